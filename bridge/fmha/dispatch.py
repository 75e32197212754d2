"""Which operator answers a call, and the refusal that lists why none, or not the one asked for, does."""

from __future__ import annotations

from typing import Any

from pallas_kernels.errors import ArgumentError, UnsupportedError

from . import pallas
from .inputs import Inputs
from .operators import AttentionBwOpBase, AttentionFwOpBase, AttentionOpBase


def forward_operator(inp: Inputs, op: Any = None) -> type[AttentionFwOpBase]:
    """`op`, or where it is None the one with the widest coverage; raises UnsupportedError where it refuses `inp`.

    UnsupportedError is a ValueError (an operator was named) and a NotImplementedError (none was).
    """
    return _checked(pallas.FwOp if op is None else op, AttentionFwOpBase, "forward", inp)


def backward_operator(inp: Inputs, op: Any = None) -> type[AttentionBwOpBase]:
    """As `forward_operator`, for the backward."""
    return _checked(pallas.BwOp if op is None else op, AttentionBwOpBase, "backward", inp)


def _checked[O: AttentionOpBase](op: Any, base: type[O], direction: str, inp: Inputs) -> type[O]:
    if not (isinstance(op, type) and issubclass(op, base)):
        raise ArgumentError(f"op: expected a {direction} operator class, got {op!r}")
    reasons = op.not_supported_reasons(inp)
    if reasons:
        lines = [
            f"op: {op.NAME} does not serve the {direction} of memory_efficient_attention for these inputs:",
            *(f"  {n}: {_described(getattr(inp, n))}" for n in ("query", "key", "value", "attn_bias")),
            f"  p: {inp.p}",
            "because of:",
            *(f"  {reason}" for reason in reasons),
        ]
        raise UnsupportedError("\n".join(lines))
    return op


def _described(x: Any) -> str:
    if x is None or not hasattr(x, "shape"):
        return str(x) if x is None else type(x).__name__
    return f"{x.dtype} {tuple(x.shape)} strides {tuple(x.stride())} on {x.device}"
