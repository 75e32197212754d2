"""Compiling ahead: a warmed-up process compiles nothing more, a serving trace compiles little, modules outlive it."""

import ctypes
import os
import random
import subprocess
import sys
import timeit
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from fake_card import Card

import bridge
from bridge import _mosaic, _warmup, cache, doctor, launch
from bridge.fmha import attn_bias
from pallas_kernels.errors import ArgumentError, DeviceError, StaticArgumentError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
PAGE, PAGES, MOST = 64, 640, 32768


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(_warmup, "_card", lambda device: torch.device("cpu"))
    return Card().install(monkeypatch)


def step(rng, heads, kv_heads, dim=64, most_batch=256):
    """A decode step of a server: its tensors, exactly as many as there are sequences."""
    n = rng.randint(1, most_batch)
    lengths = [rng.randint(1, MOST) for _ in range(n)]
    pool = torch.empty(PAGES, PAGE, kv_heads, dim, dtype=torch.bfloat16)
    q = torch.empty(n, heads, dim, dtype=torch.bfloat16)
    cu, used = torch.arange(n + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = torch.zeros(n, MOST // PAGE, dtype=torch.int32)
    return q, pool, cu, lengths, used, table


@pytest.mark.parametrize("heads, kv_heads", [(32, 8), (8, 1), (16, 16)])
@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"num_splits": 8}, {"split_size": 1024}], ids=str)
def test_a_serving_trace_compiles_at_most_twelve_kernels(card, heads, kv_heads, options):
    rng = random.Random(0)
    for _ in range(1000 if heads == 32 else 200):
        q, pool, cu, lengths, used, table = step(rng, heads, kv_heads)
        bridge.varlen_attn(
            q, pool, pool, cu, None, 1, max(lengths), enable_gqa=True, seqused_k=used, block_table=table,
            window_size=(-1, 0), **options,
        )  # fmt: skip
    compiled = len(card.compiled)
    print(f"{heads}/{kv_heads} {options}: {compiled} kernels")
    assert compiled <= 12
    mask = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1] * len(lengths), lengths, table, PAGE, device="cpu"
    )
    flat = pool.view(1, -1, *pool.shape[2:])
    bridge.memory_efficient_attention(q[None], flat, flat, mask, **options)
    assert len(card.compiled) == compiled  # the masks' kernels are those of varlen


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}, {"softcap": 3.0, "scale": 0.5}], ids=str)
def test_nothing_is_compiled_after_a_warmup(card, options):
    made = bridge.warmup(
        heads=16, kv_heads=4, head_dim=64, max_length=MOST, batch=(1, 200), page_size=PAGE, pages=PAGES,
        window=(-1, 0), **options,
    )  # fmt: skip
    assert len(made) == len(card.compiled) > 0 and not card.launched
    assert made == bridge.cache_info().kernels
    card.capturing = True  # compiling would raise
    rng = random.Random(1)
    for _ in range(100):
        q, pool, cu, _, used, table = step(rng, 16, 4, most_batch=200)
        bridge.varlen_attn(
            q, pool, pool, cu, None, 1, MOST, enable_gqa=True, seqused_k=used, block_table=table,
            window_size=(-1, 0), **options,
        )  # fmt: skip
    assert bridge.warmup(
        heads=16, kv_heads=4, head_dim=64, max_length=MOST, batch=(3, 150), page_size=PAGE, pages=PAGES,
        window=(-1, 0), **options,
    ) == ()  # fmt: skip


def test_several_tokens_of_padded_slots(card):
    bridge.warmup(heads=8, kv_heads=2, head_dim=64, max_length=128, batch=(1, 40), tokens=(1, 4), dtype=torch.float16)
    compiled, rng = len(card.compiled), random.Random(2)
    for _ in range(60):
        counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 40))]
        q = torch.empty(1, sum(counts), 8, 64, dtype=torch.float16)
        k = torch.empty(1, len(counts) * 128, 2, 64, dtype=torch.float16)
        mask = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(counts, 128, [100] * len(counts), device="cpu")
        bridge.memory_efficient_attention(q, k, k, mask)
    assert len(card.compiled) == compiled


def test_plain_batches_and_partials(card):
    named = dict(heads=8, kv_heads=2, head_dim=64, max_length=256, window=(-1, 0))
    bridge.warmup(batch=(1, 40), plain=True, output_dtype=torch.float32, **named)
    compiled = len(card.compiled)
    for n in range(1, 41):
        q, k = torch.empty(n, 1, 8, 64, dtype=torch.bfloat16), torch.empty(n, 256, 2, 64, dtype=torch.bfloat16)
        bridge.memory_efficient_attention_partial(q, k, k, attn_bias.LowerTriangularFromBottomRightMask())
    assert len(card.compiled) == compiled


def test_wrong_arguments(card):
    named = dict(heads=8, kv_heads=2, head_dim=64, max_length=256, batch=4)
    for error, text, change in (
        (ArgumentError, "page_size, pages", dict(page_size=64)),
        (ArgumentError, "plain", dict(plain=True, page_size=64, pages=4)),
        (ArgumentError, "batch", dict(batch=0)),
        (ArgumentError, "batch", dict(batch=(4, 2))),
        (StaticArgumentError, "batch", dict(batch=2.0)),
        (StaticArgumentError, "heads", dict(heads=8.0)),
        (ValueError, "heads", dict(heads=7)),
        (UnsupportedError, "head_dim", dict(head_dim=24)),
        (UnsupportedError, "dtype", dict(dtype=torch.float32)),
    ):
        with pytest.raises(error, match=text):
            bridge.warmup(**{**named, **change})
    assert not card.compiled


def test_without_a_card_there_is_nothing_to_warm_up():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(DeviceError, match="no CUDA device"):
        bridge.warmup(heads=8, kv_heads=2, head_dim=64, max_length=256, batch=4)


# ------------------------------------------------------------------------------------------------- the disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "kernels"))
    for name in list(os.environ):
        if name.startswith(cache.DEBUGGING):
            monkeypatch.delenv(name)
    return tmp_path / "kernels"


STRUCTS = (jax.ShapeDtypeStruct((4, 8), "bfloat16"),)


def test_a_module_is_lowered_once(folder):
    made = []

    def lower():
        made.append(1)
        return b"module"

    kernel = launch.Launch(None, ("q",), ("out",))  # any dataclass
    assert cache.lowered(kernel, STRUCTS, lower) == (b"module", False)
    assert cache.lowered(kernel, STRUCTS, lower) == (b"module", True)
    other = [jax.ShapeDtypeStruct((4, 9), "bfloat16")]
    assert cache.lowered(kernel, other, lower) == (b"module", False)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(made) == len(files) == 2 and all(path.suffix == ".mlir" for path in files)


def test_a_damaged_file_is_lowered_anew(folder):
    kernel = launch.Launch(None, (), ())
    cache.lowered(kernel, STRUCTS, lambda: b"module")
    (path,) = folder.rglob("*.mlir")
    for content in (b"", path.read_bytes()[:-1], path.read_bytes() + b"x", b"\0" * 64):
        path.write_bytes(content)
        assert cache.lowered(kernel, STRUCTS, lambda: b"module") == (b"module", False)
    assert cache.lowered(kernel, STRUCTS, lambda: b"") == (b"module", True)


@pytest.mark.parametrize("off", ["", "0", "off", "OFF"])
def test_it_can_be_disabled(monkeypatch, off):
    monkeypatch.setenv(cache.ENVIRONMENT, off)
    assert cache.directory() is None and bridge.cache_info().directory is None
    for _ in range(2):
        assert cache.lowered(launch.Launch(None, (), ()), STRUCTS, lambda: b"module") == (b"module", False)


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "file"))
    assert cache.lowered(launch.Launch(None, (), ()), STRUCTS, lambda: b"module") == (b"module", False)


def test_where_it_is_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "pallas-splitk"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == Path.home() / ".cache" / "pallas-splitk"


def test_different_values_have_different_texts():
    values = (1, True, 1.0, "1", None, (1,), ("1",), (1, (2,)), ((1,), 2), (1, 2), launch.Launch(None, (), ("x",)))
    assert len({cache.described(x) for x in values}) == len(values)
    with pytest.raises(TypeError):
        cache.described(object())
    assert cache.lowered(object(), STRUCTS, lambda: b"module") == (b"module", False)


def test_a_second_process_finds_real_kernels(folder):
    code = """
import jax
from bridge import _mosaic, cache, launch
from pallas_kernels.problem import build
from pallas_kernels.program import Target
import jax.numpy as jnp
q, k = jnp.zeros((4, 1, 8, 64), jnp.bfloat16), jnp.zeros((4, 128, 2, 64), jnp.bfloat16)
made, _ = launch.at_capacity(build(q, k, k, num_splits=2)[0], Target((9, 0), 132))
for step in made.launches:
    structs = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in map(made.buffer, step.reads)]
    module, found = cache.lowered(step.kernel, structs, lambda: _mosaic.lower(step.kernel.build(), structs))
    print(found, len(module))
"""
    runs = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=280)
        for _ in range(2)
    ]
    first, second = (run.stdout.split() for run in runs)
    assert first[::2] == ["False", "False"] and second[::2] == ["True", "True"] and first[1::2] == second[1::2]


# ------------------------------------------------------------------------------------------ time on the host


def test_the_doctor_says_what_there_is(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["doctor"])
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for text in (torch.__version__.split("+")[0], jax.__version__, str(folder), "kernels"):
        assert text in printed
    if not torch.cuda.is_available():
        assert "no CUDA device" in printed
        monkeypatch.setattr(sys, "argv", ["doctor", "--host-time"])
        assert doctor.main() == 1


def test_host_time_of_a_call_is_reported(card, monkeypatch):
    """Arguments to launch, with a C function that does nothing in the place of each launch. Reports, asserts nothing
    about time: run with -s. Allocations are those of CPU tensors."""
    pointer, library = ctypes.c_void_p, ctypes.CDLL(None)
    nothing = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, ctypes.c_char_p, ctypes.c_int)(
        ctypes.cast(library.getpid, pointer).value
    )

    def compile(step, inputs, device, tokens):
        owner, function, ordinal = pointer(1), pointer(2), ctypes.c_int(0)
        return lambda stream, buffers: nothing(owner, function, stream, buffers, ordinal)

    monkeypatch.setattr(launch, "_compile", compile)
    q, pool, cu, lengths, used, table = step(random.Random(0), 32, 8, most_batch=1)
    mask = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1], lengths, table, PAGE, device="cpu")
    flat, out = pool.view(1, -1, *pool.shape[2:]), torch.empty_like(q)
    named = dict(enable_gqa=True, seqused_k=used, block_table=table)
    for name, call in {
        "paged mask, one launch": lambda: bridge.memory_efficient_attention(q[None], flat, flat, mask, num_splits=1),
        "paged mask, two launches": lambda: bridge.memory_efficient_attention(q[None], flat, flat, mask),
        "varlen_attn, two launches": lambda: bridge.varlen_attn(q, pool, pool, cu, None, 1, MOST, **named),
        "varlen_attn_out": lambda: bridge.varlen_attn_out(out, q, pool, pool, cu, None, 1, MOST, **named),
    }.items():
        call()
        seconds = min(timeit.repeat(call, number=500, repeat=10))
        print(f"{name}: {seconds / 500 * 1e6:.1f} us")
    assert np.isfinite(seconds) and _mosaic.ARCH == (9, 0)
