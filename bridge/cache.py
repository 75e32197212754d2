"""Lowered kernels on disk, so that the next process need not trace and lower them again.

What is kept is a kernel's MLIR module, as Mosaic GPU's compiler takes it: the runtime offers no way to get at its
machine code or to hand some in, so a kernel found here still costs its assembly (`cache_info` tells how long). Files
lie in a folder named after the library's sources, the versions of jax and jaxlib, and the architecture; any of them
may be deleted at any time. `PALLAS_SPLITK_CACHE_DIR` names another folder, "off" disables the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

import pallas_kernels

from . import _mosaic

ENVIRONMENT = "PALLAS_SPLITK_CACHE_DIR"
OFF = ("", "0", "off")
DEBUGGING = ("MOSAIC_GPU_DUMP", "MOSAIC_GPU_LINE", "MOSAIC_GPU_LLVM")
"""Variables of Mosaic GPU that enter a module, or that want it to be lowered."""


def directory() -> Path | None:
    """Where lowered kernels are kept; None where the cache is disabled."""
    chosen = os.environ.get(ENVIRONMENT)
    if chosen is not None:
        return None if chosen.lower() in OFF else Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pallas-splitk"


def lowered(
    kernel: Any, inputs: Sequence[jax.ShapeDtypeStruct], lower: Callable[[], bytes]
) -> tuple[bytes, bool]:
    """(module, whether it was on disk) of a kernel; `lower` makes it where it is not found, and it is kept."""
    path = _path(kernel, inputs)
    if path is not None and (found := _read(path)) is not None:
        return found, True
    module = lower()
    if path is not None:
        with contextlib.suppress(OSError):  # a full or read-only disk costs the cache, not the call
            _write(path, module)
    return module, False


def _path(kernel: Any, inputs: Sequence[jax.ShapeDtypeStruct]) -> Path | None:
    """The file of a kernel, or None where it is not to be cached."""
    root = directory()
    if root is None or any(name.startswith(DEBUGGING) for name in os.environ):
        return None
    try:
        text = described((kernel, tuple((x.shape, str(x.dtype)) for x in inputs)))
    except TypeError:
        return None
    return root / version() / f"{hashlib.sha256(text.encode()).hexdigest()}.mlir"


@functools.cache
def version() -> str:
    """What all modules of a folder depend on: sources, jax, jaxlib, architecture."""
    sources = hashlib.sha256()
    package = Path(pallas_kernels.__file__).parent
    for path in [*sorted(package.rglob("*.py")), Path(_mosaic.__file__)]:
        sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    major, minor = _mosaic.ARCH
    return f"{sources.hexdigest()[:16]}-jax{jax.__version__}-jaxlib{jaxlib.__version__}-sm{major}{minor}"


def described(x: Any) -> str:
    """A text that equal values share and different ones do not. TypeError for what has no such text."""
    if x is None or isinstance(x, (bool, int, str)):
        return f"{type(x).__name__}:{x!r}"
    if isinstance(x, float):
        return f"float:{x.hex()}"
    if isinstance(x, tuple):
        return f"{type(x).__name__}({','.join(map(described, x))})"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [f"{f.name}={described(getattr(x, f.name))}" for f in dataclasses.fields(x)]
        return f"{type(x).__module__}.{type(x).__qualname__}({','.join(fields)})"
    raise TypeError(f"no text stands for a {type(x).__name__}")


def _read(path: Path) -> bytes | None:
    try:
        if path.stat().st_uid not in (0, os.getuid()):  # what others wrote is not run
            return None
        content = path.read_bytes()
    except OSError:
        return None
    digest, module = content[:32], content[32:]
    return module if hashlib.sha256(module).digest() == digest else None


def _write(path: Path, module: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(module).digest() + module)
        os.replace(name, path)  # whole or not at all, whoever else writes it
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
