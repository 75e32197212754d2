"""Joins the partial results of `decode`: one block a query row, pieces added in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat
from .lse import UNSEEN, LsePlace
from .work import SplitPolicy

AT_ONCE = 4
"""Accumulators in flight; pitches of the statistics are a multiple."""
WIDTH = 128
"""Elements that a warpgroup handles at once, one a thread: the accumulators' row pitch is a multiple."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """Static parameters; as in `Decode`. (accumulators, maxima, sums[, count]) -> out [tokens * heads * D], lse."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    out_dtype: str
    lse: LsePlace
    policy: SplitPolicy
    counted: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        rows = self.tokens * self.heads
        return [jax.ShapeDtypeStruct((rows * self.head_dim,), self.out_dtype), self.lse.out_type(rows)]

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: (accumulators, maxima, sums[, count]) -> `out_types`."""
        pitch, width = self.policy.stats_pitch(self.tokens), max(self.head_dim, WIDTH)
        strided = plgpu.Layout.WG_STRIDED((width,), width // WIDTH)
        stats_layout = plgpu.Layout.WG_STRIDED((pitch,), pitch // WIDTH)

        def body(accumulators: Any, maxima: Any, sums: Any, *rest: Any) -> None:
            *count, out, lse, staged, weights, totals = rest
            tokens = count[0][0] if self.counted else jnp.int32(self.tokens)
            pieces = jnp.int32(self.policy.count(tokens if self.counted else self.tokens))
            row = lax.axis_index("block")
            token, head = lax.div(row, jnp.int32(self.heads)), lax.rem(row, jnp.int32(self.heads))
            kv_head, g = lax.div(head, jnp.int32(self.group)), lax.rem(head, jnp.int32(self.group))

            def part(s: Any) -> jax.Array:
                """The accumulator of piece s; the last one's again beyond it, for loads must stay in bounds."""
                place = (token * pieces + jnp.minimum(s, pieces - 1), kv_head, g)
                return plgpu.load(accumulators.at[place], layout=strided, optimized=False)

            @pl.when(token < tokens)
            def _() -> None:
                m, l = (
                    plgpu.load(x.at[pl.ds(row * pitch, pitch)], layout=stats_layout, optimized=False)
                    for x in (maxima, sums)
                )
                real = plgpu.broadcasted_iota(jnp.int32, (pitch,), 0, layout=stats_layout) < pieces
                m, l = jnp.where(real, m, UNSEEN), jnp.where(real, l, 0.0)
                top = m.max()
                # A piece without keys has maximum UNSEEN, sum 0 and accumulator 0.
                weight = jnp.where(l > 0, jnp.exp2(m - top), 0.0)
                weights[...], totals[...] = weight, l * weight
                plgpu.commit_smem()

                def add(n: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                    acc, total = carry
                    several = [n * AT_ONCE + k for k in range(AT_ONCE)]
                    parts = [part(s) for s in several]
                    for s, x in zip(several, parts):
                        acc, total = acc + x * weights[s], total + totals[s]
                    return acc, total

                zero = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), strided)
                steps = lax.div(pieces + (AT_ONCE - 1), jnp.int32(AT_ONCE))
                acc, total = lax.fori_loop(0, steps, add, (zero, jnp.float32(0)))
                staged[...] = (acc / jnp.where(total > 0, total, 1)).astype(self.out_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(0, self.head_dim)], out.at[pl.ds(row * self.head_dim, self.head_dim)]
                )
                self.lse.store(lse, token, head, tokens, top, total)
                plgpu.wait_smem_to_gmem(0)

        stats = plgpu.SMEM((pitch,), jnp.float32)
        return _compat.kernel(
            body,
            out_type=self.out_types,
            scratch_types=[plgpu.SMEM((width,), self.out_dtype), stats, stats],
            blocks=self.tokens * self.heads,
            warpgroups=1,
            interpret=interpret,
            detect_races=detect_races,
        )
