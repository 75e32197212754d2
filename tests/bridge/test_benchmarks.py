"""The benchmark harness on a machine without a GPU: command line, tables, runner, references."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import check, configs, decode, inputs, machine, peers, reference, report, rows, runner, timing
from benchmarks.__main__ import main
from benchmarks.report import Measurement, RowResult
from benchmarks.rows import Row

ROOT = Path(__file__).parents[2]
SMALL = Row(2, 64, 4, 2, head_dim=32)


# ------------------------------------------------------------------------------------------- the command line


def command(*arguments):
    """`python -m benchmarks` where no GPU is visible."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [(), ("check",), ("decode",)])
def test_help(arguments):
    done = command(*arguments, "--help")
    assert done.returncode == 0
    assert "usage: python -m benchmarks" in done.stdout
    assert "--child" not in done.stdout


@pytest.mark.parametrize("arguments", [("check",), ("check", "--quick"), ("decode", "--rows", "b1-*")])
def test_without_a_gpu(arguments):
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"benchmarks \w+: needs an NVIDIA GPU, and none is visible here\n", done.stderr)


def test_list():
    assert command("decode", "--list").stdout.split() == [row.name for row in rows.DECODE]
    assert len(command("check", "--list", "--quick").stdout.split()) == 6


# ----------------------------------------------------------------------------------------------- rows, tables


def test_bytes_of_rows():
    sizes = {row.name: row.kv_bytes for row in rows.DECODE}
    assert sizes["b1-8192-32-8-d128"] == 2 * 8192 * 8 * 128 * 2 == 33_554_432
    assert sizes["b32-4096-32-32-d128"] == 2**31
    assert sizes["b16-8192-32-8-d64"] == 2**28
    assert len(sizes) == len(rows.DECODE)


def test_choice_of_rows():
    assert rows.choose(rows.DECODE, None) == list(rows.DECODE)
    assert [row.keys for row in rows.choose(rows.DECODE, ["b1-8192-*", "b1-3*"])] == [8192, 32768]
    with pytest.raises(ValueError, match="no row is named 'b7'"):
        rows.choose(rows.DECODE, ["b7", "b1-*"])


def test_choice_of_peers():
    assert peers.choose(None) == [*peers.OURS, *peers.PEERS]
    assert peers.choose(["none"]) == list(peers.OURS)
    assert peers.choose(["fa3"]) == [*peers.OURS, "fa3"]
    with pytest.raises(ValueError, match="no peer is named fa4"):
        peers.choose(["fa4"])


def test_rates():
    assert report.tb_s(1_073_741_824, 251.0) == pytest.approx(4.278, abs=1e-3)
    assert report.percent_of_copy(4.1, 4.27) == pytest.approx(96.02, abs=1e-2)
    assert timing.sets_needed(33_554_432) * 33_554_432 > 2 * timing.L2_BYTES + 33_554_431
    assert timing.sets_needed(2**31) == 2
    calls = [[("a", 1.0), ("b", 5.0)], [("a", 3.0), ("b", 1.0)], [("a", 2.0), ("b", 2.0)]]
    assert timing.total_us(calls) == 4.0
    assert timing.median_kernels(calls) == [("a", 2.0), ("b", 2.0)]


@pytest.fixture
def results():
    kernels = [("decode", 249.0), ("merge", 2.0)]
    timed = Measurement(us=251.0, repeats=[250.0, 251.0, 252.0], error=1e-3, kernels=kernels)
    first = RowResult(
        Row(32, 8192, 32, 8),
        4.27,
        2,
        {
            "pallas_jax": timed,
            "pallas_torch": Measurement(note="wrong, so not timed: relative error 2.0e-01", error=0.2),
            "mslk": Measurement(note="not installed (mslk)"),
        },
    )
    second = RowResult(Row(1, 256, 32, 8, host=True), 4.2, 1, {
        "pallas_jax": Measurement(us=5.0, repeats=[5.0], error=1e-3, host_us=55.0),
        "pallas_torch": Measurement(us=6.0, repeats=[6.0], error=1e-3, host_us=14.5),
        "mslk": Measurement(note="not installed (mslk)"),
    })
    return [first, second, RowResult(Row(1, 8192, 32, 8), failed="at fa3: SIGSEGV")]


def test_markdown(results):
    text = report.decode_markdown(results, ["pallas_jax", "pallas_torch", "mslk"])
    lines = text.splitlines()
    assert lines[:5] == [
        "| B x Mk, Hq/Hkv | K+V | pallas_jax | pallas_torch |",
        "|---|---|---|---|",
        "| 32 x 8192, 32/8, D 128 | 1.07 GB | 251.0 (4.28, 100 %) | - |",
        "| 1 x 256, 32/8, D 128 | 1 MB | 5.0 (0.21, 5 %) | 6.0 (0.17, 4 %) |",
        "| 1 x 8192, 32/8, D 128 | 34 MB | - | - |",
    ]
    for line in (
        "Missing: mslk: not installed (mslk).",
        "Row b1-8192-32-8-d128: at fa3: SIGSEGV.",
        "Row b32-8192-32-8-d128, pallas_torch: wrong, so not timed: relative error 2.0e-01.",
        "Host time of a call, 1 x 256, 32/8, D 128: pallas_torch 14.5 us.",
        "Copy bandwidth: 4.20 to 4.27 TB/s, read plus written. Largest spread of repeats: 0.8 %.",
    ):
        assert line in lines


def test_json(results, tmp_path):
    path = report.write(tmp_path, "decode", {"rows": [r.to_json() for r in results], "bad": float("nan")}, "a table\n")
    data = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert data["versions"].keys() >= {"python", "jax", "jaxlib", "torch", "numpy"}
    assert data["date"].startswith("20")
    first = data["rows"][0]
    assert first["kv_bytes"] == 2**30
    assert first["measurements"]["pallas_jax"]["percent_of_copy"] == pytest.approx(100.2, abs=0.1)
    assert [RowResult.from_json(row) for row in data["rows"]] == [
        dataclasses.replace(r, measurements={n: _listed(m) for n, m in r.measurements.items()}) for r in results
    ]
    assert path.with_suffix(".md").read_text().endswith("a table\n")


def _listed(measurement):
    """As JSON gives it back: lists for tuples."""
    kernels = measurement.kernels
    return dataclasses.replace(measurement, kernels=None if kernels is None else [list(kernel) for kernel in kernels])


FINE = {"jax_error": 1e-3, "torch_error": 2e-3, "jax_lse_error": 1e-6, "torch_lse_error": 3e-6, "misses": []}
FINE |= {"out_bits_differ": 0, "lse_bits_differ": 0, "kernels": ["a", "b"], "launches": 2}


def test_check_line():
    line = report.check_line("some-call", FINE, 12)
    assert line.split() == ["some-call", "1.0e-03", "2.0e-03", "3.0e-06", "equal", "2", "of", "2"]
    assert len(line.split("equal")[0]) == len(report.check_head(12).split(" bits")[0])
    wrong = report.check_line("some-call", FINE | {"lse_bits_differ": 3, "misses": ["lse: 3 of 8 differ"]}, 12)
    assert "DIFFER" in wrong and wrong.endswith("MISS lse: 3 of 8 differ")
    half = {"jax_error": 1e-3, "jax_lse_error": 1e-6, "misses": ["torch: no"], "kernels": [], "launches": 1}
    assert report.check_line("some-call", half, 12).splitlines()[0].split()[2:] == ["-", "1.0e-06", "-", "0", "of", "1"]
    assert "FAILED at jax: SIGSEGV" in report.check_line("some-call", {"failed": "at jax: SIGSEGV"}, 12)


# ------------------------------------------------------------------------------------------------ the runner

CHILD = """
import os, sys, time
from pathlib import Path
from benchmarks import runner

def one(name, at):
    at("step of " + name)
    if name == "crash":
        os.abort()
    if name == "quit":
        print("the last words")
        sys.exit(7)
    if name == "hang":
        time.sleep(600)
    if name == "raise":
        raise ValueError("first line\\nsecond line")
    return {"pid": os.getpid(), **({"raised": True} if name == "a" else {})}

start = sys.argv.index("--child")
sys.exit(runner.serve(sys.argv[start + 1 :], Path(sys.argv[start - 1]), one))
"""


@pytest.mark.parametrize(("per_child", "jobs"), [(None, 1), (1, 1), (None, 3)])
def test_a_failure_costs_one_piece(per_child, jobs, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    names = ["a", "crash", "b", "hang", "raise", "c", "quit", "d"]
    reported = []
    results = runner.run(
        names,
        "some",
        [],
        timeout=3,
        per_child=per_child,
        jobs=jobs,
        report=lambda name, result: reported.append(name),
        program=(sys.executable, str(script)),
    )
    assert list(results) == names and sorted(reported) == sorted(names)
    assert results["crash"]["failed"].startswith("at step of crash: SIGABRT")
    assert results["hang"] == {"failed": "at step of hang: no sign for 3 s"}
    assert results["raise"] == {"failed": "ValueError: first line"}
    assert results["quit"] == {"failed": "at step of quit: exit status 7: the last words"}
    children = {results[name]["pid"] for name in "abcd"}
    if jobs == 1:
        assert len(children) == 4  # after each failure, and with per_child=1 always, a new one
    assert "raised" not in results["a"]


# ------------------------------------------------------------------------------------- references and inputs


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [0, 1, 3, 50])
def test_reference(causal, keys):
    make = torch.Generator().manual_seed(keys)
    q = torch.randn(4, 6, 16, generator=make, dtype=torch.float64)
    k, v = torch.randn(2, keys, 2, 16, generator=make, dtype=torch.float64)
    out, lse = reference.attention(q, k, v, causal=causal, block=7)
    for i, h in itertools.product(range(4), range(6)):
        seen = max(0, min(keys, i + keys - 4 + 1)) if causal else keys
        scores = k[:seen, h // 3] @ q[i, h] / 4
        torch.testing.assert_close(out[i, h], scores.softmax(0) @ v[:seen, h // 3])
        torch.testing.assert_close(lse[i, h], torch.logsumexp(scores, 0))


def test_relative_error():
    assert reference.relative_error(torch.ones(4), torch.full((4,), 2.0)) == 0.5
    assert reference.relative_error(torch.zeros(4), torch.zeros(4)) == 0.0
    assert np.isnan(reference.relative_error(torch.full((4,), torch.nan), torch.ones(4)))
    assert np.isnan(decode.max_error([0.5, float("nan"), 1.0])) and decode.max_error([0.5, 1.0]) == 1.0


def test_configs_cover():
    chosen = configs.default()
    assert len(chosen) <= 30 and len({c.name for c in chosen}) == len(chosen)
    assert {c.group for c in chosen} == set(configs.GROUPS)
    values = [
        ((c.storage, c.page_size), c.head_dim, c.dtype, c.tokens, (c.num_splits, c.split_size), c.kv_heads)
        for c in chosen
    ]
    for a, b in itertools.combinations(range(len(configs.FACTORS)), 2):
        met = {(v[a], v[b]) for v in values}
        assert met >= set(itertools.product(configs.FACTORS[a], configs.FACTORS[b]))
    assert {c.storage for c in configs.quick()} == {"dense", "padded", "paged"} and len(configs.quick()) == 6
    assert {0, 1, chosen[0].keys} <= set(chosen[0].lengths())


@pytest.mark.parametrize("number", range(6))
def test_check_of_the_plain_backend(number):
    """The same calls on the CPU: inputs, masks and references fit each other."""
    config = configs.quick()[number]
    if config.page_size is None:
        config = dataclasses.replace(config, keys=min(config.keys, 1000))
    assert check.one(config, device="cpu", backend="chunked")["misses"] == []


def test_poison_is_where_nothing_may_be_read():
    config = next(c for c in configs.quick() if c.page_size == 64)
    case = inputs.of_config(config, device="cpu")
    pages = case.k.reshape(-1, config.page_size, config.kv_heads, config.head_dim)
    real = sum(config.lengths())
    assert (~pages.isnan()).sum() == real * config.kv_heads * config.head_dim
    entries = case.table.flatten().tolist()
    assert {-1, 2**31 - 1, -(2**31), len(pages)} <= set(entries)


@pytest.mark.parametrize("spoil", ["out", "nan", "lse", "empty"])
def test_check_sees_what_is_wrong(spoil):
    config = configs.quick()[0]
    case = inputs.of_config(config, device="cpu")
    want = [reference.attention(*sequence) for sequence in case.sequences]
    out = torch.cat([o for o, _ in want]).float().numpy()
    lse = torch.cat([l for _, l in want]).float().numpy()
    assert check.errors(config, want, out, lse)[2] == []
    where = config.lengths().index({"empty": 0}.get(spoil, config.keys))
    if spoil in ("out", "nan"):
        out[where, 3] *= 2 if spoil == "out" else np.nan
    elif spoil == "lse":
        lse[where, 3] += 1e-2
    else:
        out[where, 3, 5] = 1.0
    misses = check.errors(config, want, out, lse)[2]
    assert len(misses) == 1 and f"sequence {where} ({config.lengths()[where]} keys)" in misses[0]


def test_check_without_a_front_end(monkeypatch):
    def torch_fails(*arguments):
        raise ValueError("not here")

    monkeypatch.setattr(check, "_torch", torch_fails)
    result = check.one(configs.quick()[0], device="cpu", backend="chunked")
    assert result["misses"] == ["torch: ValueError: not here"] and result["jax_error"] < 5e-3 and result["raised"]


# ------------------------------------------------------------------------------------------------- one row


@pytest.fixture
def fake_card(monkeypatch):
    """Timing that needs no card, and adapters: right, wrong, absent, refusing and raising ones."""

    def attention(q, k, v, lengths):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)

    def adapter(name):
        made = types.SimpleNamespace(
            FRAMEWORK="torch",
            available=lambda: None,
            refuses=lambda row: None,
            prepare=lambda row, given: tuple(given),
            run=attention,
        )
        if name == "absent":
            made.available = lambda: "not installed (absent)"
        if name == "refusing":
            made.refuses = lambda row: f"head_dim {row.head_dim}"
        if name == "wrong":
            made.run = lambda *arguments: attention(*arguments) * 1.1
        if name == "raising":
            made.run = lambda *arguments: 1 / 0
        return made

    ticks = itertools.count(10)
    monkeypatch.setattr(peers, "adapter", adapter)
    monkeypatch.setattr(timing, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(timing, "torch_us", lambda call, sets: float(next(ticks)))


def test_only_what_is_right_is_timed(fake_card):
    steps = []
    names = ["right", "wrong", "absent", "refusing", "raising", "also_right"]
    result = decode.measure(SMALL, names, 3, steps.append, device="cpu")
    found = result.measurements
    assert found["right"].repeats == [10, 12, 14] and found["also_right"].repeats == [11, 13, 15]
    assert found["right"].us == 12 and found["right"].error < 5e-3 and found["right"].note is None
    assert found["wrong"].us is None and found["wrong"].note == "wrong, so not timed: relative error 1.0e-01"
    assert [found[name].note for name in ("absent", "refusing", "raising")] == [
        "not installed (absent)",
        "head_dim 32",
        "ZeroDivisionError: division by zero",
    ]
    assert result.sets == timing.sets_needed(SMALL.kv_bytes) and "timing right" in steps
    assert json.loads(json.dumps(result.to_json()))["measurements"]["right"]["tb_s"] == SMALL.kv_bytes / 12 / 1e6


def test_a_jax_implementation(fake_card, monkeypatch):
    import jax

    def adapter(name):
        return types.SimpleNamespace(
            FRAMEWORK="jax",
            available=lambda: None,
            refuses=lambda row: None,
            prepare=lambda row, given: given[:3],
            run=jax.nn.dot_product_attention,
        )

    monkeypatch.setattr(peers, "adapter", adapter)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "jax_kernels", lambda call, sets: (None, [[("a", 3.0), ("b", 1.0)]]))
    found = decode.measure(SMALL, ["some"], 2, device="cpu").measurements["some"]
    assert found.repeats == [4.0, 4.0] and found.kernels == [("a", 3.0), ("b", 1.0)] and found.error < 5e-3


@pytest.fixture
def fake_children(monkeypatch, results):
    """The commands with a card and children that need none."""
    monkeypatch.setattr(machine, "refusal", lambda: None)

    def run(names, command, options, *, report, **_):
        given = {name: {"failed": "at start: SIGSEGV"} for name in names}
        given |= {r.row.name: r.to_json() for r in results if r.row.name in names and not r.failed}
        given |= {name: {**FINE, "misses": []} for name in list(names)[:2] if command == "check"}
        for name in names:
            report(name, given[name])
        return given

    monkeypatch.setattr(runner, "run", run)


def test_decode_from_end_to_end(fake_children, tmp_path, capsys):
    assert main(["decode", "--rows", "b1-256-*", "--json", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "| 1 x 256, 32/8, D 128 | 1 MB | 5.0 (0.21, 5 %) |" in printed.out
    assert printed.err == "b1-256-32-8-d128: pallas_jax 5.0 us, pallas_torch 6.0 us\n"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]
    assert main(["decode", "--rows", "b32-8192-*", "b1-8192-*", "--json", str(tmp_path)]) == 1  # one has no time
    assert main(["decode", "--rows", "none-such"]) == 2


def test_check_from_end_to_end(fake_children, tmp_path, capsys):
    names = [c.name for c in configs.quick()]
    assert main(["check", "--configs", *names[:2], "--json", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "2 of 2 right"
    assert json.loads(next(tmp_path.iterdir()).read_text())["configs"].keys() == set(names[:2])
    assert main(["check", "--quick"]) == 1
    assert "2 of 6 right; missed: " in capsys.readouterr().out
    assert main(["check", "--configs", "none-such"]) == 2


def test_adapters_keep_their_contract():
    for name in (*peers.OURS, *peers.PEERS):
        adapter = peers.adapter(name)
        assert adapter.FRAMEWORK in ("jax", "torch")
        assert adapter.available() is None or isinstance(adapter.available(), str)
        for function in ("refuses", "prepare", "run"):
            assert callable(getattr(adapter, function))
    assert peers.adapter("fa3_jax").refuses(SMALL) == "head_dim 32 (accepted: 128)"
    assert peers.import_reason("no_such_package") == "not installed (no_such_package)"


def test_rotation_takes_the_sets_in_turn():
    import jax

    rotation = timing.Rotation(jax.jit(lambda x: x), [(1,), (2,), (3,)])
    assert isinstance(rotation, jax.stages.Wrapped)
    assert [int(rotation()) for _ in range(4)] == [1, 2, 3, 1]
