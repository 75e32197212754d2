"""Partial attentions that autograd can differentiate after they are merged (MSLK merge_training).

    one = memory_efficient_attention_partial_autograd(q, k1, v1)
    two = memory_efficient_attention_partial_autograd(q, k2, v2)
    out = merge_attentions_autograd(one, two)  # differentiable in q, k1, v1, k2, v2

The gradient is the chain rule's, through outputs and LSEs: a partial may be sliced, and used more than once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch

import bridge
from pallas_kernels.errors import ArgumentError, UnsupportedError

from . import pallas
from .entry_points import differentiable, no_dropout
from .inputs import Bias, Inputs
from .operators import AttentionFwOpBase, AttentionOp


class Partial:
    """Attention over a part of the keys: out [B, M, H, K] or [B, M, G, H, K], its LSE, and a placeholder like out."""

    def __init__(self, attn: torch.Tensor, lse: torch.Tensor, placeholder: torch.Tensor) -> None:
        self._attn, self._lse, self._placeholder = attn, lse, placeholder

    def is_bmghk(self) -> bool:
        return self._attn.ndim == 5

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """`fn` applied as if to the output; it must leave the last axis alone, since the LSE has it with size 1.

        `lambda x: x[:, 4:]` drops four queries.
        """
        rows = self._lse.movedim(-1, 1).unsqueeze(-1)
        return type(self)(fn(self._attn), fn(rows).squeeze(-1).movedim(1, -1), fn(self._placeholder))

    def _tuple(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._attn, self._lse, self._placeholder


def memory_efficient_attention_partial_autograd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | type[AttentionFwOpBase] | None = None,
    output_dtype: torch.dtype | None = None,
) -> Partial:
    """`memory_efficient_attention_partial` as a `Partial`, differentiable once it is merged.

    op: a forward operator class, or a pair whose second member is None or `fmha.pallas.BwOp`. Raises UnsupportedError
    for another backward operator: those take no gradient of the LSE.
    """
    no_dropout(p)
    fw, bw = op if isinstance(op, tuple) else (op, None)
    if bw not in (None, pallas.BwOp):
        raise UnsupportedError(f"op: the backward of a partial is {pallas.BwOp.NAME}, got {bw}")
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype, is_partial=True)
    attn, lse = differentiable(inp, fw, None)
    return Partial(attn, lse, attn.detach().new_zeros(()).expand(attn.shape))


def merge_attentions_autograd(*partials: Partial) -> torch.Tensor:
    """The attention over the keys of all partials together; of one alone its own output.

    Raises ArgumentError (a ValueError) for none, ShapeError for partials of different shapes.
    """
    if not partials:
        raise ArgumentError("partials: No partials to merge")
    if len(partials) == 1:
        return partials[0]._attn
    attn, lse, _ = zip(*(partial._tuple() for partial in partials))
    return bridge.merge_attentions(attn, lse, write_lse=False)[0]
