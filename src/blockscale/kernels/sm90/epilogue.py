# mypy: ignore-errors
"""A warpgroup's accumulators to the output: scaled, added to, rounded once, stored by TMA or one by
one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute, range_constexpr

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..common.copies import TmaTiles
from ..common.factor import factor_of
from ..common.ptx import load_shared, store_global
from . import ptx
from .product_config import ProductConfig

__all__ = ["Epilogue", "store_rows"]

_KINDS = {BFLOAT16: "bf16", FLOAT16: "f16", FLOAT32: "f32"}


@dataclass(frozen=True)
class Epilogue:
    """Stores tiles of ``d`` (M, N): a warpgroup's work. ``boxes``: of it, in shared memory, if any;
    ``bias`` (N,); ``alpha`` as of ``factor_of``. Addresses are computed ``late``, after the
    mainloop, where that leaves them no registers.
    """

    config: ProductConfig
    boxes: TmaTiles | None
    d: Any
    bias: Any = None
    alpha: Any = None
    late: bool = False

    @property
    def kind(self) -> str:
        return _KINDS[self.config.out_dtype]

    @cute.jit
    def __call__(self, acc, warpgroup, thread, row, column, end=None, group=None):
        """Store what starts at ``row`` and ``column``, all of a warpgroup's; but nothing from row
        ``end`` on, if that is given. ``group``: whose it is, if there are any."""
        config = self.config
        if const_expr(self.late):
            thread = ptx.pin(thread)
        self.scale(acc, thread, column, group)
        if const_expr(config.tma_store):
            if const_expr(config.accumulate and not config.reduces):
                self.add(acc, thread, row, column, end)
            if const_expr(config.stores_tiles):
                self.store(acc, warpgroup, thread, row, column, end)
            else:
                self.store_pairs(acc, thread, row, column)
        else:
            self.store_each(acc, thread, row, column, end)

    def values(self, acc, row_step: int, column: int) -> list:
        """A thread's four values in the eight columns from ``column`` on."""
        values, first = self.where(acc, row_step, column)
        return [values[first + i] for i in range(4)]

    def where(self, acc, row_step: int, column: int):
        """The tensor of those four values, and the index of the first."""
        mma, first = self.config.place(row_step, column)
        return acc[mma], first

    @cute.jit
    def scale(self, acc, thread, column, group):
        """``alpha * acc + bias`` in place."""
        config, bias, alpha = self.config, self.bias, self.alpha
        factor = None if alpha is None else factor_of(alpha, group)
        eights = config.own_columns // 8 if alpha is not None or bias is not None else 0
        for eight in range_constexpr(eights):
            added = []
            for j in range_constexpr(0 if bias is None else 2):
                where = column + eight * 8 + thread % 4 * 2 + j
                added.append(Float32(bias[cutlass.min(where, bias.shape[0] - 1)]))
            for row_step in range_constexpr(config.row_steps):
                values, first = self.where(acc, row_step, eight * 8)
                for i in range_constexpr(4):
                    value = values[first + i]
                    if const_expr(alpha is not None):
                        value = value * factor
                    if const_expr(bias is not None):
                        value = value + added[i % 2]
                    values[first + i] = value

    @cute.jit
    def add(self, acc, thread, row, column, end=None):
        """Add what the output holds, in pairs: its rows start at multiples of two elements and have
        an even number of columns."""
        for values, i, *place in self.pairs(acc, thread, row, column, end):
            pair = ptx.ld_global_pair(*place, self.kind)
            for j in range_constexpr(2):
                values[i + j] = values[i + j] + pair[j]

    @cute.jit
    def store_pairs(self, acc, thread, row, column):
        """Store from registers where rows are as ``add`` wants them."""
        for values, i, *place in self.pairs(acc, thread, row, column):
            ptx.st_global_pair(*place, [values[i + j] for j in range(2)], self.kind)

    def pairs(self, acc, thread, row, column, end=None) -> list:
        """Neighbours in a row: their tensor, the index of the first, its address and how far after
        it, and whether they are in the matrix, or before row ``end``."""
        config, d, found = self.config, self.d, []
        end = d.shape[0] if end is None else end
        row = row + thread // 32 * 16 + thread % 32 // 4
        column = column + thread % 4 * 2
        itemsize = config.out_dtype.itemsize
        for row_step in range(config.row_steps):
            for half in range(2):
                r = row + row_step * 64 + half * 8
                address = d.iterator.toint() + d.layout((r, column)) * itemsize
                for group in range(config.own_columns // 8):
                    c = column + group * 8
                    inside = cutlass.Int32(r < end) & cutlass.Int32(c < d.shape[1])
                    values, first = self.where(acc, row_step, group * 8)
                    found.append((values, first + 2 * half, address, group * 8 * itemsize, inside))
        return found

    @cute.jit
    def store(self, acc, warpgroup, thread, row, column, end=None):
        """Store boxes of 64 rows, ``epilogue_stages`` at a time."""
        config, nbytes = self.config, self.boxes.copies.nbytes
        first = warpgroup * config.epilogue_stages
        across = config.tile[1] // config.box_columns
        base = self.boxes.address + first * nbytes
        # known to be the same in all lanes: else the compiler gives up uniform registers all over
        warp = cute.arch.make_warp_uniform(thread // 32)
        for start in range_constexpr(0, config.boxes, config.epilogue_stages):
            if warp == 0:  # stores have read the buffers
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.sync(warpgroup)
            for i in range_constexpr(config.epilogue_stages):
                box = start + i
                down, right = box // across, box % across * config.box_columns
                self.put(acc, base + i * nbytes, down, right, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync(warpgroup)
            if const_expr(end is None):
                self.send(warp, first, start, row, column)
            else:
                if row + 64 * config.row_steps <= end:
                    self.send(warp, first, start, row, column)
                else:
                    for i in range_constexpr(config.epilogue_stages):
                        given = base + i * nbytes, config.box_bytes, thread
                        place = self.place(start + i, row, column)
                        store_rows(self.d, *given, *place, end, config.reduces)

    @cute.jit
    def send(self, warp, first, start: cutlass.Constexpr, row, column):
        """Store boxes by TMA: the ``start``-th and those after it, from buffer ``first`` on."""
        if warp == 0:
            for i in range_constexpr(self.config.epilogue_stages):
                self.boxes.store(first + i, self.place(start + i, row, column))
            cute.arch.cp_async_bulk_commit_group()

    def place(self, box: int, row, column) -> tuple:
        """Where a box begins, of what starts at ``row`` and ``column``."""
        across = self.config.tile[1] // self.config.box_columns
        return row + box // across * 64, column + box % across * self.config.box_columns

    def sync(self, warpgroup):
        cute.arch.barrier(barrier_id=warpgroup + 1, number_of_threads=128)

    def put(self, acc, address, row_step: int, column: int, thread) -> None:
        """Put a box's values into shared memory, swizzled."""
        config, kind = self.config, self.kind
        warp, lane, nbytes = thread // 32, thread % 32, config.box_bytes
        if kind == "f32":
            row = warp * 16 + lane // 4
            line, swizzle = address + row * nbytes + lane % 2 * 8, swizzle_of(row, nbytes)
            for group in range(config.box_columns // 8):
                chunk = (2 * group + lane % 4 // 2) ^ swizzle
                values = self.values(acc, row_step, column + 8 * group)
                ptx.st_shared(line + chunk * 16, values[:2])
                ptx.st_shared(line + 8 * nbytes + chunk * 16, values[2:])
            return
        row = warp * 16 + lane % 16
        swizzle = swizzle_of(row, nbytes)
        for group in range(0, config.box_columns // 8, 2):
            chunk = (group + lane // 16) ^ swizzle
            words = []
            for j in (0, 1):
                values = self.values(acc, row_step, column + 8 * (group + j))
                words += [ptx.cvt_rn_x2(*values[i : i + 2], kind) for i in (0, 2)]
            ptx.stmatrix(address + row * nbytes + chunk * 16, words)

    @cute.jit
    def store_each(self, acc, thread, row, column, end):
        """Store where rows may start anywhere."""
        config, d = self.config, self.d
        end = d.shape[0] if end is None else end
        warp, lane = thread // 32, thread % 32
        for row_step in range_constexpr(config.row_steps):
            for group in range_constexpr(config.own_columns // 8):
                values = self.values(acc, row_step, group * 8)
                for i in range_constexpr(4):
                    r = row + row_step * 64 + warp * 16 + lane // 4 + i // 2 * 8
                    c = column + group * 8 + lane % 4 * 2 + i % 2
                    if r < end and c < d.shape[1]:
                        value = values[i]
                        if const_expr(config.accumulate):
                            value = value + Float32(d[r, c])
                        d[r, c] = d.element_type(value)


def swizzle_of(row, nbytes: int):
    """What 16-byte chunks of a row of so many bytes are moved by: Swizzle<B, 4, 3> of CuTe, whose B
    is 3, 2 or 1 for 128, 64 or 32 bytes."""
    return row // (128 // nbytes) % (nbytes // 16)


@cute.jit
def store_rows(
    d,
    address,
    nbytes: cutlass.Constexpr,
    thread,
    row,
    column,
    end,
    adds: cutlass.Constexpr = False,
):
    """Store a swizzled box of 64 rows of ``nbytes``, or add it to fp32, but for its rows from
    ``end`` on, which TMA cannot leave out; by a warpgroup."""
    itemsize = d.element_type.width // 8
    chunks = nbytes // 16  # of a row
    chunk, first = thread % chunks, thread // chunks
    c = column + chunk * (16 // itemsize)
    for down in range_constexpr(0, 64, 128 // chunks):
        r = first + down
        if row + r < end and c < d.shape[1]:
            source = address + r * nbytes + (chunk ^ swizzle_of(r, nbytes)) * 16
            target = d.iterator.toint() + d.layout((row + r, c)) * itemsize
            if const_expr(adds):
                for offset in (0, 8):
                    pair = ptx.ld_shared(source, offset, 2)
                    held = ptx.ld_global_pair(target, offset, Int32(1), "f32")
                    added = [x + y for x, y in zip(pair, held, strict=True)]
                    ptx.st_global_pair(target, offset, Int32(1), added, "f32")
            else:
                store_global(target, load_shared(source, 16), 16)
