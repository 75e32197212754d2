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

from . import tuning
from .kernels.bias import Bias
from .kernels.copying import Storage
from .kernels.decode import Decode
from .kernels.lse import LsePlace
from .kernels.merge import Merge
from .kernels.partials import Partials
from .kernels.work import MAX_BATCH, MAX_TILE_TOKENS, ROWS, SplitPolicy, Tiling, Work, key_tile, most_shares
from .problem import Operands, Problem

Role = Literal["in", "out", "workspace"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a program is made for. device: its name, by which launch constants are stored (`tuning`). interpret:
    Mosaic GPU's interpreter on the CPU, with made-up SMs."""

    arch: tuple[int, int]
    sms: int
    device: str = ""
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


HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256, 512)
"""Of keys, and of values."""
MLA_DIMS = (576, 512)
"""(key's, value's) head_dim of multi-head latent attention: the one pair with a longer key."""
MAX_GROUP = 128
"""Query heads that share a KV head."""
MAX_TOKENS_PER_SEQUENCE = 16
"""Every 64 rows of query tokens and heads read their sequence's keys once: more tokens are better served otherwise."""
SHARED_MEMORY = 232448
"""Bytes that a block of compute capability 9.0 has."""
MAX_STAGES = 6
"""Key and value tiles in flight where nothing is stored: what fits of them."""
BYTES_PER_US, SM_BYTES_PER_US = 4.2e6, 39e3
"""Of keys and values, what decode reaches on an H200, and what one of its SMs does when few are busy (B1 Mk8192 with
one piece a row: 108 us; 2026-11-30)."""
SHARE_BYTES_PER_US = 30e3, 19.5e3
"""What one of two shares of an SM does alone (estimated), and beside the other."""
MERGE_US = 3.0
"""What a second launch costs (2.4 to 3.5 us, 2026-11-30)."""


def unsupported(problem: Problem) -> list[str]:
    """Why no program answers the problem; empty where one does."""
    p = problem
    low_bit = p.key_format not in ("float16", "bfloat16")
    dims = (p.head_dim in HEAD_DIMS and p.value_dim in HEAD_DIMS) or (p.head_dim, p.value_dim) == MLA_DIMS
    checks = [
        (p.q_dtype not in ("float16", "bfloat16"), f"query dtype {p.q_dtype} (accepted: float16, bfloat16)"),
        (
            low_bit and p.q_dtype in ("float16", "bfloat16"),
            f"low-bit keys and values ({p.key_format.split('/')[0]})",
        ),
        (p.out_dtype not in ("float16", "bfloat16", "float32"), f"output dtype {p.out_dtype}"),
        (
            dims and max(p.head_dim, p.value_dim) > 256 and p.value_dim % 64 != 0,
            f"value head_dim {p.value_dim} beside {p.head_dim} (accepted: multiples of 64)",
        ),
        (not dims, f"head_dim {p.head_dim}, of values {p.value_dim} (accepted: {HEAD_DIMS}, or the pair {MLA_DIMS})"),
        (not 1 <= p.group <= MAX_GROUP, f"{p.group} query heads share a KV head (accepted: 1 to {MAX_GROUP})"),
        (p.sinks == "float64", "float64 sinks"),
        (
            p.queries > MAX_TOKENS_PER_SEQUENCE * p.batch,
            f"{p.queries} query tokens for {p.batch} sequences (accepted: {MAX_TOKENS_PER_SEQUENCE} a sequence)",
        ),
        (
            p.batch > MAX_BATCH and None in (p.equal_queries, p.equal_keys),
            f"{p.batch} sequences of different lengths (accepted: {MAX_BATCH})",
        ),
    ]
    found = [text for wrong, text in checks if wrong]
    if p.bias is not None and (refused := Bias.refused(p.bias, p.bias_dtype)):
        found.append(refused)
    if not found and _one_token(p) and not _direct(p):
        found.append(f"{p.group} query heads a KV head at head_dim {p.head_dim} (accepted: 1 to 8, multiples of 8)")
    if not found:
        made = _decode(p, Target((9, 0), 1), counted=True)
        # Registers hold rows by 64, the tiles of long heads have fewer.
        if made.storage.restaged and (made.work.key_tile < ROWS or made.shared_memory > SHARED_MEMORY):
            found.append(f"keys that do not lie in eights at head_dim {p.head_dim}")
    return found


def resolve(problem: Problem, target: Target) -> Problem:
    """The problem with what depends on its true sizes made definite, so that both front ends take the same program:
    the query tokens that a tile is made for, and one piece where whole rows are good shares (one launch then)."""
    each = -(-problem.queries // max(problem.batch, 1))
    tokens = problem.equal_queries or (1 if each == 1 else 4 if each <= 4 else MAX_TILE_TOKENS)
    p = dataclasses.replace(problem, tile_tokens=tokens)
    if (p.num_splits, p.split_size) != (None, None) or p.equal_queries is None or p.equal_keys is None:
        return p
    tiles = _tiling(p)
    rows = p.batch * p.kv_heads * -(-p.equal_queries // tiles.tokens) * tiles.parts
    each_sm = _shares_of_block(p)
    rounds = -(-rows // (target.sms * each_sm))
    row_bytes = 2 * p.equal_keys * (p.head_dim + p.value_dim)
    # Of whole rows, a share has at most `rounds`; while it has any, the others' idleness only leaves it more bandwidth.
    rate = SM_BYTES_PER_US if each_sm == 1 else SHARE_BYTES_PER_US[rows > target.sms]
    lost = rounds * row_bytes / rate - rows * row_bytes / BYTES_PER_US
    return dataclasses.replace(p, num_splits=1) if lost < MERGE_US else p


def _tiling(p: Problem) -> Tiling:
    tokens = 1 if _one_token(p) else p.tile_tokens or MAX_TILE_TOKENS
    return Tiling.of(p.group, (p.head_dim, p.value_dim), tokens)


@functools.cache
def program(problem: Problem, target: Target, counted: bool = False) -> Program:
    """The launches that answer a problem on a target.

    counted: the problem's leading sizes are capacities (of one that `resolve` has seen); the true numbers of query
    tokens and of sequences are read from the buffers "count" and "sequences".
    """
    p = problem if counted else resolve(problem, target)
    decode = _decode(p, target, counted)
    rows = (p.queries, p.kv_heads, p.group)
    shapes = {
        "q": ((*rows, p.head_dim), p.q_dtype),
        "k": ((*decode.storage.axes, p.kv_heads, p.head_dim), p.q_dtype),
        "v": ((*decode.storage.axes, p.kv_heads, p.value_dim), p.q_dtype),
        "q_start": ((p.batch + 1,), "int32"),
        "k_start": ((p.batch,), "int32"),
        "k_len": ((p.batch,), "int32"),
        "block_table": ((p.batch, decode.storage.pages_per_row or 0), "int32"),
        "bias": (p.bias or (), p.bias_dtype),
        "sinks": ((p.kv_heads, p.group), p.sinks or "float32"),
        "count": ((1,), "int32"),
        "sequences": ((1,), "int32"),
    }
    buffers = [Buffer(name, *shapes[name], "in") for name in decode.reads]
    buffers += [
        Buffer("out", (*rows, p.value_dim), p.out_dtype, "out"),
        Buffer("lse", (p.queries * p.kv_heads * p.group,), p.lse_dtype, "out"),
    ]
    launches = [Launch(decode, decode.reads, decode.writes)]
    if decode.split:
        buffers += [Buffer(name, t.shape, str(t.dtype), "workspace") for name, t in decode.partials.types.items()]
        merge = Merge(decode.partials, p.out_dtype, decode.lse, bool(p.sinks))
        launches.append(Launch(merge, merge.reads, merge.writes))
    return Program(tuple(buffers), tuple(launches))


def _one_token(p: Problem) -> bool:
    """Whether a query tile holds one token: of long heads, several do not fit beside the keys."""
    return max(p.head_dim, p.value_dim) > 256


def _direct(p: Problem) -> bool:
    """Whether the copy engine can lay out the query heads of a token as `wgmma` reads them."""
    return p.group <= 8 or p.group % 8 == 0


def _shares_of_block(p: Problem) -> int:
    """Two where shared memory holds the tiles of both; several tokens' queries, or an array bias, take the room."""
    one = _tiling(p).tokens > 1 or not _direct(p) or p.bias is not None
    return 1 if one else most_shares(p.head_dim, p.value_dim)


def _decode(p: Problem, target: Target, counted: bool, shares: int | None = None) -> Decode:
    shares = shares or _shares_of_block(p)
    # More pieces than keys, or longer ones than a sequence, are the same as just as many.
    most = max(p.max_keys, 1)
    splits, size = (None if n is None else min(n, most) for n in (p.num_splits, p.split_size))
    policy = SplitPolicy(splits, size)
    tile = key_tile(p.head_dim, p.value_dim)
    tiling = _tiling(p)
    work = Work(
        tokens=p.queries,
        batch=p.batch,
        kv_heads=p.kv_heads,
        tiling=tiling,
        key_tile=tile,
        window=p.window,
        policy=policy,
        equal_queries=p.equal_queries,
        equal_keys=p.equal_keys,
        max_keys=p.max_keys,
        counted=counted,
        blocks=target.sms,
        shares=target.sms * shares,
        cost=max(1, 128 // max(p.head_dim, p.value_dim)),
    )
    pages_per_row = None if p.page_size is None else p.max_keys // p.page_size
    if p.page_size is not None:
        storage = Storage(tile, (p.key_rows // p.page_size, p.page_size), pages_per_row, p.gappy_pages)
    elif p.slot is not None:
        storage = Storage(tile, (p.batch, p.slot), None, False)
    else:
        storage = Storage(tile, (1, p.key_rows), None, True)
    made = Decode(
        work=work,
        group=p.group,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        dtype=p.q_dtype,
        out_dtype=p.out_dtype,
        lse=LsePlace(p.lse_dtype, p.kv_heads * p.group, None if p.lse_rows == 1 else p.queries // p.lse_rows),
        scale=p.scale,
        softcap=p.softcap,
        bias=None if p.bias is None else Bias(p.bias, p.bias_dtype, tiling, tile),
        sinks=bool(p.sinks),
        storage=storage,
        split=policy.automatic or policy.most(p.max_keys) > 1,
        partials=Partials(work, p.group, p.value_dim, policy.most(p.max_keys)),
        stages=1,
        q_direct=tiling.tokens == 1 and _direct(p),
    )
    tuned = tuning.stored(target.device, p)
    stages = range(tuned.stages if tuned else MAX_STAGES, 0, -1)
    fitting = (n for n in stages if dataclasses.replace(made, stages=n).shared_memory <= SHARED_MEMORY)
    found = next(fitting, None)
    if found is None and shares > 1:  # the plan of a large batch takes room, too
        return _decode(p, target, counted, 1)
    return dataclasses.replace(made, stages=found or 1)


def warpgroups(problem: Problem) -> int:
    """Warpgroups of a block of decode."""
    target = Target((9, 0), 1)
    return _decode(resolve(problem, target), target, counted=False).warpgroups


def pieces(problem: Problem, target: Target) -> int:
    """Into how many pieces the problem's program cuts each sequence's keys; under automatic splits, about how many
    shares have them where all sequences are equally long."""
    p = resolve(problem, target)
    decode = _decode(p, target, counted=False)
    if not decode.work.policy.automatic:
        return decode.work.policy.most(p.max_keys)
    return max(1, -(-decode.work.shares // max(1, p.queries // decode.work.tiling.tokens * p.kv_heads)))


def run(problem: Problem, target: Target, x: Operands) -> tuple[jax.Array, jax.Array]:
    """Trace a problem's program: (out [queries, kv_heads, group, Dv], lse [rows, heads, queries of a row])."""
    made = program(problem, target)
    given = {
        "q": x.q,
        "k": x.k.reshape(made.buffer("k").shape),
        "v": x.v.reshape(made.buffer("v").shape),
        "q_start": x.nf.q_start,
        "k_start": x.nf.k_start,
        "k_len": x.nf.k_len,
        "block_table": x.nf.block_table,
        "bias": x.bias,
        "sinks": x.sinks,
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
    return Target((major, minor), int(device.core_count), str(device.device_kind))


__all__ = [
    "Buffer",
    "Launch",
    "Program",
    "Target",
    "pieces",
    "program",
    "resolve",
    "run",
    "target_of",
    "unsupported",
    "warpgroups",
]
