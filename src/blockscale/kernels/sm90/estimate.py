"""How long a product takes in tiles of one kind: as tensor cores and as memory let it.

A K block of a tile takes a multiprocessor some time if it is there, and the L2 cache some time to
bring, the more, the more CTAs ask at once. Tiles run in waves, the last of which has fewer. All of
it takes no less than DRAM takes for the operands and the output. Of two times of which the longer
one counts, the shorter one adds a little where both are alike: ``_longer``.

``benchmarks/fit_tiles.py`` fits the constants to what ``benchmarks/gpu_tiles.py`` measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..common.gpu import Gpu
from .product_config import ROW, ProductConfig

__all__ = ["Costs", "Tiling", "by_estimate", "by_k_groups"]

_WAVES_OR_DRAM, _WORK_OR_L2 = 3.5, 4.0  # exponents: the larger, the less the shorter time adds


@dataclass(frozen=True, slots=True)
class Costs:
    """What all tiles have in common.

    Attributes:
        a: what a row of A that a CTA loads counts, of a row of B: neighbours, which share a
            multiprocessor's TPC, mostly share rows of B.
        l2_rate: bytes of rows of B that L2 gives a nanosecond.
        start_ns: of DRAM, until the first bytes are there.
        split_ns: for each of the CTAs that split K.
    """

    a: float
    l2_rate: float
    start_ns: float
    split_ns: float


@dataclass(frozen=True, slots=True)
class Tiling:
    """A way to cut a product into tiles, and what it costs.

    Attributes:
        config: with one epilogue stage; ``product_config.fit`` makes more where there is room.
        k_block_ns: nanoseconds of a K block that is in shared memory.
        tile_ns: of a tile, beside its K blocks.
        stored_ns: the same of one that is not added to fp32, where ``tile_ns`` is of one that is.
        stored_stages: its stages, where they are fewer, beside which 16-bit output has room for a
            whole tile, which is stored while the next one is multiplied.
    """

    config: ProductConfig
    k_block_ns: float
    tile_ns: float
    costs: Costs
    stored_ns: float = 0
    stored_stages: int = 0

    def stored(self, out_dtype: np.dtype, accumulate: bool) -> Tiling:
        """The same way to cut a product whose tiles are stored so, and not added to fp32."""
        stages = self.config.stages
        if self.stored_stages and out_dtype.itemsize == 2:
            stages = self.stored_stages
        config = replace(self.config, out_dtype=out_dtype, accumulate=accumulate, stages=stages)
        return replace(self, config=config, tile_ns=self.stored_ns)

    def is_legal(self, m: int, n: int, gpu: Gpu) -> bool:
        """Whether a cluster fits, and there are rows for its CTAs; and whether all clusters run at
        once where CTAs split K."""
        config = self.config
        if config.split_k > 1:
            return config.runs_at_once(m, n, gpu)
        if not gpu.max_active_clusters(config.cluster_size):
            return False
        return -(-m // config.tile[0]) >= config.cluster[0]

    def nanoseconds(
        self, shape: tuple[int, int, int], block_k: int, gpu: Gpu, groups: int = 1
    ) -> float:
        """An estimate for a product of ``shape`` (M, N, K), in K blocks of ``block_k``; without
        what is the same for all tiles. ``groups``: products of so many rows each in the mean."""
        (m, n, k), config, costs = shape, self.config, self.costs
        k_blocks = -(-k // (block_k * config.split_k))
        at_once = gpu.max_active_clusters(config.cluster_size)
        down, across = config.clusters(m, n)
        rows = min(m, config.tile[0])
        if groups == 1:
            waves, rest = divmod(down * across, at_once)
            time = waves * self._wave(rows, k_blocks, at_once)
            if rest:
                time += self._wave(rows, k_blocks, rest)
        else:  # in the mean half a tile of a group is missing, and half a wave
            tiles = groups * max(1, m / config.tile[0] + 0.5) * across
            waves = max(1, tiles / at_once + 0.5)
            time = waves * self._wave(rows, k_blocks, min(round(tiles), at_once))
        if config.split_k > 1:
            time += costs.split_ns * config.split_k
        output = m * n * config.out_dtype.itemsize * (2 if config.accumulate else 1)
        nbytes = groups * ((m + n) * k * ROW // block_k + output)
        return _longer(time, nbytes / gpu.dram_rate + costs.start_ns, _WAVES_OR_DRAM)

    def _wave(self, rows: int, k_blocks: int, clusters: int) -> float:
        """Nanoseconds of tiles that so many clusters take at once, where a CTA has ``rows``."""
        config, costs = self.config, self.costs
        loaded = ROW * (rows * costs.a + config.tile[1])
        l2_ns = loaded * clusters * config.cluster_size / costs.l2_rate
        return k_blocks * _longer(self.k_block_ns, l2_ns, _WORK_OR_L2) + self.tile_ns


def _longer(one: float, other: float, exponent: float) -> float:
    longer, shorter = max(one, other), min(one, other)
    return float(longer * (1 + (shorter / longer) ** exponent) ** (1 / exponent))


def by_estimate(
    tilings: Iterable[Tiling],
    shape: tuple[int, int, int],
    block_k: int,
    gpu: Gpu,
    groups: int = 1,
) -> list[ProductConfig]:
    """Configurations of those that are legal, the one of least estimated time first."""
    suiting = (each for each in tilings if each.is_legal(*shape[:2], gpu))
    ranked = sorted(suiting, key=lambda each: each.nanoseconds(shape, block_k, gpu, groups))
    return [each.config for each in ranked]


def by_k_groups(
    tilings: Iterable[Tiling], shape: tuple[int, int, int], groups: int, block_k: int, gpu: Gpu
) -> list[ProductConfig]:
    """The same for products (M, N) of each of ``groups`` of K columns in all, as if groups were
    alike, and their products one below the other. CTAs do not split K."""
    m, n, k = shape

    def nanoseconds(tiling: Tiling) -> float:
        rows = tiling.config.tile[0] * tiling.config.cluster[0]
        down = groups * -(-m // rows) * rows
        return tiling.nanoseconds((down, n, -(-k // groups)), block_k, gpu)

    suiting = (each for each in tilings if each.config.split_k == 1 and each.is_legal(m, n, gpu))
    return [each.config for each in sorted(suiting, key=nanoseconds)]
