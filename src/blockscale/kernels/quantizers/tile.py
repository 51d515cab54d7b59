# mypy: ignore-errors
"""A tile of each source in shared memory, and the tiles that a producer makes of them.

A CTA loads its tiles by one wait on TMA, as panels of 128 columns. A tile hangs over
the edges of its matrix: it reads zeros there, whose scales and elements are the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..common import ptx
from ..common.numeric import NUMERIC
from ..common.swiglu import PRODUCE
from .config import PANEL, PRODUCERS, Config

__all__ = ["ELEMENTS", "STRIP_LANES", "Part", "Tiles", "lane_order", "load_words"]

ELEMENTS = 16  # of one lane at a time
STRIP_LANES = PANEL // ELEMENTS


@dataclass(frozen=True)
class Part:
    """A tile to be quantized: its address in shared memory, its first column in the tensor, and
    the column after the last one that belongs to this part of the tensor.
    """

    address: Any
    column: Any
    stop: Any


def lane_order(config: Config, lane):
    """The order in which a lane reads 16 elements: what it reads as its i-th is element i XOR this.

    Lanes start 16 elements apart, so that four of them (fp32), or two, begin in the same banks of
    shared memory. In this order eight lanes read 16 bytes each from all banks at once. None: in
    the order of the elements, where putting codes back costs more than the banks do.
    """
    itemsize = config.dtype.itemsize
    busy = config.producer != "load" or config.spec.bits < 8  # with instructions, not with banks
    if itemsize == 2 and busy:
        return None
    return Uint32(lane << 1 & ELEMENTS - 16 // itemsize)


def load_words(address, itemsize: int, order=None) -> list:
    """16 elements of shared memory, in the lane's ``order`` if there is one."""
    offsets = range(0, ELEMENTS * itemsize, 16)
    if order is not None:
        offsets = [Int32(order * itemsize ^ i) for i in offsets]
    return [word for i in offsets for word in ptx.load_shared(address + i, 16)]


class Tiles:
    """How the tiles of a :class:`Config` get into shared memory."""

    def __init__(self, config: Config):
        self.config = config
        self.shape = PRODUCERS[config.producer]

    def descriptors(self, sources) -> tuple[list, list]:
        """On the host: TMA atoms and tensors of ``sources``; Nones where TMA cannot load them."""
        config = self.config
        if not config.tma:
            return [None] * len(sources), [None] * len(sources)
        box = (config.box_rows, PANEL)
        layout = cute.make_layout(box, stride=(PANEL, 1))
        op = cpasync.CopyBulkTensorTileG2SOp()
        pairs = [cpasync.make_tiled_tma_atom(op, x, layout, box) for x in sources]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def allocate(self, memory) -> tuple[list, Any]:
        """Tiles and a barrier in shared memory."""
        config = self.config
        rows = config.loaded_rows
        panels = cute.make_layout((rows, PANEL, config.panels), stride=(PANEL, 1, rows * PANEL))
        kind = NUMERIC[config.dtype]
        tiles = [
            memory.allocate_tensor(kind, panels, byte_alignment=128)
            for _ in range(self.shape.sources)
        ]
        return tiles, memory.allocate_array(cutlass.Int64, 1)

    @cute.jit
    def start(self, sources, atoms, views, tiles, barrier, rows, column):
        """Start to load the tiles of ``rows`` from ``column`` on. All threads meet in here."""
        config, start = self.config, (rows.start, column)
        if const_expr(config.tma):
            thread = cute.arch.thread_idx()[0]
            if thread == 0:
                cute.arch.mbarrier_init(barrier, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
            boxes = Int32(config.loaded_rows // config.box_rows)
            if const_expr(config.grouped):
                boxes = cute.ceil_div(rows.stop - rows.start, config.box_rows)
                boxes = cutlass.max(boxes, Int32(0))
            if thread == 0:
                nbytes = boxes * (config.tile_bytes * config.box_rows // config.loaded_rows)
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes * self.shape.sources)
            if thread < 32:
                for i in range_constexpr(self.shape.sources):
                    for box in range_constexpr(config.loaded_rows // config.box_rows):
                        if const_expr(not config.grouped) or box < boxes:
                            self.copy(atoms[i], views[i], tiles[i], barrier, start, box)
        else:
            for i in range_constexpr(self.shape.sources):
                self.load(sources[i], tiles[i].iterator.toint(), start)
            cute.arch.sync_threads()

    @cute.jit
    def copy(self, atom, view, tile, barrier, start, box: cutlass.Constexpr):
        """Load box ``box`` of each panel of a tile by TMA."""
        shape = (self.config.box_rows, PANEL)
        row = box * self.config.box_rows
        for panel in range_constexpr(self.config.panels):
            # the row need not be a multiple of the box's: experts start anywhere
            moved = cute.domain_offset((start[0] + row, start[1] + panel * PANEL), view)
            target = cute.local_tile(tile[(None, None, panel)], shape, (box, 0))
            shared, piece = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(target, 0, 2),
                cute.group_modes(cute.local_tile(moved, shape, (0, 0)), 0, 2),
            )
            cute.copy(atom, piece, shared, tma_bar_ptr=barrier)

    @cute.jit
    def load(self, x, address, start):
        """Load a tile an element at a time: for strides and addresses that TMA cannot take."""
        config, size = self.config, self.config.dtype.itemsize
        base, stride = x.iterator.toint(), Int64(x.stride[0])
        thread = cute.arch.thread_idx()[0]
        for i in range(config.loaded_rows * config.tile_columns // config.threads):
            index = i * config.threads + thread
            strip = index // PANEL
            row = start[0] + strip % config.loaded_rows
            column = start[1] + strip // config.loaded_rows * PANEL + index % PANEL
            value = Uint32(0)
            if row < x.shape[0] and column < x.shape[1]:
                value = ptx.load_global(base + (row * stride + column) * size, size)
            ptx.store_shared(address + index * size, [value], size)

    @cute.jit
    def wait(self, barrier):
        if const_expr(self.config.tma):
            cute.arch.mbarrier_wait(barrier, 0)

    def parts(self, sources, tiles, column) -> list[Part]:
        """What the producer leaves in shared memory, for tiles whose first column is ``column``."""
        if self.shape.parts == 1:  # which ends where the tensor does, padding included
            return [Part(tiles[0].iterator.toint(), column, None)]
        width = Int32(sources[0].shape[1])
        return [
            Part(tiles[i].iterator.toint(), column + i * width, (i + 1) * width)
            for i in range(self.shape.parts)
        ]

    def fetch(self, tiles, offset, order=None, keep: bool = False, made: bool = False) -> list:
        """16 elements of each part, as words, ``offset`` bytes into the tile, in the lane's
        ``order``. ``keep``: put them there, too, where a producer makes them; ``made``: it did so
        before.
        """
        itemsize = self.config.dtype.itemsize
        addresses = [tile.iterator.toint() + offset for tile in tiles]
        if made or self.config.producer == "load":
            return [load_words(addresses[i], itemsize, order) for i in range(self.shape.parts)]
        words = [load_words(address, itemsize, order) for address in addresses]
        blackwell = self.config.arch.startswith("sm_10")
        parts = PRODUCE[self.config.producer](words, self.config.dtype, blackwell)
        if keep:
            for part, address in zip(parts, addresses, strict=False):
                for i in range(0, len(part), 4):
                    place = 4 * i if order is None else Int32(order * itemsize ^ 4 * i)
                    ptx.store_shared(address + place, part[i : i + 4], 16)
        return parts

    @cute.jit
    def produce(self, tiles):
        """Replace the first of the tiles by all that the producer makes. All threads meet here."""
        config = self.config
        if const_expr(config.producer != "load"):
            thread = cute.arch.thread_idx()[0]
            step = config.threads * ELEMENTS
            order = lane_order(config, thread % STRIP_LANES)
            for i in range_constexpr(config.loaded_rows * config.tile_columns // step):
                offset = (i * config.threads + thread) * ELEMENTS * config.dtype.itemsize
                self.fetch(tiles, offset, order, keep=True)
            cute.arch.sync_threads()

    @cute.jit
    def clear(self, tiles, first):
        """Set rows from ``first`` on to zero. All threads meet in here."""
        config = self.config
        thread = cute.arch.thread_idx()[0]
        if first < config.loaded_rows:
            cute.arch.sync_threads()
            line = PANEL * config.dtype.itemsize // 16
            zero = [Uint32(0)] * 4
            for i in range(thread, config.loaded_rows * config.panels * line, config.threads):
                if i // line % config.loaded_rows >= first:
                    for tile in tiles:
                        ptx.store_shared(tile.iterator.toint() + i * 16, zero, 16)
            cute.arch.sync_threads()
