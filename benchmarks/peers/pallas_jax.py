"""This library from JAX."""

from __future__ import annotations

from typing import Any

from ..inputs import Dense
from ..rows import Row
from . import import_reason

FRAMEWORK = "jax"


def available() -> str | None:
    return import_reason("pallas_kernels")


def refuses(row: Row) -> str | None:
    return None


def prepare(row: Row, inputs: Dense) -> tuple[Any, ...]:
    return tuple(inputs)


def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    import pallas_kernels as pk

    return pk.memory_efficient_attention(q, k, v, kv_lengths=lengths, backend="hopper")
