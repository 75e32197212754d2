"""The definition by online softmax over blocks of keys, in plain XLA: any accelerator, memory of one key block.

Query rows are cut into tiles of one sequence each; all tiles step through their own visible keys together, block by
block. The backward recomputes the probabilities of a block from the LSE, so nothing of size queries x keys is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .masks import key_row, visible, visible_range
from .problem import Operands, Problem
from .sharding import vary_like
from .sizes import power_of_two
from .softmax import FP8_BLOCK, finish, fp8_pv, score, take, take_keys

MAX_TILE = 64
MAX_BLOCK = 512
BLOCK_ELEMENTS = 2**23
"""Bound on the scores and on the gathered key elements of one step; it chooses the block length."""


class _Tiles(NamedTuple):
    """Query tiles: the sequence b [W], local query index i [W, tile], packed row [W, tile], whether real [W, tile]."""

    b: jax.Array
    i: jax.Array
    row: jax.Array
    real: jax.Array
    first_key: jax.Array
    """[W]: the first key of the tile's first block."""
    blocks: jax.Array
    """Steps until every tile has passed its last visible key."""


def attention(problem: Problem, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [queries, kv_heads, group, Dv], lse [queries, kv_heads, group]), as `reference.attention`."""
    block = _block_length(problem)
    tiles = _tiles(problem, x, block)
    q = _query_rows(problem, x, tiles)
    shape = q.shape[:-1]
    dtype = problem.compute_dtype

    def step(n: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, m, l = carry
        s, _, rows, any_seen = _scores(problem, x, tiles, q, n, block)
        new = jnp.maximum(m, s.max(-1))
        base = jnp.where(jnp.isfinite(new), new, 0)
        p = jnp.exp(s - base[..., None])
        rescale = jnp.exp(m - base)
        if problem.fp8_qk or problem.fp8_pv:
            pv = fp8_pv(problem, p, x.v, rows, any_seen)
        else:
            v = jnp.where(any_seen[..., None, None], take(problem, x.v, rows), 0)
            pv = jnp.einsum("wqhgk,wkhd->wqhgd", p, v, precision="highest")
        return acc * rescale[..., None] + pv, new, l * rescale + p.sum(-1)

    start = (
        jnp.zeros((*shape, problem.value_dim), dtype),
        jnp.full(shape, -jnp.inf, dtype),
        jnp.zeros(shape, dtype),
    )
    acc, m, l = jax.lax.fori_loop(jnp.int32(0), tiles.blocks, step, vary_like(start, x))
    sink = None if x.sinks is None else x.sinks.astype(dtype)
    out, lse = finish(acc, m, l, sink, problem.lse_dtype)

    # Rows of no sequence (beyond q_start[-1]) keep what an empty row has.
    empty_out, empty_lse = finish(start[0][0, 0], start[1][0, 0], start[2][0, 0], sink, problem.lse_dtype)
    target = jnp.where(tiles.real, tiles.row, problem.queries)
    out = jnp.broadcast_to(empty_out, (problem.queries, *empty_out.shape)).at[target].set(out, mode="drop")
    lse = jnp.broadcast_to(empty_lse, (problem.queries, *empty_lse.shape)).at[target].set(lse, mode="drop")
    return out, lse


class Gradients(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None


def backward(
    problem: Problem, x: Operands, out: jax.Array, d_out: jax.Array, d_lse: jax.Array
) -> Gradients:
    """Gradients of the operands for cotangents of both results; out as `attention` returned it.

    With p = exp(s - m) / l, dp = d_out . v and delta = d_out . out - d_lse: ds = p (dp - delta). The maximum m and the
    sum l of each row are found again: beside a maximum of large magnitude the LSE m + log l has lost log l.
    """
    dtype = problem.compute_dtype
    block = _block_length(problem)
    tiles = _tiles(problem, x, block)
    q = _query_rows(problem, x, tiles)
    m, l = _row_statistics(problem, x, tiles, q, block)
    d_out, d_lse = d_out.astype(dtype), d_lse.astype(dtype)
    delta = (d_out * out.astype(dtype)).sum(-1) - d_lse

    def tiled(a: jax.Array) -> jax.Array:
        keep = tiles.real.reshape(*tiles.real.shape, *(1,) * (a.ndim - 1))
        return jnp.where(keep, jnp.take(a, tiles.row, axis=0, mode="clip"), 0)

    d_out_t, delta_t = tiled(d_out), tiled(delta)

    def step(n: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        d_q, d_k, d_v, d_bias = carry
        s, slope, rows, any_seen = _scores(problem, x, tiles, q, n, block)
        p = jnp.exp(s - m[..., None]) / l[..., None]
        v = jnp.where(any_seen[..., None, None], take(problem, x.v, rows), 0)
        k = jnp.where(any_seen[..., None, None], take(problem, x.k, rows), 0)
        d_s = p * (jnp.einsum("wqhgd,wkhd->wqhgk", d_out_t, v, precision="highest") - delta_t[..., None])
        if x.bias is not None:
            d_bias = _add_bias(d_bias, tiles, _keys(tiles, n, block), d_s)
        if slope is not None:
            d_s = d_s * slope
        d_s = d_s * problem.scale
        target = jnp.where(any_seen, rows, problem.key_rows)
        d_q = d_q + jnp.einsum("wqhgk,wkhd->wqhgd", d_s, k, precision="highest")
        d_k = d_k.at[target].add(jnp.einsum("wqhgk,wqhgd->wkhd", d_s, q, precision="highest"), mode="drop")
        d_v = d_v.at[target].add(jnp.einsum("wqhgk,wqhgd->wkhd", p, d_out_t, precision="highest"), mode="drop")
        return d_q, d_k, d_v, d_bias

    def rows_like(width: int) -> jax.Array:
        return jnp.zeros((problem.key_rows, problem.kv_heads, width), dtype)

    start = (
        jnp.zeros_like(q),
        rows_like(problem.head_dim),
        rows_like(problem.value_dim),
        None if x.bias is None else jnp.zeros(x.bias.shape, dtype),
    )
    d_q, d_k, d_v, d_bias = jax.lax.fori_loop(jnp.int32(0), tiles.blocks, step, vary_like(start, (x, d_out, d_lse)))
    target = jnp.where(tiles.real, tiles.row, problem.queries)
    packed = jnp.zeros((problem.queries, *q.shape[2:]), dtype).at[target].set(d_q, mode="drop")
    return Gradients(
        packed.astype(x.q.dtype),
        d_k.reshape(x.k.shape).astype(x.k.dtype),
        d_v.reshape(x.v.shape).astype(x.v.dtype),
        None if d_bias is None else d_bias.astype(x.bias.dtype),
        None if x.sinks is None else _sink_gradient(problem, x, tiles, m, l, d_lse, delta_t),
    )


def _row_statistics(
    problem: Problem, x: Operands, tiles: _Tiles, q: jax.Array, block: int
) -> tuple[jax.Array, jax.Array]:
    """(m, l) [W, tile, kv_heads, group]: the maximum of each row's scores, sink included, and the sum of exp(s - m);
    0 and 1 where a row sees nothing."""

    def step(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        m, l = carry
        s = _scores(problem, x, tiles, q, n, block)[0]
        new = jnp.maximum(m, s.max(-1))
        base = jnp.where(jnp.isfinite(new), new, 0)
        return new, l * jnp.exp(m - base) + jnp.exp(s - base[..., None]).sum(-1)

    shape, dtype = q.shape[:-1], problem.compute_dtype
    start = (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))
    m, l = jax.lax.fori_loop(jnp.int32(0), tiles.blocks, step, vary_like(start, x))
    if x.sinks is not None:
        sink = x.sinks.astype(dtype)
        top = jnp.maximum(m, sink)
        top = jnp.where(jnp.isfinite(top), top, 0)
        m, l = top, l * jnp.exp(m - top) + jnp.exp(sink - top)
    return jnp.where(jnp.isfinite(m), m, 0), jnp.where(l > 0, l, 1)


def _sink_gradient(
    problem: Problem, x: Operands, tiles: _Tiles, m: jax.Array, l: jax.Array, d_lse: jax.Array, delta_t: jax.Array
) -> jax.Array:
    """A sink is a key of value 0: dp = 0, so ds = -p delta, summed over the query rows.

    Rows of no sequence see the sink alone: p = 1, and their LSE is the sink.
    """
    p = jnp.exp(x.sinks.astype(m.dtype) - m) / l
    rows = jnp.zeros((problem.queries, 1, 1), bool).at[jnp.where(tiles.real, tiles.row, problem.queries)].set(
        True, mode="drop"
    )
    beyond = jnp.where(rows, 0, d_lse)
    return (beyond.sum(0) - (p * delta_t).sum((0, 1))).astype(x.sinks.dtype)


def _tile_length(problem: Problem) -> int:
    """About the mean query count of a sequence, so that tiles of N sequences hold at most thrice the real rows."""
    mean = -(-problem.queries // problem.batch)
    return min(MAX_TILE, power_of_two(mean))


def _block_length(problem: Problem) -> int:
    """Keys of one step."""
    if problem.fp8_qk or problem.fp8_pv:
        return FP8_BLOCK
    tile = _tile_length(problem)
    tiles = (problem.queries + problem.batch * (tile - 1)) // tile
    widest = max(tile * problem.group, problem.head_dim, problem.value_dim)
    block = BLOCK_ELEMENTS // max(tiles * problem.kv_heads * widest, 1)
    return max(1, min(MAX_BLOCK, max(16, block), problem.max_keys))


def _tiles(problem: Problem, x: Operands, block: int) -> _Tiles:
    tile = _tile_length(problem)
    count = (problem.queries + problem.batch * (tile - 1)) // tile
    q_len = jnp.diff(x.nf.q_start)
    ends = jnp.cumsum((q_len + tile - 1) // tile, dtype=jnp.int32)
    w = jnp.arange(count, dtype=jnp.int32)
    b = jnp.clip(jnp.searchsorted(ends, w, side="right").astype(jnp.int32), 0, problem.batch - 1)
    first = (w - jnp.where(b > 0, ends[b - 1], 0)) * tile
    i = first[:, None] + jnp.arange(tile, dtype=jnp.int32)
    real = (i < q_len[b][:, None]) & (w < ends[-1])[:, None]
    row = jnp.clip(x.nf.q_start[b][:, None] + i, 0, problem.queries - 1)
    low, high = visible_range(first, tile, q_len[b], x.nf.k_len[b], problem.window)
    if problem.fp8_qk or problem.fp8_pv:  # blocks of probabilities that share a scale start at multiples of the block
        low = low // block * block
    steps = jnp.where(real[:, 0], (high - low + block - 1) // block, 0)
    return _Tiles(b, i, row, real, low, jnp.maximum(steps.max(), 0).astype(jnp.int32))


def _query_rows(problem: Problem, x: Operands, tiles: _Tiles) -> jax.Array:
    """[W, tile, kv_heads, group, D] in the compute dtype; rows of no query are zero."""
    q = x.q.astype(problem.compute_dtype)
    if x.q_scale is not None:
        q = q * x.q_scale[..., None]
    return jnp.where(tiles.real[..., None, None, None], jnp.take(q, tiles.row, axis=0, mode="clip"), 0)


def _keys(tiles: _Tiles, n: jax.Array, block: int) -> jax.Array:
    """[W, block]: the keys of step n."""
    return tiles.first_key[:, None] + n * block + jnp.arange(block, dtype=jnp.int32)


def _scores(
    problem: Problem, x: Operands, tiles: _Tiles, q: jax.Array, n: jax.Array, block: int
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """One step: scores [W, tile, kv_heads, group, block] (-inf where not seen), the softcap's slope, the key rows
    [W, block], and which of them any query of the tile sees."""
    j = _keys(tiles, n, block)
    q_len, k_len = jnp.diff(x.nf.q_start)[tiles.b], x.nf.k_len[tiles.b]
    seen = visible(tiles.i[..., None], j[:, None, :], q_len[:, None, None], k_len[:, None, None], problem.window)
    seen = seen & tiles.real[..., None]
    any_seen = seen.any(1)
    rows = key_row(x.nf, tiles.b[:, None], j, problem.page_size, problem.key_rows)
    # What no query sees may be NaN: it is replaced before any product, for 0 * NaN is NaN.
    k = jnp.where(any_seen[..., None, None], take_keys(problem, x.k, rows), 0)
    s = score(problem, jnp.einsum("wqhgd,wkhd->wqhgk", q, k, precision="highest"))
    slope = None if problem.softcap is None else 1 - (s / problem.softcap) ** 2
    if x.bias is not None:
        s = s + jnp.moveaxis(_bias_block(x.bias, tiles, j), 3, 1).astype(s.dtype)
    return jnp.where(seen[:, :, None, None, :], s, -jnp.inf), slope, rows, any_seen


def _bias_index(bias: jax.Array, tiles: _Tiles, j: jax.Array) -> tuple[jax.Array, ...]:
    """Indices of one block on the batch, query and key axes, [W, tile, block] each; axes of size 1 are broadcast."""
    i = jnp.broadcast_to(tiles.i[:, :, None], (*tiles.i.shape, j.shape[-1]))
    b, j = jnp.broadcast_to(tiles.b[:, None, None], i.shape), jnp.broadcast_to(j[:, None, :], i.shape)
    return tuple(
        jnp.clip(index, 0, size - 1) for index, size in zip((b, i, j), (bias.shape[0], *bias.shape[3:]))
    )


def _bias_block(bias: jax.Array, tiles: _Tiles, j: jax.Array) -> jax.Array:
    """[W, kv_heads|1, group|1, tile, block]."""
    b, i, k = _bias_index(bias, tiles, j)
    return jnp.moveaxis(bias[b, :, :, i, k], (3, 4), (1, 2))


def _add_bias(d_bias: jax.Array, tiles: _Tiles, j: jax.Array, d_s: jax.Array) -> jax.Array:
    """Adds d_s [W, tile, kv_heads, group, block] where the bias was read; unseen entries are zero already."""
    b, i, k = _bias_index(d_bias, tiles, j)
    d_s = jnp.moveaxis(d_s, 4, 2)
    for axis, size in ((3, d_bias.shape[1]), (4, d_bias.shape[2])):
        if size == 1:
            d_s = d_s.sum(axis, keepdims=True)
    return d_bias.at[b, :, :, i, k].add(d_s)
