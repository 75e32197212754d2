"""MSLK's acceptance tables through `bridge.fmha`, with the operators that the tables name.

On the CPU the rows of `acceptance`; tests/bridge/test_fmha_gpu.py holds the whole ranges.
"""

import pytest
from fmha_frontend import Frontend, splitk

import acceptance
import acceptance_merge

any_op, split_k = Frontend(), Frontend(strict=True)
early_exit = Frontend(strict=True, base=type("EarlyExit", (splitk.FwOp,), {"SPLIT_K_EARLY_EXIT": True}))
autotune = Frontend(strict=True, base=type("Autotune", (splitk.FwOp,), {"AUTOTUNE": True}))


@pytest.mark.parametrize("case", acceptance.generated()[1::2], ids=str)
def test_generated_forward(case):
    acceptance.check_forward(any_op, case)


@pytest.mark.parametrize("layout", ["BMHK", "BMK"])
def test_packed_qkv(layout):
    acceptance.check_packed_qkv(split_k, layout, "bfloat16")


@pytest.mark.parametrize("case", acceptance.gqa(), ids=str)
def test_gqa(case):
    acceptance.check_forward(any_op, case)


@pytest.mark.parametrize("case", acceptance.splitk(), ids=str)
def test_splitk_shapes(case):
    acceptance.check_forward(split_k, case)


def test_autotune_changes_no_result():
    acceptance.check_forward(autotune, acceptance.masked(acceptance.CLASSES[1], 1, 1, 2048, 8, 128, "bfloat16"))


@pytest.mark.parametrize("case", acceptance.logsumexp()[1::2], ids=str)
def test_logsumexp(case):
    acceptance.check_logsumexp(any_op, case)


@pytest.mark.parametrize("frontend", [split_k, early_exit], ids=["", "early-exit"])
@pytest.mark.parametrize("case", acceptance.decoder(), ids=str)
def test_decoder(case, frontend):
    acceptance.check_forward(frontend, case, atol_factor=4)


@pytest.mark.parametrize("case", acceptance.decoder_many_queries(), ids=str)
def test_decoder_many_queries(case):
    acceptance.check_forward(split_k, case, atol_factor=4)


@pytest.mark.parametrize("case", acceptance.INT4_DECODER, ids=str)
def test_int4_decoder(case):
    acceptance.check_int4_decoder(split_k, *case)


@pytest.mark.parametrize("case", acceptance.mqa_decoding(), ids=str)
def test_mqa_decoding(case):
    acceptance.check_forward(split_k, case)


@pytest.mark.parametrize("case", acceptance.PAGED, ids=str)
def test_paged(case):
    acceptance.check_paged(split_k, *case)


def test_paged_gappy_needs_a_padding_of_whole_pages():
    with pytest.raises(ValueError, match="Notional padding should be divisible by the page size"):
        acceptance.check_paged(split_k, *acceptance.PAGED_GAPPY_ERROR)


@pytest.mark.parametrize("case", acceptance.FP8, ids=str)
def test_fp8_rowwise_and_paged(case):
    acceptance.check_fp8_rowwise(split_k, *case)


@pytest.mark.parametrize("case", acceptance.FP8_SQNR[1:], ids=str)
def test_fp8_qk_and_pv_sqnr(case):
    acceptance.check_fp8_sqnr(split_k, *case)


def test_nan_in_padding():
    acceptance.check_nan_in_padding(split_k)


def test_numpy_lengths():
    acceptance.check_numpy_lengths(split_k)


@pytest.mark.parametrize("name", acceptance.EMPTY)
@pytest.mark.parametrize("frontend", [any_op, split_k], ids=["none", "split-k"])
def test_empty(name, frontend):
    acceptance.check_empty(frontend, *acceptance.EMPTY[name])


@pytest.mark.parametrize("case", acceptance_merge.SELF_MERGE[1:], ids=str)
def test_merge_with_itself(case):
    acceptance_merge.check_merge_with_itself(split_k, *case)


@pytest.mark.parametrize("groups", [1, 2])
def test_partial_paged(groups):
    acceptance_merge.check_partial_paged(split_k, groups)


@pytest.mark.parametrize("case", acceptance_merge.CHUNKED_DECODING, ids=str)
def test_chunked_decoding(case):
    acceptance_merge.check_chunked_decoding(split_k, *case)


def test_shared_prefix():
    acceptance_merge.check_shared_prefix(any_op)


@pytest.mark.parametrize("case", acceptance_merge.MERGE_VS_FORMULA[1:], ids=str)
def test_merge_vs_formula(case):
    acceptance_merge.check_merge_vs_formula(split_k, case)
