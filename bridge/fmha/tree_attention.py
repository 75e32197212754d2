"""Attention of a tree of speculative tokens: over the cache, and among themselves (MSLK tree_attention)."""

from __future__ import annotations

import torch

from pallas_kernels.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

from .attn_bias import AttentionBias
from .attn_bias.base import PagedBias
from .entry_points import (
    _memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
)
from .inputs import InputsFp8
from .merge import merge_attentions
from .operators import AttentionFwOpBase
from .tree_choices import (
    TreeAttnMetadata,
    construct_full_tree_choices,
    construct_tree_choices,
    get_full_tree_size,
)
from .triton_splitk import FwOp


class SplitKAutotune(FwOp):
    """The split-K operator, tuned on first use in MSLK; here as `FwOp`."""

    AUTOTUNE = True


def use_triton_splitk_for_prefix(B: int, G: int, tree_size: int) -> bool:
    """MSLK's choice of split-K for the cache's part, by batch, head groups and tree size. For reading: the operator
    here is one for all sizes."""
    return (B * G <= 128 and tree_size <= 64) or (B * G < 4 and tree_size < 100) or B * G < 2


def tree_attention(
    q: torch.Tensor,
    spec_k: torch.Tensor,
    spec_v: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    spec_attn_bias: torch.Tensor,
    prefix_attn_bias: AttentionBias,
    prefix_op: type[AttentionFwOpBase] | None = None,
    suffix_op: type[AttentionFwOpBase] | None = None,
    autotune: bool = False,
    quantized_kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    q_fp8: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention [B, tq, (G,) H, D] of tq tree nodes over the cache and over the tree's own keys; no gradient.

    q: [B, tq, (G,) H, D]. spec_k, spec_v: [B, tkv, (G,) H, D], tkv >= tq; the queries are the last tq nodes.
    cache_k, cache_v: [B, Mk, (G,) H, D], with a paged bias [1, pages * page_size, ...]; uint8 for e4m3, with
    quantized_kv_scales = int32 words (half scale low, half shift high) of k and v, one a row of a head.
    spec_attn_bias: [tq, tkv], such as TreeAttnMetadata.attention_bias. prefix_attn_bias: block-diagonal with tq
    queries a sequence, usually padded and not causal. prefix_op, suffix_op: forward operator classes, default this
    library's widest. autotune has no effect. q_fp8 is not served.

    Raises ShapeError (an AssertionError), ArgumentError, DTypeError, UnsupportedError; all are ValueErrors.
    """
    if q_fp8 is not None or cache_k.dtype == torch.float8_e4m3fn:
        raise UnsupportedError("q_fp8, cache_k: caches with a scale a tensor are not served; accepted are uint8 caches")
    _check(q, spec_k, spec_v, cache_k, cache_v, spec_attn_bias, prefix_attn_bias)
    batch, queries, *heads, _ = q.shape

    def packed(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])

    if cache_k.dtype == torch.uint8:
        if quantized_kv_scales is None:
            raise ArgumentError("quantized_kv_scales: must be given with a uint8 cache")
        key, value = (packed(x).view(torch.int32) for x in (cache_k, cache_v))
        k_scale, v_scale = (x.reshape(key.shape[:-1]) for x in quantized_kv_scales)
        inp = InputsFp8(packed(q), key, value, prefix_attn_bias, is_partial=True)
        inp.k_fp8_scale_shift, inp.v_fp8_scale_shift = k_scale, v_scale
        prefix, ctx = _memory_efficient_attention_forward_requires_grad(inp, prefix_op)
        prefix_lse = ctx.lse
    elif quantized_kv_scales is not None:
        raise DTypeError(f"cache_k: quantized_kv_scales go with a uint8 cache, got {cache_k.dtype}")
    else:
        prefix, prefix_lse = memory_efficient_attention_partial(
            packed(q), packed(cache_k), packed(cache_v), prefix_attn_bias, op=prefix_op
        )
    prefix = prefix.reshape(q.shape)
    prefix_lse = prefix_lse.reshape(*heads, batch, queries).movedim(-2, 0)

    bias = spec_attn_bias.expand(batch, *heads, *spec_attn_bias.shape)
    suffix, suffix_lse = memory_efficient_attention_forward_requires_grad(q, spec_k, spec_v, bias, op=suffix_op)
    with torch.no_grad():
        return merge_attentions([prefix, suffix], [prefix_lse, suffix_lse], output_dtype=q.dtype)[0]


def _check(
    q: torch.Tensor,
    spec_k: torch.Tensor,
    spec_v: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    spec_attn_bias: torch.Tensor,
    prefix_attn_bias: AttentionBias,
) -> None:
    if q.ndim not in (4, 5):
        raise ShapeError(f"q: expected [B, tq, H, D] or [B, tq, G, H, D], got {tuple(q.shape)}")
    for name, x in (("spec_k", spec_k), ("spec_v", spec_v), ("cache_k", cache_k), ("cache_v", cache_v)):
        if x.shape[2:] != q.shape[2:]:
            raise ShapeError(f"{name}: expected query's heads and head dim {tuple(q.shape[2:])}, got {tuple(x.shape)}")
    if cache_k.shape != cache_v.shape:
        raise ShapeError(f"cache_v: expected cache_k's shape {tuple(cache_k.shape)}, got {tuple(cache_v.shape)}")
    rows = 1 if isinstance(prefix_attn_bias, PagedBias) else q.shape[0]
    if cache_k.shape[0] != rows:
        raise ShapeError(f"cache_k: expected batch {rows} for this prefix_attn_bias, got {cache_k.shape[0]}")
    shape = (q.shape[1], spec_k.shape[1])
    if spec_attn_bias.shape != shape or spec_k.shape != spec_v.shape or shape[0] > shape[1]:
        raise ShapeError(
            f"spec_attn_bias: expected [tq, tkv] with tq <= tkv, of q and spec_k {shape}, "
            f"got {tuple(spec_attn_bias.shape)}, spec_v {tuple(spec_v.shape)}"
        )


__all__ = [
    "SplitKAutotune",
    "TreeAttnMetadata",
    "construct_full_tree_choices",
    "construct_tree_choices",
    "get_full_tree_size",
    "tree_attention",
    "use_triton_splitk_for_prefix",
]
