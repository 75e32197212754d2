"""The `out` of `varlen_attn_out`: what may be given, and how a result that lies elsewhere gets there."""

from __future__ import annotations

from typing import Any

import torch

from pallas_kernels.errors import ArgumentError, DeviceError, DTypeError, GradientError, ShapeError

from . import _route
from .exchange import overlaps


def check(out: Any, query: torch.Tensor, key: Any, value: Any, *others: torch.Tensor | None) -> None:
    """Raises where a call cannot write `out`; others: its further inputs."""
    if not isinstance(out, torch.Tensor):
        raise DTypeError(f"out: expected a tensor, got {type(out).__name__}")
    _route.check_tensors(query, key, value)
    expected = (*query.shape[:-1], value.shape[-1])
    if out.shape != expected:
        raise ShapeError(f"out: expected shape {expected}, got {tuple(out.shape)}")
    if out.dtype != query.dtype:
        raise DTypeError(f"out: expected query's dtype {query.dtype}, got {out.dtype}")
    if out.device != query.device:
        raise DeviceError(f"out: expected query's device {query.device}, got {out.device}")
    inputs = [x for x in (query, key, value, *others) if x is not None]
    if any([type(x) is not torch.Tensor for x in inputs]):
        inputs = [part for x in inputs for part in _tensors(x)]
    if torch.is_grad_enabled() and any([x.requires_grad for x in (out, *inputs)]):
        raise GradientError("out: varlen_attn_out has no gradient; call varlen_attn, or use torch.no_grad()")
    if not out.is_contiguous() and overlaps(out):
        raise ArgumentError("out: an expanded tensor (elements that share memory) cannot be written")
    low, high = _span(out)
    for x in inputs:
        first, last = _span(x)
        if low < last and first < high and x.device == out.device:
            raise ArgumentError("out: must not overlap query, key, value or another input in memory")


def direct(out: torch.Tensor) -> torch.Tensor | None:
    """`out` where a kernel may write it itself."""
    return out if out.is_contiguous() and out.data_ptr() % 16 == 0 else None


def fill(out: torch.Tensor, result: torch.Tensor, query: torch.Tensor, cu_seq_q: torch.Tensor) -> None:
    """The rows in use. On a GPU their number is not read back: the rest is written too, as zeros."""
    if result is not out:
        used = query.shape[0] if query.is_cuda else int(cu_seq_q[-1])
        out[:used].copy_(result[:used])


def _tensors(x: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of an argument: of a tensor itself, of a format its parts."""
    if isinstance(x, torch.Tensor):
        return (x,)
    return tuple(part for part in vars(x).values() if isinstance(part, torch.Tensor)) if hasattr(x, "opened") else ()


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses [first, last) between which a tensor's elements lie."""
    first = x.data_ptr()
    if x.is_contiguous() or not x.numel():
        return first, first + x.nbytes
    return first, first + (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()
