"""Compiling ahead of the first call, and what was compiled so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pallas_kernels.errors import ArgumentError, DeviceError, UnsupportedError
from pallas_kernels.problem import Problem, static_int
from pallas_kernels.varlen import window as as_window

from . import _flat, _lean, _route, cache, launch
from .launch import CompiledKernel

Range = int | tuple[int, int]


class CacheInfo(NamedTuple):
    """What this process has compiled.

    kernels: in order. seconds: for all of them together. calls: how many calls were launched, whether or not they
    compiled; plans: how many signatures of calls are kept. directory: of lowered kernels on disk, None if disabled.
    """

    kernels: tuple[CompiledKernel, ...]
    seconds: float
    calls: int
    plans: int
    directory: Path | None


def cache_info() -> CacheInfo:
    """What was compiled, when, how long it took, and how many calls it has served."""
    kernels = launch.compiled()
    return CacheInfo(kernels, sum(k.seconds for k in kernels), _lean.calls(), _lean.plans(), cache.directory())


def warmup(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_length: int,
    batch: Range,
    tokens: Range = 1,
    page_size: int | None = None,
    pages: int | None = None,
    plain: bool = False,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    output_dtype: torch.dtype | None = None,
    window: Sequence[int] = (-1, -1),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.dtype | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    device: torch.device | str | int | None = None,
) -> tuple[CompiledKernel, ...]:
    """Compile what calls of these shapes will launch, so that none of them waits, and all may be captured in a graph.

    For `varlen_attn` and the paged masks (give page_size and pages), the padded masks (neither), or plain batches
    (`plain`: no mask, or one that is only a window). Nothing is launched, and beside the kernels 1.25 MiB is all
    that is put on the device.

    Args:
        heads, kv_heads, head_dim, value_dim: of query, and of key and value; value_dim is head_dim by default.
        max_length: rows of a sequence's slot; with pages, the keys that a row of the block table has room for: its
            width times page_size.
        batch: sequences of a call: a number, or (least, most), both included.
        tokens: query tokens of a sequence, likewise.
        page_size, pages: rows of a page, and pages of the whole pool (`key.shape[0]`, or its rows / page_size).
        plain: plain batches, query [batch, tokens, heads, D] and key [batch, max_length, kv_heads, D].
        dtype: of query, key and value. output_dtype: as given to the call; float32 for partial results.
        window: (left, right) in keys, negative: unbounded; (-1, 0) is causal, a causal window of W keys (W - 1, 0).
        scale, softcap, num_splits, split_size: as given to the call. sinks: their dtype, if calls give some.
        device: a CUDA device, by default the current one.

    Returns:
        The kernels that were compiled now; those of earlier calls are not compiled again.

    Raises:
        ArgumentError, ShapeError, DTypeError for what no call may be given; UnsupportedError, with the reasons, where
        calls would not be launched; DeviceError without a CUDA device.
    """
    if (page_size is None) != (pages is None):
        raise ArgumentError(f"page_size, pages: give both or neither, got {page_size} and {pages}")
    if plain and page_size is not None:
        raise ArgumentError("plain: a plain batch has no pages; give one of plain and page_size")
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "max_length": max_length}
    sizes |= {"value_dim": head_dim if value_dim is None else value_dim}
    if page_size is not None and pages is not None:
        sizes |= {"page_size": page_size, "pages": pages}
    for name, size in sizes.items():
        static_int(size, name, least=1)
    card = _card(device)
    before = len(launch.compiled())
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, num_splits=num_splits, split_size=split_size)
    for count, total in _counts(_range(batch, "batch"), _range(tokens, "tokens"), every=plain):
        call = _paged_or_padded if not plain else _plain
        (query, key, value), mask = call(count, total, sizes, dtype, as_window(window))
        sink = None if sinks is None else torch.empty(heads, dtype=sinks, device="meta")
        _flat.attend(
            query, key, value, None, sink, None, mask,
            output_dtype=output_dtype, backend="hopper", answer=_answer(card), **options,
        )  # fmt: skip
    return launch.compiled()[before:]


def _answer(device: torch.device) -> Callable[..., None]:
    """In the place of an answer: the plan, from tensors without memory."""

    def plan(build: Any, arguments: Any, static: Any, backend: str, tensors: Callable[[Problem], Any]) -> None:
        problem, layout = _route.described(build, arguments, static)
        reasons = launch.reasons(problem, device)
        if reasons:
            raise UnsupportedError("warmup: calls of this kind are not launched: " + "; ".join(reasons))
        launch.plan(problem, layout, tensors(problem), device)

    return plan


def _paged_or_padded(
    count: int, total: int, sizes: dict[str, int], dtype: torch.dtype, window: Any
) -> tuple[list[torch.Tensor], _flat.Mask]:
    """(query, key, value) and the mask of `count` sequences with `total` tokens, without memory."""
    table, page_size = None, sizes.get("page_size")
    rows = count * sizes["max_length"]
    if page_size is not None:
        table = _ints(count, -(-sizes["max_length"] // page_size))
        rows = page_size * sizes["pages"]
    mask = _flat.Mask(
        q_start=_ints(count + 1), k_len=_ints(count), block_table=table, left=window.left, right=window.right,
        page_size=page_size, packed=True,
    )  # fmt: skip
    return _tensors(1, total, rows, sizes, dtype), mask


def _plain(
    count: int, total: int, sizes: dict[str, int], dtype: torch.dtype, window: Any
) -> tuple[list[torch.Tensor], _flat.Mask]:
    given = _tensors(count, total // count, sizes["max_length"], sizes, dtype)
    return given, _flat.Mask(left=window.left, right=window.right)


def _tensors(
    batch: int, queries: int, keys: int, sizes: dict[str, int], dtype: torch.dtype
) -> list[torch.Tensor]:
    shapes = (
        (batch, queries, sizes["heads"], sizes["head_dim"]),
        (batch, keys, sizes["kv_heads"], sizes["head_dim"]),
        (batch, keys, sizes["kv_heads"], sizes["value_dim"]),
    )
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _range(given: Range, name: str) -> tuple[int, int]:
    low, high = given if isinstance(given, tuple) and len(given) == 2 else (given, given)
    low, high = static_int(low, name, least=1), static_int(high, name, least=1)
    if high < low:
        raise ArgumentError(f"{name}: expected (least, most), got {given}")
    return low, high


def _counts(batch: tuple[int, int], tokens: tuple[int, int], every: bool) -> Iterator[tuple[int, int]]:
    """(sequences, tokens of all) that stand for all calls in the ranges.

    What is compiled changes where a power of two is passed. `every`: all tokens are shared out evenly, and whether
    results are merged depends on how rows fill the card, so each number is looked at.
    """
    if every:
        for count in range(batch[0], batch[1] + 1):
            for each in range(tokens[0], tokens[1] + 1):
                yield count, count * each
        return
    for count in _steps(*batch):
        for total in _steps(count * tokens[0], count * tokens[1]):
            yield count, total


def _steps(low: int, high: int) -> list[int]:
    """One number for each power of two that holds a number of a range."""
    bits = range((low - 1).bit_length(), (high - 1).bit_length() + 1)
    return [min(1 << n, high) for n in bits]


def _card(device: torch.device | str | int | None) -> torch.device:
    launch.check_process()
    if not torch.cuda.is_available():
        raise DeviceError("warmup: no CUDA device is available")
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise DeviceError(f"device: expected a CUDA device, got {found}")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
