"""torch.nn.attention.varlen.varlen_attn, torch's own (FlashAttention-2); newer versions accept more."""

from __future__ import annotations

import inspect
from typing import Any

from ..inputs import Attention
from ..rows import Row
from . import OWN_SPLITS, import_reason

FRAMEWORK = "torch"


def available() -> str | None:
    return import_reason("torch.nn.attention.varlen")


def _accepts(argument: str) -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return argument in inspect.signature(varlen_attn).parameters


def refuses(row: Row) -> str | None:
    wanted = [] if row.lengths == "full" and row.page_size is None else ["seqused_k"]
    wanted += [] if row.page_size is None else ["block_table"]
    lacking = [name for name in wanted if not _accepts(name)]
    if lacking:
        return f"this torch's varlen_attn has no {', '.join(lacking)}"
    return OWN_SPLITS if row.split_size or row.num_splits else None


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    import torch

    options: dict[str, Any] = {}
    if row.lengths != "full" or row.page_size is not None:
        options["seqused_k"] = inputs.lengths
    if row.page_size is not None:
        options["block_table"] = inputs.table
    if _accepts("enable_gqa"):
        options["enable_gqa"] = row.heads != row.kv_heads
    if row.causal:
        options["window_size"] = (-1, 0)
    starts = torch.arange(row.batch + 1, dtype=torch.int32, device=inputs.q.device)
    k, v = (x if row.page_size else x.flatten(0, 1) for x in (inputs.k, inputs.v))
    return inputs.q.flatten(0, 1), k, v, starts * row.tokens, starts * row.keys, options


def run(row: Row, q: Any, k: Any, v: Any, q_starts: Any, k_starts: Any, options: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, q_starts, k_starts, row.tokens, row.keys, **options)
