"""A card without a card: the torch front end's launch path on CPU tensors, compiling faked and launches observed.

Everything of the front end runs but the compiler, CUDA's allocator and the launch itself. A launched kernel may be run
in the interpreter, on the very memory that its addresses name.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from bridge import _lean, _route, launch
from pallas_kernels.program import Target

STREAM = 7


class Card:
    """`install` it with a monkeypatch; `launched` then lists (kernel, names, addresses) of every launch.

    execute: run the launched kernels in the interpreter, else they do nothing.
    """

    def __init__(self, sms: int = 132, execute: bool = False) -> None:
        self.target = Target((9, 0), sms)
        self.execute = execute
        self.launched: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = []
        self.compiled: list[tuple[Any, Any]] = []
        self.capturing = False

    def install(self, monkeypatch: Any) -> Card:
        patch = monkeypatch.setattr
        patch(_route, "_on_gpu", lambda arguments: True)
        patch(launch, "target", lambda device: self.target)
        patch(launch, "machine_reasons", lambda device: [])
        patch(launch, "current_device", lambda: None)  # the index of a CPU tensor's device
        patch(launch, "raw_stream", lambda device: STREAM)
        patch(launch, "_tables", {None: launch._table()})
        patch(launch, "_kernels", {})
        patch(launch, "_compiled", [])
        patch(launch, "_compile", self.compile)
        patch(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch(_lean, "_plans", {})
        patch(_lean, "_calls_of_dropped", 0)
        launch.plan_of.cache_clear()
        launch.at_capacity.cache_clear()
        return self

    def compile(self, step: Any, inputs: Any, device: Any, tokens: int) -> Any:
        launch.check_not_capturing("the kernel of this call is not compiled yet")
        self.compiled.append((step.kernel, inputs))
        launch._compiled.append(
            launch.CompiledKernel(type(step.kernel).__name__, tokens, -1, time.time(), 0.0, 0.0, False)
        )
        names = (*step.reads, *step.writes)

        def enqueue(stream: int, packed: bytes) -> None:
            assert stream == STREAM
            addresses = tuple(int(x) for x in np.frombuffer(packed, np.uint64))
            assert len(addresses) == len(names)
            self.launched.append((step.kernel, names, addresses))
            if self.execute:
                self.run(step, inputs, addresses, tokens)

        return enqueue

    def run(self, step: Any, inputs: Any, addresses: tuple[int, ...], tokens: int) -> None:
        """Run a kernel in the interpreter. Inputs are read at their compiled sizes: leave room behind them. Results of
        torch's own, which are exactly as large as the call's, are read and written as far as they go."""
        given = dict(zip((*step.reads, *step.writes), addresses))
        count = int(memory(given["count"], (1,), "int32")[0])

        def held(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
            if name not in ("out", "lse"):
                return memory(given[name], shape, dtype)
            true = memory(given[name], (math.prod(shape) // tokens * count,), dtype)
            return np.concatenate([true, np.full(math.prod(shape) - true.size, np.nan, true.dtype)]).reshape(shape)

        arrays = [jnp.asarray(held(name, *kind)) for name, kind in zip(step.reads, inputs)]
        results = interpreted(step.kernel)(*arrays)
        for name, result in zip(step.writes, results, strict=True):
            used = result.size // tokens * count if name in ("out", "lse") else result.size
            memory(given[name], (used,), str(result.dtype))[:] = np.asarray(result).reshape(-1)[:used]


@functools.cache
def interpreted(kernel: Any) -> Any:
    """Compiled once for all launches: that is nearly all the time."""
    return jax.jit(kernel.build(interpret=True))


def memory(address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The numbers at an address."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind).reshape(shape)


def roomy(x: torch.Tensor, rows: int, axis: int = 0) -> torch.Tensor:
    """The same numbers, contiguous, with memory for `rows` rows behind them that holds NaN (or -1)."""
    shape = list(x.shape)
    shape[axis] = rows
    poison = float("nan") if x.is_floating_point() else -1
    held = torch.full((math.prod(shape) + 64,), poison, dtype=x.dtype)
    skip = (-held.data_ptr() // x.element_size()) % (64 // x.element_size())
    view = held[skip : skip + x.numel()].view(x.shape)
    view.copy_(x)
    return view
