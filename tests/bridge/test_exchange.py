"""`bridge.exchange` on CPU memory: what is shared, what is copied with which warning, who keeps what."""

import gc
import itertools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge import exchange
from bridge.exchange import ExchangeCopyWarning, to_jax, to_torch
from pallas_kernels.errors import ArgumentError, DTypeError
from shared_memory import DTYPES, SHAPES, aligned, churn, no_warning, raw, shares


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


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
