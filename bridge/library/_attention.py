"""`pallas_splitk::attention` and its backward: the `memory_efficient_attention` family."""

from __future__ import annotations

from typing import Any

import torch

from pallas_kernels.errors import UnsupportedError

from .. import _flat, _gradients
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
    f"{QKV}, Tensor? bias=None, Tensor? sinks=None, Tensor? kv_lengths=None, Tensor? q_start=None, "
    "Tensor? k_start=None, Tensor? k_len=None, Tensor? block_table=None, Tensor[]? coefficients=None, *, "
    f"ScalarType? output_dtype=None, bool partial=False, float? scale=None, float? softcap=None, {SPLITS}, "
    "SymInt? window_left=None, SymInt? window_right=None, bool top_left=False, SymInt? page_size=None, "
    'bool packed=False, bool slotted=True, bool quantize_pv=False, str formats="", str backend="auto"'
)


def attention(
    query: Any, key: Any, value: Any, bias: Any, sinks: Any, kv_lengths: Any, mask: _flat.Mask, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on a mask and on tensors or formats. options: the keywords of `_flat.attend`."""
    _flat.check_options(options)
    if (p := options.pop("p")) != 0.0:
        raise UnsupportedError(f"p: dropout is not supported, got p = {p}; accepted is 0.0")
    bias, kv_lengths = _flat.as_tensor(bias, "attn_bias"), _flat.as_tensor(kv_lengths, "kv_lengths")
    check_sinks(sinks)
    (query, key, value), coefficients, formats = _flat.flatten_formats(query, key, value)
    check_no_tangents((query, key, value, bias, sinks, *coefficients))
    if (what := _inference_only(formats, mask.page_size)) is not None:
        refuse_gradient((query, key, value, bias, sinks, *coefficients), what)
    return ops.attention(
        query,
        key,
        value,
        bias,
        sinks,
        kv_lengths,
        mask.q_start,
        mask.k_start,
        mask.k_len,
        mask.block_table,
        coefficients or None,
        window_left=mask.left,
        window_right=mask.right,
        top_left=mask.top_left,
        page_size=mask.page_size,
        packed=mask.packed,
        slotted=mask.slotted,
        formats=formats,
        **options,
    )


def _inference_only(formats: str, page_size: Any) -> str | None:
    if formats:
        return "key and value are low-bit"
    return None if page_size is None else "key and value are paged (block_table)"


def _mask(tensors: tuple[Any, ...], options: dict[str, Any]) -> _flat.Mask:
    """Takes the mask's numbers out of the options."""
    names = ("window_left", "window_right", "top_left", "page_size", "packed", "slotted")
    return _flat.Mask(*tensors, *(options.pop(name) for name in names))


def _real(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    sinks: Any,
    kv_lengths: Any,
    q_start: Any,
    k_start: Any,
    k_len: Any,
    block_table: Any,
    coefficients: Any,
    *,
    formats: str,
    **options: Any,
) -> Any:
    mask = _mask((q_start, k_start, k_len, block_table), options)
    query, key, value = _flat.restore_formats((query, key, value), coefficients or (), formats)
    return _flat.attend(query, key, value, bias, sinks, kv_lengths, mask, **options)


def _fake(
    query: Any, key: Any, value: Any, *rest: Any, output_dtype: Any, partial: bool, packed: bool, formats: str, **_: Any
) -> Any:
    same_device(query, key, value, *rest[:-1])
    out_dtype = output_dtype or query.dtype
    if output_dtype is None and partial and query.dtype != torch.float64:
        out_dtype = torch.float32
    heads, queries = query.shape[2:-1] or (1,), query.shape[1]
    lse_dtype = torch.float64 if out_dtype in (torch.float32, torch.float64) else torch.float32
    out = query.new_empty((*query.shape[:-1], _flat.last_axis(value, formats, 2)), dtype=out_dtype)
    return out, query.new_empty((1 if packed else query.shape[0], *heads, queries), dtype=lse_dtype)


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    options = dict(keyword_only_inputs)
    if (what := _inference_only(options.pop("formats"), options["page_size"])) is not None:
        raise no_gradient(what)
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    *inputs, out, lse = ctx.saved_tensors
    return given(
        ctx, ops.attention_backward(grad_out, grad_lse, out, lse, wanted(ctx, range(5)), *inputs, **ctx.options)
    )


def _real_backward(
    grad_out: Any,
    grad_lse: Any,
    out: Any,
    lse: Any,
    wanted: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    sinks: Any,
    kv_lengths: Any,
    q_start: Any,
    k_start: Any,
    k_len: Any,
    block_table: Any,
    coefficients: Any,
    *,
    output_dtype: Any,
    backend: str,
    formats: str,
    **options: Any,
) -> Any:
    mask = _mask((q_start, k_start, k_len, block_table), options)
    normalise = _flat.normaliser(mask, output_dtype, options)
    arguments = (query, key, value, bias, sinks, kv_lengths, mask[:4])
    return _gradients.backward(normalise, arguments, range(5), wanted, out, lse, grad_out, grad_lse, backend)


def _fake_backward(grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, *inputs: Any, **_: Any) -> Any:
    return like(inputs[:5], wanted)


register("attention", f"({_ARGUMENTS}) -> (Tensor out, Tensor lse)", _real, _fake, backward=_backward, setup=_setup)
register(
    "attention_backward",
    f"({GRADS}, Tensor out, Tensor lse, bool[5] wanted, {_ARGUMENTS})"
    " -> (Tensor? query, Tensor? key, Tensor? value, Tensor? bias, Tensor? sinks)",
    _real_backward,
    _fake_backward,
)
autocast("attention")
