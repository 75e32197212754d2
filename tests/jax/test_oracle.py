"""The oracle against tables and numbers worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import oracle

NEG = -math.inf


def rows(table):
    return ["".join("01"[int(x)] for x in row) for row in table]


def masked_rows(q_lens, positions, total, kind, **window):
    visible = [oracle.visible_table(kind, q, len(p), **window) for q, p in zip(q_lens, positions, strict=True)]
    return rows(oracle.mask_table(q_lens, positions, visible, total))


@pytest.mark.parametrize(
    "kind, q_len, k_len, window, expected",
    [
        ("all", 2, 3, {}, ["111", "111"]),
        ("causal", 2, 4, {}, ["1110", "1111"]),
        ("causal", 4, 2, {}, ["00", "00", "10", "11"]),
        ("causal", 1, 3, {}, ["111"]),
        ("window", 2, 4, dict(left=1, right=0), ["0110", "0011"]),
        ("window", 2, 4, dict(left=0, right=1), ["0011", "0001"]),
        ("window", 2, 4, dict(left=0, right=0), ["0010", "0001"]),
        ("window", 2, 4, dict(left=None, right=0), ["1110", "1111"]),
        ("window", 2, 4, dict(left=0, right=None), ["0011", "0001"]),
        ("window", 2, 4, dict(), ["1111", "1111"]),
        ("window", 4, 2, dict(left=1, right=1), ["00", "10", "11", "11"]),
        ("local", 3, 3, dict(window=1), ["100", "010", "001"]),
        ("local", 3, 3, dict(window=0), ["000", "000", "000"]),
        ("local", 2, 4, dict(window=2), ["0110", "0011"]),
        ("causal top-left", 2, 4, {}, ["1000", "1100"]),
        ("causal top-left", 4, 2, {}, ["10", "11", "11", "11"]),
        ("local top-left", 4, 3, dict(window=2), ["100", "110", "011", "001"]),
        ("window top-left", 3, 4, dict(left=1, right=1), ["1100", "1110", "0111"]),
    ],
)
def test_visible_table(kind, q_len, k_len, window, expected):
    assert rows(oracle.visible_table(kind, q_len, k_len, **window)) == expected


def test_visible_table_empty():
    assert oracle.visible_table("causal", 0, 3).shape == (0, 3)
    assert oracle.visible_table("causal", 3, 0).shape == (3, 0)
    with pytest.raises(ValueError):
        oracle.visible_table("diagonal", 1, 1)


@pytest.mark.parametrize(
    "kind, window, expected",
    [
        ("causal", {}, ["11000000", "11100000", "00001110", "00001111"]),
        ("local", dict(window=2), ["11000000", "01100000", "00000110", "00000011"]),
        ("window", dict(left=1, right=1), ["11100000", "01100000", "00000111", "00000011"]),
        ("all", {}, ["11100000", "11100000", "00001111", "00001111"]),
    ],
)
def test_padded_masks(kind, window, expected):
    positions = oracle.key_positions("padded", [3, 4], total=8)
    assert masked_rows([2, 2], positions, 8, kind, **window) == expected


def test_gappy_masks():
    positions = oracle.key_positions("gappy", [6, 3, 1], starts=[0, 7, 12, 14])
    assert masked_rows([1, 1, 1], positions, 14, "all") == ["11111100000000", "00000001110000", "00000000000010"]
    positions = oracle.key_positions("gappy", [3, 2], starts=[1, 5, 8])
    assert masked_rows([2, 2], positions, 8, "causal") == ["01100000", "01110000", "00000100", "00000110"]


def test_paged_masks():
    pages = dict(block_tables=[[2, 0], [1, 3]], page_size=2)
    positions = oracle.key_positions("paged", [3, 2], **pages)
    assert [p.tolist() for p in positions] == [[4, 5, 0], [2, 3]]
    assert masked_rows([1, 1], positions, 8, "all") == ["10001100", "00110000"]
    positions = oracle.key_positions("paged gappy", [2, 3], starts=[1, 1], **pages)
    assert [p.tolist() for p in positions] == [[5, 0], [3, 6, 7]]


def test_unused_table_entries_are_not_read():
    positions = oracle.key_positions("paged", [2, 0], block_tables=[[1, None], [None, None]], page_size=2)
    assert [p.tolist() for p in positions] == [[2, 3], []]


def one_head(q, k, v, **kwargs):
    """Attention of single-number queries, keys and values: q [Lq], k, v [Lk] -> out [Lq], lse [Lq]."""
    visible = kwargs.pop("visible", np.ones((len(q), len(k)), bool))
    out, lse = oracle.attend(
        *(np.reshape(x, (-1, 1, 1)) for x in (q, k, v)), scale=kwargs.pop("scale", 1.0), visible=visible, **kwargs
    )
    return out[:, 0, 0], lse[0]


def test_two_keys_by_hand():
    # scores 0 and ln 3: probabilities 1/4 and 3/4, sum of exponentials 4
    out, lse = one_head([2.0], [0.0, math.log(3)], [8.0, 4.0], scale=0.5)
    np.testing.assert_allclose(out, [5.0], rtol=1e-14)
    np.testing.assert_allclose(lse, [math.log(4)], rtol=1e-14)


def test_bias_softcap_and_sinks_by_hand():
    out, lse = one_head([0.0], [1.0, 1.0], [8.0, 4.0], bias=np.array([[[0.0, math.log(3)]]]))
    np.testing.assert_allclose([out[0], lse[0]], [5.0, math.log(4)], rtol=1e-14)
    out, lse = one_head([0.0], [1.0, 1.0], [8.0, np.nan], bias=np.array([[[0.0, NEG]]]))
    assert (out[0], lse[0]) == (8.0, 0.0)
    # the cap comes before the bias: 2 * tanh(3 / 2) + 5
    out, lse = one_head([1.0], [3.0], [7.0], softcap=2.0, bias=np.array([[[5.0]]]))
    np.testing.assert_allclose([out[0], lse[0]], [7.0, 2 * math.tanh(1.5) + 5], rtol=1e-14)
    # a sink of ln 2 beside one key of score 0: denominator 3
    out, lse = one_head([0.0], [1.0], [6.0], sinks=[math.log(2)])
    np.testing.assert_allclose([out[0], lse[0]], [2.0, math.log(3)], rtol=1e-14)


def test_empty_rows():
    q, k, v = np.ones(2), np.full(2, np.nan), np.full(2, np.nan)
    nothing = np.zeros((2, 2), bool)
    out, lse = one_head(q, k, v, visible=nothing)
    assert out.tolist() == [0, 0] and lse.tolist() == [NEG, NEG]
    out, lse = one_head(q, k, v, visible=nothing, sinks=[0.5])
    assert out.tolist() == [0, 0] and lse.tolist() == [0.5, 0.5]
    out, lse = one_head(q, k, v, visible=oracle.visible_table("local", 2, 2, window=0))
    assert out.tolist() == [0, 0] and lse.tolist() == [NEG, NEG]
    out, lse = one_head([1.0, 2.0], [5.0, 1.0], [3.0, 4.0], bias=np.array([[[NEG, NEG], [NEG, 0.0]]]))
    assert out.tolist() == [0, 4] and lse.tolist() == [NEG, 2.0]
    out, lse = one_head(q, [], [])
    assert out.tolist() == [0, 0] and lse.tolist() == [NEG, NEG]


def test_grouped_heads():
    """Six query heads on two KV heads: 0, 1, 2 read the first, 3, 4, 5 the second."""
    v = np.array([[[1.0], [2.0]]])
    out, _ = oracle.attend(np.ones((1, 6, 3)), np.ones((1, 2, 3)), v, scale=1.0, visible=np.ones((1, 1), bool))
    assert out[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_block_diagonal_reads_only_its_keys():
    v = np.array([np.nan, 1.0, 2.0, np.nan, 3.0, np.nan]).reshape(6, 1, 1)
    k = np.where(np.isnan(v), np.nan, 0)
    positions = oracle.key_positions("gappy", [2, 0, 1], starts=[1, 3, 4, 6])
    q_lens = [2, 1, 1]
    visible = [oracle.visible_table("causal", a, len(p)) for a, p in zip(q_lens, positions, strict=True)]
    out, lse = oracle.block_diagonal(np.ones((4, 1, 1)), k, v, q_lens, positions, visible)
    assert out[:, 0, 0].tolist() == [1, 1.5, 0, 3]
    np.testing.assert_allclose(lse[0], [0, math.log(2), NEG, 0])


def test_dense_against_softmax():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s) for s in [(2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 6)])
    bias = rng.normal(size=(2, 1, 3, 5))
    out, lse = oracle.dense(q, k, v, bias=bias, kv_lengths=[5, 2])
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8) + bias
    scores[1, :, :, 2:] = NEG
    e = np.exp(scores)
    np.testing.assert_allclose(out, np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v), atol=1e-12)
    np.testing.assert_allclose(lse, np.log(e.sum(-1)), atol=1e-12)


def test_varlen_window_paging_and_used_lengths():
    v = np.array([1.0, 2.0, 4.0, 8.0]).reshape(4, 1, 1)
    q, k = np.zeros((3, 1, 1)), np.zeros((4, 1, 1))
    out, lse = oracle.varlen(q, k, v, [0, 2, 3], [0, 3, 4], window=(0, 0))
    assert out[:, 0, 0].tolist() == [2, 4, 8] and lse.tolist() == [[0, 0, 0]]
    out, _ = oracle.varlen(q, k, v, [0, 2, 3], [0, 3, 4], window=(1, 0))
    assert out[:, 0, 0].tolist() == [1.5, 3, 8]
    out, _ = oracle.varlen(q, k, v, [0, 2, 3], [0, 3, 4], window=(0, -1))
    assert out[:, 0, 0].tolist() == [3, 4, 8]
    out, lse = oracle.varlen(q, k, v, [0, 2, 3], [0, 3, 4], window=(-1, 0), seqused_k=[1, 0])
    assert out[:, 0, 0].tolist() == [0, 1, 0] and lse.tolist() == [[NEG, 0, NEG]]
    pages = dict(seqused_k=[3, 1], block_table=[[1, 0], [1, -1]])
    out, _ = oracle.varlen(q, k.reshape(2, 2, 1, 1), v.reshape(2, 2, 1, 1), [0, 2, 3], None, **pages)
    np.testing.assert_allclose(out[:, 0, 0], [13 / 3, 13 / 3, 4])


def test_merge_by_hand():
    outs = np.array([4.0, 8.0]).reshape(2, 1, 1, 1, 1)
    out, lse = oracle.merge(outs, np.array([0.0, math.log(3)]).reshape(2, 1, 1, 1))
    np.testing.assert_allclose([out.item(), lse.item()], [7.0, math.log(4)], rtol=1e-14)
    out, lse = oracle.merge(outs, np.array([NEG, 3.0]).reshape(2, 1, 1, 1))
    assert (out.item(), lse.item()) == (8.0, 3.0)
    out, lse = oracle.merge(outs, np.full((2, 1, 1, 1), NEG))
    assert (out.item(), lse.item()) == (0.0, NEG)


@pytest.mark.parametrize("groups", [(), (3,)])
def test_merge_of_parts_is_the_whole(groups):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, length, 6, 4)) for length in (3, 7, 7))
    whole = oracle.dense(q, k, v)
    parts = [oracle.dense(q, k[:, a], v[:, a]) for a in (slice(0, 2), slice(2, 2), slice(2, 7))]
    outs = [out.reshape(2, 3, *groups, -1, 4) for out, _ in parts]
    lses = [lse.reshape(2, *groups, -1, 3) for _, lse in parts]
    out, lse = oracle.merge(outs, lses)
    np.testing.assert_allclose(out.reshape(whole[0].shape), whole[0], atol=1e-13)
    np.testing.assert_allclose(lse.reshape(whole[1].shape), whole[1], atol=1e-13)
    packed = oracle.merge([out[0] for out, _ in parts], [lse[0] for _, lse in parts])
    np.testing.assert_allclose(packed[0], whole[0][0], atol=1e-13)


def test_numeric_grad():
    x = np.array([[1.0, 2.0], [3.0, -1.0]])
    np.testing.assert_allclose(oracle.numeric_grad(lambda x: (x**2).sum(), x), 2 * x, rtol=1e-8)
    indices, values = oracle.numeric_grad(lambda x: (x**2).sum(), x, count=2)
    np.testing.assert_allclose(values, 2 * x.reshape(-1)[indices], rtol=1e-8)
    np.testing.assert_allclose(oracle.numeric_directional(lambda x: (x**2).sum(), x, np.ones((2, 2))), 10, rtol=1e-8)


def test_int4_worked_example():
    words = np.array([0xBC003000, 0x76543210, 0xFEDCBA98], np.uint32).view(np.int32)
    assert words.tolist() == [-1140838400, 1985229328, -19088744]
    first = np.arange(16) / 8 - 1
    assert oracle.int4_dequantize(words, 1).tolist() == first.tolist()
    assert oracle.int4_pack(np.arange(16), [0.125], [-1.0]).tolist() == words.tolist()
    two = np.array([0xBC003000, 0x40003800] + [0x76543210, 0xFEDCBA98] * 2, np.uint32).view(np.int32)
    for fused in (False, True):
        x = oracle.int4_dequantize(np.stack([two, two]), 2, fused)
        assert x.dtype == np.float16 and x[1].tolist() == first.tolist() + (np.arange(16) / 2 + 2).tolist()
    assert oracle.int4_pack([*range(16)] * 2, [0.125, 0.5], [-1.0, 2.0]).tolist() == two.tolist()


def test_int4_rounds_in_half():
    """3 * (1 + 2^-10) = 3 + 3 * 2^-10 lies between two halves and rounds up to 3 + 2^-8 (ties to even)."""
    row = oracle.int4_pack([3] * 8, [1 + 2.0**-10], [-3.0])
    assert set(oracle.int4_dequantize(row, 1).tolist()) == {2.0**-8}
    assert set(oracle.int4_dequantize(row, 1, fused=True).tolist()) == {3 * 2.0**-10}


FP8_VALUES = [1, -1, 0.5, 448, 2, -0.25, 0, 3.5, 1.5, -448, 2**-6, 7, -2, 16, 2**-9, 0.875]
FP8_WORDS = np.array([0x7E30B838, 0x4600A840, 0x4E08FE3C, 0x360158C0], np.uint32).view(np.int32)


def test_fp8_worked_example():
    assert oracle.e4m3_decode(FP8_WORDS).tolist() == FP8_VALUES
    assert oracle.e4m3_pack(FP8_VALUES).tolist() == FP8_WORDS.tolist()
    coef = oracle.pack_coefficients(0.5, -1.0)
    assert coef == -1140836352 and [float(x) for x in oracle.coefficients(coef)] == [0.5, -1.0]
    expected = [-0.5, -1.5, -0.75, 223, 0, -1.125, -1, 0.75, -0.25, -225, -0.9921875, 2.5, -2, 7]
    expected += [-0.9990234375, -0.5625]
    x = oracle.fp8_dequantize(FP8_WORDS, coef)
    assert x.dtype == np.float16 and x.tolist() == expected
    assert math.isnan(oracle.e4m3_decode(np.array([0x7F], np.int32))[0])


def test_fp8_float32_scales():
    halves = np.array([0x3F000000], np.int32)
    expected = (np.array(FP8_VALUES) / 2).tolist()
    for coef in (halves, halves.view(np.float32)):
        x = oracle.fp8_dequantize(FP8_WORDS[None], coef, fp32_scales=True)
        assert x.dtype == np.float32 and x[0].tolist() == expected


def test_fp8_quantize():
    x = np.random.default_rng(2).normal(size=(50, 16))
    for fp32_scales in (False, True):
        words, coefs = oracle.fp8_quantize(x, symmetric=True, fp32_scales=fp32_scales)
        np.testing.assert_allclose(oracle.fp8_dequantize(words, coefs, fp32_scales), x, rtol=0.07, atol=0.02)
    words, coefs = oracle.fp8_quantize(x + 20)
    np.testing.assert_allclose(oracle.fp8_dequantize(words, coefs), x + 20, atol=0.25)


@pytest.mark.parametrize("fp32_scales", [False, True])
@pytest.mark.parametrize("qk", [False, True])
@pytest.mark.parametrize("pv", [False, True])
def test_fp8_attend_is_close_to_attention(fp32_scales, qk, pv):
    rng = np.random.default_rng(3)
    q_len, k_len, dim = 3, 150, 32
    q, k, v = (rng.normal(size=(n, heads, dim)) for n, heads in ((q_len, 4), (k_len, 2), (k_len, 2)))
    k_words, k_coefs = oracle.fp8_quantize(k, symmetric=True, fp32_scales=fp32_scales)
    v_words, v_coefs = oracle.fp8_quantize(v, symmetric=True, fp32_scales=fp32_scales)
    visible = oracle.visible_table("causal", q_len, k_len)
    visible[0] = False
    q_scales = np.abs(q).max(-1) / 448 if qk else None
    q = oracle.round_to(q / q_scales[..., None], "float8_e4m3fn") if qk else oracle.round_to(q, "float16")
    out, lse = oracle.fp8_attend(
        q, k_words, v_words, k_coefs, v_coefs, scale=dim**-0.5, visible=visible, q_scales=q_scales, quantize_pv=pv,
        query_dtype="float8_e4m3fn" if qk else "float16", fp32_scales=fp32_scales,
    )  # fmt: skip
    exact_q = q * q_scales[..., None] if qk else q
    k, v = (oracle.fp8_dequantize(*x, fp32_scales) for x in ((k_words, k_coefs), (v_words, v_coefs)))
    exact, exact_lse = oracle.attend(exact_q, k, v, scale=dim**-0.5, visible=visible)
    assert (out[0] == 0).all() and (lse[:, 0] == NEG).all()
    np.testing.assert_allclose(lse, exact_lse, atol=2e-3)
    np.testing.assert_allclose(out, exact, atol=1e-3 if not (qk or pv) else 0.05)


def test_fp8_pv_by_hand():
    """One query, equal scores, blocks of two keys: p = 1 everywhere, v scales 1, 3/4, 1/2, 1/2."""
    v = np.array([[8.0] * 4, [16.0] * 4, [2.0] * 4, [4.0] * 4])[:, None]
    coefs = oracle.pack_coefficients(np.array([1.0, 0.75, 0.5, 0.5]), np.full(4, 9.0))[:, None]
    zeros = np.zeros((4, 1, 1), np.int32)
    out, lse = oracle.fp8_attend(
        np.ones((1, 1, 4)), zeros, oracle.e4m3_pack(v), oracle.pack_coefficients(np.ones((4, 1)), np.zeros((4, 1))),
        coefs, scale=1.0, visible=np.ones((1, 4), bool), quantize_pv=True, block_n=2,
    )  # fmt: skip
    # block 1: unit 1/448, p8 = 448 and round(336) = 320 or 352 (336 is half way: to even); block 2 is exact
    second = float(oracle.round_to(336.0, "float8_e4m3fn"))
    assert second in (320.0, 352.0)
    expected = (8 + 16 * second / 448 + 0.5 * 2 + 0.5 * 4) / 4
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-14)
    np.testing.assert_allclose(lse, [[math.log(4)]])


# The cases: their answers are finite, do not depend on what must not be read, and cover what they promise


@pytest.mark.parametrize("case", cases.mask_cases() + cases.dense_cases(), ids=str)
def test_case(case):
    check_case(case, seed=1)


def check_case(case, seed):
    inputs = cases.make_inputs(case, seed)
    out, lse = cases.expected(case, inputs)
    assert out.shape == (*case.q_shape[:-1], case.v_dim or case.k_shape[-1]) and lse.shape == case.lse_shape
    assert np.isfinite(out).all() and not np.isnan(lse).any() and not (lse == math.inf).any()
    assert case.sinks or (np.moveaxis(out.any(-1), 1, -1).reshape(lse.shape) == (lse > NEG)).all()
    clean = cases.make_inputs(case, seed, poison=False)
    assert np.isfinite(clean["k"]).all()
    for poisoned, plain in zip((out, lse), cases.expected(case, clean), strict=True):
        np.testing.assert_array_equal(poisoned, plain)


@given(case=cases.draw_case(), seed=st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_drawn_case(case, seed):
    check_case(case, seed)


@pytest.mark.parametrize("case", cases.varlen_cases(), ids=str)
def test_varlen_case(case):
    inputs = cases.make_varlen_inputs(case)
    out, lse = cases.expected_varlen(case, inputs)
    assert out.shape == inputs["q"].shape and lse.shape == (case.q_heads, len(out)) and np.isfinite(out).all()
    plain, _ = cases.expected_varlen(case, cases.make_varlen_inputs(case, poison=False))
    np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("case", cases.merge_cases(), ids=str)
def test_merge_case(case):
    inputs = cases.make_merge_inputs(case)
    out, lse = cases.expected_merge(case, inputs)
    assert out.shape == case.shape and lse.shape == case.lse_shape
    assert np.isfinite(out).all() and not np.isnan(lse).any() and (lse == NEG).any() == (case.empty > 0)


def test_case_coverage():
    listed = cases.mask_cases()
    assert len({case.name for case in listed}) == len(listed)
    for mask_class in cases.MASK_CLASSES:
        mine = [case for case in listed if case.mask_class == mask_class]
        groups = {(len(c.q_shape), c.q_heads // math.prod(c.k_shape[2:-1])) for c in mine}
        assert groups >= {(ndim, group) for ndim in (4, 5) for group in (1, 4, 16)}
        assert {case.dtype for case in mine} == {"float16", "bfloat16", "float32"}
