"""The whole ranges of MSLK's acceptance tables through `bridge.fmha` on a GPU, and what only a GPU shows."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from fmha_frontend import Frontend

import acceptance
import acceptance_merge
import cases
from bridge import fmha
from bridge.fmha import attn_bias as ab
from pallas_kernels.errors import FallbackWarning

pytestmark = pytest.mark.gpu

tri = fmha.triton_splitk
any_op, split_k = Frontend("cuda"), Frontend("cuda", strict=True)
LOW = ("float16", "bfloat16")
CLASSES = acceptance.CLASSES


def sizes():
    """(B, Mq, Mk, H, K) of MSLK's generator."""
    for b, q_len, k_len, dim in itertools.product((1, 300), (32, 256), (32, 64, 256, 1024), (32, 128)):
        yield b, q_len, k_len, 1, dim
    for m in (2, 3, 15, 31, 32, 34, 68, 72, 90, 132, 136):
        yield from ((1, m, 128, 1, 32), (1, 256, m, 1, 32))
    yield from ((1, 2, 128, 1, k) for k in (64, 512))
    yield from ((1, 16, 1024, 1, 32), (1, 1024, 16, 1, 32), (1, 128, 128, 300, 128))
    yield from ((1, 32, 64, heads, 32) for heads in (3, 5, 12))


def generated():
    kinds = itertools.cycle(["none", "bias", *CLASSES])
    for (dtype, size), kind in zip(itertools.product(LOW, sizes()), kinds):
        batch, *rest = size
        if kind in ("none", "bias"):
            batch = min(batch, 12) if kind == "bias" else batch
            layout = "BMK" if rest[2] == 1 and rest[0] % 64 == 0 else "BMHK"
            yield acceptance.dense(batch, *rest, dtype, bias=kind == "bias", layout=layout)
        else:
            yield acceptance.masked(kind, min(batch, 12), *rest, dtype)


@pytest.mark.parametrize("case", list(generated()), ids=str)
def test_generated_forward(case):
    acceptance.check_forward(any_op, case)


@pytest.mark.parametrize("case", [case for case in generated() if len(case.q_shape) == 4], ids=str)
def test_logsumexp(case):
    acceptance.check_logsumexp(any_op, case)


def gqa():
    for q_len, kind in itertools.product((1, 512), ("none", "bias", *CLASSES)):
        if kind in ("none", "bias"):
            bias = (3, 2, 16, q_len, 512) if kind == "bias" else None
            shapes = (3, q_len, 2, 16, 128), (3, 512, 2, 1, 128)
            yield cases.Case(f"{kind}-{q_len}", None, {}, *shapes, bias_shape=bias, magnitude=3.0)
        else:
            yield acceptance.masked(kind, 3, q_len, 512, (2, 16), 128, "float16", k_heads=(2, 1))


@pytest.mark.parametrize("case", list(gqa()), ids=str)
def test_gqa(case):
    acceptance.check_forward(any_op, case)


SPLITK = [
    *((1, m, 65536, 128) for m in (8, 4, 16)), (1, 16, 65536, 32), (1, 8, 1025, 128), (2, 8, 4096, 128),
    *((10, m, 65536, 128) for m in (8, 15)), (1, 3, 65536, 128), (1, 3, 65526, 128), (2, 3, 73, 128), (2, 7, 7328, 128),
]  # fmt: skip


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("splits", [None, 1, 8, 128])
@pytest.mark.parametrize("size", SPLITK, ids=str)
def test_splitk_shapes(size, splits, dtype):
    batch, q_len, k_len, dim = size
    case = acceptance.dense(batch, q_len, k_len, 1, dim, dtype, options={"num_splits": splits})
    acceptance.check_forward(split_k, case)


@pytest.mark.parametrize(("splits", "dtype"), [(1, "bfloat16"), (2, "float16")])
@pytest.mark.parametrize(("padding", "batch"), [(32, 8), (4096, 1)])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_decoder(kv_heads, padding, batch, splits, dtype):
    case = acceptance.decoder_case(kv_heads, 16, padding, batch, dtype, splits)
    acceptance.check_forward(split_k, case, atol_factor=4)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("padding", "batch"), [(32, 8), (44, 1)])
@pytest.mark.parametrize(("heads", "q_len"), [(2, 4), (2, 5), (6, 7), (20, 3)])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_decoder_many_queries(kv_heads, heads, q_len, padding, batch, splits, dtype):
    case = acceptance.decoder_case(kv_heads, heads, padding, batch, dtype, splits, q_len=q_len)
    acceptance.check_forward(split_k, case, atol_factor=4)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize(("padding", "batch"), [(32, 8), (4096, 1)])
@pytest.mark.parametrize("kv_heads", [None, 1, 2])
def test_int4_decoder(groups, kv_heads, padding, batch):
    acceptance.check_int4_decoder(split_k, groups, kv_heads, padding, batch)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [(1, 65536, 3, 128), (5, 53, 4, 64), (7, 51, 4, 512)], ids=str)
def test_mqa_decoding(size, dtype):
    batch, k_len, heads, dim = size
    shapes = (batch, 1, heads, dim), (batch, k_len, 1, dim)
    acceptance.check_forward(split_k, cases.Case("mqa", None, {}, *shapes, dtype, magnitude=3.0))


@pytest.mark.parametrize("splits", [None, 8, 48])
@pytest.mark.parametrize("gappy", [False, True], ids=["padded", "gappy"])
@pytest.mark.parametrize("groups", [0, 1, 8])
@pytest.mark.parametrize("page_size", [64, 128, 256])
@pytest.mark.parametrize("max_t", [64, 128, 2048, 4096, 8192])
@pytest.mark.parametrize("batch", [1, 5, 128])
def test_paged(batch, max_t, page_size, groups, gappy, splits):
    arguments = (split_k, batch, max_t, page_size, groups, gappy, splits)
    if gappy and max_t % page_size:
        with pytest.raises(ValueError, match="Notional padding should be divisible by the page size"):
            acceptance.check_paged(*arguments)
    else:
        acceptance.check_paged(*arguments)


@pytest.mark.parametrize("page_size", [64, 256])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("k_len", [2048, 8192])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_fp8_rowwise_and_paged(batch, k_len, kv_heads, group, page_size):
    acceptance.check_fp8_rowwise(split_k, batch, k_len, kv_heads, group, page_size)


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("k_len", [2048, 8192])
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_fp8_qk_and_pv_sqnr(batch, k_len, kv_heads, group, dim):
    acceptance.check_fp8_sqnr(split_k, batch, k_len, kv_heads, group, dim)


def test_nan_in_padding():
    acceptance.check_nan_in_padding(split_k)


def test_numpy_lengths():
    acceptance.check_numpy_lengths(split_k)


@pytest.mark.parametrize("name", acceptance.EMPTY)
@pytest.mark.parametrize("frontend", [any_op, split_k], ids=["none", "split-k"])
def test_empty(name, frontend):
    acceptance.check_empty(frontend, *acceptance.EMPTY[name])


@pytest.mark.parametrize("k_len", [5, 100000])
@pytest.mark.parametrize(("groups", "heads"), [(1, 11), (7, 1), (1, 1), (7, 11), (None, 11)])
def test_merge_with_itself(groups, heads, k_len):
    acceptance_merge.check_merge_with_itself(split_k, 13, k_len, groups, heads)


@pytest.mark.parametrize("groups", [1, 2])
def test_partial_paged(groups):
    acceptance_merge.check_partial_paged(split_k, groups)


@pytest.mark.parametrize("as_list", [False, True], ids=["stacked", "list"])
@pytest.mark.parametrize("splits", [1, 32])
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_chunked_decoding(groups, q_len, splits, as_list):
    acceptance_merge.check_chunked_decoding(split_k, 128, 8192, groups, q_len, as_list, splits)


@pytest.mark.parametrize("shared", [False, True], ids=["MHA", "GQA"])
@pytest.mark.parametrize("splits", [None, 1, 32])
def test_shared_prefix(splits, shared):
    acceptance_merge.check_shared_prefix(any_op, gqa=shared, splits=splits)


@pytest.mark.parametrize("shape", [(12, 137, 8, 128), (12, 137, 1, 8, 128), (12, 137, 2, 8, 128)], ids=str)
def test_merge_vs_formula(shape):
    acceptance_merge.check_merge_vs_formula(split_k, cases.MergeCase("merge", 16, shape))


# What only a GPU shows


def decoding(batch=4, rows=512, heads=8, dim=128, lens=(512, 1, 77, 300)):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, m, h, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
               for m, h in ((batch, heads), (batch * rows, 1), (batch * rows, 1)))  # fmt: skip
    mask = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1] * batch, rows, lens, device="cuda")
    return q, k.expand(-1, -1, heads, -1), v.expand(-1, -1, heads, -1), mask


def test_operators_launch_the_kernels():
    """No fallback, no JAX client, and the same bits with and without the LSE."""
    q, k, v, mask = decoding()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for op in (None, tri.FwOp, tri.FwOp_S4):
            out, _ = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, mask, op=op)
            assert torch.equal(fmha.memory_efficient_attention_forward(q, k, v, mask, op=op), out)
            parts = [fmha.memory_efficient_attention_partial(q, k, v, mask, op=op) for _ in range(2)]
            merged, total = fmha.merge_attentions(*map(list, zip(*parts)))
            torch.testing.assert_close(merged, parts[0][0], atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(total, parts[0][1] + math.log(2), atol=1e-3, rtol=1e-3)
    copies = k.contiguous(), v.contiguous()
    torch.testing.assert_close(fmha.memory_efficient_attention_forward(q, *copies, mask, op=tri.FwOp), out)


@pytest.mark.parametrize("op", [None, tri.FwOp, tri.FwOp_S2], ids=["none", "auto", "s2"])
def test_captured_in_a_graph(op):
    """Lengths that change in place count in the next replay."""
    q, k, v, mask = decoding()

    def run():
        return fmha.memory_efficient_attention_forward_requires_grad(q, k, v, mask, op=op)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out, lse = run()
    for lens in ([512, 1, 77, 300], [3, 200, 1, 511]):
        mask.k_seqinfo.from_seqlens_padded_inplace(lens)
        graph.replay()
        want, want_lse = run()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        alone = [k[0, b * 512 : b * 512 + n, 0].float() @ q[0, b].float().T * 128**-0.5 for b, n in enumerate(lens)]
        truth = np.stack([torch.logsumexp(x, 0).cpu().numpy() for x in alone], 1)
        np.testing.assert_allclose(lse[0].cpu().numpy(), truth, 2e-3, 2e-3)
