"""One token's queries against a KV cache, in each format, dense and in pages: what it costs and how far off it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import bridge
from bridge.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

from .model import KeysValues

PAGE = 64
"""Rows of a page."""


class Format(NamedTuple):
    """How the cache is stored: `name` of `bridge.formats.quantize`, or None for a plain tensor; and what to expect."""

    name: str | None
    options: dict[str, Any]
    limit: float
    """The relative error of the decoded queries that is still accepted."""


FORMATS = {
    "bf16": Format(None, {}, 5e-3),
    "fp8": Format("fp8", {}, 4e-2),
    "int8": Format("int8", {}, 1e-2),
    "int4, 4 groups": Format("int4", {"groups": 4}, 7e-2),
    "int4, 1 group": Format("int4", {}, 1.3e-1),
}


class Result(NamedTuple):
    """One row of the table. `ok`: the error is within the format's limit."""

    cache: str
    storage: str
    error: float
    limit: float
    nbytes: int
    splits: int
    backend: str

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


def exact(x: KeysValues) -> np.ndarray:
    """The definition in float64: [layers, 1, heads, D]."""
    q, k, v = (np.asarray(t.cpu(), np.float64) for t in x)
    scores = np.einsum("lqhd,lmhd->lhqm", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("lhqm,lmhd->lqhd", p / p.sum(-1, keepdims=True), v)


def relative_error(out: torch.Tensor, expected: np.ndarray) -> float:
    """|out - expected| / |expected| over all elements."""
    got = np.asarray(out.double().cpu()).reshape(expected.shape)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def store(x: torch.Tensor, form: Format, dtype: torch.dtype) -> Any:
    """Keys or values in a format."""
    return x.to(dtype) if form.name is None else bridge.formats.quantize(x, form.name, **form.options)


def block_table(layers: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """int32 [layers, pages of a layer]: all pages in shuffled order, as an allocator leaves them after a while."""
    pages = -(-tokens // PAGE)
    order = torch.randperm(layers * pages, generator=torch.Generator().manual_seed(seed))
    return order.reshape(layers, pages).int()


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """[layers, T, heads, D] with room for a multiple of 8 tokens, as a cache has. What no token fills is NaN."""
    layers, tokens, *row = x.shape
    full = x.new_full((layers, -(-tokens // 8) * 8, *row), torch.nan)
    full[:, :tokens] = x
    return full


def paged(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[layers, T, heads, D] -> [pages, PAGE, heads, D]. What no token fills is NaN: nothing may read it."""
    layers, tokens, *row = x.shape
    full = x.new_full((layers, table.shape[1] * PAGE, *row), torch.nan)
    full[:, :tokens] = x
    pages = torch.empty(table.numel(), PAGE, *row, dtype=x.dtype, device=x.device)
    pages[table.flatten().long()] = full.reshape(pages.shape)
    return pages


def decode(x: KeysValues, dtype: torch.dtype, backend: str = "auto") -> Iterator[Result]:
    """The rows of the table, one by one. The layers are a batch: each has its own queries, keys and values."""
    layers, tokens = x.k.shape[:2]
    expected = exact(x)
    table = block_table(layers, tokens).to(x.k.device)
    mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens([1] * layers, [tokens] * layers, table, PAGE)
    lengths = torch.full((layers,), tokens, dtype=torch.int32, device=x.k.device)
    q = x.q.to(dtype)
    for cache, form in FORMATS.items():
        for storage, query, bias, lens, k, v in (
            ("dense", q, None, lengths, rounded_up(x.k), rounded_up(x.v)),
            (f"pages of {PAGE}", q.transpose(0, 1), mask, None, paged(x.k, table), paged(x.v, table)),
        ):
            call = (query, store(k, form, dtype), store(v, form, dtype), bias)
            options: dict[str, Any] = dict(kv_lengths=lens, backend=backend)
            served = bridge.served_by(*call, **options)
            out = bridge.memory_efficient_attention(*call, **options)
            yield Result(
                cache,
                storage,
                relative_error(out, expected),
                form.limit,
                call[1].nbytes + call[2].nbytes,
                served.splits,
                served.backend,
            )
