"""Causal and local masks of a plain batch: every batch entry is one sequence (MSLK attn_bias)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from pallas_kernels.errors import ArgumentError
from pallas_kernels.masks import Window

from .base import CAUSAL, CAUSAL_TOP_LEFT, AttentionBias, Lowered, block_mask, dense_form
from .seqlen import Device, movable, moved, require_exact


def check_window_size(window_size: int) -> None:
    if window_size <= 0:
        raise ArgumentError(f"window_size: expected `window_size > 0`, got {window_size}")


def check_window(window_left: int, window_right: int) -> None:
    for name, value in (("window_left", window_left), ("window_right", window_right)):
        if value < 0:
            raise ArgumentError(f"{name}: expected `{name} >= 0`, got {value}")


class _DenseBias(AttentionBias):
    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> torch.Tensor:
        """The additive mask (0 or -inf) of `shape` = [..., queries, keys]."""
        return block_mask(shape, self._window(), dtype, device)

    def _lower(self, batch: int, queries: int, key_rows: int, device: Device | None) -> Lowered:
        return dense_form(batch, queries, key_rows, self._window(), device=device)


class LowerTriangularMask(_DenseBias):
    """Top-left causal: query i sees key j iff j <= i. `device` is accepted and has no effect."""

    def __init__(self, device: Device | None = None) -> None:
        pass

    def to(self, device: Device) -> LowerTriangularMask:
        require_exact(self, LowerTriangularMask)
        return self

    def _window(self) -> Window:
        return CAUSAL_TOP_LEFT

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """This mask plus a tensor bias."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Top-left causal plus `bias`, a tensor that broadcasts to [batch, heads, queries, keys]."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def to(self, device: Device) -> LowerTriangularMaskWithTensorBias:
        require_exact(self, LowerTriangularMaskWithTensorBias)
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> torch.Tensor:
        """The causal mask of `shape` plus the bias, in `dtype`."""
        return (super().materialize(shape, dtype, device) + self._bias.to(device)).to(dtype)

    def _lower(self, batch: int, queries: int, key_rows: int, device: Device | None) -> Lowered:
        return dense_form(batch, queries, key_rows, self._window(), self._bias)


class LowerTriangularFromBottomRightMask(_DenseBias):
    """Bottom-right causal: query i sees key j iff j <= i + keys - queries, so the last query sees the last key."""

    def to(self, device: Device) -> LowerTriangularFromBottomRightMask:
        require_exact(self, LowerTriangularFromBottomRightMask)
        return self

    def _window(self) -> Window:
        return CAUSAL

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The same, but each query sees its last `window_size` keys only."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@movable
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Bottom-right causal with at most `_window_size` keys a query; ArgumentError (a ValueError) if it is <= 0."""

    _window_size: int

    def __post_init__(self) -> None:
        check_window_size(self._window_size)

    def to(self, device: Device) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return moved(self, device)

    def _window(self) -> Window:
        return Window(self._window_size - 1, 0)


@movable
class LocalAttentionFromBottomRightMask(_DenseBias):
    """Query i sees key j iff i + s - window_left <= j <= i + s + window_right, s = keys - queries.

    At most window_left + 1 + window_right keys. Raises ArgumentError (a ValueError) for a negative window.
    """

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_window(self.window_left, self.window_right)

    def to(self, device: Device) -> Self:
        return self

    def _window(self) -> Window:
        return Window(self.window_left, self.window_right)
