"""Between MSLK's packed formats and ours: stored bits are moved, never recomputed."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from ..errors import ArgumentError
from . import codes
from .base import rows_first, rows_last
from .native import Fp8, Int4
from .seed import SeedFp8, SeedInt4


def from_seed(seed: SeedInt4 | SeedFp8) -> Int4 | Fp8:
    """SeedInt4 -> Int4, SeedFp8 -> Fp8, keeping every stored bit.

    Packed coefficients become float16 scales and shifts, those of `fp32_scales` float32 scales without a shift. The
    result decodes in float32, the seed in half: they differ by half's rounding (not with `fp32_scales`).
    Raises ArgumentError for anything else.
    """
    if isinstance(seed, SeedInt4):
        n = seed.num_groups
        words = jnp.asarray(seed.words)
        pair = codes.split_word(words[..., 0] if n == 1 else words[..., :n])
        return Int4(words[..., n:], *(rows_last(x) for x in pair))
    if isinstance(seed, SeedFp8):
        values = codes.unpack_bytes(jnp.asarray(seed.words))
        coefficients = rows_last(seed.coefficients)
        if seed.fp32_scales:
            return Fp8(values, lax.bitcast_convert_type(coefficients, jnp.float32))
        return Fp8(values, *codes.split_word(coefficients))
    raise ArgumentError(f"seed: expected a SeedInt4 or SeedFp8, got {type(seed).__name__}")


def to_seed(native: Int4 | Fp8) -> SeedInt4 | SeedFp8:
    """The inverse of `from_seed`, again keeping every stored bit.

    Int4 -> SeedInt4. Fp8 -> SeedFp8: a float16 scale is packed with its shift or with 0, a float32 scale gives the
    `fp32_scales` form with its bits as int32; a scale per head is repeated for each row.
    Raises ArgumentError where MSLK has no such form: Int8, an Fp8 with a float32 scale and a shift, one whose D is
    not a multiple of 4; and for anything that is none of our formats.
    """
    if isinstance(native, Int4):
        scale, shift = (rows_first(x) for x in (native.scale, native.shift))
        coefficients = codes.join_word(scale, shift)
        coefficients = coefficients if native.grouped else coefficients[..., None]
        return SeedInt4(jnp.concatenate([coefficients, jnp.asarray(native.words)], -1), native.num_groups)
    if not isinstance(native, Fp8):
        raise ArgumentError(f"native: MSLK has forms of Int4 and Fp8 only, got {type(native).__name__}")
    if native.head_dim % 4:
        raise ArgumentError(f"native: MSLK packs four values a word, expected D a multiple of 4, got {native.head_dim}")
    values = jnp.asarray(native.values)
    scale = jnp.asarray(native.scale) if native.per_head else rows_first(native.scale)
    scale = jnp.broadcast_to(scale, values.shape[:-1])
    if scale.dtype == jnp.float32:
        if native.shift is not None:
            raise ArgumentError("native: MSLK has no form of a float32 scale with a shift; expected a float16 scale")
        return SeedFp8(codes.pack_bytes(values), lax.bitcast_convert_type(scale, jnp.int32), True)
    shift = jnp.zeros_like(scale) if native.shift is None else rows_first(native.shift)
    return SeedFp8(codes.pack_bytes(values), codes.join_word(scale, shift))
