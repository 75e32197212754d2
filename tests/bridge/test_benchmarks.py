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

from benchmarks import (
    check,
    configs,
    contest,
    inputs,
    machine,
    peers,
    plot,
    reference,
    report,
    rows,
    runner,
    timed,
    timing,
    tune,
    turns,
)
from benchmarks.__main__ import main
from benchmarks.report import Measurement, RowResult
from benchmarks.rows import MergeRow, Row

ROOT = Path(__file__).parents[2]
SMALL = Row(2, 64, 4, 2, head_dim=32)


# ------------------------------------------------------------------------------------------- the command line


def command(*arguments):
    """`python -m benchmarks` where no GPU is visible."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [(), ("check",), ("merge",)])
def test_help(arguments):
    done = command(*arguments, "--help")
    assert done.returncode == 0
    assert "usage: python -m benchmarks" in done.stdout
    assert "--child" not in done.stdout


@pytest.mark.parametrize("arguments", [("check", "--quick"), ("decode", "--rows", "b1-*"), ("tune",)])
def test_without_a_gpu(arguments):
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"benchmarks \w+: needs an NVIDIA GPU, and none is visible here\n", done.stderr)


def test_list(capsys):
    for command in timed.COMMANDS:
        assert main([command.NAME, "--list"]) == 0
        assert capsys.readouterr().out.split() == [row.name for row in command.rows]
    assert main(["check", "--list", "--quick"]) == 0
    assert len(capsys.readouterr().out.split()) == 6
    assert main(["tune", "--list"]) == 0
    assert len(capsys.readouterr().out.split()) == len(tune.ROWS) > len(rows.DECODE)


# ----------------------------------------------------------------------------------------------- rows, tables


def test_bytes_of_rows():
    for command in timed.COMMANDS:
        assert len({row.name for row in command.rows}) == len({row.label for row in command.rows}) == len(command.rows)
        assert len({row.kind for row in command.rows}) == 1
        assert all(rows.of_fields(json.loads(json.dumps(dataclasses.asdict(row)))) == row for row in command.rows)
    sizes = {row.name: row.bytes_needed for row in rows.DECODE}
    assert sizes["b1-8192-32-8-d128"] == 2 * 8192 * 8 * 128 * 2 == 33_554_432
    assert sizes["b32-4096-32-32-d128"] == 2**31
    assert sizes["b16-8192-32-8-d64"] == 2**28
    assert sizes["b32-8192-32-8-d128-f16"] == 2**30
    # Figures of MSLK's merge: 3.3, 128 and 319 us at 2.64, 2.39 and 3.63 TB/s.
    rates = [report.tb_s(row.bytes_needed, us) for row, us in zip(rows.MERGE, (3.3, 128, 319))]
    assert rates == pytest.approx([2.64, 2.39, 3.63], rel=0.015)


def test_lengths_of_rows():
    for row in (r for r in rows.RAGGED if r.lengths.startswith("fill")):
        counts = row.key_counts()
        assert counts == row.key_counts() and len(counts) == row.batch and min(counts) >= 1
        assert max(counts) == row.keys
        assert sum(counts) / row.batch / row.keys == pytest.approx(float(row.lengths[4:]), abs=1e-3)
    spread, same = (next(r for r in rows.RAGGED if r.page_size and r.lengths == kind) for kind in ("log1024", "full"))
    assert 1024 <= min(spread.key_counts()) < 2048 and 100_000 < max(spread.key_counts()) <= 131072
    assert same.bytes_needed == pytest.approx(spread.bytes_needed, rel=1e-3) and 6e9 < same.bytes_needed < 7e9
    assert Row(3, 9, 2, 1).key_counts() == [9, 9, 9]


def test_names_and_labels():
    row = Row(2, 64, 4, 2, tokens=4, causal=True, dtype="float16", page_size=16, num_splits=3, lengths="fill0.5")
    assert row.name == "b2-64-4-2-d128-f16-fill0.5-page16-q4causal-splits3"
    assert row.label == "2 x 64, 4/2, D 128, f16, mean fill 0.5, page 16, 4 causal queries, num_splits 3"


def test_choice_of_rows():
    assert rows.choose(rows.DECODE, None) == list(rows.DECODE)
    assert [row.keys for row in rows.choose(rows.DECODE, ["b1-8192-*", "b1-3*"])] == [8192, 32768]
    with pytest.raises(ValueError, match="no row is named 'b7'"):
        rows.choose(rows.DECODE, ["b7", "b1-*"])


def test_choice_of_peers():
    for kind, known in peers.PEERS.items():
        assert peers.choose(None, kind) == [*peers.OURS, *known]
        assert peers.choose(["none"], kind) == list(peers.OURS)
    assert peers.choose(["fa3"]) == [*peers.OURS, "fa3"]
    assert peers.choose(["fa3", "mslk"], "merge") == [*peers.OURS, "mslk"]
    with pytest.raises(ValueError, match="no peer is named fa4"):
        peers.choose(["fa4"])


def test_rates():
    assert report.tb_s(1_073_741_824, 251.0) == pytest.approx(4.278, abs=1e-3)
    assert report.percent_of_copy(4.1, 4.27) == pytest.approx(96.02, abs=1e-2)
    assert timing.sets_needed(33_554_432) * 33_554_432 > 2 * timing.L2_BYTES + 33_554_431
    assert timing.sets_needed(2**31) == 2 and timing.sets_needed(6 * 2**30) == 1
    assert [timing.replayed_calls(ms, 3) for ms in (0.01, 0.1, 0.3, 1.0, 50.0)] == [255, 51, 39, 6, 3]
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
    text = report.markdown(results, ["pallas_jax", "pallas_torch", "mslk"])
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
    assert first["bytes"] == 2**30
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
    assert np.isnan(contest.max_error([0.5, float("nan"), 1.0])) and contest.max_error([0.5, 1.0]) == 1.0


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


TINY = (
    SMALL,
    dataclasses.replace(SMALL, dtype="float16"),
    dataclasses.replace(SMALL, batch=4, lengths="fill0.5"),
    dataclasses.replace(SMALL, batch=4, lengths="log8", page_size=8),
    dataclasses.replace(SMALL, page_size=1),
    dataclasses.replace(SMALL, page_size=16, tokens=4, causal=True),
    dataclasses.replace(SMALL, tokens=4, causal=True, lengths="fill0.7"),
    dataclasses.replace(SMALL, split_size=16),
    dataclasses.replace(SMALL, num_splits=3),
    MergeRow(2, 3, 4, 5, head_dim=16),
)
"""One of each sort of row that the commands hold."""


@pytest.fixture
def no_card(monkeypatch):
    """Timing that needs no card: torch takes 10, 11, ... us, JAX 4."""
    ticks = itertools.count(10)

    class Replay:
        def __init__(self, call, sets):
            call(*sets[0])

        def us(self):
            return float(next(ticks))

    monkeypatch.setattr(timing, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(timing, "Replay", Replay)
    monkeypatch.setattr(timing, "sets_needed", lambda count: 2)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "jax_kernels", lambda call, sets: (call(*sets[0]), [[("a", 3.0), ("b", 1.0)]]))


@pytest.mark.parametrize("row", TINY, ids=lambda row: row.name)
def test_every_sort_of_row_on_the_cpu(row, no_card, monkeypatch, tmp_path):
    """Our adapters on the plain backend: inputs, masks, references and both front ends fit each other."""
    real = peers.adapter

    def adapter(name, kind):
        made = real(name, kind)
        if kind == "merge":
            return made
        copy = {key: getattr(made, key) for key in ("FRAMEWORK", "available", "refuses", "prepare")}
        return types.SimpleNamespace(**copy, run=lambda *arguments: made.run(*arguments, backend="chunked"))

    monkeypatch.setattr(peers, "adapter", adapter)
    result = contest.measure(row, peers.OURS, 2, device="cpu")
    jax, torch = (result.measurements[name] for name in peers.OURS)
    assert jax.note is None and torch.note is None
    assert max(jax.error, torch.error) <= contest.TOLERANCE[row.dtype]
    assert jax.repeats == [4.0, 4.0] and jax.kernels == [("a", 3.0), ("b", 1.0)] and torch.repeats == [10.0, 11.0]
    assert RowResult.from_json(json.loads(json.dumps(result.to_json()))).row == row
    table = report.markdown([result], peers.OURS).splitlines()
    assert table[2].startswith(f"| {row.label} | ")
    assert "plot" in plot.draw([result], peers.OURS, tmp_path / "some.svg")


def test_references_see_only_what_is_in_use():
    for row in (r for r in TINY if isinstance(r, Row)):
        given = inputs.of_row(row, 0, "cpu")
        places, want = reference.sample(row, given, 0)
        assert sorted(places) == list(range(row.batch)) and want.shape == row.out_shape
        used = torch.zeros(given.k.shape[:2], dtype=torch.bool)
        for b, count in enumerate(row.key_counts()):
            for j in range(count):
                where = (b, j) if given.table is None else (given.table[b, j // row.page_size], j % row.page_size)
                assert not used[where]  # no page twice
                used[where] = True
        given.k[~used], given.v[~used] = torch.nan, torch.nan
        assert torch.equal(reference.sample(row, given, 0)[1], want)
        b = places[-1]
        given.k[:], given.v[:] = given.k + used[..., None, None], given.v + 1  # and everything that is
        assert not torch.allclose(reference.sample(row, given, 0)[1][places.index(b)], want[places.index(b)])


def test_samples_of_large_rows(monkeypatch):
    monkeypatch.setattr(reference, "MOST_BYTES", 0)
    monkeypatch.setattr(reference, "MOST_MERGED", 2)
    row = dataclasses.replace(SMALL, batch=6, lengths="fill0.4")
    counts, (places, want) = row.key_counts(), reference.sample(row, inputs.of_row(row, 0, "cpu"), 0)
    assert [counts[b] for b in places] == [min(counts), max(counts)] and want.shape == (2, *row.out_shape[1:])
    one = dataclasses.replace(SMALL, batch=1)
    assert reference.sample(one, inputs.of_row(one, 0, "cpu"), 0)[0] == [0]
    merged = MergeRow(2, 3, 4, 5, head_dim=16)
    places, want = reference.sample(merged, inputs.of_row(merged, 0, "cpu"), 0)
    assert len(places) == 2 and want.shape == (2, 4, 16)


def test_reference_of_a_merge():
    row = MergeRow(2, 3, 4, 5, head_dim=16)
    given = inputs.of_row(row, 0, "cpu")
    assert given.lse.dtype == torch.float64 and given.attn.dtype == torch.float32
    places, want = reference.sample(row, given, 0)
    for place, out in zip(places, want):
        b, m = divmod(place, row.queries)
        for h in range(row.heads):
            weights = given.lse[:, b, h, m].exp()
            expected = (weights[:, None] * given.attn[:, b, m, h].double()).sum(0) / weights.sum()
            torch.testing.assert_close(out[h], expected)


@pytest.fixture
def fake_peers(no_card, monkeypatch):
    """Adapters: right, wrong, absent, refusing and raising ones."""

    def attention(row, q, k, v, lengths, table=None):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)

    def not_finite(*arguments):
        out = attention(*arguments)
        out[-1, 0, 0, 0] = torch.nan
        return out

    def adapter(name, kind):
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
        if name == "not_finite":
            made.run = not_finite
        if name == "raising":
            made.run = lambda *arguments: 1 / 0
        return made

    monkeypatch.setattr(peers, "adapter", adapter)


def test_only_what_is_right_is_timed(fake_peers):
    steps = []
    names = ["right", "wrong", "not_finite", "absent", "refusing", "raising", "also_right"]
    result = contest.measure(SMALL, names, 3, steps.append, device="cpu")
    found = result.measurements
    assert list(found) == names
    assert found["right"].repeats == [10, 12, 14] and found["also_right"].repeats == [11, 13, 15]
    assert found["right"].us == 12 and found["right"].error < 5e-3 and found["right"].note is None
    assert found["wrong"].us is None and found["wrong"].note == "wrong, so not timed: relative error 1.0e-01"
    assert [found[name].note for name in ("not_finite", "absent", "refusing", "raising")] == [
        "wrong, so not timed: relative error nan",
        "not installed (absent)",
        "head_dim 32",
        "ZeroDivisionError: division by zero",
    ]
    assert result.sets == 2 and "timing right" in steps
    assert json.loads(json.dumps(result.to_json()))["measurements"]["right"]["tb_s"] == SMALL.bytes_needed / 12 / 1e6


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_a_capture_that_fails_costs_one_cell(fake_peers, monkeypatch, when):
    kind, made = timing.Replay, []

    class Failing(kind):
        def __init__(self, call, sets):
            made.append(self)
            if len(made) == 1 and when == "capture":
                raise RuntimeError("operation not permitted when stream is capturing")
            super().__init__(call, sets)

        def us(self):
            if self is made[0] and when == "replay":
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().us()

    monkeypatch.setattr(timing, "Replay", Failing)
    found = contest.measure(SMALL, ["first", "second"], 2, device="cpu").measurements
    assert found["first"].note == "timing: RuntimeError: operation not permitted when stream is capturing"
    assert found["first"].us is None and found["second"].us == 10.5


def test_a_broken_context_ends_the_row(fake_peers, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match=r"^at some: ValueError: first$"):
        contest.probe("some", ValueError("first"), "cuda")
    contest.probe("some", ValueError("first"), "cpu")


def test_one_process_at_a_time_has_the_card(tmp_path):
    heard = []
    with turns.turn(None, heard.append):
        pass
    lock = tmp_path / "lock"
    script = (
        "import sys, time; from pathlib import Path; from benchmarks.turns import turn\n"
        "with turn(Path(sys.argv[1]), print): print('has it', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(lock)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "has it\n"

    def hear(step):
        heard.append(step)
        if len(heard) == 3:
            other.kill()  # its end lets go of the card

    with turns.turn(lock, hear):
        assert set(heard) == {"waiting for the card"} and len(heard) >= 3
    other.communicate()


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
    assert {path.suffix for path in tmp_path.iterdir()} >= {".json", ".md"}
    assert main(["decode", "--rows", "b32-8192-32-8-d128", "b1-8192-*", "--json", str(tmp_path)]) == 1  # no time
    assert main(["decode", "--rows", "none-such"]) == 2


def test_what_takes_the_process_along_costs_its_column(monkeypatch, tmp_path, capsys):
    asked = []

    def run(chosen, command, options, *, jobs, **_):
        names = options[options.index("--names") + 1 :]
        asked.append((list(chosen), names, "--lock" in options, jobs))
        if "fa3" in names:
            return {name: {"failed": "at timing fa3: SIGSEGV: some text"} for name in chosen}
        if "pallas_torch" in names:
            return {name: {"failed": "RuntimeError: at pallas_torch: illegal"} for name in chosen}
        row = dataclasses.asdict(rows.MULTIQUERY[0])
        one = {name: dataclasses.asdict(Measurement(us=5.0, repeats=[5.0])) for name in names}
        return {name: {"row": row, "measurements": one} for name in chosen}

    monkeypatch.setattr(machine, "refusal", lambda: None)
    monkeypatch.setattr(runner, "run", run)
    name = rows.MULTIQUERY[0].name
    line = ["multiquery", "--rows", name, rows.MULTIQUERY[1].name, "--peers", "fa3", "mslk", "--json", str(tmp_path)]
    assert main([*line, "--jobs", "4"]) == 1  # ours has no time from torch
    ours = list(peers.OURS)
    assert asked[:3] == [
        ([name, rows.MULTIQUERY[1].name], [*ours, "mslk", "fa3"], True, 2),
        ([name], [*ours, "mslk"], True, 1),
        ([name], ["pallas_jax", "mslk"], True, 1),
    ]
    printed = capsys.readouterr().out
    assert "Missing: fa3: at timing fa3: SIGSEGV: some text." in printed
    assert "Missing: pallas_torch: RuntimeError: at pallas_torch: illegal." in printed


def test_children_measure_what_they_are_told(monkeypatch, tmp_path):
    asked = []

    def measure(row, names, repeat, at, lock):
        asked.append((row, names, repeat, lock))
        at("a step")
        return RowResult(row, 4.0, 1, {name: Measurement(us=5.0, repeats=[5.0]) for name in names})

    def search(row, device, repeat, again, seen, at):
        asked.append((row, device, repeat, again))
        return {"key": row.name, "skipped": "stored"}

    monkeypatch.setattr(machine, "refusal", lambda: None)
    monkeypatch.setattr(machine, "gpu", lambda: machine.Gpu("Some Card", (9, 0)))
    monkeypatch.setattr(contest, "measure", measure)
    monkeypatch.setattr(tune, "search", search)
    for command in timed.COMMANDS:
        emit, row = tmp_path / command.NAME, command.rows[-1]
        options = ["--repeat", "2", "--lock", str(tmp_path / "lock"), "--names", "pallas_jax", "mslk"]
        assert main([command.NAME, *options, "--emit", str(emit), "--child", row.name]) == 0
        assert asked.pop() == (row, ["pallas_jax", "mslk"], 2, tmp_path / "lock")
        events = [json.loads(line) for line in emit.read_text().splitlines()]
        assert events[:2] == [{"at": "start"}, {"at": "a step"}]
        assert RowResult.from_json(events[2]["result"]).measurements["mslk"].us == 5.0
    name = tune.ROWS[0].name
    assert main(["tune", "--repeat", "2", "--again", "--emit", str(tmp_path / "tune"), "--child", name]) == 0
    assert asked == [(tune.ROWS[0], "Some Card", 2, True)]


def test_plot(results, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "some.svg"
    assert plot.draw(results, ["pallas_jax", "pallas_torch", "mslk"], path) == "plot: some.svg"
    assert "pallas_jax" in path.read_text() or path.stat().st_size > 1000
    assert plot.draw(results[2:], ["pallas_jax"], path) == "no plot: nothing was timed"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.draw(results, ["pallas_jax"], path) == "no plot: matplotlib is not installed"


def test_check_from_end_to_end(fake_children, tmp_path, capsys):
    names = [c.name for c in configs.quick()]
    assert main(["check", "--configs", *names[:2], "--json", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == "2 of 2 right"
    assert json.loads(next(tmp_path.iterdir()).read_text())["configs"].keys() == set(names[:2])
    assert main(["check", "--quick"]) == 1
    assert "2 of 6 right; missed: " in capsys.readouterr().out
    assert main(["check", "--configs", "none-such"]) == 2


def test_adapters_keep_their_contract():
    names = [(kind, name) for kind, some in peers.PEERS.items() for name in (*peers.OURS, *some)]
    environment = dict(os.environ)
    for kind, name in names:
        adapter = peers.adapter(name, kind)
        assert adapter.FRAMEWORK in ("jax", "torch")
        assert adapter.available() is None or isinstance(adapter.available(), str)
        for function in ("prepare", "run"):
            assert callable(getattr(adapter, function))
        for row in (row for command in timed.COMMANDS if command.kind == kind for row in command.rows):
            why = adapter.refuses(row)
            assert why is None or (isinstance(why, str) and name not in peers.OURS and "\n" not in why)
    assert os.environ.get("TRITON_CACHE_DIR") == environment.get("TRITON_CACHE_DIR")
    mslk, fa3 = peers.adapter("mslk"), peers.adapter("fa3")
    pages = [row for row in rows.PAGED if row.batch == 8]
    assert [mslk.refuses(row) for row in pages] == [None, None, None] + [
        f"pages of {n} (accepted: multiples of 64)" for n in (16, 1)
    ]
    assert fa3.refuses(pages[1]) == "built without pages"
    assert peers.adapter("cudnn").refuses(rows.MULTIQUERY[0]) == "jax.nn aligns causal masks top-left"
    assert peers.adapter("fa3_jax").refuses(SMALL) == "head_dim 32 (accepted: 128)"
    assert peers.import_reason("no_such_package") == "not installed (no_such_package)"


def test_rotation_takes_the_sets_in_turn():
    import jax

    rotation = timing.Rotation(jax.jit(lambda x: x), [(1,), (2,), (3,)])
    assert isinstance(rotation, jax.stages.Wrapped)
    assert [int(rotation()) for _ in range(4)] == [1, 2, 3, 1]


# ------------------------------------------------------------------------------------------------------- tune


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    from pallas_kernels import tuning

    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.read.cache_clear()
    yield tuning
    tuning.read.cache_clear()


def _problem(row):
    from benchmarks.peers import pallas_jax

    given = inputs.shared_with_jax(inputs.of_row(row, 0, "cpu"))
    return tune._problem(row, pallas_jax.prepare(row, given))


def test_constants_are_stored_and_found(tuned):
    problem, other = _problem(SMALL), _problem(dataclasses.replace(SMALL, page_size=16))
    assert tuned.key(problem) == "bfloat16-d32-kv2-g2-slots-auto-b2-m1-keys64" != tuned.key(other)
    assert tuned.stored("Some Card", problem) is None
    path = tuned.path("Some Card")
    tune.store(path, tuned.key(problem), {"stages": 3})
    tune.store(path, tuned.key(other), {"stages": 5})
    assert path.name == "Some-Card.json" and len(list(path.parent.iterdir())) == 1
    tuned.read.cache_clear()
    assert tuned.stored("Some Card", problem) == tuned.Tuning(3)
    with tuned.forced(tuned.Tuning(7)):
        assert tuned.stored("Some Card", problem) == tuned.stored("Any", other) == tuned.Tuning(7)
    assert tuned.stored("Some Card", other) == tuned.Tuning(5)


@pytest.mark.parametrize("dims,most", [((32, 32), 8), ((128, 128), 3), ((256, 256), 3), ((512, 512), 3)])
def test_candidates_are_as_many_stages_as_fit(tuned, dims, most):
    """Tiles of longer heads have fewer keys."""
    found = tuned.candidates(dataclasses.replace(_problem(SMALL), head_dim=dims[0], value_dim=dims[1]))
    assert [t.stages for t in found] == list(range(2, most + 1))


def test_search_takes_the_fastest(tuned, monkeypatch):
    from benchmarks.peers import pallas_jax

    monkeypatch.setattr(timing, "sets_needed", lambda count: 1)
    now = []

    def run(row, q, k, v, where, backend):
        assert backend == "chunked"
        now[:] = [tuned.stored("any", None).stages]  # a forced one needs no problem
        if now[0] == 4:
            raise ValueError("too much shared memory")
        return q * (2 if now[0] == 5 else 1)

    def kernels(call, sets):
        call(*sets[0])
        return None, [[("a", {2: 9.0, 3: 7.0}.get(now[0], 8.0))]]

    monkeypatch.setattr(pallas_jax, "run", run)
    monkeypatch.setattr(timing, "jax_kernels", kernels)
    monkeypatch.setattr(tuned, "candidates", lambda problem: [tuned.Tuning(n) for n in (2, 3, 4, 5, 6)])
    seen, steps = set(), []
    result = tune.search(SMALL, "Some Card", 2, False, seen, steps.append, place="cpu", backend="chunked")
    assert result["constants"] == {"stages": 3} and steps == [f"stages={n}" for n in (2, 3, 4, 5, 6)]
    assert result["us"] == {
        "stages=2": 9.0,
        "stages=3": 7.0,
        "stages=4": "ValueError: too much shared memory",
        "stages=5": "ValueError: other bits than the first candidate's",
        "stages=6": 8.0,
    }
    again = tune.search(SMALL, "Some Card", 2, True, seen, place="cpu", backend="chunked")
    assert again == {"key": result["key"], "skipped": "measured with another row"}
    tune.store(tuned.path("Some Card"), result["key"], {"stages": 3})
    tuned.read.cache_clear()
    assert tune.search(SMALL, "Some Card", 2, False, set(), place="cpu", backend="chunked")["skipped"] == "stored"
    wide = dataclasses.replace(SMALL, heads=4, kv_heads=2, head_dim=40)
    assert "no kernel: head_dim 40" in tune.search(wide, "Some Card", 2, True, set(), place="cpu")["skipped"]


@pytest.mark.parametrize("tqdm", [True, False])
def test_tune_from_end_to_end(tuned, monkeypatch, capsys, tqdm):
    if tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(machine, "refusal", lambda: None)
    monkeypatch.setattr(machine, "gpu", lambda: machine.Gpu("Some Card", (9, 0)))

    def run(names, command, options, *, report, **_):
        assert command == "tune" and options == ["--repeat", "2", "--again"]
        given = [{"key": "a", "constants": {"stages": 3}, "us": {"stages=3": 7.0, "stages=4": "no"}}]
        given += [{"key": "b", "skipped": "stored"}, {"failed": "at stages=4: SIGSEGV"}]
        for name, result in zip(names, given):
            report(name, result)
        return dict(zip(names, given))

    monkeypatch.setattr(runner, "run", run)
    chosen = [row.name for row in tune.ROWS[:3]]
    assert main(["tune", "--rows", *chosen, "--repeat", "2", "--again"]) == 1  # one failed
    assert json.loads(tuned.path("Some Card").read_text()) == {"a": {"stages": 3}}
    printed = capsys.readouterr().err
    for text in ("a: stages=3 of stages=3 7.0 us, stages=4 no", "b: stored", "at stages=4: SIGSEGV"):
        assert text in printed
    assert ("3/3 " in printed) or tqdm
    assert main(["tune", "--rows", "none-such"]) == 2
