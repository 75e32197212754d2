"""The torch front end as `checks` wants it."""

import numpy as np
import torch

import bridge as api
from bridge.fmha import attn_bias

__all__ = ["api", "array", "dtype_of", "mask", "numpy"]


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
