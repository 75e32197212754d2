"""Joins the partial results of `decode` (`partials`), in order; rows that decode finished are left as they are."""

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

from . import _compat
from .lse import UNSEEN, LsePlace
from .partials import Partials
from .rows import with_sink
from .work import CHUNK

AT_ONCE = 16
"""Accumulators in flight."""
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
        return self.partials.work.tokens * self.heads

    @property
    def _sharing(self) -> int:
        return min(self.partials.rows, MOST_BLOCKS_PER_RECORD)

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: `reads` -> `writes`; out [rows, Dv] and lse are written in place."""
        scratch = {
            "staged": plgpu.SMEM((self.partials.width,), self.out_dtype),
            "weights": plgpu.SMEM((CHUNK,), jnp.float32),
            "totals": plgpu.SMEM((CHUNK,), jnp.float32),
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
            row, g = lax.div(block, jnp.int32(partials.group)), lax.rem(block, jnp.int32(partials.group))
            token, head = lax.div(row, jnp.int32(work.kv_heads)), lax.rem(row, jnp.int32(work.kv_heads))

            @pl.when(token < tokens)
            def _() -> None:
                record = row * work.tiling.parts + lax.div(g, jnp.int32(work.tiling.heads))
                parts = given["records"][record, 0]
                merge = lambda: self._row(given, smem, row * partials.most, g, parts, token, head, g, tokens)  # noqa: E731
                pl.when(parts > 1)(merge)

            return
        place, first = lax.div(block, jnp.int32(self._sharing)), lax.rem(block, jnp.int32(self._sharing))
        parts = given["records"][place, 0]

        @pl.when(parts > 1)
        def _() -> None:
            token, count, head, g = (given["records"][place, n] for n in (1, 2, 3, 4))
            heads = work.tiling.heads

            def one(n: Any, _: None) -> None:
                r = first + n * self._sharing
                t, h = lax.div(r, jnp.int32(heads)), lax.rem(r, jnp.int32(heads))
                self._row(given, smem, place, r, parts, token + t, head, g + h, tokens)

            lax.fori_loop(0, lax.div(count * heads - first + (self._sharing - 1), jnp.int32(self._sharing)), one, None)

    def _row(
        self, given: Any, smem: Any, place: Any, row: Any, parts: Any, token: Any, head: Any, g: Any, tokens: Any
    ) -> None:
        """Merge one query head's row: its parts' places begin at `place`."""
        partials, stats = self.partials, given["stats"]
        accumulators, heads = given["accumulators"], self.heads
        layout = plgpu.Layout.WG_STRIDED((CHUNK,), 1)
        wide = plgpu.Layout.WG_STRIDED((partials.width,), partials.width // CHUNK)
        behind = partials.parts(place, jnp.int32(1)) - 1  # the places of parts from the second on, less their numbers

        def chunk(c: Any) -> tuple[Any, Any]:
            """(maxima, sums) of parts c * CHUNK and on; a part without keys has maximum UNSEEN and sum 0."""
            number = c * CHUNK + plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=layout)
            found = []
            for n, empty in ((0, UNSEEN), (1, 0.0)):
                x = plgpu.load(stats.at[n, row, pl.ds(behind + c * CHUNK, CHUNK)], layout=layout, optimized=False)
                x = jnp.where(number == 0, stats[n, row, place], x)
                found.append(jnp.where(number < parts, x, empty))
            return found[0], found[1]

        def load(first: Any) -> tuple[Any, ...]:
            """AT_ONCE accumulators; the last part's again beyond it, with weight 0: loads stay in bounds."""
            places = [partials.parts(place, jnp.minimum(first + k, parts - 1)) for k in range(AT_ONCE)]
            return tuple(plgpu.load(accumulators.at[p, row], layout=wide, optimized=False) for p in places)

        def weigh(m: Any, l: Any) -> None:
            weight = jnp.where(l == 0, 0.0, jnp.exp2(m - top))
            smem["weights"][...], smem["totals"][...] = weight, l * weight
            plgpu.commit_smem()

        def add(at: Any, loaded: tuple[Any, ...], carry: tuple[Any, Any]) -> tuple[Any, Any]:
            acc, total = carry
            for k, x in enumerate(loaded):
                acc, total = acc + x * smem["weights"][at + k], total + smem["totals"][at + k]
            return acc, total

        def rest(c: Any, skip: int, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            """The parts of chunk c behind its first `skip` groups."""
            steps = lax.div(jnp.minimum(parts - c * CHUNK, CHUNK) + (AT_ONCE - 1), jnp.int32(AT_ONCE))
            one = lambda n, carry: add(n * AT_ONCE, load(c * CHUNK + n * AT_ONCE), carry)  # noqa: E731
            return lax.fori_loop(skip, steps, one, carry)

        # Most rows have few parts: the first ones' accumulators are on their way while the weights are formed.
        m, l = chunk(jnp.int32(0))
        loaded = load(jnp.int32(0))
        chunks = lax.div(parts + (CHUNK - 1), jnp.int32(CHUNK))
        top = lax.fori_loop(1, chunks, lambda c, top: jnp.maximum(top, chunk(c)[0].max()), m.max())
        weigh(m, l)
        zero = plgpu.layout_cast(jnp.zeros((partials.width,), jnp.float32), wide)
        carry = rest(jnp.int32(0), 1, add(jnp.int32(0), loaded, (zero, jnp.float32(0))))

        def join(c: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            weigh(*chunk(c))
            return rest(c, 0, carry)

        acc, total = lax.fori_loop(1, chunks, join, carry)
        if self.sinks:
            sink = given["sinks"][head, g].astype(jnp.float32) * math.log2(math.e)
            (acc,), top, total = with_sink((acc,), top, total, sink)
        smem["staged"][...] = (acc / jnp.where(total > 0, total, 1)).astype(self.out_dtype)
        # As a vector of equal rows: float64 arithmetic is one text for decode and for this.
        smem["lse_rows"][...] = self.lse.value(*(jnp.zeros((CHUNK,), jnp.float32) + x for x in (top, total)))
        plgpu.commit_smem()
        query_head = head * partials.group + g
        target = given["out"].at[token * heads + query_head]
        plgpu.copy_smem_to_gmem(smem["staged"].at[pl.ds(0, partials.value_dim)], target)
        given["lse"][self.lse.place(token, query_head, tokens)] = smem["lse_rows"][0]
        plgpu.wait_smem_to_gmem(0)
