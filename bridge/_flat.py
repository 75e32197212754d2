"""A call as plain tensors and numbers: masks and formats taken apart, put together again, and answered.

A `torch.library` schema knows tensors and numbers only, so this is the form in which a call crosses the dispatcher.
Without it the same functions are called directly. Nothing here reads a length back, and taking apart reads no host
list of a mask either: a compiled caller sees device tensors, whose values it does not depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pallas_kernels import varlen as jax_varlen
from pallas_kernels.dispatch import check_backend
from pallas_kernels.errors import ArgumentError, DTypeError, ShapeError
from pallas_kernels.masks import NormalForm, Window
from pallas_kernels.problem import (
    MaskParts,
    Problem,
    build,
    check_dropout,
    check_softcap,
    check_splits,
    default_scale,
)

from . import _route, formats
from ._call import jax_dtype
from .fmha.attn_bias import AttentionBias, _PaddedSeqLenInfo
from .fmha.attn_bias.base import PackedBias, PagedBias


class Mask(NamedTuple):
    """What a bias object reduces to: tensors of its normal form, and what is static about it.

    q_start: int32 [N + 1]; k_start: int32 [N], None where every sequence begins at its own slot or row of pages
    (`slotted`); k_len: int32 [N]; block_table: int32 [N, pages_per_row]. All None for a plain batch, which only has
    a window. left, right, top_left: the `Window`. packed: the sequences share one batch entry.
    """

    q_start: torch.Tensor | None = None
    k_start: torch.Tensor | None = None
    k_len: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    page_size: int | None = None
    packed: bool = False
    slotted: bool = True

    @property
    def plain(self) -> bool:
        """No mask object, or one that hides nothing."""
        return not self.packed and self.left is None and self.right is None


def flatten_bias(attn_bias: Any, key_rows: int) -> tuple[Mask, Any]:
    """(mask, what is left of the bias: a tensor, None, or whatever else was given)."""
    if not isinstance(attn_bias, AttentionBias):
        return Mask(), attn_bias
    window = attn_bias._window()
    sides = (window.left, window.right, window.top_left)
    if not isinstance(attn_bias, PackedBias):
        return Mask(None, None, None, None, *sides), getattr(attn_bias, "_bias", None)
    slotted = isinstance(attn_bias.k_seqinfo, _PaddedSeqLenInfo)
    k_start, k_len = (None, attn_bias.k_seqinfo.seqlen) if slotted else attn_bias._keys(key_rows)
    table, page_size = None, None
    if isinstance(attn_bias, PagedBias):
        table, page_size = attn_bias.block_tables.to(torch.int32), attn_bias.page_size
    return Mask(attn_bias.q_seqinfo.seqstart, k_start, k_len, table, *sides, page_size, True, slotted), None


# ------------------------------------------------------------------------------------------------- formats

_TENSORS = {
    "Fp8": ("values", "scale", "shift"),
    "Int8": ("values", "scale"),
    "Int4": ("words", "scale", "shift"),
    "SeedInt4": ("words",),
    "SeedFp8": ("words", "coefficients"),
}
"""The tensors of each format; the first goes in the place of the dense tensor."""


def flatten_formats(*stores: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Dense tensors or formats -> (one tensor each, all further tensors, what they are).

    The text has one entry a store, joined by ";": empty for a dense tensor, else the class, its tensors and numbers,
    such as "Fp8 values scale" or "SeedInt4 words num_groups=4". All dense: the empty text.
    """
    first: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    texts: list[str] = []
    for x in stores:
        if isinstance(x, torch.Tensor):
            first.append(x)
            texts.append("")
            continue
        kind = type(x).__name__
        words = [kind]
        for name in _TENSORS[kind]:
            tensor = getattr(x, name)
            if tensor is not None:
                words.append(name)
                (first if name == _TENSORS[kind][0] else rest).append(tensor)
        if kind == "SeedInt4":
            words.append(f"num_groups={x.num_groups}")
        if kind == "SeedFp8":
            words.append(f"fp32_scales={int(x.fp32_scales)}")
        texts.append(" ".join(words))
    return first, rest, ";".join(texts) if any(texts) else ""


def restore_formats(first: Sequence[torch.Tensor], rest: Sequence[torch.Tensor], text: str) -> list[Any]:
    """The inverse of `flatten_formats`."""
    if not text:
        return list(first)
    remaining, stores = iter(rest), []
    entries = text.split(";")
    if len(entries) != len(first):
        raise ArgumentError(f"formats: expected {len(first)} entries joined by ';', got {text!r}")
    for x, entry in zip(first, entries):
        if not entry:
            stores.append(x)
            continue
        kind, *words = entry.split()
        if kind not in _TENSORS:
            raise ArgumentError(f"formats: expected one of {', '.join(_TENSORS)}, got {kind!r}")
        fields: dict[str, Any] = {}
        for word in words:
            name, _, number = word.partition("=")
            if number:
                fields[name] = bool(int(number)) if name == "fp32_scales" else int(number)
            else:
                fields[name] = x if name == _TENSORS[kind][0] else next(remaining)
        stores.append(getattr(formats, kind)(**fields))
    return stores


def last_axis(first: torch.Tensor, text: str, position: int) -> Any:
    """The logical head dimension of the store at `position`, from its first tensor: an int or a SymInt."""
    last = first.shape[-1]
    entry = text.split(";")[position] if text else ""
    kind = entry.split()[0] if entry else ""
    if kind == "Int4":
        return last * 8
    if kind == "SeedFp8":
        return last * 4
    if kind == "SeedInt4":
        return (last - int(entry.partition("num_groups=")[2])) * 8
    return last


# ------------------------------------------------------------------------------------------------- answers


def attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    sinks: Any,
    kv_lengths: Any,
    mask: Mask,
    *,
    output_dtype: torch.dtype | None,
    backend: str,
    answer: Callable[..., Any] = _route.answer,
    **options: Any,
) -> Any:
    """(out, lse) of a call of the `memory_efficient_attention` family, no gradient. options: as `problem.build`."""
    normalise = normaliser(mask, output_dtype, options)

    def tensors(problem: Problem) -> dict[str, torch.Tensor]:
        """The inputs of the problem's program."""
        named = {"q": query, "k": key, "v": value, "q_start": mask.q_start, "k_start": mask.k_start}
        named |= {"k_len": mask.k_len if mask.packed else kv_lengths, "block_table": mask.block_table}
        named |= {"bias": _of_all_heads(bias, query, problem), "sinks": sinks}
        return {name: x for name, x in named.items() if x is not None}

    static = ("attention", output_dtype, mask[4:], *((n, type(x), x) for n, x in options.items()))
    return answer(normalise, (query, key, value, bias, sinks, kv_lengths, mask[:4]), static, backend, tensors)


def _of_all_heads(bias: Any, query: Any, problem: Problem) -> Any:
    """The bias as the problem has it: of two head axes, one alone may be broadcast only where they are group and head
    of a group. Elsewhere it is a view of both, which is not launched."""
    if bias is None or bias.numel() == math.prod(problem.bias or ()):
        return bias
    return bias.expand(-1, *query.shape[2:-1], -1, -1)


def normaliser(mask: Mask, output_dtype: torch.dtype | None, options: dict[str, Any]) -> Callable[..., Any]:
    """`problem.build` as a function of the arrays alone."""
    window = Window(mask.left, mask.right, mask.top_left)

    def normalise(query: Any, key: Any, value: Any, bias: Any, sinks: Any, kv_lengths: Any, lowered: Any) -> Any:
        parts = None
        if mask.packed:
            form = _normal_form(lowered, key, mask.slotted)
            parts = MaskParts(form, window, mask.page_size, True, mask.slotted)
        elif not mask.plain:
            parts = MaskParts(NormalForm(None, None, None), window, None, False, True)
        return build(
            query=query,
            key=key,
            value=value,
            attn_bias=bias,
            sinks=sinks,
            kv_lengths=kv_lengths,
            output_dtype=jax_dtype(output_dtype),
            parts=parts,
            **options,
        )

    return normalise


def _normal_form(lowered: Sequence[Any], key: Any, slotted: bool) -> NormalForm:
    q_start, k_start, k_len, table = lowered
    if slotted:
        count, rows = k_len.shape[0], key.shape[0] * key.shape[1]
        if table is None and rows % max(count, 1):
            raise ShapeError(f"key: {rows} rows are not a multiple of the bias' {count} sequences")
        k_start = np.arange(count, dtype=np.int32) * np.int32(0 if table is not None else rows // max(count, 1))
    return NormalForm(q_start, k_start, k_len, table)


def attend_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    seqused_k: Any,
    block_table: Any,
    sinks: Any,
    *,
    backend: str,
    answer: Callable[..., Any] = _route.answer,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a call of `varlen_attn`, no gradient. options: as `varlen.build`."""

    def tensors(problem: Problem) -> dict[str, torch.Tensor]:
        """The inputs of the problem's program."""
        lengths = cu_seq_k.diff() if seqused_k is None else seqused_k
        starts = cu_seq_k[:-1] if block_table is None else None
        named = {"q": query, "k": key, "v": value, "q_start": cu_seq_q, "k_start": starts, "k_len": lengths}
        named |= {"block_table": block_table, "sinks": sinks}
        return {name: x for name, x in named.items() if x is not None}

    normalise = varlen_normaliser(max_q, max_k, options)
    arguments = (query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, sinks)
    static = ("varlen", max_q, max_k, *((n, type(x), _hashable(x)) for n, x in options.items()))
    return answer(normalise, arguments, static, backend, tensors)


def varlen_normaliser(max_q: int, max_k: int, options: dict[str, Any]) -> Callable[..., Any]:
    """`varlen.build` as a function of the arrays alone."""

    def normalise(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, used: Any, table: Any, sinks: Any) -> Any:
        return jax_varlen.build(
            query, key, value, cu_q, cu_k, max_q, max_k, seqused_k=used, block_table=table, sinks=sinks, **options
        )

    return normalise


def _hashable(option: Any) -> Any:
    return tuple((type(x), x) for x in option) if isinstance(option, (list, tuple)) else option


def check_options(options: dict[str, Any]) -> None:
    """Raises what a direct call would: an op's schema takes True, or a tensor, for a number. (A traced call's numbers
    may be symbols.)"""
    if torch.compiler.is_compiling():
        return
    given = options.get
    check_backend(given("backend", "auto"))
    check_dropout(given("p", 0.0))
    default_scale(given("scale"), 1)
    check_softcap(given("softcap"))
    check_splits(given("num_splits"), given("split_size"))
    check_output_dtype(given("output_dtype"))
    jax_varlen.window(given("window_size", (-1, -1)))


def as_tensor(x: Any, name: str) -> torch.Tensor | None:
    """Lists and numpy arrays, which a direct call takes, too."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    if isinstance(x, (list, tuple, np.ndarray)):
        return torch.as_tensor(np.asarray(x))
    raise DTypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def check_output_dtype(output_dtype: Any) -> None:
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise DTypeError(f"output_dtype: expected a torch.dtype or None, got {output_dtype!r}")
