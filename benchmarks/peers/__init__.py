"""Everything that a row is timed with, one adapter a file; the first two are this library's.

An adapter is a module with
    FRAMEWORK                "jax" or "torch": what `run` takes, gives and is timed by
    available() -> str|None  why it cannot run at all (not installed, say), or None
    refuses(row) -> str|None why it cannot run a row, or None
    prepare(row, inputs)     the arguments of `run` for one set of inputs (`inputs.Dense`); not timed
    run(*arguments)          the timed call (jitted by the harness for jax); the output [B, tokens, heads, D]
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

OURS = ("pallas_jax", "pallas_torch")
PEERS = ("mslk", "fa3", "flashinfer", "fa3_jax", "cudnn")


def adapter(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def choose(names: Sequence[str] | None) -> list[str]:
    """OURS and the named peers; all without names, none for "none". ValueError for a name that is not one."""
    if names is None:
        return [*OURS, *PEERS]
    wrong = [name for name in names if name not in (*PEERS, "none")]
    if wrong:
        raise ValueError(f"no peer is named {', '.join(wrong)}; peers: {', '.join(PEERS)}, none")
    return [*OURS, *(name for name in PEERS if name in names)]


def import_reason(module: str) -> str | None:
    """Why a module cannot be imported, in one line, or None."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"not installed ({error.name})"
    except Exception as error:  # whatever a half-installed package raises
        return f"{module} cannot be imported: {type(error).__name__}: {error}"[:160]
    return None
