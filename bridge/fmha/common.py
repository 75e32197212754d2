"""The names of MSLK's `fmha.common`."""

from .inputs import Context, Gradients, Inputs, InputsFp8
from .operators import AttentionBwOpBase, AttentionFwOpBase, AttentionOp, AttentionOpBase

__all__ = [
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "Context",
    "Gradients",
    "Inputs",
    "InputsFp8",
]
