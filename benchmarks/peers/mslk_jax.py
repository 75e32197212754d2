"""MSLK's own Triton kernels called from `jax.jit` through jax-triton (0.3.1 for triton 3.6)."""

from __future__ import annotations

import os
from typing import Any

from ..inputs import Attention
from ..rows import Row
from . import import_reason, mslk

FRAMEWORK = "jax"
X64 = True
"""Its LSEs of partial results are float64."""


def available() -> str | None:
    why = mslk.available()
    if why is not None:
        return why
    cache = os.environ.get("TRITON_CACHE_DIR")
    try:
        return import_reason("jax_triton") or import_reason(f"{__package__}._mslk_triton")
    finally:  # jax_triton empties it, and triton would then write into the working directory
        os.environ.pop("TRITON_CACHE_DIR", None)
        if cache is not None:
            os.environ["TRITON_CACHE_DIR"] = cache


refuses = mslk.refuses


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    import jax.numpy as jnp

    table = jnp.zeros((1, 1), jnp.int32) if inputs.table is None else inputs.table
    return inputs.q, inputs.k, inputs.v, inputs.lengths, table


def run(row: Row, q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
    """As `FwOp.apply` does it: the query heads of a KV head, outer, and the tokens, inner, are one axis of queries."""
    import jax
    import jax_triton
    import numpy as np
    from mslk.attention.fmha.triton_splitk import FwOp

    from . import _mslk_triton

    b, tokens, groups, d = row.batch, row.tokens, row.kv_heads, row.head_dim
    heads = row.heads // groups
    queries, keys = heads * tokens, row.pages_per_row * (row.page_size or row.keys)
    splits = FwOp.get_split_k(b, groups, 1, keys, tokens, row.page_size or 0, row.page_size is not None)
    launch = FwOp.get_extra_args(
        is_paged=row.page_size is not None,
        B=b,
        M=queries,
        Kkv=d,
        Kq=d,
        Mq=tokens,
        split_k=splits,
        attn_bias=None,
        k_fp8_scale_shift=None,
    )
    q = q.reshape(b, tokens, groups, heads, d).transpose(0, 2, 3, 1, 4)
    padded = -(-queries // FwOp.MAX_BLOCK_M) * FwOp.MAX_BLOCK_M if splits > 1 else queries
    partial = jax.ShapeDtypeStruct((b, groups, splits, padded, d), np.float32 if splits > 1 else q.dtype)
    lses = jax.ShapeDtypeStruct((b, groups, splits, queries) if splits > 1 else (1,), np.float64)
    out, lse = jax_triton.triton_call(
        q,
        k,
        v,
        lengths,
        table,
        np.float32(d**-0.5),
        kernel=_mslk_triton.attend,
        out_shape=(partial, lses),
        grid=(-(-queries // launch["BLOCK_M"]), b * groups, splits),
        q_z=groups * queries * d,
        q_m=d,
        q_g=queries * d,
        kv_z=keys * groups * d,
        kv_n=groups * d,
        kv_g=d,
        o_z=groups * splits * padded * d,
        o_g=splits * padded * d,
        o_s=padded * d,
        o_m=d,
        lse_z=groups * splits * queries,
        lse_g=splits * queries,
        lse_s=queries,
        pages_per_row=row.pages_per_row,
        batch=b,
        queries=queries,
        keys=keys,
        split_keys=-(-keys // splits),
        groups=groups,
        head_dim=d,
        splits=splits,
        causal=row.causal,
        tokens=tokens,
        page_size=row.page_size or 0,
        **launch,
    )
    if splits == 1:
        return out.reshape(b, groups, heads, tokens, d).transpose(0, 3, 1, 2, 4)
    return reduce(
        out,
        lse,
        shape=(b, tokens, groups, heads, d),
        dtype=q.dtype,
        attn_strides=(groups * splits * padded * d, splits * padded * d, tokens * d, padded * d, d),
        lse_strides=(groups * splits * queries, splits * queries, tokens, queries, 1),
        splits=splits,
    )


def reduce(
    attn: Any,
    lse: Any,
    *,
    shape: tuple[int, int, int, int, int],
    dtype: Any,
    attn_strides: tuple[int, ...],
    lse_strides: tuple[int, ...],
    splits: int,
    lse_dtype: Any = None,
) -> Any:
    """MSLK's reduction to [B, M, G, H, D]; strides of B, G, H, split, M. With `lse_dtype` also the LSE [B, G, H, M]."""
    import jax
    import jax_triton

    from . import _mslk_triton

    b, m, g, h, d = shape
    options: dict[str, Any] = dict(zip(("z", "g", "h", "s", "m"), attn_strides))
    options = {f"stride_osk_{name}": stride for name, stride in options.items()} | {"stride_osk_k": 1}
    options |= {f"stride_lsek_{name}": stride for name, stride in zip(("z", "g", "h", "s", "m"), lse_strides)}
    options |= {"stride_oz": m * g * h * d, "stride_om": g * h * d, "stride_og": h * d, "stride_oh": d, "stride_ok": 1}
    out_shape = [jax.ShapeDtypeStruct(shape, dtype)]
    if lse_dtype is None:
        options |= {"LSE": None, **{f"stride_lse_{name}": None for name in "zghm"}}
    else:
        out_shape.append(jax.ShapeDtypeStruct((b, g, h, m), lse_dtype))
        options |= {"stride_lse_z": g * h * m, "stride_lse_g": h * m, "stride_lse_h": m, "stride_lse_m": 1}
    results = jax_triton.triton_call(
        attn,
        lse,
        kernel=_mslk_triton.reduce,
        out_shape=out_shape,
        grid=(m, b * g * h, 1),
        num_warps=4 if b * g * h < 32 else 2,
        split_k=splits,
        splitK_pow2=1 << (splits - 1).bit_length(),
        head_dim=d,
        head_dim_pow_2=1 << (d - 1).bit_length(),
        G=g,
        H=h,
        WRITE_LSE=lse_dtype is not None,
        **options,
    )
    return results[0] if lse_dtype is None else tuple(results)
