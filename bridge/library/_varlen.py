"""`pallas_splitk::varlen`, `varlen_out` and the backward: packed sequences."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pallas_kernels.errors import DTypeError, GradientError, ShapeError

from .. import _flat, _gradients, _route, _varlen_out
from ._registry import (
    GRADS,
    QKV,
    SPLITS,
    autocast,
    check_no_tangents,
    check_sinks,
    given,
    like,
    no_gradient,
    ops,
    refuse_gradient,
    register,
    same_device,
    wanted,
)

_ARGUMENTS = (
    f"{QKV}, Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, SymInt max_k, Tensor? seqused_k=None, "
    "Tensor? block_table=None, Tensor? sinks=None, Tensor[]? coefficients=None, *, float? scale=None, "
    f"SymInt[] window_size=[-1, -1], bool enable_gqa=False, {SPLITS}, float? softcap=None, "
    'str formats="", str backend="auto"'
)


def varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: Any,
    max_k: Any,
    seqused_k: Any,
    block_table: Any,
    sinks: Any,
    *,
    out: torch.Tensor | None = None,
    window_size: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on tensors or formats, into `out` if that is given. options: the keywords of `_flat.attend_varlen`."""
    _flat.check_options({**options, "window_size": window_size})
    cu_seq_q, cu_seq_k = _flat.as_tensor(cu_seq_q, "cu_seq_q"), _flat.as_tensor(cu_seq_k, "cu_seq_k")
    seqused_k, block_table = _flat.as_tensor(seqused_k, "seqused_k"), _flat.as_tensor(block_table, "block_table")
    check_sinks(sinks)
    (query, key, value), coefficients, formats = _flat.flatten_formats(query, key, value)
    check_no_tangents((query, key, value, sinks, *coefficients))
    if (what := _inference_only(formats, seqused_k, block_table)) is not None:
        refuse_gradient((query, key, value, sinks, *coefficients), what)
    call = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, sinks, coefficients or None)
    options |= {"window_size": list(window_size), "formats": formats}
    tensors = [x for x in (out, query, key, value, sinks) if x is not None]
    if out is not None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise GradientError("out: varlen_attn_out has no gradient; call varlen_attn, or use torch.no_grad()")
    if out is None:
        return ops.varlen(*call, **options)
    return out, ops.varlen_out(out, *call, **options)


@torch.compiler.assume_constant_result  # as torch's own `varlen_attn` takes it while it is traced
def flash_enabled() -> bool:
    """Whether the user lets SDPA's flash backend run, of which `varlen_attn` is a part."""
    return torch.backends.cuda.flash_sdp_enabled()


def _inference_only(formats: str, seqused_k: Any, block_table: Any) -> str | None:
    if formats:
        return "key and value are low-bit"
    for x, name in ((block_table, "block_table"), (seqused_k, "seqused_k")):
        if x is not None:
            return f"{name} is given"
    return None


def _real(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    seqused_k: Any,
    block_table: Any,
    sinks: Any,
    coefficients: Any,
    *,
    formats: str,
    **options: Any,
) -> Any:
    query, key, value = _flat.restore_formats((query, key, value), coefficients or (), formats)
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table)
    return _flat.attend_varlen(query, key, value, *lengths, sinks, **options)


def _fake(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, *rest: Any, formats: str, **_: Any
) -> Any:
    same_device(query, key, value, cu_q, cu_k, *rest[:3])
    out = query.new_empty((*query.shape[:-1], _flat.last_axis(value, formats, 2)))
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty((query.shape[1], query.shape[0]), dtype=lse_dtype)


def _real_out(out: torch.Tensor, *args: Any, formats: str, **options: Any) -> torch.Tensor:
    *first, cu_seq_q, cu_seq_k, max_q, max_k, used, table, sinks, coefficients = args
    query, key, value = _flat.restore_formats(first, coefficients or (), formats)
    _varlen_out.check(out, query, key, value, cu_seq_q, cu_seq_k, used, table, sinks)
    call = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, used, table, sinks)
    answer = functools.partial(_route.answer, out=_varlen_out.direct(out))
    result, lse = _flat.attend_varlen(*call, answer=answer, **options)
    _varlen_out.fill(out, result, query, cu_seq_q)
    return lse


def _fake_out(out: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    result, lse = _fake(*args, **options)
    same_device(out, result)
    if out.shape != result.shape:
        raise ShapeError(f"out: expected shape {tuple(result.shape)}, got {tuple(out.shape)}")
    if out.dtype != result.dtype:
        raise DTypeError(f"out: expected query's dtype {result.dtype}, got {out.dtype}")
    return lse


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    options = dict(keyword_only_inputs)
    query, key, value, cu_q, cu_k, ctx.max_q, ctx.max_k, used, table, sinks, _ = inputs
    if (what := _inference_only(options.pop("formats"), used, table)) is not None:
        raise no_gradient(what)
    ctx.save_for_backward(query, key, value, cu_q, cu_k, sinks, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    query, key, value, cu_q, cu_k, sinks, out, lse = ctx.saved_tensors
    inputs = (query, key, value, cu_q, cu_k, ctx.max_q, ctx.max_k, None, None, sinks)
    d = ops.varlen_backward(grad_out, grad_lse, out, lse, wanted(ctx, (0, 1, 2, 9)), *inputs, **ctx.options)
    return given(ctx, (*d[:3], *(None,) * 6, d[3]))


def _real_backward(
    grad_out: Any,
    grad_lse: Any,
    out: Any,
    lse: Any,
    wanted: Any,
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    seqused_k: Any,
    block_table: Any,
    sinks: Any,
    coefficients: Any,
    *,
    formats: str,
    backend: str,
    **options: Any,
) -> Any:
    normalise = _flat.varlen_normaliser(max_q, max_k, options)
    arguments = (query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, sinks)
    return _gradients.backward(normalise, arguments, (0, 1, 2, 7), wanted, out, lse, grad_out, grad_lse, backend)


def _fake_backward(grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, *inputs: Any, **_: Any) -> Any:
    return like((*inputs[:3], inputs[9]), wanted)


register("varlen", f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _real, _fake, backward=_backward, setup=_setup)
register("varlen_out", f"(Tensor(a!) out, {_ARGUMENTS}) -> Tensor lse", _real_out, _fake_out, differentiable=False)
register(
    "varlen_backward",
    f"({GRADS}, Tensor out, Tensor lse, bool[4] wanted, {_ARGUMENTS})"
    " -> (Tensor? query, Tensor? key, Tensor? value, Tensor? sinks)",
    _real_backward,
    _fake_backward,
)
autocast("varlen")
autocast("varlen_out", first=1)
