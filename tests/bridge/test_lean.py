"""The short way of eager calls on a faked card: what is launched, on which memory, and what takes the long way."""

import dataclasses
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_card import Card, memory, roomy

import bridge
import cases
import oracle
import torch_frontend as frontend
from bridge import _lean, _route, launch
from bridge.fmha import attn_bias
from pallas_kernels.errors import ArgumentError, DTypeError, ShapeError, StaticArgumentError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER_SMS = 4


@pytest.fixture
def card(monkeypatch):
    return Card().install(monkeypatch)


@pytest.fixture
def no_long_way(monkeypatch):
    """From its call on, the long way is closed."""

    def close():
        def refuse(*arguments, **keywords):
            raise AssertionError("the long way was taken")

        monkeypatch.setattr(_route, "answer", refuse)

    return close


SLOT, HEADS, KV_HEADS, DIM, PAGE = 128, 8, 2, 64, 64


def padded(lengths, kind=attn_bias.BlockDiagonalPaddedKeysMask, dtype=torch.bfloat16, seed=0):
    generator, n = torch.Generator().manual_seed(seed), len(lengths)
    q = torch.randn(1, n, HEADS, DIM, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, n * SLOT, KV_HEADS, DIM, generator=generator).to(dtype)
    return q, k, v, kind.from_seqlens([1] * n, SLOT, lengths, device="cpu")


def paged(lengths, seed=0):
    q, k, v, mask = padded(lengths, seed=seed)
    table = torch.randperm(len(lengths) * SLOT // PAGE).view(len(lengths), -1).to(torch.int32)
    return q, k, v, mask.make_paged(table, PAGE, attn_bias.PagedBlockDiagonalPaddedKeysMask)


def varlen_arguments(q, k, v, mask):
    pages = [x.view(-1, PAGE, KV_HEADS, DIM) for x in (k, v)]
    n = q.shape[1]
    given = (q[0], *pages, torch.arange(n + 1, dtype=torch.int32), None, 1, SLOT)
    return given, dict(enable_gqa=True, seqused_k=mask.k_seqinfo.seqlen, block_table=mask.block_tables)


# ------------------------------------------------------------------------------------- values, on true memory


@pytest.mark.parametrize(
    "way, options",
    [("padded", {}), ("padded", {"num_splits": 1}), ("paged", {"split_size": 50}), ("varlen_out", {"num_splits": 1})],
)
def test_right_through_addresses(monkeypatch, no_long_way, way, options):
    """Both ways launch kernels that read and write the right memory: run in the interpreter, against float64."""
    Card(INTERPRETER_SMS, execute=True).install(monkeypatch)
    rng = np.random.default_rng(3)
    lengths, capacity = [SLOT, 7, 0], 4
    n = len(lengths)
    q = cases.round_f32(rng.standard_normal((n, HEADS, DIM)), "bfloat16")
    k, v = (cases.round_f32(rng.standard_normal((n * SLOT, KV_HEADS, DIM)), "bfloat16") for _ in range(2))
    positions = oracle.key_positions("padded", lengths, total=n * SLOT)
    want_out, want_lse = oracle.block_diagonal(
        q, k, v, [1] * n, positions, [oracle.visible_table("all", 1, length) for length in lengths]
    )
    outside = np.setdiff1d(np.arange(n * SLOT), np.concatenate(positions))
    k[outside] = v[outside] = np.nan
    pages, per_row = n * SLOT // PAGE, SLOT // PAGE
    table = rng.permutation(pages).reshape(n, per_row)
    if way != "padded":
        k, v = (x.reshape(pages, PAGE, KV_HEADS, DIM)[np.argsort(table.ravel())].reshape(x.shape) for x in (k, v))
    q, k, v = (frontend.array(x[None], "bfloat16") for x in (q, k, v))
    q = roomy(q, capacity, 1)
    if way == "padded":
        k, v = (roomy(x, capacity * SLOT, 1) for x in (k, v))
    mask = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1] * n, SLOT, lengths, device="cpu")
    mask.q_seqinfo.seqstart = roomy(mask.q_seqinfo.seqstart, capacity + 1)
    mask.k_seqinfo.seqlen = roomy(mask.k_seqinfo.seqlen, capacity)
    if way != "padded":
        table = roomy(torch.tensor(table, dtype=torch.int32), capacity)
        mask = mask.make_paged(table, PAGE, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    target = torch.full((n, HEADS, DIM), torch.nan, dtype=torch.bfloat16)
    for again in range(2):
        if "varlen" in way:
            given, named = varlen_arguments(q, k, v, mask)
            given = (*given[:3], mask.q_seqinfo.seqstart, *given[4:])
            named |= options | {"return_aux": bridge.AuxRequest(lse=True)}
            if way == "varlen_out":
                out, lse = bridge.varlen_attn_out(target, *given, **named)
                assert out is target
            else:
                out, lse = bridge.varlen_attn(*given, **named)
        else:
            out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v, mask, **options)
            plain = bridge.memory_efficient_attention(q, k, v, mask, **options)
            assert torch.equal(plain, out)
            out, lse = out[0], lse[0]
        error = np.linalg.norm(frontend.numpy(out) - want_out) / np.linalg.norm(want_out)
        assert error <= 5e-3, error
        np.testing.assert_allclose(frontend.numpy(lse), want_lse, atol=2e-3, rtol=2e-3)
        target.fill_(torch.nan)
        if not again:
            no_long_way()


@pytest.mark.parametrize(
    "shape,expanded,lengths",
    [((3, HEADS, 1, SLOT), False, [SLOT, 7, 0]), ((1, HEADS, 1, SLOT), True, None), ((3, 1, 1, 1), False, None)],
)
def test_array_biases_through_addresses(monkeypatch, no_long_way, shape, expanded, lengths):
    """The bias is read where it lies, with room for a capacity behind it; an expanded one is read as it is stored."""
    card = Card(INTERPRETER_SMS, execute=True).install(monkeypatch)
    generator, capacity = torch.Generator().manual_seed(3), 4
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    q, k, v = (
        roomy(draw(3, n, h, DIM).bfloat16(), capacity) for n, h in ((1, HEADS), (SLOT, KV_HEADS), (SLOT, KV_HEADS))
    )
    bias = draw(*shape)
    bias[..., 1::3] = -torch.inf if shape[-1] > 1 else 0
    bias = roomy(bias, capacity if shape[0] > 1 else 1)
    given = bias.expand(3, -1, -1, -1) if expanded else bias
    used = None
    if lengths is not None:
        used = roomy(torch.tensor(lengths, dtype=torch.int32), capacity)
    call = functools.partial(bridge.memory_efficient_attention_forward_requires_grad, kv_lengths=used)
    want = call(q, k, v, given, backend="reference")
    for again in range(2):
        found = call(q, k, v, given)
        for x, y in zip(found, want):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, atol=2e-2, rtol=1e-2)
        _, names, addresses = card.launched[-2 if "records" in card.launched[-1][1] else -1]
        assert dict(zip(names, addresses))["bias"] == bias.data_ptr()
        if not again:
            no_long_way()


def test_array_biases_that_are_not_launched(card):
    q, k = torch.zeros(2, 1, 2, 4, DIM, dtype=torch.half), torch.zeros(2, SLOT, 2, 4, DIM, dtype=torch.half)
    call = functools.partial(bridge.memory_efficient_attention, q, k, k, backend="hopper")
    call(torch.zeros(2, 2, 4, 1, SLOT))
    call(torch.zeros(1, 1, 1, 1, SLOT).expand(2, 2, 4, 1, SLOT))
    for bias, reason in (
        (torch.zeros(2, 2, 1, 1, SLOT), "contiguous"),  # every head has its own keys, so the two axes are one
        (torch.zeros(2, 2, 4, 1, SLOT + 8)[..., :SLOT], "contiguous"),
        (torch.zeros(2, 2, 4, 1, SLOT, dtype=torch.float64), "float64"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            call(bias)


# -------------------------------------------------------------------------------------------- the short way


@pytest.mark.parametrize("make", [padded, paged])
def test_equal_calls_take_the_short_way_with_their_own_addresses(card, no_long_way, make):
    call = bridge.memory_efficient_attention
    call(*make([5, 100, 0]))
    launches = len(card.launched)
    no_long_way()
    q, k, v, mask = make([100, 3, 99], seed=1)
    out = call(q, k, v, mask)
    assert len(card.launched) == 2 * launches
    given = {}
    for _, names, addresses in card.launched[launches:]:
        given |= dict(zip(names, addresses))
    assert (given["q"], given["k"], given["v"]) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert given["q_start"] == mask.q_seqinfo.seqstart.data_ptr()
    assert given["k_len"] == mask.k_seqinfo.seqlen.data_ptr()
    if make is paged:
        assert given["block_table"] == mask.block_tables.data_ptr()
    assert given["out"] == out.data_ptr() and (out.shape, out.dtype) == (q.shape, q.dtype)
    assert memory(given["count"], (1,), "int32") == memory(given["sequences"], (1,), "int32") == 3


def test_replaced_and_updated_lengths_are_seen(card, no_long_way):
    q, k, v, mask = padded([100, 7])
    bridge.memory_efficient_attention(q, k, v, mask)
    no_long_way()
    mask.k_seqinfo.seqlen = torch.tensor([3, 4], dtype=torch.int32)
    bridge.memory_efficient_attention(q, k, v, mask)
    _, names, addresses = card.launched[-2]
    assert dict(zip(names, addresses))["k_len"] == mask.k_seqinfo.seqlen.data_ptr()
    other = dataclasses.replace(mask)  # a new object with the same tensors
    bridge.memory_efficient_attention(q, k, v, other)


def test_a_plain_batch_needs_no_tensors_but_its_own(card, no_long_way):
    q, k = torch.randn(3, 1, HEADS, DIM).half(), torch.randn(3, SLOT, KV_HEADS, DIM).half()
    masks = [None, attn_bias.LowerTriangularFromBottomRightMask(), attn_bias.LocalAttentionFromBottomRightMask(3, 0)]
    for mask in masks:
        bridge.memory_efficient_attention(q, k, k, mask)
    no_long_way()
    for mask in masks:
        bridge.memory_efficient_attention(q, k, k, mask)
    assert {name for _, names, _ in card.launched for name in names}.isdisjoint({"k_len", "block_table"})


def test_expanded_heads_take_the_short_way(card, no_long_way):
    q = torch.randn(1, 3, KV_HEADS, 4, DIM).half()
    k = torch.randn(1, 3 * SLOT, KV_HEADS, 1, DIM).half().expand(-1, -1, -1, 4, -1)
    mask = padded([5, 6, 7])[3]
    bridge.memory_efficient_attention(q, k, k, mask)
    no_long_way()
    assert bridge.memory_efficient_attention(q, k, k, mask).shape == q.shape
    assert dict(zip(*card.launched[-2][1:]))["k"] == k.data_ptr()


def test_an_lse_that_is_not_returned_goes_where_nothing_is_read(card, monkeypatch):
    q, k, v, mask = padded([100, 7])
    given = []
    for function in (bridge.memory_efficient_attention, bridge.memory_efficient_attention_forward_requires_grad):
        for _ in range(2):
            result = function(q, k, v, mask)
        given.append(dict(zip(*card.launched[-1][1:])))
    assert given[1]["lse"] == result[1].data_ptr()
    table = launch._tables[None]
    assert table.data_ptr() + 4 * launch.MOST_TOKENS < given[0]["lse"]
    assert given[0]["lse"] + result[1].nbytes <= table.data_ptr() + table.nbytes
    assert torch.equal(table[: launch.MOST_TOKENS + 1], torch.arange(launch.MOST_TOKENS + 1))
    monkeypatch.setattr(launch, "SINK_BYTES", 4)  # a larger one is allocated
    launch.plan_of.cache_clear()
    _lean._plans.clear()
    assert isinstance(bridge.memory_efficient_attention(q, k, v, mask), torch.Tensor)
    address = dict(zip(*card.launched[-1][1:]))["lse"]
    assert not table.data_ptr() <= address < table.data_ptr() + table.nbytes


def test_a_table_of_other_integers_is_converted_in_every_call(card):
    q, k, v, mask = paged([100, 7])
    mask.block_tables = mask.block_tables.long()
    for _ in range(2):
        bridge.memory_efficient_attention(q, k, v, mask)
    assert not _lean._plans
    assert all(dict(zip(n, a)).get("block_table") != mask.block_tables.data_ptr() for _, n, a in card.launched)


@pytest.mark.parametrize(
    "change",
    [dict(num_splits=1), dict(split_size=64), dict(softcap=2.0), dict(scale=0.5), dict(output_dtype=torch.float32)],
    ids=str,
)
def test_options_have_plans_of_their_own(card, change):
    arguments = padded([100, 7])
    bridge.memory_efficient_attention(*arguments)
    bridge.memory_efficient_attention(*arguments, **change)
    bridge.memory_efficient_attention(*arguments)
    first, second = card.launched[0], card.launched[-2]
    assert first[0] == second[0] and len({kernel for kernel, *_ in card.launched}) > 2 - ("num_splits" in change)


def test_wrong_types_raise_although_they_equal_what_was_served(card):
    arguments = padded([100, 7])
    bridge.memory_efficient_attention(*arguments, num_splits=1)
    for wrong in (True, 1.0, [1]):
        with pytest.raises(StaticArgumentError, match="num_splits"):
            bridge.memory_efficient_attention(*arguments, num_splits=wrong)
    given, named = varlen_arguments(*paged([100, 7]))
    bridge.varlen_attn(*given, window_size=(-1, 0), **named)
    with pytest.raises(StaticArgumentError, match="window_size"):
        bridge.varlen_attn(*given, window_size=(-1.0, 0), **named)
    with pytest.raises(StaticArgumentError, match="max_q"):
        bridge.varlen_attn(*given[:-2], True, SLOT, **named)
    with pytest.raises(ArgumentError, match="max_k"):
        bridge.varlen_attn(*given[:-1], -1, **named)
    launched = len(card.launched)
    with pytest.raises(ValueError, match="op"):
        bridge.memory_efficient_attention(*arguments, num_splits=1, op=object())
    assert len(card.launched) == launched


def test_bad_calls_raise_after_good_ones_and_launch_nothing(card):
    q, k, v, mask = padded([100, 7])
    bridge.memory_efficient_attention(q, k, v, mask)
    launched = len(card.launched)
    with pytest.raises(ShapeError, match="query"):
        bridge.memory_efficient_attention(q[:, :1].contiguous(), k, v, mask)
    with pytest.raises(ShapeError, match="value"):
        bridge.memory_efficient_attention(q, k, v[:, :SLOT].contiguous(), mask)
    with pytest.raises(DTypeError, match="dtypes"):
        bridge.memory_efficient_attention(q, k, v.half(), mask)
    longer = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 2 * SLOT, [SLOT + 1, 7], device="cpu")
    with pytest.raises(ShapeError, match="kv_seqlen"):
        bridge.memory_efficient_attention(q, k, v, longer)
    assert len(card.launched) == launched


def test_what_is_read_where_it_lies(card):
    q, k, v, mask = padded([100, 7])
    bridge.memory_efficient_attention(q, k, v, mask, backend="hopper")
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(UnsupportedError, match="16 bytes"):
        bridge.memory_efficient_attention(shifted, k, v, mask, backend="hopper")
    with pytest.raises(UnsupportedError, match="strides"):
        strided = torch.empty(*q.shape[:3], 2 * DIM, dtype=q.dtype)[..., :DIM]
        bridge.memory_efficient_attention(strided, k, v, mask, backend="hopper")


def test_what_must_be_seen_takes_the_long_way(card):
    from torch.utils._python_dispatch import TorchDispatchMode

    q, k, v, mask = padded([100, 7])
    bridge.memory_efficient_attention(q, k, v, mask)
    launched = len(card.launched)

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise InterruptedError

    with pytest.raises(InterruptedError), Refusing():
        bridge.memory_efficient_attention(q, k, v, mask)
    assert len(card.launched) == launched
    q.requires_grad_()
    assert bridge.memory_efficient_attention(q, k, v, mask).requires_grad
    launched = len(card.launched)
    with torch.no_grad():
        bridge.memory_efficient_attention(q, k, v, mask)
    assert len(card.launched) == launched + 2


def test_filed_plans_are_bounded(card, monkeypatch):
    monkeypatch.setattr(_lean, "MOST_PLANS", 2)
    for n in (1, 2, 3, 4):
        for _ in range(2):
            bridge.memory_efficient_attention(*padded([5] * n))
    assert len(_lean._plans) <= 2


def test_threads_have_their_own_addresses(card):
    def call(seed):
        q, k, v, mask = padded([100, 7, 3], seed=seed)
        for _ in range(50):
            out = bridge.memory_efficient_attention(q, k, v, mask, num_splits=1)
        return q, k, out

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    assert len(card.compiled) == 1
    pairs = {(a[names.index("q")], a[names.index("k")]) for _, names, a in card.launched}
    assert pairs == {(q.data_ptr(), k.data_ptr()) for q, k, _ in results}


# ------------------------------------------------------------------------------------------- capture, forks


def test_a_first_call_cannot_be_captured_and_the_error_names_warmup(card):
    q, k, v, mask = padded([100, 7])
    card.capturing = True
    with pytest.raises(ArgumentError, match="warmup"):
        bridge.memory_efficient_attention(q, k, v, mask)
    card.capturing = False
    bridge.memory_efficient_attention(q, k, v, mask)
    card.capturing = True
    bridge.memory_efficient_attention(q, k, v, mask)
    bridge.memory_efficient_attention(*padded([100, 7, 3]))  # another size at the same capacity: nothing to compile


def test_a_forked_child_is_told_so():
    code = """
import os, sys, torch
from bridge import launch
from pallas_kernels.errors import DeviceError
launch.check_process()
launch._tables[0] = torch.zeros(1)
child = os.fork()
if child == 0:
    try:
        launch.check_process()
    except DeviceError as error:
        os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 2)
    os._exit(1)
launch.check_process()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, timeout=240, env=os.environ)


# ----------------------------------------------------------------------------------------- varlen_attn_out


def test_varlen_out_is_written_directly(card, no_long_way):
    q, k, v, mask = paged([100, 7])
    given, named = varlen_arguments(q, k, v, mask)
    out = torch.empty_like(given[0])
    bridge.varlen_attn_out(out, *given, **named)
    no_long_way()
    bridge.varlen_attn_out(out, *given, **named)
    assert all(dict(zip(n, a)).get("out", out.data_ptr()) == out.data_ptr() for _, n, a in card.launched)
    bridge.varlen_attn_out(out, *given[:-2], 1, 17, **named)  # another maximum: nothing depends on it


def test_varlen_out_refuses_before_a_launch(card):
    q, k, v, mask = paged([100, 7])
    given, named = varlen_arguments(q, k, v, mask)
    bridge.varlen_attn_out(torch.empty_like(given[0]), *given, **named)
    launched = len(card.launched)
    good = torch.empty_like(given[0])
    pool = torch.zeros(64, HEADS, DIM, dtype=q.dtype)
    table = pool.view(torch.int32).view(-1)[: mask.block_tables.numel()].view(mask.block_tables.shape)
    used = pool.view(torch.int32).view(-1)[10:12]
    for out, text, change in (
        (good.float(), "dtype", {}),
        (torch.empty(2, HEADS, 32, dtype=q.dtype), "shape", {}),
        (torch.empty(3, HEADS, DIM, dtype=q.dtype), "shape", {}),
        (good.to("meta"), "device", {}),
        (given[0], "overlap", {}),
        (given[1].view(-1, HEADS, DIM)[3:5], "overlap", {}),
        (pool[:2], "overlap", {"block_table": table}),
        (pool[:2], "overlap", {"seqused_k": used}),
        (good[:1].expand(2, -1, -1), "expanded", {}),
        ("out", "tensor", {}),
    ):
        with pytest.raises(ValueError, match=text):
            bridge.varlen_attn_out(out, *given, **{**named, **change})
    assert len(card.launched) == launched
    wide = torch.empty(2, HEADS, 2 * DIM, dtype=q.dtype)[..., :DIM]  # not contiguous: written through a copy
    assert bridge.varlen_attn_out(wide, *given, **named) is wide


def test_calls_are_counted(card):
    for _ in range(3):
        bridge.memory_efficient_attention(*padded([100, 7]))
    assert bridge.cache_info().calls == 3 and len(bridge.cache_info().kernels) == 2
    assert bridge.cache_info().plans == 1
