"""torch tensors <-> `jax.Array` over DLPack: the general route between the two libraries.

Both directions share memory wherever that is possible, for every dtype the two libraries have in common, and never
hide a copy or a change of dtype. What sharing means:

* **A JAX array is taken to be immutable. Writing into a tensor that `to_torch` gave changes the JAX array's value**,
  and with it everything JAX computes from it afterwards. To get a tensor to write into, pass `copy=True`.
* Writing into a tensor after `to_jax(tensor)` is visible in the JAX array, and JAX computes asynchronously: wait for
  the results (`jax.block_until_ready`) before the write, or pass `copy=True`.
* Either side may be dropped first. On the CPU JAX never reuses shared memory for a donated argument; on CUDA, donating
  an array that `to_jax` gave lets JAX write its result into the tensor's memory. Don't `resize_` the tensor.

float64, int64, uint64 and complex128 tensors become arrays of that very dtype also while JAX's x64 mode is off; JAX's
own operations on them narrow the results unless they run under `jax.enable_x64(True)` (`wrap` sees to that).
`torch.compile` breaks the graph at these functions, but would trace JAX calls of yours between them: `wrap` those.
`torch.func` and `jax.jit` cannot trace through these functions.

CPU and CUDA memory is exchanged. The first call starts JAX's backends, the accelerator's among them where one is
installed: **that opens JAX's CUDA client, which preallocates three quarters of the GPU's memory unless
XLA_PYTHON_CLIENT_PREALLOCATE=false is in the environment before**. On CUDA:

* The GPU orders the work, the host does not wait: a tensor from `to_torch` may be used at once on what is then torch's
  current stream of the array's device, and an array from `to_jax` stands behind all that is queued on torch's current
  stream of the tensor's device.
* Memory is given back to the library that owns it when the GPU is done with it. A tensor over JAX memory may be
  dropped while work that reads it is queued on the stream that was current at `to_torch`, or is where the last view is
  dropped (in its thread); tell `record_stream` of any other stream. An array over torch memory may be dropped while
  JAX's work on it is queued. No thread of ours waits for that: what is dropped too early, and all memory of torch, is
  given back by the next exchanges on CUDA.
* Nothing is exchanged while a CUDA graph is captured. With JAX's client open, capture with
  `torch.cuda.graph(..., capture_error_mode="thread_local")`: JAX's own threads may call CUDA meanwhile. A graph
  does not keep what it reads: hold a tensor over JAX memory while you replay a graph that was captured with it.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from pallas_kernels.errors import ArgumentError, DTypeError, GradientError, StaticArgumentError, UnsupportedError

from . import _lifetime

__all__ = ["ExchangeCopyWarning", "record_stream", "to_jax", "to_torch", "wrap"]

# Warnings point at the caller outside these: the package, and what `torch.compiler.disable` puts around a function.
_INNER = (__file__.removesuffix("exchange.py"), torch._dynamo.__file__.removesuffix("__init__.py"))
_ALIGNMENT = {"cpu": 64, "cuda": 16}  # bytes: XLA's CPU client copies what starts elsewhere, its CUDA programs fail
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})  # the dtypes that JAX narrows while x64 is off
_DTYPES = _WIDE | {  # all that crosses; both libraries use these names
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
}


class ExchangeCopyWarning(UserWarning):
    """An exchange with `copy=None` could not share memory and copied; the text says why."""


def opaque[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, at whose calls `torch.compile` breaks the graph: JAX's code cannot be traced into torch's."""
    return torch.compiler.disable(function, reason="it runs JAX, which torch.compile cannot trace")


@opaque
def to_jax(tensor: torch.Tensor, *, copy: bool | None = None) -> jax.Array:
    """The tensor as a `jax.Array` of the same shape and dtype on JAX's CPU device, or on the tensor's own GPU.

    Args:
        tensor: a plain CPU or CUDA tensor (or `torch.nn.Parameter`) of any shape, 0-d and zero-size included, that does
            not require a gradient; bool, (u)int8 to 64, float16 to 64, bfloat16, the float8 types, complex64 and 128.
        copy: None shares the tensor's memory. It copies, with an `ExchangeCopyWarning`, where that cannot be: data that
            does not start at a multiple of 64 bytes (16 on CUDA), and strides that are not a permutation of a
            contiguous tensor's (sliced columns, steps). A tensor whose elements overlap (`expand`) raises instead,
            since its copy would be larger than its memory. False shares the memory or raises. True silently makes a
            fresh buffer.

    Raises:
        ArgumentError: `copy=False` where a copy is needed; an expanded tensor with `copy=None`; a sparse, nested,
            conjugate, negated, named or meta tensor; a subclass of Tensor; a tensor inside a torch.func transform.
        DTypeError: a dtype that the libraries do not share. GradientError: a tensor that requires a gradient.
        UnsupportedError: a tensor on another device, or one that JAX does not see; a CUDA graph is being captured.
        TypeError: not a tensor.
    """
    _check_copy(copy)
    _check_tensor(tensor)
    if tensor.is_cuda:
        _enter_cuda("to_jax", tensor.device.index)
    if tensor.numel() == 0:  # nothing to share, whatever its strides and address
        return _empty(tensor)
    if not copy:
        reason = _why_not_shared(tensor)
        if reason is None:
            array = _import(tensor)
            if array.unsafe_buffer_pointer() == tensor.data_ptr():
                return array
            reason = "JAX copied it on import"
        if copy is None and overlaps(tensor):
            layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise ArgumentError(f"to_jax: elements overlap ({layout}); pass the tensor before expand, or copy=True")
        _refuse_or_warn("to_jax", "tensor", tuple(tensor.shape), tensor.dtype, reason, copy)
    # torch makes the copy: on the CPU it is complete on return, whereas jax.dlpack.from_dlpack(copy=True) still
    # shares the memory there, and lets JAX write into it if the array is donated.
    return _import(tensor.clone(memory_format=torch.contiguous_format))


@opaque
def to_torch(array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
    """The array as a tensor of the same shape and dtype on the same device, the CPU or a GPU.

    On the CPU this waits until the array has been computed; on CUDA torch's current stream does.

    **Do not write into the result unless `copy=True`: it is the memory of the JAX array, which must never change.**

    Args:
        array: a concrete `jax.Array` on one CPU or CUDA device, of any shape; dtypes as for `to_jax`.
        copy: None and False share the array's memory. True always makes a fresh, contiguous tensor.

    Raises:
        DTypeError: a dtype that torch does not have (int4, uint4, keys of `jax.random.key`).
        ArgumentError: an array sharded over several devices, or deleted. StaticArgumentError: a traced array.
        UnsupportedError: an array elsewhere (in pinned memory, too); a CUDA graph is being captured. TypeError: not a
            `jax.Array`.
    """
    _check_copy(copy)
    device = _check_array(array)
    if device.type == "cuda":
        _enter_cuda("to_torch", device.index)
    else:
        array.block_until_ready()
    if array.size == 0:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
    tensor = torch.from_dlpack(array) if device.type == "cpu" else _export(array, device.index)
    if not copy and tensor.data_ptr() != array.unsafe_buffer_pointer():
        _refuse_or_warn("to_torch", "array", array.shape, array.dtype.name, "it was copied on export", copy)
    return tensor.clone(memory_format=torch.contiguous_format) if copy else tensor


def wrap(jax_function: Callable[..., Any]) -> Callable[..., Any]:
    """A function on torch tensors that calls `jax_function`.

    Every tensor anywhere in the arguments (nested lists, tuples, dicts and other JAX pytrees) goes through `to_jax`,
    every `jax.Array` in the result through `to_torch`; all else is passed on unchanged, static arguments of a
    `jax.jit` included. Where an argument is 64 bits wide the function runs under `jax.enable_x64(True)`, so that
    nothing is narrowed (and JAX's default dtypes are then 64 bits wide too).

    There is no autograd through the call: a tensor that requires a gradient raises GradientError. A result shares its
    memory with whatever array the function returned: if that is an argument, or an array that the function keeps,
    clone the result before writing into it. Errors and copies as in `to_jax` and `to_torch`. A function of CUDA tensors
    runs in stream order like torch's own, but on JAX's stream, and cannot be captured in a graph.
    """

    @opaque
    @functools.wraps(jax_function)
    def torch_function(*args: Any, **kwargs: Any) -> Any:
        _check_capture("wrap")
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        wide = any(isinstance(leaf, jax.Array) and leaf.dtype.name in _WIDE for leaf in leaves)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            result = jax_function(*args, **kwargs)
        leaves, tree = jax.tree.flatten(result)
        return jax.tree.unflatten(tree, [to_torch(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])

    return torch_function


@opaque
def record_stream(tensor_or_array: torch.Tensor | jax.Array, stream: torch.cuda.Stream | None) -> None:
    """Keep exchanged memory until `stream`, a `torch.cuda.Stream`, is done with it; nothing to do on the CPU.

    For a tensor that means the work queued on the stream when the last view of it is dropped, as in torch's own
    `Tensor.record_stream`; for an array the work queued on the stream at this call. The stream has to outlive the wait.

    Raises:
        UnsupportedError: another device; a CUDA graph is being captured. TypeError: neither tensor nor array, or on
            CUDA not a stream. Others as in `to_torch`.
    """
    if isinstance(tensor_or_array, torch.Tensor):
        _check_device(tensor_or_array.device.type, "record_stream", "tensor", "tensor.cpu()")
        device = tensor_or_array.device
    else:
        device = _check_array(tensor_or_array, "record_stream", "tensor_or_array")
    if device.type == "cpu":
        return
    if not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"record_stream: stream must be a torch.cuda.Stream, got {type(stream).__qualname__}")
    _enter_cuda("record_stream", device.index)
    reader = _lifetime.Stream(stream.device.index, stream.cuda_stream)
    if isinstance(tensor_or_array, torch.Tensor):
        if not _keeper.record_stream(tensor_or_array.untyped_storage().data_ptr(), reader):
            tensor_or_array.record_stream(stream)  # torch's own memory
    else:
        _keeper.release_after({reader}, [tensor_or_array].clear)  # the list holds the array


def import_or_copy(tensor: torch.Tensor) -> jax.Array:
    """`to_jax` for this library's own functions: shares the memory where possible, else copies silently."""
    _check_tensor(tensor)
    return to_jax(tensor, copy=True if _why_not_shared(tensor) else None)


def jax_dtype(dtype: torch.dtype | None) -> np.dtype | None:
    """JAX's dtype of the same name; None stays None."""
    if dtype is not None:
        _check_dtype(dtype)
    return None if dtype is None else jax.numpy.dtype(_name(dtype))


def _import(tensor: torch.Tensor) -> jax.Array:
    source = _Source(tensor)
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    try:
        with on_device, jax.enable_x64(True):  # torch exports from the current device only
            array = jax.dlpack.from_dlpack(source if tensor.is_cuda or tensor.is_pinned() else tensor)
    finally:
        if source.capsule is not None:
            _lifetime.discard(source.capsule)  # JAX raised before it took the capsule
    if array.dtype.name != _name(tensor.dtype):
        raise DTypeError(f"to_jax: JAX imported a {tensor.dtype} tensor as {array.dtype.name}")
    return array


class _Source:
    """What JAX imports in place of a CUDA tensor, or of a pinned one, which it would take to be the GPU's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.capsule: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.tensor.device.index) if self.tensor.is_cuda else (1, 0)  # kDLCUDA, kDLCPU

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if not self.tensor.is_cuda:
            return self.tensor.__dlpack__()
        if stream is None:  # JAX names a stream of its own, and torch makes it wait for the current one; if ever not:
            torch.cuda.current_stream().synchronize()
        capsule = self.tensor.__dlpack__(stream=stream)
        self.capsule = _keeper.imported(capsule, self.tensor.device.index)
        return self.capsule


def _empty(tensor: torch.Tensor) -> jax.Array:
    array = _import(torch.empty(tensor.shape, dtype=tensor.dtype))
    if tensor.is_cuda:
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            array = jax.device_put(array, _jax_device(tensor.device.index))
    return array


def _export(array: jax.Array, index: int) -> torch.Tensor:
    stream = _current(index)
    exporter: Any = array
    capsule = exporter.__dlpack__(stream=stream.handle or 1)  # which waits for the array; 1 names the default stream
    capsule = _keeper.exported(capsule, array.unsafe_buffer_pointer(), stream)
    try:
        return torch.from_dlpack(capsule)
    finally:
        _lifetime.discard(capsule)  # torch raised before it took the capsule


def _current(index: int) -> _lifetime.Stream:
    return _lifetime.Stream(index, torch.cuda.current_stream(index).cuda_stream)


@functools.cache
def _jax_device(index: int) -> jax.Device:
    """JAX's name of a CUDA device."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        way_out = "install jax[cuda13] or jax[cuda12], and see that JAX_PLATFORMS does not leave CUDA out"
        raise UnsupportedError(f"exchange on CUDA: JAX has no CUDA devices ({error}); {way_out}") from error
    for device in devices:
        if device.local_hardware_id == index:
            return device
    raise UnsupportedError(f"exchange on CUDA: JAX does not see cuda:{index}, only {devices}")


_keeper = _lifetime.Keeper(_current, _lifetime.record, lambda index: _lifetime.jax_fence(_jax_device(index)))


def _enter_cuda(function: str, index: int) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(f"{function}: torch sees no CUDA device here; install a CUDA build of it")
    _check_capture(function)
    with torch.cuda.device(index):
        _check_capture(function)
    _jax_device(index)
    _keeper.sweep()


def _check_capture(function: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        reason = "a CUDA graph is being captured, and what JAX runs cannot be part of it"
        way_out = "exchange before the capture, or capture attention that `bridge.launch` serves, without an exchange"
        raise UnsupportedError(f"{function}: {reason}; {way_out}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_not_shared(tensor: torch.Tensor) -> str | None:
    """The reason why JAX cannot share this tensor's memory, or None."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size != 1):
        if stride != expected:
            return f"its strides {tensor.stride()} are not a permutation of a contiguous tensor's"
        expected *= size
    alignment = _ALIGNMENT[tensor.device.type]
    if tensor.data_ptr() % alignment:
        return f"its data does not start at a multiple of {alignment} bytes"
    return None


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: a stride of 0 (`expand`), or windows that overlap (`as_strided`, `unfold`)."""
    steps = [(stride, size - 1) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]
    return any(stride == 0 for stride, _ in steps) or 1 + sum(a * b for a, b in steps) < tensor.numel()


def _refuse_or_warn(function: str, noun: str, shape: tuple[int, ...], dtype: Any, reason: str, copy: Any) -> None:
    what = f"{noun} of shape {shape} and dtype {_name(dtype)}"
    if copy is False:
        raise ArgumentError(f"{function}: copy=False, but the {what} cannot be shared: {reason}")
    message = f"{function} copied the {what}: {reason}. Pass copy=True to copy silently, copy=False to raise instead"
    warnings.warn(message, ExchangeCopyWarning, stacklevel=2, skip_file_prefixes=_INNER)


def _check_copy(copy: Any) -> None:
    if copy is not None and not isinstance(copy, bool):
        raise ArgumentError(f"copy must be None, True or False, got {copy!r}")


def _check_device(device: str, function: str, noun: str, way_out: str) -> None:
    if device not in _ALIGNMENT:
        reason = "exchange is provided on the CPU and on CUDA only"
        raise UnsupportedError(f"{function}: the {noun} is on {device!r}; {reason}. Move it first: {way_out}")


_REFUSALS: tuple[tuple[Callable[[torch.Tensor], bool], str], ...] = (  # asked in this order
    (lambda t: type(t) not in (torch.Tensor, torch.nn.Parameter), "a subclass of Tensor"),
    (lambda t: t.is_nested, "a nested tensor (pass its parts)"),
    (lambda t: t.layout != torch.strided, "another layout (pass tensor.to_dense())"),
    (lambda t: t.is_conj(), "one with the conjugate bit set (pass tensor.resolve_conj())"),
    (lambda t: t.is_neg(), "one with the negative bit set (pass tensor.resolve_neg())"),
    (lambda t: any(getattr(t, "names", ())), "a named tensor (pass tensor.rename(None))"),
)


def _check_tensor(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_jax takes a torch.Tensor, got {type(tensor).__module__}.{type(tensor).__qualname__}")
    if tensor.device.type == "meta":
        raise ArgumentError("to_jax: a meta tensor has no data to share")
    _check_device(tensor.device.type, "to_jax", "tensor", "tensor.cpu()")
    if refusal := next((what for refused, what in _REFUSALS if refused(tensor)), None):
        raise ArgumentError(f"to_jax takes a plain dense tensor, got {refusal}: {type(tensor)} of {tensor.layout}")
    if tensor.requires_grad:
        raise GradientError("to_jax: the tensor requires a gradient, which JAX cannot see; pass tensor.detach()")
    _check_dtype(tensor.dtype)
    try:
        tensor.data_ptr()
    except RuntimeError:
        raise ArgumentError("to_jax: the tensor has no memory of its own (inside a torch.func transform?)") from None


def _check_dtype(dtype: torch.dtype) -> None:
    if _name(dtype) not in _DTYPES:
        raise DTypeError(f"{dtype} cannot cross to JAX; accepted are {', '.join(sorted(_DTYPES))}")


def _check_array(array: Any, function: str = "to_torch", noun: str = "array") -> torch.device:
    if not isinstance(array, jax.Array):
        raise TypeError(f"{function}: {noun} is a {type(array).__module__}.{type(array).__qualname__}")
    if isinstance(array, jax.core.Tracer):
        raise StaticArgumentError(f"{function}: {noun} is traced (inside jit, grad or vmap) and has no memory: {array}")
    if array.is_deleted():
        raise ArgumentError(f"{function}: {noun} has been deleted or donated")
    if len(array.devices()) != 1:
        raise ArgumentError(f"{function}: {noun} lies on {len(array.devices())} devices; jax.device_put it on one")
    (device,) = array.devices()
    cuda = device.platform == "gpu" and "cuda" in device.client.platform_version
    place = "cuda" if cuda else device.platform
    if cuda and array.sharding.memory_kind not in (None, "device"):
        place = str(array.sharding.memory_kind)
    _check_device(place, function, noun, 'jax.device_put(array, jax.devices("cpu")[0])')
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise DTypeError(f"{function}: {noun} has dtype {array.dtype}; pass jax.random.key_data(array)")
    if array.dtype.name not in _DTYPES:
        raise DTypeError(f"{function}: torch cannot take {array.dtype.name}; convert it with array.astype(...)")
    return torch.device("cuda", int(device.local_hardware_id)) if cuda else torch.device("cpu")
