"""The torch.library ops: opcheck, fakes against real results, gradients, autocast, what sends a call to them."""

import math
import timeit

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bridge
from bridge import library
from bridge.fmha import attn_bias as biases
from pallas_kernels.errors import ArgumentError, DeviceError, DTypeError, GradientError, ShapeError, UnsupportedError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ops = library.ops
HALF = torch.bfloat16


def rand(*shape, device="cpu", dtype=torch.float32, grad=False):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


# What each op is called with: name -> (args, kwargs) on a device, differentiable where the op is.


def plain(device, grad=True):
    q = rand(2, 3, 4, 16, device=device, grad=grad)
    k, v = (rand(2, 7, 2, 16, device=device, grad=grad) for _ in range(2))
    return q, k, v


def packed_case(device, grad=True, pages=False, gappy=False):
    q = rand(1, 6, 4, 16, device=device, grad=grad)
    k, v = (rand(1, 24, 2, 16, device=device, grad=grad) for _ in range(2))
    tensors = dict(q_start=ints([0, 1, 4, 6], device), k_len=ints([5, 8, 0], device))
    if gappy:
        tensors["k_start"] = ints([1, 9, 3], device)
    options = dict(packed=True, slotted=not gappy, window_right=0)
    if pages:
        tensors["block_table"] = ints([[5, 1], [0, 3], [-1, 99]], device)
        options["page_size"] = 4
    return (q, k, v), tensors | options


def varlen_case(device, grad=True):
    cu = ints([0, 3, 3, 8], device)
    return (*(rand(8, 4, 16, device=device, grad=grad) for _ in range(3)), cu, cu, 5, 5)


def paged_varlen(device):
    pages = rand(6, 4, 2, 16, device=device)
    call = (rand(8, 4, 16, device=device), pages, pages, ints([0, 3, 3, 8], device), None, 5, 8)
    return (*call, ints([5, 0, 8], device), ints([[5, 1], [-1, 99], [0, 3]], device)), dict(enable_gqa=True)


def attention_backward(device):
    q, k, v = plain(device, grad=False)
    bias = rand(2, 4, 3, 7, device=device)
    sinks = rand(4, device=device)
    out, lse = ops.attention(q, k, v, bias, sinks)
    grads = torch.randn_like(out), torch.randn_like(lse)
    return (*grads, out, lse, [True, False, True, True, True], q, k, v, bias, sinks)


def varlen_backward(device):
    call = varlen_case(device, grad=False)
    out, lse = ops.varlen(*call)
    return (torch.randn_like(out), None, out, lse, [True, True, True, False], *call)


def partials(device, grad=True, stacked=False):
    attn, lse = rand(3, 2, 5, 4, 16, device=device), rand(3, 2, 4, 5, device=device)
    attn, lse = ([x] if stacked else list(x) for x in (attn, lse))
    return [x.clone().requires_grad_(grad) for x in attn], [x.clone().requires_grad_(grad) for x in lse]


def merge_backward(device):
    attn, lse = partials(device, grad=False)
    return rand(2, 5, 4, 16, device=device), rand(2, 4, 5, device=device), attn, lse


CALLS = {
    "attention": lambda d: (ops.attention, plain(d), {}),
    "attention, tensor bias and sinks": lambda d: (
        ops.attention, (*plain(d), rand(2, 1, 3, 7, device=d, grad=True), rand(4, device=d, grad=True)),
        dict(softcap=2.0, num_splits=2),
    ),
    "attention, lengths": lambda d: (ops.attention, (*plain(d), None, None, ints([7, 2], d)), {}),
    "attention, top-left window": lambda d: (
        ops.attention, plain(d), dict(window_left=1, window_right=0, top_left=True),
    ),
    "attention, partial": lambda d: (ops.attention, tuple(x.to(HALF) for x in plain(d, False)), dict(partial=True)),
    "attention, padded": lambda d: (ops.attention, *packed_case(d)),
    "attention, gappy": lambda d: (ops.attention, *packed_case(d, gappy=True)),
    "attention, paged": lambda d: (ops.attention, *packed_case(d, grad=False, pages=True)),
    "attention, paged gappy": lambda d: (
        ops.attention, packed_case(d, grad=False)[0],
        packed_case(d, pages=True)[1] | dict(k_start=ints([1, 0, 3], d), slotted=False),
    ),
    "attention, 5-D": lambda d: (
        ops.attention, (rand(1, 3, 2, 4, 16, device=d, grad=True), *(rand(1, 7, 2, 1, 16, device=d) for _ in "kv")), {},
    ),
    "attention_backward": lambda d: (ops.attention_backward, attention_backward(d), {}),
    "varlen": lambda d: (ops.varlen, varlen_case(d), dict(window_size=[-1, 0])),
    "varlen, paged": lambda d: (ops.varlen, *paged_varlen(d)),
    "varlen_out": lambda d: (
        ops.varlen_out, (rand(8, 4, 16, device=d), *varlen_case(d, False)), dict(window_size=[2, 0]),
    ),
    "varlen_backward": lambda d: (ops.varlen_backward, varlen_backward(d), {}),
    "merge": lambda d: (ops.merge, partials(d), {}),
    "merge, stacked, without lse": lambda d: (
        ops.merge, partials(d, stacked=True), dict(stacked_attn=True, stacked_lse=True, write_lse=False),
    ),
    "merge_backward": lambda d: (ops.merge_backward, merge_backward(d), {}),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, device):
    op, args, kwargs = CALLS[name](device)
    torch.library.opcheck(op.default, args, kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in CALLS if n.startswith(("attention", "varlen")) and "backward" not in n])
def test_opcheck_of_what_the_kernels_serve(name):
    op, args, kwargs = CALLS[name]("cuda")
    args = [x.detach().to(HALF) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    torch.library.opcheck(op.default, tuple(args), kwargs)


def layouts(results):
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in results]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_fake_looks_like_the_real_result(name, device):
    op, args, kwargs = CALLS[name](device)
    real = op(*args, **kwargs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = op(*args, **kwargs)
    flat = lambda x: torch.utils._pytree.tree_leaves(x, is_leaf=lambda leaf: leaf is None)  # noqa: E731
    assert layouts(flat(fake)) == layouts(flat(real))


def test_fake_of_public_functions():
    """Under a fake mode nothing runs, and bad arguments raise."""
    with FakeTensorMode():
        q = torch.empty(2, 3, 4, 16, dtype=HALF)
        out, lse = bridge.memory_efficient_attention_partial(q, q, q)
        assert (out.dtype, lse.dtype, lse.shape) == (torch.float32, torch.float64, (2, 4, 3))
        with pytest.raises(UnsupportedError, match="dropout"):
            bridge.memory_efficient_attention(q, q, q, p=0.5)
        cu = torch.empty(3, dtype=torch.int32)
        with pytest.raises(ShapeError, match="out"):
            bridge.varlen_attn_out(q[0, :2], q[0], q[0], q[0], cu, cu, 2, 2)
        with pytest.raises(DTypeError, match="out"):
            bridge.varlen_attn_out(q[0].float(), q[0], q[0], q[0], cu, cu, 2, 2)
    meta = torch.empty(2, 3, 4, 16, device="meta")
    assert bridge.memory_efficient_attention(meta, meta, meta).is_meta
    with pytest.raises(DeviceError):
        bridge.memory_efficient_attention(meta, torch.zeros(2, 3, 4, 16), meta)


# ------------------------------------------------------------------------------------------------------ results


def dense(q, k, v, seen, scale=None):
    """softmax(scale q k^T) v in float64 for BMHK tensors of equal heads; `seen` [B, 1, M, N] or None."""
    q, k, v = (x.double() for x in (q, k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_against_float64(device):
    q, k, v = (rand(2, n, 2, 16, device=device, grad=True) for n in (5, 9, 9))
    seen = torch.ones(5, 9, dtype=torch.bool, device=device).tril(4)
    grad = torch.randn(2, 5, 2, 16, device=device)
    out = bridge.memory_efficient_attention(q, k, v, biases.LowerTriangularFromBottomRightMask())
    assert "pallas_splitk" in type(out.grad_fn).__name__
    expected = dense(q, k, v, seen)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(out, (q, k, v), grad)
    want = torch.autograd.grad(expected, (q, k, v), grad.double())
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_gradcheck_through_output_and_lse():
    q, k, v = (rand(1, n, 2, 8, dtype=torch.float64, grad=True) for n in (3, 5, 5))
    bias, sinks = rand(1, 2, 3, 5, dtype=torch.float64, grad=True), rand(2, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda *x: ops.attention(*x, scale=0.3), (q, k, v, bias, sinks))
    x = rand(6, 2, 8, dtype=torch.float64, grad=True)
    cu = ints([0, 2, 6])
    assert torch.autograd.gradcheck(lambda x: ops.varlen(x, x, x, cu, cu, 4, 4, window_size=[1, 0]), (x,))
    attn = [rand(1, 2, 2, 8, dtype=torch.float64, grad=True) for _ in range(2)]
    lse = [rand(1, 2, 2, dtype=torch.float64, grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda *x: ops.merge(list(x[:2]), list(x[2:])), (*attn, *lse))
    assert torch.autograd.gradcheck(
        lambda *x: ops.merge([torch.stack(x)], lse, stacked_attn=True, write_lse=False)[0], tuple(attn)
    )


def test_only_what_wants_a_gradient_is_computed():
    call = plain("cpu", grad=False)
    out, lse = ops.attention(*call)
    d = ops.attention_backward(None, torch.ones_like(lse), out, lse, [False, True, False, True, True], *call)
    assert [x is None for x in d] == [True, False, True, True, True]  # no bias and no sinks were given


def test_what_has_no_gradient_raises():
    args, kwargs = packed_case("cpu", pages=True)
    with pytest.raises(GradientError, match="paged"):
        ops.attention(*args, **kwargs)
    call, options = paged_varlen("cpu")
    with pytest.raises(GradientError, match="block_table"):
        ops.varlen(call[0].requires_grad_(), *call[1:], **options)
    with pytest.raises(GradientError, match="varlen_attn_out"):
        x, cu = rand(8, 4, 16, grad=True), ints([0, 8])
        bridge.varlen_attn_out(torch.empty(8, 4, 16), x, x, x, cu, cu, 8, 8)
    q = rand(1, 3, 2, 16, grad=True)
    (d,) = torch.autograd.grad(bridge.memory_efficient_attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(GradientError, match="second"):
        d.sum().backward()


def test_transforms():
    """vmap runs the op for each; forward mode raises, where the dispatcher alone would lose the tangents."""
    x = rand(3, 2, 3, 4, 16)
    mapped = torch.func.vmap(lambda y: bridge.memory_efficient_attention(y, y, y))(x)
    torch.testing.assert_close(mapped, torch.stack([bridge.memory_efficient_attention(y, y, y) for y in x]))
    cu, lse = ints([0, 2, 3]), rand(3, 2, 4, 3)
    for function, y in (
        (lambda y: bridge.memory_efficient_attention(y, y, y), x[0]),
        (lambda y: bridge.varlen_attn(y, y, y, cu, cu, 2, 2), x[0, 0]),
        (lambda y: bridge.merge_attentions(y, lse)[0], x),
    ):
        with pytest.raises(GradientError, match="forward-mode"):
            torch.func.jvp(function, (y,), (torch.ones_like(y),))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "seed_int4", "seed_fp8"])
def test_low_bit_keys_cross_the_dispatcher(name):
    """The op on a format's tensors gives what the function gives on the format, and its fake looks like it."""
    q, x = rand(1, 6, 4, 32, dtype=HALF), rand(1, 24, 2, 32)
    k, v = (bridge.formats.quantize(y, name) for y in (x, x + 1))
    bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens([1, 3, 2], 8, [5, 8, 2], device="cpu")
    expected = bridge.memory_efficient_attention(q, k, v, bias)
    from bridge import _flat

    mask, _ = _flat.flatten_bias(bias, 24)
    out, _ = library.attention(q, k, v, None, None, None, mask, p=0.0)
    assert torch.equal(out, expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = bridge.memory_efficient_attention(q, k, v, bias)
    assert layouts([fake]) == layouts([expected])
    with pytest.raises(GradientError, match="low-bit"):
        bridge.memory_efficient_attention(q.requires_grad_(), k, v, bias)


# --------------------------------------------------------------------------------------------- autocast, needed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_as_sdpa(device, dtype):
    q = rand(2, 3, 4, 16, device=device, grad=True)
    k = rand(2, 7, 4, 16, device=device)
    cu = ints([0, 3, 6], device)
    with torch.autocast(device, dtype=dtype):
        peer = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, k)))
        out = bridge.memory_efficient_attention(q, k, k, rand(2, 4, 3, 7, device=device) * 0)
        x = q.flatten(0, 1)
        packed = bridge.varlen_attn(x, x, x, cu, cu, 3, 3)
        wide = q.double()
        assert bridge.memory_efficient_attention(wide, wide, wide).dtype == torch.float64
        assert bridge.memory_efficient_attention(q, k, k, output_dtype=torch.float32).dtype == torch.float32
    assert out.dtype == packed.dtype == peer.dtype == dtype
    torch.testing.assert_close(out.transpose(1, 2), peer, atol=2e-2, rtol=2e-2)
    (d,) = torch.autograd.grad(out.float().sum(), q)
    assert d.dtype == torch.float32


def test_needed():
    q, grad = rand(2, 3, 4, 16), rand(2, 3, 4, 16, grad=True)
    cache = bridge.formats.quantize(q, "fp8")
    assert not library.needed((q, q, q, None)) and not library.needed((q, cache, cache))
    assert library.needed((q, grad)) and library.needed((torch.nn.Parameter(q),))
    with torch.no_grad():
        assert not library.needed((q, grad))
    assert library.needed((q.to("meta"),))
    assert library.needed((torch.nn.Buffer(q).as_subclass(type("Mine", (torch.Tensor,), {})),))
    with FakeTensorMode():
        assert library.watched()
    with torch.utils.flop_counter.FlopCounterMode(display=False), torch.no_grad():
        assert library.needed((q,))
    with torch.autocast("cpu"):
        assert library.needed((q,))
    with torch.overrides.BaseTorchFunctionMode():
        assert library.needed((q,))
    seen = []
    torch.func.vmap(lambda x: seen.append(library.needed((x,))) or x)(q)
    assert seen == [True]


def test_needed_costs_next_to_nothing():
    tensors = (*(rand(2, 3, 4, 16) for _ in range(3)), None, None)
    assert min(timeit.repeat(lambda: library.needed(tensors), number=2000, repeat=20)) / 2000 < 2e-6


# -------------------------------------------------------------------------------------------------- the out form


def test_out_is_checked_before_anything_is_written():
    """Through the op, as through the function: what does not fit raises, and `out` stays as it was."""
    x, cu = rand(8, 2, 16), ints([0, 3, 8])
    shared = rand(16, 2, 16)
    for out, error in (
        (torch.full((7, 2, 16), 5.0), ShapeError),
        (torch.full((8, 2, 16), 5.0, dtype=HALF), DTypeError),
        (torch.full((1, 2, 16), 5.0).expand(8, 2, 16), ArgumentError),
        (torch.full((8, 2, 16), 5.0, device="meta"), DeviceError),
    ):
        for function in (bridge.varlen_attn_out, ops.varlen_out):
            with pytest.raises(error, match=r"out|one device"):
                function(out, x, x, x, cu, cu, 5, 5)
        assert out.is_meta or (out == 5).all()
    before = shared.clone()
    for function in (bridge.varlen_attn_out, ops.varlen_out):
        with pytest.raises(ArgumentError, match="overlap"):
            function(shared[:8], shared[4:12], x, x, cu, cu, 5, 5)
    assert torch.equal(shared, before)
    out = torch.empty(8, 2, 16)
    lse = ops.varlen_out(out, x, x, x, cu, cu, 5, 5)
    expected = bridge.varlen_attn(x, x, x, cu, cu, 5, 5, return_aux=bridge.AuxRequest(lse=True))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
