"""Array biases in the decode kernels: values in the interpreter, lowering for CUDA, refusals."""

import dataclasses
import functools

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


def call(*, batch=2, tokens=1, kv_heads=2, group=4, keys=136, dim=64, value_dim=None, axes="bhgqk", lengths=None,
         causal=False, sinks=False, bias_dtype="float32", dtype="bfloat16", hidden=0.2, seed=0, **options):  # fmt: skip
    """(problem, operands, layout, (out, lse) in float64). axes: those of the bias that are not broadcast: batch, KV
    head, head of the group, query, key; `hidden` of its entries are -inf, and one row of it. Keys beyond `lengths` are
    poisoned, and so is the bias where it is theirs alone."""
    rng = np.random.default_rng(seed)
    q = cases.round_f32(rng.standard_normal((batch, tokens, kv_heads, group, dim)), dtype)
    k, v = (cases.round_f32(rng.standard_normal((batch, keys, kv_heads, 1, d)), dtype) for d in (dim, value_dim or dim))
    full = dict(b=batch, h=kv_heads, g=group, q=tokens, k=keys)
    bias = cases.round_f32(2 * rng.standard_normal([n if x in axes else 1 for x, n in full.items()]), bias_dtype)
    if hidden:
        bias[rng.random(bias.shape) < hidden] = -np.inf
        bias[-1, -1, -1, -1] = -np.inf
    ends = np.full(batch, keys) if lengths is None else np.array(lengths)
    seen = (np.arange(keys) < ends[:, None])[:, None, None, None]
    k, v = (np.where(seen[:, 0, 0, 0, :, None, None, None], x, np.nan) for x in (k, v))
    given = np.where(seen, bias, np.nan) if {"b", "k"} <= set(axes) else bias
    if causal:
        seen = seen & (np.arange(keys) <= np.arange(tokens)[:, None] + (ends[:, None, None, None, None] - tokens))
    logits = rng.standard_normal((kv_heads, group)).astype(np.float32) if sinks else None
    want = definition(q, k, v, np.where(seen, bias, -np.inf), logits, options.get("softcap"))
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v)]
    given = jnp.asarray(given, bias_dtype)
    if ("h" in axes) == ("g" in axes) or 1 in (kv_heads, group):  # four axes will do
        arrays = [x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in arrays]
        given = given.reshape(given.shape[0], -1, *given.shape[3:])
    if lengths is not None:
        options["kv_lengths"] = jnp.asarray(lengths, jnp.int32)
    if sinks:
        options["sinks"] = jnp.asarray(logits.ravel())
    parts = MaskParts(NormalForm(None, None, None), Window(None, 0), None, False, True) if causal else None
    return (*build(*arrays, given, parts=parts, **options), want)


def definition(q, k, v, bias, sinks, softcap):
    """(out [batch, tokens, heads, Dv], lse [batch, heads, tokens]) by the definition, in float64."""
    q, k, v = (np.nan_to_num(x.astype(np.float64)) for x in (q, k, v))
    s = np.einsum("bqhgd,bkhd->bhgqk", q, k[:, :, :, 0]) * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s, v = s + bias, v[:, :, :, 0]
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(sinks[..., None, None], (*s.shape[:-1], 1))], -1)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], 1)
    top = s.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    p = np.exp(s - top)
    l = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(l))[..., 0]
    out = np.einsum("bhgqk,bkhd->bqhgd", p / np.where(l > 0, l, 1), v)
    return out.reshape(*q.shape[:2], -1, v.shape[-1]), lse.reshape(q.shape[0], -1, q.shape[1])


VALUES = {
    "pieces": dict(num_splits=3, lengths=[136, 70], group=3),
    "automatic": dict(batch=1, group=8, kv_heads=1, dim=128, keys=304),
    "split-size": dict(group=3, split_size=96, lengths=[0, 77]),
    "group-1": dict(group=1, kv_heads=3, keys=4, num_splits=1),
    "group-16": dict(group=16, kv_heads=1, num_splits=2, lengths=[129, 64], sinks=True),
    "group-128": dict(batch=1, group=128, kv_heads=1, keys=72, num_splits=1),
    "tokens": dict(tokens=3, group=2, causal=True, num_splits=2),
    "16-tokens": dict(tokens=16, group=2, lengths=[136, 77]),
    "two-tiles-of-tokens": dict(batch=1, tokens=5, group=24, kv_heads=1, keys=72),
    "tree": dict(tokens=7, axes="qk", hidden=0.5),
    "of-each-head": dict(axes="hgk", tokens=2, num_splits=1),
    "of-each-kv-head": dict(axes="hqk", tokens=2, bias_dtype="bfloat16", lengths=[77, 1]),
    "of-the-group": dict(axes="gk", tokens=2, keys=132, lengths=[131, 4], num_splits=1),
    "of-keys": dict(axes="k", lengths=[5, 136]),
    "of-the-batch": dict(axes="bk", lengths=[5, 136], dim=16, num_splits=2, float32_out=True),
    "of-rows": dict(axes="bhgq", tokens=2, group=2, keys=72),
    "of-heads": dict(axes="hg", group=40, kv_heads=1, keys=72, num_splits=1),
    "one-number": dict(axes="", keys=72, hidden=0, num_splits=1),
    "float16": dict(bias_dtype="float16", dtype="float16", num_splits=2, softcap=1.5),
    "dim-256": dict(dim=256, split_size=64, tokens=2),
    "dim-512": dict(dim=512, group=1, keys=72, bias_dtype="bfloat16", lengths=[72, 33]),
    "latent": dict(dim=576, value_dim=512, group=16, kv_heads=1, keys=72, bias_dtype="bfloat16"),
    "one-key": dict(keys=1, batch=3),
}  # fmt: skip


def of_case(name, **changes):
    options = {**VALUES[name], **changes}
    if options.pop("float32_out", False):
        options["output_dtype"] = "float32"
    return call(**options)


def check(problem, operands, _, want, dtype):
    assert unsupported(problem) == []
    out, lse = jax.jit(run, static_argnums=(0, 1))(problem, INTERPRETER, operands)
    assert not _compat.races_found()
    checks.close(frontend.numpy(out).reshape(want[0].shape), want[0], *cases.TOLERANCES[dtype])
    checks.close(frontend.numpy(lse).reshape(want[1].shape), want[1], *cases.LSE_TOLERANCE)


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    check(*of_case(name), VALUES[name].get("dtype", "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_lowest_finite_numbers_hide_nothing_where_there_is_nothing_else(dtype):
    """As in float32 by the definition, where every score is that number: the mean of the values."""
    lowest = float(jnp.finfo(dtype).min)
    problem, x, *_ = call(batch=1, kv_heads=1, group=2, bias_dtype=dtype, hidden=0)
    bias = jnp.full_like(x.bias, lowest).at[:, :, 1, :, 5:].set(-jnp.inf)
    out, lse = run(problem, INTERPRETER, x._replace(bias=bias))
    v = frontend.numpy(x.v).reshape(136, 64)
    np.testing.assert_allclose(frontend.numpy(out)[0, 0], [v.mean(0), v[:5].mean(0)], atol=4e-3)
    assert (frontend.numpy(lse) < -1e38).all() and np.isfinite(frontend.numpy(lse)).all()


def test_counted_programs_read_the_bias_of_true_sequences():
    """At a capacity of 4 sequences, two are real: what lies behind the others' bias is never read."""
    problem, x, _, want = call(num_splits=2)
    raised = dataclasses.replace(problem, queries=4, batch=4, key_rows=4 * 136, lse_rows=4, bias=(4, *problem.bias[1:]))
    made = program(raised, INTERPRETER, counted=True)
    grown = lambda a, name: jnp.full(made.buffer(name).shape, jnp.nan, a.dtype).at[:2].set(  # noqa: E731
        a.reshape(2, *made.buffer(name).shape[1:])
    )
    values = {name: grown(a, name) for name, a in dict(q=x.q, k=x.k, v=x.v, bias=x.bias).items()}
    values["count"] = jnp.array([2], jnp.int32)
    for launch in made.launches:
        results = launch.kernel.build(interpret=True, detect_races=True)(*(values[n] for n in launch.reads))
        values |= dict(zip(launch.writes, results))
    out, lse = (frontend.numpy(values[n]) for n in ("out", "lse"))
    checks.close(out.reshape(4, 1, 8, 64)[:2], want[0], *cases.TOLERANCES["bfloat16"])
    checks.close(lse.reshape(4, 8, 1)[:2], want[1], *cases.LSE_TOLERANCE)
    assert np.isnan(out.reshape(4, -1)[2:]).all() and np.isnan(lse.reshape(4, -1)[2:]).all()


def test_public_functions_and_gradients():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, *s, 32)), jnp.bfloat16) for s in ((2, 4), (64, 2), (64, 2)))
    bias = jnp.asarray(rng.standard_normal((2, 4, 1, 64)), jnp.float32)

    def loss(backend, q, k, v, bias):
        out, lse = pk.memory_efficient_attention_forward_requires_grad(q, k, v, bias, backend=backend)
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum()

    got, want = (
        jax.value_and_grad(functools.partial(loss, backend), argnums=(0, 1, 2, 3))(q, k, v, bias)
        for backend in ("interpret", "chunked")
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
    for a, b in zip(got[1], want[1]):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        checks.close(frontend.numpy(a), frontend.numpy(b), 4e-2, 2e-2)


# ------------------------------------------------------------------------------------------------- lowering


LOWERED = [
    *(("group-1", dict(group=group, kv_heads=1, keys=136)) for group in (1, 12, 32, 128)),
    *(("16-tokens", dict(dim=dim, keys=keys)) for dim, keys in ((128, 1024), (192, 1000), (256, 64))),
    *((name, {}) for name in ("tokens", "tree", "float16", "of-rows")),
    *((f"of-{what}", {}) for what in ("each-kv-head", "the-batch", "the-group")),
    ("group-1", dict(dim=512, group=64, kv_heads=1, keys=136)),
    *(("dim-512", dict(axes=axes, bias_dtype=dtype)) for axes, dtype in (("bk", "float32"), ("bhgqk", "bfloat16"))),
    *(("latent", dict(group=group)) for group in (5, 128)),
]


@pytest.mark.parametrize("name,changes", LOWERED)
def test_lowers_for_cuda_without_a_gpu(name, changes):
    problem = of_case(name, **changes)[0]
    assert unsupported(problem) == []
    made = program(problem, HOPPER, counted=True)
    kernel = made.launches[0].kernel
    assert kernel.shared_memory <= SHARED_MEMORY
    structs = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in map(made.buffer, kernel.reads)]
    with jax.enable_x64(True):  # as torch's are
        text = jax.jit(kernel.build()).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("shape", [(4, 32, 1, 1024), (1, 32, 1, 1024), (4, 1, 1, 1024), (1, 1, 1, 1)])
def test_nothing_is_added_around_the_kernels(shape):
    """The bias goes into the kernel as it is given, whatever its dtype and broadcast axes."""
    q, k, bias = (
        jax.ShapeDtypeStruct(s, dtype)
        for s, dtype in (((4, 1, 32, 128), jnp.bfloat16), ((4, 1024, 8, 128), jnp.bfloat16), (shape, jnp.float16))
    )

    def attend(q, k, v, bias):
        problem, operands, _ = build(q, k, v, bias)
        return run(problem, HOPPER, operands)

    text = jax.jit(attend).trace(q, k, k, bias).lower(lowering_platforms=("cuda",)).as_text()
    operations = {word.split("(")[0] for word in text.split() if word.startswith("stablehlo.")}
    assert operations <= {"stablehlo.custom_call", "stablehlo.reshape"}, operations
    assert text.count("stablehlo.custom_call") == 2


@pytest.mark.parametrize("keys,dtype,reason", [(130, "float32", "130 keys in float32"), (132, "bfloat16", "16 bytes")])
def test_rows_that_are_no_multiple_of_16_bytes_are_refused(keys, dtype, reason):
    (text,) = unsupported(call(keys=keys, bias_dtype=dtype)[0])
    assert reason in text
    assert unsupported(call(keys=keys, bias_dtype=dtype, axes="bhgq")[0]) == []
