"""Appending rows to low-bit caches."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from format_kinds import HEADS, KINDS, bits, every_format, numbers
from pallas_kernels import formats
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError, ShapeError
from pallas_kernels.formats import KVCache, quantize


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
    for where in ([[0, 4], [3, 1]], np.array([[0, 4], [3, 1]], np.int32)):
        assert formats.target_rows(cache.k.shape, positions=where).tolist() == [[0, 4], [8, 6]]
    assert bits(cache.append(keys[:0], values[:0], slot_mapping=[]).k) == bits(cache.k)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
def test_small_and_unsigned_indices_are_refused(dtype):
    """Their range could not be checked where they are not host-known, nor can they count the rows of a cache."""
    shape = (2, 500, 3, 16)
    for array in (np.array, jnp.array):
        with pytest.raises(DTypeError, match=f"slot_mapping: .* int32 or int64, got {np.dtype(dtype)}"):
            formats.target_rows(shape, slot_mapping=array([3, 100], dtype))
        with pytest.raises(DTypeError, match=f"positions: .* int32 or int64, got {np.dtype(dtype)}"):
            formats.target_rows(shape, positions=array([[3], [100]], dtype))


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
