"""The entry points of `bridge.fmha`: results against float64, LSE shapes and dtypes, layouts, formats, refusals."""

import functools

import numpy as np
import pytest
import torch

import bridge
import cases
import oracle
import torch_frontend
from bridge import _flat, fmha
from bridge.fmha import attn_bias as ab
from checks import close

tri = fmha.triton_splitk


def draw(shape, dtype=torch.half, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(q_shape, k_shape, dtype=torch.half, seed=0):
    return draw(q_shape, dtype, seed), draw(k_shape, dtype, seed + 1), draw(k_shape, dtype, seed + 2)


def numbers(x):
    return x.detach().double().numpy()


def definition(q, k, v, **options):
    """(out, lse) in float64 of dense inputs in BMHK or BMGHK; k and v may have size 1 on the last head axis."""
    flat = [cases.flat_heads(numbers(x)) for x in (q, k, v)]
    out, lse = oracle.dense(*flat, **options)
    heads = q.shape[2:-1]
    return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[0], *heads, q.shape[1])


# Values, LSE shapes and dtypes

DENSE = [
    ((2, 3, 4, 32), None),
    ((2, 3, 2, 3, 32), None),
    ((2, 3, 4, 32), (2, 4, 3, 9)),
    ((2, 3, 2, 3, 32), (2, 2, 3, 3, 9)),
]


@pytest.mark.parametrize("op", [None, tri.FwOp_S1], ids=["none", "s1"])
@pytest.mark.parametrize(("shape", "bias_shape"), DENSE, ids=str)
def test_dense(shape, bias_shape, op):
    q, k, v = qkv(shape, (shape[0], 9, *shape[2:]))
    bias = None if bias_shape is None else draw(bias_shape, torch.float32, 7)
    if bias is not None:
        bias[..., 0, :] = -torch.inf
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=0.3, op=op)
    flat = None if bias is None else numbers(bias).reshape(shape[0], -1, 3, 9)
    want, want_lse = definition(q, k, v, bias=flat, scale=0.3)
    assert out.dtype == torch.half and lse.dtype == torch.float32
    assert out.shape == shape and lse.shape == want_lse.shape
    close(numbers(out), want, *cases.TOLERANCES["float16"])
    close(numbers(lse), want_lse, *cases.LSE_TOLERANCE)
    without = fmha.memory_efficient_attention_forward(q, k, v, bias, scale=0.3, op=op)
    assert torch.equal(without, out)
    pair = None if op is None else (op, None)
    assert torch.equal(fmha.memory_efficient_attention(q, k, v, bias, scale=0.3, op=pair), out)


@pytest.mark.parametrize(
    ("q_dtype", "output_dtype", "partial", "out_dtype", "lse_dtype"),
    [
        (torch.half, None, False, torch.half, torch.float32),
        (torch.half, torch.bfloat16, False, torch.bfloat16, torch.float32),
        (torch.half, torch.float32, False, torch.float32, torch.float64),
        (torch.half, torch.float64, False, torch.float64, torch.float64),
        (torch.bfloat16, None, True, torch.float32, torch.float64),
        (torch.bfloat16, torch.half, True, torch.half, torch.float32),
    ],
)
def test_dtypes(q_dtype, output_dtype, partial, out_dtype, lse_dtype):
    q, k, v = qkv((1, 2, 1, 16), (1, 5, 1, 16), q_dtype)
    run = fmha.memory_efficient_attention_partial if partial else fmha.memory_efficient_attention_forward_requires_grad
    for op in (None, tri.FwOp_S2):
        out, lse = run(q, k, v, output_dtype=output_dtype, op=op)
        assert (out.dtype, lse.dtype) == (out_dtype, lse_dtype)
        want, want_lse = definition(q, k, v)
        low = "bfloat16" if torch.bfloat16 in (q_dtype, out_dtype) else "float16"
        close(numbers(out), want, *cases.TOLERANCES[low])
        close(numbers(lse), want_lse, *cases.LSE_TOLERANCE)


def test_legacy_layout():
    q, k, v = qkv((2, 3, 16), (2, 5, 16))
    bias = draw((2, 3, 5), torch.float32)
    want = definition(q[:, :, None], k[:, :, None], v[:, :, None], bias=numbers(bias)[:, None])[0][:, :, 0]
    for op in (None, tri.FwOp):
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, op=op)
        assert out.shape == (2, 3, 16) and lse.shape == (2, 1, 3)
        close(numbers(out), want, *cases.TOLERANCES["float16"])
    causal = fmha.memory_efficient_attention(q, k, v, ab.LowerTriangularMask())
    seen = np.where(np.tri(3, 5), 0, -np.inf)
    want = definition(q[:, :, None], k[:, :, None], v[:, :, None], bias=seen)[0][:, :, 0]
    close(numbers(causal), want, *cases.TOLERANCES["float16"])


@pytest.mark.parametrize(("heads", "q_lens"), [((3,), [3, 3]), ((2, 3), [1, 1])], ids=["BMHK", "BMGHK"])
@pytest.mark.parametrize("mask_class", cases.MASK_CLASSES)
def test_packed_lse_has_one_row(mask_class, heads, q_lens):
    window = (4,) if cases.MASK_CLASSES[mask_class][0] == "local" else (2, 2)
    case = cases.mask_case("x", mask_class, q_lens, [7, 64], heads, heads, 16, page_size=64, window=window)
    inputs = cases.make_inputs(case)
    q, k, v = (torch.from_numpy(inputs[n]).half() for n in "qkv")
    mask = torch_frontend.mask(mask_class, inputs["mask"]).to("cpu")
    want, want_lse = cases.expected(case, inputs)
    for op in (tri.FwOp_S2, None) if len(heads) == 1 else (tri.FwOp,):
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, mask, op=op)
        assert lse.shape == (1, *heads, sum(q_lens)) and out.shape == q.shape
        close(numbers(out), want, *cases.TOLERANCES["float16"])
        close(numbers(lse), want_lse, *cases.LSE_TOLERANCE)


# Layouts


def test_expanded_heads_are_folded(monkeypatch):
    """One head's worth of keys reaches the library, in both layouts, and the bits are those of a copy."""
    seen = []
    real = bridge.memory_efficient_attention_forward

    def spy(query, key, value, *args, **kwargs):
        seen.append(key.words.shape[-2] if isinstance(key, bridge.formats.SeedInt4) else key.stride(-2))
        return real(query, key, value, *args, **kwargs)

    monkeypatch.setattr(bridge, "memory_efficient_attention_forward", spy)
    for lead in ((), (2,)):
        q, k, v = qkv((1, 2, *lead, 4, 32), (1, 9, *lead, 1, 32))
        k, v = (x.expand(1, 9, *lead, 4, 32) for x in (k, v))
        out = fmha.memory_efficient_attention_forward(q, k, v, op=tri.FwOp_S2)
        k, v = k.contiguous(), v.contiguous()
        assert torch.equal(out, fmha.memory_efficient_attention_forward(q, k, v, op=tri.FwOp_S2))
        words = torch.randint(0, 2**31 - 1, (1, 9, *lead, 1, 5), dtype=torch.int32)
        words[..., 0] = 0x38003000
        words = words.expand(1, 9, *lead, 4, 5)
        inp = fmha.Inputs(q, words, words)
        copied = fmha.Inputs(q, words.contiguous(), words.contiguous())
        out, other = (fmha._memory_efficient_attention_forward(x, tri.FwOp_S2) for x in (inp, copied))
        assert torch.equal(out, other)
    assert seen == [0, 32, 1, 4] * 2


def test_expanded_bias_is_not_written_out(monkeypatch):
    seen = []
    real = _flat.attend

    def spy(query, key, value, bias, *args, **kwargs):
        seen.append(tuple(bias.shape))
        return real(query, key, value, bias, *args, **kwargs)

    monkeypatch.setattr(_flat, "attend", spy)
    q, k, v = qkv((3, 4, 2, 16), (3, 5, 2, 16))
    bias = draw((4, 5), torch.float32).expand(3, 2, 4, 5)
    out = fmha.memory_efficient_attention_forward(q, k, v, bias, op=tri.FwOp)
    close(numbers(out), definition(q, k, v, bias=numbers(bias))[0], *cases.TOLERANCES["float16"])
    assert seen == [(1, 1, 4, 5)]


@pytest.mark.parametrize("op", [None, tri.FwOp], ids=["none", "split-k"])
def test_slices_and_permutations(op):
    whole = draw((2, 6, 3, 4, 32))
    q, k, v = whole[:, 1:4, 0], whole[:, ::2, 1], whole[:, 1::2, 2].transpose(0, 1).contiguous().transpose(0, 1)
    out = fmha.memory_efficient_attention_forward(q, k, v, op=op)
    close(numbers(out), definition(q, k, v)[0], *cases.TOLERANCES["float16"])


@pytest.mark.parametrize("op", [None, (tri.FwOp, None), (tri.FwOp_S8, None)], ids=["none", "auto", "s8"])
@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 3, 0), (0, 3, 5)], ids=str)
def test_empty(sizes, op):
    batch, queries, keys = sizes
    q, k, v = (x.requires_grad_() for x in qkv((batch, queries, 4, 32), (batch, keys, 4, 32)))
    out = fmha.memory_efficient_attention(q, k, v, op=op)
    assert out.shape == q.shape and out.dtype == q.dtype and (out == 0).all()
    for gradient, x in zip(torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(x))
    fw = None if op is None else op[0]
    _, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, output_dtype=torch.float32, op=fw)
    assert lse.shape == (q.shape[0], 4, q.shape[1]) and lse.dtype == torch.float64 and (lse == -torch.inf).all()


def test_nothing_else_is_looked_at_where_it_is_empty():
    q, words = draw((1, 0, 2, 32)), torch.zeros(1, 5, 2, 8, dtype=torch.int32)
    op = type("Eight", (tri.FwOp,), {"NUM_GROUPS": 8})
    out, ctx = op.apply(fmha.InputsFp8(q, words, words, quantize_qk_to_fp8=True), needs_gradient=True)
    assert out.shape == q.shape and ctx.lse.shape == (1, 2, 0)


# int4 and fp8


def fp8_inputs(query_dtype, *, symmetric, fp32_scales, lead=(), heads=4, q_len=1, k_len=150):
    rng = np.random.default_rng(3)
    q = oracle.round_to(rng.standard_normal((q_len, *lead, heads, 32)), "float16")
    rows = [rng.standard_normal((k_len, *lead, 1, 32)) + (0 if symmetric else 0.5) for _ in "kv"]
    packed = [oracle.fp8_quantize(x, symmetric=symmetric, fp32_scales=fp32_scales) for x in rows]
    return q, packed


@pytest.mark.parametrize("fp32_scales", [False, True])
@pytest.mark.parametrize("quantize_pv", [False, True])
@pytest.mark.parametrize("quantize_qk", [False, True])
def test_fp8_switches(quantize_qk, quantize_pv, fp32_scales):
    """Every combination against MSLK's own arithmetic in float64, in BMHK expanded and in BMGHK copied."""
    symmetric = quantize_qk or quantize_pv or fp32_scales
    for lead in ((), (2,)):
        q, ((k, k_coef), (v, v_coef)) = fp8_inputs("float16", symmetric=symmetric, fp32_scales=fp32_scales, lead=lead)
        query, q_scale = torch.from_numpy(q).half()[None], None
        if quantize_qk:
            words, scales = oracle.fp8_quantize(q, symmetric=True, fp32_scales=True)
            q, q_scale = oracle.e4m3_decode(words), scales
            query = torch.from_numpy(q).to(torch.float8_e4m3fn)[None]

        tensors = [torch.from_numpy(np.ascontiguousarray(x))[None] for x in (k, v, k_coef, v_coef)]
        tensors[:2] = [x.expand(*x.shape[:-2], 4, x.shape[-1]) for x in tensors[:2]]
        tensors[2:] = [x.expand(*x.shape[:-1], 4) for x in tensors[2:]]
        if lead:
            tensors = [x.contiguous() for x in tensors]
        inp = tri.InputsFp8(query, *tensors[:2], output_dtype=torch.half, use_fp32_scales=fp32_scales)
        inp.quantize_pv_to_fp8, inp.quantize_qk_to_fp8 = quantize_pv, quantize_qk
        inp.k_fp8_scale_shift, inp.v_fp8_scale_shift = tensors[2:]
        inp.q_fp8_scale_shift = None if q_scale is None else torch.from_numpy(q_scale)[None].float()
        out, ctx = fmha._memory_efficient_attention_forward_requires_grad(inp, tri.FwOp)
        for g in range(lead[0] if lead else 1):
            at = (slice(None), g) if lead else (slice(None),)
            want, want_lse = oracle.fp8_attend(
                q[at], k[at], v[at], k_coef[at], v_coef[at], scale=32**-0.5, visible=np.ones((1, 150), bool),
                query_dtype="float8_e4m3fn" if quantize_qk else "float16",
                q_scales=None if q_scale is None else q_scale[at], quantize_pv=quantize_pv, fp32_scales=fp32_scales,
            )  # fmt: skip
            # Probabilities rounded to e4m3 differ by a unit where the running maximum differs in its last bit.
            slack = 5e-2 if quantize_qk and not quantize_pv else 2e-3
            close(numbers(out[0, :, g] if lead else out[0]), want, slack, slack)
            close(numbers(ctx.lse[0, g] if lead else ctx.lse[0]), want_lse, 2e-4, 1e-4)


def test_fp8_output_by_default():
    q, ((k, k_coef), (v, v_coef)) = fp8_inputs("float16", symmetric=True, fp32_scales=False)
    query = torch.from_numpy(q).to(torch.float8_e4m3fn)[None]
    words = [torch.from_numpy(x)[None].expand(1, -1, 4, -1) for x in (k, v)]
    coefs = [torch.from_numpy(x)[None].expand(1, -1, 4) for x in (k_coef, v_coef)]
    inp = tri.InputsFp8(query, *words, quantize_qk_to_fp8=True, k_fp8_scale_shift=coefs[0], v_fp8_scale_shift=coefs[1])
    inp.q_fp8_scale_shift = torch.ones(1, 1, 4)
    assert fmha._memory_efficient_attention_forward(inp, tri.FwOp).dtype == torch.float8_e4m3fn
    inp.is_partial = True
    out, ctx = fmha._memory_efficient_attention_forward_requires_grad(inp, tri.FwOp)
    assert out.dtype == torch.float32 and ctx.lse.dtype == torch.float64


def test_fp8_coefficients_come_with_both_head_axes():
    scale = torch.zeros(1, 9, 4, dtype=torch.int32)
    q, words = draw((1, 2, 4, 32)), torch.zeros(1, 9, 4, 8, dtype=torch.int32)
    assert tri.FwOp.get_fp8_scale_shift(fmha.Inputs(q, q, q)) == (None, None, None)
    inp = tri.InputsFp8(q, words, words, k_fp8_scale_shift=scale, v_fp8_scale_shift=scale)
    k, v, q_scale = tri.FwOp.get_fp8_scale_shift(inp)
    assert k.shape == v.shape == (1, 9, 1, 4) and q_scale is None
    inp.q_fp8_scale_shift = torch.zeros(1, 2, 4)
    assert tri.FwOp.get_fp8_scale_shift(inp)[2].shape == (1, 2, 1, 4)
    inp.k_fp8_scale_shift = k
    assert tri.FwOp.get_fp8_scale_shift(inp)[0] is k


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_int4_groups_come_from_the_class(groups):
    rng = np.random.default_rng(groups)
    coefs = rng.uniform(0.1, 1, (2, 9, 4, groups))
    rows = oracle.int4_pack(rng.integers(0, 16, (9, 4, 64)), *coefs)
    words = torch.from_numpy(rows)[None]
    q = draw((1, 3, 4, 64))
    op = type("Grouped", (tri.FwOp_S4,), {"NUM_GROUPS": groups})
    out = fmha._memory_efficient_attention_forward(fmha.Inputs(q, words, words), op)
    decoded = torch.from_numpy(oracle.int4_dequantize(rows, groups))[None]
    close(numbers(out), definition(q, decoded, decoded)[0], *cases.TOLERANCES["float16"])


# Refusals

Q, K, V = qkv((1, 2, 4, 32), (1, 9, 4, 32))
WORDS = torch.zeros(1, 9, 4, 8, dtype=torch.int32)
SCALES = torch.zeros(1, 9, 4, dtype=torch.int32)
FP8 = functools.partial(tri.InputsFp8, Q, WORDS, WORDS)


def masked(mask, q=Q, k=K, v=V):
    return fmha.Inputs(q, k, v, mask)


def padded(*args):
    return ab.BlockDiagonalPaddedKeysMask.from_seqlens(*args, device="cpu")


@pytest.mark.parametrize(
    ("inp", "attributes", "kind", "text"),
    [
        (masked(padded([1, 1], 4, [1, 1]), Q.expand(2, -1, -1, -1), K[:, 1:], V[:, 1:]), {}, AssertionError, "batch"),
        (masked(padded([1, 1], 4, [1, 1])), {}, RuntimeError, "9 rows"),
        (fmha.Inputs(Q, WORDS, WORDS), {"NUM_GROUPS": 1}, AssertionError, "56.*32"),
        (FP8(k_fp8_scale_shift=SCALES[:, :, :4], v_fp8_scale_shift=SCALES), {}, None, None),
        (tri.InputsFp8(Q, WORDS[..., :6], WORDS[..., :6], k_fp8_scale_shift=SCALES, v_fp8_scale_shift=SCALES), {},
         AssertionError, "24.*32"),
        (fmha.Inputs(Q, K, V), {"NUM_GROUPS": 2}, AssertionError, "NUM_GROUPS"),
        (FP8(k_fp8_scale_shift=SCALES), {}, AssertionError, "v_fp8_scale_shift"),
        (FP8(k_fp8_scale_shift=SCALES[0], v_fp8_scale_shift=SCALES), {}, ValueError, "BMH"),
        (FP8(k_fp8_scale_shift=SCALES[:, :5], v_fp8_scale_shift=SCALES), {}, ValueError, "k_fp8_scale_shift"),
        (FP8(k_fp8_scale_shift=SCALES, v_fp8_scale_shift=SCALES, quantize_qk_to_fp8=True), {}, AssertionError, "q_fp8"),
        (fmha.Inputs(Q, K, V, quantize_qk_to_fp8=True), {}, AssertionError, "q_fp8_scale_shift"),
        (fmha.Inputs(Q, K, V, quantize_pv_to_fp8=True), {}, AssertionError, "quantize_pv"),
        (FP8(k_fp8_scale_shift=SCALES, v_fp8_scale_shift=SCALES), {"NUM_GROUPS": 2}, AssertionError, "NUM_GROUPS"),
        (fmha.Inputs(Q, WORDS, WORDS), {"NUM_GROUPS": 3}, AssertionError, "num_groups"),
        (tri.InputsFp8(Q, K, V, k_fp8_scale_shift=SCALES, v_fp8_scale_shift=SCALES), {}, ValueError, "int32"),
        (FP8(k_fp8_scale_shift=SCALES, v_fp8_scale_shift=SCALES, quantize_pv_to_fp8=True), {"BLOCK_N": 32}, ValueError,
         "BLOCK_N"),
    ],
)  # fmt: skip
def test_apply_refuses(inp, attributes, kind, text):
    op = type("Variant", (tri.FwOp,), attributes)
    if kind is None:
        op.apply(inp, needs_gradient=True)
        return
    with pytest.raises(kind, match=text):
        op.apply(inp, needs_gradient=True)


def test_an_operator_that_refuses_says_every_reason():
    q = draw((1, 2, 4, 48), torch.float32)
    with pytest.raises(ValueError, match="triton_splitKF") as error:
        fmha.memory_efficient_attention_forward(q, q, q, p=0.5, op=tri.FwOp)
    assert all(text in str(error.value) for text in ("48", "float32", "dropout"))
    with pytest.raises(ValueError, match="forward operator class"):
        fmha.memory_efficient_attention_forward(Q, K, V, op=(tri.FwOp, None))


def test_no_operator_at_all():
    with pytest.raises(NotImplementedError, match="dropout"):
        fmha.memory_efficient_attention(Q, K, V, p=0.5)
    with pytest.raises(NotImplementedError, match="dtype"):
        fmha.memory_efficient_attention(Q.int(), K.int(), V.int())
    with pytest.raises(ValueError, match="p:"):
        fmha.memory_efficient_attention(Q, K, V, p=0.5, op=(tri.FwOp, None))


def test_dropout_has_no_other_form():
    lse = torch.zeros(1, 4, 2)
    for call in (
        fmha.memory_efficient_attention_forward_requires_grad,
        fmha.memory_efficient_attention_partial,
        fmha.memory_efficient_attention_partial_autograd,
        lambda *qkv, p: fmha.memory_efficient_attention_backward(Q, Q, lse, *qkv, p=p),
    ):
        with pytest.raises(NotImplementedError, match="dropout"):
            call(Q, K, V, p=0.5)


def test_only_tensors_are_taken():
    for op in (None, tri.FwOp):
        with pytest.raises(ValueError, match="key: expected a tensor"):
            fmha.memory_efficient_attention_forward(Q, K.numpy(), V, op=op)


def test_a_bias_of_another_rank_is_refused():
    q, k, v = qkv((1, 2, 2, 4, 32), (1, 9, 2, 4, 32))
    for op in (None, tri.FwOp):
        with pytest.raises(ValueError, match="attn_bias"):
            fmha.memory_efficient_attention_forward(q, k, v, torch.zeros(1, 8, 2, 9), op=op)


def test_wider_without_an_operator():
    """Fewer key heads, other head dims, float32, axes of size 1 in a bias, long causal queries of unequal counts."""
    q, k, v = qkv((2, 3, 4, 40), (2, 9, 2, 40), torch.float32)
    v = v[..., :24]
    bias = draw((1, 1, 3, 9), torch.float32)
    out = fmha.memory_efficient_attention_forward(q, k, v, bias)
    close(numbers(out), definition(q, k, v, bias=numbers(bias))[0], *cases.TOLERANCES["float32"])
    with pytest.raises(ValueError):
        fmha.memory_efficient_attention_forward(q, k, v, bias, op=tri.FwOp)
    mask = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([20, 3], 32, [30, 2], device="cpu")
    q, k, v = qkv((1, 23, 2, 16), (1, 64, 2, 16))
    out = fmha.memory_efficient_attention_forward(q, k, v, mask)
    tables = [oracle.visible_table("causal", a, b) for a, b in ((20, 30), (3, 2))]
    positions = [np.arange(30), 32 + np.arange(2)]
    want, _ = oracle.block_diagonal(*(numbers(x)[0] for x in (q, k, v)), [20, 3], positions, tables)
    close(numbers(out)[0], want, *cases.TOLERANCES["float16"])


def test_user_operators_are_called():
    """Entry points read nothing but the class: `supports`, `apply`, attributes."""
    calls = []

    class Mine(tri.FwOp_S2):
        NAME = "mine"

        @classmethod
        def apply(cls, inp, needs_gradient):
            calls.append((cls.SPLIT_K, needs_gradient))
            return super().apply(inp, needs_gradient)

    assert torch.equal(
        fmha.memory_efficient_attention_forward(Q, K, V, op=Mine),
        fmha.memory_efficient_attention_forward(Q, K, V, op=tri.FwOp_S2),
    )
    fmha.memory_efficient_attention_forward_requires_grad(Q, K, V, op=Mine)
    fmha.memory_efficient_attention_partial(Q, K, V, op=(Mine, None))
    assert calls == [(2, False), (2, True), (2, True)]


def test_num_splits_follow_the_class(monkeypatch):
    seen = []
    real = bridge.memory_efficient_attention_forward

    def spy(*args, **kwargs):
        seen.append(kwargs["num_splits"])
        return real(*args, **kwargs)

    monkeypatch.setattr(bridge, "memory_efficient_attention_forward", spy)
    for op in (tri.FwOp, tri.FwOp_S1, tri.FwOp_Map[72], type("X", (tri.FwOp_S4,), {"SPLIT_K": 3})):
        fmha._memory_efficient_attention_forward(fmha.Inputs(Q, K, V, num_splits=9), op)
    for splits in (0, 9):
        fmha._memory_efficient_attention_forward(fmha.Inputs(Q, K, V, num_splits=splits), None)
    assert seen == [None, 1, 72, 3, None, 9]


def test_one_inputs_object_is_normalised_once():
    inp = fmha.Inputs(*qkv((2, 3, 16), (2, 5, 16)))
    assert fmha._memory_efficient_attention_forward(inp, tri.FwOp).shape == (2, 3, 16)
    assert fmha._memory_efficient_attention_forward(inp, tri.FwOp).shape == (2, 3, 1, 16)


def test_operators_in_the_functions_of_bridge():
    """`op=` is there what it is here, differentiable in both results."""
    want, want_lse = fmha.memory_efficient_attention_forward_requires_grad(Q, K, V, op=tri.FwOp_S2)
    for op in (tri.FwOp_S2, (tri.FwOp_S2, None)):
        out, lse = bridge.memory_efficient_attention_forward_requires_grad(Q, K, V, op=op)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert torch.equal(bridge.memory_efficient_attention(Q, K, V, op=op), want)
        assert bridge.memory_efficient_attention_partial(Q, K, V, op=op)[0].dtype == torch.float32
    q = Q.clone().requires_grad_()
    lse = bridge.memory_efficient_attention_forward_requires_grad(q, K, V, op=tri.FwOp)[1]
    plain = bridge.memory_efficient_attention_forward_requires_grad(q, K, V)[1]
    assert torch.equal(torch.autograd.grad(lse.sum(), q)[0], torch.autograd.grad(plain.sum(), q)[0])
    with pytest.raises(ValueError, match="expand"):
        bridge.memory_efficient_attention(Q, K[:, :, :1].contiguous(), V[:, :, :1].contiguous(), op=tri.FwOp)
    lengths = torch.tensor([3], dtype=torch.int32)
    for option in ({"num_splits": 2}, {"softcap": 3.0}, {"backend": "chunked"}, {"kv_lengths": lengths}):
        with pytest.raises(ValueError, match=next(iter(option))):
            bridge.memory_efficient_attention(Q, K, V, op=tri.FwOp, **option)
    stored = bridge.formats.SeedInt4(torch.zeros(1, 9, 4, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match="key"):
        bridge.memory_efficient_attention(Q, stored, stored, op=tri.FwOp)
    with pytest.raises(NotImplementedError, match="op"):
        bridge.served_by(Q, K, V, op=tri.FwOp)


@pytest.mark.parametrize("op", [None, tri.FwOp_S2], ids=["none", "s2"])
def test_compiled_whole_and_once(op):
    """One graph for all key lengths, with an operator as without."""
    torch._dynamo.reset()
    q, k, v = qkv((1, 2, 4, 32), (1, 32, 4, 32))

    def attend(q, k, v, mask):
        parts = [fmha.memory_efficient_attention_partial(q, k, v, mask, op=op) for _ in range(2)]
        return fmha.merge_attentions([x for x, _ in parts], [x for _, x in parts], output_dtype=q.dtype)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lens in ([3, 16], [9, 1], [0, 7]):
            mask = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1], 16, lens, device="cpu")
            for mine, want in zip(compiled(q, k, v, mask), attend(q, k, v, mask)):
                assert mine.dtype == want.dtype and torch.equal(mine, want)
    torch._dynamo.reset()


def test_operators_of_torch_library():
    ops = torch.ops.pallas_splitk
    bias = draw((1, 4, 2, 9), torch.float32)
    plain, biased = ops.fmha_memory_efficient_attention_forward, ops.fmha_memory_efficient_attention_forward_with_bias
    assert torch.equal(plain(Q, K, V), fmha.memory_efficient_attention_forward(Q, K, V))
    want = fmha.memory_efficient_attention_forward(Q, K, V, bias, scale=0.5)
    assert torch.equal(plain(Q, K, V, bias, 0.0, 0.5), want) and torch.equal(biased(Q, K, V, bias, scale=0.5), want)
    torch.library.opcheck(plain.default, (Q, K, V[..., :16]))
    torch.library.opcheck(biased.default, (Q, K, V, bias))


def test_operators_of_torch_library_on_int4_words():
    """Their results look like the query, whatever the rows of words look like: one group, D / 8 + 1 words."""
    ops = torch.ops.pallas_splitk
    stored = [bridge.formats.quantize(draw((2, 9, 4, 32), seed=seed), "seed_int4").words for seed in (4, 5)]
    q, bias = draw((2, 3, 4, 32)), draw((2, 4, 3, 9), torch.float32)
    arguments = {"": (q, *stored), "_with_bias": (q, *stored, bias)}
    for suffix, given in arguments.items():
        op = getattr(ops, f"fmha_memory_efficient_attention_forward{suffix}").default
        assert op(*(x.to("meta") for x in given)).shape == op(*given).shape == q.shape
        torch.library.opcheck(op, given)


DEFECTS = {  # what MSLK's operator gets wrong by its own definition
    "window with folded heads": ("BlockDiagonalLocalAttentionPaddedKeysMask", [5, 5], [30, 12], {"window": (3, 2)}),
    "causal behind a gap": ("BlockDiagonalCausalWithOffsetGappyKeysMask", [4, 4], [9, 20], {}),
    "no keys from the middle of a page": ("PagedBlockDiagonalGappyKeysMask", [1, 1, 1], [0, 70, 3], {"page_size": 64}),
    "early exit in one piece": ("BlockDiagonalPaddedKeysMask", [1, 1], [0, 9], {}),
    "sequences without queries": ("BlockDiagonalPaddedKeysMask", [1, 0, 1], [4, 5, 9], {}),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_of_the_reference_are_none_here(name):
    """With NaN and infinities wherever no sequence has a key, those before a sequence's start among them."""
    mask_class, q_lens, k_lens, options = DEFECTS[name]
    case = cases.mask_case(name, mask_class, q_lens, k_lens, (6,), (1,), 32, **options)
    inputs = cases.make_inputs(case)
    q, k, v = (torch.from_numpy(inputs[n]).half() for n in "qkv")
    k, v = (x.expand(-1, -1, 6, -1) for x in (k, v))
    mask = torch_frontend.mask(mask_class, inputs["mask"]).to("cpu")
    want, want_lse = cases.expected(case, inputs)
    for op in (tri.FwOp, tri.FwOp.get_operator(1, split_k_early_exit=True)):
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, mask, op=op)
        close(numbers(out), want, *cases.TOLERANCES["float16"])
        close(numbers(lse), want_lse, *cases.LSE_TOLERANCE)


def test_no_gradient_without_the_lse():
    """`needs_gradient=False` is a promise: packed keys are served though the query requires grad."""
    words = torch.zeros(1, 9, 4, 5, dtype=torch.int32)
    q = Q.clone().requires_grad_()
    out, ctx = tri.FwOp.apply(fmha.Inputs(q, words, words), needs_gradient=False)
    assert ctx is None and not out.requires_grad
