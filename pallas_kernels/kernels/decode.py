"""Split-K decode: each query token's group of heads against one piece of its sequence's keys.

Two warpgroups a block: one copies key and value tiles into shared memory, several tiles ahead; the other multiplies
(the query group as the first rows of a 64-row tile) and keeps the online softmax. Blocks are persistent and take work
items in turn. With one piece a sequence the result is final; else partial results go to a workspace for `merge`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..masks import Window
from . import _compat
from .lse import UNSEEN, LsePlace
from .work import KEY_TILE, SplitPolicy, tile_range, token_sequence, visible_keys

ROWS = 64
"""Rows of the query tile: the least that `wgmma` multiplies."""


@dataclasses.dataclass(frozen=True)
class Decode:
    """Static parameters. Leading sizes (tokens, batch) are capacities where `counted`: the true numbers then come with
    the call, as `count` (of tokens) and `sequences`, int32 [1] each.

    q, out [tokens, kv_heads, group, D]; k, v [batch, slot, kv_heads, D] or [pages, page_size, kv_heads, D];
    q_start int32 [batch + 1], unless every sequence has `equal_queries`; k_len int32 [batch], unless every sequence
    has `equal_keys`; block_table int32 [batch, pages_per_row].
    """

    tokens: int
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str
    out_dtype: str
    lse: LsePlace
    scale: float
    softcap: float | None
    window: Window
    policy: SplitPolicy
    key_shape: tuple[int, ...]
    equal_queries: int | None
    equal_keys: int | None
    pages_per_row: int | None
    counted: bool
    split: bool
    """Write partial results (accumulator, maximum, sum) instead of the final ones."""
    blocks: int
    stages: int

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs' names, in order."""
        wanted = {
            "q": True,
            "k": True,
            "v": True,
            "q_start": self.equal_queries is None,
            "k_len": self.equal_keys is None,
            "block_table": self.pages_per_row is not None,
            "count": self.counted,
            "sequences": self.counted and self.equal_queries is None,
        }
        return tuple(name for name, yes in wanted.items() if yes)

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        rows = (self.tokens, self.kv_heads, self.group)
        if not self.split:
            out = jax.ShapeDtypeStruct((*rows, self.head_dim), self.out_dtype)
            return [out, self.lse.out_type(math.prod(rows))]
        return partial_types(self.policy, self.tokens, self.kv_heads, self.group, self.head_dim)

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: `reads` -> `out_types`."""
        tile, dtype = (self.stages, KEY_TILE, self.head_dim), self.dtype
        copies = KEY_TILE // self._copy_rows
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
        freed = plgpu.Barrier(num_barriers=self.stages)
        out_dtype = jnp.float32 if self.split else self.out_dtype
        scratch = dict(
            q_rows=plgpu.SMEM((ROWS, max(self.head_dim, 64)), dtype),  # a copy's target lies at a multiple of 128 bytes
            q=_compat.tiled((ROWS, self.head_dim), dtype),
            k=_compat.tiled(tile, dtype),
            v=_compat.tiled(tile, dtype),
            p=_compat.tiled((ROWS, KEY_TILE), dtype) if interpret else None,
            out=plgpu.SMEM((ROWS, self.head_dim), out_dtype),
            stats=plgpu.SMEM((2, ROWS), jnp.float32),
            q_filled=plgpu.Barrier(num_arrivals=self.group),
            k_filled=filled,
            v_filled=filled,
            k_freed=freed,
            v_freed=freed,
        )
        names = [name for name, kind in scratch.items() if kind is not None]
        inputs, outputs = len(self.reads), len(self.out_types)

        def body(*refs: Any) -> None:
            given = dict(zip(self.reads, refs[:inputs]))
            smem = dict(zip(names, refs[inputs + outputs :]))
            _Block(self, given, refs[inputs : inputs + outputs], smem).run()

        return _compat.kernel(
            body,
            out_type=self.out_types,
            scratch_types=[scratch[name] for name in names],
            blocks=self.blocks,
            warpgroups=2,
            interpret=interpret,
            detect_races=detect_races,
        )

    @property
    def _copy_rows(self) -> int:
        """Key rows of one copy: a page at most."""
        return KEY_TILE if self.pages_per_row is None else min(KEY_TILE, self.key_shape[1])


def partial_types(
    policy: SplitPolicy, tokens: int, kv_heads: int, group: int, head_dim: int
) -> list[jax.ShapeDtypeStruct]:
    """The workspace of partial results: accumulators float32 [slots, kv_heads, group, 128], of which the first D
    columns are used; maxima (of scores in units of log 2) and sums float32 [tokens * heads * stats_pitch].

    The slot of piece s of token t is t * pieces + s, with the true number of pieces.
    """
    slots = max(n * policy.count(n) for n in {tokens, *range(1, min(tokens, policy.sms) + 1)})
    stats = jax.ShapeDtypeStruct((tokens * kv_heads * group * policy.stats_pitch(tokens),), jnp.float32)
    return [jax.ShapeDtypeStruct((slots, kv_heads, group, max(head_dim, 128)), jnp.float32), stats, stats]


class _Block:
    """What one block does, at tracing time."""

    def __init__(self, cfg: Decode, given: dict[str, Any], written: Any, smem: dict[str, Any]) -> None:
        self.cfg, self.given, self.written, self.smem = cfg, given, written, smem
        self.tokens = given["count"][0] if cfg.counted else jnp.int32(cfg.tokens)
        self.pieces = jnp.int32(cfg.policy.count(self.tokens if cfg.counted else cfg.tokens))

    def run(self) -> None:
        block = lax.axis_index("block")
        items = self.tokens * self.pieces * self.cfg.kv_heads
        mine = lax.div(items - block + (self.cfg.blocks - 1), jnp.int32(self.cfg.blocks))

        def loop(one: Callable[..., Any]) -> Any:
            """`one(item, tiles done before)` -> tiles done, over this block's items."""
            return lax.fori_loop(0, mine, lambda n, done: one(block + n * self.cfg.blocks, done), jnp.int32(0))

        @pl.when(lax.axis_index("wg") == 0)
        def compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            loop(self.compute)

        @pl.when(lax.axis_index("wg") == 1)
        def copy() -> None:
            plgpu.set_max_registers(40, action="decrease")
            done = loop(self.copy)
            # The last tiles' slots are freed by nobody's next copy: their barriers are waited for here.
            lax.fori_loop(jnp.maximum(done - self.cfg.stages, 0), done, lambda n, _: self._wait_freed(n), None)

    def item(self, item: Any) -> tuple[Any, ...]:
        """(token, head, piece, sequence, low, high) of a work item: the keys [low, high) of its piece in its window."""
        piece, rest = lax.rem(item, self.pieces), lax.div(item, self.pieces)
        token, head = lax.div(rest, jnp.int32(self.cfg.kv_heads)), lax.rem(rest, jnp.int32(self.cfg.kv_heads))
        b, i, q_len = self._sequence(token)
        k_len = self.given["k_len"][b] if self.cfg.equal_keys is None else jnp.int32(self.cfg.equal_keys)
        low, high = self.cfg.policy.bounds(piece, self.pieces, k_len)
        first, last = visible_keys(self.cfg.window, i, q_len, k_len)
        return token, head, piece, b, jnp.maximum(low, first), jnp.minimum(high, last)

    def _sequence(self, token: Any) -> tuple[Any, Any, Any]:
        """(b, i, q_len) of a query token."""
        if self.cfg.equal_queries is not None:
            each = jnp.int32(self.cfg.equal_queries)
            return lax.div(token, each), lax.rem(token, each), each
        sequences = self.given["sequences"][0] if self.cfg.counted else jnp.int32(self.cfg.batch)
        return token_sequence(self.given["q_start"], token, sequences, self.cfg.batch)

    # ------------------------------------------------------------------------------------ the copying warpgroup

    def copy(self, item: Any, done: Any) -> Any:
        _, head, _, b, low, high = self.item(item)
        first, tiles = tile_range(low, high)

        def tile(n: Any, _: None) -> None:
            self._wait_freed(done + n - self.cfg.stages, when=done + n >= self.cfg.stages)
            slot = lax.rem(done + n, jnp.int32(self.cfg.stages))
            for name in ("k", "v"):
                filled = self.smem[f"{name}_filled"].at[slot]
                self._copy_tile(self.given[name], self.smem[name].at[slot], filled, b, first + n, head)

        lax.fori_loop(0, tiles, tile, None)
        return done + tiles

    def _wait_freed(self, n: Any, when: Any = True) -> None:
        """Until the n-th tile of this block has been consumed."""

        @pl.when(when)
        def _() -> None:
            slot = lax.rem(n + self.cfg.stages, jnp.int32(self.cfg.stages))
            plgpu.barrier_wait(self.smem["k_freed"].at[slot])
            plgpu.barrier_wait(self.smem["v_freed"].at[slot])

    def _copy_tile(self, source: Any, target: Any, barrier: Any, b: Any, tile: Any, head: Any) -> None:
        rows = self.cfg._copy_rows
        if self.cfg.pages_per_row is None:
            plgpu.copy_gmem_to_smem(source.at[b, pl.ds(tile * KEY_TILE, KEY_TILE), head], target, barrier)
            return
        pages, page_size = self.cfg.key_shape[:2]
        for part in range(KEY_TILE // rows):
            position = tile * KEY_TILE + part * rows
            # Past the last needed page the table may hold anything; what is copied from there is masked.
            index = jnp.minimum(lax.div(position, jnp.int32(page_size)), self.cfg.pages_per_row - 1)
            page = jnp.clip(self.given["block_table"][b, index], 0, pages - 1)
            start = lax.rem(lax.div(position, jnp.int32(rows)), jnp.int32(page_size // rows)) * rows
            plgpu.copy_gmem_to_smem(
                source.at[page, pl.ds(start, rows), head], target.at[pl.ds(part * rows, rows)], barrier
            )

    # ----------------------------------------------------------------------------------- the computing warpgroup

    def compute(self, item: Any, done: Any) -> Any:
        token, head, piece, _, low, high = self.item(item)
        first, tiles = tile_range(low, high)
        self._load_query(token, head)
        per_row = plgpu.Layout.WGMMA.reduce(1)
        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, self.cfg.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), per_row),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), per_row),
        )
        carry = lax.fori_loop(0, tiles, lambda n, c: self._tile(done + n, first + n, low, high, c), carry)
        (self._store_partial if self.cfg.split else self._store_final)(token, head, piece, carry)
        return done + tiles

    def _load_query(self, token: Any, head: Any) -> None:
        """The group's rows, one copy each: any group, and no byte beyond it. The other rows become zero."""
        raw, filled = self.smem["q_rows"].at[:, pl.ds(0, self.cfg.head_dim)], self.smem["q_filled"]
        for g in range(self.cfg.group):
            plgpu.copy_gmem_to_smem(self.given["q"].at[token, head, pl.ds(g, 1)], raw.at[pl.ds(g, 1)], filled)
        plgpu.barrier_wait(filled)
        rows = plgpu.load(raw, layout=plgpu.Layout.WGMMA, optimized=False)
        index = plgpu.broadcasted_iota(jnp.int32, rows.shape, 0, layout=plgpu.Layout.WGMMA)
        self.smem["q"][...] = jnp.where(index < self.cfg.group, rows, jnp.zeros_like(rows))
        plgpu.commit_smem()

    def _tile(self, n: Any, tile: Any, low: Any, high: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, m, l = carry
        smem, base = self.smem, tile * KEY_TILE
        slot = lax.rem(n, jnp.int32(self.cfg.stages))
        plgpu.barrier_wait(smem["k_filled"].at[slot])

        def multiply(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, smem["q"], smem["k"].at[slot].transpose((1, 0)))
            return ref[...]

        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, KEY_TILE), jnp.float32))
        plgpu.barrier_arrive(smem["k_freed"].at[slot])
        key = base + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
        s = jnp.where((key >= low) & (key < high), self._score(s), UNSEEN)
        new = jnp.maximum(m, s.max(axis=1))
        rescale = jnp.exp2(m - new)
        p = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
        l = l * rescale + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])

        plgpu.barrier_wait(smem["v_filled"].at[slot])
        pl.when((base < low) | (base + KEY_TILE > high))(lambda: self._clear_values(slot, base, low, high))
        acc = _compat.weighted_values(p.astype(self.cfg.dtype), smem["v"].at[slot], acc, smem.get("p"))
        plgpu.barrier_arrive(smem["v_freed"].at[slot])
        return acc, new, l

    def _score(self, raw: jax.Array) -> jax.Array:
        """q.k -> score in units of log 2."""
        cap = self.cfg.softcap
        if cap is None:
            return raw * (self.cfg.scale * math.log2(math.e))
        # tanh by exp2: the hardware's own tanh is good to 11 bits only, which a cap of 50 turns into 0.02.
        grown = jnp.exp2(raw * (2 * self.cfg.scale / cap * math.log2(math.e)))
        return (cap * math.log2(math.e)) * (1 - 2 / (grown + 1))

    def _clear_values(self, slot: Any, base: Any, low: Any, high: Any) -> None:
        """Rows outside the piece may be NaN, and 0 * NaN is NaN: they become zero."""
        v = plgpu.load(self.smem["v"].at[slot], layout=plgpu.Layout.WGMMA, optimized=False)
        key = base + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        self.smem["v"][slot] = jnp.where((key >= low) & (key < high), v, jnp.zeros_like(v))
        plgpu.commit_smem()

    def _store_rows(self, rows: jax.Array, m: jax.Array, l: jax.Array, target: Any) -> None:
        """The group's rows to `target` [group, D], its statistics to shared memory."""
        self.smem["out"][...] = rows.astype(self.smem["out"].dtype)
        self.smem["stats"][0], self.smem["stats"][1] = m, l
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.smem["out"].at[pl.ds(0, self.cfg.group)], target)

    def _store_partial(self, token: Any, head: Any, piece: Any, carry: tuple[jax.Array, ...]) -> None:
        acc, m, l = carry
        accumulators, maxima, sums = self.written
        slot = token * self.pieces + piece
        self._store_rows(acc, m, l, accumulators.at[slot, head, :, pl.ds(0, self.cfg.head_dim)])
        row = (token * self.cfg.kv_heads + head) * self.cfg.group
        for g in range(self.cfg.group):
            place = (row + g) * self.cfg.policy.stats_pitch(self.cfg.tokens) + piece
            maxima[place], sums[place] = self.smem["stats"][0, g], self.smem["stats"][1, g]
        plgpu.wait_smem_to_gmem(0)

    def _store_final(self, token: Any, head: Any, piece: Any, carry: tuple[jax.Array, ...]) -> None:
        acc, m, l = carry
        out, lse = self.written
        safe = jnp.where(l > 0, l, 1)
        self._store_rows(acc / lax.broadcast_in_dim(safe, acc.shape, [0]), m, l, out.at[token, head])
        for g in range(self.cfg.group):
            m_g, l_g = self.smem["stats"][0, g], self.smem["stats"][1, g]
            self.cfg.lse.store(lse, token, head * self.cfg.group + g, self.tokens, m_g, l_g)
        plgpu.wait_smem_to_gmem(0)
