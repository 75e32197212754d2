"""`bridge.fmha` as `acceptance` wants a front end: calls become `Inputs` and an operator class, as MSLK is called.

`num_splits` chooses FwOp or FwOp_Sn, formats become int32 words of all heads (expanded, stride 0) with their
coefficients beside them. Where the operator refuses what the tables hold for others (long causal queries and the like)
op=None answers, unless the front end is strict.
"""

import dataclasses

import torch

import bridge
import torch_frontend
from bridge import fmha

splitk = fmha.triton_splitk


class Frontend:
    formats = bridge.formats
    masks = fmha.attn_bias
    dtype_of = staticmethod(torch_frontend.dtype_of)
    numpy = staticmethod(torch_frontend.numpy)
    cast = staticmethod(torch_frontend.cast)
    stack = staticmethod(torch_frontend.stack)
    vjp = staticmethod(torch_frontend.vjp)
    share_heads = staticmethod(torch_frontend.share_heads)
    merge = staticmethod(fmha.merge_attentions)

    def __init__(self, device="cpu", strict=False, base=splitk.FwOp):
        self.device, self.strict, self.base = device, strict, base
        self.api = self

    def array(self, x, dtype):
        return torch_frontend.array(x, dtype).to(self.device)

    def nan_tail(self, x):
        tailed = torch_frontend.nan_tail(x.cpu())
        if self.device == "cpu":
            return tailed
        buffer = torch.full((tailed.untyped_storage().nbytes() // x.element_size(),), torch.nan, dtype=x.dtype)
        view = buffer.to(self.device).as_strided(tailed.shape, tailed.stride())
        return view.copy_(x)

    def mask(self, name, arguments):
        return torch_frontend.mask(name, arguments).to(self.device)

    def memory_efficient_attention(self, q, k, v, bias=None, *, backend=None):
        return fmha.memory_efficient_attention(q, k, v, bias)

    def memory_efficient_attention_forward(self, *args, **options):
        inp, op = self.request(*args, **options)
        return fmha._memory_efficient_attention_forward(inp, op)

    def memory_efficient_attention_forward_requires_grad(self, *args, **options):
        inp, op = self.request(*args, **options)
        out, ctx = fmha._memory_efficient_attention_forward_requires_grad(inp, op)
        return out, ctx.lse

    def memory_efficient_attention_partial(self, *args, **options):
        inp, op = self.request(*args, **options)
        inp.is_partial = True
        out, ctx = fmha._memory_efficient_attention_forward_requires_grad(inp, op)
        return out, ctx.lse

    def request(
        self, q, k, v, bias=None, *, backend=None, num_splits=None, scale=None, output_dtype=None, quantize_pv=False
    ):
        """(inputs, operator class or None)."""
        attributes = {}
        query, q_scale = (q.values, q.scale.movedim(-1, 1)) if isinstance(q, bridge.formats.Fp8) else (q, None)
        if isinstance(k, torch.Tensor):
            inp = fmha.Inputs(query, k, v, bias, scale=scale, output_dtype=output_dtype)
        else:
            key, value = (self.share_heads(x.words, query) for x in (k, v))
            if isinstance(k, bridge.formats.SeedInt4):
                attributes["NUM_GROUPS"] = k.num_groups
                inp = fmha.Inputs(query, key, value, bias, scale=scale, output_dtype=output_dtype)
            else:
                scales = (x.coefficients.expand(key.shape[:-1]) for x in (k, v))
                inp = splitk.InputsFp8(query, key, value, bias, 0.0, scale, output_dtype)
                inp.k_fp8_scale_shift, inp.v_fp8_scale_shift = scales
                inp.q_fp8_scale_shift = q_scale
                inp.quantize_qk_to_fp8, inp.quantize_pv_to_fp8 = q_scale is not None, quantize_pv
                inp.use_fp32_scales = k.fp32_scales
        op = self.base if num_splits is None else self.base.get_operator(num_splits)
        if attributes:
            op = type("Variant", (op,), attributes | {"NAME": f"{op.NAME}_variant"})
        if self.strict or attributes:
            return inp, op
        trial = dataclasses.replace(inp)
        trial.normalize_bmhk()
        return inp, op if op.supports(trial) else None
