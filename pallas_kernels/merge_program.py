"""The program of a merge of partial results: which ones a kernel serves, and the one launch that does it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .kernels.merge_chunks import MergeChunks
from .program import Buffer, Launch, Program

CHUNK_DTYPES = ("float16", "bfloat16", "float32")
LSE_DTYPES = ("float32", "float64")
MOST_DIM = 512
MOST_OPERANDS = 64
"""Chunks of a list: each is an operand of the kernel, and its code names each."""


@dataclasses.dataclass(frozen=True)
class Merge:
    """One call: chunks of `shape` [B, M, heads or (G, H), K], their dtypes and those of the LSEs, chunk by chunk."""

    shape: tuple[int, ...]
    chunk_dtypes: tuple[str, ...]
    lse_dtypes: tuple[str, ...]
    chunks_stacked: bool
    lses_stacked: bool
    out_dtype: str
    write_lse: bool

    @property
    def lse_shape(self) -> tuple[int, ...]:
        batch, queries, *heads, _ = self.shape
        return (batch, *heads, queries)

    def unsupported(self) -> list[str]:
        """Why no kernel merges it; empty where one does."""
        dim, chunks = self.shape[-1], len(self.chunk_dtypes)
        checks = [
            (not set(self.chunk_dtypes) <= set(CHUNK_DTYPES), f"chunks of {_listed(self.chunk_dtypes)}", CHUNK_DTYPES),
            (not set(self.lse_dtypes) <= set(LSE_DTYPES), f"LSEs of {_listed(self.lse_dtypes)}", LSE_DTYPES),
            (self.out_dtype not in CHUNK_DTYPES, f"output dtype {self.out_dtype}", CHUNK_DTYPES),
            (dim % 8 != 0 or dim > MOST_DIM, f"head_dim {dim}", f"multiples of 8 up to {MOST_DIM}"),
            (math.prod(self.shape) == 0, f"empty chunks of shape {self.shape}", "others"),
            (
                chunks > MOST_OPERANDS and not (self.chunks_stacked and self.lses_stacked),
                f"a list of {chunks} chunks",
                f"up to {MOST_OPERANDS}, any number stacked",
            ),
        ]
        return [
            f"{text} (accepted: {accepted if isinstance(accepted, str) else ', '.join(accepted)})"
            for wrong, text, accepted in checks
            if wrong
        ]

    def kernel(self, capacity: int | None = None) -> MergeChunks:
        """The kernel of exactly this shape, or of any batch up to a capacity: the true number then comes as "count"."""
        batch, queries, *heads, dim = self.shape
        rows = (batch if capacity is None else capacity, queries, math.prod(heads))
        if capacity is None and (rows[1] == 1 or rows[2] == 1):  # chunks and LSEs have their rows in one order
            rows = (1, math.prod(rows), 1)
        return MergeChunks(
            *rows,
            dim,
            self.chunk_dtypes,
            self.lse_dtypes,
            self.chunks_stacked,
            self.lses_stacked,
            self.out_dtype,
            self.lse_dtypes[0] if self.write_lse else None,
            counted=capacity is not None,
        )


def program(kernel: MergeChunks) -> Program:
    """One launch: "chunk0", ..., "lse0", ... ["count"] -> "out" [, "lse"]."""
    chunks = 1 if kernel.chunks_stacked else kernel.chunks
    lses = 1 if kernel.lses_stacked else kernel.chunks
    reads = (*(f"chunk{n}" for n in range(chunks)), *(f"lse{n}" for n in range(lses)), *["count"] * kernel.counted)
    writes = ("out", "lse")[: len(kernel.out_types)]
    buffers = [Buffer(name, t.shape, str(t.dtype), "in") for name, t in zip(reads, kernel.in_types, strict=True)]
    buffers += [Buffer(name, t.shape, str(t.dtype), "out") for name, t in zip(writes, kernel.out_types, strict=True)]
    return Program(tuple(buffers), (Launch(kernel, reads, writes),))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(set(names)))
