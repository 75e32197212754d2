"""`varlen_attn` and `varlen_attn_out` on torch tensors: PyTorch's names, arguments and order, then this library's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pallas_kernels import AuxRequest
from pallas_kernels.errors import ArgumentError, DeviceError, DTypeError, GradientError, ShapeError, UnsupportedError
from pallas_kernels.problem import Problem
from pallas_kernels.varlen import build, check_aux

from . import _route
from .exchange import overlaps


def varlen_attn(
    query: torch.Tensor,
    key: Any,
    value: Any,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: Sequence[int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed sequences; arguments and results as `pallas_kernels.varlen_attn`, on torch tensors.

    Differentiable in query, key, value and sinks, through the output and the LSE. Rows that see no key are 0 and
    their LSE is -inf. Raises RuntimeError where the user has disabled the flash backend of SDPA.
    """
    if not torch.backends.cuda.flash_sdp_enabled():
        raise UnsupportedError("varlen_attn: SDPBackend.FLASH_ATTENTION is disabled; enable it with sdpa_kernel()")
    _route.check_tensors(query, key, value)
    check_aux(return_aux)
    options: dict[str, Any] = dict(
        scale=scale,
        window_size=window_size,
        enable_gqa=enable_gqa,
        num_splits=num_splits,
        split_size=split_size,
        softcap=softcap,
    )

    def normalise(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, used: Any, table: Any, sinks: Any) -> Any:
        return build(
            query, key, value, cu_q, cu_k, max_q, max_k, seqused_k=used, block_table=table, sinks=sinks, **options
        )

    def tensors(problem: Problem) -> dict[str, torch.Tensor]:
        """The inputs of the problem's program, which reads paged keys only."""
        assert seqused_k is not None and block_table is not None
        return {"q": query, "k": key, "v": value, "q_start": cu_seq_q, "k_len": seqused_k, "block_table": block_table}

    arguments = (query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, sinks)
    static = ("varlen", max_q, max_k, *((n, type(x), _hashable(x)) for n, x in options.items()))
    out, lse = _route.answer(normalise, arguments, static, backend, tensors)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def _hashable(option: Any) -> Any:
    return tuple(option) if isinstance(option, (list, tuple)) else option


def varlen_attn_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: Any,
    value: Any,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`varlen_attn` into `out` [Tq, Hq, Dv] of the query's dtype and device; returns that same tensor.

    Rows beyond cu_seq_q[N] are outside the contract. No gradient is defined. Keywords as `varlen_attn`.
    """
    _check_out(out, query, key, value)
    with torch.no_grad():
        result, lse = varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=AuxRequest(lse=True), **options
        )
        # On a GPU the number of rows in use is not read back: the rest is written too, as zeros.
        used = query.shape[0] if query.is_cuda else int(cu_seq_q[-1])
        out[:used].copy_(result[:used])
    return (out, lse) if return_aux is not None and return_aux.lse else out


def _check_out(out: Any, query: torch.Tensor, key: Any, value: Any) -> None:
    if not isinstance(out, torch.Tensor):
        raise DTypeError(f"out: expected a tensor, got {type(out).__name__}")
    expected = (*query.shape[:-1], value.shape[-1])
    if tuple(out.shape) != expected:
        raise ShapeError(f"out: expected shape {expected}, got {tuple(out.shape)}")
    if out.dtype != query.dtype:
        raise DTypeError(f"out: expected query's dtype {query.dtype}, got {out.dtype}")
    if out.device != query.device:
        raise DeviceError(f"out: expected query's device {query.device}, got {out.device}")
    inputs = [x for x in (query, key, value) if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (out, *inputs)):
        raise GradientError("out: varlen_attn_out has no gradient; call varlen_attn, or use torch.no_grad()")
    if overlaps(out):
        raise ArgumentError("out: an expanded tensor (elements that share memory) cannot be written")
    if any(_overlap(out, x) for x in inputs):
        raise ArgumentError("out: must not overlap query, key or value in memory")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""

    def span(x: torch.Tensor) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    if not a.numel() or not b.numel():
        return False
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1
