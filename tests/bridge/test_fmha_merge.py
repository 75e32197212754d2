"""`fmha.merge_attentions` in all its forms: against float64, errors, the operators in torch.library."""

import math

import numpy as np
import pytest
import torch

import bridge
import oracle
from bridge import fmha
from checks import close

tri = fmha.triton_splitk


def chunks(n, lead, dtype=torch.float32, lse_dtype=torch.float64, seed=0, m=3, k=24, empty=True):
    """n chunks [B, M, *heads, K] and LSEs [B, *heads, M]; some chunks see nothing in some rows, row 0 in none."""
    b, *heads = lead
    rng = np.random.default_rng(seed)
    attn = [torch.from_numpy(rng.standard_normal((b, m, *heads, k))).to(dtype) for _ in range(n)]
    lse = [torch.from_numpy(4 * rng.standard_normal((b, *heads, m))).to(lse_dtype) for _ in range(n)]
    if empty:
        for i, (a, x) in enumerate(zip(attn, lse)):
            x[..., 0] = -torch.inf
            a[:, 0] = 0
            x[..., 1 + i % (m - 1)] = -torch.inf if i else x[..., 1 + i % (m - 1)]
    return attn, lse


def numbers(tensors):
    return [x.detach().double().numpy() for x in tensors]


@pytest.mark.parametrize("lead", [(2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("form", ["lists", "stacked", "attn-stacked", "lse-stacked"])
def test_against_the_formula(form, lead):
    attn, lse = chunks(3, lead)
    a = torch.stack(attn) if form in ("stacked", "attn-stacked") else attn
    x = torch.stack(lse) if form in ("stacked", "lse-stacked") else lse
    out, merged = fmha.merge_attentions(a, x)
    want, want_lse = oracle.merge(numbers(attn), numbers(lse))
    close(out.numpy(), want, 1e-6, 1e-5)
    close(merged.numpy(), want_lse, 1e-9, 1e-9)
    assert (out[:, 0] == 0).all() and (merged[..., 0] == -torch.inf).all()
    alone, nothing = fmha.merge_attentions(a, x, write_lse=False)
    assert nothing is None and torch.equal(alone, out)


def test_weights_by_hand():
    attn = [torch.full((1, 1, 1, 2), 4.0), torch.full((1, 1, 1, 2), 8.0)]
    lse = [torch.zeros(1, 1, 1), torch.full((1, 1, 1), math.log(3))]
    out, merged = fmha.merge_attentions(attn, lse)
    close(out.numpy(), np.full((1, 1, 1, 2), 7.0), 1e-6, 0)
    close(merged.numpy(), np.full((1, 1, 1), math.log(4)), 1e-6, 0)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
def test_dtypes_follow_the_first_chunk(dtypes):
    (a, b), (x, y) = chunks(2, (1, 2))
    a, b = (t.to(getattr(torch, d)) for t, d in zip((a, b), dtypes))
    x, y = x.double(), y.float()
    out, lse = fmha.merge_attentions([a, b], [x, y])
    assert out.dtype == a.dtype and lse.dtype == torch.float64
    assert fmha.merge_attentions([a, b], [y, x])[1].dtype == torch.float32
    assert fmha.merge_attentions([a, b], [x, y], output_dtype=torch.half)[0].dtype == torch.half


def test_a_chunk_without_weight_may_hold_nan():
    attn, lse = chunks(2, (1, 2), empty=False)
    lse[1][..., 1] = -torch.inf
    attn[1][:, 1] = torch.nan
    out, _ = fmha.merge_attentions(attn, lse)
    assert torch.isfinite(out).all()
    close(out[:, 1].numpy(), attn[0][:, 1].numpy(), 1e-6, 1e-6)


ATTN, LSE = chunks(2, (2, 3, 4))


@pytest.mark.parametrize(
    "arguments",
    [
        (ATTN, LSE[:1]),
        (torch.stack(ATTN), torch.stack(LSE)[:1]),
        ([], []),
        (ATTN, [x[:, 0] for x in LSE]),
        ([x[:, :, 0] for x in ATTN], LSE),
        (torch.stack(ATTN)[..., 0], torch.stack(LSE)),
        (ATTN, [x[:1] for x in LSE]),
        (ATTN, [x[:, :2] for x in LSE]),
        (ATTN, [x[..., :2] for x in LSE]),
        (torch.stack(ATTN), torch.stack(LSE)[..., :2]),
        ([ATTN[0], ATTN[1][..., :8]], LSE),
        ([ATTN[0], ATTN[1][:, :2]], LSE),
        (ATTN, [LSE[0], LSE[1][..., :2]]),
    ],
)
def test_chunks_that_do_not_fit(arguments):
    with pytest.raises((ValueError, AssertionError), match=r"attn_split|lse_split"):
        fmha.merge_attentions(*arguments)


@pytest.mark.parametrize("which", ["attn", "lse"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("lead", [(2, 4), (2, 3, 4)], ids=str)
def test_gradients_raise(which, stacked, lead):
    attn, lse = chunks(2, lead)
    (attn if which == "attn" else lse)[1].requires_grad_()
    want = fmha.merge_attentions([x.detach() for x in attn], [x.detach() for x in lse])
    a, x = (torch.stack(attn), torch.stack(lse)) if stacked else (attn, lse)
    with pytest.raises(ValueError, match="write_lse"):
        fmha.merge_attentions(a, x, write_lse=False)
    out, merged = fmha.merge_attentions(a, x)
    assert torch.equal(out, want[0]) and torch.equal(merged, want[1])
    with pytest.raises(NotImplementedError, match="Backward pass is not implemented for merge_attentions"):
        (out.sum() + merged[..., 1:].sum()).backward()
    with torch.no_grad():
        out, nothing = fmha.merge_attentions(a, x, write_lse=False)
    assert nothing is None and not out.requires_grad


# The operators


def kernel_order(attn):
    return [x.permute(0, 2, 3, 1, 4) for x in attn]


@pytest.mark.parametrize("write_lse", [False, True])
def test_varargs(write_lse):
    attn, lse = chunks(3, (2, 3, 4), k=20)
    outs = tri.merge_attentions_varargs(kernel_order(attn), lse, write_lse, torch.half, 2, 3, 3, 4, 20)
    want = fmha.merge_attentions(attn, lse, output_dtype=torch.half)
    assert len(outs) == 1 + write_lse and all(map(torch.equal, outs, want))
    assert outs[0].shape == (2, 3, 3, 4, 20) and outs[0].dtype == torch.half
    with pytest.raises(ValueError, match="attn_split"):
        tri.merge_attentions_varargs(attn, lse, write_lse, None, 2, 3, 3, 4, 20)


def test_varargs_backward():
    """The formulas in float64, and the gradient that autograd takes of the library's merge."""
    attn, lse = chunks(3, (2, 3, 4), torch.float64, k=20)
    grad_attn, grad_lse = (torch.from_numpy(np.random.default_rng(n).standard_normal(x.shape)) for n, x in
                           enumerate((attn[0], lse[0])))  # fmt: skip
    out, merged = fmha.merge_attentions(attn, lse)
    d_attn, d_lse = tri.merge_attentions_varargs_backward(
        kernel_order(attn), lse, out, merged, grad_attn, grad_lse
    )
    leaves = [x.clone().requires_grad_() for x in (*attn, *lse)]
    result, total = bridge.merge_attentions(leaves[:3], leaves[3:])
    seen = torch.where(torch.isfinite(total), total, 0)
    want = torch.autograd.grad((result * grad_attn).sum() + (seen * grad_lse).sum(), leaves)
    for mine, other in zip((*(x.permute(0, 3, 1, 2, 4) for x in d_attn), *d_lse), want):
        close(mine.numpy(), other.numpy(), 1e-9, 1e-9)
    assert (d_attn[0][:, :, :, 0] == 0).all() and (d_lse[0][..., 0] == 0).all()


def test_varargs_backward_refuses_other_shapes():
    attn, lse = chunks(2, (2, 3, 4))
    out, merged = fmha.merge_attentions(attn, lse)
    with pytest.raises(ValueError, match="grad_lse"):
        tri.merge_attentions_varargs_backward(kernel_order(attn), lse, out, merged, out, merged[..., :1])


def test_operators_comply():
    attn, lse = chunks(2, (1, 2, 3), empty=False)
    split = kernel_order(attn)
    for dtype, write_lse in ((None, True), (torch.half, False)):
        torch.library.opcheck(tri.merge_attentions_varargs, (split, lse, write_lse, dtype, 1, 3, 2, 3, 24))
    out, merged = fmha.merge_attentions(attn, lse)
    torch.library.opcheck(tri.merge_attentions_varargs_backward, (split, lse, out, merged, out, merged))


@pytest.mark.parametrize("with_lse", [False, True])
def test_in_place(with_lse):
    attn, lse = chunks(3, (2, 3, 4))
    split = torch.stack([x.permute(0, 2, 3, 1, 4) for x in attn], 3)
    logs = torch.stack(lse, 3)
    out = torch.full((2, 3, 3, 4, 24), torch.nan, dtype=torch.half)
    merged = torch.full((2, 3, 4, 3), torch.nan) if with_lse else None
    assert tri.merge_attentions(out, merged, split, logs) is None
    want, want_lse = oracle.merge(numbers(attn), numbers(lse))
    close(out.numpy(), want, 4e-3, 4e-4)
    if merged is not None:
        close(merged.numpy(), want_lse, 1e-6, 1e-6)
    for name, arguments in (
        ("attn_split", (out, merged, split[..., :1], logs)),
        ("attn_split", (out, merged, split[:, :, :, 0], logs)),
        ("lse_split", (out, merged, split, logs[..., :1])),
        ("lse_split", (out, merged, split, logs[:, :, :, :2])),
        ("lse_out", (out, torch.zeros(2, 3, 4, 1), split, logs)),
    ):
        with pytest.raises(AssertionError, match=name):
            tri.merge_attentions(*arguments)
