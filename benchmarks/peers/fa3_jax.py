"""FlashAttention-3 in JAX (flash-attn3-jax). Its splits are the caller's: as many as fill the card once."""

from __future__ import annotations

from typing import Any

from ..inputs import Attention
from ..rows import Row
from . import OWN_SPLITS, import_reason

FRAMEWORK = "jax"


def available() -> str | None:
    return import_reason("flash_attn3_jax")


def refuses(row: Row) -> str | None:
    if row.split_size or row.num_splits:
        return OWN_SPLITS
    return None if row.head_dim == 128 else f"head_dim {row.head_dim} (accepted: 128)"


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    return (inputs.q, inputs.k, inputs.v, inputs.lengths, *([] if inputs.table is None else [inputs.table]))


def run(row: Row, q: Any, k: Any, v: Any, lengths: Any, table: Any = None) -> Any:
    import jax
    from flash_attn3_jax import flash_mha_with_kvcache

    splits = int(jax.devices()[0].core_count) // (row.batch * row.kv_heads)
    return flash_mha_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=lengths,
        page_table=table,
        is_causal=row.causal,
        num_splits=max(1, min(splits, row.keys // 128)),
    )
