"""Gradient checks that both front ends must pass.

A frontend's `value_and_grad(loss, arrays)` takes a function of arrays and float64 numpy arrays, and gives the loss and
its gradients as numpy. The loss weighs the output and the LSE with fixed random cotangents, so that both carry.
"""

import numpy as np

import oracle

# name -> (q, k, v shapes, options, mask class and its arguments or None, bias shape, sinks)
GRADIENT_CASES = {
    "dense": dict(q=(2, 3, 4, 16), k=(2, 9, 4, 16)),
    "gqa": dict(q=(2, 3, 4, 16), k=(2, 9, 2, 16), v_dim=8),
    "five-d": dict(q=(1, 3, 2, 3, 16), k=(1, 9, 2, 1, 16)),
    "softcap": dict(q=(1, 4, 4, 16), k=(1, 9, 2, 16), options=dict(softcap=0.7, scale=0.9)),
    "sinks": dict(q=(2, 3, 4, 16), k=(2, 9, 2, 16), sinks=True),
    "bias": dict(q=(2, 3, 4, 16), k=(2, 9, 4, 16), bias=(2, 4, 3, 9)),
    "bias-broadcast": dict(q=(2, 3, 4, 16), k=(2, 9, 2, 16), bias=(1, 1, 3, 9), options=dict(softcap=1.5), sinks=True),
    "causal-padded": dict(
        q=(1, 9, 4, 16), k=(1, 24, 2, 16), options=dict(softcap=1.0), sinks=True,
        mask=("BlockDiagonalCausalWithOffsetPaddedKeysMask",
              dict(q_seqlen=[3, 1, 5], kv_padding=8, kv_seqlen=[8, 5, 2])),
    ),
    "local-padded": dict(
        q=(1, 8, 2, 16), k=(1, 24, 2, 16),
        mask=("BlockDiagonalLocalAttentionPaddedKeysMask",
              dict(q_seqlen=[4, 4], kv_padding=12, kv_seqlen=[12, 7], window_left=2, window_right=1)),
    ),
    "gappy-overlapping": dict(
        q=(1, 5, 4, 16), k=(1, 20, 1, 16),
        mask=("BlockDiagonalCausalWithOffsetGappyKeysMask",
              dict(q_seqlen=[3, 0, 2], kv_seqstarts=[4, 0, 6, 20], kv_seqlen=[9, 3, 12])),
    ),
}  # fmt: skip


def make(case, seed):
    rng = np.random.default_rng(seed)
    q, k = case["q"], case["k"]
    arrays = {
        "q": rng.standard_normal(q),
        "k": rng.standard_normal(k),
        "v": rng.standard_normal((*k[:-1], case.get("v_dim", k[-1]))),
    }
    if "bias" in case:
        arrays["bias"] = rng.standard_normal(case["bias"])
    if case.get("sinks"):
        arrays["sinks"] = rng.standard_normal(int(np.prod(q[2:-1])))
    return arrays


def attention_loss(frontend, case, backend, seed):
    """(loss(**arrays), arrays): the loss as a function of the front end's arrays."""
    arrays = make(case, seed)
    rng = np.random.default_rng(seed + 1)
    out_shape = (*case["q"][:-1], arrays["v"].shape[-1])
    batch, queries, *heads, _ = case["q"]
    w_out, w_lse = rng.standard_normal(out_shape), rng.standard_normal((batch, *heads, queries))
    mask = None if "mask" not in case else frontend.mask(*case["mask"])

    def loss(q, k, v, bias=None, sinks=None):
        out, lse = frontend.api.memory_efficient_attention_forward_requires_grad(
            q, k, v, mask if bias is None else bias, sinks=sinks, backend=backend, **case.get("options", {})
        )
        seen = frontend.where_finite(lse)
        return (out * frontend.array(w_out, "float64")).sum() + (seen * frontend.array(w_lse, "float64")).sum()

    return loss, arrays


def check_against_differences(frontend, loss, arrays, rtol=1e-5):
    """Every gradient along random directions against central differences in float64."""
    value, gradients = frontend.value_and_grad(loss, arrays)
    assert np.isfinite(value)
    rng = np.random.default_rng(99)
    for name, x in arrays.items():
        assert gradients[name].shape == x.shape
        assert np.abs(gradients[name]).max() > 1e-6, f"the gradient of {name} vanishes: nothing is tested"
        for _ in range(2):
            direction = rng.standard_normal(x.shape)
            wanted = oracle.numeric_directional(
                lambda y, name=name: frontend.value(loss, {**arrays, name: y}), x, direction, 1e-5
            )
            np.testing.assert_allclose((gradients[name] * direction).sum(), wanted, rtol=rtol, atol=1e-7)


def check_attention(frontend, case, backend, seed=21):
    loss, arrays = attention_loss(frontend, case, backend, seed)
    check_against_differences(frontend, loss, arrays)


def check_large_common_score(frontend, backend):
    """A row whose scores are all beside a huge common bias still splits its gradient evenly (MSLK-style padding)."""
    rng = np.random.default_rng(31)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 3, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16)))
    for value in (np.finfo(np.float32).min, -1e9, -1e6):
        bias = np.zeros((1, 1, 3, 9), np.float32)
        bias[..., 1, :] = value

        def loss(q, k, v, bias=bias):
            bias = frontend.array(bias, "float32")
            return frontend.api.memory_efficient_attention(q, k, v, bias, backend=backend)[:, 1].sum()

        _, gradients = frontend.value_and_grad(loss, {"q": q, "k": k, "v": v})
        np.testing.assert_allclose(gradients["v"][0, :, 0, 0].sum(), 1, rtol=1e-4)


def check_bias_row_of_minus_infinity(frontend, backend):
    """A row that the bias empties gives zero gradients, not NaN."""
    rng = np.random.default_rng(32)
    arrays = {"q": rng.standard_normal((1, 3, 2, 16)), **{n: rng.standard_normal((1, 9, 2, 16)) for n in "kv"}}
    bias = rng.standard_normal((1, 1, 3, 9))
    bias[..., 1, :] = -np.inf

    def loss(q, k, v):
        bias_array = frontend.array(bias, "float64")
        out, lse = frontend.api.memory_efficient_attention_forward_requires_grad(q, k, v, bias_array, backend=backend)
        return out.sum() + frontend.where_finite(lse).sum()

    check_against_differences(frontend, loss, arrays)


def check_varlen(frontend, window, seed=22, sinks=False):
    rng = np.random.default_rng(seed)
    q_lens, k_lens = [3, 0, 5, 2], [7, 2, 3, 0]
    cu_q, cu_k = (frontend.array(np.cumsum([0, *x]), "int32") for x in (q_lens, k_lens))
    arrays = {"q": rng.standard_normal((10, 4, 16)), **{n: rng.standard_normal((12, 2, 16)) for n in "kv"}}
    if sinks:
        arrays["sinks"] = rng.standard_normal(4)
    w_out, w_lse = rng.standard_normal((10, 4, 16)), rng.standard_normal((4, 10))

    def loss(q, k, v, sinks=None):
        out, lse = frontend.api.varlen_attn(
            q, k, v, cu_q, cu_k, 5, 7, window_size=window, enable_gqa=True, sinks=sinks,
            return_aux=frontend.api.AuxRequest(lse=True),
        )  # fmt: skip
        seen = frontend.where_finite(lse)
        return (out * frontend.array(w_out, "float64")).sum() + (seen * frontend.array(w_lse, "float64")).sum()

    check_against_differences(frontend, loss, arrays)


def check_merge(frontend, write_lse, seed=23):
    rng = np.random.default_rng(seed)
    arrays = {f"a{n}": rng.standard_normal((2, 3, 2, 4, 8)) for n in range(3)}
    arrays |= {f"l{n}": rng.standard_normal((2, 2, 4, 3)) for n in range(3)}
    w_out, w_lse = rng.standard_normal((2, 3, 2, 4, 8)), rng.standard_normal((2, 2, 4, 3))

    def loss(a0, a1, a2, l0, l1, l2):
        out, lse = frontend.api.merge_attentions([a0, a1, a2], [l0, l1, l2], write_lse=write_lse)
        total = (out * frontend.array(w_out, "float64")).sum()
        return total + (lse * frontend.array(w_lse, "float64")).sum() if write_lse else total

    check_against_differences(frontend, loss, arrays)


def check_merged_partials(frontend, seed=24):
    """The gradient through partials and their merge is that of the whole attention."""
    rng = np.random.default_rng(seed)
    arrays = {"q": rng.standard_normal((2, 3, 4, 16)), **{n: rng.standard_normal((2, 11, 2, 16)) for n in "kv"}}
    weight = rng.standard_normal((2, 3, 4, 16))

    def whole(q, k, v):
        out = frontend.api.memory_efficient_attention(q, k, v)
        return (out * frontend.array(weight, "float64")).sum()

    def merged(q, k, v):
        parts = [
            frontend.api.memory_efficient_attention_partial(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 11))
        ]
        out, _ = frontend.api.merge_attentions([p[0] for p in parts], [p[1] for p in parts])
        return (out * frontend.array(weight, "float64")).sum()

    (a, da), (b, db) = (frontend.value_and_grad(f, arrays) for f in (whole, merged))
    np.testing.assert_allclose(a, b, rtol=1e-9)
    for name in arrays:
        np.testing.assert_allclose(da[name], db[name], rtol=1e-7, atol=1e-9)
