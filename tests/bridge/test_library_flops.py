"""FLOP formulas: against counting visible pairs one by one, and what is counted where lengths are not known."""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import bridge
from bridge.fmha import attn_bias as biases
from bridge.library._flops import pairs
from pallas_kernels.masks import Window, visible

HEADS, KV_HEADS, D, DV = 4, 2, 16, 8


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


ALL = Window()


def visible_pairs(lengths, window=ALL):
    return sum(bool(visible(i, j, m, n, window)) for m, n in lengths for i, j in itertools.product(range(m), range(n)))


def forward(count):
    return 2 * HEADS * count * (D + DV)


def backward(count):
    return 2 * HEADS * count * (3 * D + 2 * DV)


def packed(queries, keys, device="cpu", grad=False):
    q = torch.randn(1, queries, HEADS, D, device=device, requires_grad=grad)
    return q, *(torch.randn(1, keys, KV_HEADS, n, device=device, requires_grad=grad) for n in (D, DV))


def test_pairs_are_counted():
    sides = (None, 0, 1, 3, -1, -2)
    for m, n in itertools.product((0, 1, 3, 5), (0, 1, 4, 7)):
        for left, right, top_left in itertools.product(sides, sides, (False, True)):
            expected = visible_pairs([(m, n)], Window(left, right, top_left))
            assert pairs(m, n, left, right, top_left) == expected, (m, n, left, right, top_left)


@pytest.mark.parametrize("kind", ["none", "causal", "lengths"])
def test_plain_batches(kind):
    q, k, v = torch.randn(2, 3, HEADS, D), torch.randn(2, 7, KV_HEADS, D), torch.randn(2, 7, KV_HEADS, DV)
    bias = biases.LowerTriangularFromBottomRightMask() if kind == "causal" else None
    options = {"kv_lengths": torch.tensor([2, 5], dtype=torch.int32)} if kind == "lengths" else {}
    lengths = [(3, 2), (3, 5)] if options else [(3, 7)] * 2
    expected = visible_pairs(lengths, Window(None, 0) if bias else ALL)
    assert counted(lambda: bridge.memory_efficient_attention(q, k, v, bias, **options)) == forward(expected)


def test_forward_and_backward():
    q, k, v = packed(6, 24, grad=True)
    cls = biases.BlockDiagonalLocalAttentionPaddedKeysMask
    bias = cls.from_seqlens_local([1, 3, 2], 8, [5, 8, 2], 2, 0, device="cpu")
    expected = visible_pairs([(1, 5), (3, 8), (2, 2)], Window(2, 0))
    total = counted(lambda: bridge.memory_efficient_attention(q, k, v, bias).sum().backward())
    assert total == forward(expected) + backward(expected)


def test_pages_count_the_keys_in_use():
    q, k, v = packed(6, 24)
    table = torch.tensor([[5, 1], [0, 3], [-1, 99]], dtype=torch.int32)
    cls = biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    bias = cls.from_seqlens([1, 3, 2], [5, 8, 0], table, 4, device="cpu")
    expected = visible_pairs([(1, 5), (3, 8), (2, 0)], Window(None, 0))
    assert counted(lambda: bridge.memory_efficient_attention(q, k, v, bias)) == forward(expected)
    gappy = biases.PagedBlockDiagonalGappyKeysMask.from_seqlens([1, 3, 2], [1, 0, 0], [5, 8, 0], table, 4, device="cpu")
    assert counted(lambda: bridge.memory_efficient_attention(q, k, v, gappy)) == forward(5 + 24)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
def test_varlen(window):
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q = torch.randn(8, HEADS, D, requires_grad=True)
    k, v = torch.randn(8, KV_HEADS, D), torch.randn(8, KV_HEADS, DV)
    call, options = (k, v, cu, cu, 9, 9), dict(window_size=window, enable_gqa=True)
    left, right = (w if w >= 0 else None for w in window)
    expected = visible_pairs([(3, 3), (5, 5)], Window(left, right))
    total = counted(lambda: bridge.varlen_attn(q, *call, **options).sum().backward())
    assert total == forward(expected) + backward(expected)
    q, out = q.detach(), torch.empty(8, HEADS, DV)
    assert counted(lambda: bridge.varlen_attn_out(out, q, *call, **options)) == forward(expected)


def test_paged_varlen():
    """Where torch's own formula raises."""
    pages, v = torch.randn(6, 4, KV_HEADS, D), torch.randn(6, 4, KV_HEADS, DV)
    table = torch.tensor([[5, 1], [-1, 99], [0, 3]], dtype=torch.int32)
    cu, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [5, 0, 8]))
    q = torch.randn(8, HEADS, D)
    options = dict(enable_gqa=True, seqused_k=used, block_table=table, window_size=(-1, 0))
    expected = visible_pairs([(3, 5), (5, 8)], Window(None, 0))
    assert counted(lambda: bridge.varlen_attn(q, pages, v, cu, None, 5, 8, **options)) == forward(expected)


@pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_unknown_lengths_count_as_capacities(device):
    def count():
        place = "cpu" if device == "fake" else "cuda"
        cu = torch.zeros(4, dtype=torch.int32, device=place)
        q = torch.randn(8, HEADS, D, device=place)
        k, v = torch.randn(8, KV_HEADS, D, device=place), torch.randn(8, KV_HEADS, DV, device=place)
        options = dict(enable_gqa=True, window_size=(-1, 0), backend="chunked")
        expected = 3 * visible_pairs([(3, 5)], Window(None, 0))
        assert counted(lambda: bridge.varlen_attn(q, k, v, cu, cu, 3, 5, **options)) == forward(expected)
        q, k, v = packed(6, 24, place)
        padded = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 3, 2], 8, [5, 8, 2], device=place)
        table = torch.zeros(3, 2, dtype=torch.int32, device=place)
        paged = padded.make_paged(table, 4, biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
        expected = 3 * visible_pairs([(2, 8)], Window(None, 0))
        for bias in (padded, paged):
            total = counted(lambda bias=bias: bridge.memory_efficient_attention(q, k, v, bias, backend="chunked"))
            assert total == forward(expected)

    if device == "fake":
        with FakeTensorMode():
            count()
    else:
        count()


def test_low_bit_and_five_axes_and_merge():
    q, x = torch.randn(2, 3, HEADS, 32), torch.randn(2, 7, KV_HEADS, 32)
    for name in ("fp8", "int4", "seed_int4", "seed_fp8"):
        cache = bridge.formats.quantize(x, name)
        options = dict(output_dtype=torch.float32)
        total = counted(lambda c=cache, o=options: bridge.memory_efficient_attention(q, c, c, **o))
        assert total == 2 * HEADS * 2 * 21 * 64
    q, k = torch.randn(1, 3, 2, HEADS, D), torch.randn(1, 7, 2, 1, D)
    assert counted(lambda: bridge.memory_efficient_attention(q, k, k)) == 2 * 2 * HEADS * 21 * 2 * D
    attn, lse = torch.randn(3, 2, 5, HEADS, D, requires_grad=True), torch.randn(3, 2, HEADS, 5)
    assert counted(lambda: bridge.merge_attentions(attn, lse)[0].sum().backward()) == 6 * attn.numel()


@pytest.mark.parametrize("groups", [(), (3,)])
def test_the_ops_of_fmha(groups):
    ops = torch.ops.pallas_splitk
    q, k = torch.randn(2, 3, *groups, HEADS, 32), torch.randn(2, 7, *groups, HEADS, 32)
    words, v = bridge.formats.quantize(k, "seed_int4").words, torch.randn(2, 7, *groups, HEADS, DV)
    bias = torch.randn(2, *groups, HEADS, 3, 7)
    heads = HEADS * math.prod(groups)
    plain, biased = ops.fmha_memory_efficient_attention_forward, ops.fmha_memory_efficient_attention_forward_with_bias
    for key, value, last in ((k, v, DV), (words, words, 32)):
        expected = 2 * heads * 2 * 21 * (32 + last)
        assert counted(lambda k=key, v=value: plain(q, k, v)) == expected
        assert counted(lambda k=key, v=value: biased(q, k, v, bias, scale=0.5)) == expected


def test_the_merges_of_fmha():
    ops = torch.ops.pallas_splitk
    attn, lse = ([torch.randn(2, 1, 3, 5, *last) for _ in range(4)] for last in ((D,), ()))
    sizes, elements = (2, 5, 1, 3, D), 4 * 2 * 3 * 5 * D
    assert counted(lambda: ops.fmha_merge_attentions_varargs(attn, lse, True, None, *sizes)) == 2 * elements
    out, merged = ops.fmha_merge_attentions_varargs(attn, lse, True, None, *sizes)
    backward_op = ops.fmha_merge_attentions_varargs_backward
    assert counted(lambda: backward_op(attn, lse, out, merged, out, merged)) == 4 * elements


def test_every_op_has_a_formula():
    """None costs nothing: one that did would need a formula that says 0."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("pallas_splitk::")}
    assert len(names) == 11
    for name in names:
        assert getattr(torch.ops.pallas_splitk, name.partition("::")[2]) in flop_registry, name
