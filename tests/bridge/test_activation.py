"""torch's own attention on these kernels: what is replaced, what goes on to torch, and that it ends."""

import subprocess
import sys

import pytest
import torch
import torch.nn.attention as attention
from torch.nn.functional import scaled_dot_product_attention

import bridge
from bridge.adapters import sdpa
from pallas_kernels.errors import UnsupportedError

varlen = pytest.importorskip("torch.nn.attention.varlen")
pytestmark = pytest.mark.skipif(not hasattr(attention, "register_flash_attention_impl"), reason="torch before 2.11")
aten = torch.ops.aten
of_today = pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch's varlen_attn before 2.13")


@pytest.fixture
def on_cpu():
    """The replaced kernels, for CPU tensors and by the backend that runs there."""
    handle = sdpa._register("CPU", "chunked")
    yield
    handle.remove()


def rand(*shape, device="cpu", dtype=torch.bfloat16):
    return torch.randn(*shape, device=device, dtype=dtype)


def reference(q, k, v, causal=False, window=None):
    """[B, H, S, D] in float64; causal from the bottom right."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q.double() @ k.mT * q.shape[-1] ** -0.5
    i, j = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], torch.arange(k.shape[2])[None]
    seen = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (j >= i - window[0]) & (j <= i + window[1])
    s = s.masked_fill(~seen.to(s.device), -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, torch.logsumexp(s, -1)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_op(on_cpu, causal):
    q, k, v = rand(2, 4, 5, 16), rand(2, 2, 7, 16), rand(2, 2, 7, 16)
    out, lse, cum_q, _, max_q, max_k, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    expected, expected_lse = reference(q, k, v, causal)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-2, rtol=2e-2)
    assert (cum_q, max_q, max_k, lse.dtype) == (None, 5, 7, torch.float32)
    meta = aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)), 0.0, causal)
    assert [x.shape for x in meta[:2]] == [out.shape, lse.shape]
    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    real, fake = (aten._scaled_dot_product_flash_attention(*x)[0] for x in (bshd, [y.to("meta") for y in bshd]))
    assert real.stride() == fake.stride()  # what the kernels serve has the layout that tracing expects


@of_today
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)])
def test_torch_varlen_attn(on_cpu, window):
    q, cu = rand(11, 4, 16), torch.tensor([0, 3, 3, 11], dtype=torch.int32)
    k = rand(11, 2, 16)
    call = (q, k, k, cu, cu, 8, 8)
    options = dict(window_size=window, enable_gqa=True)
    out, lse = varlen.varlen_attn(*call, return_aux=varlen.AuxRequest(lse=True), **options)
    for a, b in ((0, 3), (3, 11)):
        x, y = (t[a:b].transpose(0, 1)[None] for t in (q, k))
        limits = None if window == (-1, -1) else (100 if window[0] < 0 else window[0], window[1])
        expected, expected_lse = reference(x, y, y, window=limits)
        torch.testing.assert_close(out[a:b].double(), expected[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, a:b].double(), expected_lse[0], atol=2e-2, rtol=2e-2)
    written = torch.empty_like(out)
    varlen.varlen_attn_out(written, *call, **options)
    assert torch.equal(written, out)


@of_today
def test_pages(on_cpu):
    q, pages = rand(2, 4, 16), rand(6, 4, 2, 16)
    table = torch.tensor([[5, 0], [2, -1]], dtype=torch.int32)
    used, cu = torch.tensor([7, 3], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    options = dict(enable_gqa=True, seqused_k=used, block_table=table)
    out = varlen.varlen_attn(q, pages, pages, cu, None, 1, 8, **options)
    for b in range(2):
        keys = pages[table[b].clamp(min=0)].flatten(0, 1)[: used[b]].transpose(0, 1)[None]
        expected, _ = reference(q[b][None, :, None], keys, keys)
        torch.testing.assert_close(out[b].double(), expected[0, :, 0], atol=2e-2, rtol=2e-2)


def test_rows_without_keys_have_the_lse_of_torch(on_cpu):
    """+inf where torch's backward will read it, -inf where nothing but a merge can."""
    x, cu = rand(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
    none = torch.tensor([0, 0], dtype=torch.int32)
    _, lse, *_ = aten._flash_attention_forward(x, x[:0], x[:0], cu, none, 5, 0, 0.0, False, False)
    assert (lse == torch.inf).all()
    used = torch.tensor([0], dtype=torch.int32)
    _, lse, *_ = aten._flash_attention_forward(x, x, x, cu, cu, 5, 5, 0.0, False, False, seqused_k=used)
    assert (lse == -torch.inf).all()
    _, lse, *_ = aten._flash_attention_forward(x[None], x[None, :2], x[None, :2], None, None, 5, 2, 0.0, True, False)
    assert (lse[..., :3] == torch.inf).all() and torch.isfinite(lse[..., 3:]).all()


def test_what_is_not_served(on_cpu):
    """Torch has no flash kernel for the CPU to go on to, so the reasons come out."""
    q = rand(1, 2, 5, 16)
    for arguments, keywords, why in (
        ((q, q, q, 0.5), {}, "dropout"),
        ((q.float(), q.float(), q.float()), {}, "float32"),
        ((q, q, q, 0.0, False, True), {}, "debug"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            aten._scaled_dot_product_flash_attention(*arguments, **keywords)


def test_a_call_goes_on_to_torch():
    """What these kernels do not serve runs as if nothing were active; an op with a CPU kernel stands in for CUDA's."""
    calls = []

    def ours(backend, *args, **kwargs):
        calls.append(backend)
        raise UnsupportedError("not here")

    theirs = torch.library.get_kernel("aten::add.Tensor", "CPU")
    library = torch.library.Library("aten", "IMPL")
    import functools

    library.impl("add.Tensor", functools.partial(sdpa._choose, "add", ours, theirs, "x"), "CPU", with_keyset=True)
    x = torch.ones(3)
    total = torch.add(x, x, alpha=2)
    del library
    assert calls == ["x"] and (total == 3).all()
    torch.add(x, x)
    assert calls == ["x"]


def test_it_is_registered_by_activate_alone_and_ends():
    code = (
        "import bridge, bridge.adapters.sdpa as s, torch.nn.attention as a\n"
        "assert s.NAME not in a.list_flash_attention_impls() and a.current_flash_attention_impl() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    before = attention.current_flash_attention_impl()
    with sdpa.activated():
        assert attention.current_flash_attention_impl() == sdpa.NAME
        with sdpa.activated():
            pass
        assert attention.current_flash_attention_impl() == sdpa.NAME
    assert attention.current_flash_attention_impl() == before
    sdpa.activate()
    sdpa.restore()
    sdpa.restore()
    assert attention.current_flash_attention_impl() is None


def test_sdpa_on_the_cpu_is_left_alone():
    q = rand(1, 2, 5, 16, dtype=torch.float32)
    plain = scaled_dot_product_attention(q, q, q)
    with sdpa.activated():
        assert torch.equal(scaled_dot_product_attention(q, q, q), plain)


# ------------------------------------------------------------------------------------------------------- on a GPU


def count(monkeypatch):
    """How many calls these kernels answered."""
    answered = []
    for name in ("memory_efficient_attention_forward_requires_grad", "varlen_attn"):
        function = getattr(bridge, name)

        def counted(*args, function=function, **kwargs):
            result = function(*args, **kwargs)
            answered.append(1)
            return result

        monkeypatch.setattr(bridge, name, counted)
    return answered


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
def test_sdpa_on_the_kernels(monkeypatch, queries):
    answered = count(monkeypatch)
    q = rand(3, queries, 8, 128, device="cuda").transpose(1, 2)
    k, v = (rand(3, 512, 2, 128, device="cuda").transpose(1, 2) for _ in range(2))
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        theirs = scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert not answered
        with sdpa.activated():
            ours = scaled_dot_product_attention(q, k, v, enable_gqa=True)
            assert answered
            scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)  # goes on to torch
            scaled_dot_product_attention(q, k.contiguous(), v.contiguous(), enable_gqa=True)
        calls = len(answered)
        assert calls == 1
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert len(answered) == calls
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(ours.double(), reference(q, k, v)[0], atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
def test_gradient_by_torch_on_the_forward_of_the_kernels(monkeypatch):
    answered = count(monkeypatch)
    q = rand(2, 4, 8, 128, device="cuda").requires_grad_()
    k, v = (rand(2, 512, 8, 128, device="cuda").requires_grad_() for _ in range(2))
    grad = rand(2, 8, 4, 128, device="cuda")

    def gradients():
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return torch.autograd.grad(out, (q, k, v), grad)

    theirs = gradients()
    with sdpa.activated():
        ours = gradients()
    assert answered
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@of_today
@pytest.mark.gpu
def test_paged_varlen_attn_on_the_kernels(monkeypatch):
    answered = count(monkeypatch)
    q, pages = rand(2, 8, 128, device="cuda"), rand(6, 256, 2, 128, device="cuda")
    table = torch.tensor([[5, 0], [2, 3]], dtype=torch.int32, device="cuda")
    used, cu = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([300, 512], [0, 1, 2]))
    options = dict(enable_gqa=True, seqused_k=used, block_table=table)
    call = (q, pages, pages, cu, None, 1, 512)
    with sdpa.activated():
        ours = varlen.varlen_attn(*call, **options)
        compiled = torch.compile(lambda: varlen.varlen_attn(*call, **options), fullgraph=True)()
    assert answered
    torch.testing.assert_close(compiled, ours, atol=0, rtol=0)
    for b in range(2):
        keys = pages[table[b]].flatten(0, 1)[: used[b]].transpose(0, 1)[None]
        expected, _ = reference(q[b][None, :, None], keys, keys)
        torch.testing.assert_close(ours[b].double(), expected[0, :, 0], atol=1e-2, rtol=1e-2)
