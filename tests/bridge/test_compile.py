"""torch.compile and torch.export of the public functions: one graph, compiled once, whatever the lengths."""

import jax.numpy as jnp
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import bridge
from bridge import exchange, formats
from bridge.fmha import attn_bias as biases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = 50


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Once:
    """A function compiled whole, of which a second compilation raises; `backend` None is inductor."""

    def __init__(self, function, backend="aot_eager", **options):
        self.counter = CompileCounterWithBackend(backend or "inductor")
        self.function = torch.compile(
            function, backend=self.counter if backend else "inductor", fullgraph=True, dynamic=True, **options
        )

    def __call__(self, *args):
        with torch._dynamo.config.patch(error_on_recompile=True):
            return self.function(*args)

    def ops(self):
        """The attention ops of all graphs."""
        nodes = (node for graph in self.counter.graphs for node in graph.graph.nodes)
        return [str(node.target) for node in nodes if "pallas_splitk" in str(node.target)]


def rand(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=dtype)


QUERIES, SLOT, PAGE = [1, 3, 2], 16, 4


def keys_of(n):
    """Key lengths that change at every step, one of them empty at times."""
    return [3 + n % 14, SLOT - n % 16, (5 * n) % 9]


def masks(kind, device):
    """A function n -> bias, of equal shapes and other lengths each time."""
    table = torch.tensor([[11, 1, 5, 0], [2, 4, 3, 10], [6, 7, 9, 8]], dtype=torch.int32, device=device)
    starts = lambda n: [0, SLOT, 2 * SLOT + n % 3]  # noqa: E731
    short = lambda n: [3 + n % 10, 12 - n % 7, 2 + n % 5]  # noqa: E731
    return {
        "padded": lambda n: biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            QUERIES, SLOT, keys_of(n), device=device
        ),
        "padded, local": lambda n: biases.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
            QUERIES, SLOT, keys_of(n), 5, 2, device=device
        ),
        "paged": lambda n: biases.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            QUERIES, keys_of(n), table, PAGE, device=device
        ),
        "gappy": lambda n: biases.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            QUERIES, [*starts(n), 3 * SLOT], short(n), device=device
        ),
        "paged gappy": lambda n: biases.PagedBlockDiagonalGappyKeysMask.from_seqlens(
            QUERIES, [n % 3, 0, 1], short(n), table, PAGE, device=device
        ),
        "packed": lambda n: biases.BlockDiagonalCausalMask.from_seqlens(
            QUERIES, [3 + n % 10, 20 - n % 10, 25], device=device
        ),
    }[kind]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["padded", "padded, local", "paged", "gappy", "paged gappy", "packed"])
def test_one_compilation_for_all_lengths(kind, device):
    make = masks(kind, device)
    compiled = Once(lambda q, k, v, bias: bridge.memory_efficient_attention(q, k, v, bias, scale=0.25))
    for n in range(LENGTHS):
        q = rand(1, sum(QUERIES), 4, 16, device=device)
        k, v = (rand(1, 3 * SLOT, 2, 16, device=device) for _ in range(2))
        out = compiled(q, k, v, make(n))
        if n % 7 == 0:
            torch.testing.assert_close(out, bridge.memory_efficient_attention(q, k, v, make(n), scale=0.25))
    assert compiled.ops() == ["pallas_splitk.attention"]


def test_one_compilation_for_all_batches():
    """The number of sequences is a size like any other."""
    compiled = Once(bridge.memory_efficient_attention)
    for count in range(5, 11):  # no two sizes of the first call are equal: torch would take them to be one
        q, k = rand(1, 2 * count, 4, 16), rand(1, SLOT * count, 2, 16)
        bias = biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            [2] * count, SLOT, list(range(6, 6 + count)), device="cpu"
        )
        torch.testing.assert_close(compiled(q, k, k, bias), bridge.memory_efficient_attention(q, k, k, bias))


def test_lengths_updated_in_place():
    bias = masks("padded", "cpu")(13)
    bias.k_seqinfo.max_seqlen = SLOT
    compiled = Once(bridge.memory_efficient_attention)
    for n in range(5):
        bias.k_seqinfo.from_seqlens_padded_inplace(keys_of(n))
        q, k = rand(1, 6, 4, 16), rand(1, 3 * SLOT, 2, 16)
        torch.testing.assert_close(compiled(q, k, k, bias), bridge.memory_efficient_attention(q, k, k, bias))


@pytest.mark.parametrize("kind", ["none", "tensor", "causal", "lengths"])
def test_plain_batches_of_all_sizes(kind):
    def function(q, k, v, extra):
        if kind == "lengths":
            return bridge.memory_efficient_attention(q, k, v, kv_lengths=extra)
        return bridge.memory_efficient_attention(q, k, v, extra)

    compiled = Once(function)
    for n in range(8):
        q, k, v = rand(3 + n, 5 + n, 4, 16), rand(3 + n, 9 + 2 * n, 2, 16), rand(3 + n, 9 + 2 * n, 2, 16)
        extra = {
            "none": None,
            "tensor": rand(3 + n, 4, 5 + n, 9 + 2 * n),
            "causal": biases.LowerTriangularFromBottomRightMask(),
            "lengths": torch.full((3 + n,), 4 + n, dtype=torch.int32),
        }[kind]
        torch.testing.assert_close(compiled(q, k, v, extra), function(q, k, v, extra))
    assert compiled.ops() == ["pallas_splitk.attention"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("paged", [False, True])
def test_varlen(paged, device):
    def function(q, k, v, cu_q, cu_k, longest, capacity, used, table):
        return bridge.varlen_attn(
            q, k, v, cu_q, cu_k, longest, capacity, window_size=(-1, 0), enable_gqa=True, seqused_k=used,
            block_table=table, return_aux=bridge.AuxRequest(lse=True),
        )  # fmt: skip

    compiled = Once(function)
    for n in range(LENGTHS):
        lengths = [2 + n % 5, 3, 2 + n % 7]
        cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        q = rand(sum(lengths), 4, 16, device=device)
        if paged:
            k = rand(6, PAGE, 2, 16, device=device)
            used = torch.tensor([1 + n % 8, 7, 8], dtype=torch.int32, device=device)
            table = torch.tensor([[5, 1], [0, 2], [3, 4]], dtype=torch.int32, device=device)
            call = (q, k, k, cu, None, max(lengths), 8 + n, used, table)
        else:
            k = rand(sum(lengths), 2, 16, device=device)
            call = (q, k, k, cu, cu, max(lengths), max(lengths), None, None)
        results = compiled(*call)
        if n % 10 == 0:
            torch.testing.assert_close(results, function(*call))
    assert compiled.ops() == ["pallas_splitk.varlen"]


def test_out_form_merge_and_partials():
    def function(q, k, v, cu, buffer):
        both = bridge.AuxRequest(lse=True)
        out, lse = bridge.varlen_attn_out(buffer, q[0], k[0], v[0], cu, cu, 8, 8, return_aux=both)
        half = k.shape[1] // 2
        parts = [
            bridge.memory_efficient_attention_partial(q, k[:, rows], v[:, rows])
            for rows in (slice(half), slice(half, None))
        ]
        merged, merged_lse = bridge.merge_attentions([p[0] for p in parts], [p[1] for p in parts])
        return out * 2, lse, merged, merged_lse

    compiled = Once(function)
    for n in range(3):
        q, k, v = (rand(1, 8 + 2 * n, 2, 16) for _ in range(3))
        cu, buffer = torch.tensor([0, 3, 8], dtype=torch.int32), torch.empty(8 + 2 * n, 2, 16)
        out, lse, merged, merged_lse = compiled(q, k, v, cu, buffer)
        both = bridge.AuxRequest(lse=True)
        expected, expected_lse = bridge.varlen_attn(q[0], k[0], v[0], cu, cu, 8, 8, return_aux=both)
        torch.testing.assert_close((out[:8] / 2, lse[:, :8]), (expected[:8], expected_lse[:, :8]))
        torch.testing.assert_close(buffer[:8], out[:8] / 2)
        whole, whole_lse = bridge.memory_efficient_attention_partial(q, k, v)
        torch.testing.assert_close((merged, merged_lse), (whole, whole_lse), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_training_step(backend):
    """Forward and backward in one graph each, equal to eager; `None` is inductor."""

    def loss(q, k, v, bias):
        return bridge.memory_efficient_attention(q * 2, k, v, bias).square().sum()

    compiled = Once(loss, backend)
    for n in range(3):
        inputs = [rand(1, rows, heads, 16).requires_grad_() for rows, heads in ((6, 4), (48, 2), (48, 2))]
        bias = masks("padded", "cpu")(n)
        got = torch.autograd.grad(compiled(*inputs, bias), inputs)
        want = torch.autograd.grad(loss(*inputs, bias), inputs)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_low_bit_keys():
    q = rand(2, 3, 4, 32)
    compiled = Once(lambda q, k, v: bridge.memory_efficient_attention(q, k, v, output_dtype=torch.float32))
    for _ in range(3):
        k, v = (bridge.formats.quantize(rand(2, 9, 2, 32), "fp8") for _ in range(2))
        expected = bridge.memory_efficient_attention(q, k, v, output_dtype=torch.float32)
        torch.testing.assert_close(compiled(q, k, v), expected)


class Module(torch.nn.Module):
    def forward(self, q, k, v, cu, used, table):
        plain = bridge.memory_efficient_attention(q[None], q[None], q[None], biases.LowerTriangularMask())
        packed = bridge.varlen_attn(
            q, k, v, cu, None, 8, 8, enable_gqa=True, seqused_k=used, block_table=table, softcap=3.0
        )
        return plain[0] + packed


def test_export():
    call = (
        rand(8, 4, 16), rand(6, PAGE, 2, 16), rand(6, PAGE, 2, 16),
        *(torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [5, 0, 8], [[5, 1], [0, 2], [3, 4]])),
    )  # fmt: skip
    tokens = torch.export.Dim("tokens", min=2)
    exported = torch.export.export(Module(), call, dynamic_shapes=({0: tokens}, None, None, None, None, None))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert [t for t in targets if "pallas" in t] == ["pallas_splitk.attention.default", "pallas_splitk.varlen.default"]
    for rows in (8, 11):
        call = (rand(rows, 4, 16), *call[1:])
        torch.testing.assert_close(exported.module()(*call), Module()(*call))


def test_autocast_inside():
    compiled = Once(lambda q, k: bridge.memory_efficient_attention(q, k, k))
    q, k = rand(2, 3, 4, 16), rand(2, 7, 4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(q, k)
        torch.testing.assert_close(out, bridge.memory_efficient_attention(q, k, k))
    assert out.dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["padded", "paged"])
def test_reduce_overhead(kind):
    """In CUDA graphs, lengths changing between replays."""
    make = masks(kind, "cuda")
    function = lambda q, k, v, bias: bridge.memory_efficient_attention(q * 2, k, v, bias) + 1  # noqa: E731
    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    bias = make(0)
    with torch.no_grad():
        for n in range(8):
            bias.k_seqinfo.seqlen.copy_(torch.tensor(keys_of(n), dtype=torch.int32))
            q = rand(1, sum(QUERIES), 8, 128, device="cuda", dtype=torch.bfloat16)
            k, v = (rand(1, 3 * SLOT, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(q, k, v, bias), function(q, k, v, make(n)), atol=1e-2, rtol=1e-2)


def append_and_attend(q, new, cache, positions):
    new = new * 2
    cache.append(new, new + 1, positions=positions)
    return bridge.memory_efficient_attention(q, cache.k, cache.v, kv_lengths=positions[:, 0] + 1) + 1


@pytest.mark.parametrize("kind", [None, "int8", "seed_int4"])
def test_a_step_that_appends_equals_eager(kind):
    """The graph breaks where JAX runs; the attention is in a graph."""
    q, empty = rand(2, 1, 2, 16), torch.zeros(2, 8, 2, 16)
    caches = [
        formats.KVCache(*(empty.clone() if kind is None else formats.quantize(empty, kind) for _ in "kv")) for _ in "ab"
    ]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(append_and_attend, backend=counter)
    for row in range(3):
        new, positions = rand(2, 1, 2, 16), torch.tensor([[row], [row + 4]], dtype=torch.int32)
        results = [step(q, new, c, positions) for step, c in zip((append_and_attend, compiled), caches)]
        assert torch.equal(*results)
    stored = [x if kind is None else x.dequantize() for cache in caches for x in (cache.k, cache.v)]
    assert torch.equal(stored[0], stored[2]) and torch.equal(stored[1], stored[3]) and stored[0].any()
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert any("pallas_splitk.attention" in target for target in targets)


BROKEN = {
    "quantize": lambda x: formats.quantize(x * 2, "int8").dequantize() + 1,
    "attend": lambda x: bridge.memory_efficient_attention(x, *(formats.quantize(x * 2, "fp8"),) * 2) + 1,
    "convert": lambda x: formats.from_seed(formats.to_seed(formats.quantize(x * 2, "int4"))).to("cpu").dequantize(),
    "describe": lambda x: torch.tensor(
        [(c := formats.quantize(x * 2, "int4")).nbytes, c.ndim, *c.shape, c.device.type == "cpu"]
    ),
    "exchange": lambda x: exchange.to_torch(exchange.to_jax(x * 2), copy=True) + 1,
    "wrap": lambda x: exchange.wrap(jnp.sin)(x * 2) + 1,
    "record_stream": lambda x: (exchange.record_stream(x * 2, None), x + 1)[1],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_runs_jax_breaks_the_graph(name):
    x = rand(1, 3, 2, 16)
    assert torch.equal(torch.compile(BROKEN[name], backend="aot_eager")(x), BROKEN[name](x))
    torch._dynamo.reset()
    if name != "record_stream":
        with pytest.raises(torch._dynamo.exc.Unsupported, match="it runs JAX"):
            torch.compile(BROKEN[name], backend="aot_eager", fullgraph=True)(x)
