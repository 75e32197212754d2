"""Joining partial results over disjoint parts of the keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from . import dispatch
from .errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from .merge_program import Merge
from .problem import FLOATS, as_array
from .sharding import gradient_of

Chunks = Any | Sequence[Any]
Arrays = tuple[jax.Array, ...]
"""One stacked array, or an array a chunk."""
Result = tuple[jax.Array, jax.Array | None]


def merge_attentions(
    attn_split: Chunks, lse_split: Chunks, write_lse: bool = True, output_dtype: Any = None
) -> tuple[jax.Array, jax.Array | None]:
    """Merge n partial attentions: out = sum_i w_i out_i with w_i = exp(lse_i - lse), lse = log sum_i exp(lse_i).

    Differentiable in every chunk and LSE, through both results, in reverse mode; forward mode is not defined where the
    kernel serves. One kernel on a Hopper GPU, for chunks of float16, bfloat16 and float32, LSEs of float32 and float64,
    K a multiple of 8 up to 512, lists of up to 64 chunks and stacks of any number; plain XLA elsewhere.

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
    return merge_on("auto", attn_split, lse_split, write_lse, output_dtype)


def merge_on(
    backend: str, attn_split: Chunks, lse_split: Chunks, write_lse: bool = True, output_dtype: Any = None
) -> Result:
    """`merge_attentions` on a backend of one's choice: "auto", "hopper", "interpret" or "plain"."""
    call, attn, lse = described(attn_split, lse_split, write_lse, output_dtype)
    chosen = _choose(call, backend, attn)
    if chosen == "plain":
        return _plain(call, attn, lse)
    return _merge(call, chosen == "interpret", attn, lse)


def described(
    attn_split: Chunks, lse_split: Chunks, write_lse: bool = True, output_dtype: Any = None
) -> tuple[Merge, Arrays, Arrays]:
    """(the call, its chunks, its LSEs), checked."""
    attn, attn_stacked = _arrays(attn_split, "attn_split")
    lse, lse_stacked = _arrays(lse_split, "lse_split")
    shapes, lse_shapes = _chunk_shapes(attn, attn_stacked), _chunk_shapes(lse, lse_stacked)
    _check(shapes, lse_shapes)
    out_dtype = attn[0].dtype if output_dtype is None else jnp.dtype(output_dtype)
    if str(out_dtype) not in FLOATS:
        raise DTypeError(f"output_dtype: expected one of {', '.join(FLOATS)}, got {out_dtype}")
    dtypes, lse_dtypes = (
        tuple(str(x.dtype) for x in arrays) * (len(shapes) if stacked else 1)
        for arrays, stacked in ((attn, attn_stacked), (lse, lse_stacked))
    )
    call = Merge(shapes[0], dtypes, lse_dtypes, attn_stacked, lse_stacked, str(out_dtype), bool(write_lse))
    return call, attn, lse


def _choose(call: Merge, backend: str, attn: Arrays) -> str:
    if backend == "plain":
        return backend
    if backend == "auto":
        if jax.default_backend() != "gpu" or dispatch.on_cpu(attn[0]):
            return "plain"
        why = [*dispatch.machine_reasons("hopper"), *call.unsupported()]
        if why:
            dispatch.warn_once("a GPU is present but plain XLA merges: " + "; ".join(why))
        return "plain" if why else "hopper"
    why = [*dispatch.machine_reasons(backend), *call.unsupported()]
    if why:
        raise UnsupportedError(f"backend: {backend!r} cannot serve this merge: " + "; ".join(why))
    return backend


# ------------------------------------------------------------------------------------------------ the kernel


@functools.partial(jax.jit, static_argnums=(0, 1))
def _launched(call: Merge, interpret: bool, attn: Arrays, lse: Arrays) -> Result:
    kernel = call.kernel()
    operands = [x.reshape(t.shape) for x, t in zip((*attn, *lse), kernel.in_types, strict=True)]
    out, *merged = kernel.build(interpret)(*operands)
    return out.reshape(call.shape), merged[0].reshape(call.lse_shape) if merged else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _merge(call: Merge, interpret: bool, attn: Arrays, lse: Arrays) -> Result:
    return _launched(call, interpret, attn, lse)


def _merge_fwd(call: Merge, interpret: bool, attn: Any, lse: Any) -> tuple[Result, Any]:
    attn, lse = (tuple(x.value for x in arrays) for arrays in (attn, lse))
    return _merge(call, interpret, attn, lse), (attn, lse)  # not the kernel itself: gradients have gradients too


@functools.partial(jax.jit, static_argnums=0)
def _pulled_back(call: Merge, residuals: tuple[Arrays, Arrays], cotangents: Any) -> tuple[Arrays, Arrays]:
    _, vjp = jax.vjp(functools.partial(_plain, call), *residuals)
    return vjp(cotangents)


def _merge_bwd(call: Merge, interpret: bool, residuals: Any, cotangents: Any) -> tuple[Arrays, Arrays]:
    del interpret
    cotangents = tuple(jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c for c in cotangents)
    gradients = _pulled_back(call, residuals, cotangents)
    attn, lse = (tuple(map(gradient_of, x, d)) for x, d in zip(residuals, gradients))
    return attn, lse


_merge.defvjp(_merge_fwd, _merge_bwd, symbolic_zeros=True)


# ------------------------------------------------------------------------------------------------- plain XLA


def _plain(call: Merge, attn_split: Arrays, lse_split: Arrays) -> Result:
    attn = list(attn_split[0]) if call.chunks_stacked else attn_split
    lse = list(lse_split[0]) if call.lses_stacked else lse_split
    work = jnp.float64 if "float64" in call.chunk_dtypes else jnp.float32
    log_dtype = jnp.float64 if "float64" in call.lse_dtypes else jnp.float32

    logs = jnp.stack([x.astype(log_dtype) for x in lse])
    top = jax.lax.stop_gradient(logs.max(0))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(logs - top)
    total = weights.sum(0)
    empty = total == 0
    shares = (weights / jnp.where(empty, 1, total)).astype(work)
    out = jnp.zeros(call.shape, work)
    for chunk, share in zip(attn, shares):
        share = jnp.moveaxis(share, -1, 1)[..., None]
        out = out + share * jnp.where(share > 0, chunk.astype(work), 0)
    if not call.write_lse:
        return out.astype(call.out_dtype), None
    merged = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
    return out.astype(call.out_dtype), merged.astype(call.lse_dtypes[0])


# ------------------------------------------------------------------------------------------------- arguments


def _arrays(x: Chunks, name: str) -> tuple[Arrays, bool]:
    """(the arrays, whether it is one stacked array)."""
    if isinstance(x, (list, tuple)):
        arrays, stacked = tuple(as_array(chunk, f"{name}[{n}]") for n, chunk in enumerate(x)), False
    else:
        arrays, stacked = (as_array(x, name),), True
        if arrays[0].ndim == 0:
            raise ShapeError(f"{name}: expected a leading axis of chunks, got a scalar")
    if not arrays or (stacked and not arrays[0].shape[0]):
        raise ArgumentError(f"{name}: expected at least one chunk, got none")
    for n, array in enumerate(arrays):
        if str(array.dtype) not in FLOATS:
            raise DTypeError(f"{name}[{n}]: expected one of {', '.join(FLOATS)}, got {array.dtype}")
    return arrays, stacked


def _chunk_shapes(arrays: Arrays, stacked: bool) -> list[tuple[int, ...]]:
    return [arrays[0].shape[1:]] * arrays[0].shape[0] if stacked else [x.shape for x in arrays]


def _check(attn: list[tuple[int, ...]], lse: list[tuple[int, ...]]) -> None:
    if len(attn) != len(lse):
        raise ShapeError(f"lse_split: {len(lse)} chunks, but attn_split has {len(attn)}")
    if len(attn[0]) not in (4, 5):
        raise ShapeError(f"attn_split: expected chunks [B, M, H, K] or [B, M, G, H, K], got {attn[0]}")
    batch, queries, *heads, _ = attn[0]
    for n, (a, x) in enumerate(zip(attn, lse)):
        if a != attn[0]:
            raise ShapeError(f"attn_split[{n}]: expected the first chunk's shape {attn[0]}, got {a}")
        if x != (batch, *heads, queries):
            raise ShapeError(f"lse_split[{n}]: expected shape {(batch, *heads, queries)}, got {x}")
