"""The checks that both front ends must pass; each takes a `frontend`, so one set of cases serves both.

A frontend is a module-like object with: `array(numpy, dtype) -> array`, `numpy(array) -> float64 numpy`,
`dtype_of(array) -> str`, `mask(class_name, arguments) -> mask object`, and the library's functions under `api`.
"""

import numpy as np

import cases
import oracle


def close(actual, expected, atol, rtol):
    """As numpy's allclose, with -inf equal to -inf; NaN never passes."""
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=rtol, equal_nan=False)


def call_case(frontend, case, inputs, function="memory_efficient_attention_forward_requires_grad", **options):
    q, k, v = (frontend.array(x, case.dtype) for x in (inputs["q"], *(inputs[n] for n in "kv")))
    bias = None if inputs["bias"] is None else frontend.array(inputs["bias"], "float32")
    if case.mask_class is not None:
        bias = frontend.mask(case.mask_class, inputs["mask"])
    extra = {}
    if inputs["sinks"] is not None:
        extra["sinks"] = frontend.array(inputs["sinks"], "float32")
    if inputs["kv_lengths"] is not None:
        extra["kv_lengths"] = frontend.array(inputs["kv_lengths"], "int32")
    return getattr(frontend.api, function)(q, k, v, bias, **case.options, **extra, **options)


def check_case(frontend, case, backend, seed):
    inputs = cases.make_inputs(case, seed)
    out, lse = call_case(frontend, case, inputs, backend=backend)
    want_out, want_lse = cases.expected(case, inputs)
    assert frontend.dtype_of(out) == case.dtype
    assert tuple(out.shape) == want_out.shape
    assert tuple(lse.shape) == case.lse_shape
    close(frontend.numpy(out), want_out, *case.tolerance)
    close(frontend.numpy(lse), want_lse, *cases.LSE_TOLERANCE)
    no_lse = call_case(frontend, case, inputs, "memory_efficient_attention_forward", backend=backend)
    np.testing.assert_array_equal(frontend.numpy(no_lse), frontend.numpy(out))


def check_garbage(frontend, case, backend, seed):
    """NaN and Inf wherever nothing may be read change no bit."""
    clean, dirty = (
        call_case(frontend, case, cases.make_inputs(case, seed, poison=poison), backend=backend)
        for poison in (False, True)
    )
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(frontend.numpy(a), frontend.numpy(b))


def call_varlen(frontend, case, inputs, **options):
    q, k, v = (frontend.array(inputs[n], case.dtype) for n in "qkv")
    ints = {
        n: None if inputs[n] is None else frontend.array(inputs[n], "int32")
        for n in ("cu_q", "cu_k", "seqused_k", "block_table")
    }
    sinks = None if inputs["sinks"] is None else frontend.array(inputs["sinks"], "float32")
    return frontend.api.varlen_attn(
        q, k, v, ints["cu_q"], ints["cu_k"], inputs["max_q"], inputs["max_k"],
        return_aux=frontend.api.AuxRequest(lse=True), window_size=case.window, enable_gqa=case.q_heads != case.kv_heads,
        seqused_k=ints["seqused_k"], block_table=ints["block_table"], sinks=sinks, **case.options, **options,
    )  # fmt: skip


def check_varlen(frontend, case, backend, seed):
    inputs = cases.make_varlen_inputs(case, seed)
    out, lse = call_varlen(frontend, case, inputs, backend=backend)
    want_out, want_lse = cases.expected_varlen(case, inputs)
    assert frontend.dtype_of(out) == case.dtype
    assert frontend.dtype_of(lse) == "float32"
    assert tuple(out.shape) == want_out.shape
    assert tuple(lse.shape) == want_lse.shape
    close(frontend.numpy(out), want_out, *case.tolerance)
    close(frontend.numpy(lse), want_lse, *cases.LSE_TOLERANCE)
    clean = call_varlen(frontend, case, cases.make_varlen_inputs(case, seed, poison=False), backend=backend)
    np.testing.assert_array_equal(frontend.numpy(clean[0]), frontend.numpy(out))
    np.testing.assert_array_equal(frontend.numpy(clean[1]), frontend.numpy(lse))


def check_merge(frontend, case, as_list, seed):
    inputs = cases.make_merge_inputs(case, seed)
    outs = frontend.array(inputs["outs"], case.dtype)
    lses = frontend.array(inputs["lses"], case.lse_dtype)
    if as_list:
        outs, lses = list(outs), list(lses)
    want_out, want_lse = cases.expected_merge(case, inputs)
    out, lse = frontend.api.merge_attentions(outs, lses)
    assert frontend.dtype_of(out) == case.dtype
    assert frontend.dtype_of(lse) == case.lse_dtype
    close(frontend.numpy(out), want_out, *case.tolerance)
    close(frontend.numpy(lse), want_lse, 1e-4, 1e-4 if case.lse_dtype == "float32" else 1e-6)
    alone, none = frontend.api.merge_attentions(outs, lses, write_lse=False)
    assert none is None
    np.testing.assert_array_equal(frontend.numpy(alone), frontend.numpy(out))


def check_split_and_merge(frontend, backend, seed, dtype="float32"):
    """Partial attentions over two halves of the keys merge to the whole."""
    rng = np.random.default_rng(seed)
    q, k, v = (cases.round_f32(rng.standard_normal((2, n, 4, 32)), dtype) for n in (3, 40, 40))
    parts = [
        frontend.api.memory_efficient_attention_partial(
            frontend.array(q, dtype), frontend.array(k[:, s], dtype), frontend.array(v[:, s], dtype), backend=backend
        )
        for s in (slice(0, 23), slice(23, 40))
    ]
    assert all(frontend.dtype_of(o) == "float32" for o, _ in parts)
    out, lse = frontend.api.merge_attentions([p[0] for p in parts], [p[1] for p in parts])
    want_out, want_lse = oracle.dense(q, k, v)
    close(frontend.numpy(out), want_out, 1e-4, 1e-4)
    close(frontend.numpy(lse), want_lse, 1e-4, 1e-4)


FORMATS = [("seed_int4", 2), ("seed_fp8", 1), ("fp8", 1), ("int8", 1), ("int4", 1), ("int4", 4)]


def check_garbage_in_formats(frontend, name, groups, paged):
    """NaN codes and coefficients in rows that no query sees change no bit of the result."""
    rng = np.random.default_rng(41)
    lengths, slot = [5, 0, 16], 16
    x = rng.standard_normal((2, 3, slot, 2, 32))
    q = frontend.array(rng.standard_normal((1, 3, 4, 32)), "float16")
    unused = (np.arange(slot) >= np.array(lengths)[:, None])[..., None, None]
    arguments, axes = dict(q_seqlen=[1, 1, 1], kv_seqlen=lengths, kv_padding=slot), (1, -1, 2, 32)
    mask = frontend.mask("BlockDiagonalPaddedKeysMask", arguments)
    if paged:
        table, axes = np.arange(3, dtype=np.int32)[:, None], (3, slot, 2, 32)
        arguments = dict(q_seqlen=[1, 1, 1], kv_seqlen=lengths, block_tables=table, page_size=slot)
        mask = frontend.mask("PagedBlockDiagonalPaddedKeysMask", arguments)
    options = {"groups": groups} if groups > 1 else {}
    results = []
    for garbage in (0.0, np.nan):  # a row that holds a NaN is quantised with NaN coefficients
        kv = [frontend.array(np.where(unused, garbage, part).reshape(axes), "float32") for part in x]
        kv = [frontend.api.formats.quantize(part, name, **options) for part in kv]
        assert np.isnan(frontend.numpy(kv[0].dequantize())).any() == np.isnan(garbage)
        results.append(frontend.api.memory_efficient_attention_forward_requires_grad(q, *kv, mask))
    for clean, dirty in zip(*results):
        np.testing.assert_array_equal(frontend.numpy(clean), frontend.numpy(dirty))
    assert np.isfinite(frontend.numpy(results[0][0])).all()
