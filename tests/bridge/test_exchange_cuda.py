"""`bridge.exchange` on CUDA memory: what is shared, in which order the GPU works, and who keeps what for how long."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge import _lifetime, exchange
from bridge.exchange import ExchangeCopyWarning, record_stream, to_jax, to_torch, wrap
from pallas_kernels.errors import ArgumentError, GradientError, UnsupportedError

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when the first test opens JAX's client
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(f"error::{ExchangeCopyWarning.__module__}.ExchangeCopyWarning"),
]

WIDE = ["int64", "uint64", "float64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
NARROW = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"]
DTYPES = WIDE + NARROW + FLOAT8
SHAPES = [(), (1,), (24,), (2, 3, 4), (1, 5, 1), (0,), (0, 3), (2, 0)]
COUNT = 1 << 18  # float32: 1 MB


@pytest.fixture(autouse=True)
def on_the_first_gpu():
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no CUDA: {error}")
    with jax.default_device(device), torch.cuda.device(0):
        yield
        settle()


def settle():
    """Waits for the GPU and gives back all that was kept."""
    gc.collect()
    torch.cuda.synchronize()
    for n in range(100):
        (jnp.zeros(()) + 1).block_until_ready()  # JAX lets go of what was released
        exchange._keeper.sweep()
        if len(exchange._keeper) == 0 and n > 3:
            break
        time.sleep(0.01)
    assert len(exchange._keeper) == 0


def values(shape, dtype):
    count = int(np.prod(shape))
    numbers = torch.arange(1, count + 1) % 2 if dtype == torch.bool else torch.arange(1, count + 1)
    return numbers.to(torch.float32).view(shape).to(dtype).cuda()


def raw(x):
    """Shape, dtype name and bytes in logical order, of either library."""
    if isinstance(x, torch.Tensor):
        data = x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).cpu().numpy().tobytes()
        return tuple(x.shape), str(x.dtype).removeprefix("torch."), data
    return x.shape, x.dtype.name, np.asarray(x).tobytes()


def shares(array, tensor):
    return array.unsafe_buffer_pointer() == tensor.data_ptr()


def spin(milliseconds):
    """Keeps torch's current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.9e6))


fill = jax.jit(lambda value: jnp.full((COUNT,), value, jnp.float32))


@partial(jax.jit, static_argnums=1)
def chain(w, steps):
    for _ in range(steps):
        w = jnp.fft.fft(w) * 0.5
    return w


@cache
def signal(log_size):
    return jnp.zeros(1 << log_size, jnp.complex64)


@cache
def steps(milliseconds, log_size):
    """How many steps of a chain keep JAX busy for a time."""
    w = chain(signal(log_size), 10).block_until_ready()
    start = time.perf_counter()
    for _ in range(3):
        w = chain(w, 10)
    w.block_until_ready()
    return 1 + int(milliseconds / ((time.perf_counter() - start) / 30 * 1e3))


@partial(jax.jit, static_argnums=2)
def late(x, w, steps):
    """x, read after a long computation."""
    return x + 0 * chain(w, steps)[0].real


# Sharing, dtypes and shapes


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_is_shared_both_ways(dtype):
    for shape, copy in itertools.product(SHAPES, (None, False)):
        tensor = values(shape, getattr(torch, dtype))
        array = to_jax(tensor, copy=copy)
        back = to_torch(array, copy=copy)
        assert array.devices() == {jax.devices("cuda")[0]} and back.device == tensor.device
        assert array.dtype.name == dtype and raw(array) == raw(tensor) == raw(back)
        if tensor.numel():
            assert shares(array, tensor) and back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_jax_are_shared_and_copies_are_fresh(dtype):
    with jax.enable_x64(True):
        for shape in SHAPES:
            array = jnp.array(np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(jnp.dtype(dtype)))
            tensor, copied = to_torch(array), to_torch(array, copy=True)
            again = to_jax(copied, copy=True)
            assert raw(tensor) == raw(array) == raw(copied) == raw(again)
            if array.size:
                assert shares(array, tensor)
                assert len({tensor.data_ptr(), copied.data_ptr(), again.unsafe_buffer_pointer()}) == 3


def test_layouts_and_alignment():
    tensor = values((2, 3, 4, 5), torch.float32)
    for order in itertools.permutations(range(4)):
        permuted = tensor.permute(order)
        array = to_jax(permuted, copy=False)
        back = to_torch(array, copy=False)
        assert shares(array, permuted) and raw(array) == raw(permuted) and back.stride() == permuted.stride()
        np.testing.assert_array_equal(np.asarray(array + 1), permuted.cpu().numpy() + 1)
    flat = values((64,), torch.float32)
    array = to_jax(flat[4:])  # 16 bytes
    assert shares(array, flat[4:])
    np.testing.assert_array_equal(np.asarray(array * 2), np.arange(5, 65) * 2.0)
    for view, reason in [(flat[1:], "multiple of 16 bytes"), (flat[::2], "strides"), (tensor[..., :3], "strides")]:
        with pytest.warns(ExchangeCopyWarning, match=reason) as caught:
            array = to_jax(view)
        assert caught[0].filename == __file__ and raw(array) == raw(view) == raw(exchange.import_or_copy(view))
        with pytest.raises(ArgumentError, match="copy=False"):
            to_jax(view, copy=False)
    with pytest.raises(ArgumentError, match="copy=True"):
        to_jax(flat.expand(3, 64))
    with pytest.raises(GradientError, match="detach"):
        to_jax(flat.clone().requires_grad_())


def test_the_default_device_and_traces_do_not_matter():
    tensor = values((64,), torch.float64)
    with jax.default_device(jax.devices("cpu")[0]):
        assert shares(to_jax(tensor, copy=False), tensor)
        assert to_jax(tensor[:0]).devices() == {jax.devices("cuda")[0]}

    @jax.jit
    def traced(x):
        array = to_jax(tensor, copy=False)
        assert shares(array, tensor) and to_torch(array).data_ptr() == tensor.data_ptr()
        assert to_jax(tensor[:0]).shape == (0,)
        return x

    traced(jnp.zeros(8))


def test_memory_of_the_host():
    pinned = torch.arange(64.0).pin_memory()
    array = to_jax(pinned, copy=False)
    assert array.devices() == {jax.devices("cpu")[0]} and shares(array, pinned)
    np.testing.assert_array_equal(np.asarray(array), np.arange(64))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cuda")[0], memory_kind="pinned_host")
    with pytest.raises(UnsupportedError, match=r"pinned_host.*device_put"):
        to_torch(jax.device_put(jnp.ones(8), sharding))
    assert to_torch(jax.device_put(np.ones(8), jax.devices("cpu")[0])).device.type == "cpu"


def test_wrap():
    function = wrap(jax.jit(lambda tree: {"sum": tree["a"] + tree["b"][0], "rest": tree["b"]}))
    a, b = values((4, 16), torch.float64), values((4, 16), torch.float64)
    out = function({"a": a, "b": [b, 3]})
    assert torch.equal(out["sum"], a + b) and torch.equal(out["rest"][0], b) and out["rest"][1].item() == 3
    assert wrap(lambda x: x)(a).data_ptr() == a.data_ptr()
    assert torch.equal(wrap(jax.grad(lambda x: (x**2).sum()))(a), 2 * a)


# Order on the GPU


def test_export_waits_on_the_stream_and_not_on_the_host():
    w, n = signal(26), steps(150, 26)
    assert (to_torch(late(fill(7.0), w, n)) != 7).sum().item() == 0  # all is compiled and loaded
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        array = late(fill(7.0), w, n)
        with torch.cuda.stream(stream):
            tensor = to_torch(array)
            assert not array.is_ready()
            assert (tensor != 7).sum().item() == 0


def test_import_waits_on_the_stream_and_not_on_the_host():
    double = jax.jit(lambda x: x * 2)
    double(to_jax(torch.zeros(COUNT, device="cuda").fill_(1), copy=True)).block_until_ready()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(COUNT, device="cuda")
            spin(100)
            tensor.fill_(3)
            result = double(to_jax(tensor, copy=False))
            assert not stream.query()
            copied = to_jax(tensor, copy=True)
        assert (np.asarray(result) == 6).all() and (np.asarray(copied) == 3).all()


def test_a_chain_through_both_libraries():
    step = wrap(jax.jit(lambda x: x + 1))
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(COUNT, device="cuda")
            for _ in range(100):
                tensor = step(tensor) * 1
            assert (tensor == 100).all()


# Lifetime


def naive_export(array):
    return torch.from_dlpack(array)


def exports(export, trials, streams):
    """How often torch read something else than the array it was given: all is dropped while torch's stream has yet to
    read it, and JAX allocates and fills as much at once."""
    wrong = torch.zeros(trials, dtype=torch.bool, device="cuda")
    w = signal(24)
    torch.cuda.synchronize()
    for i in range(trials):
        busy = chain(w, 1)  # JAX's stream
        array = fill(np.float32(i + 1))
        with torch.cuda.stream(streams[i % len(streams)]):
            tensor = export(array)
            del array
            spin(3 if i % 20 == 0 else 0.4)  # torch's stream
            wrong[i] = (tensor[1:] != i + 1).any()
        del tensor
        poison = [fill(np.float32(-1)) for _ in range(3)]
        del poison, busy
    torch.cuda.synchronize()
    return int(wrong.sum())


def test_memory_of_jax_is_kept_until_torch_has_read_it():
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    exports(to_torch, 5, [main])
    assert exports(naive_export, 100, [main]) > 0  # the set-up does show the hazard
    assert exports(to_torch, 1000, [main, side]) == 0


differs = jax.jit(lambda x, value: jnp.any(x != value))


def imports(convert, trials):
    """How often JAX read something else than the tensor it was given: all is dropped while JAX has yet to read it, and
    torch allocates and fills as much at once."""
    wrong = []
    w, n = signal(24), steps(4, 24)
    for i in range(trials):
        spin(0.1)  # torch's stream
        tensor = torch.full((COUNT,), i + 1.0, device="cuda")
        array = convert(tensor)
        result = late(array, w, n)  # JAX's stream is busy, and reads the array last
        del array, tensor
        poison = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(3)]
        del poison
        wrong.append(differs(result, np.float32(i + 1)))
    return sum(bool(x) for x in wrong)


def test_memory_of_torch_is_kept_until_jax_has_read_it(record_property):
    imports(to_jax, 5)
    naive = imports(jax.dlpack.from_dlpack, 50)
    print(f"jax.dlpack.from_dlpack alone: {naive} wrong of 50")  # XLA promises nothing here
    record_property("naive", naive)
    assert imports(to_jax, 1000) == 0


def test_tensors_saved_for_a_backward_pass():
    wrong = torch.zeros(100, dtype=torch.bool, device="cuda")
    for i in range(len(wrong)):
        w = torch.ones(COUNT, device="cuda", requires_grad=True)
        x = to_torch(fill(np.float32(i)))
        loss = (w * x).sum()
        del x
        spin(0.4)
        loss.backward()  # reads x and releases it, in autograd's thread
        del loss
        poison = [fill(np.float32(-1)) for _ in range(3)]
        del poison
        wrong[i] = (w.grad != i).any()
    assert not wrong.any()


def test_record_stream_keeps_memory_for_a_stream_that_is_never_current():
    other, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def trial(told):
        wrong = 0
        for i in range(20):
            tensor = to_torch(fill(np.float32(i + 1)))
            other.wait_stream(main)
            target = torch.zeros(COUNT, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                spin(5)
                target.copy_(tensor)
            if told:
                record_stream(tensor[3:], other)
            del tensor
            poison = [fill(np.float32(-1)) for _ in range(3)]
            del poison
            torch.cuda.synchronize()
            wrong += int((target != i + 1).any())
        return wrong

    assert trial(told=True) == 0
    assert trial(told=False) > 0


def test_record_stream_of_arrays_and_of_torch_memory():
    stream = torch.cuda.Stream()
    array = fill(5.0)
    address = array.unsafe_buffer_pointer()
    with torch.cuda.stream(stream):
        spin(20)
    record_stream(array, stream)
    del array
    assert all(fill(-1.0).unsafe_buffer_pointer() != address for _ in range(5))
    tensor = torch.ones(8, device="cuda")
    record_stream(tensor, stream)
    for wrong in (None, 7):
        with pytest.raises(TypeError, match=r"torch\.cuda\.Stream"):
            record_stream(tensor, wrong)


def test_threads_with_streams_of_their_own():
    barrier = threading.Barrier(4)
    step = wrap(jax.jit(lambda x: x * 2))

    def work(seed):
        wrong = 0
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
            barrier.wait(60)
            for i in range(50):
                tensor = torch.full((COUNT,), float(seed + i), device="cuda")
                result = step(tensor)
                del tensor
                spin(0.1)
                wrong += (result != 2 * (seed + i)).any()
                del result
            return int(wrong)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_does_not_grow():
    source = torch.ones(1 << 16, device="cuda")
    one = jax.jit(lambda x: x + 1)

    def exchange_often(count):
        for _ in range(count):
            array = to_jax(source * 1)
            to_torch(one(array))
            to_torch(array)
            assert len(exchange._keeper) < 200
        settle()
        stats = jax.devices("cuda")[0].memory_stats()
        return torch.cuda.memory_allocated(), stats["bytes_in_use"], len(_lifetime._live), resident()

    before = exchange_often(500)
    after = exchange_often(3300)  # about 10000 exchanges
    assert after[0] == before[0] and after[1] - before[1] < 1 << 18 and after[2] == before[2]
    assert after[3] - before[3] < 16 << 20


# Capture


def test_an_exchange_during_a_capture_raises_and_leaves_the_capture_intact():
    tensor, array, stream = torch.ones(8, device="cuda"), jnp.ones(8), torch.cuda.Stream()
    to_torch(array), to_jax(tensor)
    graph = torch.cuda.CUDAGraph()
    calls = [partial(to_jax, tensor), partial(to_jax, tensor, copy=True), partial(to_jax, tensor[:0])]
    calls += [partial(to_torch, array), partial(to_torch, array, copy=True), partial(wrap(lambda x: x), tensor)]
    calls += [wrap(lambda: array), partial(record_stream, tensor, stream), partial(record_stream, array, stream)]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            with pytest.raises(UnsupportedError, match=r"being captured.*before the capture.*bridge\.launch"):
                call()
        tensor.add_(1)
    graph.replay()
    assert (tensor == 2).all() and (np.asarray(array) == 1).all()


def test_a_release_during_a_capture_waits_for_its_end():
    tensor = to_torch(fill(4.0))
    out = torch.empty_like(tensor)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.add(tensor, 1, out=out)
        del tensor
        gc.collect()
        assert len(exchange._keeper._unrecorded) == 1
    poison = [fill(-1.0) for _ in range(5)]
    graph.replay()
    assert (out == 5).all()
    del poison
    settle()
    assert not exchange._keeper._unrecorded


# Several GPUs


def test_a_gpu_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    device = jax.devices("cuda")[1]
    assert torch.cuda.current_device() == 0
    for stream in (torch.cuda.default_stream(1), torch.cuda.Stream(1)):
        with torch.cuda.device(1):
            previous = torch.cuda.current_stream(1)
            torch.cuda.set_stream(stream)
        try:
            with torch.cuda.device(0):
                for i in range(20):
                    tensor = torch.full((COUNT,), float(i), device="cuda:1")
                    array = to_jax(tensor, copy=False)
                    assert array.devices() == {device} and shares(array, tensor)
                    back = to_torch(array + 1)
                    del array, tensor
                    assert back.device.index == 1 and (back == i + 1).all()
                    copied = to_jax(back[1:], copy=True)
                    assert copied.devices() == {device} and (np.asarray(copied) == i + 1).all()
                    assert to_jax(back[:0]).devices() == {device}
                assert torch.cuda.current_device() == 0
        finally:
            with torch.cuda.device(1):
                torch.cuda.set_stream(previous)


# Donation, and the end of the process

PROCESS = """
import gc, sys, warnings
import jax, jax.numpy as jnp, numpy as np, torch
from bridge.exchange import to_jax, to_torch
step = jax.jit(lambda x: x + 1, donate_argnums=0)
warnings.simplefilter("ignore")
def donate(array):
    try:
        return step(array).block_until_ready()
    except Exception as error:
        print("refused:", error, file=sys.stderr)
tensor = torch.zeros(4096, device="cuda")
result = donate(to_jax(tensor))
# Donating an import is the caller's leave to write into torch's memory: all of it or nothing.
assert result is None or np.asarray(result).all()
assert not tensor.any() or (tensor == 1).all()
array = jnp.zeros(4096) + 0
exported = to_torch(array)
result = donate(array)
assert not exported.any() and (result is None or np.asarray(result).all())
alive = [to_jax(torch.ones(4096, device="cuda")), to_torch(jnp.ones(4096) + 1)]
cycle = [to_torch(jnp.ones(4096) + 2)]
cycle.append(cycle)
del cycle
torch.cuda._sleep(10**8)  # releases are waiting at exit
late = to_torch(jnp.ones(4096) + 3)
del late
print("passed", flush=True)
"""


def test_donation_never_writes_into_shared_memory_and_the_process_ends_well():
    env = os.environ | {"PYTHONPATH": str(Path(exchange.__file__).parents[1])}
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = [sys.executable, "-X", "faulthandler", "-c", PROCESS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "passed", done.stderr


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "bool"])
def test_no_copy_is_hidden(dtype):
    tensor = values((128,), getattr(torch, dtype))
    settle()
    before = torch.cuda.memory_allocated()
    tensors = [to_torch(array) for array in [to_jax(tensor) for _ in range(8)]]
    assert torch.cuda.memory_allocated() == before
    assert {x.data_ptr() for x in tensors} == {tensor.data_ptr()}
