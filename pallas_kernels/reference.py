"""The definition: what each row of the output is, in plain jnp. Everything else in this library must agree with it.

It attends one query row at a time, gathering that row's own keys, so there is no batching, tiling or ordering to
reason about, and it is as slow as that sounds. Paged keys are the same thing: the row's table is clamped, gathered
and masked. `backend="reference"` runs it; the module itself is the text to read.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from .errors import ReferenceSizeWarning
from .masks import key_row, query_sequence, visible
from .problem import Operands, Problem
from .softmax import FP8_BLOCK, finish, fp8_pv, score, take, take_keys

SCORES_AT_A_TIME = 2**22
WARN_ABOVE_SCORES = 2**30


def attention(problem: Problem, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [queries, kv_heads, group, Dv], lse [queries, kv_heads, group])."""
    q_len = jnp.diff(x.nf.q_start)
    j = jnp.arange(problem.max_keys, dtype=jnp.int32)

    def row(t: jax.Array) -> tuple[jax.Array, jax.Array]:
        b, i = query_sequence(x.nf, t)
        seen = visible(i, j, q_len[b], x.nf.k_len[b], problem.window) & (i < q_len[b])
        rows = key_row(x.nf, b, j, problem.page_size, problem.key_rows)
        # What is not seen may be NaN: it is replaced before any product, for 0 * NaN is NaN.
        k = jnp.where(seen[:, None, None], take_keys(problem, x.k, rows), 0)
        q = jnp.where(i < q_len[b], x.q[t].astype(problem.compute_dtype), 0)  # rows of no sequence may be NaN, too
        if x.q_scale is not None:
            q = q * x.q_scale[t][..., None]
        s = score(problem, jnp.einsum("hgd,khd->hgk", q, k, precision="highest"))
        if x.bias is not None:
            s = s + _bias_row(x.bias, b, i, problem.max_keys).astype(s.dtype)
        s = jnp.where(seen, s, -jnp.inf)

        m = s.max(-1)
        p = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0)[..., None])
        if problem.fp8_qk or problem.fp8_pv:
            acc = _fp8_row(problem, s, m, x.v, rows, seen)
        else:
            v = jnp.where(seen[:, None, None], take(problem, x.v, rows), 0)
            acc = jnp.einsum("hgk,khd->hgd", p, v, precision="highest")
        sink = None if x.sinks is None else x.sinks.astype(m.dtype)
        return finish(acc, m, p.sum(-1), sink, problem.lse_dtype)

    scores = problem.kv_heads * problem.group * problem.max_keys
    if problem.queries * scores > WARN_ABOVE_SCORES:
        warnings.warn(
            f"reference: {problem.queries * scores} scores, row by row; `chunked` computes the same faster",
            ReferenceSizeWarning,
            stacklevel=2,
        )
    at_a_time = min(problem.queries, max(1, SCORES_AT_A_TIME // (scores * max(problem.head_dim, 1))))
    tokens = jnp.arange(problem.queries, dtype=jnp.int32)
    return jax.lax.map(jax.checkpoint(row), tokens, batch_size=at_a_time)  # type: ignore[attr-defined]


def _bias_row(bias: jax.Array, b: jax.Array, i: jax.Array, keys: int) -> jax.Array:
    """[kv_heads|1, group|1, keys]; axes of size 1 are broadcast."""
    picked = bias[b if bias.shape[0] > 1 else 0, :, :, i if bias.shape[3] > 1 else 0]
    return jnp.broadcast_to(picked, (*picked.shape[:-1], keys))


def _fp8_row(problem: Problem, s: jax.Array, m: jax.Array, v: Any, rows: jax.Array, seen: jax.Array) -> jax.Array:
    """P V with e4m3 operands. It rounds against the *running* maximum, so here alone the order of blocks matters."""
    acc = jnp.zeros((*s.shape[:-1], problem.value_dim), s.dtype)
    running = jnp.full_like(m, -jnp.inf)
    for block in range(math.ceil(problem.max_keys / FP8_BLOCK)):
        part = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        new = jnp.maximum(running, s[..., part].max(-1))
        base = jnp.where(jnp.isfinite(new), new, 0)
        p = jnp.exp(s[..., part] - base[..., None])
        contribution = fp8_pv(problem, p[None], v, rows[part], seen[part])[0]
        acc, running = acc * jnp.exp(running - base)[..., None] + contribution, new
    return acc
