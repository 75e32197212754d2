"""MSLK's merge of stacked partial results."""

from __future__ import annotations

from typing import Any

from ...inputs import Merge
from ...rows import MergeRow
from .. import mslk

FRAMEWORK = "torch"
available = mslk.available


def refuses(row: MergeRow) -> str | None:
    return None


def prepare(row: MergeRow, inputs: Merge) -> tuple[Any, ...]:
    return tuple(inputs)


def run(row: MergeRow, attn: Any, lse: Any) -> Any:
    import torch
    from mslk.attention import fmha

    return fmha.merge_attentions(attn, lse, output_dtype=getattr(torch, row.dtype))
