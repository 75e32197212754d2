"""Attention biases as pytrees, the one mask formula, and the normal form that everything else reads.

A mask says two things: where the keys of each sequence lie (its *storage*: padded, gappy, each also paged) and which
of them a query may see (its *window*). The ten classes are MSLK's block-diagonal biases; `varlen_attn` and plain
batches reduce to the same two things. Sequences are numbered b = 0 .. N-1, queries i and keys j of one sequence from
0. Lengths are int32 leaves: a change of lengths never retraces, and masks of equal N stack under `vmap`. Static are
only capacities: the padding, the page size and the width of the block table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from .errors import ArgumentError, ShapeError, StaticArgumentError, UnsupportedError

Lengths = Sequence[int] | np.ndarray | jax.Array
_T = TypeVar("_T")


# ---------------------------------------------------------------------------------------------- the formula


FAR = 2**30


@dataclasses.dataclass(frozen=True)
class Window:
    """How far a query sees around its own position; None is unbounded.

    The position of query i on the key axis is i + k_len - q_len (bottom-right, the default) or i (`top_left`).
    Causal is right = 0; MSLK's causal-local class of width W is (W - 1, 0); torch's window_size (L, R) is (L, R) with
    -1 as None.
    """

    left: int | None = None
    right: int | None = None
    top_left: bool = False

    def __post_init__(self) -> None:
        # No sequence is so long, and positions are int32: beyond this a bound would wrap.
        for name in ("left", "right"):
            bound = getattr(self, name)
            if bound is not None:
                object.__setattr__(self, name, None if bound >= FAR else max(int(bound), -FAR))


def visible(i: Any, j: Any, q_len: Any, k_len: Any, window: Window) -> Any:
    """Whether query i sees key j of its sequence; elementwise on ints, numpy, jax or torch arrays.

    Every mask of this library is this formula. A row for which it holds for no j is *empty*: output 0, LSE -inf.
    """
    seen = (j >= 0) & (j < k_len)
    here = i if window.top_left else i + (k_len - q_len)
    if window.left is not None:
        seen = seen & (j >= here - window.left)
    if window.right is not None:
        seen = seen & (j <= here + window.right)
    return seen


def visible_range(i: Any, rows: Any, q_len: Any, k_len: Any, window: Window) -> tuple[Any, Any]:
    """The keys [low, high) outside which none of the queries i .. i + rows - 1 sees anything; empty where high <= low.

    Elementwise on ints, numpy (the result is numpy) or jax arrays.
    """
    xp = _numpy(i, rows, q_len, k_len)
    shift = 0 if window.top_left else k_len - q_len
    low, high = xp.zeros_like(k_len), k_len
    if window.left is not None:
        low = xp.clip(i + shift - window.left, 0, k_len)
    if window.right is not None:
        high = xp.clip(i + rows + shift + window.right, 0, k_len)
    some = (rows > 0) & (window.left is None or window.right is None or window.left + window.right >= 0)
    return low, xp.where(some, high, low)


class NormalForm(NamedTuple):
    """Where queries and keys lie: all that kernels, the reference and `materialize` read of a mask.

    Query i of sequence b is row q_start[b] + i of the packed queries. Key j of sequence b (j < k_len[b]) is row
    k_start[b] + j of the key axis or, with a block table, row x % page_size of page block_table[b, x // page_size]
    where x = k_start[b] + j.

    q_start: int32 [N + 1]; k_start, k_len: int32 [N]; block_table: int32 [N, pages_per_row] or None.
    """

    q_start: Any
    k_start: Any
    k_len: Any
    block_table: Any = None

    @property
    def batch(self) -> int:
        return self.k_len.shape[-1]


def key_row(nf: NormalForm, b: Any, j: Any, page_size: int | None, key_rows: int) -> Any:
    """The physical row of key j of sequence b, clamped into [0, key_rows): what lies there must still be masked."""
    x = jnp.asarray(nf.k_start)[b] + j
    if nf.block_table is not None:
        assert page_size is not None
        table = jnp.asarray(nf.block_table)
        page = table[b, jnp.clip(x // page_size, 0, table.shape[-1] - 1)]
        x = jnp.clip(page, 0, max(key_rows // page_size - 1, 0)) * page_size + x % page_size
    return jnp.clip(x, 0, max(key_rows - 1, 0))


def query_sequence(nf: NormalForm, tokens: Any) -> tuple[Any, Any]:
    """(b, i): each packed query row's sequence and its index there; rows past the last get b = N - 1, i >= q_len."""
    q_start = jnp.asarray(nf.q_start)
    b = jnp.clip(jnp.searchsorted(q_start, tokens, side="right").astype(jnp.int32) - 1, 0, nf.batch - 1)
    return b, tokens - q_start[b]


def dense_form(batch: int, queries: int, keys: int, kv_lengths: Any = None) -> NormalForm:
    """The normal form of a plain batch: `queries` queries and `keys` key rows a sequence."""
    steps = np.arange(batch + 1, dtype=np.int32)
    k_len = np.full(batch, keys, np.int32) if kv_lengths is None else kv_lengths
    return NormalForm(steps * np.int32(queries), steps[:-1] * np.int32(keys), k_len)


# ------------------------------------------------------------------------------------- sequence lengths


def is_host(x: Any) -> bool:
    """Host-known: Python numbers and numpy arrays. Device arrays are never read back to be checked."""
    return isinstance(x, (int, np.integer, list, tuple, np.ndarray))


def _lengths(x: Lengths, name: str, dims: int = 1) -> Any:
    """int32 array of the given rank: numpy when host-known (checked to be non-negative), else a jax array."""
    if is_host(x):
        host = np.asarray(x)
        if host.size == 0:
            host = host.astype(np.int32)
        if not np.issubdtype(host.dtype, np.integer):
            raise ArgumentError(f"{name}: expected integers, got dtype {host.dtype}")
        if host.size and (host.max() > np.iinfo(np.int32).max or host.min() < np.iinfo(np.int32).min):
            raise ArgumentError(f"{name}: values must fit int32, got up to {host.max()}")
        x = host.astype(np.int32)
    elif not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.integer)):
        raise ArgumentError(f"{name}: expected a list, numpy array or jax array of integers, got {type(x).__name__}")
    else:
        x = jnp.asarray(x).astype(jnp.int32)
    if x.ndim != dims:
        raise ShapeError(f"{name}: expected {dims} axis(es), got shape {tuple(x.shape)}")
    return x


def _non_negative(x: Any, name: str) -> None:
    if is_host(x) and x.size and x.min() < 0:
        raise ArgumentError(f"{name}: lengths and starts must be >= 0, got {int(x.min())}")


def _numpy(*arrays: Any) -> Any:
    """numpy while everything is host-known, so that checks stay possible; jax.numpy otherwise."""
    return np if all(is_host(a) for a in arrays) else jnp


@dataclass_transform(frozen_default=True, eq_default=False)
def _pytree(*meta: str) -> Callable[[type[_T]], type[_T]]:
    def register(cls: type[_T]) -> type[_T]:
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        data = [f.name for f in dataclasses.fields(cls) if f.name not in meta]  # type: ignore[arg-type]
        return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(meta))

    return register


def _capacity(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, (jax.Array, jax.core.Tracer)) or not isinstance(value, (int, np.integer)):
        raise StaticArgumentError(f"{name}: expected a Python int (a static capacity), got {type(value).__name__}")
    if value < least:
        raise ArgumentError(f"{name}: expected at least {least}, got {value}")
    return int(value)


@_pytree()
class SeqLenInfo:
    """Packed sequences: `seqstart` int32 [N + 1], cumulative from 0."""

    seqstart: Any

    @classmethod
    def from_seqlens(cls, seqlens: Lengths) -> Self:
        """seqlens: int [N] (a list, numpy or traced); those that the host knows are checked."""
        lens = _lengths(seqlens, "seqlens")
        _non_negative(lens, "seqlens")
        xp = _numpy(lens)
        return cls(xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lens, dtype=np.int32)]))


@_pytree("padding")
class PaddedSeqLenInfo:
    """Equal slots of `padding` rows, the first `seqlen[b]` of each in use: `seqlen` int32 [N]."""

    seqlen: Any
    padding: int

    @property
    def seqstart(self) -> Any:
        """int32 [N + 1]: padding * arange(N + 1)."""
        return np.arange(self.seqlen.shape[-1] + 1, dtype=np.int32) * np.int32(self.padding)

    @classmethod
    def from_seqlens_padded(cls, seqlens: Lengths, padding: int) -> Self:
        """seqlens: int [N], at most `padding`, the rows of each sequence's slot (static)."""
        lens = _lengths(seqlens, "seqlens")
        _non_negative(lens, "seqlens")
        padding = _capacity(padding, "padding")
        if lens.shape[0] == 0:
            raise ArgumentError("seqlens: at least one sequence is needed")
        if is_host(lens) and lens.max() > padding:
            raise ArgumentError(f"seqlens: length {int(lens.max())} is beyond the padding {padding}")
        return cls(lens, padding)


@_pytree("paged")
class GappySeqInfo:
    """Sequences anywhere on the key axis: `seqstart` int32 [N + 1], `seqlen` int32 [N].

    Unpaged: seqstart[b] is an offset on the whole key axis, seqstart[N] the axis' length, seqlen counts keys.
    Paged: seqstart[b] is an offset in row b's own pages, seqstart[N] means nothing, and seqlen[b] is the *end*
    (start + count), as in MSLK. Starts need not be sorted, sequences may overlap.
    """

    seqstart: Any
    seqlen: Any
    paged: bool

    @classmethod
    def from_seqlens_gappy(cls, seqstarts: Lengths, seqlens: Lengths, paged: bool = False) -> Self:
        """seqstarts: int [N + 1]; seqlens: int [N]; both as `GappySeqInfo` has them."""
        starts, lens = _lengths(seqstarts, "seqstarts"), _lengths(seqlens, "seqlens")
        if lens.shape[0] == 0:
            raise ArgumentError("seqlens: at least one sequence is needed")
        if starts.shape[0] != lens.shape[0] + 1:
            raise ArgumentError(
                f"seqstarts: expected one entry more than seqlens ({lens.shape[0] + 1}), got {starts.shape[0]}"
            )
        _non_negative(starts[:-1], "seqstarts")
        _non_negative(lens, "seqlens")
        return cls(starts, lens, paged)


# ------------------------------------------------------------------------------------------- the ten classes


def _same_batch(q: Any, n: int, name: str) -> None:
    if q.seqstart.shape[-1] - 1 != n:
        raise ShapeError(f"{name}: {n} sequences, but q_seqlen has {q.seqstart.shape[-1] - 1}")


def _block_tables(block_tables: Any, page_size: Any, n: int) -> tuple[Any, int]:
    tables = _lengths(block_tables, "block_tables", dims=2)
    if tables.shape[0] != n:
        raise ShapeError(f"block_tables: expected one row for each of {n} sequences, got shape {tuple(tables.shape)}")
    return tables, _capacity(page_size, "page_size", least=1)


class AttentionMask:
    """Base of the ten classes: a storage with a window."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: Any

    @property
    def paging(self) -> int | None:
        """The page size; None where keys are not paged."""
        return getattr(self, "page_size", None)

    @property
    def window(self) -> Window:
        return Window()

    @property
    def slotted(self) -> bool:
        """Whether sequences start at the beginning of equal slots, or of their row of pages (padded storage)."""
        return isinstance(self.k_seqinfo, PaddedSeqLenInfo)

    @property
    def batch(self) -> int:
        """N, the number of sequences."""
        return self.q_seqinfo.seqstart.shape[-1] - 1

    def normal_form(self, key_rows: int) -> NormalForm:
        """Where the keys lie on a key axis of `key_rows` rows (all pages together for paged masks)."""
        raise TypeError(f"{type(self).__name__} is not an attention mask")

    def check(self, key_rows: int, queries: int | None = None) -> None:
        """Raise where host-known lengths, starts, ends or page ids do not fit `key_rows` keys and `queries` queries."""
        q_start = self.q_seqinfo.seqstart
        if queries is not None and is_host(q_start) and int(q_start[-1]) != queries:
            raise ShapeError(f"query: {queries} rows, but the mask's q_seqlen add up to {int(q_start[-1])}")
        if self.paging is not None and key_rows % self.paging:
            raise ShapeError(f"key: {key_rows} rows are not a multiple of page_size {self.paging}")
        self._check_keys(key_rows)

    def _check_keys(self, key_rows: int) -> None:
        raise TypeError(type(self).__name__)

    def materialize(self, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
        """The additive mask (0 or -inf) broadcast to `shape` = [..., total queries, keys].

        keys: the length of the key axis (padding * N, or seqstart[N] of gappy keys); for paged masks the logical
        length N * pages_per_row * page_size, and the result's last axis is the *physical* one,
        (max(block_tables) + 1) * page_size. For checking and teaching: attention never builds it.
        Raises ShapeError when `shape` does not fit, and StaticArgumentError for a traced block table.
        """
        queries, keys = int(shape[-2]), int(shape[-1])
        self._check_materialize(queries, keys)
        nf = self.normal_form(keys)
        if nf.block_table is not None and not is_host(nf.block_table):
            if isinstance(nf.block_table, jax.core.Tracer):
                raise StaticArgumentError("block_tables: materialize needs host-known page ids, got a traced array")
            nf = nf._replace(block_table=np.asarray(nf.block_table))
        row_length = keys // nf.batch
        b, i = query_sequence(nf, jnp.arange(queries, dtype=jnp.int32))
        q_len = jnp.diff(jnp.asarray(nf.q_start))[b]
        base = jnp.asarray(nf.k_start)[b]
        if nf.block_table is not None:  # logical positions first, one row of pages after another
            base = base + b * row_length
        j = jnp.arange(keys, dtype=jnp.int32)[None, :] - base[:, None]
        seen = visible(i[:, None], j, q_len[:, None], jnp.asarray(nf.k_len)[b][:, None], self.window)
        if nf.block_table is not None:
            seen = _to_physical(np.asarray(seen), nf.block_table, self.paging or 1)
        table = jnp.where(seen, 0.0, -jnp.inf).astype(dtype)
        return jnp.broadcast_to(table, (*shape[:-2], *table.shape))

    def _check_materialize(self, queries: int, keys: int) -> None:
        q_start = self.q_seqinfo.seqstart
        if is_host(q_start) and int(q_start[-1]) != queries:
            raise ShapeError(f"shape: q shapes wrong, the mask has {int(q_start[-1])} queries, got {queries}")
        expected = self._logical_keys()
        if expected is not None and expected != keys:
            raise ShapeError(f"shape: k shapes wrong, the mask has {expected} keys, got {keys}")

    def _logical_keys(self) -> int | None:
        raise TypeError(type(self).__name__)


def _to_physical(seen: np.ndarray, block_table: np.ndarray, page_size: int) -> np.ndarray:
    """Logical key columns -> physical ones; where a row lists a page twice the later logical page wins."""
    pages = int(block_table.max()) + 1
    out = np.zeros((seen.shape[0], pages, page_size), bool)
    logical = seen.reshape(seen.shape[0], *block_table.shape, page_size)
    for b, row in enumerate(block_table):
        mine = logical[:, b].any(axis=(1, 2))
        for p, page in enumerate(row):
            if 0 <= page < pages:
                out[mine, page] = logical[mine, b, p]
    return out.reshape(seen.shape[0], -1)


class _CausalMask(AttentionMask):
    """Bottom-right causal: key j is seen iff j <= i + k_len - q_len."""

    @property
    def window(self) -> Window:
        return Window(None, 0)


@_pytree()
class BlockDiagonalPaddedKeysMask(AttentionMask):
    """Class 1: N equal key slots, the first k_seqinfo.seqlen[b] rows of each in use; every query sees them all.

    The slots' pitch is key rows / N, whatever `padding` says.
    """

    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo

    @classmethod
    def from_seqlens(cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths) -> Self:
        """q_seqlen, kv_seqlen: lengths int [N] (lists, numpy or traced); kv_padding: rows of a slot (static)."""
        q, k = SeqLenInfo.from_seqlens(q_seqlen), PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding)
        _same_batch(q, k.seqlen.shape[-1], "kv_seqlen")
        return cls(q, k)

    def normal_form(self, key_rows: int) -> NormalForm:
        if key_rows % self.batch:
            raise ShapeError(f"key: {key_rows} rows are not a multiple of the mask's {self.batch} sequences")
        starts = np.arange(self.batch, dtype=np.int32) * np.int32(key_rows // self.batch)
        return NormalForm(self.q_seqinfo.seqstart, starts, self.k_seqinfo.seqlen)

    def _check_keys(self, key_rows: int) -> None:
        self.normal_form(key_rows)
        longest = _host_max(self.k_seqinfo.seqlen)
        if longest > key_rows // self.batch:
            raise ShapeError(
                f"kv_seqlen: length {longest} is beyond the {key_rows // self.batch} rows that each of "
                f"{self.batch} sequences has in {key_rows} key rows"
            )

    def _logical_keys(self) -> int:
        return self.k_seqinfo.padding * self.batch

    def make_paged(self, block_tables: Any, page_size: int, paged_type: type[_PagedPadded]) -> _PagedPadded:
        """The same lengths over pages, block_tables int32 [N, pages_per_row], with the window of `paged_type`."""
        check_storage(paged_type, PagedBlockDiagonalPaddedKeysMask)
        tables, page_size = _block_tables(block_tables, page_size, self.batch)
        k = PaddedSeqLenInfo.from_seqlens_padded(self.k_seqinfo.seqlen, tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, k, tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """The same lengths with a window (class 3)."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


def check_storage(paged_type: Any, storage: type) -> None:
    if not (isinstance(paged_type, type) and issubclass(paged_type, storage)):
        raise ArgumentError(f"paged_type: expected {storage.__name__} or its causal form, got {paged_type!r}")


def _host_max(x: Any) -> int:
    return int(x.max()) if is_host(x) and x.size else 0


@_pytree()
class BlockDiagonalCausalWithOffsetPaddedKeysMask(_CausalMask, BlockDiagonalPaddedKeysMask):
    """Class 2: class 1, bottom-right causal."""


class _LocalMask(BlockDiagonalPaddedKeysMask):
    def make_paged(self, block_tables: Any, page_size: int, paged_type: type[_PagedPadded]) -> _PagedPadded:
        raise UnsupportedError(f"paged_type: no paged class has the window of {type(self).__name__}")


@_pytree("window_left", "window_right")
class BlockDiagonalLocalAttentionPaddedKeysMask(_LocalMask):
    """Class 3: class 1 with the window i + s - window_left <= j <= i + s + window_right, s = k_len - q_len."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths, window_left: int, window_right: int
    ) -> Self:
        """As `from_seqlens`; window_left, window_right: keys that a query sees before and behind its own position."""
        base = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen)
        left, right = (
            _capacity(w, name, least=-(2**31))
            for w, name in ((window_left, "window_left"), (window_right, "window_right"))
        )
        return cls(base.q_seqinfo, base.k_seqinfo, left, right)

    @property
    def window(self) -> Window:
        if self.window_left < 0 or self.window_right < 0:
            raise ArgumentError(
                f"window_left, window_right: expected values >= 0, got ({self.window_left}, {self.window_right})"
            )
        return Window(self.window_left, self.window_right)


@_pytree("window_size")
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(_LocalMask):
    """Class 4: class 1 with i + s - window_size < j <= i + s: at most window_size keys (none if it is <= 0)."""

    window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Lengths, kv_padding: int, kv_seqlen: Lengths, window_size: int
    ) -> Self:
        """As `from_seqlens`; window_size: keys that a query sees at most, the one at its own position included."""
        base = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen)
        return cls(base.q_seqinfo, base.k_seqinfo, _capacity(window_size, "window_size", least=-(2**31)))

    @property
    def window(self) -> Window:
        return Window(self.window_size - 1, 0)


@_pytree()
class BlockDiagonalGappyKeysMask(AttentionMask):
    """Class 5: sequence b's keys are rows seqstart[b] .. seqstart[b] + seqlen[b] - 1; every query sees them all."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: GappySeqInfo

    @classmethod
    def from_seqlens(cls, q_seqlen: Lengths, kv_seqstarts: Lengths, kv_seqlen: Lengths) -> Self:
        """q_seqlen, kv_seqlen: int [N]; kv_seqstarts: int [N + 1], the last entry being the key axis' length."""
        q, k = SeqLenInfo.from_seqlens(q_seqlen), GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen)
        _same_batch(q, k.seqlen.shape[-1], "kv_seqlen")
        return cls(q, k)

    def normal_form(self, key_rows: int) -> NormalForm:
        return NormalForm(self.q_seqinfo.seqstart, self.k_seqinfo.seqstart[:-1], self.k_seqinfo.seqlen)

    def _check_keys(self, key_rows: int) -> None:
        starts, lens = self.k_seqinfo.seqstart[:-1], self.k_seqinfo.seqlen
        if is_host(starts) and is_host(lens):
            end = _host_max(np.where(lens > 0, starts + lens, 0))
            if end > key_rows:
                raise ShapeError(f"kv_seqstarts + kv_seqlen: keys up to row {end}, but key has {key_rows} rows")

    def _logical_keys(self) -> int | None:
        total = self.k_seqinfo.seqstart[-1]
        return int(total) if is_host(total) else None

    def make_paged(
        self, block_tables: Any, page_size: int, notional_padding: int, paged_type: type[_PagedGappy]
    ) -> _PagedGappy:
        """The same keys over pages, with the window of `paged_type`; sequence b's notional slot began at
        b * notional_padding."""
        check_storage(paged_type, PagedBlockDiagonalGappyKeysMask)
        tables, page_size = _block_tables(block_tables, page_size, self.batch)
        notional_padding = _capacity(notional_padding, "notional_padding", least=1)
        if notional_padding % page_size:
            raise ArgumentError(
                f"notional_padding: Notional padding should be divisible by the page size, got {notional_padding} "
                f"and page_size {page_size}"
            )
        lens = self.k_seqinfo.seqlen
        starts = self.k_seqinfo.seqstart[:-1] - np.arange(self.batch, dtype=np.int32) * np.int32(notional_padding)
        row = tables.shape[1] * page_size
        if is_host(starts) and (starts.min() < 0 or starts.max() >= row):
            raise ArgumentError(
                f"kv_seqstarts: starts relative to the notional slots must lie in [0, {row}), got {starts.tolist()}"
            )
        return paged_type._from_counts(self.q_seqinfo, starts, lens, tables, page_size)


@_pytree()
class BlockDiagonalCausalWithOffsetGappyKeysMask(_CausalMask, BlockDiagonalGappyKeysMask):
    """Class 6: class 5, bottom-right causal."""


class _Paged(AttentionMask):
    """What the paged classes share: key rows come in pages, found through block_tables int32 [N, pages_per_row]."""

    block_tables: Any
    page_size: int

    def _logical_keys(self) -> int:
        return self.batch * self.block_tables.shape[-1] * self.page_size

    def _check_keys(self, key_rows: int) -> None:
        """Ends against the row, and page ids that some key needs against the pages that exist."""
        nf = self.normal_form(key_rows)
        page, table = self.page_size, nf.block_table
        if not (is_host(nf.k_start) and is_host(nf.k_len)):
            return
        ends = np.where(nf.k_len > 0, nf.k_start + nf.k_len, 0)
        row = table.shape[-1] * page
        if _host_max(ends) > row:
            raise ShapeError(f"kv_seqlen: keys up to {_host_max(ends)}, but a row of block_tables holds {row}")
        if not is_host(table) or not is_host(self.q_seqinfo.seqstart):
            return
        q_len = np.diff(nf.q_start)
        low, high = visible_range(0, q_len, q_len, nf.k_len, self.window)
        for b, (start, first, end) in enumerate(zip(nf.k_start, low, high)):
            needed = table[b, (start + first) // page : -(-(start + end) // page)] if end > first else table[b, :0]
            if needed.size and (needed.min() < 0 or needed.max() >= key_rows // page):
                raise ArgumentError(
                    f"block_tables: row {b} needs pages {needed.tolist()}, "
                    f"but key holds pages 0 .. {key_rows // page - 1}"
                )


@_pytree("page_size")
class PagedBlockDiagonalPaddedKeysMask(_Paged):
    """Class 7: class 1 over pages."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo
    block_tables: Any
    page_size: int

    @classmethod
    def from_seqlens(cls, q_seqlen: Lengths, kv_seqlen: Lengths, block_tables: Any, page_size: int) -> Self:
        """q_seqlen, kv_seqlen: int [N]; block_tables: int [N, pages_per_row]; page_size: rows of a page (static)."""
        q = SeqLenInfo.from_seqlens(q_seqlen)
        tables, page_size = _block_tables(block_tables, page_size, q.seqstart.shape[-1] - 1)
        k = PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, tables.shape[1] * page_size)
        _same_batch(q, k.seqlen.shape[-1], "kv_seqlen")
        return cls(q, k, tables, page_size)

    def normal_form(self, key_rows: int) -> NormalForm:
        zeros = np.zeros(self.batch, np.int32)
        return NormalForm(self.q_seqinfo.seqstart, zeros, self.k_seqinfo.seqlen, self.block_tables)


@_pytree("page_size")
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(_CausalMask, PagedBlockDiagonalPaddedKeysMask):
    """Class 8: class 7, bottom-right causal."""


@_pytree("page_size")
class PagedBlockDiagonalGappyKeysMask(_Paged):
    """Class 9: keys start anywhere in each row's pages; k_seqinfo.seqlen holds ends (start + count)."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: GappySeqInfo
    block_tables: Any
    page_size: int

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Lengths, kv_seqstarts: Lengths, kv_seqlen: Lengths, block_tables: Any, page_size: int
    ) -> Self:
        """kv_seqstarts: int [N], each relative to its own row of pages; kv_seqlen: int [N] counts of keys."""
        q = SeqLenInfo.from_seqlens(q_seqlen)
        starts, lens = _lengths(kv_seqstarts, "kv_seqstarts"), _lengths(kv_seqlen, "kv_seqlen")
        _same_batch(q, lens.shape[0], "kv_seqlen")
        _same_batch(q, starts.shape[0], "kv_seqstarts")
        tables, page_size = _block_tables(block_tables, page_size, lens.shape[0])
        _non_negative(starts, "kv_seqstarts")
        return cls._from_counts(q, starts, lens, tables, page_size)

    @classmethod
    def _from_counts(cls, q: SeqLenInfo, starts: Any, counts: Any, tables: Any, page_size: int) -> Self:
        ends, row = starts + counts, tables.shape[1] * page_size
        if _host_max(ends) > row:
            raise ArgumentError(f"kv_seqlen: keys up to {_host_max(ends)}, but a row of block_tables holds {row}")
        xp = _numpy(starts)
        seqstart = xp.concatenate([starts, xp.full(1, -1, np.int32)])
        return cls(q, GappySeqInfo.from_seqlens_gappy(seqstart, ends, paged=True), tables, page_size)

    def normal_form(self, key_rows: int) -> NormalForm:
        starts = self.k_seqinfo.seqstart[:-1]
        return NormalForm(self.q_seqinfo.seqstart, starts, self.k_seqinfo.seqlen - starts, self.block_tables)


@_pytree("page_size")
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(_CausalMask, PagedBlockDiagonalGappyKeysMask):
    """Class 10: class 9, bottom-right causal."""


_PagedPadded = TypeVar("_PagedPadded", bound=PagedBlockDiagonalPaddedKeysMask)
_PagedGappy = TypeVar("_PagedGappy", bound=PagedBlockDiagonalGappyKeysMask)

__all__ = [
    "AttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalPaddedKeysMask",
    "GappySeqInfo",
    "NormalForm",
    "PaddedSeqLenInfo",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "SeqLenInfo",
    "Window",
    "visible",
]
