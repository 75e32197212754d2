"""Numbers to formats: whole arrays (`quantize`) and the new rows of a cache (`encode_rows`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..errors import ArgumentError, DTypeError, GradientError, ShapeError
from ..masks import is_host
from . import codes
from .base import KVFormat, check_dtype, check_groups, rows_last
from .native import Fp8, Int4, Int8
from .seed import SeedFp8, SeedInt4

FORMATS: dict[str, type[KVFormat]] = {cls.NAME: cls for cls in (SeedInt4, SeedFp8, Fp8, Int8, Int4)}
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


@jax.custom_jvp
def _no_gradient(x: jax.Array) -> jax.Array:
    return x


@_no_gradient.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise GradientError(
        "quantize, KVCache.append: rounding to a low-bit format has no gradient; accepted are inputs that are not "
        "differentiated, e.g. jax.lax.stop_gradient(x)"
    )


def quantize(
    x: jax.Array,
    format: type[KVFormat] | str,
    *,
    groups: int = 1,
    scale: str | Any = "row",
    asymmetric: bool = False,
    scale_dtype: Any = None,
) -> Any:
    """Store x [A, M, *heads, D] (float16, bfloat16, float32 or float64) in a low-bit format, and return that.

    format: SeedInt4, SeedFp8, Fp8, Int8, Int4, or its name: 'seed_int4', 'seed_fp8', 'fp8', 'int8', 'int4'.
    groups: 1 (default), 2, 4 or 8 coefficient pairs a row; int4 formats only.
    scale: 'row' (default); for Fp8 also 'head', one scale of all rows of a head, or these scales, [*heads] > 0.
    asymmetric: store x - mean(row), with the mean as shift; fp8 formats only (int4 always has a shift).
    scale_dtype: of Fp8 and Int8, float32 (default; float16 if asymmetric) or float16; of SeedFp8, float16 (default;
        scale and shift packed) or float32 (the `fp32_scales` form).

    int4: shift = min, scale = (max - min) / 15; int8: scale = max|x| / 127; fp8: scale = max|x - shift| / 448. Codes
    are rounded to nearest against the coefficients as stored. What no coefficient or given scale reaches saturates;
    in the packed seed formats, decoded in half, that is beyond 60000 at the latest, for int4 also beyond the row's
    minimum + 65460 (MSLK's own kernel reads rows up to a range of 1900 only). A NaN makes its row NaN, or its head
    where a scale per head is computed.

    Raises ShapeError and DTypeError for x, ArgumentError for an option that is unknown or that the format lacks,
    GradientError where x is differentiated.
    """
    cls = FORMATS.get(format) if isinstance(format, str) else format
    if cls is None or cls not in FORMATS.values():
        raise ArgumentError(f"format: expected one of {', '.join(map(repr, FORMATS))} or such a class, got {format!r}")
    x = _numbers(x, "x")
    if x.ndim not in (4, 5):
        raise ShapeError(f"x: expected [A, M, heads, D] or [A, M, G, H, D], got shape {x.shape}")
    _check_options(cls, x.shape[-1], groups, scale, asymmetric)
    scale_dtype = _scale_dtype(cls, scale_dtype, scale, asymmetric)
    if cls is SeedInt4:
        return SeedInt4(_seed_int4(x, groups), groups)
    if cls is SeedFp8:
        words, coefficients = _seed_fp8(x, scale_dtype, asymmetric)
        return SeedFp8(words, coefficients, scale_dtype == jnp.float32)
    if cls is Fp8:
        return _whole_fp8(x, scale, scale_dtype, asymmetric)
    if cls is Int8:
        values, row_scale = codes.encode_int8(x, scale_dtype)
        return Int8(values, rows_last(row_scale))
    words, row_scale, shift = _int4(x, None if groups == 1 else groups)
    return Int4(words, rows_last(row_scale), rows_last(shift))


def encode_rows(part: Any, new_rows: jax.Array) -> dict[str, jax.Array]:
    """New rows in the format of a cache's keys or values: the first half of an append.

    part: any format, or a float array; of its leaves only shapes and dtypes are read, and an Fp8's scale per head.
    new_rows: [R..., *heads, D], float. -> what to store for each name in `components(part)`: [R..., ...], each with the
    row's axes R first and then the component's own axes in order, without axis 0 (A) and the one of the rows.

    One scale a row is chosen for the new row, a scale per head is kept and clips. Fp8 with a shift is written
    asymmetric; SeedFp8 symmetric (shift 0), which also products of e4m3 can read.
    Raises DTypeError unless new_rows are floats, ShapeError unless they are rows of `part`.
    """
    check_dtype(new_rows, "new_rows", FLOATS)
    if new_rows.shape[-(len(part.shape) - 2) :] != tuple(part.shape[2:]):
        raise ShapeError(f"new_rows: expected [..., {str(tuple(part.shape[2:]))[1:-1]}], got shape {new_rows.shape}")
    if not isinstance(part, KVFormat):
        return {"values": jnp.asarray(new_rows).astype(part.dtype)}
    x = _numbers(new_rows, "new_rows")
    if isinstance(part, SeedInt4):
        return {"words": _seed_int4(x, part.num_groups)}
    if isinstance(part, SeedFp8):
        words, coefficients = _seed_fp8(x, jnp.float32 if part.fp32_scales else jnp.float16, asymmetric=False)
        return {"words": words, "coefficients": lax.bitcast_convert_type(coefficients, part.coefficients.dtype)}
    if isinstance(part, Int8):
        return dict(zip(("values", "scale"), codes.encode_int8(x, part.scale.dtype)))
    if isinstance(part, Int4):
        return dict(zip(("words", "scale", "shift"), _int4(x, part.num_groups if part.grouped else None)))
    if not isinstance(part, Fp8):
        raise ArgumentError(f"part: expected one of {', '.join(map(repr, FORMATS))} or a float array, got {part!r}")
    encoded = {}
    if part.shift is not None:
        x, encoded["shift"] = codes.fp8_shift(x, seed=False)
    if part.per_head:
        scale = jnp.asarray(part.scale)
    else:
        scale = encoded["scale"] = codes.fp8_scale(x, -1, part.scale.dtype, seed=False)
    return {"values": codes.encode_fp8(x, scale), **encoded}


def _numbers(x: Any, name: str) -> jax.Array:
    check_dtype(x, name, FLOATS)
    return _no_gradient(jnp.asarray(x)).astype(jnp.float32)


def _check_options(cls: type[KVFormat], d: int, groups: Any, scale: Any, asymmetric: Any) -> None:
    int4, fp8 = cls in (SeedInt4, Int4), cls in (SeedFp8, Fp8)
    check_groups(groups, "groups")
    if groups != 1 and not int4:
        raise ArgumentError(f"groups: {cls.NAME} has one scale a row, expected 1, got {groups}")
    if not isinstance(asymmetric, bool):
        raise ArgumentError(f"asymmetric: expected True or False, got {type(asymmetric).__name__}")
    if asymmetric and not fp8:
        raise ArgumentError(f"asymmetric: only fp8 formats offer it, expected False for {cls.NAME!r}, got True")
    if isinstance(scale, str) and scale not in ("row", "head"):
        raise ArgumentError(f"scale: expected 'row', 'head' or an array of scales, got {scale!r}")
    if cls is not Fp8 and not (isinstance(scale, str) and scale == "row"):
        given = repr(scale) if isinstance(scale, str) else type(scale).__name__
        raise ArgumentError(f"scale: only 'fp8' has scales per head, expected 'row' for {cls.NAME!r}, got {given}")
    multiple = max(8, groups) if int4 else 4 if cls is SeedFp8 else 1
    if d == 0 or d % multiple:
        raise ShapeError(f"x: {cls.NAME} needs a last axis that is a positive multiple of {multiple}, got {d}")


def _scale_dtype(cls: type[KVFormat], given: Any, scale: Any, asymmetric: bool) -> Any:
    """The dtype of scales, checked against the format."""
    if given is None:
        if getattr(scale, "dtype", None) in (jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)):
            return jnp.dtype(scale.dtype)
        half = asymmetric or cls in (SeedInt4, SeedFp8, Int4)
        return jnp.dtype(jnp.float16 if half else jnp.float32)
    accepted = (jnp.float16,) if cls in (SeedInt4, Int4) else (jnp.float16, jnp.float32)
    names = " or ".join(str(jnp.dtype(d)) for d in accepted)
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        raise DTypeError(f"scale_dtype: expected {names}, got {given!r}") from None
    if dtype not in map(jnp.dtype, accepted):
        raise DTypeError(f"scale_dtype: {cls.NAME} has scales of {names}, got {dtype}")
    if cls is SeedFp8 and asymmetric and dtype == jnp.float32:
        raise ArgumentError("asymmetric: seed_fp8 has no shift beside float32 scales, expected False, got True")
    return dtype


def _whole_fp8(x: jax.Array, scale: Any, dtype: Any, asymmetric: bool) -> Fp8:
    shift = None
    if asymmetric:
        x, row_shift = codes.fp8_shift(x, seed=False)
        shift = rows_last(row_shift)
    if isinstance(scale, str) and scale == "row":
        row_scale = codes.fp8_scale(x, -1, dtype, seed=False)
        return Fp8(codes.encode_fp8(x, row_scale), rows_last(row_scale), shift)
    if isinstance(scale, str):
        head_scale = codes.fp8_scale(x, (0, 1, x.ndim - 1), dtype, seed=False)
    else:
        head_scale = _given_scale(scale, x.shape[2:-1], dtype)
    return Fp8(codes.encode_fp8(x, head_scale), head_scale, shift)


def _given_scale(scale: Any, heads: tuple[int, ...], dtype: Any) -> jax.Array:
    if is_host(scale):
        host = np.asarray(scale)
        if host.dtype.kind in "iuf":
            with np.errstate(over="ignore"):
                scale = host.astype(dtype)
            if not (np.isfinite(scale) & (scale > 0)).all():
                raise ArgumentError(f"scale: expected positive finite numbers in {dtype}, got {host.tolist()}")
        else:
            scale = host
    check_dtype(scale, "scale", FLOATS)
    if tuple(scale.shape) != heads:
        raise ShapeError(f"scale: expected one scale a head, shape {heads}, got {tuple(scale.shape)}")
    return codes.stored(jnp.asarray(scale).astype(jnp.float32), dtype).astype(dtype)


def _seed_int4(x: jax.Array, groups: int) -> jax.Array:
    nibbles, scale, shift = codes.encode_int4(_by_group(x, groups), seed=True)
    return jnp.concatenate([codes.join_word(scale, shift), codes.pack_nibbles(nibbles.reshape(x.shape))], -1)


def _int4(x: jax.Array, groups: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """words, scale and shift, these [...] or, with a number of groups, [..., N]."""
    nibbles, scale, shift = codes.encode_int4(x if groups is None else _by_group(x, groups), seed=False)
    return codes.pack_nibbles(nibbles.reshape(x.shape)), scale, shift


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _seed_fp8(x: jax.Array, scale_dtype: Any, asymmetric: bool) -> tuple[jax.Array, jax.Array]:
    """words and coefficients; these int32 in both forms."""
    packed = jnp.dtype(scale_dtype) == jnp.float16
    if asymmetric:
        x, shift = codes.fp8_shift(x, seed=True)
    else:
        shift = jnp.zeros(x.shape[:-1], jnp.float16)
    scale = codes.fp8_scale(x, -1, scale_dtype, seed=packed)
    coefficients = codes.join_word(scale, shift) if packed else lax.bitcast_convert_type(scale, jnp.int32)
    return codes.pack_bytes(codes.encode_fp8(x, scale)), coefficients
