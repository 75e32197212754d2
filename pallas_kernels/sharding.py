"""What loops and gradients owe to `shard_map`, which types every value by the mesh axes it varies over."""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which some leaf varies; none outside `shard_map` or without its check."""
    return frozenset[str]().union(*(jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(tree)))


def vary_like[Tree](carry: Tree, operands: Any) -> Tree:
    """A loop's first carry, typed as what its body computes from `operands`."""
    axes = varying_axes(operands)

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(axes - varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, carry)


def gradient_of(primal: Any, gradient: Any) -> Any:
    """The gradient of an operand that is one and the same over some mesh axes: the sum over them."""
    if gradient is None:
        return None
    axes = tuple(varying_axes(gradient) - varying_axes(primal))
    return jax.lax.psum(gradient, axes) if axes else gradient
