"""An array bias in decode: copied with each tile of keys, added to its scores. Nothing of it is ever broadcast in
memory: of an axis of size 1, index 0 is read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _compat
from .work import ROWS, Item, Tiling

LEAST = -2.9e38
"""In units of log 2, above `lse.UNSEEN`: lower scores are this, so that a finite bias, however low (the lowest number
of float32 is a common one), masks nothing by overflow."""
UNROLLED = 8
PER_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Bias:
    """Static parameters. bias [B|1, kv_heads|1, group|1, Mq|1, Mk|1].

    A query tile sees `heads` x `tokens` different rows of it, fewer than its own where an axis is broadcast. They are
    copied by one copy a tile of keys, which counts as one of the keys' own; a row that is one number is read directly.
    """

    shape: tuple[int, ...]
    dtype: str
    tiling: Tiling
    key_tile: int

    @staticmethod
    def refused(shape: tuple[int, ...], dtype: str) -> str | None:
        """Why a bias is not served, or None."""
        if dtype == "float64":
            return "a float64 bias (accepted: float32, bfloat16, float16)"
        if shape[4] > 1 and shape[4] * jnp.dtype(dtype).itemsize % 16:
            return f"a bias of {shape[4]} keys in {dtype} (accepted: rows of a multiple of 16 bytes, or of one number)"
        return None

    @property
    def heads(self) -> int:
        return self.tiling.heads if self.shape[2] > 1 else 1

    @property
    def tokens(self) -> int:
        return self.tiling.tokens if self.shape[3] > 1 else 1

    @property
    def by_key(self) -> bool:
        return self.shape[4] > 1

    @property
    def copies(self) -> int:
        return int(self.by_key)

    def scratch(self, shares: int, stages: int, computing: int) -> Any:
        if not self.by_key:
            return plgpu.SMEM((shares, computing, ROWS), jnp.float32)
        # A copy's target lies at a multiple of 128 bytes.
        whole = max(1, 128 // (self.tokens * self.key_tile * jnp.dtype(self.dtype).itemsize))
        heads = -(-self.heads // whole) * whole
        return plgpu.SMEM((shares, stages, heads, self.tokens, self.key_tile), self.dtype)

    # ------------------------------------------------------------------------------------- at tracing time

    def _start(self, item: Item, token: Any) -> list[Any]:
        """Where a tile's rows begin: on each axis but the keys', and 0 where it is broadcast."""
        start = (item.b, item.head, item.g, token)
        return [x if size > 1 else x * 0 for x, size in zip(start, self.shape)]  # traced: a constant is no index

    def copy(self, item: Item, base: Any, source: Any, target: Any, slot: Any, filled: Any) -> None:
        """The rows of an item at the keys [base, base + key_tile); what lies beyond the array is filled with zeros."""
        if self.by_key:
            b, head, g, i = self._start(item, item.i)
            rows = source.at[b, head, pl.ds(g, self.heads), pl.ds(i, self.tokens), pl.ds(base, self.key_tile)]
            plgpu.copy_gmem_to_smem(rows, target.at[slot, pl.ds(0, self.heads)], filled.at[slot])

    def prepare(self, item: Item, source: Any, target: Any) -> None:
        """Before an item's tiles: the numbers of a bias that has one a row, each to its row of the query tile."""
        if self.by_key:
            return
        for t in range(self.tiling.tokens):
            b, head, g, i = self._start(item, item.i + jnp.minimum(t, item.tokens - 1))

            def one(h: Any, _: None, t: int = t, at: Any = (b, head, g, i)) -> None:
                b, head, g, i = at
                number = source[b, head, g + (h if self.shape[2] > 1 else h * 0), i, h * 0]
                target[t * self.tiling.pitch + h] = number.astype(jnp.float32)

            _compat.loop(0, self.tiling.heads, one, None)
        plgpu.commit_smem()

    def add(self, s: jax.Array, unit: float, rows: Any) -> jax.Array:
        """Scores, of a unit, and their bias -> in units of log 2. rows: what was copied, or prepared."""
        bias = self._by_key(s, rows) if self.by_key else plgpu.load(rows, layout=PER_ROW, optimized=False)
        bias = jnp.where(bias > -jnp.inf, jnp.maximum(bias * math.log2(math.e), LEAST), bias)
        return s * unit + (bias if self.by_key else lax.broadcast_in_dim(bias, s.shape, [0]))

    def _by_key(self, s: jax.Array, rows: Any) -> jax.Array:
        """[ROWS, key_tile]: the bias of each row of the query tile, chosen from those that differ."""
        per_key = plgpu.Layout.WGMMA.reduce(0)

        def load(h: Any, t: Any) -> jax.Array:
            row = plgpu.load(rows.at[h, t], layout=per_key, optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(row, s.shape, [1])

        if self.heads * self.tokens == 1:
            return load(0, 0)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
        pitch, mine = jnp.full_like(row, self.tiling.pitch), jnp.zeros_like(row)
        if self.heads > 1:
            mine = lax.rem(row, pitch) * self.tokens
        if self.tokens > 1:
            mine = mine + lax.div(row, pitch)
        mine = lax.broadcast_in_dim(mine, s.shape, [0])

        def choose(n: Any, bias: jax.Array) -> jax.Array:
            h, t = lax.div(n, jnp.int32(self.tokens)), lax.rem(n, jnp.int32(self.tokens))
            return jnp.where(mine == n, load(h, t), bias)

        count = self.heads * self.tokens
        zero = plgpu.layout_cast(jnp.zeros(s.shape, jnp.float32), plgpu.Layout.WGMMA)
        return _compat.loop(0, count, choose, zero, unroll=count <= UNROLLED)
