"""The log-sum-exp at the end of a row, and where it goes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

UNSEEN = -3e38
"""Maximum of no scores. Finite, so that no difference from the score of a masked key, -inf, is NaN."""


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

    def place(self, token: Any, head: Any, tokens: Any) -> Any:
        """The index of a query head's LSE; tokens: the true number."""
        if self.per_row is None:
            return head * tokens + token
        row, query = lax.div(token, jnp.int32(self.per_row)), lax.rem(token, jnp.int32(self.per_row))
        return (row * self.heads + head) * self.per_row + query

    def value(self, m: Any, l: Any) -> Any:
        """The LSE of rows from their maximum m (in units of log 2) and sum l, both float32, formed in float64.

        A row that saw no key (l = 0) gets -inf, one that saw a NaN gets NaN.
        """
        with jax.enable_x64(True):
            value = m.astype(jnp.float64) * math.log(2.0) + _log(jnp.where(l > 0, l, 1))
            value = jnp.where(l > 0, value, math.nan)
            return jnp.where(l == 0, -math.inf, value).astype(self.dtype)


def _log(x: Any) -> Any:
    """The natural logarithm of positive float32 numbers, in float64: Mosaic GPU has none for vectors.

    x = 2**e * y with y in [sqrt(1/2), sqrt(2)), and log y = 2 artanh z with z = (y - 1) / (y + 1), |z| < 0.172: ten
    terms of the series are exact to 1e-17.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = lax.shift_right_arithmetic(bits - 0x3F3504F3, jnp.full_like(bits, 23))  # of sqrt(1/2)
    y = lax.bitcast_convert_type(bits - lax.shift_left(exponent, jnp.full_like(bits, 23)), jnp.float32)
    y, e = y.astype(jnp.float64), exponent.astype(jnp.float32).astype(jnp.float64)
    z = (y - 1) / (y + 1)
    square, series = z * z, jnp.zeros_like(z)
    for n in range(19, 0, -2):
        series = series * square + 1 / n
    return e * math.log(2.0) + 2 * z * series
