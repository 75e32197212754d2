"""`varlen_attn` and `varlen_attn_out` on torch tensors: PyTorch's names, arguments and order, then this library's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from pallas_kernels import AuxRequest
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.varlen import check_aux

from . import _flat, _lean, _route, _varlen_out, library


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
    if not library.flash_enabled():
        raise UnsupportedError("varlen_attn: SDPBackend.FLASH_ATTENTION is disabled; enable it with sdpa_kernel()")
    check_aux(return_aux)
    want_lse = return_aux is not None and return_aux.lse
    call = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, sinks)
    options = (scale, window_size, enable_gqa, num_splits, split_size, softcap, backend)
    out, lse = _attend(call, options, want_lse)
    return (out, lse) if want_lse else out


OPTIONS = ("scale", "window_size", "enable_gqa", "num_splits", "split_size", "softcap", "backend")


def _attend(
    call: tuple[Any, ...], options: tuple[Any, ...], want_lse: bool, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """(out, lse, or None if not wanted) of a call; options: OPTIONS. `out`: written and returned, if a kernel runs."""
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, sinks = call
    needed, looked = library.needed((query, key, value, sinks)), None
    if not needed and block_table is not None and seqused_k is not None:
        tensors = (query, key, value, cu_seq_q, seqused_k, block_table, *(() if sinks is None else (sinks,)))
        looked = _lean.varlen(tensors, cu_seq_k, max_q, max_k, options)
        if looked is not None and (found := _lean.run(looked, want_lse, out)) is not None:
            return found
    _route.check_tensors(query, key, value)
    named = dict(zip(OPTIONS, options))
    if needed:
        return library.varlen(*call, **named)
    return _flat.attend_varlen(*call, answer=functools.partial(_route.answer, call=looked, out=out), **named)


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
    """`varlen_attn` into `out` [Tq, Hq, Dv] of the query's dtype and device; returns that same tensor.

    Rows beyond cu_seq_q[N] are outside the contract. No gradient is defined. Keywords as `varlen_attn`.
    """
    if not library.flash_enabled():
        raise UnsupportedError("varlen_attn_out: SDPBackend.FLASH_ATTENTION is disabled; enable it with sdpa_kernel()")
    check_aux(return_aux)
    want_lse = return_aux is not None and return_aux.lse
    call = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, sinks)
    options = (scale, window_size, enable_gqa, num_splits, split_size, softcap, backend)
    if isinstance(out, torch.Tensor) and library.needed((out, query, key, value, sinks)):
        _route.check_tensors(query, key, value)
        _, lse = library.varlen(*call, out=out, **dict(zip(OPTIONS, options)))  # which checks out, too
        return (out, lse) if want_lse else out
    _varlen_out.check(out, query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, sinks)
    with torch.no_grad():
        result, lse = _attend(call, options, want_lse, _varlen_out.direct(out))
        _varlen_out.fill(out, result, query, cu_seq_q)
    return (out, lse) if want_lse else out
