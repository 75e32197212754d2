"""Fused attention for serving and training, for JAX: `import pallas_kernels as pk`."""

from . import errors, formats, masks, reference
from .attention import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    not_supported_reasons,
)
from .merge import merge_attentions
from .varlen import AuxRequest, varlen_attn

__version__ = "0.1.0"

__all__ = [
    "AuxRequest",
    "errors",
    "formats",
    "masks",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
    "not_supported_reasons",
    "reference",
    "varlen_attn",
]
