"""FlashAttention-3 in torch (fa3-fwd)."""

from __future__ import annotations

from typing import Any

from ..inputs import Dense
from ..rows import Row
from . import import_reason

FRAMEWORK = "torch"


def available() -> str | None:
    return import_reason("fa3_fwd_interface")


def refuses(row: Row) -> str | None:
    return None if row.dtype == "bfloat16" else f"built without {row.dtype}"


def prepare(row: Row, inputs: Dense) -> tuple[Any, ...]:
    return tuple(inputs)


def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    from fa3_fwd_interface import flash_attn_with_kvcache

    return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, pack_gqa=True)
