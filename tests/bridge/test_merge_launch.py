"""merge_attentions from torch: which kernel a call launches and what it is handed, anywhere; values, bits, graphs and
fallbacks on a GPU."""

import ctypes
import dataclasses
import struct
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import bridge
import cases
import checks
import oracle
import torch_frontend as frontend
from bridge import _merge_launch, launch
from pallas_kernels.errors import FallbackWarning
from pallas_kernels.kernels import _compat
from pallas_kernels.merge import merge_on
from pallas_kernels.merge_program import MOST_OPERANDS, Merge

CALL = Merge((6, 3, 4, 64), ("float32",) * 3, ("float64",) * 3, True, True, "float32", True)
TOLERANCES = {"float32": (2e-6, 2e-6), "float16": (2e-3, 1e-3), "bfloat16": (1e-2, 8e-3)}


def drawn(n, shape, dtypes=("float32",), lse_dtypes=("float64",), empty=0.2, seed=0):
    """(chunks with NaN where the LSE is -inf, LSEs, expected out, expected lse); dtypes in turn."""
    rng = np.random.default_rng(seed)
    batch, queries, *heads, _ = shape
    outs = [cases.round_f32(rng.standard_normal(shape), dtypes[i % len(dtypes)]) for i in range(n)]
    lses = [3 * rng.standard_normal((batch, *heads, queries)) for _ in range(n)]
    lses = [x.astype(lse_dtypes[i % len(lse_dtypes)]) for i, x in enumerate(lses)]
    for x in lses:
        x[rng.random(x.shape) < empty] = -np.inf
    nothing = [np.moveaxis(x == -np.inf, -1, 1) for x in lses]
    want = oracle.merge([np.where(no[..., None], 0, a) for a, no in zip(outs, nothing)], lses)
    for a, no in zip(outs, nothing):
        a[no] = np.nan
    chunks = [torch.from_numpy(a).to(getattr(torch, dtypes[i % len(dtypes)])) for i, a in enumerate(outs)]
    return chunks, [torch.from_numpy(x) for x in lses], *want


# -------------------------------------------------------------------------------------------------- anywhere


def test_batches_between_capacities_share_a_kernel():
    forms = {_merge_launch.kernel_of(dataclasses.replace(CALL, shape=(n, 3, 4, 64))) for n in (5, 8, 15)}
    (kernel,) = forms
    assert kernel.counted and kernel.batch == 16 and not kernel.chunks_stacked
    exact = _merge_launch.kernel_of(dataclasses.replace(CALL, shape=(16, 3, 4, 64)))
    assert not exact.counted and exact.batch == 16


def test_more_chunks_than_operands_stay_stacked():
    n = MOST_OPERANDS + 1
    many = dataclasses.replace(CALL, chunk_dtypes=("float32",) * n, lse_dtypes=("float64",) * n)
    kernel = _merge_launch.kernel_of(many)
    assert kernel.chunks_stacked and kernel.lses_stacked and not kernel.counted


@pytest.fixture
def interpreted(monkeypatch):
    """Launches run in the interpreter on host memory."""
    numbers = torch.arange(100, dtype=torch.int32)

    def enqueue(made, launched, device):
        kernel = launched.kernel

        def array(address, t):
            size = int(np.prod(t.shape)) * t.dtype.itemsize
            return np.frombuffer((ctypes.c_char * size).from_address(address), t.dtype).reshape(t.shape)

        def run(stream, packed):
            addresses = struct.unpack(f"{len(packed) // 8}Q", packed)
            with jax.enable_x64(True):
                inputs = [array(a, t) for a, t in zip(addresses, kernel.in_types)]
                results = kernel.build(interpret=True)(*(jnp.array(x) for x in inputs))
                for address, x in zip(addresses[len(inputs) :], results, strict=True):
                    count = numbers[kernel.batch if not kernel.counted else int(inputs[-1][0])]
                    used = np.asarray(x)[: int(count)]
                    ctypes.memmove(address, np.ascontiguousarray(used).ctypes.data, used.nbytes)

        return run

    monkeypatch.setattr(launch, "loaded", enqueue)
    monkeypatch.setattr(launch, "numbers_on", lambda device: numbers)
    monkeypatch.setattr(launch, "current_device", lambda: None)
    monkeypatch.setattr(launch, "raw_stream", lambda device: 0)
    yield
    _compat.reset_interpreter()


@pytest.mark.parametrize("stacked", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize(
    "n,shape,dtypes",
    [
        (3, (3, 2, 4, 64), ("float32",)),
        (2, (4, 1, 8, 32), ("float32",)),
        (3, (4, 5, 2, 3, 16), ("bfloat16", "float32")),
        (MOST_OPERANDS + 2, (2, 1, 2, 8), ("float32",)),
    ],
    ids=str,
)
def test_a_plan_hands_the_kernel_what_it_reads(interpreted, n, shape, dtypes, stacked):
    if len(dtypes) > 1 or n > MOST_OPERANDS:
        stacked = (n > MOST_OPERANDS,) * 2
    outs, lses, want, want_lse = drawn(n, shape, dtypes)
    given = outs[0].dtype
    if shape[0] == 3:  # at a capacity of 4: the interpreter reads a chunk more
        grow = lambda x: torch.cat([x, x.new_full((1, *x.shape[1:]), torch.nan)])[: shape[0]]  # noqa: E731
        outs, lses, stacked = [grow(x) for x in outs], [grow(x) for x in lses], (False, False)
    names = [tuple(str(x.dtype).removeprefix("torch.") for x in xs) for xs in (outs, lses)]
    call = Merge(shape, *names, *stacked, names[0][0], True)
    plan = _merge_launch.Plan(call, torch.device("cpu"))
    attn, lse = (torch.stack(x) if s else x for x, s in zip((outs, lses), stacked))
    out, merged = plan.run([*plan.chunks.addresses(attn), *plan.lses.addresses(lse)])
    assert (out.dtype, merged.dtype) == (given, torch.float64)
    checks.close(frontend.numpy(out), want, *TOLERANCES[names[0][0]])
    checks.close(frontend.numpy(merged), want_lse, 1e-6, 1e-6)


def test_tensors_on_the_cpu_are_merged_there():
    outs, lses, want, want_lse = drawn(3, (2, 3, 4, 32))
    out, lse = bridge.merge_attentions(outs, lses)
    checks.close(frontend.numpy(out), want, *TOLERANCES["float32"])
    checks.close(frontend.numpy(lse), want_lse, 1e-6, 1e-6)


# ------------------------------------------------------------------------------------------------- on a GPU

GPU = {
    "decode": dict(n=16, shape=(32, 1, 32, 128)),
    "batch-33": dict(n=5, shape=(33, 1, 8, 128)),
    "queries": dict(n=4, shape=(2, 513, 4, 128)),
    "odd-heads": dict(n=3, shape=(3, 3, 77, 128), dtypes=("bfloat16",), lse_dtypes=("float32",)),
    "groups": dict(n=3, shape=(5, 7, 2, 8, 64), dtypes=("float16", "float32")),
    "mixed": dict(n=6, shape=(3, 70, 5, 96), dtypes=("bfloat16", "float32", "float16"),
                  lse_dtypes=("float32", "float64")),
    "dim-8": dict(n=2, shape=(3, 11, 3, 8)),
    "dim-72": dict(n=2, shape=(3, 11, 3, 72), dtypes=("bfloat16",)),
    "dim-80": dict(n=20, shape=(2, 9, 3, 80), dtypes=("float16",)),
    "dim-256": dict(n=2, shape=(4, 9, 3, 256)),
    "dim-512": dict(n=7, shape=(2, 9, 3, 512)),
    "one-chunk": dict(n=1, shape=(2, 9, 3, 64)),
    "all-empty": dict(n=3, shape=(2, 9, 3, 64), empty=1.0),
    "64-chunks": dict(n=64, shape=(3, 5, 4, 128), dtypes=("float32", "bfloat16"), lse_dtypes=("float64", "float32")),
    "70-chunks": dict(n=70, shape=(3, 5, 4, 128)),
}  # fmt: skip


def on_gpu(given):
    outs, lses, *want = given
    return [x.cuda() for x in outs], [x.cuda() for x in lses], *want


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_values_and_bits(name):
    """Torch against float64; lists, stacks and JAX give the same bits."""
    outs, lses, want, want_lse = on_gpu(drawn(**GPU[name]))
    dtype = str(outs[0].dtype).removeprefix("torch.")
    equal = len({x.dtype for x in outs}) == len({x.dtype for x in lses}) == 1
    forms = [(outs, lses)] * (len(outs) <= MOST_OPERANDS) + [(torch.stack(outs), torch.stack(lses))] * equal
    seen = []
    for form in forms:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            out, lse = bridge.merge_attentions(*form)
        checks.close(frontend.numpy(out), want, *TOLERANCES[dtype])
        checks.close(frontend.numpy(lse), want_lse, 1e-6, 1e-6)
        seen.append((out, lse))
    with jax.enable_x64(True):
        arrays = [[bridge.exchange.to_jax(x) for x in xs] for xs in (outs, lses)]
        if len(outs) > MOST_OPERANDS:
            arrays = [jnp.stack(x) for x in arrays]
        for jitted in (False, True):
            merge = lambda a, x: merge_on("hopper", a, x)  # noqa: E731
            seen.append([bridge.exchange.to_torch(x) for x in (jax.jit(merge) if jitted else merge)(*arrays)])
    for other in seen[1:]:
        for a, b in zip(seen[0], other):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_output_dtypes(dtype):
    outs, lses, want, _ = on_gpu(drawn(3, (3, 5, 4, 128), ("bfloat16",), seed=1))
    out, none = bridge.merge_attentions(outs, lses, write_lse=False, output_dtype=getattr(torch, dtype))
    assert none is None and out.dtype == getattr(torch, dtype)
    checks.close(frontend.numpy(out), want, *TOLERANCES[dtype])


@pytest.mark.gpu
def test_graphs_and_streams():
    outs, lses, want, want_lse = on_gpu(drawn(4, (7, 2, 8, 128), seed=2))
    bridge.merge_attentions(outs, lses)  # compiled
    graph = torch.cuda.CUDAGraph()
    given = [x.clone() for x in outs]
    for x in given:
        x.zero_()
    with torch.cuda.graph(graph):
        out, lse = bridge.merge_attentions(given, lses)
    for x, source in zip(given, outs):
        x.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    checks.close(frontend.numpy(out), want, *TOLERANCES["float32"])
    checks.close(frontend.numpy(lse), want_lse, 1e-6, 1e-6)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        late = [x.clone() for x in outs]
        again, _ = bridge.merge_attentions(late, lses)
    stream.synchronize()
    assert torch.equal(again, out)


@pytest.mark.gpu
def test_what_is_not_launched_is_right_and_says_so():
    outs, lses, want, _ = on_gpu(drawn(2, (2, 3, 4, 12), seed=3))
    with pytest.warns(FallbackWarning, match="head_dim 12"):
        out, _ = bridge.merge_attentions(outs, lses)
    checks.close(frontend.numpy(out), want, *TOLERANCES["float32"])
    outs, lses, want, _ = on_gpu(drawn(2, (2, 3, 4, 64), seed=4))
    out, _ = bridge.merge_attentions([x.transpose(1, 2).contiguous().transpose(1, 2) for x in outs], lses)
    checks.close(frontend.numpy(out), want, *TOLERANCES["float32"])
    room = torch.empty(outs[0].numel() + 1, device="cuda")
    room[1:] = outs[0].flatten()
    out, _ = bridge.merge_attentions([room[1:].view(outs[0].shape), outs[1]], lses)
    checks.close(frontend.numpy(out), want, *TOLERANCES["float32"])


@pytest.mark.gpu
def test_gradients():
    outs, lses, want, _ = on_gpu(drawn(2, (2, 3, 4, 64), empty=0.0, seed=5))
    outs = [x.requires_grad_() for x in outs]
    lses = [x.requires_grad_() for x in lses]
    out, lse = bridge.merge_attentions(outs, lses)
    checks.close(frontend.numpy(out.detach()), want, *TOLERANCES["float32"])
    (out.double().square().sum() + lse.sum()).backward()
    found = [x.grad.clone() for x in (*outs, *lses)]
    doubles = [x.detach().double().requires_grad_() for x in (*outs, *lses)]
    a, x = torch.stack(doubles[:2]), torch.stack(doubles[2:])
    share = torch.softmax(x, 0).movedim(-1, 2)[..., None]
    ((share * a).sum(0).square().sum() + torch.logsumexp(x, 0).sum()).backward()
    for got, exact in zip(found, doubles):
        torch.testing.assert_close(got.double(), exact.grad, atol=1e-5, rtol=1e-5)
