"""Gradients on the JAX front end: against finite differences in float64, and what must raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradients
import jax_frontend as frontend
import pallas_kernels as pk
from pallas_kernels.errors import GradientError


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("name", gradients.GRADIENT_CASES)
def test_attention(name, backend):
    gradients.check_attention(frontend, gradients.GRADIENT_CASES[name], backend)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_extreme_biases(backend):
    gradients.check_large_common_score(frontend, backend)
    gradients.check_bias_row_of_minus_infinity(frontend, backend)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
def test_varlen(window):
    gradients.check_varlen(frontend, window, sinks=window == (-1, 0))


@pytest.mark.parametrize("write_lse", [True, False])
def test_merge(write_lse):
    gradients.check_merge(frontend, write_lse)


def test_merged_partials():
    gradients.check_merged_partials(frontend)


def test_merge_of_empty_chunks_has_finite_gradients():
    outs = jnp.array(np.random.default_rng(0).standard_normal((2, 1, 2, 1, 4)))
    lses = jnp.array([[[[-jnp.inf, -jnp.inf]]], [[[-jnp.inf, 0.3]]]])
    d = jax.grad(lambda o, x: pk.merge_attentions(o, x, write_lse=False)[0].sum(), (0, 1))(outs, lses)
    assert all(np.isfinite(g).all() for g in d)
    np.testing.assert_array_equal(d[0][1, 0, 1], 1)
    np.testing.assert_array_equal(d[0][:, 0, 0], 0)


def test_garbage_has_no_gradient():
    """Keys beyond a length are NaN; the gradient of everything else is finite and theirs is zero."""
    rng = np.random.default_rng(3)
    q, k, v = (jnp.array(rng.standard_normal((1, n, 2, 16))) for n in (4, 16, 16))
    k, v = (x.at[:, 5:8].set(jnp.nan) for x in (k, v))
    mask = pk.masks.BlockDiagonalPaddedKeysMask.from_seqlens([2, 2], 8, [5, 8])
    for backend in ("chunked", "reference"):
        grads = jax.grad(
            lambda *x, backend=backend: pk.memory_efficient_attention(*x, mask, backend=backend).sum(), (0, 1, 2)
        )(q, k, v)
        assert all(np.isfinite(g).all() for g in grads)
        assert all(not np.asarray(g)[:, 5:8].any() for g in grads[1:])


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_query_rows_of_no_sequence_have_none(backend):
    rng = np.random.default_rng(4)
    q, k, v = (jnp.array(rng.standard_normal((n, 2, 16))) for n in (5, 4, 4))
    cu_q, cu_k = jnp.array([0, 2, 3], jnp.int32), jnp.array([0, 2, 4], jnp.int32)

    def loss(q, k, v):
        return (pk.varlen_attn(q, k, v, cu_q, cu_k, 2, 2, softcap=1.5, backend=backend)[:3] ** 2).sum()

    want = jax.grad(loss, (0, 1, 2))(q, k, v)
    got = jax.grad(loss, (0, 1, 2))(q.at[3:].set(jnp.nan), k, v)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(got[0])[3:].any() and np.asarray(got[0])[:3].any()


def test_empty_problems_have_zero_gradients():
    for queries, keys in ((0, 5), (3, 0)):
        q, k, v = (jnp.ones((2, n, 2, 16)) for n in (queries, keys, keys))
        grads = jax.grad(lambda *x: pk.memory_efficient_attention(*x).sum(), (0, 1, 2))(q, k, v)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        assert not any(np.asarray(g).any() for g in grads)


def paged_call(q, k, v):
    mask = pk.masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], [3, 8], [[0], [1]], 8)
    return pk.memory_efficient_attention(q, k, v, mask).sum()


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_paged_keys_have_no_gradient(argument):
    q, k = jnp.ones((1, 2, 2, 16)), jnp.ones((1, 16, 2, 16))
    with pytest.raises(GradientError, match="paged"):
        jax.grad(paged_call, argument)(q, k, k)
    with pytest.raises(NotImplementedError):
        jax.grad(jax.jit(paged_call), argument)(q, k, k)


@pytest.mark.parametrize("given", ["seqused_k", "block_table"])
def test_varlen_inference_only_arguments(given):
    used = jnp.array([2], jnp.int32)
    cu = jnp.array([0, 4], jnp.int32)
    q = jnp.ones((4, 2, 16))
    k, table = (q, None) if given == "seqused_k" else (jnp.ones((1, 8, 2, 16)), jnp.zeros((1, 1), jnp.int32))

    def call(q):
        return pk.varlen_attn(q, k, k, cu, cu, 4, 8, seqused_k=used, block_table=table).sum()

    assert np.isfinite(call(q))
    with pytest.raises(RuntimeError, match=given):
        jax.grad(call)(q)


def test_low_bit_keys_have_no_gradient():
    q = jnp.array(np.random.default_rng(0).standard_normal((1, 1, 2, 16)), jnp.float32)
    kv = pk.formats.quantize(jnp.ones((1, 4, 2, 16), jnp.float32), "int8")
    with pytest.raises(GradientError, match="low-bit"):
        jax.grad(lambda q: pk.memory_efficient_attention(q, kv, kv).sum())(q)
    with pytest.raises(GradientError):
        jax.grad(lambda s: pk.memory_efficient_attention(q, pk.formats.Int8(kv.values, s), kv).sum())(kv.scale)


def test_fp8_query_has_no_gradient():
    q = pk.formats.quantize(jnp.ones((1, 1, 2, 16), jnp.float32), "fp8")
    kv = pk.formats.quantize(jnp.ones((1, 4, 2, 16), jnp.float32), "fp8")

    def call(scale):
        query = pk.formats.Fp8(q.values, scale)
        return pk.memory_efficient_attention(query, kv, kv, output_dtype=jnp.float32).sum()

    with pytest.raises(GradientError):
        jax.grad(call)(q.scale)


def test_forward_mode_raises():
    q = jnp.ones((1, 2, 2, 16))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda q: pk.memory_efficient_attention(q, q, q), (q,), (q,))
