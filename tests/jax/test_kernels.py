"""The decode kernels' values in Mosaic GPU's interpreter, with races detected and scratch poisoned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import checks
import jax_frontend as frontend
import oracle
import pallas_kernels as pk
from benchmarks.mask_choice import mask_of
from pallas_kernels.kernels import _compat, merge
from pallas_kernels.problem import build
from pallas_kernels.program import Target, program, run, unsupported

INTERPRETER = Target((9, 0), _compat.INTERPRETER_SMS, interpret=True, detect_races=True)


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    _compat.reset_interpreter()


def poisoned(x, rows):
    x = np.array(x)
    x[rows] = np.nan
    return x


def call(q_lens, k_lens, *, group, kv_heads, dim, dtype="bfloat16", value_dim=None, page_size=None, slot=None,
         starts=None, window=None, sinks=False, seed=0, **options):  # fmt: skip
    """(problem, operands, expected out, expected lse): packed queries, garbage poisoned. Keys lie in slots of `slot`
    rows, in pages, or (`starts`) anywhere on the key axis or in their row of pages."""
    rng = np.random.default_rng(seed)
    n, heads, tokens = len(k_lens), group * kv_heads, sum(q_lens)
    q = cases.round_f32(rng.standard_normal((tokens, heads, dim)), dtype)
    table = None
    if page_size is None:
        rows = n * slot
        layout = "gappy" if starts else "padded"
        positions = oracle.key_positions(layout, k_lens, total=rows, starts=starts)
    else:
        begins = starts or [0] * n
        per_row = max(1, -(-max(x + k for x, k in zip(begins, k_lens)) // page_size)) + 1
        table = rng.permutation(n * per_row + 1)[: n * per_row].reshape(n, per_row)
        rows = (n * per_row + 1) * page_size
        layout = "paged gappy" if starts else "paged"
        positions = oracle.key_positions(layout, k_lens, starts=starts, block_tables=table, page_size=page_size)
        table = cases.poison_table(table, cases.used_pages(k_lens, begins, page_size, table.shape)).astype(np.int32)
    k, v = (cases.round_f32(rng.standard_normal((rows, kv_heads, d)), dtype) for d in (dim, value_dim or dim))
    outside = np.setdiff1d(np.arange(rows), np.concatenate([*positions, []]).astype(int))
    k, v = poisoned(k, outside), poisoned(v, outside)
    left, right = window or (None, None)
    visible = [oracle.visible_table("window", *lens, left=left, right=right) for lens in zip(q_lens, k_lens)]
    logits = rng.standard_normal(heads).astype(np.float32) if sinks else None
    want = oracle.block_diagonal(
        q, k, v, q_lens, positions, visible, softcap=options.get("softcap"), sinks=logits, scale=options.get("scale")
    )
    mask = mask_of(q_lens, k_lens, window=window, slot=slot, rows=rows, starts=starts, table=table, page_size=page_size)
    arrays = [jnp.asarray(x[None], dtype) for x in (q, k, v)]
    if sinks:
        options["sinks"] = jnp.asarray(logits)
    problem, operands, layout = build(*arrays, mask, **options)
    return problem, operands, layout, want


def check(problem, operands, layout, want, dtype):
    assert unsupported(problem) == []
    out, lse = jax.jit(run, static_argnums=(0, 1))(problem, INTERPRETER, operands)
    assert not _compat.races_found()
    checks.close(frontend.numpy(out).reshape(want[0].shape), want[0], *cases.TOLERANCES[dtype])
    checks.close(frontend.numpy(lse).reshape(want[1].shape), want[1], *cases.LSE_TOLERANCE)


VALUES = {
    "one-piece": dict(q_lens=[1, 1, 1], k_lens=[256, 1, 0], group=4, kv_heads=2, dim=64, slot=256, num_splits=1),
    "pieces": dict(q_lens=[1, 1, 1], k_lens=[256, 130, 0], group=3, kv_heads=2, dim=64, slot=256, num_splits=3,
                   dtype="float16"),
    "automatic": dict(q_lens=[1], k_lens=[300], group=8, kv_heads=1, dim=128, slot=304),
    "split-size": dict(q_lens=[1, 1], k_lens=[200, 65], group=1, kv_heads=2, dim=32, slot=200, split_size=96),
    "group-16": dict(q_lens=[1, 1], k_lens=[129, 64], group=16, kv_heads=1, dim=128, slot=136, num_splits=2),
    "paged-128": dict(q_lens=[1, 1], k_lens=[0, 257], group=2, kv_heads=2, dim=128, page_size=128, num_splits=1),
    "paged-64": dict(q_lens=[1] * 4, k_lens=[64, 0, 65, 200], group=4, kv_heads=2, dim=64, page_size=64, num_splits=2),
    "several-tokens": dict(q_lens=[2, 0, 3], k_lens=[20, 9, 140], group=2, kv_heads=2, dim=64, slot=144,
                           window=(None, 0), num_splits=2),
    "more-tokens-than-keys": dict(q_lens=[4], k_lens=[2], group=2, kv_heads=1, dim=32, slot=8, window=(None, 0)),
    "window": dict(q_lens=[1, 3], k_lens=[256, 100], group=2, kv_heads=1, dim=64, slot=256, window=(30, 2),
                   num_splits=2),
    "paged-causal": dict(q_lens=[3, 1], k_lens=[130, 64], group=2, kv_heads=1, dim=64, page_size=64, window=(None, 0),
                         num_splits=1),
    "softcap": dict(q_lens=[1, 1], k_lens=[200, 65], group=12, kv_heads=1, dim=64, slot=200, num_splits=1, softcap=1.5),
    "group-40": dict(q_lens=[1, 2], k_lens=[129, 64], group=40, kv_heads=1, dim=64, slot=136, num_splits=2,
                     window=(None, 0)),
    "all-empty": dict(q_lens=[1, 1], k_lens=[0, 0], group=4, kv_heads=1, dim=64, slot=64, num_splits=2),
    "page-16": dict(q_lens=[1, 1], k_lens=[17, 200], group=4, kv_heads=2, dim=64, page_size=16),
    "page-24": dict(q_lens=[1, 2], k_lens=[24, 150], group=3, kv_heads=1, dim=64, page_size=24, window=(None, 0)),
    "page-256": dict(q_lens=[1, 1], k_lens=[256, 300], group=8, kv_heads=1, dim=32, page_size=256, split_size=100),
    "page-1": dict(q_lens=[1, 1], k_lens=[3, 140], group=4, kv_heads=1, dim=64, page_size=1),
    "page-1-tokens": dict(q_lens=[1, 2], k_lens=[0, 131], group=2, kv_heads=1, dim=32, page_size=1, window=(None, 0)),
    "gappy": dict(q_lens=[1, 2], k_lens=[200, 45], group=4, kv_heads=2, dim=64, slot=150, starts=[3, 250]),
    "gappy-causal": dict(q_lens=[2, 3], k_lens=[129, 7], group=2, kv_heads=1, dim=128, slot=130, starts=[101, 60],
                         window=(None, 0), num_splits=2),
    "paged-gappy": dict(q_lens=[1, 2], k_lens=[100, 70], group=4, kv_heads=1, dim=64, page_size=64, starts=[50, 3],
                        window=(None, 0)),
    "odd-slot": dict(q_lens=[1, 1], k_lens=[131, 77], group=4, kv_heads=1, dim=64, slot=131),
    "small-slot": dict(q_lens=[1, 1], k_lens=[5, 0], group=4, kv_heads=1, dim=64, slot=5),
    "dim-16": dict(q_lens=[1, 3], k_lens=[130, 64], group=3, kv_heads=2, dim=16, slot=136, window=(None, 0)),
    "dim-96": dict(q_lens=[1, 1], k_lens=[130, 64], group=4, kv_heads=1, dim=96, slot=136, sinks=True),
    "dim-96-tokens": dict(q_lens=[3, 1], k_lens=[70, 33], group=1, kv_heads=2, dim=96, slot=72, window=(None, 0)),
    "dim-192": dict(q_lens=[1, 2], k_lens=[130, 64], group=4, kv_heads=1, dim=192, value_dim=128, slot=136),
    "dim-256": dict(q_lens=[1, 1], k_lens=[130, 64], group=4, kv_heads=1, dim=256, slot=136, split_size=64),
    "dim-512": dict(q_lens=[1, 2], k_lens=[70, 30], group=8, kv_heads=1, dim=512, slot=72, window=(None, 0),
                    sinks=True),
    "latent": dict(q_lens=[1, 1], k_lens=[70, 33], group=16, kv_heads=1, dim=576, value_dim=512, page_size=16),
    "narrow-values": dict(q_lens=[1, 2], k_lens=[70, 33], group=2, kv_heads=2, dim=128, value_dim=32, slot=72),
    "group-1": dict(q_lens=[4, 1], k_lens=[70, 33], group=1, kv_heads=3, dim=64, slot=72, window=(None, 0)),
    "group-96": dict(q_lens=[1, 1], k_lens=[70, 33], group=96, kv_heads=1, dim=64, slot=136, num_splits=2, sinks=True),
    "group-128": dict(q_lens=[2], k_lens=[200], group=128, kv_heads=1, dim=64, slot=200, window=(None, 0)),
    "16-tokens": dict(q_lens=[16, 7], k_lens=[140, 133], group=4, kv_heads=1, dim=64, slot=144, window=(None, 0)),
    "many-tiles": dict(q_lens=[5, 3], k_lens=[140, 33], group=24, kv_heads=1, dim=32, slot=144, window=(None, 0),
                       split_size=64, sinks=True),
    "far-left": dict(q_lens=[2, 2], k_lens=[300, 30], group=4, kv_heads=1, dim=32, slot=300, window=(20, 0),
                     split_size=64),
    "float32-out": dict(q_lens=[1, 1], k_lens=[300, 30], group=4, kv_heads=1, dim=32, slot=300, output_dtype="float32",
                        scale=-0.5),
    "group-72": dict(q_lens=[1], k_lens=[70], group=72, kv_heads=1, dim=64, slot=72, num_splits=1, softcap=1e6),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    check(*call(**VALUES[name]), VALUES[name].get("dtype", "bfloat16"))


@settings(max_examples=5)
@given(st.data())
def test_drawn_lengths_and_tables(data):
    n = data.draw(st.integers(1, 3))
    page_size = data.draw(st.sampled_from([None, 64, 128]))
    k_lens = data.draw(st.lists(st.integers(0, 200), min_size=n, max_size=n))
    q_lens = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n).filter(sum))
    policy = data.draw(st.sampled_from([{}, {"num_splits": 1}, {"num_splits": 2}, {"split_size": 70}]))
    window = data.draw(st.sampled_from([None, (None, 0)]))
    check(
        *call(q_lens, k_lens, group=data.draw(st.sampled_from([1, 3, 8])), kv_heads=1, dim=32, dtype="bfloat16",
              page_size=page_size, slot=None if page_size else 200, window=window, seed=data.draw(st.integers(0, 99)),
              **policy),
        "bfloat16",
    )  # fmt: skip


def test_pieces_do_not_change_more_than_rounding_and_one_is_exact():
    """A sequence's bits with `num_splits=1` or a fixed `split_size` do not depend on its companions."""
    settings_of = dict(group=2, kv_heads=2, dim=64, dtype="bfloat16", slot=256)
    for policy in ({"num_splits": 1}, {"split_size": 96}):
        alone = call([1], [200], **settings_of, **policy)
        (problem, operands, _, _) = call([1, 1, 1], [17, 200, 256], **settings_of, seed=1, **policy)
        k = operands.k.at[:, 256:512].set(alone[1].k)
        v = operands.v.at[:, 256:512].set(alone[1].v)
        q = operands.q.at[1].set(alone[1].q[0])
        runner = jax.jit(run, static_argnums=(0, 1))
        one = runner(alone[0], INTERPRETER, alone[1])
        many = runner(problem, INTERPRETER, operands._replace(q=q, k=k, v=v))
        np.testing.assert_array_equal(frontend.numpy(one[0][0]), frontend.numpy(many[0][1]))


def test_counted_programs_read_the_true_numbers():
    """At a capacity of 4 tokens and sequences, two are real: their results are right and nothing else is written."""
    problem, x, _, want = call([1, 1], [100, 3], group=2, kv_heads=2, dim=64, dtype="bfloat16", slot=128)
    raised = dataclasses.replace(problem, queries=4, batch=4, key_rows=4 * 128)
    made = program(raised, INTERPRETER, counted=True)
    grown = lambda a, shape: jnp.concatenate([a, jnp.full(shape, jnp.nan, a.dtype)])  # noqa: E731
    values = {
        "q": grown(x.q, (2, 2, 2, 64)),
        "k": grown(x.k.reshape(2, 128, 2, 64), (2, 128, 2, 64)),
        "v": grown(x.v.reshape(2, 128, 2, 64), (2, 128, 2, 64)),
        "q_start": jnp.array([0, 1, 2, 77, -5], jnp.int32),
        "k_len": jnp.array([100, 3, 10**9, -1], jnp.int32),
        "count": jnp.array([2], jnp.int32),
        "sequences": jnp.array([2], jnp.int32),
    }
    for launch in made.launches:
        results = launch.kernel.build(interpret=True, detect_races=True)(*(values[n] for n in launch.reads))
        values |= dict(zip(launch.writes, results))
    out = frontend.numpy(values["out"].reshape(4, 4, 64))
    checks.close(out[:2], want[0], *cases.TOLERANCES["bfloat16"])
    assert np.isnan(out[2:]).all(), "rows beyond the true count are not written"
    lse = frontend.numpy(values["lse"])
    checks.close(lse[:8].reshape(4, 2), want[1], *cases.LSE_TOLERANCE)
    assert np.isnan(lse[8:]).all()


def test_public_functions_run_the_interpreter():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, *s, 64)), jnp.bfloat16) for s in ((1, 4), (64, 2), (64, 2)))
    out, lse = pk.memory_efficient_attention_forward_requires_grad(q, k, v, backend="interpret", num_splits=2)
    want_out, want_lse = pk.memory_efficient_attention_forward_requires_grad(q, k, v, backend="reference")
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 1), jnp.float32)
    checks.close(frontend.numpy(out), frontend.numpy(want_out), *cases.TOLERANCES["bfloat16"])
    checks.close(frontend.numpy(lse), frontend.numpy(want_lse), *cases.LSE_TOLERANCE)
    pages, table = k.reshape(2, 64, 2, 64), jnp.array([[1], [0]], jnp.int32)
    cu, used = jnp.arange(3, dtype=jnp.int32), jnp.array([64, 7], jnp.int32)
    options = dict(enable_gqa=True, seqused_k=used, block_table=table)
    out = pk.varlen_attn(q[:, 0], pages, pages, cu, None, 1, 64, backend="interpret", num_splits=1, **options)
    want = pk.varlen_attn(q[:, 0], pages, pages, cu, None, 1, 64, backend="reference", **options)
    checks.close(frontend.numpy(out), frontend.numpy(want), *cases.TOLERANCES["bfloat16"])


@pytest.mark.parametrize("page_size,max_k,lengths", [(64, 5, [5, 3]), (24, 60, [60, 30]), (256, 100, [100, 30])])
def test_pages_longer_than_the_longest_sequence(page_size, max_k, lengths):
    rng = np.random.default_rng(0)
    width = 4
    q = jnp.asarray(rng.standard_normal((2, 4, 64)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.standard_normal((2 * width, page_size, 2, 64)), jnp.bfloat16) for _ in range(2))
    table = jnp.asarray(rng.permutation(2 * width).reshape(2, width), jnp.int32)
    cu, used = jnp.arange(3, dtype=jnp.int32), jnp.asarray(lengths, jnp.int32)
    options = dict(enable_gqa=True, seqused_k=used, block_table=table)
    got, want = (pk.varlen_attn(q, k, v, cu, None, 1, max_k, backend=b, **options) for b in ("interpret", "reference"))
    checks.close(frontend.numpy(got), frontend.numpy(want), *cases.TOLERANCES["bfloat16"])


@pytest.mark.parametrize("policy", [{}, {"num_splits": 3}, {"split_size": 64}], ids=str)
def test_a_length_beyond_its_slot_reads_and_writes_the_slot_only(policy):
    problem, x, _, _ = call([1, 1], [128, 5], group=4, kv_heads=1, dim=64, dtype="bfloat16", slot=128, **policy)
    runner = jax.jit(run, static_argnums=(0, 1))
    want = runner(problem, INTERPRETER, x)
    wrong = x._replace(nf=x.nf._replace(k_len=jnp.array([2**31 - 1, 5], jnp.int32)))
    for a, b in zip(runner(problem, INTERPRETER, wrong), want):
        np.testing.assert_array_equal(frontend.numpy(a), frontend.numpy(b))


def test_a_nan_among_the_keys_is_seen_in_output_and_lse():
    problem, x, _, _ = call([1, 1], [100, 50], group=2, kv_heads=1, dim=64, dtype="bfloat16", slot=104, num_splits=2)
    x = x._replace(k=x.k.at[0, 7].set(jnp.nan))
    out, lse = jax.jit(run, static_argnums=(0, 1))(problem, INTERPRETER, x)
    assert np.isnan(frontend.numpy(out)[0]).all() and np.isfinite(frontend.numpy(out)[1]).all()
    lse = frontend.numpy(lse).reshape(2, 2)
    assert np.isnan(lse[:, 0]).all() and np.isfinite(lse[:, 1]).all()


@pytest.mark.parametrize("options", [{}, {"split_size": 50}], ids=str)
def test_values_do_not_depend_on_how_the_merge_is_laid_out(options, monkeypatch):
    """Heads one by one with many parts in flight, or four at once, by as many blocks as there are rows or by few. (On a
    card bits do not, either; a CPU's compiler takes another exp2 for several numbers than for one.)"""
    given = dict(group=4, kv_heads=2, dim=128, dtype="float16", slot=304, sinks=True, **options)
    problem, operands, _, (want, want_lse) = call([1, 3, 0, 1], [300, 40, 9, 0], window=(None, 0), **given)
    for few_rows, most_blocks in ((64, 2112), (0, 2112), (0, 3)):
        monkeypatch.setattr(merge, "FEW_ROWS", few_rows)
        monkeypatch.setattr(merge, "MOST_BLOCKS", most_blocks)
        jax.clear_caches()
        out, lse = jax.jit(run, static_argnums=(0, 1))(problem, INTERPRETER, operands)
        assert not _compat.races_found()
        checks.close(frontend.numpy(out).reshape(want.shape), want, *cases.TOLERANCES["float16"])
        checks.close(frontend.numpy(lse).reshape(want_lse.shape), want_lse, *cases.LSE_TOLERANCE)
