"""Time on the card and on the host.

Device time of JAX is what CUPTI reports for each kernel; of torch, the replay of a CUDA graph, gaps between kernels
included. Calls rotate among sets of inputs larger together than the L2, so that every call finds it cold.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

COPY_BYTES = 2 * 1024**3
L2_BYTES = 60 * 1024**2
Kernels = list[tuple[str, float]]
"""(name, microseconds) of each kernel of one call, in order."""


def sets_needed(set_bytes: int, l2_bytes: int = L2_BYTES, most: int = 64) -> int:
    """Sets of inputs so that they exceed the L2 twice even without the one in use; one that is far larger is enough."""
    if set_bytes > 64 * l2_bytes:
        return 1
    return min(most, 1 + -(-2 * l2_bytes // set_bytes))


class Rotation:
    """A call without arguments that runs `function` on the next set of arguments each time.

    With `trace` and `lower` it passes for a jitted function, which the profiler would otherwise jit around it, with
    the first set frozen in.
    """

    def __init__(self, function: Any, argument_sets: Sequence[tuple[Any, ...]]) -> None:
        self._function, self._sets = function, list(argument_sets)
        self._next = itertools.cycle(self._sets)

    def __call__(self) -> Any:
        return self._function(*next(self._next))

    def trace(self) -> Any:
        return self._function.trace(*self._sets[0])

    def lower(self) -> Any:
        return self._function.lower(*self._sets[0])


def jax_kernels(
    jitted: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]], iterations: int = 15
) -> tuple[Any, list[Kernels]]:
    """(a result, the kernels of each call) of a jitted function; no other work may be on the card."""
    from jax.experimental.mosaic.gpu import profiler

    measured: Any = profiler.measure(Rotation(jitted, argument_sets), aggregate=False, iterations=iterations)
    result, calls = measured()
    if calls is None:
        return result, [[] for _ in range(iterations)]
    if iterations == 1:  # the profiler then unwraps the list
        calls = [calls]
    return result, [[(name, 1e3 * ms) for name, ms in call] for call in calls]


def total_us(calls: Sequence[Kernels]) -> float:
    """The median over calls of the sum over kernels."""
    return statistics.median(sum(us for _, us in call) for call in calls)


def median_kernels(calls: Sequence[Kernels]) -> Kernels:
    """Each kernel's own median; the calls hold the same kernels."""
    return [(same[0][0], statistics.median(us for _, us in same)) for same in zip(*calls)]


class Replay:
    """Calls of a function of torch captured once, to be timed by replaying them: `us()` as often as wanted.

    Captured thread-locally: in torch's default mode, what JAX's own threads do meanwhile fails, and the capture too.
    Nothing of JAX may be under way: the card is idle, and no collected array can free memory in the middle.
    """

    def __init__(self, function: Callable[..., Any], argument_sets: Sequence[tuple[Any, ...]]) -> None:
        import torch

        self._stream = torch.cuda.Stream()
        call, sets = Rotation(function, argument_sets), len(argument_sets)
        with torch.cuda.stream(self._stream):
            for _ in range(sets):
                call()
            self.calls = replayed_calls(self._milliseconds(call, 2 * sets)[0] / (2 * sets), sets)
            self._graph = torch.cuda.CUDAGraph()
            gc.collect()
            torch.cuda.synchronize()
            gc.disable()
            try:
                with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                    for _ in range(self.calls):
                        call()
            finally:
                gc.enable()
            self._milliseconds(self._graph.replay, 1)

    def us(self, replays: int = 5) -> float:
        """Microseconds of one call, gaps between kernels included: the median of replays.

        One replay goes before those that are measured, so that the host is ahead and its time is not among them.
        """
        import torch

        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            self._graph.replay()
            times = self._milliseconds(self._graph.replay, 1, replays)
        return 1e3 * statistics.median(times) / self.calls

    def _milliseconds(self, call: Callable[[], Any], count: int, times: int = 1) -> list[float]:
        """Of `count` calls one after another on the stream, so many times."""
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        events[0].record(self._stream)
        for event in events[1:]:
            for _ in range(count):
                call()
            event.record(self._stream)
        events[-1].synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def replayed_calls(each_ms: float, sets: int, graph_ms: float = 5.0) -> int:
    """Calls of one graph, whole rounds of the sets. A call that looks short may be the host's time, and be shorter."""
    least = 40 if each_ms < 0.5 else 4
    wanted = min(256, max(least, round(graph_ms / max(each_ms, 1e-3))))
    return sets * max(1, round(wanted / sets))


def host_us(call: Callable[[], Any], wait: Callable[[], Any], count: int = 500) -> float:
    """Microseconds that one call keeps the host, the card running behind. `wait` waits for the card."""
    for _ in range(20):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    wait()
    return 1e6 * elapsed / count


def copy_tb_s() -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written: the roof of anything bound by memory."""
    import torch
    from triton.testing import do_bench

    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    # Launched, not replayed: as a node of a graph the same copy ran at 2.7 TB/s on an H200, launched at over 4.
    us = 1e3 * do_bench(lambda: target.copy_(source), warmup=10, rep=30, return_mode="median")
    return 2 * COPY_BYTES / us / 1e6
