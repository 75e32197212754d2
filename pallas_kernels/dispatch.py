"""Which backend answers a problem, why each other one does not, and the differentiable call itself."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from . import chunked, program, reference
from .errors import ArgumentError, FallbackWarning, GradientError, UnsupportedError
from .kernels import _compat
from .problem import Operands, Problem
from .sharding import gradient_of
from .softmax import cast_output, finish

BACKENDS = ("hopper", "interpret", "chunked", "reference")


def reasons(problem: Problem, backend: str) -> list[str]:
    """Why `backend` cannot serve the problem; empty where it can."""
    if backend == "chunked":
        return []
    if backend == "reference":
        return [] if problem.value_dim else ["value head_dim 0"]
    if backend in ("hopper", "interpret"):
        found = [*machine_reasons(backend), *program.unsupported(problem)]
        if backend == "interpret" and _pool() < (needed := program.warpgroups(problem)):
            found.append(f"the interpreter needs {needed} threads and XLA has {_pool()}: set NPROC=8 before JAX starts")
        return found
    raise _unknown(backend)


def check_backend(backend: Any) -> None:
    if backend not in ("auto", *BACKENDS):
        raise _unknown(backend)


def _unknown(backend: Any) -> ArgumentError:
    return ArgumentError(f"backend: expected one of {', '.join(('auto', *BACKENDS))}, got {backend!r}")


def _pool() -> int:
    """Threads of XLA's CPU client, of which the interpreter blocks one for each warpgroup that waits."""
    return int(os.environ.get("NPROC") or os.cpu_count() or 1)


@functools.cache
def machine_reasons(backend: str) -> list[str]:
    """Why this machine cannot run the kernels as `backend` does."""
    if backend == "interpret":
        return [] if jax.default_backend() == "cpu" else ["the interpreter runs on the CPU only"]
    if jax.default_backend() != "gpu":
        return [f"no GPU: JAX's default backend is {jax.default_backend()}"]
    capability = str(jax.devices("gpu")[0].compute_capability)
    return [] if capability == "9.0" else [f"compute capability {capability} (accepted: 9.0)"]


def choose(problem: Problem, backend: str, x: Operands | None = None) -> str:
    """The backend that serves the problem. "auto" never means `reference`; naming one that cannot serve raises.

    Operands that are known to lie on a CPU are served there, whatever other devices there are.
    """
    if backend == "auto" and x is not None and on_cpu(x.q):
        return "chunked"
    if backend != "auto":
        why = reasons(problem, backend)
        if why:
            raise UnsupportedError(f"backend: {backend!r} cannot serve this call: " + "; ".join(why))
        return backend
    why = reasons(problem, "hopper")
    if not why:
        return "hopper"
    if jax.default_backend() == "gpu":
        warn_once("a GPU is present but `chunked` serves the call: " + "; ".join(why))
    return "chunked"


def on_cpu(q: Any) -> bool:
    concrete = isinstance(q, jax.Array) and not isinstance(q, jax.core.Tracer)
    return concrete and all(device.platform == "cpu" for device in q.devices())


@functools.cache
def warn_once(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=4)


def forward(problem: Problem, backend: str, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(out [queries, kv_heads, group, Dv] in out_dtype, lse [lse_rows, heads, queries of a row] in lse_dtype)."""
    if backend in ("hopper", "interpret") and not problem.empty:
        return program.run(problem, program.target_of(backend), x)
    out, lse = _plain(problem, backend, x)
    return cast_output(out, problem.out_dtype), _rows_first(problem, lse)


def _rows_first(problem: Problem, lse: jax.Array) -> jax.Array:
    """[queries, kv_heads, group] -> [lse_rows, heads, queries of a row]."""
    rows, heads = problem.lse_rows, problem.kv_heads * problem.group
    return jnp.moveaxis(lse.reshape(rows, problem.queries // rows if rows else 0, heads), 1, 2)


def _tokens_first(problem: Problem, lse: jax.Array) -> jax.Array:
    """The inverse of `_rows_first`."""
    rows, heads = problem.lse_rows, problem.kv_heads * problem.group
    lse = lse.reshape(rows, heads, problem.queries // rows if rows else 0)
    return jnp.moveaxis(lse, 1, 2).reshape(problem.queries, problem.kv_heads, problem.group)


def _plain(problem: Problem, backend: str, x: Operands) -> tuple[jax.Array, jax.Array]:
    """(out, lse [queries, kv_heads, group]) of the backends in plain jnp, the output in the compute dtype."""
    if problem.empty:
        rows = (problem.queries, problem.kv_heads, problem.group)
        zeros = jnp.zeros(rows, problem.compute_dtype)
        sink = None if x.sinks is None else x.sinks.astype(zeros.dtype)
        acc = jnp.zeros((*rows, problem.value_dim), zeros.dtype)
        return finish(acc, jnp.full_like(zeros, -jnp.inf), zeros, sink, problem.lse_dtype)
    return (reference if backend == "reference" else chunked).attention(problem, x)


def backward(
    problem: Problem, backend: str, x: Operands, out: jax.Array, d_out: jax.Array, d_lse: jax.Array
) -> chunked.Gradients:
    """Gradients of q, k, v, bias and sinks; shapes and dtypes of the operands. A kernel's forward has the blockwise
    backward."""
    d_lse = _tokens_first(problem, d_lse)
    if problem.empty or backend == "reference":

        def run(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> tuple[jax.Array, jax.Array]:
            return _plain(problem, backend, x._replace(q=q, k=k, v=v, bias=bias, sinks=sinks))

        _, vjp = jax.vjp(run, x.q, x.k, x.v, x.bias, x.sinks)
        return chunked.Gradients(*vjp((d_out.astype(problem.compute_dtype), d_lse)))
    return chunked.backward(problem, x, out, d_out, d_lse)


_forward_jit = jax.jit(forward, static_argnums=(0, 1))
_backward_jit = jax.jit(backward, static_argnums=(0, 1))


def _forward(problem: Problem, backend: str, x: Operands) -> tuple[jax.Array, jax.Array]:
    """`forward`, compiled. The interpreter's threads know the process's x64 only, not that of its caller's thread."""
    if backend != "interpret":
        return _forward_jit(problem, backend, x)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        if _compat.process_x64() != jax.config.jax_enable_x64:
            raise UnsupportedError(
                "backend: 'interpret' inside jit needs the process's jax_enable_x64 to be as this thread's; "
                "set jax.config.update('jax_enable_x64', ...) instead of `with jax.enable_x64(...)`"
            )
        return _forward_jit(problem, backend, x)
    with _compat.own_x64():
        return jax.block_until_ready(_forward_jit(problem, backend, x))


def attend(problem: Problem, backend: str, x: Operands) -> tuple[jax.Array, jax.Array]:
    """`forward`, differentiable in q, k, v, bias and sinks through both results."""
    return _attend(problem, backend, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(problem: Problem, backend: str, x: Operands) -> tuple[jax.Array, jax.Array]:
    return _forward(problem, backend, x)


def _attend_fwd(problem: Problem, backend: str, x: Any) -> tuple[Any, Any]:
    # With symbolic_zeros every leaf says whether it is differentiated, so what has no gradient can raise.
    is_leaf = lambda leaf: hasattr(leaf, "perturbed")  # noqa: E731
    if problem.inference_only and any(leaf.perturbed for leaf in jax.tree.leaves(x, is_leaf=is_leaf)):
        raise GradientError(f"no gradient is defined where {problem.inference_only}: inference-only arguments")
    if x.q_scale is not None or problem.fp8_qk:
        raise GradientError("no gradient is defined for an fp8 query")
    x = jax.tree.map(lambda leaf: leaf.value, x, is_leaf=is_leaf)
    out, lse = _forward(problem, backend, x)
    return (out, lse), (x, out)


def _attend_bwd(problem: Problem, backend: str, residuals: Any, cotangents: Any) -> tuple[Any]:
    x, out = residuals
    d_out, d_lse = (
        jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c for c in cotangents
    )
    d = _backward_jit(problem, backend, x, out, d_out, d_lse)
    d = chunked.Gradients(*map(gradient_of, (x.q, x.k, x.v, x.bias, x.sinks), d))
    nf = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jax.dtypes.float0), x.nf)
    return (Operands(d.q, d.k, d.v, nf, d.bias, d.sinks),)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)
