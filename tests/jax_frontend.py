"""The JAX front end as `checks` wants it."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as api
from pallas_kernels import masks

__all__ = ["api", "array", "dtype_of", "mask", "numpy"]


def array(x, dtype):
    return jnp.asarray(x).astype(dtype)


def numpy(x):
    return np.asarray(jax.device_get(x)).astype(np.float64)


def dtype_of(x):
    return str(x.dtype)


def mask(name, arguments):
    cls = getattr(masks, name)
    factory = cls.from_seqlens_local if {"window_left", "window_size"} & set(arguments) else cls.from_seqlens
    return factory(**arguments)
