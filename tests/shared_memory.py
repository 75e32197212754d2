"""Tensors at known addresses, and what the two libraries' arrays over one memory have in common."""

import contextlib
import gc
import warnings

import jax.numpy as jnp
import numpy as np
import torch

WIDE = ["int64", "uint64", "float64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
NARROW = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"]
DTYPES = WIDE + NARROW + FLOAT8
SHAPES = [(), (1,), (24,), (2, 3, 4), (1, 5, 1), (0,), (0, 3), (2, 0), (3, 0, 2)]


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


def churn():
    gc.collect()
    for _ in range(8):
        torch.full((4096,), float("nan"))
        (jnp.zeros(4096) + jnp.nan).block_until_ready()
