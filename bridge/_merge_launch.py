"""A merge of partial results without gradient: launched on torch's current stream, or through JAX.

A launch needs no JAX call, no copy and no synchronisation. The kernel of a call is compiled for its numbers of
queries, heads and chunks, and for the batch itself where that is a capacity of `launch`, else for the next one, the
true number being read from device memory. What a call needs beside its tensors is settled once for each signature.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import struct
from collections.abc import Hashable, Sequence
from functools import reduce

import torch
from torch.autograd import forward_ad

from pallas_kernels.kernels.merge_chunks import MergeChunks
from pallas_kernels.merge import described, merge_on
from pallas_kernels.merge_program import MOST_OPERANDS, Merge, program

from . import _call, _route, launch
from ._call import jax_dtype

Chunks = torch.Tensor | Sequence[torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor | None]
MOST_PLANS = 4096
ALIGNED_TO = 16
"""Bytes, of a chunk: a thread reads as many at once."""


def merge(attn: Chunks, lse: Chunks, write_lse: bool, output_dtype: torch.dtype | None) -> Result:
    """(out, lse or None) of plain tensors that want no gradient."""
    chunks = [x for part in (attn, lse) for x in (part if isinstance(part, (list, tuple)) else (part,))]
    on_gpu = bool(chunks) and all(isinstance(x, torch.Tensor) and x.is_cuda for x in chunks)
    if on_gpu and (launched := _launched(attn, lse, write_lse, output_dtype, chunks[0].device)) is not None:
        return launched
    backend = "auto" if on_gpu else "plain"  # the tensors' device decides, not what else there is
    return _call.run(lambda a, x: merge_on(backend, a, x, write_lse, jax_dtype(output_dtype)), attn, lse)


def _launched(
    attn: Chunks, lse: Chunks, write_lse: bool, output_dtype: torch.dtype | None, device: torch.device
) -> Result | None:
    """None where the call is not launched directly (a warning says why)."""
    launch.check_process()
    if forward_ad._current_level >= 0:
        _call.check_no_tangents([*attn, *lse])
    key = (_look(attn), _look(lse), bool(write_lse), output_dtype)
    plan = _plans.get(key)
    if plan is None:
        plan = _file(key, attn, lse, write_lse, output_dtype, device)
    if isinstance(plan, str):
        _route.warn_once(plan)
        return None
    addresses = plan.chunks.addresses(attn)
    if reduce(operator.or_, addresses) % ALIGNED_TO:
        _route.warn_once(f"attn_split: a chunk at an address that is not a multiple of {ALIGNED_TO} bytes")
        return None
    return plan.run([*addresses, *plan.lses.addresses(lse)])


def _look(x: Chunks) -> Hashable:
    """What a plan depends on."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.get_device(), x.is_contiguous()
    return tuple([(chunk.shape, chunk.dtype, chunk.get_device(), chunk.is_contiguous()) for chunk in x])


@dataclasses.dataclass(frozen=True)
class Operands:
    """Where the chunks of an argument lie. count, pitch: of a stacked tensor whose chunks are operands of their own,
    the pitch in bytes; (1, 0) where it is one operand; None for a list."""

    stack: tuple[int, int] | None

    def addresses(self, x: Chunks) -> list[int]:
        if self.stack is None:
            return [chunk.data_ptr() for chunk in x]
        assert isinstance(x, torch.Tensor)
        base, (count, pitch) = x.data_ptr(), self.stack
        return [base + n * pitch for n in range(count)]


class Plan:
    """A call with everything but its tensors settled."""

    __slots__ = ("_count", "_device", "_enqueue", "_index", "_lse", "_out", "_pack", "chunks", "lses")

    def __init__(self, call: Merge, device: torch.device) -> None:
        kernel = kernel_of(call)
        made = program(kernel)
        (launched,) = made.launches
        self._device, self._index = device, device.index
        self._out = launch.contiguous(call.shape, call.out_dtype)
        self._lse = launch.contiguous(call.lse_shape, call.lse_dtypes[0]) if call.write_lse else None
        self._count = [launch.numbers_on(device.index).data_ptr() + 4 * call.shape[0]] if kernel.counted else []
        self._enqueue = launch.loaded(made, launched, device.index)
        self._pack = struct.Struct(f"{len(launched.reads) + len(launched.writes)}Q").pack
        count, shape = len(call.chunk_dtypes), call.shape
        self.chunks = _operands(call.chunks_stacked, kernel.chunks_stacked, count, shape, call.chunk_dtypes[0])
        self.lses = _operands(call.lses_stacked, kernel.lses_stacked, count, call.lse_shape, call.lse_dtypes[0])

    def run(self, addresses: list[int]) -> Result:
        """addresses: of the kernel's chunks and LSEs."""
        if launch.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self._run(addresses)
        return self._run(addresses)

    def _run(self, addresses: list[int]) -> Result:
        shape, strides, dtype = self._out
        out = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        results, lse = [out.data_ptr()], None
        if self._lse is not None:
            shape, strides, dtype = self._lse
            lse = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
            results.append(lse.data_ptr())
        self._enqueue(launch.raw_stream(self._index), self._pack(*addresses, *self._count, *results))
        return out, lse


def _operands(stacked: bool, one_operand: bool, count: int, shape: Sequence[int], dtype: str) -> Operands:
    if not stacked:
        return Operands(None)
    return Operands((1, 0) if one_operand else (count, math.prod(shape) * getattr(torch, dtype).itemsize))


def kernel_of(call: Merge) -> MergeChunks:
    """The kernel that a call launches: chunks are operands of their own, so that their pitch may be any, unless they
    are too many."""
    if len(call.chunk_dtypes) > MOST_OPERANDS:
        return call.kernel()
    listed = dataclasses.replace(call, chunks_stacked=False, lses_stacked=False)
    batch = call.shape[0]
    capacity = launch.capacity(batch)
    return listed.kernel() if batch == capacity or batch > launch.MOST_TOKENS else listed.kernel(capacity)


_plans: dict[Hashable, Plan | str] = {}


def _file(
    key: Hashable,
    attn: Chunks,
    lse: Chunks,
    write_lse: bool,
    output_dtype: torch.dtype | None,
    device: torch.device,
) -> Plan | str:
    """The plan of all calls that look like this one, or why there is none."""
    call: Merge = _call.describe(lambda a, x: described(a, x, write_lse, jax_dtype(output_dtype))[0], attn, lse)
    reasons = [*launch.machine_reasons(device), *call.unsupported()]
    for name, x in (("attn_split", attn), ("lse_split", lse)):
        if not all(chunk.is_contiguous() for chunk in ([x] if isinstance(x, torch.Tensor) else x)):
            reasons.append(f"{name}: strides (accepted: contiguous)")
    plan = "; ".join(reasons) or Plan(call, device)
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _after_fork() -> None:
    _plans.clear()


os.register_at_fork(after_in_child=_after_fork)
