"""This library's merge from JAX, with float64 LSEs under x64."""

from __future__ import annotations

from typing import Any

from ...inputs import Merge
from ...rows import MergeRow
from .. import import_reason

FRAMEWORK = "jax"
X64 = True


def available() -> str | None:
    return import_reason("pallas_kernels")


def refuses(row: MergeRow) -> str | None:
    return None


def prepare(row: MergeRow, inputs: Merge) -> tuple[Any, ...]:
    return tuple(inputs)


def run(row: MergeRow, attn: Any, lse: Any) -> Any:
    """The LSE is a result too, so that it is not left out of the compiled function."""
    import pallas_kernels as pk

    return pk.merge_attentions(attn, lse, output_dtype=row.dtype)
