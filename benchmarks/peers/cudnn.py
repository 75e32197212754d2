"""cuDNN through jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

from ..inputs import Attention
from ..rows import Row
from . import OWN_SPLITS, import_reason

FRAMEWORK = "jax"


def available() -> str | None:
    return import_reason("jax")


def refuses(row: Row) -> str | None:
    if row.page_size is not None:
        return "jax.nn takes no pages"
    if row.causal:
        return "jax.nn aligns causal masks top-left"
    return OWN_SPLITS if row.split_size or row.num_splits else None


def prepare(row: Row, inputs: Attention) -> tuple[Any, ...]:
    return (inputs.q, inputs.k, inputs.v, *([] if row.lengths == "full" else [inputs.lengths]))


def run(row: Row, q: Any, k: Any, v: Any, lengths: Any = None) -> Any:
    import jax

    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
