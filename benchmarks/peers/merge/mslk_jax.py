"""MSLK's own Triton reduction called from `jax.jit` through jax-triton."""

from __future__ import annotations

from typing import Any

from ...inputs import Merge
from ...rows import MergeRow
from .. import mslk_jax

FRAMEWORK = "jax"
X64 = True
available = mslk_jax.available


def refuses(row: MergeRow) -> str | None:
    return None


def prepare(row: MergeRow, inputs: Merge) -> tuple[Any, ...]:
    return tuple(inputs)


def run(row: MergeRow, attn: Any, lse: Any) -> Any:
    import jax.numpy as jnp

    b, m, h, d = row.batch, row.queries, row.heads, row.head_dim
    return mslk_jax.reduce(
        attn,
        lse,
        shape=(b, m, 1, h, d),
        dtype=jnp.dtype(row.dtype),
        attn_strides=(m * h * d, d, d, b * m * h * d, h * d),
        lse_strides=(h * m, m, m, b * h * m, 1),
        splits=row.splits,
        lse_dtype=lse.dtype,
    )
