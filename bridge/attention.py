"""The `memory_efficient_attention` family on torch tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from pallas_kernels.errors import UnsupportedError

from . import _flat, _lean, _route, library
from .fmha import attn_bias as biases
from .fmha import entry_points


def memory_efficient_attention(
    query: torch.Tensor,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    quantize_pv: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """`pallas_kernels.memory_efficient_attention` on torch tensors, differentiable by torch's autograd.

    Shapes, options and results are those of the JAX function. `attn_bias` is None, a tensor, or one of
    `bridge.fmha.attn_bias`; `key` and `value` are tensors or `bridge.formats`. Expanded heads (stride 0) are folded
    into the group, never materialised, unless they are differentiated: then each has a gradient of its own. Tensors lie
    on the CPU or on one GPU. On a Hopper GPU, calls that the kernels cover are launched directly, on the current stream
    and without JAX's CUDA client; others go through JAX, with one `FallbackWarning` for each reason.
    """
    options = (p, scale, op, output_dtype, num_splits, split_size, softcap, quantize_pv, backend)
    return _attend(query, key, value, attn_bias, kv_lengths, sinks, options, want_lse=False)[0]


memory_efficient_attention_forward = memory_efficient_attention


def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    quantize_pv: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), both differentiable. lse is float64 beside a float32 or float64 output, else float32."""
    options = (p, scale, op, output_dtype, num_splits, split_size, softcap, quantize_pv, backend)
    return _attend(query, key, value, attn_bias, kv_lengths, sinks, options)


def memory_efficient_attention_partial(
    query: torch.Tensor,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    quantize_pv: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over a part of the keys, float32 and float64 by default, to be joined by `merge_attentions`.

    Give `sinks` to one of the parts only: a sink counts as a key.
    """
    options = (p, scale, op, output_dtype, num_splits, split_size, softcap, quantize_pv, backend)
    return _attend(query, key, value, attn_bias, kv_lengths, sinks, options, partial=True)


def served_by(*arguments: Any, **keywords: Any) -> _route.Served:
    """(backend, splits) of this call of `memory_efficient_attention`; raises what the call would, computes nothing."""
    call = inspect.signature(memory_efficient_attention).bind(*arguments, **keywords)
    call.apply_defaults()
    return _attention(**call.arguments, answer=_route.serving)


OPTIONS = ("p", "scale", "op", "output_dtype", "num_splits", "split_size", "softcap", "quantize_pv", "backend")


def _attend(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    kv_lengths: Any,
    sinks: Any,
    options: tuple[Any, ...],
    partial: bool = False,
    want_lse: bool = True,
) -> Any:
    """(out, lse or None) of a call: at once if its like was launched before, else the long way. options: OPTIONS."""
    call = None
    if not library.needed((query, key, value, attn_bias, sinks, kv_lengths)):
        call = _lean.attention(query, key, value, attn_bias, kv_lengths, sinks, options, partial)
        if call is not None and (found := _lean.run(call, want_lse)) is not None:
            return found
    return _attention(
        query=query,
        key=key,
        value=value,
        attn_bias=attn_bias,
        sinks=sinks,
        kv_lengths=kv_lengths,
        call=call,
        partial=partial,
        **dict(zip(OPTIONS, options)),
    )


def _attention(
    *,
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    sinks: Any,
    kv_lengths: Any,
    op: Any,
    output_dtype: torch.dtype | None,
    backend: str,
    answer: Callable[..., Any] = _route.answer,
    call: _lean.Call | None = None,
    **options: Any,
) -> Any:
    if op is not None:
        if answer is _route.serving:
            raise UnsupportedError(f"op: an operator class says itself what serves, got {op}")
        options |= {"backend": backend, "sinks": sinks, "kv_lengths": kv_lengths}
        return entry_points.by_operator(query, key, value, attn_bias, op, output_dtype, **options)
    _route.check_tensors(query, key, value)
    _flat.check_output_dtype(output_dtype)
    key, value = _folded(query, key, value)
    rows = key.shape[0] * key.shape[1]
    if isinstance(attn_bias, biases.AttentionBias) and not torch.compiler.is_compiling():
        biases.host_check(attn_bias, query.shape[1], rows)  # a compiled call must not depend on the host lists
    mask, bias = _flat.flatten_bias(attn_bias, rows)
    flat = (query, key, value, _unexpanded(bias), sinks, kv_lengths, mask)
    options |= {"output_dtype": output_dtype, "backend": backend}
    if answer is not _route.serving:
        if library.needed(flat[:6]):
            return library.attention(*flat, **options)
        answer = functools.partial(answer, call=call)
    return _flat.attend(*flat, answer=answer, **options)


def _own_gradients(x: Any) -> bool:
    """Whether each element may be asked for a gradient of its own, also those that share memory."""
    return torch.is_grad_enabled() and x.requires_grad


def _unexpanded(bias: Any) -> Any:
    """A tensor bias without its expanded axes (stride 0): they are broadcast, never written out."""
    if isinstance(bias, torch.Tensor) and not _own_gradients(bias):
        for axis, (size, stride) in enumerate(zip(bias.shape, bias.stride())):
            if stride == 0 and size > 1:
                bias = bias.narrow(axis, 0, 1)
    return bias


def _folded(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Heads expanded from one to the query's (stride 0 in both) -> that one head; the query heads become its group."""
    axis = {4: 2, 5: 3}.get(query.ndim)
    if axis is None or not (isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
        return key, value
    if query.ndim != key.ndim or key.shape != (*value.shape[:-1], key.shape[-1]):
        return key, value
    if _own_gradients(key) or _own_gradients(value):
        return key, value
    if key.shape[axis] == query.shape[axis] > 1 and key.stride(axis) == value.stride(axis) == 0:
        return key.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    return key, value
