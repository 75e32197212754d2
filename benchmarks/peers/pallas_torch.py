"""This library from torch."""

from __future__ import annotations

from typing import Any

from ..inputs import Attention, packed_mask
from ..rows import Row
from . import import_reason

FRAMEWORK = "torch"


def available() -> str | None:
    return import_reason("bridge")


def refuses(row: Row) -> str | None:
    return None


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    """(q, k, v, lengths of a plain batch, or the mask of a packed one)."""
    from bridge.fmha import attn_bias

    if row.page_size is None and not row.causal:
        return inputs.q, inputs.k, inputs.v, inputs.lengths
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (inputs.q, inputs.k, inputs.v))
    return q, k, v, packed_mask(attn_bias, row, inputs.table, device=q.device)


def run(row: Row, q: Any, k: Any, v: Any, where: Any, backend: str = "hopper") -> Any:
    import bridge

    options: dict[str, Any] = {"num_splits": row.num_splits, "split_size": row.split_size, "backend": backend}
    if row.page_size is None and not row.causal:
        return bridge.memory_efficient_attention(q, k, v, kv_lengths=where, **options)
    return bridge.memory_efficient_attention(q, k, v, where, **options)
