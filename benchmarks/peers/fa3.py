"""FlashAttention-3 in torch (fa3-fwd)."""

from __future__ import annotations

from typing import Any

from ..inputs import Attention
from ..rows import Row
from . import OWN_SPLITS, import_reason

FRAMEWORK = "torch"


def available() -> str | None:
    return import_reason("fa3_fwd_interface")


def refuses(row: Row) -> str | None:
    if row.page_size is not None:
        return "built without pages"
    if row.split_size or row.num_splits:
        return OWN_SPLITS
    return None if row.dtype == "bfloat16" else f"built without {row.dtype}"


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.lengths


def run(row: Row, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    from fa3_fwd_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=row.causal, pack_gqa=True)
