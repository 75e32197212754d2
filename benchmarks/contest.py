"""One row: every implementation is compared with float64, then all are timed in turns.

Only what is right is timed. Inputs rotate so that the L2 is cold; repeats go round all implementations, so that a drift
of the card meets all alike. Compiling needs no turn on the card, so several processes can do it at a time.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import inputs, peers, reference, runner, timing
from .report import Measurement, RowResult
from .rows import AnyRow
from .turns import turn

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
"""Relative error of the worst sequence's output."""


def measure(
    row: AnyRow,
    names: Sequence[str],
    repeat: int,
    at: runner.At = lambda step: None,
    device: str = "cuda",
    lock: Path | None = None,
) -> RowResult:
    """Check and time the named implementations on a row."""
    result = RowResult(row, measurements={name: Measurement() for name in names})
    with turn(lock, at):
        at("inputs")
        result.copy_tb_s = timing.copy_tb_s()
        result.sets = 1 if row.host else timing.sets_needed(row.bytes_needed)
        given = _Inputs(row, result.sets, device)
    ready: dict[str, _Contestant] = {}

    @contextlib.contextmanager
    def trying(name: str, step: str, before: str = "") -> Iterator[None]:
        """What fails is noted and no longer takes part; a CUDA context that it broke ends the row."""
        at(step)
        try:
            yield
        except Exception as error:
            result.measurements[name] = Measurement(note=before + runner.brief(error))
            ready.pop(name, None)
            probe(step, error, device)

    for name in names:
        adapter = peers.adapter(name, row.kind)
        why = adapter.available() or adapter.refuses(row)
        if why is not None:
            result.measurements[name].note = why
            continue
        with trying(name, name):
            ready[name] = _Contestant(adapter, row, given)
            ready[name].compile()
    with turn(lock, at):
        for name, contestant in list(ready.items()):
            found = result.measurements[name]
            with trying(name, name):
                found.error = contestant.error()
                if not found.error <= TOLERANCE[row.dtype]:
                    found.note = f"wrong, so not timed: relative error {found.error:.1e}"
                    del ready[name]
        for name, contestant in list(ready.items()):
            with trying(name, f"timing {name}", "timing: "):
                contestant.prepare_timing()
        for _ in range(repeat):
            for name, contestant in list(ready.items()):
                found = result.measurements[name]
                with trying(name, f"timing {name}", "timing: "):
                    us, found.kernels = contestant.time()
                    found.repeats.append(us)
        for name, contestant in list(ready.items()):
            result.measurements[name].us = statistics.median(result.measurements[name].repeats)
            if row.host:
                with trying(name, f"timing {name}", "timing on the host: "):
                    result.measurements[name].host_us = contestant.host_us()
    return result


def max_error(found: Sequence[float]) -> float:
    """The largest; NaN where one is NaN."""
    return max(found, key=lambda x: float("inf") if x != x else x)


class _Inputs:
    """The sets of a row's inputs, and what must come out."""

    def __init__(self, row: AnyRow, count: int, device: str) -> None:
        import torch

        torch.cuda.empty_cache()  # JAX allocates from the same card
        self.torch = [inputs.of_row(row, seed, device) for seed in range(count)]
        samples = [reference.sample(row, given, seed) for seed, given in enumerate(self.torch)]
        self.expected = [(places, want.cpu()) for places, want in samples]
        torch.cuda.empty_cache()
        self._jax: list[Any] = []

    @property
    def jax(self) -> list[Any]:
        if not self._jax:
            self._jax = [inputs.shared_with_jax(given) for given in self.torch]
        return self._jax


class _Contestant:
    """An implementation with its arguments for every set of inputs."""

    def __init__(self, adapter: Any, row: AnyRow, given: _Inputs) -> None:
        self.row, self.expected = row, given.expected
        self.jax, self.x64 = adapter.FRAMEWORK == "jax", getattr(adapter, "X64", False)
        with self._mode():
            self.arguments = [adapter.prepare(row, one) for one in (given.jax if self.jax else given.torch)]

        def run(*arguments: Any) -> Any:
            return adapter.run(row, *arguments)

        self.call: Callable[..., Any] = run
        self._replay: timing.Replay | None = None
        if self.jax:
            import jax

            self.call = jax.jit(run)

    def _mode(self) -> Any:
        if not self.x64:
            return contextlib.nullcontext()
        import jax

        return jax.enable_x64(True)

    def compile(self) -> None:
        """The first call, with whatever it has to prepare."""
        self._wait(self._call(self.arguments[0]))

    def _call(self, arguments: Any) -> Any:
        with self._mode():
            return self.call(*arguments)

    def _wait(self, result: Any = None) -> None:
        if self.jax:
            import jax

            jax.block_until_ready(result)
        elif self.arguments[0][0].is_cuda:
            import torch

            torch.cuda.synchronize()

    def error(self) -> float:
        """The worst relative error at the sampled places of all sets; NaN where any output anywhere is not finite."""
        import numpy as np
        import torch

        found = []
        for arguments, (places, want) in zip(self.arguments, self.expected):
            out = self._call(arguments)
            out = out[0] if isinstance(out, tuple) else out
            if self.jax:
                host = np.asarray(out).reshape(self.row.out_shape)
                finite = bool(np.isfinite(host).all())
                got = torch.from_numpy(host[places].astype(np.float64))
            else:
                out = out.detach().reshape(self.row.out_shape)
                finite = bool(out.isfinite().all())
                got = out[places].double().cpu()
            found += [reference.relative_error(a, b) for a, b in zip(got, want)] if finite else [float("nan")]
        return max_error(found)

    def prepare_timing(self) -> None:
        if not self.jax:
            self._replay = timing.Replay(self.call, self.arguments)

    def time(self) -> tuple[float, timing.Kernels | None]:
        if self._replay is not None:
            return self._replay.us(), None
        import torch

        torch.cuda.synchronize()
        with self._mode():
            _, calls = timing.jax_kernels(self.call, self.arguments)
        if not calls[0]:
            raise RuntimeError("the profiler saw no kernel")
        return timing.total_us(calls), timing.median_kernels(calls)

    def host_us(self) -> float:
        arguments = self.arguments[0]
        with self._mode():
            return timing.host_us(lambda: self.call(*arguments), lambda: self._wait(self.call(*arguments)))


def probe(step: str, error: Exception, device: str) -> None:
    """Raise where the CUDA context no longer works: whatever came next would fail, and not by its own fault."""
    if device != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:
        raise RuntimeError(f"at {step}: {runner.brief(error)}") from error
