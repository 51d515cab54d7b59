"""What to compile for FP8 by MXFP4, whose elements become E4M3 on their way to the tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import BFLOAT16
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from .config import BLOCK_K, OF_BLOCKS, Config, fitted
from .estimate import Tiling, by_estimate
from .product_config import ProductConfig, fit
from .product_config import why_not as why_no_product

__all__ = [
    "A_BOX",
    "B_ROWS",
    "PART",
    "PASSES",
    "RAW_SLOTS",
    "SCALE_WORDS",
    "UPCAST_REGISTERS",
    "KBlocksConfig",
    "UpcastConfig",
    "list_length",
    "upcast_candidates",
    "why_not",
]

B_ROWS = 128  # of B that a tile has, and that share a factor
SCALE_WORDS = 128  # of the scales of 128 x 128 elements
PART = 32  # K blocks of a part of a list
#: How often at most a K block is multiplied: a pass takes 15 exponents of 254.
PASSES = 17
A_BOX = 160  # scales of A in a box, where rows are grouped: two boxes have those of 256 rows and 4

RAW_SLOTS = 4  # K blocks of B as it is in memory, in flight
UPCAST_REGISTERS = 48  # of a thread that makes E4M3 of B


@dataclass(frozen=True, slots=True)
class UpcastConfig(Config):
    """A kernel of FP8 by MXFP4: all that its code depends on. Its tiles have 128 columns."""

    tile: tuple[int, int] = (256, B_ROWS)
    cluster: tuple[int, int] = (1, 1)
    unroll: int = 1

    def wrong(self) -> dict[str, Any]:
        return {
            **Config.wrong(self),
            "tile": self.tile[1] != B_ROWS or ProductConfig.wrong(self)["tile"],
            "cluster": self.cluster_size > 1,
            "warpgroup_split_k": self.warpgroup_split_k,
            "grouping": self.grouping == "k",
        }

    @property
    def threads(self) -> int:
        """With a warpgroup that makes E4M3 of B."""
        return 128 * (2 + self.warpgroups)

    @property
    def registers(self) -> tuple[int, int]:
        return 32, {1: 240, 2: 216}[self.warpgroups]

    @property
    def a_boxes(self) -> int:
        """Of scales of A, in a stage."""
        return -(-self.a_scales // A_BOX) if self.rows_grouped else 1

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Of A and of B in a stage: B has a factor."""
        return 4 * (A_BOX * self.a_boxes if self.rows_grouped else self.a_scales), 16

    @property
    def raw_bytes(self) -> int:
        """With scales of B, and the barriers of each slot."""
        return RAW_SLOTS * (B_ROWS * BLOCK_K // 2 + 4 * SCALE_WORDS + 2 * 8) + 128


@dataclass(frozen=True, slots=True)
class KBlocksConfig:
    """The kernel that lists the K blocks of MXFP4, and lays its scales out.

    Attributes:
        whole: scales of a row and a K block are a word, at a multiple of four bytes.
    """

    whole: bool
    arch: str = "sm_90a"


def list_length(k: int) -> int:
    """Room for the entries of 128 rows of B (N, K)."""
    return -(-k // (BLOCK_K * PART)) * PART * PASSES


def why_not(k: int, out_dtype: np.dtype, b_format: str | None, arch: str) -> str:
    """Why there is no kernel for such a product; empty where there is one."""
    reason = why_no_product(out_dtype, arch)
    if reason:
        return reason
    if b_format != "mxfp4":
        return f"b_format {b_format}: there are kernels for mxfp4"
    if k % 32:
        return f"K = {k}: TMA wants rows of a multiple of 16 bytes"
    return ""


def _tiling(rows: int, stages: int, k_block_ns: int, tile_ns: int, warpgroups: int) -> Tiling:
    fields: dict[str, Any] = {"tile": (rows, B_ROWS), "stages": stages, "warpgroups": warpgroups}
    config = UpcastConfig(BFLOAT16, epilogue_stages=1, mma_n=B_ROWS, **fields)
    return Tiling(config, k_block_ns, tile_ns, OF_BLOCKS)


#: Times as those of 4096 x 4096 x 4096 on an H200 (``benchmarks/results/upcast_h200.json``).
TILINGS = (
    _tiling(64, 5, 460, 700, 1),
    _tiling(128, 4, 620, 900, 2),
    _tiling(256, 3, 900, 1600, 2),
)


def upcast_candidates(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    groups: int = 1,
    grouping: str = "",
    gpu: Gpu = GPUS["sm_90a"],
) -> list[UpcastConfig]:
    """Configurations for a product of ``shape`` (M, N, K), whose rows may be in ``groups``; the one
    first that is chosen, as if all had as many rows."""
    m, n, k = shape
    ranked = by_estimate(TILINGS, (-(-m // groups), n, k), BLOCK_K, gpu, groups)
    fields = {"grouping": grouping, **epilogue._asdict()}
    if grouping:
        return [fit(each, **fields) for each in ranked]
    return [fitted(each, m, **fields) for each in ranked]  # type: ignore[misc]
