"""What the benchmarks measure, on a machine without a GPU: references, inputs, the check, one row's contest."""

import dataclasses
import itertools
import json
import types

import numpy as np
import pytest
import torch

from benchmarks import (
    check,
    configs,
    contest,
    inputs,
    peers,
    plot,
    reference,
    report,
    timing,
)
from benchmarks.report import RowResult
from benchmarks.rows import MergeRow, Row

SMALL = Row(2, 64, 4, 2, head_dim=32)


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


def test_rotation_takes_the_sets_in_turn():
    import jax

    rotation = timing.Rotation(jax.jit(lambda x: x), [(1,), (2,), (3,)])
    assert isinstance(rotation, jax.stages.Wrapped)
    assert [int(rotation()) for _ in range(4)] == [1, 2, 3, 1]
