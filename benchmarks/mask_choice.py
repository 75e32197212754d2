"""The mask class of a call by where its keys lie and what its window is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallas_kernels import masks


def mask_of(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    window: tuple[int | None, int | None] | None = None,
    slot: int | None = None,
    rows: int | None = None,
    starts: Sequence[int] | None = None,
    table: Any = None,
    page_size: int | None = None,
) -> Any:
    """Keys lie in slots of `slot` rows, or (`starts`) anywhere in `rows`; with a table in pages, each sequence's from
    its first page's row 0 or (`starts`) from a later row on. window: (None, 0) is causal; others have slots only."""
    kind = {None: "", (None, 0): "CausalWithOffset"}.get(window, "LocalAttention")
    paged, gappy = "" if table is None else "Paged", "Padded" if starts is None else "Gappy"
    cls = getattr(masks, f"{paged}BlockDiagonal{kind}{gappy}KeysMask")
    if table is not None:
        return cls.from_seqlens(q_lens, *(() if starts is None else (starts,)), k_lens, table, page_size)
    if starts is not None:
        return cls.from_seqlens(q_lens, [*starts, rows], k_lens)
    if kind == "LocalAttention":
        return cls.from_seqlens_local(q_lens, slot, k_lens, *window)
    return cls.from_seqlens(q_lens, slot, k_lens)
