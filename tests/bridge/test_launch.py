"""The launch path: capacities and lowering anywhere; on a GPU values, bits, streams, graphs, memory and refusals."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge
import cases
import checks
import oracle
import pallas_kernels as pk
import torch_frontend as frontend
from bridge import _mosaic, launch
from bridge.fmha import attn_bias
from pallas_kernels.errors import FallbackWarning, UnsupportedError
from pallas_kernels.problem import build
from pallas_kernels.program import Target

ROOT = Path(__file__).resolve().parents[2]
HOPPER = Target((9, 0), 132)


def problem_of(tokens, *, slot=1024, heads=8, kv_heads=2, dim=64, **options):
    q, k = (jnp.zeros((1, n, h, dim), jnp.bfloat16) for n, h in ((tokens, heads), (tokens * slot, kv_heads)))
    mask = pk.masks.BlockDiagonalPaddedKeysMask.from_seqlens([1] * tokens, slot, [slot] * tokens)
    return build(q, k, k, mask, **options)[0]


def test_capacity_is_the_power_of_four_above():
    assert [launch.capacity(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 4, 4, 4, 16, 64, 256]


def test_counts_between_capacities_share_a_program():
    programs = {launch.at_capacity(problem_of(n, slot=8), HOPPER)[0] for n in range(5, 9)}
    assert len(programs) == 1
    (made,) = programs
    assert made.buffer("q").shape[0] == made.buffer("k").shape[0] == 16
    assert {"count", "sequences"} <= {b.name for b in made.buffers}


def plain_problem(batch, keys, **options):
    q, k = jnp.zeros((batch, 1, 8, 64), jnp.bfloat16), jnp.zeros((batch, keys, 2, 64), jnp.bfloat16)
    return build(q, k, k, **options)[0]


def test_one_launch_where_every_row_is_a_whole_piece():
    assert len(launch.at_capacity(problem_of(3, slot=8), HOPPER)[0].launches) == 2
    assert len(launch.at_capacity(problem_of(3, slot=8, num_splits=1), HOPPER)[0].launches) == 1
    assert len(launch.at_capacity(plain_problem(66, 4096), HOPPER)[0].launches) == 1  # 132 rows: one for each SM
    assert len(launch.at_capacity(plain_problem(1, 65536), HOPPER)[0].launches) == 2


def test_lowering_opens_no_backend():
    code = """
import jax
from jax._src import xla_bridge
from bridge import _call, _flat, _mosaic, _warmup, launch
from pallas_kernels.program import Target
import torch
made = []
def answer(build, arguments, static, backend, tensors):
    problem, _, _ = _call.describe(build, *arguments)
    made.append(launch.at_capacity(problem, Target((9, 0), 132))[0])
q, k = torch.empty(2, 1, 4, 64, dtype=torch.half, device="meta"), torch.empty(2, 128, 1, 64, dtype=torch.half, device="meta")
_flat.attend(q, k, k, None, None, None, _flat.Mask(), output_dtype=None, backend="hopper", num_splits=2, answer=answer)
for step in made[0].launches:
    structs = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in map(made[0].buffer, step.reads)]
    assert len(_mosaic.lower(step.kernel.build(), structs)) > 1000
assert len(made[0].launches) == 2 and not xla_bridge._backends
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)


def test_layout_reasons():
    x = torch.zeros(4, 8, 16, dtype=torch.float16)
    assert launch.layout_reasons({"q": x}) == []
    assert "contiguous" in launch.layout_reasons({"q": x.transpose(0, 1)})[0]
    assert "16 bytes" in launch.layout_reasons({"q": x.flatten()[1:17]})[0]


def test_more_than_one_kernel_is_not_launched():
    with pytest.raises(RuntimeError, match="one kernel"):
        _mosaic.lower(lambda x: x + 1, [jax.ShapeDtypeStruct((4,), jnp.float32)])


# ----------------------------------------------------------------------------------------------- on a GPU


def cuda(x, dtype):
    return frontend.array(x, dtype).cuda()


class CudaFrontend:
    """`torch_frontend` with everything on the GPU."""

    api = bridge
    array = staticmethod(cuda)
    numpy = staticmethod(frontend.numpy)
    dtype_of = staticmethod(frontend.dtype_of)

    @staticmethod
    def mask(name, arguments):
        return frontend.mask(name, arguments).to("cuda")


def padded(tokens, slot, lengths, *, heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, device="cuda", generator=generator).to(dtype)  # noqa: E731
    q, k, v = draw(1, tokens, heads, dim), *(draw(1, tokens * slot, kv_heads, dim) for _ in range(2))
    mask = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1] * tokens, slot, lengths)
    return q, k, v, mask


SHARED = [
    case for case in cases.mask_cases() if case.mask_class and "Padded" in case.mask_class
    and case.dtype in ("float16", "bfloat16") and case.q_shape[-1] in (32, 64, 128) and case.q_shape[1]
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::pallas_kernels.errors.FallbackWarning")
@pytest.mark.parametrize("case", SHARED[::3], ids=str)
def test_shared_cases(case):
    """The cases of every front end; what the kernels do not cover goes through JAX."""
    checks.check_case(CudaFrontend, case, "auto", seed=31)


COVERED = [
    dict(group=4, kv_heads=8, dim=128, lengths=[1024, 1, 0, 65], slot=1024, options={}),
    dict(group=1, kv_heads=2, dim=64, lengths=[100, 7], slot=104, options={"num_splits": 1}),
    dict(group=16, kv_heads=1, dim=32, lengths=[300, 7, 256], slot=304, options={"num_splits": 3}),
    dict(group=3, kv_heads=2, dim=128, lengths=[512, 511], slot=512, options={"split_size": 200}),
    dict(group=48, kv_heads=1, dim=128, lengths=[512, 3], slot=512, options={"softcap": 2.0}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 64, 128])
@pytest.mark.parametrize("case", COVERED, ids=lambda c: f"group{c['group']}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_and_the_same_bits_as_jax(case, page_size, dtype):
    rng = np.random.default_rng(1)
    n, slot, kv_heads, dim, group = len(case["lengths"]), case["slot"], case["kv_heads"], case["dim"], case["group"]
    if page_size:
        slot = -(-slot // page_size) * page_size
    q = cases.round_f32(rng.standard_normal((n, group * kv_heads, dim)), dtype)
    k, v = (cases.round_f32(rng.standard_normal((n * slot, kv_heads, dim)), dtype) for _ in range(2))
    positions = oracle.key_positions("padded", case["lengths"], total=n * slot)
    want_out, want_lse = oracle.block_diagonal(
        q, k, v, [1] * n, positions, [oracle.visible_table("all", 1, length) for length in case["lengths"]],
        softcap=case["options"].get("softcap"),
    )  # fmt: skip
    outside = np.setdiff1d(np.arange(n * slot), np.concatenate(positions))
    k[outside] = v[outside] = np.nan
    name, arguments = "BlockDiagonalPaddedKeysMask", dict(q_seqlen=[1] * n, kv_seqlen=case["lengths"])
    if page_size:
        pages = n * slot // page_size
        table = rng.permutation(pages).reshape(n, -1)
        k, v = (x.reshape(pages, page_size, kv_heads, dim)[np.argsort(table.ravel())] for x in (k, v))
        k, v = (x.reshape(n * slot, kv_heads, dim) for x in (k, v))
        table = cases.poison_table(table, cases.used_pages(case["lengths"], [0] * n, page_size, table.shape))
        name, arguments = f"Paged{name}", {**arguments, "block_tables": table.astype(np.int32), "page_size": page_size}
    else:
        arguments["kv_padding"] = slot
    tensors = [cuda(x[None], dtype) for x in (q, k, v)]
    call = dict(backend="hopper", **case["options"])
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(
        *tensors, CudaFrontend.mask(name, arguments), **call
    )
    error = np.linalg.norm(frontend.numpy(out[0]) - want_out) / np.linalg.norm(want_out)
    assert error <= 5e-3, error
    checks.close(frontend.numpy(lse[0]), want_lse, *cases.LSE_TOLERANCE)

    mask = getattr(pk.masks, name).from_seqlens(**arguments)
    arrays = [jnp.asarray(x[None], dtype) for x in (q, k, v)]
    jax_out, jax_lse = jax.jit(
        lambda q, k, v, mask: pk.memory_efficient_attention_forward_requires_grad(q, k, v, mask, **call)
    )(*arrays, mask)
    np.testing.assert_array_equal(np.asarray(jax_out).view(np.int16), out.cpu().view(torch.int16).numpy())
    np.testing.assert_array_equal(np.asarray(jax_lse), lse.cpu().numpy())


BIASES = {
    "all-axes": ((3, 8, 2, 320), "float32"),
    "of-heads": ((1, 8, 1, 320), "bfloat16"),
    "tree": ((1, 1, 2, 320), "float16"),
    "of-keys": ((3, 1, 1, 320), "float32"),
    "of-rows": ((3, 8, 2, 1), "float32"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("name", BIASES)
def test_array_biases_are_right_and_the_same_bits_as_jax(name, kv_heads):
    shape, dtype = BIASES[name]
    rng = np.random.default_rng(2)
    q = cases.round_f32(rng.standard_normal((3, 2, 8, 128)), "bfloat16")
    k, v = (cases.round_f32(rng.standard_normal((3, 320, kv_heads, 128)), "bfloat16") for _ in range(2))
    bias = cases.round_f32(2 * rng.standard_normal(shape), dtype)
    bias[rng.random(shape) < 0.2] = -np.inf
    bias[-1, -1, -1] = -np.inf
    lengths = np.array([320, 100, 7], np.int32)
    arrays = [jnp.asarray(x, "bfloat16") for x in (q, k, v)]
    for options in ({}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": 96}):
        out, lse = bridge.memory_efficient_attention_forward_requires_grad(
            *(cuda(x, "bfloat16") for x in (q, k, v)), cuda(bias, dtype),
            kv_lengths=torch.from_numpy(lengths).cuda(), backend="hopper", **options,
        )  # fmt: skip
        call = lambda *x, o=options, b="hopper": pk.memory_efficient_attention_forward_requires_grad(  # noqa: E731
            *x[:4], kv_lengths=x[4], backend=b, **o
        )
        given = (*arrays, jnp.asarray(bias, dtype), jnp.asarray(lengths))
        jax_out, jax_lse = jax.jit(call)(*given)
        np.testing.assert_array_equal(np.asarray(jax_out).view(np.int16), out.cpu().view(torch.int16).numpy())
        np.testing.assert_array_equal(np.asarray(jax_lse), lse.cpu().numpy())
        want_out, want_lse = call(*given, o={}, b="reference")
        checks.close(frontend.numpy(out), np.asarray(want_out, np.float64), *cases.TOLERANCES["bfloat16"])
        checks.close(frontend.numpy(lse), np.asarray(want_lse, np.float64), *cases.LSE_TOLERANCE)


@pytest.mark.gpu
def test_partials_have_a_float64_lse_that_rounds_to_jax_s():
    q, k, v, mask = padded(3, 256, [256, 100, 0])
    out, lse = bridge.memory_efficient_attention_partial(q, k, v, mask, backend="hopper", num_splits=2)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float64)
    arrays = [jnp.asarray(x.cpu().view(torch.int16).numpy()).view(jnp.bfloat16) for x in (q, k, v)]
    jax_mask = pk.masks.BlockDiagonalPaddedKeysMask.from_seqlens([1] * 3, 256, [256, 100, 0])
    jax_out, jax_lse = pk.memory_efficient_attention_partial(*arrays, jax_mask, backend="hopper", num_splits=2)
    np.testing.assert_array_equal(np.asarray(jax_out), out.cpu().numpy())
    np.testing.assert_array_equal(np.asarray(jax_lse), lse.cpu().numpy().astype(np.float32))
    assert (lse.cpu().numpy()[..., :2] != np.asarray(jax_lse)[..., :2].astype(np.float64)).any()


@pytest.mark.gpu
def test_several_tokens_causal():
    rng = np.random.default_rng(5)
    q_lens, k_lens, slot = [3, 0, 5], [200, 10, 3], 256
    q = cases.round_f32(rng.standard_normal((8, 8, 64)), "bfloat16")
    k, v = (cases.round_f32(rng.standard_normal((3 * slot, 2, 64)), "bfloat16") for _ in range(2))
    positions = oracle.key_positions("padded", k_lens, total=3 * slot)
    want = oracle.block_diagonal(
        q, k, v, q_lens, positions, [oracle.visible_table("causal", a, b) for a, b in zip(q_lens, k_lens)]
    )
    mask = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_lens, slot, k_lens)
    for options in ({}, {"num_splits": 1}):
        out, lse = bridge.memory_efficient_attention_forward_requires_grad(
            *(cuda(x[None], "bfloat16") for x in (q, k, v)), mask, backend="hopper", **options
        )
        checks.close(frontend.numpy(out[0]), want[0], *cases.TOLERANCES["bfloat16"])
        checks.close(frontend.numpy(lse[0]), want[1], *cases.LSE_TOLERANCE)


@pytest.mark.gpu
def test_varlen_over_pages():
    k = torch.randn(8, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.arange(3, device="cuda", dtype=torch.int32)
    used = torch.tensor([130, 64], device="cuda", dtype=torch.int32)
    table = torch.tensor([[5, 0, 7], [2, -1, 99]], device="cuda", dtype=torch.int32)
    arguments = (k, k, cu, None, 1, 192)
    options = dict(enable_gqa=True, seqused_k=used, block_table=table)
    out = bridge.varlen_attn(q, *arguments, backend="hopper", **options)
    cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in (q, *arguments)]
    want = bridge.varlen_attn(*cpu, **{n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in options.items()})
    torch.testing.assert_close(out.cpu(), want, atol=2e-2, rtol=5e-3)
    target = torch.full_like(q, float("nan"))
    assert bridge.varlen_attn_out(target, q, *arguments, backend="hopper", **options) is target
    assert torch.equal(target, out)


@pytest.mark.gpu
def test_side_stream():
    q, k, v, mask = padded(4, 2048, [2048, 100, 0, 7])
    want = bridge.memory_efficient_attention(q, k, v, mask, backend="hopper")
    stream = torch.cuda.Stream()
    for _ in range(20):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy = torch.randn(4096, 4096, device="cuda")
            late = torch.full_like(q, float("nan"))
            for _ in range(3):
                busy = busy @ busy
            late.copy_(q)  # reaches the stream after the products
            out = bridge.memory_efficient_attention(late, k, v, mask, backend="hopper")
        stream.synchronize()
        assert torch.equal(out, want)


@pytest.mark.gpu
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v, mask = padded(3, 256, [256, 1, 0])
    want = bridge.memory_efficient_attention(q, k, v, mask, backend="hopper")
    there = [x.to("cuda:1") for x in (q, k, v)]
    out = bridge.memory_efficient_attention(*there, mask.to("cuda:1"), backend="hopper")
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), want.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 64])
def test_graph_replays_with_other_lengths_and_tables(page_size):
    q, k, v, mask = padded(3, 512, [512, 1, 0])
    if page_size:
        table = torch.randperm(24, device="cuda").view(3, 8).to(torch.int32)
        mask = mask.make_paged(table, page_size, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    run = lambda: bridge.memory_efficient_attention_forward_requires_grad(q, k, v, mask, backend="hopper")  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        mask.k_seqinfo.seqlen.copy_(torch.randint(0, 513, (3,), generator=generator, dtype=torch.int32))
        if page_size:
            table.copy_(torch.randperm(24, generator=generator).view(3, 8).to(torch.int32))
        q.copy_(torch.randn(q.shape, generator=generator))
        graph.replay()
        for a, b in zip(captured, run()):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_memory_does_not_grow():
    q, k, v, mask = padded(3, 256, [256, 1, 0])
    run = lambda: bridge.memory_efficient_attention(q, k, v, mask, backend="hopper")  # noqa: E731
    for _ in range(10):
        run()
    torch.cuda.synchronize()
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(10000):
        run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.mem_get_info()[0] == free


@pytest.mark.gpu
def test_no_jax_memory_and_no_client():
    code = """
import torch, bridge
from bridge.fmha import attn_bias
from jax._src import xla_bridge
q, k = torch.randn(1, 2, 8, 64, device="cuda").half(), torch.randn(1, 256, 2, 64, device="cuda").half()
mask = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1, 1], 128, [128, 7])
bridge.memory_efficient_attention(q, k, k, mask, backend="hopper")
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
assert not xla_bridge._backends
assert total - free < 3 * 2**30, (total - free) / 2**30
print("right")
"""
    env = {name: x for name, x in os.environ.items() if not name.startswith("XLA_PYTHON_CLIENT")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "right", done.stderr[-2000:]


@pytest.mark.gpu
def test_memcheck_of_exact_allocations_at_a_capacity():
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    code = """
import torch, bridge
from bridge.fmha import attn_bias
for tokens, page in ((1, None), (3, None), (5, 64), (7, 128)):
    slot = 384
    draw = lambda *shape: torch.randn(shape, device="cuda").half()
    q, k = draw(1, tokens, 6, 64), draw(1, tokens * slot, 2, 64)
    lengths = [(n * 131) % (slot + 1) for n in range(tokens)]
    mask = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1] * tokens, slot, lengths)
    if page:
        table = torch.randperm(tokens * slot // page, device="cuda").view(tokens, -1).to(torch.int32)
        mask = mask.make_paged(table, page, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    for options in ({}, {"num_splits": 1}, {"split_size": 100}):
        bridge.memory_efficient_attention_partial(q, k, k, mask, backend="hopper", **options)
torch.cuda.synchronize()
"""
    done = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.gpu
def test_what_no_kernel_covers():
    """Under "auto" it falls back with one warning; named, the kernels refuse with reasons; the context survives."""
    q, k, v, mask = padded(2, 100, [100, 7])  # slots of 100 keys
    with pytest.raises(UnsupportedError, match="multiples of 8"):
        bridge.memory_efficient_attention(q, k, v, mask, backend="hopper")
    sinks = torch.zeros(8, device="cuda")
    with pytest.raises(UnsupportedError, match="sinks"):
        bridge.memory_efficient_attention(q, k, v, mask, backend="hopper", sinks=sinks)
    with pytest.warns(FallbackWarning) as warned:
        out = bridge.memory_efficient_attention(q, k, v, mask)
        bridge.memory_efficient_attention(q, k, v, mask)
    assert sum("multiples of 8" in str(w.message) and "goes through JAX" in str(w.message) for w in warned) == 1
    cpu = bridge.memory_efficient_attention(*(x.cpu() for x in (q, k, v)), mask.to("cpu"))
    torch.testing.assert_close(out.cpu(), cpu, atol=2e-2, rtol=5e-3)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_bad_calls_raise_before_launch():
    q, k, v, mask = padded(2, 128, [128, 7])
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(UnsupportedError, match="16 bytes"):
        bridge.memory_efficient_attention(shifted, k, v, mask, backend="hopper")
    with pytest.raises(ValueError, match="one device"):
        bridge.memory_efficient_attention(q, k.cpu(), v, mask, backend="hopper")
    with pytest.raises(ValueError, match="heads"):
        bridge.memory_efficient_attention(q[:, :, :7].contiguous(), k, v, mask, backend="hopper")
    pages = torch.randn(2, 64, 2, 64, device="cuda", dtype=q.dtype)
    cu = torch.arange(3, device="cuda", dtype=torch.int32)
    used, table = torch.tensor([3, 4], device="cuda", dtype=torch.int32), cu[:2, None].contiguous()
    call = lambda out: bridge.varlen_attn_out(  # noqa: E731
        out, q[0], pages, pages, cu, None, 1, 64, enable_gqa=True, seqused_k=used, block_table=table
    )
    for out, text in (
        (torch.empty(2, 8, 32, device="cuda", dtype=q.dtype), "shape"), (torch.empty_like(q[0]).float(), "dtype"),
        (torch.empty_like(q[0]).cpu(), "device"), (q[0], "overlap"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            call(out)
    torch.cuda.synchronize()
    assert torch.isfinite(bridge.memory_efficient_attention(q, k, v, mask, backend="hopper")).all()


@pytest.mark.gpu
def test_the_compiled_jax_function_holds_the_programs_kernels_and_no_other():
    profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")
    arrays = [jnp.asarray(np.random.default_rng(0).standard_normal(s), jnp.bfloat16) for s in
              ((1, 4, 32, 128), (1, 4096, 8, 128), (1, 4096, 8, 128))]  # fmt: skip
    mask = pk.masks.BlockDiagonalPaddedKeysMask.from_seqlens([1] * 4, 1024, np.array([1024, 5, 0, 77]))
    mask = jax.tree.map(jnp.asarray, mask)
    for options, kernels in (({}, 2), ({"num_splits": 1}, 1)):
        function = jax.jit(
            lambda *x, options=options: pk.memory_efficient_attention_forward_requires_grad(
                *x, backend="hopper", **options
            )
        )
        _, runs = profiler.measure(function, iterations=3, aggregate=False)(*arrays, mask)
        assert all(len(run) == kernels for run in runs), runs


@pytest.mark.gpu
def test_threads_share_a_compilation():
    from concurrent.futures import ThreadPoolExecutor

    q, k, v, mask = padded(2, 136, [136, 7], kv_heads=4)
    before = len(launch.compiled())
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda _: bridge.memory_efficient_attention(q, k, v, mask, backend="hopper"), range(16))
        )
    torch.cuda.synchronize()
    assert len(launch.compiled()) <= before + 2  # each of the program's kernels once
    assert all(torch.equal(x, results[0]) for x in results)


def test_problems_of_one_program_differ_in_counts_only():
    small, large = (launch.at_capacity(problem_of(n, slot=8), HOPPER)[1] for n in (5, 7))
    capacities = dict(queries=16, batch=16, key_rows=128, tile_tokens=1)
    assert small == large == dataclasses.replace(problem_of(7, slot=8), **capacities)


@pytest.mark.parametrize("batch, tokens", [(1, 3), (3, 3), (5, 1), (1, 1)])
def test_a_plain_batch_keeps_its_tokens_a_sequence(batch, tokens):
    q, k = jnp.zeros((batch, tokens, 8, 64), jnp.bfloat16), jnp.zeros((batch, 128, 2, 64), jnp.bfloat16)
    raised = launch.at_capacity(build(q, k, k)[0], HOPPER)[1]
    assert (raised.batch, raised.queries) == (launch.capacity(batch), launch.capacity(batch) * tokens)
    assert raised.lse_rows == raised.batch and raised.key_rows == raised.batch * 128


def test_the_pitch_of_a_block_table_is_its_own_whatever_maximum_is_named():
    from pallas_kernels.varlen import build as varlen_build

    q, pages = jnp.zeros((3, 8, 64), jnp.bfloat16), jnp.zeros((16, 64, 2, 64), jnp.bfloat16)
    cu, used, table = jnp.arange(4, dtype=jnp.int32), jnp.full(3, 64, jnp.int32), jnp.zeros((3, 8), jnp.int32)
    made = {
        launch.at_capacity(
            varlen_build(q, pages, pages, cu, None, 1, m, enable_gqa=True, seqused_k=used, block_table=table)[0],
            HOPPER,
            table_width=8,
        )[0]
        for m in (1, 64, 65, 300, 512)
    }
    assert len(made) == 1
    assert made.pop().buffer("block_table").shape == (4, 8)
