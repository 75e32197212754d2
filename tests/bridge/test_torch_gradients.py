"""Gradients on the torch front end: against finite differences in float64, and what must raise."""

import numpy as np
import pytest
import torch

import bridge
import gradients
import torch_frontend as frontend
from bridge.fmha import attn_bias
from pallas_kernels.errors import GradientError


@pytest.mark.parametrize("name", gradients.GRADIENT_CASES)
def test_attention(name):
    gradients.check_attention(frontend, gradients.GRADIENT_CASES[name], "chunked")


def test_extreme_biases():
    gradients.check_large_common_score(frontend, "chunked")
    gradients.check_bias_row_of_minus_infinity(frontend, "reference")


@pytest.mark.parametrize("window", [(-1, 0), (2, 1)])
def test_varlen(window):
    gradients.check_varlen(frontend, window, sinks=window == (-1, 0))


@pytest.mark.parametrize("write_lse", [True, False])
def test_merge(write_lse):
    gradients.check_merge(frontend, write_lse)


def test_merged_partials():
    gradients.check_merged_partials(frontend)


def test_only_what_requires_grad_gets_one():
    q, k, v = (torch.randn(2, 3, 2, 16) for _ in range(3))
    k.requires_grad_()
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v)
    assert out.requires_grad and lse.requires_grad
    out.sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None
    with torch.no_grad():
        assert not bridge.memory_efficient_attention(q, k, v).requires_grad


def test_expanded_heads_sum_their_gradients():
    """A head expanded with stride 0 gets the sum over the query heads that read it."""
    q = torch.randn(2, 3, 4, 16, dtype=torch.float64)
    k, v = (torch.randn(2, 7, 1, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bridge.memory_efficient_attention(q, k.expand(2, 7, 4, 16), v.expand(2, 7, 4, 16)).square().sum().backward()
    full = [x.detach().repeat(1, 1, 4, 1).requires_grad_() for x in (k, v)]
    bridge.memory_efficient_attention(q, *full).square().sum().backward()
    for x, y in zip((k, v), full):
        torch.testing.assert_close(x.grad, y.grad.sum(2, keepdim=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("what", ["key and value", "bias"])
def test_expanded_elements_have_gradients_of_their_own(what, compiled):
    q, k, v = torch.randn(1, 2, 3, 8), *torch.randn(2, 1, 5, 1, 8).expand(2, 1, 5, 3, 8)
    bias = torch.randn(1, 1, 1, 5).expand(1, 3, 2, 5)
    given = [k, v] if what == "key and value" else [bias]
    attend = bridge.memory_efficient_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)

    def gradients(chosen):
        leaves = [x.detach().requires_grad_() for x in chosen]
        arguments = (*leaves, bias) if what == "key and value" else (k, v, *leaves)
        return torch.autograd.grad(attend(q, *arguments).square().sum(), leaves)

    for got, want in zip(gradients(given), gradients([x.clone(memory_format=torch.contiguous_format) for x in given])):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


def test_write_before_backward_raises():
    q = torch.randn(1, 3, 2, 16, requires_grad=True)
    k = torch.randn(1, 3, 2, 16)
    out = bridge.memory_efficient_attention(q, k, k)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_write_into_a_result_before_backward_raises(which):
    q, k = torch.randn(3, 1, 4, 16, requires_grad=True), torch.randn(3, 9, 1, 16)
    results = bridge.memory_efficient_attention_forward_requires_grad(q, k, k)
    results[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


def test_forward_mode_raises():
    q = torch.randn(1, 3, 2, 16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(GradientError, match="forward-mode"):
            bridge.memory_efficient_attention(dual, q, q)


def test_appending_has_no_gradient():
    cache = bridge.formats.KVCache(torch.zeros(1, 4, 2, 16), torch.zeros(1, 4, 2, 16))
    new = torch.randn(1, 1, 2, 16, requires_grad=True)
    with pytest.raises(GradientError, match="appending"):
        cache.append(new, new, positions=[[0]])


def test_second_derivative_raises():
    q = torch.randn(1, 3, 2, 16, requires_grad=True)
    (d,) = torch.autograd.grad(bridge.memory_efficient_attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        d.sum().backward()


def test_inference_only_arguments():
    q = torch.randn(4, 2, 16, requires_grad=True)
    cu, used = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="seqused_k"):
        bridge.varlen_attn(q, q, q, cu, cu, 4, 4, seqused_k=used)
    with torch.no_grad():
        assert torch.isfinite(bridge.varlen_attn(q, q, q, cu, cu, 4, 4, seqused_k=used)).all()
    pages, table = torch.randn(1, 8, 2, 16), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block_table"):
        bridge.varlen_attn(q, pages, pages, cu, None, 4, 8, seqused_k=used, block_table=table)


def test_paged_and_low_bit_keys_raise():
    q = torch.randn(1, 1, 2, 16, requires_grad=True)
    k = torch.randn(1, 8, 2, 16)
    mask = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], [5], torch.zeros(1, 1, dtype=torch.int32), 8)
    with pytest.raises(GradientError, match="paged"):
        bridge.memory_efficient_attention(q, k, k, mask)
    kv = bridge.formats.quantize(k, "int4")
    with pytest.raises(GradientError, match="low-bit"):
        bridge.memory_efficient_attention(q, kv, kv)
    with pytest.raises(GradientError):
        bridge.formats.quantize(k.clone().requires_grad_(), "int8")


def test_dtype_of_gradients():
    q, k, v = (torch.randn(1, 5, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bridge.memory_efficient_attention(q, k, v).float().sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and np.isfinite(frontend.numpy(x.grad)).all() for x in (q, k, v))
