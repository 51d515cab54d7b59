"""What to compile for a product: a pure function of shapes, types and target, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import BFLOAT16, FLOAT32
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from ..common.loadable import rows_to_load
from . import product_config
from .estimate import Costs, Tiling, by_estimate
from .product_config import ProductConfig, fit

__all__ = [
    "BLOCK_K",
    "OF_BLOCKS",
    "TILINGS",
    "Config",
    "candidates",
    "choose_config",
    "fitted",
    "tilings",
    "why_not",
]

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
        return {
            **ProductConfig.wrong(self),
            "loaded_rows": self.loaded_rows not in few,
            "tile": ProductConfig.wrong(self)["tile"] or self.a_scales > 256,  # of a box
            # TMA loads scales of columns to multiples of 128 bytes
            "b_block": self.b_block[0] == 1 and self.tile[1] % 32,
        }

    @property
    def segment(self) -> int:
        """Columns of a tile that have a 128 x 128 scale in common, whichever tile it is."""
        return math.gcd(self.tile[1], 128)

    @property
    def a_scales(self) -> int:
        """Scales of A in a stage: where rows are grouped, tiles start anywhere, but loads of scales
        at every fourth row."""
        return self.tile[0] + (4 if self.rows_grouped else 0)

    @property
    def b_scales(self) -> int:
        """Scales of B in a stage: of columns, or of all blocks that a tile may reach into."""
        if self.b_block[0] == 1:
            return self.tile[1]
        return -(-(128 - self.segment + self.tile[1]) // 128)

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Of A and of B in a stage."""
        if self.rows_grouped:  # those of B are behind those of A
            return -(-4 * (self.a_scales + self.b_scales) // 128) * 128, 0
        return 4 * self.a_scales, -(-4 * self.b_scales // 128) * 128

    @property
    def b_scales_apart(self) -> int:
        """Bytes from one stage to the next."""
        return self.scale_bytes[1] or self.scale_bytes[0]

    @property
    def block_k(self) -> int:
        """Columns of a stage."""
        return BLOCK_K

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


OF_BLOCKS = Costs(a=1.538, l2_rate=22298, start_ns=1935, split_ns=430)
_OF_COLUMNS = Costs(a=1.124, l2_rate=19632, start_ns=3001, split_ns=0)
_SPLIT: dict[str, Any] = {"warpgroup_split_k": True}
_ADDED: dict[str, Any] = {"b_block": (1, 128), "out_dtype": FLOAT32, "accumulate": True}


def _tiling(
    tile: tuple[int, int],
    stages: int,
    k_block_ns: int,
    tile_ns: int,
    stored_ns: int = 0,
    stored_stages: int = 0,
    **fields: Any,
) -> Tiling:
    columns = {256: 128, 160: 80 if tile[0] == 192 else 160}  # what registers have room for
    mma_n = columns.get(tile[1], tile[1])
    fields = {"out_dtype": BFLOAT16, "cluster": (1, 1), "mma_n": mma_n, **fields}
    config = Config(tile=tile, stages=stages, epilogue_stages=1, **fields)
    costs = OF_BLOCKS if config.b_block[0] > 1 else _OF_COLUMNS
    return Tiling(config, k_block_ns, tile_ns, costs, stored_ns, stored_stages)


#: For scales of B: of some 50 tilings those among which the estimate chooses best, at 166 and 38
#: shapes on an H100, most of them drawn at random. Their times are a fit: another start gives
#: others that choose as well.
TILINGS: dict[tuple[int, int], tuple[Tiling, ...]] = {
    (128, 128): (
        _tiling((64, 16), 12, 90, 321, **_SPLIT),
        _tiling((64, 32), 12, 102, 324, **_SPLIT),
        _tiling((64, 48), 12, 113, 471, **_SPLIT),
        _tiling((64, 96), 9, 163, 675, **_SPLIT),
        _tiling((64, 64), 11, 114, 0, **_SPLIT, split_k=4),
        _tiling((64, 64), 11, 114, 0, **_SPLIT, split_k=8),
        _tiling((64, 96), 8, 163, 675, **_SPLIT, split_k=3),
        _tiling((64, 64), 12, 139, 424, warpgroups=1),
        _tiling((64, 128), 8, 218, 669, warpgroups=1),
        _tiling((64, 160), 7, 266, 1600, warpgroups=1),
        _tiling((128, 96), 7, 314, 804),
        _tiling((128, 128), 6, 346, 870),
        _tiling((128, 144), 6, 414, 1258),
        _tiling((128, 160), 5, 439, 1230),
        _tiling((128, 192), 5, 516, 1246),
        _tiling((128, 256), 4, 697, 1471),
        _tiling((192, 96), 5, 438, 681, warpgroups=3),
        _tiling((192, 128), 4, 516, 1012, warpgroups=3),
        _tiling((256, 128), 4, 699, 1585),
    ),
    # Times of tiles that are added to fp32, as gradients of weights are, and of those that are
    # stored, which of those that have fewer stages then are set by hand, by wgrad_tiles_h200.json.
    # What is unrolled less has no registers for more.
    (1, 128): (
        _tiling((64, 64), 12, 186, 589, 730, **_SPLIT, **_ADDED),
        _tiling((64, 96), 9, 223, 1176, 950, **_SPLIT, **_ADDED),
        _tiling((64, 128), 7, 265, 2026, 1080, **_SPLIT, **_ADDED),
        _tiling((64, 128), 8, 302, 1584, 850, **_ADDED, warpgroups=1),
        _tiling((128, 64), 7, 285, 1845, 1110, **_SPLIT, **_ADDED),
        _tiling((128, 128), 6, 519, 2896, 1400, **_ADDED),
        _tiling((128, 160), 5, 607, 4517, 2000, **_ADDED),
        _tiling((128, 192), 5, 703, 5384, 1650, **_ADDED, stored_stages=4),
        _tiling((128, 256), 4, 937, 8368, 2500, **_ADDED, stored_stages=3),
        _tiling((192, 96), 5, 587, 3664, 1450, **_ADDED, warpgroups=3),
        _tiling((192, 128), 4, 716, 5886, 1850, **_ADDED, warpgroups=3, unroll=2),
        _tiling((192, 160), 4, 979, 6909, 2600, **_ADDED, warpgroups=3, unroll=2),
        _tiling((256, 128), 4, 950, 7159, 2050, **_ADDED, stored_stages=3, unroll=1),
        _tiling(
            (256, 128), 4, 921, 7632, 2300, **_ADDED, stored_stages=3, unroll=1, cluster=(2, 1)
        ),
        _tiling(
            (256, 128), 4, 903, 7848, 2300, **_ADDED, stored_stages=3, unroll=1, cluster=(1, 2)
        ),
    ),
}


def tilings(b_block: tuple[int, int], epilogue: Epilogue) -> tuple[Tiling, ...]:
    """Those for scales of B, and for what is done with an accumulator."""
    found = TILINGS[b_block]
    if b_block[0] > 1 or (epilogue.accumulate and epilogue.out_dtype == FLOAT32):
        return found
    return tuple(each.stored(epilogue.out_dtype, epilogue.accumulate) for each in found)


def candidates(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    b_block: tuple[int, int] = (128, 128),
    gpu: Gpu = GPUS["sm_90a"],
) -> list[Config]:
    """Configurations for a product of ``shape`` (M, N, K), the one that is chosen first."""
    fields = {"b_block": b_block, **epilogue._asdict()}
    ranked = by_estimate(tilings(b_block, epilogue), shape, BLOCK_K, gpu)
    return [fitted(each, shape[0], **fields) for each in ranked]


def fitted(config: ProductConfig, m: int, **fields: Any) -> Config:
    """The kernel for ``m`` rows, which loads no others."""
    if config.multicast_ctas == 1 and m < config.tile[0]:
        fields["loaded_rows"] = rows_to_load(m, config.tile[0])
    made: Config = fit(config, **fields)
    return made


def choose_config(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    b_block: tuple[int, int] = (128, 128),
    gpu: Gpu = GPUS["sm_90a"],
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K)."""
    chosen = by_estimate(tilings(b_block, epilogue), shape, BLOCK_K, gpu)[0]
    return fitted(chosen, shape[0], b_block=b_block, **epilogue._asdict())
