"""The card, one process at a time: several may compile meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(lock: Path | None, at: Callable[[str], None]) -> Iterator[None]:
    """Hold the card, as the lock file says; without one it is ours. Signs of life go to `at` meanwhile."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:  # closing it, or the end of the process, lets go
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                at("waiting for the card")
                time.sleep(0.1)
        yield
