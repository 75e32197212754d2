"""Runs a JAX function of this library on torch tensors, with torch's autograd around it.

Every public function of `bridge` that has no faster route ends here: tensors become JAX arrays without a copy where
their layout allows (else they are copied into a compact one), the function runs under a local x64 (so that float64
keeps its width, as torch users expect), and its gradient is JAX's own. int32 tensors on the CPU are handed over as
numpy arrays: they are host-known there, so the checks for host-known lengths apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from pallas_kernels.errors import DeviceError

from . import exchange
from .formats import TorchFormat

jax_dtype = exchange.jax_dtype


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` of JAX arrays applied to a tuple of torch tensors, formats and pytrees of them; None passes through.

    Tensors that require grad are differentiated through (once); the result is a tensor or a tuple of tensors.
    """
    leaves, tree = jax.tree.flatten([_opened(a) for a in arguments])
    _check_devices(leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        results = _JaxFunction.apply(function, tree, *leaves)
    else:
        with jax.enable_x64(True):
            out = function(*jax.tree.unflatten(tree, [_lower(leaf) for leaf in leaves]))
        results = tuple(None if a is None else exchange.to_torch(a) for a in _as_tuple(out))
    return results[0] if len(results) == 1 else results


class _JaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], tree: Any, *leaves: Any) -> tuple[Any, ...]:
        ctx.differentiated = [n for n, leaf in enumerate(leaves) if ctx.needs_input_grad[n + 2]]
        arrays = [_lower(leaf) for leaf in leaves]

        def of_differentiated(*chosen: jax.Array) -> tuple[jax.Array, ...]:
            filled = list(arrays)
            for n, array in zip(ctx.differentiated, chosen, strict=True):
                filled[n] = array
            return _as_tuple(function(*jax.tree.unflatten(tree, filled)))

        with jax.enable_x64(True):
            out, ctx.vjp = jax.vjp(of_differentiated, *(arrays[n] for n in ctx.differentiated))
        ctx.count = len(leaves)
        # The residuals alias these tensors: saving them makes torch notice a write before the backward.
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        ctx.results = [None if a is None else (a.shape, a.dtype) for a in out]
        return tuple(None if a is None else exchange.to_torch(a) for a in out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        with jax.enable_x64(True):
            arrays = [
                None if result is None else jax.numpy.zeros(*result) if c is None else _lower(c)
                for c, result in zip(cotangents, ctx.results, strict=True)
            ]
            gradients = ctx.vjp(tuple(arrays))
        result: list[Any] = [None] * (ctx.count + 2)
        for n, gradient in zip(ctx.differentiated, gradients, strict=True):
            result[n + 2] = exchange.to_torch(gradient)
        return tuple(result)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _opened(x: Any) -> Any:
    """Torch formats become JAX formats that hold torch tensors, so that their parts are leaves."""
    return jax.tree.map(
        lambda leaf: leaf.opened() if isinstance(leaf, TorchFormat) else leaf,
        x,
        is_leaf=lambda leaf: isinstance(leaf, TorchFormat),
    )


def _lower(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    if leaf.device.type == "cpu" and leaf.dtype in (torch.int32, torch.int64):
        return leaf.numpy()
    return exchange.import_or_copy(leaf)


def _check_devices(leaves: list[Any]) -> None:
    devices = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(devices) > 1:
        raise DeviceError(f"all tensors of a call must be on one device, got {', '.join(sorted(devices))}")
