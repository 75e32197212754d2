"""The same attention for PyTorch, under the same names: `import bridge`."""

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        'bridge needs PyTorch: pip install "pallas-splitk[torch]", or "pallas-splitk[demo]" to run its demo'
    ) from None

from pallas_kernels import AuxRequest

from . import exchange, fmha, formats
from ._warmup import CacheInfo, cache_info, warmup
from .attention import (
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    served_by,
)
from .merge import merge_attentions
from .varlen import varlen_attn, varlen_attn_out

__all__ = [
    "AuxRequest",
    "CacheInfo",
    "cache_info",
    "exchange",
    "fmha",
    "formats",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
    "served_by",
    "varlen_attn",
    "varlen_attn_out",
    "warmup",
]
