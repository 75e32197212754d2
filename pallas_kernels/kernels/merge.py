"""Joins the partial results of `decode` (`partials`), in order; rows that decode finished are left as they are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat
from .lse import UNSEEN, LsePlace
from .partials import Partials
from .rows import with_sink
from .work import CHUNK

FEW = 2
"""Parts that most rows have at most: no more are loaded of those."""
FEW_ROWS = 64
"""A call of fewer rows has many parts of each (B1 Mk8192: 17) and few blocks: a block then loads more parts at once, of
one query head, else fewer, of several heads, so that its registers let many blocks be on an SM. Merge of B32 Mk8192
with 8 accumulators in flight 4.1 us, with 4 2.6, with 4 of 4 heads 2.5; of B1 Mk8192 3.0, 3.4 and 4.1 (2026-12-01)."""
MOST_BLOCKS = 2112
"""Further rows are joined by the same blocks."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """Static parameters; as in `Decode`."""

    partials: Partials
    out_dtype: str
    lse: LsePlace
    sinks: bool

    @property
    def reads(self) -> tuple[str, ...]:
        counted = ("count",) if self.partials.work.counted else ()
        return (*self.partials.types, *(("sinks",) if self.sinks else ()), *counted, "out", "lse")

    @property
    def writes(self) -> tuple[str, ...]:
        return ("out", "lse")

    @property
    def heads(self) -> int:
        return self.partials.work.kv_heads * self.partials.group

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        rows = self.partials.work.tokens * self.heads
        return [jax.ShapeDtypeStruct((rows, self.partials.value_dim), self.out_dtype), self.lse.out_type(rows)]

    @property
    def units(self) -> int:
        return self.partials.work.tokens * self.heads // self.rows

    @property
    def _many_parts(self) -> bool:
        return self.partials.records <= FEW_ROWS

    @property
    def rows(self) -> int:
        """Query heads that a block joins at once: those whose outputs lie one behind the other."""
        partials = self.partials
        whole = partials.width == partials.value_dim <= 256 and partials.work.tiling.heads % 4 == 0
        return 4 if whole and not self._many_parts else 1

    @property
    def at_once(self) -> int:
        """Accumulators in flight, for each row. Of four rows, three are in 114 registers (four in 141), so that four
        blocks are on an SM (ptxas 13.0, 2026-12-01)."""
        return min(24 if self._many_parts else 3 if self.rows > 1 else 4, self.partials.most_parts)

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: `reads` -> `writes`; out [rows, Dv] and lse are written in place."""
        scratch = {
            "staged": plgpu.SMEM((self.rows, self.partials.width), self.out_dtype),
            "lse_rows": plgpu.SMEM((CHUNK,), self.lse.dtype),
        }

        def body(*refs: Any) -> None:
            given = dict(zip(self.reads, refs))
            self._block(given, dict(zip(scratch, refs[len(self.reads) :])))

        call = _compat.kernel(
            body,
            out_type=(),
            scratch_types=list(scratch.values()),
            blocks=min(self.units, MOST_BLOCKS),
            warpgroups=1,
            interpret=interpret,
            detect_races=detect_races,
        )

        def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            *rest, out, lse = inputs
            refs = [jax.new_ref(x) for x in (out.reshape(-1, self.partials.value_dim), lse)]
            call(*rest, *refs)
            return tuple(jax.freeze(ref) for ref in refs)

        return run

    # ----------------------------------------------------------------------------------- at tracing time

    def _block(self, given: dict[str, Any], smem: dict[str, Any]) -> None:
        work, partials = self.partials.work, self.partials
        tokens = given["count"][0] if work.counted else jnp.int32(work.tokens)
        each, block = partials.group // self.rows, lax.axis_index("block")

        def unit(n: Any) -> None:
            row, g = lax.div(n, jnp.int32(each)), lax.rem(n, jnp.int32(each)) * self.rows
            token, head = lax.div(row, jnp.int32(work.kv_heads)), lax.rem(row, jnp.int32(work.kv_heads))

            @pl.when(token < tokens)
            def _() -> None:
                parts, whereabouts = (given["records"][partials.record(token, head, g), n] for n in range(2))
                first = partials.first(whereabouts, token, head, g)
                pl.when(parts > 1)(lambda: self._rows(given, smem, first[:2], first[2:], parts, token, head, g, tokens))

        if self.units <= MOST_BLOCKS:
            unit(block)
            return
        rounds = lax.div(self.units - block + (MOST_BLOCKS - 1), jnp.int32(MOST_BLOCKS))
        _compat.loop(0, rounds, lambda n, _: unit(block + n * MOST_BLOCKS), None)

    def _rows(
        self, given: Any, smem: Any, first: Any, stats: Any, parts: Any, token: Any, head: Any, g: Any, tokens: Any
    ) -> None:
        """Join the rows of `rows` query heads from g on. first, stats: (place, row) of the first part's accumulators
        and statistics."""
        partials, heads, count = self.partials, self.heads, self.rows
        shape = (count, partials.width)
        wide = plgpu.Layout.WG_STRIDED(shape, min(4, math.prod(shape) // CHUNK))
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=wide)

        def spread(numbers: Any, index: Any = row) -> Any:
            """Each row its own of `rows` numbers."""
            found = jnp.zeros_like(index, jnp.float32) + numbers[0]
            for n, x in enumerate(numbers[1:], 1):
                found = jnp.where(index == n, x, found)
            return found

        def numbers(group: Any, at_once: int) -> list[Any]:
            """Parts of a group; the last one again beyond it: loads stay in bounds."""
            return [jnp.minimum(group * at_once + k, parts - 1) for k in range(at_once)]

        def statistic(which: int, k: Any) -> list[Any]:
            """The maxima (0) or sums (1) of part k."""
            return [given["stats"][partials.parts(stats[0], k), which, stats[1] + r] for r in range(count)]

        def load(group: Any, at_once: int) -> tuple[list[Any], ...]:
            found = numbers(group, at_once)
            at = (given["accumulators"].at[partials.parts(first[0], k), pl.ds(first[1], count)] for k in found)
            loaded = [plgpu.load(x, layout=wide, optimized=False) for x in at]
            return loaded, [statistic(0, k) for k in found], [statistic(1, k) for k in found]

        def highest(maxima: Any, top: Any) -> list[Any]:
            return [functools.reduce(jnp.maximum, of_row) for of_row in zip(top, *maxima)]

        def add(group: Any, loaded: Any, top: Any, carry: Any) -> tuple[Any, Any]:
            """One product and one sum a part, so that no compiler has a choice: bits do not depend on the groups."""
            acc, total = carry
            at_once = len(loaded[0])
            for n, (x, m, l) in enumerate(zip(*loaded)):
                some = group * at_once + n < parts
                l = [jnp.where(some, b, 0.0) for b in l]
                # A part without keys has maximum UNSEEN, which is finite, and sum 0.
                weights = [jnp.where(b == 0, 0.0, jnp.exp2(a - y)) for a, b, y in zip(m, l, top)]
                acc, total = acc + x * spread(weights), tuple(z + b * w for z, b, w in zip(total, l, weights))
            return acc, total

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), wide)
        none, lowest = (zero, (jnp.float32(0),) * count), (jnp.float32(UNSEEN),) * count

        def few() -> Any:
            loaded = load(parts * 0, FEW)
            top = highest(loaded[1], lowest)
            return *add(parts * 0, loaded, top, none), tuple(top)

        def many() -> Any:
            groups = lax.div(parts + (self.at_once - 1), jnp.int32(self.at_once))
            loaded = load(parts * 0, self.at_once)

            def rise(n: Any, top: Any) -> Any:
                return tuple(highest([statistic(0, k) for k in numbers(n, self.at_once)], top))

            top = _compat.loop(1, groups, rise, tuple(highest(loaded[1], lowest)))
            carry = add(parts * 0, loaded, top, none)
            more = lambda n, carry: add(n, load(n, self.at_once), top, carry)  # noqa: E731
            return *_compat.loop(1, groups, more, carry), top

        acc, total, top = lax.cond(parts <= FEW, few, many) if self.at_once > FEW else many()
        if self.sinks:
            sinks = [given["sinks"][head, g + r].astype(jnp.float32) * math.log2(math.e) for r in range(count)]
            joined = [with_sink(m, l, sink) for m, l, sink in zip(top, total, sinks)]
            rescale, top, total = zip(*joined)
            acc = acc * spread(rescale)
        out = (acc / spread([jnp.where(x > 0, x, 1.0) for x in total])).astype(self.out_dtype)
        query_head = head * partials.group + g
        target = given["out"].at[pl.ds(token * heads + query_head, count)]
        staged = partials.width != partials.value_dim
        if staged:
            smem["staged"][...] = out
        else:
            _compat.store(target, out)
        # As a vector, a row a thread: float64 arithmetic is one text for decode and for this.
        one_each = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=plgpu.Layout.WG_STRIDED((CHUNK,), 1))
        smem["lse_rows"][...] = self.lse.value(spread(top, one_each), spread(total, one_each))
        plgpu.commit_smem()
        for r in range(count):
            given["lse"][self.lse.place(token, query_head + r, tokens)] = smem["lse_rows"][r]
        if staged:
            plgpu.copy_smem_to_gmem(smem["staged"].at[:, pl.ds(0, partials.value_dim)], target)
            plgpu.wait_smem_to_gmem(0)
