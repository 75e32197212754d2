"""Calls that must raise before anything is computed, for both front ends.

Each entry: (name, call(frontend), kinds that the exception must all be, what its text must contain).
"""

import numpy as np
import pytest

RNG = np.random.default_rng(0)


def floats(frontend, *shape, dtype="float32"):
    return frontend.array(RNG.standard_normal(shape), dtype)


def attend(frontend, q=(2, 3, 4, 16), k=(2, 9, 4, 16), v=None, bias=None, dtypes=("float32",) * 3, **options):
    arrays = [floats(frontend, *shape, dtype=d) for shape, d in zip((q, k, v or k), dtypes)]
    return frontend.api.memory_efficient_attention(*arrays, bias, **options)


def masked(frontend, name, q=(1, 2, 4, 16), k=(1, 16, 4, 16), options=None, **arguments):
    return attend(frontend, q, k, bias=frontend.mask(name, arguments), **(options or {}))


def varlen(frontend, q=(6, 4, 16), k=(6, 4, 16), cu_q=(0, 2, 6), cu_k=(0, 2, 6), max_q=6, max_k=6, **options):
    for name in ("seqused_k", "block_table"):
        if name in options:
            options[name] = frontend.array(np.array(options[name]), "int32")
    return frontend.api.varlen_attn(
        floats(frontend, *q), floats(frontend, *k), floats(frontend, *k), frontend.host_ints(cu_q),
        None if cu_k is None else frontend.host_ints(cu_k), max_q, max_k, **options,
    )  # fmt: skip


def merge(frontend, outs, lses, **options):
    return frontend.api.merge_attentions(
        [floats(frontend, *s) for s in outs], [floats(frontend, *s) for s in lses], **options
    )


PADDED = "BlockDiagonalPaddedKeysMask"
GAPPY = "BlockDiagonalGappyKeysMask"
PAGED = "PagedBlockDiagonalPaddedKeysMask"
PAGED_GAPPY = "PagedBlockDiagonalGappyKeysMask"
LOCAL = "BlockDiagonalLocalAttentionPaddedKeysMask"

BAD_CALLS = [
    ("rank", lambda f: attend(f, q=(3, 16), k=(3, 16)), ValueError, "rank"),
    ("ranks-differ", lambda f: attend(f, q=(2, 3, 4, 16), k=(2, 9, 1, 4, 16)), ValueError, "rank"),
    ("rank-3-mask", lambda f: masked(f, PADDED, q=(1, 2, 16), k=(1, 16, 16), q_seqlen=[1, 1], kv_padding=8,
                                     kv_seqlen=[8, 8]), ValueError, "query"),
    ("dtype", lambda f: attend(f, dtypes=("int32", "int32", "int32")), TypeError, "query"),
    ("dtypes-differ", lambda f: attend(f, dtypes=("float32", "float16", "float32")), ValueError, "dtypes must be equal"),
    ("heads", lambda f: attend(f, k=(2, 9, 3, 16)), ValueError, "heads"),
    ("groups", lambda f: attend(f, q=(2, 3, 2, 4, 16), k=(2, 9, 3, 1, 16)), ValueError, "groups"),
    ("head-dim", lambda f: attend(f, k=(2, 9, 4, 8)), ValueError, "head_dim"),
    ("value-rows", lambda f: attend(f, v=(2, 8, 4, 16)), ValueError, "value"),
    ("batch", lambda f: attend(f, k=(1, 9, 4, 16)), ValueError, "batch"),
    ("batch-with-mask", lambda f: masked(f, PADDED, q=(2, 2, 4, 16), q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[8, 8]),
     ValueError, "batch"),
    ("dropout", lambda f: attend(f, p=0.1), NotImplementedError, "dropout"),
    ("dropout-is-value-error", lambda f: attend(f, p=0.1), ValueError, "dropout"),
    ("probability", lambda f: attend(f, p=1.5), ValueError, r"p: expected a probability in \[0, 1\], got 1.5"),
    ("both-splits", lambda f: attend(f, num_splits=2, split_size=64), ValueError, "num_splits, split_size"),
    ("no-splits", lambda f: attend(f, num_splits=0), ValueError, "num_splits: expected at least 1, got 0"),
    ("split-size", lambda f: attend(f, split_size=-5), ValueError, "split_size"),
    ("splits-float", lambda f: attend(f, num_splits=2.5), TypeError, "num_splits"),
    ("softcap-zero", lambda f: attend(f, softcap=0.0), ValueError, "softcap"),
    ("softcap-array", lambda f: attend(f, softcap=floats(f, 1)), TypeError, "softcap"),
    ("scale-array", lambda f: attend(f, scale=floats(f, 1)), TypeError, "scale"),
    ("scale-nan", lambda f: attend(f, scale=float("nan")), ValueError, "scale"),
    ("backend", lambda f: attend(f, backend="triton"), ValueError, "backend: expected one of auto, hopper"),
    ("bias-shape", lambda f: attend(f, bias=floats(f, 2, 4, 3, 8)), ValueError, r"attn_bias: expected shape"),
    ("bias-rank", lambda f: attend(f, q=(2, 3, 2, 2, 16), k=(2, 9, 2, 1, 16), bias=floats(f, 2, 4, 3, 9)),
     ValueError, "attn_bias"),
    ("bias-type", lambda f: attend(f, bias="causal"), TypeError, "attn_bias"),
    ("sinks-shape", lambda f: attend(f, sinks=floats(f, 3)), ValueError, "sinks"),
    ("sinks-dtype", lambda f: attend(f, sinks=f.array(np.ones(4), "int32")), TypeError, "sinks"),
    ("kv-lengths-shape", lambda f: attend(f, kv_lengths=f.host_ints([1, 2, 3])), ValueError, "kv_lengths"),
    ("kv-lengths-beyond", lambda f: attend(f, kv_lengths=f.host_ints([1, 10])), ValueError, r"\[0, 9\]"),
    ("kv-lengths-negative", lambda f: attend(f, kv_lengths=f.host_ints([1, -1])), ValueError, "kv_lengths"),
    ("kv-lengths-dtype", lambda f: attend(f, kv_lengths=floats(f, 2)), TypeError, "kv_lengths"),
    ("kv-lengths-mask", lambda f: masked(f, PADDED, q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[8, 8],
                                         options={"kv_lengths": f.host_ints([1])}), ValueError, "kv_lengths"),
    ("quantize-pv", lambda f: attend(f, quantize_pv=True), TypeError, "quantize_pv"),
    # masks
    ("length-beyond-padding", lambda f: masked(f, PADDED, q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[9, 1]),
     AssertionError, "padding"),
    ("length-beyond-rows", lambda f: masked(f, PADDED, k=(1, 8, 4, 16), q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[8, 1]),
     ValueError, "kv_seqlen"),
    ("rows-not-divisible", lambda f: masked(f, PADDED, k=(1, 15, 4, 16), q_seqlen=[1, 1], kv_padding=8,
                                            kv_seqlen=[7, 1]), RuntimeError, "key"),
    ("counts-differ", lambda f: masked(f, PADDED, q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[8]), AssertionError, "seqlen"),
    ("queries-differ", lambda f: masked(f, PADDED, q_seqlen=[1, 2], kv_padding=8, kv_seqlen=[8, 1]), ValueError, "query"),
    ("negative-length", lambda f: masked(f, PADDED, q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[-1, 1]), ValueError, "len"),
    ("gappy-beyond-rows", lambda f: masked(f, GAPPY, q_seqlen=[1, 1], kv_seqstarts=[0, 10, 16], kv_seqlen=[4, 7]),
     ValueError, "kv_seq"),
    ("gappy-starts", lambda f: masked(f, GAPPY, q_seqlen=[1, 1], kv_seqstarts=[0, 10], kv_seqlen=[4, 5]),
     ValueError, "seqstart"),
    ("negative-window", lambda f: masked(f, LOCAL, q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[8, 1], window_left=-2,
                                         window_right=0), ValueError, "window_left"),
    ("page-size", lambda f: masked(f, PAGED, k=(1, 15, 4, 16), q_seqlen=[1, 1], kv_seqlen=[3, 1],
                                   block_tables=[[0], [1]], page_size=4), ValueError, "page_size"),
    ("page-size-zero", lambda f: masked(f, PAGED, q_seqlen=[1, 1], kv_seqlen=[3, 1], block_tables=[[0], [1]],
                                        page_size=0), ValueError, "page_size"),
    ("page-beyond", lambda f: masked(f, PAGED, q_seqlen=[1, 1], kv_seqlen=[3, 1], block_tables=[[0], [4]], page_size=4),
     ValueError, "block_tables: row 1 needs pages"),
    ("page-negative", lambda f: masked(f, PAGED, q_seqlen=[1, 1], kv_seqlen=[3, 1], block_tables=[[-1], [0]],
                                       page_size=4), ValueError, "block_tables"),
    ("tables-shape", lambda f: masked(f, PAGED, q_seqlen=[1, 1], kv_seqlen=[3, 1], block_tables=[[0]], page_size=4),
     ValueError, "block_tables"),
    ("beyond-the-row-of-pages", lambda f: masked(f, PAGED, q_seqlen=[1, 1], kv_seqlen=[5, 1], block_tables=[[0], [1]],
                                                 page_size=4), AssertionError, "len"),
    ("paged-gappy-beyond", lambda f: masked(f, PAGED_GAPPY, q_seqlen=[1, 1], kv_seqstarts=[2, 0], kv_seqlen=[3, 1],
                                            block_tables=[[0], [1]], page_size=4), ValueError, "len"),
    # varlen
    ("varlen-rank", lambda f: varlen(f, q=(1, 6, 4, 16)), ValueError, "query"),
    ("varlen-gqa", lambda f: varlen(f, k=(6, 2, 16)), ValueError, "enable_gqa=True"),
    ("varlen-gqa-multiple", lambda f: varlen(f, k=(6, 3, 16), enable_gqa=True), ValueError, "multiple of kv heads"),
    *((f"varlen-scale-{s}", lambda f, s=s: varlen(f, scale=s), ValueError, "scale") for s in (0.0, -1.0, float("nan"))),
    ("varlen-window", lambda f: varlen(f, window_size=(1, 2, 3)), ValueError, "window_size: expected length 2, got 3"),
    ("varlen-window-array", lambda f: varlen(f, window_size=(floats(f, 1), 0)), TypeError, "window_size"),
    ("varlen-cu-missing", lambda f: varlen(f, cu_k=None), ValueError, "cu_seq_k"),
    ("varlen-cu-shape", lambda f: varlen(f, cu_k=(0, 6)), ValueError, "cu_seq_k"),
    ("varlen-cu-order", lambda f: varlen(f, cu_k=(0, 4, 2)), ValueError, "cu_seq_k"),
    ("varlen-cu-start", lambda f: varlen(f, cu_q=(1, 4, 6)), ValueError, "cu_seq_q"),
    ("varlen-cu-beyond", lambda f: varlen(f, cu_q=(0, 4, 7)), ValueError, "cu_seq_q"),
    ("varlen-max-q", lambda f: varlen(f, max_q=3), ValueError, "max_q"),
    ("varlen-max-k", lambda f: varlen(f, max_k=3), ValueError, "max_k"),
    ("varlen-max-float", lambda f: varlen(f, max_k=6.5), TypeError, "max_k"),
    ("varlen-table-alone", lambda f: varlen(f, k=(2, 4, 4, 16), cu_k=None, block_table=[[0], [1]]), ValueError,
     "seqused_k"),
    ("paged-type", lambda f: f.mask(PADDED, dict(q_seqlen=[1, 1], kv_padding=8, kv_seqlen=[3, 4])).make_paged(
        f.array(np.zeros((2, 1)), "int32"), 8, f.mask_class(PAGED_GAPPY)), ValueError, "paged_type"),
    ("fp8-value", lambda f: f.api.memory_efficient_attention(
        floats(f, 1, 1, 2, 16), f.api.formats.quantize(floats(f, 1, 8, 2, 16), "fp8"),
        f.api.formats.quantize(floats(f, 1, 8, 2, 16), "int8"), quantize_pv=True), TypeError, "quantize_pv"),
    ("varlen-aux", lambda f: varlen(f, return_aux=True), ValueError, "return_aux"),
    ("cache-as-key", lambda f: f.api.memory_efficient_attention(
        floats(f, 1, 1, 4, 16), f.api.formats.KVCache(*(floats(f, 1, 8, 4, 16),) * 2), floats(f, 1, 8, 4, 16)),
     TypeError, "key: .*pass its k and v"),
    ("varlen-both-splits", lambda f: varlen(f, num_splits=1, split_size=1), ValueError, "num_splits"),
    # merge
    ("merge-none", lambda f: merge(f, [], []), ValueError, "at least one chunk"),
    ("merge-counts", lambda f: merge(f, [(1, 2, 3, 4)] * 2, [(1, 3, 2)]), ValueError, "lse_split"),
    ("merge-shapes", lambda f: merge(f, [(1, 2, 3, 4), (1, 3, 3, 4)], [(1, 3, 2)] * 2), ValueError, "attn_split"),
    ("merge-lse", lambda f: merge(f, [(1, 2, 3, 4)] * 2, [(1, 2, 3)] * 2), ValueError, "lse_split"),
    ("merge-rank", lambda f: merge(f, [(2, 3, 4)], [(3, 2)]), ValueError, "attn_split"),
]  # fmt: skip


def check(frontend, call, kind, text):
    with pytest.raises(kind, match=text):
        call(frontend)


IDS = [name for name, *_ in BAD_CALLS]
