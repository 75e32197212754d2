"""Block-diagonal masks over gappy keys, as they lie or in pages (MSLK attn_bias)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from pallas_kernels.errors import ArgumentError, ShapeError, UnsupportedError
from pallas_kernels.masks import Window, check_storage

from .base import CAUSAL, PackedBias, PagedBias, check_tables, same_count
from .seqlen import Device, _GappySeqInfo, _SeqLenInfo, default_device, host_lengths, movable


@movable
class BlockDiagonalGappyKeysMask(PackedBias):
    """Sequence b's keys are rows seqstart[b] .. seqstart[b] + seqlen[b] - 1 of k_seqinfo; its queries see them all."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Device | None = None,
    ) -> Self:
        """q_seqlen, kv_seqlen: N lengths each; kv_seqstarts: N + 1 rows, the last being the key axis' length.

        Raises ArgumentError (a ValueError and AssertionError) for other counts, or for tensors.
        """
        q, k = _gappy(q_seqlen, kv_seqstarts, kv_seqlen, device)
        return cls(q_seqinfo=q, k_seqinfo=k)

    def make_paged[P: PagedBlockDiagonalGappyKeysMask](
        self, block_tables: torch.Tensor, page_size: int, notional_padding: int, paged_type: type[P]
    ) -> P:
        """The same keys over pages, without a device sync; sequence b's slot had begun at row b * notional_padding.

        Raises ArgumentError (a ValueError and AssertionError) where page_size does not divide notional_padding, or
        keys lie outside [0, pages_per_row * page_size) of their slot.
        """
        check_storage(paged_type, PagedBlockDiagonalGappyKeysMask)
        check_tables(block_tables, page_size, self._count)
        if notional_padding % page_size:
            raise ArgumentError(
                f"Notional padding should be divisible by the page size, got notional_padding={notional_padding}, "
                f"page_size={page_size}"
            )
        k, row = self.k_seqinfo, block_tables.shape[1] * page_size
        starts = [start - b * notional_padding for b, start in enumerate(k.seqstart_py[:-1])]
        ends = [start + n for start, n in zip(starts, k.seqlen_py)]
        if min(starts) < 0 or max(starts) >= row or max(ends) > row:
            raise ArgumentError(
                f"kv_seqstarts: keys {list(zip(starts, ends))} of their slots do not lie in the {row} rows of pages"
            )
        slots = notional_padding * torch.arange(self._count + 1, dtype=torch.int32, device=k.seqstart.device)
        seqstart = k.seqstart - slots
        paged = _GappySeqInfo(
            seqstart=seqstart,
            max_seqlen=k.max_seqlen,
            min_seqlen=k.min_seqlen,
            seqstart_py=starts + [-1],
            seqlen=k.seqlen + seqstart[:-1],
            seqlen_py=ends,
        )
        return paged_type(q_seqinfo=self.q_seqinfo, k_seqinfo=paged, block_tables=block_tables, page_size=page_size)

    def _keys(self, key_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_seqinfo.seqstart[:-1], self.k_seqinfo.seqlen

    def _check_keys(self, key_rows: int) -> None:
        end = max((end for start, end in self.k_seqinfo.intervals() if end > start), default=0)
        if end > key_rows:
            raise ShapeError(f"kv_seqstarts + kv_seqlen: keys up to row {end}, but key has {key_rows} rows")


def _gappy(
    q_seqlen: Sequence[int],
    kv_seqstarts: Sequence[int],
    kv_seqlen: Sequence[int],
    device: Device | None,
    paged: bool = False,
) -> tuple[_SeqLenInfo, _GappySeqInfo]:
    device = default_device(device)
    q = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
    k = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, paged, device=device)
    same_count(q_seqlen, kv_seqlen, "kv_seqlen")
    return q, k


@movable
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Gappy keys, bottom-right causal: j <= i + k_len - q_len, j counted from the sequence's first key."""

    def _window(self) -> Window:
        return CAUSAL


@movable
class BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Gappy keys with i + s - window_left <= j <= i + s + window_right, s = k_len - q_len.

    At most window_left + 1 + window_right keys a query.
    """

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local_gappy(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        device: Device | None = None,
    ) -> Self:
        """As `BlockDiagonalGappyKeysMask.from_seqlens`, with the window."""
        q, k = _gappy(q_seqlen, kv_seqstarts, kv_seqlen, device)
        return cls(q_seqinfo=q, k_seqinfo=k, window_left=window_left, window_right=window_right)

    def make_paged(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedError (a NotImplementedError): no paged class has such a window."""
        raise UnsupportedError("make_paged: no paged class has a window (left, right); it would be lost")

    def _window(self) -> Window:
        return Window(self.window_left, self.window_right)


@movable
class PagedBlockDiagonalGappyKeysMask(PagedBias):
    """As BlockDiagonalGappyKeysMask, over pages: key j of sequence b is logical row x = seqstart[b] + j of its own row
    of pages, that is row x % page_size of page block_tables[b, x // page_size].

    k_seqinfo.seqlen holds *ends* (start + count). block_tables: int32 [N, pages_per_row]; entries of pages without
    keys may be anything.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo
    block_tables: torch.Tensor
    page_size: int

    _UNPAGED_TYPE: ClassVar[type[BlockDiagonalGappyKeysMask]] = BlockDiagonalGappyKeysMask

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: torch.Tensor,
        page_size: int,
        *,
        device: Device | None = None,
    ) -> Self:
        """q_seqlen, kv_seqlen: N lengths each; kv_seqstarts: N starts, each relative to its own row of pages.

        device: of the lengths; None is the tables' own. Raises ArgumentError (a ValueError and AssertionError) for
        other counts, tensors, or keys beyond pages_per_row * page_size.
        """
        starts, lens = host_lengths(kv_seqstarts, "kv_seqstarts"), host_lengths(kv_seqlen, "kv_seqlen")
        same_count(q_seqlen, lens, "kv_seqlen")
        same_count(q_seqlen, starts, "kv_seqstarts")
        check_tables(block_tables, page_size, len(lens))
        end, row = max((a + n for a, n in zip(starts, lens)), default=0), block_tables.shape[1] * page_size
        if end > row:
            raise ArgumentError(f"kv_seqlen: keys up to {end}, but a row of block_tables holds {row}")
        device = block_tables.device if device is None else device
        q, k = _gappy(q_seqlen, starts, lens, device, paged=True)
        return cls(q_seqinfo=q, k_seqinfo=k, block_tables=block_tables, page_size=page_size)

    def _keys(self, key_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self.k_seqinfo.seqstart[:-1]
        return starts, self.k_seqinfo.seqlen - starts

    def _spans(self) -> list[tuple[int, int]]:
        return [(start, end - start) for start, end in zip(self.k_seqinfo.seqstart_py, self.k_seqinfo.seqlen_py)]


@movable
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """As BlockDiagonalCausalWithOffsetGappyKeysMask, over pages."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetGappyKeysMask
