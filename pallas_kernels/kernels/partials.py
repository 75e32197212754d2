"""The workspace between decode and merge: partial results of rows that several shares, or pieces, have.

accumulators float32 [places, rows, width], of which the first Dv columns are used; stats float32 [places of tiles, 2,
64]: the maximum of a tile's rows in units of log 2, and the sum; records int32 [tokens * kv_heads * parts of a group,
2]: a row's number of parts, and where they are (`whereabouts`).

A row's parts have places one behind the other. Under a fixed policy part n of a token and KV head is at
(token * kv_heads + head) * most + n, and rows are the query heads of the group; its statistics are where its tile's
first token has them. Under the automatic one every share has two places, one for the row that it begins and leaves
unfinished, one for a row that began before it; rows are those of the tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .work import CHUNK, ROWS, Item, Work


@dataclasses.dataclass(frozen=True)
class Partials:
    work: Work
    group: int
    value_dim: int
    most: int
    """Pieces of a sequence at most; of no meaning under the automatic policy."""

    @property
    def automatic(self) -> bool:
        return self.work.policy.automatic

    @property
    def width(self) -> int:
        """Columns of an accumulator: a multiple of a warpgroup's threads."""
        return -(-self.value_dim // CHUNK) * CHUNK

    @property
    def rows(self) -> int:
        return self.work.tiling.tokens * self.work.tiling.heads if self.automatic else self.group

    @property
    def most_parts(self) -> int:
        """Of a row. Automatically, each part has a tile of keys."""
        if not self.automatic:
            return self.most
        return max(1, min(self.work.shares, -(-self.work.max_keys // self.work.key_tile)))

    @property
    def places(self) -> int:
        return 2 * self.work.shares if self.automatic else self.work.tokens * self.work.kv_heads * self.most

    @property
    def records(self) -> int:
        return self.work.tokens * self.work.kv_heads * self.work.tiling.parts

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        tiles = self.places if self.automatic else self.records * self.most
        return {
            "accumulators": jax.ShapeDtypeStruct((self.places, self.rows, self.width), jnp.float32),
            "stats": jax.ShapeDtypeStruct((tiles, 2, ROWS), jnp.float32),
            "records": jax.ShapeDtypeStruct((self.records, 2), jnp.int32),
        }

    def place(self, item: Item, t: int, share: Any) -> tuple[Any, Any]:
        """(place, first row) of the accumulators of token t of an item."""
        if self.automatic:
            return self._of_share(item, share), t * self.work.tiling.heads
        return ((item.token + t) * self.work.kv_heads + item.head) * self.most + item.piece, item.g

    def stats_place(self, item: Item, share: Any) -> Any:
        """The place of an item's statistics."""
        if self.automatic:
            return self._of_share(item, share)
        return self.record(item.token, item.head, item.g) * self.most + item.piece

    def _of_share(self, item: Item, share: Any) -> Any:
        return jnp.where(item.piece == 0, share, self.work.shares + share)

    def record(self, token: Any, head: Any, g: Any) -> Any:
        """The number of a token's record; g: a query head of the group."""
        tiling = self.work.tiling
        return (token * self.work.kv_heads + head) * tiling.parts + lax.div(g, jnp.int32(tiling.heads))

    def whereabouts(self, t: Any, share: Any) -> Any:
        """One number of a record: the token's place in its tile, and the share that has the row's first part."""
        return share * self.work.tiling.tokens + t

    def first(self, whereabouts: Any, token: Any, head: Any, g: Any) -> tuple[Any, Any, Any, Any]:
        """(place, row) of the first part's accumulator of a query head, and of its statistics."""
        tiling = self.work.tiling
        share, t = (f(whereabouts, jnp.int32(tiling.tokens)) for f in (lax.div, lax.rem))
        h = lax.rem(g, jnp.int32(tiling.heads))
        if self.automatic:
            return share, t * tiling.heads + h, share, t * tiling.pitch + h
        place = (token * self.work.kv_heads + head) * self.most
        return place, g, self.record(token - t, head, g) * self.most, t * tiling.pitch + h

    def parts(self, place: Any, n: Any) -> Any:
        """The place of a row's n-th part, the first one's being `place`; elementwise on n."""
        if self.automatic:
            return jnp.where(n == 0, place, self.work.shares + place + n)
        return place + n
