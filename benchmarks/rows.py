"""The shapes that are timed, by name."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

ITEM_BYTES = {"bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Row:
    """One decode call: `tokens` queries a sequence over `keys` keys each, all in use.

    host: the call's time on the host is measured too; for calls so short that the card never falls behind.
    """

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    tokens: int = 1
    host: bool = False

    @property
    def name(self) -> str:
        return f"b{self.batch}-{self.keys}-{self.heads}-{self.kv_heads}-d{self.head_dim}"

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.keys}, {self.heads}/{self.kv_heads}, D {self.head_dim}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        return 2 * self.batch * self.keys * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


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
    Row(1, 256, 32, 8, host=True),
)


def choose(rows: Sequence[Row], patterns: Sequence[str] | None) -> list[Row]:
    """The rows whose names match a pattern (shell wildcards); all without patterns. ValueError where one matches none.
    """
    if not patterns:
        return list(rows)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            raise ValueError(f"no row is named {pattern!r}; rows: {', '.join(row.name for row in rows)}")
    return [row for row in rows if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]
