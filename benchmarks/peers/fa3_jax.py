"""FlashAttention-3 in JAX (flash-attn3-jax). Its splits are the caller's: as many as fill the card once."""

from __future__ import annotations

from typing import Any

from ..inputs import Dense
from ..rows import Row
from . import import_reason

FRAMEWORK = "jax"


def available() -> str | None:
    return import_reason("flash_attn3_jax")


def refuses(row: Row) -> str | None:
    return None if row.head_dim == 128 else f"head_dim {row.head_dim} (accepted: 128)"


def prepare(row: Row, inputs: Dense) -> tuple[Any, ...]:
    return tuple(inputs)


def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    import jax
    from flash_attn3_jax import flash_mha_with_kvcache

    batch, keys, kv_heads, _ = k.shape
    splits = int(jax.devices()[0].core_count) // (batch * kv_heads)
    return flash_mha_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=max(1, min(splits, keys // 128)))
