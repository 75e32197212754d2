"""This library from JAX."""

from __future__ import annotations

from typing import Any

from ..inputs import Attention, packed_mask
from ..rows import Row
from . import import_reason

FRAMEWORK = "jax"


def available() -> str | None:
    return import_reason("pallas_kernels")


def refuses(row: Row) -> str | None:
    return None


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    """(q, k, v, lengths of a plain batch, or the mask of a packed one)."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels as pk

    if row.page_size is None and not row.causal:
        return inputs.q, inputs.k, inputs.v, inputs.lengths
    return inputs.q, inputs.k, inputs.v, jax.tree.map(jnp.asarray, packed_mask(pk.masks, row, inputs.table))


def run(row: Row, q: Any, k: Any, v: Any, where: Any, backend: str = "hopper") -> Any:
    import pallas_kernels as pk

    options: dict[str, Any] = {"num_splits": row.num_splits, "split_size": row.split_size, "backend": backend}
    if row.page_size is None and not row.causal:
        return pk.memory_efficient_attention(q, k, v, kv_lengths=where, **options)
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    return pk.memory_efficient_attention(q, k, v, where, **options)
