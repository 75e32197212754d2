"""The definition of attention used by the tests: numpy, float64, one query row at a time.

It follows the behaviour of MSLK's fmha (masks, layouts, quantised formats) and of torch's varlen attention, and shares
no code with the library under test. Shapes: Lq, Lk = queries and keys of one sequence; Hq, Hkv = query and KV heads
(query head h reads KV head h // (Hq // Hkv)); D, Dv = head dims; T = length of the packed key axis. Every LSE is a
natural logarithm.
"""

import itertools
import math

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
E4M3_MAX = 448.0


def round_to(x, dtype):
    """`x` rounded to the dtype named `dtype`, as float64. fp8 saturates at +-448."""
    x = np.asarray(x)
    if dtype == "float8_e4m3fn":
        x = np.clip(x, -E4M3_MAX, E4M3_MAX)
    return x.astype(DTYPES[dtype]).astype(np.float64)


# Which keys a query sees, and where they lie


def visible_table(kind, q_len, k_len, *, left=None, right=None, window=None):
    """Boolean [q_len, k_len]: may query i see key j?

    kind: "all"; "causal"; "window" (`left` before and `right` after the diagonal, None = unbounded); "local" (the last
    `window` keys up to the diagonal). The diagonal of query i is key i + k_len - q_len; with " top-left" appended to
    the kind it is key i.
    """
    kind, top_left = kind.removesuffix(" top-left"), kind.endswith(" top-left")
    table = np.zeros((q_len, k_len), bool)
    for i in range(q_len):
        diagonal = i if top_left else i + k_len - q_len
        for j in range(k_len):
            if kind == "all":
                table[i, j] = True
            elif kind == "causal":
                table[i, j] = j <= diagonal
            elif kind == "window":
                table[i, j] = (left is None or j >= diagonal - left) and (right is None or j <= diagonal + right)
            elif kind == "local":
                table[i, j] = diagonal - window < j <= diagonal
            else:
                raise ValueError(kind)
    return table


def key_positions(layout, k_lens, *, total=None, starts=None, block_tables=None, page_size=None):
    """For each sequence the positions of its keys on the key axis: a list of int arrays [k_lens[b]].

    layout: "padded" (needs total = T), "gappy" (starts: absolute), "paged", "paged gappy" (starts: within each row).
    Only the block-table entries of pages that hold keys are read.
    """
    positions = []
    for b, k_len in enumerate(k_lens):
        row = np.zeros(k_len, np.int64)
        for j in range(k_len):
            if layout == "padded":
                assert total % len(k_lens) == 0
                row[j] = b * (total // len(k_lens)) + j
            elif layout == "gappy":
                row[j] = starts[b] + j
            else:
                x = j + (starts[b] if layout == "paged gappy" else 0)
                row[j] = block_tables[b][x // page_size] * page_size + x % page_size
        positions.append(row)
    return positions


def mask_table(q_lens, positions, visible, total):
    """Boolean [total_q, total]: the tables of all sequences on the physical key axis."""
    table = np.zeros((sum(q_lens), total), bool)
    first = 0
    for q_len, where, see in zip(q_lens, positions, visible, strict=True):
        for i in range(q_len):
            table[first + i, where[see[i]]] = True
        first += q_len
    return table


# Attention


def attend(q, k, v, *, scale, visible, softcap=None, bias=None, sinks=None):
    """Attention of one sequence.

    q [Lq, Hq, D], k [Lk, Hkv, D], v [Lk, Hkv, Dv], visible bool [Lq, Lk], bias [Hq, Lq, Lk] (natural units, -inf
    hides), sinks [Hq] (one more key per head, with this logit and a value of zero) -> out [Lq, Hq, Dv], lse [Hq, Lq].
    A row that sees nothing has out 0 and lse -inf (the sink's logit when there are sinks).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (q_len, q_heads, _), group = q.shape, q.shape[1] // max(k.shape[1], 1)
    out = np.zeros((q_len, q_heads, v.shape[2]))
    lse = np.full((q_heads, q_len), -np.inf)
    for h in range(q_heads):
        for i in range(q_len):
            see = np.flatnonzero(visible[i])
            scores = k[see, h // group] @ q[i, h] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias[h, i, see]
                see, scores = see[scores != -np.inf], scores[scores != -np.inf]
            logits = scores if sinks is None else np.append(scores, float(sinks[h]))
            top = np.max(logits, initial=-np.inf)
            if top == -np.inf:
                continue
            denominator = np.exp(logits - top).sum()
            out[i, h] = np.exp(scores - top) @ v[see, h // group] / denominator
            lse[h, i] = top + math.log(denominator)
    return out, lse


def default_scale(q):
    """D ** -0.5 of a query [..., D]."""
    return q.shape[-1] ** -0.5


def block_diagonal(q, k, v, q_lens, positions, visible, *, scale=None, softcap=None, sinks=None):
    """Packed sequences: q [total_q, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> out [total_q, Hq, Dv], lse [Hq, total_q].

    positions: per sequence the places of its keys on the key axis; visible: per sequence bool [q_len, k_len].
    """
    scale = default_scale(q) if scale is None else scale
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    first = 0
    for q_len, where, see in zip(q_lens, positions, visible, strict=True):
        rows = slice(first, first + q_len)
        out[rows], lse[:, rows] = attend(
            q[rows], k[where], v[where], scale=scale, visible=see, softcap=softcap, sinks=sinks
        )
        first += q_len
    return out, lse


def dense(q, k, v, *, scale=None, softcap=None, bias=None, sinks=None, kv_lengths=None):
    """q [B, Mq, Hq, D], k [B, Mk, Hkv, D], v [B, Mk, Hkv, Dv] -> out [B, Mq, Hq, Dv], lse [B, Hq, Mq].

    bias broadcasts to [B, Hq, Mq, Mk]; with kv_lengths [B] key j of batch b is visible iff j < kv_lengths[b].
    """
    scale = default_scale(q) if scale is None else scale
    (batch, q_len, heads, _), k_len = q.shape, k.shape[1]
    if bias is not None:
        bias = np.broadcast_to(np.asarray(bias, np.float64), (batch, heads, q_len, k_len))
    out = np.zeros((batch, q_len, heads, v.shape[-1]))
    lse = np.full((batch, heads, q_len), -np.inf)
    for b in range(batch):
        visible = np.zeros((q_len, k_len), bool)
        visible[:, : k_len if kv_lengths is None else kv_lengths[b]] = True
        out[b], lse[b] = attend(
            q[b], k[b], v[b], scale=scale, visible=visible, softcap=softcap, sinks=sinks,
            bias=None if bias is None else bias[b],
        )  # fmt: skip
    return out, lse


def varlen(q, k, v, cu_q, cu_k, *, window=(-1, -1), seqused_k=None, block_table=None, **options):
    """torch's varlen attention: q [Tq, Hq, D], k and v [Tk, Hkv, D] or, with block_table, [pages, page_size, Hkv, D].

    cu_q, cu_k: cumulative lengths (cu_k may be None with block_table and seqused_k); window (left, right), negative =
    unbounded, bottom-right aligned -> out [Tq, Hq, Dv], lse [Hq, Tq]. A row that sees nothing has lse -inf.
    """
    q_lens = np.diff(cu_q)
    k_lens = np.diff(cu_k) if seqused_k is None else np.asarray(seqused_k)
    if block_table is None:
        positions = key_positions("gappy", k_lens, starts=cu_k)
    else:
        positions = key_positions("paged", k_lens, block_tables=block_table, page_size=k.shape[1])
        k, v = k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])
    left, right = (None if w < 0 else w for w in window)
    visible = [visible_table("window", a, b, left=left, right=right) for a, b in zip(q_lens, k_lens, strict=True)]
    return block_diagonal(q, k, v, q_lens, positions, visible, **options)


def merge(outs, lses):
    """Joins attention over disjoint sets of keys.

    outs n x [B, M, (G,) H, D] with lses n x [B, (G,) H, M], or n x [M, H, D] with n x [H, M] -> one out, one lse.
    """
    outs = np.stack([np.asarray(x, np.float64) for x in outs])
    lses = np.stack([np.asarray(x, np.float64) for x in lses])
    top = lses.max(0)
    weights = np.exp(lses - np.where(top == -np.inf, 0, top))
    total = weights.sum(0)
    with np.errstate(divide="ignore"):
        lse = np.where(top == -np.inf, -np.inf, top + np.log(total))
    weights = weights / np.where(total == 0, 1, total)
    token_axis = 1 if lses.ndim == 3 else 2
    return (np.moveaxis(weights, -1, token_axis)[..., None] * outs).sum(0), lse


# Numeric gradients


def numeric_grad(f, x, eps=1e-5, count=None, seed=0):
    """Central differences of the scalar function f at x (float64).

    Returns the gradient, shaped like x; with `count` (indices, values): flat indices of that many random entries and
    the derivatives along them.
    """
    x = np.array(x, np.float64)
    indices = np.arange(x.size)
    if count is not None and count < x.size:
        indices = np.random.default_rng(seed).choice(x.size, count, replace=False)
    values = np.zeros(len(indices))
    for n, index in enumerate(indices):
        direction = np.zeros(x.size)
        direction[index] = 1
        values[n] = numeric_directional(f, x, direction.reshape(x.shape), eps)
    return values.reshape(x.shape) if count is None else (indices, values)


def numeric_directional(f, x, direction, eps=1e-5):
    """Derivative of the scalar function f at x along `direction` (shaped like x), to equal sum(grad * direction)."""
    return (f(x + eps * direction) - f(x - eps * direction)) / (2 * eps)


# Quantised K and V


def coefficients(words):
    """int32 words [...] -> (scale, shift), float16 [...]: scale in the low half, shift in the high half."""
    words = np.asarray(words).astype(np.uint32)
    return tuple((words >> np.uint32(b) & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16) for b in (0, 16))


def pack_coefficients(scale, shift):
    """The inverse of `coefficients`: values rounded to half -> int32 words."""
    scale, shift = (np.asarray(x, np.float16).view(np.uint16).astype(np.uint32) for x in (scale, shift))
    return (shift << np.uint32(16) | scale).astype(np.uint32).view(np.int32)


def int4_dequantize(rows, groups, fused=False):
    """int32 rows [..., groups + D / 8] -> float16 [..., D]: nibble * scale + shift in half arithmetic.

    All coefficient words lead the row; then eight unsigned nibbles a word, the least significant first. `fused` skips
    the rounding of the product, as a fused multiply-add does.
    """
    rows = np.asarray(rows, np.int32)
    scale, shift = (x[..., None] for x in coefficients(rows[..., :groups]))
    words = rows[..., groups:].astype(np.uint32)
    nibbles = np.stack([words >> np.uint32(4 * t) & np.uint32(15) for t in range(8)], -1)
    nibbles = nibbles.reshape(*rows.shape[:-1], groups, -1).astype(np.float16)
    if fused:
        x = (nibbles.astype(np.float64) * scale + shift).astype(np.float16)
    else:
        x = nibbles * scale + shift
    return x.reshape(*rows.shape[:-1], -1)


def int4_pack(nibbles, scale, shift):
    """nibbles [..., D] in 0..15, scale and shift [..., groups] -> int32 rows [..., groups + D / 8]."""
    nibbles = np.asarray(nibbles, np.uint32)
    nibbles = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    words = sum(nibbles[..., t] << np.uint32(4 * t) for t in range(8)).astype(np.uint32).view(np.int32)
    return np.concatenate([pack_coefficients(scale, shift), words], -1)


def e4m3_decode(words):
    """int32 words [..., D / 4] -> float32 [..., D]: four OCP e4m3 values a word, the least significant byte first."""
    words = np.asarray(words).astype(np.uint32)
    data = np.stack([words >> np.uint32(8 * t) & np.uint32(255) for t in range(4)], -1).astype(np.uint8)
    return data.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(*words.shape[:-1], -1)


def e4m3_pack(x):
    """x [..., D] -> int32 words [..., D / 4], values rounded to e4m3."""
    data = round_to(x, "float8_e4m3fn").astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint32)
    data = data.reshape(*data.shape[:-1], -1, 4)
    return sum(data[..., t] << np.uint32(8 * t) for t in range(4)).astype(np.uint32).view(np.int32)


def fp8_dequantize(words, coefs, fp32_scales=False):
    """words int32 [..., D / 4], coefs int32 [...] -> [..., D]: value * scale + shift in half arithmetic (float16).

    With fp32_scales a coefficient word is one float32 scale (int32 bits or a float32 array), the result float32.
    """
    values = e4m3_decode(words)
    if fp32_scales:
        return values * np.asarray(coefs).view(np.float32)[..., None]
    scale, shift = (x[..., None] for x in coefficients(coefs))
    return values.astype(np.float16) * scale + shift


def fp8_quantize(x, *, symmetric=False, fp32_scales=False):
    """Row-wise e4m3 of x [..., D]: (words int32 [..., D / 4], coefs int32 [...]; float32 scales with fp32_scales)."""
    x = np.asarray(x, np.float32)
    shift = np.zeros(x.shape[:-1], np.float32) if symmetric else x.mean(-1)
    scale = np.abs(x - shift[..., None]).max(-1) / np.float32(E4M3_MAX)
    scale = np.where((scale == 0) | np.isinf(scale), np.float32(1), scale)
    words = e4m3_pack((x - shift[..., None]) / scale[..., None])
    return words, scale.astype(np.float32) if fp32_scales else pack_coefficients(scale, shift)


def fp8_attend(
    q, k_words, v_words, k_coefs, v_coefs, *, scale, visible, query_dtype="float16", q_scales=None, quantize_pv=False,
    fp32_scales=False, block_n=64, block_offset=0,
):  # fmt: skip
    """Attention of one sequence over packed fp8 keys and values, block by block as the seed's kernel goes.

    q [Lq, Hq, D] (values of query_dtype), words int32 [Lk, Hkv, D / 4], coefs [Lk, Hkv], visible bool [Lq, Lk]
    -> out [Lq, Hq, D], lse [Hq, Lq].
    q_scales [Lq, Hq]: fp8 QK; q holds e4m3 values (query_dtype "float8_e4m3fn"), K stays fp8 and its shift is ignored.
    quantize_pv: V stays fp8 (its shift ignored) and the probabilities are quantised per row and block of block_n keys.
    Otherwise V and the probabilities are rounded to query_dtype. block_offset: place of key 0 inside its block.
    """
    (q_len, heads, dim), (k_len, kv_heads) = q.shape, k_words.shape[:2]
    k = e4m3_decode(k_words).astype(np.float64)
    v = e4m3_decode(v_words).astype(np.float64)
    k_scales, v_scales = (
        np.asarray(c).view(np.float32) if fp32_scales else coefficients(c)[0] for c in (k_coefs, v_coefs)
    )
    if q_scales is None:
        k = round_to(fp8_dequantize(k_words, k_coefs, fp32_scales), query_dtype)
    if not quantize_pv:
        v = round_to(fp8_dequantize(v_words, v_coefs, fp32_scales), query_dtype)
    edges = sorted({0, k_len, *range(block_n - block_offset % block_n, k_len, block_n)})
    out, lse = np.zeros((q_len, heads, dim)), np.full((heads, q_len), -np.inf)
    for h in range(heads):
        g = h // (heads // kv_heads)
        for i in range(q_len):
            top, total, acc = -np.inf, 0.0, np.zeros(dim)
            for first, last in itertools.pairwise(edges):
                see = first + np.flatnonzero(visible[i, first:last])
                if len(see) == 0:
                    continue
                scores = k[see, g] @ np.asarray(q[i, h], np.float64) * scale
                if q_scales is not None:
                    scores = scores * k_scales[see, g].astype(np.float64) * float(q_scales[i, h])
                new_top = max(top, scores.max())
                p, rescale = np.exp(scores - new_top), np.exp(top - new_top)
                top, total = new_top, total * rescale + p.sum()
                if quantize_pv:
                    p = p * v_scales[see, g].astype(np.float64)
                    unit = max(p.max() / E4M3_MAX, 1e-9)
                    update = round_to(np.clip(p / unit, 0, E4M3_MAX), "float8_e4m3fn") @ v[see, g] * unit
                else:
                    update = round_to(p, query_dtype) @ v[see, g]
                acc = acc * rescale + update
            if total > 0:
                out[i, h], lse[h, i] = acc / total, top + math.log(total)
    return out, lse
