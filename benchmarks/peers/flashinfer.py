"""FlashInfer over pages (flashinfer-python): its tensor-core decode, or prefill for several query tokens.

It compiles with the machine's nvcc. A cache without pages is given as pages in order.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from ..inputs import Attention
from ..rows import Row
from . import OWN_SPLITS, import_reason

FRAMEWORK = "torch"
PAGE_SIZE = 64
"""Of a cache without pages. Of 16 and 64 the faster on nearly every row."""
WORKSPACE_BYTES = 256 * 1024**2


def available() -> str | None:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    return import_reason("flashinfer")


def refuses(row: Row) -> str | None:
    if row.split_size or row.num_splits:
        return OWN_SPLITS
    return None if row.page_size or row.keys % PAGE_SIZE == 0 else f"{row.keys} keys are not whole pages of {PAGE_SIZE}"


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    import flashinfer
    import torch

    size, counts = row.page_size or PAGE_SIZE, torch.tensor(row.key_counts())
    used, pages_per_row = -(-counts // size), -(-row.keys // size)
    table = inputs.table
    if table is None:
        table = torch.arange(row.batch * pages_per_row, dtype=torch.int32).reshape(row.batch, pages_per_row)
    needed = torch.arange(pages_per_row)[None, :] < used[:, None]
    starts = torch.zeros(row.batch + 1, dtype=torch.int32)
    starts[1:] = used.cumsum(0)
    pages = (starts, table.cpu()[needed], (counts - size * (used - 1)).to(torch.int32))
    heads = (row.heads, row.kv_heads, row.head_dim, size)
    dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.k.dtype}
    workspace = _workspace(inputs.q.device)
    if row.tokens == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        tokens = torch.arange(row.batch + 1, dtype=torch.int32) * row.tokens
        wrapper.plan(tokens, *pages, *heads, causal=row.causal, **dtypes)
    paged = tuple(x.reshape(-1, size, row.kv_heads, row.head_dim) for x in (inputs.k, inputs.v))
    return inputs.q.flatten(0, 1), paged, wrapper


@functools.cache
def _workspace(device: Any) -> Any:
    """One for all calls: they run one after another."""
    import torch

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def run(row: Row, q: Any, paged: Any, wrapper: Any) -> Any:
    return wrapper.run(q, paged)
