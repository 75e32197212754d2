"""Gradients of `bridge.fmha`: by autograd, by the explicit backward, and through merged partials."""

import numpy as np
import pytest
import torch

import acceptance
import bridge
import cases
from bridge import fmha
from bridge.fmha import attn_bias as ab
from checks import close

tri = fmha.triton_splitk
BACKWARD = {torch.float32: (9e-4, 1e-4), torch.half: (0.2, 2e-2), torch.bfloat16: (0.9, 0.1)}


def inputs(lead, q_len, k_len, dim=16, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    b, *heads = lead
    shapes = [(b, m, *heads, dim) for m in (q_len, k_len, k_len, q_len)]
    *qkv, grad = (torch.from_numpy(rng.standard_normal(s)).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in qkv], grad


def definition(qkv, grad, visible=None):
    """out, dq, dk, dv in float64, [B, M, heads, D] flat."""
    flat = [cases.flat_heads(x.detach().double().numpy()) for x in (*qkv, grad)]
    scale = flat[0].shape[-1] ** -0.5
    rows = [acceptance.attend_gradients(*one, scale=scale, visible=visible) for one in zip(*flat)]
    return [np.stack(x) for x in zip(*rows)]


def check(results, qkv, grad, visible=None, tolerance=None):
    tolerance = tolerance or BACKWARD[qkv[0].dtype]
    for mine, want in zip(results, definition(qkv, grad, visible)[1:], strict=True):
        close(cases.flat_heads(mine.detach().double().numpy()), want, *tolerance)


class Recomputed(fmha.pallas.BwOp):
    """A backward operator of a user's."""

    NAME = "mine"
    calls = 0

    @classmethod
    def apply(cls, ctx, inp, grad):
        Recomputed.calls += 1
        return super().apply(ctx, inp, grad)


@pytest.mark.parametrize("lead", [(2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, None),
        (torch.half, (tri.FwOp, None)),
        (torch.bfloat16, (tri.FwOp_S2, fmha.pallas.BwOp)),
        (torch.half, (None, Recomputed)),
        (torch.half, (tri.FwOp_S2, Recomputed)),
    ],
)
def test_autograd(dtype, op, lead):
    qkv, grad = inputs(lead, 5, 9, dtype=dtype)
    calls = Recomputed.calls
    out = fmha.memory_efficient_attention(*qkv, op=op)
    check(torch.autograd.grad(out, qkv, grad), qkv, grad)
    assert Recomputed.calls - calls == (op is not None and op[1] is Recomputed)


def test_autograd_of_the_legacy_layout():
    qkv, grad = inputs((2,), 5, 9)
    for op in (None, (None, Recomputed)):
        out = fmha.memory_efficient_attention(*qkv, op=op)
        assert out.shape == (2, 5, 16)
        results = torch.autograd.grad(out, qkv, grad)
        flat = [x.unsqueeze(2) for x in (*qkv, grad)]
        check([x.unsqueeze(2) for x in results], flat[:3], flat[3])


def test_a_tensor_bias():
    qkv, grad = inputs((2, 3), 5, 9)
    bias = torch.randn(2, 3, 5, 9, requires_grad=True)
    results = [
        torch.autograd.grad(fmha.memory_efficient_attention(*qkv, bias, op=op), (*qkv, bias), grad)
        for op in (None, (None, Recomputed))
    ]
    for one, other in zip(*results):
        close(one.numpy(), other.numpy(), 1e-5, 1e-5)

    class NoBias(Recomputed):
        SUPPORTS_ATTN_BIAS_GRAD = False

    with pytest.raises(ValueError, match="tensor bias"):
        fmha.memory_efficient_attention(*qkv, bias, op=(None, NoBias))


@pytest.mark.parametrize("lead", [(2, 3), (2, 2, 3), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_explicit_backward(dtype, lead):
    qkv, grad = inputs(lead, 5, 9, dtype=dtype)
    op = None if dtype == torch.float32 else tri.FwOp
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(*qkv, op=op)
    assert not out.requires_grad and not lse.requires_grad
    padded = torch.nn.functional.pad(lse, [0, 3], value=torch.inf)
    for given in (lse, padded):
        results = fmha.memory_efficient_attention_backward(grad, out, given, *qkv)
        assert [x.shape for x in results] == [x.shape for x in qkv]
        flat = [x.unsqueeze(2) if len(lead) == 1 else x for x in (*results, *qkv, grad)]
        check(flat[:3], flat[3:6], flat[6])


def test_explicit_backward_with_a_mask():
    """Bottom-right causal with more queries than keys: the first rows see nothing and have no gradient."""
    qkv, grad = inputs((1, 3), 9, 5)
    mask = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([9], 5, [5], device="cpu")
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(*qkv, mask)
    assert (lse[..., :4] == -torch.inf).all()
    grad[:, :4] = torch.nan
    results = fmha.memory_efficient_attention_backward(torch.nan_to_num(grad), out, lse, *qkv, mask)
    check(results, qkv, torch.nan_to_num(grad), np.tri(9, 5, -4, dtype=bool))
    assert (results[0][:, :4] == 0).all()


def test_explicit_backward_gives_every_expanded_head_its_own():
    qkv, grad = inputs((2, 3), 5, 9)
    expanded = [qkv[0], *(x.detach()[:, :, :1].expand_as(x) for x in qkv[1:])]
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(*expanded)
    check(fmha.memory_efficient_attention_backward(grad, out, lse, *expanded), expanded, grad)


def test_the_backward_of_a_part_is_exact_given_merged_results():
    qkv, grad = inputs((2, 3), 5, 9)
    q, k, v = qkv
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v)
    parts = [fmha.memory_efficient_attention_backward(grad, out, lse, q, k[:, s], v[:, s]) for s in
             (slice(0, 4), slice(4, 9))]  # fmt: skip
    results = [parts[0][0] + parts[1][0], *(torch.cat([parts[0][n], parts[1][n]], 1) for n in (1, 2))]
    check(results, qkv, grad)


def test_backward_refuses():
    qkv, grad = inputs((2, 3), 5, 9)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(*qkv)
    backward = fmha.memory_efficient_attention_backward
    for name, arguments in (
        ("grad", (grad[:, :4], out, lse, *qkv)),
        ("output", (grad, out[..., :8], lse, *qkv)),
        ("lse", (grad, out, lse[:, :2], *qkv)),
        ("lse", (grad, out, lse[..., :3], *qkv)),
        ("lse", (grad, out, lse.unsqueeze(1), *qkv)),
        ("query, key, value", (grad, out, lse, qkv[0], qkv[1][0], qkv[2])),
    ):
        with pytest.raises(ValueError, match=name):
            backward(*arguments)
    words = torch.zeros(2, 9, 3, 3, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="low-bit"):
        backward(grad, out, lse, qkv[0], words, words)
    with pytest.raises(ValueError, match="backward operator class"):
        backward(grad, out, lse, *qkv, op=tri.FwOp)
    table = torch.zeros(1, 1, dtype=torch.int32)
    paged = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([5], [9], table, 9, device="cpu")
    one = [x[:1] for x in (grad, out, lse, *qkv)]
    with pytest.raises(NotImplementedError, match="paged"):
        backward(*one, paged)
    with pytest.raises(NotImplementedError, match="paged"):
        fmha.memory_efficient_attention(*one[3:], paged)


def test_forward_functions_have_no_gradient():
    qkv, _ = inputs((2, 3), 5, 9, dtype=torch.half)
    words = torch.zeros(2, 9, 3, 3, dtype=torch.int32)
    assert not fmha.memory_efficient_attention_forward(*qkv).requires_grad
    assert not any(x.requires_grad for x in fmha.memory_efficient_attention_partial(*qkv))
    assert not fmha._memory_efficient_attention_forward(fmha.Inputs(qkv[0], words, words), tri.FwOp).requires_grad
    with torch.no_grad():
        assert not fmha.memory_efficient_attention(*qkv).requires_grad


# Partials


@pytest.mark.parametrize("op", [None, tri.FwOp, (tri.FwOp_S2, None), (None, Recomputed)])
def test_partial_with_its_restricted_backward(op):
    qkv, grad = inputs((2, 3), 5, 9, dtype=torch.half)
    out, lse = fmha.memory_efficient_attention_partial(*qkv, op=op, _allow_backward=True)
    assert out.dtype == torch.float32 and out.requires_grad and not lse.requires_grad
    check(torch.autograd.grad(out, qkv, grad.float()), qkv, grad)
    grouped, _ = inputs((2, 2, 3), 5, 9, dtype=torch.half)
    with pytest.raises(ValueError, match="BMGHK"):
        fmha.memory_efficient_attention_partial(*grouped, op=op, _allow_backward=True)


@pytest.mark.parametrize("lead", [(2, 3), (2, 2, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "op"), [(torch.float32, None), (torch.half, tri.FwOp), (torch.half, (tri.FwOp_S2, None))]
)
def test_merged_partials(dtype, op, lead):
    qkv, grad = inputs(lead, 5, 9, dtype=dtype)
    q, k, v = qkv
    parts = [fmha.memory_efficient_attention_partial_autograd(q, k[:, s], v[:, s], op=op) for s in
             (slice(0, 2), slice(2, 7), slice(7, 9))]  # fmt: skip
    assert all(part.is_bmghk() == (len(lead) == 3) for part in parts)
    attn, lse, placeholder = parts[0]._tuple()
    assert attn.dtype == torch.float32 and lse.dtype == torch.float64 and placeholder.shape == attn.shape == q.shape
    out = fmha.merge_attentions_autograd(*parts)
    assert out.dtype == torch.float32
    close(out.detach().numpy(), fmha.memory_efficient_attention_partial(*qkv)[0].numpy(), 1e-5, 1e-5)
    check(torch.autograd.grad(out, qkv, grad.float()), qkv, grad)


def test_slices_of_partials():
    """`apply` moves out, LSE and placeholder alike; each partial may be used more than once."""
    qkv, grad = inputs((2, 3), 6, 9)
    q, k, v = qkv
    parts = [fmha.memory_efficient_attention_partial_autograd(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 9))]
    pieces = [
        fmha.merge_attentions_autograd(*(part.apply(lambda x, s=s: x[:, s]) for part in parts))
        for s in (slice(0, 4), slice(4, 6))
    ]
    assert [x.shape[1] for x in parts[0].apply(lambda x: x[:, :4])._tuple()] == [4, 3, 4]
    check(torch.autograd.grad(torch.cat(pieces, 1), qkv, grad), qkv, grad)
    grouped, _ = inputs((2, 2, 3), 6, 9)
    lse = fmha.memory_efficient_attention_partial_autograd(*grouped).apply(lambda x: x[:1, 2:])._lse
    assert lse.shape == (1, 2, 3, 4)


def test_one_partial_or_none():
    qkv, grad = inputs((2, 3), 5, 9)
    part = fmha.memory_efficient_attention_partial_autograd(*qkv)
    assert fmha.merge_attentions_autograd(part) is part._attn
    check(torch.autograd.grad(part._attn, qkv, grad), qkv, grad)
    with pytest.raises(ValueError, match="No partials to merge"):
        fmha.merge_attentions_autograd()
    with pytest.raises(NotImplementedError, match="pallasB"):
        fmha.memory_efficient_attention_partial_autograd(*qkv, op=(None, Recomputed))


def test_partials_without_a_gradient_may_be_paged():
    table = torch.zeros(1, 1, dtype=torch.int32)
    mask = ab.PagedBlockDiagonalPaddedKeysMask.from_seqlens([5], [9], table, 9, device="cpu")
    q, k, v = (x.detach() for x in inputs((1, 3), 5, 9)[0])
    part = fmha.memory_efficient_attention_partial_autograd(q, k, v, mask)
    close(part._attn.numpy(), bridge.memory_efficient_attention(q, k, v).numpy(), 1e-5, 1e-5)


def test_training_merge():
    """MSLK's acceptance row: bfloat16, two halves merged against the whole."""
    qkv, grad = inputs((1, 1), 50, 50, 128, torch.bfloat16)
    q, k, v = qkv
    whole = fmha.memory_efficient_attention(q, k, v)
    parts = [fmha.memory_efficient_attention_partial_autograd(q, k[:, s], v[:, s]) for s in
             (slice(0, 25), slice(25, 50))]  # fmt: skip
    merged = fmha.merge_attentions_autograd(*parts)
    close(merged.detach().float().numpy(), whole.detach().float().numpy(), 1e-3, 0.1)
    for one, other in zip(torch.autograd.grad(merged, qkv, grad.float()), torch.autograd.grad(whole, qkv, grad)):
        close(one.float().numpy(), other.float().numpy(), 0.9, 0.1)


def test_explicit_backward_in_inference_mode():
    qkv, grad = inputs((2, 3), 5, 9)
    plain = [x.detach() for x in qkv]
    with torch.inference_mode():
        given = [plain[0] * 1, *plain[1:]]
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(*given)
        results = fmha.memory_efficient_attention_backward(grad, out, lse, *given)
    check(results, qkv, grad)
