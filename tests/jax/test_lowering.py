"""The decode kernels lower for CUDA, which needs no GPU, over everything that a program may ask for; and what is
refused."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import masks
from pallas_kernels.kernels import gather
from pallas_kernels.problem import build
from pallas_kernels.program import HEAD_DIMS, MAX_GROUP, SHARED_MEMORY, Target, program, run, unsupported

HOPPER = Target((9, 0), 132)
PAGE_SIZES = (1, 16, 24, 64, 128, 256)
POLICIES = [{"num_splits": 1}, {"num_splits": 3, "softcap": 30.0}, {"split_size": 256}, {}]
STORAGES = ["full", "dense", "padded", *PAGE_SIZES]


def lowering_cases():
    """Every head_dim with a small and an odd or large group, and every storage with two policies; the rest in turn."""
    yes_or_no = (False, True)
    turns = itertools.cycle(itertools.product(STORAGES, range(4), yes_or_no, yes_or_no))
    for n, dim in enumerate(HEAD_DIMS):
        for group in (4, (1, 24, MAX_GROUP)[n % 3] if dim < 512 else 16):
            storage, policy, counted, partial = next(turns)
            for _ in range(6):  # a stride that shares no factor with the turns
                next(turns)
            storage = 16 if (dim, storage) == (512, 1) else storage  # its keys would not lie in eights
            yield group, dim, ("bfloat16", "float16")[n % 2], storage, policy, counted, partial
    yield 24, 96, "bfloat16", "padded", 3, False, False  # values of one and a half swizzles, staged in many rows
    for n, storage in enumerate(STORAGES):
        for policy in (n % 4, (n + 2) % 4):
            yield 4, 64, "bfloat16", storage, policy, policy > 1, n % 3 == 0


@pytest.mark.parametrize("group,dim,dtype,storage,policy,counted,partial", list(lowering_cases()))
def test_lowers_for_cuda_without_a_gpu(group, dim, dtype, storage, policy, counted, partial):
    problem = described(group, dim, dtype, storage, partial, **POLICIES[policy])
    assert unsupported(problem) == []
    made = program(problem, HOPPER, counted=counted)
    assert 1 <= len(made.launches) <= 2
    for launch in made.launches:
        structs = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in map(made.buffer, launch.reads)]
        with jax.enable_x64(counted or problem.lse_dtype == "float64"):  # torch's are all lowered so
            text = jax.jit(launch.kernel.build()).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 1


def described(group, dim, dtype, storage, partial=False, **options):
    """The problem of 4 sequences of one token, 2 KV heads and 1024 keys ("full": all in use)."""
    heads, found = 2 * group, []
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    if storage in ("full", "dense"):
        q, k = struct(4, 1, heads, dim), struct(4, 1024, 2, dim)
    else:
        rows = 4096 if storage == "padded" else 43 * 4 * storage if storage == 24 else 4096
        q, k = struct(1, 4, heads, dim), struct(1, rows, 2, dim)

    def attend(q, k, v, lengths, table):
        mask = None
        if storage == "padded":
            mask = masks.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1] * 4, 1024, lengths)
        elif storage not in ("full", "dense"):
            mask = masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1] * 4, lengths, table, storage)
        kv_lengths = lengths if storage == "dense" else None
        found.append(build(q, k, v, mask, kv_lengths=kv_lengths, partial=partial, **options)[0])

    pages = jax.ShapeDtypeStruct((4, -(-1024 // (storage if isinstance(storage, int) else 1024))), jnp.int32)
    with jax.enable_x64(partial):
        jax.eval_shape(attend, q, k, k, lengths, pages)
    return found[0]


@pytest.mark.parametrize("dims", [(16, 512), (512, 512), (32, 512), (576, 512), (64, 128), (96, 96)])
def test_gathered_rows_are_copied_whole(dims, monkeypatch):
    """Each thread copies 16 bytes at a time, of at least as many as a tile of keys and one of values have."""
    head_dim, value_dim = dims
    problem = dataclasses.replace(described(4, 128, "bfloat16", 1), head_dim=head_dim, value_dim=value_dim)
    made = program(problem, HOPPER)
    kernel = made.launches[0].kernel
    assert unsupported(problem) == [] and kernel.storage.gathered
    structs = [jax.ShapeDtypeStruct(b.shape, jnp.dtype(b.dtype)) for b in map(made.buffer, kernel.reads)]
    copies, begin = [], gather.nvvm.cp_async_shared_global
    monkeypatch.setattr(gather.nvvm, "cp_async_shared_global", lambda *args: copies.append(begin(*args)))
    jax.jit(kernel.build()).trace(*structs).lower(lowering_platforms=("cuda",))
    assert len(copies) == sum(-(-kernel.work.key_tile * dim * 2 // 16 // 128) for dim in dims)


@pytest.mark.parametrize("storage", ["full", 1])
@pytest.mark.parametrize("dim", [64, 128, 512])
def test_warpgroups_ask_for_no_more_registers_than_the_block_has(dim, storage):
    kernel = program(described(8, dim, "bfloat16", storage), HOPPER).launches[0].kernel
    copying, computing = kernel.registers
    assert kernel.warpgroups > 2
    asked = kernel.shares * (copying + kernel.computing * computing)
    assert asked <= kernel.warpgroups * (65536 // 128 // kernel.warpgroups // 8 * 8)
    assert copying % 8 == computing % 8 == 0 and 24 <= copying < computing <= 256


@pytest.mark.parametrize("batch", [2304, 4096])
def test_two_shares_or_one_fit_beside_the_plan_of_any_batch(batch):
    problem = described(8, 128, "bfloat16", "padded")
    problem = dataclasses.replace(
        problem, batch=batch, queries=batch, slot=1023, max_keys=1023, key_rows=1023 * batch
    )
    assert unsupported(problem) == []
    assert program(problem, HOPPER).launches[0].kernel.shared_memory <= SHARED_MEMORY


@pytest.mark.parametrize("storage", ["full", "dense", "padded"])
def test_the_jitted_function_is_the_programs_kernels_and_nothing_else(storage):
    """With lengths as arguments, the lowered module holds the program's custom calls and reshapes only."""
    packed = storage == "padded"
    shapes = ((1, 4, 32, 128), (1, 4096, 8, 128)) if packed else ((4, 1, 32, 128), (4, 1024, 8, 128))
    q, k = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    mask = None
    if packed:
        starts = masks.SeqLenInfo(jax.ShapeDtypeStruct((5,), jnp.int32))
        mask = masks.BlockDiagonalPaddedKeysMask(starts, masks.PaddedSeqLenInfo(lengths, 1024))

    def attend(q, k, v, mask, lengths):
        problem, operands, layout = build(q, k, v, mask, kv_lengths=lengths)
        out, lse = run(problem, HOPPER, operands)
        return out.reshape(layout.out), lse.reshape(layout.lse)

    given = lengths if storage == "dense" else None
    text = jax.jit(attend).trace(q, k, k, mask, given).lower(lowering_platforms=("cuda",)).as_text()
    operations = {word.split("(")[0] for word in text.split() if word.startswith("stablehlo.")}
    assert operations <= {"stablehlo.custom_call", "stablehlo.reshape"}, operations
    assert text.count("stablehlo.custom_call") == 2


@pytest.mark.parametrize(
    "change,reason",
    [
        (dict(head_dim=48, value_dim=48), "head_dim"), (dict(value_dim=40), "head_dim"), (dict(group=129), "129"),
        (dict(bias=(1, 1, 1, 1, 9)), "9 keys"), (dict(bias=(1, 1, 1, 1, 8), bias_dtype="float64"), "float64 bias"),
        (dict(sinks="float64"), "sinks"),
        (dict(q_dtype="float32", key_format="float32"), "dtype"), (dict(key_format="int4/int32"), "low-bit"),
        (dict(queries=65), "query tokens"), (dict(out_dtype="float8_e4m3fn"), "output"),
        (dict(batch=5000, queries=5000), "5000 sequences"), (dict(head_dim=512, value_dim=512, group=12), "12 query"),
        (dict(head_dim=512, value_dim=512, slot=1023), "in eights"),
        (dict(head_dim=512, value_dim=96), "multiples of 64"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)  # fmt: skip
def test_reasons_for_refusal(change, reason):
    problem = dataclasses.replace(described(4, 128, "bfloat16", "padded"), **change)
    assert any(reason in text for text in unsupported(problem))


def test_more_pieces_than_keys_are_as_many_as_keys():
    problem = described(4, 128, "bfloat16", "padded")
    kept = [dataclasses.replace(problem, **x) for x in (dict(split_size=10**12), dict(num_splits=10**6))]
    policies = [program(p, HOPPER).launches[0].kernel.work.policy for p in kept]
    assert [policies[0].split_size, policies[1].num_splits] == [1024, 1024]
