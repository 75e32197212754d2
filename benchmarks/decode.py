"""Decode: time of one token a sequence against full caches, beside every installed peer.

A row is timed only for what is right on it: each implementation's output is first compared with float64 on every set
of inputs. Inputs rotate so that the L2 is cold; repeats go round all implementations, so that a drift of the card
meets all alike. A missing peer is one line. Exit status 1 where this library has no time on a row.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import inputs, peers, reference, report, rows, runner, timing
from .report import Measurement, RowResult
from .rows import Row

NAME = "decode"
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
RESULTS = Path(__file__).parent / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="names of rows (shell wildcards), default all")
    parser.add_argument(
        "--peers", nargs="+", metavar="PEER", help=f"of {', '.join(peers.PEERS)}; or none; default all that are there"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="DIR", help="default benchmarks/results")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times that each is timed, default 3")
    parser.add_argument(
        "--in-process", action="store_true", help="all rows in one child process, a new one only after a failure"
    )
    parser.add_argument("--list", action="store_true", help="print the rows' names and end")
    runner.add_arguments(parser, timeout=120)


def main(arguments: argparse.Namespace) -> int:
    try:
        chosen, names = rows.choose(rows.DECODE, arguments.rows), peers.choose(arguments.peers)
    except ValueError as error:
        print(f"benchmarks decode: {error}", file=sys.stderr)
        return 2
    table = {row.name: row for row in chosen}
    if arguments.list:
        print("\n".join(table))
        return 0
    repeat = max(1, arguments.repeat)
    if arguments.child:
        everything = {row.name: row for row in rows.DECODE}
        one = lambda name, at: measure(everything[name], names, repeat, at).to_json()  # noqa: E731
        return runner.serve(arguments.child, arguments.emit, one)
    others = [name for name in names if name not in peers.OURS]
    per_child = None if arguments.in_process else 1

    def run(chosen: Sequence[str], others: Sequence[str]) -> dict[str, runner.Result]:
        options = ["--repeat", str(repeat), "--peers", *(others or ["none"])]
        return runner.run(chosen, NAME, options, timeout=arguments.timeout, per_child=per_child, report=_progress)

    results = []
    for name, data in run(list(table), others).items():
        # A peer that takes the process along costs its own column, not the row.
        culprit = next((p for p in others if re.match(rf"at (timing )?{p}:", data.get("failed") or "")), None)
        if culprit is not None:
            why = data["failed"]
            data = run([name], [p for p in others if p != culprit])[name]
        failed = data.get("failed")
        result = RowResult(table[name], failed=failed) if failed else RowResult.from_json(data)
        if culprit is not None:
            result.measurements[culprit] = Measurement(note=runner.brief(RuntimeError(why)))
        results.append(result)
    markdown = report.decode_markdown(results, names)
    print(markdown)
    data = {"repeat": repeat, "names": names, "rows": [r.to_json() for r in results]}
    print(f"written: {report.write(arguments.json, NAME, data, markdown)} and .md")
    return 1 if any(_untimed(result) for result in results) else 0


def _untimed(result: RowResult) -> bool:
    """Whether this library has no time on a row."""
    return any(name not in result.measurements or result.measurements[name].us is None for name in peers.OURS)


def _progress(name: str, data: runner.Result) -> None:
    times = {n: m["us"] for n, m in data.get("measurements", {}).items() if m["us"] is not None}
    text = data.get("failed") or ", ".join(f"{n} {us:.1f} us" for n, us in times.items()) or "nothing timed"
    print(f"{name}: {text}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------- one row


class _Contestant:
    """An implementation that is right on a row, ready to be timed."""

    def __init__(self, name: str, row: Row, torch_sets: Sequence[inputs.Dense], jax_sets: Callable[[], Any]) -> None:
        adapter = peers.adapter(name)
        self.jax = adapter.FRAMEWORK == "jax"
        sets = jax_sets() if self.jax else torch_sets
        self.arguments = [adapter.prepare(row, given) for given in sets]
        if self.jax:
            import jax

            self.call: Callable[..., Any] = jax.jit(adapter.run)
        else:
            self.call = adapter.run

    def outputs(self) -> list[Any]:
        """Of every set, as torch tensors on the host."""
        import numpy as np
        import torch

        results = [self.call(*arguments) for arguments in self.arguments]
        if not self.jax:
            return [x.detach().double().cpu() for x in results]
        return [torch.from_numpy(np.asarray(x).astype(np.float64)) for x in results]

    def time(self) -> tuple[float, timing.Kernels | None]:
        import torch

        if not self.jax:
            return timing.torch_us(self.call, self.arguments), None
        torch.cuda.synchronize()
        _, calls = timing.jax_kernels(self.call, self.arguments)
        if not calls[0]:
            raise RuntimeError("the profiler saw no kernel")
        return timing.total_us(calls), timing.median_kernels(calls)

    def host_us(self) -> float:
        import jax
        import torch

        arguments = self.arguments[0]
        wait = (lambda: jax.block_until_ready(self.call(*arguments))) if self.jax else torch.cuda.synchronize
        return timing.host_us(lambda: self.call(*arguments), wait)


def measure(
    row: Row, names: Sequence[str], repeat: int, at: runner.At = lambda step: None, device: str = "cuda"
) -> RowResult:
    """Check and time the named implementations on a row."""
    import torch

    result = RowResult(row, timing.copy_tb_s())
    torch.cuda.empty_cache()  # JAX allocates from the same card
    result.sets = 1 if row.host else timing.sets_needed(row.kv_bytes)
    torch_sets = [inputs.of_row(row, seed, device) for seed in range(result.sets)]
    want = [_expected(given).cpu() for given in torch_sets]
    torch.cuda.empty_cache()
    shared: list[inputs.Dense] = []

    def jax_sets() -> list[inputs.Dense]:
        if not shared:
            shared.extend(inputs.shared_with_jax(given) for given in torch_sets)
        return shared

    ready: dict[str, _Contestant] = {}
    for name in names:
        found = result.measurements[name] = Measurement()
        adapter = peers.adapter(name)
        at(name)
        found.note = adapter.available() or adapter.refuses(row)
        if found.note is not None:
            continue
        try:
            contestant = _Contestant(name, row, torch_sets, jax_sets)
            pairs = zip(contestant.outputs(), want)
            found.error = max_error([reference.relative_error(got.reshape(x.shape), x) for got, x in pairs])
        except Exception as error:
            found.note = runner.brief(error)
            continue
        if found.error <= TOLERANCE[row.dtype]:
            ready[name] = contestant
        else:
            found.note = f"wrong, so not timed: relative error {found.error:.1e}"
    for _ in range(repeat):
        for name, contestant in list(ready.items()):
            found = result.measurements[name]
            at(f"timing {name}")
            try:
                us, found.kernels = contestant.time()
                found.repeats.append(us)
            except Exception as error:
                found.note = f"timing: {runner.brief(error)}"
                found.repeats.clear()
                del ready[name]
    for name, contestant in ready.items():
        found = result.measurements[name]
        found.us = statistics.median(found.repeats)
        if row.host:
            found.host_us = contestant.host_us()
    return result


def max_error(found: Sequence[float]) -> float:
    """The largest; NaN where one is NaN."""
    return max(found, key=lambda x: float("inf") if x != x else x)


def _expected(given: inputs.Dense) -> Any:
    import torch

    return torch.stack([reference.attention(q, k, v)[0] for q, k, v in zip(given.q, given.k, given.v)])
