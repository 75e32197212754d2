"""A drop-in for `mslk.attention.fmha`."""

from . import attn_bias

__all__ = ["attn_bias"]
