"""Named pieces of work in child processes, so that a hang or a crash costs one piece.

A child is this same command with `--child NAMES --emit FILE`; it appends a JSON line for each step and each result. A
child that dies, or gives no sign for `timeout` seconds, fails the piece it was at; the rest goes to a new child. So
does what follows an exception, which may have left the CUDA context unusable.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
"""What a piece gives; {"failed": text} where it gave nothing."""
At = Callable[[str], None]
"""A sign of life: what the piece is at now."""
PROGRAM = (sys.executable, "-m", "benchmarks")
ROOT = Path(__file__).resolve().parents[1]
RAISED = "raised"
"""Set in a result, it asks for a new child: an exception was caught in the piece."""
_AFTER_EXCEPTION = 3


def add_arguments(parser: argparse.ArgumentParser, timeout: float) -> None:
    parser.add_argument(
        "--timeout", type=float, default=timeout, metavar="S", help=f"without a sign of life, default {timeout:g}"
    )
    parser.add_argument("--child", nargs="+", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--emit", type=Path, default=None, help=argparse.SUPPRESS)


# ------------------------------------------------------------------------------------------------ the child


def serve(names: Sequence[str], emit: Path, one: Callable[[str, At], Result]) -> int:
    """The child's side: `one(name, at)` for each name."""
    with emit.open("a") as file:

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        for name in names:
            say(at="start")
            try:
                result = one(name, lambda step: say(at=step))
            except Exception as error:
                traceback.print_exc()
                say(name=name, result={"failed": brief(error)})
                return _AFTER_EXCEPTION
            ends = result.pop(RAISED, False)
            say(name=name, result=result)
            if ends:
                return _AFTER_EXCEPTION
    return 0


def brief(error: BaseException, length: int = 160) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:length]


# ----------------------------------------------------------------------------------------------- the parent


def run(
    names: Sequence[str],
    command: str,
    options: Sequence[str],
    *,
    timeout: float,
    per_child: int | None,
    jobs: int = 1,
    report: Callable[[str, Result], None] = lambda name, result: None,
    program: Sequence[str] = PROGRAM,
) -> dict[str, Result]:
    """Every name's result, in the order given; `report` is called as they come, by one thread.

    per_child: names that one child serves (None: as many as it survives). jobs: children at a time.
    """
    chunks = [list(names[n::jobs]) for n in range(jobs)]
    arrived: queue.SimpleQueue[tuple[str, Result] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work(left: list[str]) -> None:
        try:
            while left and not stop.is_set():
                mine = left if per_child is None else left[:per_child]
                line = [*program, command, *options]
                served = _child(mine, line, timeout, lambda *pair: arrived.put(pair), stop)
                left = left[served:]
        finally:
            arrived.put(None)

    threads = [threading.Thread(target=work, args=(chunk,)) for chunk in chunks]
    for thread in threads:
        thread.start()
    results: dict[str, Result] = {}
    try:
        working = len(threads)
        while working:
            pair = arrived.get()
            if pair is None:
                working -= 1
                continue
            results[pair[0]] = pair[1]
            report(*pair)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return {name: results.get(name, {"failed": "not run"}) for name in names}


def _child(
    names: list[str], command: list[str], timeout: float, arrived: Callable[[str, Result], None], stop: threading.Event
) -> int:
    """Serve names in one child until it ends; the number of names that have a result."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        emit, log = Path(folder) / "emit", Path(folder) / "log"
        emit.touch()
        line = [*command, "--emit", str(emit), "--child", *names]
        with log.open("wb") as output, emit.open() as events:
            process = subprocess.Popen(
                line, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            served, partial, heard, step, killed = 0, "", time.monotonic(), "start", False
            while True:
                ended = process.poll() is not None
                partial += events.read()
                *lines, partial = partial.split("\n")
                for event in map(json.loads, lines):
                    heard, step = time.monotonic(), event.get("at", step)
                    if "result" in event:
                        served += 1
                        arrived(event["name"], event["result"])
                if ended:
                    break
                if stop.is_set() or time.monotonic() - heard > timeout:
                    killed = True
                    _kill(process)
                time.sleep(0.1)
        if served < len(names) and (process.returncode != _AFTER_EXCEPTION or served == 0):
            ending = f"no sign for {timeout:g} s" if killed else _ending(process.returncode, log)
            arrived(names[served], {"failed": f"at {step}: {ending}"})
            served += 1
    return served


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _ending(status: int, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    end = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"{end}: {lines[-1][:160]}" if lines else end
