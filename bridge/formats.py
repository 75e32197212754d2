"""`pallas_kernels.formats` on torch tensors: the same classes, functions and bits.

A format here holds torch tensors in the fields of its JAX class, and hands the numerics to it. `KVCache.append`
writes in place, as torch users expect.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, ClassVar

import jax
import torch

from pallas_kernels import formats as jax_formats
from pallas_kernels.errors import ArgumentError, DTypeError, GradientError
from pallas_kernels.formats import KVFormat

from . import exchange
from ._call import run


class TorchFormat:
    """Keys or values at rest in few bits, as torch tensors. Fields, layouts and checks are those of the JAX class."""

    JAX: ClassVar[type[KVFormat]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _signature(self.JAX).bind(*args, **kwargs)
        bound.apply_defaults()
        self.__dict__.update(bound.arguments)
        self._spec = _spec(self.JAX, bound.arguments)

    @classmethod
    def wrap(cls, opened: KVFormat) -> TorchFormat:
        """The torch format of a JAX format whose leaves are torch tensors."""
        twin = _TWINS[type(opened)]
        return twin(**{f.name: getattr(opened, f.name) for f in dataclasses.fields(opened)})  # type: ignore[arg-type]

    def opened(self) -> KVFormat:
        """The JAX format with this one's torch tensors as leaves."""
        fields = [getattr(self, f.name) for f in dataclasses.fields(self.JAX)]  # type: ignore[arg-type]
        tensors = [x for x in fields if isinstance(x, torch.Tensor)]
        return jax.tree.unflatten(jax.tree.structure(self._spec), tensors)

    @property
    def name(self) -> str:
        """Short name with the static parameters, for tables."""
        return self._spec.name

    @property
    def shape(self) -> torch.Size:
        """The logical shape [A, M, *heads, D]."""
        return torch.Size(self._spec.shape)

    @property
    def ndim(self) -> int:
        return self._spec.ndim

    @property
    def head_dim(self) -> int:
        return self._spec.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors: values and coefficients."""
        return self._spec.nbytes

    @property
    def device(self) -> torch.device:
        return next(x for x in vars(self).values() if isinstance(x, torch.Tensor)).device

    @exchange.opaque
    def to(self, device: Any) -> TorchFormat:
        """The same bits on another device."""
        return TorchFormat.wrap(jax.tree.map(lambda x: x.to(device), self.opened()))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers that are stored, [A, M, *heads, D] in `dtype`."""
        return run(lambda x: x.dequantize(exchange.jax_dtype(dtype)), self)

    def __repr__(self) -> str:
        return repr(self._spec)


_signature = functools.cache(inspect.signature)


def _spec(cls: type[KVFormat], fields: dict[str, Any]) -> KVFormat:
    """The JAX format of these shapes and dtypes: all that its constructor checks, and all that its properties need.

    It is made once for equal ones, since a format is made on every call of a serving loop.
    """
    key: Any = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else (type(x), x) for x in fields.values())
    try:
        hash(key)
    except TypeError:  # a field of a wrong type: the constructor says which
        key = None
    found = None if key is None else _specs.get((cls, key))
    if found is None:
        found = cls(**{name: _struct(x, name) for name, x in fields.items()})
        if key is not None:
            _specs[cls, key] = found
            if len(_specs) > MOST_SPECS:
                _specs.pop(next(iter(_specs)))
    return found


_specs: dict[Any, KVFormat] = {}
MOST_SPECS = 4096


def _struct(x: Any, name: str) -> Any:
    """A tensor's shape and dtype; what is no array at all is left to the constructor."""
    if not isinstance(x, torch.Tensor):
        if hasattr(x, "dtype"):
            raise DTypeError(f"{name}: expected a torch.Tensor, got {_type_name(x)}")
        return x
    return jax.ShapeDtypeStruct(tuple(x.shape), exchange.jax_dtype(x.dtype))


def _type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


class SeedInt4(TorchFormat):
    __doc__ = jax_formats.SeedInt4.__doc__
    JAX = jax_formats.SeedInt4


class SeedFp8(TorchFormat):
    __doc__ = jax_formats.SeedFp8.__doc__
    JAX = jax_formats.SeedFp8


class Fp8(TorchFormat):
    __doc__ = jax_formats.Fp8.__doc__
    JAX = jax_formats.Fp8


class Int8(TorchFormat):
    __doc__ = jax_formats.Int8.__doc__
    JAX = jax_formats.Int8


class Int4(TorchFormat):
    __doc__ = jax_formats.Int4.__doc__
    JAX = jax_formats.Int4


_TWINS: dict[type[KVFormat], type[TorchFormat]] = {c.JAX: c for c in (SeedInt4, SeedFp8, Fp8, Int8, Int4)}


@exchange.opaque
def quantize(x: torch.Tensor, format: type[TorchFormat] | str, *, scale: Any = "row", **options: Any) -> Any:
    """`pallas_kernels.formats.quantize` on a torch tensor; `format` is a class of this module or its name."""
    chosen: Any = format.JAX if isinstance(format, type) and issubclass(format, TorchFormat) else format
    if "scale_dtype" in options and isinstance(options["scale_dtype"], torch.dtype):
        options["scale_dtype"] = exchange.jax_dtype(options["scale_dtype"])
    given = scale.clone() if isinstance(scale, torch.Tensor) else None  # kept as it is now

    def encode(x: Any, given: Any) -> Any:
        return jax_formats.quantize(x, chosen, scale=scale if given is None else given, **options)

    return TorchFormat.wrap(run(encode, x, given))


@exchange.opaque
def from_seed(seed: TorchFormat) -> Any:
    """MSLK's format -> this library's, keeping every stored bit."""
    return TorchFormat.wrap(run(jax_formats.from_seed, seed))


@exchange.opaque
def to_seed(native: TorchFormat) -> Any:
    """This library's format -> MSLK's, keeping every stored bit; raises ArgumentError where MSLK has none."""
    return TorchFormat.wrap(run(jax_formats.to_seed, native))


class KVCache:
    """Keys and values of one layer, each a format of this module or a float tensor [A, M, *heads, D].

    As `pallas_kernels.formats.KVCache`, except that `append` writes into these tensors.
    """

    def __init__(self, k: Any, v: Any) -> None:
        self.k, self.v = k, v
        parts = (("k", k), ("v", v))
        jax_formats.KVCache(*(x._spec if isinstance(x, TorchFormat) else _struct(x, name) for name, x in parts))

    @exchange.opaque
    def append(
        self,
        new_keys: torch.Tensor,
        new_values: torch.Tensor,
        *,
        positions: Any = None,
        slot_mapping: Any = None,
    ) -> KVCache:
        """Store new tokens in place; returns this cache. Everything is checked and encoded before the first write.

        new_keys, new_values: [A, T, *heads, D] with positions int32 [A, T], the row of each new token in its own
        sequence (dense caches); [T, *heads, D] or [1, T, ...] with slot_mapping int32 [T], page * page_size + row, -1
        to skip (paged caches). Exactly one of the two. Errors as the JAX method. Masks carry their own lengths: make
        the next one with the new lengths.
        """
        for name, new in (("new_keys", new_keys), ("new_values", new_values)):
            if not isinstance(new, torch.Tensor):
                raise DTypeError(f"{name}: expected a torch.Tensor of floats, got {_type_name(new)}")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (new_keys, new_values)):
            raise GradientError("new_keys, new_values: appending has no gradient; pass them detached")
        parts = [x.opened() if isinstance(x, TorchFormat) else x for x in (self.k, self.v)]
        for tensor in jax.tree.leaves(parts):
            if exchange.overlaps(tensor):
                raise ArgumentError("k, v: an expanded tensor (elements that share memory) cannot be written")

        def encode(k: Any, v: Any, new_keys: Any, new_values: Any, positions: Any, slot_mapping: Any) -> Any:
            cache = jax_formats.KVCache(k, v)
            return cache.encode(new_keys, new_values, positions=positions, slot_mapping=slot_mapping)

        with torch.no_grad():
            rows, *encoded = run(encode, self.k, self.v, new_keys, new_values, positions, slot_mapping)
            writes = [
                _placed(tensor, row_axis, rows.reshape(-1).long(), pieces[name])
                for part, pieces in zip(parts, encoded)
                for name, (tensor, row_axis) in jax_formats.components(part).items()
            ]
            for target, index, new in writes:
                target[index] = new
        return self


_Placed = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]


def _placed(tensor: torch.Tensor, row_axis: int, rows: torch.Tensor, new: torch.Tensor) -> _Placed:
    """(target, index, values): target[index] = values puts new into tensor[a, row m] for each flat row a * M + m.

    Rows at or beyond A * M are skipped. The values are a copy, so that they may come from what is written: rows that
    a float cache stores as they are share the memory of the caller's tensor, which may be a part of the cache.
    """
    by_row = tensor.movedim(row_axis, 1)
    a, m = by_row.shape[:2]
    keep = rows < a * m
    rows, new = rows[keep], new.reshape(-1, *by_row.shape[2:])[keep]
    if tensor.element_size() == 1:  # index_put_ does not know float8
        by_row, new = by_row.view(torch.uint8), new.view(torch.uint8)
    return by_row, (rows // max(m, 1), rows % max(m, 1)), new


__all__ = ["Fp8", "Int4", "Int8", "KVCache", "SeedFp8", "SeedInt4", "TorchFormat", "from_seed", "quantize", "to_seed"]
