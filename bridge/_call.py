"""Runs a JAX function of this library on torch tensors, with torch's autograd around it.

Every public function of `bridge` that has no faster route ends here: tensors become JAX arrays without a copy where
their layout allows (else they are copied into a compact one), the function runs under a local x64 (so that float64
keeps its width, as torch users expect), and its gradient is JAX's own. int32 tensors on the CPU are handed over as
numpy arrays: they are host-known there, so the checks for host-known lengths apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.autograd import forward_ad

from pallas_kernels.errors import DeviceError, GradientError

from . import _mosaic, exchange

jax_dtype = exchange.jax_dtype


@exchange.opaque
def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` of JAX arrays applied to torch tensors, formats and pytrees of them; None passes through.

    Returns what `function` does, with tensors in place of arrays. Tensors that require grad are differentiated
    through (once).
    """
    leaves, tree = jax.tree.flatten([_opened(a) for a in arguments])
    _check_devices(leaves)
    check_no_tangents(leaves)
    grad = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
    if not grad:
        with jax.enable_x64(True):
            result = function(*jax.tree.unflatten(tree, [_lower(leaf) for leaf in leaves]))
        return jax.tree.map(exchange.to_torch, result)
    trees: list[Any] = []

    def flat_function(arrays: list[Any]) -> tuple[jax.Array, ...]:
        out, result_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, arrays)))
        trees.append(result_tree)
        return tuple(out)

    results = _JaxFunction.apply(flat_function, *leaves)
    return jax.tree.unflatten(trees[0], results)


@exchange.opaque
def describe(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns beside arrays, from the shapes and dtypes of its arguments alone.

    For tensors on a GPU: nothing is read, and none of JAX's backends is opened.
    """
    leaves, tree = jax.tree.flatten([_opened(a) for a in arguments])
    _check_devices(leaves)
    structs = [jax.ShapeDtypeStruct(x.shape, jax_dtype(x.dtype)) if isinstance(x, torch.Tensor) else x for x in leaves]
    results: list[Any] = []

    def traced(*arrays: Any) -> None:
        results.append(function(*jax.tree.unflatten(tree, arrays)))

    with _mosaic.no_backends(), jax.enable_x64(True):
        jax.eval_shape(traced, *structs)
    return results[0]


class _JaxFunction(torch.autograd.Function):
    """`function` of a list of leaves -> tuple of arrays; differentiated by jax.vjp."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *leaves: Any) -> tuple[torch.Tensor, ...]:
        ctx.differentiated = [n for n in range(len(leaves)) if ctx.needs_input_grad[n + 1]]
        ctx.count = len(leaves)
        arrays = [_lower(leaf) for leaf in leaves]

        def of_differentiated(*chosen: jax.Array) -> tuple[jax.Array, ...]:
            filled = list(arrays)
            for n, array in zip(ctx.differentiated, chosen):
                filled[n] = array
            return function(filled)

        with jax.enable_x64(True):
            out, ctx.vjp = jax.vjp(of_differentiated, *(arrays[n] for n in ctx.differentiated))
        results = tuple(exchange.to_torch(a) for a in out)
        # The residuals alias inputs and results: saving these makes torch notice a write before the backward.
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *results)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        with jax.enable_x64(True):
            gradients = ctx.vjp(tuple(_lower(c) for c in cotangents))
        result: list[Any] = [None] * (ctx.count + 1)
        for n, gradient in zip(ctx.differentiated, gradients):
            result[n + 1] = exchange.to_torch(gradient)
        return tuple(result)


def _opened(x: Any) -> Any:
    """Torch formats become JAX formats that hold torch tensors, so that their parts are leaves."""
    return jax.tree.map(lambda leaf: leaf.opened() if hasattr(leaf, "opened") else leaf, x)


def _lower(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    if leaf.device.type == "cpu" and leaf.dtype in (torch.int32, torch.int64):
        return leaf.numpy()
    return exchange.import_or_copy(leaf)


def check_no_tangents(leaves: Sequence[Any]) -> None:
    """Forward-mode derivatives are not defined: a dual tensor raises, instead of losing its tangent."""
    if forward_ad._current_level < 0:
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            raise GradientError("forward-mode differentiation is not defined; use backward or autograd.grad")


def _check_devices(leaves: list[Any]) -> None:
    devices = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(devices) > 1:
        raise DeviceError(f"all tensors of a call must be on one device, got {', '.join(sorted(devices))}")
