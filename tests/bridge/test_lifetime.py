"""`bridge._lifetime` without a GPU: replaced deleters on CPU capsules, and the keeping with streams that are fakes."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge import _lifetime
from bridge._lifetime import Keeper, Stream, discard, jax_fence, replace_deleter

COUNT = 4096


@pytest.fixture(autouse=True)
def nothing_left_alive():
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    gc.collect()
    assert not _lifetime._live


def owned():
    """A tensor over numpy memory, and a weak reference that tells whether that memory still lives."""
    memory = np.empty(COUNT + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    memory[start : start + COUNT] = np.arange(COUNT)
    return torch.from_numpy(memory[start : start + COUNT]), weakref.ref(memory)


class Source:
    """Something with a given capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        return self.capsule


# Replaced deleters

TAKERS = {
    "torch": lambda capsule: torch.from_dlpack(capsule),
    "jax": lambda capsule: jax.dlpack.from_dlpack(Source(capsule)),
    "numpy": lambda capsule: np.from_dlpack(Source(capsule)),
}
VERSIONS = {"dltensor": {}, "dltensor_versioned": {"max_version": (1, 0)}}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("taker", TAKERS)
def test_the_memory_lives_until_the_kept_release_is_called(taker, version):
    if taker == "jax" and version == "dltensor_versioned" and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.11 takes no versioned capsules")
    tensor, memory = owned()
    releases = []
    capsule = replace_deleter(tensor.__dlpack__(**VERSIONS[version]), releases.append)
    assert f'"{version}"' in repr(capsule)
    taken = TAKERS[taker](capsule)
    del tensor, capsule
    gc.collect()
    assert not releases and np.asarray(taken)[-1] == COUNT - 1
    view = taken[1:2]
    del taken
    gc.collect()
    assert float(view[0]) == 1.0
    del view
    gc.collect()
    assert len(releases) == 1 and memory() is not None
    releases.pop()()
    assert memory() is None


def test_memory_of_jax_is_given_back_to_jax():
    tensor, memory = owned()
    array = jax.dlpack.from_dlpack(tensor)
    releases = []
    tensor = torch.from_dlpack(replace_deleter(array.__dlpack__(), releases.append))
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    del array
    gc.collect()
    assert memory() is not None and tensor[-1] == COUNT - 1
    del tensor
    assert len(releases) == 1 and memory() is not None
    releases.pop()()
    jnp.zeros(3).block_until_ready()  # JAX drops its own reference at the next chance
    gc.collect()
    assert memory() is None


def test_a_capsule_is_used_up_once():
    tensor, memory = owned()
    given = tensor.__dlpack__()
    capsule = replace_deleter(given, lambda release: release())
    for used in (given, object(), None):
        with pytest.raises(ValueError, match="not an unused DLPack capsule"):
            replace_deleter(used, print)
    discard(given)  # nothing
    taken = torch.from_dlpack(capsule)
    with pytest.raises(ValueError, match="not an unused"):
        replace_deleter(capsule, print)
    discard(capsule)  # nothing
    del tensor
    assert taken[5] == 5 and memory() is not None
    del taken
    assert memory() is None


def test_what_is_never_taken_is_discarded():
    tensor, memory = owned()
    releases = []
    capsule = replace_deleter(tensor.__dlpack__(), releases.append)
    del tensor
    discard(capsule)
    discard(capsule)
    assert len(releases) == 1 and memory() is not None
    releases.pop()()
    assert memory() is None

    gpu = Gpu()
    tensor, memory = owned()
    discard(gpu.keeper.exported(tensor.__dlpack__(), tensor.data_ptr(), A))
    del tensor
    assert not gpu.keeper._exports and memory() is not None
    gpu.finish(A)
    gpu.keeper.sweep()
    assert memory() is None


def test_deleters_replaced_twice():
    tensor, memory = owned()
    order = []

    def named(name):
        return lambda release: (order.append(name), release())

    taken = torch.from_dlpack(replace_deleter(replace_deleter(tensor.__dlpack__(), named("in")), named("out")))
    del tensor, taken
    assert order == ["out", "in"] and memory() is None


AT_EXIT = """
import atexit, sys
called, kept, mode = [], [], sys.argv[1]

@atexit.register  # runs after the handlers that are registered later
def last():
    if mode == "made after the handler":
        kept.append(export())
    if mode != "dropped with the interpreter":
        kept.clear()
    print("called" if called else "passed", flush=True)

import jax, jax.numpy as jnp, torch
import bridge._lifetime as lifetime

class Source:
    def __dlpack_device__(self): return 1, 0
    def __dlpack__(self, **_): return lifetime.replace_deleter(torch.ones(64).__dlpack__(), called.append)

def export():
    return torch.from_dlpack(lifetime.replace_deleter((jnp.arange(64.0) + 1).__dlpack__(), called.append))

kept += [export(), jax.dlpack.from_dlpack(Source())]
cycle = [export()]
cycle.append(cycle)
del cycle
"""


@pytest.mark.parametrize("mode", ["dropped in a handler", "dropped with the interpreter", "made after the handler"])
def test_releases_at_exit_need_no_interpreter(mode):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(_lifetime.__file__).parents[1])}
    command = [sys.executable, "-X", "faulthandler", "-c", AT_EXIT, mode]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "passed", "")


# The keeping, with fake streams


class Gpu:
    """Streams that pass their points when told to."""

    def __init__(self):
        self.current = Stream(0, 1)
        self.reached = Counter()  # of each stream
        self.queued = Counter()
        self.capturing = set()
        self.fences = []
        self.keeper = Keeper(lambda device: self.current._replace(device=device), self.record, self.fence)

    def record(self, stream):
        if stream in self.capturing:
            return None
        self.queued[stream] += 1
        point = self.queued[stream]
        return lambda: self.reached[stream] >= point

    def fence(self, device):
        done = threading.Event()
        self.fences.append((device, done))
        return done.is_set

    def finish(self, *streams):
        for stream in streams:
            self.reached[stream] = self.queued[stream]

    def export(self, stream=None):
        tensor, memory = owned()
        address = tensor.data_ptr()
        capsule = self.keeper.exported(tensor.__dlpack__(), address, stream or self.current)
        return torch.from_dlpack(capsule), memory

    def imported(self, device=0):
        tensor, memory = owned()
        return jax.dlpack.from_dlpack(Source(self.keeper.imported(tensor.__dlpack__(), device))), memory


A, B, C = Stream(0, 1), Stream(0, 2), Stream(1, 2)


def test_memory_is_kept_until_its_stream_has_passed_and_a_sweep_looks():
    gpu = Gpu()
    tensor, memory = gpu.export()
    gpu.keeper.sweep()
    del tensor
    for _ in range(3):
        gpu.keeper.sweep()
        assert memory() is not None and len(gpu.keeper) == 1
    gpu.finish(A)
    assert memory() is not None
    gpu.keeper.sweep()
    assert memory() is None and len(gpu.keeper) == 0


def test_an_idle_stream_gives_back_at_once():
    gpu = Gpu()
    gpu.reached[A] = 10**9
    tensor, memory = gpu.export()
    view = tensor[3:].view(-1)
    del tensor
    assert memory() is not None
    del view
    assert memory() is None and len(gpu.keeper) == 0


def test_the_streams_of_export_and_release_and_those_named_all_count():
    gpu = Gpu()
    tensor, memory = gpu.export(A)
    assert gpu.keeper.record_stream(tensor.data_ptr(), C)
    assert not gpu.keeper.record_stream(tensor.data_ptr() + 4, C)
    gpu.current = B
    del tensor
    assert not gpu.keeper._exports
    for last in (A, B):
        gpu.finish(last)
        gpu.keeper.sweep()
        assert memory() is not None
    gpu.finish(C)
    gpu.keeper.sweep()
    assert memory() is None and gpu.queued == {A: 1, B: 1, C: 1}


def test_a_stream_counts_from_the_release_on():
    gpu = Gpu()
    tensor, memory = gpu.export()
    gpu.record(A)
    gpu.finish(A)  # what was queued before the release
    del tensor
    gpu.keeper.sweep()
    assert memory() is not None
    gpu.finish(A)
    gpu.keeper.sweep()
    assert memory() is None


def test_releases_are_given_back_in_order_and_one_stream_does_not_hold_up_another():
    gpu = Gpu()
    memories = {}
    for stream in (A, B):
        gpu.current = stream
        for n in range(3):
            tensor, memories[stream, n] = gpu.export()
            del tensor
    gpu.reached[A], gpu.reached[B] = 0, 2
    gpu.keeper.sweep()
    assert [memory() is None for memory in memories.values()] == [False] * 3 + [True, True, False]
    gpu.finish(A)
    gpu.keeper.sweep()
    assert [memory() is None for memory in memories.values()] == [True] * 5 + [False]
    gpu.finish(B)
    gpu.keeper.sweep()
    assert memories[B, 2]() is None


def test_a_captured_stream_is_not_touched_and_its_releases_wait_for_the_capture_to_end():
    gpu = Gpu()
    tensor, memory = gpu.export(A)
    gpu.current = B
    gpu.capturing = {B}
    del tensor
    gpu.finish(A, B)
    gpu.keeper.sweep()
    assert memory() is not None and gpu.queued == {A: 1} and len(gpu.keeper) == 1
    gpu.capturing = set()
    gpu.keeper.sweep()  # records only now, and on A not again
    assert memory() is not None and gpu.queued == {A: 1, B: 1}
    gpu.finish(A, B)
    gpu.keeper.sweep()
    assert memory() is None


@pytest.mark.parametrize("part", ["_current", "_record"])
def test_a_failing_driver_keeps_the_memory(part, capfd):
    gpu = Gpu()
    tensor, memory = gpu.export()
    works = getattr(gpu.keeper, part)
    setattr(gpu.keeper, part, lambda _: 1 / 0)
    del tensor
    assert memory() is not None
    gpu.keeper.sweep()
    assert memory() is not None
    setattr(gpu.keeper, part, works)
    gpu.keeper.sweep()
    gpu.finish(A)
    gpu.keeper.sweep()
    assert memory() is None and capfd.readouterr() == ("", "")


def test_releases_of_jax_are_fenced_together_and_one_fence_at_a_time():
    gpu = Gpu()
    memories = []
    for _ in range(3):
        array, memory = gpu.imported()
        memories.append(memory)
        array.block_until_ready()
        del array
    gc.collect()
    assert not gpu.fences
    gpu.keeper.sweep()
    assert [device for device, _ in gpu.fences] == [0]
    array, late = gpu.imported()
    array.block_until_ready()
    del array
    other, elsewhere = gpu.imported(1)
    del other
    gpu.keeper.sweep()
    assert [device for device, _ in gpu.fences] == [0, 1]
    assert all(memory() is not None for memory in [*memories, late, elsewhere])
    gpu.fences[0][1].set()
    gpu.keeper.sweep()
    assert all(memory() is None for memory in memories) and late() is not None and elsewhere() is not None
    assert [device for device, _ in gpu.fences] == [0, 1, 0]
    for _, done in gpu.fences:
        done.set()
    gpu.keeper.sweep()
    assert late() is None and elsewhere() is None and len(gpu.keeper) == 0
    gpu.keeper.sweep()
    assert len(gpu.fences) == 3


def test_a_fence_that_fails_loses_nothing():
    gpu = Gpu()
    array, memory = gpu.imported()
    del array
    works, gpu.keeper._fence = gpu.keeper._fence, lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        gpu.keeper.sweep()
    gpu.keeper._fence = works
    gpu.keeper.sweep()
    gpu.fences[0][1].set()
    gpu.keeper.sweep()
    assert memory() is None


def test_the_release_runs_within_garbage_collection_and_within_a_sweep():
    gpu = Gpu()
    memories = []

    def leave_a_cycle():
        tensor, memory = gpu.export()
        cycle = [tensor]
        cycle.append(cycle)
        memories.append(memory)

    record = gpu.keeper._record

    def recording(stream):
        gc.collect()  # runs the deleters of other tensors within this one's
        return record(stream)

    gpu.keeper._record = recording
    for _ in range(5):
        leave_a_cycle()
    gc.collect()
    assert len(gpu.keeper) == 5
    passing = gpu.keeper._waiting[frozenset({A})]
    gpu.finish(A)
    for kept in list(passing):
        kept.events.append(lambda: (leave_a_cycle(), gc.collect(), True)[-1])
    gpu.keeper.sweep()
    gpu.finish(A)
    gpu.keeper.sweep()
    assert all(memory() is None for memory in memories) and len(memories) == 10 and len(gpu.keeper) == 0


def test_the_releasing_thread_decides_the_stream():
    gpu = Gpu()
    streams = {}
    gpu.keeper._current = lambda device: streams.get(threading.get_ident(), A)
    tensor, memory = gpu.export(A)
    holder = [tensor]
    del tensor

    def release():
        streams[threading.get_ident()] = B
        holder.clear()

    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    gpu.finish(A)
    gpu.keeper.sweep()
    assert memory() is not None
    gpu.finish(B)
    gpu.keeper.sweep()
    assert memory() is None


def test_many_threads_release_and_sweep_at_once():
    gpu = Gpu()
    lock = threading.Lock()
    record, given_back = gpu.record, Counter()

    def recording(stream):
        with lock:
            return record(stream)

    gpu.keeper._record = recording
    gpu.keeper._current = lambda device: Stream(device, threading.get_ident() % 3 + 1)

    def work(seed):
        for n in range(200):
            capsule = np.zeros(8, np.float32).__dlpack__()
            tensor = torch.from_dlpack(gpu.keeper.exported(capsule, 0, Stream(0, n % 3 + 1)))
            gpu.keeper.release_after({Stream(0, n % 3 + 1)}, partial(given_back.update, [(seed, n)]))
            gpu.keeper.record_stream(0, Stream(1, 1))
            del tensor
            gpu.keeper.sweep()
            with lock:
                gpu.finish(*list(gpu.queued)[: n % 4])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    gpu.finish(*gpu.queued)
    gpu.keeper.sweep()
    assert len(gpu.keeper) == 0 and not gpu.keeper._exports
    assert sum(given_back.values()) == 1600


def test_nothing_grows():
    gpu = Gpu()
    gpu.reached[A] = 10**9
    for _ in range(3000):
        torch.from_dlpack(gpu.keeper.exported(np.zeros(8).__dlpack__(), 0, A))
        jax.dlpack.from_dlpack(Source(gpu.keeper.imported(torch.zeros(64).__dlpack__(), 0)))
        gpu.keeper.sweep()
        gpu.fences[-1][1].set()
        assert len(gpu.keeper) <= 2 and len(_lifetime._live) <= 1
    gpu.keeper.sweep()
    assert len(gpu.keeper) == 0 and not gpu.keeper._waiting and len(gpu.keeper._unfenced) == 1


def test_an_array_in_hand_can_be_kept_too():
    gpu = Gpu()
    array = jnp.ones(8) + 1
    alive = weakref.ref(array)
    gpu.keeper.release_after({B}, [array].clear)
    del array
    gpu.keeper.sweep()
    assert alive() is not None
    gpu.finish(B)
    gpu.keeper.sweep()
    assert alive() is None


# JAX's fence


def test_the_fence_is_a_computation_behind_the_others():
    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        passed = jax_fence(device)
        for _ in range(1000):
            if passed():
                break
            threading.Event().wait(0.01)
        assert passed()


def test_the_fence_runs_inside_a_trace_and_whatever_x64_says():
    device = jax.devices("cpu")[0]
    _lifetime._fence_program.cache_clear()

    @jax.jit
    def traced(x):
        for x64 in (True, False):
            with jax.enable_x64(x64):
                assert jax_fence(device)() in (True, False)
        return x + 1

    with jax.default_device(device):
        assert traced(jnp.float32(1)) == 2
        assert "pjit" not in str(jax.make_jaxpr(lambda x: (jax_fence(device), x + 1)[1])(1.0))


# The driver's calls


class Driver:
    """A CUDA driver whose calls succeed unless told otherwise, and that counts what must be balanced."""

    def __init__(self):
        self.depth, self.relaxed, self.events, self.fails, self.calls = 0, 0, set(), {}, []
        self.capturing = self.busy = False

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            return getattr(self, "_" + name)(*arguments) or 0

        return call

    def _cuDeviceGet(self, ordinal, device):
        ordinal._obj.value = device

    def _cuDevicePrimaryCtxRetain(self, context, ordinal):
        context._obj.value = 4096 + ordinal.value

    def _cuCtxPushCurrent_v2(self, context):
        assert isinstance(context, ctypes.c_void_p)
        self.depth += 1
        self.context = context.value

    def _cuCtxPopCurrent_v2(self, context):
        self.depth -= 1

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        self.relaxed, mode._obj.value = mode._obj.value, self.relaxed

    def _cuStreamIsCapturing(self, stream, status):
        assert self.inside() and isinstance(stream, ctypes.c_void_p)
        status._obj.value = int(self.capturing)

    def _cuStreamQuery(self, stream):
        assert self.inside() and not self.capturing
        return 600 if self.busy else 0

    def _cuEventCreate(self, event, flags):
        assert self.inside() and flags == 2
        event._obj.value = 2**40 + len(self.calls)
        self.events.add(event._obj.value)

    def _cuEventRecord(self, event, stream):
        assert self.inside() and event.value in self.events

    def _cuEventQuery(self, event):
        assert self.inside() and event.value in self.events
        return 600 if self.busy else 0

    def _cuEventDestroy_v2(self, event):
        self.events.remove(event.value)

    def inside(self):
        return self.depth == 1 and self.relaxed == 2


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(_lifetime, "_driver", lambda: fake)
    _lifetime._primary_context.cache_clear()
    yield fake
    _lifetime._primary_context.cache_clear()
    assert fake.depth == 0 and fake.relaxed == 0


def test_an_event_is_recorded_on_a_busy_stream_and_destroyed_once_passed(driver):
    driver.busy = True
    passed = _lifetime.record(Stream(3, 2**40))
    assert driver.context == 4096 + 3 and len(driver.events) == 1
    assert not passed() and not passed()
    driver.fails["cuEventQuery"] = 700
    driver.busy = False
    assert not passed()
    driver.fails.clear()
    assert passed() and not driver.events and passed()


def test_an_idle_stream_needs_no_event(driver):
    assert _lifetime.record(Stream(0, 0))() and "cuEventCreate" not in driver.calls


@pytest.mark.parametrize("failing", ["cuStreamIsCapturing", "cuEventCreate", "cuEventRecord"])
def test_what_cannot_be_recorded_gives_none(driver, failing):
    driver.busy, driver.fails = True, {failing: 906}
    assert _lifetime.record(Stream(0, 0)) is None and not driver.events


def test_a_capturing_stream_is_left_alone(driver):
    driver.capturing = True
    assert _lifetime.record(Stream(0, 5)) is None
    assert not {"cuStreamQuery", "cuEventCreate", "cuEventRecord"} & set(driver.calls)


@pytest.mark.parametrize("failing", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuDeviceGet"])
def test_a_driver_without_a_context_raises(driver, failing):
    driver.fails = {failing: 3}
    with pytest.raises(RuntimeError, match="CUDA driver error 3"):
        _lifetime.record(Stream(0, 5))
