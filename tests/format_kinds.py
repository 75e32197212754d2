"""Every kind of low-bit storage, filled with the numbers of one array, and read by few compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import from_seed, quantize, to_seed

HEADS = [(3,), (2, 3)]


def bits(x):
    """Raw bytes, so that NaN and the sign of zero count."""
    return np.ascontiguousarray(np.asarray(x)).tobytes()


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


KINDS = {
    "seed_int4": {},
    "seed_int4 groups": dict(groups=4),
    "seed_fp8": {},
    "seed_fp8 asymmetric": dict(asymmetric=True),
    "seed_fp8 fp32": dict(scale_dtype=jnp.float32),
    "fp8": {},
    "fp8 asymmetric": dict(asymmetric=True),
    "fp8 half": dict(scale_dtype=jnp.float16),
    "fp8 head": dict(scale="head"),
    "fp8 head asymmetric": dict(scale="head", asymmetric=True),
    "int8": {},
    "int8 half": dict(scale_dtype="float16"),
    "int4": {},
    "int4 groups": dict(groups=2),
}

LAYOUTS = ("seed_int4 groups", "seed_fp8 fp32", "fp8", "fp8 head asymmetric", "int4", "int4 groups")

# Compiled once a shape: eagerly every operation of every format would be compiled on its own.
QUANTIZE = jax.jit(quantize, static_argnums=1, static_argnames=("groups", "scale", "asymmetric", "scale_dtype"))
FROM_SEED, TO_SEED = jax.jit(from_seed), jax.jit(to_seed)
READ = jax.jit(lambda kv, dtype=jnp.float32: kv.dequantize(dtype), static_argnums=1)
READ_ALL = jax.jit(lambda kvs, dtype: [kv.dequantize(dtype) for kv in kvs], static_argnums=1)
GATHER_ALL = jax.jit(lambda kvs, rows, dtype: [kv.gather_rows(rows, dtype) for kv in kvs], static_argnums=2)


def at_once(f, formats, *args):
    """f(format, *args) of several formats in one compiled program."""
    return jax.jit(lambda kvs, args: [f(kv, *args) for kv in kvs])([kv for _, kv in formats], args)


@functools.cache
def every_format(heads=(3,), d=16, seed=0, labels=None):
    """(label, instance) of every kind of storage, with the numbers of one random array [2, 5, *heads, d].

    With two axes of heads, one kind for each way in which the axes of an array are laid out.
    """
    labels = labels or tuple(label for label in KINDS if len(heads) == 1 or label in LAYOUTS)
    fill = jax.jit(lambda x: [quantize(x, label.split()[0], **KINDS[label]) for label in labels])
    return list(zip(labels, fill(numbers(seed, 2, 5, *heads, d))))
