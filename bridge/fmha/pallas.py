"""The operators behind `op=None`: everything that this library serves, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .attn_bias import AttentionBias
from .attn_bias.base import PagedBias
from .inputs import Context, Gradients, Inputs
from .library_op import LibraryFwOp
from .operators import AttentionBwOpBase

FLOATS = frozenset({torch.half, torch.bfloat16, torch.float32, torch.float64})


class FwOp(LibraryFwOp):
    """Forward: any head dim, any bias, GQA without expanding, array biases with axes of size 1."""

    SUPPORTED_DTYPES = FLOATS | {torch.float8_e4m3fn}
    SUPPORTED_ATTN_BIAS_TYPES = (type(None), torch.Tensor, AttentionBias)
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_OUTPUT_DTYPE = True
    SUPPORTS_PARTIAL = True
    SUPPORTS_BMGHK = True
    NAME = "pallasF"

    @classmethod
    def num_splits(cls, inp: Inputs) -> int | None:
        return cls.SPLIT_K if inp.num_splits == 0 else inp.num_splits

    @classmethod
    def bias_not_supported_reasons(cls, attn_bias: Any) -> list[str]:
        """Subclasses too: a bias says itself which keys it shows."""
        if isinstance(attn_bias, tuple(cls.SUPPORTED_ATTN_BIAS_TYPES)):
            return []
        return [f"attn_bias type is {type(attn_bias).__name__}"]


class BwOp(AttentionBwOpBase):
    """Backward of any output and LSE, be they of these keys alone or merged with those of others."""

    SUPPORTED_DTYPES = FLOATS
    SUPPORTED_ATTN_BIAS_TYPES = FwOp.SUPPORTED_ATTN_BIAS_TYPES
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_OUTPUT_DTYPE = True
    SUPPORTS_BMGHK = True
    SUPPORTS_ATTN_BIAS_GRAD = True
    NAME = "pallasB"

    @classmethod
    def bias_not_supported_reasons(cls, attn_bias: Any) -> list[str]:
        reasons = FwOp.bias_not_supported_reasons(attn_bias)
        return [*reasons, "key and value are paged"] if isinstance(attn_bias, PagedBias) else reasons

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        reasons = super().not_supported_reasons(inp)
        return [*reasons, "key and value are low-bit"] if inp.key.dtype == torch.int32 else reasons

    @classmethod
    def apply(cls, ctx: Context, inp: Inputs, grad: torch.Tensor) -> Gradients:
        """Gradients for the cotangent `grad` of ctx.out, given the rows' LSE in ctx.lse.

        Of these keys alone the probabilities are p and the results (out, lse); among all keys they are w p with
        w = exp(lse - ctx.lse). The scores' gradient, w p (grad . v - grad . ctx.out), is therefore what the
        cotangents w grad of out and w (grad . out - grad . ctx.out) of lse give.
        """
        bias = inp.attn_bias
        if inp.query.numel() == 0 or inp.key.numel() == 0:
            dq, dk, dv = (torch.zeros_like(x) for x in (inp.query, inp.key, inp.value))
            db = torch.zeros_like(bias) if isinstance(bias, torch.Tensor) and bias.requires_grad else None
            return Gradients(dq, dk, dv, db)
        wide = torch.float64 if inp.query.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [_leaf(x) for x in (inp.query, inp.key, inp.value)]
            if isinstance(bias, torch.Tensor) and bias.requires_grad:
                bias = _leaf(bias)
                leaves.append(bias)
            q, k, v = leaves[:3]
            call = dataclasses.replace(inp, query=q, key=k, value=v, attn_bias=bias, output_dtype=wide)
            out, local = FwOp.apply(call, needs_gradient=True)
        assert local is not None
        lse, grad = local.lse, grad.to(wide)
        with torch.inference_mode(False), torch.no_grad():
            weight = torch.where(lse == -torch.inf, 0, torch.exp(lse - ctx.lse[..., : lse.shape[-1]]))
            d_out = grad * weight.movedim(-1, 1).unsqueeze(-1).to(wide)
            inner = (grad * (out - ctx.out)).sum(-1).movedim(1, -1)
            d_lse = torch.where(weight == 0, 0, weight * inner)
            return Gradients(*torch.autograd.grad((out, lse), leaves, (d_out, d_lse)))


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """x as a leaf of its own (also in inference mode), every element with a gradient of its own."""
    x = x.clone() if x.is_inference() else x.detach()
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride()))
    return (x.contiguous() if expanded else x).requires_grad_()
