"""What the operators of this package take and return: `Inputs`, `InputsFp8`, `Context`, `Gradients` (MSLK common)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from pallas_kernels.errors import ArgumentError, DeviceError, DTypeError, ShapeError

from .attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from .attn_bias.base import PackedBias

Bias = torch.Tensor | AttentionBias | None


def output_dim(query: torch.Tensor, value: torch.Tensor) -> Any:
    """The last axis of the output, an int or a SymInt: value's, or query's where value is packed in int32 words."""
    return query.shape[-1] if value.dtype == torch.int32 else value.shape[-1]


@dataclass
class Inputs:
    """One call of an operator.

    query: [B, Mq, H, K] (BMHK), [B, Mq, G, H, K] (BMGHK) or [B, Mq, K] (BMK). key, value: [B, Mk, H, K] and
    [B, Mk, H, Kv] (or the like for the other layouts); int32 where they are packed in few bits. attn_bias: None, a
    tensor added to the scaled scores, or one of `attn_bias`. scale: default K ** -0.5. output_dtype: default the
    query's; float32 where `is_partial` and the query is not float64. quantize_qk_to_fp8, quantize_pv_to_fp8: multiply
    in e4m3; use_fp32_scales: a coefficient of fp8 keys and values is one float32 scale without shift. num_splits: read
    by operators other than split-K; 0 is automatic.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: Bias = None
    p: float = 0.0
    scale: float | None = None
    output_dtype: torch.dtype | None = None
    is_partial: bool = False
    quantize_pv_to_fp8: bool = False
    quantize_qk_to_fp8: bool = False
    use_fp32_scales: bool = False
    num_splits: int = 0

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def scale_float(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of query, key and value."""
        return sum(x.untyped_storage().nbytes() for x in (self.query, self.key, self.value))

    @property
    def low_bit(self) -> bool:
        """Whether key and value are packed in int32 words."""
        return self.key.dtype == self.value.dtype == torch.int32

    def get_output_dtype(self) -> torch.dtype:
        if self.output_dtype is not None:
            return self.output_dtype
        return torch.float32 if self.is_partial and self.query.dtype != torch.float64 else self.query.dtype

    def get_qkv_in_bmghk(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value as views with both head axes."""
        missing = (None,) * (5 - self.query.ndim)
        q, k, v = (x[(slice(None), slice(None), *missing)] for x in (self.query, self.key, self.value))
        return q, k, v

    def normalize_bmhk(self) -> tuple[int, ...]:
        """Give BMK inputs their head axis, in place; returns the shape of the output as the caller expects it."""
        self.check_ranks()
        shape = (*self.query.shape[:-1], output_dim(self.query, self.value))
        if self.query.ndim == 3:
            self.query, self.key, self.value = (x.unsqueeze(2) for x in (self.query, self.key, self.value))
            if isinstance(self.attn_bias, torch.Tensor):
                self.attn_bias = self.attn_bias.unsqueeze(1)
            elif isinstance(self.attn_bias, LowerTriangularMaskWithTensorBias):
                self.attn_bias = LowerTriangularMaskWithTensorBias(self.attn_bias._bias.unsqueeze(1))
        return shape

    def check_ranks(self) -> None:
        """Raises ShapeError (a ValueError) unless query, key and value all have 3, 4 or 5 axes, DTypeError unless they
        are tensors."""
        for name in ("query", "key", "value"):
            x: Any = getattr(self, name)
            if not isinstance(x, torch.Tensor):
                hint = ", which bridge.memory_efficient_attention takes" if hasattr(x, "opened") else ""
                raise DTypeError(f"{name}: expected a tensor, got {type(x).__name__}{hint}")
        if self.query.ndim not in (3, 4, 5) or not self.query.ndim == self.key.ndim == self.value.ndim:
            raise ShapeError(f"query, key, value: expected all BMGHK, BMHK or BMK, got {self._shapes()}")

    def validate_inputs(self) -> None:
        """Raises a ValueError where MSLK's operators take no such inputs: nothing is broadcast, GQA is expanded."""
        self.check_ranks()
        self._check_devices()
        self._check_dtypes()
        self._check_bias()
        if not 0.0 <= self.p <= 1.0:
            raise ArgumentError(f"p: expected a probability in [0, 1], got {self.p}")
        batch, keys = self.key.shape[:2]
        *heads, dim = self.query.shape[2:]
        value_dim = self.value.shape[-1]
        key_dim = value_dim if self.value.dtype == torch.int32 else dim
        if (
            self.query.shape[0] != batch
            or self.key.shape != (batch, keys, *heads, key_dim)
            or self.value.shape != (batch, keys, *heads, value_dim)
        ):
            raise ShapeError(
                f"query, key, value: incompatible shapes, got {self._shapes()}. Hint: operators do not broadcast; "
                "`expand` key and value to the query's batch and heads"
            )

    def _check_devices(self) -> None:
        devices = {x.device for x in (self.query, self.key, self.value)}
        if len(devices) > 1:
            raise DeviceError(f"query, key, value: expected one device, got {', '.join(sorted(map(str, devices)))}")
        if isinstance(self.attn_bias, PackedBias):
            device = self.attn_bias.q_seqinfo.seqstart.device
            if device != self.device:
                raise DeviceError(f"attn_bias: expected to be on query's device {self.device}, got {device}")

    def _check_dtypes(self) -> None:
        if not self.low_bit and not self.query.dtype == self.key.dtype == self.value.dtype:
            raise DTypeError(
                "query, key, value: expected one dtype, or int32 for both key and value, got "
                f"{self.query.dtype}, {self.key.dtype}, {self.value.dtype}"
            )

    def _check_bias(self) -> None:
        bias = self.attn_bias
        if self.query.ndim == 3 and bias is not None and type(bias) not in (torch.Tensor, LowerTriangularMask):
            raise ShapeError(f"query: a bias of type {type(bias).__name__} needs the layout BMHK, got BMK")
        added = bias._bias if isinstance(bias, LowerTriangularMaskWithTensorBias) else bias
        if self.query.ndim == 4 and isinstance(added, torch.Tensor):
            b, queries, heads, _ = self.query.shape
            if added.shape != (b, heads, queries, self.key.shape[1]):
                raise ShapeError(
                    f"attn_bias: expected shape {(b, heads, queries, self.key.shape[1])}, got {tuple(added.shape)}"
                )
        if isinstance(bias, BlockDiagonalMask) and {x.shape[0] for x in (self.query, self.key, self.value)} != {1}:
            raise ShapeError(f"query, key, value: expected batch 1 with a block-diagonal mask, got {self._shapes()}")

    def _shapes(self) -> str:
        return ", ".join(str(tuple(x.shape)) for x in (self.query, self.key, self.value))


@dataclass
class InputsFp8(Inputs):
    """Inputs with keys and values in e4m3, four to an int32 word.

    k_fp8_scale_shift, v_fp8_scale_shift: one int32 word a row of a head (half scale low, half shift high),
    [1, rows, H] or [1, rows, G, H] (without a mask [B, Mk, ...]); float32 scales with `use_fp32_scales`.
    q_fp8_scale_shift: float32 scales, query.shape[:-1], for an e4m3 query with `quantize_qk_to_fp8`.
    """

    k_fp8_scale_shift: torch.Tensor | None = None
    v_fp8_scale_shift: torch.Tensor | None = None
    q_fp8_scale_shift: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of query, key, value and the coefficients of key and value."""
        coefficients = (self.k_fp8_scale_shift, self.v_fp8_scale_shift)
        return super().nbytes + sum(x.untyped_storage().nbytes() for x in coefficients if x is not None)


@dataclass
class Context:
    """What a forward operator keeps for the backward.

    lse: [B, *heads, Mq], natural logarithm; [1, *heads, total queries] with block-diagonal masks. out: the output.
    op_bw: the only backward operator that goes with it, or None.
    """

    lse: torch.Tensor
    out: torch.Tensor
    op_bw: Any = None
    rng_state: Any = None
    qkv_share_storage: bool = False

    def get_padded_lse(self, pad_to: int, force_pad_inf: bool = False) -> torch.Tensor:
        """lse with its last axis padded by +inf to a multiple of `pad_to`.

        With `force_pad_inf`, what lies beyond the output's rows becomes +inf too.
        """
        rows = self.lse.shape[-1]
        kept = self.lse[..., : self.out.shape[1]] if force_pad_inf else self.lse
        size = rows if rows % pad_to == 0 else -(-kept.shape[-1] // pad_to) * pad_to
        return torch.nn.functional.pad(kept, [0, size - kept.shape[-1]], value=math.inf)


@dataclass
class Gradients:
    """Gradients of query, key, value and of a tensor bias that requires grad, else None."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    db: torch.Tensor | None = None
