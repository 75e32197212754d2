"""How an operator's `Inputs` become one call of this library: the only place where the two meet."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import bridge
from pallas_kernels.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

from .. import formats
from .inputs import Context, Inputs, output_dim
from .operators import AttentionFwOpBase

FP8_BLOCK_N = 64
"""Keys that share one scale of the probabilities where P V is multiplied in e4m3."""

Coefficients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class LibraryFwOp(AttentionFwOpBase):
    """A forward operator that this library answers.

    SPLIT_K: pieces of each sequence's keys, None = automatic. NUM_GROUPS: coefficient pairs of a row of int4 keys and
    values. BLOCK_N: keys that share one scale of the probabilities in e4m3.
    """

    SPLIT_K: ClassVar[int | None] = None
    NUM_GROUPS: ClassVar[int] = 1
    BLOCK_N: ClassVar[int] = FP8_BLOCK_N

    @classmethod
    def num_splits(cls, inp: Inputs) -> int | None:
        return cls.SPLIT_K

    @classmethod
    def get_fp8_scale_shift(cls, inp: Inputs) -> Coefficients:
        """The coefficients (of key, value, query) with both head axes, [B, M, G, H]; Nones for plain `Inputs`.

        Raises ArgumentError (an AssertionError) where key's or value's are missing, ShapeError (a ValueError) where
        they have neither 3 nor 4 axes.
        """
        if not hasattr(inp, "k_fp8_scale_shift"):
            return None, None, None
        k, v, q = (getattr(inp, f"{name}_fp8_scale_shift") for name in "kvq")
        if k is None or v is None:
            raise ArgumentError("k_fp8_scale_shift, v_fp8_scale_shift: fp8 keys and values need both")
        if k.ndim not in (3, 4):
            raise ShapeError(f"k_fp8_scale_shift: expected the layout BMH or BMGH, got shape {tuple(k.shape)}")
        if k.ndim == 4:
            return k, v, q
        return k.unsqueeze(2), v.unsqueeze(2), None if q is None else q.unsqueeze(2)

    @classmethod
    def apply(cls, inp: Inputs, needs_gradient: bool) -> tuple[torch.Tensor, Context | None]:
        """(out, Context), differentiable by torch's autograd where grad mode is on, or (out, None) without gradient.

        out: query's shape with value's head dim, in `inp.get_output_dtype()`; lse: float64 beside a float32 or
        float64 output, else float32. Rows that see no key, and empty inputs, give 0 and -inf.
        """
        if inp.query.numel() == 0 or inp.key.numel() == 0:
            out, lse = _empty(inp)
            return out, Context(lse=lse, out=out) if needs_gradient else None
        arguments = (*_operands(inp, cls), inp.p, inp.scale)
        options: dict[str, Any] = {
            "output_dtype": inp.get_output_dtype(),
            "num_splits": cls.num_splits(inp),
            "quantize_pv": inp.quantize_pv_to_fp8,
        }
        if not needs_gradient:
            with torch.no_grad():
                return bridge.memory_efficient_attention_forward(*arguments, **options), None
        out, lse = bridge.memory_efficient_attention_forward_requires_grad(*arguments, **options)
        return out, Context(lse=lse, out=out)


def _empty(inp: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    q, dtype = inp.query, inp.get_output_dtype()
    out = torch.zeros((*q.shape[:-1], output_dim(q, inp.value)), dtype=dtype, device=q.device)
    lse_dtype = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    lse = torch.full((q.shape[0], *q.shape[2:-1], q.shape[1]), -torch.inf, dtype=lse_dtype, device=q.device)
    wanted = [x for x in (q, inp.key, inp.value) if x.requires_grad]
    if torch.is_grad_enabled() and wanted:  # gradients are zeros, not missing
        never = torch.zeros((), dtype=torch.bool, device=q.device)
        out = torch.where(never, sum(x.sum() for x in wanted).to(dtype), out)  # type: ignore[union-attr]
    return out, lse


def _operands(inp: Inputs, cls: type[LibraryFwOp]) -> tuple[Any, Any, Any, Any]:
    """(query, key, value, attn_bias) as this library takes them, in its formats."""
    k_scale, v_scale, q_scale = cls.get_fp8_scale_shift(inp)
    query: Any = inp.query
    if inp.quantize_qk_to_fp8:
        if q_scale is None:
            raise ArgumentError("q_fp8_scale_shift: must be given with quantize_qk_to_fp8")
        scale = _fitted("q_fp8_scale_shift", q_scale, inp.query.shape[:-1])
        query = formats.Fp8(inp.query, scale.movedim(1, -1))
    if inp.quantize_pv_to_fp8 and cls.BLOCK_N != FP8_BLOCK_N:
        raise UnsupportedError(f"BLOCK_N: quantize_pv_to_fp8 is served with {FP8_BLOCK_N} only, got {cls.BLOCK_N}")
    if not inp.low_bit:
        if k_scale is not None:
            raise DTypeError(f"key, value: fp8 coefficients go with int32 words, got {inp.key.dtype}")
        if cls.NUM_GROUPS != 1:
            raise ArgumentError(f"NUM_GROUPS: {cls.NUM_GROUPS} groups go with int4 keys and values only")
        return query, inp.key, inp.value, inp.attn_bias

    words = [inp.key, inp.value]
    shared = all(x.shape[-2] > 1 and x.stride(-2) == 0 for x in words)  # one head, expanded: read once
    if shared:
        words = [x.narrow(-2, 0, 1) for x in words]
    if k_scale is None or v_scale is None:
        key, value = (formats.SeedInt4(x, cls.NUM_GROUPS) for x in words)
        return query, key, value, inp.attn_bias
    if cls.NUM_GROUPS != 1:
        raise ArgumentError(f"NUM_GROUPS: fp8 keys and values have one group, got {cls.NUM_GROUPS}")
    stored = []
    for name, x, coefficients in zip("kv", words, (k_scale, v_scale)):
        if shared:
            coefficients = coefficients.narrow(-1, 0, 1)
        coefficients = _fitted(f"{name}_fp8_scale_shift", coefficients, x.shape[:-1])
        stored.append(formats.SeedFp8(x, coefficients, bool(inp.use_fp32_scales)))
    return query, *stored, inp.attn_bias


def _fitted(name: str, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if x.numel() != shape.numel() or x.shape[-1] != shape[-1]:
        raise ShapeError(f"{name}: expected one coefficient a row of a head, {tuple(shape)}, got {tuple(x.shape)}")
    return x.reshape(shape)
