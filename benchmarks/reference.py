"""The float64 that everything is compared with, in torch. Written apart from the library."""

from __future__ import annotations

import random
from typing import Any

from .rows import AnyRow, MergeRow, Row

MOST_BYTES = 2**30
"""Of keys and values in float64 that a row's check reads."""
MOST_MERGED = 256


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, block: int = 16384) -> tuple[Any, Any]:
    """(out [m, heads, D] float64, lse [m, heads] float64) of q [m, heads, D] over k, v [n, kv_heads, D].

    `block` keys at a time. causal: bottom-right, query i sees the keys j <= i + n - m. A row that sees no key is 0 with
    LSE -inf.
    """
    import torch

    queries, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    rows = q.double().reshape(queries, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, dim) * dim**-0.5
    here = torch.arange(queries, device=q.device).repeat_interleave(group) + (keys - queries)
    top = torch.full(rows.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
    total, acc = torch.zeros_like(top), torch.zeros_like(rows)
    for start in range(0, keys, block):
        some_k, some_v = (x[start : start + block].double().transpose(0, 1) for x in (k, v))
        scores = rows @ some_k.transpose(1, 2)
        if causal:
            j = torch.arange(start, start + some_k.shape[1], device=q.device)
            scores = scores.masked_fill(j[None, :] > here[:, None], -torch.inf)
        new = torch.maximum(top, scores.amax(-1))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        weights = torch.exp(scores - safe[..., None])
        scale = torch.exp(top - safe)
        total, acc, top = total * scale + weights.sum(-1), acc * scale[..., None] + weights @ some_v, new
    out = acc / total.masked_fill(total == 0, 1.0)[..., None]
    lse = top + total.log()
    lse = lse.masked_fill(total == 0, -torch.inf)
    split = (kv_heads, queries, group)
    return (
        out.reshape(*split, dim).transpose(0, 1).reshape(queries, heads, dim),
        lse.reshape(split).transpose(0, 1).reshape(queries, heads),
    )


def merge(attn: Any, lse: Any) -> Any:
    """out float64 [rows, heads, D] of attn [S, rows, heads, D] with lse [S, rows, heads]."""
    return (lse.double().softmax(0)[..., None] * attn.double()).sum(0)


def sample(row: AnyRow, given: Any, seed: int) -> tuple[list[int], Any]:
    """(places, out float64 [places, ...]): what the output of a row must be at some places of its first axis.

    All places while that is quick; else the sequences with the fewest and the most keys, and others at random.
    """
    import torch

    draw = random.Random(seed)
    if isinstance(row, MergeRow):
        places = sorted(draw.sample(range(row.out_shape[0]), min(row.out_shape[0], MOST_MERGED)))
        attn = given.attn.flatten(1, 2)[:, places]
        lse = given.lse.transpose(2, 3).flatten(1, 2)[:, places]
        return places, merge(attn, lse)
    counts = row.key_counts()
    order = sorted(range(row.batch), key=counts.__getitem__)
    order = [order[0], order[-1], *draw.sample(order[1:-1], len(order[1:-1]))][: row.batch]
    places, bytes_left = [], MOST_BYTES
    for b in order:
        bytes_left -= 2 * counts[b] * row.kv_heads * row.head_dim * 8
        if bytes_left < 0 and len(places) >= 2:
            break
        places.append(b)
    outs = [attention(given.q[b], *_keys(row, given, b, counts[b]), causal=row.causal)[0] for b in places]
    return places, torch.stack(outs)


def _keys(row: Row, given: Any, b: int, count: int) -> tuple[Any, Any]:
    """k, v [count, kv_heads, D] of a sequence."""
    if row.page_size is None:
        return given.k[b, :count], given.v[b, :count]
    pages = given.table[b, : -(-count // row.page_size)].long()
    return tuple(x[pages].flatten(0, 1)[:count] for x in (given.k, given.v))  # type: ignore[return-value]


def relative_error(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected|, Euclidean; |actual| where expected is 0; NaN where either has one."""
    import torch

    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    size = torch.linalg.vector_norm(expected.double())
    return float(difference / size) if float(size) != 0 else float(difference)
