"""Quantisers of the low-bit formats: their errors, extremes and what they refuse."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from format_kinds import HEADS, QUANTIZE, READ, bits, every_format, numbers
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError, ShapeError, StaticArgumentError
from pallas_kernels.formats import Fp8, Int4, Int8, KVCache, SeedFp8, SeedInt4, quantize

F8 = ml_dtypes.float8_e4m3fn


@given(st.integers(0, 2**32 - 1), st.sampled_from([("seed_int4", 1), ("seed_int4", 4), ("int4", 2), ("int4", 8)]))
def test_int4_error_is_half_a_step(seed, case):
    name, groups = case
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((1, 4, 2, 16)) * np.exp2(rng.integers(-6, 8))).astype(np.float32)
    kv = QUANTIZE(x, name, groups=groups)
    grouped = x.reshape(1, 4, 2, groups, -1)
    step = np.ptp(grouped, -1, keepdims=True) / 15
    error = np.abs(np.asarray(READ(kv)).reshape(grouped.shape) - grouped)
    # Half a step, what rounding the coefficients to half adds, and for the seed's arithmetic two roundings.
    assert (error <= step * 0.51 + np.abs(grouped).max(-1, keepdims=True) * 2**-9).all()


@given(st.integers(0, 2**32 - 1))
def test_int8_and_fp8_errors(seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((1, 4, 2, 16)) * np.exp2(rng.integers(-6, 8))).astype(np.float32)
    largest = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(READ(QUANTIZE(x, "int8")) - x) <= largest / 127 * 0.501).all()
    for name, options in (("fp8", {}), ("seed_fp8", {}), ("seed_fp8", dict(scale_dtype=jnp.float32))):
        error = np.abs(READ(QUANTIZE(x, name, **options)) - x)
        assert (error <= np.abs(x) * (1 / 16 + 2**-9) + largest * 2**-18).all()
    shifted = x + 10 * largest
    assert (np.abs(READ(QUANTIZE(shifted, "seed_fp8", asymmetric=True)) - shifted) < largest / 6).all()


ALL = ["seed_int4", "seed_fp8", "fp8", "int8", "int4"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.140625, 6e-8, 1e-12, 3e4])
def test_constant_rows(name, value):
    x = np.full((1, 2, 1, 8), value, np.float32)
    out = np.asarray(READ(QUANTIZE(x, name)))
    np.testing.assert_allclose(out, x, rtol=1 / 400, atol=6e-8)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("top", [6.5e4, 1e6, 1e20, 3e38, np.inf])
def test_huge_numbers_saturate(name, top):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1, 6, 1, 16)).astype(np.float32)
    x[0, 0, 0, 3], x[0, 1, 0, 5], x[0, 2, 0, :2], x[0, 3], x[0, 4] = top, -top, (top, -top), top, -top
    for options in ({}, dict(asymmetric=True)) if "fp8" in name else ({},):
        out = np.asarray(READ(QUANTIZE(x, name, **options)))
        assert np.isfinite(out).all(), (name, options)
        assert out[0, 0, 0, 3] > 5e4 and out[0, 1, 0, 5] < -5e4 and (out[0, 2, 0, 0] > 4e3 > out[0, 2, 0, 1])
        assert np.abs(out[0, 5] - x[0, 5]).max() < 0.1  # an ordinary row beside them


@given(st.integers(0, 2**32 - 1))
def test_no_finite_row_decodes_to_infinity(seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((1, 64, 1, 16)) * 6e4).clip(-65504, 65504)
    x[0, ::3] += 5e4
    for name, options in (("seed_int4", {}), ("seed_fp8", {}), ("seed_fp8", dict(asymmetric=True))):
        assert np.isfinite(READ(QUANTIZE(x.astype(np.float32), name, **options), jnp.float16)).all()


@pytest.mark.parametrize("name", ALL)
def test_a_nan_stays_in_its_row(name):
    x = numbers(0, 1, 3, 1, 8)
    x[0, 1, 0, 2] = np.nan
    out = np.asarray(READ(QUANTIZE(x, name)))
    assert np.isnan(out[0, 1]).all() and np.isfinite(out[0, [0, 2]]).all()


def test_e4m3_is_rounded_to_nearest_even_and_saturates():
    every = np.arange(256, dtype=np.uint8).view(F8).astype(np.float32)
    exact = np.unique(every[np.isfinite(every)])
    between = (exact[1:] + exact[:-1]) / 2
    x = np.concatenate([exact, between, np.nextafter(between, 999), np.nextafter(between, -999)]).astype(np.float32)
    x = np.concatenate([x, np.float32([1e9, -1e9, np.inf, 464.1, -0.0])])
    kv = quantize(x.reshape(1, 1, 1, -1), "fp8", scale=[1.0])
    expected = np.clip(x, -448, 448).astype(F8)
    np.testing.assert_array_equal(np.asarray(kv.values).ravel().view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("heads", HEADS)
def test_scales_per_head(heads):
    x = numbers(0, 2, 5, *heads, 16)
    kv = QUANTIZE(x, "fp8", scale="head")
    np.testing.assert_allclose(kv.scale, np.abs(x).max((0, 1, -1)) / 448, rtol=1e-6)
    assert dict(every_format(heads))["fp8 head asymmetric"].scale.dtype == jnp.float16
    given_scale = np.full(heads, 2.0**-9, np.float16)
    kv = quantize(x, "fp8", scale=given_scale)
    assert kv.scale.dtype == jnp.float16 and bits(kv.scale) == bits(given_scale)
    assert float(jnp.abs(kv.dequantize()).max()) == 448 * 2**-9
    assert quantize(x, "fp8", scale=given_scale.tolist()).scale.dtype == jnp.float32
    assert (QUANTIZE(np.zeros_like(x), "fp8", scale="head").scale == 1).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_quantize_takes_every_float(dtype):
    x = jnp.asarray(numbers(0, 1, 2, 3, 8)).astype(dtype)
    for name in ("seed_fp8", "int4"):
        np.testing.assert_allclose(READ(QUANTIZE(x, name)), x.astype(jnp.float32), atol=0.2)


def test_quantize_errors():
    x = numbers(0, 1, 2, 3, 16)
    for bad, error, text in [
        (dict(format="int5"), ArgumentError, "expected one of 'seed_int4'"),
        (dict(format=KVCache), ArgumentError, "format"),
        (dict(x=x[0]), ShapeError, r"x: expected \[A, M"),
        (dict(x=x.astype(np.int32)), DTypeError, "got int32"),
        (dict(x=[1.0]), DTypeError, "got list"),
        (dict(x=x[..., :12]), ShapeError, "multiple of 8, got 12"),
        (dict(x=x[..., :6], format="seed_fp8"), ShapeError, "multiple of 4, got 6"),
        (dict(groups=3), ArgumentError, r"\(1, 2, 4, 8\), got 3"),
        (dict(groups=2.0), StaticArgumentError, "groups"),
        (dict(groups=2, format="fp8"), ArgumentError, "one scale a row"),
        (dict(scale="column", format="fp8"), ArgumentError, "got 'column'"),
        (dict(scale="head"), ArgumentError, "only 'fp8'"),
        (dict(scale=[1.0], format="fp8"), ShapeError, r"shape \(3,\), got \(1,\)"),
        (dict(scale=[1.0, 0.0, 1.0], format="fp8"), ArgumentError, "positive finite"),
        (dict(scale=[1.0, 1e9, 1.0], format="fp8", scale_dtype="float16"), ArgumentError, "positive finite"),
        (dict(scale=["a", "b", "c"], format="fp8"), DTypeError, "scale"),
        (dict(asymmetric=True), ArgumentError, "asymmetric"),
        (dict(asymmetric=1, format="fp8"), ArgumentError, "got int"),
        (dict(asymmetric=True, format="seed_fp8", scale_dtype=jnp.float32), ArgumentError, "no shift beside float32"),
        (dict(scale_dtype=jnp.float32), DTypeError, "scales of float16"),
        (dict(scale_dtype=jnp.bfloat16, format="int8"), DTypeError, "float16 or float32, got bfloat16"),
        (dict(scale_dtype="no", format="int8"), DTypeError, "got 'no'"),
    ]:
        with pytest.raises(error, match=text):
            quantize(**(dict(x=x, format="int4") | bad))


def test_differentiating_a_quantiser_raises():
    x = jnp.asarray(numbers(0, 1, 2, 1, 8))
    with pytest.raises(GradientError, match="stop_gradient"):
        jax.grad(lambda x: quantize(x, "int8").dequantize().sum())(x)
    through = jax.grad(lambda x: (x * quantize(jax.lax.stop_gradient(x), "int8").dequantize()).sum())(x)
    np.testing.assert_allclose(through, x, atol=0.02)


def test_constructor_errors():
    i32, f16, f32 = (partial(np.zeros, dtype=d) for d in (np.int32, np.float16, np.float32))
    e4m3, i8 = partial(np.zeros, dtype=F8), partial(np.zeros, dtype=np.int8)
    for make, error, text in [
        (lambda: SeedInt4(f32((1, 1, 1, 3))), DTypeError, "words: expected dtype int32, got float32"),
        (lambda: SeedInt4([1, 2]), DTypeError, "got list"),
        (lambda: SeedInt4(i32((1, 1, 3))), ShapeError, "words"),
        (lambda: SeedInt4(i32((1, 1, 1, 1))), ShapeError, "rows of 1 words"),
        (lambda: SeedInt4(i32((1, 1, 1, 3)), 3), ArgumentError, "num_groups"),
        (lambda: jax.jit(lambda n: SeedInt4(i32((1, 1, 1, 3)), n))(1), StaticArgumentError, "num_groups"),
        (lambda: SeedFp8(i32((1, 2, 3, 4)), i32((1, 3, 2))), ShapeError, r"shape \(1, 2, 3\), got \(1, 3, 2\)"),
        (lambda: SeedFp8(i32((1, 2, 3, 4)), f32((1, 2, 3))), DTypeError, "expected dtype int32, got float32"),
        (lambda: SeedFp8(i32((1, 2, 3, 4)), f16((1, 2, 3)), True), DTypeError, "int32 or float32"),
        (lambda: SeedFp8(i32((1, 2, 3, 4)), i32((1, 2, 3)), 1), ArgumentError, "fp32_scales"),
        (lambda: Fp8(i8((1, 2, 3, 4)), f32((1, 3, 2))), DTypeError, "float8_e4m3fn, got int8"),
        (lambda: Fp8(e4m3((1, 2, 3, 4)), f32((1, 2, 3))), ShapeError, r"\(1, 3, 2\) \(one a row\) or \(3,\)"),
        (lambda: Fp8(e4m3((1, 2, 3, 4)), f32(3), f16(3)), ShapeError, "shift"),
        (lambda: Fp8(e4m3((1, 2, 3, 4)), f32(3), f32((1, 3, 2))), DTypeError, "shift"),
        (lambda: Int8(i8((1, 2, 3, 4)), f32(3)), ShapeError, "scale"),
        (lambda: Int8(i8((1, 2, 3, 4)), f32((1, 3, 2)).astype(np.float64)), DTypeError, "got float64"),
        (lambda: Int4(i32((1, 2, 3, 2)), f32((1, 3, 2)), f16((1, 3, 2))), DTypeError, "scale"),
        (lambda: Int4(i32((1, 2, 3, 2)), f16((1, 3, 3, 2)), f16((1, 3, 3, 2))), ShapeError, "4 a row"),
        (lambda: Int4(i32((1, 2, 3, 2)), f16((1, 3, 2, 2)), f16((1, 3, 2))), ShapeError, "as scale"),
        (lambda: KVCache(i32((1, 2, 3, 4)), f32((1, 2, 3, 4))), DTypeError, "k: "),
        (lambda: KVCache(f32((1, 2, 3, 4)), f32((1, 2, 3))), ShapeError, "v: "),
        (lambda: KVCache(f32((1, 2, 3, 4)), f32((1, 2, 4, 4))), ShapeError, "equal shapes up to D"),
    ]:
        with pytest.raises(error, match=text):
            make()
