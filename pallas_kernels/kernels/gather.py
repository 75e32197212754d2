"""Single key rows from anywhere into a tile that `wgmma` reads, by all threads of a warpgroup.

The copy engine takes 26 ns for a row whatever its length (H200, 2026-12-01): single rows, which pages of one or of odd
numbers of keys are, keep it four times longer than whole tiles. Here every thread copies 16 bytes at a time
(`cp.async`), so that rows cost what their bytes do. Mosaic GPU's interpreter knows no such code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm

from . import _compat
from .work import CHUNK

BYTES = 16
"""Of one copy of a thread."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Static parameters: `count` rows of pages [pages, page_size, heads, D], numbers of 16 bits."""

    count: int
    pages: int
    page_size: int

    def copy(self, tiles: Any, window: Any, position: Any, last: Any, first: Any, head: Any) -> None:
        """Begin to copy the rows at position, position + 1, ... of a sequence's pages, the row `last` again behind it.

        tiles: (source, target, bytes of the target's swizzle) of keys and of values. window: page numbers of the
        sequence, from its page `first` on.
        """
        sources, targets, swizzles = zip(*tiles)
        scalar, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
        tiled = tuple(plgpu.RefType(_compat.swizzled(n, 2)) for n in swizzles)

        @plgpu.inline_mgpu(arg_types=(ref, ref, *tiled, ref, *(scalar,) * 4))
        def begin(_: Any, *given: Any) -> None:
            sources, targets, (window, *scalars) = given[:2], given[2:4], given[4:]
            self._begin(sources, targets, swizzles, window, *(x.registers.item() for x in scalars))

        begin(*sources, *targets, window, position, last, first, head)

    def _begin(
        self, sources: Any, targets: Any, swizzles: Any, window: Any, position: Any, last: Any, first: Any, head: Any
    ) -> None:
        """As `copy`, of one thread, in MLIR."""
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        c = lambda n, kind=i32: mgpu.utils.c(n, kind)  # noqa: E731
        thread = arith.remui(mgpu.utils.thread_idx(), c(CHUNK))

        def row_of(row: Any) -> Any:
            """A row's number among all key rows, 64 bits."""
            at = arith.maxsi(arith.minsi(arith.addi(position, row), last), c(0))
            place = arith.subi(arith.divui(at, c(self.page_size)), first)
            place = arith.minsi(arith.maxsi(place, c(0)), c(CHUNK - 1))  # whatever the device says of lengths
            page = memref.load(window, [arith.index_cast(ir.IndexType.get(), place)])
            page = arith.maxsi(arith.minsi(page, c(self.pages - 1)), c(0))
            inside = arith.extui(i64, arith.remui(at, c(self.page_size)))
            return arith.addi(arith.muli(arith.extui(i64, page), c(self.page_size, i64)), inside)

        def place_of(row: Any, column: Any, dim: int, swizzle: int) -> Any:
            """Where the bytes from `column` on of a row lie: tiles of 8 rows of `swizzle` bytes, whose 16-byte pieces
            change places as the copy engine swizzles them."""
            across = dim * 2 // swizzle
            tile = arith.addi(arith.muli(arith.divui(row, c(8)), c(across)), arith.divui(column, c(swizzle)))
            inside = arith.addi(arith.muli(arith.remui(row, c(8)), c(swizzle)), arith.remui(column, c(swizzle)))
            at = arith.addi(arith.muli(tile, c(8 * swizzle)), inside)
            return arith.xori(at, arith.andi(arith.shrui(at, c(3)), c(swizzle - BYTES)))

        numbers: dict[int, list[Any]] = {}
        for source, target, swizzle in zip(sources, targets, swizzles):
            heads, dim = ir.MemRefType(source.type).shape[-2:]
            pieces = dim * 2 // BYTES
            if pieces not in numbers:  # of keys and of values the same
                total = self.count * pieces
                threads = [arith.addi(thread, c(n * CHUNK)) for n in range(-(-total // CHUNK))]
                if total % CHUNK:  # the last piece is copied by several threads
                    threads = [arith.minsi(n, c(total - 1)) for n in threads]
                rows = [arith.divui(n, c(pieces)) for n in threads]
                columns = [arith.muli(arith.remui(n, c(pieces)), c(BYTES)) for n in threads]
                numbers[pieces] = [(row, row_of(row), column) for row, column in zip(rows, columns)]
            pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(source))
            into, byte = mgpu.utils.memref_ptr(target), ir.IntegerType.get_signless(8)
            for row, number, column in numbers[pieces]:
                start = arith.addi(arith.muli(number, c(heads, i64)), arith.extui(i64, head))
                start = arith.addi(arith.muli(start, c(2 * dim, i64)), arith.extui(i64, column))
                nvvm.cp_async_shared_global(
                    mgpu.utils.getelementptr(into, [place_of(row, column, dim, swizzle)], byte),
                    mgpu.utils.getelementptr(pointer, [start], byte),
                    BYTES,
                    nvvm.LoadCacheModifierKind.CG,
                )
        nvvm.cp_async_commit_group()
        mgpu.utils.warpgroup_barrier()  # the window may be filled again


def wait(pending: int) -> None:
    """Until the copies of all calls but the last `pending` ones can be read by `wgmma`."""

    @plgpu.inline_mgpu()
    def all_done(_: Any) -> None:
        nvvm.cp_async_wait_group(pending)

    all_done()
    plgpu.commit_smem()
