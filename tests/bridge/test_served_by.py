"""`bridge.served_by`: the backend and its splits, without running it."""

import pytest
import torch

import bridge
from bridge.fmha.attn_bias import BlockDiagonalCausalWithOffsetPaddedKeysMask
from pallas_kernels.errors import ArgumentError, ShapeError, UnsupportedError


def inputs(dtype=torch.bfloat16):
    return tuple(torch.zeros(1, n, 2, 16, dtype=dtype) for n in (3, 8, 8))


@pytest.mark.parametrize(("asked", "serves"), [("auto", "chunked"), ("chunked", "chunked"), ("reference", "reference")])
def test_name(asked, serves):
    mask = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 2], 4, [3, 4])
    assert bridge.served_by(*inputs(), backend=asked) == (serves, 1)
    assert bridge.served_by(*inputs(), attn_bias=mask, num_splits=2, backend=asked) == (serves, 1)


def test_splits_of_a_kernel():
    q, k = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    assert bridge.served_by(q, k, k, backend="interpret", num_splits=3) == ("interpret", 3)
    assert bridge.served_by(q, k, k, backend="interpret") == ("interpret", 1)  # too little work for a second launch
    k = torch.zeros(1, 65536, 2, 64, dtype=torch.bfloat16)
    assert bridge.served_by(q, k, k, backend="interpret") == ("interpret", 4)  # 8 shares over 2 KV heads


def test_formats_and_gradients():
    q, k, v = inputs()
    cache = [bridge.formats.quantize(x, "int8") for x in (k, v)]
    assert bridge.served_by(q.requires_grad_(), *cache).backend == "chunked"


def test_raises_as_the_call():
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match="hopper"):
        bridge.served_by(q, k, v, backend="hopper")
    with pytest.raises(ArgumentError, match="backend"):
        bridge.served_by(q, k, v, backend="triton")
    with pytest.raises(ShapeError, match="key"):
        bridge.served_by(q, k[..., :8], v)
