# mypy: ignore-errors
"""The global scale of a tensor: the largest finite magnitude of each tile, then of all of them."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32, cute, range_constexpr

from ...formats import E4M3, get_format
from ...rounding import FP32_ONE, MIN_GLOBAL, ROOM
from ..common import ptx
from ..common.pdl import pdl_wait
from ..common.tensor_specs import HostFunction, any_tensor
from .config import ACROSS, BAND, PANEL, PRODUCERS, Config
from .groups import TileRows
from .kernel import any_signs, encoder_of, fake_sources
from .tile import ELEMENTS, STRIP_LANES, Loaded, Loading, Tiles, lane_order, load_words
from .transform import Transform

__all__ = ["Amax", "host_function"]

_THREADS = 1024  # of the one block that reduces the tiles' maxima


class Amax:
    """Two kernels: one of a block a tile, one of a single block."""

    def __init__(self, config: Config):
        self.config = config
        self.format = get_format(config.format)
        self.tiles = Tiles(config)
        self.encoder = encoder_of(config)

    @cute.jit
    def __call__(self, sources, partials, scale, weights, signs, stream):
        """Launch. ``sources`` (M, K) each; ``partials`` int32, one for each tile; ``scale`` ()
        fp32, the result; ``weights`` (M,) fp32, or None; ``signs`` of a transform, or None.
        """
        config = self.config
        atoms, views = self.tiles.descriptors(sources)
        rows, columns = sources[0].shape
        down = cute.ceil_div(rows, config.tile_rows)
        across = cute.ceil_div(columns, config.tile_columns)
        self.find(atoms, views, sources, partials, weights, signs).launch(
            grid=(down * across, 1, 1), block=(config.threads, 1, 1), stream=stream, use_pdl=True
        )
        self.combine(partials, scale).launch(
            grid=(1, 1, 1), block=(_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def find(self, atoms, views, sources, partials, weights, signs):
        config = self.config
        pdl_wait()
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        across = cute.ceil_div(sources[0].shape[1], config.tile_columns)
        row, column = block // across * config.tile_rows, block % across * config.tile_columns
        memory = cutlass.memory.SmemAllocator()
        tiles, barrier = self.tiles.allocate(memory)
        found = memory.allocate_array(cutlass.Uint32, config.warps, byte_alignment=16).toint()
        rows = TileRows(row, sources[0].shape[0], None, None, None)
        loaded = Loaded(tiles, rows, column, sources[0].shape[1], weights)
        self.tiles.start(Loading(sources, atoms, views, barrier), loaded)
        transform = Transform.of(config, signs) if config.hadamard else None
        self.tiles.wait(barrier)
        self.tiles.produce(loaded)
        states = []
        for part in self.tiles.parts(sources, tiles, column):
            for words in self.words(part.address, thread, transform):
                state = self.encoder.finite(words[0])
                for word in words[1:]:
                    state = self.encoder.merge(state, self.encoder.finite(word))
                states.append(self.encoder.amax(state))
        amax = _block_maximum(cutlass.max(*states), found, config.warps)
        if thread == 0:
            ptx.store_global(partials.iterator.toint() + cutlass.Int64(block) * 4, [amax], 4)

    def words(self, address, thread, transform):
        """What a lane takes of a tile, some words at a time, transformed if that is asked for."""
        config, itemsize = self.config, self.config.dtype.itemsize
        if transform is not None and config.along == -2:
            yield from self.columns(address, thread, transform)
            return
        order = lane_order(config, thread % STRIP_LANES)
        step = config.threads * ELEMENTS
        for i in range(config.loaded_rows * config.tile_columns // step):
            offset = (i * config.threads + thread) * ELEMENTS * itemsize
            words = load_words(address + offset, itemsize, order)
            yield words if transform is None else transform.of_row(words)

    def columns(self, address, thread, transform):
        """Words of two columns of a lane, as ``PackedColumns`` takes them: of half of a panel of a
        band, or of 16 columns of all bands."""
        config, itemsize = self.config, self.config.dtype.itemsize
        bands, size = config.loaded_rows // BAND, min(config.hadamard, BAND)
        for i in range(bands * config.panels * 2 // config.warps):
            unit, lane = i * config.warps + thread // 32, thread % 32
            if config.hadamard > BAND:
                column = (unit * ACROSS + lane % ACROSS) * 2
                start = (lane // ACROSS * BAND * PANEL + column) * itemsize
            else:
                half, band = unit // bands, unit % bands
                row = half // 2 * config.loaded_rows + band * BAND
                start = (row * PANEL + half % 2 * (PANEL // 2) + lane * 2) * itemsize
            for first in range(0, BAND, size):
                rows = [
                    ptx.load_shared(address + start + (first + j) * PANEL * itemsize, 2 * itemsize)
                    for j in range(size)
                ]
                yield [word for row in transform.of_columns(rows) for word in row]

    @cute.kernel
    def combine(self, partials, scale):
        pdl_wait()
        thread = cute.arch.thread_idx()[0]
        memory = cutlass.memory.SmemAllocator()
        found = memory.allocate_array(cutlass.Uint32, _THREADS // 32, byte_alignment=16).toint()
        amax = Uint32(0)
        for i in range(thread, partials.shape[0], _THREADS):
            each = ptx.load_global(partials.iterator.toint() + cutlass.Int64(i) * 4, 4)
            amax = cutlass.max(amax, each)
        amax = _block_maximum(amax, found, _THREADS // 32)
        if thread == 0:
            largest = Float32(E4M3.max * self.format.element.max)
            quotient = ptx.divide(amax.bitcast(Float32), largest).bitcast(Uint32)
            value = cutlass.max(quotient, Uint32(MIN_GLOBAL))
            value = Uint32(cutlass.select_(amax == Uint32(0), Uint32(FP32_ONE), value))
            room = Float32(ROOM if self.config.room else 1)
            value = ptx.multiply(value.bitcast(Float32), room).bitcast(Uint32)
            ptx.store_global(scale.iterator.toint(), [value], 4)


@cute.jit
def _block_maximum(value, shared, warps: cutlass.Constexpr):
    """The largest of every thread's values, in thread 0; ``shared`` has a word for each warp."""
    thread = cute.arch.thread_idx()[0]
    for i in range_constexpr(5):
        value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, 1 << i))
    if thread % 32 == 0:
        ptx.store_shared(shared + thread // 32 * 4, [value], 4)
    cute.arch.sync_threads()
    for i in range_constexpr(warps):
        value = cutlass.max(value, ptx.load_shared(shared + i * 4, 4)[0])
    return value


def host_function(config: Config):
    """The host function of the two kernels, which takes tensors of any shape."""
    return HostFunction(
        config.arch,
        Amax(config),
        fake_sources(config),
        any_tensor(cutlass.Int32, 1, 4),
        any_tensor(Float32, 0, 4),
        any_tensor(Float32, 1, 4) if PRODUCERS[config.producer].weighted else None,
        any_signs(config) or None,
    )
