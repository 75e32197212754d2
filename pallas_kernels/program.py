"""A problem's program: the launches that answer it, and the buffers between them.

A pure function of the problem and the target. Two interpreters run programs: `run` here traces the launches one after
another, so that in JAX a program is part of the jitted graph; `bridge.launch` compiles each launch once and enqueues
it on torch's stream. Kernels read everything beyond shapes (lengths, tables, counts) from device memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax

from .kernels.decode import Decode
from .kernels.lse import LsePlace
from .kernels.merge import Merge
from .kernels.work import SplitPolicy
from .problem import Operands, Problem

Role = Literal["in", "out", "workspace"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is made for. `interpret`: Mosaic GPU's interpreter on the CPU, with made-up SMs."""

    arch: tuple[int, int]
    sms: int
    interpret: bool = False
    detect_races: bool = False


@dataclasses.dataclass(frozen=True)
class Buffer:
    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role


class Kernel(Protocol):
    """Static parameters that build a traceable function."""

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]: ...

    def build(self, interpret: bool = False, detect_races: bool = False) -> Callable[..., tuple[jax.Array, ...]]: ...


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel: it reads the named buffers in order and writes the others."""

    kernel: Kernel
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]

    def buffer(self, name: str) -> Buffer:
        return next(b for b in self.buffers if b.name == name)


HEAD_DIMS = (32, 64, 128)
MAX_GROUP = 64
"""Query heads that share a KV head: the rows of one tile."""
PAGE_SIZES = (64, 128)
MAX_TOKENS_PER_SEQUENCE = 16
"""Each query token reads its sequence's keys once, so that many tokens are better served otherwise."""


def unsupported(problem: Problem) -> list[str]:
    """Why no program answers the problem; empty where one does."""
    p = problem
    low_bit = p.key_format not in ("float16", "bfloat16")
    checks = [
        (p.q_dtype not in ("float16", "bfloat16"), f"query dtype {p.q_dtype} (accepted: float16, bfloat16)"),
        (
            low_bit and p.q_dtype in ("float16", "bfloat16"),
            f"low-bit keys and values ({p.key_format.split('/')[0]})",
        ),
        (p.out_dtype not in ("float16", "bfloat16", "float32"), f"output dtype {p.out_dtype}"),
        (p.head_dim not in HEAD_DIMS, f"head_dim {p.head_dim} (accepted: {HEAD_DIMS})"),
        (p.value_dim != p.head_dim, f"value head_dim {p.value_dim} other than key's"),
        (not 1 <= p.group <= MAX_GROUP, f"{p.group} query heads share a KV head (accepted: 1 to {MAX_GROUP})"),
        (p.bias is not None, "an array bias"),
        (p.sinks, "sinks"),
        (
            p.queries > MAX_TOKENS_PER_SEQUENCE * p.batch,
            f"{p.queries} query tokens for {p.batch} sequences (accepted: {MAX_TOKENS_PER_SEQUENCE} a sequence)",
        ),
        (p.slot is None and p.page_size is None, "keys that are neither in equal slots nor paged"),
        (p.gappy_pages, "paged keys that start anywhere in their row"),
        (p.slot is not None and p.slot % 8 != 0, f"slots of {p.slot} keys (accepted: multiples of 8)"),
        (
            p.page_size is not None and p.page_size not in PAGE_SIZES,
            f"page_size {p.page_size} (accepted: {PAGE_SIZES})",
        ),
    ]
    return [text for wrong, text in checks if wrong]


@functools.cache
def program(problem: Problem, target: Target, least_tokens: int | None = None) -> Program:
    """The launches that answer a problem on a target.

    least_tokens: if given, the problem's leading sizes are capacities; the true numbers of query tokens (at least
    this many) and of sequences are read from the buffers "count" and "sequences".
    """
    counted = least_tokens is not None
    p = problem
    # More pieces than keys, or longer ones than a sequence, are the same as just as many.
    most = max(p.max_keys, 1)
    splits, size = (None if n is None else min(n, most) for n in (p.num_splits, p.split_size))
    policy = SplitPolicy(splits, size, p.max_keys, p.kv_heads, target.sms)
    lse = LsePlace(p.lse_dtype, p.kv_heads * p.group, None if p.lse_rows == 1 else p.queries // p.lse_rows)
    key_shape = (
        (p.key_rows // p.page_size, p.page_size, p.kv_heads, p.head_dim)
        if p.page_size is not None
        else (p.batch, p.slot or 0, p.kv_heads, p.head_dim)
    )
    # With one piece for every number of tokens that may come, the decode kernel's own result is final.
    split = policy.count(least_tokens or p.queries) > 1
    decode = Decode(
        tokens=p.queries,
        batch=p.batch,
        kv_heads=p.kv_heads,
        group=p.group,
        head_dim=p.head_dim,
        dtype=p.q_dtype,
        out_dtype=p.out_dtype,
        lse=lse,
        scale=p.scale,
        softcap=p.softcap,
        window=p.window,
        policy=policy,
        key_shape=key_shape,
        equal_queries=p.equal_queries,
        equal_keys=p.equal_keys,
        pages_per_row=None if p.page_size is None else p.max_keys // p.page_size,
        counted=counted,
        split=split,
        blocks=target.sms,
        stages=_stages(p),
    )
    rows = (p.queries, p.kv_heads, p.group)
    inputs = {
        "q": ((*rows, p.head_dim), p.q_dtype),
        "k": (key_shape, p.q_dtype),
        "v": (key_shape, p.q_dtype),
        "q_start": ((p.batch + 1,), "int32"),
        "k_len": ((p.batch,), "int32"),
        "block_table": ((p.batch, decode.pages_per_row or 0), "int32"),
        "count": ((1,), "int32"),
        "sequences": ((1,), "int32"),
    }
    buffers = [Buffer(name, *inputs[name], "in") for name in decode.reads]
    buffers += [
        Buffer("out", (*rows, p.head_dim), p.out_dtype, "out"),
        Buffer("lse", (p.queries * p.kv_heads * p.group,), p.lse_dtype, "out"),
    ]
    if not split:
        return Program(tuple(buffers), (Launch(decode, decode.reads, ("out", "lse")),))
    partial = ("accumulators", "maxima", "sums")
    buffers += [
        Buffer(name, t.shape, str(t.dtype), "workspace") for name, t in zip(partial, decode.out_types, strict=True)
    ]
    merge = Merge(p.queries, p.kv_heads, p.group, p.head_dim, p.out_dtype, lse, policy, counted)
    reads = (*partial, "count") if counted else partial
    return Program(tuple(buffers), (Launch(decode, decode.reads, partial), Launch(merge, reads, ("out", "lse"))))


def pieces(problem: Problem, target: Target) -> int:
    """Into how many pieces the problem's program cuts each sequence's keys."""
    decode = program(problem, target).launches[0].kernel
    assert isinstance(decode, Decode)
    return int(decode.policy.count(problem.queries))


def _stages(problem: Problem) -> int:
    """Key and value tiles in flight: what fits beside the rest of shared memory, 128 KiB at most."""
    tile = 2 * 128 * problem.head_dim * 2
    return max(2, min(4, 131072 // tile))


def run(problem: Problem, target: Target, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Trace a problem's program: (out [queries, kv_heads, group, Dv], lse [rows, heads, queries of a row])."""
    made = program(problem, target)
    given = {
        "q": x.q,
        "k": x.k.reshape(made.buffer("k").shape),
        "v": x.v.reshape(made.buffer("v").shape),
        "q_start": x.nf.q_start,
        "k_len": x.nf.k_len,
        "block_table": x.nf.block_table,
    }
    values: dict[str, Any] = given
    for launch in made.launches:
        results = launch.kernel.build(target.interpret, target.detect_races)(*(values[name] for name in launch.reads))
        values |= dict(zip(launch.writes, results, strict=True))
    return values["out"].reshape(made.buffer("out").shape), values["lse"]


def target_of(backend: str) -> Target:
    """The target of `hopper` (the default GPU) or of `interpret`."""
    if backend == "interpret":
        from .kernels._compat import INTERPRETER_SMS

        return Target((9, 0), INTERPRETER_SMS, interpret=True)
    device = jax.devices("gpu")[0]
    major, minor = (int(x) for x in str(device.compute_capability).split("."))
    return Target((major, minor), int(device.core_count))


__all__ = ["Buffer", "Launch", "Program", "Target", "pieces", "program", "run", "target_of", "unsupported"]
