"""MSLK's Triton split-K kernel (mslk-cuda-nightly); its Python files are enough."""

from __future__ import annotations

import os
from typing import Any

from ..inputs import Attention, packed_mask
from ..rows import Row
from . import OWN_SPLITS, import_reason

FRAMEWORK = "torch"
BLOCK_N = 64
"""Keys of one step of its kernel; pages hold a multiple of them."""


def available() -> str | None:
    os.environ.setdefault("MSLK_PYTHON_ONLY", "1")
    why = import_reason("mslk.attention.fmha")
    if why is not None:
        return why
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return None if version < (3, 8) else f"needs triton < 3.8 (block pointers), found {triton.__version__}"


def refuses(row: Row) -> str | None:
    if row.page_size is not None and row.page_size % BLOCK_N:
        return f"pages of {row.page_size} (accepted: multiples of {BLOCK_N})"
    return OWN_SPLITS if row.split_size or row.num_splits else None


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    """All sequences on one axis, heads in groups of one KV head, lengths on the device."""
    from mslk.attention.fmha import attn_bias

    group = row.heads // row.kv_heads
    q = inputs.q.reshape(1, row.batch * row.tokens, row.kv_heads, group, row.head_dim)
    k, v = (
        x.reshape(1, -1, row.kv_heads, 1, row.head_dim).expand(-1, -1, -1, group, -1) for x in (inputs.k, inputs.v)
    )
    bias = packed_mask(attn_bias, row, inputs.table)
    bias.q_seqinfo, bias.k_seqinfo = bias.q_seqinfo.to(q.device), bias.k_seqinfo.to(q.device)
    return q, k, v, bias


def run(row: Row, q: Any, k: Any, v: Any, bias: Any) -> Any:
    from mslk.attention import fmha

    return fmha.memory_efficient_attention_forward(q, k, v, bias, op=fmha.triton_splitk.FwOp)
