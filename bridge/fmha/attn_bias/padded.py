"""Block-diagonal masks over padded keys, as they lie or in pages (MSLK attn_bias)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from pallas_kernels.errors import ShapeError, UnsupportedError
from pallas_kernels.masks import Window, check_storage

from .base import CAUSAL, DenseBlocks, PagedBias, check_tables, same_count
from .dense import check_window
from .seqlen import Device, _PaddedSeqLenInfo, _SeqLenInfo, default_device, movable


@movable
class BlockDiagonalPaddedKeysMask(DenseBlocks):
    """N equal key slots, the first k_seqinfo.seqlen[b] rows of slot b in use; every query of b sees them all.

    The slots' pitch is key rows / N, whatever `padding` says.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device | None = None,
    ) -> Self:
        """q_seqlen, kv_seqlen: N lengths each (lists or numpy arrays); kv_padding: rows of a slot.

        causal_diagonal has no effect. Raises ArgumentError (an AssertionError) for different counts, a key length
        beyond kv_padding, or tensors.
        """
        q, k = _padded(q_seqlen, kv_padding, kv_seqlen, device)
        return cls(q_seqinfo=q, k_seqinfo=k)

    def make_paged[P: PagedBlockDiagonalPaddedKeysMask](
        self, block_tables: torch.Tensor, page_size: int, paged_type: type[P]
    ) -> P:
        """The same lengths (the same tensors) over pages; block_tables: int32 [N, pages_per_row]."""
        check_storage(paged_type, PagedBlockDiagonalPaddedKeysMask)
        return paged_type(**self._paged_fields(block_tables, page_size))

    def _paged_fields(self, block_tables: torch.Tensor, page_size: int) -> dict[str, Any]:
        check_tables(block_tables, page_size, self._count)
        k = dataclasses.replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return {"q_seqinfo": self.q_seqinfo, "k_seqinfo": k, "block_tables": block_tables, "page_size": page_size}

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """The same storage with a window of `window_left` keys before and `window_right` after a query's position."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)

    def _pitch(self, key_rows: int) -> int:
        if key_rows % self._count:
            raise ShapeError(f"key: {key_rows} rows are not a multiple of the bias' {self._count} sequences")
        return key_rows // self._count

    def _keys(self, key_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        lens, pitch = self.k_seqinfo.seqlen, self._pitch(key_rows)
        if pitch == 0:
            return torch.zeros_like(lens), lens
        return torch.arange(0, self._count * pitch, pitch, dtype=torch.int32, device=lens.device), lens

    def _check_keys(self, key_rows: int) -> None:
        longest, pitch = max(self.k_seqinfo.seqlen_py), self._pitch(key_rows)
        if longest > pitch:
            raise ShapeError(
                f"kv_seqlen: length {longest} is beyond the {pitch} rows that each of {self._count} sequences has in "
                f"{key_rows} key rows"
            )


def _padded(
    q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], device: Device | None
) -> tuple[_SeqLenInfo, _PaddedSeqLenInfo]:
    device = default_device(device)
    q = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
    k = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
    same_count(q_seqlen, kv_seqlen, "kv_seqlen")
    return q, k


@movable
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys, bottom-right causal: j <= i + k_len - q_len. `causal_diagonal` has no effect."""

    causal_diagonal: Any = None

    def _window(self) -> Window:
        return CAUSAL


@movable
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys with i + s - window_left <= j <= i + s + window_right, s = k_len - q_len.

    At most window_left + 1 + window_right keys a query. A negative window raises ArgumentError (a ValueError) where
    the mask is used, not here.
    """

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
        *,
        device: Device | None = None,
    ) -> Self:
        """As `BlockDiagonalPaddedKeysMask.from_seqlens`, with the window."""
        q, k = _padded(q_seqlen, kv_padding, kv_seqlen, device)
        return cls(q_seqinfo=q, k_seqinfo=k, window_left=window_left, window_right=window_right)

    def _paged_fields(self, block_tables: torch.Tensor, page_size: int) -> dict[str, Any]:
        raise UnsupportedError("make_paged: no paged class has a window (left, right); it would be lost")

    def _window(self) -> Window:
        check_window(self.window_left, self.window_right)
        return Window(self.window_left, self.window_right)


@movable
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Padded keys with i + s - _window_size < j <= i + s, s = k_len - q_len; no key at all if _window_size <= 0."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
        *,
        device: Device | None = None,
    ) -> Self:
        """As `BlockDiagonalPaddedKeysMask.from_seqlens`, with the window."""
        q, k = _padded(q_seqlen, kv_padding, kv_seqlen, device)
        return cls(q_seqinfo=q, k_seqinfo=k, _window_size=window_size)

    def _paged_fields(self, block_tables: torch.Tensor, page_size: int) -> dict[str, Any]:
        return super()._paged_fields(block_tables, page_size) | {"_window_size": self._window_size}

    def _window(self) -> Window:
        return Window(self._window_size - 1, 0)


@movable
class PagedBlockDiagonalPaddedKeysMask(PagedBias):
    """As BlockDiagonalPaddedKeysMask, over pages: key j of sequence b is row j % page_size of page
    block_tables[b, j // page_size].

    block_tables: int32 [N, pages_per_row]; entries past a sequence's last page may be anything. k_seqinfo.padding is
    pages_per_row * page_size; k_seqinfo.seqstart means nothing.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _PaddedSeqLenInfo
    block_tables: torch.Tensor
    page_size: int

    _UNPAGED_TYPE: ClassVar[type[BlockDiagonalPaddedKeysMask]] = BlockDiagonalPaddedKeysMask

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: torch.Tensor,
        page_size: int,
        *,
        device: Device | None = None,
    ) -> Self:
        """q_seqlen, kv_seqlen: N lengths each; block_tables: int32 [N, pages_per_row]; page_size: rows of a page.

        Raises ArgumentError (an AssertionError) for different counts or a key length beyond pages_per_row * page_size.
        """
        check_tables(block_tables, page_size, len(q_seqlen))
        q, k = _padded(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device)
        return cls(q_seqinfo=q, k_seqinfo=k, block_tables=block_tables, page_size=page_size)

    def _keys(self, key_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        lens = self.k_seqinfo.seqlen
        return torch.zeros_like(lens), lens

    def _spans(self) -> list[tuple[int, int]]:
        return [(0, n) for n in self.k_seqinfo.seqlen_py]


@movable
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """As BlockDiagonalCausalWithOffsetPaddedKeysMask, over pages."""

    _UNPAGED_TYPE = BlockDiagonalCausalWithOffsetPaddedKeysMask


@movable
class PagedBlockDiagonalCausalLocalPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """As BlockDiagonalCausalLocalAttentionPaddedKeysMask, over pages."""

    _window_size: int

    _UNPAGED_TYPE = BlockDiagonalCausalLocalAttentionPaddedKeysMask

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: torch.Tensor,
        page_size: int,
        window_size: int,
        *,
        device: Device | None = None,
    ) -> Self:
        """As `PagedBlockDiagonalPaddedKeysMask.from_seqlens`, with the window."""
        base = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen, kv_seqlen, block_tables, page_size, device=device
        )
        return cls(base.q_seqinfo, base.k_seqinfo, block_tables, page_size, window_size)
