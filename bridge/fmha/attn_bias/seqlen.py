"""Sequence lengths of an attention bias, held twice: as host lists and as int32 device tensors (MSLK attn_bias).

Sizes and checks read the host lists (`*_py`, `max_seqlen`, `min_seqlen`), masking reads the device tensors. A CUDA
graph may update the tensors alone, so the two may disagree; nothing here reads a tensor back.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Self, dataclass_transform

import torch

from pallas_kernels.errors import ArgumentError, ShapeError

Device = torch.device | str
_INT32_MAX = 2**31 - 1


def default_device(device: Device | None = None) -> torch.device:
    """`device`, or where it is None the current CUDA device, or the CPU where there is no CUDA."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def host_lengths(values: Iterable[int], name: str) -> list[int]:
    """The non-negative Python ints of a list or numpy array; ArgumentError for tensors and for anything else."""
    if isinstance(values, torch.Tensor):
        raise ArgumentError(
            f"{name}: expected a list or numpy array of integers, got a torch.Tensor; use .tolist(), or make a bias "
            "once and change its k_seqinfo.seqlen in place"
        )
    try:
        out = [operator.index(v) for v in values]
    except TypeError:
        raise ArgumentError(f"{name}: expected a list or numpy array of integers, got {values!r}") from None
    if out and min(out) < 0:
        raise ArgumentError(f"{name}: expected values >= 0, got {min(out)}")
    return out


def int32_tensor(values: Sequence[int], device: torch.device, name: str) -> torch.Tensor:
    """An int32 tensor on `device`; on its way to CUDA it is pinned, so that the copy does not block the host."""
    if values and max(values) > _INT32_MAX:
        raise ArgumentError(f"{name}: values must fit int32, got up to {max(values)}")
    tensor = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


@dataclass_transform()
def movable[T](cls: type[T]) -> type[T]:
    """`dataclass` for classes whose `to` is `moved`: it serves exactly this class, a subclass needs its own `to`."""
    cls = dataclasses.dataclass(cls)
    cls._exact = cls  # type: ignore[attr-defined]
    return cls


def require_exact(obj: Any, cls: type) -> None:
    if type(obj) is not cls:
        raise ArgumentError(f"{type(obj).__name__}: a subclass of {cls.__name__} must implement `to` itself")


def moved[T](obj: T, device: Device) -> T:
    """A copy of a `movable` with every tensor on `device` (the object itself where lengths are there already).

    Lengths that queries and keys share stay shared. Raises ArgumentError (an AssertionError) for a subclass.
    """
    require_exact(obj, obj._exact)  # type: ignore[attr-defined]
    device = torch.device(device)
    lengths: dict[int, _SeqLenInfo] = {}

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device, non_blocking=device.type != "cpu")
        if isinstance(x, _SeqLenInfo):
            return lengths.setdefault(id(x), x.to(device))
        return x

    old = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}  # type: ignore[arg-type]
    new = {name: move(x) for name, x in old.items()}
    if isinstance(obj, _SeqLenInfo):
        if all(new[name] is x for name, x in old.items()):
            return obj
        new = {name: list(x) if isinstance(x, list) else x for name, x in new.items()}
    return type(obj)(**new)


@movable
class _SeqLenInfo:
    """Sequences packed along one axis: sequence b is rows seqstart[b] .. seqstart[b + 1] - 1.

    seqstart: int32 [N + 1], cumulative from 0; max_seqlen, min_seqlen: of the lengths, -1 where N = 0;
    seqstart_py: the N + 1 starts on the host. For lengths [2, 3, 2]: seqstart [0, 2, 5, 7], max 3, min 2.
    """

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    _exact: ClassVar[type]

    def to(self, device: Device) -> Self:
        """These lengths on `device`."""
        return moved(self, device)

    def intervals(self) -> Iterable[tuple[int, int]]:
        """(start, end) of each sequence, from the host list."""
        return zip(self.seqstart_py, self.seqstart_py[1:])

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device | None = None) -> Self:
        """seqlens: N lengths, a list or numpy array. Raises ArgumentError (an AssertionError) for a tensor."""
        lens = host_lengths(seqlens, "seqlens")
        starts = _cumulative(lens)
        return cls(
            seqstart=int32_tensor(starts, default_device(device), "seqlens"),
            max_seqlen=max(lens, default=-1),
            min_seqlen=min(lens, default=-1),
            seqstart_py=starts,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> None:
        """New lengths in the same tensor, for CUDA graphs; max_seqlen and min_seqlen stay as they were.

        Raises ArgumentError (an AssertionError) for another count, or a length beyond max_seqlen.
        """
        lens = host_lengths(seqlens, "seqlens")
        self._check_update(lens, len(self.seqstart_py) - 1)
        self.seqstart_py[:] = _cumulative(lens)
        new = int32_tensor(self.seqstart_py, self.seqstart.device, "seqlens")
        self.seqstart.copy_(new, non_blocking=True)

    def _check_update(self, lens: list[int], count: int) -> None:
        if len(lens) != count:
            raise ArgumentError(f"seqlens: an update keeps the number of sequences, {count}, got {len(lens)}")
        longest = max(lens, default=-1)
        if longest > self.max_seqlen:
            raise ArgumentError(f"seqlens: an update stays within max_seqlen {self.max_seqlen}, got {longest}")

    def split(self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Views of x [1, total, ...]: one [1, length, ...] a sequence, or [bs, length, ...] a group of bs sequences.

        Raises ShapeError (a ValueError) where x has another shape, or a group has unequal lengths.
        """
        starts = self.seqstart_py
        if x.ndim < 2 or x.shape[0] != 1 or x.shape[1] != starts[-1]:
            raise ShapeError(f"x: expected shape (1, {starts[-1]}, ...) for starts {starts}, got {tuple(x.shape)}")
        sizes = [1] * (len(starts) - 1) if batch_sizes is None else list(batch_sizes)
        if sum(sizes) != len(starts) - 1:
            raise ShapeError(f"batch_sizes: {sizes} do not add up to {len(starts) - 1} sequences")
        out, b = [], 0
        for size in sizes:
            length = starts[b + 1] - starts[b] if size else 0
            if any(starts[n + 1] - starts[n] != length for n in range(b, b + size)):
                raise ShapeError(f"batch_sizes: sequences {b} .. {b + size - 1} of one group differ in length")
            out.append(x[:, starts[b] : starts[b + size]].reshape(size, length, *x.shape[2:]))
            b += size
        return out


def _cumulative(lens: list[int]) -> list[int]:
    starts = [0]
    for n in lens:
        starts.append(starts[-1] + n)
    return starts


@movable
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Equal slots of `padding` rows, the first seqlen[b] of slot b in use.

    seqstart: int32 [N + 1], padding * arange(N + 1); seqlen: int32 [N]; max_seqlen, min_seqlen: of the lengths;
    seqlen_py: the lengths on the host. Three slots of 4 with lengths [2, 3, 2]: rows 0, 1, 4, 5, 6, 8, 9.
    """

    seqlen: torch.Tensor
    seqlen_py: list[int]
    padding: int

    def __post_init__(self) -> None:
        if len(self.seqstart_py) != len(self.seqlen_py) + 1:
            raise ShapeError(
                f"seqstart_py: expected {len(self.seqlen_py) + 1} starts for {len(self.seqlen_py)} lengths, "
                f"got {len(self.seqstart_py)}"
            )

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(start, start + length) of each sequence, from the host lists."""
        for start, length in zip(self.seqstart_py, self.seqlen_py):
            yield start, start + length

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device | None = None) -> NoReturn:
        """Raises RuntimeError: padded lengths come from `from_seqlens_padded`."""
        raise RuntimeError("_PaddedSeqLenInfo.from_seqlens: use from_seqlens_padded, or _SeqLenInfo.from_seqlens")

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Device | None = None) -> Self:
        """seqlens: N >= 1 lengths of at most `padding`.

        Raises ArgumentError (a ValueError and AssertionError) for no length, a longer one, or a tensor.
        """
        lens = host_lengths(seqlens, "seqlens")
        if not lens:
            raise ArgumentError("seqlens: at least one sequence is needed")
        _check_padding(lens, padding)
        device = default_device(device)
        starts = [b * padding for b in range(len(lens) + 1)]
        return cls(
            seqstart=int32_tensor(starts, device, "padding"),
            max_seqlen=max(lens),
            min_seqlen=min(lens),
            seqstart_py=starts,
            seqlen=int32_tensor(lens, device, "seqlens"),
            seqlen_py=lens,
            padding=padding,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> NoReturn:
        """Raises RuntimeError: padded lengths are updated by `from_seqlens_padded_inplace`."""
        raise RuntimeError("_PaddedSeqLenInfo.from_seqlens_inplace: use from_seqlens_padded_inplace")

    def from_seqlens_padded_inplace(self, seqlens: Sequence[int]) -> None:
        """New lengths in the same tensor, for CUDA graphs; everything but seqlen and seqlen_py stays as it was.

        Raises ArgumentError (an AssertionError) for another count, or a length beyond padding or max_seqlen.
        """
        lens = host_lengths(seqlens, "seqlens")
        _check_padding(lens, self.padding)
        self._check_update(lens, len(self.seqlen_py))
        self.seqlen_py[:] = lens
        self.seqlen.copy_(int32_tensor(lens, self.seqlen.device, "seqlens"), non_blocking=True)

    def split(self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> NoReturn:
        """Raises NotImplementedError: slots hold more than sequences."""
        raise NotImplementedError("_PaddedSeqLenInfo.split: padded sequences do not fill their axis")


def _check_padding(lens: list[int], padding: int) -> None:
    if lens and max(lens) > padding:
        raise ArgumentError(f"seqlens: length {max(lens)} is beyond the padding {padding}")


@movable
class _GappySeqInfo(_SeqLenInfo):
    """Sequences anywhere on the key axis, in any order, overlapping or not.

    seqstart: int32 [N + 1]; seqlen: int32 [N]; max_seqlen, min_seqlen: of the *counts* of keys; with two meanings:

    |             | seqstart[b]                   | seqstart[N]        | seqlen[b]                  |
    | ----------- | ----------------------------- | ------------------ | -------------------------- |
    | without pages | offset on the whole key axis | length of the axis | number of keys             |
    | with pages  | offset in row b's own pages   | unused (-1)        | *end*: seqstart[b] + count |
    """

    seqlen: torch.Tensor
    seqlen_py: list[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        """(start, start + seqlen) of each sequence, from the host lists."""
        for start, length in zip(self.seqstart_py, self.seqlen_py):
            yield start, start + length

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device | None = None) -> NoReturn:
        """Raises NotImplementedError: gappy lengths come from `from_seqlens_gappy`."""
        raise NotImplementedError("_GappySeqInfo.from_seqlens: use from_seqlens_gappy")

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Device | None = None
    ) -> Self:
        """seqlens: N >= 1 *counts* of keys in both meanings; seqstarts: N + 1 starts, or N where `paged`.

        Raises ArgumentError (a ValueError) for no sequence or another number of starts.
        """
        lens, starts = host_lengths(seqlens, "seqlens"), host_lengths(seqstarts, "seqstarts")
        if not lens:
            raise ArgumentError("seqlens: at least one sequence is needed")
        if len(starts) != len(lens) + (not paged):
            raise ArgumentError(
                f"seqstarts: expected {len(lens) + (not paged)} starts for {len(lens)} sequences"
                f"{' in pages' if paged else ' and the length of the axis'}, got {len(starts)}"
            )
        device = default_device(device)
        most, least = max(lens), min(lens)
        if paged:
            lens = [start + n for start, n in zip(starts, lens)]
            starts.append(-1)
        return cls(
            seqstart=int32_tensor(starts, device, "seqstarts"),
            max_seqlen=most,
            min_seqlen=least,
            seqstart_py=starts,
            seqlen=int32_tensor(lens, device, "seqlens"),
            seqlen_py=lens,
        )

    def from_seqlens_inplace(self, seqlens: Iterable[int]) -> NoReturn:
        """Raises NotImplementedError: gappy lengths have no in-place update."""
        raise NotImplementedError("_GappySeqInfo.from_seqlens_inplace: gappy lengths have no in-place update")

    def split(self, x: torch.Tensor, batch_sizes: Sequence[int] | None = None) -> NoReturn:
        """Raises NotImplementedError: gaps belong to no sequence."""
        raise NotImplementedError("_GappySeqInfo.split: gappy sequences do not fill their axis")
