"""The short way of an eager call: what it looks like was seen before, so its plan is run at once.

A call's *key* is everything that normalisation, validation and the choice of a route depend on and that can be seen
without reading device memory: shapes, contiguity, dtypes, device, options and their types, the kind of bias and its
static parts. A first call takes the long way (`bridge._route`), which raises, falls back or files its plan under the
key; equal calls then differ in what is looked at each time: addresses (and their alignment). Callers
come here only where nothing in torch has to see the call: no gradient, no compiler, no mode, no transform.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from . import launch
from .fmha import attn_bias as biases

MOST_PLANS = 4096
ALIGNED_TO = 16

_TENSOR = torch.Tensor
_plans: dict[Hashable, launch.Plan] = {}
_calls_of_dropped = 0


class Call(NamedTuple):
    """A call as the short way sees it. `tensors` are its program's inputs; longest: the keys of a sequence, as the
    bias knows them."""

    key: Hashable
    tensors: tuple[torch.Tensor, ...]
    longest: int = 0


def run(call: Call, want_lse: bool, out: torch.Tensor | None = None) -> tuple[torch.Tensor, Any] | None:
    """(out, lse or None) of a call whose like was launched before; None sends it the long way."""
    try:
        plan = _plans.get(call.key)
    except TypeError:  # an option of a wrong type: the long way says which
        return None
    if plan is None or call.longest > plan.room:
        return None
    addresses = [x.data_ptr() for x in call.tensors]
    if reduce(or_, addresses) % ALIGNED_TO:
        return None
    return plan.run(addresses, want_lse, out)


def file(call: Call | None, plan: launch.Plan, addresses: list[int]) -> None:
    """Keep the plan of a call that the long way has launched with these addresses.

    Unless it had to make a tensor of its own, such as int32 entries of a table that has others.
    """
    global _calls_of_dropped
    if call is None or any(type(x) is not _TENSOR for x in call.tensors):
        return
    if [x.data_ptr() for x in call.tensors] == addresses:
        if len(_plans) >= MOST_PLANS:
            _calls_of_dropped += sum(plan.calls for plan in _plans.values())
            _plans.clear()
        _plans[call.key] = plan


def calls() -> int:
    """Calls that ran a filed plan."""
    return _calls_of_dropped + sum(plan.calls for plan in list(_plans.values()))


def plans() -> int:
    """Signatures whose plans are kept."""
    return len(_plans)


def look(kind: tuple[Any, ...], options: tuple[Any, ...], tensors: tuple[Any, ...], longest: int = 0) -> Call | None:
    """The call of these tensors, or None where it always takes the long way."""
    if forward_ad._current_level >= 0:
        return None
    looks = [(x.shape, x.is_contiguous() or x.stride(), x.dtype, x.get_device()) for x in tensors if type(x) is _TENSOR]
    return Call((kind, options, *map(type, options), *looks), tensors, longest)


# --------------------------------------------------------------------------------------------------- biases


def attention(
    query: Any, key: Any, value: Any, bias: Any, kv_lengths: Any, sinks: Any, options: tuple[Any, ...], partial: bool
) -> Call | None:
    """A call of the `memory_efficient_attention` family; options: all others, in a fixed order."""
    last, given = () if sinks is None else (sinks,), (partial, sinks is None)
    if bias is None:
        if kv_lengths is None:
            return look(("attention", given), options, (query, key, value, *last))
        return look(("attention", given, "k_len"), options, (query, key, value, kv_lengths, *last))
    if type(bias) is _TENSOR:
        lengths = () if kv_lengths is None else (kv_lengths,)
        kind = ("attention", given, "bias", kv_lengths is None)
        return look(kind, options, (query, key, value, *lengths, bias, *last))
    reader = _READERS.get(type(bias))
    if reader is None or kv_lengths is not None:
        return None
    static, tensors, longest = reader(bias)
    return look(("attention", given, type(bias), *static), options, (query, key, value, *tensors, *last), longest)


Read = tuple[tuple[Hashable, ...], tuple[torch.Tensor, ...], int]
"""Of a bias: its static parts, its tensors in the program's order, the keys of its longest sequence."""


def _reader(*parameters: str) -> Callable[[Any], Read]:
    """Reads a bias without tensors: its window."""
    return lambda bias: (tuple([getattr(bias, name) for name in parameters]), (), 0)


def _padded_reader(*parameters: str, paged: bool = False) -> Callable[[Any], Read]:
    """Reads a bias of padded keys. Lengths may be replaced or updated in place between calls, so all is read anew;
    of the host's lists, that is how many there are, how many queries in all, and the longest that ever were."""

    def read(bias: Any) -> Read:
        q, k = bias.q_seqinfo, bias.k_seqinfo
        starts = q.seqstart_py
        static = (starts[-1], len(starts), len(k.seqstart_py), *[getattr(bias, name) for name in parameters])
        if paged:
            return (*static, bias.page_size), (q.seqstart, k.seqlen, bias.block_tables), k.max_seqlen
        return static, (q.seqstart, k.seqlen), k.max_seqlen

    return read


_READERS: dict[type, Callable[[Any], Read]] = {
    biases.LowerTriangularMask: _reader(),
    biases.LowerTriangularFromBottomRightMask: _reader(),
    biases.LowerTriangularFromBottomRightLocalAttentionMask: _reader("_window_size"),
    biases.LocalAttentionFromBottomRightMask: _reader("window_left", "window_right"),
    biases.BlockDiagonalPaddedKeysMask: _padded_reader(),
    biases.BlockDiagonalCausalWithOffsetPaddedKeysMask: _padded_reader(),
    biases.BlockDiagonalLocalAttentionPaddedKeysMask: _padded_reader("window_left", "window_right"),
    biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask: _padded_reader("_window_size"),
    biases.PagedBlockDiagonalPaddedKeysMask: _padded_reader(paged=True),
    biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask: _padded_reader(paged=True),
    biases.PagedBlockDiagonalCausalLocalPaddedKeysMask: _padded_reader("_window_size", paged=True),
}
"""By exact class: a subclass may see other keys."""


def varlen(
    tensors: tuple[Any, ...], cu_seq_k: Any, max_q: Any, max_k: Any, options: tuple[Any, ...]
) -> Call | None:
    """A call of `varlen_attn` over pages. tensors: (query, key, value, cu_seq_q, seqused_k, block_table[, sinks]);
    options: (scale, window_size, ...).

    The maxima are checked here and enter no key: with pages, nothing that is compiled depends on them.
    """
    if type(max_q) is not int or type(max_k) is not int or max_q < 0 or max_k < 0:
        return None
    scale, window, *others = options
    if type(window) not in (tuple, list) or any([type(w) is not int for w in window]):
        return None
    unread = None
    if cu_seq_k is not None:
        if type(cu_seq_k) is not torch.Tensor:
            return None
        unread = (cu_seq_k.shape, cu_seq_k.dtype, cu_seq_k.get_device())
    return look(("varlen", *window, unread), (scale, *others), tensors)


def _after_fork() -> None:
    _plans.clear()


os.register_at_fork(after_in_child=_after_fork)
