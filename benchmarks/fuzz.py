"""Fuzz: random calls on this GPU against float64, and the same sequence in a thousand batches, bit for bit.

    python -m benchmarks fuzz [--configurations 112] [--draws 20] [--batches 1000] [--seed N] [--jobs 14]

Configurations are drawn over everything that the kernels cover; each is compiled once and then called with fresh
lengths, tables and contents, NaN wherever no key lies. In the batches a sequence meets random companions, in any order,
in pages of several sizes: with `num_splits=1` or a fixed `split_size` its output and LSE may not change. Last, a cache
of 2**32 elements. Exit status 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

NAME = "fuzz"
PAGES, POLICIES = (16, 64, 256), ({"num_splits": 1}, {"split_size": 256})
TOLERANCE = {"bfloat16": (2e-2, 2.8e-3, 5e-3), "float16": (6e-3, 4e-4, 1e-3)}
"""rtol, atol of an element, and relative error of the whole output."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in (("configurations", 112), ("draws", 20), ("batches", 1000), ("seed", 0), ("jobs", 14)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--one", help=argparse.SUPPRESS)


def main(arguments: argparse.Namespace) -> int:
    if arguments.one:
        task = json.loads(arguments.one)
        for line in {"calls": calls, "batches": batches, "large": large}[task.pop("kind")](**task):
            print(json.dumps(line), flush=True)
        return 0
    count, jobs = arguments.configurations, max(1, arguments.jobs - len(PAGES) * len(POLICIES) - 1)
    shares = [list(range(n, count, jobs)) for n in range(min(jobs, count))]
    tasks: list[dict[str, Any]] = [
        {"kind": "calls", "numbers": share, "draws": arguments.draws, "seed": arguments.seed} for share in shares
    ]
    each = -(-arguments.batches // (len(PAGES) * len(POLICIES)))
    if each:
        tasks += [
            {"kind": "batches", "page_size": p, "policy": policy, "count": each, "seed": arguments.seed}
            for p in PAGES
            for policy in POLICIES
        ]
        tasks.append({"kind": "large"})
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = [line for lines in pool.map(_child, tasks) for line in lines]
    wrong = [r for r in results if r.get("wrong")]
    bits: dict[str, set[str]] = {}
    for r in results:
        for name, digest in r.get("bits", {}).items():
            bits.setdefault(f"{r['policy']} {name}", set()).add(digest)
    changed = [name for name, found in bits.items() if len(found) > 1]
    for r in (*wrong, *({"changed with the page size": name} for name in changed)):
        print(json.dumps(r))
    drawn = sum(r.get("draws", 0) for r in results)
    worst = max((r["error"] for r in results if "error" in r), default=0.0)
    seconds = [r["compile"] for r in results if "compile" in r]
    print(f"{sum('draws' in r for r in results)} configurations, {drawn} calls, worst relative error {worst:.1e}")
    print(f"first call of a configuration: median {sorted(seconds)[len(seconds) // 2]:.1f} s" if seconds else "")
    print(f"{sum(r.get('batches', 0) for r in results)} batches; sequences whose bits changed: {len(changed)}")
    print(f"wrong: {len(wrong)}")
    return 1 if wrong or changed else 0


def _child(task: dict[str, Any]) -> list[dict[str, Any]]:
    """A task's lines; a process that dies is a wrong one."""
    command = [sys.executable, "-m", "benchmarks", NAME, "--one", json.dumps(task)]
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        out, tail = done.stdout, "" if done.returncode == 0 else done.stderr[-400:]
    except subprocess.TimeoutExpired as error:
        out, tail = (error.stdout or b"").decode(), "no end after 300 s"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [*lines, {"task": task, "wrong": tail}] if tail else lines


# ------------------------------------------------------------------------------------------- random calls


def configuration(number: int, seed: int) -> dict[str, Any]:
    """What is static of a call, drawn over the coverage of the kernels."""
    import numpy as np

    rng = np.random.default_rng((seed, number))
    pick = lambda *xs: xs[int(rng.integers(len(xs)))]  # noqa: E731
    dim = pick(16, 32, 64, 64, 96, 128, 128, 128, 192, 256, 512)
    group = pick(1, 2, 3, 4, 4, 8, 8, 12, 16, 24, 64, 96, 128) if dim < 512 else pick(1, 4, 8, 16)
    storage = pick("padded", "padded", "odd", "gappy", 1, 16, 24, 64, 64, 128, 256, "paged gappy")
    if dim == 512 and storage in ("odd", "gappy", 1, "paged gappy"):
        storage = 16
    found = {
        "dim": dim,
        "value_dim": pick(dim, dim, dim, dim, 64 if dim < 512 else dim),
        "group": group,
        "kv_heads": pick(1, 2, 3),
        "storage": storage,
        "dtype": pick("bfloat16", "bfloat16", "float16"),
        "out": pick(None, None, "float32"),
        "batch": int(rng.integers(1, 7)),
        "max_q": pick(1, 1, 1, 3, 16),
        "slot": int(rng.integers(1, 640)),
        "window": pick(None, None, (None, 0), (None, 0), (int(rng.integers(0, 90)), int(rng.integers(0, 5)))),
        "policy": pick({}, {}, {"num_splits": 1}, {"num_splits": 3}, {"split_size": int(rng.integers(40, 300))}),
        "softcap": pick(None, None, None, 3.0),
        "sinks": pick(False, False, True),
        "bias": pick(None, "bhgqk", "bhgk", "hgk", "qk", "bk", "hgq"),
        "bias_dtype": pick("float32", "bfloat16", "float16"),
    }
    if found["storage"] != "padded":
        found["bias"] = None
    elif found["bias"]:  # a plain batch
        found["window"] = None
    return found


def draw(c: dict[str, Any], rng: Any) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """(arrays of a call, (q, k, v, visible, bias) of each sequence in float64); NaN and junk wherever no key lies."""
    import ml_dtypes
    import numpy as np

    n, dtype = c["batch"], getattr(ml_dtypes, c["dtype"], np.float16)
    slot = -(-c["slot"] // 8) * 8 if c["storage"] == "padded" else c["slot"]
    total = n if c["max_q"] == 1 else n * -(-(c["max_q"] + 1) // 2)
    q_lens = [1] * n if c["max_q"] == 1 else _parts(total, n, c["max_q"], rng)
    if c["bias"]:
        q_lens, total = [c["max_q"]] * n, n * c["max_q"]
    k_lens = [int(rng.choice([0, 1, slot, rng.integers(0, slot + 1)], p=[0.08, 0.08, 0.14, 0.7])) for _ in range(n)]
    page = None
    if c["storage"] not in ("padded", "odd", "gappy"):
        page = 32 if c["storage"] == "paged gappy" else c["storage"]
    starts = [0] * n
    if c["storage"] == "paged gappy":
        starts = [int(rng.integers(0, 50)) for _ in range(n)]
    table = None
    if page is not None:
        per_row = -(-(slot + 50) // page)
        pool = n * per_row + 2
        table = rng.permutation(pool)[: n * per_row].reshape(n, per_row).astype(np.int32)
        rows = pool * page
        where = [table[b, (s + np.arange(k)) // page] * page + (s + np.arange(k)) % page
                 for b, (s, k) in enumerate(zip(starts, k_lens))]  # fmt: skip
        for b, (s, k) in enumerate(zip(starts, k_lens)):
            used = np.zeros(per_row, bool)
            if k:
                used[s // page : (s + k - 1) // page + 1] = True
            table[b, ~used] = rng.choice([-1, 10**6, 2**31 - 1], int((~used).sum()))
    elif c["storage"] == "gappy":
        rows = n * slot + 7
        starts = [int(rng.integers(0, rows - k + 1)) for k in k_lens]
        where = [s + np.arange(k) for s, k in zip(starts, k_lens)]
    else:
        rows = n * slot
        where = [b * slot + np.arange(k) for b, k in enumerate(k_lens)]
    heads = c["kv_heads"] * c["group"]
    q = rng.standard_normal((total, heads, c["dim"])).astype(dtype)
    k = np.full((rows, c["kv_heads"], c["dim"]), np.nan, dtype)
    v = np.full((rows, c["kv_heads"], c["value_dim"]), np.nan, dtype)
    for at in where:
        k[at] = rng.standard_normal((len(at), *k.shape[1:]))
        v[at] = rng.standard_normal((len(at), *v.shape[1:]))
    sinks = rng.standard_normal(heads).astype(np.float32) if c["sinks"] else None
    bias, biases = _bias(c, slot, k_lens, rng) if c["bias"] else (None, [0.0] * n)
    sequences, first = [], 0
    left, right = c["window"] or (None, None)
    for q_len, at, added in zip(q_lens, where, biases):
        i, j = np.arange(q_len)[:, None] + len(at) - q_len, np.arange(len(at))[None]
        seen = np.ones((q_len, len(at)), bool)
        if left is not None:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
        sequences.append((q[first : first + q_len].astype(np.float64), k[at].astype(np.float64),
                          v[at].astype(np.float64), seen, added))  # fmt: skip
        first += q_len
    arrays = {"q": q, "k": k, "v": v, "q_lens": q_lens, "k_lens": k_lens, "starts": starts, "table": table,
              "page": page, "slot": slot, "rows": rows, "sinks": sinks, "bias": bias}  # fmt: skip
    return arrays, sequences


def _bias(c: dict[str, Any], slot: int, k_lens: list[int], rng: Any) -> tuple[Any, list[Any]]:
    """(an array bias with the axes of `c`, what each sequence sees of it [heads, q, k] in float64): some entries are
    -inf, some whole rows, and NaN where no key lies."""
    import ml_dtypes
    import numpy as np

    full = dict(b=c["batch"], h=c["kv_heads"], g=c["group"], q=c["max_q"], k=slot)
    bias = 2 * rng.standard_normal([size if axis in c["bias"] else 1 for axis, size in full.items()])
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    bias[rng.random(bias.shape[:-1]) < 0.1] = -np.inf
    bias = bias.astype(getattr(ml_dtypes, c["bias_dtype"], c["bias_dtype"]))
    whole = np.broadcast_to(bias.astype(np.float64), tuple(full.values())).reshape(c["batch"], -1, c["max_q"], slot)
    if {"b", "k"} <= set(c["bias"]):
        known = (np.arange(slot) < np.array(k_lens)[:, None])[:, None, None, None]
        bias = np.where(known, bias, bias.dtype.type(np.nan))
    return bias.reshape(bias.shape[0], -1, *bias.shape[3:]), [x[..., :k] for x, k in zip(whole, k_lens)]


def _parts(total: int, n: int, most: int, rng: Any) -> list[int]:
    """n random lengths up to `most` that add up to `total`."""
    lens = [0] * n
    while sum(lens) < total:
        b = int(rng.integers(n))
        lens[b] += lens[b] < most
    return lens


def expected(c: dict[str, Any], sequences: list[tuple[Any, ...]], sinks: Any) -> tuple[Any, Any]:
    """(out [tokens, heads, Dv], lse [heads, tokens]) by the definition, in float64."""
    import numpy as np

    outs, lses = [], []
    for q, k, v, seen, bias in sequences:
        k, v = (np.repeat(x, c["group"], 1) for x in (k, v))
        s = np.einsum("qhd,khd->hqk", q, k) * c["dim"] ** -0.5
        if c["softcap"]:
            s = c["softcap"] * np.tanh(s / c["softcap"])
        s = np.where(seen[None], s + bias, -np.inf)
        if sinks is not None:
            logit = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (*s.shape[:2], 1))
            s, v = np.concatenate([s, logit], -1), np.concatenate([v, np.zeros((1, *v.shape[1:]))])
        top = s.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isfinite(top), top, 0))
        l = p.sum(-1, keepdims=True)
        outs.append(np.einsum("hqk,khd->qhd", p / np.where(l > 0, l, 1), v))
        with np.errstate(divide="ignore"):
            lses.append((np.where(np.isfinite(top), top, 0) + np.log(l))[..., 0])
    return np.concatenate(outs), np.concatenate(lses, 1)


def mask_of(c: dict[str, Any], a: dict[str, Any]) -> Any:
    """The call's `attn_bias`: an array where it has one."""
    from .mask_choice import mask_of

    if a["bias"] is not None:
        return a["bias"]
    starts = a["starts"] if "gappy" in str(c["storage"]) else None
    return mask_of(a["q_lens"], a["k_lens"], window=c["window"], slot=a["slot"], rows=a["rows"], starts=starts,
                   table=a["table"], page_size=a["page"])  # fmt: skip


def calls(numbers: list[int], draws: int, seed: int, backend: str = "hopper") -> Any:
    """One line a configuration: the worst error over its draws, and what was wrong."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import pallas_kernels as pk

    for number in numbers:
        c, rng = configuration(number, seed), np.random.default_rng((seed, number, 1))
        if c["window"] not in (None, (None, 0)) and c["storage"] not in ("padded", "odd"):
            c["window"] = None  # only padded keys have classes with local windows
        options = {**c["policy"], "softcap": c["softcap"], "output_dtype": c["out"], "backend": backend}

        def call(q: Any, k: Any, v: Any, mask: Any, sinks: Any, lengths: Any, o: dict[str, Any] = options) -> Any:
            attend = pk.memory_efficient_attention_forward_requires_grad
            return attend(q, k, v, mask, sinks=sinks, kv_lengths=lengths, **o)

        jitted, line = jax.jit(call), {"number": number, "configuration": c, "draws": 0, "error": 0.0, "wrong": ""}
        try:
            for n in range(draws):
                arrays, sequences = draw(c, rng)
                mask = jax.tree.map(jnp.asarray, mask_of(c, arrays))
                began = time.perf_counter()
                sinks = None if arrays["sinks"] is None else jnp.asarray(arrays["sinks"])
                batch = c["batch"] if c["bias"] else 1
                given = (arrays[x].reshape(batch, -1, *arrays[x].shape[1:]) for x in "qkv")
                lengths = jnp.asarray(arrays["k_lens"], jnp.int32) if c["bias"] else None
                out, lse = jitted(*map(jnp.asarray, given), mask, sinks, lengths)
                got = np.asarray(out, np.float64).reshape(-1, *out.shape[2:])
                got_lse = np.moveaxis(np.asarray(lse, np.float64), 1, 0).reshape(lse.shape[1], -1)
                if n == 0:
                    line["compile"] = time.perf_counter() - began
                want, want_lse = expected(c, sequences, arrays["sinks"])
                rtol, atol, whole = TOLERANCE[c["dtype"]]
                error = float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
                line["error"] = max(line["error"], error)
                empty = np.isinf(want_lse)
                fine = np.allclose(got, want, rtol, 4 * atol) and error <= whole
                fine &= bool((got_lse[empty] == want_lse[empty]).all())
                fine &= np.allclose(got_lse[~empty], want_lse[~empty], 1e-4, 1e-4)
                line["draws"] += 1
                if not fine:
                    line["wrong"] = f"draw {n}: relative error {error:.1e}, lengths {arrays['k_lens']}"
                    break
            if jitted._cache_size() != 1:
                line["wrong"] += f" compiled {jitted._cache_size()} times"
        except Exception as error:
            line["wrong"] = f"{type(error).__name__}: {str(error)[:300]}"
        yield line


# ------------------------------------------------------------------------------ one sequence, many batches


def batches(page_size: int, policy: dict[str, int], count: int, seed: int) -> Any:
    """Digests of every watched sequence's output and LSE, which each batch must give again."""
    import numpy as np
    import torch

    import bridge
    from bridge.fmha import attn_bias

    fixed, rng = torch.Generator("cuda").manual_seed(seed), np.random.default_rng((seed, page_size, len(str(policy))))
    kv_heads, heads, dim, most = 2, 8, 128, 2048
    lengths = [(1, 1), (1, 130), (2, 777), (1, 1024), (3, 1500), (1, most)]
    random = lambda *shape: torch.randn(shape, generator=fixed, device="cuda").bfloat16()  # noqa: E731
    watched = [(random(q, heads, dim), random(k, kv_heads, dim), random(k, kv_heads, dim)) for q, k in lengths]
    per_row = most // page_size
    seen: dict[str, str] = {}
    wrong = ""
    for _ in range(count):
        n = int(rng.choice([1, 2, 3, 4, 7, 16, 33, 64]))
        mine = {int(b): int(rng.integers(len(watched))) for b in rng.choice(n, min(n, 3), replace=False)}
        q_lens, k_lens, queries = [], [], []
        pool = torch.full((n * per_row + 1, page_size, kv_heads, 2 * dim), torch.nan, device="cuda").bfloat16()
        order = rng.permutation(n * per_row + 1)[: n * per_row].astype(np.int32)
        table = torch.from_numpy(order).cuda().view(n, per_row)
        for b in range(n):
            if b in mine:
                q, k, v = watched[mine[b]]
            else:
                q = torch.randn(int(rng.integers(1, 4)), heads, dim, device="cuda").bfloat16()
                k, v = torch.randn(2, int(rng.integers(0, most)), kv_heads, dim, device="cuda").bfloat16()
            at = torch.arange(k.shape[0], device="cuda")
            pool[table[b, at // page_size].long(), at % page_size] = torch.cat([k, v], -1)
            q_lens.append(q.shape[0])
            k_lens.append(k.shape[0])
            queries.append(q)
        keys, values = (x.contiguous().view(1, -1, kv_heads, dim) for x in (pool[..., :dim], pool[..., dim:]))
        bias = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_lens, k_lens, table, page_size, device="cuda"
        )
        out, lse = bridge.memory_efficient_attention_forward_requires_grad(
            torch.cat(queries)[None], keys, values, bias, backend="hopper", **policy
        )
        first = np.cumsum([0, *q_lens])
        for b, which in mine.items():
            rows = slice(int(first[b]), int(first[b + 1]))
            parts = (out[0, rows], lse[0, :, rows])
            raw = b"".join(x.contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in parts)
            digest = hashlib.sha256(raw).hexdigest()
            if seen.setdefault(str(which), digest) != digest:
                wrong = f"sequence {which} changed in a batch of {n}, page {page_size}"
    yield {"policy": str(policy), "batches": count, "bits": seen, "wrong": wrong}


def large() -> Any:
    """Two sequences in the last pages of a cache of 2**32 elements, keys and values each."""
    import torch

    import bridge
    from bridge.fmha import attn_bias

    kv_heads, heads, dim, page = 8, 32, 128, 64
    pages = 2**32 // (page * kv_heads * dim) + 3
    k, v = (torch.full((1, pages * page, kv_heads, dim), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    table = torch.tensor([[pages - 1, 0, pages - 2], [pages - 3, 1, pages // 2]], dtype=torch.int32, device="cuda")
    lengths = [2 * page + 9, page + 1]
    q = torch.randn(1, 2, heads, dim, device="cuda").bfloat16()
    wrong = ""
    want = []
    for b, length in enumerate(lengths):
        at = torch.arange(length, device="cuda")
        rows = table[b, at // page].long() * page + at % page
        for x in (k, v):
            x[0, rows] = torch.randn(length, kv_heads, dim, device="cuda").bfloat16()
        keys, values = (x[0, rows].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        p = torch.einsum("hd,khd->hk", q[0, b].double(), keys).mul(dim**-0.5).softmax(-1)
        want.append(torch.einsum("hk,khd->hd", p, values))
    bias = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([1, 1], lengths, table, page, device="cuda")
    got = bridge.memory_efficient_attention(q, k, v, bias, backend="hopper")[0].double()
    error = float((got - torch.stack(want)).norm() / torch.stack(want).norm())
    if not error <= 5e-3:
        wrong = f"cache of {k.numel()} elements: relative error {error:.1e}"
    yield {"large": k.numel(), "error": error, "wrong": wrong}
