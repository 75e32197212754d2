"""`pallas_splitk::merge` and its backward: joining partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch

from pallas_kernels.merge import merge_on

from .. import _merge_launch
from .._call import jax_dtype, run
from ._registry import GRADS, check_no_tangents, ops, register

_OPTIONS = "bool stacked_attn=False, bool stacked_lse=False, bool write_lse=True, ScalarType? output_dtype=None"
_ARGUMENTS = f"Tensor[] attn, Tensor[] lse, *, {_OPTIONS}"
Chunks = torch.Tensor | Sequence[torch.Tensor]


def merge(
    attn: Chunks, lse: Chunks, write_lse: bool, output_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The op on `merge_attentions`' arguments: each a list, or one stacked tensor (a list of it alone, and a flag)."""
    chunks = [[x] if isinstance(x, torch.Tensor) else list(x) for x in (attn, lse)]
    check_no_tangents([*chunks[0], *chunks[1]])
    stacked = [isinstance(x, torch.Tensor) for x in (attn, lse)]
    return ops.merge(
        *chunks, stacked_attn=stacked[0], stacked_lse=stacked[1], write_lse=write_lse, output_dtype=output_dtype
    )


def _chunks(attn: Any, lse: Any, stacked_attn: bool, stacked_lse: bool) -> tuple[Any, Any]:
    return attn[0] if stacked_attn else list(attn), lse[0] if stacked_lse else list(lse)


def _real(
    attn: Any, lse: Any, *, stacked_attn: bool, stacked_lse: bool, write_lse: bool, output_dtype: torch.dtype | None
) -> Any:
    return _merge_launch.merge(*_chunks(attn, lse, stacked_attn, stacked_lse), write_lse, output_dtype)


def _fake(
    attn: Any, lse: Any, *, stacked_attn: bool, stacked_lse: bool, write_lse: bool, output_dtype: torch.dtype | None
) -> Any:
    out = attn[0].new_empty(attn[0].shape[stacked_attn:], dtype=output_dtype or attn[0].dtype)
    return out, lse[0].new_empty(lse[0].shape[stacked_lse:]) if write_lse else None


def _setup(ctx: Any, inputs: Any, keyword_only_inputs: dict[str, Any], output: Any) -> None:
    attn, lse = inputs
    ctx.save_for_backward(*attn, *lse)
    ctx.count, ctx.options = len(attn), dict(keyword_only_inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    saved = list(ctx.saved_tensors)
    return ops.merge_backward(grad_out, grad_lse, saved[: ctx.count], saved[ctx.count :], **ctx.options)


def _real_backward(
    grad_out: Any,
    grad_lse: Any,
    attn: Any,
    lse: Any,
    *,
    stacked_attn: bool,
    stacked_lse: bool,
    write_lse: bool,
    output_dtype: torch.dtype | None,
) -> Any:
    def gradients(d_out: Any, d_lse: Any, attn: Any, lse: Any) -> Any:
        def merged(attn: Any, lse: Any) -> Any:
            results = merge_on("plain", attn, lse, write_lse, jax_dtype(output_dtype))
            return [x for x, d in zip(results, (d_out, d_lse)) if d is not None]

        return jax.vjp(merged, attn, lse)[1]([d for d in (d_out, d_lse) if d is not None])

    d_attn, d_lse = run(gradients, grad_out, grad_lse, *_chunks(attn, lse, stacked_attn, stacked_lse))
    return [d_attn] if stacked_attn else list(d_attn), [d_lse] if stacked_lse else list(d_lse)


def _fake_backward(grad_out: Any, grad_lse: Any, attn: Any, lse: Any, **_: Any) -> Any:
    return [x.new_empty(x.shape) for x in attn], [x.new_empty(x.shape) for x in lse]


register("merge", f"({_ARGUMENTS}) -> (Tensor out, Tensor? lse)", _real, _fake, backward=_backward, setup=_setup)
register(
    "merge_backward",
    f"({GRADS}, {_ARGUMENTS}) -> (Tensor[] attn, Tensor[] lse)",
    _real_backward,
    _fake_backward,
)
