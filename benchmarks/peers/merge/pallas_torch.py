"""This library's merge from torch."""

from __future__ import annotations

from typing import Any

from ...inputs import Merge
from ...rows import MergeRow
from .. import import_reason

FRAMEWORK = "torch"


def available() -> str | None:
    return import_reason("bridge")


def refuses(row: MergeRow) -> str | None:
    return None


def prepare(row: MergeRow, inputs: Merge) -> tuple[Any, ...]:
    return tuple(inputs)


def run(row: MergeRow, attn: Any, lse: Any) -> Any:
    import torch

    import bridge

    return bridge.merge_attentions(attn, lse, output_dtype=getattr(torch, row.dtype))
