"""cuDNN through jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

from ..inputs import Dense
from ..rows import Row
from . import import_reason

FRAMEWORK = "jax"


def available() -> str | None:
    return import_reason("jax")


def refuses(row: Row) -> str | None:
    return None


def prepare(row: Row, inputs: Dense) -> tuple[Any, ...]:
    return inputs.q, inputs.k, inputs.v


def run(q: Any, k: Any, v: Any) -> Any:
    import jax

    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
