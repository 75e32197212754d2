"""This library's own formats: codes and coefficients apart, coefficients with the rows on the last axis.

So laid out, one copy reads the coefficients of many rows of a head. They are decoded in float32.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from .base import (
    E4M3,
    GROUPS,
    Component,
    KVFormat,
    check_dtype,
    check_rank,
    pytree,
    rows_first,
    take_coefficients,
    take_rows,
)
from .codes import unpack_nibbles


class Native(KVFormat):
    """What the three share: `codes` [A, M, *heads, ...] stand for float32 values, to which scale and shift apply."""

    scale: jax.Array

    @property
    @abc.abstractmethod
    def codes(self) -> jax.Array:
        """The array that is not a coefficient."""

    @staticmethod
    @abc.abstractmethod
    def values_of(stored: jax.Array) -> jax.Array:
        """float32 values [..., D] of codes."""

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        scale, shift = (self._whole(x) for x in self._coefficients)
        return _affine(self.values_of(jnp.asarray(self.codes)), scale, shift, dtype)

    def gather_rows(self, rows: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        scale, shift = (self._taken(x, rows) for x in self._coefficients)
        return _affine(self.values_of(take_rows(self.codes, rows)), scale, shift, dtype)

    @property
    def _coefficients(self) -> tuple[Any, Any]:
        return self.scale, getattr(self, "shift", None)

    def _per_head(self, x: Any) -> bool:
        return len(x.shape) == self.ndim - 3

    def _whole(self, x: Any) -> Any:
        """Coefficients as they broadcast against [A, M, *heads]."""
        return x if x is None or self._per_head(x) else rows_first(x)

    def _taken(self, x: Any, rows: jax.Array) -> Any:
        """The coefficients of some rows, as they broadcast against [R..., heads]."""
        if x is None:
            return None
        return jnp.asarray(x).reshape(-1) if self._per_head(x) else take_coefficients(x, rows, self.shape[2:-1])


def _affine(values: jax.Array, scale: jax.Array, shift: jax.Array | None, dtype: Any) -> jax.Array:
    """values float32 [..., D]; coefficients that broadcast against [...] or, by groups, are [..., N]."""
    grouped = values
    if scale.ndim == values.ndim:
        grouped = values.reshape(*values.shape[:-1], scale.shape[-1], values.shape[-1] // scale.shape[-1])
    x = grouped * scale.astype(jnp.float32)[..., None]
    if shift is not None:
        x = x + shift.astype(jnp.float32)[..., None]
    return x.reshape(values.shape).astype(dtype)


def _check_coefficients(x: Any, name: str, dtypes: list[Any], accepted: dict[tuple[int, ...], str]) -> None:
    check_dtype(x, name, dtypes)
    if tuple(x.shape) not in accepted:
        options = " or ".join(f"{shape} ({what})" for shape, what in accepted.items())
        raise ShapeError(f"{name}: expected shape {options}, got {tuple(x.shape)}")


def _row_shape(stored: Any) -> tuple[int, ...]:
    """[A, *heads, M]: the shape of one coefficient a row."""
    a, m, *heads, _ = stored.shape
    return (a, *heads, m)


@pytree()
class Fp8(Native):
    """e4m3 values [A, M, *heads, D] with a scale and perhaps a shift; an element is value * scale + shift.

    scale: float32 or float16, one a row [A, *heads, M] or one a head [*heads].
    shift: float16, one a row [A, *heads, M], or None (the default): no shift.
    The arithmetic is float32, with one cast at the end; with both a float32 scale and a shift the multiply-add may be
    fused. Products of e4m3 ignore the shift. As an attention query: values [B, Mq, *heads, D], scale [B, *heads, Mq].

    Raises DTypeError and ShapeError for other dtypes and shapes.
    """

    NAME: ClassVar[str] = "fp8"
    values: jax.Array
    scale: jax.Array
    shift: jax.Array | None = None

    def __post_init__(self) -> None:
        check_dtype(self.values, "values", [E4M3])
        check_rank(self.values, "values", "D")
        row = {_row_shape(self.values): "one a row"}
        either = {**row, self.shape[2:-1]: "one a head"}
        _check_coefficients(self.scale, "scale", [jnp.float32, jnp.float16], either)
        if self.shift is not None:
            _check_coefficients(self.shift, "shift", [jnp.float16], row)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def per_head(self) -> bool:
        """Whether one scale serves all rows of a head."""
        return self._per_head(self.scale)

    def gather_values(self, rows: jax.Array) -> jax.Array:
        """The stored e4m3 numbers of some rows, neither scaled nor shifted: float32 [R..., heads, D]."""
        return self.values_of(take_rows(self.values, rows))

    def gather_scales(self, rows: jax.Array) -> jax.Array:
        """The scales of some rows, float32 [R..., heads]; the shifts have no part in products of e4m3."""
        scale = self._taken(self.scale, rows).astype(jnp.float32)
        return jnp.broadcast_to(scale, (*rows.shape, scale.shape[-1]))

    def components(self) -> dict[str, Component]:
        stored = {"values": Component(self.values, 1)}
        if not self.per_head:
            stored["scale"] = Component(self.scale, -1)
        if self.shift is not None:
            stored["shift"] = Component(self.shift, -1)
        return stored

    @property
    def codes(self) -> jax.Array:
        return self.values

    @staticmethod
    def values_of(stored: jax.Array) -> jax.Array:
        return stored.astype(jnp.float32)


@pytree()
class Int8(Native):
    """int8 values [A, M, *heads, D] with one scale a row, [A, *heads, M] float32 or float16.

    An element is value * scale in float32, with one cast at the end. Raises DTypeError and ShapeError for other dtypes
    and shapes.
    """

    NAME: ClassVar[str] = "int8"
    values: jax.Array
    scale: jax.Array

    def __post_init__(self) -> None:
        check_dtype(self.values, "values", [jnp.int8])
        check_rank(self.values, "values", "D")
        _check_coefficients(self.scale, "scale", [jnp.float32, jnp.float16], {_row_shape(self.values): "one a row"})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def components(self) -> dict[str, Component]:
        return {"values": Component(self.values, 1), "scale": Component(self.scale, -1)}

    @property
    def codes(self) -> jax.Array:
        return self.values

    @staticmethod
    def values_of(stored: jax.Array) -> jax.Array:
        return stored.astype(jnp.float32)


@pytree()
class Int4(Native):
    """words int32 [A, M, *heads, D/8], eight unsigned nibbles each, least significant first; scale and shift float16.

    scale and shift have one entry a row, [A, *heads, M], or one for each of N groups of D/N consecutive elements,
    [A, *heads, N, M] with N = 1, 2, 4 or 8. An element is nibble * scale + shift in float32, with one cast at the end.
    Raises DTypeError and ShapeError for other dtypes and shapes.
    """

    NAME: ClassVar[str] = "int4"
    words: jax.Array
    scale: jax.Array
    shift: jax.Array

    def __post_init__(self) -> None:
        check_dtype(self.words, "words", [jnp.int32])
        check_rank(self.words, "words", "D/8")
        *lead, m = _row_shape(self.words)
        groups = {(*lead, n, m): f"{n} a row" for n in GROUPS if self.head_dim % n == 0}
        _check_coefficients(self.scale, "scale", [jnp.float16], {(*lead, m): "one a row", **groups})
        _check_coefficients(self.shift, "shift", [jnp.float16], {tuple(self.scale.shape): "as scale"})

    @property
    def name(self) -> str:
        return self.NAME if self.num_groups == 1 else f"{self.NAME}g{self.num_groups}"

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, row = self.words.shape
        return (*lead, row * 8)

    @property
    def grouped(self) -> bool:
        """Whether scale and shift have an axis of groups."""
        return len(self.scale.shape) == len(self.words.shape)

    @property
    def num_groups(self) -> int:
        """N; 1 where scale has no axis of groups."""
        return self.scale.shape[-2] if self.grouped else 1

    def components(self) -> dict[str, Component]:
        return {
            "words": Component(self.words, 1),
            "scale": Component(self.scale, -1),
            "shift": Component(self.shift, -1),
        }

    @property
    def codes(self) -> jax.Array:
        return self.words

    @staticmethod
    def values_of(stored: jax.Array) -> jax.Array:
        return unpack_nibbles(stored).astype(jnp.float32)
