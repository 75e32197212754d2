"""The traps, defects and departures that only the torch front end has, or has by code of its own.

tests/jax/test_traps.py says what the names mean and holds the others.
"""

import functools

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import acceptance
import bridge
import cases
import oracle
import torch_frontend as frontend
from bridge.fmha import attn_bias
from checks import close

TOLERANCE = cases.TOLERANCES["float16"]
DIM = 32


def draw(seed, *shapes, dtype="float16"):
    rng = np.random.default_rng(seed)
    return [acceptance.draw(rng, shape, dtype) for shape in shapes]


def tensors(*arrays, dtype="float16"):
    return [frontend.array(x, dtype) for x in arrays]


def attend(q, k, v, bias=None, **options):
    """(out, lse), numpy, of tensors or of numpy arrays taken to float16."""
    q, k, v = (frontend.array(x, "float16") if isinstance(x, np.ndarray) else x for x in (q, k, v))
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v, bias, backend="chunked", **options)
    return frontend.numpy(out), frontend.numpy(lse)


def expect(actual, q, k, v, q_lens, positions, kind="all"):
    visible = [oracle.visible_table(kind, n, len(p)) for n, p in zip(q_lens, positions, strict=True)]
    want, want_lse = oracle.block_diagonal(q[0], k[0], v[0], q_lens, positions, visible)
    close(actual[0], want[None], *TOLERANCE)
    close(actual[1], want_lse[None], *cases.LSE_TOLERANCE)


# Traps


def test_trap_01_lse_is_float64_beside_a_float32_output():
    q, k, v = tensors(*draw(1, *[(1, 3, 2, DIM)] * 3))
    out, lse = bridge.memory_efficient_attention_partial(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float64)
    for dtype in (torch.float16, torch.bfloat16):
        out, lse = bridge.memory_efficient_attention_partial(q, k, v, output_dtype=dtype)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


def test_trap_07_paged_gappy_lengths_are_ends_and_the_extremes_counts():
    gappy = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [1, 5, 8], [2, 3])
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    paged = gappy.make_paged(table, 2, 4, attn_bias.PagedBlockDiagonalGappyKeysMask)
    for mask, lengths in ((gappy, [2, 3]), (paged, [3, 4])):
        info = mask.k_seqinfo
        assert info.seqlen.tolist() == info.seqlen_py == lengths
        assert (info.max_seqlen, info.min_seqlen) == (3, 2)
    assert paged.k_seqinfo.seqstart_py == [1, 1, -1]
    q, k, v = draw(7, (1, 2, 2, DIM), *[(1, 8, 2, DIM)] * 2)
    expect(attend(q, k, v, paged), q, k, v, [1, 1], [np.array([5, 0]), np.array([3, 6, 7])])


@pytest.mark.parametrize("axes", [4, 5])
def test_trap_16_heads_of_stride_zero_are_those_of_a_copy(axes):
    lead, shared = ((8,), (1,)) if axes == 4 else ((2, 4), (2, 1))
    q, k, v = tensors(*draw(16, (2, 3, *lead, DIM), *[(2, 40, *shared, DIM)] * 2))
    expanded = [x.expand(*x.shape[:-2], lead[-1], DIM) for x in (k, v)]
    copied = [x.contiguous() for x in expanded]
    assert expanded[0].stride(-2) == 0 and copied[0].stride(-2) != 0
    results = [attend(q, *kv) for kv in (expanded, copied, (expanded[0], copied[1]))]
    for other in results[1:]:
        close(other[0], results[0][0], *TOLERANCE)
        close(other[1], results[0][1], *cases.LSE_TOLERANCE)
    want, _ = oracle.dense(*(frontend.numpy(x).reshape(*x.shape[:2], -1, DIM) for x in (q, *copied)))
    close(results[0][0], want.reshape(results[0][0].shape), *TOLERANCE)


def test_trap_16_expanded_fp8_rows_with_scales_of_every_head():
    rng = np.random.default_rng(16)
    (q,) = draw(16, (1, 2, 4, DIM))
    rows = [acceptance.fp8_rows(rng, (1, 40, 1, DIM)) for _ in "kv"]
    kv = [
        bridge.formats.SeedFp8(torch.from_numpy(words).expand(1, 40, 4, -1), torch.from_numpy(coefs).expand(1, 40, 4))
        for words, coefs in rows
    ]
    want, _ = oracle.dense(q, *(oracle.round_to(oracle.fp8_dequantize(*x), "float16") for x in rows))
    close(attend(q, *kv)[0], want, *TOLERANCE)


def test_trap_21_masking_follows_lengths_that_were_updated_in_place():
    q, k, v = draw(21, (1, 2, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    mask = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 24, [24, 16])
    positions = [np.arange(24), 24 + np.arange(16)]
    expect(attend(q, k, v, mask), q, k, v, [1, 1], positions)
    mask.k_seqinfo.from_seqlens_padded_inplace([5, 10])
    assert (mask.k_seqinfo.max_seqlen, mask.k_seqinfo.min_seqlen) == (24, 16)
    positions = [np.arange(5), 24 + np.arange(10)]
    poisoned = [np.full_like(x, np.nan) for x in (k, v)]
    for new, old in zip(poisoned, (k, v), strict=True):
        for rows in positions:
            new[:, rows] = old[:, rows]
    expect(attend(q, *poisoned, mask), q, k, v, [1, 1], positions)
    mask.k_seqinfo.seqlen.copy_(torch.tensor([3, 0], dtype=torch.int32))  # the tensor alone, as in a CUDA graph
    expect(attend(q, *poisoned, mask), q, k, v, [1, 1], [np.arange(3), np.zeros(0, int)])


@pytest.mark.parametrize("name", ["seqused_k", "block_table"])
def test_trap_31_used_lengths_and_pages_raise_only_while_autograd_records(name):
    q, k, v = tensors(*draw(31, (2, 2, DIM), *[(16, 2, DIM)] * 2))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 8, 16]))
    tables = {"seqused_k": torch.tensor([3, 8], dtype=torch.int32)}
    if name == "block_table":
        tables["block_table"] = torch.tensor([[0], [1]], dtype=torch.int32)
        k, v = (x.view(2, 8, 2, DIM) for x in (k, v))

    def call(query):
        return bridge.varlen_attn(query, k, v, cu_q, cu_k, 1, 8, backend="chunked", **tables)

    want = call(q)
    q = q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=name):
        call(q)
    with torch.no_grad():
        assert torch.equal(call(q), want)


# Defects


PAGED_GAPPY = [attn_bias.PagedBlockDiagonalGappyKeysMask, attn_bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask]
PAGED_TABLE, PAGED_STARTS, PAGED_LENS = [[3, 1], [0, 5], [2, 4]], [3, 9, 0], [10, 0, 7]
PAGED_POSITIONS = [np.r_[27:32, 8:13], np.zeros(0, int), np.r_[16:23]]


@pytest.mark.parametrize("cls", PAGED_GAPPY, ids=lambda c: c.__name__)
def test_defect_3_and_4_and_5_paged_gappy_masks(cls):
    """From lengths (3); a sequence without keys that starts inside a page (4); NaN before a start (5)."""
    table = torch.tensor(PAGED_TABLE, dtype=torch.int32)
    mask = cls.from_seqlens([2] * 3, PAGED_STARTS, PAGED_LENS, table, 8)
    assert mask.k_seqinfo.seqstart_py == [*PAGED_STARTS, -1]
    assert mask.k_seqinfo.seqlen.tolist() == [13, 9, 7]
    assert (mask.k_seqinfo.max_seqlen, mask.k_seqinfo.min_seqlen) == (10, 0)
    q, k, v = draw(103, (1, 6, 2, DIM), *[(1, 48, 2, DIM)] * 2)
    poisoned = [np.full_like(x, np.nan) for x in (k, v)]
    for new, old in zip(poisoned, (k, v), strict=True):
        for rows in PAGED_POSITIONS:
            new[:, rows] = old[:, rows]
    kind = "causal" if "Causal" in cls.__name__ else "all"
    out, lse = attend(q, *poisoned, mask)
    expect((out, lse), q, k, v, [2] * 3, PAGED_POSITIONS, kind)
    np.testing.assert_array_equal(out[0, 2:4], 0)
    np.testing.assert_array_equal(lse[0, :, 2:4], -np.inf)


def test_defect_7_single_queries_beside_sequences_without_any():
    q_lens, lens = [1, 0, 1], [24, 5, 16]
    q, k, v = draw(107, (1, 2, 2, DIM), *[(1, 72, 2, DIM)] * 2)
    mask = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_lens, 24, lens)
    positions = [24 * b + np.arange(n) for b, n in enumerate(lens)]
    expect(attend(q, k, v, mask), q, k, v, q_lens, positions, "causal")


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
@pytest.mark.parametrize("as_list", [False, True])
def test_defect_8_merge_compares_the_query_counts(kind, as_list):
    rng = np.random.default_rng(108)
    outs, lses = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((2, 1, 5, 2, 16), (2, 1, 2, 4)))
    with pytest.raises(kind):
        bridge.merge_attentions(*((list(outs), list(lses)) if as_list else (outs, lses)))


def test_defect_10_empty_inputs_keep_their_shapes_with_an_output_dtype():
    q, k, v = tensors(*draw(110, (1, 2, 2, DIM), *[(1, 0, 2, DIM)] * 2))
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v, output_dtype=torch.float32)
    assert out.shape == q.shape and out.dtype in (torch.float16, torch.float32)
    assert lse.shape == (1, 2, 2) and lse.dtype == torch.float64
    assert (out == 0).all() and (lse == -torch.inf).all()


# Departures


def test_departure_fewer_key_heads_without_expand():
    q, k, v = draw(201, (2, 3, 8, DIM), *[(2, 40, 2, DIM)] * 2)
    out, lse = attend(q, k, v)
    want, want_lse = oracle.dense(q, k, v)
    close(out, want, *TOLERANCE)
    close(lse, want_lse, *cases.LSE_TOLERANCE)


def test_departure_array_bias_with_splits_and_broadcast_axes():
    q, k, v = draw(202, (2, 3, 4, DIM), *[(2, 40, 4, DIM)] * 2)
    bias = np.random.default_rng(202).standard_normal((1, 1, 3, 40)).astype(np.float32)
    out, _ = attend(q, k, v, torch.from_numpy(bias), num_splits=4)
    close(out, oracle.dense(q, k, v, bias=bias)[0], *TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_departure_wide_queries_on_the_cpu(dtype):
    q, k, v = np.random.default_rng(203).standard_normal((3, 2, 40, 2, DIM)).astype(dtype)
    q, k, v = tensors(q, k, v, dtype=dtype)
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v)
    assert (out.dtype, lse.dtype, out.device.type) == (getattr(torch, dtype), torch.float64, "cpu")
    want, want_lse = oracle.dense(*(frontend.numpy(x) for x in (q, k, v)))
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    close(frontend.numpy(out), want, tolerance, tolerance)
    close(frontend.numpy(lse), want_lse, tolerance, tolerance)


def test_departure_gradients_through_the_lse_and_the_merge():
    rng = np.random.default_rng(204)
    q, k, v, w = (rng.standard_normal((1, n, 2, 8)) for n in (3, 10, 10, 3))
    w_lse, direction = rng.standard_normal((1, 2, 3)), rng.standard_normal(k.shape)

    def loss(attend_to, merge, to, keys):
        parts = [attend_to(to(q), keys[:, s], to(v[:, s])) for s in (slice(0, 4), slice(4, 10))]
        out, lse = merge([p[0] for p in parts], [p[1] for p in parts])
        total = (out * to(w)).sum() + (parts[0][1] * to(w_lse)).sum()
        return total if lse is None else total + (lse * to(w_lse)).sum()

    for write_lse in (True, False):

        def merge(outs, lses, write_lse=write_lse):
            return bridge.merge_attentions(outs, lses, write_lse=write_lse)

        def by_oracle(outs, lses, write_lse=write_lse):
            out, lse = oracle.merge(outs, lses)
            return out, lse if write_lse else None

        keys = torch.from_numpy(k.copy()).requires_grad_()
        loss(bridge.memory_efficient_attention_partial, merge, torch.from_numpy, keys).backward()
        exact = functools.partial(loss, oracle.dense, by_oracle, np.asarray)
        slope = oracle.numeric_directional(exact, k, direction)
        assert np.isclose((keys.grad.numpy() * direction).sum(), slope, rtol=1e-6, atol=1e-8)


def test_departure_lse_of_empty_varlen_rows_and_choice_of_the_backend():
    q, k, v = tensors(*draw(205, (5, 2, DIM), *[(9, 2, DIM)] * 2))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 9, 9]))

    def call():
        aux = bridge.AuxRequest(lse=True)
        return bridge.varlen_attn(q, k, v, cu_q, cu_k, 3, 9, return_aux=aux, backend="chunked")

    out, lse = call()
    assert (out[2:] == 0).all() and (lse[:, 2:] == -torch.inf).all() and torch.isfinite(lse[:, :2]).all()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert torch.equal(call()[0], out)
    with sdpa_kernel([SDPBackend.MATH]), pytest.raises(RuntimeError):
        call()
