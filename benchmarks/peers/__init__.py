"""Everything that a row is timed with, one adapter a file; the first two are this library's.

An adapter is a module, here for attention and in `merge/` for merging, with
    FRAMEWORK                "jax" or "torch": what `run` takes, gives and is timed by
    X64                      (jax) True where its 64-bit numbers must stay so; default False
    available() -> str|None  why it cannot run at all (not installed, say), or None
    refuses(row) -> str|None why it cannot run a row, or None
    prepare(row, inputs)     the arguments of `run` for one set of inputs (`inputs.Attention`, `.Merge`); not timed
    run(row, *arguments)     the timed call (jitted by the harness for jax); the output reshapes to `row.out_shape`
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

OURS = ("pallas_jax", "pallas_torch")
PEERS = {
    "attention": ("mslk", "fa3", "flashinfer", "torch_varlen", "fa3_jax", "cudnn", "tokamax", "mslk_jax"),
    "merge": ("mslk", "mslk_jax"),
}
OWN_SPLITS = "fixed splits are this library's"


def adapter(name: str, kind: str = "attention") -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}" if kind == "attention" else f"{__name__}.{kind}.{name}")


def choose(names: Sequence[str] | None, kind: str = "attention") -> list[str]:
    """OURS and the named peers; all without names, none for "none". ValueError for a name that no kind of row knows.

    Those that only another kind of row knows are left out, so that one list serves every command.
    """
    if names is None:
        return [*OURS, *PEERS[kind]]
    known = list(dict.fromkeys(name for some in PEERS.values() for name in some))
    wrong = [name for name in names if name not in (*known, "none")]
    if wrong:
        raise ValueError(f"no peer is named {', '.join(wrong)}; peers: {', '.join(known)}, none")
    return [*OURS, *(name for name in PEERS[kind] if name in names)]


def import_reason(module: str) -> str | None:
    """Why a module cannot be imported, in one line, or None."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"not installed ({error.name})"
    except Exception as error:  # whatever a half-installed package raises
        text = (str(error).strip().splitlines() or [""])[0]
        return f"{module} cannot be imported: {type(error).__name__}: {text}"[:160]
    return None
