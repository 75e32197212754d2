"""The calls that are timed, by name."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
SHORT = {"bfloat16": "bf16", "float16": "f16"}


@dataclasses.dataclass(frozen=True)
class Row:
    """Attention of a few query tokens a sequence over a KV cache.

    keys: of each sequence's slot, and its longest. lengths: "full"; "fill0.31", one full and the mean 0.31 of `keys`;
    or "log1024", between 1024 and `keys`, their logarithms uniform. page_size: keys in pages, in random order. host:
    the call's time on the host is measured too; for calls so short that the card never falls behind.
    """

    kind: ClassVar[str] = "attention"
    moved: ClassVar[str] = "K+V"

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    tokens: int = 1
    causal: bool = False
    lengths: str = "full"
    page_size: int | None = None
    split_size: int | None = None
    num_splits: int | None = None
    host: bool = False

    @property
    def name(self) -> str:
        parts = [f"b{self.batch}-{self.keys}-{self.heads}-{self.kv_heads}-d{self.head_dim}"]
        parts += [SHORT[self.dtype]] * (self.dtype != "bfloat16")
        parts += [self.lengths] * (self.lengths != "full")
        parts += [f"page{self.page_size}"] * (self.page_size is not None)
        parts += [f"q{self.tokens}{'causal' * self.causal}"] * (self.tokens > 1)
        parts += [f"every{self.split_size}"] * (self.split_size is not None)
        parts += [f"splits{self.num_splits}"] * (self.num_splits is not None)
        return "-".join(parts)

    @property
    def label(self) -> str:
        parts = [f"{self.batch} x {self.keys}, {self.heads}/{self.kv_heads}, D {self.head_dim}"]
        parts += [SHORT[self.dtype]] * (self.dtype != "bfloat16")
        if self.lengths.startswith("fill"):
            parts.append(f"mean fill {self.lengths.removeprefix('fill')}")
        elif self.lengths != "full":
            parts.append(f"lengths log-uniform from {self.lengths.removeprefix('log')}")
        parts += [f"page {self.page_size}"] * (self.page_size is not None)
        parts += [f"{self.tokens} {'causal ' * self.causal}queries"] * (self.tokens > 1)
        parts += [f"split_size {self.split_size}"] * (self.split_size is not None)
        parts += [f"num_splits {self.num_splits}"] * (self.num_splits is not None)
        return ", ".join(parts)

    def key_counts(self) -> list[int]:
        """Keys in use of each sequence; the same in every run."""
        draw = random.Random(self.batch)
        if self.lengths == "full":
            return [self.keys] * self.batch
        if self.lengths.startswith("log"):
            low, high = math.log(int(self.lengths.removeprefix("log"))), math.log(self.keys)
            return [round(math.exp(draw.uniform(low, high))) for _ in range(self.batch)]
        # One is full; uniform draws, scaled, give the others the mean that was asked for.
        fill, others = float(self.lengths.removeprefix("fill")), [draw.random() for _ in range(self.batch - 1)]
        scale = self.keys * (fill * self.batch - 1) / sum(others)
        return [self.keys, *(min(self.keys, max(1, round(scale * x))) for x in others)]

    @property
    def pages_per_row(self) -> int:
        return -(-self.keys // (self.page_size or self.keys))

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.batch, self.tokens, self.heads, self.head_dim)

    @property
    def bytes_needed(self) -> int:
        """Of K and V, each key in use read once."""
        return 2 * sum(self.key_counts()) * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class MergeRow:
    """Joining `splits` partial results of `queries` tokens a sequence: float32 outputs, `lse_dtype` LSEs."""

    kind: ClassVar[str] = "merge"
    moved: ClassVar[str] = "read + written"
    host: ClassVar[bool] = False

    batch: int
    queries: int
    heads: int
    splits: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    lse_dtype: str = "float64"

    @property
    def name(self) -> str:
        return f"b{self.batch}-m{self.queries}-h{self.heads}-d{self.head_dim}-s{self.splits}"

    @property
    def label(self) -> str:
        return f"B {self.batch}, M {self.queries}, H {self.heads}, D {self.head_dim}, {self.splits} parts"

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.batch * self.queries, self.heads, self.head_dim)

    @property
    def bytes_needed(self) -> int:
        """Partial results and LSEs read, one of each written."""
        lse = ITEM_BYTES[self.lse_dtype]
        one = self.splits * (4 * self.head_dim + lse) + ITEM_BYTES[self.dtype] * self.head_dim + lse
        return self.batch * self.queries * self.heads * one


AnyRow = Row | MergeRow


def of_fields(fields: Mapping[str, Any]) -> AnyRow:
    """The row that `dataclasses.asdict` took apart."""
    return MergeRow(**fields) if "splits" in fields else Row(**fields)


DECODE = (
    Row(1, 8192, 32, 8),
    Row(1, 32768, 32, 8),
    Row(1, 131072, 32, 8),
    Row(8, 8192, 32, 8),
    Row(32, 8192, 32, 8),
    Row(64, 2048, 32, 8),
    Row(128, 1024, 64, 8),
    Row(16, 16384, 8, 1),
    Row(32, 4096, 32, 32),
    Row(16, 8192, 32, 8, head_dim=64),
    Row(16, 8192, 16, 4, head_dim=256),
    Row(32, 8192, 32, 8, dtype="float16"),
    Row(1, 256, 32, 8, host=True),
)

_SPREAD = Row(64, 131072, 32, 8, lengths="log1024", page_size=64)
_SAME_BYTES = Row(64, round(sum(_SPREAD.key_counts()) / 64 / 64) * 64, 32, 8, page_size=64)

RAGGED = (
    Row(8, 8192, 32, 8, lengths="fill0.31"),
    Row(32, 8192, 32, 8, lengths="fill0.25"),
    Row(64, 2048, 32, 8, lengths="fill0.28"),
    _SPREAD,
    _SAME_BYTES,
    Row(16, 8192, 32, 8),
    Row(16, 8192, 32, 8, split_size=1024),
    Row(32, 8192, 32, 8),
    Row(32, 8192, 32, 8, split_size=1024),
)

PAGED = tuple(
    Row(batch, keys, 32, 8, page_size=page)
    for batch, keys in ((8, 8192), (32, 8192), (64, 2048), (1, 32768))
    for page in (None, 256, 64, 16, 1)
)
"""Each with the same problem unpaged (page None) before it."""

MULTIQUERY = tuple(
    Row(batch, keys, 32, 8, tokens=tokens, causal=True)
    for tokens in (4, 16)
    for batch, keys in ((8, 8192), (32, 8192), (64, 2048))
)

MERGE = (
    MergeRow(32, 1, 32, 16),
    MergeRow(1, 4096, 32, 4),
    MergeRow(8, 1024, 32, 8),
)


def choose[R: AnyRow](rows: Sequence[R], patterns: Sequence[str] | None) -> list[R]:
    """The rows whose names match a pattern (shell wildcards); all without patterns. ValueError where one matches none.
    """
    if not patterns:
        return list(rows)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"no row is named {pattern!r}; rows: {', '.join(row.name for row in rows)}")
    return [row for row in rows if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]
