"""Command line, texts and tables of `python -m bridge.demo`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import bridge
from pallas_kernels.dispatch import BACKENDS
from pallas_kernels.errors import UnsupportedError

from . import decode, texts
from .model import SentenceModel, Setting, setting

COSINE_LIMIT = 0.9999
MOST_SENTENCES = 8
MOST_CHARACTERS = 1_000_000

DESCRIPTION = """\
Runs a real sentence model's attention on this library and checks it: (a) packed embeddings against the model's own,
(b) decoding from a KV cache in several formats against float64."""

EPILOG = """\
exit status: 0 if every figure is within its limit (always, with --text); 1 if one is not; 2 if the demo cannot run,
because of an argument, a file, a backend that cannot serve here, or a missing package."""


class CannotRun(Exception):
    """Why the demo stops, as a message for the user; exit status 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options.backend, options.text)
    except (CannotRun, UnsupportedError) as error:
        print(f"bridge.demo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bridge.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend", choices=("auto", *BACKENDS), default="auto", help="what computes the attention (default: auto)"
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="use this UTF-8 text, cut at the model's 512 tokens, instead of the built-in ones: its first sentences "
        "and the whole for (a), the whole for (b); a figure beyond its limit is then shown, but is no failure",
    )
    return parser


def _run(backend: str, file: Path | None) -> int:
    where = setting()
    text = None if file is None else _read(file)
    _check_backend(where, backend)
    _progress("loading the model")
    try:
        model = SentenceModel(where.device)
    except ImportError as error:
        raise CannotRun(f'{error}. The demo needs further packages: pip install "pallas-splitk[demo]"') from None

    sentences: Sequence[str] = texts.SENTENCES
    passage = texts.PASSAGE
    if text is not None:
        passage = model.cut(text)
        if not passage.strip():
            raise CannotRun(f"{file}: no text in it")
        print(f"{file}: " + ("all of it" if not text[len(passage) :].strip() else f"cut at {model.max_tokens} tokens"))
        sentences = _sentences(passage)
    misses = _embeddings(model, sentences, where, backend) + _decoding(model, passage, where, backend)
    if misses:
        print(f"\n{misses} beyond the limit" + (": no failure with --text" if text is not None else ""))
    else:
        print("\nall within the limits")
    return 1 if misses and text is None else 0


def _check_backend(where: Setting, backend: str) -> None:
    """Raises UnsupportedError before the model is loaded, where some row of the table could not be served."""
    x = torch.ones(1, 8, 1, 32, dtype=where.decoding, device=where.device)
    cache = x if backend == "auto" else bridge.formats.quantize(x, "int8")
    bridge.served_by(x[:, :1], cache, cache, backend=backend)


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(MOST_CHARACTERS)  # far beyond what the model takes
    except OSError as error:
        raise CannotRun(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CannotRun(f"{file}: not a UTF-8 text") from None
    if not text.strip():
        raise CannotRun(f"{file}: no text in it")
    return text


def _sentences(text: str) -> list[str]:
    """The first sentences of a text, and the whole."""
    parts = [part for part in re.split(r"(?<=[.!?])\s+|\n+", text.strip()) if part.strip()]
    return [*parts[:MOST_SENTENCES], text] if len(parts) > 1 else [text]


def _embeddings(model: SentenceModel, sentences: Sequence[str], where: Setting, backend: str) -> int:
    """(a): prints the table, returns the number of misses."""
    ids = [model.tokens(sentence) for sentence in sentences]
    lengths = [len(x) for x in ids]
    _progress("embedding with the model's own attention")
    own = model.own_embeddings(ids)
    _progress("embedding packed, with bridge.varlen_attn")
    packed = model.packed_embeddings(ids, where.embedding, backend)
    cosines = torch.nn.functional.cosine_similarity(own.double(), packed.double()).tolist()

    print(f"\n(a) Embeddings of {len(ids)} texts, packed without padding, attention by bridge.varlen_attn")
    print(f"    in {_name(where.embedding)} on {where.device.type}; backend {backend}")
    print(f"    tokens computed: {sum(lengths):,}; padded, as the model's own: {len(ids) * max(lengths):,}\n")
    print(f"{'tokens':>8}  {'cosine to own':>13}  {'limit':>7}        text")
    for sentence, n, cosine in zip(sentences, lengths, cosines):
        print(f"{n:8}  {cosine:13.7f}  {COSINE_LIMIT:7}  {_verdict(cosine >= COSINE_LIMIT)}  {_shortened(sentence)}")
    return sum(not cosine >= COSINE_LIMIT for cosine in cosines)


def _decoding(model: SentenceModel, passage: str, where: Setting, backend: str) -> int:
    """(b): prints the table row by row, returns the number of misses."""
    _progress("decoding from the KV cache")
    x = model.keys_values(model.tokens(passage))
    layers, tokens, heads, width = x.k.shape
    print(f"\n(b) Decoding: the last token's queries against the KV cache of {tokens} tokens")
    print(f"    {layers} layers of {heads} heads of {width}, queries in {_name(where.decoding)} on {where.device.type}")
    print("    error: of all layers together, relative to float64\n")
    print(f"{'cache':14}  {'storage':11}  {'error':>8}  {'limit':>8}  {'':4}  {'bytes':>9}  {'splits':>6}  backend")
    misses = 0
    for r in decode.decode(x, where.decoding, backend):
        misses += not r.ok
        figures = f"{r.error:8.1e}  {r.limit:8.1e}  {_verdict(r.ok)}  {r.nbytes:9,}  {r.splits:>6}"
        print(f"{r.cache:14}  {r.storage:11}  {figures}  {r.backend}", flush=True)
    return misses


def _verdict(ok: bool) -> str:
    return "ok  " if ok else "MISS"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _progress(step: str) -> None:
    """What is being done now, where it may take over a second."""
    print(f"... {step}", file=sys.stderr, flush=True)
