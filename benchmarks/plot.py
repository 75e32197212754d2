"""The figures of a run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import RowResult, tb_s


def draw(results: Sequence[RowResult], names: Sequence[str], path: Path) -> str:
    """Bars of TB/s for each row and implementation, the copy bandwidth as a line. What was done, in one line."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in names if any(_rate(result, name) for result in results)]
    if not shown:
        return "no plot: nothing was timed"
    height = 0.8 / len(shown)
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.16 * len(results) * (len(shown) + 1)), layout="constrained")
    for n, name in enumerate(shown):
        places = [i + n * height for i in range(len(results))]
        axes.barh(places, [_rate(result, name) or 0.0 for result in results], height, label=name)
    copies = [result.copy_tb_s for result in results if result.copy_tb_s]
    if copies:
        axes.axvline(sum(copies) / len(copies), color="black", linewidth=0.8, linestyle="--", label="copy")
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(results))], [r.row.label for r in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"TB/s of {results[0].row.moved}")
    figure.legend(loc="outside upper center", ncols=5, fontsize=7)
    figure.savefig(path)
    pyplot.close(figure)
    return f"plot: {path.name}"


def _rate(result: RowResult, name: str) -> float | None:
    m = result.measurements.get(name)
    return None if m is None or m.us is None else tb_s(result.row.bytes_needed, m.us)
