"""The kernel of merge_attentions: values in the interpreter (races detected, scratch poisoned), lowering for CUDA."""

import dataclasses
import functools
import itertools
import math

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
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.kernels import _compat
from pallas_kernels.kernels.merge_chunks import MergeChunks
from pallas_kernels.merge import described, merge_on
from pallas_kernels.merge_program import MOST_OPERANDS, Merge, program

ALL = {
    "float32": (2e-6, 2e-6),
    "float16": (2e-3, 1e-3),
    "bfloat16": (1e-2, 8e-3),
}
"""atol, rtol: the rounding of the output alone."""
LSE = {"float32": (2e-6, 2e-7), "float64": (2e-7, 2e-7)}
"""The sum of weights is float32."""


@pytest.fixture(autouse=True)
def fresh_interpreter():
    with jax.enable_x64(True):
        yield
    _compat.reset_interpreter()


@dataclasses.dataclass(frozen=True)
class Given:
    """Chunks as the kernel reads them (`outs`: rounded, NaN where the LSE is -inf), and what they should give."""

    outs: list
    lses: list
    want: tuple


def drawn(n, shape, dtypes=("float32",), lse_dtypes=("float32",), empty=0.25, spread=3.0, seed=0):
    """n chunks of [B, M, (G,) H, K]; dtypes in turn. Some rows have no key in some chunks, the first row in none."""
    rng = np.random.default_rng(seed)
    batch, queries, *heads, _ = shape
    outs = [cases.round_f32(rng.standard_normal(shape), dtypes[i % len(dtypes)]) for i in range(n)]
    lses = [
        (spread * rng.standard_normal((batch, *heads, queries))).astype(lse_dtypes[i % len(lse_dtypes)])
        for i in range(n)
    ]
    for x in lses:
        x[rng.random(x.shape) < empty] = -np.inf
        if empty:
            x.reshape(-1)[0] = -np.inf
    clean = [np.where(np.moveaxis(x, -1, 1)[..., None] == -np.inf, 0, a) for a, x in zip(outs, lses)]
    for a, x in zip(outs, lses):
        a[np.moveaxis(x, -1, 1) == -np.inf] = np.nan
    arrays = [jnp.asarray(a, dtypes[i % len(dtypes)]) for i, a in enumerate(outs)]
    return Given(arrays, [jnp.asarray(x) for x in lses], oracle.merge(clean, lses))


def run(kernel, attn, lse, *count):
    """A kernel's results in the interpreter."""
    operands = [x.reshape(t.shape) for x, t in zip((*attn, *lse, *count), kernel.in_types, strict=True)]
    results = kernel.build(interpret=True, detect_races=True)(*operands)
    assert not _compat.races_found()
    return results


def check(given, out_dtype="float32", stacked=(False, False), write_lse=True, **changes):
    outs, lses = (jnp.stack(x) if s else x for x, s in zip((given.outs, given.lses), stacked))
    call, attn, lse = described(outs, lses, write_lse, out_dtype)
    assert call.unsupported() == []
    kernel = dataclasses.replace(call.kernel(), **changes)
    out, *merged = run(kernel, attn, lse)
    assert (str(out.dtype), [str(x.dtype) for x in merged]) == (out_dtype, [str(lses[0].dtype)] * write_lse)
    want, want_lse = given.want
    checks.close(frontend.numpy(out).reshape(want.shape), want, *ALL[out_dtype])
    for x in merged:
        checks.close(frontend.numpy(x).reshape(want_lse.shape), want_lse, *LSE[str(x.dtype)])
    return frontend.numpy(out).ravel()


VALUES = {
    "one-chunk": dict(n=1, shape=(2, 3, 4, 32)),
    "decode": dict(n=4, shape=(3, 1, 8, 128), lse_dtypes=("float64",)),
    "one-head": dict(n=2, shape=(3, 5, 1, 64)),
    "heads-first": dict(n=3, shape=(2, 2, 11, 128)),
    "queries-first": dict(n=3, shape=(1, 21, 3, 128)),
    "groups": dict(n=2, shape=(2, 7, 2, 3, 96)),
    "small-dim": dict(n=3, shape=(1, 5, 2, 8)),
    "odd-dim": dict(n=2, shape=(2, 3, 2, 72)),
    "large-dim": dict(n=3, shape=(1, 3, 3, 512)),
    "dim-256": dict(n=2, shape=(1, 5, 2, 256), lse_dtypes=("float64",)),
    "one-row": dict(n=3, shape=(1, 1, 1, 128), empty=0.0),
    "mixed": dict(n=5, shape=(1, 3, 4, 64), dtypes=("bfloat16", "float32", "float16"),
                  lse_dtypes=("float32", "float64")),
    "16-bit": dict(n=3, shape=(2, 4, 4, 128), dtypes=("bfloat16", "float16")),
    "16-bit-small": dict(n=2, shape=(1, 3, 3, 8), dtypes=("float16",)),
    "all-empty": dict(n=3, shape=(1, 2, 5, 32), empty=1.0),
    "large-lse": dict(n=3, shape=(1, 2, 4, 32), spread=300.0, lse_dtypes=("float64",)),
    "many": dict(n=64, shape=(1, 2, 3, 32), lse_dtypes=("float64", "float32"), dtypes=("float32", "bfloat16")),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_lists(name):
    check(drawn(**VALUES[name]))


@pytest.mark.parametrize("stacked", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", ["one-chunk", "decode", "heads-first", "queries-first", "groups"])
def test_stacks(name, stacked):
    check(drawn(**VALUES[name], seed=1), stacked=stacked)


@pytest.mark.parametrize("n", [17, 33, 70])
def test_many_stacked_chunks_are_added_in_a_loop(n):
    given = drawn(n, (1, 3, 5, 32), lse_dtypes=("float64",), seed=n)
    looped = check(given, stacked=(True, True))
    if n <= MOST_OPERANDS:  # XLA on a CPU fuses a multiplication and an addition in the one and not in the other
        np.testing.assert_allclose(looped, check(given), atol=2e-7)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_output_dtypes(dtype, out_dtype):
    check(drawn(3, (2, 3, 4, 64), (dtype,), seed=2), out_dtype, (True, True), write_lse=dtype != "float16")


def test_no_bit_depends_on_the_tile():
    given = drawn(3, (1, 13, 3, 64), lse_dtypes=("float64",), seed=3)
    first, *others = [check(given, tile_rows=rows) for rows in (1, 2, 4, 8, 16, 32)]
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_one_chunk_is_returned_as_it_is():
    given = drawn(1, (2, 3, 4, 32), empty=0.0, seed=4)
    np.testing.assert_array_equal(check(given), frontend.numpy(given.outs[0]).ravel())


def test_rows_beyond_the_count_are_neither_read_nor_written():
    given = drawn(3, (2, 3, 4, 64), lse_dtypes=("float64",), seed=5)
    call, attn, lse = described(given.outs, given.lses, True, "float32")
    grow = lambda x: jnp.concatenate([x, jnp.full((3, *x.shape[1:]), jnp.nan, x.dtype)])  # noqa: E731
    kernel = call.kernel(capacity=5)
    out, merged = run(kernel, map(grow, attn), map(grow, lse), jnp.array([2], jnp.int32))
    checks.close(frontend.numpy(out[:2]), given.want[0], *ALL["float32"])
    checks.close(frontend.numpy(merged[:2]), given.want[1], *LSE["float64"])
    assert np.isnan(frontend.numpy(out[2:])).all() and np.isnan(frontend.numpy(merged[2:])).all()


@settings(max_examples=6)
@given(st.data())
def test_drawn(data):
    dtypes = st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1, max_size=3)
    heads = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2))
    batch, queries, dim = (data.draw(x) for x in (st.integers(1, 3), st.integers(1, 9), st.sampled_from([8, 40, 64])))
    check(
        drawn(
            data.draw(st.integers(1, 5)), (batch, queries, *heads, dim), tuple(data.draw(dtypes)),
            tuple(data.draw(st.lists(st.sampled_from(["float32", "float64"]), min_size=1, max_size=2))),
            data.draw(st.sampled_from([0.0, 0.3, 1.0])), seed=data.draw(st.integers(0, 99)),
        ),
        data.draw(st.sampled_from(["float32", "bfloat16"])),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ the public function


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize(
    "case", [c for c in cases.merge_cases() if c.shape[-1] % 8 == 0 and c.name != "merge-groups"], ids=str
)
def test_shared_cases(case, as_list, monkeypatch):
    monkeypatch.setattr(pk, "merge_attentions", functools.partial(merge_on, "interpret"))
    checks.check_merge(frontend, case, as_list, seed=6)


def loss(merge, write_lse):
    def f(outs, lses):
        out, lse = merge(outs, lses, write_lse)
        weights = jnp.arange(out.size, dtype=out.dtype).reshape(out.shape) / out.size
        found = (out * weights).sum()
        return found if lse is None else found + (jnp.where(jnp.isfinite(lse), lse, 0) ** 2).sum()

    return f


@pytest.mark.parametrize("write_lse", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_are_those_of_plain_xla(stacked, write_lse):
    given = drawn(3, (2, 3, 4, 16), lse_dtypes=("float64",), seed=7)
    outs, lses = (jnp.stack(x) if stacked else x for x in (given.outs, given.lses))
    got, want = (
        jax.jit(jax.grad(loss(functools.partial(merge_on, backend), write_lse), (0, 1)))(outs, lses)
        for backend in ("interpret", "plain")
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        checks.close(frontend.numpy(a), frontend.numpy(b), 1e-5, 1e-5)


def test_gradients_of_some_operands_and_of_gradients():
    given = drawn(2, (1, 2, 3, 8), empty=0.0, seed=8)
    f = lambda merge: lambda x: loss(merge, True)([given.outs[0], x], given.lses)  # noqa: E731
    interpreted, plain = (f(functools.partial(merge_on, backend)) for backend in ("interpret", "plain"))
    x = given.outs[1]
    checks.close(frontend.numpy(jax.grad(interpreted)(x)), frontend.numpy(jax.grad(plain)(x)), 1e-6, 1e-6)
    second = lambda f: jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())(x)  # noqa: E731
    checks.close(frontend.numpy(second(interpreted)), frontend.numpy(second(plain)), 1e-6, 1e-6)


def test_vmap():
    given = [drawn(2, (1, 3, 2, 32), empty=0.0, seed=seed) for seed in (9, 10)]
    outs, lses = (jnp.stack([jnp.stack(x) for x in xs]) for xs in zip(*((g.outs, g.lses) for g in given)))
    out, lse = jax.vmap(functools.partial(merge_on, "interpret"))(outs, lses)
    for n, g in enumerate(given):
        checks.close(frontend.numpy(out[n]), g.want[0], *ALL["float32"])
        checks.close(frontend.numpy(lse[n]), g.want[1], *LSE["float32"])


# ------------------------------------------------------------------------------------------------- refusals

DESCRIBED = Merge((2, 3, 4, 64), ("float32",) * 2, ("float32",) * 2, False, False, "float32", True)


@pytest.mark.parametrize(
    "change,reason",
    [
        (dict(chunk_dtypes=("float32", "float64")), "chunks of float32, float64"),
        (dict(lse_dtypes=("bfloat16",) * 2), "LSEs of bfloat16"),
        (dict(out_dtype="float64"), "output dtype"),
        (dict(shape=(2, 3, 4, 12)), "head_dim 12"),
        (dict(shape=(2, 3, 4, 520)), "head_dim 520"),
        (dict(shape=(2, 0, 4, 64)), "empty"),
        (dict(chunk_dtypes=("float32",) * 65, lse_dtypes=("float32",) * 65), "a list of 65 chunks"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_reasons_for_refusal(change, reason):
    assert DESCRIBED.unsupported() == []
    (text,) = dataclasses.replace(DESCRIBED, **change).unsupported()
    assert text.startswith(reason) and "accepted" in text


def test_backends_by_name():
    given = drawn(2, (1, 2, 3, 12), empty=0.0)
    with pytest.raises(UnsupportedError, match="head_dim 12"):
        merge_on("interpret", given.outs, given.lses)
    if jax.default_backend() == "cpu":
        with pytest.raises(UnsupportedError, match="no GPU"):
            merge_on("hopper", given.outs, given.lses)


# ------------------------------------------------------------------------------------------------- lowering

DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 120, 128, 160, 192, 256, 320, 384, 448, 512)
ROWS = ((2, 1, 8), (3, 1, 5), (2, 70, 3), (2, 3, 13), (1, 129, 1), (4, 64, 32), (1, 2, 1), (64, 128, 1))
DTYPES = (
    ("float32",), ("bfloat16",), ("float16",), ("float32", "bfloat16"), ("bfloat16", "float16"),
    ("float16", "float32", "bfloat16"),
)  # fmt: skip
LSE_DTYPES = (("float32",), ("float64",), ("float32", "float64"))


def lowering_cases():
    """Every dim with every second kind of rows; dtypes, numbers of chunks, forms, outputs and counting in turn."""
    forms = [(True, True), (False, False), (True, False), (False, True)]
    outs = ("float32", "bfloat16", "float16")
    turns = list(itertools.product((1, 2, 4, 7, 16, 20), DTYPES, LSE_DTYPES, forms, outs))
    for case, (dim, rows) in enumerate(itertools.product(DIMS, ROWS)):
        if (case + case // len(ROWS)) % 2:
            yield dim, rows, *turns[case * 211 % len(turns)], case % 3 == 0
    for case, (dtypes, lse_dtypes) in enumerate(itertools.product(DTYPES, LSE_DTYPES)):
        yield 128, (3, 1, 6), 3, dtypes, lse_dtypes, (False, False), outs[case % 3], False
    yield 128, (2, 1, 32), MOST_OPERANDS, ("float32", "bfloat16"), ("float64",), (False, False), "float32", False
    yield 128, (2, 1, 32), 1000, ("float32",), ("float64",), (True, True), "float32", False


def kernel_of(dim, rows, n, dtypes, lse_dtypes, stacked, out, counted):
    take = lambda kinds, one: tuple(kinds[0] if one else kinds[i % len(kinds)] for i in range(n))  # noqa: E731
    call = Merge((*rows, dim), take(dtypes, stacked[0]), take(lse_dtypes, stacked[1]), *stacked, out, n != 7)
    assert call.unsupported() == []
    return call.kernel(rows[0] if counted else None)


@pytest.mark.parametrize("dim,rows,n,dtypes,lse_dtypes,stacked,out,counted", list(lowering_cases()))
def test_lowers_for_cuda_without_a_gpu(dim, rows, n, dtypes, lse_dtypes, stacked, out, counted):
    kernel = kernel_of(dim, rows, n, dtypes, lse_dtypes, stacked, out, counted)
    made = program(kernel)
    (launch,) = made.launches
    structs = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in map(made.buffer, launch.reads)]
    text = jax.jit(launch.kernel.build()).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_the_jitted_function_is_one_kernel_and_reshapes():
    struct = jax.ShapeDtypeStruct
    stacks = struct((4, 8, 64, 2, 8, 128), "float32"), struct((4, 8, 2, 8, 64), "float64")
    lists = [struct((8, 64, 16, 128), d) for d in ("float32", "bfloat16")], [struct((8, 16, 64), "float64")] * 2
    for split in (stacks, lists):

        def merge(outs, lses):
            call, attn, lse = described(outs, lses)
            kernel = call.kernel()
            out, merged = kernel.build()(*(x.reshape(t.shape) for x, t in zip((*attn, *lse), kernel.in_types)))
            return out.reshape(call.shape), merged.reshape(call.lse_shape)

        text = jax.jit(merge).trace(*split).lower(lowering_platforms=("cuda",)).as_text()
        operations = {word.split("(")[0] for word in text.split() if word.startswith("stablehlo.")}
        assert operations <= {"stablehlo.custom_call", "stablehlo.reshape"}, operations
        assert text.count("stablehlo.custom_call") == 1


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("vector_dtype", ["float32", "bfloat16"])
def test_tiles_cover_lines_once_and_threads_load_16_bytes(dim, vector_dtype):
    for rows in ROWS:
        kernel = MergeChunks(*rows, dim, (vector_dtype,) * 3, ("float32",) * 3, False, False, "float32", None)
        length = kernel.queries if kernel.along_queries else kernel.heads
        tiles = [(n * kernel.rows, kernel.rows) for n in range(kernel.whole)] + kernel.cuts
        assert [start for start, _ in tiles] + [length] == [0, *np.cumsum([size for _, size in tiles])]
        assert kernel.lines * length == math.prod(rows)
        assert kernel.vector * jnp.dtype(vector_dtype).itemsize == 16 and dim % kernel.columns == 0
