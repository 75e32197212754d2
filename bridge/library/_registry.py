"""How an op is registered: its schema, what it does, what it looks like, its gradient, and autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake

from pallas_kernels.errors import DeviceError, DTypeError, GradientError

from .. import _call

NAMESPACE = "pallas_splitk"
ops = getattr(torch.ops, NAMESPACE)
_library = Library(NAMESPACE, "DEF")  # the registrations live as long as this

QKV = "Tensor query, Tensor key, Tensor value"
GRADS = "Tensor? grad_out, Tensor? grad_lse"
SPLITS = "SymInt? num_splits=None, SymInt? split_size=None"


def register(
    name: str,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., Any] | None = None,
    differentiable: bool = True,
) -> None:
    """Define op `name`. `real` runs below autograd; it and `fake` get every argument, defaults filled in.

    backward, setup: as `torch.library.register_autograd`; without them differentiating the results raises.
    differentiable: False for an op that writes an argument, which torch lets have no formula.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    fill = filler(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = fill(args, kwargs)
        with torch.no_grad():
            return real(*args, **kwargs)

    def look(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = fill(args, kwargs)
        return fake(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", look, lib=_library)
    if differentiable:
        register_autograd(
            f"{NAMESPACE}::{name}", backward or _no_gradient, setup_context=setup or _keep_nothing, lib=_library
        )


def filler(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Puts an op's defaults back in, which the dispatcher takes out."""
    arguments = getattr(ops, name).default._schema.arguments
    positional = [a for a in arguments if not a.kwarg_only]
    keywords = {a.name: a.default_value for a in arguments if a.kwarg_only and a.has_default_value()}

    def fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = {a.name: a.default_value for a in positional[len(args) :]} | keywords | kwargs
        return (*args, *(rest.pop(a.name) for a in positional[len(args) :])), rest

    return fill


def _keep_nothing(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    pass


def _no_gradient(ctx: Any, *_: Any) -> Any:
    raise GradientError("no second derivative is defined")


def wanted(ctx: Any, positions: Iterable[int]) -> list[bool]:
    """Which positional arguments want a gradient, in a backward formula."""
    needs = ctx.needs_input_grad
    return [n < len(needs) and bool(needs[n]) for n in positions]


def given(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """One gradient for each positional argument that the dispatcher did not drop as a default at the end."""
    count = len(ctx.needs_input_grad)
    return (*gradients, *(None,) * count)[:count]


def like(inputs: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    """What a fake backward returns."""
    return tuple(x.new_empty(x.shape) if want and x is not None else None for x, want in zip(inputs, wanted))


def check_no_tangents(tensors: Sequence[Any]) -> None:
    """Without a rule for forward-mode differentiation the dispatcher would drop tangents; here a dual tensor raises."""
    if not torch.compiler.is_compiling():
        _call.check_no_tangents(tensors)


def check_sinks(sinks: Any) -> None:
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise DTypeError(f"sinks: expected a tensor, got {type(sinks).__name__}")


def refuse_gradient(tensors: Iterable[Any], what: str) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        raise no_gradient(what)


def no_gradient(what: str) -> GradientError:
    return GradientError(f"no gradient is defined where {what}: inference-only arguments")


def same_device(query: torch.Tensor, *others: Any) -> None:
    for x in others:
        if x is not None and x.device != query.device:
            raise DeviceError(f"all tensors of a call must be on one device, got {query.device}, {x.device}")


# ------------------------------------------------------------------------------------------------------ autocast

_CAST = (torch.float16, torch.bfloat16, torch.float32)


def autocast(name: str, first: int = 0) -> None:
    """Under autocast the three arguments from `first` on (query, key, value) are cast to its dtype, as SDPA's are.

    float64 and low-bit ones stay, as they do there.
    """
    for device in ("cpu", "cuda"):
        _library.impl(name, functools.partial(_cast, name, first, device), f"Autocast{device.upper()}")


def _cast(name: str, first: int, device: str, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype(device)
    chosen = [
        x.to(dtype) if first <= n < first + 3 and x.dtype in _CAST and x.device.type == device else x
        for n, x in enumerate(args)
    ]
    with torch.autocast(device, enabled=False):
        return getattr(ops, name).default(*chosen, **kwargs)
