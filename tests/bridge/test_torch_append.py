"""`KVCache.append` on torch tensors: what it writes where tensors share memory, and what it refuses."""

import jax.numpy as jnp
import pytest
import torch

import bridge
from bridge.formats import KVCache, quantize
from pallas_kernels import formats as jax_formats
from pallas_kernels.errors import DTypeError

ARRANGED = torch.tensor([[3, 1, 0, 2], [0, 2, 3, 1]])  # a row of positions for each sequence


def moved(rows, positions):
    """Row t of each sequence, at positions[b, t]."""
    return torch.stack([part[order.argsort()] for part, order in zip(rows, positions)])


def test_new_rows_from_the_cache_itself():
    """Whatever part of the cache the new rows are, they are what they were before the call."""
    for dtype in (torch.float32, torch.bfloat16):
        k, v, new = (torch.randn(2, 4, 3, 16).to(dtype) for _ in range(3))
        cache = KVCache(k.clone(), v.clone())
        cache.append(new, cache.k, positions=ARRANGED)
        assert torch.equal(cache.k, moved(new, ARRANGED)) and torch.equal(cache.v, moved(k, ARRANGED))
        cache = KVCache(k.clone(), v.clone())
        cache.append(cache.v, cache.k, positions=ARRANGED)
        assert torch.equal(cache.k, moved(v, ARRANGED)) and torch.equal(cache.v, moved(k, ARRANGED))
        cache = KVCache(k.clone(), v.clone())
        cache.append(cache.k[:, 1:], cache.k[:, :3], positions=[[0, 1, 2]] * 2)
        assert torch.equal(cache.k, torch.cat([k[:, 1:], k[:, 3:]], 1))
        assert torch.equal(cache.v, torch.cat([k[:, :3], v[:, 3:]], 1))


def test_new_rows_from_the_other_half_of_a_low_bit_cache():
    k, new = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 16)
    cache = KVCache(k.clone(), quantize(torch.zeros_like(k), "int8"))
    cache.append(new, cache.k, positions=ARRANGED)
    assert torch.equal(cache.k, moved(new, ARRANGED))
    assert torch.equal(cache.v.dequantize(), quantize(moved(k, ARRANGED), "int8").dequantize())


OTHERS = [torch.int16, torch.int8, torch.uint8, torch.uint32, torch.bool, torch.float32]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", ["positions", "slot_mapping"])
def test_indices_are_int32_or_int64(name, dtype):
    cache = KVCache(*(torch.zeros(3, 4, 2, 16) for _ in "kv"))
    shape = (1, 2, 16) if name == "slot_mapping" else (3, 1, 2, 16)
    new = torch.ones(shape)
    index = torch.zeros(1 if name == "slot_mapping" else (3, 1), dtype=dtype)
    text = f"{name}: expected dtype int32 or int64, got {str(dtype).removeprefix('torch.')}"
    for given in (index, index.numpy(), index[:0], index[:0].numpy()):
        with pytest.raises(DTypeError, match=text):
            cache.append(new, new, **{name: given})
    assert not cache.k.any()
    twin = jax_formats.KVCache(*(jnp.zeros((3, 4, 2, 16)) for _ in "kv"))
    for given in (jnp.asarray(index.numpy()), index.numpy()):
        with pytest.raises(DTypeError, match=text):
            twin.append(jnp.ones(shape), jnp.ones(shape), **{name: given})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_are_checked_on_the_cpu(dtype):
    cache, new = KVCache(*(torch.zeros(3, 4, 2, 16) for _ in "kv")), torch.ones(1, 2, 16)
    with pytest.raises(ValueError, match=r"slot_mapping: expected .* < 12, got 12"):
        cache.append(new, new, slot_mapping=torch.tensor([12], dtype=dtype))
    cache.append(new, new, slot_mapping=torch.tensor([11], dtype=dtype))
    assert cache.k[2, 3].all() and cache.k.sum() == cache.k[2, 3].sum()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8], ids=str)
def test_index_arguments_of_attention_are_int32(dtype):
    """As `positions` and `slot_mapping`: no argument of a small type goes unchecked."""
    q, k = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    cu, pages = torch.tensor([0, 4], dtype=torch.int32), torch.randn(2, 4, 2, 16)
    given = {
        "cu_seq_q": lambda x: bridge.varlen_attn(q, k, k, x, cu, 4, 4),
        "cu_seq_k": lambda x: bridge.varlen_attn(q, k, k, cu, x, 4, 4),
        "seqused_k": lambda x: bridge.varlen_attn(q, k, k, cu, cu, 4, 4, seqused_k=x[1:]),
        "block_table": lambda x: bridge.varlen_attn(
            q, pages, pages, cu, None, 4, 4, seqused_k=cu[1:], block_table=x[None, :1]
        ),
        "kv_lengths": lambda x: bridge.memory_efficient_attention(q[None], k[None], k[None], kv_lengths=x[1:]),
    }
    for name, call in given.items():
        with pytest.raises(DTypeError, match=f"{name}: expected int32"):
            call(torch.tensor([0, 9], dtype=dtype))


def test_new_rows_are_tensors():
    cache, new = KVCache(*(torch.zeros(1, 4, 2, 16) for _ in "kv")), torch.ones(1, 1, 2, 16)
    for wrong in (new.numpy(), jnp.ones(new.shape), quantize(new, "int8"), new.tolist(), None):
        with pytest.raises(DTypeError, match=r"new_keys: expected a torch.Tensor of floats, got"):
            cache.append(wrong, new, positions=[[0]])
        with pytest.raises(DTypeError, match=r"new_values: expected a torch.Tensor of floats, got"):
            cache.append(new, wrong, positions=[[0]])
    assert not cache.k.any() and not cache.v.any()


def test_caches_and_formats_hold_tensors():
    x = torch.zeros(1, 4, 2, 16)
    for wrong in (x.numpy(), jnp.zeros(x.shape)):
        with pytest.raises(DTypeError, match=r"v: expected a torch.Tensor, got"):
            KVCache(x, wrong)
    stored = quantize(x, "int8")
    with pytest.raises(DTypeError, match=r"scale: expected a torch.Tensor, got numpy.ndarray"):
        bridge.formats.Int8(stored.values, stored.scale.numpy())
