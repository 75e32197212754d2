"""The `memory_efficient_attention` family and `merge_attentions` on torch tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

import pallas_kernels as pk
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.masks import NormalForm
from pallas_kernels.problem import MaskParts, Problem, build

from . import _route
from ._call import jax_dtype, run
from .fmha import attn_bias as biases


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
    into the group, never materialised. Tensors lie on the CPU or on one GPU. On a Hopper GPU, calls that the kernels
    cover are launched directly, on the current stream and without JAX's CUDA client; others go through JAX, with one
    `FallbackWarning` for each reason.
    """
    return _attention(**locals())[0]


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
    return _attention(**locals())


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
    return _attention(**locals(), partial=True)


def merge_attentions(
    attn_split: torch.Tensor | Sequence[torch.Tensor],
    lse_split: torch.Tensor | Sequence[torch.Tensor],
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`pallas_kernels.merge_attentions` on torch tensors; differentiable in every chunk and LSE."""

    def merge(attn: Any, lse: Any) -> Any:
        return pk.merge_attentions(attn, lse, write_lse, jax_dtype(output_dtype))

    return run(merge, attn_split, lse_split)


def served_by(*arguments: Any, **keywords: Any) -> _route.Served:
    """(backend, splits) of this call of `memory_efficient_attention`; raises what the call would, computes nothing."""
    call = inspect.signature(memory_efficient_attention).bind(*arguments, **keywords)
    call.apply_defaults()
    return _attention(**call.arguments, answer=_route.serving)


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
    **options: Any,
) -> Any:
    if op is not None:
        raise UnsupportedError(f"op: operator classes are not accepted by this version, got {op}; use backend=")
    form: biases.Lowered | None = None
    bias, slotted = attn_bias, True
    _route.check_tensors(query, key, value)
    key, value = _folded(query, key, value)
    if isinstance(attn_bias, biases.AttentionBias):
        queries, rows = query.shape[1], key.shape[0] * key.shape[1]
        biases.host_check(attn_bias, queries, rows)
        form = biases.normal_form(attn_bias, query.shape[0], queries, rows, device=query.device)
        bias = form.tensor_bias
        slotted = not form.packed or isinstance(getattr(attn_bias, "k_seqinfo", None), biases._PaddedSeqLenInfo)

    def normalise(query: Any, key: Any, value: Any, bias: Any, sinks: Any, kv_lengths: Any, lowered: Any) -> Any:
        parts = None
        if form is not None:
            parts = MaskParts(NormalForm(*lowered), form.window, form.page_size, form.packed, slotted)
        return build(
            query=query,
            key=key,
            value=value,
            attn_bias=bias,
            sinks=sinks,
            kv_lengths=kv_lengths,
            output_dtype=jax_dtype(output_dtype),
            parts=parts,
            **options,
        )

    def tensors(problem: Problem) -> dict[str, torch.Tensor]:
        """The inputs of the problem's program."""
        given = {"q": query, "k": key, "v": value}
        if form is not None and form.packed:
            given |= {"q_start": form.q_start, "k_len": form.k_len}
            return given if form.block_table is None else {**given, "block_table": form.block_table}
        return given if kv_lengths is None else {**given, "k_len": kv_lengths}

    lowered = None if form is None else (form.q_start, form.k_start, form.k_len, form.block_table)
    reduced = None if form is None else (form.window, form.page_size, form.packed, slotted)
    static = ("attention", output_dtype, reduced, *((n, type(x), x) for n, x in options.items()))
    return answer(normalise, (query, key, value, bias, sinks, kv_lengths, lowered), static, backend, tensors)


def _folded(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Heads expanded from one to the query's (stride 0 in both) -> that one head; the query heads become its group."""
    axis = {4: 2, 5: 3}.get(query.ndim)
    if axis is None or not (isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
        return key, value
    if query.ndim != key.ndim or key.shape != (*value.shape[:-1], key.shape[-1]):
        return key, value
    if key.shape[axis] == query.shape[axis] > 1 and key.stride(axis) == value.stride(axis) == 0:
        return key.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    return key, value
