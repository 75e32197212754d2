"""`merge_attentions`, with the errors of MSLK's, and its two operators in torch.library.

The function has no gradient: one through the chunks alone would be wrong, since attention's LSE depends on query and
key too. `bridge.merge_attentions` is differentiable in both, `merge_attentions_autograd` by `Partial`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

import bridge
from pallas_kernels.errors import ArgumentError, GradientError, ShapeError

from ..library import _flops

Chunks = torch.Tensor | Sequence[torch.Tensor]


def merge_attentions(
    attn_split: Chunks, lse_split: Chunks, write_lse: bool = True, output_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join n partial attentions: out = sum_i w_i out_i, w_i = exp(lse_i - lse), lse = log sum_i exp(lse_i).

    attn_split: n chunks [B, M, G, H, K] or [B, M, H, K], a list or stacked along axis 0; those of a list may differ in
    dtype. lse_split: as many [B, G, H, M] or [B, H, M], likewise. Returns (out in `output_dtype`, default the first
    chunk's; lse in the first LSE's dtype, or None without `write_lse`); 0 and -inf for rows that no chunk sees.

    Raises ShapeError (a ValueError and AssertionError) for chunks that do not fit one another, ArgumentError (a
    ValueError) where a gradient is wanted without `write_lse`; a backward raises NotImplementedError.
    """
    attn, lse = _listed(attn_split), _listed(lse_split)
    _check(attn, lse)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*attn, *lse))):
        return bridge.merge_attentions(attn_split, lse_split, write_lse, output_dtype)
    if not write_lse:
        raise ArgumentError("write_lse: must be True where a chunk requires grad, got False")
    flat = attn[0].ndim == 4
    if flat:
        attn, lse = [x.unsqueeze(2) for x in attn], [x.unsqueeze(1) for x in lse]
    b, m, g, h, k = attn[0].shape
    chunks = [x.permute(0, 2, 3, 1, 4) for x in attn]
    out, merged = merge_attentions_varargs(chunks, lse, write_lse, output_dtype, b, m, g, h, k)
    return (out[:, :, 0], merged[:, 0]) if flat else (out, merged)


def _listed(x: Chunks) -> list[torch.Tensor]:
    return list(x.unbind(0) if isinstance(x, torch.Tensor) else x)


def _check(attn: list[torch.Tensor], lse: list[torch.Tensor]) -> None:
    if not attn or len(attn) != len(lse):
        raise ShapeError(f"attn_split, lse_split: expected equally many chunks, got {len(attn)} and {len(lse)}")
    first = attn[0].shape
    if len(first) not in (4, 5):
        raise ShapeError(f"attn_split: expected chunks [B, M, G, H, K] or [B, M, H, K], got shape {tuple(first)}")
    rows = (first[0], *first[2:-1], first[1])
    for n, (a, x) in enumerate(zip(attn, lse)):
        if a.shape != first:
            raise ShapeError(f"attn_split[{n}]: expected the first chunk's shape {tuple(first)}, got {tuple(a.shape)}")
        if x.shape != rows:
            raise ShapeError(f"lse_split[{n}]: expected shape {rows}, got {tuple(x.shape)}")


@torch.library.custom_op("pallas_splitk::fmha_merge_attentions_varargs", mutates_args=())
def merge_attentions_varargs(
    attn_split: Sequence[torch.Tensor],
    lse_split: Sequence[torch.Tensor],
    write_lse: bool,
    output_dtype: torch.dtype | None,
    B: int,
    M: int,
    G: int,
    H: int,
    Kq: int,
) -> list[torch.Tensor]:
    """[out [B, M, G, H, Kq]] or [out, lse [B, G, H, M]] from chunks [B, G, H, M, Kq] (mind the order), LSEs alike."""
    if any(x.shape != (B, G, H, M, Kq) for x in attn_split):
        raise ShapeError(f"attn_split: expected chunks of shape {(B, G, H, M, Kq)}, got {_shapes(attn_split)}")
    chunks = [x.permute(0, 3, 1, 2, 4) for x in attn_split]
    with torch.no_grad():
        out, lse = bridge.merge_attentions(chunks, list(lse_split), write_lse, output_dtype)
    return [out] if lse is None else [out, lse]


@merge_attentions_varargs.register_fake
def _merge_attentions_varargs_fake(
    attn_split: Sequence[torch.Tensor],
    lse_split: Sequence[torch.Tensor],
    write_lse: bool,
    output_dtype: torch.dtype | None,
    B: int,
    M: int,
    G: int,
    H: int,
    Kq: int,
) -> list[torch.Tensor]:
    out = attn_split[0].new_empty((B, M, G, H, Kq), dtype=output_dtype or attn_split[0].dtype)
    return [out, lse_split[0].new_empty((B, G, H, M))] if write_lse else [out]


def _no_backward(ctx: Any, grad: Any) -> NoReturn:
    raise GradientError(
        "Backward pass is not implemented for merge_attentions: attention has no gradient through its LSE here, so "
        "one through the chunks alone would be wrong; use merge_attentions_autograd or bridge.merge_attentions"
    )


merge_attentions_varargs.register_autograd(_no_backward)


@torch.library.custom_op("pallas_splitk::fmha_merge_attentions_varargs_backward", mutates_args=())
def merge_attentions_varargs_backward(
    attn_split: list[torch.Tensor],
    lse_split: list[torch.Tensor],
    attn_out: torch.Tensor,
    lse_out: torch.Tensor,
    grad_attn: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of the chunks [B, G, H, M, K] and LSEs [B, G, H, M] of `merge_attentions_varargs`.

    attn_out, grad_attn: [B, M, G, H, K]; lse_out, grad_lse: [B, G, H, M]. Rows without keys have gradient 0.
    """
    for name, x, shape in (
        *((f"attn_split[{n}]", x, attn_split[0].shape) for n, x in enumerate(attn_split)),
        *((f"lse_split[{n}]", x, attn_split[0].shape[:-1]) for n, x in enumerate(lse_split)),
        ("attn_out", attn_out.permute(0, 2, 3, 1, 4), attn_split[0].shape),
        ("grad_attn", grad_attn.permute(0, 2, 3, 1, 4), attn_split[0].shape),
        ("lse_out", lse_out, attn_split[0].shape[:-1]),
        ("grad_lse", grad_lse, attn_split[0].shape[:-1]),
    ):
        if x.shape != shape:
            raise ShapeError(f"{name}: expected sizes {tuple(shape)} as BGHMK, got {tuple(x.shape)}")
    work = torch.float64 if torch.float64 in (attn_out.dtype, grad_attn.dtype) else torch.float32
    out, grad = (x.permute(0, 2, 3, 1, 4).to(work) for x in (attn_out, grad_attn))
    d_attn, d_lse = [], []
    for chunk, lse in zip(attn_split, lse_split):
        seen = lse != -torch.inf
        weight = torch.where(seen, torch.exp(lse - lse_out), 0)
        shared = weight.to(work).unsqueeze(-1) * grad
        along = torch.where(seen, ((chunk.to(work) - out) * shared).sum(-1).to(weight.dtype), 0)
        d_attn.append(shared.to(chunk.dtype).contiguous())
        d_lse.append((weight * grad_lse + along).to(lse.dtype).contiguous())
    return d_attn, d_lse


@merge_attentions_varargs_backward.register_fake
def _merge_attentions_varargs_backward_fake(
    attn_split: list[torch.Tensor],
    lse_split: list[torch.Tensor],
    attn_out: torch.Tensor,
    lse_out: torch.Tensor,
    grad_attn: torch.Tensor,
    grad_lse: torch.Tensor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [x.new_empty(x.shape) for x in attn_split], [x.new_empty(x.shape) for x in lse_split]


_flops.add("fmha_merge_attentions_varargs", _flops.merge)
_flops.add("fmha_merge_attentions_varargs_backward", _flops.merge_backward)


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in tensors]
