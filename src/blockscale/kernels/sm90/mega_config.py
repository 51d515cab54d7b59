"""What to compile for a mega MoE on Hopper, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...dtypes import BFLOAT16
from ...formats import get_format
from ..common.gpu import SHARED
from ..common.refuse import refuse
from ..mega.buffers import LEAST_UNIT, MULTIPLE, TILE_ROWS, Sizes, why_not_sizes
from . import mixed_config
from .config import BLOCK_K, Config

__all__ = [
    "COLUMNS",
    "FIRST_CONSUMER",
    "FIRST_DISPATCH",
    "MegaConfig",
    "MixedMegaConfig",
    "choose_mega",
]

FIRST_DISPATCH, FIRST_CONSUMER = 128, 256  # threads
COLUMNS = 2 * MULTIPLE  # of a tile; of the first product half are gates, and half of up


@dataclass(frozen=True, slots=True)
class MegaConfig:
    """A kernel of FP8 by FP8: all that its code depends on.

    Attributes:
        product: tiles and stages of both products. A thread has gates and up of the same columns.
        id_bytes: of an expert's number, 4 or 8.
        out_dtype: of what tokens get.
        send_warps, gather_warps: of a CTA, that send rows to other ranks, and bring rows of experts
            together.
    """

    sizes: Sizes
    product: Config | mixed_config.Config
    id_bytes: int
    out_dtype: np.dtype
    send_warps: int = 2
    gather_warps: int = 2

    def __post_init__(self) -> None:
        wrong = {
            "sizes": why_not_sizes(self.sizes) or self.sizes.ring_blocks % 4,
            "product": self.shared_bytes > SHARED or self.unit_rows < LEAST_UNIT,
            "id_bytes": self.id_bytes not in (4, 8),
            "send_warps": self.send_warps + self.gather_warps != 4,
        }
        refuse(self, wrong)

    @property
    def arch(self) -> str:
        return self.product.arch

    @property
    def unit_rows(self) -> int:
        """Rows of a unit of work: of a tile."""
        return TILE_ROWS

    @property
    def across(self) -> tuple[int, int]:
        """Tiles of a unit in the first product, in the second one."""
        return self.sizes.intermediate // MULTIPLE, -(-self.sizes.hidden // COLUMNS)

    @property
    def k_blocks(self) -> tuple[int, int]:
        return self.sizes.hidden // BLOCK_K, self.sizes.intermediate // BLOCK_K

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: each 64 rows of a tile."""
        return 2

    @property
    def threads(self) -> int:
        """Of a CTA: a warpgroup that loads, one for tokens, and those that multiply."""
        return 128 * (2 + self.consumers)

    @property
    def registers(self) -> tuple[int, int, int]:
        """How many a thread of each of these has: 512 of all four warpgroups together."""
        return 24, 56, 216

    @property
    def staging_bytes(self) -> int:
        """In which results are put together: 128 bytes of a row."""
        return self.consumers * 64 * 128

    @property
    def stage_bytes(self) -> int:
        return self.product.stage_bytes

    @property
    def shared_bytes(self) -> int:
        stages = self.product.stages * (self.stage_bytes + 16)
        return stages + self.staging_bytes + 4 * self.sizes.sort_words + 512


@dataclass(frozen=True, slots=True)
class MixedMegaConfig(MegaConfig):
    """A kernel of FP8 by elements of four bits, which become bf16 in registers: ``product`` is that
    of ``mixed_config``, with tiles of twice as many rows of the matrices, each warpgroup's 64.

    Attributes:
        alphas: of both products, as of ``common.epilogue.Epilogue``.
    """

    alphas: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def unit_rows(self) -> int:
        return int(self.product.rows)

    @property
    def consumers(self) -> int:
        return 4

    @property
    def registers(self) -> tuple[int, int, int]:
        """480 of all six warpgroups together, which have 80 each to begin with."""
        return 24, 72, 96

    @property
    def activated_bytes(self) -> int:
        """Of SwiGLU's results in bf16, as they are put together."""
        return self.unit_rows * MULTIPLE * 2

    @property
    def amax_bytes(self) -> int:
        """Of the magnitudes of SwiGLU's results, and of two words for each row."""
        return self.unit_rows * (2 * MULTIPLE + 8)

    @property
    def staging_bytes(self) -> int:
        """With what the second product's results are put together in."""
        return self.activated_bytes + self.amax_bytes + self.unit_rows * COLUMNS * 2

    @property
    def words(self) -> int:
        """Of four scales, of a matrix's row and a K block."""
        return BLOCK_K // get_format(self.product.b_format).block_size // 4

    @property
    def stage_bytes(self) -> int:
        rows = self.unit_rows * (2 * BLOCK_K + 4)
        return int(rows + COLUMNS * (BLOCK_K // 2 + 4 * self.words))


def choose_mega(
    sizes: Sizes,
    weights: str = "fp8_128x128",
    *,
    alphas: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    id_bytes: int = 8,
    out_dtype: np.dtype = BFLOAT16,
    arch: str = "sm_90a",
) -> MegaConfig:
    """The kernel for ``sizes``, with as many stages as there is room for."""
    if sizes.bf16_rings:
        least: MegaConfig = MixedMegaConfig(
            sizes, _mixed(weights, arch), id_bytes, out_dtype, alphas=alphas
        )
    else:
        least = MegaConfig(sizes, _fp8(arch), id_bytes, out_dtype)
    room = SHARED - least.shared_bytes
    stages = least.product.stages + room // (least.stage_bytes + 16)
    return replace(least, product=replace(least.product, stages=min(stages, 8)))


def _fp8(arch: str) -> Config:
    return Config(
        BFLOAT16,
        tile=(TILE_ROWS, COLUMNS),
        cluster=(1, 1),
        stages=1,
        mma_n=128,
        epilogue_stages=1,
        tma_store=False,
        unroll=1,
        arch=arch,
    )


def _mixed(weights: str, arch: str) -> mixed_config.Config:
    how: dict[str, Any] = {"rows": LEAST_UNIT, "stages": 2, "promotes": True, "arch": arch}
    return mixed_config.Config(weights, BFLOAT16, **how)
