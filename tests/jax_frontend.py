"""The JAX front end as `checks` wants it."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as api
from pallas_kernels import masks

__all__ = ["api", "array", "dtype_of", "mask", "masks", "numpy"]


def array(x, dtype):
    if isinstance(x, np.ndarray):  # rounded by numpy: nothing to compile for each shape
        return jnp.asarray(x.astype(jnp.dtype(dtype)))
    return jnp.asarray(x).astype(dtype)


def numpy(x):
    return np.asarray(jax.device_get(x)).astype(np.float64)


def dtype_of(x):
    return str(x.dtype)


def mask(name, arguments):
    cls = getattr(masks, name)
    factory = cls.from_seqlens_local if {"window_left", "window_size"} & set(arguments) else cls.from_seqlens
    return factory(**arguments)


def where_finite(x):
    """x with what is not finite (the LSE of empty rows) replaced by a constant 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def value(loss, arrays):
    return float(loss(**{name: jnp.asarray(x) for name, x in arrays.items()}))


def value_and_grad(loss, arrays):
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    result, gradients = jax.value_and_grad(lambda a: loss(**a))(arrays)
    return float(result), {name: numpy(g) for name, g in gradients.items()}


merge = jax.jit(api.merge_attentions, static_argnames=("write_lse", "output_dtype"))


def cast(x, dtype):
    return x.astype(dtype)


def stack(arrays):
    return jnp.stack(arrays)


def vjp(function, arrays, cotangent):
    """(function(*arrays), its gradients) for a cotangent of the result's dtype, compiled as one."""

    @jax.jit
    def run(arrays, cotangent):
        out, pull = jax.vjp(function, *arrays)
        return out, pull(cotangent)

    return run(arrays, cotangent)


def share_heads(kv, query):
    """Keys or values of one head serve as they are."""
    return kv


def nan_tail(x):
    """A JAX array has no buffer behind it to write to."""
    return x


def host_ints(x):
    """int32 that the library can check: numpy."""
    return np.asarray(x, np.int32)


def mask_class(name):
    return getattr(masks, name)
