"""What to compile for a product: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import BFLOAT16
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from ..common.loadable import rows_to_load
from . import product_config
from .estimate import Tiling
from .product_config import Candidate, ProductConfig, by_estimate, fit

__all__ = ["BLOCK_K", "Config", "candidates", "choose_config", "why_not"]

BLOCK_K = 128  # columns of a scale, and of a stage
FORMATS = ("fp8_1x128", "fp8_128x128")  # of B; A has the first


@dataclass(frozen=True, slots=True)
class Config(ProductConfig):
    """A kernel of FP8 with scales: all that its code depends on.

    Attributes:
        mma_n: columns of one wgmma. Four of them, one K block, are a partial sum.
        b_block: of a scale of B: 128 x 128, or 1 x 128.
        unroll: K blocks in the body of the loop.
        loaded_rows: of A, in each tile; 0 for all. Fewer where there are no more.
    """

    stages: int = 3
    mma_n: int = 128
    epilogue_stages: int = 4
    b_block: tuple[int, int] = (128, 128)
    unroll: int = 4
    loaded_rows: int = 0

    def wrong(self) -> dict[str, Any]:
        few = range(self.tile[0] if self.multicast_ctas == 1 else 1)
        return {**ProductConfig.wrong(self), "loaded_rows": self.loaded_rows not in few}

    @property
    def segment(self) -> int:
        """Columns of a tile that have a 128 x 128 scale in common, whichever tile it is."""
        return math.gcd(self.tile[1], 128)

    @property
    def b_scales(self) -> int:
        """Scales of B in a stage: of columns, or of all blocks that a tile may reach into."""
        if self.b_block[0] == 1:
            return self.tile[1]
        return -(-(128 - self.segment + self.tile[1]) // 128)

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Of A and of B in a stage."""
        return 4 * self.tile[0], -(-4 * self.b_scales // 128) * 128

    @property
    def stage_bytes(self) -> int:
        return sum(self.tile) * BLOCK_K + sum(self.scale_bytes)


def why_not(k: int, out_dtype: np.dtype, b_format: str | None, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    reason = product_config.why_not(out_dtype, arch)
    if reason:
        return reason
    if b_format not in FORMATS:
        return f"b_format {b_format}: there are kernels for {' and '.join(FORMATS)}"
    if k % 16:
        return f"K = {k}: TMA wants rows of a multiple of 16 bytes"
    return ""


def _candidate(k_block_ns: int, tile_ns: int, cluster_sync_ns: int = 0, **fields: Any) -> Candidate:
    return Candidate(
        Config(BFLOAT16, epilogue_stages=1, **fields), k_block_ns, tile_ns, cluster_sync_ns
    )


_WIDE = {"tile": (128, 256), "stages": 4}
_THREE = {"tile": (192, 128), "cluster": (1, 2), "stages": 4, "warpgroups": 3}
_SQUARE = {"tile": (128, 128), "stages": 5}
_FEW = {"cluster": (1, 1), "warpgroup_split_k": True, "stages": 7}
_SMALL = {"tile": (64, 64), "mma_n": 64, "warpgroup_split_k": True, "stages": 9}

CANDIDATES = {  # for scales of B
    # Of few rows. Fitted to the times of all of them at 40 shapes of LLMs and 70 of few tiles on an
    # H200.
    (128, 128): (
        _candidate(780, 1560, 250, **_WIDE),
        _candidate(861, 629, **_WIDE, cluster=(1, 1)),
        _candidate(607, 527, 250, **_THREE),
        _candidate(477, 214, 250, **_SQUARE),
        _candidate(469, 656, **_SQUARE, cluster=(1, 1)),
        _candidate(251, 1915, **_FEW, tile=(128, 64), mma_n=64),
        _candidate(319, 1888, **_FEW, tile=(64, 128)),
        _candidate(168, 2333, **_SMALL, cluster=(1, 1)),
        _candidate(140, 2936, 250, **_SMALL),
        _candidate(280, 3083, **_SMALL, cluster=(1, 1), split_k=2),
        _candidate(439, 2767, **_SMALL, cluster=(1, 1), split_k=4),
        _candidate(669, 3568, **_SMALL, cluster=(1, 1), split_k=8),
    ),
    # Fitted at 17 shapes, to bf16 and added to fp32, but for 4 us of a launch; where K is split, in
    # the proportions above. Unrolled more, the first two would not fit the registers.
    (1, 128): (
        _candidate(911, 4750, tile=(256, 128), cluster=(1, 2), stages=4, unroll=1),
        _candidate(711, 3627, **_THREE, unroll=2),
        _candidate(510, 2345, **_SQUARE, cluster=(1, 1)),
        _candidate(324, 1000, **_FEW, tile=(128, 64), mma_n=64),
        _candidate(336, 1000, **_FEW, tile=(64, 128)),
        _candidate(207, 1000, **_SMALL, cluster=(1, 1)),
        _candidate(345, 1100, **_SMALL, cluster=(1, 1), split_k=2),
        _candidate(548, 1150, **_SMALL, cluster=(1, 1), split_k=4),
        _candidate(853, 1300, **_SMALL, cluster=(1, 1), split_k=8),
    ),
}


_ALONE, _DOWN, _ACROSS = (1, 1), (2, 1), (1, 2)
_FEW_ROWS = 64


def _tilings(
    tile: tuple[int, int], stages: int, k_block_ns: int, tile_ns: int, *clusters: tuple[int, int],
    **fields: Any,
) -> list[Tiling]:  # fmt: skip
    fields |= {"tile": tile, "stages": stages, "epilogue_stages": 1}
    fields["mma_n"] = tile[1] if tile[1] <= 192 else tile[1] // 2  # what registers have room for
    return [
        Tiling(Config(BFLOAT16, cluster=each, **fields), k_block_ns, tile_ns) for each in clusters
    ]


_SPLIT: dict[str, Any] = {"warpgroup_split_k": True}

#: Of more rows, with scales of 128 x 128. Of 120 tilings those among which the estimate chooses
#: best, at 362 random shapes on an H200 and 110 on an H100; and four CTAs that split K, for fewer
#: columns than those shapes have.
TILINGS = (
    *_tilings((64, 48), 10, 99, 204, _ALONE, _DOWN, **_SPLIT),
    *_tilings((64, 64), 10, 107, 231, _ALONE, _DOWN, **_SPLIT),
    *_tilings((64, 64), 10, 107, 231, _ALONE, **_SPLIT, split_k=2),
    *_tilings((64, 64), 10, 107, 231, _ALONE, **_SPLIT, split_k=4),
    *_tilings((64, 96), 9, 138, 447, _DOWN, **_SPLIT),
    *_tilings((64, 96), 8, 138, 447, _ALONE, **_SPLIT, split_k=3),
    *_tilings((64, 128), 7, 187, 630, _DOWN, **_SPLIT),
    *_tilings((64, 128), 8, 192, 326, _DOWN, warpgroups=1),
    *_tilings((64, 160), 7, 233, 1252, _DOWN, warpgroups=1),
    *_tilings((128, 96), 7, 280, 399, _ALONE),
    *_tilings((128, 128), 6, 289, 593, _ALONE, _DOWN, _ACROSS),
    *_tilings((128, 160), 5, 379, 1080, _ALONE, _DOWN, _ACROSS),
    *_tilings((128, 192), 5, 451, 1004, _ALONE, _ACROSS),
    *_tilings((128, 256), 4, 636, 1198, _ALONE),
    *_tilings((192, 96), 5, 380, 463, _ALONE, warpgroups=3),
    *_tilings((192, 128), 4, 447, 764, _DOWN, _ACROSS, warpgroups=3),
    *_tilings((256, 128), 4, 638, 1417, _ALONE, _DOWN),
)


def candidates(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    b_block: tuple[int, int] = (128, 128),
    gpu: Gpu = GPUS["sm_90a"],
) -> list[Config]:
    """Configurations for a product of ``shape`` (M, N, K), the one that is chosen first."""
    fields = {"b_block": b_block, **epilogue._asdict()}
    return [_fitted(each, shape[0], **fields) for each in _ranked(shape, b_block, gpu)]


def _ranked(
    shape: tuple[int, int, int], b_block: tuple[int, int], gpu: Gpu
) -> Sequence[Candidate | Tiling]:
    many = b_block == (128, 128) and shape[0] > _FEW_ROWS
    known: Sequence[Candidate | Tiling] = TILINGS if many else CANDIDATES[b_block]
    return by_estimate(known, shape, BLOCK_K, gpu)


def _fitted(candidate: Candidate | Tiling, m: int, **fields: Any) -> Config:
    """The kernel of a candidate for ``m`` rows."""
    if candidate.loads_few(m):
        fields["loaded_rows"] = rows_to_load(m, candidate.config.tile[0])
    config: Config = fit(candidate.config, **fields)
    return config


def choose_config(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    b_block: tuple[int, int] = (128, 128),
    gpu: Gpu = GPUS["sm_90a"],
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K)."""
    chosen = _ranked(shape, b_block, gpu)[0]
    return _fitted(chosen, shape[0], b_block=b_block, **epilogue._asdict())
