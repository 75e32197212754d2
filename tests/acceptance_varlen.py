"""`varlen_attn`: rows of the acceptance tables, as `acceptance` describes them."""

import numpy as np

import cases
import oracle
from acceptance import BACKEND, attend, attend_gradients, draw, packed
from checks import close


def varlen_dense():
    """PyTorch's varlen against dense attention: (window, dtype, KV heads, scale, query lengths, key lengths)."""
    found = []
    for n, window in enumerate(cases.VARLEN_WINDOWS):
        q_lens, k_lens = [64, 192, 64, 128], [64, 192, 64, 128]
        if window in ((-1, 0), (4, 4), (0, -1)):
            q_lens, k_lens = [64, 128, 64, 192], [192, 64, 128, 64]
        if window == (1025, 1025):
            q_lens = k_lens = [1024, 64]
        kv_heads, scale = (16, 4)[n // 2 % 2], (None, 0.1)[n % 3 == 1]
        found.append((window, ("float16", "bfloat16")[n % 2], kv_heads, scale, q_lens, k_lens))
    return found


def check_varlen_dense(frontend, window, dtype, kv_heads, scale, q_lens, k_lens, seed=0):
    """Output and gradients at most twice as far from the float32 answer as dense attention in the low precision.

    As in PyTorch's suite the gradients are those of the tokens, from which linear maps make queries, keys and values.
    """
    rng = np.random.default_rng(seed)
    heads, dim = 16, 64
    shapes = [(sum(q_lens), heads, dim), *[(sum(k_lens), kv_heads, dim)] * 2, (sum(q_lens), heads, dim)]
    q, k, v, d_out = (draw(rng, shape, dtype) for shape in shapes)
    cu_q, cu_k = (np.cumsum([0, *lens]).astype(np.int32) for lens in (q_lens, k_lens))

    def attend_to(q, k, v):
        return frontend.api.varlen_attn(
            q, k, v, frontend.array(cu_q, "int32"), frontend.array(cu_k, "int32"), max(q_lens), max(k_lens),
            scale=scale, window_size=window, enable_gqa=heads != kv_heads, backend=BACKEND,
        )  # fmt: skip

    arrays = [frontend.array(x, dtype) for x in (q, k, v)]
    out, gradients = frontend.vjp(attend_to, arrays, frontend.array(d_out, dtype))
    assert frontend.dtype_of(out) == dtype
    found = [frontend.numpy(x) for x in (out, *gradients)]
    left, right = (None if w < 0 else w for w in window)
    golden, low = ([[], [], [], []] for _ in range(2))
    for b in range(len(q_lens)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        visible = visible_window(q_lens[b], k_lens[b], left, right)
        for target, rounding in ((golden, "float32"), (low, dtype)):
            results = attend_gradients(
                q[rows], k[keys], v[keys], d_out[rows],
                scale=dim**-0.5 if scale is None else scale, visible=visible, dtype=rounding,
            )  # fmt: skip
            for part, result in zip(target, results, strict=True):
                part.append(result)
    exact, plain = ([np.concatenate(x) for x in results] for results in (golden, low))
    maps = [rng.standard_normal((h * dim, 64)) / 32 for h in (heads, kv_heads, kv_heads)]

    def compared(results):
        """The output and the gradients of the tokens; those of queries apart where they are others than the keys'."""
        out, *gradients = results
        d_q, d_k, d_v = (x.reshape(len(x), -1) @ m for x, m in zip(gradients, maps, strict=True))
        return [out, d_q + d_k + d_v] if q_lens == k_lens else [out, d_q, d_k + d_v]

    for truth, *results in zip(*(compared(x) for x in (exact, found, plain)), strict=True):
        mine, dense_low = (np.abs(oracle.round_to(x, dtype) - truth).max() for x in results)
        x = truth.astype(np.float32)
        slack = 2 * np.abs(x + np.float32(0.3) - np.float32(0.3) - x).max()
        assert mine <= 2 * dense_low + slack


def visible_window(q_len, k_len, left, right):
    """`oracle.visible_table("window", ...)` by whole arrays."""
    diagonal = np.arange(q_len)[:, None] + k_len - q_len
    j = np.arange(k_len)[None, :]
    visible = np.ones((q_len, k_len), bool)
    if left is not None:
        visible &= j >= diagonal - left
    if right is not None:
        visible &= j <= diagonal + right
    return visible


INVARIANCE_WINDOWS = [(-1, -1), (-1, 0), (1025, 1025), (384, 0)]


def varlen_alone_and_in_batch(frontend, window, dtype="bfloat16", seed=0):
    """One sequence of 512 with `num_splits=1`, alone and beside one of 1024: two outputs [512, 2, 128]."""
    rng = np.random.default_rng(seed)
    q, k, v = (draw(rng, (1536, 2, 128), dtype) for _ in "qkv")
    outs = []
    for lens in ([512], [512, 1024]):
        cu = frontend.array(np.cumsum([0, *lens]), "int32")
        arrays = (frontend.array(x[: sum(lens)], dtype) for x in (q, k, v))
        out = frontend.api.varlen_attn(
            *arrays, cu, cu, max(lens), max(lens), window_size=window, num_splits=1, backend=BACKEND
        )
        outs.append(frontend.numpy(out)[:512])
    left, right = (None if w < 0 else w for w in window)
    visible = visible_window(512, 512, left, right)
    want, _ = attend(q[:512], k[:512], v[:512], scale=128**-0.5, visible=visible)
    close(outs[0], want, *cases.TOLERANCES[dtype])
    return outs


USED_LENGTHS = [[32, 64, 96, 48], [1, 1, 1, 1], [128, 128, 128, 128], [1, 128, 1, 128], [127, 63, 33, 17]]
SLOT, CACHE_HEADS, CACHE_DIM = 128, 8, 64


def cache_inputs(lengths, dtype, seed=0):
    """One query each of four sequences and their slots of 128 keys, NaN beyond the used length."""
    rng = np.random.default_rng(seed)
    q = draw(rng, (4, CACHE_HEADS, CACHE_DIM), dtype)
    kv = [draw(rng, (4, SLOT, CACHE_HEADS, CACHE_DIM), dtype) for _ in "kv"]
    for x in kv:
        for b, n in enumerate(lengths):
            x[b, n:] = np.nan
    return q, *kv


def call_varlen_cache(frontend, q, k, v, cu_k, dtype, function=None, **tables):
    """varlen_attn of four single queries -> numpy out; tables: seqused_k, block_table as numpy."""
    tables = {name: frontend.array(np.asarray(x), "int32") for name, x in tables.items()}
    q, k, v = (frontend.array(x, dtype) for x in (q, k, v))
    cu_q, cu_k = (frontend.array(np.asarray(x), "int32") for x in (range(5), cu_k))
    function = function or frontend.api.varlen_attn
    return frontend.numpy(function(q, k, v, cu_q, cu_k, 1, SLOT, backend=BACKEND, **tables))


def unpadded(frontend, lengths, q, k, v, dtype):
    """The same by packed keys, without seqused_k (NaN behind the last sequence)."""
    packed_kv = []
    for x in (k, v):
        rows = np.full((4 * SLOT, *x.shape[2:]), np.nan, np.float32)
        rows[: sum(lengths)] = np.concatenate([x[b, :n] for b, n in enumerate(lengths)])
        packed_kv.append(rows)
    return call_varlen_cache(frontend, q, *packed_kv, np.cumsum([0, *lengths]), dtype)


def check_seqused_k(frontend, lengths, dtype="bfloat16", seed=0):
    q, k, v = cache_inputs(lengths, dtype, seed)
    slots = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    out = call_varlen_cache(frontend, q, *slots, SLOT * np.arange(5), dtype, seqused_k=lengths)
    assert not np.isnan(out).any()
    close(out, unpadded(frontend, lengths, q, k, v, dtype), 1e-5, 1.6e-2)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    positions = [np.arange(SLOT * b, SLOT * b + n) for b, n in enumerate(lengths)]
    want, _ = packed(q, *flat, [1] * 4, positions, [None] * 4)
    close(out, want, *cases.TOLERANCES[dtype])


def check_block_table(frontend, page_size, lengths, function=None, dtype="bfloat16", seed=0):
    """Randomly permuted pages, junk entries behind the last used one, against no pages."""
    q, k, v = cache_inputs(lengths, dtype, seed)
    row_pages = SLOT // page_size if page_size <= SLOT else 1
    pages = np.random.default_rng(seed).permutation(4 * row_pages)
    pools = []
    for x in (k, v):
        padded = np.full((4, row_pages * page_size, *x.shape[2:]), np.nan, np.float32)
        padded[:, :SLOT] = x
        pool = np.full((4 * row_pages, page_size, *x.shape[2:]), np.nan, np.float32)
        pool[pages] = padded.reshape(-1, page_size, *x.shape[2:])
        pools.append(pool)
    table = pages.reshape(4, row_pages)
    table = cases.poison_table(table, cases.used_pages(lengths, [0] * 4, page_size, table.shape))
    cu_k = SLOT * np.arange(5)
    out = call_varlen_cache(frontend, q, *pools, cu_k, dtype, function, seqused_k=lengths, block_table=table)
    slots = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    want = call_varlen_cache(frontend, q, *slots, cu_k, dtype, seqused_k=lengths)
    assert not np.isnan(out).any()
    close(out, want, 1e-5, 1.6e-2)


def call_gqa(frontend, kv_heads, enable_gqa, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (draw(rng, (8, h, 64), dtype) for h in (16, kv_heads, kv_heads))
    cu = frontend.array(np.array([0, 8]), "int32")
    arrays = (frontend.array(x, dtype) for x in (q, k, v))
    out = frontend.api.varlen_attn(*arrays, cu, cu, 8, 8, enable_gqa=enable_gqa, backend=BACKEND)
    return frontend.numpy(out), attend(q, k, v, scale=64**-0.5)[0]
