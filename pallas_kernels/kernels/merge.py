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

AT_ONCE, FEW = 4, 2
"""Accumulators in flight, and parts that most rows have at most: no more are loaded of those. More in flight take so
many registers that few blocks fit on an SM. Merge of B32 Mk8192 with (8, 4) 4.1 us, with (4, 2) 2.6; of 16 query tokens
15.8 and 10.5; of B1 Mk8192, whose rows have 17 parts, 3.0 and 3.4 (2026-12-01)."""
ROWS_AT_ONCE = 4
"""Heads of a token that a block merges at once, where their outputs lie one behind the other: its time is latency."""
MOST_BLOCKS_PER_RECORD = 16
"""Blocks that share the rows of one record, under the automatic policy."""


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
    def blocks(self) -> int:
        if self.partials.automatic:
            return self.partials.records * self._sharing
        return self.partials.work.tokens * self.heads // self.rows

    @property
    def _sharing(self) -> int:
        return min(self.partials.rows // self.rows, MOST_BLOCKS_PER_RECORD)

    @property
    def rows(self) -> int:
        """Rows that a block merges at once."""
        partials = self.partials
        whole = partials.width == partials.value_dim <= 256 and partials.work.tiling.heads % ROWS_AT_ONCE == 0
        return ROWS_AT_ONCE if whole else 1

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
            blocks=self.blocks,
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
        block = lax.axis_index("block")
        if not partials.automatic:
            each = partials.group // self.rows
            row, g = lax.div(block, jnp.int32(each)), lax.rem(block, jnp.int32(each)) * self.rows
            token, head = lax.div(row, jnp.int32(work.kv_heads)), lax.rem(row, jnp.int32(work.kv_heads))

            @pl.when(token < tokens)
            def _() -> None:
                record = partials.record(token, head, g)
                parts, t = given["records"][record, 0], given["records"][record, 1]
                first = (row * partials.most, g)
                stats = (
                    partials.record(token - t, head, g) * partials.most,
                    t * work.tiling.pitch + lax.rem(g, jnp.int32(work.tiling.heads)),
                )
                pl.when(parts > 1)(lambda: self._rows(given, smem, first, stats, parts, token, head, g, tokens))

            return
        place, first = lax.div(block, jnp.int32(self._sharing)), lax.rem(block, jnp.int32(self._sharing))
        parts, token, count, head, g = (given["records"][place, n] for n in range(5))
        heads, step = work.tiling.heads, self._sharing * self.rows

        def some(n: Any, _: None) -> None:
            r = first * self.rows + n * step
            t, h = lax.div(r, jnp.int32(heads)), lax.rem(r, jnp.int32(heads))
            at = (place, t * work.tiling.pitch + h)
            self._rows(given, smem, (place, r), at, parts, token + t, head, g + h, tokens)

        @pl.when(parts > 1)
        def _() -> None:
            left = count * heads - first * self.rows
            lax.fori_loop(0, lax.div(left + (step - 1), jnp.int32(step)), some, None)

    def _rows(
        self, given: Any, smem: Any, first: Any, stats: Any, parts: Any, token: Any, head: Any, g: Any, tokens: Any
    ) -> None:
        """Merge the rows of `rows` query heads from g on. first, stats: (place, row) of the first part's accumulators
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

        def join(at_once: int, n: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            """The next parts; the last part's again beyond it, with weight 0: loads stay in bounds."""
            acc, top, total = carry
            numbers = [n * at_once + k for k in range(at_once)]
            places = [jnp.minimum(k, parts - 1) for k in numbers]
            loaded = []
            for k in places:
                at = given["accumulators"].at[partials.parts(first[0], k), pl.ds(first[1], count)]
                loaded.append(plgpu.load(at, layout=wide, optimized=False))
            maxima, sums = (
                [[given["stats"][partials.parts(stats[0], k), x, stats[1] + r] for r in range(count)] for k in places]
                for x in (0, 1)
            )
            sums = [[jnp.where(k < parts, x, 0.0) for x in of_part] for k, of_part in zip(numbers, sums)]
            # A part without keys has maximum UNSEEN, which is finite, and sum 0.
            new = [functools.reduce(jnp.maximum, of_row) for of_row in zip(top, *maxima)]
            rescale = [jnp.exp2(x - y) for x, y in zip(top, new)]
            acc, total = acc * spread(rescale), [x * y for x, y in zip(total, rescale)]
            for x, m, l in zip(loaded, maxima, sums):
                weights = [jnp.where(b == 0, 0.0, jnp.exp2(a - y)) for a, b, y in zip(m, l, new)]
                acc, total = acc + x * spread(weights), [z + b * w for z, b, w in zip(total, l, weights)]
            return acc, tuple(new), tuple(total)

        def many(carry: Any) -> Any:
            steps = lax.div(parts + (AT_ONCE - 1), jnp.int32(AT_ONCE))
            return lax.fori_loop(0, steps, functools.partial(join, AT_ONCE), carry)

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), wide)
        none = (zero, (jnp.float32(UNSEEN),) * count, (jnp.float32(0),) * count)
        acc, top, total = lax.cond(parts <= FEW, functools.partial(join, FEW, parts * 0), many, none)
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
