"""Launch constants: what may be chosen for speed alone, never a result's bits.

`python -m benchmarks tune` measures the candidates on a card and keeps the fastest in a JSON file for each kind of
device beside this one, {key: constants}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..kernels.work import key_tile, most_shares
from ..sizes import power_of_two

FOLDER = Path(__file__).parent
_SHARED_BYTES = 200 * 1024
"""Of a block's shared memory, what key and value tiles may take."""
_forced: list[Tuning] = []


@dataclasses.dataclass(frozen=True)
class Tuning:
    """stages: key and value tiles in flight."""

    stages: int


def candidates(problem: Any) -> list[Tuning]:
    """What is worth measuring for a `Problem`."""
    dims = problem.head_dim, problem.value_dim
    tile = key_tile(*dims) * sum(dims) * 2 * most_shares(*dims)
    return [Tuning(stages) for stages in range(2, max(2, min(8, _SHARED_BYTES // tile)) + 1)]


def key(problem: Any) -> str:
    """Problems that share their constants: sizes only to the next power of two."""
    p = problem
    storage = "slots" if p.page_size is None else f"page{p.page_size}"
    tokens = -(-p.queries // max(p.batch, 1))
    sizes = "-".join(f"{name}{power_of_two(n)}" for name, n in (("b", p.batch), ("m", tokens), ("keys", p.max_keys)))
    splits = "auto" if p.num_splits is p.split_size is None else f"splits{p.num_splits}" if p.num_splits else "every"
    formats = p.q_dtype if p.key_format == p.q_dtype else f"{p.q_dtype}-{p.key_format}"
    return f"{formats}-d{p.head_dim}-kv{p.kv_heads}-g{p.group}-{storage}-{splits}-{sizes}"


def stored(device_name: str, problem: Any) -> Tuning | None:
    """What was measured to be fastest on a kind of device, or None."""
    if _forced:
        return _forced[-1]
    found = read(device_name).get(key(problem))
    return None if found is None else Tuning(**found)


@contextlib.contextmanager
def forced(constants: Tuning) -> Iterator[None]:
    """Every `stored` gives these, whatever the files say. Programs and compiled functions made before keep theirs."""
    _forced.append(constants)
    try:
        yield
    finally:
        _forced.pop()


def path(device_name: str) -> Path:
    return FOLDER / f"{device_name.replace(' ', '-')}.json"


@functools.cache
def read(device_name: str) -> dict[str, dict[str, int]]:
    """All that is stored for a kind of device; {} where nothing is."""
    try:
        return json.loads(path(device_name).read_text())
    except FileNotFoundError:
        return {}


__all__ = ["Tuning", "candidates", "forced", "key", "path", "read", "stored"]
