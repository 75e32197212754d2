"""FLOP formulas of the ops, for `torch.utils.flop_counter`.

A score costs 2 D and its product with a value 2 Dv; the backward recomputes the score and forms dP, dV, dQ and dK. With
`pairs` the number of (query, key) pairs that the mask shows, summed over sequences:

    forward   2 * query heads * pairs * (D + Dv)
    backward  2 * query heads * pairs * (3 D + 2 Dv)
    merge     2 * elements of all chunks; its backward twice that

So causal and windowed calls count what is visible (torch's own formulas count the full rectangle), a group of query
heads counts each of them, and pages count the keys in use, not the pool. Array biases hide nothing here, and softcap,
sinks and the softmax itself are left out, as torch leaves them out.

Lengths are read where they lie on the host (CPU tensors). Those on a device are never read back, and those of fake
tensors do not exist; there every sequence counts with what the host knows:

| call     | queries of a sequence                    | keys of a sequence                                            |
| -------- | ---------------------------------------- | ------------------------------------------------------------- |
| varlen   | max_q                                    | max_k                                                         |
| mask     | all queries / N                          | its slot or row of pages; without slots, all key rows / N     |
| lengths  | all of them                              | all of them                                                   |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import register_flop_formula

from .. import _flat
from ._registry import filler, ops


def pairs(queries: Any, keys: Any, left: Any, right: Any, top_left: bool) -> Any:
    """Visible (query, key) pairs of sequences of these lengths: ints, SymInts, or int64 arrays to sum over."""
    shift = 0 if top_left else keys - queries
    high = queries * keys if right is None else _clipped_sum(shift + right + 1, queries, keys)
    low = 0 if left is None else _clipped_sum(shift - left, queries, keys)
    if left is not None and right is not None and left + right < 0:
        return 0
    total = high - low
    return int(total.sum()) if isinstance(total, np.ndarray) else total


def _clipped_sum(start: Any, count: Any, limit: Any) -> Any:
    """The sum over i < count of start + i, each clipped to [0, limit]."""
    return _prefix(start + count, limit) - _prefix(start, limit)


def _prefix(n: Any, limit: Any) -> Any:
    """The sum over 0 <= m < n of min(m, limit); 0 for negative n."""
    arrays = isinstance(n, np.ndarray) or isinstance(limit, np.ndarray)
    largest, least = (np.maximum, np.minimum) if arrays else (max, min)
    n = largest(n, 0)
    ramp = least(n, limit + 1)
    return ramp * (ramp - 1) // 2 + (n - ramp) * limit


def _on_host(x: Any) -> np.ndarray | None:
    if type(x) is torch.Tensor and x.device.type == "cpu" and not torch._is_functional_tensor(x):
        return x.numpy().astype(np.int64)
    return None


def _attention_pairs(arguments: dict[str, Any]) -> Any:
    query, key, k_len, lengths = (arguments[name] for name in ("query", "key", "k_len", "kv_lengths"))
    sides = (arguments["window_left"], arguments["window_right"], arguments["top_left"])
    queries = query.shape[1]
    if k_len is None:
        keys = _on_host(lengths) if lengths is not None else None
        if keys is not None:
            return pairs(np.full_like(keys, queries), keys, *sides)
        return query.shape[0] * pairs(queries, key.shape[1], *sides)
    starts, keys, count = _on_host(arguments["q_start"]), _on_host(k_len), k_len.shape[0]
    if starts is not None and keys is not None:
        return pairs(np.diff(starts), keys, *sides)
    table = arguments["block_table"]
    rows = key.shape[0] * key.shape[1] // max(count, 1) if table is None else table.shape[1] * arguments["page_size"]
    return count * pairs(-(-queries // max(count, 1)), rows, *sides)


def _varlen_pairs(arguments: dict[str, Any]) -> Any:
    left, right = (w if w >= 0 else None for w in arguments["window_size"])
    starts, used, cu_k = (_on_host(arguments[name]) for name in ("cu_seq_q", "seqused_k", "cu_seq_k"))
    keys = used if arguments["seqused_k"] is not None else None if cu_k is None else np.diff(cu_k)
    if starts is not None and keys is not None:
        return pairs(np.diff(starts), keys, left, right, False)
    count = arguments["cu_seq_q"].shape[0] - 1
    return count * pairs(arguments["max_q"], arguments["max_k"], left, right, False)


def _products(name: str, count: Callable[[dict[str, Any]], Any], backward: bool) -> Callable[..., Any]:
    fill, arguments_of = filler(name), [a.name for a in getattr(ops, name).default._schema.arguments]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        args, kwargs = fill(args, kwargs)
        arguments = dict(zip(arguments_of, args)) | kwargs
        query, value = arguments["query"], arguments["value"]
        d, dv, heads = query.shape[-1], _flat.last_axis(value, arguments["formats"], 2), 1
        for n in query.shape[1 if query.ndim == 3 and "max_q" in arguments else 2 : -1]:
            heads = heads * n
        return 2 * heads * count(arguments) * (3 * d + 2 * dv if backward else d + dv)

    return formula


def merge(attn: Any, *_: Any, out_val: Any = None, **__: Any) -> Any:
    """Of the chunks of a merge, an op's first argument."""
    return 2 * sum(x.numel() for x in attn)


def merge_backward(attn: Any, *_: Any, out_val: Any = None, **__: Any) -> Any:
    """As `merge`, of its backward."""
    return 4 * sum(x.numel() for x in attn)


def _merge_backward(grad_out: Any, grad_lse: Any, attn: Any, *_: Any, out_val: Any = None, **__: Any) -> Any:
    return merge_backward(attn)


def dense(query: Any, key: Any, last: Any) -> Any:
    """Of a forward without a mask on query [B, M, *heads, D] or [B, M, D], giving `last` elements a row."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[1] * (query.shape[-1] + last)


def register() -> None:
    formulas = {
        "attention": _products("attention", _attention_pairs, backward=False),
        "attention_backward": _products("attention_backward", _attention_pairs, backward=True),
        "varlen": _products("varlen", _varlen_pairs, backward=False),
        "varlen_out": _products("varlen_out", _varlen_pairs, backward=False),
        "varlen_backward": _products("varlen_backward", _varlen_pairs, backward=True),
        "merge": merge,
        "merge_backward": _merge_backward,
    }
    for name, formula in formulas.items():
        add(name, formula)


def add(name: str, formula: Callable[..., Any]) -> None:
    """Register the formula of op `name` of this namespace: it takes the op's arguments and keyword `out_val`."""
    register_flop_formula(getattr(ops, name), get_raw=True)(formula)
