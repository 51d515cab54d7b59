"""What to compile for a mega MoE on Hopper, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...dtypes import BFLOAT16
from ..common.gpu import SHARED
from ..common.refuse import refuse
from ..mega.buffers import MULTIPLE, TILE_ROWS, Sizes, why_not_sizes
from .config import BLOCK_K, Config

__all__ = [
    "CONSUMERS",
    "FIRST_CONSUMER",
    "FIRST_DISPATCH",
    "STAGING_BYTES",
    "MegaConfig",
    "choose_mega",
]

CONSUMERS = 2  # warpgroups that multiply, each 64 rows of a tile
FIRST_DISPATCH, FIRST_CONSUMER = 128, 256  # threads
STAGING_BYTES = CONSUMERS * 64 * 128  # in which results are put together, 128 bytes of a row


@dataclass(frozen=True, slots=True)
class MegaConfig:
    """A kernel: all that its code depends on.

    Attributes:
        product: tiles and stages of both products. Half of the first one's columns are gates, the
            other half as many of up, so that a thread has both.
        id_bytes: of an expert's number, 4 or 8.
        out_dtype: of what tokens get.
        send_warps, gather_warps: of a CTA, that send rows to other ranks, and bring rows of experts
            together.
    """

    sizes: Sizes
    product: Config
    id_bytes: int
    out_dtype: np.dtype
    send_warps: int = 2
    gather_warps: int = 2

    def __post_init__(self) -> None:
        wrong = {
            "sizes": why_not_sizes(self.sizes) or self.sizes.ring_blocks % 4,
            "product": self.product.tile != (TILE_ROWS, 2 * MULTIPLE) or self.shared_bytes > SHARED,
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
        return self.product.tile[0]

    @property
    def across(self) -> tuple[int, int]:
        """Tiles of a unit in the first product, in the second one."""
        return self.sizes.intermediate // MULTIPLE, -(-self.sizes.hidden // self.product.tile[1])

    @property
    def k_blocks(self) -> tuple[int, int]:
        return self.sizes.hidden // BLOCK_K, self.sizes.intermediate // BLOCK_K

    @property
    def threads(self) -> int:
        """Of a CTA: a warpgroup that loads, one for tokens, and those that multiply."""
        return 128 * (2 + CONSUMERS)

    @property
    def registers(self) -> tuple[int, int, int]:
        """How many a thread of each of these has: 512 of all four warpgroups together."""
        return 24, 72, 208

    @property
    def shared_bytes(self) -> int:
        return self.product.shared_bytes + STAGING_BYTES + 4 * self.sizes.sort_words + 512


def choose_mega(
    sizes: Sizes, *, id_bytes: int = 8, out_dtype: np.dtype = BFLOAT16, arch: str = "sm_90a"
) -> MegaConfig:
    """The kernel for ``sizes``."""
    product = Config(
        BFLOAT16,
        tile=(TILE_ROWS, 2 * MULTIPLE),
        cluster=(1, 1),
        stages=1,
        mma_n=128,
        epilogue_stages=1,
        tma_store=False,
        unroll=1,
        arch=arch,
    )
    least = MegaConfig(sizes, product, id_bytes, out_dtype)
    stages = (SHARED - least.shared_bytes) // (product.stage_bytes + 16) + 1
    return replace(least, product=replace(product, stages=min(stages, 8)))
