"""How long an FP8 product takes in tiles of one kind: as tensor cores and as memory let it.

A K block of a tile takes a multiprocessor some time if it is there, and the L2 cache some time to
bring, the more, the more CTAs ask at once. Tiles run in waves, the last of which has fewer. All of
it takes no less than DRAM takes for the operands and the output. Of two times of which the longer
one counts, the shorter one adds a little where both are alike: ``_longer``.

``benchmarks/fit_tiles.py`` fits the constants to what ``benchmarks/gpu_tiles.py`` measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..common.gpu import Gpu
from .product_config import ROW, ProductConfig

__all__ = ["COSTS", "Costs", "Tiling"]

_WAVES_OR_DRAM, _WORK_OR_L2 = 3.5, 3.0  # exponents: the larger, the less the shorter time adds


@dataclass(frozen=True, slots=True)
class Costs:
    """What all tiles have in common.

    Attributes:
        a, b: by cluster, what a row of A and of B counts as that a CTA has, though others of the
            cluster may have loaded it.
        again: more for each doubling of the clusters that load a row of B, one below the other.
        l2_rate: bytes that L2 gives a nanosecond.
        load_rate: bytes that a CTA takes, at most.
        start_ns: of DRAM, until the first bytes are there.
        split_ns: for each of the CTAs that split K.
    """

    a: Mapping[tuple[int, int], float]
    b: Mapping[tuple[int, int], float]
    again: float
    l2_rate: float
    load_rate: float
    start_ns: float
    split_ns: float


COSTS = Costs(
    a={(1, 1): 0.667, (2, 1): 0.823, (1, 2): 0.628},
    b={(1, 1): 0.738, (2, 1): 0.516, (1, 2): 0.759},
    again=0.06,
    l2_rate=10850,
    load_rate=121,
    start_ns=1136,
    split_ns=719,
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to cut a product into tiles, and what it costs.

    Attributes:
        config: with one epilogue stage.
        k_block_ns: nanoseconds of a K block that is in shared memory.
        tile_ns: of a tile, beside its K blocks.
    """

    config: ProductConfig
    k_block_ns: float
    tile_ns: float
    costs: Costs = COSTS

    def loads_few(self, m: int) -> bool:
        """Whether there are kernels that load no more than ``m`` rows of A."""
        return self.config.multicast_ctas == 1 and m < self.config.tile[0]

    def is_legal(self, m: int, n: int, gpu: Gpu) -> bool:
        """Whether there are rows for the CTAs of a cluster; and whether all clusters run at once
        where CTAs split K."""
        config = self.config
        if config.split_k > 1:
            return config.runs_at_once(m, n, gpu)
        return -(-m // config.tile[0]) >= config.cluster[0]

    def nanoseconds(self, shape: tuple[int, int, int], block_k: int, gpu: Gpu) -> float:
        """An estimate for a product of ``shape`` (M, N, K), in K blocks of ``block_k``; without
        what is the same for all tiles."""
        (m, n, k), config, costs = shape, self.config, self.costs
        k_blocks = -(-k // (block_k * config.split_k))
        at_once = gpu.max_active_clusters(config.cluster_size)
        down, across = config.clusters(m, n)
        waves, rest = divmod(down * across, at_once)
        rows = m if self.loads_few(m) else config.tile[0]
        time = waves * self._wave(rows, down, k_blocks, at_once)
        if rest:
            time += self._wave(rows, down, k_blocks, rest)
        if config.split_k > 1:
            time += costs.split_ns * config.split_k
        nbytes = m * k + n * k + config.out_dtype.itemsize * m * n
        return _longer(time, nbytes / gpu.dram_rate + costs.start_ns, _WAVES_OR_DRAM)

    def _wave(self, rows: int, down: int, k_blocks: int, clusters: int) -> float:
        """Nanoseconds of tiles that so many clusters take at once, where a CTA loads ``rows`` of A
        and ``down`` clusters are one below the other."""
        config, costs = self.config, self.costs
        counted = rows * costs.a[config.cluster] + config.tile[1] * costs.b[config.cluster]
        counted *= ROW * (1 + costs.again * math.log2(down))
        rate = min(costs.load_rate, costs.l2_rate / (clusters * config.cluster_size))
        return k_blocks * _longer(self.k_block_ns, counted / rate, _WORK_OR_L2) + self.tile_ns


def _longer(one: float, other: float, exponent: float) -> float:
    longer, shorter = max(one, other), min(one, other)
    return float(longer * (1 + (shorter / longer) ** exponent) ** (1 / exponent))
