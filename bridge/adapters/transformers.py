"""Hugging Face transformers on `bridge.varlen_attn`: sentences packed one after another, no padding token computed.

    from bridge.adapters.transformers import pack, register

    model.set_attn_implementation(register())
    hidden = model(**pack(token_ids)).last_hidden_state  # [1, all tokens, ...]

The packed lengths travel as keyword arguments of the model, under the names that transformers gives them for its own
flash attention, so its `DataCollatorWithFlattening` works too. As there, what a mask says beyond causality, a sliding
window and packing (blocks of image tokens, chunks) is not seen by the attention: use another implementation for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pallas_kernels.errors import ArgumentError, ShapeError, UnsupportedError

from ..varlen import varlen_attn

NAME = "pallas_varlen"


def register(name: str = NAME, *, dtype: torch.dtype | None = None, backend: str = "auto") -> str:
    """Make the attention known to transformers as `name`, and return that for `set_attn_implementation`.

    dtype: query, key and value are cast to it for the attention alone; None: as the model gives them.
    Registering a name again replaces its options, for all models that use it.
    """
    AttentionInterface.register(name, functools.partial(attention, attention_dtype=dtype, backend=backend))
    AttentionMaskInterface.register(name, no_mask)
    return name


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str | None = None) -> dict[str, Any]:
    """A model's keyword arguments for sequences of token ids on one axis: batch 1, positions from 0 in each."""
    lengths = [len(s) for s in sequences]
    cu_seq_lens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return {
        "input_ids": torch.tensor([[token for s in sequences for token in s]], device=device),
        "position_ids": torch.tensor([[i for n in lengths for i in range(n)]], device=device),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu_seq_lens),
        **dict.fromkeys(("max_length_q", "max_length_k"), max(lengths, default=0)),
    }


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None, *,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int = 0, max_length_k: int = 0, position_ids: torch.Tensor | None = None,
    attention_dtype: torch.dtype | None = None, backend: str = "auto", **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention function: [B, H, T, D] -> [B, T, H, D], no weights. Without lengths, B equal sequences"""
    if attention_mask is not None or dropout:
        raise UnsupportedError("attention_mask, dropout: not supported by packed attention, give neither")
    batch, queries = query.shape[0], query.shape[2]
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        if batch == 1 and position_ids is not None and position_ids.ndim == 2 and (position_ids.diff() != 1).any():
            raise ArgumentError("position_ids: packed sequences need cu_seq_lens_q and cu_seq_lens_k (see `pack`)")
        max_length_q, max_length_k = queries, key.shape[2]
        steps = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
        cu_seq_lens_q, cu_seq_lens_k = steps * max_length_q, steps * max_length_k
    elif batch != 1:
        raise ShapeError(f"query: packed sequences lie in batch 1, got batch {batch}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = -1 if sliding_window is None else sliding_window - 1  # transformers counts the query's own position
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(attention_dtype or x.dtype) for x in (query, key, value))
    out = varlen_attn(
        q, k, v, cu_seq_lens_q.int(), cu_seq_lens_k.int(), int(max_length_q), int(max_length_k),
        scale=scaling, window_size=(reach, 0 if causal else reach), enable_gqa=q.shape[1] != k.shape[1],
        softcap=softcap, sinks=s_aux, backend=backend,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out.to(query.dtype).unflatten(0, (batch, queries)), None


def no_mask(
    *_: Any, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **rest: Any,
) -> None:  # fmt: skip
    """transformers' mask function: none is made; raises where tokens are masked out, the mask is a user's own, or keys
    lie behind the last query, as they do in a cache that is not full."""
    if use_vmap or (attention_mask is not None and not attention_mask.all()):
        raise UnsupportedError("attention_mask: padded or custom masks are not supported, pack the sequences instead")
    causal = "allow_is_bidirectional_skip" not in rest
    keys, queries = int(kv_offset) + kv_length, int(q_offset) + q_length
    if causal and keys != queries:
        raise UnsupportedError(
            f"past_key_values: {keys} rows of keys where {queries} tokens were seen; a cache with room (StaticCache) "
            "is not supported, use a DynamicCache"
        )
