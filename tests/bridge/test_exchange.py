"""`bridge.exchange` on CPU memory: what is shared, what is copied with which warning, what raises, who keeps what."""

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bridge import exchange
from bridge.exchange import ExchangeCopyWarning, record_stream, to_jax, to_torch, wrap
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError, StaticArgumentError, UnsupportedError

WIDE = ["int64", "uint64", "float64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
NARROW = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"]
DTYPES = WIDE + NARROW + FLOAT8
SHAPES = [(), (1,), (24,), (2, 3, 4), (1, 5, 1), (0,), (0, 3), (2, 0), (3, 0, 2)]


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@contextlib.contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def aligned(shape, dtype, offset=0):
    """A tensor of arbitrary values that starts `offset` bytes after a multiple of 64."""
    count = int(np.prod(shape))
    memory = torch.empty(count * dtype.itemsize + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    values = torch.arange(1, count + 1) % 2 if dtype == torch.bool else torch.arange(1, count + 1)
    tensor = memory[start : start + count * dtype.itemsize].view(dtype).view(shape)
    return tensor.copy_(values.to(torch.float32).view(shape).to(dtype))


def raw(x):
    """Shape, dtype name and bytes in logical order, of either library."""
    if isinstance(x, torch.Tensor):
        data = x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        return tuple(x.shape), str(x.dtype).removeprefix("torch."), data
    return x.shape, x.dtype.name, np.asarray(x).tobytes()


def shares(array, tensor):
    return array.unsafe_buffer_pointer() == tensor.data_ptr()


# Sharing, dtypes and shapes


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_is_shared_both_ways(dtype, x64):
    with jax.enable_x64(x64), no_warning():
        for shape, copy in itertools.product(SHAPES, (None, False)):
            tensor = aligned(shape, getattr(torch, dtype))
            array = to_jax(tensor, copy=copy)
            back = to_torch(array, copy=copy)
            assert raw(array) == raw(tensor) == raw(back)
            assert array.dtype.name == dtype
            if tensor.numel():
                assert shares(array, tensor) and back.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_owned_arrays_are_shared_with_torch(dtype):
    with jax.enable_x64(True), no_warning():
        for shape in SHAPES:
            array = jnp.array(np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(jnp.dtype(dtype)))
            tensor = to_torch(array)
            assert raw(tensor) == raw(array)
            assert shares(array, tensor) or array.size == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_true_is_fresh_and_silent_both_ways(dtype):
    with no_warning():
        for shape in SHAPES:
            tensor = aligned(shape, getattr(torch, dtype))
            array = to_jax(tensor, copy=True)
            back = to_torch(array, copy=True)
            assert raw(array) == raw(tensor) == raw(back)
            assert not tensor.numel() or len({tensor.data_ptr(), array.unsafe_buffer_pointer(), back.data_ptr()}) == 3


def test_permuted_strides_are_shared_and_come_back_as_they_were():
    tensor = aligned((2, 3, 4, 5), torch.float32)
    for order in itertools.permutations(range(4)):
        permuted = tensor.permute(order)
        with no_warning():
            array = to_jax(permuted, copy=False)
            back = to_torch(array, copy=False)
        assert shares(array, permuted) and raw(array) == raw(permuted)
        assert back.data_ptr() == tensor.data_ptr() and back.stride() == permuted.stride()


def test_strides_of_axes_of_size_one_do_not_matter():
    tensor = aligned((64,), torch.float32)
    for strides in [(8, 1000, 1), (8, 0, 1), (8, 1, 1)]:
        array = to_jax(tensor.as_strided((8, 1, 8), strides), copy=False)
        assert shares(array, tensor)
    assert shares(to_jax(tensor[None].expand(1, 64), copy=False), tensor)


def test_zero_size_views_never_warn():
    full = torch.empty(8, 8)
    for tensor in (full[3:3, 1:], full[1:, 8:], full[:, :0].T, full[:0, ::2], torch.empty(0, 1).expand(0, 8)):
        for copy in (None, False, True):
            with no_warning():
                assert to_jax(tensor, copy=copy).shape == tuple(tensor.shape)
                assert exchange.import_or_copy(tensor).shape == tuple(tensor.shape)


def test_parameters_inference_tensors_and_scalars():
    parameter = torch.nn.Parameter(torch.ones(16), requires_grad=False)
    assert shares(to_jax(parameter), parameter)
    with torch.inference_mode():
        tensor = torch.ones(16)
        assert shares(to_jax(tensor), tensor)
    assert float(to_jax(torch.tensor(2.5))) == 2.5 and to_torch(jnp.float32(2.5)).item() == 2.5


def test_import_inside_a_trace_is_concrete():
    tensor = aligned((8,), torch.float64)
    seen = []

    @jax.jit
    def traced(x):
        seen.append(to_jax(tensor))
        return x

    traced(jnp.zeros(8))
    assert shares(seen[0], tensor) and seen[0].dtype == np.float64


def test_permuted_layouts_made_by_jax_are_shared():
    layout = pytest.importorskip("jax.experimental.layout")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    array = jax.device_put(jnp.arange(12.0).reshape(3, 4), layout.Format(layout.Layout((1, 0)), sharding))
    tensor = to_torch(array, copy=False)
    assert shares(array, tensor) and raw(tensor) == raw(array) and not tensor.is_contiguous()
    assert to_torch(array, copy=True).is_contiguous()


def test_export_waits_for_the_computation():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.cos(y @ y), x)

    x = jnp.full((300, 300), 0.01)
    expected = np.asarray(slow(x))
    for copy in (None, True):
        np.testing.assert_array_equal(to_torch(slow(x), copy=copy).numpy(), expected)


# Copies and their warnings

UNSHAREABLE = {
    "misaligned": (lambda: aligned((16,), torch.float32, 4), "multiple of 64 bytes"),
    "misaligned by 32": (lambda: aligned((16,), torch.float32, 32), "multiple of 64 bytes"),
    "rows from the middle": (lambda: aligned((8, 4), torch.float32)[1:], "multiple of 64 bytes"),
    "one element": (lambda: aligned((8,), torch.int64)[3], "multiple of 64 bytes"),
    "sliced columns": (lambda: aligned((8, 8), torch.float32)[:, :4], "strides (8, 1)"),
    "sliced and transposed": (lambda: aligned((8, 8), torch.float64)[:, :4].T, "strides (1, 8)"),
    "a step": (lambda: aligned((8,), torch.bfloat16)[::2], "strides (2,)"),
    "heads picked": (lambda: aligned((2, 8, 4, 16), torch.float16)[:, :, :1], "strides (512, 64, 16, 1)"),
}


@pytest.mark.parametrize("name", UNSHAREABLE)
def test_what_cannot_be_shared_is_copied_with_a_warning(name):
    make, reason = UNSHAREABLE[name]
    tensor = make()
    with pytest.warns(ExchangeCopyWarning) as caught:
        array = to_jax(tensor)
    assert len(caught) == 1 and reason in str(caught[0].message) and "copy=True" in str(caught[0].message)
    assert str(tuple(tensor.shape)) in str(caught[0].message)
    assert caught[0].filename == __file__
    assert raw(array) == raw(tensor) and not shares(array, tensor)


@pytest.mark.parametrize("name", UNSHAREABLE)
def test_what_cannot_be_shared_with_copy_false_raises_and_with_true_is_silent(name):
    make, reason = UNSHAREABLE[name]
    tensor = make()
    with pytest.raises(ArgumentError, match="copy=False") as error:
        to_jax(tensor, copy=False)
    assert reason in str(error.value) and isinstance(error.value, ValueError)
    with no_warning():
        assert raw(to_jax(tensor, copy=True)) == raw(tensor)
        array = exchange.import_or_copy(tensor)
    assert raw(array) == raw(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.expand(4, 64),
        lambda t: t[None, :, None].expand(2, 64, 3),
        lambda t: t[::2].expand(4, 32),
        lambda t: t[::4].expand(2, 16),
        lambda t: t[:1].expand(64),
        lambda t: t.unfold(0, 16, 1),
        lambda t: t.as_strided((8, 16), (4, 1)),
    ],
)
def test_overlapping_tensors_are_never_copied_unasked(view):
    tensor = view(aligned((64,), torch.float32))
    with pytest.raises(ArgumentError, match="copy=True"):
        to_jax(tensor)
    with pytest.raises(ArgumentError, match="copy=False"):
        to_jax(tensor, copy=False)
    with no_warning():
        assert raw(to_jax(tensor, copy=True)) == raw(tensor) == raw(exchange.import_or_copy(tensor))


def test_a_hidden_copy_of_jax_is_not_passed_on(monkeypatch):
    original = jax.dlpack.from_dlpack
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda tensor: original(tensor.clone()))
    tensor = aligned((16,), torch.float32)
    with pytest.warns(ExchangeCopyWarning, match="JAX copied"):
        assert raw(to_jax(tensor)) == raw(tensor)
    with pytest.raises(ArgumentError, match="JAX copied"):
        to_jax(tensor, copy=False)


def test_a_hidden_narrowing_of_jax_is_not_passed_on(monkeypatch):
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda tensor: jnp.zeros(tensor.shape, jnp.float32))
    with pytest.raises(DTypeError, match=r"float64.*float32"):
        to_jax(aligned((16,), torch.float64))


def test_a_hidden_copy_of_torch_is_not_passed_on(monkeypatch):
    original = torch.from_dlpack
    monkeypatch.setattr(torch, "from_dlpack", lambda array: original(array).clone())
    array = jnp.arange(16.0)
    with pytest.warns(ExchangeCopyWarning, match="copied on export"):
        assert raw(to_torch(array)) == raw(array)
    with pytest.raises(ArgumentError, match="copy=False"):
        to_torch(array, copy=False)
    with no_warning():
        to_torch(array, copy=True)


@st.composite
def views(draw):
    """A tensor of any shape up to 4 axes, sliced with steps, permuted and shifted."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = getattr(torch, draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64"])))
    tensor = aligned(shape, dtype, draw(st.sampled_from([0, 0, 0, 8, 64])))
    cut = st.sampled_from([slice(None), slice(None), slice(1, None), slice(0, 3), slice(0, None, 2)])
    tensor = tensor[tuple(draw(cut) for _ in shape)]
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


@given(views())
def test_shared_exactly_if_a_permutation_of_an_aligned_contiguous_tensor(tensor):
    orders = itertools.permutations(range(tensor.dim()))
    shareable = any(tensor.permute(order).is_contiguous() for order in orders) and tensor.data_ptr() % 64 == 0
    expected = raw(tensor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        array = to_jax(tensor)
    assert raw(array) == expected
    assert [w.category for w in caught] == ([] if shareable or tensor.numel() == 0 else [ExchangeCopyWarning])
    if tensor.numel():
        assert shares(array, tensor) == shareable
        assert to_torch(array).data_ptr() == array.unsafe_buffer_pointer()
    assert raw(to_torch(array)) == expected
    if not shareable and tensor.numel():
        with pytest.raises(ArgumentError):
            to_jax(tensor, copy=False)


# Writes and donation


def test_writes_are_visible_through_shared_memory_and_not_through_copies():
    tensor = aligned((16,), torch.float32)
    shared, copied = to_jax(tensor), to_jax(tensor, copy=True)
    tensor.fill_(-1)
    assert (np.asarray(shared) == -1).all() and (np.asarray(copied) != -1).all()

    array = jnp.zeros(16)
    shared, copied = to_torch(array), to_torch(array, copy=True)
    copied.fill_(2)
    assert not np.asarray(array).any()
    shared.fill_(1)
    assert np.asarray(array).all()


def test_a_copy_is_complete_when_the_call_returns():
    tensor = aligned((1 << 22,), torch.float32)
    for source, copy in [(tensor, True), (tensor[::2], None), (tensor[1:], None)]:
        tensor.fill_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExchangeCopyWarning)
            array = to_jax(source, copy=copy)
        tensor.fill_(7)
        assert (np.asarray(array) == 1).all()


@pytest.mark.parametrize("copy", [None, False, True])
def test_donation_never_writes_into_memory_that_torch_sees(copy):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    tensor = torch.zeros(4096)
    result = step(to_jax(tensor, copy=copy)).block_until_ready()
    assert not tensor.any() and np.asarray(result).all()

    array = jnp.zeros(4096) + 0
    exported = to_torch(array, copy=copy)
    result = step(array).block_until_ready()
    assert not exported.any() and np.asarray(result).all()


# Lifetime


def owned():
    """A tensor over numpy memory, and a weak reference that tells whether that memory still lives."""
    memory = np.empty(4096 + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    memory[start : start + 4096] = np.arange(4096)
    return torch.from_numpy(memory[start : start + 4096]), weakref.ref(memory)


def churn():
    gc.collect()
    for _ in range(8):
        torch.full((4096,), float("nan"))
        (jnp.zeros(4096) + jnp.nan).block_until_ready()


def test_jax_keeps_torch_memory_and_lets_it_go():
    tensor, memory = owned()
    array = to_jax(tensor, copy=False)
    del tensor
    churn()
    assert memory() is not None
    np.testing.assert_array_equal(np.asarray(array), np.arange(4096))
    del array
    gc.collect()
    assert memory() is None


def test_torch_keeps_jax_memory():
    array = jnp.arange(4096.0) * 1
    view = to_torch(array, copy=False)[1:].view(-1, 5)[:, 2]
    del array
    churn()
    np.testing.assert_array_equal(view.numpy(), np.arange(1, 4096).reshape(-1, 5)[:, 2])


def test_dropping_in_either_order_through_a_round_trip():
    for first in (0, 1, 2):
        tensor, memory = owned()
        array = to_jax(tensor, copy=False)
        holders = [tensor, array, to_torch(array, copy=False)]
        del tensor, array
        for gone in [first, *(i for i in range(3) if i != first)]:
            assert memory() is not None
            holders[gone] = None
            churn()
            for values in [np.asarray(holder) for holder in holders if holder is not None]:
                np.testing.assert_array_equal(values, np.arange(4096))
            values = None
        gc.collect()
        assert memory() is None


def test_a_copy_keeps_nothing_alive():
    tensor, memory = owned()
    array = to_jax(tensor, copy=True)
    del tensor
    gc.collect()
    assert memory() is None
    np.testing.assert_array_equal(np.asarray(array), np.arange(4096))


def test_memory_lives_until_queued_work_has_read_it():
    @jax.jit
    def late(x):
        slow = jax.lax.fori_loop(0, 20, lambda _, y: jnp.cos(y @ y), jnp.full((200, 200), 0.01))
        return x + 0 * jnp.sum(slow)

    for _ in range(20):
        tensor = aligned((40000,), torch.float32).fill_(1)
        result = late(to_jax(tensor, copy=False))
        del tensor
        for _ in range(4):
            torch.full((40032,), float("nan"))
        assert (np.asarray(result) == 1).all()


# What raises


class Sub(torch.Tensor):
    pass


def conjugate():
    return torch.ones(8, dtype=torch.complex64).conj()


REFUSED = {
    "requires grad": (lambda: torch.ones(8, requires_grad=True), GradientError, r"detach\(\)"),
    "computed from such": (lambda: torch.ones(8, requires_grad=True) * 2, GradientError, r"detach\(\)"),
    "parameter": (lambda: torch.nn.Parameter(torch.ones(8)), GradientError, r"detach\(\)"),
    "conjugate": (conjugate, ArgumentError, "resolve_conj"),
    "negative": (lambda: conjugate().imag, ArgumentError, "resolve_neg"),
    "sparse coo": (lambda: torch.eye(3).to_sparse(), ArgumentError, "to_dense"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), ArgumentError, "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ArgumentError, "nested"),
    "meta": (lambda: torch.ones(8, device="meta"), ArgumentError, "no data"),
    "subclass": (lambda: torch.ones(8).as_subclass(Sub), ArgumentError, "Sub"),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.ones(8)), ArgumentError, "FakeTensor"),
    "complex32": (lambda: torch.empty(8, dtype=torch.complex32), DTypeError, r"complex32.*accepted are bfloat16"),
    "int4": (lambda: torch.empty(8, dtype=torch.int8).view(torch.int4), DTypeError, "int4"),
    "fp4": (lambda: torch.empty(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), DTypeError, "float4"),
    "bits": (lambda: torch.empty(8, dtype=torch.bits8), DTypeError, "bits8"),
    "numpy": (lambda: np.ones(8), TypeError, "numpy.ndarray"),
    "a number": (lambda: 1.0, TypeError, "float"),
    "a jax array": (lambda: jnp.ones(8), TypeError, "takes a torch.Tensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("copy", [None, False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_to_jax_refuses(name, copy):
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        to_jax(make(), copy=copy)


def test_requires_grad_raises_under_no_grad_too_and_detached_is_shared():
    tensor = torch.ones(16, requires_grad=True)
    with torch.no_grad(), pytest.raises(GradientError):
        to_jax(tensor)
    assert shares(to_jax(tensor.detach()), tensor)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_to_jax_refuses_quantised_and_named_tensors():
    if hasattr(torch, "quantize_per_tensor"):
        with pytest.raises(DTypeError, match="qint8"):
            to_jax(torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8))
    try:
        named = torch.zeros(2, 3, names=("a", "b"))
    except TypeError:
        return  # this torch has no named tensors
    with pytest.raises(ArgumentError, match="rename"):
        to_jax(named)


def test_to_jax_refuses_tensors_of_a_transform():
    with pytest.raises(ArgumentError, match=r"torch\.func"):
        torch.vmap(lambda t: to_torch(to_jax(t)))(torch.ones(4, 16))


def test_other_devices_are_refused_with_the_way_out(monkeypatch):
    with FakeTensorMode():
        tensor = torch.empty(8, device="xpu")
    for call in (to_jax, partial(to_jax, copy=True), partial(record_stream, stream=None)):
        with pytest.raises(UnsupportedError, match=r"'xpu'.*CPU and on CUDA only.*tensor\.cpu\(\)") as error:
            call(tensor)
        assert isinstance(error.value, NotImplementedError) and isinstance(error.value, ValueError)

    array = jnp.ones(8)
    rocm = SimpleNamespace(platform="gpu", client=SimpleNamespace(platform_version="rocm 7"))
    for device in (rocm, SimpleNamespace(platform="tpu")):
        monkeypatch.setattr(type(array), "devices", lambda self, device=device: [device])
        for call in (to_torch, partial(to_torch, copy=True), partial(record_stream, stream=None)):
            with pytest.raises(UnsupportedError, match=rf"'{device.platform}'.*CPU and on CUDA only.*jax\.device_put"):
                call(array)


def test_a_capture_and_a_jax_without_cuda_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match=r"wrap.*being captured.*before the capture.*bridge\.launch"):
            wrap(lambda: pytest.fail("called"))()
        assert to_torch(to_jax(torch.ones(8))).sum() == 8  # the CPU has no part in it
    monkeypatch.setattr(jax, "local_devices", lambda **_: jax.devices("cpu"))
    with pytest.raises(UnsupportedError, match="JAX does not see cuda:7"):
        exchange._jax_device(7)
    monkeypatch.setattr(jax, "local_devices", lambda **_: (_ for _ in ()).throw(RuntimeError("Unknown backend cuda")))
    with pytest.raises(UnsupportedError, match=r"no CUDA devices \(Unknown backend cuda\).*jax\[cuda13\]"):
        exchange._jax_device(7)


@pytest.mark.parametrize("copy", [None, False, True])
def test_to_torch_refuses(copy):
    for dtype in ("int4", "uint4", "int2", "float8_e4m3b11fnuz", "float4_e2m1fn"):
        for shape in ((8,), (), (0, 3)):
            with pytest.raises(DTypeError, match=f"{dtype}.*astype"):
                to_torch(jnp.zeros(shape, dtype), copy=copy)
    with pytest.raises(DTypeError, match="key_data"):
        to_torch(jax.random.key(0), copy=copy)
    for other in (np.ones(3), torch.ones(3), 1.0, None):
        with pytest.raises(TypeError, match=type(other).__name__):
            to_torch(other, copy=copy)
    donated = jnp.zeros(8)
    donated.delete()
    with pytest.raises(ArgumentError, match="deleted"):
        to_torch(donated, copy=copy)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_to_torch_refuses_traced_arrays(transform):
    with pytest.raises(StaticArgumentError, match="traced"):
        transform(lambda x: to_torch(x).sum())(jnp.ones(8) if transform is not jax.grad else jnp.float32(1))


@pytest.mark.parametrize("copy", ["yes", 1, 0])
def test_copy_is_none_true_or_false(copy):
    with pytest.raises(ArgumentError, match="None, True or False"):
        to_jax(torch.ones(8), copy=copy)
    with pytest.raises(ArgumentError, match="None, True or False"):
        to_torch(jnp.ones(8), copy=copy)


SHARDED = """
import jax, jax.numpy as jnp, pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from bridge.exchange import ArgumentError, record_stream, to_torch
mesh = jax.make_mesh((2,), ("x",))
for spec in (P("x"), P()):
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, spec))
    for call in (to_torch, lambda a: to_torch(a, copy=True), lambda a: record_stream(a, None)):
        with pytest.raises(ArgumentError, match="2 devices"):
            call(array)
    shard = array.addressable_shards[1].data
    assert to_torch(shard).data_ptr() == shard.unsafe_buffer_pointer()
assert to_torch(jax.device_put(array, jax.devices()[1])).tolist() == list(range(8))
print("passed")
"""


def test_arrays_on_several_devices_raise():
    root = Path(exchange.__file__).parents[1]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(root)
    done = subprocess.run([sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "passed", done.stderr


def test_record_stream_does_nothing_on_the_cpu():
    assert record_stream(torch.ones(8), None) is None
    assert record_stream(jnp.ones(8), None) is None
    with pytest.raises(TypeError):
        record_stream(np.ones(8), None)


def test_jax_dtype():
    for dtype in DTYPES:
        assert exchange.jax_dtype(getattr(torch, dtype)) == jnp.dtype(dtype)
    assert exchange.jax_dtype(None) is None
    with pytest.raises(DTypeError, match="complex32"):
        exchange.jax_dtype(torch.complex32)


# wrap

Pair = namedtuple("Pair", "first second")


@jax.tree_util.register_dataclass
@dataclass
class Cache:
    k: object
    v: object
    page: int = field(metadata={"static": True})


def test_wrap_maps_nested_containers_and_static_arguments():
    @partial(jax.jit, static_argnums=1, static_argnames=("mode", "window"))
    def function(tree, count, *, mode, window, extra=None):
        assert isinstance(count, int) and mode == "double" and window == (3, -1) and extra is None
        a, (b, none), pair = tree["a"], tree["b"], tree["pair"]
        assert none is None and isinstance(a, jax.Array)
        return {"sum": a * count + b, "rest": [pair.first, (none, Pair(pair.second * 2, b))]}

    a, b, c = (aligned((4, 16), torch.float32) for _ in range(3))
    with no_warning():
        out = wrap(function)({"a": a, "b": (b, None), "pair": Pair(c, 3.0)}, 2, mode="double", window=(3, -1))
    assert torch.equal(out["sum"], a * 2 + b) and torch.equal(out["rest"][0], c)
    none, pair = out["rest"][1]
    assert none is None and type(pair) is Pair and pair.first.item() == 6.0 and torch.equal(pair.second, b)
    assert wrap(function).__name__ == "function"


def test_wrap_maps_registered_pytrees():
    k, v = aligned((16,), torch.float32), aligned((16,), torch.int8)
    out = wrap(jax.jit(lambda cache: Cache(cache.k * cache.page, cache.v, cache.page)))(Cache(k, v, 2))
    assert type(out) is Cache and out.page == 2 and torch.equal(out.k, 2 * k) and torch.equal(out.v, v)


def test_wrap_passes_everything_else_unchanged():
    marker, array, host = object(), jnp.ones(8), np.ones(8)
    seen = {}

    def function(*args, **kwargs):
        seen.update(args=args, kwargs=kwargs)
        return marker, "text", host, args[0]

    out = wrap(function)(array, marker, "name", host, key=marker, flag=True)
    assert seen["args"][0] is array and seen["args"][1] is marker and seen["args"][3] is host
    assert seen["kwargs"] == {"key": marker, "flag": True}
    assert out[0] is marker and out[1] == "text" and out[2] is host and torch.equal(out[3], torch.ones(8))
    assert wrap(lambda: None)() is None


def test_wrap_shares_arguments_and_results():
    tensor = aligned((16,), torch.float32)
    assert wrap(lambda x: x)(tensor).data_ptr() == tensor.data_ptr()
    assert wrap(lambda x: shares(x, tensor))(tensor)


@pytest.mark.parametrize("dtype", WIDE)
def test_wrap_never_narrows(dtype):
    tensor = aligned((16,), getattr(torch, dtype))
    for function in (lambda x: x + 1, jax.jit(lambda x: x + 1)):
        for x64 in (False, True):
            with jax.enable_x64(x64), no_warning():
                out = wrap(function)(tensor)
                assert bool(jax.config.jax_enable_x64) == x64
            assert out.dtype == tensor.dtype and out.tolist() == [x + 1 for x in tensor.tolist()]
    assert wrap(lambda x: jnp.zeros(3) + x[0])(aligned((16,), torch.float32)).dtype == torch.float32
    large = torch.tensor([2**53 + 1, -1])
    assert wrap(jax.jit(lambda x: x * 1))(large).tolist() == large.tolist()


def test_wrap_raises_and_warns_as_the_exchange_does():
    double = wrap(jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree)))
    with pytest.raises(GradientError, match="detach"):
        double([torch.ones(8), {"w": torch.ones(8, requires_grad=True)}])
    with pytest.raises(ArgumentError, match="copy=True"):
        double([torch.ones(1).expand(8)])
    with pytest.warns(ExchangeCopyWarning) as caught:
        out = double([torch.ones(8)[::2]])
    assert len(caught) == 1 and caught[0].filename == __file__ and torch.equal(out[0], torch.full((4,), 2.0))
    with pytest.raises(DTypeError, match="key_data"):
        wrap(lambda seed: jax.random.key(0))(torch.ones(8))
    with pytest.raises(ZeroDivisionError):
        wrap(lambda x: 1 / 0)(torch.ones(8))


def test_wrap_of_a_method_a_partial_and_a_transformed_function():
    x = aligned((4, 8), torch.float32)
    assert torch.equal(wrap(partial(jnp.sum, axis=1))(x), x.sum(1))
    assert torch.equal(wrap(jax.grad(lambda y: (y**2).sum()))(x), 2 * x)
    assert torch.equal(wrap(jax.vmap(lambda y: y.sum()))(x), x.sum(1))


# Threads


def test_threads_exchange_at_once_and_leave_x64_as_it_was():
    assert not jax.config.jax_enable_x64
    barrier = threading.Barrier(8)
    function = wrap(jax.jit(lambda x: x * 2))

    def work(seed):
        barrier.wait(60)
        for i in range(40):
            dtype = torch.float64 if (seed + i) % 2 else torch.float32
            tensor = aligned((64,), dtype) + seed
            array = to_jax(tensor, copy=False)
            assert array.dtype.name == str(dtype).removeprefix("torch.") and not jax.config.jax_enable_x64
            assert torch.equal(to_torch(array), tensor)
            assert torch.equal(function(tensor), tensor * 2)
        return seed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == list(range(8))
    assert not jax.config.jax_enable_x64


def test_memory_passes_between_threads():
    array = ThreadPoolExecutor(1).submit(lambda: to_jax(torch.arange(4096.0))).result()
    tensor = ThreadPoolExecutor(1).submit(to_torch, array).result()
    del array
    churn()
    np.testing.assert_array_equal(tensor.numpy(), np.arange(4096))
