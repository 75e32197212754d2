"""Merges n partial attentions that lie anywhere: one block a few rows, chunks added in order.

Bound by memory, so nothing stands between memory and registers: each thread loads 16 bytes of a row at a time, the
first chunks' rows are on their way while the weights are formed, and blocks are many and small. A row's LSEs are read
by the lanes that hold the row. No bit of the result depends on the tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat

REGISTERS = 32
"""Registers of a thread for a group of chunks; two groups are on their way at once."""
LOADS = 8
"""Loads of a thread that should be on their way at once."""
UNROLLED = 32
"""More chunks in stacked operands are added in a loop."""
SMALL = 4096
"""Up to so many rows tiles are the smallest, so that all of the card works."""


@dataclasses.dataclass(frozen=True)
class MergeChunks:
    """Static parameters. Chunks [batch, queries, heads, dim] and LSEs [batch, heads, queries], each kind `stacked` in
    one operand with a leading axis of chunks, or an operand a chunk. The results have the same shapes.

    chunk_dtypes, lse_dtypes: of each chunk (all equal where stacked). lse_dtype: None for no merged LSE.
    counted: `batch` is a capacity; the true number comes with the call as a last operand, int32 [1].
    """

    batch: int
    queries: int
    heads: int
    dim: int
    chunk_dtypes: tuple[str, ...]
    lse_dtypes: tuple[str, ...]
    chunks_stacked: bool
    lses_stacked: bool
    out_dtype: str
    lse_dtype: str | None
    counted: bool = False
    tile_rows: int | None = None
    """Rows of a tile, a power of two, or None to choose: a matter of speed alone."""
    along_heads: bool | None = None
    """Whether a tile is some heads of a query, or queries of a head, or None to choose: likewise."""

    @property
    def chunks(self) -> int:
        return len(self.chunk_dtypes)

    @property
    def in_types(self) -> list[jax.ShapeDtypeStruct]:
        """The operands: chunks, LSEs, count."""
        types = _operands((self.batch, self.queries, self.heads, self.dim), self.chunk_dtypes, self.chunks_stacked)
        types += _operands((self.batch, self.heads, self.queries), self.lse_dtypes, self.lses_stacked)
        return types + [jax.ShapeDtypeStruct((1,), jnp.int32)] * self.counted

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        out = jax.ShapeDtypeStruct((self.batch, self.queries, self.heads, self.dim), self.out_dtype)
        if self.lse_dtype is None:
            return [out]
        return [out, jax.ShapeDtypeStruct((self.batch, self.heads, self.queries), self.lse_dtype)]

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: `in_types` -> `out_types`."""
        return _compat.kernel(
            lambda *refs: _Block(self, refs).run(),
            out_type=self.out_types,
            scratch_types=[],
            blocks=self.lines * self.tiles,
            warpgroups=1,
            interpret=interpret,
            detect_races=detect_races,
            approx_math=False,  # the approximate logarithm is float32
            barriers=False,  # no thread reads what another one writes
        )

    # ------------------------------------------------------------------- what a thread, a tile and a line hold

    @property
    def vector(self) -> int:
        """Neighbouring elements of a thread: 16 bytes of the widest dtype."""
        return 16 // max(jnp.dtype(d).itemsize for d in self.chunk_dtypes)

    @property
    def columns(self) -> int:
        """Columns that the lanes of a warp cover: a power of two that divides dim."""
        return min(self.dim & -self.dim, 32 * self.vector)

    @property
    def rows(self) -> int:
        """Rows of a whole tile, a power of two."""
        if self.tile_rows is not None:
            return self.tile_rows
        least = 4 * (32 * self.vector // self.columns)  # one for each group of lanes of the four warps
        if self.batch * self.queries * self.heads <= SMALL:
            return least
        loads = self.chunks * (self.dim // self.columns)
        return least * max(1, min(4, LOADS // loads and 1 << (LOADS // loads).bit_length() - 1))

    @property
    def ahead(self) -> int:
        """Chunks of a group, which is loaded at once."""
        itemsize = max(jnp.dtype(d).itemsize for d in self.chunk_dtypes)
        return min(self.chunks, max(1, REGISTERS * 4 * 128 // (self.rows * self.dim * itemsize)))

    @property
    def along_queries(self) -> bool:
        """Whether a line, which tiles cut, is the queries of a head (their LSEs are neighbours); else the heads of a
        query."""
        if self.along_heads is not None:
            return not self.along_heads
        return self.queries >= min(self.rows, self.heads)

    @property
    def lines(self) -> int:
        return self.batch * (self.heads if self.along_queries else self.queries)

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """(first row, rows) of a line's last tiles: whole ones up to there, then a power of two each."""
        length = self.queries if self.along_queries else self.heads
        found, start = [], length - length % self.rows
        for size in _powers_below(self.rows):
            if (length - start) & size:
                found.append((start, size))
                start += size
        return found

    @property
    def whole(self) -> int:
        """Whole tiles of a line."""
        return (self.queries if self.along_queries else self.heads) // self.rows

    @property
    def tiles(self) -> int:
        """Tiles of a line."""
        return self.whole + len(self.cuts)

    @property
    def looped(self) -> bool:
        return self.chunks > UNROLLED and self.chunks_stacked and self.lses_stacked


def _operands(shape: tuple[int, ...], dtypes: tuple[str, ...], stacked: bool) -> list[jax.ShapeDtypeStruct]:
    if stacked:
        return [jax.ShapeDtypeStruct((len(dtypes), *shape), dtypes[0])]
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]


def _powers_below(n: int) -> Iterator[int]:
    """n/2, n/4, ... 1, of a power of two."""
    while n > 1:
        n //= 2
        yield n


def row_layout(rows: int, columns: int, vector: int) -> Any:
    """Of `rows` x some multiple of `columns`: each lane holds `vector` neighbours, lanes run along `columns`, then over
    rows, then warps and registers over rows. Fewer rows than lanes and warps can hold are held several times.
    """
    lanes = columns // vector
    per_warp = min(32 // lanes, rows)
    warps = min(4, rows // per_warp)
    # Tiled [.., warp, (one,) row, lane, vector]; the canonical form leaves out what is one, and counts from the end.
    tiles = [(warps * per_warp, columns), (per_warp, columns), (vector,)]
    warp, row, lane = -5, -3, -2
    if per_warp == 1 or warps == 1:
        del tiles[1]
        warp = -3
    if lanes == 1:
        del tiles[-1]
        warp, row = warp + 1, row + 1
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)),
        warp_dims=(*_held(warp, warps), *_replicated(4 // warps)),
        lane_dims=(*_held(row, per_warp), *_held(lane, lanes), *_replicated(32 // (per_warp * lanes))),
        vector_dim=-1,
    )


def _held(dimension: int, size: int) -> tuple[int, ...]:
    return (dimension,) if size > 1 else ()


def _replicated(times: int) -> tuple[Any, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()


class _Block:
    """What one block does, at tracing time."""

    def __init__(self, cfg: MergeChunks, refs: tuple[Any, ...]) -> None:
        self.cfg = cfg
        *operands, self.out = refs if cfg.lse_dtype is None else refs[:-1]
        self.lse = None if cfg.lse_dtype is None else refs[-1]
        self.count = operands.pop() if cfg.counted else None
        chunks = 1 if cfg.chunks_stacked else cfg.chunks
        self.chunk = _source(operands[:chunks], cfg.chunks_stacked)
        self.chunk_lse = _source(operands[chunks:], cfg.lses_stacked)

    def run(self) -> None:
        cfg = self.cfg
        # Neighbouring blocks take neighbouring memory.
        if cfg.along_queries:
            rest, head = _divide(lax.axis_index("block"), cfg.heads)
            b, tile = _divide(rest, cfg.tiles)
        else:
            rest, tile = _divide(lax.axis_index("block"), cfg.tiles)
            b, query = _divide(rest, cfg.queries)

        def merge(start: Any, rows: int) -> None:
            span = pl.ds(start, rows)
            if cfg.along_queries:
                _Tile(self, rows, (b, span, head), (b, head, span)).merge()
            else:
                _Tile(self, rows, (b, query, span), (b, span, query)).merge()

        def tiles() -> None:
            if cfg.whole:
                pl.when(tile < cfg.whole)(lambda: merge(tile * cfg.rows, cfg.rows))
            for n, (start, rows) in enumerate(cfg.cuts):
                pl.when(tile == cfg.whole + n)(functools.partial(merge, start, rows))

        if self.count is None:
            tiles()
        else:
            pl.when(b < self.count[0])(tiles)


def _source(refs: list[Any], stacked: bool) -> Callable[[Any, tuple[Any, ...]], Any]:
    """(chunk number, place in a chunk) -> that part of it. A traced number only where stacked."""
    if stacked:
        return lambda n, place: refs[0].at[(n, *place)]
    return lambda n, place: refs[n].at[place]


def _divide(x: Any, n: int) -> tuple[Any, Any]:
    return lax.div(x, jnp.int32(n)), lax.rem(x, jnp.int32(n))


class _Tile:
    """Some rows of all chunks."""

    def __init__(self, block: _Block, rows: int, place: tuple[Any, ...], lse_place: tuple[Any, ...]) -> None:
        self.cfg, self.block, self.shape = block.cfg, block, (rows, block.cfg.dim)
        self.place, self.lse_place = place, lse_place
        self.layout = row_layout(rows, self.cfg.columns, self.cfg.vector)
        self.per_row = self.layout.reduce(1)
        # Constants of known layout, made once: the layout of each literal would be a puzzle of its own to lowering.
        self.zero = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)
        self.log2e = plgpu.layout_cast(jnp.full((rows,), math.log2(math.e), jnp.float32), self.per_row)

    def merge(self) -> None:
        (self._in_a_loop if self.cfg.looped else self._unrolled)()

    def _unrolled(self) -> None:
        cfg = self.cfg
        logs = [self._log(n) for n in range(cfg.chunks)]
        groups = [range(n, min(n + cfg.ahead, cfg.chunks)) for n in range(0, cfg.chunks, cfg.ahead)]
        loaded = [self._load(group) for group in groups[:2]]
        top = _finite(functools.reduce(jnp.maximum, logs))
        weights = [self._weight(log, top) for log in logs]
        total = functools.reduce(jnp.add, weights)
        self._store_lse(top, total)  # while the rows are on their way
        acc = self.zero
        for g, group in enumerate(groups):
            for n, x in zip(group, loaded[g]):
                acc = self._add(acc, x, weights[n])
            loaded += [self._load(following) for following in groups[g + 2 : g + 3]]
        self._store(acc, total)

    def _in_a_loop(self) -> None:
        cfg = self.cfg

        def over_chunks(step: Callable[[list[Any], Any], Any], size: int, carry: Any) -> Any:
            """`step(chunk numbers, carry)` over groups of `size` chunks."""
            several = lambda first, count: [first + n for n in range(count)]  # noqa: E731
            done = cfg.chunks // size
            carry = _compat.loop(0, done, lambda n, carry: step(several(n * size, size), carry), carry)
            rest = cfg.chunks - done * size
            return step(several(done * size, rest), carry) if rest else carry

        def highest(numbers: list[Any], top: Any) -> Any:
            return functools.reduce(jnp.maximum, [self._log(n) for n in numbers], top)

        def add(numbers: list[Any], carry: tuple[Any, Any]) -> tuple[Any, Any]:
            acc, total = carry
            logs, values = [self._log(n) for n in numbers], self._load(numbers)
            for log, x in zip(logs, values):
                weight = self._weight(log, top)
                acc, total = self._add(acc, x, weight), total + weight
            return acc, total

        top = _finite(over_chunks(highest, LOADS, self._log(0)))
        nothing = plgpu.layout_cast(jnp.zeros(self.shape[:1], jnp.float32), self.per_row)
        acc, total = over_chunks(add, cfg.ahead, (self.zero, nothing))
        self._store(acc, total)
        self._store_lse(top, total)

    def _log(self, n: Any) -> Any:
        """A chunk's LSEs of these rows, in the widest dtype of all."""
        x = plgpu.load(self.block.chunk_lse(n, self.lse_place), optimized=False)
        if "float64" not in self.cfg.lse_dtypes:
            return x.astype(jnp.float32)
        with jax.enable_x64(True):
            return x.astype(jnp.float64)

    def _load(self, numbers: Any) -> list[Any]:
        return [plgpu.load(self.block.chunk(n, self.place), optimized=False) for n in numbers]

    def _weight(self, log: Any, top: Any) -> Any:
        return jnp.exp2((log - top).astype(jnp.float32) * self.log2e)

    def _add(self, acc: Any, x: Any, weight: Any) -> Any:
        """acc + weight x; what has no weight may hold anything."""
        weight = self._over_columns(weight)
        return acc + weight * jnp.where(weight == self.zero, self.zero, x.astype(jnp.float32))

    def _over_columns(self, x: Any) -> Any:
        return lax.broadcast_in_dim(x, self.shape, [0])

    def _store(self, acc: Any, total: Any) -> None:
        share = 1 / jnp.where(total == 0, 1, total)
        out = acc * self._over_columns(share)
        _compat.store(self.block.out.at[self.place], out.astype(self.cfg.out_dtype))

    def _store_lse(self, top: Any, total: Any) -> None:
        if self.block.lse is None:
            return
        with jax.enable_x64(True):
            value = top.astype(jnp.float64) + jnp.log(jnp.where(total == 0, 1, total).astype(jnp.float64))
            value = jnp.where(total == 0, -math.inf, value).astype(self.cfg.lse_dtype)
            _compat.store(self.block.lse.at[self.lse_place], value)


def _finite(top: Any) -> Any:
    """A maximum to be subtracted: 0 where there is none."""
    return jnp.where(top == -math.inf, jnp.zeros_like(top), top)
