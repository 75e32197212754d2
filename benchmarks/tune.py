"""Search the launch constants of the rows' kernels and store the fastest for this kind of card.

Every candidate must give the first one's bits. What is stored already is skipped, so that an interrupted search goes
on where it stopped. Exit status 1 where a row could not be tuned.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import contest, inputs, machine, rows, runner, timing
from .peers import pallas_jax
from .rows import Row

NAME = "tune"
ROWS: tuple[Row, ...] = tuple(
    {row.name: row for row in (*rows.DECODE, *rows.RAGGED, *rows.PAGED, *rows.MULTIQUERY)}.values()
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", help="names of rows (shell wildcards), default all")
    parser.add_argument("--again", action="store_true", help="measure what is stored, too")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times that each is timed, default 3")
    parser.add_argument("--list", action="store_true", help="print the rows' names and end")
    runner.add_arguments(parser, timeout=120)


def main(arguments: argparse.Namespace) -> int:
    try:
        table = {row.name: row for row in rows.choose(ROWS, arguments.rows)}
    except ValueError as error:
        print(f"benchmarks tune: {error}", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(table))
        return 0
    card = machine.gpu()
    device = card.name if card is not None else ""
    if arguments.child:
        seen: set[str] = set()

        def one(name: str, at: runner.At) -> runner.Result:
            return search(table[name], device, arguments.repeat, arguments.again, seen, at)

        return runner.serve(arguments.child, arguments.emit, one)
    from pallas_kernels import tuning

    with _progress(len(table)) as step:

        def keep(name: str, result: runner.Result) -> None:
            if "constants" in result:
                store(tuning.path(device), result["key"], result["constants"])
            step(f"{name}: {_line(result)}")

        options = ["--repeat", str(arguments.repeat), *(["--again"] if arguments.again else [])]
        results = runner.run(list(table), NAME, options, timeout=arguments.timeout, per_child=None, report=keep)
    print(f"stored in {tuning.path(device)}")
    return 1 if any("key" not in result for result in results.values()) else 0


def store(path: Path, key: str, constants: dict[str, int]) -> None:
    """Into a device's file, which is replaced as a whole."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[key] = constants
    new = path.with_suffix(".new")
    new.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    new.replace(path)


def _line(result: runner.Result) -> str:
    if "key" not in result:
        return str(result["failed"])
    if "constants" not in result:
        return f"{result['key']}: {result['skipped']}"
    times = ", ".join(f"{name} {us if isinstance(us, str) else f'{us:.1f} us'}" for name, us in result["us"].items())
    return f"{result['key']}: {_name(result['constants'])} of {times}"


def _name(constants: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in constants.items())


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar where tqdm is installed, else a counter."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        done = 0

        def count(text: str) -> None:
            nonlocal done
            done += 1
            print(f"{done}/{total} {text}", file=sys.stderr, flush=True)

        yield count
        return
    with tqdm(total=total, unit="row") as bar:

        def advance(text: str) -> None:
            bar.write(text, file=sys.stderr)
            bar.update()

        yield advance


# -------------------------------------------------------------------------------------------------- one row


def search(
    row: Row,
    device: str,
    repeat: int,
    again: bool,
    seen: set[str],
    at: runner.At = lambda step: None,
    place: str = "cuda",
    backend: str = "hopper",
) -> runner.Result:
    """Time every candidate: {"key", "constants" of the fastest, "us" of each}, or why the row was skipped.

    seen: keys that this process has measured; several rows may share one.
    """
    import jax
    import numpy as np

    from pallas_kernels import program, tuning

    sets = [inputs.of_row(row, seed, place) for seed in range(timing.sets_needed(row.bytes_needed))]
    arguments = [pallas_jax.prepare(row, inputs.shared_with_jax(given)) for given in sets]
    problem = _problem(row, arguments[0])
    key = tuning.key(problem)
    if key in seen or (not again and key in tuning.read(device)):
        return {"key": key, "skipped": "measured with another row" if key in seen else "stored"}
    reasons = program.unsupported(problem)
    if reasons:
        return {"key": key, "skipped": "no kernel: " + "; ".join(reasons)}
    seen.add(key)
    first: bytes | None = None
    found: dict[str, float | str] = {}
    best: tuple[float, dict[str, int]] | None = None
    for candidate in tuning.candidates(problem):
        constants = dataclasses.asdict(candidate)
        at(_name(constants))
        with tuning.forced(candidate):
            program.program.cache_clear()  # each made a program, and a trace, with other constants
            jax.clear_caches()
            call = jax.jit(functools.partial(pallas_jax.run, row, backend=backend))
            try:
                out = np.asarray(call(*arguments[0])).tobytes()
                if first is not None and out != first:
                    raise ValueError("other bits than the first candidate's")
                times = [timing.total_us(timing.jax_kernels(call, arguments)[1]) for _ in range(max(1, repeat))]
            except Exception as error:
                found[_name(constants)] = runner.brief(error)
                contest.probe(_name(constants), error, place)
                continue
        first = out
        us = found[_name(constants)] = statistics.median(times)
        if best is None or us < best[0]:
            best = (us, constants)
    if best is None:
        return {"failed": f"no candidate ran: {found}"}
    return {"key": key, "constants": best[1], "us": found}


def _problem(row: Row, arguments: tuple[Any, ...]) -> Any:
    from pallas_kernels.problem import build

    q, k, v, where = arguments
    options: dict[str, Any] = {"num_splits": row.num_splits, "split_size": row.split_size}
    if row.page_size is None and not row.causal:
        return build(q, k, v, kv_lengths=where, **options)[0]
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    return build(q, k, v, where, **options)[0]
