"""What configurations of the products share whose operands reach the tensor cores as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...dtypes import FLOAT32
from ..common.epilogue import OUT_DTYPES
from ..common.gpu import CLUSTERS, SHARED, Gpu
from ..common.groupings import GROUPINGS
from ..common.refuse import refuse
from ..common.rounds import rounds

__all__ = [
    "BOX",
    "GROUP",
    "ROW",
    "ROWS",
    "WIDE",
    "WIDE_GROUP",
    "ProductConfig",
    "fit",
    "why_not",
]

ROW = 128  # bytes of a row of a tile in shared memory
ROWS = 64  # of one wgmma
BOX = 128  # bytes of a row of a swizzled box, at most
BOXES = (BOX, 64, 32)
# Clusters down that are taken before the next ones across; as measured, more where so many are
# across.
GROUP, WIDE_GROUP, WIDE = 4, 8, 24
#: CTAs one after the other on a multiprocessor, and tiles that each of them has.
MOST_TURNS, LEAST_TILES = 4, 4


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """A kernel: all that its code depends on.

    Attributes:
        accumulate: add to the output.
        tile: rows and columns of the output that a CTA takes at once.
        cluster: CTAs that share tiles of B (along M) and of A (along N); two at most.
        stages: tiles of A and B in flight.
        warpgroups: that multiply, each some of the tile's rows.
        warpgroup_split_k: two warpgroups take all rows instead, and every other K block each: where
            the tiles are few and small, one waits for memory while the other works.
        split_k: CTAs of a cluster that have a part of K each, and finish some of the tile's columns
            each: where there are fewer tiles than multiprocessors.
        mma_n: columns of one wgmma.
        epilogue_stages: boxes of 64 rows x 128 bytes in which a warpgroup puts its output together.
        skew: nanoseconds by which a warpgroup starts after the one before it, so that one works
            while another stores.
        tma_store: the output is stored by TMA, where CTAs split K in pairs; else an element at a
            time.
        bias: the type of a vector that is added to each row, if there is one.
        alpha: as of ``common.epilogue.Epilogue``.
        grouping: "m": rows of A are in groups, each of which has its own B. "masked": and each
            group has an equal share of them, but fewer are multiplied. "k": columns of A and B are
            in groups, each of which has its own output. Empty: there are no groups.
    """

    out_dtype: np.dtype
    accumulate: bool = False
    tile: tuple[int, int] = (128, 256)
    cluster: tuple[int, int] = (2, 1)
    stages: int = 4
    warpgroups: int = 2
    warpgroup_split_k: bool = False
    split_k: int = 1
    mma_n: int = 256
    epilogue_stages: int = 2
    skew: int = 0
    tma_store: bool = True
    bias: np.dtype | None = None
    alpha: tuple[int, ...] = ()
    grouping: str = ""
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        refuse(self, self.wrong())

    def wrong(self) -> dict[str, Any]:
        """Fields, and whether there is no kernel with such a value."""
        rows, columns = self.tile
        return {
            "tile": rows % (ROWS * self.row_warpgroups) or columns % self.mma_n,
            "warpgroup_split_k": self.warpgroup_split_k and self.warpgroups != 2,
            "split_k": self.split_k not in CLUSTERS
            or (self.split_k > 1 and (not self.warpgroup_split_k or self.multicast_ctas > 1))
            or columns % (8 * self.split_k),
            "mma_n": self.mma_n % 16 or self.mma_n > 256,
            "cluster": self.cluster not in ((1, 1), (2, 1), (1, 2)),
            "stages": self.shared_bytes > SHARED,
            "grouping": self.grouping not in GROUPINGS
            or (self.grouped and self.split_k > 1)
            or (self.rows_grouped and self.multicast_ctas > 1),
            "epilogue_stages": self.boxes % self.epilogue_stages
            or columns * self.out_dtype.itemsize % min(BOXES),
        }

    @property
    def grouped(self) -> bool:
        return self.grouping != ""

    @property
    def rows_grouped(self) -> bool:
        """Whether tiles begin at any row of A."""
        return self.grouping in ("m", "masked")

    @property
    def threads(self) -> int:
        return 128 * (1 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        """How many a thread that loads has, and one that multiplies."""
        return {1: (56, 240), 2: (24, 240), 3: (32, 160)}[self.warpgroups]

    @property
    def multicast_ctas(self) -> int:
        """How many CTAs load tiles of A or of B for each other."""
        return self.cluster[0] * self.cluster[1]

    @property
    def cluster_size(self) -> int:
        """How many CTAs a cluster has: those, or those that split K."""
        return self.multicast_ctas * self.split_k

    @property
    def reduce_bytes(self) -> int:
        """Room for the accumulators of the other warpgroup; of all of a cluster's with split-K."""
        tile = 4 * self.tile[0] * self.tile[1]
        return (tile if self.split_k == 1 else 2 * tile) if self.warpgroup_split_k else 0

    @property
    def own_columns(self) -> int:
        """How many columns of a tile a CTA stores."""
        return self.tile[1] // self.split_k

    @property
    def k_turns(self) -> int:
        """Warpgroups that take every so many-th K block."""
        return 2 if self.warpgroup_split_k else 1

    @property
    def row_warpgroups(self) -> int:
        """That share the rows of a tile, and store them."""
        return 1 if self.warpgroup_split_k else self.warpgroups

    @property
    def row_steps(self) -> int:
        """wgmmas that a warpgroup needs to go down its rows."""
        return self.tile[0] // (ROWS * self.row_warpgroups)

    @property
    def mma_tiles(self) -> list[tuple[int, int]]:
        """Of a warpgroup, one for each wgmma: steps down the rows and across the columns."""
        return [(i, j) for i in range(self.row_steps) for j in range(self.column_steps)]

    def place(self, row_step: int, column: int) -> tuple[int, int]:
        """Where a thread has its four values of the eight columns from ``column`` on: which wgmma,
        and the first of them."""
        mma = row_step * self.column_steps + column // self.mma_n
        return mma, column % self.mma_n // 2

    @property
    def reduces(self) -> bool:
        """Whether what the output holds is added where it is, by TMA, which does so in its type."""
        return self.accumulate and self.stores_tiles and self.out_dtype == FLOAT32

    @property
    def stores_tiles(self) -> bool:
        """Whether the output is put together in shared memory, and stored by TMA."""
        return self.tma_store and self.split_k == 1

    @property
    def box_bytes(self) -> int:
        """Of a row of the output that one instruction stores."""
        row = self.tile[1] * self.out_dtype.itemsize
        return next((nbytes for nbytes in BOXES if row % nbytes == 0), min(BOXES))

    @property
    def box_columns(self) -> int:
        return self.box_bytes // self.out_dtype.itemsize

    @property
    def boxes(self) -> int:
        """Of a warpgroup's output."""
        return self.row_steps * self.tile[1] // self.box_columns

    @property
    def output_bytes(self) -> int:
        """Room in shared memory to put the output together."""
        boxes = self.row_warpgroups * self.epilogue_stages if self.stores_tiles else 0
        return boxes * ROWS * self.box_bytes

    @property
    def column_steps(self) -> int:
        return self.tile[1] // self.mma_n

    def clusters(self, m: int, n: int) -> tuple[int, int]:
        """How many there are down and across an output (M, N)."""
        rows, columns = self.tile
        down, across = self.cluster
        return -(-m // (rows * down)), -(-n // (columns * across))

    def group(self, m: int, n: int) -> int:
        """Clusters down that are taken before the next ones across."""
        return GROUP if self.clusters(m, n)[1] < WIDE else WIDE_GROUP

    def shared_ctas(self, m: int, n: int, gpu: Gpu) -> int:
        """How many CTAs to launch for an output (M, N) beside another kernel, as NCCL's, which
        holds multiprocessors: where tiles are many, several for each, one after the other. Those
        that find no multiprocessor free then have few tiles, and start wherever others end; of one
        for each, the last would start when the first have ended, and the product take twice as
        long."""
        down, across = self.clusters(m, n)
        at_once = max(gpu.multiprocessors // self.cluster_size, 1)
        turns = min(max(down * across // (at_once * LEAST_TILES), 1), MOST_TURNS)
        return gpu.multiprocessors * turns

    def runs_at_once(self, m: int, n: int, gpu: Gpu) -> bool:
        """Whether all clusters do, as they must where CTAs split K."""
        return math.prod(self.clusters(m, n)) <= gpu.max_active_clusters(self.cluster_size)

    @property
    def block_k(self) -> int:
        """Columns of a stage."""
        raise NotImplementedError

    @property
    def stage_bytes(self) -> int:
        return sum(self.tile) * ROW

    @property
    def raw_bytes(self) -> int:
        """Room for an operand as it is in memory, where the kernel makes another type of it."""
        return 0

    @property
    def shared_bytes(self) -> int:
        """With the barriers of each stage."""
        stages = self.stages * (self.stage_bytes + 8 * (1 + rounds(self.stages, self.k_turns)))
        ring = 128 if self.grouped else 0  # ``tile_ring``
        return stages + self.output_bytes + self.reduce_bytes + self.raw_bytes + ring + 256


def fit(config: ProductConfig, **fields: Any) -> Any:
    """The configuration with other ``fields``, and as much room for its output as there is."""
    least: ProductConfig = replace(config, epilogue_stages=1, **fields)
    if not least.stores_tiles:
        return least
    room = SHARED - least.shared_bytes + least.output_bytes
    fitting = (n for n in (4, 3, 2) if least.boxes % n == 0 and n * least.output_bytes <= room)
    return replace(least, epilogue_stages=next(fitting, 1))


def why_not(out_dtype: np.dtype, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    if arch != "sm_90a":
        return f"architecture {arch}: these kernels are for sm_90a"
    if out_dtype not in OUT_DTYPES:
        return f"out_dtype {out_dtype}: there are kernels for {', '.join(map(str, OUT_DTYPES))}"
    return ""
