"""The `memory_efficient_attention` family (MSLK's entry points) for JAX."""

from __future__ import annotations

from typing import Any

import jax

from . import dispatch
from .problem import Layout, MaskParts, Operands, Problem, build


def memory_efficient_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    output_dtype: Any = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    kv_lengths: Any = None,
    quantize_pv: bool = False,
    backend: str = "auto",
) -> jax.Array:
    """Attention of `query` over `key` and `value`: softmax(scale * q k^T + bias) v, without the score matrix.

    Traceable: works under `jit`, `grad`, `vmap` and `shard_map`.

    Args:
        query: [B, Mq, H, D], [B, Mq, G, H, D] or [B, Mq, D]; float16, bfloat16, float32 or float64. With a mask
            object B is 1 and the sequences lie one after another on the Mq axis. A `formats.Fp8` with one scale a row
            multiplies q k^T in e4m3.
        key, value: [B, Mk, Hkv, D] and [B, Mk, Hkv, Dv] (or with [G, H] or [G, 1] in place of Hkv for a 5-D query) of
            the query's dtype, or one of `formats`. Hkv divides H: query head h reads head h // (H // Hkv). Paged:
            [1, pages * page_size, Hkv, D] or [pages, page_size, Hkv, D].
        attn_bias: None; an array added to the scaled scores, [B, H, Mq, Mk] (5-D: [B, G, H, Mq, Mk]), axes of size 1
            broadcast, -inf allowed; or one of `masks`.
        p: dropout probability; only 0.0 is accepted.
        scale: a Python number, default D ** -0.5; any value but NaN.
        output_dtype: default the query's.
        num_splits, split_size: how a sequence's keys are cut into pieces that are computed apart and merged: into
            `num_splits` equal ones or every `split_size` tokens; at most one is given. None: chosen automatically.
            `chunked` and `reference` never split; there it changes nothing.
        softcap: scores become softcap * tanh(scores / softcap), before the bias is added. Python number.
        sinks: float [H] ([G, H]): one more key for each query head, of this logit and value zero. It joins the LSE.
        kv_lengths: int32 [B]: key j is visible iff j < kv_lengths[b]. Without a mask object only.
        quantize_pv: multiply P and V in e4m3 (fp8 keys and values only).
        backend: "auto", "hopper", "interpret", "chunked" or "reference".

    Returns:
        The query's shape with value's last axis, in `output_dtype`. A row that sees no key is 0.

    Raises:
        ShapeError, DTypeError, ArgumentError, StaticArgumentError: an argument does not fit; named in the text.
        UnsupportedError: dropout, or a named backend that cannot serve the call.
        GradientError: on differentiation through paged or low-bit keys and values.
    """
    return _attention(**locals())[0]


memory_efficient_attention_forward = memory_efficient_attention


def memory_efficient_attention_forward_requires_grad(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    output_dtype: Any = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    kv_lengths: Any = None,
    quantize_pv: bool = False,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) of `memory_efficient_attention`; both are differentiable.

    lse: natural logarithm of the softmax's denominator, -inf for a row that sees no key. Shape [B, H, Mq]
    ([B, G, H, Mq]; [1, H, total queries] with a mask object); float64 beside a float32 or float64 output where x64
    is on, else float32.
    """
    return _attention(**locals())


def memory_efficient_attention_partial(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    output_dtype: Any = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    kv_lengths: Any = None,
    quantize_pv: bool = False,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """(out, lse) over a part of the keys, to be joined by `merge_attentions`; the output is float32 by default.

    Give `sinks` to one of the parts only: a sink counts as a key.
    """
    return _attention(**locals(), partial=True)


def not_supported_reasons(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    backend: str, **options: Any,
) -> list[str]:
    """Why `backend` cannot serve the call; an empty list if it can. Arguments as `memory_efficient_attention`.

    Arguments that no backend accepts raise, as they do there.
    """
    return dispatch.reasons(build(query, key, value, attn_bias, p, scale, **options)[0], backend)


def _attention(
    *, backend: str = "auto", parts: MaskParts | None = None, partial: bool = False, **arguments: Any
) -> tuple[jax.Array, jax.Array]:
    return run(*build(**arguments, parts=parts, partial=partial), backend)


def run(problem: Problem, operands: Operands, layout: Layout, backend: str) -> tuple[jax.Array, jax.Array]:
    """Answer a normalised call, in the caller's shapes."""
    out, lse = dispatch.attend(problem, dispatch.choose(problem, backend, operands), operands)
    return out.reshape(layout.out), lse.reshape(layout.lse)
