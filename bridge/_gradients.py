"""Gradients of one call from its inputs and its output: what the backward ops compute, by JAX's blockwise backward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from pallas_kernels import dispatch
from pallas_kernels.errors import FallbackWarning, GradientError

from . import _call


def backward(
    normalise: Callable[..., Any],
    arguments: Sequence[Any],
    positions: Sequence[int],
    wanted: Sequence[bool],
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the arguments at `positions` (query, key, value, [bias,] sinks), None where not wanted.

    normalise: `problem.build` or `varlen.build` as a function of `arguments`. out, lse: what the forward gave. A
    gradient that is None is zero. Raises GradientError where no gradient is defined.
    """
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if out.is_cuda:
        _warn_once()
    if backend == "auto" and not out.is_cuda:
        backend = "chunked"
    chosen = [n for n, want in zip(positions, wanted) if want and arguments[n] is not None]

    def gradients(out: Any, d_out: Any, d_lse: Any, *arrays: Any) -> list[Any]:
        def operands(*differentiated: Any) -> tuple[Any, ...]:
            filled = list(arrays)
            for n, array in zip(chosen, differentiated):
                filled[n] = array
            _, x, _ = normalise(*filled)
            return x.q, x.k, x.v, x.bias, x.sinks

        problem, x, _ = normalise(*arrays)
        if problem.inference_only:
            raise GradientError(f"no gradient is defined where {problem.inference_only}: inference-only arguments")
        served = dispatch.choose(problem, backend, x)
        rows = (problem.queries, problem.kv_heads, problem.group)
        lse_rows = (problem.lse_rows, rows[1] * rows[2], rows[0] // problem.lse_rows if problem.lse_rows else 0)
        d = _backward(
            problem, served, x, out.reshape(*rows, problem.value_dim),
            d_out.reshape(*rows, problem.value_dim), d_lse.reshape(lse_rows),
        )  # fmt: skip
        _, pull = jax.vjp(operands, *(arrays[n] for n in chosen))  # the caller's shapes are reshapes of the operands'
        return list(pull((d.q, d.k, d.v, d.bias, d.sinks)))

    found = dict(zip(chosen, _call.run(gradients, out, grad_out, grad_lse, *arguments)))
    return tuple(found.get(n) for n in positions)


_backward = jax.jit(dispatch.backward, static_argnums=(0, 1))


@functools.cache
def _warn_once() -> None:
    text = "the backward goes through JAX, not to kernels that are launched directly, and opens its CUDA client"
    warnings.warn(text, FallbackWarning, stacklevel=4)
