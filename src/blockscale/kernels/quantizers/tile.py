# mypy: ignore-errors
"""A tile of each source in shared memory, and the tiles that a producer makes of them.

A CTA loads its tiles by one wait on TMA, as panels of 128 columns, or gathers their rows. A tile
hangs over the edges of its matrix: it reads zeros there, whose scales and elements are the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr, select_
from cutlass.cute.nvgpu import cpasync

from ..common import ptx
from ..common.norms import NORMALIZE
from ..common.numeric import NAN_WORD, NUMERIC
from ..common.swiglu import PRODUCE
from .config import DOT, PANEL, PRODUCERS, Config
from .groups import TileRows
from .norm_factors import norm_factors

__all__ = [
    "ELEMENTS",
    "STRIP_LANES",
    "Loaded",
    "Loading",
    "Part",
    "Tiles",
    "lane_order",
    "load_words",
]

ELEMENTS = 16  # of one lane at a time
_PRODUCE = {**PRODUCE, **NORMALIZE}
STRIP_LANES = PANEL // ELEMENTS


@dataclass(frozen=True)
class Part:
    """A tile to be quantized: its address in shared memory, its first column in the tensor, and
    the column after the last one that belongs to this part of the tensor.
    """

    address: Any
    column: Any
    stop: Any


@dataclass(frozen=True)
class Loading:
    """What tiles are loaded from.

    Attributes:
        sources: in global memory.
        atoms, views: of them, as ``Tiles.descriptors`` made them.
        barrier: an mbarrier, for TMA.
        indices: (rows,) int32, the rows that are gathered, if they are.
        matrix: which one of a batch, if it is one.
    """

    sources: Any
    atoms: Any
    views: Any
    barrier: Any
    indices: Any = None
    matrix: Any = None


@dataclass(frozen=True)
class Loaded:
    """What a producer makes parts of.

    Attributes:
        tiles: in shared memory, one of each source.
        rows, column: which rows of the tensor, and from which column on, they are.
        width: columns of a source.
        weights: (M,) fp32 of rows, for producers that are weighted.
        sums: (partial sums, M) fp32, where the weights' gradients go, for those that have any.
    """

    tiles: list
    rows: TileRows
    column: Any
    width: Any
    weights: Any = None
    sums: Any = None


def lane_order(config: Config, lane):
    """The order in which a lane reads 16 elements: what it reads as its i-th is element i XOR this.

    Lanes start 16 elements apart, so that four of them (fp32), or two, begin in the same banks of
    shared memory. In this order eight lanes read 16 bytes each from all banks at once. None: in
    the order of the elements, where putting codes back costs more than the banks do.
    """
    itemsize = config.dtype.itemsize
    busy = config.producer != "load" or config.spec.bits < 8  # with instructions, not with banks
    if (itemsize == 2 and busy) or config.hadamard:  # whose sums have an order, too
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
        if not config.aligned or config.gather:
            return [None] * len(sources), [None] * len(sources)
        box = (config.box_rows, PANEL)
        layout = cute.make_layout(box, stride=(PANEL, 1))
        op = cpasync.CopyBulkTensorTileG2SOp()
        if config.batched:  # rows and columns first
            sources = [
                cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0])) for x in sources
            ]
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
    def start(self, loading, loaded):
        """Start to load the tiles of ``loaded``. All threads meet in here."""
        config, sources, barrier = self.config, loading.sources, loading.barrier
        tiles, rows, column = loaded.tiles, loaded.rows, loaded.column
        if const_expr(config.aligned and config.gather):
            self.gather(sources[0], loading.indices, tiles[0].iterator.toint(), rows, column)
        elif const_expr(config.aligned):
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
                            self.copy(i, box, loading, loaded)
        else:
            for i in range_constexpr(self.shape.sources):
                self.load(sources[i], tiles[i].iterator.toint(), rows, column, loading.indices)
            cute.arch.sync_threads()

    @cute.jit
    def copy(self, i: cutlass.Constexpr, box: cutlass.Constexpr, loading, loaded):
        """Load box ``box`` of each panel of tile ``i`` by TMA."""
        shape = (self.config.box_rows, PANEL)
        row, column = loaded.rows.start + box * self.config.box_rows, loaded.column
        atom, tile = loading.atoms[i], loaded.tiles[i]
        for panel in range_constexpr(self.config.panels):
            # the row need not be a multiple of the box's: experts start anywhere
            at, first = (row, column + panel * PANEL), (0, 0)
            if const_expr(self.config.batched):
                at, first = (*at, loading.matrix), (0, 0, 0)
            moved = cute.domain_offset(at, loading.views[i])
            target = cute.local_tile(tile[(None, None, panel)], shape, (box, 0))
            shared, piece = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(target, 0, 2),
                cute.group_modes(cute.local_tile(moved, shape, first), 0, 2),
            )
            cute.copy(atom, piece, shared, tma_bar_ptr=loading.barrier)

    @cute.jit
    def gather(self, x, indices, address, rows, column):
        """Start to copy a tile's rows from where ``indices`` say they are, 16 bytes a thread."""
        config, size = self.config, self.config.dtype.itemsize
        chunk = 16 // size
        lanes = PANEL // chunk
        base, pitch = x.iterator.toint(), Int64(x.stride[0]) * size
        thread = cute.arch.thread_idx()[0]
        across, step = thread % lanes * chunk, config.threads // lanes
        count = config.loaded_rows * config.panels // step
        strips = [i * step + thread // lanes for i in range(count)]
        # all of them first: a copy waits for its index
        found = [
            self.source_row(indices, rows.start + strip % config.loaded_rows, rows.stop, x.shape[0])
            for strip in strips
        ]
        for strip, (row, known) in zip(strips, found, strict=True):
            first = column + strip // config.loaded_rows * PANEL + across
            nbytes = cutlass.max(cutlass.min((x.shape[1] - first) * size, Int32(16)), Int32(0))
            target = address + (strip * PANEL + across) * size
            nbytes = Int32(select_(row >= 0, nbytes, Int32(0)))
            first = Int32(select_(nbytes > 0, first, Int32(0)))
            source = base + Int64(cutlass.max(row, Int32(0))) * pitch + first * size
            self.copy_async(target, source, nbytes, known)

    @cute.jit
    def copy_async(self, target, source, nbytes, known):
        """Start to copy 16 bytes, of which ``nbytes`` are there and others zero; NaNs, instead, of
        a row that is not ``known``."""
        if known:
            ptx.copy_async(target, source, nbytes)
        else:
            ptx.store_shared(target, [Uint32(NAN_WORD)] * 4, 16)

    @cute.jit
    def source_row(self, indices, row, stop, rows):
        """Where row ``row`` lies among ``rows`` of a source, -1 from ``stop`` on; and whether it
        lies anywhere."""
        found = Int32(-1)
        if row < stop:
            found = Int32(ptx.load_global(indices.iterator.toint() + Int64(row) * 4, 4))
        known = (found >= 0 and found < rows) or row >= stop
        return Int32(select_(known, found, Int32(-1))), known

    @cute.jit
    def load(self, x, address, rows, start, indices):
        """Load a tile an element at a time: for strides and addresses that are not aligned."""
        config, size = self.config, self.config.dtype.itemsize
        base, stride = x.iterator.toint(), Int64(x.stride[0])
        thread = cute.arch.thread_idx()[0]
        for i in range(config.loaded_rows * config.tile_columns // config.threads):
            index = i * config.threads + thread
            strip = index // PANEL
            row = rows.start + strip % config.loaded_rows
            column = start + strip // config.loaded_rows * PANEL + index % PANEL
            value = Uint32(0)
            if const_expr(config.gather):
                row, known = self.source_row(indices, row, rows.stop, x.shape[0])
                value = Uint32(select_(known, value, Uint32(NAN_WORD)))
                row = Int32(select_(row >= 0, row, x.shape[0]))
            if row < x.shape[0] and column < x.shape[1]:
                value = ptx.load_global(base + (row * stride + column) * size, size)
            ptx.store_shared(address + index * size, [value], size)

    @cute.jit
    def wait(self, barrier):
        if const_expr(self.config.aligned and self.config.gather):
            ptx.wait_async()
            cute.arch.sync_threads()
        elif const_expr(self.config.aligned):
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

    def fetch(self, loaded, offset, order=None, keep: bool = False, made: bool = False) -> list:
        """16 elements of each part, as words, ``offset`` bytes into the tile, in the lane's
        ``order``. ``keep``: put them there, too, where a producer makes them; ``made``: it did so
        before.
        """
        config, itemsize = self.config, self.config.dtype.itemsize
        addresses = [tile.iterator.toint() + offset for tile in loaded.tiles]
        if made or config.producer == "load":
            return [load_words(addresses[i], itemsize, order) for i in range(self.shape.parts)]
        words = [load_words(address, itemsize, order) for address in addresses]
        blackwell, weights = config.arch.startswith("sm_10"), None
        if self.shape.weighted:
            strip, column = offset // (PANEL * itemsize), loaded.column + offset // itemsize % PANEL
            row = loaded.rows.start + strip % config.loaded_rows
            column = column + strip // config.loaded_rows * PANEL
            weights = self.factors(loaded, row, column, order)
        produce = _PRODUCE[config.producer]
        parts, products = produce(words, config.dtype, blackwell, weights)
        if products is not None and loaded.sums is not None:
            self.add_up(products, loaded.sums, (column // DOT, row), loaded.rows.stop)
        if keep:
            for part, address in zip(parts, addresses, strict=False):
                for i in range(0, len(part), 4):
                    place = 4 * i if order is None else Int32(order * itemsize ^ 4 * i)
                    ptx.store_shared(address + place, part[i : i + 4], 16)
        return parts

    def factors(self, loaded, row, column, order):
        """What 16 elements are multiplied by: the weight of their row, and of padding one; or what
        a norm has."""
        if self.config.producer in NORMALIZE:
            return norm_factors(self.config.producer, loaded, row, column, order)
        weight = self.weight(loaded.weights, row, loaded.rows.stop)
        if self.shape.parts > 1:  # of whole panels
            return [weight] * ELEMENTS
        columns = [column + (i if order is None else Int32(order ^ i)) for i in range(ELEMENTS)]
        return [Float32(select_(c < loaded.width, weight, Float32(1.0))) for c in columns]

    @cute.jit
    def weight(self, weights, row, stop):
        """That of a row; one from ``stop`` on, where there are zeros."""
        weight = Float32(1.0)
        if row < stop:
            weight = ptx.load_global_float(weights.iterator.toint() + Int64(row) * 4)
        return weight

    @cute.jit
    def add_up(self, products, sums, where, stop):
        """Add up products of 64 columns, 16 of each lane, by a binary tree of neighbours."""
        piece, row = where
        while const_expr(len(products) > 1):
            products = [ptx.add(*products[i : i + 2]) for i in range(0, len(products), 2)]
        total = products[0]
        for distance in (1, 2):
            total = ptx.add(total, cute.arch.shuffle_sync_bfly(total, distance))
        if cute.arch.lane_idx() % (DOT // ELEMENTS) == 0 and row < stop and piece < sums.shape[0]:
            target = sums.iterator.toint() + (Int64(piece) * sums.shape[1] + row) * 4
            ptx.store_global(target, [total.bitcast(Uint32)], 4)

    @cute.jit
    def produce(self, loaded):
        """Replace the first of the tiles by all that the producer makes. All threads meet here."""
        config = self.config
        if const_expr(config.producer != "load"):
            thread = cute.arch.thread_idx()[0]
            step = config.threads * ELEMENTS
            order = lane_order(config, thread % STRIP_LANES)
            for i in range_constexpr(config.loaded_rows * config.tile_columns // step):
                offset = (i * config.threads + thread) * ELEMENTS * config.dtype.itemsize
                self.fetch(loaded, offset, order, keep=True)
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
