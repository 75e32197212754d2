"""The kernels in the interpreter from torch, whose LSE may be float64: x64 is on in the calling thread only."""

import jax
import jax.numpy as jnp
import pytest
import torch

import bridge
import pallas_kernels as pk
from bridge.fmha import attn_bias
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.kernels import _compat


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    _compat.reset_interpreter()


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"split_size": 20, "output_dtype": torch.float32}], ids=str)
def test_results_and_gradients(options):
    q, k, v = (draw(*s, 64).half().requires_grad_() for s in ((1, 3, 4), (1, 128, 2), (1, 128, 2)))
    mask = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 1], 64, [50, 7], device="cpu")
    found = []
    for backend in ("interpret", "reference"):
        out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v, mask, backend=backend, **options)
        gradients = torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))
        found.append((out, lse, *gradients))
    for a, b in zip(*found):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, atol=4e-3, rtol=4e-3)
    assert found[0][1].dtype == (torch.float64 if "output_dtype" in options else torch.float32)
    assert not jax.config.jax_enable_x64 and not _compat.process_x64()


def test_inside_jit_the_process_decides():
    q, k = jnp.ones((1, 1, 2, 64), jnp.float16), jnp.ones((1, 64, 2, 64), jnp.float16)
    call = jax.jit(lambda q, k: pk.memory_efficient_attention(q, k, k, backend="interpret"))
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="jax_enable_x64"):
        call(q, k)
