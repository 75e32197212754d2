"""Bad calls on the JAX front end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bad_input
import jax_frontend as frontend
import pallas_kernels as pk


@pytest.mark.parametrize("name,call,kind,text", bad_input.BAD_CALLS, ids=bad_input.IDS)
def test_raises(name, call, kind, text):
    bad_input.check(frontend, call, kind, text)


@pytest.mark.parametrize("option", ["scale", "softcap", "num_splits", "split_size", "p"])
def test_traced_options_raise(option):
    q = jnp.ones((1, 2, 2, 16))
    with pytest.raises(TypeError, match=option):
        jax.jit(lambda x: pk.memory_efficient_attention(q, q, q, **{option: x}))(1.0 if option != "num_splits" else 1)


def test_traced_capacities_raise():
    q, cu = jnp.ones((4, 2, 16)), jnp.array([0, 4])
    with pytest.raises(TypeError, match="max_q"):
        jax.jit(lambda n: pk.varlen_attn(q, q, q, cu, cu, n, 4))(4)
    with pytest.raises(TypeError, match="padding"):
        jax.jit(lambda n: pk.masks.BlockDiagonalPaddedKeysMask.from_seqlens([1], n, [1]))(4)
    with pytest.raises(TypeError, match="page_size"):
        jax.jit(lambda n: pk.masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [1], [[0]], n))(4)


def test_numpy_float64_is_not_narrowed():
    q = np.ones((1, 2, 2, 16))
    with pytest.raises(TypeError, match="float64"):
        pk.memory_efficient_attention(q, q, q)


@pytest.mark.parametrize("backend", ["hopper", "interpret"])
def test_a_backend_that_cannot_serve_says_why(backend):
    q = jnp.ones((1, 2, 2, 16), jnp.float32)
    reasons = pk.not_supported_reasons(q, q, q, backend=backend)
    assert reasons
    with pytest.raises(NotImplementedError) as error:
        pk.memory_efficient_attention(q, q, q, backend=backend)
    assert all(reason in str(error.value) for reason in reasons)
    assert pk.not_supported_reasons(q, q, q, backend="chunked") == []


def test_reference_warns_above_its_size():
    q = jax.ShapeDtypeStruct((1, 40000, 1, 16), jnp.float32)
    with pytest.warns(pk.errors.ReferenceSizeWarning):
        jax.eval_shape(lambda q: pk.memory_efficient_attention(q, q, q, backend="reference"), q)


def test_a_float64_array_is_not_narrowed():
    with jax.enable_x64(True):
        q = jnp.ones((1, 2, 2, 16), jnp.float64)
    with pytest.raises(TypeError, match="narrowed"):
        pk.memory_efficient_attention(q, q, q)
    with pytest.raises(TypeError, match="narrowed"):
        pk.merge_attentions([q], [q[..., 0].swapaxes(1, 2)])


def test_mixed_array_and_format():
    q = jnp.ones((1, 2, 2, 16), jnp.float32)
    with pytest.raises(TypeError, match="both"):
        pk.memory_efficient_attention(q, pk.formats.quantize(q, "int8"), q)
