"""The private and experimental names of jax that launching a kernel without JAX's CUDA client needs, in one place.

A traced kernel lowers to one Mosaic GPU module, whose compiler lives in JAX's CUDA plugin. Lowering normally asks JAX
for its devices, which opens the CUDA client (and preallocates the card); here it is given a private CPU device
instead, for which Mosaic GPU assumes compute capability 9.0 and its 227 KiB of shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jaxlib
from jaxlib import xla_client

ARCH = (9, 0)
"""What lowering assumes without a device."""
TRIED = ((0, 11), (0, 12))
"""jaxlib versions with the launch conventions below."""

_lock = threading.RLock()


def missing() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    if _version()[:2] not in TRIED:
        return f"jaxlib {jaxlib.__version__}: its launch convention is unknown (known: 0.11, 0.12)"
    try:
        _library()
    except (OSError, AttributeError, ImportError) as error:
        return f"Mosaic GPU's compiler is not found ({error}); install jax[cuda13] or jax[cuda12]"
    return None


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in jaxlib.__version__.split(".")[:2])


@functools.cache
def _library() -> Any:
    """JAX's CUDA plugin as a C library."""
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            plugin = importlib.import_module(name)
        except ImportError:
            continue
        library = ctypes.CDLL(plugin._get_library_path())
        library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
        return library
    raise ImportError("no CUDA plugin of JAX is installed")


@functools.cache
def _cpu_device() -> Any:
    return xla_client.make_cpu_client().local_devices()[0]  # type: ignore[attr-defined]


class _WithoutDevices:
    """The jax module, except that it answers `local_devices` without opening a backend."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def local_devices(self) -> list[Any]:
        return [_cpu_device()]


@contextmanager
def no_backends() -> Iterator[None]:
    """Tracing and lowering in here open none of JAX's backends."""
    core = importlib.import_module("jax.experimental.mosaic.gpu.core")
    with _lock:
        before, core.jax = core.jax, _WithoutDevices()  # type: ignore[attr-defined]
        try:
            with jax.default_device(_cpu_device()):
                yield
        finally:
            core.jax = before  # type: ignore[attr-defined]


def lower(kernel: Callable[..., Any], inputs: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    """The Mosaic GPU module of a function that is one kernel and nothing else."""
    with no_backends(), jax.enable_x64(True):
        lowered = jax.jit(kernel, keep_unused=True).trace(*inputs).lower(lowering_platforms=("cuda",))
        calls: list[Any] = []
        others: list[str] = []

        def visit(operation: Any) -> None:
            name = operation.name
            if name == "stablehlo.custom_call" and "mosaic_gpu" in str(operation.attributes["call_target_name"]):
                calls.append(operation)
            elif name.startswith("stablehlo.") and name != "stablehlo.reshape":  # which moves nothing
                others.append(name)
            for region in operation.regions:
                for block in region.blocks:
                    for child in block.operations:
                        visit(child.operation)

        visit(lowered.compiler_ir().operation)
    if len(calls) != 1 or others:
        raise RuntimeError(f"expected one kernel and nothing beside it, got {len(calls)} kernels and {others}")
    return calls[0].attributes["mhlo.backend_config"]["module"].value_bytes


Enqueue = Callable[[int, bytes], None]
"""(stream, addresses): a kernel is enqueued. addresses: the operands' in order, then the results', 8 bytes each."""


def load(module: bytes, device: int) -> Enqueue:
    """Assemble a module for the current CUDA device, whose index is `device`.

    The runtime returns a loaded function and its launcher; it neither hands out the machine code nor takes it back.
    """
    compiled = _library().MosaicGpuCompile(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic GPU could not compile the kernel; MOSAIC_GPU_DUMP_PTXAS=1 tells more")
    pointer, addresses = ctypes.c_void_p, ctypes.c_char_p
    function = pointer(compiled[0])
    if _version() >= (0, 12):
        convention = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, addresses, ctypes.c_int)(compiled[1])
        owner, ordinal = pointer(compiled[2]), ctypes.c_int(device)
        return lambda stream, buffers: convention(owner, function, stream, buffers, ordinal)
    plain = ctypes.CFUNCTYPE(None, pointer, pointer, addresses)(compiled[1])
    return lambda stream, buffers: plain(function, stream, buffers)
