"""The rows of MSLK's and PyTorch's acceptance tables on the torch front end, backend `chunked`.

Where only shapes vary, the lists are thinned: both front ends share what lies below, and tests/jax holds all of it.
"""

import numpy as np
import pytest
import torch

import acceptance
import acceptance_merge
import acceptance_varlen
import bridge
import cases
import checks
import torch_frontend as frontend

# MSLK: forward


@pytest.mark.parametrize("case", acceptance.generated()[::2], ids=str)
def test_generated_forward(case):
    acceptance.check_forward(frontend, case)


@pytest.mark.parametrize("layout", ["BMHK", "BMK"])
def test_generated_forward_packed_qkv(layout):
    acceptance.check_packed_qkv(frontend, layout, "bfloat16")


@pytest.mark.parametrize("case", acceptance.gqa(), ids=str)
def test_gqa_forward(case):
    acceptance.check_forward(frontend, case)


@pytest.mark.parametrize("case", acceptance.splitk(), ids=str)
def test_splitk_shapes(case):
    acceptance.check_forward(frontend, case)


@pytest.mark.parametrize("case", acceptance.logsumexp()[::2], ids=str)
def test_logsumexp(case):
    acceptance.check_logsumexp(frontend, case)


@pytest.mark.parametrize("case", acceptance.decoder(), ids=str)
def test_decoder(case):
    acceptance.check_forward(frontend, case, atol_factor=4)


@pytest.mark.parametrize("case", acceptance.decoder_many_queries(), ids=str)
def test_decoder_many_queries(case):
    acceptance.check_forward(frontend, case, atol_factor=4)


@pytest.mark.parametrize("case", acceptance.INT4_DECODER, ids=str)
def test_int4_decoder(case):
    acceptance.check_int4_decoder(frontend, *case)


@pytest.mark.parametrize("case", acceptance.mqa_decoding(), ids=str)
def test_mqa_decoding(case):
    acceptance.check_forward(frontend, case)


@pytest.mark.parametrize("case", acceptance.PAGED, ids=str)
def test_paged(case):
    acceptance.check_paged(frontend, *case)


def test_paged_gappy_needs_a_padding_of_whole_pages():
    with pytest.raises(ValueError, match="Notional padding should be divisible by the page size"):
        acceptance.check_paged(frontend, *acceptance.PAGED_GAPPY_ERROR)


@pytest.mark.parametrize("case", acceptance.FP8, ids=str)
def test_fp8_rowwise_and_paged(case):
    acceptance.check_fp8_rowwise(frontend, *case)


@pytest.mark.parametrize("case", acceptance.FP8_SQNR[1:], ids=str)
def test_fp8_qk_and_pv_sqnr(case):
    acceptance.check_fp8_sqnr(frontend, *case)


def test_nan_in_padding():
    acceptance.check_nan_in_padding(frontend)


def test_numpy_lengths():
    acceptance.check_numpy_lengths(frontend)


@pytest.mark.parametrize("name", acceptance.EMPTY)
def test_empty(name):
    acceptance.check_empty(frontend, *acceptance.EMPTY[name])


# MSLK: merging


@pytest.mark.parametrize("case", acceptance_merge.SELF_MERGE[1:], ids=str)
def test_merge_with_itself(case):
    acceptance_merge.check_merge_with_itself(frontend, *case)


@pytest.mark.parametrize("groups", [1, 2])
def test_partial_paged(groups):
    acceptance_merge.check_partial_paged(frontend, groups)


@pytest.mark.parametrize("case", acceptance_merge.CHUNKED_DECODING, ids=str)
def test_chunked_decoding(case):
    acceptance_merge.check_chunked_decoding(frontend, *case)


def test_shared_prefix():
    acceptance_merge.check_shared_prefix(frontend)


@pytest.mark.parametrize("case", acceptance_merge.MERGE_VS_FORMULA[1:], ids=str)
def test_merge_vs_formula(case):
    acceptance_merge.check_merge_vs_formula(frontend, case)


def test_training_merge():
    acceptance_merge.check_training_merge(frontend)


# PyTorch: varlen


@pytest.mark.parametrize("case", acceptance_varlen.varlen_dense(), ids=lambda case: f"window{case[0]}")
def test_varlen_vs_dense_attention(case):
    acceptance_varlen.check_varlen_dense(frontend, *case)


@pytest.mark.parametrize("window", acceptance_varlen.INVARIANCE_WINDOWS[2:], ids=str)
def test_varlen_batch_invariance_within_tolerance(window):
    """Same bits are promised by the kernels only; `chunked` promises the tolerance."""
    alone, in_batch = acceptance_varlen.varlen_alone_and_in_batch(frontend, window)
    checks.close(in_batch, alone, 1e-5, 1.6e-2)


@pytest.mark.parametrize("lengths", acceptance_varlen.USED_LENGTHS, ids=str)
def test_varlen_seqused_k(lengths):
    acceptance_varlen.check_seqused_k(frontend, lengths)


@pytest.mark.parametrize("page_size", [32, 64, 128, 256])
def test_varlen_block_table(page_size):
    for lengths in acceptance_varlen.USED_LENGTHS:
        acceptance_varlen.check_block_table(frontend, page_size, lengths)


def test_varlen_out_variant():
    """The same result, written into the caller's tensor, which is what is returned."""
    rng = np.random.default_rng(0)
    lens, dtype = [64, 192, 64, 128], torch.bfloat16
    q, k, v = (torch.from_numpy(rng.standard_normal((sum(lens), h, 64))).to(dtype) for h in (16, 4, 4))
    cu = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32)
    options = dict(window_size=(-1, 0), enable_gqa=True, return_aux=bridge.AuxRequest(lse=True), backend="chunked")
    want, want_lse = bridge.varlen_attn(q, k, v, cu, cu, max(lens), max(lens), **options)
    out = torch.full_like(q, torch.nan)
    result, lse = bridge.varlen_attn_out(out, q, k, v, cu, cu, max(lens), max(lens), **options)
    assert result is out
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_varlen_gqa():
    out, want = acceptance_varlen.call_gqa(frontend, 4, enable_gqa=True)
    checks.close(out, want, *cases.TOLERANCES["bfloat16"])
    with pytest.raises(ValueError, match="enable_gqa=True"):
        acceptance_varlen.call_gqa(frontend, 4, enable_gqa=False)
    with pytest.raises(ValueError, match="multiple of kv heads"):
        acceptance_varlen.call_gqa(frontend, 3, enable_gqa=True)
