"""Who computes what: the pieces of a sequence and the work items that blocks share, computed on the device.

A work item is one piece of the keys of one query token and one KV head. Where the pieces of a sequence lie depends on
its own length and the split policy (and, for the automatic one, on the true number of tokens and the card), never on
a capacity; the blocks then take whole items in turn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..masks import Window

KEY_TILE = 128
"""Keys of one step. Part of the numerics: it decides the order in which keys are added up."""


@dataclasses.dataclass(frozen=True)
class SplitPolicy:
    """How a sequence's keys are cut: into `num_splits` pieces, every `split_size` keys, or (neither) automatically."""

    num_splits: int | None
    split_size: int | None
    max_keys: int
    kv_heads: int
    sms: int

    def capacity(self, tokens: int) -> int:
        """The most pieces that a sequence of a call with up to `tokens` tokens has (static)."""
        if self.num_splits is not None:
            return self.num_splits
        if self.split_size is not None:
            return max(1, -(-self.max_keys // self.split_size))
        return self.count(1)

    def stats_pitch(self, tokens: int) -> int:
        """Floats from one row's piece statistics to the next one's: whole vectors of a warpgroup."""
        return -(-self.capacity(tokens) // 128) * 128

    def count(self, tokens: Any) -> Any:
        """Pieces of every sequence, some perhaps empty; `tokens` is the true number, a Python or a device integer.

        Automatically: as many as fill the card once, so that one token and many keep all SMs busy alike.
        """
        if self.num_splits is not None or self.split_size is not None:
            return self.capacity(1)
        if isinstance(tokens, int):
            return max(1, self.sms // max(1, tokens * self.kv_heads))
        return jnp.maximum(lax.div(jnp.int32(self.sms), jnp.maximum(tokens * self.kv_heads, 1)), 1)

    def bounds(self, piece: Any, count: Any, k_len: Any) -> tuple[Any, Any]:
        """The keys [low, high) of a piece of a sequence of k_len keys."""
        if self.split_size is not None:
            size = jnp.int32(self.split_size)
        else:
            size = lax.div(k_len + (count - 1), jnp.int32(count))
            if self.num_splits is None:  # whole tiles, so that no key is read twice
                size = lax.div(size + (KEY_TILE - 1), jnp.int32(KEY_TILE)) * KEY_TILE
        low = jnp.minimum(piece * size, k_len)
        return low, jnp.minimum(low + size, k_len)


def token_sequence(q_start: Any, token: Any, sequences: Any, capacity: int) -> tuple[Any, Any, Any]:
    """(b, i, q_len) of a query token, from q_start int32 [sequences + 1] in device memory.

    sequences: the true number, of which `capacity` is a static bound. One token a sequence, the common case, is seen
    at once; otherwise a binary search.
    """
    direct = jnp.minimum(token, sequences - 1)
    single = (q_start[direct] == token) & (q_start[direct + 1] == token + 1)

    def search() -> Any:
        def halve(_: Any, bounds: Any) -> Any:
            low, high = bounds
            middle = lax.div(low + high + 1, jnp.int32(2))
            below = q_start[middle] <= token
            return jnp.where(below, middle, low), jnp.where(below, high, middle - 1)

        return lax.fori_loop(0, capacity.bit_length(), halve, (jnp.int32(0), sequences - 1))[0]

    b = lax.cond(single, lambda: direct, search)
    return b, token - q_start[b], q_start[b + 1] - q_start[b]


def visible_keys(window: Window, i: Any, q_len: Any, k_len: Any) -> tuple[Any, Any]:
    """The keys [low, high) that query i sees: `masks.visible` for one query is a range."""
    here = i if window.top_left else i + (k_len - q_len)
    low, high = jnp.int32(0), k_len
    if window.left is not None:
        low = jnp.maximum(low, here - window.left)
    if window.right is not None:
        high = jnp.minimum(high, here + window.right + 1)
    return low, jnp.where(i < q_len, high, low)


def tile_range(low: Any, high: Any) -> tuple[Any, Any]:
    """(first tile, number of tiles) that hold the keys [low, high); tiles lie at multiples of KEY_TILE."""
    first = lax.div(low, jnp.int32(KEY_TILE))
    last = lax.div(high + (KEY_TILE - 1), jnp.int32(KEY_TILE))
    return first, jnp.where(high > low, last - first, 0)
