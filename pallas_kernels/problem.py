"""One attention call, normalised: the static `Problem` and the arrays that go with it, and all validation.

Every public function of either front end ends here: it becomes a hashable description (shapes, dtypes, formats,
window, options) plus `Operands`. Backends read nothing else. Whatever does not fit raises in this file, before
anything is computed.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import masks
from .errors import ArgumentError, DTypeError, ShapeError, StaticArgumentError, UnsupportedError
from .formats import Fp8, KVFormat, SeedFp8
from .masks import AttentionMask, NormalForm, Window, is_host

FLOATS = ("float16", "bfloat16", "float32", "float64")
FP8 = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about a call. Heads are kv_heads x group; sequences are packed along one query and one key axis.

    queries: packed query rows over all sequences. key_rows: rows of the key axis (all pages together).
    max_keys: capacity of one sequence, in keys. slot: rows of each sequence's slot where keys lie in equal slots
    (padded storage), else None. lse_rows: the LSE is [lse_rows, heads, queries / lse_rows]; 1 for packed queries.
    bias: shape of the array bias, of bias_dtype. sinks: their dtype.
    fp8_qk, fp8_pv: multiply in e4m3 (MSLK's quantize_qk/pv_to_fp8).
    num_splits, split_size: the split policy (at most one is given).
    """

    batch: int
    queries: int
    key_rows: int
    max_keys: int
    kv_heads: int
    group: int
    head_dim: int
    value_dim: int
    q_dtype: str
    key_format: str
    value_format: str
    out_dtype: str
    lse_dtype: str
    window: Window
    page_size: int | None
    scale: float
    softcap: float | None
    bias: tuple[int, ...] | None
    sinks: str | None
    num_splits: int | None
    split_size: int | None
    slot: int | None
    lse_rows: int
    equal_queries: int | None = None
    """Query rows of every sequence, where all have the same (a plain batch): then q_start is known."""
    equal_keys: int | None = None
    """Keys of every sequence, where all have the same: then k_len is known."""
    gappy_pages: bool = False
    """Paged, and sequences may start anywhere in their row of pages."""
    fp8_qk: bool = False
    fp8_pv: bool = False
    tile_tokens: int | None = None
    """Query tokens of a sequence that the kernels are laid out for (any number is served); None: not yet chosen."""
    bias_dtype: str = "float32"
    inference_only: str | None = None
    """Why no gradient is defined, or None."""

    @property
    def compute_dtype(self) -> Any:
        return jnp.float64 if self.q_dtype == "float64" else jnp.float32

    @property
    def empty(self) -> bool:
        """No query row, no key row or no element: nothing to compute, every row is empty."""
        return 0 in (self.queries, self.key_rows, self.kv_heads, self.group, self.head_dim, self.batch, self.max_keys)


class Operands(NamedTuple):
    """The arrays of a call.

    q [queries, kv_heads, group, D] (e4m3 values with `q_scale` [queries, kv_heads, group] for fp8 QK);
    k, v [A, M, *heads, D] arrays or formats, key row r = a * M + m; nf: the normal form;
    bias [B|1, kv_heads|1, group|1, Mq|1, Mk|1]; sinks [kv_heads, group].
    """

    q: Any
    k: Any
    v: Any
    nf: NormalForm
    bias: Any = None
    sinks: Any = None
    q_scale: Any = None


class Layout(NamedTuple):
    """The caller's shapes; both are reshapes of what backends give."""

    out: tuple[int, ...]
    lse: tuple[int, ...]


# ---------------------------------------------------------------------------------------------- small checks


def as_array(x: Any, name: str) -> jax.Array:
    """A jax array without silent narrowing."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        hint = " (pass its k and v)" if hasattr(x, "append") and hasattr(x, "k") else ""
        raise DTypeError(f"{name}: expected an array, got {type(x).__name__}{hint}")
    if not isinstance(x, (np.ndarray, np.generic, jax.Array)):
        raise DTypeError(f"{name}: expected a jax or numpy array, got {type(x).__module__}.{type(x).__name__}")
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise DTypeError(f"{name}: {x.dtype} would be narrowed to {jax.dtypes.canonicalize_dtype(x.dtype)}; enable x64")
    return jnp.asarray(x)


def static_number(x: Any, name: str) -> float:
    """A Python float; traced values raise TypeError (the value is part of the compiled problem)."""
    if isinstance(x, (jax.core.Tracer, jax.Array)):
        raise StaticArgumentError(f"{name}: expected a Python number (it is static), got {type(x).__name__}")
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise StaticArgumentError(f"{name}: expected a Python number, got {type(x).__name__}")
    if math.isnan(x):
        raise ArgumentError(f"{name}: NaN is not a number to scale by")
    return float(x)


def static_int(x: Any, name: str, least: int | None = None) -> int:
    if isinstance(x, (jax.core.Tracer, jax.Array)) or isinstance(x, bool):
        raise StaticArgumentError(f"{name}: expected a Python int (it is static), got {type(x).__name__}")
    try:
        value = operator.index(x)
    except TypeError:
        raise StaticArgumentError(f"{name}: expected a Python int, got {type(x).__name__}") from None
    if least is not None and value < least:
        raise ArgumentError(f"{name}: expected at least {least}, got {value}")
    return value


def check_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    value = static_number(softcap, "softcap")
    if not (0 < value < math.inf):
        raise ArgumentError(f"softcap: expected a positive finite number or None, got {softcap}")
    return value


def check_splits(num_splits: Any, split_size: Any) -> tuple[int | None, int | None]:
    if num_splits is not None and split_size is not None:
        raise ArgumentError(f"num_splits, split_size: give at most one, got {num_splits} and {split_size}")
    return (
        None if num_splits is None else static_int(num_splits, "num_splits", least=1),
        None if split_size is None else static_int(split_size, "split_size", least=1),
    )


def check_int32(x: Any, name: str, shape: tuple[int, ...]) -> Any:
    """int32 of the given shape; host-known values stay numpy, so that callers can check them."""
    if not isinstance(x, np.ndarray) and is_host(x):
        x = np.asarray(x, np.int64)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        raise DTypeError(f"{name}: expected int32, got {getattr(x, 'dtype', type(x).__name__)}")
    if tuple(x.shape) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.dtype != np.int32:
        if not is_host(x):
            raise DTypeError(f"{name}: expected int32, got {x.dtype}")
        if x.size and (x.max() > np.iinfo(np.int32).max or x.min() < np.iinfo(np.int32).min):
            raise ArgumentError(f"{name}: values must fit int32")
        x = x.astype(np.int32)
    return x


def store(x: Any, name: str) -> Any:
    """A key or value: a float array, or one of the formats."""
    return x if isinstance(x, KVFormat) else as_array(x, name)


def format_name(x: Any) -> str:
    """Format and static parameters of a key or value, as it enters the problem."""
    if not isinstance(x, KVFormat):
        return str(x.dtype)
    parts = [x.name, *(f"{leaf.dtype}{leaf.ndim}" for leaf in jax.tree.leaves(x))]
    return "/".join(parts)


def check_dtypes(query: Any, key: Any, value: Any) -> None:
    q_dtype = str(query.values.dtype if isinstance(query, Fp8) else query.dtype)
    if q_dtype not in (*FLOATS, FP8):
        raise DTypeError(f"query: dtype {q_dtype} is not served; accepted are {', '.join((*FLOATS, FP8))}")
    low_bit = isinstance(key, KVFormat)
    if low_bit != isinstance(value, KVFormat):
        raise DTypeError("key, value: both must be arrays or both low-bit formats, got one of each")
    if not low_bit and not (str(key.dtype) == str(value.dtype) == q_dtype):
        raise DTypeError(f"query, key, value: dtypes must be equal, got {q_dtype}, {key.dtype}, {value.dtype}")


def check_output_dtype(output_dtype: Any, q_dtype: str, partial: bool) -> str:
    """The output's dtype; by default float32 for partials, else the query's."""
    if output_dtype is None:
        return "float32" if partial and q_dtype != "float64" else q_dtype
    name = str(jnp.dtype(output_dtype))
    if name not in (*FLOATS, FP8):
        raise DTypeError(f"output_dtype: {name} is not served; accepted are {', '.join((*FLOATS, FP8))}")
    if name == "float64" and not jax.config.jax_enable_x64:
        raise DTypeError("output_dtype: float64 needs x64 to be enabled")
    return name


def lse_dtype(out_dtype: str) -> str:
    """float64 beside a float32 or float64 output (MSLK's rule), where x64 allows; else float32."""
    return "float64" if out_dtype in ("float32", "float64") and jax.config.jax_enable_x64 else "float32"


# ------------------------------------------------------------------------------------------------ attention


class MaskParts(NamedTuple):
    """What a mask object of either front end reduces to.

    packed: the sequences share one batch row. slotted: every sequence starts at the beginning of its own slot, or of
    its own row of pages.
    """

    nf: NormalForm
    window: Window
    page_size: int | None
    packed: bool
    slotted: bool


def build(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    p: Any = 0.0,
    scale: Any = None,
    *,
    parts: MaskParts | None = None,
    output_dtype: Any = None,
    partial: bool = False,
    num_splits: Any = None,
    split_size: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    kv_lengths: Any = None,
    quantize_pv: bool = False,
) -> tuple[Problem, Operands, Layout]:
    """Normalise one call of the `memory_efficient_attention` family.

    `attn_bias` is None, an array or one of `masks`; `parts` stands for a mask object of another front end, and may be
    joined by an array bias where it is not packed.
    """
    query = query if isinstance(query, Fp8) else as_array(query, "query")
    key, value = store(key, "key"), store(value, "value")
    check_dtypes(query, key, value)
    check_dropout(p)
    if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4, 5):
        raise ShapeError(
            "query, key, value: expected equal ranks of 3 (BMK), 4 (BMHK) or 5 (BMGHK), "
            f"got shapes {query.shape}, {key.shape}, {value.shape}"
        )
    mask = attn_bias if isinstance(attn_bias, AttentionMask) else None
    rows = _key_rows(key, value, mask.paging if mask is not None else parts.page_size if parts else None)
    if mask is not None:
        mask.check(rows, query.shape[1])
        parts = MaskParts(mask.normal_form(rows), mask.window, mask.paging, True, mask.slotted)
    packed = parts is not None and parts.packed
    if packed and query.ndim == 3:
        raise ShapeError(f"query: a block-diagonal mask needs rank 4 or 5, got shape {query.shape}")
    kv_heads, group = _heads(query, key, value)
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if key.shape[-1] != head_dim:
        raise ShapeError(f"key: head_dim {key.shape[-1]} differs from query's {head_dim}")
    _check_batches(query, key, value, parts)

    if parts is not None and kv_lengths is not None:
        raise ArgumentError("kv_lengths: a mask object carries its own lengths, got both")
    if parts is None or not packed:
        dense = masks.dense_form(query.shape[0], query.shape[1], key.shape[1])
        if kv_lengths is not None:
            lengths = check_int32(kv_lengths, "kv_lengths", (query.shape[0],))
            if is_host(lengths) and lengths.size and not 0 <= lengths.min() <= lengths.max() <= key.shape[1]:
                raise ArgumentError(f"kv_lengths: expected values in [0, {key.shape[1]}], got {lengths.tolist()}")
            dense = dense._replace(k_len=lengths)
        parts = MaskParts(dense, parts.window if parts else Window(), None, False, True)

    bias = None if attn_bias is None or mask is not None else _array_bias(attn_bias, query, key, kv_heads, group)
    if packed and bias is not None:
        raise ShapeError("attn_bias: an array bias goes with a plain batch only, not with a block-diagonal mask")
    q_dtype = str(query.values.dtype if isinstance(query, Fp8) else query.dtype)
    out_dtype = check_output_dtype(output_dtype, q_dtype, partial)
    fp8_qk, fp8_pv = isinstance(query, Fp8), bool(quantize_pv)
    if (fp8_qk or fp8_pv) and not (isinstance(key, (SeedFp8, Fp8)) and isinstance(value, (SeedFp8, Fp8))):
        which, got = "query" if fp8_qk else "quantize_pv", f"{format_name(key)} and {format_name(value)}"
        raise DTypeError(f"{which}: multiplying in e4m3 needs key and value in SeedFp8 or Fp8, got {got}")
    splits = check_splits(num_splits, split_size)
    queries = query.shape[0] * query.shape[1]
    heads = query.shape[2:-1]
    nf = NormalForm(*(None if x is None else jnp.asarray(x, jnp.int32) for x in parts.nf))
    capacity = rows if packed else key.shape[1]
    if nf.block_table is not None:
        capacity = nf.block_table.shape[-1] * (parts.page_size or 1)
    elif parts.slotted:
        capacity = rows // parts.nf.batch if parts.nf.batch else 0

    problem = Problem(
        batch=parts.nf.batch,
        queries=queries,
        key_rows=rows,
        max_keys=capacity,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        q_dtype=q_dtype,
        key_format=format_name(key),
        value_format=format_name(value),
        out_dtype=out_dtype,
        lse_dtype=lse_dtype(out_dtype),
        window=parts.window,
        page_size=parts.page_size,
        scale=default_scale(scale, head_dim),
        softcap=check_softcap(softcap),
        bias=None if bias is None else bias.shape,
        bias_dtype="float32" if bias is None else str(bias.dtype),
        sinks=None if sinks is None else str(as_array(sinks, "sinks").dtype),
        num_splits=splits[0],
        split_size=splits[1],
        slot=capacity if parts.slotted and nf.block_table is None else None,
        lse_rows=1 if packed else query.shape[0],
        equal_queries=None if packed else query.shape[1],
        equal_keys=None if packed or kv_lengths is not None else key.shape[1],
        gappy_pages=nf.block_table is not None and not parts.slotted,
        fp8_qk=fp8_qk,
        fp8_pv=fp8_pv,
        inference_only=_inference_only(key, parts.page_size),
    )
    q = query.values if isinstance(query, Fp8) else query
    operands = Operands(
        q.reshape(queries, kv_heads, group, head_dim),
        key,
        value,
        nf,
        bias,
        check_sinks(sinks, heads or (1,), kv_heads, group),
        _query_scale(query, kv_heads, group) if isinstance(query, Fp8) else None,
    )
    lse_heads = heads or (1,)
    lse = (1, *lse_heads, queries) if packed else (query.shape[0], *lse_heads, query.shape[1])
    return problem, operands, Layout((*query.shape[:-1], value_dim), lse)


def default_scale(scale: Any, head_dim: int) -> float:
    return (head_dim**-0.5 if head_dim else 1.0) if scale is None else static_number(scale, "scale")


def check_dropout(p: Any) -> None:
    value = static_number(p, "p")
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"p: expected a probability in [0, 1], got {p}")
    if value != 0.0:
        raise UnsupportedError(f"p: dropout is not supported, got p = {p}; accepted is 0.0")


def _key_rows(key: Any, value: Any, page_size: int | None) -> int:
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(f"value: expected key's shape but for the last axis, {key.shape}, got {value.shape}")
    if page_size is not None and key.shape[0] != 1 and key.shape[1] != page_size:
        raise ShapeError(
            f"key: paged keys are [1, pages * page_size, ...] or [pages, page_size, ...] with page_size {page_size}, "
            f"got shape {key.shape}"
        )
    return key.shape[0] * key.shape[1]


def _heads(query: Any, key: Any, value: Any) -> tuple[int, int]:
    """(kv_heads, group): heads of key, and query heads that share one of them."""
    q, k = query.shape[2:-1], key.shape[2:-1]
    if query.ndim == 3:
        return 1, 1
    if query.ndim == 4:
        if k[0] == 0 or q[0] % k[0]:
            if q[0] == k[0]:
                return 0, 1
            raise ShapeError(f"key: {k[0]} heads do not divide query's {q[0]}")
        return k[0], q[0] // k[0]
    if q[0] != k[0] or k[1] not in (1, q[1]):
        raise ShapeError(f"key: groups and heads {k} must be query's {q}, or ({q[0]}, 1)")
    return (q[0] * q[1], 1) if k[1] == q[1] else (q[0], q[1])


def _check_batches(query: Any, key: Any, value: Any, parts: MaskParts | None) -> None:
    if parts is not None and parts.packed:
        if query.shape[0] != 1 or (parts.page_size is None and key.shape[0] != 1):
            raise ShapeError(
                "query, key: a block-diagonal mask needs batch 1 with the sequences concatenated, "
                f"got shapes {query.shape} and {key.shape}"
            )
    elif query.shape[0] != key.shape[0]:
        raise ShapeError(
            f"key: batch {key.shape[0]} differs from query's {query.shape[0]} "
            "(expand it; keys in pages need one of the paged masks)"
        )


def _array_bias(bias: Any, query: Any, key: Any, kv_heads: int, group: int) -> jax.Array:
    """[B|1, kv_heads|1, group|1, Mq|1, Mk|1] from a bias of the query's rank."""
    if not hasattr(bias, "dtype") or not hasattr(bias, "shape"):
        raise DTypeError(
            f"attn_bias: expected None, an array or one of pallas_kernels.masks, got {type(bias).__name__}"
        )
    bias = as_array(bias, "attn_bias")
    if str(bias.dtype) not in FLOATS:
        raise DTypeError(f"attn_bias: expected one of {', '.join(FLOATS)}, got {bias.dtype}")
    heads = query.shape[2:-1]
    full = (query.shape[0], *heads, query.shape[1], key.shape[1])
    if bias.ndim != len(full) or any(n not in (1, m) for n, m in zip(bias.shape, full)):
        raise ShapeError(f"attn_bias: expected shape {full} (axes of size 1 are broadcast), got {bias.shape}")
    if len(heads) == 2 and (kv_heads, group) != heads:  # every head has its own keys: one head axis
        if bias.shape[1:3] != (1, 1):
            bias = jnp.broadcast_to(bias, (bias.shape[0], *heads, *bias.shape[3:]))
        return bias.reshape(bias.shape[0], -1, 1, *bias.shape[3:])
    if len(heads) == 2:
        return bias
    if not heads:
        return bias[:, None, None]
    split = (1, 1) if bias.shape[1] == 1 else (kv_heads, group)
    return bias.reshape(bias.shape[0], *split, *bias.shape[2:])


def check_sinks(sinks: Any, heads: tuple[int, ...], kv_heads: int, group: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = as_array(sinks, "sinks")
    if str(sinks.dtype) not in FLOATS:
        raise DTypeError(f"sinks: expected one of {', '.join(FLOATS)}, got {sinks.dtype}")
    if sinks.shape not in (heads, (math.prod(heads),)):
        raise ShapeError(f"sinks: expected one logit for each query head, shape {heads}, got {sinks.shape}")
    return sinks.reshape(kv_heads, group)


def _query_scale(query: Fp8, kv_heads: int, group: int) -> jax.Array:
    """[queries, kv_heads, group] from the format's [B, heads, Mq]."""
    if query.shift is not None:
        raise ArgumentError("query: fp8 QK multiplies values and scales only, a shift is not accepted")
    heads = query.shape[2:-1]
    if query.scale.shape != (query.shape[0], *heads, query.shape[1]):
        raise ShapeError(
            f"query: expected a scale for each row, shape {(query.shape[0], *heads, query.shape[1])}, "
            f"got {query.scale.shape}"
        )
    return jnp.moveaxis(query.scale, -1, 1).reshape(-1, kv_heads, group)


def _inference_only(key: Any, page_size: int | None) -> str | None:
    if isinstance(key, KVFormat):
        return "key and value are low-bit"
    if page_size is not None:
        return "key and value are paged (block_table)"
    return None
