"""Array biases in the decode kernels: values in the interpreter, lowering for CUDA, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import checks
import jax_frontend as frontend
import pallas_kernels as pk
from pallas_kernels.kernels import _compat
from pallas_kernels.masks import NormalForm, Window
from pallas_kernels.problem import MaskParts, build
from pallas_kernels.program import SHARED_MEMORY, Target, program, run, unsupported

INTERPRETER = Target((9, 0), _compat.INTERPRETER_SMS, interpret=True, detect_races=True)
HOPPER = Target((9, 0), 132)


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    _compat.reset_interpreter()


def call(*, batch=2, tokens=1, kv_heads=2, group=4, keys=200, dim=64, value_dim=None, bias="bhqk", lengths=None,
         causal=False, sinks=False, bias_dtype="float32", dtype="bfloat16", hidden=0.2, seed=0, **options):  # fmt: skip
    """(problem, operands, layout, (out, lse) in float64). bias: the axes that are not broadcast: b, h (each KV head),
    g (each head of its group), q, k; some entries are -inf, and all of one row. Keys beyond `lengths` are poisoned, in
    keys, values and bias."""
    rng = np.random.default_rng(seed)
    heads = kv_heads * group
    q = cases.round_f32(rng.standard_normal((batch, tokens, heads, dim)), dtype)
    k, v = (cases.round_f32(rng.standard_normal((batch, keys, kv_heads, d)), dtype) for d in (dim, value_dim or dim))
    bias = bias.replace("h", "hg") if "g" not in bias else bias
    full = dict(b=batch, h=kv_heads, g=group, q=tokens, k=keys)
    shape = [n if axis in bias else 1 for axis, n in full.items()]
    added = cases.round_f32(2 * rng.standard_normal(shape), bias_dtype)
    added[rng.random(shape) < hidden] = -np.inf
    added[-1, -1, -1, -1] = -np.inf if hidden else 0.0
    seen = np.ones((batch, 1, tokens, keys), bool)
    if causal:
        ends = np.full(batch, keys) if lengths is None else np.asarray(lengths)
        seen &= np.arange(keys) <= np.arange(tokens)[:, None] + (ends[:, None, None, None] - tokens)
    used = added = np.broadcast_to(added, tuple(full.values())) if lengths is not None and "k" in bias else added
    if lengths is not None:
        beyond = np.arange(keys) >= np.asarray(lengths)[:, None]
        seen &= ~beyond[:, None, None]
        k, v = (np.where(beyond[..., None, None], np.nan, x) for x in (k, v))
        if "b" in bias and "k" in bias:
            used = np.where(beyond[:, None, None, None], np.nan, added)[
                tuple(slice(None if axis in bias else 1) for axis in full)
            ]
        else:
            used = added[tuple(slice(None if axis in bias else 1) for axis in full)]
    logits = rng.standard_normal(heads).astype(np.float32) if sinks else None
    want = definition(q, k, v, added, seen, logits, options.get("softcap"))
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    given = jnp.asarray(used, bias_dtype)
    if kv_heads == 1 or given.shape[1] == kv_heads and given.shape[2] == group:
        given = given.reshape(given.shape[0], -1, *given.shape[3:])
    elif given.shape[1:3] == (1, 1):
        given = given[:, 0]
    else:  # of five axes
        arrays = [x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]) for x in arrays]
    if lengths is not None:
        options["kv_lengths"] = jnp.asarray(lengths, jnp.int32)
    if sinks:
        options["sinks"] = jnp.asarray(logits)
    parts = MaskParts(NormalForm(None, None, None), Window(None, 0), None, False, True) if causal else None
    return (*build(*arrays, given, parts=parts, **options), want)


def definition(q, k, v, bias, seen, sinks, softcap):
    """(out [tokens, heads, Dv] of all sequences, lse [batch, heads, tokens]) by the definition, in float64."""
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    k, v = (np.nan_to_num(np.repeat(x.astype(np.float64), heads // kv_heads, 2)) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k) * dim**-0.5
    if softcap:
        s = softcap * np.tanh(s / softcap)
    whole = np.broadcast_to(bias, (batch, kv_heads, heads // kv_heads, tokens, k.shape[1]))
    s = np.where(seen, s + whole.reshape(s.shape), -np.inf)
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))], -1)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], 1)
    top = s.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(s - top)
    l = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(l))[..., 0]
    out = np.einsum("bhqk,bkhd->bqhd", p / np.where(l > 0, l, 1), v)
    return out.reshape(batch * tokens, heads, -1), lse


VALUES = {
    "all-axes": dict(num_splits=1),
    "pieces": dict(num_splits=3, lengths=[200, 130]),
    "automatic": dict(batch=1, group=8, kv_heads=1, dim=128, keys=304),
    "split-size": dict(group=3, split_size=96, lengths=[0, 77]),
    "group-1": dict(group=1, kv_heads=3, num_splits=1),
    "group-16": dict(group=16, kv_heads=1, num_splits=2, lengths=[129, 64], sinks=True),
    "group-24": dict(group=24, kv_heads=1, keys=136, num_splits=1),
    "group-40": dict(group=40, kv_heads=1, keys=136, num_splits=2),
    "group-128": dict(batch=1, group=128, kv_heads=1, keys=72, num_splits=1),
    "tokens": dict(tokens=3, group=2, keys=144, causal=True, num_splits=2),
    "16-tokens": dict(tokens=16, group=2, keys=144, lengths=[144, 77]),
    "tree": dict(tokens=7, bias="qk", hidden=0.5, keys=136),
    "two-tiles-of-tokens": dict(tokens=5, group=24, kv_heads=1, keys=72, bias="bqk", batch=1),
    "of-each-head": dict(bias="hk", tokens=2, num_splits=1),
    "of-each-kv-head": dict(bias="hqk", group=1, tokens=2, num_splits=1),
    "of-the-group": dict(bias="gk", tokens=2, num_splits=1),
    "of-keys": dict(bias="k", lengths=[5, 200]),
    "of-the-batch": dict(bias="bk", group=2, num_splits=2),
    "of-rows": dict(bias="bhq", tokens=2, group=2),
    "one-number": dict(bias="", hidden=0, num_splits=1),
    "of-rows-of-heads": dict(bias="h", group=40, kv_heads=1, keys=72, num_splits=1),
    "bfloat16": dict(bias_dtype="bfloat16", tokens=2, lengths=[77, 1]),
    "float16": dict(bias_dtype="float16", dtype="float16", num_splits=2),
    "softcap": dict(softcap=1.5, num_splits=2),
    "dim-16": dict(dim=16, keys=136),
    "dim-256": dict(dim=256, keys=136, split_size=64, tokens=2),
    "dim-512": dict(dim=512, group=1, keys=72, bias_dtype="bfloat16", lengths=[72, 33]),
    "latent": dict(dim=576, value_dim=512, group=16, kv_heads=1, keys=72, bias_dtype="bfloat16"),
    "odd-slot": dict(keys=132, lengths=[131, 4]),
    "few-keys": dict(keys=4),
    "one-key": dict(keys=1, batch=3),
    "float32-out": dict(output_dtype="float32", sinks=True),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    problem, operands, _, want = call(**VALUES[name])
    assert unsupported(problem) == []
    out, lse = jax.jit(run, static_argnums=(0, 1))(problem, INTERPRETER, operands)
    assert not _compat.races_found()
    dtype = VALUES[name].get("dtype", "bfloat16")
    checks.close(frontend.numpy(out).reshape(want[0].shape), want[0], *cases.TOLERANCES[dtype])
    checks.close(frontend.numpy(lse).reshape(want[1].shape), want[1], *cases.LSE_TOLERANCE)
