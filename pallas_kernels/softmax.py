"""What every backend shares of the softmax: the score, the end of a row, the LSE's dtype, the products in e4m3."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .formats import KVFormat
from .problem import FP8, Problem

FP8_MAX = 448.0
FP8_BLOCK = 64
"""Keys that share one scale of the probabilities in fp8 PV (MSLK's BLOCK_N)."""


def score(problem: Problem, raw: jax.Array) -> jax.Array:
    """q.k -> score: scaled, then capped. A bias is added to this, in natural units."""
    s = raw * problem.scale
    if problem.softcap is not None:
        s = problem.softcap * jnp.tanh(s / problem.softcap)
    return s


def finish(
    acc: jax.Array, m: jax.Array, l: jax.Array, sink: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of rows from their unnormalised output, maximum and sum: acc [..., D], m, l [...].

    A row that sees no key has m = -inf, l = 0: its output is 0 and its LSE -inf. A sink is one more key of logit
    `sink` and value 0: it joins the sum, hence the LSE, so that partial results merge rightly. The LSE is formed in
    float64 and rounded to `dtype` once.
    """
    if sink is not None:
        top = jnp.maximum(m, sink)
        top = jnp.where(jnp.isfinite(top), top, 0)
        rescale = jnp.exp(m - top)
        acc, l, m = acc * rescale[..., None], l * rescale + jnp.exp(sink - top), top
    empty = l == 0
    out = acc / jnp.where(empty, 1, l)[..., None]
    with jax.enable_x64(True):
        lse = jnp.where(empty, 0, m).astype(jnp.float64) + jnp.log(jnp.where(empty, 1, l).astype(jnp.float64))
        lse = jnp.where(empty, -jnp.inf, lse).astype(dtype)
    return out, lse


def cast_output(x: jax.Array, dtype: str) -> jax.Array:
    return to_e4m3(x) if dtype == FP8 else x.astype(dtype)


def to_e4m3(x: jax.Array) -> jax.Array:
    """Round to e4m3, saturating: a plain cast would turn what lies beyond 448 into NaN."""
    return jnp.clip(x, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)


def take(problem: Problem, kv: Any, rows: jax.Array) -> jax.Array:
    """Rows of a key or value as the score sees them: [*rows.shape, kv_heads, D] in the compute dtype.

    MSLK's formats are decoded in half precision and rounded to the query's dtype first; ours are decoded in float32.
    """
    if isinstance(kv, KVFormat):
        seed = kv.name.startswith("seed") and not problem.fp8_qk
        if seed and problem.q_dtype == FP8:
            return to_e4m3(kv.gather_rows(rows, jnp.float16)).astype(problem.compute_dtype)
        decoded = kv.gather_rows(rows, jnp.dtype(problem.q_dtype) if seed else jnp.float32)
        return decoded.astype(problem.compute_dtype)
    flat = kv.reshape(problem.key_rows, problem.kv_heads, kv.shape[-1])
    return jnp.take(flat, rows, axis=0, mode="clip").astype(problem.compute_dtype)


def take_keys(problem: Problem, key: Any, rows: jax.Array) -> jax.Array:
    """As `take`; fp8 QK multiplies e4m3 values and row scales and has no place for a shift."""
    if problem.fp8_qk:
        return key.gather_values(rows) * key.gather_scales(rows)[..., None]
    return take(problem, key, rows)


def fp8_pv(problem: Problem, p: jax.Array, value: Any, rows: jax.Array, seen: jax.Array) -> jax.Array:
    """The product P V of one block of keys with e4m3 operands, as MSLK forms it.

    p [..., q, kv_heads, group, keys], the probabilities against the running maximum; rows, seen [..., keys].
    With `fp8_pv` each row of p x v_scale gets a scale of its own; with fp8 QK alone p and the decoded V are rounded.
    """
    product = "...qhgk,...khd->...qhgd"
    if problem.fp8_pv:
        v = jnp.where(seen[..., None, None], value.gather_values(rows), 0)
        scales = jnp.where(seen[..., None], value.gather_scales(rows), 0)
        weighted = p * jnp.moveaxis(scales, -1, -2)[..., None, :, None, :]
        top = jnp.maximum(weighted.max(-1, keepdims=True) / FP8_MAX, 1e-9)
        rounded = to_e4m3(weighted / top).astype(jnp.float32)
        return jnp.einsum(product, rounded, v, precision="highest") * top
    v = jnp.where(seen[..., None, None], take(problem, value, rows), 0)
    v8, p8 = (to_e4m3(x).astype(jnp.float32) for x in (v, p))
    return jnp.einsum(product, p8, v8, precision="highest")
