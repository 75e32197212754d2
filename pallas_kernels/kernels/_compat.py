"""Everything that depends on the jax version, or on running in Mosaic GPU's interpreter instead of on a card.

The interpreter has no register operands of `wgmma`, no accumulator initialised from registers and no register budget;
the kernels call the functions below for those and are otherwise one text for both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRETER_SMS = 4
"""The interpreter's made-up target: enough blocks to share work, few enough to be quick."""

_x64_lock = threading.RLock()


def kernel(
    body: Callable[..., None],
    *,
    out_type: Sequence[jax.ShapeDtypeStruct],
    scratch_types: Sequence[Any],
    blocks: int,
    warpgroups: int,
    interpret: bool,
    detect_races: bool = False,
    approx_math: bool = True,
    barriers: bool = True,
) -> Callable[..., tuple[jax.Array, ...]]:
    """`body(*inputs, *outputs, *scratch)` on a grid of `blocks` blocks ("block") of `warpgroups` warpgroups ("wg").

    barriers: around stores, which a body without shared memory can spare.
    """
    call = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=tuple(scratch_types),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=not barriers),
        interpret=plgpu.InterpretGPUParams(detect_races=detect_races) if interpret else None,
    )
    return lambda *inputs: tuple(call(*inputs))


def tiled(shape: tuple[int, ...], dtype: Any, most: int = 128) -> Any:
    """Shared memory that `wgmma` reads."""
    size = jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=swizzled(swizzle(shape[-1] * size, most), size))


def swizzle(row_bytes: int, most: int = 128) -> int:
    """Bytes that are swizzled at once: as many as divide a row, `most` at most."""
    return next(n for n in (128, 64, 32) if n <= most and row_bytes % n == 0)


def swizzled(swizzle: int, itemsize: int) -> tuple[Any, ...]:
    """The layout of shared memory in tiles of 8 rows of `swizzle` bytes."""
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def by_rows(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory laid out row by row (said as tiles of one row): else a layout is chosen that copies of odd numbers
    of rows do not fit."""
    tiling = plgpu.TilingTransform((1, shape[-1]))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling,))


def weighted_values(p: jax.Array, v: Any, acc: jax.Array, p_smem: Any) -> jax.Array:
    """acc + p v: p [64, keys] in registers, v [keys, D] and acc [64, D]. p_smem is the interpreter's detour or None."""
    if p_smem is None:

        def accumulate(ref: Any) -> None:
            plgpu.wgmma(ref, p, v)

        return pl.run_state(accumulate)(plgpu.ACC.init(acc))
    p_smem[...] = p
    plgpu.commit_smem()

    def product(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, p_smem, v)
        return ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC((acc.shape[0], acc.shape[1])))


def loop(low: Any, high: Any, body: Callable[[Any, Any], Any], carry: Any, unroll: bool | None = None) -> Any:
    """`fori_loop` by a number of 32 bits, under x64 too."""
    return lax.fori_loop(jnp.int32(low), jnp.int32(high), body, carry, unroll=unroll)


def store(ref: Any, x: jax.Array) -> None:
    """To global memory as the registers lie, whatever sectors that touches (newer versions refuse it by default)."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def process_x64() -> bool:
    """Whether x64 is on where no thread says otherwise."""
    from jax._src import config

    return bool(config.enable_x64.get_global())


@contextmanager
def own_x64() -> Iterator[None]:
    """The process's x64 is as this thread's; for one thread at a time."""
    with _x64_lock:
        before = process_x64()
        jax.config.update("jax_enable_x64", bool(jax.config.jax_enable_x64))
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)


def races_found() -> bool:
    """Whether the interpreter has seen a race (newer versions raise instead)."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    races = interpret_pallas_call.get_races()
    return races is not None and races.races_found


def reset_interpreter() -> None:
    """After a kernel that raised, the interpreter's state is stale."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()
