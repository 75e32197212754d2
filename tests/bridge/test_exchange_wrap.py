"""`bridge.exchange.wrap` on CPU memory, and exchanging in several threads."""

import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge.exchange import ExchangeCopyWarning, to_jax, to_torch, wrap
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError
from shared_memory import WIDE, aligned, churn, no_warning, shares


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


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
