"""Tensors for the calls, and their way to JAX. Nothing here uses the library's own exchange."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .configs import Config
from .rows import AnyRow, MergeRow, Row

SPARE_PAGES = 3


class Attention(NamedTuple):
    """Of a `Row`: q [B, tokens, heads, D]; k, v [B, keys, kv_heads, D], or [pages, page_size, kv_heads, D] with a
    table int32 [B, pages of a row]; lengths int32 [B]. Rows of the cache beyond a length hold finite numbers."""

    q: Any
    k: Any
    v: Any
    lengths: Any
    table: Any = None


class Merge(NamedTuple):
    """Of a `MergeRow`: attn float32 [S, B, M, heads, D]; lse [S, B, heads, M]."""

    attn: Any
    lse: Any


def of_row(row: AnyRow, seed: int, device: str = "cuda") -> Attention | Merge:
    import torch

    make = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: str = row.dtype) -> Any:
        return torch.randn(shape, generator=make, dtype=getattr(torch, dtype), device=device)

    if isinstance(row, MergeRow):
        parts = (row.splits, row.batch)
        return Merge(
            normal(*parts, row.queries, row.heads, row.head_dim, dtype="float32"),
            normal(*parts, row.heads, row.queries, dtype=row.lse_dtype),
        )
    slots, table = (row.batch, row.keys), None
    lengths = torch.tensor(row.key_counts(), dtype=torch.int32)
    if row.page_size is not None:
        table, pages = _random_pages(row, seed)
        slots, table = (pages, row.page_size), table.to(device)
    q = normal(row.batch, row.tokens, row.heads, row.head_dim)
    k, v = (normal(*slots, row.kv_heads, row.head_dim) for _ in range(2))
    return Attention(q, k, v, lengths.to(device), table)


def _random_pages(row: Row, seed: int) -> tuple[Any, int]:
    """(table, number of pages): the pages in use in random order; entries past a sequence's last page name page 0."""
    import torch

    used = torch.tensor([-(-length // (row.page_size or 1)) for length in row.key_counts()])
    needed = torch.arange(row.pages_per_row)[None, :] < used[:, None]
    table = torch.zeros(needed.shape, dtype=torch.int32)
    pages = int(used.sum())
    table[needed] = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    return table, pages


def shared_with_jax(given: Any) -> Any:
    """The same memory as jax arrays. The tensors must outlive all use, and not be written to."""
    import jax
    import torch

    if given[0].is_cuda:
        torch.cuda.synchronize()
    with jax.enable_x64(True):  # or 64 bits would become 32
        return type(given)(*(None if x is None else jax.dlpack.from_dlpack(x) for x in given))


def packed_mask(module: Any, row: Row, table: Any, **options: Any) -> Any:
    """The mask of a row, from a module with MSLK's classes: all sequences on one axis."""
    causal = "CausalWithOffset" if row.causal else ""
    tokens, lengths = [row.tokens] * row.batch, row.key_counts()
    if row.page_size is None:
        kind = getattr(module, f"BlockDiagonal{causal}PaddedKeysMask")
        return kind.from_seqlens(tokens, row.keys, lengths, **options)
    kind = getattr(module, f"PagedBlockDiagonal{causal}PaddedKeysMask")
    return kind.from_seqlens(tokens, lengths, table, row.page_size, **options)


def host_array(tensor: Any) -> np.ndarray:
    """A copy on the host, bits kept."""
    import jax.numpy as jnp
    import torch

    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


@dataclasses.dataclass
class Case:
    """A call of `check`: tensors as torch takes them, and the same on the host.

    q [1, tokens, heads, D] with a mask object, [B, tokens, heads, D] without; sequences: (q, k, v) of each sequence,
    only what it may see. Everything else in k and v is NaN, every table entry that is not needed is junk.
    """

    config: Config
    q: Any
    k: Any
    v: Any
    table: Any
    sequences: list[tuple[Any, Any, Any]]

    def torch_arguments(self) -> dict[str, Any]:
        import torch

        from bridge.fmha import attn_bias

        c = self.config
        given = {"query": self.q, "key": self.k, "value": self.v}
        if c.storage == "dense":
            return given | {"kv_lengths": torch.tensor(c.lengths(), dtype=torch.int32, device=self.q.device)}
        causal = "CausalWithOffset" if c.causal else ""
        paged = "Paged" if c.storage == "paged" else ""
        kind = getattr(attn_bias, f"{paged}BlockDiagonal{causal}PaddedKeysMask")
        lengths, tokens, device = c.lengths(), c.token_counts(), self.q.device
        if paged:
            mask = kind.from_seqlens(tokens, lengths, self.table, c.page_size, device=device)
        else:
            mask = kind.from_seqlens(tokens, c.keys, lengths, device=device)
        return given | {"attn_bias": mask}

    def jax_arguments(self) -> dict[str, Any]:
        """The same; lengths and tables are arrays on the device, as a jitted function receives them."""
        import jax
        import jax.numpy as jnp

        import pallas_kernels as pk

        c = self.config
        tensors = {"query": self.q, "key": self.k, "value": self.v}
        given: dict[str, Any] = {name: jnp.asarray(host_array(x)) for name, x in tensors.items()}
        if c.storage == "dense":
            return given | {"kv_lengths": jnp.array(c.lengths(), jnp.int32)}
        causal = "CausalWithOffset" if c.causal else ""
        if c.storage == "paged":
            kind = getattr(pk.masks, f"PagedBlockDiagonal{causal}PaddedKeysMask")
            mask = kind.from_seqlens(c.token_counts(), c.lengths(), host_array(self.table), c.page_size)
        else:
            kind = getattr(pk.masks, f"BlockDiagonal{causal}PaddedKeysMask")
            mask = kind.from_seqlens(c.token_counts(), c.keys, c.lengths())
        return given | {"attn_bias": jax.tree.map(jnp.asarray, mask)}


def of_config(config: Config, seed: int = 0, device: str = "cuda") -> Case:
    import torch

    c, make = config, torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, c.dtype)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=make, dtype=dtype, device=device)

    rows = c.page_size or c.keys  # a slot of the key axis: a page, or a whole sequence, whose "table" is trivial
    pages_per_row = -(-c.keys // rows)
    table = _table(c, pages_per_row, seed) if c.page_size else torch.arange(c.batch)[:, None]
    slots = c.batch * pages_per_row + (SPARE_PAGES if c.page_size else 0)
    shape = (slots, rows, c.kv_heads, c.head_dim)
    k, v = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    counts = c.token_counts()
    q = normal(sum(counts), c.kv_heads * c.group, c.head_dim)
    sequences = []
    for b, (mine, length) in enumerate(zip(q.split(counts), c.lengths())):
        some_k, some_v = normal(length, c.kv_heads, c.head_dim), normal(length, c.kv_heads, c.head_dim)
        sequences.append((mine, some_k, some_v))
        for start in range(0, length, rows):
            slot, count = int(table[b, start // rows]), min(rows, length - start)
            k[slot, :count], v[slot, :count] = some_k[start : start + count], some_v[start : start + count]
    if c.storage == "dense":
        q = q.reshape(c.batch, c.tokens, *q.shape[1:])
    else:
        q, k, v = q[None], k.reshape(1, -1, *shape[2:]), v.reshape(1, -1, *shape[2:])
    return Case(config, q, k, v, table.to(device) if c.page_size else None, sequences)


def _table(c: Config, pages_per_row: int, seed: int) -> Any:
    """Pages in random order; entries past a sequence's last page are junk, or name a page of NaN."""
    import torch

    pages = c.batch * pages_per_row + SPARE_PAGES
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    spare = int(order[-1])
    junk = (-1, 2**31 - 1, spare, -(2**31), pages)
    table = order[: c.batch * pages_per_row].reshape(c.batch, pages_per_row).to(torch.int32)
    for b, length in enumerate(c.lengths()):
        used = -(-length // (c.page_size or 1))
        for n in range(used, pages_per_row):
            table[b, n] = junk[(b + n) % len(junk)]
    return table
