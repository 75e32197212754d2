"""What was measured, as JSON and as tables."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import machine, rows
from .rows import AnyRow

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "triton", "numpy")
HEADS = {"attention": "B x Mk, Hq/Hkv", "merge": "partial results"}
PEER_PACKAGES = ("mslk-cuda-nightly", "fa3-fwd", "flash-attn3-jax", "flashinfer-python", "tokamax", "jax-triton")


@dataclasses.dataclass
class Measurement:
    """One implementation on one row. us: median of the repeats, each a median itself; note: why there is none."""

    us: float | None = None
    repeats: list[float] = dataclasses.field(default_factory=list)
    error: float | None = None
    kernels: list[tuple[str, float]] | None = None
    host_us: float | None = None
    note: str | None = None

    @property
    def spread(self) -> float:
        """Of the repeats: (largest - smallest) / median."""
        return (max(self.repeats) - min(self.repeats)) / self.us if self.us else 0.0


@dataclasses.dataclass
class RowResult:
    """A row with everything timed on it in one process; failed: why the row has nothing."""

    row: AnyRow
    copy_tb_s: float | None = None
    sets: int = 0
    measurements: dict[str, Measurement] = dataclasses.field(default_factory=dict)
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        """With the figures that follow from the others written out."""
        data = dataclasses.asdict(self)
        data["bytes"] = self.row.bytes_needed
        for name, m in self.measurements.items():
            if m.us is not None:
                data["measurements"][name]["tb_s"] = tb_s(self.row.bytes_needed, m.us)
                if self.copy_tb_s:
                    share = percent_of_copy(tb_s(self.row.bytes_needed, m.us), self.copy_tb_s)
                    data["measurements"][name]["percent_of_copy"] = share
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RowResult:
        fields = [f.name for f in dataclasses.fields(Measurement)]
        measurements = {
            name: Measurement(**{key: m[key] for key in fields if key in m})
            for name, m in data.get("measurements", {}).items()
        }
        row, copy = rows.of_fields(data["row"]), data.get("copy_tb_s")
        return cls(row, copy, data.get("sets", 0), measurements, data.get("failed"))


def tb_s(bytes_moved: int, us: float) -> float:
    return bytes_moved / us / 1e6


def percent_of_copy(rate: float, copy_rate: float) -> float:
    return 100 * rate / copy_rate


# -------------------------------------------------------------------------------------------------- rows


def markdown(results: Sequence[RowResult], names: Sequence[str]) -> str:
    """The table of a run: microseconds (TB/s, share of the copy bandwidth), and what is missing."""
    never = {name: note for name in names if (note := _note_everywhere(results, name)) is not None}
    shown = [name for name in names if name not in never]
    lines = [
        f"| {HEADS[results[0].row.kind]} | {results[0].row.moved} | " + " | ".join(shown) + " |",
        "|---|---|" + "---|" * len(shown),
    ]
    lines += [
        f"| {r.row.label} | {_size(r.row.bytes_needed)} | " + " | ".join(_cell(r, name) for name in shown) + " |"
        for r in results
    ]
    lines += ["", f"Each cell: us (TB/s of {results[0].row.moved}, share of the copy bandwidth). JAX: sum of kernel "]
    lines[-1] += "times (CUPTI); torch: graph replay, gaps included. L2 cold."
    copies = [r.copy_tb_s for r in results if r.copy_tb_s]
    if copies:
        spread = max((m.spread for r in results for m in r.measurements.values()), default=0.0)
        lines.append(
            f"Copy bandwidth: {min(copies):.2f} to {max(copies):.2f} TB/s, read plus written. "
            f"Largest spread of repeats: {100 * spread:.1f} %."
        )
    hosts = [(r.row.label, n, m.host_us) for r in results for n, m in r.measurements.items() if m.host_us is not None]
    lines += [f"Host time of a call, {label}: {name} {us:.1f} us." for label, name, us in hosts]
    lines += [f"Missing: {name}: {note}." for name, note in never.items()]
    lines += [f"Row {r.row.name}: {r.failed}." for r in results if r.failed]
    lines += [
        f"Row {r.row.name}, {name}: {r.measurements[name].note}."
        for r in results
        for name in shown
        if name in r.measurements and r.measurements[name].note
    ]
    return "\n".join(lines) + "\n"


def _note_everywhere(results: Sequence[RowResult], name: str) -> str | None:
    """The note that an implementation has on every row; None where they differ or one was timed."""
    notes = {r.measurements[name].note for r in results if name in r.measurements}
    return notes.pop() if len(notes) == 1 else None


def _cell(result: RowResult, name: str) -> str:
    m = result.measurements.get(name)
    if m is None or m.us is None:
        return "-"
    rate = tb_s(result.row.bytes_needed, m.us)
    share = f", {percent_of_copy(rate, result.copy_tb_s):.0f} %" if result.copy_tb_s else ""
    return f"{m.us:.1f} ({rate:.2f}{share})"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# -------------------------------------------------------------------------------------------------- check


def _error(error: float | None) -> str:
    return f"{'-':>7}" if error is None else f"{error:7.1e}"


def check_head(width: int) -> str:
    return f"{'call':{width}}  {'jax':>7}  {'torch':>7}  {'lse':>7}  {'bits':>6}  kernels"


def check_line(name: str, result: Mapping[str, Any], width: int) -> str:
    """One call: errors of the output from both, the worse LSE error, equal bits, kernels seen of those expected."""
    if result.get("failed"):
        return f"{name:{width}}  FAILED {result['failed']}"
    jax, torch = (_error(result.get(f"{front_end}_error")) for front_end in ("jax", "torch"))
    lses = [result[key] for key in ("jax_lse_error", "torch_lse_error") if key in result]
    differ = [result[key] for key in ("out_bits_differ", "lse_bits_differ") if key in result]
    bits = "-" if not differ else "DIFFER" if any(differ) else "equal"
    kernels = f"{len(result['kernels'])} of {result['launches']}" if "kernels" in result else "-"
    line = f"{name:{width}}  {jax}  {torch}  {_error(max(lses, default=None))}  {bits:>6}  {kernels}"
    return "\n".join([line, *(f"{'':{width}}  MISS {miss}" for miss in result["misses"])])


# --------------------------------------------------------------------------------------------------- both


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *PEER_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    card = machine.gpu()
    if card is not None:
        found["gpu"] = card.name
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        found["driver"] = driver.splitlines()[0]
    commit = _output("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    if commit:
        found["commit"] = commit
    return found


def _output(*line: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    if shutil.which(line[0]) is None:
        return ""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write(folder: Path, kind: str, data: Mapping[str, Any], markdown: str | None = None) -> Path:
    """`folder`/kind-DATE.json with versions and date, and .md beside it where there is a table; the JSON's path."""
    now = datetime.datetime.now().astimezone()
    everything = {"kind": kind, "date": now.isoformat(timespec="seconds"), "versions": versions(), **data}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(_finite(everything), indent=1) + "\n")
    if markdown is not None:
        about = ", ".join(f"{name} {version}" for name, version in everything["versions"].items())
        path.with_suffix(".md").write_text(f"# {kind}, {now:%Y-%m-%d %H:%M}\n\n{about}\n\n{markdown}")
    return path


def _finite(x: Any) -> Any:
    """JSON knows no NaN and no infinity: they become text."""
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, Mapping):
        return {key: _finite(value) for key, value in x.items()}
    return [_finite(y) for y in x] if isinstance(x, (list, tuple)) else x
