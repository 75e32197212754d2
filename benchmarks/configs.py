"""The calls that `check` compares: a covering choice from a table, each by name."""

from __future__ import annotations

import dataclasses
import itertools
import random

STORAGES = (("dense", None), ("padded", None), ("paged", 64), ("paged", 128))
HEAD_DIMS = (32, 64, 128)
DTYPES = ("bfloat16", "float16")
TOKENS = (1, 4)
SPLITS = ((None, None), (1, None), (3, None), (None, 256))
KV_HEADS = (2, 8)
GROUPS = tuple(range(1, 17))
FACTORS = (STORAGES, HEAD_DIMS, DTYPES, TOKENS, SPLITS, KV_HEADS)


@dataclasses.dataclass(frozen=True)
class Config:
    """One call. Several tokens a sequence are causal but in the dense storage, which has no mask object.

    ragged: the number of tokens differs between sequences, up to `tokens`, zero among them.
    """

    storage: str
    page_size: int | None
    head_dim: int
    dtype: str
    tokens: int
    num_splits: int | None
    split_size: int | None
    kv_heads: int
    group: int
    batch: int = 10
    keys: int = 1000
    ragged: bool = False
    output_dtype: str | None = None

    @property
    def name(self) -> str:
        splits = f"splits{self.num_splits}" if self.num_splits else f"every{self.split_size}" if self.split_size else ""
        parts = [
            f"{self.storage}{self.page_size or ''}",
            f"b{self.batch}-{self.keys}",
            f"kv{self.kv_heads}",
            f"g{self.group}",
            f"d{self.head_dim}",
            {"bfloat16": "bf16", "float16": "f16"}[self.dtype],
            f"m{self.tokens}{'r' if self.ragged else ''}",
            splits or "auto",
            "f32out" if self.output_dtype else "",
        ]
        return "-".join(filter(None, parts))

    @property
    def causal(self) -> bool:
        return self.tokens > 1 and self.storage != "dense"

    def lengths(self) -> list[int]:
        """Keys of each sequence: full, none, one, around a tile, and others."""
        known = [self.keys, 0, 1, 127, 128, 129, self.keys - 1, 3 * self.keys // 10, 513, self.keys // 2]
        return [min(known[b % len(known)], self.keys) for b in range(self.batch)]

    def token_counts(self) -> list[int]:
        return [(self.tokens, 1, 0, 2)[b % 4] if self.ragged else self.tokens for b in range(self.batch)]


EXTRA = (
    Config("dense", None, 128, "bfloat16", 1, None, None, 8, 4, batch=2, keys=8192),
    Config("paged", 64, 128, "bfloat16", 4, None, 256, 2, 4, ragged=True),
    Config("padded", None, 64, "bfloat16", 1, 3, None, 2, 6, output_dtype="float32"),
)
"""Many automatic pieces; unequal numbers of tokens; partial results kept in float32."""


def full() -> list[Config]:
    """Every combination of the factors, groups at random, and the extra ones."""
    draw = random.Random(1)
    return [_config(values, draw.choice(GROUPS)) for values in itertools.product(*FACTORS)] + list(EXTRA)


def default() -> list[Config]:
    """Few, so that every two values of different factors meet, every group occurs, and the extra ones."""
    left = {pair for a, b in itertools.combinations(range(len(FACTORS)), 2) for pair in _pairs(a, b)}
    everything, draw, chosen = list(itertools.product(*FACTORS)), random.Random(1), []
    while left:
        draw.shuffle(everything)
        best = max(everything, key=lambda values: len(left & _met(values)))
        left -= _met(best)
        chosen.append(best)
    groups = list(itertools.islice(itertools.cycle(GROUPS), max(len(chosen), len(GROUPS))))
    draw.shuffle(groups)
    return [_config(values, group) for values, group in zip(chosen, groups)] + list(EXTRA)


def quick() -> list[Config]:
    """One of each storage, and all splits, dtypes and head dims among them."""
    values = [
        (STORAGES[0], 128, "bfloat16", 1, SPLITS[0], 8),
        (STORAGES[1], 64, "float16", 4, SPLITS[2], 2),
        (STORAGES[2], 128, "bfloat16", 4, SPLITS[3], 2),
        (STORAGES[3], 32, "bfloat16", 1, SPLITS[1], 8),
    ]
    return [_config(v, group) for v, group in zip(values, (4, 3, 16, 1))] + list(EXTRA[:2])


def _config(values: tuple, group: int) -> Config:
    (storage, page_size), head_dim, dtype, tokens, (num_splits, split_size), kv_heads = values
    keys = 1000 if page_size is None else 1024
    return Config(storage, page_size, head_dim, dtype, tokens, num_splits, split_size, kv_heads, group, keys=keys)


def _pairs(a: int, b: int) -> set[tuple]:
    return {(a, x, b, y) for x in FACTORS[a] for y in FACTORS[b]}


def _met(values: tuple) -> set[tuple]:
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(range(len(values)), 2)}
