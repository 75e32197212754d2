"""What all torch biases share: their normal form, their checks, and `materialize` by the library's one mask formula.

A bias is a storage (where the keys of each sequence lie) with a window (which of them a query may see), exactly as
in `pallas_kernels.masks`; the classes of this package only say which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Self

import torch

from pallas_kernels.errors import ArgumentError, DTypeError, ShapeError
from pallas_kernels.masks import Window, visible, visible_range

from .seqlen import Device, _SeqLenInfo, default_device, moved

CAUSAL = Window(None, 0)
CAUSAL_TOP_LEFT = Window(None, 0, top_left=True)


class Lowered(NamedTuple):
    """The normal form of a torch bias; `pallas_kernels.masks.NormalForm` says how its arrays are read.

    q_start: int32 [N + 1]; k_start, k_len: int32 [N]; block_table: int32 [N, pages_per_row] or None; all on the
    bias' device. window, page_size: static. tensor_bias: added to the scaled scores, as the caller gave it, or None.
    packed: whether the N sequences share one batch entry (the block-diagonal classes) or are the batch (the rest).
    """

    q_start: torch.Tensor
    k_start: torch.Tensor
    k_len: torch.Tensor
    block_table: torch.Tensor | None
    window: Window
    page_size: int | None
    tensor_bias: torch.Tensor | None
    packed: bool


class AttentionBias:
    """Base of the biases that `attn_bias` takes beside None and plain tensors."""

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> torch.Tensor:
        """The additive mask (0 or -inf) of `shape` = [..., queries, keys]. For checking: attention never builds it."""
        raise NotImplementedError(f"{type(self).__name__}.materialize")

    def _window(self) -> Window:
        raise NotImplementedError(f"{type(self).__name__} has no window")

    def _lower(self, batch: int, queries: int, key_rows: int, device: Device | None) -> Lowered:
        raise NotImplementedError(f"{type(self).__name__} has no normal form")

    def _check(self, queries: int, key_rows: int) -> None:
        """`host_check` of this bias."""


def normal_form(
    bias: AttentionBias | torch.Tensor | None,
    batch: int,
    queries: int,
    key_rows: int,
    *,
    device: Device | None = None,
) -> Lowered:
    """Where queries and keys lie, and which keys a query sees; from device tensors alone, nothing is read back.

    batch, queries: axes 0 and 1 of query. key_rows: rows of the whole key, all batch entries or pages together.
    device: where to build the form of biases that hold no tensor (None: CUDA if there is one); others ignore it.
    Raises ShapeError for a batch other than 1 with a block-diagonal bias, or key rows that the batch or the N padded
    sequences do not divide; ArgumentError for windows that no mask has.
    """
    if isinstance(bias, AttentionBias):
        return bias._lower(batch, queries, key_rows, device)
    if bias is not None and not isinstance(bias, torch.Tensor):
        raise ArgumentError(f"attn_bias: expected None, a tensor or an AttentionBias, got {type(bias).__name__}")
    return dense_form(batch, queries, key_rows, Window(), bias, device)


def host_check(bias: AttentionBias | torch.Tensor | None, queries: int, key_rows: int) -> None:
    """Raise where the host lists of a bias do not fit `queries` query rows and `key_rows` key rows.

    What lies in device tensors is not looked at: it may have been updated in place. Only a block table on the CPU is
    read, for page ids that some query needs. The padding of padded keys need not be their pitch, key_rows / N.
    Raises ShapeError (total queries, N or page_size not dividing the key rows, lengths beyond them), ArgumentError
    (page ids, page_size), DTypeError (block_tables).
    """
    if isinstance(bias, AttentionBias):
        bias._check(queries, key_rows)


# --------------------------------------------------------------------------------------------- building masks


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `seen`, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def block_mask(shape: Sequence[int], window: Window, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """The additive mask [..., q_len, k_len] of one sequence."""
    q_len, k_len = shape[-2:]
    i = torch.arange(q_len, device=device)[:, None]
    j = torch.arange(k_len, device=device)[None, :]
    seen = visible(i, j, q_len, k_len, window).expand(q_len, k_len)
    return additive(seen, dtype).expand(tuple(shape)).contiguous()


def packed_seen(nf: Lowered, queries: int, columns: int) -> torch.Tensor:
    """bool [queries, columns]: which columns of the key axis each packed query row sees.

    With a block table the columns are `columns` logical rows of its own sequence, and the result's are physical
    rows up to the last page of the table; where a row lists a page twice, the later logical page wins.
    """
    q_start, n = nf.q_start.long(), nf.k_len.shape[0]
    tokens = torch.arange(queries, device=q_start.device)
    b = (torch.searchsorted(q_start, tokens, right=True) - 1).clamp_(0, max(n - 1, 0))
    i, q_len = (tokens - q_start[b])[:, None], q_start.diff()[b][:, None]
    j = torch.arange(columns, device=q_start.device)[None, :] - nf.k_start.long()[b][:, None]
    seen = visible(i, j, q_len, nf.k_len.long()[b][:, None], nf.window) & (i < q_len)
    if nf.block_table is None:
        return seen
    assert nf.page_size is not None
    table = nf.block_table.long()
    logical = seen.view(queries, table.shape[1], nf.page_size)
    pages = int(table.max()) + 1 if table.numel() else 0
    physical = torch.zeros((queries, pages, nf.page_size), dtype=torch.bool, device=seen.device)
    for p, page in enumerate(table[b].unbind(1)):
        rows = torch.nonzero(page >= 0)[:, 0]
        physical[rows, page[rows]] = logical[rows, p]
    return physical.flatten(1)


def dense_form(
    batch: int,
    queries: int,
    key_rows: int,
    window: Window,
    tensor_bias: torch.Tensor | None = None,
    device: Device | None = None,
) -> Lowered:
    """The normal form of a plain batch: each entry is a sequence of `queries` queries and key_rows / batch keys."""
    if key_rows % max(batch, 1):
        raise ShapeError(f"key: {key_rows} rows are not a multiple of the query's batch {batch}")
    keys = key_rows // max(batch, 1)
    device = default_device(device) if tensor_bias is None else tensor_bias.device
    steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
    k_len = torch.full((batch,), keys, dtype=torch.int32, device=device)
    return Lowered(steps * queries, steps[:-1] * keys, k_len, None, window, None, tensor_bias, False)


# --------------------------------------------------------------------------------- packed sequences, pages


def same_count(q_seqlen: Sequence[int], other: Sequence[int], name: str) -> None:
    if len(q_seqlen) != len(other):
        raise ArgumentError(f"{name}: {len(other)} entries, but q_seqlen has {len(q_seqlen)}")


class PackedBias(AttentionBias):
    """N sequences packed along one query axis and one key axis; attention runs at batch 1."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any
    _exact: ClassVar[type]

    def to(self, device: Device) -> Self:
        """This bias on `device`. Raises ArgumentError (an AssertionError) for a subclass without its own `to`."""
        return moved(self, device)

    def _window(self) -> Window:
        return Window()

    @property
    def _count(self) -> int:
        return len(self.q_seqinfo.seqstart_py) - 1

    def _logical_keys(self) -> int:
        """The key axis' length that `materialize` expects."""
        return self.k_seqinfo.seqstart_py[-1]

    def _keys(self, key_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_start, k_len), from device tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no key storage")

    def _check_keys(self, key_rows: int) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no key storage")

    def _lower(self, batch: int, queries: int, key_rows: int, device: Device | None) -> Lowered:
        if batch != 1:
            raise ShapeError(f"query: a {type(self).__name__} takes batch 1, all sequences in it, got batch {batch}")
        k_start, k_len = self._keys(key_rows)
        return Lowered(self.q_seqinfo.seqstart, k_start, k_len, None, self._window(), None, None, True)

    def _check(self, queries: int, key_rows: int) -> None:
        if self.q_seqinfo.seqstart_py[-1] != queries:
            raise ShapeError(
                f"query: {queries} rows, but the bias' q_seqlen add up to {self.q_seqinfo.seqstart_py[-1]}"
            )
        if len(self.k_seqinfo.seqstart_py) != self._count + 1:
            raise ShapeError(
                f"k_seqinfo: {len(self.k_seqinfo.seqstart_py) - 1} sequences, but q_seqinfo has {self._count}"
            )
        self._check_keys(key_rows)

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> torch.Tensor:
        """The additive mask (0 or -inf), expanded to `shape` = [..., total queries, keys].

        keys: the length of the key axis; with pages N * pages_per_row * page_size, and the result's last axis is the
        *physical* one, (max(block_tables) + 1) * page_size. For checking: attention never builds it.
        Raises ShapeError (a ValueError and AssertionError) for other sizes.
        """
        queries, keys = shape[-2:]
        for name, mine, given in (
            ("k", self._logical_keys(), keys),
            ("q", self.q_seqinfo.seqstart_py[-1], queries),
        ):
            if mine != given:
                raise ShapeError(f"shape: {name} shapes wrong, the bias has {mine}, got {given}")
        lowered = self._lower(1, queries, keys, None)
        lowered = Lowered._make(x.to(device) if isinstance(x, torch.Tensor) else x for x in lowered)
        columns = keys if lowered.block_table is None else keys // max(self._count, 1)
        mask = additive(packed_seen(lowered, queries, columns), dtype)
        return mask.expand(*shape[:-2], *mask.shape)


class DenseBlocks(PackedBias):
    """What the unpaged classes without gaps have besides."""

    def _create_block_mask(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> torch.Tensor:
        """The additive mask of one block, shape [q_len, k_len]."""
        return block_mask(shape, self._window(), dtype, device)


class PagedBias(PackedBias):
    """Keys come in pages of `page_size` rows: page p of sequence b is page block_tables[b, p] of the key axis."""

    block_tables: torch.Tensor
    page_size: int
    _UNPAGED_TYPE: ClassVar[type[Any]]

    def _window(self) -> Window:
        return self._UNPAGED_TYPE._window(self)

    def _row(self) -> int:
        return self.block_tables.shape[1] * self.page_size

    def _logical_keys(self) -> int:
        return self._count * self._row()

    def _spans(self) -> list[tuple[int, int]]:
        """(start, count) of each sequence's keys in its own row of pages, from the host lists."""
        raise NotImplementedError(f"{type(self).__name__} has no key storage")

    def _lower(self, batch: int, queries: int, key_rows: int, device: Device | None) -> Lowered:
        check_tables(self.block_tables, self.page_size, self._count)
        lowered = super()._lower(batch, queries, key_rows, device)
        return lowered._replace(block_table=self.block_tables.to(torch.int32), page_size=self.page_size)

    def _check_keys(self, key_rows: int) -> None:
        check_tables(self.block_tables, self.page_size, self._count)
        if key_rows % self.page_size:
            raise ShapeError(f"key: {key_rows} rows are not a multiple of page_size {self.page_size}")
        end = max((start + count for start, count in self._spans() if count > 0), default=0)
        if end > self._row():
            raise ShapeError(f"kv_seqlen: keys up to {end}, but a row of block_tables holds {self._row()}")
        if self.block_tables.device.type == "cpu" and type(self.block_tables) is torch.Tensor:
            self._check_pages(key_rows // self.page_size)

    def _check_pages(self, pages: int) -> None:
        table = self.block_tables.numpy()
        lengths = (end - start for start, end in self.q_seqinfo.intervals())
        for b, (q_len, (start, k_len)) in enumerate(zip(lengths, self._spans())):
            low, high = visible_range(0, q_len, q_len, k_len, self._window())
            if low >= high:
                continue
            needed = table[b, (start + low) // self.page_size : -(-(start + high) // self.page_size)]
            if needed.size and (needed.min() < 0 or needed.max() >= pages):
                raise ArgumentError(
                    f"block_tables: row {b} needs pages {needed.tolist()}, but key holds pages 0 .. {pages - 1}"
                )


def check_tables(block_tables: Any, page_size: Any, count: int) -> None:
    """block_tables: an integer tensor [count, pages_per_row]; page_size: a positive int."""
    if not isinstance(page_size, Integral) or page_size < 1:
        raise ArgumentError(f"page_size: expected a positive int, got {page_size!r}")
    if not isinstance(block_tables, torch.Tensor):
        raise DTypeError(f"block_tables: expected an integer tensor, got {type(block_tables).__name__}")
    if block_tables.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise DTypeError(f"block_tables: expected an integer tensor, got {block_tables.dtype}")
    if block_tables.ndim != 2 or block_tables.shape[0] != count:
        raise ShapeError(
            f"block_tables: expected one row of pages for each of {count} sequences, got shape "
            f"{tuple(block_tables.shape)}"
        )
