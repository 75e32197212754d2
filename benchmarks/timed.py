"""The commands that time rows beside every installed peer: one harness, a table of rows each.

A peer that is missing, or cannot serve a row, is one line. Exit status 1 where this library has no time on a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import contest, peers, plot, report, rows, runner
from .report import Measurement, RowResult
from .rows import AnyRow

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Timed:
    """A command. rows: of one kind."""

    NAME: str
    rows: Sequence[AnyRow]
    __doc__: str

    @property
    def kind(self) -> str:
        return self.rows[0].kind

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        known = ", ".join(peers.PEERS[self.kind])
        parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="names of rows (shell wildcards), default all")
        parser.add_argument(
            "--peers", nargs="+", metavar="PEER", help=f"of {known}; or none; default all that are there"
        )
        parser.add_argument("--json", type=Path, default=RESULTS, metavar="DIR", help="default benchmarks/results")
        parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times that each is timed, default 3")
        parser.add_argument(
            "--in-process", action="store_true", help="a child process for all rows, a new one only after a failure"
        )
        parser.add_argument(
            "--jobs", type=int, default=1, metavar="N", help="children that compile at a time; one at a time is timed"
        )
        parser.add_argument("--list", action="store_true", help="print the rows' names and end")
        parser.add_argument("--lock", type=Path, default=None, help=argparse.SUPPRESS)
        parser.add_argument("--names", nargs="+", default=None, help=argparse.SUPPRESS)
        runner.add_arguments(parser, timeout=120)

    def main(self, arguments: argparse.Namespace) -> int:
        try:
            chosen, names = rows.choose(self.rows, arguments.rows), peers.choose(arguments.peers, self.kind)
        except ValueError as error:
            print(f"benchmarks {self.NAME}: {error}", file=sys.stderr)
            return 2
        table = {row.name: row for row in chosen}
        if arguments.list:
            print("\n".join(table))
            return 0
        repeat = max(1, arguments.repeat)
        if arguments.child:

            def one(name: str, at: runner.At) -> runner.Result:
                return contest.measure(table[name], arguments.names, repeat, at, lock=arguments.lock).to_json()

            return runner.serve(arguments.child, arguments.emit, one)
        results = self._run(table, names, repeat, arguments)
        markdown = report.markdown(results, names)
        print(markdown)
        data = {"repeat": repeat, "names": names, "rows": [r.to_json() for r in results]}
        written = report.write(arguments.json, self.NAME, data, markdown)
        print(f"written: {written} and .md; {plot.draw(results, names, written.with_suffix('.svg'))}")
        return 1 if any(_untimed(result) for result in results) else 0

    def _run(
        self, table: dict[str, AnyRow], names: Sequence[str], repeat: int, arguments: argparse.Namespace
    ) -> list[RowResult]:
        jobs = max(1, min(arguments.jobs, len(table)))
        with tempfile.TemporaryDirectory() as folder:
            lock = ["--lock", str(Path(folder) / "lock")] if jobs > 1 else []

            def run(chosen: Sequence[str], names: Sequence[str]) -> dict[str, runner.Result]:
                options = ["--repeat", str(repeat), *lock, "--names", *names]
                per_child = None if arguments.in_process else 1
                return runner.run(
                    chosen,
                    self.NAME,
                    options,
                    timeout=arguments.timeout,
                    per_child=per_child,
                    jobs=min(jobs, len(chosen)),
                    report=_progress,
                )

            results = []
            for name, data in run(list(table), names).items():
                # An implementation that takes the process along costs its own column, not the row.
                left, why = list(names), {}
                while len(left) > 1 and (culprit := _culprit(data, left)) is not None:
                    why[culprit] = data["failed"]
                    left.remove(culprit)
                    data = run([name], left)[name]
                failed = data.get("failed")
                result = RowResult(table[name], failed=failed) if failed else RowResult.from_json(data)
                result.measurements |= {culprit: Measurement(note=text[:160]) for culprit, text in why.items()}
                results.append(result)
        return results


def _culprit(data: runner.Result, names: Sequence[str]) -> str | None:
    """The implementation that a row failed at."""
    failed = data.get("failed") or ""
    return next((name for name in names if re.search(rf"\bat (timing )?{name}: ", failed)), None)


def _untimed(result: RowResult) -> bool:
    """Whether this library has no time on a row."""
    return any(name not in result.measurements or result.measurements[name].us is None for name in peers.OURS)


def _progress(name: str, data: runner.Result) -> None:
    times = {n: m["us"] for n, m in data.get("measurements", {}).items() if m["us"] is not None}
    text = data.get("failed") or ", ".join(f"{n} {us:.1f} us" for n, us in times.items()) or "nothing timed"
    print(f"{name}: {text}", file=sys.stderr, flush=True)


_HOW = """

Every implementation's output is first compared with float64, on every set of inputs. A missing peer is one line. Exit
status 1 where this library has no time on a row."""

COMMANDS = (
    Timed("decode", rows.DECODE, "Time of one query token a sequence over full caches." + _HOW),
    Timed("ragged", rows.RAGGED, "Time of decoding with lengths that differ, and with fixed splits." + _HOW),
    Timed("paged", rows.PAGED, "Time of decoding over pages in random order, beside the same unpaged." + _HOW),
    Timed("multiquery", rows.MULTIQUERY, "Time of a few causal query tokens a sequence." + _HOW),
    Timed("merge", rows.MERGE, "Time of joining partial results." + _HOW),
)
