"""MSLK's Triton split-K kernel (mslk-cuda-nightly); its Python files are enough."""

from __future__ import annotations

import os
from typing import Any

from ..inputs import Dense
from ..rows import Row
from . import import_reason

FRAMEWORK = "torch"


def available() -> str | None:
    os.environ.setdefault("MSLK_PYTHON_ONLY", "1")
    why = import_reason("mslk.attention.fmha")
    if why is not None:
        return why
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    return None if version < (3, 8) else f"needs triton < 3.8 (block pointers), found {triton.__version__}"


def refuses(row: Row) -> str | None:
    return None


def prepare(row: Row, inputs: Dense) -> tuple[Any, ...]:
    """All sequences on one axis, heads in groups of one KV head, lengths on the device."""
    from mslk.attention.fmha import attn_bias

    q, k, v, _ = inputs
    group = row.heads // row.kv_heads
    packed = q.reshape(1, row.batch * row.tokens, row.kv_heads, group, row.head_dim)
    keys, values = (
        x.reshape(1, row.batch * row.keys, row.kv_heads, 1, row.head_dim).expand(-1, -1, -1, group, -1) for x in (k, v)
    )
    bias = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[row.tokens] * row.batch, kv_padding=row.keys, kv_seqlen=[row.keys] * row.batch
    )
    bias.q_seqinfo, bias.k_seqinfo = bias.q_seqinfo.to(q.device), bias.k_seqinfo.to(q.device)
    return packed, keys, values, bias


def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
    from mslk.attention import fmha

    return fmha.memory_efficient_attention_forward(q, k, v, bias, op=fmha.triton_splitk.FwOp)
