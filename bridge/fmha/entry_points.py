"""The entry points of MSLK's `fmha`: tensors or `Inputs` in, an operator class or None as `op`.

Differentiable are `memory_efficient_attention` and, in a restricted form, `memory_efficient_attention_partial`. The
others give results without a gradient, as MSLK's do; the functions of `bridge` itself are differentiable in both
results.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pallas_kernels.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

from . import pallas
from .dispatch import backward_operator, forward_operator
from .inputs import Bias, Context, Gradients, Inputs
from .library_op import LibraryFwOp
from .operators import AttentionBwOpBase, AttentionFwOpBase, AttentionOp

FwOp = type[AttentionFwOpBase]
BwOp = type[AttentionBwOpBase]


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale * query key^T + attn_bias) value, differentiable in query, key and value.

    Shapes as in `Inputs`; the result has query's shape with value's head dim, in `output_dtype` (default query's).
    Rows that see no key are 0. scale: default K ** -0.5. p: 0.0. op: a pair (forward, backward) of operator classes,
    either may be None. Operators take what MSLK's take (key and value expanded to query's heads); without one, fewer
    heads in key and value, axes of size 1 in a tensor bias and the gradient of a tensor bias are served too.

    Raises ValueErrors that name the argument: ShapeError, DTypeError, ArgumentError, DeviceError; UnsupportedError
    (also a NotImplementedError) where the operator, or no operator, serves the call, with all reasons.
    """
    return _memory_efficient_attention(Inputs(query, key, value, attn_bias, p, scale, output_dtype), op)


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: FwOp | None = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`memory_efficient_attention` without a gradient; op: a forward operator class."""
    return _memory_efficient_attention_forward(Inputs(query, key, value, attn_bias, p, scale, output_dtype), op)


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: FwOp | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), for `memory_efficient_attention_backward` or `merge_attentions`.

    lse: natural logarithm of each row's sum of exponentials, -inf where it sees no key; [B, H, Mq], [B, G, H, Mq],
    for BMK [B, 1, Mq], with block-diagonal masks [1, *heads, total queries]. float64 beside a float32 or float64
    output, else float32. Raises NotImplementedError for p != 0.
    """
    no_dropout(p)
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype)
    out, ctx = _memory_efficient_attention_forward_requires_grad(inp, op)
    return out, ctx.lse


def memory_efficient_attention_partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: AttentionOp | FwOp | None = None,
    output_dtype: torch.dtype | None = None,
    _allow_backward: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over a part of the keys, to be joined by `merge_attentions`; float32 and float64 by default.

    op: a forward operator class, or a pair of which the first is used. Without a gradient, unless `_allow_backward`
    gives one through out alone (not for BMGHK, a ValueError): right only where nothing is merged. Use
    `memory_efficient_attention_partial_autograd` to differentiate merged attention.
    """
    no_dropout(p)
    fw, bw = op if isinstance(op, tuple) else (op, None)
    inp = Inputs(query, key, value, attn_bias, p, scale, output_dtype, is_partial=True)
    if not (_allow_backward and wants_gradient(inp)):
        out, ctx = _memory_efficient_attention_forward_requires_grad(inp, fw)
        return out, ctx.lse
    if query.ndim == 5:
        raise ShapeError(f"query: _allow_backward is not defined for the layout BMGHK, got {tuple(query.shape)}")
    out, lse = differentiable(inp, fw, bw)
    return out, lse.detach()


def memory_efficient_attention_backward(
    grad: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: BwOp | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) for `grad`, the gradient of `output`; output and lse as the forward returned them.

    They may also be those of merged attention, of which key and value are a part: then dk and dv are exact, and the
    dq of all parts add up. op: a backward operator class. Raises NotImplementedError for p != 0.
    """
    no_dropout(p)
    inp = Inputs(query, key, value, attn_bias, p, scale)
    gradients = _memory_efficient_attention_backward(Context(lse=lse, out=output), inp, grad, op)
    return gradients.dq, gradients.dk, gradients.dv


# -------------------------------------------------------------------------------------- the forms that take Inputs


def _memory_efficient_attention(inp: Inputs, op: AttentionOp | None = None) -> torch.Tensor:
    fw, bw = (None, None) if op is None else op
    return differentiable(inp, fw, bw)[0] if wants_gradient(inp) else _memory_efficient_attention_forward(inp, fw)


@torch.no_grad()
def _memory_efficient_attention_forward(inp: Inputs, op: FwOp | None) -> torch.Tensor:
    shape, op = _prepared(inp, op)
    return op.apply(inp, needs_gradient=False)[0].reshape(shape)


@torch.no_grad()
def _memory_efficient_attention_forward_requires_grad(inp: Inputs, op: FwOp | None) -> tuple[torch.Tensor, Context]:
    shape, op = _prepared(inp, op)
    out, ctx = op.apply(inp, needs_gradient=True)
    assert ctx is not None
    return out.reshape(shape), ctx


@torch.no_grad()
def _memory_efficient_attention_backward(
    ctx: Context, inp: Inputs, grad: torch.Tensor, op: BwOp | None
) -> Gradients:
    shapes = [x.shape for x in (inp.query, inp.key, inp.value)]
    _validate(inp, op)
    shape = inp.normalize_bmhk()
    for name, x in (("grad", grad), ("output", ctx.out)):
        if x.shape != shape:
            raise ShapeError(f"{name}: expected the output's shape {tuple(shape)}, got {tuple(x.shape)}")
    rows = (inp.query.shape[0], *inp.query.shape[2:-1], inp.query.shape[1])
    if ctx.lse.ndim != len(rows) or ctx.lse.shape[:-1] != rows[:-1] or ctx.lse.shape[-1] < rows[-1]:
        raise ShapeError(f"lse: expected shape {rows}, or more on the last axis, got {tuple(ctx.lse.shape)}")
    op = backward_operator(inp, op)
    if len(shape) == 3:
        grad, ctx = grad.unsqueeze(2), dataclasses.replace(ctx, out=ctx.out.unsqueeze(2))
    found = op.apply(ctx, inp, grad)
    dq, dk, dv = (x.reshape(s) for x, s in zip((found.dq, found.dk, found.dv), shapes))
    return Gradients(dq, dk, dv, found.db)


def differentiable(inp: Inputs, fw: FwOp | None, bw: BwOp | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) for autograd: with this library's own gradient, through both results, unless `bw` is another's.

    A gradient by `bw` knows out alone.
    """
    shape, fw = _prepared(inp, fw)
    if wants_gradient(inp):
        bw = backward_operator(inp, bw)
        if bw is not pallas.BwOp or not issubclass(fw, LibraryFwOp):
            out, lse = _by_operators(inp, fw, bw)
            return out.reshape(shape), lse
    out, ctx = fw.apply(inp, needs_gradient=True)
    assert ctx is not None
    return out.reshape(shape), ctx.lse


def wants_gradient(inp: Inputs) -> bool:
    """Whether autograd records, and query, key, value or a tensor in the bias requires grad."""
    bias = getattr(inp.attn_bias, "_bias", inp.attn_bias)
    tensors = (inp.query, inp.key, inp.value, bias)
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def _by_operators(inp: Inputs, fw: FwOp, bw: BwOp) -> tuple[torch.Tensor, torch.Tensor]:
    bias = inp.attn_bias
    if not isinstance(bias, torch.Tensor) and getattr(getattr(bias, "_bias", None), "requires_grad", False):
        raise UnsupportedError(f"attn_bias: {bw.NAME} has no gradient for the tensor in {type(bias).__name__}")
    return _ByOperators.apply(
        fw, bw, inp, inp.query, inp.key, inp.value, bias if isinstance(bias, torch.Tensor) else None
    )


def by_operator(
    query: Any, key: Any, value: Any, attn_bias: Any, op: Any, output_dtype: torch.dtype | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a function of `bridge` that is given `op`: a forward operator class or a pair of classes.

    options: its other options; those that an operator class says itself, or has not, must be left alone.
    """
    p, scale, partial = (options.pop(name) for name in ("p", "scale", "partial"))
    defaults = {"backend": "auto", "quantize_pv": False}
    for name, x in options.items():
        if x is not None and x != defaults.get(name):
            raise ArgumentError(f"{name}: goes without op=, which says all about the operator; got {x!r} and {op}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise DTypeError(f"{name}: operator classes take tensors (fmha.Inputs, InputsFp8), got {type(x).__name__}")
    fw, bw = op if isinstance(op, tuple) else (op, None)
    return differentiable(Inputs(query, key, value, attn_bias, p, scale, output_dtype, is_partial=partial), fw, bw)


class _ByOperators(torch.autograd.Function):
    """Forward by one operator class, backward by another."""

    @staticmethod
    def forward(ctx: Any, fw: FwOp, bw: BwOp, inp: Inputs, *tensors: torch.Tensor | None) -> tuple[Any, Any]:
        out, kept = fw.apply(inp, needs_gradient=True)
        assert kept is not None
        if kept.op_bw not in (None, bw):
            raise ArgumentError(f"op: {fw.NAME} goes with the backward {kept.op_bw.NAME} only, got {bw.NAME}")
        ctx.bw, ctx.options = bw, {f.name: getattr(inp, f.name) for f in dataclasses.fields(Inputs)[3:]}
        if isinstance(inp.attn_bias, torch.Tensor):  # saved below
            ctx.options["attn_bias"] = None
        ctx.rng_state = kept.rng_state
        ctx.save_for_backward(*tensors, out, kept.lse)
        ctx.mark_non_differentiable(kept.lse)
        return out, kept.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        query, key, value, bias, out, lse = ctx.saved_tensors
        inp = Inputs(query, key, value, **ctx.options)
        if bias is not None:
            inp.attn_bias = bias
        found = ctx.bw.apply(Context(lse=lse, out=out, rng_state=ctx.rng_state), inp, grad)
        return None, None, None, found.dq, found.dk, found.dv, found.db


def _prepared(inp: Inputs, op: FwOp | None) -> tuple[tuple[int, ...], FwOp]:
    """The output's shape and the operator; `inp` is checked and normalised in place."""
    _validate(inp, op)
    return inp.normalize_bmhk(), forward_operator(inp, op)


def _validate(inp: Inputs, op: Any) -> None:
    """MSLK's rules for its operators; without one the library's, which are wider, apply where the call is made."""
    inp.check_ranks() if op is None else inp.validate_inputs()


def no_dropout(p: float) -> None:
    if p != 0.0:
        raise UnsupportedError(f"p: dropout is not supported, got p = {p}; accepted is 0.0")
