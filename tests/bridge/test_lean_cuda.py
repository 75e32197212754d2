"""Lean eager calls on a real card: streams, frees, threads, graphs, forks, the disk, and what a call allocates."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import bridge
from bridge import _lean, launch
from bridge.fmha import attn_bias
from pallas_kernels.errors import ArgumentError

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, DIM, PAGE = 16, 4, 64, 64


def paged(lengths, per_row=8, seed=0, device="cuda", heads=HEADS):
    """(query, key, value, mask) of decode over pages; whatever no sequence needs is NaN or -1."""
    generator = torch.Generator().manual_seed(seed)
    n = len(lengths)
    q = torch.randn(1, n, heads, DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, n * per_row, PAGE, KV_HEADS, DIM, generator=generator).bfloat16()
    table = torch.randperm(n * per_row, generator=generator).view(n, per_row).to(torch.int32)
    for b, length in enumerate(lengths):
        for p, page in enumerate(table[b].tolist()):
            used = min(max(length - p * PAGE, 0), PAGE)
            k[page, used:] = v[page, used:] = torch.nan
            if not used:
                table[b, p] = -1
    k, v = (x.view(1, -1, KV_HEADS, DIM).to(device) for x in (k, v))
    mask = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
        [1] * n, lengths, table.to(device), PAGE, device=device
    )
    return q.to(device), k, v, mask


def call(q, k, v, mask, **options):
    return bridge.memory_efficient_attention(q, k, v, mask, backend="hopper", **options)


def varlen(q, k, v, mask, **options):
    pages = [x.view(-1, PAGE, KV_HEADS, DIM) for x in (k, v)]
    cu = mask.q_seqinfo.seqstart
    return bridge.varlen_attn(
        q[0], *pages, cu, None, 1, 512, enable_gqa=True, seqused_k=mask.k_seqinfo.seqlen,
        block_table=mask.block_tables, backend="hopper", **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"num_splits": 4}, {"split_size": 100}], ids=str)
def test_both_ways_give_the_right_values_and_the_same_bits(options):
    q, k, v, mask = paged([512, 1, 0, 130, 77])
    want = bridge.memory_efficient_attention(q.cpu(), k.cpu(), v.cpu(), mask.to("cpu"))
    _lean._plans.clear()
    first = call(q, k, v, mask, **options)
    before = _lean.calls()
    second, third = call(q, k, v, mask, **options), varlen(q, k, v, mask, **options)
    assert _lean.calls() > before
    torch.testing.assert_close(first.cpu(), want, atol=2e-2, rtol=5e-3)
    assert torch.equal(first, second) and torch.equal(first[0], third)
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(q, k, v, mask, backend="hopper", **options)
    again, same = bridge.memory_efficient_attention_forward_requires_grad(q, k, v, mask, backend="hopper", **options)
    assert torch.equal(out, first) and torch.equal(out, again) and torch.equal(lse, same)
    target = torch.full_like(q[0], torch.nan)
    pages = [x.view(-1, PAGE, KV_HEADS, DIM) for x in (k, v)]
    for _ in range(2):
        target.fill_(torch.nan)
        bridge.varlen_attn_out(
            target, q[0], *pages, mask.q_seqinfo.seqstart, None, 1, 512, enable_gqa=True,
            seqused_k=mask.k_seqinfo.seqlen, block_table=mask.block_tables, backend="hopper", **options,
        )  # fmt: skip
        assert torch.equal(target, first[0])


def test_a_step_waits_for_nothing_and_allocates_what_it_returns_and_one_workspace():
    q, k, v, mask = paged([512, 1, 0])
    with_lse = bridge.memory_efficient_attention_forward_requires_grad
    expected = {
        (call, 1): 1,
        (call, 4): 2,
        (with_lse, 1): 2,
        (with_lse, 4): 3,
    }
    for (function, splits), most in expected.items():
        keywords = dict(num_splits=splits) | ({} if function is call else {"backend": "hopper"})
        function(q, k, v, mask, **keywords)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = function(q, k, v, mask, **keywords)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == most
        del result


def test_streams_frees_and_neighbours():
    """Two side streams with busy neighbours; inputs and results are freed at once and their memory is filled with NaN
    by the next allocation of either stream: not one of 10000 results is wrong."""
    calls = [(call, {}), (call, {"num_splits": 1}), (varlen, {"num_splits": 4})]
    cases = []
    for seed, lengths in enumerate(([512, 3, 100], [77], [512] * 4, [1, 0, 256, 500, 130])):
        given = paged(lengths, seed=seed)
        cases += [(given, function, options, function(*given, **options)) for function, options in calls]
    streams, neighbour = [torch.cuda.Stream() for _ in range(2)], torch.cuda.Stream()
    wrong = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in streams]
    load = torch.randn(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    for n in range(10000):
        (q, k, v, mask), function, options, want = cases[n * 7 % len(cases)]
        if n % 16 == 0:
            with torch.cuda.stream(neighbour):
                load @ load
        with torch.cuda.stream(streams[n % 2]):
            if n % 32 < 2:
                load @ load  # this stream falls behind the host
            late = q.clone()
            out = function(late, k, v, mask, **options)
            del late
            torch.full_like(q, torch.nan)
            wrong[n % 2] += (out.view(torch.int16) != want.view(torch.int16)).any()
            del out
            torch.full_like(want, torch.nan)
            torch.full((1 << 20,), torch.nan, device="cuda")  # where a workspace was
        if n % 1000 == 999:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert sum(int(x) for x in wrong) == 0


def test_two_threads_on_streams_of_their_own():
    cases = [paged([300, 5, 77], seed=seed) for seed in range(2)]
    want = [call(*case) for case in cases]
    torch.cuda.synchronize()
    wrong = [0, 0]

    def work(n):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            different = torch.zeros((), device="cuda", dtype=torch.int64)
            for _ in range(3000):
                different += (call(*cases[n]) != want[n]).any()
            stream.synchronize()
            wrong[n] = int(different)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]


# -------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("side", [False, True])
def test_a_warmed_up_call_is_captured_without_having_run(side):
    """On any stream; replays follow new lengths, tables and queries."""
    lengths, heads = [500, 1, 0, 64, 300, 7, 511], 8
    bridge.warmup(heads=heads, kv_heads=KV_HEADS, head_dim=DIM, max_length=512, batch=7, page_size=PAGE, pages=56)
    compiled = len(launch.compiled())
    q, k, v, mask = paged(lengths, heads=heads, seed=3)
    k.nan_to_num_(), v.nan_to_num_(), mask.block_tables.clamp_(0)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream() if side else None
    with torch.cuda.graph(graph, stream=stream):
        captured = call(q, k, v, mask)
    assert len(launch.compiled()) == compiled
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        q.copy_(torch.randn(q.shape, generator=generator))
        mask.k_seqinfo.seqlen.copy_(torch.randint(0, 513, (7,), generator=generator, dtype=torch.int32))
        mask.block_tables.copy_(torch.randint(0, 56, (7, 8), generator=generator, dtype=torch.int32))
        graph.replay()
        assert torch.equal(captured, call(q, k, v, mask))


def test_an_unseen_shape_cannot_be_captured_and_the_process_goes_on():
    q, k, v, mask = paged([5, 6], heads=12)
    with pytest.raises(ArgumentError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(q, k, v, mask, scale=0.123)
    torch.cuda.synchronize()
    assert call(q, k, v, mask, scale=0.123).isfinite().all()


# ---------------------------------------------------------------------------------- processes and devices


def run(code, **env):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True,
        text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


CALL = """
import os, sys, torch, bridge
q, k = torch.randn(2, 1, 8, 64, device="cuda").half(), torch.randn(2, 128, 2, 64, device="cuda").half()
call = lambda: bridge.memory_efficient_attention(q, k, k, num_splits=2, backend="hopper")
out = call()
torch.cuda.synchronize()
"""


def test_a_forked_child_is_told_so():
    code = CALL + """
child = os.fork()
if child == 0:
    try:
        call()
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(call(), out)
print("right")
"""
    assert run(code) == ["right"]


def test_the_next_process_finds_lowered_kernels(tmp_path):
    code = CALL + "print(*(k.from_disk for k in bridge.cache_info().kernels), float(out.float().abs().sum()) > 0)"
    first, second = (run(code, PALLAS_SPLITK_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first == ["False", "False", "True"] and second == ["True", "True", "True"]


def test_another_card_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    given = paged([100, 3, 0])
    want = call(*given)
    there = paged([100, 3, 0], device="cuda:1")
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        out = call(*there)
        assert out.device == torch.device("cuda:1") and torch.equal(out.cpu(), want.cpu())
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        assert torch.equal(call(*there).cpu(), want.cpu())
    assert torch.equal(call(*given), want)
    with pytest.raises(ValueError, match="one device"):
        call(there[0], *given[1:])
