"""The warpgroups of decode that compute: scores, online softmax and weighted values of a query tile, and its end.

One warpgroup has all columns of the values up to 256; of wider ones, two have half each, and both form the scores.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat
from .lse import UNSEEN
from .work import CHUNK, ROWS, Item, Line, tile_range

PER_ROW = plgpu.Layout.WGMMA.reduce(1)


class Computing:
    """At tracing time; `warpgroup` of `cfg.computing`."""

    def __init__(self, cfg: Any, line: Line, given: dict[str, Any], written: dict[str, Any], smem: Any, warpgroup: int):
        self.cfg, self.line, self.given, self.written, self.smem = cfg, line, given, written, smem
        self.warpgroup = warpgroup
        each = cfg.value_dim // cfg.computing
        self.columns = [(warpgroup * each + at, min(cfg.columns, each - at)) for at in range(0, each, cfg.columns)]

    def run(self) -> None:
        self.line.walk(self._compute)
        plgpu.wait_smem_to_gmem(0)

    # --------------------------------------------------------------------------------------------- queries

    def _take_query(self, item: Item) -> None:
        plgpu.barrier_wait(self.smem["q_filled"].at[0])
        if self.cfg.work.tiling.tokens > 1:
            pl.when(item.tokens > 1)(lambda: plgpu.barrier_wait(self.smem["q_rest"].at[0]))
        if not self.cfg.q_direct:
            raw = self.smem["q_raw"].at[:, pl.ds(0, self.cfg.head_dim)]
            self.smem["q"][...] = plgpu.load(raw, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.smem["q_freed"].at[0])

    # ----------------------------------------------------------------------------------------------- tiles

    def _compute(self, item: Item, n: Any, done: Any) -> Any:
        self._take_query(item)
        first, tiles = tile_range(item.low, item.high, self.cfg.work.key_tile)
        bounds = self._bounds(item)
        if bias := self.cfg.bias:
            bias.prepare(item, self.given["bias"], None if bias.by_key else self.smem["bias"].at[self.warpgroup])
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)  # noqa: E731
        carry = (
            tuple(plgpu.layout_cast(zeros(ROWS, width), plgpu.Layout.WGMMA) for _, width in self.columns),
            plgpu.layout_cast(jnp.full((ROWS,), UNSEEN, jnp.float32), PER_ROW),
            plgpu.layout_cast(zeros(ROWS), PER_ROW),
        )

        def tile(x: Any, carry: Any) -> Any:
            return self._tile(done + x, (first + x) * self.cfg.work.key_tile, item, bounds, carry)

        acc, m, l = _compat.loop(0, tiles, tile, carry)
        if self.cfg.q_direct:
            plgpu.barrier_arrive(self.smem["q_freed"].at[0])
        if not self.cfg.split:
            self._store_final(item, acc, m, l)
        else:
            pl.when(item.whole)(lambda: self._store_final(item, acc, m, l))
            pl.when(jnp.logical_not(item.whole))(lambda: self._store_partial(item, acc, m, l))
            self._record(item)
        return done + tiles

    def _position(self, item: Item) -> Any:
        """Of the item's first query, on the key axis (`masks.Window`)."""
        return item.i if self.cfg.work.window.top_left else item.i + (item.k_len - item.q_len)

    def _bounds(self, item: Item) -> tuple[Any, Any]:
        """The keys [low, high) that each row sees of the item's: `masks.visible`. Scalars where they are all alike."""
        window, tiling = self.cfg.work.window, self.cfg.work.tiling
        if window.left is None and window.right is None:
            return item.low, item.high
        here = self._position(item)
        if tiling.tokens > 1:
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
            here = here + lax.div(row, jnp.full_like(row, tiling.pitch))
        low = item.low if window.left is None else jnp.maximum(item.low, here - window.left)
        high = item.high if window.right is None else jnp.minimum(item.high, here + window.right + 1)
        return low, high

    def _tile(self, n: Any, base: Any, item: Item, bounds: Any, carry: Any) -> Any:
        acc, m, l = carry
        smem, keys = self.smem, self.cfg.work.key_tile
        slot = lax.rem(n, jnp.int32(self.cfg.stages))
        plgpu.barrier_wait(smem["k_filled"].at[slot])
        k = self._restage("k", slot, base, item) if self.cfg.storage.restaged else smem["k"].at[slot]

        def multiply(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, smem["q"], k.transpose((1, 0)))
            return ref[...]

        s = pl.run_scoped(multiply, plgpu.ACC((ROWS, keys), jnp.float32))
        if not self.cfg.storage.restaged:
            plgpu.barrier_arrive(smem["k_freed"].at[slot])
        s, unit = self._score(s)
        if bias := self.cfg.bias:  # read before the values of its slot are freed
            s, unit = bias.add(s, unit, smem["bias"].at[slot if bias.by_key else self.warpgroup]), 1.0
        s = self._masked(s, base, item, bounds)
        new = jnp.maximum(m, s.max(axis=1) * unit)
        rescale = jnp.exp2(m - new)
        p = jnp.exp2(s * unit - lax.broadcast_in_dim(new, s.shape, [0]))
        l = l * rescale + p.sum(axis=1)
        acc = tuple(x * lax.broadcast_in_dim(rescale, x.shape, [0]) for x in acc)

        plgpu.barrier_wait(smem["v_filled"].at[slot])
        if self.cfg.storage.restaged:
            v = self._restage("v", slot, base, item)
        else:
            v = smem["v"].at[slot]
            pl.when((base < item.low) | (base + keys > item.high))(lambda: self._clear_values(v, base, item))
        p = p.astype(self.cfg.dtype)
        detour = smem["p"].at[self.warpgroup] if "p" in smem else None
        acc = tuple(
            _compat.weighted_values(p, v.at[:, pl.ds(at, width)], x, detour)
            for x, (at, width) in zip(acc, self.columns)
        )
        if not self.cfg.storage.restaged:
            plgpu.barrier_arrive(smem["v_freed"].at[slot])
        return acc, new, l

    def _score(self, raw: jax.Array) -> tuple[jax.Array, float]:
        """q.k -> (score, its unit in units of log 2). A unit is left to be multiplied together with what follows."""
        cap, unit = self.cfg.softcap, self.cfg.scale * math.log2(math.e)
        if cap is None:
            return (raw, unit) if unit > 0 else (raw * unit, 1.0)
        # tanh by exp2: the hardware's own tanh is good to 11 bits only, which a cap of 50 turns into 0.02. Its error is
        # absolute, so that small arguments (large caps) go by the series, good to 1e-8 of the argument.
        x = raw * (self.cfg.scale / cap)
        tanh = 1 - 2 / (jnp.exp2(x * (2 * math.log2(math.e))) + 1)
        square = x * x
        series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        return (cap * math.log2(math.e)) * jnp.where(jnp.abs(x) < 0.2, series, tanh), 1.0

    def _masked(self, s: jax.Array, base: Any, item: Item, bounds: Any) -> jax.Array:
        """Scores, -inf where a row does not see the key. Most tiles are seen whole: those are left as they are."""
        low, high = bounds
        window, keys = self.cfg.work.window, self.cfg.work.key_tile
        first_high, last_low = item.high, item.low
        if low.ndim or high.ndim:  # of the first row, and of the last
            here = self._position(item)
            if window.left is not None:
                last_low = jnp.maximum(last_low, here + (item.tokens - 1) - window.left)
            if window.right is not None:
                first_high = jnp.minimum(first_high, here + window.right + 1)
        else:
            first_high, last_low = high, low

        def mask(s: jax.Array) -> jax.Array:
            key = base + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            rows = (x if x.ndim == 0 else lax.broadcast_in_dim(x, s.shape, [0]) for x in (low, high))
            low_row, high_row = rows
            return jnp.where((key >= low_row) & (key < high_row), s, -jnp.inf)

        return lax.cond((base < last_low) | (base + keys > first_high), mask, lambda s: s, s)

    def _clear_values(self, tile: Any, base: Any, item: Item) -> None:
        """Rows outside the item's keys may be NaN, and 0 * NaN is NaN: they become zero."""
        end = self.columns[-1][0] + self.columns[-1][1]
        if self.cfg.work.key_tile < ROWS:  # registers hold 64 rows: here they are columns
            for at in range(self.columns[0][0], end, ROWS):
                part = tile.at[:, pl.ds(at, ROWS)].transpose((1, 0))
                part[...] = self._inside(part, 1, base, item)
            plgpu.commit_smem()
            return
        for first in range(0, self.cfg.work.key_tile, ROWS):
            here = base + first

            @pl.when((here < item.low) | (here + ROWS > item.high))
            def _(first: int = first, here: Any = here) -> None:
                for at, width in self.columns:
                    part = tile.at[pl.ds(first, ROWS), pl.ds(at, width)]
                    part[...] = self._inside(part, 0, here, item)

        plgpu.commit_smem()

    def _inside(self, tile: Any, axis: int, base: Any, item: Item) -> jax.Array:
        """A tile in registers, zero outside the item's keys, which lie along an axis."""
        rows = plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False)
        key = base + plgpu.broadcasted_iota(jnp.int32, rows.shape, axis, layout=plgpu.Layout.WGMMA)
        return jnp.where((key >= item.low) & (key < item.high), rows, jnp.zeros_like(rows))

    def _restage(self, name: str, slot: Any, base: Any, item: Item) -> Any:
        """A tile that was copied as it lies, in the layout that `wgmma` reads, zero outside the item's keys."""
        raw = self.smem[f"{name}_raw"].at[slot, :, pl.ds(0, self.cfg.dims[name])]
        self.smem[name][...] = self._inside(raw, 0, base, item)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.smem[f"{name}_freed"].at[slot])
        return self.smem[name]

    # ------------------------------------------------------------------------------------------- the end

    def _store_rows(self, staging: Any, acc: Any, item: Item, target: Any) -> None:
        """Each token's heads to `target(t, columns)` in device memory, through shared memory."""
        tiling = self.cfg.work.tiling
        for x, (at, width) in zip(acc, self.columns):
            plgpu.wait_smem_to_gmem(0)
            staging[:, pl.ds(0, width)] = x.astype(staging.dtype)
            plgpu.commit_smem()

            def copy(t: int, at: int = at, width: int = width) -> None:
                part = staging.at[pl.ds(t * tiling.pitch, tiling.heads), pl.ds(0, width)]
                plgpu.copy_smem_to_gmem(part, target(t, pl.ds(at, width)))

            copy(0)

            @pl.when(item.tokens > 1)
            def _() -> None:
                for t in range(1, tiling.tokens):
                    pl.when(t < item.tokens)(functools.partial(copy, t))

    def _store_partial(self, item: Item, acc: Any, m: jax.Array, l: jax.Array) -> None:
        partials, tiling, share = self.cfg.partials, self.cfg.work.tiling, self.line.share

        def target(t: int, columns: Any) -> Any:
            place, row = partials.place(item, t, share)
            return self.written["accumulators"].at[place, pl.ds(row, tiling.heads), columns]

        self._store_rows(self.smem["partial"].at[self.warpgroup], acc, item, target)
        if self.warpgroup:
            return
        self.smem["stats"][0], self.smem["stats"][1] = m, l
        plgpu.commit_smem()
        target_of_stats = self.written["stats"].at[partials.stats_place(item, share)]
        plgpu.copy_smem_to_gmem(self.smem["stats"], target_of_stats)

    def _record(self, item: Item) -> None:
        """What the merge has to know, from whoever has a row's first piece."""
        if self.warpgroup:
            return
        records, partials = self.written["records"], self.cfg.partials

        @pl.when(item.piece == 0)
        def _() -> None:
            def token(t: Any, _: None) -> None:
                record = partials.record(item.token + t, item.head, item.g)
                records[record, 0], records[record, 1] = item.pieces, partials.whereabouts(t, self.line.share)

            _compat.loop(0, item.tokens, token, None)

    def _store_final(self, item: Item, acc: Any, m: jax.Array, l: jax.Array) -> None:
        tiling, cfg = self.cfg.work.tiling, self.cfg
        if cfg.sinks:
            acc, m, l = self._with_sinks(item, acc, m, l)
        safe = jnp.where(l > 0, l, 1)
        acc = tuple(x / lax.broadcast_in_dim(safe, x.shape, [0]) for x in acc)

        def target(t: int, columns: Any) -> Any:
            return self.written["out"].at[item.token + t, item.head, pl.ds(item.g, tiling.heads), columns]

        self._store_rows(self.smem[cfg.staging_of_final].at[self.warpgroup], acc, item, target)
        if self.warpgroup:
            return
        for n, x in enumerate((m, l)):
            self.smem["final_stats"][n, pl.ds(0, ROWS)] = x
        plgpu.commit_smem()
        # One row a thread: a layout of matrix rows holds no float64 that can be stored.
        one_each = plgpu.Layout.WG_STRIDED((CHUNK,), 1)
        m, l = (plgpu.load(self.smem["final_stats"].at[n], layout=one_each, optimized=False) for n in (0, 1))
        self.smem["lse_rows"][...] = cfg.lse.value(m, l)
        plgpu.commit_smem()
        # Written out, so that the loads and stores of many rows are under way at once.
        for t in range(tiling.tokens):

            def store(t: int = t) -> None:
                for h in range(tiling.heads):
                    head = item.head * (tiling.heads * tiling.parts) + item.g + h
                    place = cfg.lse.place(item.token + t, head, self.line.tokens)
                    self.written["lse"][place] = self.smem["lse_rows"][t * tiling.pitch + h]

            store() if t == 0 else pl.when(t < item.tokens)(store)

    def _with_sinks(self, item: Item, acc: Any, m: jax.Array, l: jax.Array) -> Any:
        """A sink is one more key, of its own logit and value 0 (`softmax.finish`)."""
        tiling = self.cfg.work.tiling
        sinks = self.smem["sinks"].at[self.warpgroup]

        def head(h: Any, _: None) -> None:
            logit = self.given["sinks"][item.head, item.g + h].astype(jnp.float32) * math.log2(math.e)
            for t in range(tiling.tokens):
                sinks[t * tiling.pitch + h] = logit

        _compat.loop(0, tiling.heads, head, None)
        plgpu.commit_smem()
        sink = plgpu.load(sinks, layout=PER_ROW, optimized=False)
        rescale, m, l = with_sink(m, l, sink)
        return tuple(x * lax.broadcast_in_dim(rescale, x.shape, [0]) for x in acc), m, l


def with_sink(m: Any, l: Any, sink: Any) -> tuple[Any, Any, Any]:
    """(rescale of the accumulator, m, l) of rows with their sinks, in units of log 2, joined."""
    top = jnp.maximum(m, jnp.maximum(sink, UNSEEN))
    rescale = jnp.exp2(m - top)
    return rescale, top, l * rescale + jnp.exp2(sink - top)
