"""Low-bit formats: bits against worked examples and numpy, conversions, gathers."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from format_kinds import (
    FROM_SEED,
    GATHER_ALL,
    HEADS,
    QUANTIZE,
    READ,
    READ_ALL,
    TO_SEED,
    at_once,
    bits,
    every_format,
    numbers,
)
from pallas_kernels.errors import ArgumentError
from pallas_kernels.formats import Fp8, Int4, Int8, SeedFp8, SeedInt4, from_seed, to_seed

F8 = ml_dtypes.float8_e4m3fn
GROUPED = [(1, (3,), jnp.bfloat16), (2, (2, 3), jnp.float16), (4, (3,), jnp.float32), (8, (2, 3), jnp.bfloat16)]

# ------------------------------------------------------------------------------- independent re-implementations


def half_bits(x):
    return np.float16(x).view(np.uint16)


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
    for label, kv, read in zip(labels, kinds, READ_ALL(kinds, jnp.float32)):
        if not label.startswith("seed"):
            np.testing.assert_array_equal(read, numpy_native(kv), err_msg=label)


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
    for (label, _), (values, scales, whole) in zip(kinds, at_once(read, kinds, rows)):
        assert values.dtype == scales.dtype == jnp.float32
        assert scales.shape == values.shape[:-1] == (2, 1, int(np.prod(heads)))
        exact = np.asarray(values) * np.asarray(scales)[..., None]
        np.testing.assert_allclose(whole, exact, rtol=1e-3, atol=1e-6, err_msg=label)


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
    for (label, kv), (seed, read, expected) in zip(kinds, both):
        assert seed.fp32_scales == (kv.scale.dtype == jnp.float32)
        np.testing.assert_allclose(read, expected, rtol=0, atol=0 if seed.fp32_scales else 2e-3, err_msg=label)


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
