"""The split-K operator: MSLK's `triton_splitk` with its attributes and its reasons for refusing, over this library.

    from bridge import fmha
    out = fmha.memory_efficient_attention_forward(q, k, v, bias, op=fmha.triton_splitk.FwOp_S8)

Variants are subclasses; everything is read from the class. SPLIT_K is the number of pieces of each sequence's keys,
NUM_GROUPS the coefficient pairs of a row of int4 keys and values, BLOCK_N a divisor of page sizes. The other tuning
attributes are accepted and change neither result nor speed: the kernels choose for themselves.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NoReturn

import torch

import bridge
from pallas_kernels.errors import ShapeError, UnsupportedError

from .attn_bias import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from .inputs import Inputs, InputsFp8
from .library_op import LibraryFwOp
from .merge import merge_attentions_varargs, merge_attentions_varargs_backward

_CAUSAL = (
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
)
_LOCAL = (BlockDiagonalCausalLocalAttentionPaddedKeysMask, BlockDiagonalLocalAttentionPaddedKeysMask)
_PAGED = (PagedBlockDiagonalGappyKeysMask, PagedBlockDiagonalPaddedKeysMask)
_PACKED = (BlockDiagonalPaddedKeysMask, BlockDiagonalGappyKeysMask, *_PAGED)

MOST_QUERIES = 16
"""Queries of a sequence that a causal or local mask may have."""


class FwOp(LibraryFwOp):
    """Attention with the keys of each sequence cut into pieces that are computed apart and merged.

    Keys and values may be packed in int32: plain `Inputs` mean int4 (`bridge.formats.SeedInt4`, NUM_GROUPS groups a
    row), `InputsFp8` e4m3 with coefficients beside it (`bridge.formats.SeedFp8`).
    """

    OPERATOR = True
    SUPPORTED_DEVICES = frozenset({"cuda", "cpu"})
    CUDA_MINIMUM_COMPUTE_CAPABILITY = (8, 0)
    SUPPORTED_DTYPES = frozenset({torch.half, torch.bfloat16, torch.float8_e4m3fn})
    SUPPORTED_MAX_K = 512
    SUPPORTED_ATTN_BIAS_TYPES = (
        type(None),
        torch.Tensor,
        BlockDiagonalCausalWithOffsetPaddedKeysMask,
        BlockDiagonalCausalLocalAttentionPaddedKeysMask,
        BlockDiagonalLocalAttentionPaddedKeysMask,
        BlockDiagonalGappyKeysMask,
        BlockDiagonalCausalWithOffsetGappyKeysMask,
        BlockDiagonalPaddedKeysMask,
        PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
        PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
        PagedBlockDiagonalGappyKeysMask,
        PagedBlockDiagonalPaddedKeysMask,
    )
    SUPPORTS_DROPOUT = False
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_BMGHK = True
    SUPPORTS_OUTPUT_DTYPE = True
    SUPPORTS_PARTIAL = True
    NAME = "triton_splitKF"

    SPLIT_K: ClassVar[int | None] = None
    NUM_GROUPS = 1
    NUM_GROUPS_VALUES: ClassVar[list[int]] = [1, 2, 4, 8]
    BLOCK_M: ClassVar[int] = 16
    BLOCK_N = 64
    MAX_BLOCK_M: ClassVar[int] = 32
    SPLIT_K_EARLY_EXIT: ClassVar[bool] = False
    AUTOTUNE: ClassVar[bool] = False
    NUM_STAGES: ClassVar[int] = 1
    NUM_WARPS: ClassVar[int] = 2

    @classmethod
    def shape_not_supported_reasons(cls, Mq: int, Mkv: int, K: int, Kv: int) -> list[str]:
        reasons = super().shape_not_supported_reasons(Mq, Mkv, K, Kv)
        if K not in (16, 32, 64, 128, 256, 512):
            reasons.append(f"Embed dim {K} not supported (accepted: 16, 32, 64, 128, 256, 512)")
        return reasons

    @classmethod
    def not_supported_reasons(cls, inp: Inputs) -> list[str]:
        reasons = super().not_supported_reasons(inp)
        aligned = {"query": inp.query}
        if inp.key.dtype != torch.int32:
            aligned |= {"key": inp.key, "value": inp.value}
        for name, x in aligned.items():
            reasons += _alignment_reasons(name, x, 8)
        bias: Any = inp.attn_bias
        queries = inp.query.shape[1]
        narrow = isinstance(bias, (*_CAUSAL, *_LOCAL))
        if isinstance(bias, _PACKED):
            lengths = bias.q_seqinfo
            if queries != lengths.seqstart_py[-1]:
                reasons.append(f"Expected total {lengths.seqstart_py[-1]} queries not {queries}")
            queries = lengths.max_seqlen
            if narrow and queries != lengths.min_seqlen:
                kind = "causal" if isinstance(bias, _CAUSAL) else "local"
                reasons.append(
                    f"Variable query len is not supported for {kind} masks: got max {queries}, min {lengths.min_seqlen}"
                )
        if narrow and queries > MOST_QUERIES:
            reasons.append(
                f"Query length should not be larger than {MOST_QUERIES} for causal or local attention biases, "
                f"got {queries}"
            )
        if isinstance(bias, _PAGED):
            page, rows = bias.page_size, inp.key.shape[1]
            if rows % page:
                reasons.append(f"key.shape[1] should be divisible by the page size, got {rows} and {page}")
            if page % cls.BLOCK_N:
                reasons.append(f"The page size should be divisible by BLOCK_N, got {page} and {cls.BLOCK_N}")
        if isinstance(bias, torch.Tensor):
            if bias.ndim not in (4, 5):
                reasons.append(
                    "Additive attention bias has to have shape (B, G, H, Mq, Mkv) or (B, H, Mq, Mkv), "
                    f"got {tuple(bias.shape)}"
                )
            if (cls.SPLIT_K or 1) > 1:
                reasons.append(f"Additive attention bias is not supported with SPLIT_K > 1, got {cls.SPLIT_K}")
        return reasons

    @classmethod
    def get_split_k(cls, B: int, G: int, H: int, Mk: int, Mq: int, page_size: int, is_paged: bool = False) -> int:
        """MSLK's choice of SPLIT_K on CUDA, for B sequences, G head groups of H heads, Mk keys and Mq queries.

        For reading: with SPLIT_K = None this library chooses for itself. page_size and is_paged have no effect.
        """
        rows = max(B * H, 1)
        if Mq > 1 and B * G * H > 64:
            return 1
        shortest = 64 if Mk <= 512 and rows <= 64 else 128
        splits = max(Mk, 1024) // rows
        while splits * shortest > Mk:
            splits //= 2
        return max(min(splits, 64), 1)

    @classmethod
    def get_extra_args(
        cls,
        *,
        is_paged: bool,
        B: int,
        M: int,
        Kkv: int,
        Kq: int,
        Mq: int,
        split_k: int,
        attn_bias: Any,
        k_fp8_scale_shift: Any,
    ) -> dict[str, Any]:
        """The tuning attributes as MSLK names its kernel's parameters, or none with AUTOTUNE; for reading."""
        if cls.AUTOTUNE:
            return {}
        return {
            "BLOCK_M": cls.BLOCK_M,
            "BLOCK_N": cls.BLOCK_N,
            "num_warps": cls.NUM_WARPS,
            "num_stages": cls.NUM_STAGES,
        }

    @classmethod
    def get_kernel(cls) -> NoReturn:
        """Raises UnsupportedError: there is no Triton kernel here."""
        raise UnsupportedError(f"get_kernel: {cls.NAME} launches no Triton kernel; call apply")

    @classmethod
    def get_operator(
        cls,
        splitk: int,
        *,
        block_m: int | None = None,
        block_n: int | None = None,
        num_warps: int | None = None,
        num_stages: int | None = None,
        split_k_early_exit: bool | None = None,
    ) -> type[FwOp]:
        """The subclass FwOp_S{splitk} with SPLIT_K = splitk and the given attributes; the same class for the same
        arguments."""
        given: dict[str, Any] = {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "NUM_WARPS": num_warps,
            "NUM_STAGES": num_stages,
            "SPLIT_K_EARLY_EXIT": split_k_early_exit,
        }
        base: Any = cls
        return _variant(base, splitk, tuple((name, x) for name, x in given.items() if x is not None))


@functools.cache
def _variant(cls: Any, splitk: int, attributes: tuple[tuple[str, Any], ...]) -> type[FwOp]:
    own = {"NAME": f"triton_splitK{splitk}", "SPLIT_K": splitk}
    return type(f"FwOp_S{splitk}", (cls,), own | dict(attributes))


def _alignment_reasons(name: str, x: torch.Tensor, multiple: int) -> list[str]:
    reasons = []
    if x.shape[-1] % multiple:
        reasons.append(f"{name}.shape[-1] % {multiple} != 0, got {x.shape[-1]}")
    elif x.stride(-2) % multiple:
        reasons.append(f"{name}.stride(-2) % {multiple} != 0, got strides {tuple(x.stride())}")
    if x.stride(-1) > 1:
        reasons.append(f"{name}.stride(-1) > 1, got strides {tuple(x.stride())}; call .contiguous()")
    return reasons


def merge_attentions(
    attn_out: torch.Tensor, lse_out: torch.Tensor | None, attn_split: torch.Tensor, lse_split: torch.Tensor
) -> None:
    """Merge the n pieces of attn_split [B, G, H, n, M, K] and lse_split [B, G, H, n, M] into attn_out [B, M, G, H, K]
    and, unless it is None, lse_out [B, G, H, M], in place.

    Raises ShapeError (an AssertionError) for other shapes.
    """
    b, m, g, h, k = attn_out.shape
    n = attn_split.shape[3] if attn_split.ndim == 6 else None
    for name, x, shape in (
        ("attn_split", attn_split, (b, g, h, n, m, k)),
        ("lse_split", lse_split, (b, g, h, n, m)),
        ("lse_out", lse_out, (b, g, h, m)),
    ):
        if x is not None and x.shape != shape:
            raise ShapeError(f"{name}: expected shape {shape} for attn_out {(b, m, g, h, k)}, got {tuple(x.shape)}")
    with torch.no_grad():
        stacked, logs = attn_split.permute(3, 0, 4, 1, 2, 5), lse_split.permute(3, 0, 1, 2, 4)
        out, lse = bridge.merge_attentions(stacked, logs, lse_out is not None, attn_out.dtype)
        attn_out.copy_(out)
        if lse_out is not None and lse is not None:
            lse_out.copy_(lse)


FwOp_Map = {n: FwOp.get_operator(n) for n in (1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 96, 112, 128)}
FwOp_S1 = FwOp_Map[1]
FwOp_S2 = FwOp_Map[2]
FwOp_S4 = FwOp_Map[4]
FwOp_S8 = FwOp_Map[8]
FwOp_S16 = FwOp_Map[16]
FwOp_S32 = FwOp_Map[32]
FwOp_S64 = FwOp_Map[64]
FwOp_S128 = FwOp_Map[128]

__all__ = [
    "FwOp",
    "FwOp_Map",
    "FwOp_S1",
    "FwOp_S2",
    "FwOp_S4",
    "FwOp_S8",
    "FwOp_S16",
    "FwOp_S32",
    "FwOp_S64",
    "FwOp_S128",
    "InputsFp8",
    "merge_attentions",
    "merge_attentions_varargs",
    "merge_attentions_varargs_backward",
]
