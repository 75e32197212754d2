"""jit, vmap, shard_map, retracing, memory, x64: what traced model code relies on."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import checks
import jax_frontend as frontend
import oracle
import pallas_kernels as pk
from pallas_kernels import masks

# class -> (factory arguments of one length set, of another)
LENGTHS = {
    "BlockDiagonalPaddedKeysMask": [
        dict(q_seqlen=[2, 3], kv_padding=8, kv_seqlen=[8, 3]),
        dict(q_seqlen=[5, 0], kv_padding=8, kv_seqlen=[0, 7]),
    ],
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": [
        dict(q_seqlen=[2, 3], kv_padding=8, kv_seqlen=[8, 3]),
        dict(q_seqlen=[1, 4], kv_padding=8, kv_seqlen=[5, 7]),
    ],
    "BlockDiagonalLocalAttentionPaddedKeysMask": [
        dict(q_seqlen=[2, 3], kv_padding=8, kv_seqlen=[8, 3], window_left=2, window_right=1),
        dict(q_seqlen=[1, 4], kv_padding=8, kv_seqlen=[5, 7], window_left=2, window_right=1),
    ],
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": [
        dict(q_seqlen=[2, 3], kv_padding=8, kv_seqlen=[8, 3], window_size=3),
        dict(q_seqlen=[1, 4], kv_padding=8, kv_seqlen=[5, 7], window_size=3),
    ],
    "BlockDiagonalGappyKeysMask": [
        dict(q_seqlen=[2, 3], kv_seqstarts=[1, 9, 16], kv_seqlen=[8, 3]),
        dict(q_seqlen=[5, 0], kv_seqstarts=[4, 0, 16], kv_seqlen=[9, 7]),
    ],
    "BlockDiagonalCausalWithOffsetGappyKeysMask": [
        dict(q_seqlen=[2, 3], kv_seqstarts=[1, 9, 16], kv_seqlen=[8, 3]),
        dict(q_seqlen=[5, 0], kv_seqstarts=[4, 0, 16], kv_seqlen=[9, 7]),
    ],
    "PagedBlockDiagonalPaddedKeysMask": [
        dict(q_seqlen=[2, 3], kv_seqlen=[8, 3], block_tables=[[3, 0], [1, 2]], page_size=4),
        dict(q_seqlen=[5, 0], kv_seqlen=[1, 7], block_tables=[[2, 0], [3, 0]], page_size=4),
    ],
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": [
        dict(q_seqlen=[2, 3], kv_seqlen=[8, 3], block_tables=[[3, 0], [1, 2]], page_size=4),
        dict(q_seqlen=[5, 0], kv_seqlen=[1, 7], block_tables=[[2, 0], [3, 0]], page_size=4),
    ],
    "PagedBlockDiagonalGappyKeysMask": [
        dict(q_seqlen=[2, 3], kv_seqstarts=[1, 3], kv_seqlen=[7, 3], block_tables=[[3, 0], [1, 2]], page_size=4),
        dict(q_seqlen=[5, 0], kv_seqstarts=[0, 1], kv_seqlen=[1, 7], block_tables=[[2, 0], [3, 0]], page_size=4),
    ],
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": [
        dict(q_seqlen=[2, 3], kv_seqstarts=[1, 3], kv_seqlen=[7, 3], block_tables=[[3, 0], [1, 2]], page_size=4),
        dict(q_seqlen=[5, 0], kv_seqstarts=[0, 1], kv_seqlen=[1, 7], block_tables=[[2, 0], [3, 0]], page_size=4),
    ],
}


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((1, n, 2, 16)), jnp.float32) for n in (5, 16, 16)]


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_do_not_retrace_and_stack_under_vmap(name):
    """One trace for both length sets, and a stack of both masks gives the same under vmap."""
    both = [frontend.mask(name, arguments) for arguments in LENGTHS[name]]
    traces = []

    @jax.jit
    def attend(q, k, v, mask):
        traces.append(1)
        return pk.memory_efficient_attention_forward_requires_grad(q, k, v, mask)

    arrays = inputs()
    single = [attend(*arrays, mask) for mask in both]
    assert len(traces) == 1
    assert not np.allclose(single[0][0], single[1][0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both)
    out, lse = jax.vmap(pk.memory_efficient_attention_forward_requires_grad, (None, None, None, 0))(*arrays, stacked)
    for n, (one_out, one_lse) in enumerate(single):
        checks.close(frontend.numpy(out[n]), frontend.numpy(one_out), 1e-6, 1e-6)
        checks.close(frontend.numpy(lse[n]), frontend.numpy(one_lse), 1e-6, 1e-6)


def test_eager_calls_share_one_compilation():
    from pallas_kernels.dispatch import _forward_jit

    arrays = inputs()
    first, second = (
        masks.BlockDiagonalPaddedKeysMask.from_seqlens(q, 8, k) for q, k in (([2, 3], [8, 3]), ([5, 0], [0, 7]))
    )
    pk.memory_efficient_attention(*arrays, first)
    before = _forward_jit._cache_size()
    pk.memory_efficient_attention(*arrays, second)
    assert _forward_jit._cache_size() == before


def test_masks_from_traced_lengths():
    arrays = inputs()

    @jax.jit
    def attend(q_len, k_len):
        mask = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_len, 8, k_len)
        return pk.memory_efficient_attention(*arrays, mask)

    out = attend(jnp.array([2, 3]), jnp.array([8, 3]))
    host = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 3], 8, np.array([8, 3]))
    checks.close(frontend.numpy(out), frontend.numpy(pk.memory_efficient_attention(*arrays, host)), 1e-6, 1e-6)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_over_every_array(axis):
    rng = np.random.default_rng(1)
    shapes = dict(query=(2, 3, 4, 16), key=(2, 9, 2, 16), value=(2, 9, 2, 8), attn_bias=(2, 1, 3, 9), sinks=(4,))
    arrays = {n: rng.standard_normal((3, *s)).astype(np.float32) for n, s in shapes.items()}
    lengths = np.array([[9, 4], [0, 1], [5, 9]], np.int32)

    def attend(arrays, lengths):
        return pk.memory_efficient_attention_forward_requires_grad(**arrays, kv_lengths=lengths)

    moved = {n: jnp.moveaxis(jnp.asarray(x), 0, axis) for n, x in arrays.items()}
    out, lse = jax.vmap(attend, (axis, 0))(moved, jnp.asarray(lengths))
    for n in range(3):
        want = oracle.dense(*(arrays[x][n] for x in ("query", "key", "value")), bias=arrays["attn_bias"][n],
                            sinks=arrays["sinks"][n], kv_lengths=lengths[n])  # fmt: skip
        checks.close(frontend.numpy(out[n]), want[0], 1e-5, 1e-5)
        checks.close(frontend.numpy(lse[n]), want[1], 1e-5, 1e-5)


def test_vmap_of_grad():
    q, k, v = inputs()
    batched = jnp.stack([q, 2 * q])
    grad = jax.grad(lambda q: pk.memory_efficient_attention(q, k, v, softcap=2.0).sum())
    both = jax.vmap(grad)(batched)
    for n in range(2):
        checks.close(frontend.numpy(both[n]), frontend.numpy(grad(batched[n])), 1e-6, 1e-6)


def test_vmap_of_varlen_and_merge():
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.standard_normal((2, 6, 2, 16)), jnp.float32)
    cu = jnp.array([[0, 2, 6], [0, 5, 6]], jnp.int32)
    out = jax.vmap(lambda q, cu: pk.varlen_attn(q, q, q, cu, cu, 6, 6, window_size=(-1, 0)))(q, cu)
    for n in range(2):
        one = pk.varlen_attn(q[n], q[n], q[n], cu[n], cu[n], 6, 6, window_size=(-1, 0))
        checks.close(frontend.numpy(out[n]), frontend.numpy(one), 1e-6, 1e-6)
    outs, lses = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 3, 1, 4, 2, 8), (2, 3, 1, 2, 4)))
    merged = jax.vmap(pk.merge_attentions)(outs, lses)
    checks.close(frontend.numpy(merged[0][1]), oracle.merge(outs[1], lses[1])[0], 1e-5, 1e-5)


def test_shard_map():
    """Heads and batch sharded over four host devices, masks built from local lengths, gradients too."""
    code = """
import functools, jax, jax.numpy as jnp, numpy as np, pallas_kernels as pk
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, n, 4, 16)), jnp.float32) for n in (2, 12, 12))
lengths = jnp.array([12, 3, 0, 7], jnp.int32)

def local(q, k, v, lengths):
    b, m, h, d = k.shape
    mask = pk.masks.BlockDiagonalPaddedKeysMask.from_seqlens([q.shape[1]] * b, m, lengths)
    flat = lambda x: x.reshape(1, -1, *x.shape[2:])
    return pk.memory_efficient_attention(flat(q), flat(k), flat(v), mask).reshape(q.shape)

spec = P("b", None, "h")
sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, P("b")), out_specs=spec))
np.testing.assert_allclose(sharded(q, k, v, lengths), local(q, k, v, lengths), atol=1e-6)
grads = [jax.grad(lambda q, f=f: f(q, k, v, lengths).sum())(q) for f in (sharded, local)]
np.testing.assert_allclose(*grads, atol=1e-6)

sinks = jnp.asarray(rng.standard_normal(4), jnp.float32)
def with_sinks(q, k, v, sinks):
    return pk.memory_efficient_attention(q, k, v, sinks=sinks)
sharded = jax.shard_map(with_sinks, mesh=mesh, in_specs=(spec, spec, spec, P("h")), out_specs=spec)
grads = [jax.grad(lambda s, f=f: (f(q, k, v, s) ** 2).sum())(sinks) for f in (sharded, with_sinks)]
np.testing.assert_allclose(*grads, rtol=1e-5)
print("right")
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "right", done.stderr[-3000:]


def temporaries(function, *arrays):
    return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_of_one_key_block():
    """Forward and backward of `chunked` keep nothing of size queries x keys; `reference`'s gradient check bites."""
    length = 8192
    q = jax.ShapeDtypeStruct((1, length, 1, 32), jnp.float32)
    scores = 4 * length * length

    def attend(q, k, v):
        return pk.memory_efficient_attention(q, k, v, backend="chunked")

    def plain(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s, -1), v)

    grad = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))
    assert temporaries(plain, q, q, q) >= scores  # what the bound below would catch
    assert temporaries(attend, q, q, q) < scores // 2
    assert temporaries(grad, q, q, q) < scores // 2


def test_window_skips_the_keys_outside():
    """The steps over key blocks follow the window: a narrow one over long keys runs one block a tile."""
    from pallas_kernels import chunked

    mask = masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([64], 4096, [4096], 16)
    q, k = jnp.ones((1, 64, 1, 16), jnp.float32), jnp.ones((1, 4096, 1, 16), jnp.float32)
    problem, operands, _ = pk.attention.build(q, k, k, mask)
    assert int(chunked._tiles(problem, operands, chunked._block_length(problem)).blocks) == 1
    problem, operands, _ = pk.attention.build(q, k, k)
    assert int(chunked._tiles(problem, operands, chunked._block_length(problem)).blocks) > 1


@pytest.mark.parametrize("far", [2**30, 2**31 - 1, sys.maxsize])
def test_far_windows_are_no_windows(far):
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((n, 2, 16)), jnp.float32) for n in (3, 9))
    cu_q, cu_k = np.array([0, 3], np.int32), np.array([0, 9], np.int32)
    want = pk.varlen_attn(q, k, k, cu_q, cu_k, 3, 9)
    for window in ((far, -1), (-1, far), (far, far)):
        for backend in ("chunked", "reference"):
            out = pk.varlen_attn(q, k, k, cu_q, cu_k, 3, 9, window_size=window, backend=backend)
            checks.close(frontend.numpy(out), frontend.numpy(want), 1e-6, 1e-6)


def test_an_e4m3_query_saturates_seed_rows():
    rng = np.random.default_rng(0)
    cache = pk.formats.quantize(jnp.asarray(1 + 300 * rng.standard_normal((1, 9, 2, 32)), jnp.float32), "seed_int4")
    q = jnp.asarray(rng.standard_normal((1, 1, 2, 32)), jnp.float8_e4m3fn)
    out = pk.memory_efficient_attention(q, cache, cache, output_dtype=jnp.float32)
    assert np.isfinite(out).all() and np.abs(out).max() <= 448


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_lse_dtype_follows_the_output(dtype):
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 2, 16)), dtype)
    for x64, wide in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(x64):
            _, lse = pk.memory_efficient_attention_forward_requires_grad(q, q, q)
            assert lse.dtype == (wide if dtype == "float32" else "float32")
            out, lse = pk.memory_efficient_attention_partial(q, q, q)
            assert (out.dtype, lse.dtype) == (jnp.float32, wide)
            _, lse = pk.memory_efficient_attention_partial(q, q, q, output_dtype=dtype)
            assert lse.dtype == (wide if dtype == "float32" else "float32")


def test_float32_lse_is_the_float64_lse_rounded():
    q = jnp.asarray(3 * np.random.default_rng(0).standard_normal((2, 64, 2, 16)), jnp.float32)
    narrow = pk.memory_efficient_attention_partial(q, q, q)[1]
    with jax.enable_x64(True):
        wide = pk.memory_efficient_attention_partial(q, q, q)[1]
    assert wide.dtype == jnp.float64
    np.testing.assert_array_equal(np.asarray(wide).astype(np.float32), np.asarray(narrow))
    assert (np.asarray(wide) != np.asarray(narrow).astype(np.float64)).any()


def test_float64():
    with jax.enable_x64(True):
        case = cases.Case("float64", None, {}, (2, 3, 4, 16), (2, 9, 2, 16), dtype="float32")
        drawn = cases.make_inputs(case, 3)
        q, k, v = (jnp.asarray(drawn[n], jnp.float64) for n in "qkv")
        out, lse = pk.memory_efficient_attention_forward_requires_grad(q, k, v)
        want_out, want_lse = cases.expected(case, drawn)
        assert out.dtype == lse.dtype == jnp.float64
        checks.close(frontend.numpy(out), want_out, 1e-12, 1e-12)
        checks.close(frontend.numpy(lse), want_lse, 1e-12, 1e-12)


@pytest.mark.parametrize("output", ["float16", "bfloat16", "float32"])
def test_output_dtype(output):
    case = cases.Case("output", None, {}, (1, 3, 2, 16), (1, 9, 2, 16), dtype="float16")
    drawn = cases.make_inputs(case, 4)
    out, _ = checks.call_case(frontend, case, drawn, output_dtype=output)
    assert out.dtype == output
    checks.close(frontend.numpy(out), cases.expected(case, drawn)[0], *cases.TOLERANCES[output])


def test_inside_scan_and_checkpoint():
    q, k, v = inputs()

    @jax.checkpoint
    def layer(x, _):
        return pk.memory_efficient_attention(x, k, v), None

    loss = lambda q: jax.lax.scan(layer, q, None, length=2)[0].sum()  # noqa: E731
    assert np.isfinite(jax.grad(loss)(q)).all()


def test_import_does_not_start_jax_or_torch():
    code = (
        "import sys, pallas_kernels; from jax._src import xla_bridge; "
        "assert 'torch' not in sys.modules and not xla_bridge._backends"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=120)
