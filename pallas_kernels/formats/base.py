"""What every low-bit format offers, and how its arrays are laid out, gathered and registered."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from ..errors import ArgumentError, DTypeError, ShapeError, StaticArgumentError

E4M3 = jnp.float8_e4m3fn
GROUPS = (1, 2, 4, 8)
"""Groups a row that an int4 format may have."""

_T = TypeVar("_T")


class Component(NamedTuple):
    """One stored array of a cache and the axis that counts rows (1 or -1); axis 0 is A, all others belong to a row."""

    array: Any
    row_axis: int


class KVFormat(abc.ABC):
    """Keys or values at rest in few bits: what attention asks of a format.

    Logically an array [A, M, *heads, D]: A batch entries of M rows, or A pages of M rows; *heads is (heads,) or (G, H).
    Row (a, m) has the flat index a * M + m. Instances are pytrees whose leaves are the stored arrays. Constructors
    check shapes and dtypes; transformations of JAX rebuild instances around whatever leaves they like, unchecked.
    """

    NAME: ClassVar[str]

    @property
    def name(self) -> str:
        """Short name with the static parameters, for tables: 'fp8', 'int4g4' (4 groups), 'seed_fp8_fp32'."""
        return self.NAME

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The logical shape [A, M, *heads, D]."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def head_dim(self) -> int:
        """D, the number of elements of a row of one head."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays: values and coefficients."""
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(self))

    @abc.abstractmethod
    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The numbers that are stored, [A, M, *heads, D] in `dtype`."""

    @abc.abstractmethod
    def gather_rows(self, rows: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """The same numbers of some rows only: rows int32 [R...], flat indices -> [R..., heads (all axes as one), D].

        Nothing else is decoded or can reach the result. Indices are clamped into range.
        """

    @abc.abstractmethod
    def components(self) -> dict[str, Component]:
        """The stored arrays that hold a piece for each row, by field name."""

    def __repr__(self) -> str:
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_describe(x)}' for name, x in fields)})"


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") and hasattr(x, "dtype") else repr(x)


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(*static: str) -> Callable[[type[_T]], type[_T]]:
    """Make a class a frozen dataclass and a pytree; the fields named in `static` are not leaves.

    Not `register_dataclass`, which rebuilds by calling the constructor: that one checks shapes, and under
    transformations leaves may be None, object() or arrays with a further axis.
    """

    def register(cls: type[_T]) -> type[_T]:
        cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        data = [f.name for f in dataclasses.fields(cls) if f.name not in static]  # type: ignore[arg-type]

        def flatten(x: _T) -> tuple[list[Any], tuple[Any, ...]]:
            return [getattr(x, n) for n in data], tuple(getattr(x, n) for n in static)

        def flatten_with_keys(x: _T) -> tuple[list[Any], tuple[Any, ...]]:
            leaves, meta = flatten(x)
            return [(GetAttrKey(n), leaf) for n, leaf in zip(data, leaves)], meta

        def unflatten(meta: tuple[Any, ...], leaves: Iterable[Any]) -> _T:
            x = object.__new__(cls)
            for name, value in [*zip(data, leaves), *zip(static, meta)]:
                object.__setattr__(x, name, value)
            return x

        register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return register


# ------------------------------------------------------------------------------------------------- checks


def check_dtype(x: Any, name: str, accepted: Sequence[Any]) -> None:
    """Raise DTypeError unless `x` is an array of one of the accepted dtypes."""
    names = " or ".join(str(jnp.dtype(d)) for d in accepted)
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise DTypeError(f"{name}: expected an array of {names}, got {type(x).__name__}")
    try:
        fits = jnp.dtype(x.dtype) in [jnp.dtype(d) for d in accepted]
    except TypeError:  # the dtype of another library
        fits = False
    if not fits:
        raise DTypeError(f"{name}: expected dtype {names}, got {x.dtype}")


def check_rank(x: Any, name: str, last: str) -> None:
    if len(x.shape) not in (4, 5):
        raise ShapeError(f"{name}: expected [A, M, heads, {last}] or [A, M, G, H, {last}], got shape {tuple(x.shape)}")


def check_groups(groups: Any, name: str) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise StaticArgumentError(f"{name}: expected a Python int, one of {GROUPS}, got {type(groups).__name__}")
    if groups not in GROUPS:
        raise ArgumentError(f"{name}: expected one of {GROUPS}, got {groups}")


# ------------------------------------------------------------------------------------------------- rows


def take_rows(x: Any, rows: jax.Array) -> jax.Array:
    """Rows of [A, M, *heads, W], as stored: [R..., heads, W]."""
    a, m, *heads, w = x.shape
    return jnp.take(jnp.asarray(x).reshape(a * m, math.prod(heads), w), rows, axis=0, mode="clip")


def take_coefficients(x: Any, rows: jax.Array, heads: Sequence[int]) -> jax.Array:
    """Rows of coefficients [A, *heads, M] or [A, *heads, N, M]: [R..., heads] or [R..., heads, N]."""
    a, m = x.shape[0], x.shape[-1]
    groups = x.shape[1 + len(heads) : -1]
    h = math.prod(heads)
    rows = jnp.clip(rows, 0, max(a * m - 1, 0))
    flat = jnp.asarray(x).reshape(a, h * math.prod(groups), m)
    taken = flat.at[rows // max(m, 1), :, rows % max(m, 1)].get(mode="clip")
    return taken.reshape(*rows.shape, h, *groups)


def rows_first(x: Any) -> jax.Array:
    """Coefficients [A, *heads, (N,) M] -> [A, M, *heads, (N)]."""
    return jnp.moveaxis(jnp.asarray(x), -1, 1)


def rows_last(x: Any) -> jax.Array:
    """Coefficients [A, M, *heads, (N)] -> [A, *heads, (N,) M]."""
    return jnp.moveaxis(jnp.asarray(x), 1, -1)
