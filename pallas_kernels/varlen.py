"""`varlen_attn`: packed sequences of any lengths (PyTorch's `torch.nn.attention.varlen`) for JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .attention import run
from .errors import ArgumentError, DTypeError, ShapeError
from .formats import KVFormat
from .masks import NormalForm, Window, is_host
from .problem import (
    FLOATS,
    Layout,
    Operands,
    Problem,
    as_array,
    check_dtypes,
    check_int32,
    check_sinks,
    check_softcap,
    check_splits,
    default_scale,
    format_name,
    static_int,
    store,
)
from .sizes import power_of_two


class AuxRequest(NamedTuple):
    """Which results `varlen_attn` returns beside the output."""

    lse: bool = False


def varlen_attn(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    backend: str = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over packed sequences: tokens of all sequences on one axis, told apart by cumulative lengths.

    Query i of a sequence sees key j iff 0 <= j < k_len, j >= i + s - left and j <= i + s + right, where
    s = k_len - q_len: bottom-right aligned.

    Args:
        query: [Tq, Hq, D]; float16, bfloat16, float32 or float64.
        key, value: [Tk, Hkv, D] and [Tk, Hkv, Dv]; with `block_table` pages [pages, page_size, Hkv, D]; or one of
            `formats` ([1, Tk, Hkv, D], pages as above).
        cu_seq_q, cu_seq_k: int32 [N + 1], cumulative lengths from 0, ending at Tq and Tk at most: checked where
            host-known (numpy), else promised. cu_seq_k may be None with a block table.
        max_q, max_k: capacities, at least the true maxima (static ints; checked likewise).
        return_aux: `AuxRequest(lse=True)` also returns the LSE.
        scale: positive Python number, default D ** -0.5.
        window_size: (left, right) in keys, negative: unbounded: (-1, 0) is causal, (W, 0) shows W + 1 keys.
        enable_gqa: required where Hq != Hkv; Hkv must divide Hq.
        seqused_k: int32 [N], keys in use of each sequence's slot. No gradient is defined with it.
        block_table: int32 [N, pages_per_row]; key j lies in row j % page_size of page block_table[b, j // page_size].
            Needs seqused_k. Entries that no key needs may hold anything. No gradient is defined with it.
        num_splits, split_size, softcap, sinks [Hq], backend: as in `memory_efficient_attention`.

    Returns:
        out [Tq, Hq, Dv] in the query's dtype, or (out, lse [Hq, Tq]): natural logarithm, float32 (float64 for
        float64 queries). A row that sees no key is 0, its LSE -inf. Rows beyond cu_seq_q[N] see no key.

    Raises:
        ShapeError, DTypeError, ArgumentError, StaticArgumentError, UnsupportedError; GradientError on
        differentiation with seqused_k, block_table or low-bit keys and values.
    """
    check_aux(return_aux)
    problem, operands, layout = build(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        window_size=window_size,
        enable_gqa=enable_gqa,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
        split_size=split_size,
        softcap=softcap,
        sinks=sinks,
    )
    out, lse = run(problem, operands, layout, backend)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def build(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> tuple[Problem, Operands, Layout]:
    """Normalise one call; all validation. Arguments as `varlen_attn`."""
    query = as_array(query, "query")
    key, value = store(key, "key"), store(value, "value")
    check_dtypes(query, key, value)
    if str(query.dtype) not in FLOATS:
        raise DTypeError(f"query: expected one of {', '.join(FLOATS)}, got {query.dtype}")
    kv_heads, key_rows, page_size = _key_layout(query, key, value, block_table)
    heads = query.shape[1]
    if not enable_gqa and heads != kv_heads:
        raise ShapeError(
            f"key: expected query's number of heads, got Hq = {heads} and Hkv = {kv_heads}; "
            "set enable_gqa=True to share them"
        )
    if enable_gqa and (kv_heads == 0 or heads % kv_heads):
        raise ShapeError(f"query: heads must be a multiple of kv heads, got Hq = {heads} and Hkv = {kv_heads}")
    head_scale = default_scale(scale, query.shape[-1])
    if scale is not None and not head_scale > 0:
        raise ArgumentError(f"scale: expected a number greater than 0, got {scale}")
    max_q, max_k = static_int(max_q, "max_q", least=0), static_int(max_k, "max_k", least=0)
    nf = _normal_form(query, cu_seq_q, cu_seq_k, seqused_k, block_table, key_rows, page_size)
    _check_lengths(nf, seqused_k, cu_seq_k, max_q, max_k, query.shape[0], key_rows, page_size)
    splits = check_splits(num_splits, split_size)
    row_capacity = key_rows if block_table is None else nf.block_table.shape[1] * (page_size or 1)
    max_keys = power_of_two(max_k)  # callers pass the maximum: few values compile
    whole_pages = -(-max_keys // (page_size or 1)) * (page_size or 1)
    group = heads // kv_heads if kv_heads else 1
    problem = Problem(
        batch=nf.batch,
        queries=query.shape[0],
        key_rows=key_rows,
        max_keys=min(whole_pages, row_capacity),
        kv_heads=kv_heads,
        group=group,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        q_dtype=str(query.dtype),
        key_format=format_name(key),
        value_format=format_name(value),
        out_dtype=str(query.dtype),
        lse_dtype="float64" if query.dtype == jnp.float64 else "float32",
        window=window(window_size),
        page_size=page_size,
        scale=head_scale,
        softcap=check_softcap(softcap),
        bias=None,
        sinks=None if sinks is None else str(as_array(sinks, "sinks").dtype),
        num_splits=splits[0],
        split_size=splits[1],
        slot=None,
        lse_rows=1,
        inference_only=_inference_only(key, seqused_k, block_table),
    )
    operands = Operands(
        query.reshape(query.shape[0], kv_heads, group, query.shape[-1]),
        key,
        value,
        NormalForm(*(None if x is None else jnp.asarray(x, jnp.int32) for x in nf)),
        sinks=check_sinks(sinks, (heads,), kv_heads, group),
    )
    return problem, operands, Layout((query.shape[0], heads, value.shape[-1]), (heads, query.shape[0]))


def check_aux(return_aux: Any) -> None:
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise ArgumentError(f"return_aux: expected AuxRequest(lse=...) or None, got {return_aux!r}")


def window(window_size: Sequence[int]) -> Window:
    """torch's (left, right) with -1 as unbounded."""
    try:
        sizes = list(window_size)
    except TypeError:
        raise ArgumentError(f"window_size: expected (left, right), got {window_size!r}") from None
    if len(sizes) != 2:
        raise ArgumentError(f"window_size: expected length 2, got {len(sizes)}")
    left, right = (static_int(w, "window_size") for w in sizes)
    return Window(left if left >= 0 else None, right if right >= 0 else None)


def _key_layout(query: Any, key: Any, value: Any, block_table: Any) -> tuple[int, int, int | None]:
    """(kv heads, key rows, page size)."""
    if query.ndim != 3:
        raise ShapeError(f"query: expected [tokens, heads, head_dim], got shape {query.shape}")
    paged = block_table is not None
    rank = 4 if paged or isinstance(key, KVFormat) else 3
    for x, name in ((key, "key"), (value, "value")):
        if x.ndim != rank or (rank == 4 and not paged and x.shape[0] != 1):
            expected = "[pages, page_size, heads, head_dim]" if paged else "[tokens, heads, head_dim]"
            raise ShapeError(f"{name}: expected {expected} (a format without pages: [1, tokens, ...]), got {x.shape}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(f"value: expected key's shape but for the last axis, {key.shape}, got {value.shape}")
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(f"key: head_dim {key.shape[-1]} differs from query's {query.shape[-1]}")
    rows = math.prod(key.shape[:-2])
    return key.shape[-2], rows, key.shape[1] if paged else None


def _normal_form(
    query: Any, cu_q: Any, cu_k: Any, seqused: Any, table: Any, key_rows: int, page_size: int | None
) -> NormalForm:
    if not hasattr(cu_q, "shape") or len(cu_q.shape) != 1 or cu_q.shape[0] < 1:
        raise ShapeError(f"cu_seq_q: expected int32 [N + 1], got {getattr(cu_q, 'shape', type(cu_q).__name__)}")
    batch = cu_q.shape[0] - 1
    cu_q = check_int32(cu_q, "cu_seq_q", (batch + 1,))
    if cu_k is not None:
        cu_k = check_int32(cu_k, "cu_seq_k", (batch + 1,))
    if seqused is not None:
        seqused = check_int32(seqused, "seqused_k", (batch,))
    if table is None:
        if cu_k is None:
            raise ArgumentError("cu_seq_k: required without a block_table, got None")
        lengths = (np if is_host(cu_k) else jnp).diff(cu_k) if seqused is None else seqused
        return NormalForm(cu_q, cu_k[:-1], lengths)
    if seqused is None:
        raise ArgumentError("block_table: needs seqused_k, got None")
    if getattr(table, "ndim", 0) != 2:
        raise ShapeError(f"block_table: expected int32 [{batch}, pages_per_row], got {getattr(table, 'shape', table)}")
    table = check_int32(table, "block_table", (batch, table.shape[1]))
    return NormalForm(cu_q, np.zeros(batch, np.int32), seqused, table)


def _check_lengths(
    nf: NormalForm, seqused: Any, cu_k: Any, max_q: int, max_k: int, queries: int, key_rows: int, page_size: int | None
) -> None:
    """What host-known lengths tell."""
    for cu, name, most, rows in (
        (nf.q_start, "cu_seq_q", max_q, queries),
        (None if page_size else cu_k, "cu_seq_k", None if seqused is not None else max_k, key_rows),
    ):
        if cu is None or not is_host(cu):
            continue
        steps = np.diff(cu)
        if cu[0] != 0 or (steps < 0).any():
            raise ArgumentError(f"{name}: expected cumulative lengths from 0, got {np.asarray(cu).tolist()}")
        if cu[-1] > rows:
            raise ShapeError(f"{name}: ends at {int(cu[-1])}, beyond the {rows} rows given")
        if most is not None and steps.size and steps.max() > most:
            raise ArgumentError(f"max_{name[-1]}: {most} is less than the longest sequence, {int(steps.max())}")
    if seqused is None or not is_host(seqused) or not np.size(seqused):
        return
    slots = None
    if page_size is not None:
        slots = nf.block_table.shape[1] * page_size
    elif is_host(cu_k):
        slots = np.diff(cu_k)
    if np.min(seqused) < 0 or (slots is not None and (seqused > slots).any()) or np.max(seqused) > max_k:
        raise ArgumentError(
            f"seqused_k: expected values in [0, slot], slots {np.asarray(slots).tolist()} and max_k {max_k}, "
            f"got {np.asarray(seqused).tolist()}"
        )
    if page_size is not None and is_host(nf.block_table):
        for b, used in enumerate(seqused):
            needed = nf.block_table[b, : -(-int(used) // page_size)]
            if needed.size and (needed.min() < 0 or needed.max() >= key_rows // page_size):
                raise ArgumentError(
                    f"block_table: row {b} needs pages {needed.tolist()}, "
                    f"but key holds pages 0 .. {key_rows // page_size - 1}"
                )


def _inference_only(key: Any, seqused: Any, table: Any) -> str | None:
    if isinstance(key, KVFormat):
        return "key and value are low-bit"
    for x, name in ((table, "block_table"), (seqused, "seqused_k")):
        if x is not None:
            return f"{name} is given"
    return None
