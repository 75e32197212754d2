"""Bits and numbers: packing, half arithmetic, and the choice of codes and coefficients for given numbers.

Everything works along the last axis, one row of one head. "half" is IEEE float16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .base import E4M3

E4M3_MAX = 448.0
_HALF_MAX = 65504.0
_HALF_TINY = 2.0**-24
_FLOAT_TINY = 2.0**-126

_HUGE = 1e30
"""Larger magnitudes (and inf) are stored as this, or as the largest number the coefficients reach."""

_SEED_LIMIT = 60000.0
"""The same for formats decoded in half: a code may decode to 1/16 more than its number, which must stay finite."""

_SEED_SCALE = 4364.0
"""The largest int4 scale there: the last half for which 15 * scale is finite in half."""


# ----------------------------------------------------------------------------------------------- rounding


def _round(x: jax.Array, mantissa: int, least_exponent: int) -> jax.Array:
    """float32 rounded to nearest even, to `mantissa` bits and to multiples of 2**(least_exponent - mantissa).

    `reduce_precision` survives XLA's excess-precision pass, which drops a pair of casts; but it flushes subnormal
    results, so those are rounded as multiples of the smallest one. All steps but the rounding itself are exact.
    """
    ulp = 2.0 ** (least_exponent - mantissa)
    subnormal = lax.round(x * (1 / ulp), lax.RoundingMethod.TO_NEAREST_EVEN) * ulp
    return jnp.where(jnp.abs(x) < 2.0**least_exponent, subnormal, lax.reduce_precision(x, 5, mantissa))


def to_half(x: jax.Array) -> jax.Array:
    """float32 numbers rounded to half, still as float32; what is too large becomes inf."""
    return _round(x, 10, -14)


def to_e4m3(x: jax.Array) -> jax.Array:
    """float32 -> e4m3, saturating at 448: a plain cast makes NaN of larger numbers. NaN stays NaN."""
    return _round(jnp.clip(x, -E4M3_MAX, E4M3_MAX), 3, -6).astype(E4M3)


def half_affine(values: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """values * scale + shift, the product and the sum each rounded to half; float32 in and out.

    values have at most 4 significant bits, so the float32 product is exact and one rounding gives the half product.
    The sum of two halves in float32 rounds to the same half as the exact sum (24 >= 2 * 11 + 2 bits).
    """
    return to_half(to_half(values * scale) + shift)


# ------------------------------------------------------------------------------------------------ packing


def unpack_nibbles(words: jax.Array) -> jax.Array:
    """int32 [..., D/8] -> int32 [..., D] in 0 .. 15: element 8p + t is bits 4t .. 4t+3 of word p."""
    nibbles = (words[..., None] >> np.arange(0, 32, 4, dtype=np.int32)) & 15
    return nibbles.reshape(*words.shape[:-1], words.shape[-1] * 8)


def pack_nibbles(nibbles: jax.Array) -> jax.Array:
    """The inverse of `unpack_nibbles`."""
    by_word = nibbles.reshape(*nibbles.shape[:-1], nibbles.shape[-1] // 8, 8).astype(jnp.uint32)
    words = (by_word << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def unpack_bytes(words: jax.Array) -> jax.Array:
    """int32 [..., D/4] -> e4m3 [..., D]: element 4p + t is bits 8t .. 8t+7 of word p."""
    return lax.bitcast_convert_type(words, E4M3).reshape(*words.shape[:-1], words.shape[-1] * 4)


def pack_bytes(values: jax.Array) -> jax.Array:
    """The inverse of `unpack_bytes`."""
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], values.shape[-1] // 4, 4), jnp.int32)


def split_word(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32 coefficient words -> (scale, shift), float16: the low and the high half."""
    halves = lax.bitcast_convert_type(words, jnp.uint16)  # as integers: no NaN payload is touched
    scale, shift = (lax.bitcast_convert_type(halves[..., i], jnp.float16) for i in (0, 1))
    return scale, shift


def join_word(scale: jax.Array, shift: jax.Array) -> jax.Array:
    """The inverse of `split_word`."""
    halves = [lax.bitcast_convert_type(x, jnp.uint16) for x in (scale, shift)]
    return lax.bitcast_convert_type(jnp.stack(halves, -1), jnp.int32)


# ----------------------------------------------------------------------------------------------- encoding


def stored(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 as it will be read back from `dtype`, so that codes are chosen for the stored coefficient."""
    return to_half(jnp.clip(x, -_HALF_MAX, _HALF_MAX)) if jnp.dtype(dtype) == jnp.float16 else x


def encode_int4(x: jax.Array, seed: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 [..., D] -> (nibbles int32 [..., D], scale, shift float16 [...]): shift = min, scale = (max - min) / 15.

    Constant rows get scale 0. `seed`: the numbers are to be decoded in half.
    """
    limit = _SEED_LIMIT if seed else _HUGE
    x = jnp.clip(x, -limit, limit)
    shift = stored(x.min(-1), jnp.float16)
    extent = jnp.maximum(x.max(-1) - shift, 0)
    scale = to_half(jnp.clip(extent / 15, _HALF_TINY, _SEED_SCALE if seed else _HALF_MAX))
    steps = (x - shift[..., None]) / scale[..., None]
    nibbles = jnp.where(jnp.isnan(steps), 0, jnp.clip(jnp.round(steps), 0, 15)).astype(jnp.int32)
    return nibbles, jnp.where(extent == 0, 0, scale).astype(jnp.float16), shift.astype(jnp.float16)


def encode_int8(x: jax.Array, scale_dtype: Any) -> tuple[jax.Array, jax.Array]:
    """float32 [..., D] -> (int8 [..., D], scale [...]): scale = max|x| / 127, or 1 where the row is zero."""
    x = jnp.clip(x, -_HUGE, _HUGE)
    scale = _symmetric_scale(jnp.abs(x).max(-1), 127.0, scale_dtype)
    steps = x / scale[..., None]
    values = jnp.where(jnp.isnan(steps), 0, jnp.clip(jnp.round(steps), -127, 127))
    return values.astype(jnp.int8), scale.astype(scale_dtype)


def encode_fp8(x: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 [..., D] and scale [...] -> e4m3 [..., D], saturating."""
    return to_e4m3(x / scale.astype(jnp.float32)[..., None])


def fp8_shift(x: jax.Array, seed: bool) -> tuple[jax.Array, jax.Array]:
    """The asymmetric form's shift = mean of the row, float16 [...], and the rest x - shift, float32 [..., D]."""
    limit = _SEED_LIMIT if seed else _HUGE
    x = jnp.clip(x, -limit, limit)
    shift = stored(x.mean(-1), jnp.float16)
    return x - shift[..., None], shift.astype(jnp.float16)


def fp8_scale(x: jax.Array, axes: int | tuple[int, ...], dtype: Any, seed: bool) -> jax.Array:
    """scale = max|x| / 448 over `axes`, or 1 where all is zero; in `dtype`, without the axes."""
    largest = jnp.minimum(jnp.abs(x).max(axes), _SEED_LIMIT if seed else _HUGE)
    return _symmetric_scale(largest, E4M3_MAX, dtype).astype(dtype)


def _symmetric_scale(largest: jax.Array, code_max: float, dtype: Any) -> jax.Array:
    """The scale that maps `largest` to `code_max`, as stored in `dtype`; never 0, so that zeros divide to zero."""
    half = jnp.dtype(dtype) == jnp.float16
    scale = jnp.clip(largest / code_max, *((_HALF_TINY, _HALF_MAX) if half else (_FLOAT_TINY, _HUGE)))
    return jnp.where(largest == 0, 1.0, stored(scale, dtype))
