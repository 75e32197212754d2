"""Split-K decode: query tiles against their sequences' keys, read once.

One warpgroup copies key and value tiles into shared memory, several tiles ahead (`copying`); another one (two, for
values wider than 256) multiplies and keeps the online softmax (`rows`). They have an equal share of all tiles (`work`);
blocks are persistent, and one may have two shares. Rows that one share sees whole are final; partial results of the
others go to a workspace (`partials`) for `merge`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

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

REGISTERS = 512
"""Of one thread of each warpgroup together."""
COPYING_REGISTERS, GATHERING_REGISTERS = 48, 88
"""What a copying one keeps where a block has three or four warpgroups. Bytes a thread that spilled, lowered as for
torch (ptxas 13.0, 2026-12-01), at head_dim 128: of pages of 1 208 with 40, none with 88; of other storages 20 with 40,
with 48 none but for 64 query heads (24) and one of batch 32 (36). At head_dim 512 2.5 KB where three warpgroups had as
many each; so 0.4 to 1.6 KB."""


def computing_warpgroups(value_dim: int) -> int:
    """Of a share. An accumulator of 64 x 256 numbers is what one has registers for."""
    return 1 if value_dim <= 256 else 2


class Slots:
    """The barriers that one share has of an array of them."""

    def __init__(self, ref: Any, first: Any) -> None:
        self._ref, self._first = ref, first

    @property
    def at(self) -> Slots:
        return self

    def __getitem__(self, n: Any) -> Any:
        return self._ref.at[self._first + n]


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
    def shares(self) -> int:
        """Of a block."""
        return self.work.shares // self.work.blocks

    @property
    def computing(self) -> int:
        """Computing warpgroups of a share."""
        return computing_warpgroups(self.value_dim)

    @property
    def warpgroups(self) -> int:
        """Of a block."""
        return self.shares * (self.computing + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a copying and a computing thread, of a block of more than two warpgroups. It has those that it was
        launched with, a multiple of 8 each: more would be waited for for ever."""
        launched = self.warpgroups * (REGISTERS // self.warpgroups // 8 * 8)
        copying = GATHERING_REGISTERS if self.storage.gathered else COPYING_REGISTERS
        return copying, (launched // self.shares - copying) // self.computing // 8 * 8

    @property
    def columns(self) -> int:
        """Columns of the output that are staged at once: as many as the values' swizzle has."""
        return self.swizzle("v") // 2

    @property
    def dims(self) -> dict[str, int]:
        return {"k": self.head_dim, "v": self.value_dim}

    def swizzle(self, name: str) -> int:
        """Of the tiles of keys or of values, which are multiplied in steps of a swizzle's keys."""
        return _compat.swizzle(2 * self.dims[name], 128 if name == "k" else 2 * self.work.key_tile)

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
        scratch = {**self._of_block(), **self._of_share(interpret)}
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
            warpgroups=self.warpgroups,
            interpret=interpret,
            detect_races=detect_races,
        )

    def _of_block(self) -> dict[str, Any]:
        """Shared memory for the plan, which the shares of a block have in common."""
        return {**self.work.scratch(), "planned": plgpu.Barrier()} if self.work.planned else {}

    def _of_share(self, interpret: bool) -> dict[str, Any]:
        """Shared memory of each share; the leading axis is the share's; the barriers of one follow another's."""
        storage, tile, shares = self.storage, self.work.key_tile, self.shares
        found: dict[str, Any] = {"q": _compat.tiled((shares, ROWS, self.head_dim), self.dtype)}
        for name, dim in self.dims.items():
            if storage.restaged:
                found[f"{name}_raw"] = _compat.by_rows((shares, self.stages, tile, dim), self.dtype)
                found[name] = _compat.tiled((shares, tile, dim), self.dtype, self.swizzle(name))
            else:
                found[name] = _compat.tiled((shares, self.stages, tile, dim), self.dtype, self.swizzle(name))
        if self.bias:
            found["bias"] = self.bias.scratch(shares, self.stages, self.computing)
        if storage.gathered:
            found["pages"] = plgpu.SMEM((shares, CHUNK), jnp.int32)
        if not self.q_direct:
            found["q_raw"] = plgpu.SMEM((shares, ROWS, self.head_dim), self.dtype)
        for name in {self.staging_of_final, "partial"} if self.split else {self.staging_of_final}:
            dtype = self.out_dtype if name == "final" else jnp.float32
            found[name] = plgpu.SMEM((shares, self.computing, ROWS, self.columns), dtype)
        if self.sinks:
            found["sinks"] = plgpu.SMEM((shares, self.computing, ROWS), jnp.float32)
        if interpret:
            found["p"] = _compat.tiled((shares, self.computing, ROWS, tile), self.dtype)
        found["lse_rows"] = plgpu.SMEM((shares, CHUNK), self.lse.dtype)
        found["stats"] = plgpu.SMEM((shares, 2, ROWS), jnp.float32)
        found["final_stats"] = plgpu.SMEM((shares, 2, CHUNK), jnp.float32)
        for name, (number, arrivals) in self._barriers(interpret).items():
            found[name] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=shares * number)
        return found

    def _barriers(self, interpret: bool) -> dict[str, tuple[int, int]]:
        """(number, arrivals) of each share's barriers."""
        found = {"q_filled": (1, 1), "q_freed": (1, self.computing)}
        for name in ("k", "v"):
            copies = self.storage.arrivals(interpret) + (self.bias.copies if self.bias and name == "k" else 0)
            found[f"{name}_filled"] = (self.stages, copies)
            found[f"{name}_freed"] = (self.stages, self.computing)
        if self.work.tiling.tokens > 1:
            found["q_rest"] = (1, self.work.tiling.tokens - 1)
        return found

    @property
    def shared_memory(self) -> int:
        """Bytes of a block, barriers and reductions included."""
        total = 4096
        for kind in {**self._of_block(), **self._of_share(interpret=False)}.values():
            if not isinstance(kind, plgpu.Barrier):
                total += -(-math.prod(kind.shape) * jnp.dtype(kind.dtype).itemsize // 1024) * 1024
        return total

    @property
    def staging_of_final(self) -> str:
        """Final results are staged where partial ones are if their dtype is the same."""
        return "partial" if self.split and self.out_dtype == "float32" else "final"

    def _block(self, given: dict[str, Any], written: dict[str, Any], smem: dict[str, Any], interpret: bool) -> None:
        """What one block does, at tracing time. Warpgroups: the first computing one of each share, any second ones,
        the copying ones."""
        warpgroup = lax.axis_index("wg")
        which = lax.rem(warpgroup, jnp.int32(self.shares))
        number = which * self.work.blocks + lax.axis_index("block")

        barriers = self._barriers(interpret)

        def of_share(name: str, ref: Any) -> Any:
            if name in self._of_block():
                return ref
            return Slots(ref, which * barriers[name][0]) if name in barriers else ref.at[which]

        smem = {name: of_share(name, ref) for name, ref in smem.items()}
        line = Line(self.work, given, smem, number)

        copying, computing = self.registers

        def registers(n: int, action: Literal["increase", "decrease"]) -> None:
            if self.warpgroups > 2 and not interpret:
                plgpu.set_max_registers(n, action=action)

        if self.work.planned:

            @pl.when(warpgroup == 0)
            def _() -> None:
                line.plan()
                plgpu.barrier_arrive(smem["planned"])

            pl.when(warpgroup > 0)(lambda: plgpu.barrier_wait(smem["planned"]))

        for n in range(self.computing):

            @pl.when(lax.div(warpgroup, jnp.int32(self.shares)) == n)
            def compute(n: int = n) -> None:
                registers(computing, "increase")
                Computing(self, line, given, written, smem, n).run()

        @pl.when(lax.div(warpgroup, jnp.int32(self.shares)) == self.computing)
        def copy() -> None:
            registers(copying, "decrease")
            Copying(self, line, given, smem, interpret).run()
