"""Attention biases on torch tensors, a drop-in for MSLK's (and xformers') `fmha.attn_bias`.

Every bias reduces to its `normal_form`: where the keys of each sequence lie, and a window. `materialize`, the kernels
and the JAX side read the same form and the same formula, `pallas_kernels.masks.visible`.

| storage        | classes                                                                              |
| -------------- | ------------------------------------------------------------------------------------ |
| a plain batch  | LowerTriangular..., LocalAttentionFromBottomRightMask                                 |
| packed         | BlockDiagonalMask, BlockDiagonalCausal...Mask                                         |
| padded slots   | BlockDiagonal...PaddedKeysMask, over pages PagedBlockDiagonal...PaddedKeysMask        |
| gappy          | BlockDiagonal...GappyKeysMask, over pages PagedBlockDiagonal...GappyKeysMask          |
"""

from .base import AttentionBias, Lowered, host_check, normal_form
from .block_diagonal import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
)
from .dense import (
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from .gappy import (
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)
from .padded import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalCausalLocalPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from .seqlen import _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo

VARLEN_BIASES = (
    BlockDiagonalMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
)

__all__ = [
    "VARLEN_BIASES",
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "Lowered",
    "PagedBlockDiagonalCausalLocalPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "_GappySeqInfo",
    "_PaddedSeqLenInfo",
    "_SeqLenInfo",
    "host_check",
    "normal_form",
]
