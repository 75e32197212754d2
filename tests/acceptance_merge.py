"""Partial results and their merge: rows of the acceptance tables, as `acceptance` describes them."""

import itertools
import math

import numpy as np

import cases
import oracle
from acceptance import BACKEND, CLASSES, attend_gradients, draw, packed, partial
from checks import close

SELF_MERGE = [  # B, Mk, G (None: BMHK), H
    (13, 5, 1, 11),
    (13, 5, 7, 11),
    (13, 5, None, 11),
    (1, 100000, 1, 1),
]


def check_merge_with_itself(frontend, batch, k_len, groups, heads, seed=0):
    """The same output and LSE + ln 2, from a list or stacked, with and without the LSE; dtypes stay."""
    rng = np.random.default_rng(seed)
    q_len, dim = 3, 128
    lead, shared = ((heads,), (1,)) if groups is None else ((groups, heads), (groups, 1))
    q, k, v = (
        cases.round_f32(3 * rng.random((batch, m, *h, dim), np.float32), "bfloat16")
        for m, h in ((q_len, lead), (k_len, shared), (k_len, shared))
    )
    query = frontend.array(q, "bfloat16")
    k, v = (frontend.share_heads(frontend.array(x, "bfloat16"), query) for x in (k, v))
    out32, lse1 = partial(frontend, query, k, v)
    assert frontend.dtype_of(out32) == "float32"
    assert tuple(out32.shape) == (batch, q_len, *lead, dim) and tuple(lse1.shape) == (batch, *lead, q_len)
    variants = [("float32", True, True), ("bfloat16", False, False)]
    for dtype, as_list, write_lse in variants if heads == 1 else [(d, not a, w) for d, a, w in variants]:
        out1 = frontend.cast(out32, dtype)
        outs, lses = [out1, out1], [lse1, lse1]
        if not as_list:
            outs, lses = (frontend.stack(x) for x in (outs, lses))
        out, lse = frontend.merge(outs, lses, write_lse=write_lse)
        assert frontend.dtype_of(out) == dtype and out.shape == out1.shape
        close(frontend.numpy(out), frontend.numpy(out1), 1e-3, 1e-3)
        if not write_lse:
            assert lse is None
            continue
        assert frontend.dtype_of(lse) == frontend.dtype_of(lse1) and lse.shape == lse1.shape
        close(frontend.numpy(lse), frontend.numpy(lse1) + math.log(2), 1e-3, 1e-3)


def check_partial_paged(frontend, groups, seed=1):
    """128 sequences that all look at one page; shapes of out and LSE."""
    rng = np.random.default_rng(seed)
    batch, heads, dim, page_size = 128, 8, 128, 256
    lead, shared = ((heads,), (1,)) if groups == 1 else ((groups, heads), (groups, 1))
    k_lens = [1] + [100] * (batch - 1)
    arguments = {"q_seqlen": [1] * batch, "kv_seqlen": k_lens, "block_tables": [[0]] * batch, "page_size": page_size}
    q, k, v = (draw(rng, (1, m, *h, dim), "bfloat16") for m, h in ((batch, lead), (256, shared), (256, shared)))
    k[:, 100:] = v[:, 100:] = np.nan
    query = frontend.array(q, "bfloat16")
    keys, values = (frontend.share_heads(frontend.array(x, "bfloat16"), query) for x in (k, v))
    out, lse = partial(frontend, query, keys, values, frontend.mask(CLASSES[7], arguments))
    assert frontend.dtype_of(out) == "float32"
    assert tuple(out.shape) == (1, batch, *lead, dim)
    assert tuple(lse.shape) == (1, *lead, batch)
    q, k, v = (cases.flat_heads(x)[0] for x in (q, k, v))
    want, want_lse = packed(q, k, v, [1] * batch, [np.arange(n) for n in k_lens], [None] * batch)
    close(frontend.numpy(out), want.reshape(out.shape), *cases.TOLERANCES["float32"])
    close(frontend.numpy(lse), want_lse.reshape(lse.shape), *cases.LSE_TOLERANCE)


CHUNKED_DECODING = [(128, 160, 2, 2, False, 1), (1, 8192, 1, 1, True, 32)]  # B, MAX_T, G, Mq, list, splits


def check_chunked_decoding(frontend, batch, max_t, groups, q_len, as_list, splits, seed=1):
    """Attention to ten chunks of the keys, merged, against attention to all of them; float32 partials."""
    rng = np.random.default_rng(seed)
    heads, dim, chunks = 8, 128, 10
    lead, shared = ((heads,), (1,)) if groups == 1 else ((groups, heads), (groups, 1))
    step = -(-max_t // chunks)
    edges = [min(n * step, max_t) for n in range(chunks + 1)]
    k_lens = rng.integers(edges[-2] + q_len, max_t, batch).tolist()
    q = frontend.array(draw(rng, (1, batch * q_len, *lead, dim), "bfloat16"), "bfloat16")
    kv = [draw(rng, (batch, max_t, *shared, dim), "bfloat16") for _ in "kv"]

    def attend_to(first, last, mask_class):
        lens = [min(max(n - first, 0), last - first) for n in k_lens]
        arguments = {"q_seqlen": [q_len] * batch, "kv_padding": last - first, "kv_seqlen": lens}
        part = (frontend.array(x[:, first:last].reshape(1, -1, *shared, dim), "bfloat16") for x in kv)
        part = (frontend.share_heads(x, q) for x in part)
        return partial(frontend, q, *part, frontend.mask(mask_class, arguments), num_splits=splits)

    parts = [attend_to(a, b, CLASSES[0]) for a, b in itertools.pairwise(edges[:-1])]
    parts.append(attend_to(*edges[-2:], CLASSES[1]))
    assert all(frontend.dtype_of(out) == "float32" for out, _ in parts)
    outs, lses = ([part[n] for part in parts] for n in (0, 1))
    if not as_list:
        outs, lses = (frontend.stack(x) for x in (outs, lses))
    out, lse = frontend.merge(outs, lses)
    whole_out, whole_lse = attend_to(0, max_t, CLASSES[1])
    close(frontend.numpy(out), frontend.numpy(whole_out), 1e-3, 1e-3)
    close(frontend.numpy(lse), frontend.numpy(whole_lse), 1e-3, 1e-3)


def check_shared_prefix(frontend, max_t=8192, gqa=True, splits=32, seed=1):
    """20 tokens that two of three sequences share are attended to once."""
    rng = np.random.default_rng(seed)
    groups, heads, dim, shared = 2, 16, 128, 20
    lengths, starts = [30, 35, 40], [shared, max_t + shared, 2 * max_t, 3 * max_t]
    q = frontend.array(draw(rng, (1, 3, groups, heads, dim), "bfloat16"), "bfloat16")
    kv = []
    for _ in "kv":  # only what some mask below may read holds numbers
        x = np.full((3, max_t, groups, 1 if gqa else heads, dim), np.nan, np.float32)
        for b, n in enumerate(lengths):
            x[b, :n] = draw(rng, x[b, :n].shape, "bfloat16")
        x[1, :shared] = x[0, :shared]
        kv.append(frontend.share_heads(frontend.array(x.reshape(1, -1, *x.shape[2:]), "bfloat16"), q))
    ones, counts = [1, 1, 1], [10, 15, 40]
    masks = [
        frontend.mask(CLASSES[1], {"q_seqlen": ones, "kv_padding": max_t, "kv_seqlen": lengths}),
        frontend.mask(CLASSES[0], {"q_seqlen": [2, 1], "kv_padding": max_t, "kv_seqlen": [shared, 0]}),
        frontend.mask(CLASSES[4], {"q_seqlen": ones, "kv_seqstarts": starts, "kv_seqlen": counts}),
    ]
    whole, *parts = (partial(frontend, q, *kv, mask, num_splits=splits) for mask in masks)
    assert tuple(parts[0][0].shape) == (1, 3, groups, heads, dim)
    assert tuple(parts[0][1].shape) == (1, groups, heads, 3)
    np.testing.assert_array_equal(frontend.numpy(parts[0][1])[..., 2], -np.inf)
    out, lse = frontend.merge(*([p[n] for p in parts] for n in (0, 1)), output_dtype=q.dtype)
    assert frontend.dtype_of(out) == "bfloat16"
    close(frontend.numpy(out), frontend.numpy(whole[0]), 2e-3, 1e-2)
    close(frontend.numpy(lse), frontend.numpy(whole[1]), 1e-3, 1e-3)


MERGE_VS_FORMULA = [  # MSLK's `test_merge_attentions_against_ref`: 16 chunks [B, M, (G,) H, D]
    cases.MergeCase("merge-16-12-137-8", 16, (12, 137, 8, 128)),
    cases.MergeCase("merge-16-1-137-2x8", 16, (1, 137, 2, 8, 128)),
]


def check_merge_vs_formula(frontend, case, seed=1):
    inputs = cases.make_merge_inputs(case, seed)
    outs, lses = (frontend.array(inputs[name], "float32") for name in ("outs", "lses"))
    for result, want in zip(frontend.merge(outs, lses), oracle.merge(**inputs), strict=True):
        close(frontend.numpy(result), want, 1e-4, 1e-4)


def check_training_merge(frontend, seed=1):
    """Gradients through two merged halves against those of the whole, and both against float64."""
    rng = np.random.default_rng(seed)
    length, dim, split = 50, 128, 25
    *arrays, weights = (cases.round_f32(3 * rng.random((1, length, 1, dim)), "bfloat16") for _ in range(4))

    def whole(q, k, v):
        return frontend.api.memory_efficient_attention(q, k, v, backend=BACKEND)

    def merged(q, k, v):
        parts = [partial(frontend, q, k[:, keys], v[:, keys]) for keys in (slice(0, split), slice(split, length))]
        return frontend.merge(*([p[n] for p in parts] for n in (0, 1)), output_dtype=q.dtype)[0]

    def run(function):
        low = (frontend.array(x, "bfloat16") for x in arrays)
        out, gradients = frontend.vjp(function, list(low), frontend.array(weights, "bfloat16"))
        return frontend.numpy(out), [frontend.numpy(x) for x in gradients]

    out, gradients = run(whole)
    truth, *truths = attend_gradients(*(x[0] for x in arrays), weights[0], scale=dim**-0.5)
    close(out[0], truth, *cases.TOLERANCES["bfloat16"])
    other, others = run(merged)
    close(other, out, 1e-3, 0.1)
    for mine, plain, exact in zip(others, gradients, truths, strict=True):
        close(mine, plain, 0.9, 0.1)
        close(mine[0], exact, 0.1, 0.1)
