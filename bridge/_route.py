"""Which way a call of the torch front end goes: a direct launch of the kernels, or through JAX."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from pallas_kernels import attention, dispatch
from pallas_kernels.errors import DTypeError, FallbackWarning, UnsupportedError
from pallas_kernels.problem import Layout, Operands, Problem
from pallas_kernels.program import pieces, target_of

from . import _call, _lean, launch

Build = Callable[..., tuple[Problem, Operands, Layout]]
Tensors = Callable[[Problem], dict[str, torch.Tensor]]


def answer(
    build: Build,
    arguments: tuple[Any, ...],
    static: Hashable,
    backend: str,
    tensors: Tensors,
    call: _lean.Call | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call.

    build: the call's normalisation as a function of JAX arrays in place of the tensors in `arguments`. static: what
    else it depends on; equal calls are normalised once. tensors: the inputs of the problem's program, by name, in the
    order of the call's own. call: how the short way sees it; if it is launched, its plan is filed under that. out:
    where the kernels may write the output, if they run.
    """
    if _on_gpu(arguments):
        launch.check_process()
        _call.check_no_tangents(arguments)
        problem, layout = described(build, arguments, static)
        why = _launch_reasons(problem, arguments, tensors, backend)
        if why is None:
            inputs = tensors(problem)
            plan = launch.plan(problem, layout, inputs, arguments[0].device)
            addresses = [x.data_ptr() for x in inputs.values()]
            _lean.file(call, plan, addresses)
            written, lse = plan.run(addresses, out=out)
            assert lse is not None
            return written, lse
        if backend == "auto":
            warn_once(why)
    elif backend == "auto":
        backend = "chunked"  # the tensors' device decides, not what else there is
    return _call.run(lambda *arrays: attention.run(*build(*arrays), backend), *arguments)


def check_tensors(query: Any, key: Any, value: Any) -> None:
    """Raises DTypeError for what is neither a tensor nor a format."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) and not hasattr(x, "opened"):
            hint = " (pass its k and v)" if hasattr(x, "append") else " (arrays of JAX go to pallas_kernels)"
            raise DTypeError(f"{name}: expected a tensor or a format of bridge.formats, got {type(x).__name__}{hint}")


def _on_gpu(arguments: tuple[Any, ...]) -> bool:
    return arguments[0].device.type == "cuda"


class Served(NamedTuple):
    """Who answers a call, and into how many pieces it cuts each sequence's keys."""

    backend: str
    splits: int


def serving(build: Build, arguments: tuple[Any, ...], static: Hashable, backend: str, tensors: Tensors) -> Served:
    """What serves a call; raises what the call would."""
    if _on_gpu(arguments):
        problem, _ = described(build, arguments, static)
        if _launch_reasons(problem, arguments, tensors, backend) is None:
            return Served("hopper", pieces(problem, launch.target(arguments[0].device.index)))
        chosen = dispatch.choose(problem, backend)
    else:
        problems: list[Problem] = []
        with torch.no_grad():
            _call.run(lambda *arrays: problems.append(build(*arrays)[0]), *arguments)
        problem = problems[0]
        chosen = dispatch.choose(problem, "chunked" if backend == "auto" else backend)
    return Served(chosen, pieces(problem, target_of(chosen)) if chosen in ("hopper", "interpret") else 1)


_normalised: OrderedDict[Hashable, tuple[Problem, Layout]] = OrderedDict()
MOST_NORMALISED = 4096


def described(build: Build, arguments: tuple[Any, ...], static: Hashable) -> tuple[Problem, Layout]:
    """The problem of a call and its results' shapes: normalising costs a trace, so it is done once a signature."""
    try:
        key = (static, _signature(arguments))
        hash(key)
    except TypeError:  # an option of a wrong type: normalising it says which
        key = None
    if key is not None and (found := _normalised.get(key)) is not None:
        return found
    problem, _, layout = _call.describe(build, *arguments)
    if key is not None:
        _normalised[key] = (problem, layout)
        if len(_normalised) > MOST_NORMALISED:
            _normalised.popitem(last=False)
    return problem, layout


def _signature(x: Any) -> Hashable:
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    if isinstance(x, (tuple, list)):
        return tuple(map(_signature, x))
    if hasattr(x, "opened"):
        return type(x), tuple((name, _signature(value)) for name, value in vars(x).items() if name != "_spec")
    return x


def _launch_reasons(problem: Problem, arguments: tuple[Any, ...], tensors: Tensors, backend: str) -> str | None:
    """Why the call is not launched directly, or None; raises where the kernels are asked for by name."""
    if backend not in ("auto", "hopper"):
        return f"backend={backend!r} is asked for"
    if problem.empty:
        return "nothing is to be computed"
    reasons = list(launch.reasons(problem, arguments[0].device))
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
        reasons.append("a gradient is wanted")
    if not reasons:
        reasons = launch.layout_reasons(tensors(problem))
    if reasons and backend == "hopper":
        raise UnsupportedError("backend: 'hopper' cannot serve this call: " + "; ".join(reasons))
    return "; ".join(reasons) or None


@functools.cache
def warn_once(why: str) -> None:
    warnings.warn(f"the call goes through JAX, not to the kernels directly: {why}", FallbackWarning, stacklevel=5)
