"""Times of the merge kernel on a GPU, over the tiles that it may be cut into: `python scripts/sweep_merge.py`.

One line a shape and tile: us of a replayed CUDA graph, TB/s of bytes read and written; last, what a copy of as many
bytes takes. The first line of a shape is the kernel's own choice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

import torch

from bridge import _merge_launch
from pallas_kernels.merge_program import Merge

SHAPES = {
    "B32 M1 H32 S16": (16, (32, 1, 32, 128)),
    "B1 M4096 H32 S4": (4, (1, 4096, 32, 128)),
    "B8 M1024 H32 S8": (8, (8, 1024, 32, 128)),
    "B33 M1 H32 S16": (16, (33, 1, 32, 128)),
    "B4 M1 H64 S32": (32, (4, 1, 64, 128)),
    "B8 M1024 H32 D64 S2": (2, (8, 1024, 32, 64)),
}
REPEATS = 20


def timed(call: Callable[[], object]) -> float:
    """us of one call: a graph of many, replayed, the median of replays."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return statistics.median(times)


def main() -> None:
    choose = _merge_launch.kernel_of
    for name, (n, shape) in SHAPES.items():
        call = Merge(shape, ("float32",) * n, ("float64",) * n, True, True, "float32", True)
        attn = torch.randn(n, *shape, device="cuda")
        lse = torch.randn(n, *call.lse_shape, device="cuda", dtype=torch.float64)
        rows = math.prod(shape[:-1])
        moved = (n + 1) * rows * (4 * shape[-1] + 8)
        options = [{}, *(dict(tile_rows=r, along_heads=a) for r, a in itertools.product((4, 8, 16, 32), (False, True)))]
        for option in options:
            kernel = dataclasses.replace(choose(call), **option)
            if option and kernel.tile_rows > (kernel.queries if kernel.along_queries else kernel.heads):
                continue
            _merge_launch.kernel_of = lambda _, kernel=kernel: kernel
            plan = _merge_launch.Plan(call, torch.device("cuda", torch.cuda.current_device()))
            addresses = [*plan.chunks.addresses(attn), *plan.lses.addresses(lse)]
            us = timed(lambda plan=plan, addresses=addresses: plan.run(addresses))
            along = "queries" if kernel.along_queries else "heads"
            tile = f"{kernel.rows:3} {along}"
            print(f"{name:20} {tile:24} {us:8.2f} us {moved / us / 1e6:5.2f} TB/s", flush=True)
        _merge_launch.kernel_of = choose
        a, b = (torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
        us = timed(lambda a=a, b=b: b.copy_(a))
        print(f"{name:20} {'copy of as many bytes':24} {us:8.2f} us {moved / us / 1e6:5.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
