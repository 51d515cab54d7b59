# mypy: ignore-errors
"""Epilogues of both products of a mega MoE: the first one's result is quantized for the second one,
whose result goes to the ranks that the tokens came from."""

from __future__ import annotations

from cutlass import Int32, Int64, cute, range_constexpr
from cutlass import min as least

from ..common import ptx as common
from ..mega.peers import Peers
from ..ranks.rows import of_lane
from ..ranks.signals import add_release
from . import ptx
from .epilogue import Epilogue
from .mega_config import MegaConfig
from .quantizing import QuantizingEpilogue
from .roles import Pipeline

__all__ = ["MegaEpilogue", "ReturnEpilogue"]

_ROW_BYTES = 128  # of a row that is put together in shared memory
_CHUNK = 16  # bytes that a thread stores at once


class ReturnEpilogue(Epilogue):
    """Stores rows where their ranks add them up. ``staging``: the address of 128 rows of 128 bytes
    of shared memory."""

    def __init__(self, pipeline: Pipeline, staging, alpha, peers: Peers):
        super().__init__(pipeline, None, (None, None, alpha))
        self.staging, self.peers = staging, peers

    @cute.jit
    def store(self, values, i, warp, tile, column):
        peers, sizes, lane = self.peers, self.peers.sizes, cute.arch.lane_idx()
        values = self.scale(values, None, self.output[2], column, tile.group)
        rows, base = tile.rows - warp * 32, self.staging + warp * (32 * _ROW_BYTES)
        if rows > 0:
            self.put(values, base + lane * _ROW_BYTES, lane)
            cute.arch.sync_warp()
            row = tile.first + warp * 32 + least(lane, rows - 1)
            origin = peers.word("origins", row)
            start = Int64(origin % sizes.pairs) * sizes.hidden + column
            address = peers.of_peer(origin // sizes.pairs, "results") + start * 2
            chunks = _ROW_BYTES // _CHUNK
            chunk = lane % chunks
            for part in range_constexpr(chunks):
                other = part * (32 // chunks) + lane // chunks
                words = common.load_shared(
                    base + other * _ROW_BYTES + (chunk ^ other % 8) * _CHUNK, _CHUNK
                )
                inside = Int32(other < rows) & Int32(column + chunk * (_CHUNK // 2) < sizes.hidden)
                there = of_lane(address, other) + chunk * _CHUNK
                ptx.st_global_v4(there, [Int32(word) for word in words], inside)
            cute.arch.sync_warp()


class MegaEpilogue(Epilogue):
    """Stores tiles of both products, and says so to those that wait for it."""

    def __init__(
        self, config: MegaConfig, peers: Peers, up: QuantizingEpilogue, down: ReturnEpilogue
    ):
        super().__init__(up.pipeline, up.store_tiles, up.output)
        self.mega, self.peers, self.up, self.down = config, peers, up, down

    def begin(self) -> None:
        self.up.begin()

    @cute.jit
    def store_acc(self, acc, which, free, warp, tile):
        peers, lane = self.peers, cute.arch.lane_idx()
        if tile.second == 0:
            if warp == 0 and lane == 0:  # all that it reads has been loaded
                add_release(peers.signal("up_done", tile.slot), 1, "gpu")
            self.up.store_acc(acc, which, free, warp, tile)
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.sync_warp()
            if lane == 0:
                add_release(peers.signal("down_full", tile.slot), 1, "gpu")
        else:
            if warp == 0 and lane == 0:
                add_release(peers.signal("down_done", tile.slot), 1, "gpu")
            self.down.store_acc(acc, which, free, warp, tile)
