"""Who computes what: the work of a call as one line of key tiles, cut into equal shares on the device.

Query rows that see the same keys share a 64-row tile (`Tiling`). Every tile of every sequence has a stretch of the
line, one unit for each tile of keys that it reads and some for its beginning and end; a share is an interval of the
line, so that all shares finish together whatever the lengths, and no host needs to know them.

Where the pieces of a sequence's keys lie depends on its own length and the split policy alone; a share then holds the
whole pieces that begin in it. Under the automatic policy a row is cut where shares end, and a piece is what a share has
of a row: at most two unfinished ones a share, whatever the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..masks import Window
from . import _compat

ROWS = 64
"""Rows of a query tile: the least that `wgmma` multiplies."""
CHUNK = 128
"""Sequences that are planned at once: one for each thread of a warpgroup."""
FEW = 4
"""Sequences that are planned one by one instead."""
MAX_TILE_TOKENS = 16
"""Query tokens of one tile at most; each takes a copy of its own, and decode brings few."""
LEAST_UNITS = 8
"""Of the line in each share, or only the first share of each block has any: a row of many parts takes the merge longer
(B1 Mk8192 in 264 shares: 4.1 us, in 132: 2.8; 2026-12-01)."""
MAX_BATCH = 4096
"""Sequences of a call whose lengths are on the device: their places on the line are kept in shared memory."""


def key_tile(head_dim: int, value_dim: int) -> int:
    """Keys of one step. Part of the numerics (it decides the order in which keys are added up): what lets two stages of
    keys and values fit into shared memory, for each of a block's shares."""
    return 64 if max(head_dim, value_dim) <= 256 else 32


def most_shares(head_dim: int, value_dim: int) -> int:
    """Shares of the work that a block has at most: as many as shared memory holds two stages of."""
    return 2 if max(head_dim, value_dim) <= 128 else 1


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The rows of a query tile: row t * pitch + h is head h (of `heads` that share a KV head) of query token t.

    Rows that no token or head has may hold anything: rows do not mix, and those are not stored.
    """

    tokens: int
    heads: int
    pitch: int
    parts: int
    """Tiles that a token's `heads * parts` query heads are spread over."""

    @classmethod
    def of(cls, group: int, dims: tuple[int, ...], tokens: int) -> Tiling:
        """tokens: the most query tokens that are worth a tile's room. dims: of the rows that are copied, which begin at
        multiples of 128 bytes."""
        # Where heads lie in eights, so do their parts: the copy engine then lays them out (`Decode.q_direct`).
        step = 8 if group > ROWS and group % 8 == 0 else 1
        heads = max(n for n in range(step, min(group, ROWS) + 1, step) if group % n == 0)
        if heads < group or tokens == 1:
            return cls(1, heads, heads, group // heads)
        whole = max(64 // math.gcd(64, dim) for dim in dims)
        pitch = -(-heads // whole) * whole
        return cls(max(1, min(ROWS // pitch, tokens, MAX_TILE_TOKENS)), heads, pitch, 1)


@dataclasses.dataclass(frozen=True)
class SplitPolicy:
    """How a sequence's keys are cut: into `num_splits` pieces, every `split_size` keys, or (neither) where shares
    end."""

    num_splits: int | None
    split_size: int | None

    @property
    def automatic(self) -> bool:
        return self.num_splits is None and self.split_size is None

    def most(self, max_keys: int) -> int:
        """The most pieces that a sequence of up to max_keys keys has."""
        if self.split_size is not None:
            return max(1, -(-max_keys // self.split_size))
        return self.num_splits or 1

    def size(self, k_len: Any) -> Any:
        """Keys of each piece of a sequence but the last."""
        if self.split_size is not None:
            return jnp.full_like(k_len, self.split_size)
        return jnp.maximum(_ceil(k_len, self.num_splits), 1)


class Item(NamedTuple):
    """A query tile and the keys [low, high) that are computed of it at once.

    token: the tile's first query token, of the packed ones; tokens: how many it has (at least 1); i: the first one's
    place in its sequence; g: the first of its query heads in the group. whole: these are all keys that the tile sees;
    else piece `piece` (from 0) of `pieces`.
    """

    b: Any
    head: Any
    g: Any
    token: Any
    tokens: Any
    i: Any
    q_len: Any
    k_len: Any
    low: Any
    high: Any
    whole: Any
    piece: Any
    pieces: Any


class Place(NamedTuple):
    """A place of the line, with what is known there: the sequence (b, its first query token, lengths), and the row: its
    own place, its KV head, and its query tile of the sequence."""

    at: Any
    b: Any
    start: Any
    q_len: Any
    k_len: Any
    row: Any
    head: Any
    tile: Any


@dataclasses.dataclass(frozen=True)
class Work:
    """What of the work is static. Leading sizes are capacities where `counted`."""

    tokens: int
    batch: int
    kv_heads: int
    tiling: Tiling
    key_tile: int
    window: Window
    policy: SplitPolicy
    equal_queries: int | None
    equal_keys: int | None
    max_keys: int
    counted: bool
    blocks: int
    shares: int
    """One or two for each block, which it computes side by side, each with warpgroups and tiles of its own: while one
    begins or ends a row, or waits for a product, the other keeps the memory busy."""
    cost: int
    """Units of the beginning and end of a piece."""

    @property
    def planned(self) -> bool:
        """Whether the places on the line depend on lengths that only the device knows."""
        return self.equal_queries is None or self.equal_keys is None

    @property
    def places(self) -> int:
        """Entries of the table of places."""
        return -(-self.batch // CHUNK) * CHUNK + CHUNK

    def scratch(self) -> dict[str, Any]:
        if not self.planned:
            return {}
        lengths = plgpu.SMEM((self.places,), jnp.int32)
        found = dict(places=lengths, weights=plgpu.SMEM((CHUNK,), jnp.int32))
        if self.equal_keys is None:
            found["k_lens"] = plgpu.SMEM((CHUNK,), jnp.int32)
        if self.equal_queries is None:
            found["q_starts"] = plgpu.SMEM((2 * CHUNK,), jnp.int32)
        return found

    # ------------------------------------------------- one sequence, or a vector of them

    def seen(self, q_len: Any, k_len: Any) -> tuple[Any, Any]:
        """The keys [low, high) outside which no query of a sequence sees anything: `masks.visible` for all its rows."""
        shift = 0 if self.window.top_left else k_len - q_len
        low, high = jnp.zeros_like(k_len), k_len
        if self.window.left is not None:
            low = jnp.minimum(jnp.maximum(shift - self.window.left, 0), k_len)
        if self.window.right is not None:
            high = jnp.minimum(jnp.maximum(q_len + shift + self.window.right, 0), k_len)
        return low, high

    def row_tiles(self, q_len: Any) -> Any:
        """Query tiles of a sequence for each KV head."""
        return _ceil(q_len, self.tiling.tokens) * self.tiling.parts

    def pieces(self, k_len: Any, low: Any, high: Any) -> tuple[Any, Any, Any]:
        """(first piece, pieces, units of each) of a row that sees [low, high); one empty piece where it sees nothing.

        Automatically, a row is one piece as far as the line goes; its first tile instead.
        """
        if self.policy.automatic:
            first = _floor(low, self.key_tile)
            one = jnp.ones_like(k_len)
            return first, one, jnp.maximum(_ceil(high, self.key_tile) - first, 1) + self.cost
        size = self.policy.size(k_len)
        first = lax.div(low, size)
        pieces = lax.div(high + (size - 1), size) - first
        return first, jnp.maximum(jnp.where(high > low, pieces, 1), 1), _ceil(size, self.key_tile) + self.cost

    def weight(self, q_len: Any, k_len: Any) -> Any:
        """Units of a whole sequence."""
        _, pieces, units = self.pieces(k_len, *self.seen(q_len, k_len))
        return self.row_tiles(q_len) * self.kv_heads * pieces * units


class Line:
    """The line of a call, at tracing time, as the warpgroups that have a share of it read it."""

    def __init__(self, work: Work, given: dict[str, Any], smem: dict[str, Any], share: Any) -> None:
        self.work, self.given, self.smem, self.share = work, given, smem, share
        self.tokens = given["count"][0] if work.counted else jnp.int32(work.tokens)
        if work.equal_queries is not None:
            self.sequences = lax.div(self.tokens, jnp.int32(work.equal_queries))
        else:
            self.sequences = given["sequences"][0] if work.counted else jnp.int32(work.batch)

    # ------------------------------------------------------------------ the places, by one warpgroup

    def plan(self) -> None:
        """Fill the table of places, which planned work has: of sequence b, the units before it."""
        rows = plgpu.Layout.WGMMA.reduce(1)
        self.smem["places"][0] = jnp.int32(0)
        if self.work.batch <= FEW:
            place = jnp.int32(0)
            for b in range(self.work.batch):
                _, q_len, k_len = self._lengths(jnp.minimum(b, self.sequences))
                place = place + jnp.where(b < self.sequences, self.work.weight(q_len, k_len), 0)
                self.smem["places"][b + 1] = place
            plgpu.commit_smem()
            return

        def chunk(c: Any, _: None) -> None:
            index = c * CHUNK + plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=rows)
            count = self.sequences - c * CHUNK
            q_len = jnp.full_like(index, self.work.equal_queries or 0)
            k_len = jnp.full_like(index, self.work.equal_keys or 0)
            some, arrays = jnp.minimum(count, CHUNK), []
            if self.work.equal_keys is None:
                arrays.append((self.given["k_len"], self.smem["k_lens"]))
            if self.work.equal_queries is None:
                starts = self.smem["q_starts"]
                arrays.append((self.given["q_start"], starts))
                starts[some] = self.given["q_start"][c * CHUNK + some]
            stage(arrays, c * CHUNK, some)
            plgpu.commit_smem()
            if self.work.equal_keys is None:
                k_len = self._possible(plgpu.load(self.smem["k_lens"], layout=rows, optimized=False))
            if self.work.equal_queries is None:
                here, there = (
                    plgpu.load(starts.at[pl.ds(c * 0 + n, CHUNK)], layout=rows, optimized=False) for n in (0, 1)
                )
                q_len = there - here
            weight = jnp.where(index < self.sequences, self.work.weight(q_len, k_len), 0)
            self.smem["weights"][...] = weight
            plgpu.commit_smem()
            across = plgpu.load(self.smem["weights"], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            shape = (CHUNK, CHUNK)
            row, column = (plgpu.broadcasted_iota(jnp.int32, shape, n, layout=plgpu.Layout.WGMMA) for n in (0, 1))
            before = jnp.where(column <= row, lax.broadcast_in_dim(across, shape, [1]), 0).sum(axis=1)
            base = self.smem["places"][c * CHUNK]
            self.smem["places"][pl.ds(c * CHUNK + 1, CHUNK)] = base + before
            plgpu.commit_smem()

        _compat.loop(0, _ceil(self.sequences, CHUNK), chunk, None)

    # --------------------------------------------------------------------------------- shares and items

    def walk(self, do: Callable[[Item, Any, Any], Any]) -> tuple[Any, Any]:
        """`do(item, items before, tiles before) -> tiles done` for this share's items, in order; (items, tiles)."""
        first, end, size = self._interval()

        def one(carry: tuple[Place, Any, Any]) -> tuple[Place, Any, Any]:
            place, items, done = carry
            item, after = self.item(place, end, size)
            done = do(item, items, done)
            return self.next(place, after), items + 1, done

        zero = jnp.int32(0)
        _, items, done = lax.while_loop(lambda carry: carry[0].at < end, one, (first, zero, zero))
        return items, done

    def _interval(self) -> tuple[Place, Any, Any]:
        """(where this share begins, where it ends, length of every share)."""
        total = self._total()
        shares = jnp.where(total < LEAST_UNITS * self.work.shares, self.work.blocks, self.work.shares)
        size = jnp.maximum(_ceil(total, shares), 1)
        begin = self.share * size
        first = self._find(begin)
        return first, self._end(begin + size, total), size

    def _total(self) -> Any:
        if not self.work.planned:
            return self.sequences * self._equal_weight()
        last = self.smem["places"][self.sequences]
        if self.work.equal_queries is not None:
            return last
        # Tokens behind the last sequence belong to one without keys.
        return last + self.work.weight(self.tokens - self.given["q_start"][self.sequences], jnp.int32(0))

    def _equal_weight(self) -> Any:
        q_len, k_len = jnp.int32(self.work.equal_queries or 0), jnp.int32(self.work.equal_keys or 0)
        return self.work.weight(q_len, k_len)

    def _sequence(self, at: Any) -> tuple[Any, Any]:
        """(b, its place) of the sequence that holds a place of the line."""
        if not self.work.planned:
            weight = jnp.maximum(self._equal_weight(), 1)
            b = lax.div(at, weight)
            return b, b * weight

        def halve(_: Any, bounds: Any) -> Any:
            low, high = bounds
            middle = lax.div(low + high + 1, jnp.int32(2))
            below = self.smem["places"][middle] <= at
            return jnp.where(below, middle, low), jnp.where(below, high, middle - 1)

        last = self.sequences if self.work.equal_queries is None else self.sequences - 1
        b = _compat.loop(0, self.work.batch.bit_length(), halve, (jnp.int32(0), last))[0]
        return b, self.smem["places"][b]

    def _lengths(self, b: Any) -> tuple[Any, Any, Any]:
        """(first query token, q_len, k_len) of a sequence; b may be one beyond the last."""
        real = b < self.sequences
        known = jnp.minimum(b, self.sequences - 1)
        if self.work.equal_queries is not None:
            start, q_len = b * self.work.equal_queries, jnp.int32(self.work.equal_queries)
        else:
            start = self.given["q_start"][b]
            q_len = jnp.where(real, self.given["q_start"][known + 1], self.tokens) - start
        k_len = jnp.int32(self.work.equal_keys) if self.work.equal_keys is not None else self.given["k_len"][known]
        return start, q_len, jnp.where(real, self._possible(k_len), 0)

    def _possible(self, k_len: Any) -> Any:
        """A length from the device, within what there is room for: a wrong one may not lead beyond an allocation."""
        return jnp.minimum(jnp.maximum(k_len, 0), self.work.max_keys)

    def _row_weight(self, q_len: Any, k_len: Any) -> tuple[Any, Any]:
        """(units of a row, of each of its pieces)."""
        _, pieces, units = self.work.pieces(k_len, *self.work.seen(q_len, k_len))
        return pieces * units, units

    def _find(self, at: Any) -> Place:
        """The first piece that begins at or after a place; under the automatic policy, the place itself.

        A place inside a row's beginning is the row's: nothing of it has been read before.
        """
        b, base = self._sequence(at)
        start, q_len, k_len = self._lengths(b)
        row_units, units = self._row_weight(q_len, k_len)
        row = lax.div(at - base, row_units)
        tiles = jnp.maximum(self.work.row_tiles(q_len), 1)
        here = base + row * row_units
        if self.work.policy.automatic:
            at = jnp.where(at - here <= self.work.cost, here, at)
        else:
            at = here + lax.div(at - here + (units - 1), units) * units
        found = Place(at, b, start, q_len, k_len, here, lax.div(row, tiles), lax.rem(row, tiles))
        if self.work.policy.automatic:
            return found
        return self.next(found, at)  # perhaps the next row's first piece

    def _end(self, at: Any, total: Any) -> Any:
        """Where a share ends: where the next one begins."""
        if not self.work.policy.automatic:
            return jnp.minimum(at, total)
        return jnp.where(at >= total, total, self._find(jnp.minimum(at, total - 1)).at)

    def next(self, place: Place, at: Any) -> Place:
        """The place `at`, which is a piece's beginning, of the same row or of the next one."""
        row_units, _ = self._row_weight(place.q_len, place.k_len)
        tiles = self.work.row_tiles(place.q_len)
        here = place.row + row_units
        same_head, same_sequence = place.tile + 1 < tiles, place.head + 1 < self.work.kv_heads

        def following() -> tuple[Any, ...]:
            b, base = self._sequence(at)
            return (b, *self._lengths(b), base, jnp.int32(0), jnp.int32(0))

        def current() -> tuple[Any, ...]:
            head = place.head + jnp.where(same_head, 0, 1)
            tile = jnp.where(same_head, place.tile + 1, 0)
            stay = at < here
            return (
                place.b, place.start, place.q_len, place.k_len, jnp.where(stay, place.row, here),
                jnp.where(stay, place.head, head), jnp.where(stay, place.tile, tile),
            )  # fmt: skip

        return Place(at, *lax.cond((at < here) | same_head | same_sequence, current, following))

    def item(self, place: Place, end: Any, size: Any) -> tuple[Item, Any]:
        """What is done at a place of the share, and the place after it."""
        work = self.work
        at, b, start, q_len, k_len, here, head, tile = place
        i = lax.div(tile, jnp.int32(work.tiling.parts)) * work.tiling.tokens
        g = lax.rem(tile, jnp.int32(work.tiling.parts)) * work.tiling.heads
        low, high = work.seen(q_len, k_len)
        first, pieces, units = work.pieces(k_len, low, high)
        one = (jnp.int32(0), jnp.int32(1))
        if work.policy.automatic:
            after = jnp.minimum(end, here + units)
            whole = (at == here) & (after == here + units)

            def shared() -> tuple[Any, Any]:
                """(this share's part, parts): a share that ends in a row's beginning has none of it."""
                begun = lax.div(here + work.cost, size)
                return self.share - begun, lax.div(here + units - 1, size) - begun + 1

            piece, pieces = lax.cond(whole, lambda: one, shared)
            low = jnp.maximum(low, (first + jnp.maximum(at - here - work.cost, 0)) * work.key_tile)
            high = jnp.minimum(high, (first + (after - here - work.cost)) * work.key_tile)
        else:
            after, whole = at + units, pieces == 1
            piece = lax.cond(whole, lambda: one[0], lambda: lax.div(at - here, units))
            keys = work.policy.size(k_len)
            low, high = jnp.maximum(low, (first + piece) * keys), jnp.minimum(high, (first + piece + 1) * keys)
        tokens = jnp.minimum(q_len - i, work.tiling.tokens)
        return Item(b, head, g, start + i, tokens, i, q_len, k_len, low, high, whole, piece, pieces), after


def stage(arrays: list[tuple[Any, Any]], start: Any, count: Any, aligned: bool = True) -> None:
    """Copy source[start : start + count] (device memory, count up to CHUNK) to the beginning of target (shared memory),
    for every (source, target).

    No byte beyond the end is read: a whole vector where it fits, then halves, then single numbers. aligned: sources
    begin at multiples of 8 bytes, and so does source[start]; halves are read by two numbers a thread.
    """
    done = count * 0  # traced: a constant is no index
    for width in (CHUNK, 64, 32, 16, 8) if aligned else (CHUNK,):
        if width > arrays[0][0].shape[0]:
            continue
        layout = plgpu.Layout.WG_STRIDED((CHUNK,), 1) if width == CHUNK else plgpu.Layout.WGMMA.reduce(0)

        @pl.when(count - done >= width)
        def _(width: int = width, layout: Any = layout, done: Any = done) -> None:
            parts = [
                plgpu.load(source.at[pl.ds(start + done, width)], layout=layout, optimized=False)
                for source, _ in arrays
            ]
            for (_, target), part in zip(arrays, parts):
                target[pl.ds(done, width)] = part

        done = done + jnp.where(count - done >= width, width, 0)

    def one(n: Any, _: None) -> None:
        for number, (_, target) in zip([source[start + n] for source, _ in arrays], arrays):
            target[n] = number

    _compat.loop(done, count, one, None)


def tile_range(low: Any, high: Any, tile: int) -> tuple[Any, Any]:
    """(first tile, number of tiles) that hold the keys [low, high); tiles lie at multiples of `tile`."""
    first = _floor(low, tile)
    return first, jnp.where(high > low, _ceil(high, tile) - first, 0)


def _floor(x: Any, n: int) -> Any:
    return lax.div(x, jnp.full_like(x, n))


def _ceil(x: Any, n: Any) -> Any:
    return lax.div(x + (n - 1), jnp.full_like(x, n))
