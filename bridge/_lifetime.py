"""Keeps memory that torch and JAX share on CUDA until nothing queued on the GPU needs it: used by `bridge.exchange`.

DLPack orders the reading of shared memory after its writing, and nothing after the reading: once the last tensor over
a JAX buffer is dropped, JAX hands the memory to its next computation at once, on its own stream, though torch's stream
may not have read it yet; and the other way round. So the deleter that comes with every export, which is called at that
last release and at no other time, is replaced (`replace_deleter`), and the producer's own is called only when the
streams have passed the point of the release (`Keeper`):

* memory of JAX seen from torch: an event is recorded on the streams that may read it;
* memory of torch seen from JAX, whose stream cannot be had: a tiny computation is queued behind all others of the
  device. (XLA may call the deleter as soon as the last computation that reads the memory is *enqueued*.)

No thread waits. `Keeper.sweep`, called at every exchange on CUDA, looks at the oldest release of every stream. So
memory of JAX that was released while its stream was busy, and all of torch's, stays until the next exchange or two
after the GPU has passed: never more than was in use, and queued, at once. At exit it is left to the operating system.

A deleter runs in any thread, within garbage collection and while a graph is captured. So nothing here takes a lock,
and CUDA is called through its driver API, with which one thread's calls leave a capture in another undisturbed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

Release = Callable[[], object]  # gives memory back to its producer
Passed = Callable[[], bool]  # whether the GPU has reached a point


class Stream(NamedTuple):
    """A CUDA stream: the ordinal of its device, and the driver's handle (0 for the default stream)."""

    device: int
    handle: int


class _Kept(NamedTuple):
    release: Release
    streams: frozenset[Stream]
    missing: list[Stream]  # where nothing is recorded yet
    events: list[Passed]

    def passed(self) -> bool:
        return all(passed() for passed in self.events)


class Keeper:
    """The releases that wait for the GPU.

    Args:
        current: torch's current stream of a device, in the calling thread.
        record: what tells that a stream has passed this point, or None while the stream is being captured.
        fence: what tells that JAX's computations on a device have passed this point.
    """

    def __init__(
        self,
        current: Callable[[int], Stream],
        record: Callable[[Stream], Passed | None],
        fence: Callable[[int], Passed],
    ) -> None:
        self._current, self._record, self._fence = current, record, fence
        self._exports: dict[object, tuple[int, set[Stream]]] = {}  # of live tensors over JAX memory: address, readers
        self._waiting: dict[frozenset[Stream], deque[_Kept]] = {}  # in order, for each set of streams
        self._unrecorded: deque[_Kept] = deque()
        self._unfenced: dict[int, deque[Release]] = {}  # torch memory that JAX released, by device
        self._fenced: dict[int, deque[tuple[Passed, list[Release]]]] = {}

    def exported(self, capsule: Any, address: int, stream: Stream) -> Any:
        """The capsule of JAX memory at an address for torch, which reads it on `stream` or where it is released."""
        key, streams = object(), {stream}

        def released(release: Release) -> None:
            self._exports.pop(key, None)
            with contextlib.suppress(Exception):  # the keeping must not fail
                streams.add(self._current(stream.device))
            self.release_after(streams, release)

        self._exports[key] = address, streams
        return replace_deleter(capsule, released)

    def imported(self, capsule: Any, device: int) -> Any:
        """The capsule of torch memory for JAX."""
        return replace_deleter(capsule, self._unfenced.setdefault(device, deque()).append)

    def record_stream(self, address: int, stream: Stream) -> bool:
        """Notes another reader of the exported memory at an address; False if there is none."""
        found = [streams for start, streams in list(self._exports.values()) if start == address]
        for streams in found:
            streams.add(stream)
        return bool(found)

    def release_after(self, streams: set[Stream], release: Release) -> None:
        """Calls `release` once the streams have passed this point: now, or in a later sweep."""
        self._keep(_Kept(release, frozenset(streams), list(streams), []))

    def _keep(self, kept: _Kept) -> None:
        for stream in list(kept.missing):
            with contextlib.suppress(Exception):  # the keeping must not fail
                if (passed := self._record(stream)) is not None:
                    kept.events.append(passed)
                    kept.missing.remove(stream)
        if kept.missing:
            self._unrecorded.append(kept)
        elif kept.passed():
            kept.release()
        else:
            self._waiting.setdefault(kept.streams, deque()).append(kept)

    def sweep(self) -> None:
        """Gives back what the GPU has passed. Never waits for it."""
        for _ in range(len(self._unrecorded)):
            if (kept := _pop(self._unrecorded)) is not None:
                self._keep(kept)
        for waiting in list(self._waiting.values()):
            while (kept := _pop(waiting)) is not None:
                if not kept.passed():  # nor have those behind it
                    waiting.appendleft(kept)
                    break
                kept.release()
        for device, unfenced in list(self._unfenced.items()):
            self._sweep_jax(device, unfenced, self._fenced.setdefault(device, deque()))

    def _sweep_jax(self, device: int, unfenced: deque[Release], fenced: deque[tuple[Passed, list[Release]]]) -> None:
        if (batch := _pop(fenced)) is not None:
            passed, releases = batch
            if not passed():  # one fence at a time, so that they never fill JAX's queue
                fenced.append(batch)
                return
            for release in releases:
                release()
        releases = list(iter(functools.partial(_pop, unfenced), None))
        if releases:
            try:
                fenced.append((self._fence(device), releases))
            except BaseException:
                unfenced.extend(releases)
                raise

    def __len__(self) -> int:
        """How many releases, or batches of them under one fence, are waiting."""
        queues: list[deque[Any]] = [*self._waiting.values(), *self._unfenced.values(), *self._fenced.values()]
        return len(self._unrecorded) + sum(len(queue) for queue in queues)


def _pop(queue: deque[Any]) -> Any:
    try:
        return queue.popleft()
    except IndexError:  # empty, or another thread was faster
        return None


def jax_fence(device: jax.Device) -> Passed:
    """Queues a tiny computation on the device; whether it is done, and with it all that was queued before."""
    program, argument = _fence_program(device)
    return program(argument).is_ready


@functools.cache
def _fence_program(device: jax.Device) -> tuple[Any, jax.Array]:
    with jax.ensure_compile_time_eval():  # also inside a trace
        argument = jax.device_put(np.int32(0), device)
        return jax.jit(lambda x: x + 1).lower(argument).compile(), argument


# DLPack's structures, and the replacement of a deleter. The consumer gets a copy of the producer's structure, so that
# the deleter can be set at exit to something that needs no interpreter.


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_KINDS: dict[bytes, type[ctypes.Structure]] = {b"dltensor": _Managed, b"dltensor_versioned": _ManagedVersioned}
_USED = {name: b"used_" + name for name in _KINDS}  # capsules keep pointers to these names

_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_set_destructor = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_c = ctypes.CDLL(None)
_c.malloc.argtypes, _c.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_c.free.argtypes, _c.free.restype = (ctypes.c_void_p,), None
_FREE = ctypes.cast(_c.free, ctypes.c_void_p).value
_DeleterType = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_live: dict[int, tuple[type[ctypes.Structure], Callable[[Release], object], Release]] = {}
_exiting = False


def replace_deleter(capsule: Any, released: Callable[[Release], object]) -> Any:
    """A capsule of the same tensor whose deleter calls `released(release)`, where `release()` is the producer's own.

    The given capsule is used up. `released` runs in any thread, within garbage collection too. If nothing has consumed
    the result, `discard` it.
    """
    name = _name(capsule)
    if name is None:
        raise ValueError(f"not an unused DLPack capsule: {capsule!r}")
    kind, address = _KINDS[name], _pointer(capsule, name)
    copy = _c.malloc(ctypes.sizeof(kind))
    if not copy:
        raise MemoryError
    ctypes.memmove(copy, address, ctypes.sizeof(kind))
    managed: Any = kind.from_address(copy)
    release = functools.partial(_delete, managed.deleter, address)
    _live[copy] = kind, released, release
    managed.context, managed.deleter = None, _FREE if _exiting else _DELETER
    _set_name(capsule, _USED[name])
    _set_destructor(capsule, None)
    return _new_capsule(copy, name, None)


def discard(capsule: Any) -> None:
    """Drops what `replace_deleter` gave, as its consumer would have, if there never was one."""
    name = _name(capsule)
    if name is not None:
        copy = _pointer(capsule, name)
        _set_name(capsule, _USED[name])
        _drop(copy)


def _name(capsule: Any) -> bytes | None:
    return next((name for name in _KINDS if _is_valid(capsule, name)), None)


def _delete(deleter: int | None, address: int) -> None:
    if deleter:
        _DeleterType(deleter)(address)


def _drop(copy: int) -> None:
    _, released, release = _live.pop(copy)
    _c.free(copy)
    released(release)


_deleter = _DeleterType(_drop)
_DELETER = ctypes.cast(_deleter, ctypes.c_void_p).value


@atexit.register
def _at_exit() -> None:
    """Lets releases during and after the interpreter's end do nothing but free the copies."""
    global _exiting
    _exiting = True
    for copy, (kind, _, _) in list(_live.items()):
        managed: Any = kind.from_address(copy)
        managed.deleter = _FREE


# CUDA's driver


def record(stream: Stream) -> Passed | None:
    """What tells that the stream has passed this point; None if that cannot be recorded, as while it is captured."""
    handle, status, event = ctypes.c_void_p(stream.handle), ctypes.c_int(), ctypes.c_void_p()
    with _entered(stream.device) as cuda:
        if cuda.cuStreamIsCapturing(handle, ctypes.byref(status)) or status.value:
            return None
        if cuda.cuStreamQuery(handle) == _SUCCESS:
            return _always
        if cuda.cuEventCreate(ctypes.byref(event), _DISABLE_TIMING):
            return None
        if cuda.cuEventRecord(event, handle):
            cuda.cuEventDestroy_v2(event)
            return None
    return _Event(stream.device, event).passed


class _Event:
    def __init__(self, device: int, handle: ctypes.c_void_p) -> None:
        self.device, self.handle = device, handle

    def passed(self) -> bool:
        if self.handle:
            with contextlib.suppress(RuntimeError), _entered(self.device) as cuda:
                if cuda.cuEventQuery(self.handle) == _SUCCESS:
                    cuda.cuEventDestroy_v2(self.handle)
                    self.handle = ctypes.c_void_p()
        return not self.handle


def _always() -> bool:
    return True


_SUCCESS = 0
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context that torch and JAX use on the device."""
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(ordinal), device))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    return context


@contextlib.contextmanager
def _entered(device: int) -> Iterator[Any]:
    """The driver, with the device's context current and all calls allowed while another thread captures a graph."""
    cuda, mode, context = _driver(), ctypes.c_int(_RELAXED), ctypes.c_void_p()
    _check(cuda.cuCtxPushCurrent_v2(_primary_context(device)))
    try:
        _check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        try:
            yield cuda
        finally:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))


def _check(result: int) -> None:
    if result != _SUCCESS:
        raise RuntimeError(f"CUDA driver error {result}")
