"""The log-sum-exp at the end of a row, and where it goes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

UNSEEN = -1e30
"""Score of a key outside the piece or the window, and maximum of no keys. Finite, so that no difference is NaN."""


@dataclasses.dataclass(frozen=True)
class LsePlace:
    """The LSE's dtype and layout: [rows, heads, queries of a row], the batch leading where `per_row` is given.

    per_row: queries of a batch row (static), or None where all tokens share one row: the true number is the pitch.
    """

    dtype: str
    heads: int
    per_row: int | None

    def out_type(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), self.dtype)

    def store(self, lse: Any, token: Any, head: Any, tokens: Any, m: Any, l: Any) -> None:
        """The LSE of a row from its maximum m (in units of log 2) and sum l, both float32 scalars, formed in float64.

        A row that saw no key (l = 0) gets -inf.
        """
        if self.per_row is None:
            place = head * tokens + token
        else:
            row, query = lax.div(token, jnp.int32(self.per_row)), lax.rem(token, jnp.int32(self.per_row))
            place = (row * self.heads + head) * self.per_row + query
        with jax.enable_x64(True):
            value = m.astype(jnp.float64) * math.log(2.0) + jnp.log(jnp.where(l > 0, l, 1).astype(jnp.float64))
            lse[place] = jnp.where(l > 0, value, -math.inf).astype(self.dtype)
