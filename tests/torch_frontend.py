"""The torch front end as `checks` wants it."""

import numpy as np
import torch

import bridge as api
from bridge.fmha import attn_bias

__all__ = ["api", "array", "dtype_of", "mask", "masks", "numpy"]

masks = attn_bias


def array(x, dtype):
    return torch.from_numpy(np.array(x)).to(getattr(torch, dtype))


def numpy(x):
    return x.detach().cpu().double().numpy()


def dtype_of(x):
    return str(x.dtype).removeprefix("torch.")


def mask(name, arguments):
    cls = getattr(attn_bias, name)
    arguments = dict(arguments)
    if "block_tables" in arguments:
        arguments["block_tables"] = torch.tensor(arguments["block_tables"], dtype=torch.int32)
    factory = cls.from_seqlens_local if {"window_left", "window_size"} & set(arguments) else cls.from_seqlens
    return factory(**arguments)


def where_finite(x):
    """x with what is not finite (the LSE of empty rows) replaced by a constant 0."""
    return torch.where(torch.isfinite(x), x, 0.0)


def value(loss, arrays):
    return float(loss(**{name: torch.from_numpy(x) for name, x in arrays.items()}))


def value_and_grad(loss, arrays):
    arrays = {name: torch.from_numpy(x).requires_grad_() for name, x in arrays.items()}
    result = loss(**arrays)
    result.backward()
    return float(result), {name: numpy(x.grad) for name, x in arrays.items()}


merge = api.merge_attentions


def cast(x, dtype):
    return x.to(getattr(torch, dtype))


def stack(tensors):
    return torch.stack(tensors)


def vjp(function, tensors, cotangent):
    """(function(*tensors), its gradients) for a cotangent of the result's dtype."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = function(*tensors)
    out.backward(cotangent)
    return out, [x.grad for x in tensors]


def share_heads(kv, query):
    """Keys or values of one head, expanded (stride 0) to the query's heads as MSLK's callers do."""
    axis = query.ndim - 2
    if kv.ndim != query.ndim or axis == 1 or kv.shape[axis] == query.shape[axis]:
        return kv
    return kv.expand(*kv.shape[:axis], query.shape[axis], kv.shape[-1])


def nan_tail(x):
    """The same elements and strides in a longer buffer, with NaN behind the last one."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    buffer = torch.full((span + 4096,), torch.nan, dtype=x.dtype)
    view = buffer.as_strided(x.shape, x.stride())
    view.copy_(x)
    return view


def host_ints(x):
    """int32 that the library can check: a tensor on the CPU."""
    return torch.tensor(x, dtype=torch.int32)


def mask_class(name):
    return getattr(attn_bias, name)
