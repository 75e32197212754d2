"""The attention functions as `torch.library` ops, for everything in torch that must see a call, not only run it.

Namespace `pallas_splitk`:

| op                                     | what it is                                            | autograd                 |
| -------------------------------------- | ----------------------------------------------------- | ------------------------ |
| `attention`                            | the `memory_efficient_attention` family: (out, lse)   | `attention_backward`     |
| `varlen`                               | `varlen_attn`: (out, lse)                             | `varlen_backward`        |
| `varlen_out`                           | `varlen_attn_out`: writes `out`, returns lse          | none: `out` is written   |
| `merge`                                | `merge_attentions`: (out, lse or None)                | `merge_backward`         |
| `attention_backward`, `varlen_backward`, `merge_backward` | gradients, None where not wanted   | raises (once only)       |

Each has a fake implementation (shapes, strides and dtypes of the real one, so tracing runs nothing), a rule for
autocast (query, key and value are cast as SDPA's are) and a FLOP formula (`bridge._flops`). Masks are flattened into
optional tensors and symbolic ints (`bridge._flat.Mask`), so a compiled function is traced once for all lengths.

The public functions of `bridge` call the ops where `needed` says so; plain eager inference skips the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake

from pallas_kernels.errors import DeviceError, GradientError, UnsupportedError

from . import _flat, _gradients
from ._needed import needed, watched

__all__ = ["NAMESPACE", "attention", "flash_enabled", "needed", "ops", "varlen", "watched"]

NAMESPACE = "pallas_splitk"
ops = getattr(torch.ops, NAMESPACE)

_library = Library(NAMESPACE, "DEF")  # the registrations live as long as this


# ------------------------------------------------------------------------------------------------------- schemas

_SPLITS = "SymInt? num_splits=None, SymInt? split_size=None"
_MASK = "Tensor? q_start=None, Tensor? k_start=None, Tensor? k_len=None, Tensor? block_table=None"
_ATTENTION = (
    f"Tensor? bias=None, Tensor? sinks=None, Tensor? kv_lengths=None, {_MASK}, Tensor[]? coefficients=None, *, ScalarType? output_dtype=None, "
    f"bool partial=False, float? scale=None, float? softcap=None, {_SPLITS}, "
    "SymInt? window_left=None, SymInt? window_right=None, bool top_left=False, SymInt? page_size=None, "
    'bool packed=False, bool slotted=True, bool quantize_pv=False, str formats="", str backend="auto"'
)
_VARLEN = (
    "Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, SymInt max_k, Tensor? seqused_k=None, "
    "Tensor? block_table=None, Tensor? sinks=None, Tensor[]? coefficients=None, *, float? scale=None, SymInt[] window_size=[-1, -1], "
    f'bool enable_gqa=False, {_SPLITS}, float? softcap=None, str formats="", str backend="auto"'
)
_MERGE = "bool stacked_attn=False, bool stacked_lse=False, bool write_lse=True, ScalarType? output_dtype=None"
_QKV = "Tensor query, Tensor key, Tensor value"
_GRADS = "Tensor? grad_out, Tensor? grad_lse"

_SCHEMAS = {
    "attention": f"({_QKV}, {_ATTENTION}) -> (Tensor out, Tensor lse)",
    "attention_backward": f"({_GRADS}, Tensor out, Tensor lse, bool[5] wanted, {_QKV}, {_ATTENTION})"
    " -> (Tensor? query, Tensor? key, Tensor? value, Tensor? bias, Tensor? sinks)",
    "varlen": f"({_QKV}, {_VARLEN}) -> (Tensor out, Tensor lse)",
    "varlen_out": f"(Tensor(a!) out, {_QKV}, {_VARLEN}) -> Tensor lse",
    "varlen_backward": f"({_GRADS}, Tensor out, Tensor lse, bool[4] wanted, {_QKV}, {_VARLEN})"
    " -> (Tensor? query, Tensor? key, Tensor? value, Tensor? sinks)",
    "merge": f"(Tensor[] attn, Tensor[] lse, *, {_MERGE}) -> (Tensor out, Tensor? lse)",
    "merge_backward": f"({_GRADS}, Tensor[] attn, Tensor[] lse, *, {_MERGE}) -> (Tensor[] attn, Tensor[] lse)",
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))


def _implement(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as what the op does on every device, below autograd."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return function(*args, **kwargs)

        _library.impl(name, run, "CompositeExplicitAutograd")
        return function

    return register


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return register_fake(f"{NAMESPACE}::{name}", lib=_library)


# ----------------------------------------------------------------------------------------------------- attention


def attention(
    query: Any, key: Any, value: Any, bias: Any, sinks: Any, kv_lengths: Any, mask: _flat.Mask, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`pallas_splitk::attention` of a mask and of tensors or formats. options: the keywords of `_flat.attend`."""
    if (p := options.pop("p")) != 0.0:
        raise UnsupportedError(f"p: dropout is not supported, got p = {p}; accepted is 0.0")
    (query, key, value), coefficients, formats = _flat.flatten_formats(query, key, value)
    tensors = (query, key, value, bias, sinks)
    if formats or mask.page_size is not None:
        what = "key and value are low-bit" if formats else "key and value are paged (block_table)"
        _refuse_gradient((*tensors, *coefficients), what)
    q_start, k_start, k_len, table, left, right, top_left, page_size, packed, slotted = mask
    return ops.attention(
        query, key, value, bias, sinks, kv_lengths, q_start, k_start, k_len, table,
        window_left=left, window_right=right, top_left=top_left, page_size=page_size, packed=packed, slotted=slotted,
        coefficients=coefficients or None, formats=formats, **options,
    )  # fmt: skip


def _refuse_gradient(tensors: Iterable[Any], what: str) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors):
        raise GradientError(f"no gradient is defined where {what}: inference-only arguments")


def _same_device(query: torch.Tensor, *others: Any) -> None:
    for x in others:
        if x is not None and x.device != query.device:
            raise DeviceError(f"all tensors of a call must be on one device, got {query.device}, {x.device}")


def _mask(tensors: Sequence[Any], options: dict[str, Any]) -> _flat.Mask:
    """Takes the mask's numbers out of the options."""
    names = ("window_left", "window_right", "top_left", "page_size", "packed", "slotted")
    return _flat.Mask(*tensors, *(options.pop(name) for name in names))


def _stores(first: Sequence[torch.Tensor], coefficients: Any, options: dict[str, Any]) -> list[Any]:
    """Takes what the stores are out of the options."""
    return _flat.restore_formats(first, coefficients or (), options.pop("formats"))


_ATTENTION_DEFAULTS: dict[str, Any] = dict(
    output_dtype=None, partial=False, scale=None, softcap=None, num_splits=None, split_size=None,
    window_left=None, window_right=None, top_left=False, page_size=None, packed=False, slotted=True,
    quantize_pv=False, formats="", backend="auto",
)  # fmt: skip
_VARLEN_DEFAULTS: dict[str, Any] = dict(
    scale=None, window_size=(-1, -1), enable_gqa=False, num_splits=None, split_size=None, softcap=None, formats="",
    backend="auto",
)  # fmt: skip


@_implement("attention")
def _attention(
    query: Any, key: Any, value: Any, bias: Any = None, sinks: Any = None,
    kv_lengths: Any = None, q_start: Any = None, k_start: Any = None, k_len: Any = None, block_table: Any = None,
    coefficients: Any = None, **options: Any,
) -> Any:  # fmt: skip
    options = _ATTENTION_DEFAULTS | options
    mask = _mask((q_start, k_start, k_len, block_table), options)
    stores = _stores((query, key, value), coefficients, options)
    return _flat.attend(*stores, bias, sinks, kv_lengths, mask, **options)


@_fake("attention")
def _attention_fake(
    query: Any, key: Any, value: Any, bias: Any = None, sinks: Any = None,
    kv_lengths: Any = None, q_start: Any = None, k_start: Any = None, k_len: Any = None, block_table: Any = None,
    coefficients: Any = None, *, output_dtype: Any = None, partial: bool = False, packed: bool = False, formats: str = "",
    **_: Any,
) -> Any:  # fmt: skip
    _same_device(query, key, value, bias, sinks, kv_lengths, q_start, k_len, block_table)
    out_dtype = output_dtype or query.dtype
    if output_dtype is None and partial and query.dtype != torch.float64:
        out_dtype = torch.float32
    heads, queries = query.shape[2:-1] or (1,), query.shape[1]
    lse_dtype = torch.float64 if out_dtype in (torch.float32, torch.float64) else torch.float32
    out = query.new_empty((*query.shape[:-1], _flat.last_axis(value, formats, 2)), dtype=out_dtype)
    lse = query.new_empty((1 if packed else query.shape[0], *heads, queries), dtype=lse_dtype)
    return out, lse


def _attention_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    query, key, value, bias, sinks, *lengths, _ = inputs
    if keyword_only_inputs["formats"] or keyword_only_inputs["page_size"] is not None:
        raise GradientError("no gradient is defined where key and value are low-bit or paged (block_table)")
    ctx.save_for_backward(query, key, value, bias, sinks, *lengths, *output)
    ctx.options = {name: x for name, x in keyword_only_inputs.items() if name != "formats"}
    ctx.set_materialize_grads(False)


def _attention_autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    *inputs, out, lse = ctx.saved_tensors
    wanted = _wanted(ctx, range(5))
    d = ops.attention_backward(grad_out, grad_lse, out, lse, wanted, *inputs, **ctx.options)
    return _given(ctx, d)


def _wanted(ctx: Any, positions: Iterable[int]) -> list[bool]:
    """Which positional arguments want a gradient; the dispatcher drops trailing ones that are their defaults."""
    needs = ctx.needs_input_grad
    return [n < len(needs) and bool(needs[n]) for n in positions]


def _given(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    """One gradient for each positional argument that the dispatcher kept."""
    count = len(ctx.needs_input_grad)
    return (*gradients, *(None,) * count)[:count]


@_implement("attention_backward")
def _attention_backward(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, query: Any, key: Any, value: Any,
    bias: Any = None, sinks: Any = None, kv_lengths: Any = None, q_start: Any = None, k_start: Any = None,
    k_len: Any = None, block_table: Any = None, coefficients: Any = None, **options: Any,
) -> Any:  # fmt: skip
    options = _ATTENTION_DEFAULTS | options
    mask = _mask((q_start, k_start, k_len, block_table), options)
    options.pop("formats")
    backend, output_dtype = options.pop("backend"), options.pop("output_dtype")
    normalise = _flat.normaliser(mask, output_dtype, options)
    arguments = (query, key, value, bias, sinks, kv_lengths, mask[:4])
    return _gradients.backward(normalise, arguments, (0, 1, 2, 3, 4), wanted, out, lse, grad_out, grad_lse, backend)


@_fake("attention_backward")
def _attention_backward_fake(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, query: Any, key: Any, value: Any,
    bias: Any = None, sinks: Any = None, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    return _like((query, key, value, bias, sinks), wanted)


def _like(inputs: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(x.new_empty(x.shape) if want and x is not None else None for x, want in zip(inputs, wanted))


# -------------------------------------------------------------------------------------------------------- varlen


@torch.compiler.assume_constant_result  # as torch's own `varlen_attn` takes it while it is traced
def flash_enabled() -> bool:
    """Whether the user lets SDPA's flash backend run, of which `varlen_attn` is a part."""
    return torch.backends.cuda.flash_sdp_enabled()


def varlen(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, seqused_k: Any,
    block_table: Any, sinks: Any, *, out: torch.Tensor | None = None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`pallas_splitk::varlen`, or `varlen_out` where `out` is given. options: the keywords of `_flat.attend_varlen`."""
    (query, key, value), coefficients, formats = _flat.flatten_formats(query, key, value)
    for given, what in (
        (formats or None, "key and value are low-bit"),
        (block_table, "block_table is given"),
        (seqused_k, "seqused_k is given"),
    ):
        if given is not None and out is None:
            _refuse_gradient((query, key, value, sinks, *coefficients), what)
    arguments = (
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, sinks
    )  # fmt: skip
    options["window_size"] = list(options["window_size"])
    if out is not None:
        return out, ops.varlen_out(out, *arguments, coefficients=coefficients or None, formats=formats, **options)
    return ops.varlen(*arguments, coefficients=coefficients or None, formats=formats, **options)


@_implement("varlen")
def _varlen(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any,
    seqused_k: Any = None, block_table: Any = None, sinks: Any = None, coefficients: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    options = _VARLEN_DEFAULTS | options
    stores = _stores((query, key, value), coefficients, options)
    return _flat.attend_varlen(*stores, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, sinks, **options)


@_fake("varlen")
def _varlen_fake(query: Any, key: Any, value: Any, *rest: Any, formats: str = "", **_: Any) -> Any:
    _same_device(query, key, value, *rest[:2], *rest[4:7])
    out = query.new_empty((*query.shape[:-1], _flat.last_axis(value, formats, 2)))
    return out, _varlen_lse(query)


def _varlen_lse(query: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((query.shape[1], query.shape[0]), dtype=dtype)


@_implement("varlen_out")
def _varlen_out(out: torch.Tensor, query: Any, *args: Any, **options: Any) -> torch.Tensor:
    result, lse = _varlen(query, *args, **options)
    # On a GPU the number of rows in use is not read back: the rest is written too, as zeros.
    cu_seq_q = args[2]
    used = query.shape[0] if query.is_cuda else int(cu_seq_q[-1])
    out[:used].copy_(result[:used])
    return lse


@_fake("varlen_out")
def _varlen_out_fake(out: torch.Tensor, query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return _varlen_lse(query)


def _varlen_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    query, key, value, cu_q, cu_k, ctx.max_q, ctx.max_k, used, table, sinks, _ = inputs
    for given, name in ((table, "block_table"), (used, "seqused_k")):
        if given is not None:
            raise GradientError(f"no gradient is defined where {name} is given: inference-only arguments")
    if keyword_only_inputs["formats"]:
        raise GradientError("no gradient is defined where key and value are low-bit: inference-only arguments")
    ctx.save_for_backward(query, key, value, cu_q, cu_k, sinks, *output)
    ctx.options = {name: x for name, x in keyword_only_inputs.items() if name != "formats"}
    ctx.set_materialize_grads(False)


def _varlen_autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    query, key, value, cu_q, cu_k, sinks, out, lse = ctx.saved_tensors
    wanted = _wanted(ctx, (0, 1, 2, 9))
    d = ops.varlen_backward(
        grad_out, grad_lse, out, lse, wanted, query, key, value, cu_q, cu_k, ctx.max_q, ctx.max_k, None, None, sinks,
        **ctx.options,
    )  # fmt: skip
    return _given(ctx, (*d[:3], *(None,) * 6, d[3]))


@_implement("varlen_backward")
def _varlen_backward(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, query: Any, key: Any, value: Any, cu_seq_q: Any,
    cu_seq_k: Any, max_q: Any, max_k: Any, seqused_k: Any = None, block_table: Any = None, sinks: Any = None,
    coefficients: Any = None, **options: Any,
) -> Any:  # fmt: skip
    options = _VARLEN_DEFAULTS | options
    options.pop("formats")
    backend = options.pop("backend")
    normalise = _flat.varlen_normaliser(max_q, max_k, options)
    arguments = (query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, sinks)
    return _gradients.backward(normalise, arguments, (0, 1, 2, 7), wanted, out, lse, grad_out, grad_lse, backend)


@_fake("varlen_backward")
def _varlen_backward_fake(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, wanted: Any, query: Any, key: Any, value: Any, *rest: Any,
    sinks: Any = None, **_: Any,
) -> Any:  # fmt: skip
    return _like((query, key, value, rest[6] if len(rest) > 6 else sinks), wanted)


# ------------------------------------------------------------------------------------- autograd: once, not twice


def _keep(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
    pass


def _no_second(ctx: Any, *_: Any) -> Any:
    raise GradientError("no second derivative is defined")


for _op, _backward, _setup in (
    ("attention", _attention_autograd, _attention_setup),
    ("attention_backward", _no_second, _keep),
    ("varlen", _varlen_autograd, _varlen_setup),
    ("varlen_backward", _no_second, _keep),
):
    register_autograd(f"{NAMESPACE}::{_op}", _backward, setup_context=_setup, lib=_library)


# ------------------------------------------------------------------------------------------------------ autocast


def _register_autocast(name: str, device: str, first: int) -> None:
    """Under autocast the query, key and value that start at argument `first` are cast, low-bit ones excepted."""
    op = getattr(ops, name).default
    low = (torch.float16, torch.bfloat16, torch.float32)

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        chosen = [
            x.to(dtype) if first <= n < first + 3 and x.dtype in low and x.device.type == device else x
            for n, x in enumerate(args)
        ]
        with torch.autocast(device, enabled=False):
            return op(*chosen, **kwargs)

    _library.impl(name, cast, f"Autocast{device.upper()}")


for _device in ("cpu", "cuda"):
    _register_autocast("attention", _device, 0)
    _register_autocast("varlen", _device, 0)
    _register_autocast("varlen_out", _device, 1)
