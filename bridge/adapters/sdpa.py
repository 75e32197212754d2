"""One line puts torch's own attention on these kernels: `scaled_dot_product_attention` and `varlen_attn`.

    from bridge.adapters import sdpa
    sdpa.activate()     # until sdpa.restore(); or: with sdpa.activated(): ...

Nothing happens on import. `activate` goes through `torch.nn.attention.activate_flash_attention_impl` under the name
"pallas_splitk" (torch 2.11 on), so it replaces whatever else is active there, and torch's own `restore` ends it.

What is replaced is the CUDA kernel of aten's three flash forward ops; the op that a program records keeps its name
(`_scaled_dot_product_flash_attention`, `_flash_attention_forward`), so that checkpoint policies, profiles and exported
graphs stay as they are. A call takes one of two ways:

* It runs here if these kernels serve it: a Hopper GPU, float16 or bfloat16, no dropout, no ALiBi, tensors that are
  contiguous as [batch, sequence, heads, head_dim] or [tokens, heads, head_dim] (pages: [pages, page_size, heads,
  head_dim] of any size), and what `bridge.served_by` asks besides.
* Else torch's own kernel runs, as if nothing were active.

The backward is torch's own flash backward, which reads this output and this LSE (a natural logarithm in float32, as
its own). The LSE of a row that sees no key is +inf for it, as torch's kernel gives it, in calls that may have a
gradient; with `seqused_k` or `block_table`, which have none, it is -inf, so that `merge_attentions` may read it.

Calls for which torch chooses cuDNN do not pass here: `varlen_attn` without window, GQA and `num_splits` whose max_q is
above 128 (`enable_gqa=True` or `num_splits=` keeps them on flash), and SDPA where cuDNN was put first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import Library

import bridge
from pallas_kernels.errors import UnsupportedError

NAME = "pallas_splitk"

_Results = tuple[torch.Tensor, torch.Tensor]


def activate() -> None:
    """Run torch's flash attention on these kernels where they serve a call.

    Raises UnsupportedError before torch 2.11.
    """
    attention = _registry()
    attention.register_flash_attention_impl(NAME, register_fn=_register)
    attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Undo `activate`; nothing happens where it is not active."""
    attention = _registry()
    if attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()


@contextlib.contextmanager
def activated() -> Iterator[None]:
    """`activate` for a block; whatever implementation was active before is active after it."""
    before = _registry().current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        restore()
        if before is not None and before != NAME:
            _registry().activate_flash_attention_impl(before)
        elif before == NAME:
            activate()


def _registry() -> Any:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise UnsupportedError(f"activate: torch {torch.__version__} has no register_flash_attention_impl; use 2.11 on")
    return torch.nn.attention


class _Handle:
    """What torch keeps while the implementation is active."""

    def __init__(self, library: Library) -> None:
        self.library: Library | None = library

    def remove(self) -> None:
        self.library = None  # the registrations end with it


def _register(key: str = "CUDA", backend: str = "hopper") -> _Handle:
    """Put the ops' kernels for a dispatch key in place, answered by a backend of this library."""
    library = Library("aten", "IMPL")
    for name, ours in (
        ("_flash_attention_forward", _flash),
        ("_flash_attention_forward_no_dropout_inplace", _flash_out),
        ("_scaled_dot_product_flash_attention", _sdpa),
    ):
        if not hasattr(torch.ops.aten, name):  # a torch without the written form
            continue
        theirs = None  # without one, what is not served raises
        if hasattr(torch.library, "get_kernel"):
            with contextlib.suppress(RuntimeError):  # torch has none for this key
                theirs = torch.library.get_kernel(f"aten::{name}", key)
        library.impl(name, functools.partial(_choose, name, ours, theirs, backend), key, with_keyset=True)
    return _Handle(library)


def _choose(name: str, ours: Callable[..., Any], theirs: Any, backend: str, keys: Any, *args: Any, **kw: Any) -> Any:
    try:
        with torch.no_grad():  # autograd is above this
            return ours(backend, *args, **kw)
    except UnsupportedError as why:
        if theirs is None:
            raise UnsupportedError(
                f"aten::{name}: torch has no kernel of its own for this call, and here: {why}"
            ) from why
    return theirs.call_boxed(keys, *args, **kw)


# ------------------------------------------------------------------------------------------------ the three ops


def _sdpa(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """[batch, heads, sequence, head_dim], whose transpose is what the kernels read and write."""
    _check(query, dropout_p, return_debug_mask, None)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = _dense(backend, q, k, v, None, 0 if is_causal else None, scale)
    return (out.transpose(1, 2), lse, None, None, query.shape[2], key.shape[2], *_randomness(query))


def _flash(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Any, ...]:
    _check(query, dropout_p, return_debug_mask, options.get("alibi_slopes"))
    out, lse = _any(backend, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, **options)
    return (out, lse, *_randomness(query))


def _flash_out(
    backend: str,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> torch.Tensor:
    _check(query, dropout_p, return_debug_mask, options.get("alibi_slopes"))
    _, lse = _any(backend, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, out=out, **options)
    return lse


def _check(query: torch.Tensor, dropout_p: float, return_debug_mask: bool, alibi_slopes: Any) -> None:
    for refused, what in (
        (dropout_p != 0.0, "dropout"),
        (return_debug_mask, "return_debug_mask"),
        (alibi_slopes is not None, "alibi_slopes"),
        (query.dtype not in (torch.float16, torch.bfloat16), f"query of {query.dtype}"),
    ):
        if refused:
            raise UnsupportedError(f"{what} is not served")


def _any(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> _Results:
    """aten's flash forward: packed sequences with `cum_seq_q`, else [batch, sequence, heads, head_dim]."""
    left, right = (None if w is None or w < 0 else w for w in (window_size_left, window_size_right))
    if is_causal:
        right = 0
    if cum_seq_q is None:
        if seqused_k is not None or block_table is not None or out is not None:
            raise UnsupportedError("seqused_k, block_table and out are served with cum_seq_q")
        return _dense(backend, query, key, value, left, right, scale, num_splits)
    call = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    options: dict[str, Any] = dict(
        return_aux=bridge.AuxRequest(lse=True),
        scale=scale,
        window_size=(-1 if left is None else left, -1 if right is None else right),
        enable_gqa=True,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits or None,
        backend=backend,
    )
    if out is not None:
        return bridge.varlen_attn_out(out, *call, **options)  # type: ignore[return-value]
    out, lse = bridge.varlen_attn(*call, **options)
    if seqused_k is None and block_table is None:
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    return out, lse


def _dense(
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    left: int | None,
    right: int | None,
    scale: float | None,
    num_splits: int | None = None,
) -> _Results:
    far = 2**30  # beyond any sequence
    bias: Any = None
    if (left, right) == (None, 0):
        bias = bridge.fmha.attn_bias.LowerTriangularFromBottomRightMask()
    elif (left, right) != (None, None):
        bias = bridge.fmha.attn_bias.LocalAttentionFromBottomRightMask(
            far if left is None else left, far if right is None else right
        )
    out, lse = bridge.memory_efficient_attention_forward_requires_grad(
        query, key, value, bias, scale=scale, num_splits=num_splits or None, backend=backend
    )
    if bias is not None and not (left is None and query.shape[1] <= key.shape[1]):  # rows may see no key
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    return out, lse


def _randomness(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The random state of a dropout that there is not, and the mask that was not asked for."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return state, offset, query.new_empty(0)
