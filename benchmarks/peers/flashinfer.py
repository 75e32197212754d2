"""FlashInfer's tensor-core decode over pages in order (flashinfer-python); compiles with the machine's nvcc."""

from __future__ import annotations

import os
from typing import Any

from ..inputs import Dense
from ..rows import Row
from . import import_reason

FRAMEWORK = "torch"
PAGE_SIZE = 64
"""Of 16 and 64 the faster on nearly every row."""
WORKSPACE_BYTES = 256 * 1024**2


def available() -> str | None:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    return import_reason("flashinfer")


def refuses(row: Row) -> str | None:
    if row.tokens != 1:
        return "the decode wrapper takes one query token"
    return None if row.keys % PAGE_SIZE == 0 else f"{row.keys} keys are not whole pages of {PAGE_SIZE}"


def prepare(row: Row, inputs: Dense) -> tuple[Any, ...]:
    import flashinfer
    import torch

    q, k, v, _ = inputs
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    pages = row.keys // PAGE_SIZE
    wrapper.plan(
        torch.arange(row.batch + 1, dtype=torch.int32) * pages,
        torch.arange(row.batch * pages, dtype=torch.int32),
        torch.full((row.batch,), PAGE_SIZE, dtype=torch.int32),
        row.heads,
        row.kv_heads,
        row.head_dim,
        PAGE_SIZE,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    paged = tuple(x.reshape(-1, PAGE_SIZE, row.kv_heads, row.head_dim) for x in (k, v))
    return wrapper, q[:, 0], paged


def run(wrapper: Any, q: Any, paged: Any) -> Any:
    return wrapper.run(q, paged)
