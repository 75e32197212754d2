"""Runs a problem's program on torch's current stream, with buffers that torch owns.

The same kernels as JAX runs, compiled once for each capacity of the leading sizes (powers of two) and launched
directly: no JAX call, no DLPack, no synchronisation. The true numbers of tokens and sequences are read from device
memory, from a table of all numbers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import jax
import torch

from pallas_kernels.errors import ArgumentError
from pallas_kernels.problem import Problem
from pallas_kernels.program import Program, Target, program, unsupported

from . import _mosaic

MOST_TOKENS = 65536
"""Entries of a device's table of numbers."""
ALIGNMENT = 256
"""Of the pieces of a workspace, in bytes; TMA asks for 16 of a buffer, 128 keeps sectors whole."""


def reasons(problem: Problem, device: torch.device) -> list[str]:
    """Why the launch path cannot serve a problem on a device; empty where it can."""
    found = [] if (text := _mosaic.missing()) is None else [text]
    capability = torch.cuda.get_device_capability(device)
    if capability != _mosaic.ARCH:
        found.append(f"compute capability {capability[0]}.{capability[1]} (accepted: 9.0)")
    if problem.queries > MOST_TOKENS:
        found.append(f"{problem.queries} query tokens (accepted: {MOST_TOKENS})")
    return [*found, *unsupported(problem)]


def layout_reasons(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Why tensors cannot be read where they lie: strides, alignment."""
    found = []
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            found.append(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} (accepted: contiguous)")
        elif tensor.data_ptr() % 16:
            found.append(f"{name}: data at an address that is not a multiple of 16 bytes")
    return found


def run(problem: Problem, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a problem's program: (out [queries, kv_heads, group, Dv], lse, flat as `Problem.lse_rows` says).

    tensors: the program's inputs by name (q, k, v and what it asks for of q_start, k_len, block_table), contiguous, on
    one CUDA device.
    """
    q = tensors["q"]
    device = q.device
    plan = _plan(problem, device.index)
    with torch.cuda.device(device):
        out = torch.empty(
            (problem.queries, problem.kv_heads, problem.group, problem.value_dim),
            dtype=getattr(torch, problem.out_dtype),
            device=device,
        )
        lse = torch.empty(math.prod(out.shape[:-1]), dtype=getattr(torch, problem.lse_dtype), device=device)
        numbers = _numbers(device.index)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        addresses |= {
            "out": out.data_ptr(),
            "lse": lse.data_ptr(),
            "count": numbers.data_ptr() + 4 * problem.queries,
            "sequences": numbers.data_ptr() + 4 * problem.batch,
        }
        if plan.workspace:
            workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=device)
            addresses |= {name: workspace.data_ptr() + offset for name, offset in plan.offsets.items()}
        stream = torch.cuda.current_stream(device).cuda_stream
        for names, launch in plan.launches:
            launch(stream, (ctypes.c_void_p * len(names))(*(addresses[name] for name in names)))
    return out, lse


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A compiled program: launches with the names of their operands and results, and the workspace's pieces."""

    launches: list[tuple[tuple[str, ...], Callable[[int, Any], None]]]
    offsets: dict[str, int]
    workspace: int


_plans: dict[tuple[Any, int], _Plan] = {}
_lock = threading.Lock()


def _plan(problem: Problem, device: int) -> _Plan:
    made, _ = at_capacity(problem, target(device))
    key = (made, device)
    found = _plans.get(key)
    if found is None:
        with _lock:  # two threads that need one kernel compile it once
            found = _plans.get(key)
            if found is None:
                found = _plans[key] = _compile(made, device)
    return found


@functools.cache
def target(device: int) -> Target:
    """The target of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Target((properties.major, properties.minor), properties.multi_processor_count)


@functools.lru_cache(maxsize=4096)
def at_capacity(problem: Problem, target: Target) -> tuple[Program, Problem]:
    """The program of a problem with its leading sizes raised to capacities, and that problem."""
    tokens, batch = capacity(problem.queries), capacity(problem.batch)
    per_row = problem.queries // problem.lse_rows
    if problem.lse_rows != 1:  # a plain batch: every sequence has the same number of tokens
        tokens = batch * per_row
    rows = problem.key_rows if problem.slot is None else batch * problem.slot
    raised = dataclasses.replace(
        problem,
        queries=tokens,
        batch=batch,
        key_rows=rows,
        lse_rows=1 if problem.lse_rows == 1 else batch,
    )
    least = capacity(problem.queries) // 2 + 1 if problem.lse_rows == 1 else (batch // 2 + 1) * per_row
    return program(raised, target, least_tokens=least), raised


def capacity(count: int) -> int:
    """The power of two that holds a count."""
    return 1 << max(count - 1, 0).bit_length()


def _compile(made: Program, device: int) -> _Plan:
    offsets, size = {}, 0
    for buffer in made.buffers:
        if buffer.role == "workspace":
            offsets[buffer.name] = size
            bytes_needed = math.prod(buffer.shape) * getattr(torch, buffer.dtype).itemsize
            size += -(-bytes_needed // ALIGNMENT) * ALIGNMENT
    launches = []
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context that the kernel is loaded into
        for launch in made.launches:
            inputs = [
                jax.ShapeDtypeStruct(buffer.shape, jax.numpy.dtype(buffer.dtype))
                for buffer in map(made.buffer, launch.reads)
            ]
            module = _mosaic.lower(launch.kernel.build(), inputs)
            launches.append(((*launch.reads, *launch.writes), _mosaic.load(module, device)))
    return _Plan(launches, offsets, size)


@functools.cache
def _numbers(device: int) -> torch.Tensor:
    """0, 1, 2, ... on a device: a count that a kernel reads is the address of its entry."""
    return _constant(device, lambda: torch.arange(MOST_TOKENS + 1, dtype=torch.int32))


def _constant(device: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A tensor that every stream may read from now on."""
    if torch.cuda.is_current_stream_capturing():
        raise ArgumentError("a first call of this shape cannot be captured: run it once before the capture")
    tensor = make().to(f"cuda:{device}")
    torch.cuda.synchronize(device)
    return tensor
