"""`merge_attentions` on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _flat, _merge_launch, library

Chunks = torch.Tensor | Sequence[torch.Tensor]


def merge_attentions(
    attn_split: Chunks,
    lse_split: Chunks,
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`pallas_kernels.merge_attentions` on torch tensors; differentiable in every chunk and LSE.

    On a Hopper GPU, contiguous chunks that the kernel covers are merged by one launch on the current stream, without
    JAX's CUDA client; others go through JAX, with one `FallbackWarning` for each reason. A kernel is compiled for the
    numbers of chunks, queries and heads, and for batches up to a power of four.
    """
    _flat.check_output_dtype(output_dtype)
    chunks = [x for part in (attn_split, lse_split) for x in (part if isinstance(part, (list, tuple)) else (part,))]
    if library.needed(chunks):
        return library.merge(attn_split, lse_split, write_lse, output_dtype)
    return _merge_launch.merge(attn_split, lse_split, write_lse, output_dtype)
