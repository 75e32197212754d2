"""Base classes of attention operators (MSLK common): classes, never instances, whose attributes say what they serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from .inputs import Context, Gradients, Inputs, output_dim


class AttentionOpBase:
    """What forward and backward operators share. Everything is read from the class, so subclassing makes variants.

    `CUDA_..._COMPUTE_CAPABILITY` is kept for reading: any device is served, by the kernels or by XLA.
    """

    OPERATOR: ClassVar[Any] = True
    SUPPORTED_DEVICES: ClassVar[Collection[str]] = frozenset({"cuda", "cpu"})
    CUDA_MINIMUM_COMPUTE_CAPABILITY: ClassVar[tuple[int, int]] = (5, 0)
    CUDA_MAXIMUM_COMPUTE_CAPABILITY: ClassVar[tuple[int, int] | None] = None
    SUPPORTED_DTYPES: ClassVar[Collection[torch.dtype]] = frozenset()
    SUPPORTED_MAX_K: ClassVar[float] = float("inf")
    SUPPORTED_MIN_K: ClassVar[int] = 0
    SUPPORTED_ATTN_BIAS_TYPES: ClassVar[Collection[Any]] = (type(None),)
    SUPPORTS_DROPOUT: ClassVar[bool] = False
    SUPPORTS_CUSTOM_SCALE: ClassVar[bool] = False
    SUPPORTS_DIFFERENT_VALUE_EMBED: ClassVar[bool] = False
    SUPPORTS_OUTPUT_DTYPE: ClassVar[bool] = False
    SUPPORTS_PARTIAL: ClassVar[bool] = False
    SUPPORTS_BMGHK: ClassVar[bool] = False
    IS_DETERMINISTIC: ClassVar[bool] = True
    NAME: ClassVar[str] = ""
    OPERATOR_CATEGORY: ClassVar[str] = "memory_efficient_attention"
    VARLEN_LSE_PACKED: ClassVar[bool] = True
    """The LSE of block-diagonal masks is [1, *heads, total queries], not [sequences, *heads, longest]."""
    _TEST_BATCH_SIZES: ClassVar[list[int]] = [1, 300]
    _TEST_K: ClassVar[list[int]] = [32, 128]

    @classmethod
    def is_available(cls) -> bool:
        return cls.OPERATOR is not None

    @classmethod
    def supports(cls, inp: Inputs) -> bool:
        """Whether `not_supported_reasons` is empty."""
        return not cls.not_supported_reasons(inp)

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        """Why these sizes (queries, keys, head dims of key and value) are not served."""
        reasons = []
        if K != Kv and not cls.SUPPORTS_DIFFERENT_VALUE_EMBED:
            reasons.append(f"query.shape[-1] != value.shape[-1]: {K} and {Kv}")
        if max(K, Kv) > cls.SUPPORTED_MAX_K:
            reasons.append(f"max(query.shape[-1], value.shape[-1]) > {cls.SUPPORTED_MAX_K}")
        if min(K, Kv) < cls.SUPPORTED_MIN_K:
            reasons.append(f"min(query.shape[-1], value.shape[-1]) < {cls.SUPPORTED_MIN_K}")
        return reasons

    @classmethod
    def bias_not_supported_reasons(cls, attn_bias: Any) -> list[str]:
        """By exact type: a subclass may mean another mask."""
        if type(attn_bias) in cls.SUPPORTED_ATTN_BIAS_TYPES:
            return []
        return [f"attn_bias type is {type(attn_bias).__name__}"]

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        """Why this operator does not take `inp`, one text each; empty where it does."""
        dim = inp.query.shape[-1]
        last = output_dim(inp.query, inp.value)
        reasons = cls.shape_not_supported_reasons(inp.query.shape[1], inp.key.shape[1], dim, last)
        if inp.device.type not in cls.SUPPORTED_DEVICES:
            reasons.append(f"device={inp.device.type} (supported: {', '.join(sorted(cls.SUPPORTED_DEVICES))})")
        if inp.query.dtype not in cls.SUPPORTED_DTYPES:
            reasons.append(f"dtype={inp.query.dtype} (supported: {', '.join(sorted(map(str, cls.SUPPORTED_DTYPES)))})")
        reasons += cls.bias_not_supported_reasons(inp.attn_bias)
        if inp.output_dtype not in (None, inp.query.dtype) and not cls.SUPPORTS_OUTPUT_DTYPE:
            reasons.append(f"output_dtype={inp.output_dtype} differs from query's")
        if inp.is_partial and not cls.SUPPORTS_PARTIAL:
            reasons.append("partial attention")
        if inp.p != 0.0 and not cls.SUPPORTS_DROPOUT:
            reasons.append("dropout > 0.0")
        if inp.scale is not None and not cls.SUPPORTS_CUSTOM_SCALE:
            reasons.append("a scale of its own")
        if inp.query.ndim == 5 and not cls.SUPPORTS_BMGHK:
            reasons.append("the layout BMGHK")
        if not cls.is_available():
            reasons.append("operator is not available: OPERATOR is None")
        if not cls.IS_DETERMINISTIC and torch.are_deterministic_algorithms_enabled():
            reasons.append("operator is not deterministic, and torch.use_deterministic_algorithms is set")
        return reasons


class AttentionFwOpBase(AttentionOpBase):
    """A forward operator."""

    ERROR_ATOL: ClassVar[Mapping[torch.dtype, float]] = {torch.float: 3e-4, torch.half: 4e-3, torch.bfloat16: 2e-2}
    ERROR_RTOL: ClassVar[Mapping[torch.dtype, float]] = {torch.float: 2e-5, torch.half: 4e-4, torch.bfloat16: 5e-3}

    @classmethod
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[torch.Tensor, Context | None]:
        """(out, Context with the LSE), or (out, None) without `needs_gradient`; inputs have rank 4 or 5."""
        raise NotImplementedError(f"{cls.__name__}.apply")


class AttentionBwOpBase(AttentionOpBase):
    """A backward operator."""

    ERROR_ATOL: ClassVar[Mapping[torch.dtype, float]] = {torch.float: 9e-4, torch.half: 0.2, torch.bfloat16: 0.9}
    ERROR_RTOL: ClassVar[Mapping[torch.dtype, float]] = {torch.float: 1e-4, torch.half: 2e-2, torch.bfloat16: 0.1}
    SUPPORTS_ATTN_BIAS_GRAD: ClassVar[bool] = False
    SUPPORTS_PARTIAL = True

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        reasons = super().not_supported_reasons(inp)
        bias = inp.attn_bias
        if isinstance(bias, torch.Tensor) and bias.requires_grad and not cls.SUPPORTS_ATTN_BIAS_GRAD:
            reasons.append("the gradient of a tensor bias")
        return reasons

    @classmethod
    def apply(cls, ctx: Context, inp: Inputs, grad: torch.Tensor) -> Gradients:
        """Gradients for `grad`, the cotangent of the output; inputs have rank 4 or 5."""
        raise NotImplementedError(f"{cls.__name__}.apply")


AttentionOp = tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None]
