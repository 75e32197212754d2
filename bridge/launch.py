"""Runs a problem's program on torch's current stream, with buffers that torch owns.

The same kernels as JAX runs, compiled once for each capacity of the leading sizes and launched directly: no JAX call,
no DLPack, no synchronisation. The true numbers of tokens and sequences are read from device memory, from a table of
all numbers. What a call needs beside its tensors is settled once, in a `Plan`: running it costs the host the
allocation of its results and of one workspace, and the launches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import torch

from pallas_kernels.errors import ArgumentError, DeviceError
from pallas_kernels.problem import Layout, Problem
from pallas_kernels.program import Launch, Program, Target, program, resolve, unsupported
from pallas_kernels.sizes import power_of_two

from . import _mosaic, cache

MOST_TOKENS = 65536
"""Entries of a device's table of numbers."""
ALIGNMENT = 256
"""Of the pieces of a workspace, in bytes; TMA asks for 16 of a buffer, 128 keeps sectors whole."""

SINK_BYTES = 1 << 20
"""Of a device's memory that is written and never read: the place of an LSE that nobody asked for."""

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
"""The current stream of a device as CUDA's handle: `torch.cuda.current_stream` costs thirty times as much."""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
"""`torch.cuda.current_device` without the question whether CUDA has begun: with tensors on it, it has."""


def reasons(problem: Problem, device: torch.device) -> list[str]:
    """Why the launch path cannot serve a problem on a device; empty where it can."""
    found = [*machine_reasons(device)]
    if problem.queries > MOST_TOKENS:
        found.append(f"{problem.queries} query tokens (accepted: {MOST_TOKENS})")
    # A capacity is a larger problem: it must be served too.
    return [*found, *(unsupported(problem) or unsupported(raised(problem)))]


def machine_reasons(device: torch.device) -> list[str]:
    """Why no kernel runs on a device from this process; empty where kernels do."""
    found = [] if (text := _mosaic.missing()) is None else [text]
    capability = torch.cuda.get_device_capability(device)
    if capability != _mosaic.ARCH:
        found.append(f"compute capability {capability[0]}.{capability[1]} (accepted: 9.0)")
    return found


def layout_reasons(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Why tensors cannot be read where they lie: strides, alignment."""
    found = []
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            found.append(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} (accepted: contiguous)")
        elif tensor.data_ptr() % 16:
            found.append(f"{name}: data at an address that is not a multiple of 16 bytes")
    return found


# ------------------------------------------------------------------------------------------------ one call


class Plan:
    """A call with everything but its tensors settled: what is allocated, and what each launch is given."""

    __slots__ = (
        "_counts", "_device", "_index", "_launches", "_lse", "_offsets", "_out", "_sink", "_workspace", "calls", "room"
    )  # fmt: skip

    def __init__(self, problem: Problem, layout: Layout, names: Sequence[str], made: Program, device: torch.device):
        """names: of the tensors whose addresses `run` is given, in that order; a program may read fewer."""
        self._device, self._index = device, device.index
        self.calls = 0
        self.room = problem.max_keys
        """Keys that a sequence may have."""
        self._out = contiguous(layout.out, problem.out_dtype)
        self._lse = contiguous(layout.lse, problem.lse_dtype)
        workspaces = [b for b in made.buffers if b.role == "workspace"]
        *self._offsets, self._workspace = _offsets(
            [math.prod(b.shape) * getattr(torch, b.dtype).itemsize for b in workspaces]
        )
        numbers = numbers_on(device.index).data_ptr()
        fits = math.prod(layout.lse) * self._lse[2].itemsize <= SINK_BYTES
        self._sink = numbers + SINK_OFFSET if fits else None
        self._counts = (numbers + 4 * problem.queries, numbers + 4 * problem.batch)
        place = {
            name: n
            for n, name in enumerate([*names, "out", "lse", *(b.name for b in workspaces), "count", "sequences"])
        }
        self._launches = []
        for launch in made.launches:
            operands = (*launch.reads, *launch.writes)
            pick = operator.itemgetter(*(place[name] for name in operands))
            self._launches.append((loaded(made, launch, device.index), pick, struct.Struct(f"{len(operands)}Q").pack))

    def run(
        self, addresses: Sequence[int], want_lse: bool = True, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse) of a call on the current stream of its device, in the caller's shapes.

        addresses: of the inputs, in the order of the plan's names. Without `want_lse`, lse is None. out: where to
        write, of the right shape and dtype, contiguous.
        """
        if current_device() != self._index:
            with torch.cuda.device(self._index):
                return self._run(addresses, want_lse, out)
        return self._run(addresses, want_lse, out)

    def _run(
        self, addresses: Sequence[int], want_lse: bool, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        device, empty, index = self._device, torch.empty_strided, self._index
        self.calls += 1
        if out is None:
            shape, strides, dtype = self._out
            out = empty(shape, strides, dtype=dtype, device=device)
        workspace, base = None, 0
        if self._workspace:  # held until all that uses it is enqueued; the allocator reuses it in the stream's order
            workspace = empty((self._workspace,), (1,), dtype=torch.uint8, device=device)
            base = workspace.data_ptr()
        lse, lse_address = None, self._sink
        if want_lse or lse_address is None:
            shape, strides, dtype = self._lse
            lse = empty(shape, strides, dtype=dtype, device=device)
            lse_address = lse.data_ptr()
        every = (
            *addresses, out.data_ptr(), lse_address, *[base + offset for offset in self._offsets], *self._counts
        )  # fmt: skip
        stream = raw_stream(index)
        for enqueue, pick, pack in self._launches:
            enqueue(stream, pack(*pick(every)))
        return out, lse if want_lse else None


def plan(problem: Problem, layout: Layout, tensors: dict[str, torch.Tensor], device: torch.device) -> Plan:
    """The plan of a call, from the inputs of its program by name; compiles what no earlier call has.

    Raises ArgumentError if something is to be compiled while a graph is captured, DeviceError in a forked process.
    """
    check_process()
    table = tensors.get("block_table")
    width = None if table is None else table.shape[1]
    return plan_of(problem, layout, tuple(tensors), width, device)


@functools.lru_cache(maxsize=4096)
def plan_of(
    problem: Problem, layout: Layout, names: tuple[str, ...], table_width: int | None, device: torch.device
) -> Plan:
    """The plan of all calls that differ in addresses only."""
    made, _ = at_capacity(problem, target(device.index), table_width)
    return Plan(problem, layout, names, made, device)


def contiguous(shape: Sequence[int], dtype: str) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, strides and dtype of a new contiguous tensor."""
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    return tuple(shape), tuple(strides), getattr(torch, dtype)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin, one after another, and where they end."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


# ---------------------------------------------------------------------------------------------- capacities


@functools.cache
def target(device: int) -> Target:
    """The target of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Target((properties.major, properties.minor), properties.multi_processor_count, properties.name)


@functools.lru_cache(maxsize=4096)
def at_capacity(problem: Problem, target: Target, table_width: int | None = None) -> tuple[Program, Problem]:
    """The program of a problem with its leading sizes raised to capacities, and that problem.

    table_width: entries of a row of the block table, which is the pitch that a kernel is compiled for, whatever
    maximum the caller names.
    """
    p = raised(resolve(problem, target), table_width)
    return program(p, target, counted=True), p


def raised(problem: Problem, table_width: int | None = None) -> Problem:
    """The problem with its leading sizes raised to capacities; table_width as in `at_capacity`."""
    p, plain = problem, problem.equal_queries is not None
    batch = capacity(p.batch)
    if not plain and p.queries <= MOST_TIED:
        batch = max(batch, capacity(p.queries))
    return dataclasses.replace(
        p,
        queries=capacity(p.queries) if p.equal_queries is None else batch * p.equal_queries,
        batch=batch,
        key_rows=p.key_rows if p.slot is None else batch * p.slot,
        bias=(batch, *p.bias[1:]) if p.bias and p.bias[0] > 1 else p.bias,
        max_keys=p.max_keys if table_width is None or p.page_size is None else table_width * p.page_size,
        lse_rows=batch if plain else 1,
    )


MOST_TIED = 1024
"""Up to so many tokens the capacity of sequences is that of tokens, so that their ratio compiles nothing; planning more
sequences than there are takes shared memory."""


def capacity(count: int) -> int:
    """The power of four that holds a count: few kernels are compiled, and idle blocks cost little."""
    power = power_of_two(count)
    return power if power.bit_length() % 2 else 2 * power


# ------------------------------------------------------------------------------------------------- kernels


class CompiledKernel(NamedTuple):
    """A kernel that was compiled in this process.

    name: its kind. tokens: the most query tokens that it serves (merging chunks: batch entries). device: index. when:
    seconds since the epoch. seconds: what it took, of which `lowering` before the assembly. from_disk: it was lowered
    by an earlier process.
    """

    name: str
    tokens: int
    device: int
    when: float
    seconds: float
    lowering: float
    from_disk: bool


_kernels: dict[tuple[Any, ...], _mosaic.Enqueue] = {}
_compiled: list[CompiledKernel] = []
_lock = threading.RLock()


def compiled() -> tuple[CompiledKernel, ...]:
    """What was compiled in this process, in order."""
    return tuple(_compiled)


def loaded(made: Program, launch: Launch, device: int) -> _mosaic.Enqueue:
    """The loaded kernel of a launch."""
    inputs = tuple((buffer.shape, buffer.dtype) for buffer in map(made.buffer, launch.reads))
    key = (launch.kernel, inputs, device)
    found = _kernels.get(key)
    if found is None:
        with _lock:  # two threads that need one kernel compile it once
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _compile(
                    launch, inputs, device, made.buffer("out").shape[0]
                )
    return found


def _compile(
    launch: Launch, inputs: tuple[tuple[tuple[int, ...], str], ...], device: int, tokens: int
) -> _mosaic.Enqueue:
    check_not_capturing("the kernel of this call is not compiled yet")
    structs = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in inputs]
    began = time.perf_counter()
    module, from_disk = cache.lowered(
        launch.kernel, structs, lambda: _mosaic.lower(launch.kernel.build(), structs)
    )
    lowering = time.perf_counter() - began
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context that the kernel is loaded into
        loaded = _mosaic.load(module, device)
    seconds = time.perf_counter() - began
    name = type(launch.kernel).__name__
    _compiled.append(CompiledKernel(name, tokens, device, time.time(), seconds, lowering, from_disk))
    return loaded


def check_not_capturing(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            f"{what}, which cannot be done while a CUDA graph is captured: "
            "call bridge.warmup(...) for this shape, or the function itself once, before the capture"
        )


SINK_OFFSET = -(-4 * (MOST_TOKENS + 1) // ALIGNMENT) * ALIGNMENT
_tables: dict[int, torch.Tensor] = {}


def numbers_on(device: int) -> torch.Tensor:
    """0, 1, 2, ... on a device, the sink behind them: a count that a kernel reads is the address of its entry."""
    found = _tables.get(device)
    if found is None:
        with _lock:
            found = _tables.get(device)
            if found is None:
                check_not_capturing("a table of numbers is not on the device yet")
                # In a thread of its own: what this one allocates may go to a graph's pool (torch.compile's warm-up of
                # a graph), which is taken back later, whoever holds a tensor there.
                with ThreadPoolExecutor(1) as thread:
                    made = thread.submit(_table().to, f"cuda:{device}").result()
                torch.cuda.synchronize(device)  # from now on every stream may read it
                found = _tables[device] = made
    return found


def _table() -> torch.Tensor:
    table = torch.zeros((SINK_OFFSET + SINK_BYTES) // 4, dtype=torch.int32)
    torch.arange(MOST_TOKENS + 1, dtype=torch.int32, out=table[: MOST_TOKENS + 1])
    return table


# --------------------------------------------------------------------------------------------------- forks

_forked = False


def check_process() -> None:
    """Raises DeviceError in a process that was forked after kernels had been launched in its parent."""
    if _forked:
        raise DeviceError(
            "this process was forked from one that has used CUDA, which CUDA does not support; "
            "start processes with multiprocessing's 'spawn' or 'forkserver' method"
        )


def _after_fork() -> None:
    global _forked
    _forked = bool(_tables)


os.register_at_fork(after_in_child=_after_fork)
