"""The forward as operators of torch.library, for graphs that name an operator; no gradient.

torch.ops.pallas_splitk.fmha_memory_efficient_attention_forward(q, k, v, b=None, p=0.0, scale=None) and
..._with_bias(q, k, v, b, p=0.0, scale=None): `fmha.memory_efficient_attention_forward` with a tensor bias or none. To
compile that function itself nothing of this is needed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..library import _flops
from .entry_points import memory_efficient_attention_forward
from .inputs import output_dim

_NAME = "pallas_splitk::fmha_memory_efficient_attention_forward"


@torch.library.custom_op(_NAME, mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor | None = None,
    p: float | None = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    return memory_efficient_attention_forward(q, k, v, b, p or 0.0, scale)


@torch.library.custom_op(f"{_NAME}_with_bias", mutates_args=())
def forward_with_bias(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    p: float | None = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    return memory_efficient_attention_forward(q, k, v, b, p or 0.0, scale)


@forward.register_fake
@forward_with_bias.register_fake
def _like_query(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor | None = None,
    p: float | None = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], output_dim(q, v)))


def _count(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, out_val: Any = None, **__: Any) -> Any:
    return _flops.dense(q, k, output_dim(q, v))


for _name in (_NAME, f"{_NAME}_with_bias"):
    _flops.add(_name.partition("::")[2], _count)
