"""Bad calls on the torch front end: they raise before anything is written."""

import numpy as np
import pytest
import torch

import bad_input
import bridge
import torch_frontend as frontend


@pytest.mark.parametrize("name,call,kind,text", bad_input.BAD_CALLS, ids=bad_input.IDS)
def test_raises(name, call, kind, text):
    bad_input.check(frontend, call, kind, text)


def test_expanded_heads_must_be_the_query_s():
    q, k = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 1, 16).expand(2, 9, 6, 16)
    with pytest.raises(ValueError, match="heads"):
        bridge.memory_efficient_attention(q, k, k)


def test_an_expanded_cache_is_not_written():
    k, v = torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, 1, 16).expand(1, 8, 4, 16)
    new = torch.randn(1, 2, 4, 16)
    with pytest.raises(ValueError, match="expanded"):
        bridge.formats.KVCache(k, v).append(new, new, positions=[[0, 1]])
    assert not k.any()


def test_a_given_scale_is_kept_as_it_was():
    scale = torch.full((2,), 0.01)
    cache = bridge.formats.quantize(torch.randn(1, 4, 2, 16), "fp8", scale=scale)
    before = cache.dequantize()
    scale.mul_(2)
    assert torch.equal(cache.dequantize(), before)


def test_devices_mixed():
    q = torch.randn(1, 2, 2, 16)
    with pytest.raises(RuntimeError, match="one device"):
        bridge.memory_efficient_attention(q, q.to("meta"), q)


def test_op_is_an_operator_class():
    q = torch.randn(1, 2, 2, 16)
    with pytest.raises(ValueError, match="op"):
        bridge.memory_efficient_attention(q, q, q, op=object)


def test_disabled_flash_raises():
    q, cu = torch.randn(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with pytest.raises(RuntimeError, match="FLASH_ATTENTION"):
            bridge.varlen_attn(q, q, q, cu, cu, 4, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        bridge.varlen_attn(q, q, q, cu, cu, 4, 4)


class TestOut:
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)

    def call(self, out, q, k, v, **options):
        return bridge.varlen_attn_out(out, q, k, v, self.cu, self.cu, 4, 4, **options)

    def tensors(self):
        return [torch.randn(6, 2, 16) for _ in range(3)]

    def test_right(self):
        q, k, v = self.tensors()
        out = torch.full_like(q, float("nan"))
        assert self.call(out, q, k, v) is out
        want = bridge.varlen_attn(q, k, v, self.cu, self.cu, 4, 4)
        np.testing.assert_array_equal(out[:5].numpy(), want[:5].numpy())
        assert out[5:].isnan().all(), "rows beyond cu_seq_q[N] are not written"
        again, lse = self.call(out, q, k, v, return_aux=bridge.AuxRequest(lse=True), window_size=(-1, 0))
        assert again is out and lse.shape == (2, 6)

    def test_strided_out(self):
        q, k, v = self.tensors()
        wide = torch.full((6, 4, 16), float("nan"))
        self.call(wide[:, 1:3], q, k, v)
        want = bridge.varlen_attn(q, k, v, self.cu, self.cu, 4, 4)
        np.testing.assert_array_equal(wide[:5, 1:3].numpy(), want[:5].numpy())
        assert wide[:, 0].isnan().all() and wide[:, 3].isnan().all()

    @pytest.mark.parametrize(
        "make,kind,text",
        [
            (lambda q: torch.empty(6, 2, 15), ValueError, "out: expected shape"),
            (lambda q: torch.empty(6, 2, 16, dtype=torch.float16), TypeError, "dtype"),
            (lambda q: torch.empty(6, 2, 16, device="meta"), ValueError, "device"),
            (lambda q: torch.empty(6, 1, 16).expand(6, 2, 16), ValueError, "expanded"),
            (lambda q: q, ValueError, "overlap"),
            (lambda q: np.empty((6, 2, 16)), TypeError, "tensor"),
        ],
        ids=["shape", "dtype", "device", "expanded", "overlap", "type"],
    )
    def test_bad_out(self, make, kind, text):
        q, k, v = self.tensors()
        before = q.clone()
        with pytest.raises(kind, match=text):
            self.call(make(q), q, k, v)
        assert torch.equal(q, before)

    def test_bad_call_writes_nothing(self):
        q, k, v = self.tensors()
        out = torch.full_like(q, 7.0)
        with pytest.raises(ValueError):
            self.call(out, q, k, v, scale=-1.0)
        assert (out == 7).all()

    def test_gradient(self):
        q, k, v = self.tensors()
        with pytest.raises(RuntimeError, match="no gradient"):
            self.call(torch.empty_like(q), q.requires_grad_(), k, v)

    def test_gradient_of_sinks(self):
        q, k, v = self.tensors()
        with pytest.raises(RuntimeError, match="no gradient"):
            self.call(torch.empty_like(q), q, k, v, sinks=torch.zeros(q.shape[1], requires_grad=True))


OPTIONS = [
    (dict(scale=True), TypeError, "scale"), (dict(scale=torch.tensor(0.5)), TypeError, "scale"),
    (dict(softcap=True), TypeError, "softcap"), (dict(num_splits=True), TypeError, "num_splits"),
    (dict(num_splits=2.0), TypeError, "num_splits"), (dict(split_size=0), ValueError, "split_size"),
    (dict(backend=None), ValueError, "backend"), (dict(sinks=[0.0, 1.0]), TypeError, "sinks"),
]  # fmt: skip
OF_ATTENTION = [(dict(p=1.5), ValueError, "p"), (dict(output_dtype="float32"), TypeError, "output_dtype"),
                (dict(kv_lengths="5"), TypeError, "kv_lengths")]  # fmt: skip
OF_VARLEN = [(dict(window_size=x), kind, "window_size") for x, kind in ((None, ValueError), (3, ValueError),
             ((True, 0), TypeError), ((1.0, 2), TypeError))]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options,kind,name", [*OPTIONS, *OF_ATTENTION], ids=str)
def test_options_of_attention_are_checked_with_a_gradient_too(options, kind, name, grad):
    q, k = torch.randn(1, 2, 2, 16, requires_grad=grad), torch.randn(1, 6, 2, 16)
    with pytest.raises(kind, match=f"^{name}: "):
        bridge.memory_efficient_attention(q, k, k, **options)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options,kind,name", [*OPTIONS, *OF_VARLEN], ids=str)
def test_options_of_varlen_are_checked_with_a_gradient_too(options, kind, name, grad):
    q, k, cu = torch.randn(5, 2, 16, requires_grad=grad), torch.randn(5, 2, 16), torch.tensor([0, 2, 5])
    with pytest.raises(kind, match=f"^{name}: "):
        bridge.varlen_attn(q, k, k, cu.int(), cu.int(), 3, 3, **options)


def test_host_lengths_are_taken_with_a_gradient_too():
    q, k = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    want = bridge.varlen_attn(q, k, k, *[torch.tensor([0, 2, 5], dtype=torch.int32)] * 2, 3, 3)
    for cu in (np.array([0, 2, 5], np.int32), [0, 2, 5]):
        assert torch.equal(bridge.varlen_attn(q.clone().requires_grad_(), k, k, cu, cu, 3, 3), want)
