"""Split-K decode: query tiles against their sequences' keys, read once.

One warpgroup of a block copies key and value tiles into shared memory, several tiles ahead (`copying`); another one
(two, for values wider than 256) multiplies and keeps the online softmax (`rows`). Blocks are persistent, each with an
equal share of all tiles (`work`). Rows that one block sees whole are final; partial results of the others go to a
workspace (`partials`) for `merge`.
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

from . import _compat
from .bias import Bias
from .copying import Copying, Storage
from .lse import LsePlace
from .partials import Partials
from .rows import Computing
from .work import CHUNK, ROWS, Line, Work


def computing_warpgroups(value_dim: int) -> int:
    """An accumulator of 64 x 256 numbers is what one has registers for."""
    return 1 if value_dim <= 256 else 2


@dataclasses.dataclass(frozen=True)
class Decode:
    """Static parameters. Leading sizes (tokens, batch) are capacities where `work.counted`: the true numbers then come
    with the call, as `count` (of tokens) and `sequences`, int32 [1] each.

    q, out [tokens, kv_heads, group, D]; k, v as in `Storage`; q_start int32 [batch + 1], unless every sequence has
    `equal_queries`; k_len int32 [batch], unless every sequence has `equal_keys`; k_start int32 [batch];
    block_table int32 [batch, pages_per_row]; bias as in `Bias`; sinks [kv_heads, group].
    """

    work: Work
    group: int
    head_dim: int
    value_dim: int
    dtype: str
    out_dtype: str
    lse: LsePlace
    scale: float
    softcap: float | None
    bias: Bias | None
    sinks: bool
    storage: Storage
    split: bool
    """Whether rows may be shared, so that a merge follows."""
    partials: Partials
    stages: int
    """Key and value tiles in flight."""
    q_direct: bool
    """Whether queries are copied into the layout that `wgmma` reads (one token a tile, whose heads lie in eights)."""

    @property
    def q_slots(self) -> int:
        """Queries in flight."""
        return 2 if self.q_direct and self.head_dim <= 128 else 1

    @property
    def computing(self) -> int:
        return computing_warpgroups(self.value_dim)

    @property
    def columns(self) -> int:
        """Columns of the output that are staged at once."""
        return 128 if self.value_dim <= 128 else 64 if self.value_dim <= 256 else 32

    @property
    def dims(self) -> dict[str, int]:
        return {"k": self.head_dim, "v": self.value_dim}

    @property
    def reads(self) -> tuple[str, ...]:
        """The inputs' names, in order."""
        work = self.work
        wanted = {
            "q": True,
            "k": True,
            "v": True,
            "q_start": work.equal_queries is None,
            "k_start": self.storage.anywhere,
            "k_len": work.equal_keys is None,
            "block_table": self.storage.paged,
            "bias": self.bias is not None,
            "sinks": self.sinks,
            "count": work.counted,
            "sequences": work.counted and work.equal_queries is None,
        }
        return tuple(name for name, yes in wanted.items() if yes)

    @property
    def writes(self) -> tuple[str, ...]:
        return ("out", "lse", *(self.partials.types if self.split else ()))

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        rows = (self.work.tokens, self.work.kv_heads, self.group)
        out = jax.ShapeDtypeStruct((*rows, self.value_dim), self.out_dtype)
        return [out, self.lse.out_type(math.prod(rows)), *(self.partials.types.values() if self.split else ())]

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]:
        """The kernel: `reads` -> `writes`."""
        scratch = self.scratch(interpret)
        inputs, outputs = len(self.reads), len(self.writes)

        def body(*refs: Any) -> None:
            given = dict(zip(self.reads, refs[:inputs]))
            written = dict(zip(self.writes, refs[inputs : inputs + outputs]))
            smem = dict(zip(scratch, refs[inputs + outputs :]))
            self._block(given, written, smem, interpret)

        return _compat.kernel(
            body,
            out_type=self.out_types,
            scratch_types=list(scratch.values()),
            blocks=self.work.blocks,
            warpgroups=self.computing + 1,
            interpret=interpret,
            detect_races=detect_races,
        )

    def scratch(self, interpret: bool) -> dict[str, Any]:
        work, storage, tile = self.work, self.storage, self.work.key_tile
        found: dict[str, Any] = dict(work.scratch())
        found["q"] = _compat.tiled((self.q_slots, ROWS, self.head_dim), self.dtype)
        if not self.q_direct:
            found["q_raw"] = plgpu.SMEM((ROWS, self.head_dim), self.dtype)
        for name, dim in self.dims.items():
            most = 128 if name == "k" else 2 * tile  # values are multiplied in steps of a swizzle's keys
            if storage.restaged:
                # A copy's target lies at a multiple of 128 bytes.
                pitch = -(-dim // 64) * 64 if storage.paged else dim
                found[f"{name}_raw"] = _compat.by_rows((self.stages, tile, pitch), self.dtype, pitch == dim)
                found[name] = _compat.tiled((tile, dim), self.dtype, most)
            else:
                found[name] = _compat.tiled((self.stages, tile, dim), self.dtype, most)
            copies = self.storage.copies + (self.bias.copies if self.bias and name == "k" else 0)
            found[f"{name}_filled"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages)
            found[f"{name}_freed"] = plgpu.Barrier(num_arrivals=self.computing, num_barriers=self.stages)
        if self.bias:
            found |= self.bias.scratch(self.stages, self.computing)
        if storage.restaged and storage.paged:
            found["pages"] = plgpu.SMEM((CHUNK,), jnp.int32)
        found["q_filled"] = plgpu.Barrier(num_barriers=self.q_slots)
        if work.tiling.tokens > 1:
            found["q_rest"] = plgpu.Barrier(num_arrivals=work.tiling.tokens - 1)
        found["q_freed"] = plgpu.Barrier(num_arrivals=self.computing, num_barriers=self.q_slots)
        for n in range(self.computing):
            for name in {self.staging_of_final, "partial"} if self.split else {self.staging_of_final}:
                dtype = self.out_dtype if name == "final" else "float32"
                found[f"{name}{n}"] = plgpu.SMEM((ROWS, min(self.columns, self.value_dim)), dtype)
            if self.sinks:
                found[f"sinks{n}"] = plgpu.SMEM((ROWS,), jnp.float32)
            if interpret:
                found[f"p{n}"] = _compat.tiled((ROWS, tile), self.dtype)
        found["lse_rows"] = plgpu.SMEM((CHUNK,), self.lse.dtype)
        found["stats"] = plgpu.SMEM((2, CHUNK), jnp.float32)
        if work.planned:
            found["planned"] = plgpu.Barrier()
        return found

    @property
    def shared_memory(self) -> int:
        """Bytes of a block, barriers and reductions included."""
        total = 4096
        for kind in self.scratch(interpret=False).values():
            if isinstance(kind, plgpu.Barrier):
                continue
            total += -(-math.prod(kind.shape) * jnp.dtype(kind.dtype).itemsize // 1024) * 1024
        return total

    @property
    def staging_of_final(self) -> str:
        """Final results are staged where partial ones are if their dtype is the same."""
        return "partial" if self.split and self.out_dtype == "float32" else "final"

    def _block(self, given: dict[str, Any], written: dict[str, Any], smem: dict[str, Any], interpret: bool) -> None:
        """What one block does, at tracing time."""
        line = Line(self.work, given, smem)
        for n in range(self.computing):

            @pl.when(lax.axis_index("wg") == n)
            def compute(n: int = n) -> None:
                if n == 0 and self.work.planned:
                    line.plan()
                    plgpu.barrier_arrive(smem["planned"])
                elif self.work.planned:
                    plgpu.barrier_wait(smem["planned"])
                Computing(self, line, given, written, smem, n).run()

        @pl.when(lax.axis_index("wg") == self.computing)
        def copy() -> None:
            if self.work.planned:
                plgpu.barrier_wait(smem["planned"])
            Copying(self, line, given, smem, interpret).run()
