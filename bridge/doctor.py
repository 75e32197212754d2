"""`python -m bridge.doctor`: what this machine has, whether the kernels run on it and why not, and what a call costs.

`--host-time` also measures, on a GPU that runs the kernels, how long one eager call keeps the host.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import bridge

from . import cache, launch
from .fmha import attn_bias

PACKAGES = ("pallas-splitk", "torch", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")


def report() -> Iterator[tuple[str, str]]:
    """(what, how it is), line by line; opens CUDA, but not JAX's client of it."""
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "CUDA of torch", torch.version.cuda or "none: this build is for CPUs"
    if not torch.cuda.is_available():
        yield "kernels", "no: torch finds no CUDA device; calls are served by JAX on the CPU"
    else:
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            yield f"device {index}", (
                f"{card.name}, compute capability {card.major}.{card.minor}, {card.multi_processor_count} SMs, "
                f"{card.total_memory / 2**30:.0f} GiB"
            )
            reasons = launch.machine_reasons(torch.device("cuda", index))
            yield f"kernels on {index}", f"no: {'; '.join(reasons)}" if reasons else "yes"
    folder = cache.directory()
    if folder is None:
        yield "lowered kernels", f"not kept ({cache.ENVIRONMENT} disables the cache)"
        return
    sizes = [path.stat().st_size for path in folder.rglob("*.mlir")]
    current = len(list((folder / cache.version()).glob("*.mlir")))
    yield "lowered kernels", f"{folder} ({len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB; {current} of this version)"


# -------------------------------------------------------------------------------------------- time on the host


def host_us(call: Callable[[], Any], count: int = 200, rounds: int = 15) -> float:
    """Microseconds that one call keeps the host: the median of rounds that begin with an idle card."""
    call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - began) / count)
    torch.cuda.synchronize()
    return sorted(found)[rounds // 2] * 1e6


def host_times() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call): tiny decode calls (one sequence of 256 keys, 32 heads of 8 KV heads, head_dim 128, bf16)."""
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    ints = lambda *values: torch.tensor(values, device="cuda", dtype=torch.int32)  # noqa: E731
    q, k, pages = draw(1, 1, 32, 128), draw(1, 256, 8, 128), draw(8, 64, 8, 128)
    padded = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1], 256, [256])
    table, cu, used, out = ints(3, 1, 7, 0)[None], ints(0, 1), ints(256), draw(1, 32, 128)
    paged = padded.make_paged(table, 64, attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    flat, packed = pages.view(1, 512, 8, 128), (q[0], pages, pages, cu, None, 1, 256)
    plain, with_lse = bridge.memory_efficient_attention, bridge.memory_efficient_attention_forward_requires_grad
    varlen: Any = bridge.varlen_attn
    varlen_out: Any = bridge.varlen_attn_out
    pooled: dict[str, Any] = dict(enable_gqa=True, seqused_k=used, block_table=table, window_size=(-1, 0))
    for splits, launches in ((1, "one launch"), (2, "two launches"), (None, "automatic splits")):
        given: dict[str, Any] = dict(num_splits=splits, backend="hopper")
        yield f"plain batch, {launches}", partial(plain, q, k, k, **given)
        yield f"padded mask, {launches}", partial(plain, q, k, k, padded, **given)
        yield f"paged mask, {launches}", partial(plain, q, flat, flat, paged, **given)
        yield f"paged mask with LSE, {launches}", partial(with_lse, q, flat, flat, paged, **given)
        yield f"varlen_attn, {launches}", partial(varlen, *packed, **pooled, **given)
        yield f"varlen_attn_out, {launches}", partial(varlen_out, out, *packed, **pooled, **given)
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            fa3 = importlib.import_module(module).flash_attn_with_kvcache
        except (ImportError, AttributeError):
            continue
        yield "FlashAttention-3", partial(fa3, q, k, k, cache_seqlens=used, causal=True)
        break
    sizes = ((1, 1, 32, 128), (4096, 4096, 128, 1))
    yield "an allocation, for comparison", partial(torch.empty_strided, *sizes, dtype=torch.bfloat16, device=q.device)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bridge.doctor", description=__doc__)
    parser.add_argument("--host-time", action="store_true", help="measure how long an eager call keeps the host")
    chosen = parser.parse_args()
    for what, how in report():
        print(f"{what:18} {how}")
    if not chosen.host_time:
        return 0
    if not torch.cuda.is_available() or launch.machine_reasons(torch.device("cuda")):
        print("--host-time needs a GPU that runs the kernels")
        return 1
    print("\nHost time of one eager call, one sequence of 256 keys:")
    for name, call in host_times():
        print(f"{name:36} {host_us(call):6.1f} us")
    for kernel in bridge.cache_info().kernels:
        where = "lowered before" if kernel.from_disk else f"of it lowering {kernel.lowering:.2f} s"
        print(f"compiled {kernel.name} for {kernel.tokens} tokens in {kernel.seconds:.2f} s ({where})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
