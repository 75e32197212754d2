"""`bridge.exchange` on CPU memory: what raises."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bridge import exchange
from bridge.exchange import record_stream, to_jax, to_torch, wrap
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError, StaticArgumentError, UnsupportedError
from shared_memory import DTYPES, shares


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


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
