"""Correctness on a GPU, from JAX and from torch.

Both front ends run the same call on the same bits, with NaN and junk wherever nothing may be read. Asked of each: the
error against float64, equal bits of both in output and LSE, and a compiled JAX function that holds the program's
kernels and no other. Exit status 1 where anything is missed.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import configs, inputs, reference, report, runner
from .configs import Config

NAME = "check"
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3}
"""Relative error of the output of the worst sequence."""
LSE_TOLERANCE = (2e-4, 1e-5)
"""Absolute and relative."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="six calls")
    which.add_argument("--full", action="store_true", help="every combination")
    parser.add_argument("--configs", nargs="+", metavar="PATTERN", help="only these, from all (shell wildcards)")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time, default 4")
    parser.add_argument("--json", type=Path, default=None, metavar="DIR", help="write the results there")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    runner.add_arguments(parser, timeout=120)


def chosen(arguments: argparse.Namespace) -> list[Config]:
    if arguments.configs:
        everything = {c.name: c for c in (*configs.default(), *configs.quick(), *configs.full())}
        return [c for name, c in everything.items() if any(fnmatch.fnmatchcase(name, p) for p in arguments.configs)]
    return configs.full() if arguments.full else configs.quick() if arguments.quick else configs.default()


def main(arguments: argparse.Namespace) -> int:
    table = {c.name: c for c in chosen(arguments)}
    if arguments.list:
        print("\n".join(table))
        return 0
    if arguments.child:
        everything = {c.name: c for c in (*configs.default(), *configs.quick(), *configs.full())}
        return runner.serve(arguments.child, arguments.emit, lambda name, at: one(everything[name], at))
    if not table:
        print(f"benchmarks check: no call is named {' '.join(arguments.configs)}", file=sys.stderr)
        return 2
    width = max(map(len, table))
    print(report.check_head(width), flush=True)

    def line(name: str, result: runner.Result) -> None:
        print(report.check_line(name, result, width), flush=True)

    jobs = max(1, min(arguments.jobs, len(table)))
    results = runner.run(list(table), NAME, [], timeout=arguments.timeout, per_child=None, jobs=jobs, report=line)
    missed = [name for name, result in results.items() if result.get("failed") or result["misses"]]
    names = f"; missed: {', '.join(missed)}" if missed else ""
    print(f"{len(results) - len(missed)} of {len(results)} right{names}")
    if arguments.json is not None:
        written = report.write(arguments.json, NAME, {"tolerance": TOLERANCE, "configs": results})
        print(f"written: {written}")
    return 1 if missed else 0


# ------------------------------------------------------------------------------------------------ one call


def one(
    config: Config, at: runner.At = lambda step: None, device: str = "cuda", backend: str = "hopper"
) -> runner.Result:
    """Run one call from both front ends and say what is missed. On the CPU no kernel is counted."""
    case = inputs.of_config(config, device=device)
    want = [reference.attention(*sequence, causal=config.causal) for sequence in case.sequences]
    result: runner.Result = {"misses": []}
    front_ends = {
        "torch": lambda: _torch(case, backend),
        "jax": lambda: _jax(case, backend, result, count=device == "cuda"),
    }
    found = {}
    for front_end, call in front_ends.items():
        at(front_end)
        try:
            out, lse = found[front_end] = call()
        except Exception as error:
            traceback.print_exc()
            result["misses"].append(f"{front_end}: {runner.brief(error)}")
            result[runner.RAISED] = True
            continue
        off, lse_off, misses = errors(config, want, out, lse)
        result |= {f"{front_end}_error": off, f"{front_end}_lse_error": lse_off}
        result["misses"] += [f"{front_end}: {miss}" for miss in misses]
    if len(found) < len(front_ends):
        return result
    for n, what in enumerate(("out", "lse")):
        a, b = (_bits(found[front_end][n]) for front_end in ("jax", "torch"))
        differing = int((a != b).sum())
        result[f"{what}_bits_differ"] = differing
        if differing:
            result["misses"].append(f"{what}: {differing} of {a.size} differ between jax and torch")
    return result


def _options(config: Config, dtypes: Any) -> dict[str, Any]:
    options = {"num_splits": config.num_splits, "split_size": config.split_size}
    if config.output_dtype is not None:
        options["output_dtype"] = getattr(dtypes, config.output_dtype)
    return options


def _torch(case: inputs.Case, backend: str) -> tuple[np.ndarray, np.ndarray]:
    import torch

    import bridge

    out, lse = bridge.memory_efficient_attention_forward_requires_grad(
        **case.torch_arguments(), **_options(case.config, torch), backend=backend
    )
    return _per_token(inputs.host_array(out), inputs.host_array(lse))


def _jax(case: inputs.Case, backend: str, result: runner.Result, count: bool) -> tuple[np.ndarray, np.ndarray]:
    import jax
    import jax.numpy as jnp

    import pallas_kernels as pk

    arguments, options = case.jax_arguments(), _options(case.config, jnp)

    @jax.jit
    def call(arguments: dict[str, Any]) -> Any:
        return pk.memory_efficient_attention_forward_requires_grad(**arguments, **options, backend=backend)

    out, lse = call(arguments)
    if count:
        _count_kernels(call, arguments, options, result)
    return _per_token(np.asarray(out), np.asarray(lse))


def _count_kernels(
    call: Callable[..., Any], arguments: dict[str, Any], options: dict[str, Any], result: runner.Result
) -> None:
    """The kernels that the compiled function launches are those of the program."""
    from pallas_kernels.problem import build
    from pallas_kernels.program import program, target_of

    from .timing import jax_kernels

    problem = build(**arguments, **options)[0]
    expected = len(program(problem, target_of("hopper")).launches)
    try:
        _, calls = jax_kernels(call, [(arguments,)], iterations=1)
    except Exception as error:
        result["misses"].append(f"kernels not counted: {runner.brief(error)}")
        return
    result |= {"kernels": [name for name, _ in calls[0]], "launches": expected}
    if len(calls[0]) != expected:
        names = ", ".join(name for name, _ in calls[0])
        result["misses"].append(f"{len(calls[0])} kernels for {expected} launches: {names}")


def _per_token(out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out [tokens, heads, D] and lse [tokens, heads] float32 of [B, m, heads, D] and [B, heads, m].

    torch's LSE is float64 beside a float32 output where JAX's is float32: rounded, they are the same.
    """
    heads, dim = out.shape[-2:]
    return out.reshape(-1, heads, dim), np.moveaxis(lse, 1, 2).reshape(-1, heads).astype(np.float32)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}")


def errors(
    config: Config, want: list[tuple[Any, Any]], out: np.ndarray, lse: np.ndarray
) -> tuple[float, float, list[str]]:
    """(the worst sequence's relative error, the LSE's worst absolute error, what is out of tolerance)."""
    import torch

    worst, worst_lse, misses, token = 0.0, 0.0, [], 0
    for b, (count, (want_out, want_lse)) in enumerate(zip(config.token_counts(), want)):
        mine = slice(token, token + count)
        token += count
        got = torch.from_numpy(out[mine].astype(np.float64)).to(want_out.device)
        error = reference.relative_error(got, want_out)
        worst = error if math.isnan(error) else max(worst, error)
        if not error <= TOLERANCE[config.dtype]:
            misses.append(f"sequence {b} ({config.lengths()[b]} keys) is off by {error:.1e}")
        got_lse, expected_lse = lse[mine].astype(np.float64), want_lse.cpu().numpy()
        same = got_lse == expected_lse  # -inf among them
        with np.errstate(invalid="ignore"):
            off = np.where(same, 0.0, np.abs(got_lse - expected_lse))
        worst_lse = max(worst_lse, float(off.max(initial=0.0)))
        if not np.all(same | (off <= LSE_TOLERANCE[0] + LSE_TOLERANCE[1] * np.abs(expected_lse))):
            misses.append(f"sequence {b} ({config.lengths()[b]} keys): LSE is off by {off.max():.1e}")
    if token != len(out):
        misses.append(f"{len(out)} query tokens in the output, expected {token}")
    return worst, worst_lse, misses
