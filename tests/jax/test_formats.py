"""Low-bit formats: bits against worked examples and numpy, conversions, gathers, quantisers, appends."""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import formats
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError, ShapeError, StaticArgumentError
from pallas_kernels.formats import Fp8, Int4, Int8, KVCache, SeedFp8, SeedInt4, from_seed, quantize, to_seed

F8 = ml_dtypes.float8_e4m3fn
HEADS = [(3,), (2, 3)]
GROUPED = [(1, (3,), jnp.bfloat16), (2, (2, 3), jnp.float16), (4, (3,), jnp.float32), (8, (2, 3), jnp.bfloat16)]

# ------------------------------------------------------------------------------- independent re-implementations


def half_bits(x):
    return np.float16(x).view(np.uint16)


def bits(x):
    """Raw bytes, so that NaN and the sign of zero count."""
    return np.ascontiguousarray(np.asarray(x)).tobytes()


def numpy_int4(words, groups):
    """Element by element, in numpy's half arithmetic: [..., D/8 + groups] int32 -> float16 [..., D]."""
    words = np.ascontiguousarray(words).view(np.uint32)
    d = (words.shape[-1] - groups) * 8
    out = np.zeros((*words.shape[:-1], d), np.float16)
    for e in range(d):
        coefficient = words[..., e * groups // d]
        scale = (coefficient & 0xFFFF).astype(np.uint16).view(np.float16)
        shift = (coefficient >> 16).astype(np.uint16).view(np.float16)
        nibble = (words[..., groups + e // 8] >> (4 * (e % 8))) & 0xF
        out[..., e] = nibble.astype(np.float16) * scale + shift
    return out


def numpy_fp8(words, coefficients, fp32_scales=False):
    values = np.ascontiguousarray(words).view(F8)
    if fp32_scales:
        return values.astype(np.float32) * np.ascontiguousarray(coefficients).view(np.float32)[..., None]
    pair = np.ascontiguousarray(coefficients)[..., None].view(np.float16)
    return values.astype(np.float16) * pair[..., :1] + pair[..., 1:]


def numpy_native(kv):
    """float32 numbers of one of our formats."""
    if isinstance(kv, Int4):
        words = np.asarray(kv.words).view(np.uint32)
        codes = np.stack([(words >> (4 * t)) & 15 for t in range(8)], -1).reshape(*words.shape[:-1], -1)
    else:
        codes = np.asarray(kv.values)
    scale, shift = np.asarray(kv.scale), getattr(kv, "shift", None)
    if isinstance(kv, Fp8) and kv.per_head:
        scale = np.broadcast_to(scale[None, ..., None], (kv.shape[0], *scale.shape, kv.shape[1]))
    out = np.zeros(kv.shape, np.float32)
    for m in range(kv.shape[1]):
        row = codes[:, m].astype(np.float32)
        s = scale[..., m].astype(np.float32)
        b = 0 if shift is None else np.asarray(shift)[..., m].astype(np.float32)
        per = row.shape[-1] // s.shape[-1] if s.ndim == row.ndim else None
        widen = partial(np.repeat, repeats=per, axis=-1) if per else lambda x: np.asarray(x)[..., None]
        out[:, m] = row * widen(s) + (b if shift is None else widen(b))
    return out


def same_half(actual, expected):
    """Equal as numbers, with NaN equal to NaN and -0 unlike 0."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])
    np.testing.assert_array_equal(np.signbit(actual[~nan]), np.signbit(expected[~nan]))


def random_words(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def random_halves(rng, *shape, low=-8, high=4):
    return (rng.standard_normal(shape) * np.exp2(rng.integers(low, high, shape))).astype(np.float16)


def pack(scale, shift):
    return np.ascontiguousarray(np.stack([scale, shift], -1)).view(np.int32)[..., 0]


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


KINDS = {
    "seed_int4": {},
    "seed_int4 groups": dict(groups=4),
    "seed_fp8": {},
    "seed_fp8 asymmetric": dict(asymmetric=True),
    "seed_fp8 fp32": dict(scale_dtype=jnp.float32),
    "fp8": {},
    "fp8 asymmetric": dict(asymmetric=True),
    "fp8 half": dict(scale_dtype=jnp.float16),
    "fp8 head": dict(scale="head"),
    "fp8 head asymmetric": dict(scale="head", asymmetric=True),
    "int8": {},
    "int8 half": dict(scale_dtype="float16"),
    "int4": {},
    "int4 groups": dict(groups=2),
}

LAYOUTS = ("seed_int4 groups", "seed_fp8 fp32", "fp8", "fp8 head asymmetric", "int4", "int4 groups")

# Compiled once a shape: eagerly every operation of every format would be compiled on its own.
QUANTIZE = jax.jit(quantize, static_argnums=1, static_argnames=("groups", "scale", "asymmetric", "scale_dtype"))
FROM_SEED, TO_SEED = jax.jit(from_seed), jax.jit(to_seed)
READ = jax.jit(lambda kv, dtype=jnp.float32: kv.dequantize(dtype), static_argnums=1)
READ_ALL = jax.jit(lambda kvs, dtype: [kv.dequantize(dtype) for kv in kvs], static_argnums=1)
GATHER_ALL = jax.jit(lambda kvs, rows, dtype: [kv.gather_rows(rows, dtype) for kv in kvs], static_argnums=2)


def at_once(f, formats, *args):
    """f(format, *args) of several formats in one compiled program."""
    return jax.jit(lambda kvs, args: [f(kv, *args) for kv in kvs])([kv for _, kv in formats], args)


@functools.cache
def every_format(heads=(3,), d=16, seed=0, labels=None):
    """(label, instance) of every kind of storage, with the numbers of one random array [2, 5, *heads, d].

    With two axes of heads, one kind for each way in which the axes of an array are laid out.
    """
    labels = labels or tuple(label for label in KINDS if len(heads) == 1 or label in LAYOUTS)
    fill = jax.jit(lambda x: [quantize(x, label.split()[0], **KINDS[label]) for label in labels])
    return list(zip(labels, fill(numbers(seed, 2, 5, *heads, d))))


# ------------------------------------------------------------------------------------------------- seed formats


def test_int4_worked_example_of_one_group():
    words = np.array([0xBC003000, 0x76543210, 0xFEDCBA98], np.uint32).view(np.int32)
    assert words.tolist() == [-1140838400, 1985229328, -19088744]
    kv = SeedInt4(words.reshape(1, 1, 1, 3))
    assert kv.shape == (1, 1, 1, 16) and kv.ndim == 4 and kv.head_dim == 16
    expected = (np.arange(16) * 0.125 - 1).astype(np.float32)
    np.testing.assert_array_equal(kv.dequantize().ravel(), expected)
    assert kv.dequantize(jnp.bfloat16).dtype == jnp.bfloat16


def test_int4_worked_example_of_two_groups():
    words = [0xBC003000, 0x40003800, 0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]
    kv = SeedInt4(np.array(words, np.uint32).view(np.int32).reshape(1, 1, 1, 6), 2)
    expected = np.concatenate([np.arange(16) * 0.125 - 1, np.arange(16) * 0.5 + 2])
    np.testing.assert_array_equal(READ(kv, jnp.float16).ravel(), expected.astype(np.float16))
    # The quantiser finds the same words, the second half of whose grid is exact too.
    found = QUANTIZE(expected.astype(np.float32).reshape(1, 1, 1, 32), "seed_int4", groups=2)
    np.testing.assert_array_equal(found.words, kv.words)


VALUES = [1, -1, 0.5, 448, 2, -0.25, 0, 3.5, 1.5, -448, 2**-6, 7, -2, 16, 2**-9, 0.875]


def test_fp8_worked_example():
    words = np.array([0x7E30B838, 0x4600A840, 0x4E08FE3C, 0x360158C0], np.uint32).view(np.int32).reshape(1, 1, 1, 4)
    kv = SeedFp8(words, np.full((1, 1, 1), -1140836352, np.int32))
    expected = [-0.5, -1.5, -0.75, 223, 0, -1.125, -1, 0.75, -0.25, -225, -0.9921875, 2.5, -2, 7]
    expected += [-0.9990234375, -0.5625]
    np.testing.assert_array_equal(kv.dequantize().ravel(), np.float32(expected))
    rows = jnp.array([0])
    np.testing.assert_array_equal(kv.gather_values(rows).ravel(), np.float32(VALUES))
    np.testing.assert_array_equal(kv.gather_scales(rows), [[0.5]])


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_fp32_scales_come_as_bits_or_floats(dtype):
    words = np.array([0x7E30B838, 0x4600A840, 0x4E08FE3C, 0x360158C0], np.uint32).view(np.int32).reshape(1, 1, 1, 4)
    scale = np.full((1, 1, 1), 0x3F000000, np.int32).view(dtype)
    kv = SeedFp8(words, scale, fp32_scales=True)
    np.testing.assert_array_equal(kv.dequantize().ravel(), np.float32(VALUES) / 2)
    np.testing.assert_array_equal(kv.gather_scales(jnp.array([0])), [[0.5]])


@pytest.mark.parametrize("jit", [False, True])
def test_int4_arithmetic_is_half_arithmetic_for_every_scale(jit):
    """All 2**16 scales with random shifts: also subnormal, infinite and NaN ones."""
    rng = np.random.default_rng(1)
    scale = np.arange(65536, dtype=np.uint16).view(np.float16)
    shift = rng.permutation(scale)
    shift[::2] = random_halves(rng, 32768, low=-24)
    words = np.concatenate([pack(scale, shift)[:, None], random_words(rng, 65536, 1)], -1).reshape(1, 65536, 1, 2)
    kv = SeedInt4(words)
    actual = READ(kv, jnp.float16) if jit else kv.dequantize(jnp.float16)
    with np.errstate(all="ignore"):
        same_half(actual, numpy_int4(words, 1))


@given(st.integers(0, 2**32 - 1), st.sampled_from(GROUPED))
def test_int4_matches_numpy(seed, case):
    groups, heads, dtype = case
    rng = np.random.default_rng(seed)
    coefficients = pack(*(random_halves(rng, 2, 3, *heads, groups, low=-20) for _ in range(2)))
    words = np.concatenate([coefficients, random_words(rng, 2, 3, *heads, 2)], -1)
    expected = numpy_int4(words, groups)
    actual = np.asarray(READ(SeedInt4(words, groups), dtype))
    assert actual.dtype == dtype
    same_half(actual.astype(np.float32), expected.astype(dtype).astype(np.float32))


def test_fp8_arithmetic_is_half_arithmetic_for_every_value():
    """All 256 values under 256 random coefficient pairs each, in one compiled program."""
    rng = np.random.default_rng(2)
    values = np.stack([rng.permutation(256) for _ in range(1024)]).astype(np.uint8)
    words = values.view(np.int32).reshape(1, 1024, 1, 64)
    scale, shift = random_halves(rng, 1024, low=-24, high=12), random_halves(rng, 1024, low=-24, high=12)
    scale[:4], shift[2:6] = [np.inf, np.nan, 0, -0.0], [-np.inf, np.nan, 0, -0.0]
    coefficients = pack(scale, shift).reshape(1, 1024, 1)
    with np.errstate(all="ignore"):
        expected = numpy_fp8(words, coefficients)
    same_half(READ(SeedFp8(words, coefficients), jnp.float16), expected)


@given(st.integers(0, 2**32 - 1))
def test_fp32_scales_match_numpy(seed):
    rng = np.random.default_rng(seed)
    words = random_words(rng, 2, 3, 3, 4)
    scale = rng.standard_normal((2, 3, 3)).astype(np.float32)
    kv = SeedFp8(words, scale, fp32_scales=True)
    same_half(READ(kv), numpy_fp8(words, scale, True))
    other = SeedFp8(words, scale.view(np.int32), fp32_scales=True)
    assert bits(READ(other, jnp.bfloat16)) == bits(READ(kv, jnp.bfloat16))


# ------------------------------------------------------------------------------------------ reading in general


@pytest.mark.parametrize("heads", HEADS)
def test_native_formats_match_numpy(heads):
    labels, kinds = zip(*every_format(heads))
    for label, kv, numbers in zip(labels, kinds, READ_ALL(kinds, jnp.float32)):
        if not label.startswith("seed"):
            np.testing.assert_array_equal(numbers, numpy_native(kv), err_msg=label)


@pytest.mark.parametrize("heads, dtype", [(HEADS[0], jnp.float32), (HEADS[1], jnp.bfloat16)])
def test_gather_rows_reads_what_dequantize_reads(heads, dtype):
    labels, kinds = zip(*every_format(heads))
    wholes = [np.asarray(x).reshape(10, int(np.prod(heads)), 16) for x in READ_ALL(kinds, dtype)]
    rows = np.array([[0, 9, 3], [7, 3, 5]], np.int32)
    for label, whole, taken in zip(labels, wholes, GATHER_ALL(kinds, rows, dtype)):
        assert taken.dtype == dtype and taken.shape == whole[rows].shape, label
        assert bits(taken) == bits(whole[rows]), label
    few = [i for i, label in enumerate(labels) if label in ("seed_fp8", "fp8 head asymmetric")]
    for index in (rows[0], rows[0, 0], rows[:, :0]):
        for i, taken in zip(few, GATHER_ALL([kinds[i] for i in few], index, dtype)):
            assert taken.shape == wholes[i][index].shape and bits(taken) == bits(wholes[i][index]), labels[i]


@pytest.mark.parametrize("heads", HEADS)
def test_gathered_values_and_scales_make_up_the_row(heads):
    kinds = [(label, kv) for label, kv in every_format(heads) if "fp8" in label and "asymmetric" not in label]
    rows = np.array([[8], [1]])
    read = lambda kv, rows: (kv.gather_values(rows), kv.gather_scales(rows), kv.gather_rows(rows))  # noqa: E731
    for (label, _), (values, scales, numbers) in zip(kinds, at_once(read, kinds, rows)):
        assert values.dtype == scales.dtype == jnp.float32
        assert scales.shape == values.shape[:-1] == (2, 1, int(np.prod(heads)))
        exact = np.asarray(values) * np.asarray(scales)[..., None]
        np.testing.assert_allclose(numbers, exact, rtol=1e-3, atol=1e-6, err_msg=label)


def test_rows_that_are_not_addressed_do_not_leak():
    """NaN in the codes and coefficients of every other row."""
    rows = np.array([[4, 5, 5], [5, 4, 4]], np.int32)

    def spoil(kv):
        leaves = {}
        for name, (array, axis) in kv.components().items():
            junk = np.full_like(array, -1 if np.issubdtype(array.dtype, np.integer) else np.nan)
            for r in (4, 5):
                np.moveaxis(junk, axis, 1)[r // 5, r % 5] = np.moveaxis(np.asarray(array), axis, 1)[r // 5, r % 5]
            leaves[name] = junk
        return jax.tree.unflatten(jax.tree.structure(kv), [leaves.get(n, getattr(kv, n)) for n in leaf_names(kv)])

    labels, kinds = zip(*every_format())
    spoiled = tuple(spoil(kv) for kv in kinds)
    clean, read = (GATHER_ALL(x, rows, jnp.float32) for x in (kinds, spoiled))
    for label, expected, actual, whole in zip(labels, clean, read, READ_ALL(spoiled, jnp.float32)):
        assert np.isnan(whole).any() and np.isfinite(expected).all(), label
        assert bits(actual) == bits(expected), label


def leaf_names(kv):
    return [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(kv)]


def test_indices_out_of_range_are_clamped():
    labels, kinds = zip(*every_format())
    rows = np.array([[-1, 10, 2**31 - 1], [0, 9, 9]], np.int32)
    for label, (wild, tame) in zip(labels, GATHER_ALL(kinds, rows, jnp.float32)):
        assert bits(wild) == bits(tame), label


def test_names_and_sizes():
    names = {label: (kv.name, kv.nbytes) for label, kv in every_format()}
    rows = 2 * 5 * 3
    assert names["seed_int4"] == ("seed_int4", rows * (4 + 8))
    assert names["seed_int4 groups"] == ("seed_int4g4", rows * (16 + 8))
    assert names["seed_fp8"] == ("seed_fp8", rows * (4 + 16))
    assert names["seed_fp8 fp32"] == ("seed_fp8_fp32", rows * (4 + 16))
    assert names["fp8 asymmetric"] == ("fp8", rows * (2 + 2 + 16))
    assert names["fp8 head"] == ("fp8", rows * 16 + 3 * 4)
    assert names["int8"] == ("int8", rows * (4 + 16))
    assert names["int4 groups"] == ("int4g2", rows * (2 * 4 + 8))
    assert "float8_e4m3fn[2, 5, 3, 16]" in repr(dict(every_format())["fp8"])


# --------------------------------------------------------------------------------------------------- pytrees


def test_any_leaves_pass_through():
    for _, kv in every_format():
        leaves, structure = jax.tree.flatten(kv)
        for junk in (None, object(), np.zeros(3)):
            rebuilt = jax.tree.unflatten(structure, [junk] * len(leaves))
            assert type(rebuilt) is type(kv)
            assert all(getattr(rebuilt, name) is junk for name in leaf_names(kv))


def test_vmap_and_scan_over_layers():
    kinds = every_format()[::3]

    def run(kv):
        layers = jax.tree.map(lambda x: jnp.stack([x, x]), kv)
        mapped, again = jax.vmap(lambda kv: (kv.dequantize(), kv))(layers)
        _, scanned = jax.lax.scan(lambda c, kv: (c, kv.gather_rows(jnp.array([3]))), 0, layers)
        return kv.dequantize(), mapped[1], kv.gather_rows(jnp.array([3])), scanned[1], again

    for (label, kv), (whole, mapped, row, scanned, again) in zip(kinds, at_once(run, kinds)):
        assert bits(mapped) == bits(whole) and bits(scanned) == bits(row), label
        assert type(again) is type(kv), label
        assert all(x.shape == (2, *y.shape) for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(kv))), label


def test_quantize_under_vmap():
    x = numbers(0, 2, 1, 4, 2, 8)
    stacked = jax.vmap(lambda x: QUANTIZE(x, "int4"))(x)
    assert bits(stacked.words[1]) == bits(QUANTIZE(x[1], "int4").words)


def test_static_fields_are_part_of_the_structure():
    words = np.zeros((1, 1, 1, 6), np.int32)
    assert jax.tree.structure(SeedInt4(words, 2)) != jax.tree.structure(SeedInt4(words, 4))


# ----------------------------------------------------------------------------------------------- conversions


@given(st.integers(0, 2**32 - 1), st.sampled_from(GROUPED))
def test_int4_round_trip_keeps_every_bit(seed, case):
    """Arbitrary words: NaN payloads and infinities among the coefficients too."""
    groups, heads, _ = case
    kv = SeedInt4(random_words(np.random.default_rng(seed), 2, 3, *heads, groups + 2), groups)
    native = FROM_SEED(kv)
    assert native.num_groups == groups and native.shape == kv.shape
    back = TO_SEED(native)
    assert back.num_groups == groups and bits(back.words) == bits(kv.words)
    again = FROM_SEED(back)
    assert all(bits(a) == bits(b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(native)))


@given(st.integers(0, 2**32 - 1), st.sampled_from([(False, (3,)), (True, (2, 3))]))
def test_fp8_round_trip_keeps_every_bit(seed, case):
    fp32_scales, heads = case
    rng = np.random.default_rng(seed)
    kv = SeedFp8(random_words(rng, 2, 3, *heads, 4), random_words(rng, 2, 3, *heads), fp32_scales)
    native = FROM_SEED(kv)
    assert (native.shift is None) == fp32_scales
    back = TO_SEED(native)
    assert back.fp32_scales == fp32_scales
    assert bits(back.words) == bits(kv.words) and bits(back.coefficients) == bits(kv.coefficients)


def test_all_halves_survive_conversion():
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    kv = SeedFp8(np.zeros((1, 65536, 1, 1), np.int32), pack(every, every[::-1]).reshape(1, 65536, 1))
    native = from_seed(kv)
    assert bits(native.scale) == bits(every) and bits(native.shift) == bits(every[::-1])
    assert bits(to_seed(native).coefficients) == bits(kv.coefficients)


def test_conversion_lays_out_values_and_coefficients():
    words = np.array([0xBC003000, 0x40003800, 1, 2, 3, 4], np.uint32).view(np.int32)
    native = from_seed(SeedInt4(np.tile(words, (1, 3, 2, 1)), 2))
    assert native.scale.shape == (1, 2, 2, 3) and native.words.shape == (1, 3, 2, 4)
    np.testing.assert_array_equal(native.scale[0, 0, :, 1], np.float16([0.125, 0.5]))
    np.testing.assert_array_equal(native.shift[0, 1, :, 2], np.float16([-1, 2]))
    float_scales = SeedFp8(np.zeros((1, 2, 1, 1), np.int32), np.float32([[[1], [2]]]), True)
    np.testing.assert_array_equal(from_seed(float_scales).scale, np.float32([[[1, 2]]]))
    assert to_seed(from_seed(float_scales)).coefficients.dtype == jnp.int32


@pytest.mark.parametrize("heads", HEADS)
def test_to_seed_of_each_fp8_form(heads):
    kinds = [(label, kv) for label, kv in every_format(heads) if isinstance(kv, Fp8)]
    both = at_once(lambda kv: (to_seed(kv), to_seed(kv).dequantize(), kv.dequantize()), kinds)
    for (label, kv), (seed, numbers, expected) in zip(kinds, both):
        assert seed.fp32_scales == (kv.scale.dtype == jnp.float32)
        np.testing.assert_allclose(numbers, expected, rtol=0, atol=0 if seed.fp32_scales else 2e-3, err_msg=label)


def test_conversions_without_a_seed_form_raise():
    values, scale = np.zeros((1, 2, 1, 6), F8), np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ArgumentError, match="Int8"):
        to_seed(Int8(values.astype(np.int8), scale))
    with pytest.raises(ArgumentError, match="float32 scale with a shift"):
        to_seed(Fp8(values[..., :4], scale, scale.astype(np.float16)))
    with pytest.raises(ArgumentError, match="multiple of 4, got 6"):
        to_seed(Fp8(values, scale))
    with pytest.raises(ArgumentError, match="SeedInt4"):
        to_seed(SeedInt4(np.zeros((1, 1, 1, 2), np.int32)))
    with pytest.raises(ArgumentError, match="got Fp8"):
        from_seed(Fp8(values, scale))


# ------------------------------------------------------------------------------------------------ quantisers


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


# ---------------------------------------------------------------------------------------------------- append


@functools.cache
def caches(heads=(3,)):
    """(label, cache): whatever a format stores at least once, as K or as V of another head size, and plain arrays."""
    k_labels = ("seed_int4 groups", "seed_fp8 fp32", "fp8", "int4 groups")
    v_labels = ("seed_fp8", "int8 half", "int4", "fp8 head asymmetric")
    ks, vs = dict(every_format(heads)), every_format(heads, 24, 1, v_labels)
    pairs = [(f"{k}, {label}", KVCache(ks[k], v)) for k, (label, v) in zip(k_labels, vs)]
    arrays = [jnp.asarray(numbers(0, 2, 5, *heads, d)).astype(t) for d, t in ((16, "bfloat16"), (24, "float16"))]
    return [*pairs, ("plain", KVCache(*arrays))]


def new_tokens(heads, *lead):
    return jnp.asarray(numbers(7, *lead, *heads, 16)), jnp.asarray(numbers(8, *lead, *heads, 24))


@jax.jit
def append_all(caches, keys, values, where):
    """(cache after appending, the encoded keys and values) of several caches."""
    return [
        (c.append(keys, values, **where), formats.encode_rows(c.k, keys), formats.encode_rows(c.v, values))
        for c in caches
    ]


def flat(array, row_axis):
    """A stored array as [A * M, ...]."""
    rows = array.shape[0] * array.shape[row_axis]
    return np.moveaxis(np.asarray(array), row_axis, 1).reshape(rows, array.size // rows)


def check_append(before, after, written, label):
    """Rows in `written` hold exactly what encoding the new rows on their own gives; all others keep their bits."""
    after, *encoded = after
    for old, part, new in zip((before.k, before.v), (after.k, after.v), encoded):
        assert jax.tree.structure(old) == jax.tree.structure(part)
        stored = formats.components(part)
        assert set(stored) == set(new)
        for name, component in formats.components(old).items():
            expected = flat(*component).copy()
            for r, row in zip(written, np.asarray(new[name]).reshape(len(written), -1)):
                if r is not None:
                    expected[r] = row
            assert bits(flat(*stored[name])) == bits(expected), (label, name)


def check_all(heads, new, where, written):
    kinds = caches(heads)
    for (label, cache), after in zip(kinds, append_all([c for _, c in kinds], *new, where)):
        check_append(cache, after, written, label)


@pytest.mark.parametrize("heads", HEADS)
def test_append_by_positions(heads):
    where = jnp.array([[0, 4, 1], [3, 1, 0]])
    check_all(heads, new_tokens(heads, 2, 3), dict(positions=where), [0, 4, 1, 8, 6, 5])


def test_positions_beyond_a_sequence_never_reach_the_next_one():
    where = jnp.array([[5, -1, 2], [-5, 2**31 - 1, 1]])
    check_all((3,), new_tokens((3,), 2, 3), dict(positions=where), [None, None, 2, None, None, 6])


def test_append_by_slots_skips_and_drops():
    where = jnp.array([9, -1, 0, 10, -7, 2**31 - 1])
    check_all((3,), new_tokens((3,), 6), dict(slot_mapping=where), [9, None, 0, None, None, None])


def test_slots_with_a_batch_axis_and_host_known_indices():
    _, cache = caches()[-1]
    keys, values = new_tokens((3,), 3)
    expected = append_all([cache], keys, values, dict(slot_mapping=jnp.array([7, -1, 2])))[0][0]
    for where in ([7, -1, 2], np.array([7, -1, 2], np.int64), (7, -1, 2)):
        after = cache.append(keys[None], values[None], slot_mapping=where)
        assert all(bits(a) == bits(b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected)))
    for where in ([[0, 4], [3, 1]], np.array([[0, 4], [3, 1]], np.uint8)):
        assert formats.target_rows(cache.k.shape, positions=where).tolist() == [[0, 4], [8, 6]]
    assert bits(cache.append(keys[:0], values[:0], slot_mapping=[]).k) == bits(cache.k)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_small_and_unsigned_indices(dtype):
    shape = (2, 500, 3, 16)  # more rows than the small types can count
    assert formats.target_rows(shape, slot_mapping=jnp.array([3, 100], dtype)).tolist() == [3, 100]
    assert formats.target_rows(shape, positions=jnp.array([[3], [100]], dtype)).tolist() == [[3], [600]]


def test_append_equals_quantize():
    """A cache filled by appending holds the bits that quantising the whole gives, where scales are per row."""
    labels = ("seed_int4 groups", "seed_fp8", "seed_fp8 fp32", "fp8 asymmetric", "int8 half", "int4 groups")
    kinds = {label: KINDS[label] for label in labels}
    x = numbers(3, 2, 5, 3, 16)

    @jax.jit
    def both(x):
        out = []
        for label, options in kinds.items():
            part = quantize(jnp.zeros_like(x), label.split()[0], **options)
            rows = x.reshape(10, 3, 16)
            cache = KVCache(part, part).append(rows, rows, slot_mapping=np.arange(10))
            out.append((cache.k, cache.v, quantize(x, label.split()[0], **options)))
        return out

    for label, (k, v, whole) in zip(kinds, both(x)):
        for a, b, c in zip(*map(jax.tree.leaves, (k, v, whole))):
            assert bits(a) == bits(b) == bits(c), label


def test_scale_per_head_is_kept_and_clips():
    part = quantize(np.zeros((1, 4, 2, 8), np.float32), "fp8", scale=[1.0, 0.5])
    new = jnp.full((1, 1, 2, 8), 1000.0)
    after = jax.jit(lambda cache: cache.append(new, -new, positions=[[2]]))(KVCache(part, part))
    np.testing.assert_array_equal(after.k.scale, [1.0, 0.5])
    np.testing.assert_array_equal(after.k.dequantize()[0, 2, :, 0], [448.0, 224.0])
    np.testing.assert_array_equal(after.v.dequantize()[0, 2, :, 0], [-448.0, -224.0])


def test_append_errors_come_before_writing():
    _, cache = caches()[0]
    keys, values = new_tokens((3,), 2, 1)
    slot_keys, slot_values = keys[:, 0], values[:, 0]
    for args, kwargs, error, text in [
        ((keys, values), {}, ArgumentError, "exactly one of the two, got none"),
        ((keys, values), dict(positions=[[0], [0]], slot_mapping=[0, 1]), ArgumentError, "got both"),
        ((keys, values), dict(positions=[[0], [5]]), ArgumentError, "positions: expected 0 <= index < 5, got 5"),
        ((keys, values), dict(positions=[[0], [-1]]), ArgumentError, "got -1"),
        (
            (slot_keys, slot_values),
            dict(slot_mapping=[0, 10]),
            ArgumentError,
            r"-1 \(skip\) or 0 <= index < 10, got 10",
        ),
        ((slot_keys, slot_values), dict(slot_mapping=np.array([0, -2])), ArgumentError, "got -2"),
        ((keys, values), dict(positions=[0, 1]), ShapeError, "positions: expected 2 axis"),
        ((keys, values), dict(positions=[[0]]), ShapeError, r"expected \[2, T\]"),
        ((keys, values), dict(positions=[[0.0], [1.0]]), DTypeError, "got float64"),
        ((keys, values), dict(positions=3), ShapeError, "positions"),
        ((keys, values), dict(positions=[[True], [False]]), DTypeError, "got bool"),
        ((keys, values), dict(positions="01"), DTypeError, "got str"),
        ((keys, values), dict(slot_mapping=[0, 1]), ShapeError, "new_keys: expected shape"),
        ((keys, values), dict(positions=[[0, 1], [0, 1]]), ShapeError, "new_keys"),
        ((keys, values[..., :8]), dict(positions=[[0], [0]]), ShapeError, "new_values"),
        ((keys.astype(jnp.int32), values), dict(positions=[[0], [0]]), DTypeError, "new_keys"),
    ]:
        with pytest.raises(error, match=text):
            cache.append(*args, **kwargs)
    with pytest.raises(ShapeError, match="new_rows"):
        formats.encode_rows(cache.k, values)
    with pytest.raises(ShapeError, match="at most"):
        formats.target_rows((2**16, 2**16, 1, 8), slot_mapping=[0])


def test_gradients_of_append():
    keys, values = new_tokens((3,), 2)
    low_bit, plain = caches()[0][1], KVCache(jnp.zeros((2, 5, 3, 16)), jnp.zeros((2, 5, 3, 24)))
    with pytest.raises(GradientError):
        jax.grad(lambda k: low_bit.append(k, values, slot_mapping=[0, 1]).k.dequantize().sum())(keys)
    grad = jax.grad(lambda k: plain.append(k, values, slot_mapping=[0, -1]).k.sum())(keys)
    np.testing.assert_array_equal(grad, np.stack([np.ones((3, 16)), np.zeros((3, 16))]))


def test_append_under_vmap():
    keys, values = new_tokens((3,), 2, 2)  # two layers of two tokens
    kinds, where = caches()[2:], jnp.array([[3, -1], [0, 9]])
    layers = jax.tree.map(lambda x: np.stack([x, x]), [c for _, c in kinds])
    mapped = jax.jit(jax.vmap(append_all))(layers, keys, values, dict(slot_mapping=where))
    for (label, cache), after in zip(kinds, jax.tree.map(lambda x: np.asarray(x)[1], mapped)):
        check_append(cache, after, [0, 9], label)


def test_append_to_a_donated_cache_is_in_place():
    """Every array that changes is aliased to its input, and no temporary is as large as the smallest of them."""
    step = jax.jit(lambda cs, *new: [c.append(*new[:2], slot_mapping=new[2]) for c in cs], donate_argnums=0)
    # XLA's CPU backend widens an e4m3 array to write into it.
    skipped = "fp8" if jax.default_backend() == "cpu" else "none"
    x = jax.ShapeDtypeStruct((2, 4096, 3, 16), jnp.float32)
    kinds = [(label.split()[0], options) for label, options in KINDS.items() if not label.startswith(skipped)]
    stored = [jax.eval_shape(lambda x, n=name, o=options: quantize(x, n, **o), x) for name, options in kinds]
    donated = [KVCache(kv, kv) for kv in stored]
    new = [jax.ShapeDtypeStruct((4, 3, 16), jnp.bfloat16)] * 2
    memory = step.lower(donated, *new, jax.ShapeDtypeStruct((4,), jnp.int32)).compile().memory_analysis()
    written = [
        math.prod(x.shape) * x.dtype.itemsize
        for c in donated
        for part in (c.k, c.v)
        for x, _ in formats.components(part).values()
    ]
    assert memory.alias_size_in_bytes >= sum(written)
    assert memory.temp_size_in_bytes < min(written), memory.temp_size_in_bytes


def test_encoding_reads_only_the_scale_per_head():
    """A front end with arrays of its own describes them by shape and dtype, and writes what `encode_rows` gives."""
    kinds, new = caches(), new_tokens((3,), 6)
    described = [
        jax.tree.map(lambda x: x if x.shape == (3,) else jax.ShapeDtypeStruct(x.shape, x.dtype), c) for _, c in kinds
    ]
    encode = jax.jit(lambda k, v: [(formats.encode_rows(c.k, k), formats.encode_rows(c.v, v)) for c in described])
    expected = append_all([c for _, c in kinds], *new, dict(slot_mapping=jnp.zeros(6, jnp.int32)))
    for (_, k, v), encoded in zip(expected, encode(*new)):
        assert all(bits(a) == bits(b) for a, b in zip(jax.tree.leaves((k, v)), jax.tree.leaves(encoded)))
