"""Joining partial results over disjoint parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .errors import ArgumentError, DTypeError, ShapeError
from .problem import FLOATS, as_array

Chunks = Any | Sequence[Any]


def merge_attentions(
    attn_split: Chunks, lse_split: Chunks, write_lse: bool = True, output_dtype: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Merge n partial attentions: out = sum_i w_i out_i with w_i = exp(lse_i - lse), lse = log sum_i exp(lse_i).

    Differentiable in every chunk and LSE, through both results.

    Args:
        attn_split: n chunks, stacked [n, B, M, H, K] ([n, B, M, G, H, K]) or a list of [B, M, H, K]
            ([B, M, G, H, K]); chunks of a list may differ in dtype. Any K.
        lse_split: their natural-log LSEs, stacked [n, B, H, M] ([n, B, G, H, M]) or a list. A chunk whose LSE is
            -inf has weight 0 and may hold anything. +inf is not accepted as "empty".
        write_lse: whether to return the merged LSE.
        output_dtype: default the (first) chunk's.

    Returns:
        (out [B, M, [G,] H, K], lse [B, [G,] H, M] of the first LSE's dtype, or None). Rows with no chunk: 0 and -inf.

    Raises:
        ShapeError, DTypeError, ArgumentError: no chunk, or chunks that do not fit one another.
    """
    attn, lse = _chunks(attn_split, "attn_split"), _chunks(lse_split, "lse_split")
    _check(attn, lse)
    out_dtype = attn[0].dtype if output_dtype is None else jnp.dtype(output_dtype)
    if str(out_dtype) not in FLOATS:
        raise DTypeError(f"output_dtype: expected one of {', '.join(FLOATS)}, got {out_dtype}")
    lse_dtype = lse[0].dtype
    work = jnp.float64 if any(a.dtype == jnp.float64 for a in attn) else jnp.float32
    log_dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in lse) else jnp.float32

    logs = jnp.stack([x.astype(log_dtype) for x in lse])
    top = jax.lax.stop_gradient(logs.max(0))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(logs - top)
    total = weights.sum(0)
    empty = total == 0
    shares = (weights / jnp.where(empty, 1, total)).astype(work)
    out = jnp.zeros(attn[0].shape, work)
    for chunk, share in zip(attn, shares):
        share = jnp.moveaxis(share, -1, 1)[..., None]
        out = out + share * jnp.where(share > 0, chunk.astype(work), 0)
    if not write_lse:
        return out.astype(out_dtype), None
    merged = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
    return out.astype(out_dtype), merged.astype(lse_dtype)


def _chunks(x: Chunks, name: str) -> list[jax.Array]:
    if isinstance(x, (list, tuple)):
        chunks = [as_array(chunk, f"{name}[{n}]") for n, chunk in enumerate(x)]
    else:
        stacked = as_array(x, name)
        if stacked.ndim == 0:
            raise ShapeError(f"{name}: expected a leading axis of chunks, got a scalar")
        chunks = list(stacked)
    if not chunks:
        raise ArgumentError(f"{name}: expected at least one chunk, got none")
    for n, chunk in enumerate(chunks):
        if str(chunk.dtype) not in FLOATS:
            raise DTypeError(f"{name}[{n}]: expected one of {', '.join(FLOATS)}, got {chunk.dtype}")
    return chunks


def _check(attn: list[jax.Array], lse: list[jax.Array]) -> None:
    if len(attn) != len(lse):
        raise ShapeError(f"lse_split: {len(lse)} chunks, but attn_split has {len(attn)}")
    if attn[0].ndim not in (4, 5):
        raise ShapeError(f"attn_split: expected chunks [B, M, H, K] or [B, M, G, H, K], got {attn[0].shape}")
    batch, queries, *heads, _ = attn[0].shape
    for n, (a, x) in enumerate(zip(attn, lse)):
        if a.shape != attn[0].shape:
            raise ShapeError(f"attn_split[{n}]: expected the first chunk's shape {attn[0].shape}, got {a.shape}")
        if x.shape != (batch, *heads, queries):
            raise ShapeError(f"lse_split[{n}]: expected shape {(batch, *heads, queries)}, got {x.shape}")
