"""Launch constants: what is tried, stored and found again."""

import dataclasses
import json
import sys

import pytest

from benchmarks import (
    inputs,
    machine,
    runner,
    timing,
    tune,
)
from benchmarks.__main__ import main
from benchmarks.rows import Row

SMALL = Row(2, 64, 4, 2, head_dim=32)


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
