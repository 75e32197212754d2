"""What MSLK's split-K attention and PyTorch's varlen attention make easy to get wrong.

Three lists, each with the numbers of its own: `trap`, behaviour that a reader would not expect; `defect`, where MSLK's
kernels deviate from their definition and this library follows the definition; `departure`, what this library serves on
purpose beyond the originals. Traps of operator classes, the split heuristic and FLOP counts belong to other files.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import acceptance
import cases
import jax_frontend as frontend
import oracle
import pallas_kernels as pk
from checks import close
from pallas_kernels import masks

TOLERANCE = cases.TOLERANCES["float16"]
DIM = 32


def draw(seed, *shapes, dtype="float16"):
    rng = np.random.default_rng(seed)
    return [acceptance.draw(rng, shape, dtype) for shape in shapes]


def attend(q, k, v, bias=None, *, dtype="float16", **options):
    """(out, lse) of pk.memory_efficient_attention_forward_requires_grad, numpy float64; formats pass through."""
    q, k, v = (frontend.array(x, dtype) if isinstance(x, np.ndarray) else x for x in (q, k, v))
    out, lse = pk.memory_efficient_attention_forward_requires_grad(q, k, v, bias, backend="chunked", **options)
    return frontend.numpy(out), frontend.numpy(lse)


def expect(actual, want):
    """Out and LSE of packed sequences, 4-D, against the oracle's."""
    close(actual[0], want[0][None], *TOLERANCE)
    close(actual[1], want[1][None], *cases.LSE_TOLERANCE)


def oracle_of(q, k, v, q_lens, positions, kind="all", **window):
    visible = [oracle.visible_table(kind, n, len(p), **window) for n, p in zip(q_lens, positions, strict=True)]
    return oracle.block_diagonal(q[0], k[0], v[0], q_lens, positions, visible)


def nan_but(x, positions):
    """x [1, T, ...] with NaN in every row that holds no key."""
    out = np.full_like(x, np.nan)
    for rows in positions:
        out[:, rows] = x[:, rows]
    return out


# Traps


def test_trap_01_lse_is_float64_beside_a_float32_output():
    q, k, v = (frontend.array(x, "float16") for x in draw(1, *[(1, 3, 2, DIM)] * 3))
    found = {}
    for x64, wide in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(x64):
            out, found[wide] = pk.memory_efficient_attention_partial(q, k, v, backend="chunked")
            assert (out.dtype, found[wide].dtype) == ("float32", wide)
            for name in ("partial", "forward_requires_grad"):
                function = getattr(pk, f"memory_efficient_attention_{name}")
                out, lse = function(q, k, v, output_dtype=jnp.float16, backend="chunked")
                assert (out.dtype, lse.dtype) == ("float16", "float32")
    np.testing.assert_array_equal(np.asarray(found["float64"]).astype(np.float32), np.asarray(found["float32"]))


def test_trap_02_lse_is_a_natural_logarithm_of_scores_and_bias():
    q, k, v = draw(2, (1, 1, 1, DIM), *[(1, 2, 1, DIM)] * 2)
    _, lse = attend(q, k, v, jnp.asarray([0.75, -1.0]).reshape(1, 1, 1, 2), scale=0.5)
    scores = 0.5 * (q * k).sum(-1).ravel() + [0.75, -1.0]
    close(lse, np.full((1, 1, 1), np.logaddexp(*scores)), 1e-5, 1e-5)


@pytest.mark.parametrize("heads", [(4,), (2, 2)], ids=["4d", "5d"])
def test_trap_03_lse_of_packed_sequences_keeps_queries_on_one_axis(heads):
    q, k, v = draw(3, (1, 5, *heads, DIM), *[(1, 32, *heads, DIM)] * 2)
    padded = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 3], 16, [9, 16])
    paged = padded.make_paged([[1, 0], [2, 3]], 8, masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    gappy = masks.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [1, 12, 32], [9, 16])
    for mask in (padded, paged, gappy):
        assert attend(q, k, v, mask)[1].shape == (1, *heads, 5)
    q, k, v = draw(3, (3, 5, *heads, DIM), *[(3, 16, *heads, DIM)] * 2)
    for bias in (None, jnp.zeros((3, *heads, 5, 16))):
        assert attend(q, k, v, bias)[1].shape == (3, *heads, 5)


def test_trap_04_bmk_queries_have_a_head_axis_in_the_lse():
    q, k, v = draw(4, (3, 5, DIM), (3, 16, DIM), (3, 16, DIM))
    out, lse = attend(q, k, v)
    assert out.shape == (3, 5, DIM) and lse.shape == (3, 1, 5)


@pytest.mark.parametrize("padding", [16, 64, 8192])
def test_trap_05_row_pitch_is_key_rows_over_n(padding):
    lens, positions = [16, 9], [np.arange(16), 24 + np.arange(9)]
    q, k, v = draw(5, (1, 4, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    mask = masks.BlockDiagonalPaddedKeysMask.from_seqlens([2, 2], padding, lens)
    expect(attend(q, *(nan_but(x, positions) for x in (k, v)), mask), oracle_of(q, k, v, [2, 2], positions))


def test_trap_06_causal_is_bottom_right_with_the_used_length():
    q_lens, lens = [6, 3], [2, 20]
    positions = [np.arange(2), 24 + np.arange(20)]
    q, k, v = draw(6, (1, 9, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    mask = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_lens, 24, lens)
    out, lse = attend(q, *(nan_but(x, positions) for x in (k, v)), mask)
    expect((out, lse), oracle_of(q, k, v, q_lens, positions, "causal"))
    np.testing.assert_array_equal(out[0, :4], 0)
    np.testing.assert_array_equal(lse[0, :, :4], -np.inf)
    close(out[0, 4], v[0, 0], *TOLERANCE)  # query 4 of 6 sees the first of two keys


def test_trap_07_paged_gappy_lengths_are_ends():
    starts, counts, table = [1, 5], [2, 3], [[2, 0], [1, 3]]
    gappy = masks.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [*starts, 8], counts)
    paged = gappy.make_paged(table, 2, 4, masks.PagedBlockDiagonalGappyKeysMask)
    assert np.asarray(gappy.k_seqinfo.seqlen).tolist() == [2, 3]
    assert np.asarray(paged.k_seqinfo.seqlen).tolist() == [3, 4]
    assert np.asarray(paged.k_seqinfo.seqstart).tolist()[:2] == [1, 1]
    q, k, v = draw(7, (1, 2, 2, DIM), *[(1, 8, 2, DIM)] * 2)
    positions = [np.array([5, 0]), np.array([3, 6, 7])]
    expect(attend(q, *(nan_but(x, positions) for x in (k, v)), paged), oracle_of(q, k, v, [1, 1], positions))


def test_trap_08_gappy_starts_overlap_in_any_order_and_the_last_is_no_start():
    lens, starts = [4, 6, 3], [6, 2, 4]
    positions = [s + np.arange(n) for s, n in zip(starts, lens, strict=True)]
    q, k, v = draw(8, (1, 6, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    want = oracle_of(q, k, v, [2] * 3, positions)
    for total in (48, 1):
        mask = masks.BlockDiagonalGappyKeysMask.from_seqlens([2] * 3, [*starts, total], lens)
        expect(attend(q, *(nan_but(x, positions) for x in (k, v)), mask), want)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_trap_09_table_entries_behind_the_last_used_page_may_be_anything(place):
    table = np.array([[2, -1, 10**6], [0, 3, -(2**31)], [2**31 - 1, -5, 7]], np.int32)
    lens = [5, 16, 0]
    positions = [16 + np.arange(5), np.r_[0:8, 24:32], np.zeros(0, int)]
    q, k, v = draw(9, (1, 3, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    mask = masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1] * 3, lens, place(table), 8)
    expect(attend(q, *(nan_but(x, positions) for x in (k, v)), mask), oracle_of(q, k, v, [1] * 3, positions))


def test_trap_10_unused_value_rows_are_not_merely_weighted_by_zero():
    lens, positions = [5, 0], [np.arange(5), np.zeros(0, int)]
    q, k, v = draw(10, (1, 2, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    mask = masks.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 24, lens)
    want = oracle_of(q, k, v, [1, 1], positions)
    for bad in (np.nan, np.inf):
        poisoned = np.full_like(v, bad)
        poisoned[:, :5] = v[:, :5]
        expect(attend(q, k, poisoned, mask), want)


def test_trap_11_int4_rows_begin_with_all_coefficients():
    words = np.array([0xBC003000, 0x40003800, *[0x76543210, 0xFEDCBA98] * 2], np.uint32).view(np.int32)
    seed = pk.formats.SeedInt4(jnp.asarray(words.reshape(1, 1, 1, 6)), num_groups=2)
    values = [*(n * 0.125 - 1 for n in range(16)), *(n * 0.5 + 2 for n in range(16))]
    np.testing.assert_array_equal(np.asarray(seed.dequantize()).ravel(), values)
    q = frontend.array(draw(11, (1, 1, 1, 32))[0], "float16")
    out, _ = attend(q, seed, seed)  # one key: the output is its value
    np.testing.assert_array_equal(out.ravel(), values)
    other = pk.formats.SeedInt4(seed.words, num_groups=1)
    assert seed.shape[-1] == 32 and other.shape[-1] == 40
    with pytest.raises(pk.errors.ShapeError, match="head_dim 40"):
        attend(q, other, other)


def test_trap_12_low_bit_rows_are_decoded_in_half_then_rounded_to_the_query():
    rng = np.random.default_rng(12)
    scale, shift = rng.uniform(0.01, 2, (1, 1, 64, 1)), rng.standard_normal((1, 1, 64, 1))
    nibbles = rng.integers(0, 16, (1, 1, 64, DIM))
    rows = oracle.int4_pack(nibbles, scale, shift)
    words, coefs = acceptance.fp8_rows(rng, (1, 1, 64, DIM))
    wide_words, wide_coefs = acceptance.fp8_rows(rng, (1, 1, 64, DIM), symmetric=True, fp32_scales=True)
    seeds = {
        "int4": pk.formats.SeedInt4(jnp.asarray(rows)),
        "fp8": pk.formats.SeedFp8(jnp.asarray(words), jnp.asarray(coefs)),
        "fp32": pk.formats.SeedFp8(jnp.asarray(wide_words), jnp.asarray(wide_coefs), fp32_scales=True),
    }
    coefficients = {"int4": oracle.coefficients(rows[..., 0]), "fp8": oracle.coefficients(coefs)}
    codes = {"int4": nibbles, "fp8": oracle.e4m3_decode(words)}
    truth = {
        "int4": oracle.int4_dequantize(rows, 1),
        "fp8": oracle.fp8_dequantize(words, coefs),
        "fp32": oracle.fp8_dequantize(wide_words, wide_coefs, fp32_scales=True),
    }
    q = frontend.array(draw(12, (1, 1, 64, DIM), dtype="bfloat16")[0], "bfloat16")
    for name, seed in seeds.items():
        np.testing.assert_array_equal(np.asarray(seed.dequantize()), truth[name].astype(np.float32))
        if name in codes:  # float32 arithmetic gives other numbers
            a, b = (x.astype(np.float32)[..., None] for x in coefficients[name])
            assert (truth[name] != codes[name].astype(np.float32) * a + b).any()
        out, _ = attend(q, seed, seed)
        np.testing.assert_array_equal(out, cases.round_f32(truth[name], "bfloat16"))


def fp8_query(q):
    """A query in e4m3 and its scales, float32 [B, heads, Mq] in the format and [B, Mq, heads] as numpy."""
    words, scales = oracle.fp8_quantize(q, symmetric=True, fp32_scales=True)
    values = oracle.e4m3_decode(words)
    query = pk.formats.Fp8(frontend.array(values, "float8_e4m3fn"), jnp.asarray(np.moveaxis(scales, 1, -1)))
    return query, values, scales


def fp8_problem(seed, keys, **options):
    """q [1, 2, 2, D] in e4m3, keys and values of two heads (asymmetric rows: with shifts)."""
    rng = np.random.default_rng(seed)
    query, values, scales = fp8_query(acceptance.draw(rng, (1, 2, 2, DIM), "bfloat16"))
    rows = [acceptance.fp8_rows(rng, (1, keys, 2, DIM), **options) for _ in "kv"]
    formats = [pk.formats.SeedFp8(jnp.asarray(words), jnp.asarray(coefs)) for words, coefs in rows]
    return query, values, scales, rows, formats


def fp8_expected(values, scales, rows, keys, **options):
    (k_words, k_coefs), (v_words, v_coefs) = rows
    return oracle.fp8_attend(
        values[0], k_words[0], v_words[0], k_coefs[0], v_coefs[0], scale=DIM**-0.5, visible=np.ones((2, keys), bool),
        query_dtype="float8_e4m3fn", q_scales=scales[0], **options,
    )  # fmt: skip


def test_trap_13_scales_of_an_fp8_query_are_plain_float32():
    query, values, scales, rows, kv = fp8_problem(13, 1)
    assert query.scale.dtype == "float32" and query.scale.shape == (1, 2, 2)
    assert kv[0].coefficients.dtype == "int32"
    k_scale = oracle.coefficients(rows[0][1])[0].astype(np.float64)
    want = (values[0] * oracle.e4m3_decode(rows[0][0])[0]).sum(-1) * scales[0] * k_scale[0] * DIM**-0.5
    _, lse = attend(query, *kv, output_dtype=jnp.float32)
    close(lse[0], want.T, 1e-5, 1e-5)


@pytest.mark.parametrize("pv", [False, True])
def test_trap_14_fp8_qk_rounds_values_and_drops_shifts(pv):
    query, values, scales, rows, kv = fp8_problem(14, 1)
    out, lse = attend(query, *kv, output_dtype=jnp.float32, quantize_pv=pv)
    v_scale, v_shift = (x.astype(np.float64)[0, 0, :, None] for x in oracle.coefficients(rows[1][1]))
    assert (np.abs(oracle.coefficients(rows[0][1])[1]) > 1e-3).all() and (np.abs(v_shift) > 1e-3).all()
    # One key: its weight is 1.
    decoded = oracle.round_to(oracle.fp8_dequantize(*rows[1]), "float8_e4m3fn")[0, 0]
    want = oracle.e4m3_decode(rows[1][0])[0, 0] * v_scale if pv else decoded
    close(out[0], np.broadcast_to(want, out[0].shape), 1e-6, 1e-5)
    close(lse[0], fp8_expected(values, scales, rows, 1, quantize_pv=pv)[1], 1e-5, 1e-5)  # without k's shift


def test_trap_14_fp8_qk_rounds_probabilities():
    query, values, scales, rows, kv = fp8_problem(15, 100)
    out, lse = attend(query, *kv, output_dtype=jnp.float32)
    want, want_lse = fp8_expected(values, scales, rows, 100)
    close(out[0], want, 5e-4, 0)
    close(lse[0], want_lse, 1e-4, 1e-5)


def test_trap_15_fp8_pv_has_scales_for_blocks_of_64_keys():
    query, values, scales, rows, kv = fp8_problem(16, 100)
    out, lse = attend(query, *kv, output_dtype=jnp.float32, quantize_pv=True)
    want, want_lse = fp8_expected(values, scales, rows, 100, quantize_pv=True)
    close(out[0], want, 5e-4, 0)
    for block in (32, 128):
        other, _ = fp8_expected(values, scales, rows, 100, quantize_pv=True, block_n=block)
        assert np.abs(out[0] - other).max() > 5 * np.abs(out[0] - want).max()
    close(lse[0], want_lse, 1e-4, 1e-5)
    plain = attend(query, *kv, output_dtype=jnp.float32)[1]
    np.testing.assert_array_equal(lse, plain)


def test_trap_16_fp8_scales_may_carry_every_head_of_shared_rows():
    rng = np.random.default_rng(16)
    (q,) = draw(16, (1, 2, 4, DIM))
    rows = [acceptance.fp8_rows(rng, (1, 40, 1, DIM)) for _ in "kv"]
    results = []
    for heads in (1, 4):
        kv = [
            pk.formats.SeedFp8(jnp.asarray(np.repeat(words, heads, 2)), jnp.asarray(np.repeat(coefs, heads, 2)))
            for words, coefs in rows
        ]
        results.append(attend(q, *kv))
    for one, all_heads in zip(*results, strict=True):
        close(all_heads, one, 1e-3, 1e-3)
    k, v = (oracle.round_to(oracle.fp8_dequantize(*x), "float16") for x in rows)
    close(results[0][0], oracle.dense(q, k, v)[0], *TOLERANCE)


def test_trap_22_merge_keeps_large_lses_apart_in_their_own_dtype():
    rng = np.random.default_rng(22)
    outs = rng.standard_normal((3, 2, 5, 2, 16)).astype(np.float32)
    lses = rng.standard_normal((3, 2, 2, 5)) + 1e6
    with jax.enable_x64(True):
        out, lse = pk.merge_attentions(jnp.asarray(outs), jnp.asarray(lses))
        assert lse.dtype == "float64"
    want, want_lse = oracle.merge(outs, lses)
    close(frontend.numpy(out), want, 1e-4, 1e-4)
    close(frontend.numpy(lse) - 1e6, want_lse - 1e6, 1e-4, 1e-4)


def test_trap_23_merge_takes_chunks_of_different_dtypes():
    rng = np.random.default_rng(23)
    outs, lses = rng.standard_normal((2, 1, 5, 2, 16)), rng.standard_normal((2, 1, 2, 5))
    pairs = [("float32", "float64"), ("bfloat16", "float32")]  # of an output and its LSE
    with jax.enable_x64(True):
        for order in (pairs, pairs[::-1]):
            chunks, logs = (
                [jnp.asarray(x).astype(pair[n]) for x, pair in zip(arrays, order, strict=True)]
                for n, arrays in enumerate((outs, lses))
            )
            out, lse = pk.merge_attentions(chunks, logs)
            assert (out.dtype, lse.dtype) == order[0]
            want, want_lse = oracle.merge([frontend.numpy(x) for x in chunks], [frontend.numpy(x) for x in logs])
            close(frontend.numpy(out), want, *cases.TOLERANCES[order[0][0]])
            close(frontend.numpy(lse), want_lse, 1e-5, 1e-5)


def test_trap_24_rows_that_no_chunk_sees_merge_to_zero_and_minus_infinity():
    rng = np.random.default_rng(24)
    outs, lses = rng.standard_normal((2, 1, 5, 2, 16)), rng.standard_normal((2, 1, 2, 5))
    lses[:, 0, 0, 1] = -np.inf
    lses[0, 0, 1, 3] = -np.inf
    outs[:, 0, 1, 0] = np.nan  # what an empty chunk holds has no weight
    outs[0, 0, 3, 1] = np.nan
    out, lse = pk.merge_attentions(jnp.asarray(outs, jnp.float32), jnp.asarray(lses, jnp.float32))
    want, want_lse = oracle.merge(np.nan_to_num(outs), lses)
    close(frontend.numpy(out), want, 1e-5, 1e-5)
    close(frontend.numpy(lse), want_lse, 1e-5, 1e-5)
    np.testing.assert_array_equal(frontend.numpy(out)[0, 1, 0], 0)
    assert frontend.numpy(lse)[0, 0, 1] == -np.inf


def varlen(q, k, v, q_lens, k_lens, *, max_k=None, lse=True, dtype="float16", **options):
    cu_q, cu_k = (jnp.asarray(np.cumsum([0, *lens]), jnp.int32) for lens in (q_lens, k_lens))
    result = pk.varlen_attn(
        *(frontend.array(x, dtype) for x in (q, k, v)), cu_q, cu_k, max(q_lens), max_k or max(k_lens),
        return_aux=pk.AuxRequest(lse=True) if lse else None, backend="chunked", **options,
    )  # fmt: skip
    return tuple(frontend.numpy(x) for x in result) if lse else frontend.numpy(result)


def test_trap_25_empty_varlen_rows_have_an_lse_that_merges():
    q, k, v = draw(25, (5, 2, DIM), *[(9, 2, DIM)] * 2)
    out, lse = varlen(q, k, v, [2, 3], [9, 0])
    np.testing.assert_array_equal(out[2:], 0)
    np.testing.assert_array_equal(lse[:, 2:], -np.inf)
    q2, k2, v2 = draw(26, (5, 2, DIM), *[(9, 2, DIM)] * 2)
    out2, lse2 = varlen(q2, k2, v2, [2, 3], [4, 5])
    outs, lses = ([jnp.asarray(x[None], jnp.float32) for x in pair] for pair in ((out2, out), (lse2, lse)))
    merged, merged_lse = pk.merge_attentions(outs, lses)
    np.testing.assert_array_equal(frontend.numpy(merged)[0, 2:], out2[2:])
    close(frontend.numpy(merged_lse)[0, :, 2:], lse2[:, 2:], 1e-6, 1e-6)


def seen(weights):
    """Which keys a query sees: `weights` is its output where the values are rows of the identity."""
    return np.flatnonzero(weights > 0).tolist()


def test_trap_26_windows_count_keys_differently():
    q, k = draw(26, *[(1, 32, 1, DIM)] * 2)
    v = np.eye(32, dtype=np.float32)[None, :, None]
    for window in ((4, 0), (2, 3)):
        out = varlen(q[0], k[0], v[0], [32], [32], lse=False, window_size=window)
        assert seen(out[16, 0]) == list(range(16 - window[0], 16 + window[1] + 1))  # W + 1 keys, L + R + 1 keys
    local = masks.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local([32], 32, [32], 4, 2)
    assert seen(attend(q, k, v, local)[0][0, 16, 0]) == list(range(12, 19))  # L + R + 1 keys
    causal = masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([32], 32, [32], 4)
    assert seen(attend(q, k, v, causal)[0][0, 16, 0]) == list(range(13, 17))  # W keys


def test_trap_27_varlen_lse_leads_with_heads():
    q, k, v = draw(27, (5, 2, DIM), *[(9, 2, DIM)] * 2)
    out, lse = varlen(q, k, v, [2, 3], [4, 5])
    want, want_lse = oracle.varlen(q, k, v, [0, 2, 5], [0, 4, 9])
    assert out.shape == (5, 2, DIM) and lse.shape == (2, 5)
    close(out, want, *TOLERANCE)
    close(lse, want_lse, *cases.LSE_TOLERANCE)


def test_trap_29_max_k_changes_a_sequence_within_tolerance_only():
    """The kernels promise the same bits with num_splits=1; `chunked` promises the tolerance."""
    q, k, v = draw(29, (300, 2, DIM), *[(300, 2, DIM)] * 2)
    one = varlen(q, k, v, [300], [300], num_splits=1)
    other = varlen(q, k, v, [300], [300], num_splits=1, max_k=4000)
    for a, b in zip(one, other, strict=True):
        close(b, a, 1e-3, 1e-3)
    close(other[0], oracle.varlen(q, k, v, [0, 300], [0, 300])[0], *TOLERANCE)


def test_trap_32_empty_inputs_return_the_query_dtype():
    rng = np.random.default_rng(32)
    q = frontend.array(acceptance.draw(rng, (1, 2, 2, DIM), "bfloat16"), "bfloat16")
    words, coefs = acceptance.fp8_rows(rng, (1, 4, 2, DIM))
    none = pk.formats.SeedFp8(jnp.asarray(words[:, :0]), jnp.asarray(coefs[:, :0]))
    plain = jnp.zeros((1, 0, 2, DIM), jnp.bfloat16)
    for kv in (none, plain):
        out, lse = pk.memory_efficient_attention_forward_requires_grad(q, kv, kv, backend="chunked")
        assert out.dtype == "bfloat16" and out.shape == q.shape and lse.shape == (1, 2, 2)
        np.testing.assert_array_equal(frontend.numpy(out), 0)
        np.testing.assert_array_equal(frontend.numpy(lse), -np.inf)


def test_trap_33_a_single_query_ignores_the_right_bound_not_the_left():
    lens, positions = [24, 7], [np.arange(24), 24 + np.arange(7)]
    q, k, v = draw(33, (1, 2, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    k, v = (nan_but(x, positions) for x in (k, v))

    def local(left, right):
        mask = masks.BlockDiagonalLocalAttentionPaddedKeysMask
        return attend(q, k, v, mask.from_seqlens_local([1, 1], 24, lens, left, right))

    for left, right in ((9, 0), (9, 5)):
        expect(local(left, right), oracle_of(q, k, v, [1, 1], positions, "window", left=9, right=0))
    assert np.abs(local(9, 0)[0] - local(3, 0)[0]).max() > 0.05
    causal = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 1], 24, lens)
    expect(attend(q, k, v, causal), oracle_of(q, k, v, [1, 1], positions))
    windowed = masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([1, 1], 24, lens, 9)
    expect(attend(q, k, v, windowed), oracle_of(q, k, v, [1, 1], positions, "local", window=9))


def test_trap_34_int4_may_fuse_its_multiply_and_add():
    rng = np.random.default_rng(34)
    scale, shift = rng.uniform(-2, 2, (1, 999, 1, 1)), 3 * rng.standard_normal((1, 999, 1, 1))
    rows = oracle.int4_pack(rng.integers(0, 16, (1, 999, 1, DIM)), scale, shift)
    for decode in (lambda x: x.dequantize(), jax.jit(lambda x: x.dequantize())):
        found = np.asarray(decode(pk.formats.SeedInt4(jnp.asarray(rows))))
        two, one = (oracle.int4_dequantize(rows, 1, fused=fused).astype(np.float32) for fused in (False, True))
        assert ((found == two) | (found == one)).all()
        assert (two != one).any()


# Defects of the original, resolved by the definition


def test_trap_35_local_and_causal_gappy_follow_the_formula():
    """The outputs of the original kernels are no golden data here: those of defects 1 and 2."""
    test_defect_1_local_windows_of_several_queries_and_sequences((2, 2))
    test_defect_2_causal_gappy_sees_no_future_keys()


@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (2, 1)], ids=str)
def test_defect_1_local_windows_of_several_queries_and_sequences(heads):
    q_lens, lens = [5, 5, 5], [24, 7, 16]
    positions = [24 * b + np.arange(n) for b, n in enumerate(lens)]
    q, k, v = draw(101, (1, 15, heads[0], DIM), *[(1, 72, heads[1], DIM)] * 2)
    k, v = (nan_but(x, positions) for x in (k, v))
    mask = masks.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(q_lens, 24, lens, 3, 1)
    expect(attend(q, k, v, mask), oracle_of(q, k, v, q_lens, positions, "window", left=3, right=1))


def test_defect_2_causal_gappy_sees_no_future_keys():
    q_lens, lens, starts = [4, 4], [12, 9], [10, 25]
    positions = [s + np.arange(n) for s, n in zip(starts, lens, strict=True)]
    q, k, v = draw(102, (1, 8, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    k, v = (nan_but(x, positions) for x in (k, v))
    mask = masks.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(q_lens, [*starts, 48], lens)
    expect(attend(q, k, v, mask), oracle_of(q, k, v, q_lens, positions, "causal"))


PAGED_GAPPY = [masks.PagedBlockDiagonalGappyKeysMask, masks.PagedBlockDiagonalCausalWithOffsetGappyKeysMask]
PAGED_TABLE, PAGED_STARTS, PAGED_LENS = [[3, 1], [0, 5], [2, 4]], [3, 9, 0], [10, 0, 7]
PAGED_POSITIONS = [np.r_[27:32, 8:13], np.zeros(0, int), np.r_[16:23]]


@pytest.mark.parametrize("cls", PAGED_GAPPY, ids=lambda c: c.__name__)
def test_defect_3_paged_gappy_masks_from_lengths(cls):
    mask = cls.from_seqlens([2] * 3, PAGED_STARTS, PAGED_LENS, PAGED_TABLE, 8)
    assert np.asarray(mask.k_seqinfo.seqstart).tolist() == [*PAGED_STARTS, -1]
    assert np.asarray(mask.k_seqinfo.seqlen).tolist() == [13, 9, 7]
    q, k, v = draw(103, (1, 6, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    want = oracle_of(q, k, v, [2] * 3, PAGED_POSITIONS, "causal" if "Causal" in cls.__name__ else "all")
    expect(attend(q, *(nan_but(x, PAGED_POSITIONS) for x in (k, v)), mask), want)


@pytest.mark.parametrize("splits", [None, 1, 2])
def test_defect_4_paged_gappy_without_keys_and_an_unaligned_start(splits):
    mask = PAGED_GAPPY[0].from_seqlens([2] * 3, PAGED_STARTS, PAGED_LENS, PAGED_TABLE, 8)
    q, k, v = draw(103, (1, 6, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    out, lse = attend(q, *(nan_but(x, PAGED_POSITIONS) for x in (k, v)), mask, num_splits=splits)
    np.testing.assert_array_equal(out[0, 2:4], 0)
    np.testing.assert_array_equal(lse[0, :, 2:4], -np.inf)
    assert np.isfinite(out).all() and np.isfinite(lse[0, :, [0, 1, 4, 5]]).all()


def test_defect_5_values_before_the_start_in_the_first_page_have_no_effect():
    mask = PAGED_GAPPY[0].from_seqlens([2] * 3, PAGED_STARTS, PAGED_LENS, PAGED_TABLE, 8)
    q, k, v = draw(103, (1, 6, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    clean = attend(q, k, v, mask)
    v[0, 24:27] = np.nan  # page 3, before the first key of sequence 0
    for a, b in zip(attend(q, k, v, mask), clean, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["padded", "gappy", "paged"])
def test_defect_7_single_queries_beside_sequences_without_any(layout):
    q_lens, lens = [1, 0, 1], [24, 5, 16]
    q, k, v = draw(107, (1, 2, 2, DIM), *[(1, 72, 2, DIM)] * 2)
    positions = [24 * b + np.arange(n) for b, n in enumerate(lens)]
    mask = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_lens, 24, lens)
    if layout == "gappy":
        positions = [s + np.arange(n) for s, n in zip((40, 0, 7), lens, strict=True)]
        mask = masks.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(q_lens, [40, 0, 7, 72], lens)
    elif layout == "paged":
        positions = [np.r_[48:72], np.r_[16:21], np.r_[24:40]]
        table = [[6, 7, 8], [2, -1, -1], [3, 4, -1]]
        mask = mask.make_paged(table, 8, masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    k, v = (nan_but(x, [positions[0], positions[2]]) for x in (k, v))
    expect(attend(q, k, v, mask), oracle_of(q, k, v, q_lens, positions, "causal"))


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
@pytest.mark.parametrize("as_list", [False, True])
def test_defect_8_merge_compares_the_query_counts(kind, as_list):
    rng = np.random.default_rng(108)
    outs, lses = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 1, 5, 2, 16), (2, 1, 2, 4)))
    with pytest.raises(kind):
        pk.merge_attentions(*((list(outs), list(lses)) if as_list else (outs, lses)))


def test_defect_10_empty_inputs_keep_their_shapes_with_an_output_dtype():
    """Of the two dtypes that may come, this library returns the one that was asked for."""
    q, k, v = (frontend.array(x, "float16") for x in draw(110, (1, 2, 2, DIM), *[(1, 0, 2, DIM)] * 2))
    out, lse = pk.memory_efficient_attention_forward_requires_grad(
        q, k, v, output_dtype=jnp.float32, backend="chunked"
    )
    assert out.shape == q.shape and out.dtype == "float32" and lse.shape == (1, 2, 2)
    np.testing.assert_array_equal(frontend.numpy(out), 0)
    np.testing.assert_array_equal(frontend.numpy(lse), -np.inf)


# Departures


@pytest.mark.parametrize("kind", ["causal", "local", "window"])
def test_departure_more_than_16_queries_and_unequal_counts(kind):
    q_lens, lens = [40, 1, 0, 17], [24, 16, 9, 24]
    positions = [24 * b + np.arange(n) for b, n in enumerate(lens)]
    q, k, v = draw(201, (1, 58, 2, DIM), *[(1, 96, 2, DIM)] * 2)
    cls, arguments, window = {
        "causal": (masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens, (), {}),
        "local": (masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local, (5,), {"window": 5}),
        "window": (
            masks.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local, (5, 2), {"left": 5, "right": 2},
        ),
    }[kind]  # fmt: skip
    k, v = (nan_but(x, positions) for x in (k, v))
    expect(attend(q, k, v, cls(q_lens, 24, lens, *arguments)), oracle_of(q, k, v, q_lens, positions, kind, **window))


@pytest.mark.parametrize(("dim", "v_dim"), [(48, 48), (80, 80), (96, 96), (112, 112), (192, 128), (320, 320), (16, 64)])
def test_departure_other_head_dims(dim, v_dim):
    q, k, v = draw(202, (1, 3, 4, dim), (1, 40, 2, dim), (1, 40, 2, v_dim))
    out, lse = attend(q, k, v)
    want, want_lse = oracle.dense(q, k, v)
    assert out.shape == (1, 3, 4, v_dim)
    close(out, want, *TOLERANCE)
    close(lse, want_lse, *cases.LSE_TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 8, 24])
def test_departure_small_pages(page_size):
    lens, rows = [24, 7], 48
    table = np.random.default_rng(203).permutation(rows // page_size).reshape(2, -1)
    positions = oracle.key_positions("paged", lens, block_tables=table, page_size=page_size)
    q, k, v = draw(203, (1, 4, 2, DIM), *[(1, rows, 2, DIM)] * 2)
    mask = masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens([2, 2], lens, table, page_size)
    expect(attend(q, *(nan_but(x, positions) for x in (k, v)), mask), oracle_of(q, k, v, [2, 2], positions))


@pytest.mark.parametrize("shape", [(2, 4, 3, 40), (1, 4, 3, 40), (2, 1, 1, 40), (1, 1, 3, 1)], ids=str)
def test_departure_array_bias_with_splits_broadcast_axes_and_shared_heads(shape):
    q, k, v = draw(204, (2, 3, 4, DIM), *[(2, 40, 2, DIM)] * 2)
    bias = np.random.default_rng(204).standard_normal(shape).astype(np.float32)
    out, lse = attend(q, k, v, jnp.asarray(bias), num_splits=4)
    want, want_lse = oracle.dense(q, k, v, bias=bias)
    close(out, want, *TOLERANCE)
    close(lse, want_lse, *cases.LSE_TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_departure_wide_queries(dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (np.random.default_rng(205).standard_normal((3, 2, 40, 2, DIM)).astype(dtype))
        out, lse = attend(q, k, v, dtype=dtype)
    want, want_lse = oracle.dense(q, k, v)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    close(out, want, tolerance, tolerance)
    close(lse, want_lse, tolerance, tolerance)


def test_departure_num_splits_cut_the_sequence_and_only_round():
    q, k, v = draw(206, (2, 3, 2, DIM), *[(2, 100, 2, DIM)] * 2)
    want, want_lse = oracle.dense(q, k, v)
    for options in ({"num_splits": 1}, {"num_splits": 7}, {"split_size": 16}):
        out, lse = attend(q, k, v, **options)
        close(out, want, *TOLERANCE)
        close(lse, want_lse, *cases.LSE_TOLERANCE)


def test_departure_gradients_through_the_lse_and_the_merge():
    rng = np.random.default_rng(207)
    q, k, v, w = (rng.standard_normal((1, n, 2, 8)) for n in (3, 10, 10, 3))
    w_lse = rng.standard_normal((1, 2, 3))

    def loss(attend_to, merge, x):
        parts = [attend_to(q, k[:, s] + x[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 10))]
        out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
        return (out * w).sum() + (lse * w_lse).sum() + (parts[0][1] * w_lse).sum()

    def by_library(x, write_lse=True):
        def merge(outs, lses):
            out, lse = pk.merge_attentions(outs, lses, write_lse=write_lse)
            return out, jnp.zeros(()) if lse is None else lse

        def attend_to(*qkv):
            return pk.memory_efficient_attention_partial(*(jnp.asarray(a) for a in qkv), backend="chunked")

        return loss(attend_to, merge, x)

    def without_merged_lse(outs, lses):
        return oracle.merge(outs, lses)[0], np.zeros(())

    x, direction = np.zeros_like(k), rng.standard_normal(k.shape)
    with jax.enable_x64(True):
        for write_lse, merge in ((True, oracle.merge), (False, without_merged_lse)):
            gradient = jax.grad(by_library)(jnp.asarray(x), write_lse)
            slope = oracle.numeric_directional(functools.partial(loss, oracle.dense, merge), x, direction)
            assert np.isclose(float((gradient * direction).sum()), slope, rtol=1e-6, atol=1e-8)


def test_departure_errors_are_of_both_kinds():
    q, k, v = draw(208, (1, 4, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    beyond = masks.BlockDiagonalPaddedKeysMask.from_seqlens([2, 2], 64, [30, 5])  # the pitch is 24
    for kind in (ValueError, AssertionError, RuntimeError, pk.errors.ShapeError):
        with pytest.raises(kind, match="kv_seqlen"):
            attend(q, k, v, beyond)
        with pytest.raises(kind, match="multiple"):
            attend(q, k[:, :47], v[:, :47], masks.BlockDiagonalPaddedKeysMask.from_seqlens([2, 2], 20, [3, 5]))
    dtypes = ("float16", "bfloat16", "float16")
    mixed = [frontend.array(x, dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
    for kind in (ValueError, TypeError, AssertionError, pk.errors.DTypeError):
        with pytest.raises(kind, match="dtypes"):
            pk.memory_efficient_attention(*mixed)
    for kind in (ValueError, NotImplementedError, pk.errors.UnsupportedError):
        with pytest.raises(kind, match="dropout"):
            attend(q, k, v, p=0.5)
