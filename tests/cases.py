"""Attention problems as plain data, shared by the JAX and the torch tests.

A case says everything about a problem except its numbers. `make_inputs(case, seed)` draws those (numpy float32, rounded
to the case's dtype) and `expected(case, inputs)` is the oracle's answer. Varlen and merge problems have their own case
classes and `make_...` / `expected_...` functions. With `poison=True` whatever must not be read holds NaN or infinity,
and block-table entries of pages that hold no key hold junk; the answer is the same as with `poison=False`.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

import oracle

# name -> (kind of oracle.visible_table, layout of oracle.key_positions)
MASK_CLASSES = {
    "BlockDiagonalPaddedKeysMask": ("all", "padded"),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("causal", "padded"),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("window", "padded"),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("local", "padded"),
    "BlockDiagonalGappyKeysMask": ("all", "gappy"),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ("causal", "gappy"),
    "PagedBlockDiagonalPaddedKeysMask": ("all", "paged"),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": ("causal", "paged"),
    "PagedBlockDiagonalGappyKeysMask": ("all", "paged gappy"),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": ("causal", "paged gappy"),
}

# argument of oracle.visible_table -> argument of the factories
WINDOW_NAMES = {"left": "window_left", "right": "window_right", "window": "window_size"}

# output dtype -> (atol, rtol) of the output; the LSE has its own
TOLERANCES = {"float32": (3e-4, 2e-5), "float16": (4e-3, 4e-4), "bfloat16": (2e-2, 5e-3)}
LSE_TOLERANCE = (2e-4, 1e-5)
MERGE_TOLERANCES = {**TOLERANCES, "float32": (1e-4, 1e-4)}

GARBAGE = (np.nan, np.inf, -np.inf)
JUNK_PAGES = (-1, 10**6, -7)


@dataclass(frozen=True)
class Case:
    """A fmha call.

    mask_class names one of the ten classes of `MASK_CLASSES` (or None: dense) and `mask` holds the keyword arguments of
    its factory (`from_seqlens_local` where there is a window, else `from_seqlens`), as plain lists and ints. Paged
    gappy classes take the starts of the N sequences within their own rows, and counts.

    q_shape is [B, Mq, D], [B, Mq, Hq, D] or [B, Mq, G, H, D]; k_shape has the same number of axes. A 4-D key has Hq or
    fewer heads (GQA); a 5-D key has [G, H] heads, or [G, 1] to be broadcast with `expand`.
    """

    name: str
    mask_class: str | None
    mask: dict
    q_shape: tuple
    k_shape: tuple
    dtype: str = "float16"
    v_dim: int | None = None  # the head dim of the values where it is another one
    options: dict = field(default_factory=dict)  # keyword arguments of the call: scale, softcap, num_splits
    sinks: bool = False  # inputs["sinks"]: float32 [Hq]
    bias_shape: tuple | None = None  # inputs["bias"]: float32, broadcasts to [B, (G,) Hq, Mq, Mk], holds -inf
    kv_lengths: list | None = None  # inputs["kv_lengths"]: int32 [B]
    magnitude: float = 1.0  # standard deviation of q, k and v

    @property
    def tolerance(self):
        """(atol, rtol) of the output."""
        return TOLERANCES[self.dtype]

    @property
    def q_heads(self):
        return math.prod(self.q_shape[2:-1])

    @property
    def lse_shape(self):
        """[B, (G,) H, Mq]; a 3-D query has one head."""
        batch, q_len, *heads, _ = self.q_shape
        return (batch, *(heads or [1]), q_len)

    def __str__(self):
        return self.name


def round_f32(x, dtype):
    """x rounded to dtype, as float32."""
    return oracle.round_to(x, dtype).astype(np.float32)


def expand(case, x):
    """A 5-D key or value [B, M, G, 1, D] as a (stride 0) view [B, M, G, H, D]; any other as it is."""
    if x.ndim != 5 or x.shape[3] == case.q_shape[3]:
        return x
    return np.broadcast_to(x, (*x.shape[:3], case.q_shape[3], x.shape[4]))


def mask_layout(case, mask=None):
    """(q_lens, positions, visible) of a case with a mask: see oracle.block_diagonal."""
    mask = case.mask if mask is None else mask
    kind, layout = MASK_CLASSES[case.mask_class]
    positions = oracle.key_positions(
        layout, mask["kv_seqlen"], total=case.k_shape[1], starts=mask.get("kv_seqstarts"),
        block_tables=mask.get("block_tables"), page_size=mask.get("page_size"),
    )  # fmt: skip
    window = {a: mask[b] for a, b in WINDOW_NAMES.items() if b in mask}
    q_lens = mask["q_seqlen"]
    visible = [oracle.visible_table(kind, q, len(p), **window) for q, p in zip(q_lens, positions, strict=True)]
    return q_lens, positions, visible


def used_pages(k_lens, starts, page_size, shape):
    """Boolean [N, pages_per_row]: does the logical page hold a key?"""
    used = np.zeros(shape, bool)
    for b, (start, k_len) in enumerate(zip(starts, k_lens, strict=True)):
        if k_len:
            used[b, start // page_size : (start + k_len - 1) // page_size + 1] = True
    return used


def poison_rows(x, rows):
    """Writes NaN and infinities over the rows (indices into the leading axis of x)."""
    for n, row in enumerate(rows):
        x[row] = GARBAGE[n % len(GARBAGE)]


def poison_table(table, used):
    """The block table (nested lists or array) with junk where `used` is False, as an int array."""
    table = np.array(table, np.int64).reshape(used.shape)
    table[~used] = np.resize(JUNK_PAGES, int((~used).sum()))
    return table


def make_inputs(case, seed=0, poison=True):
    """-> {"q", "k", "v"} float32 arrays of values of case.dtype; {"mask"}: the factory's arguments (None when dense);
    {"sinks", "bias", "kv_lengths"}: arrays or None."""
    rng = np.random.default_rng(seed)
    v_shape = (*case.k_shape[:-1], case.v_dim or case.k_shape[-1])
    q, k, v = (
        round_f32(case.magnitude * rng.standard_normal(shape), case.dtype)
        for shape in (case.q_shape, case.k_shape, v_shape)
    )
    sinks = rng.standard_normal(case.q_heads).astype(np.float32) if case.sinks else None
    bias = None
    if case.bias_shape is not None:
        bias = rng.standard_normal(case.bias_shape).astype(np.float32)
        bias[rng.random(case.bias_shape) < 0.2] = -np.inf
        if bias.shape[-2] > 1:
            bias[..., -1, :] = -np.inf
    mask = None if case.mask_class is None else dict(case.mask)
    lengths = None if case.kv_lengths is None else np.array(case.kv_lengths, np.int32)
    if poison and mask is not None:
        _, positions, _ = mask_layout(case)
        outside = np.setdiff1d(np.arange(case.k_shape[1]), np.concatenate([*positions, []]))
        poison_rows(k[0], outside)
        poison_rows(v[0], outside[::-1])
        if "block_tables" in mask:
            k_lens, table = mask["kv_seqlen"], np.array(mask["block_tables"])
            starts = mask.get("kv_seqstarts", [0] * len(k_lens))
            used = used_pages(k_lens, starts, mask["page_size"], table.shape)
            mask["block_tables"] = poison_table(table, used).tolist()
    elif poison and lengths is not None:
        for b, length in enumerate(lengths):
            poison_rows(k[b], range(length, k.shape[1]))
            poison_rows(v[b], range(length, v.shape[1]))
    return {"q": q, "k": k, "v": v, "mask": mask, "sinks": sinks, "bias": bias, "kv_lengths": lengths}


def flat_heads(x):
    """[B, M, D] or [B, M, G, H, D] -> [B, M, heads, D]."""
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:-1]), x.shape[-1])


def expected(case, inputs):
    """-> out [*q_shape[:-1], Dv] and lse (case.lse_shape), float64. -inf marks the LSE of rows that see nothing."""
    q, k, v = (flat_heads(inputs[name]) for name in "qkv")
    options = {name: case.options.get(name) for name in ("scale", "softcap")}
    if case.mask_class is None:
        bias = inputs["bias"]
        if bias is not None:  # [B, (G, H,) Mq, Mk], any axis 1 -> [B, Hq, Mq, Mk]
            batch, q_len, *heads, _ = case.q_shape
            bias = np.broadcast_to(bias, (batch, *heads, q_len, case.k_shape[1]))
            bias = bias.reshape(batch, case.q_heads, q_len, case.k_shape[1])
        out, lse = oracle.dense(q, k, v, bias=bias, sinks=inputs["sinks"], kv_lengths=inputs["kv_lengths"], **options)
    else:
        q_lens, positions, visible = mask_layout(case, inputs["mask"])
        out, lse = oracle.block_diagonal(q[0], k[0], v[0], q_lens, positions, visible, sinks=inputs["sinks"], **options)
    return out.reshape(*case.q_shape[:-1], v.shape[-1]), lse.reshape(case.lse_shape)


# Cases with a mask

LAYOUTS = [  # (query heads, key heads): 1, 4 and 16 query heads per KV head, 4-D and 5-D
    ((2,), (2,)),
    ((2, 4), (2, 1)),
    ((16,), (1,)),
    ((2, 3), (2, 3)),
    ((8,), (2,)),
    ((1, 16), (1, 1)),
]

SIZES = [  # page size, head dim, key lengths, query lengths: "one", "equal", "variable" (with 0 and more than the keys)
    (16, 32, [0, 1, 16, 17, 48], {"one": [1] * 5, "equal": [3] * 5, "variable": [2, 0, 20, 5, 3]}),
    (8, 64, [8, 9, 40], {"one": [1] * 3, "equal": [12] * 3, "variable": [0, 12, 5]}),
    (64, 16, [64, 65, 80], {"one": [1] * 3, "equal": [2] * 3, "variable": [17, 1, 0]}),
]

WINDOWS = [(4, 0), (0, 0), (1, 1), (0, 5), (3, 2), (10, 1), (100, 100), (0, 30), (20, 7)]
WINDOW_SIZES = [1, 3, 2, 8, 16, 17, 100, 0, 5]
CASE_OPTIONS = [
    *({}, {"num_splits": 1}, {"num_splits": 3}),
    *({}, {"softcap": 2.0}, {}),
    *({"num_splits": 2}, {"scale": 0.4}, {}),
]
CASE_DTYPES = ["float16", "bfloat16", "float32"]


def make_mask(mask_class, q_lens, k_lens, *, page_size=16, window=(0, 0), spread="gaps", slack=0, seed=0):
    """-> (the factory's arguments, length of the key axis).

    window: (left, right), or (size,) for causal-local. spread: where gappy keys start, "gaps", "reversed" or
    "overlap". slack: unused keys (padded) or pages (paged) at the end of each row. Every block-table entry is valid.
    """
    kind, layout = MASK_CLASSES[mask_class]
    count, longest = len(k_lens), max(k_lens)
    mask = {"q_seqlen": list(q_lens), "kv_seqlen": list(k_lens)}
    if kind == "window":
        mask["window_left"], mask["window_right"] = window
    elif kind == "local":
        (mask["window_size"],) = window
    if layout == "padded":
        mask["kv_padding"] = longest + slack
        return mask, count * (longest + slack)
    if layout == "gappy":
        order = range(count) if spread != "reversed" else reversed(range(count))
        starts, end = [0] * count, 0
        for b in order:
            starts[b] = 10 * b if spread == "overlap" else end + 3
            end = max(end, starts[b] + k_lens[b])
        mask["kv_seqstarts"] = [*starts, end + 5]
        return mask, end + 5
    starts = [0] * count
    if layout == "paged gappy":
        starts = [(0, page_size, 1, page_size - 1, 5)[(b + len(spread)) % 5] for b in range(count)]
        mask["kv_seqstarts"] = starts
    longest = max(start + k_len for start, k_len in zip(starts, k_lens, strict=True))
    row_pages = max(-(-longest // page_size) + slack, 1)
    pages = np.random.default_rng(seed).permutation(count * row_pages + 2)
    mask["block_tables"] = pages[: count * row_pages].reshape(count, row_pages).tolist()
    mask["page_size"] = page_size
    return mask, len(pages) * page_size


def mask_case(name, mask_class, q_lens, k_lens, q_heads, k_heads, dim, *, total=None, mask=None, **fields):
    """A Case on packed queries and keys; `fields` are make_mask's arguments and the Case's own."""
    names = ("page_size", "window", "spread", "slack", "seed")
    made, made_total = make_mask(mask_class, q_lens, k_lens, **{n: fields.pop(n) for n in names if n in fields})
    q_shape, k_shape = (1, sum(q_lens), *q_heads, dim), (1, total or made_total, *k_heads, dim)
    return Case(name, mask_class, {**made, **(mask or {})}, q_shape, k_shape, **fields)


def mask_cases():
    """Every class with one, several equal and variable query lengths, two of three sizes each; then special ones."""
    cases = []
    for c, (mask_class, (kind, _)) in enumerate(MASK_CLASSES.items()):
        for p, pattern in enumerate(("one", "equal", "variable")):
            for s, (page_size, dim, k_lens, q_lens) in enumerate(SIZES):
                if (p + s + c) % 3 == 2:
                    continue
                n = 3 * p + s
                q_heads, k_heads = LAYOUTS[(len(cases) + c) % len(LAYOUTS)]
                dtype = CASE_DTYPES[(s + 2 * p + c) % 3]
                heads = "x".join(map(str, q_heads))
                cases.append(
                    mask_case(
                        f"{short_name(mask_class)}-{pattern}-page{page_size}-heads{heads}-{dtype}",
                        mask_class, q_lens[pattern], k_lens, q_heads, k_heads, dim, page_size=page_size, dtype=dtype,
                        window=(WINDOW_SIZES[n],) if kind == "local" else WINDOWS[n],
                        spread=("gaps", "reversed", "overlap")[s], slack=(0, 0, 1)[s], seed=n,
                        options=CASE_OPTIONS[n], sinks=n % 4 == 1 and len(q_heads) == 1,
                    )
                )  # fmt: skip
    return cases + special_mask_cases()


def short_name(mask_class):
    """E.g. "PagedCausalGappy"."""
    words = mask_class.replace("WithOffset", "").replace("Attention", "").replace("BlockDiagonal", "")
    return words.replace("KeysMask", "")


def special_mask_cases():
    padded, causal, paged = (
        "BlockDiagonalPaddedKeysMask",
        "BlockDiagonalCausalWithOffsetPaddedKeysMask",
        "PagedBlockDiagonalPaddedKeysMask",
    )
    shared = [[3, 1], [3, 0], [3, 3]]
    return [
        # the row pitch is (length of the key axis) / (number of sequences), whatever the padding says
        mask_case("pitch-below-padding", causal, [2, 2], [24, 7], (4,), (1,), 32, mask={"kv_padding": 64}),
        mask_case("pitch-above-padding", padded, [1, 0], [20, 0], (2,), (2,), 32, total=60),
        mask_case("all-keys-empty", causal, [2, 1], [0, 0], (4,), (2,), 32, slack=16, dtype="bfloat16"),
        mask_case("all-keys-empty-paged", paged, [1, 1], [0, 0], (2, 4), (2, 1), 32, slack=2),
        mask_case("all-keys-empty-sinks", padded, [1, 1], [0, 5], (4,), (2,), 32, sinks=True),
        mask_case("no-queries", causal, [0, 0], [3, 5], (2,), (2,), 16),
        mask_case("one-sequence", causal, [16], [33], (4,), (1,), 64, sinks=True, options={"softcap": 3.0}),
        mask_case("page-of-one", paged.replace("Padded", "CausalWithOffsetPadded"), [3, 2], [9, 5], (4,), (1,), 32,
                  page_size=1, slack=3),
        mask_case("pages-shared-by-rows", paged, [1, 1, 1], [20, 16, 32], (8,), (2,), 32, total=64,
                  mask={"block_tables": shared}),
        mask_case("other-value-dim", padded, [2, 3], [17, 30], (4,), (2,), 32, v_dim=64),
        mask_case("large-scores", causal, [4, 4], [60, 33], (4,), (2,), 64, magnitude=3.0),
        mask_case("negative-scale", causal, [4, 4], [60, 33], (4,), (2,), 64, options={"scale": -0.1}),
    ]  # fmt: skip


@st.composite
def draw_case(draw, dtypes=tuple(CASE_DTYPES), mask_classes=tuple(MASK_CLASSES)):
    """A random small case with a mask."""
    mask_class = draw(st.sampled_from(mask_classes))
    kind, _ = MASK_CLASSES[mask_class]
    page_size = draw(st.sampled_from([1, 8, 16, 64]))
    count = draw(st.integers(1, 4))
    length = st.one_of(st.integers(0, 48), st.sampled_from([0, 1, page_size, page_size + 1]))
    k_lens = draw(st.lists(length, min_size=count, max_size=count))
    pattern = draw(st.sampled_from(["equal", "variable"]))
    if pattern == "equal":
        q_lens = [draw(st.integers(1, 8))] * count
    else:
        q_lens = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    q_heads, k_heads = draw(st.sampled_from([*LAYOUTS[:2], *LAYOUTS[3:5]]))
    side = st.integers(0, 50)
    options = {}
    if draw(st.booleans()):
        options["num_splits"] = draw(st.sampled_from([1, 2, 3, 8]))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from([0.0, 0.05, 0.3, -0.2]))
    return mask_case(
        "drawn", mask_class, q_lens, k_lens, q_heads, k_heads, draw(st.sampled_from([16, 32])), page_size=page_size,
        window=(draw(side),) if kind == "local" else (draw(side), draw(side)),
        spread=draw(st.sampled_from(["gaps", "reversed", "overlap"])), slack=draw(st.sampled_from([0, 1, 3])),
        seed=draw(st.integers(0, 99)), dtype=draw(st.sampled_from(dtypes)), options=options,
        sinks=len(q_heads) == 1 and draw(st.booleans()),
    )  # fmt: skip


# Dense cases


def dense_cases():
    """Without a mask object: no bias, an array bias, kv_lengths; 3-D, 4-D, 5-D; empty axes."""

    def case(name, q_shape, k_shape, **fields):
        return Case(f"dense-{name}", None, {}, q_shape, k_shape, **fields)

    return [
        case("3d", (4, 5, 32), (4, 17, 32)),
        case("3d-bias", (2, 5, 32), (2, 17, 32), bias_shape=(2, 5, 17), dtype="bfloat16"),
        case("4d", (2, 15, 3, 64), (2, 73, 3, 64), dtype="bfloat16"),
        case("4d-float32", (2, 7, 2, 32), (2, 33, 2, 32), dtype="float32"),
        case("5d", (2, 3, 2, 4, 32), (2, 40, 2, 1, 32), options={"num_splits": 3}),
        case("5d-heads", (2, 3, 2, 3, 16), (2, 20, 2, 3, 16), dtype="float32"),
        case("mqa-one-query", (3, 1, 16, 64), (3, 65, 1, 64), options={"num_splits": 2}),
        case("gqa", (2, 4, 8, 32), (2, 50, 2, 32), sinks=True, dtype="bfloat16"),
        case("softcap-scale", (2, 4, 4, 32), (2, 50, 4, 32), options={"softcap": 1.5, "scale": 0.5}),
        case("scale-zero", (1, 4, 2, 32), (1, 20, 2, 32), options={"scale": 0.0}),
        case("bias", (2, 6, 4, 32), (2, 37, 4, 32), bias_shape=(2, 4, 6, 37)),
        case("bias-broadcast", (2, 6, 4, 32), (2, 37, 2, 32), bias_shape=(1, 1, 6, 37), sinks=True),
        case("bias-per-key", (2, 6, 4, 32), (2, 37, 4, 32), bias_shape=(2, 1, 1, 37), dtype="float32"),
        case("bias-softcap", (1, 6, 4, 32), (1, 37, 4, 32), bias_shape=(1, 4, 6, 37), options={"softcap": 2.0}),
        case("bias-splits", (1, 3, 2, 64), (1, 80, 2, 64), bias_shape=(1, 2, 3, 80), options={"num_splits": 2}),
        case("bias-5d", (2, 4, 2, 3, 32), (2, 20, 2, 1, 32), bias_shape=(2, 2, 3, 4, 20), dtype="bfloat16"),
        case("bias-5d-broadcast", (2, 4, 2, 3, 32), (2, 20, 2, 3, 32), bias_shape=(2, 1, 1, 4, 20)),
        case("kv-lengths", (5, 2, 8, 32), (5, 48, 2, 32), kv_lengths=[0, 1, 16, 17, 48]),
        case("kv-lengths-5d", (3, 2, 2, 4, 32), (3, 40, 2, 1, 32), kv_lengths=[40, 0, 7], dtype="bfloat16"),
        case("kv-lengths-bias", (2, 3, 4, 32), (2, 30, 4, 32), kv_lengths=[30, 11], bias_shape=(2, 4, 3, 30)),
        case("kv-lengths-sinks", (2, 3, 4, 32), (2, 30, 2, 32), kv_lengths=[0, 11], sinks=True, dtype="float32"),
        case("other-value-dim", (2, 3, 4, 32), (2, 30, 2, 32), v_dim=16),
        case("no-queries", (2, 0, 4, 32), (2, 30, 4, 32)),
        case("no-keys", (2, 3, 4, 32), (2, 0, 4, 32)),
        case("no-batch", (0, 3, 4, 32), (0, 30, 4, 32)),
    ]


# Varlen cases


@dataclass(frozen=True)
class VarlenCase:
    """A varlen call: q [sum(q_lens), q_heads, D]; keys of sequence b in a slot of k_lens[b] rows, or in pages.

    seqused: numbers of keys used (None: all of k_lens). page_size: keys in pages instead (needs seqused).
    """

    name: str
    q_lens: list
    k_lens: list
    window: tuple = (-1, -1)
    q_heads: int = 4
    kv_heads: int = 4
    dim: int = 64
    dtype: str = "float16"
    seqused: list | None = None
    page_size: int | None = None
    options: dict = field(default_factory=dict)  # scale, softcap, num_splits
    sinks: bool = False

    @property
    def tolerance(self):
        return TOLERANCES[self.dtype]

    def __str__(self):
        return self.name


VARLEN_WINDOWS = [(-1, -1), (-1, 0), (4, 0), (-1, 4), (0, 0), (1, 0), (0, 1), (0, -1), (4, 4), (8, 2), (1025, 1025)]


def varlen_cases():
    """Every window with equal and with different lengths, GQA, used lengths, pages."""
    cases = []
    for n, window in enumerate(VARLEN_WINDOWS):
        name = f"varlen-window{window[0]},{window[1]}"
        dtype, other = ("float16", "bfloat16") if n % 2 else ("bfloat16", "float16")
        lens = [40, 1, 17, 0]
        cases.append(VarlenCase(f"{name}-self", lens, lens, window, dtype=dtype))
        cases.append(
            VarlenCase(f"{name}-cross", [5, 0, 20, 3], [33, 7, 8, 0], window, 8, 2, 32, other, sinks=n % 3 == 0)
        )
    slots, used = [24, 40, 8, 33], [17, 40, 0, 1]
    for n, window in enumerate([(-1, -1), (-1, 0), (4, 2)]):
        dtype = CASE_DTYPES[n]
        name = f"varlen-window{window[0]},{window[1]}"
        cases.append(VarlenCase(f"{name}-used", [1] * 4, slots, window, seqused=used, dtype=dtype))
        cases.append(VarlenCase(f"{name}-used-gqa", [3, 5, 2, 4], slots, window, 16, 4, 32, dtype, seqused=used))
        for page_size in (8, 16, 64):
            cases.append(
                VarlenCase(
                    f"{name}-page{page_size}", [[1] * 4, [3, 5, 2, 4]][page_size == 16], used, window, 8, 2, 32, dtype,
                    seqused=used, page_size=page_size, options={"num_splits": 1} if page_size == 64 else {},
                )
            )  # fmt: skip
    cases.append(VarlenCase("varlen-scale", [7, 9], [7, 9], (-1, 0), options={"scale": 0.1}))
    cases.append(VarlenCase("varlen-softcap", [7, 9], [30, 9], (-1, 0), options={"softcap": 2.0, "num_splits": 2}))
    cases.append(VarlenCase("varlen-float32", [7, 9], [30, 9], (5, 3), 4, 1, 16, "float32"))
    return cases


def make_varlen_inputs(case, seed=0, poison=True):
    """-> q [Tq, Hq, D], k and v [Tk, Hkv, D] or [pages, page_size, Hkv, D] (float32, rounded to case.dtype),
    cu_q, cu_k int32 [N + 1] (cu_k None with pages), max_q, max_k, seqused_k int32 [N] or None,
    block_table int32 [N, P] or None, sinks float32 [Hq] or None."""
    rng = np.random.default_rng(seed)
    k_lens = case.k_lens if case.seqused is None else case.seqused
    cu_q, cu_k = (np.cumsum([0, *lens]).astype(np.int32) for lens in (case.q_lens, case.k_lens))
    table = None
    if case.page_size is None:
        total, positions = int(cu_k[-1]), oracle.key_positions("gappy", k_lens, starts=cu_k)
    else:
        count, row_pages = len(k_lens), -(-max(k_lens) // case.page_size) + 1
        pages = rng.permutation(count * row_pages + 2)
        table, total = pages[: count * row_pages].reshape(count, row_pages), len(pages) * case.page_size
        positions = oracle.key_positions("paged", k_lens, block_tables=table, page_size=case.page_size)
        if poison:
            table = poison_table(table, used_pages(k_lens, [0] * count, case.page_size, table.shape))
        table, cu_k = table.astype(np.int32), None
    shapes = [(int(cu_q[-1]), case.q_heads, case.dim)] + [(total, case.kv_heads, case.dim)] * 2
    q, k, v = (round_f32(rng.standard_normal(shape), case.dtype) for shape in shapes)
    if poison:
        outside = np.setdiff1d(np.arange(total), np.concatenate(positions))
        poison_rows(k, outside)
        poison_rows(v, outside[::-1])
    if table is not None:
        k, v = (x.reshape(-1, case.page_size, *x.shape[1:]) for x in (k, v))
    return {
        "q": q, "k": k, "v": v, "cu_q": cu_q, "cu_k": cu_k, "max_q": max(case.q_lens), "max_k": max(case.k_lens),
        "seqused_k": None if case.seqused is None else np.array(case.seqused, np.int32), "block_table": table,
        "sinks": rng.standard_normal(case.q_heads).astype(np.float32) if case.sinks else None,
    }  # fmt: skip


def expected_varlen(case, inputs):
    """-> out [Tq, Hq, D], lse [Hq, Tq], float64."""
    names = ("q", "k", "v", "cu_q", "cu_k", "seqused_k", "block_table", "sinks")
    options = {name: case.options.get(name) for name in ("scale", "softcap")}
    return oracle.varlen(**{name: inputs[name] for name in names}, window=case.window, **options)


# Merge cases


@dataclass(frozen=True)
class MergeCase:
    """`chunks` partial results [B, M, (G,) H, D] with LSEs [B, (G,) H, M].

    empty: share of (chunk, row) pairs that saw nothing; the first row of all saw nothing in any chunk when empty > 0.
    offset: added to every LSE.
    """

    name: str
    chunks: int
    shape: tuple
    dtype: str = "float32"
    lse_dtype: str = "float32"
    empty: float = 0.0
    offset: float = 0.0

    @property
    def tolerance(self):
        return MERGE_TOLERANCES[self.dtype]

    @property
    def lse_shape(self):
        batch, length, *heads, _ = self.shape
        return (batch, *heads, length)

    def __str__(self):
        return self.name


def merge_cases():
    return [
        MergeCase("merge-one", 1, (2, 3, 4, 32)),
        MergeCase("merge-two", 2, (2, 3, 4, 32)),
        MergeCase("merge-bfloat16", 2, (3, 3, 1, 11, 128), "bfloat16"),
        MergeCase("merge-float16", 5, (2, 3, 4, 32), "float16"),
        MergeCase("merge-groups", 16, (2, 13, 2, 8, 64)),
        MergeCase("merge-odd-dims", 3, (2, 5, 3, 7, 11)),
        MergeCase("merge-float64-lse", 4, (2, 3, 4, 32), lse_dtype="float64"),
        MergeCase("merge-empty", 3, (2, 9, 4, 32), empty=0.4),
        MergeCase("merge-all-empty", 3, (2, 9, 2, 2, 16), "bfloat16", empty=1.0),
        MergeCase("merge-large-lse", 4, (2, 3, 4, 32), offset=500.0, empty=0.2),
        MergeCase("merge-small-lse", 4, (2, 3, 4, 32), offset=-500.0, lse_dtype="float64"),
    ]


def make_merge_inputs(case, seed=0):
    """-> {"outs": float32 [chunks, *shape] rounded to case.dtype, "lses": [chunks, *lse_shape] in case.lse_dtype}.

    A chunk that saw nothing has out 0 and LSE -inf.
    """
    rng = np.random.default_rng(seed)
    outs = round_f32(rng.standard_normal((case.chunks, *case.shape)), case.dtype)
    lses = 3 * rng.standard_normal((case.chunks, *case.lse_shape)) + case.offset
    empty = rng.random(lses.shape) < case.empty
    if case.empty:
        empty.reshape(case.chunks, -1)[:, 0] = True
    lses[empty] = -np.inf
    outs[np.moveaxis(empty, -1, 2)] = 0
    return {"outs": outs, "lses": lses.astype(case.lse_dtype)}


def expected_merge(case, inputs):
    """-> out [*case.shape], lse [*case.lse_shape], float64."""
    return oracle.merge(inputs["outs"], inputs["lses"])
