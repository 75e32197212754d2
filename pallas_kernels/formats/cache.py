"""KV caches in any format, and writing new rows into them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ArgumentError, ShapeError
from ..masks import is_host
from .base import Component, KVFormat, check_dtype, check_rank, pytree
from .encode import FLOATS, encode_rows

_INT32_MAX = 2**31 - 1


@pytree()
class KVCache:
    """Keys and values of one layer, each a low-bit format or a float array [A, M, *heads, D]; the D may differ.

    Dense: A sequences of M rows; paged: A pages of M rows, or [1, pages * page, ...]. A pytree.
    Raises DTypeError for other arrays, ShapeError where the shapes do not go together.
    """

    k: Any
    v: Any

    def __post_init__(self) -> None:
        for name, part in (("k", self.k), ("v", self.v)):
            if not isinstance(part, KVFormat):
                check_dtype(part, name, FLOATS)
                check_rank(part, name, "D")
        if tuple(self.k.shape[:-1]) != tuple(self.v.shape[:-1]):
            shapes = f"{tuple(self.k.shape)} and {tuple(self.v.shape)}"
            raise ShapeError(f"k, v: expected equal shapes up to D, got {shapes}")

    def append(
        self, new_keys: jax.Array, new_values: jax.Array, *, positions: Any = None, slot_mapping: Any = None
    ) -> KVCache:
        """Store new tokens and return the cache that holds them; under jit with this one donated, in place.

        A dense cache takes `positions`, a paged one `slot_mapping`: token t of sequence b goes to slot
        block_table[b, t // page_size] * page_size + t % page_size.

        positions: int32 [A, T], the row of each new token in its own sequence; new_keys, new_values [A, T, *heads, D].
        slot_mapping: int32 [T], page * page_size + row, -1 = skip; new_keys, new_values [T, *heads, D] or [1, T, ...].
        Exactly one of them, as Python lists, numpy or jax arrays; int64 is taken too, no other dtype is. The new rows
        are floats, stored in the cache's own format as by `encode_rows`: a scale per head stays as it is, and clips.

        Indices that point nowhere raise ArgumentError when host-known; of those on a device the rows are dropped, never
        written elsewhere. Rows named twice hold either token's bits, or a mixture: undefined.
        Raises ArgumentError unless one index is given, DTypeError and ShapeError for the arrays, all before writing;
        GradientError where rows for a low-bit format are differentiated.
        """
        rows, keys, values = self.encode(new_keys, new_values, positions=positions, slot_mapping=slot_mapping)
        return KVCache(write_rows(self.k, rows, keys), write_rows(self.v, rows, values))

    def encode(
        self, new_keys: jax.Array, new_values: jax.Array, *, positions: Any = None, slot_mapping: Any = None
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """What `append` would write, for caches that are written in place: (rows, keys, values).

        rows: of `target_rows`; keys, values: of `encode_rows`. Everything is checked.
        """
        rows = target_rows(self.k.shape, positions=positions, slot_mapping=slot_mapping)
        keys = _new_rows(new_keys, "new_keys", self.k, rows, positions is None)
        values = _new_rows(new_values, "new_values", self.v, rows, positions is None)
        return rows, encode_rows(self.k, keys), encode_rows(self.v, values)


def components(part: Any) -> dict[str, Component]:
    """The stored arrays of a cache's keys or values that hold a piece for each row, by field name.

    Together with `encode_rows` and `target_rows` this is an append for arrays that are written in place: for each
    name, with r = rows, `array.movedim(row_axis, 1)[r // M, r % M] = encode_rows(part, x)[name]`, for all r < A * M.
    A float array is one component, "values".
    """
    return part.components() if isinstance(part, KVFormat) else {"values": Component(part, 1)}


def target_rows(shape: tuple[int, ...], *, positions: Any = None, slot_mapping: Any = None) -> jax.Array:
    """The flat row a * M + m of each new token, int32, for a cache of logical shape [A, M, ...]; A * M = write nothing.

    positions [A, T] -> [A, T]; slot_mapping [T] -> [T]. Arguments and errors as in `KVCache.append`.
    """
    if (positions is None) == (slot_mapping is None):
        given = "none" if positions is None else "both"
        raise ArgumentError(f"positions, slot_mapping: expected exactly one of the two, got {given}")
    a, m = shape[:2]
    if a * m > _INT32_MAX:
        raise ShapeError(f"k, v: expected at most {_INT32_MAX} rows, got {a} * {m}")
    if positions is None:
        slots = _indices(slot_mapping, "slot_mapping", 1, -1, a * m)
        return jnp.where((slots >= 0) & (slots < a * m), slots, a * m).astype(jnp.int32)
    rows = _indices(positions, "positions", 2, 0, m)
    if rows.shape[0] != a:
        raise ShapeError(f"positions: expected [{a}, T], a line for each sequence of the cache, got {rows.shape}")
    start = np.arange(a, dtype=np.int32)[:, None] * np.int32(m)
    return jnp.where((rows >= 0) & (rows < m), start + rows, a * m).astype(jnp.int32)


def write_rows(part: Any, rows: jax.Array, encoded: dict[str, jax.Array]) -> Any:
    """A cache's keys or values with `encoded` (of `encode_rows`) at flat `rows` (of `target_rows`)."""
    written = {name: _write(*component, rows, encoded[name]) for name, component in components(part).items()}
    if not isinstance(part, KVFormat):
        return written["values"]
    return dataclasses.replace(part, **written)  # type: ignore[type-var]


def _write(array: Any, row_axis: int, rows: jax.Array, new: jax.Array) -> jax.Array:
    a, m = array.shape[0], array.shape[row_axis]
    if row_axis == 1:
        flat = jnp.asarray(array).reshape(a * m, *array.shape[2:])
        return flat.at[rows].set(new, mode="drop").reshape(array.shape)
    # Every axis is indexed: with a slice between the two, XLA transposes the whole array there and back.
    width = math.prod(array.shape[1:-1])
    flat = jnp.asarray(array).reshape(a, width, m)
    index = (rows[..., None] // max(m, 1), np.arange(width, dtype=np.int32), rows[..., None] % max(m, 1))
    return flat.at[index].set(new.reshape(*rows.shape, width), mode="drop").reshape(array.shape)


def _new_rows(x: Any, name: str, part: Any, rows: jax.Array, by_slot: bool) -> jax.Array:
    """The new rows [*rows.shape, *heads, D], checked."""
    check_dtype(x, name, FLOATS)
    expected = (*rows.shape, *part.shape[2:])
    accepted = [expected, (1, *expected)] if by_slot else [expected]
    if tuple(x.shape) not in accepted:
        raise ShapeError(f"{name}: expected shape {' or '.join(map(str, accepted))}, got {tuple(x.shape)}")
    return jnp.asarray(x).reshape(expected)


def _indices(x: Any, name: str, rank: int, least: int, end: int) -> jax.Array:
    """int32 or int64 of the given rank; when host-known, all in [least, end)."""
    if is_host(x) and not isinstance(x, np.ndarray):
        x = np.asarray(x)
        x = x.astype(np.int32) if x.size == 0 else x
    check_dtype(x, name, (np.int32, np.int64))
    if x.ndim != rank:
        raise ShapeError(f"{name}: expected {rank} axis(es), got shape {tuple(x.shape)}")
    if isinstance(x, np.ndarray) and x.size and not ((x >= least) & (x < end)).all():
        wrong = x[(x < least) | (x >= end)][0]
        skip = "-1 (skip) or " if least == -1 else ""
        raise ArgumentError(f"{name}: expected {skip}0 <= index < {end}, got {wrong}")
    return jnp.asarray(x)
