"""The packed formats of MSLK's triton_splitk attention, bit for bit: int32 words, decoded in half arithmetic."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import ArgumentError, ShapeError
from . import codes
from .base import Component, KVFormat, check_dtype, check_groups, check_rank, pytree, take_rows


@pytree("num_groups")
class SeedInt4(KVFormat):
    """MSLK triton_splitk int4: words int32 [A, M, *heads, D/8 + N], N = `num_groups` in 1 (default), 2, 4, 8.

    The first N words of a row are coefficients, one for each group of D/N consecutive elements: half scale in the
    low 16 bits, half shift in the high ones. The other words hold unsigned nibbles, least significant first.
    An element is nibble * scale + shift, product and sum each rounded to half; then cast. (MSLK's own kernel needs
    |scale| < 128 and may fuse the two operations; this one has neither trait.)

    Raises DTypeError for words other than int32, ShapeError where they are no such rows, ArgumentError and
    StaticArgumentError for a `num_groups` that is not one of the four as a Python int.
    """

    NAME: ClassVar[str] = "seed_int4"
    words: jax.Array
    num_groups: int = 1

    def __post_init__(self) -> None:
        check_groups(self.num_groups, "num_groups")
        check_dtype(self.words, "words", [jnp.int32])
        check_rank(self.words, "words", "D/8 + num_groups")
        d = self.head_dim
        if d < 8 or d % self.num_groups:
            raise ShapeError(
                f"words: expected rows of num_groups + D/8 words with D a multiple of num_groups, got rows of "
                f"{self.words.shape[-1]} words and num_groups {self.num_groups}"
            )

    @property
    def name(self) -> str:
        return self.NAME if self.num_groups == 1 else f"{self.NAME}g{self.num_groups}"

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, row = self.words.shape
        return (*lead, (row - self.num_groups) * 8)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        return self._decode(jnp.asarray(self.words), dtype)

    def gather_rows(self, rows: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        return self._decode(take_rows(self.words, rows), dtype)

    def components(self) -> dict[str, Component]:
        return {"words": Component(self.words, 1)}

    def _decode(self, words: jax.Array, dtype: Any) -> jax.Array:
        n = self.num_groups
        scale, shift = codes.split_word(words[..., :n])
        nibbles = codes.unpack_nibbles(words[..., n:]).astype(jnp.float32)
        grouped = nibbles.reshape(*nibbles.shape[:-1], n, nibbles.shape[-1] // n)
        x = codes.half_affine(grouped, *(c.astype(jnp.float32)[..., None] for c in (scale, shift)))
        return x.reshape(nibbles.shape).astype(dtype)


@pytree("fp32_scales")
class SeedFp8(KVFormat):
    """MSLK triton_splitk fp8: words int32 [A, M, *heads, D/4], four e4m3 a word, the first in the lowest byte.

    coefficients [A, M, *heads], one for each row of a head:
    - int32 (default): half scale in the low 16 bits, half shift in the high ones. An element is
      value * scale + shift, product and sum each rounded to half; then cast.
    - with `fp32_scales=True`, a float32 scale, as float32 or as its bits in int32, and no shift. An element is
      value * scale in float32; then cast.

    Raises DTypeError for other dtypes, ShapeError for other shapes, ArgumentError unless `fp32_scales` is a bool.
    """

    NAME: ClassVar[str] = "seed_fp8"
    words: jax.Array
    coefficients: jax.Array
    fp32_scales: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.fp32_scales, bool):
            raise ArgumentError(f"fp32_scales: expected True or False, got {type(self.fp32_scales).__name__}")
        check_dtype(self.words, "words", [jnp.int32])
        check_dtype(self.coefficients, "coefficients", [jnp.int32, jnp.float32] if self.fp32_scales else [jnp.int32])
        check_rank(self.words, "words", "D/4")
        if tuple(self.coefficients.shape) != tuple(self.words.shape[:-1]):
            raise ShapeError(
                f"coefficients: expected one for each row of a head, shape {tuple(self.words.shape[:-1])}, "
                f"got {tuple(self.coefficients.shape)}"
            )

    @property
    def name(self) -> str:
        return f"{self.NAME}_fp32" if self.fp32_scales else self.NAME

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, row = self.words.shape
        return (*lead, row * 4)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        return self._decode(jnp.asarray(self.words), jnp.asarray(self.coefficients), dtype)

    def gather_rows(self, rows: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        return self._decode(take_rows(self.words, rows), self._take_coefficients(rows), dtype)

    def gather_values(self, rows: jax.Array) -> jax.Array:
        """The stored e4m3 numbers of some rows, neither scaled nor shifted: float32 [R..., heads, D]."""
        return codes.unpack_bytes(take_rows(self.words, rows)).astype(jnp.float32)

    def gather_scales(self, rows: jax.Array) -> jax.Array:
        """The scales of some rows, float32 [R..., heads]; the shifts have no part in products of e4m3."""
        return self._scale_shift(self._take_coefficients(rows))[0]

    def components(self) -> dict[str, Component]:
        return {"words": Component(self.words, 1), "coefficients": Component(self.coefficients, 1)}

    def _take_coefficients(self, rows: jax.Array) -> jax.Array:
        return take_rows(self.coefficients[..., None], rows)[..., 0]

    def _scale_shift(self, coefficients: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if self.fp32_scales:
            return lax.bitcast_convert_type(coefficients, jnp.float32), None
        scale, shift = codes.split_word(coefficients)
        return scale.astype(jnp.float32), shift.astype(jnp.float32)

    def _decode(self, words: jax.Array, coefficients: jax.Array, dtype: Any) -> jax.Array:
        values = codes.unpack_bytes(words).astype(jnp.float32)
        scale, shift = self._scale_shift(coefficients)
        if shift is None:
            return (values * scale[..., None]).astype(dtype)
        return codes.half_affine(values, scale[..., None], shift[..., None]).astype(dtype)
