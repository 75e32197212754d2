"""Operator classes: their attributes, variants, reasons for refusing, and the split heuristic."""

import sys

import pytest
import torch

from bridge import fmha
from bridge.fmha import attn_bias as ab
from bridge.fmha import triton_splitk as tri

SUPPORTED = {
    type(None),
    torch.Tensor,
    ab.BlockDiagonalPaddedKeysMask,
    ab.BlockDiagonalCausalWithOffsetPaddedKeysMask,
    ab.BlockDiagonalLocalAttentionPaddedKeysMask,
    ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    ab.BlockDiagonalGappyKeysMask,
    ab.BlockDiagonalCausalWithOffsetGappyKeysMask,
    ab.PagedBlockDiagonalPaddedKeysMask,
    ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    ab.PagedBlockDiagonalGappyKeysMask,
    ab.PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
}


def test_base_attributes():
    base = fmha.AttentionOpBase
    assert base.CUDA_MINIMUM_COMPUTE_CAPABILITY == (5, 0) and base.CUDA_MAXIMUM_COMPUTE_CAPABILITY is None
    assert base.SUPPORTED_MIN_K == 0 and base.SUPPORTED_ATTN_BIAS_TYPES == (type(None),)
    flags = ("CUSTOM_SCALE", "DIFFERENT_VALUE_EMBED", "OUTPUT_DTYPE", "PARTIAL", "BMGHK")
    assert not any(getattr(base, f"SUPPORTS_{flag}") for flag in flags)
    assert base.IS_DETERMINISTIC and base.VARLEN_LSE_PACKED
    assert base.OPERATOR_CATEGORY == "memory_efficient_attention"
    assert base._TEST_BATCH_SIZES == [1, 300] and base._TEST_K == [32, 128]


def test_fwop_attributes():
    op = tri.FwOp
    assert issubclass(op, fmha.AttentionFwOpBase) and op.is_available()
    assert op.OPERATOR is True and op.NAME == "triton_splitKF" and op.SPLIT_K is None
    assert op.SUPPORTED_DEVICES == {"cuda", "cpu"} and op.CUDA_MINIMUM_COMPUTE_CAPABILITY == (8, 0)
    assert op.SUPPORTED_DTYPES == {torch.half, torch.bfloat16, torch.float8_e4m3fn}
    assert set(op.SUPPORTED_ATTN_BIAS_TYPES) == SUPPORTED
    assert op.SUPPORTED_MAX_K == 512 and op.MAX_BLOCK_M == 32 and (op.BLOCK_M, op.BLOCK_N) == (16, 64)
    assert not (op.SPLIT_K_EARLY_EXIT or op.AUTOTUNE or op.SUPPORTS_DROPOUT or op.SUPPORTS_DIFFERENT_VALUE_EMBED)
    assert op.SUPPORTS_CUSTOM_SCALE and op.SUPPORTS_BMGHK and op.SUPPORTS_OUTPUT_DTYPE and op.SUPPORTS_PARTIAL
    assert op.NUM_GROUPS == 1 and op.NUM_GROUPS_VALUES == [1, 2, 4, 8]
    assert (op.NUM_STAGES, op.NUM_WARPS) == (1, 2)
    assert op.ERROR_ATOL == {torch.float: 3e-4, torch.half: 4e-3, torch.bfloat16: 2e-2}
    assert op.ERROR_RTOL == {torch.float: 2e-5, torch.half: 4e-4, torch.bfloat16: 5e-3}
    with pytest.raises(NotImplementedError, match="Triton"):
        op.get_kernel()


def test_operator_variants():
    one = tri.FwOp.get_operator(5, block_m=32, block_n=16, num_warps=4, num_stages=3, split_k_early_exit=True)
    assert one.__name__ == "FwOp_S5" and one.NAME == "triton_splitK5" and one.SPLIT_K == 5
    assert (one.BLOCK_M, one.BLOCK_N, one.NUM_WARPS, one.NUM_STAGES) == (32, 16, 4, 3) and one.SPLIT_K_EARLY_EXIT
    arguments = dict(is_paged=False, B=1, M=1, Kkv=16, Kq=16, Mq=1, split_k=5, attn_bias=None, k_fp8_scale_shift=None)
    tuned = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 4, "num_stages": 3}
    assert one.get_extra_args(**arguments) == tuned
    assert type("A", (one,), {"AUTOTUNE": True}).get_extra_args(**arguments) == {}
    assert one is tri.FwOp.get_operator(
        splitk=5, split_k_early_exit=True, num_stages=3, num_warps=4, block_n=16, block_m=32
    )
    assert tri.FwOp.get_operator(5) is tri.FwOp.get_operator(splitk=5) is not one
    assert tri.FwOp.get_operator(5).BLOCK_N == 64

    assert list(tri.FwOp_Map) == [1, 2, 4, 8, 16, 32, 48, 64, 72, 80, 96, 112, 128]
    for n, op in tri.FwOp_Map.items():
        assert op.SPLIT_K == n and op.NAME == f"triton_splitK{n}" and op is tri.FwOp.get_operator(n)
        if n in (1, 2, 4, 8, 16, 32, 64, 128):
            assert getattr(tri, f"FwOp_S{n}") is op
    grouped = type("X", (tri.FwOp_S2,), {"NUM_GROUPS": 8, "NAME": "x"})
    assert grouped.get_operator(4).NUM_GROUPS == 8 and grouped.get_operator(4) is not tri.FwOp_S4


SPLITS = """
1,1,1,32,1 1|1,1,1,64,1 1|1,1,1,128,1 2|1,1,1,512,1 8|1,1,1,513,1 4|1,1,1,1024,1 8|1,1,1,1025,1 8|1,1,1,2048,1 16
1,1,1,4096,1 32|1,1,1,8192,1 64|1,1,1,65536,1 64|16,1,1,4096,1 32|1,1,16,256,1 4|1,1,16,4096,1 32|65,1,1,8192,1 63
65,1,1,8192,2 1|128,2,1,8192,2 1|1,1,1,0,1 1
"""


@pytest.mark.parametrize("row", SPLITS.strip().replace("\n", "|").split("|"))
def test_split_heuristic(row):
    arguments, want = row.split()
    assert tri.FwOp.get_split_k(*map(int, arguments.split(",")), page_size=0) == int(want)


def inputs(bias=None, q_shape=(1, 2, 1, 64), k_shape=(1, 128, 1, 64), dtype=torch.half, **options):
    return fmha.Inputs(
        torch.zeros(q_shape, dtype=dtype), torch.zeros(k_shape, dtype=dtype), torch.zeros(k_shape, dtype=dtype), bias,
        **options,
    )  # fmt: skip


def causal(q_lens, k_lens, padding=64, cls=ab.BlockDiagonalCausalWithOffsetPaddedKeysMask):
    return cls.from_seqlens(q_lens, padding, k_lens, device="cpu")


def local(q_lens, k_lens):
    return ab.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(q_lens, 64, k_lens, 3, 3, device="cpu")


def paged(page_size, cls=ab.PagedBlockDiagonalPaddedKeysMask):
    table = torch.zeros(2, 4, dtype=torch.int32)
    return cls.from_seqlens([1, 1], [5, 6], table, page_size, device="cpu")


class Derived(ab.BlockDiagonalPaddedKeysMask):
    pass


Q64 = torch.zeros(1, 2, 1, 64, dtype=torch.half)


@pytest.mark.parametrize(
    ("inp", "text"),
    [
        (inputs(q_shape=(1, 2, 1, 48), k_shape=(1, 128, 1, 48)), "Embed dim 48"),
        (inputs(q_shape=(1, 2, 1, 1024), k_shape=(1, 128, 1, 1024)), "> 512"),
        (fmha.Inputs(Q64, Q64, Q64[..., :32]), r"query.shape\[-1\] != value.shape\[-1\]"),
        (inputs(dtype=torch.float32), "dtype"),
        (inputs(torch.nn.Parameter(torch.zeros(1, 1, 2, 128))), "Parameter"),
        (inputs(Derived(*vars(causal([1, 1], [5, 6], cls=ab.BlockDiagonalPaddedKeysMask)).values())), "Derived"),
        (inputs(ab.LowerTriangularMask()), "LowerTriangularMask"),
        (inputs(p=0.5), "dropout"),
        (inputs(causal([1, 2], [5, 6]), q_shape=(1, 3, 1, 64)), "Variable query len is not supported for causal"),
        (inputs(local([1, 2], [5, 6]), q_shape=(1, 3, 1, 64)), "Variable query len is not supported for local"),
        (inputs(causal([17], [50]), q_shape=(1, 17, 1, 64)), "larger than 16"),
        (inputs(local([17], [50]), q_shape=(1, 17, 1, 64)), "larger than 16"),
        (inputs(causal([1, 1], [5, 6]), q_shape=(1, 3, 1, 64)), "Expected total 2 queries not 3"),
        (inputs(paged(64), k_shape=(1, 100, 1, 64)), "divisible by the page size"),
        (inputs(paged(32)), "BLOCK_N"),
        (inputs(torch.zeros(2, 128)), "Additive attention bias has to have shape"),
        (fmha.Inputs(torch.zeros(1, 2, 1, 65, dtype=torch.half)[..., :64], Q64, Q64), r"query.stride\(-2\)"),
        (fmha.Inputs(Q64, torch.zeros(1, 2, 1, 128, dtype=torch.half)[..., ::2], Q64), r"key.stride\(-1\)"),
        (fmha.Inputs(Q64, Q64, torch.zeros(1, 2, 1, 128, dtype=torch.half)[..., ::2]), r"value.stride\(-1\)"),
    ],
)
def test_reasons(inp, text):
    reasons = tri.FwOp.not_supported_reasons(inp)
    with pytest.raises(AssertionError, match=text):
        assert not reasons, "\n".join(reasons)
    assert not tri.FwOp.supports(inp)


@pytest.mark.parametrize(
    "inp",
    [
        inputs(),
        inputs(dtype=torch.bfloat16),
        inputs(scale=3.0, output_dtype=torch.float32, is_partial=True),
        inputs(q_shape=(1, 2, 2, 3, 64), k_shape=(1, 128, 2, 3, 64)),
        inputs(torch.zeros(1, 1, 2, 128)),
        inputs(causal([16], [50]), q_shape=(1, 16, 1, 64)),
        inputs(causal([17, 1], [50, 5], cls=ab.BlockDiagonalPaddedKeysMask), q_shape=(1, 18, 1, 64)),
        inputs(paged(64)),
        inputs(paged(64, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)),
    ],
)
def test_no_reasons(inp):
    assert tri.FwOp.not_supported_reasons(inp) == []


def test_reasons_read_the_class():
    assert tri.FwOp.get_operator(2, block_n=16).supports(inputs(paged(32)))
    assert not tri.FwOp.get_operator(2, block_n=48).supports(inputs(paged(64), k_shape=(1, 128, 1, 64)))
    bias = inputs(torch.zeros(1, 1, 2, 128))
    assert tri.FwOp_S1.supports(bias) and not tri.FwOp_S2.supports(bias)
    assert "SPLIT_K > 1" in tri.FwOp_S2.not_supported_reasons(bias)[0]
    assert not type("Off", (tri.FwOp,), {"OPERATOR": None}).supports(inputs())
    assert type("Wide", (tri.FwOp,), {"SUPPORTED_DTYPES": {torch.float32}}).supports(inputs(dtype=torch.float32))


def test_low_bit_keys_need_no_alignment():
    words = torch.zeros(1, 128, 1, 9, dtype=torch.int32)
    assert tri.FwOp.supports(fmha.Inputs(Q64, words, words))


def test_shape_reasons():
    assert tri.FwOp.shape_not_supported_reasons(1, 1, 64, 64) == []
    assert len(tri.FwOp.shape_not_supported_reasons(1, 1, 1000, 64)) == 3
    assert all(tri.FwOp.shape_not_supported_reasons(1, 1, k, k) == [] for k in (16, 32, 64, 128, 256, 512))


def test_stale_host_lengths_count():
    """Lengths that shrank in place do not refresh the minimum that the check reads."""
    mask = causal([4, 4], [20, 20])
    mask.q_seqinfo.from_seqlens_inplace([4, 2])
    assert tri.FwOp.supports(inputs(mask, q_shape=(1, 6, 1, 64)))


def test_the_package_looks_like_mslk():
    for name in ("Inputs", "Context", "Gradients", "AttentionOp", "ALL_FW_OPS", "ALL_BW_OPS", "merge_attentions"):
        assert hasattr(fmha, name)
    for module in ("common", "merge_training", "tree_attention", "triton_splitk", "attn_bias"):
        assert getattr(fmha, module) is sys.modules[f"bridge.fmha.{module}"]
