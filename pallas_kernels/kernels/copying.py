"""The warpgroup of decode that copies: queries, and key and value tiles several ahead, into shared memory.

Keys and values lie in slots, in pages, or anywhere on one axis (`Storage`). Where a tile's rows begin at multiples of
8 the copy engine brings them into the layout that `wgmma` reads. Rows of other pages are gathered one by one
(`gather`); elsewhere (odd slots, keys that start anywhere) they arrive as they lie, and the computing warpgroup
restages them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat, gather
from .work import CHUNK, Item, Line, stage, tile_range

COPY_ROWS = 32
"""Key rows that are copied at once, or not at all; a tile is a multiple."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """Where keys lie. Keys and values are [batch, slot, kv_heads, D], [1, key rows, kv_heads, D] (`anywhere`) or
    [pages, page_size, kv_heads, D]; `anywhere`: a sequence begins at k_start[b] of the axis, or of its row of pages.
    """

    key_tile: int
    axes: tuple[int, int]
    """The two leading axes."""
    pages_per_row: int | None
    anywhere: bool

    @property
    def paged(self) -> bool:
        return self.pages_per_row is not None

    @property
    def rows(self) -> int:
        """Key rows of one copy: few enough that little beyond a sequence's end is copied."""
        if not self.paged:
            return COPY_ROWS
        return 1 if self.anywhere else math.gcd(self.axes[1], COPY_ROWS)

    @property
    def restaged(self) -> bool:
        """Whether the rows of a tile arrive as they lie, because they do not lie in eights."""
        return not self.paged and (self.anywhere or (self.axes[1] > 8 and self.axes[1] % 8 != 0))

    @property
    def gathered(self) -> bool:
        """Whether rows are copied one by one: those of a page do not lie in eights."""
        return self.paged and self.rows % 8 != 0

    def arrivals(self, interpret: bool) -> int:
        """At the barrier of a tile of keys, or of values."""
        if self.gathered:
            return self.key_tile if interpret else 1
        return 2 if self.restaged else self.key_tile // self.rows


class Copying:
    """At tracing time. `ring`: the refs of key and value tiles [stages, key_tile, D]."""

    def __init__(self, cfg: Any, line: Line, given: dict[str, Any], smem: dict[str, Any], interpret: bool) -> None:
        self.cfg, self.line, self.given, self.smem, self.interpret = cfg, line, given, smem, interpret
        self.storage: Storage = cfg.storage
        kind = "_raw" if self.storage.restaged else ""
        self.ring = {name: smem[f"{name}{kind}"] for name in ("k", "v")}

    def run(self) -> None:
        items, done = self.line.walk(self._copy_item)
        # The last slots are freed for nobody's next copy: their barriers are waited for here.
        _compat.loop(jnp.maximum(done - self.cfg.stages, 0), done, lambda n, _: self._wait_freed(n), None)
        self._wait_query(when=items > 0)

    # --------------------------------------------------------------------------------------------- queries

    def _wait_query(self, when: Any) -> None:
        """Until the last item's query, and its place, are free."""
        pl.when(when)(lambda: plgpu.barrier_wait(self.smem["q_freed"].at[0]))

    def _copy_query(self, item: Item, n: Any) -> None:
        """Each token's heads. A tile of fewer tokens takes its last one again: nothing beyond it is read. A single
        token, the common case, waits for no others."""
        self._wait_query(when=n > 0)
        tiling, filled = self.cfg.work.tiling, self.smem["q_filled"].at[0]
        if self.cfg.q_direct:  # the copy engine fills the rows that a short group has not with zeros
            source = self.given["q"].at[item.token, item.head, pl.ds(_eights(item.g), 64)]
            plgpu.copy_gmem_to_smem(source, self.smem["q"], filled)
            return

        def copy(t: int, filled: Any) -> None:
            token = item.token + jnp.minimum(t, item.tokens - 1)
            source = self.given["q"].at[token, item.head, pl.ds(item.g, tiling.heads)]
            plgpu.copy_gmem_to_smem(source, self.smem["q_raw"].at[pl.ds(t * tiling.pitch, tiling.heads)], filled)

        copy(0, filled)
        if tiling.tokens > 1:

            @pl.when(item.tokens > 1)
            def _() -> None:
                for t in range(1, tiling.tokens):
                    copy(t, self.smem["q_rest"].at[0])

    # -------------------------------------------------------------------------------------- keys and values

    def _wait_freed(self, n: Any, when: Any = True) -> None:
        """Until the n-th tile of this block has been consumed."""

        @pl.when(when)
        def _() -> None:
            slot = lax.rem(n + self.cfg.stages, jnp.int32(self.cfg.stages))
            plgpu.barrier_wait(self.smem["k_freed"].at[slot])
            plgpu.barrier_wait(self.smem["v_freed"].at[slot])

    def _copy_item(self, item: Item, items: Any, done: Any) -> Any:
        """Copy an item's query and tiles; tiles done after it.

        Its first tiles come before the query: they find room while the item before is still computed, the query does
        not. Not so the first item's.
        """
        first, tiles = tile_range(item.low, item.high, self.cfg.work.key_tile)
        ahead = min(self.cfg.stages, 2)
        pending = self.cfg.stages - 1  # of gathered tiles, beside the one that is waited for

        def query(when: Any) -> None:
            pl.when(when)(lambda: self._copy_query(item, items))

        query(items == 0)

        def tile(n: Any, _: None) -> None:
            base = (first + n) * self.cfg.work.key_tile
            # Page numbers are read before the wait, which hides their latency.
            pages = self._pages(item.b, base) if self.storage.paged and not self.storage.gathered else []
            window = self._window(item.b, self._position(item.b, base)) if self.storage.gathered else None
            self._wait_freed(done + n - self.cfg.stages, when=done + n >= self.cfg.stages)
            slot = self._slot(done + n)
            if bias := self.cfg.bias:
                bias.copy(item, base, self.given["bias"], self.smem["bias"], slot, self.smem["k_filled"])
            if not self.storage.paged:
                self._copy_rows(item, base, slot)
            elif not self.storage.gathered:
                self._copy_pages(item, base, pages, slot)
            elif self.interpret:
                self._copy_single_rows(item, self._position(item.b, base), window, slot)
            else:
                self._gather_rows(item, self._position(item.b, base), window, slot)
                pl.when(n >= pending)(lambda: self._gathered(done + n - pending, pending))
            query((n == ahead - 1) & (items > 0))

        _compat.loop(0, tiles, tile, None)
        if self.storage.gathered and not self.interpret:
            # All of them: the next query waits for this item, which waits for its last tile.
            for n in range(pending, 0, -1):
                pl.when(tiles >= n)(functools.partial(self._gathered, done + tiles - n, n - 1))
        query((tiles < ahead) & (items > 0))
        return done + tiles

    def _slot(self, n: Any) -> Any:
        return lax.rem(n, jnp.int32(self.cfg.stages))

    def _position(self, b: Any, key: Any) -> Any:
        return self.given["k_start"][b] + key if self.storage.anywhere else key

    def _copy(self, slot: Any, lead: Any, start: Any, rows: int, head: Any, at: Any) -> None:
        for name in ("k", "v"):
            source = self.given[name].at[lead, pl.ds(start, rows), head]
            target = self.ring[name].at[slot, pl.ds(at, rows), pl.ds(0, self.cfg.dims[name])]
            plgpu.copy_gmem_to_smem(source, target, self.smem[f"{name}_filled"].at[slot])

    def _copy_needed(self, item: Item, base: Any, n: int, slot: Any, lead: Any, start: Any) -> None:
        """The n-th copy of a tile whose first key is `base`, if it holds a key of the item's."""
        key, rows = base + n * self.storage.rows, self.storage.rows

        def skip() -> None:
            for name in ("k", "v"):
                plgpu.barrier_arrive(self.smem[f"{name}_filled"].at[slot])

        copy = lambda: self._copy(slot, lead, start, rows, item.head, n * rows)  # noqa: E731
        lax.cond((key < item.high) & (key + rows > item.low), copy, skip)

    def _copy_rows(self, item: Item, base: Any, slot: Any) -> None:
        tile, rows = self.cfg.work.key_tile, self.storage.rows
        if not self.storage.restaged:
            for n in range(tile // rows):
                self._copy_needed(item, base, n, slot, item.b, base + n * rows)
            return
        lead = jnp.int32(0) if self.storage.anywhere else item.b
        position = self._position(item.b, base)
        # In two parts, of which one does not begin at a multiple of 8: so the tile is laid out row by row.
        self._copy(slot, lead, position, tile - 4, item.head, 0)
        self._copy(slot, lead, position + (tile - 4), 4, item.head, tile - 4)

    def _pages(self, b: Any, base: Any) -> list[Any]:
        """The page of each copy of a tile. Past the last needed page the table may hold anything: that is not copied,
        or masked."""
        pages, page_size = self.storage.axes
        tile, per_row = self.cfg.work.key_tile, self.storage.pages_per_row
        assert per_row is not None
        found: dict[int, Any] = {}
        nested = tile % page_size == 0 or page_size % tile == 0
        for at in range(0, tile, self.storage.rows):
            known = at // page_size if nested else at
            if known not in found:
                index = jnp.minimum(lax.div(base + at, jnp.int32(page_size)), per_row - 1)
                found[known] = jnp.clip(self.given["block_table"][b, index], 0, pages - 1)
        return [found[at // page_size if nested else at] for at in range(0, tile, self.storage.rows)]

    def _copy_pages(self, item: Item, base: Any, pages: list[Any], slot: Any) -> None:
        rows, page_size = self.storage.rows, self.storage.axes[1]
        for n, page in enumerate(pages):
            start = lax.rem(lax.div(base, jnp.int32(rows)) + n, jnp.int32(page_size // rows)) * rows
            self._copy_needed(item, base, n, slot, page, start)

    def _window(self, b: Any, position: Any) -> Any:
        """Bring the page numbers of a tile's rows into shared memory; the first one's place in the table."""
        page_size, per_row = self.storage.axes[1], self.storage.pages_per_row
        assert per_row is not None
        first = jnp.minimum(lax.div(position, jnp.int32(page_size)), per_row - 1)
        table = self.given["block_table"].at[b]
        stage([(table, self.smem["pages"])], first, jnp.minimum(CHUNK, per_row - first), aligned=False)
        plgpu.commit_smem()
        return first

    def _gather_rows(self, item: Item, position: Any, first: Any, slot: Any) -> None:
        rows = gather.Rows(self.cfg.work.key_tile, *self.storage.axes)
        names = ("k", "v")
        tiles = [(self.given[n], self.ring[n].at[slot], self.cfg.swizzle(n)) for n in names]
        last = self._position(item.b, item.high - 1)
        rows.copy(tiles, self.smem["pages"], position, last, first, item.head)

    def _gathered(self, n: Any, pending: int) -> None:
        """The n-th tile has arrived, with all but `pending` later ones."""
        gather.wait(pending)
        for name in ("k", "v"):
            plgpu.barrier_arrive(self.smem[f"{name}_filled"].at[self._slot(n)])

    def _copy_single_rows(self, item: Item, position: Any, first: Any, slot: Any) -> None:
        """As `_gather_rows`, for the interpreter: one copy a row."""
        pages, page_size = self.storage.axes
        per_row, window = self.storage.pages_per_row, self.smem["pages"]
        assert per_row is not None
        def row(n: Any, _: None) -> None:
            index = jnp.minimum(lax.div(position + n, jnp.int32(page_size)), per_row - 1) - first
            page = jnp.clip(window[index], 0, pages - 1)
            self._copy(slot, page, lax.rem(position + n, jnp.int32(page_size)), 1, item.head, n)

        _compat.loop(0, self.cfg.work.key_tile, row, None)


def _eights(x: Any) -> Any:
    """x, a multiple of 8, so that its divisibility can be seen."""
    return lax.div(x, jnp.int32(8)) * 8
