"""Attention of one sequence in float64, block by block of keys, in torch. Written apart from the library."""

from __future__ import annotations

from typing import Any


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, block: int = 16384) -> tuple[Any, Any]:
    """(out [m, heads, D] float64, lse [m, heads] float64) of q [m, heads, D] over k, v [n, kv_heads, D].

    causal: bottom-right, query i sees the keys j <= i + n - m. A row that sees no key is 0 with LSE -inf.
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


def relative_error(actual: Any, expected: Any) -> float:
    """|actual - expected| / |expected|, Euclidean; |actual| where expected is 0; NaN where either has one."""
    import torch

    difference = torch.linalg.vector_norm(actual.double() - expected.double())
    size = torch.linalg.vector_norm(expected.double())
    return float(difference / size) if float(size) != 0 else float(difference)
