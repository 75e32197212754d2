"""A drop-in for `mslk.attention.fmha`: `from bridge import fmha`.

| module                        | what it holds                                                                    |
| ----------------------------- | -------------------------------------------------------------------------------- |
| `entry_points`                | the `memory_efficient_attention` family                                          |
| `inputs`, `operators`         | what operators take and return, and their base classes (`common`)                |
| `triton_splitk`, `pallas`     | the operators: MSLK's split-K with its reasons for refusing; the one behind None |
| `library_op`                  | the one place where `Inputs` become a call of this library                       |
| `dispatch`                    | which operator answers                                                           |
| `merge`, `merge_training`     | joining partial results, without and with a gradient                             |
| `tree_attention`              | attention of a tree of speculative tokens                                        |
| `attn_bias`                   | attention biases                                                                 |
"""

from . import attn_bias, common, merge_training, pallas, torch_ops, tree_attention, triton_splitk
from .attn_bias import VARLEN_BIASES, AttentionBias, BlockDiagonalMask, LowerTriangularMask
from .entry_points import (
    _memory_efficient_attention,
    _memory_efficient_attention_backward,
    _memory_efficient_attention_forward,
    _memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
)
from .inputs import Context, Gradients, Inputs, InputsFp8
from .merge import merge_attentions
from .merge_training import Partial, memory_efficient_attention_partial_autograd, merge_attentions_autograd
from .operators import AttentionBwOpBase, AttentionFwOpBase, AttentionOp, AttentionOpBase

ALL_FW_OPS: list[type[AttentionFwOpBase]] = [pallas.FwOp, triton_splitk.FwOp]
ALL_BW_OPS: list[type[AttentionBwOpBase]] = [pallas.BwOp]

__all__ = [
    "ALL_BW_OPS",
    "ALL_FW_OPS",
    "VARLEN_BIASES",
    "AttentionBias",
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "BlockDiagonalMask",
    "Context",
    "Gradients",
    "Inputs",
    "InputsFp8",
    "LowerTriangularMask",
    "Partial",
    "_memory_efficient_attention",
    "_memory_efficient_attention_backward",
    "_memory_efficient_attention_forward",
    "_memory_efficient_attention_forward_requires_grad",
    "attn_bias",
    "common",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "memory_efficient_attention_partial_autograd",
    "merge_attentions",
    "merge_attentions_autograd",
    "merge_training",
    "pallas",
    "torch_ops",
    "tree_attention",
    "triton_splitk",
]
