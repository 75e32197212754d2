"""Block-diagonal masks over keys packed without gaps (MSLK attn_bias)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from pallas_kernels.errors import ArgumentError, ShapeError
from pallas_kernels.masks import Window

from .base import CAUSAL, CAUSAL_TOP_LEFT, DenseBlocks, same_count
from .dense import check_window_size
from .seqlen import Device, _SeqLenInfo, default_device, host_lengths, movable


@movable
class BlockDiagonalMask(DenseBlocks):
    """N sequences side by side; the queries of each see all of its keys, and no others.

    q_seqinfo, k_seqinfo: lengths of queries and keys, one object where they are equal; _batch_sizes: how `split`
    groups sequences.
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device | None = None
    ) -> Self:
        """q_seqlen, kv_seqlen: N lengths each (lists or numpy arrays); kv_seqlen None means q_seqlen.

        Raises ArgumentError (an AssertionError) for different counts or for tensors.
        """
        device = default_device(device)
        q = k = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is not None:
            same_count(q_seqlen, kv_seqlen, "kv_seqlen")
            if host_lengths(q_seqlen, "q_seqlen") != host_lengths(kv_seqlen, "kv_seqlen"):
                k = _SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        return cls(q_seqinfo=q, k_seqinfo=k)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        """The mask of tensors [B_t, M_t, ...], each batch entry a sequence, and them packed: [1, sum B_t * M_t, ...].

        `split` undoes it.
        """
        mask = cls.from_seqlens(_token_counts(tensors))
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, _pack(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Self, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `from_tensor_list`, with keys and values of their own lengths: (mask, q, k, v), v None if not given.

        Raises ShapeError (an AssertionError) where lists or batch sizes differ, or values have other rows than keys.
        """
        for name, tensors in (("tensors_k", tensors_k), ("tensors_v", tensors_v)):
            if tensors is not None and len(tensors) != len(tensors_q):
                raise ShapeError(f"{name}: {len(tensors)} tensors, but {len(tensors_q)} queries")
        for n, (q, k) in enumerate(zip(tensors_q, tensors_k)):
            if q.shape[0] != k.shape[0]:
                raise ShapeError(f"tensors_k[{n}]: batch {k.shape[0]}, but the query has {q.shape[0]}")
            if tensors_v is not None and tensors_v[n].shape[:2] != k.shape[:2]:
                raise ShapeError(
                    f"tensors_v[{n}]: expected batch and rows {tuple(k.shape[:2])}, got {tuple(tensors_v[n].shape[:2])}"
                )
        mask = cls.from_seqlens(_token_counts(tensors_q), _token_counts(tensors_k))
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        return mask, _pack(tensors_q), _pack(tensors_k), None if tensors_v is None else _pack(tensors_v)

    def split_queries(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """[1, total queries, ...] cut into what the mask was made of."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """[1, total keys, ...] cut into what the mask was made of."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """As `split_queries`, where queries and keys share their lengths; else ArgumentError (an AssertionError)."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ArgumentError("split: queries and keys have lengths of their own; use split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Top-left causal in each block."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Bottom-right causal in each block."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Top-left causal in each block, at most `window_size` keys a query."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Bottom-right causal in each block, at most `window_size` keys a query."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )

    def _keys(self, key_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = self.k_seqinfo.seqstart
        return starts[:-1], starts.diff()

    def _check_keys(self, key_rows: int) -> None:
        if self.k_seqinfo.seqstart_py[-1] > key_rows:
            raise ShapeError(f"key: {key_rows} rows, but kv_seqlen add up to {self.k_seqinfo.seqstart_py[-1]}")

    def _block_lengths(self) -> list[tuple[int, int]]:
        """(q_len, k_len) of each block, from the host lists."""
        intervals = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals())
        return [(q_end - q_start, k_end - k_start) for (q_start, q_end), (k_start, k_end) in intervals]


def _token_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.flatten(0, 1)[None] for x in tensors], dim=1)


@movable
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Top-left causal in each block: j <= i."""

    def _window(self) -> Window:
        return CAUSAL_TOP_LEFT


@movable
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Bottom-right causal in each block: j <= i + k_len - q_len.

    Raises ShapeError (a ValueError) for a block with fewer keys than queries.
    """

    def __post_init__(self) -> None:
        for b, (q_len, k_len) in enumerate(self._block_lengths()):
            if k_len < q_len:
                raise ShapeError(f"kv_seqlen: block {b} has fewer keys ({k_len}) than queries ({q_len})")

    def _window(self) -> Window:
        return CAUSAL


@movable
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Top-left causal with at most `_window_size` keys a query: i - W < j <= i.

    Raises ArgumentError (a ValueError) for W <= 0, and ShapeError (a RuntimeError) for a block whose last queries
    would see no key.
    """

    _window_size: int = 0

    def __post_init__(self) -> None:
        check_window_size(self._window_size)
        for b, (q_len, k_len) in enumerate(self._block_lengths()):
            if q_len - self._window_size >= k_len:
                raise ShapeError(
                    f"window_size: the last of {q_len} queries of block {b} sees none of {k_len} keys within "
                    f"{self._window_size}"
                )

    def _window(self) -> Window:
        return Window(self._window_size - 1, 0, top_left=True)


@movable
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Bottom-right causal with at most `_window_size` keys a query: i + s - W < j <= i + s, s = k_len - q_len.

    Raises ArgumentError (a ValueError) for W <= 0, ShapeError (a ValueError) for a block with fewer keys than queries.
    """

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window_size(self._window_size)

    def _window(self) -> Window:
        return Window(self._window_size - 1, 0)
