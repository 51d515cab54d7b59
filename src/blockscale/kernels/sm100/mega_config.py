"""What to compile for a mega MoE on Blackwell, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...dtypes import BFLOAT16, UINT8
from ..common.gpu import SHARED
from ..common.refuse import refuse
from ..mega.buffers import Sizes, why_not_sizes
from .config import EPILOGUE_WARPS, TILE_M, Config
from .quantizing_config import Quantizing

__all__ = ["STAGING_BYTES", "MegaConfig", "choose_mega"]

STAGING_BYTES = EPILOGUE_WARPS * 32 * 128  # through which rows go to other ranks


@dataclass(frozen=True, slots=True)
class MegaConfig:
    """A kernel: all that its code depends on.

    Attributes:
        up, down: the two products, which have the same tiles and stages.
        id_bytes: of an expert's number, 4 or 8.
        out_dtype: of what tokens get.
        send_warps, gather_warps: of a CTA, that send rows to other ranks, and bring rows of experts
            together.
    """

    sizes: Sizes
    up: Config
    down: Config
    id_bytes: int
    out_dtype: np.dtype
    send_warps: int = 2
    gather_warps: int = 2

    def __post_init__(self) -> None:
        wrong = {
            "sizes": why_not_sizes(self.sizes) or self.ring_units % 4,
            "up": self.up.quantizing is None or self.shared_bytes > SHARED,
            "down": self.down.stages != self.up.stages or self.down.mma_n != self.up.mma_n,
            "id_bytes": self.id_bytes not in (4, 8),
        }
        refuse(self, wrong)

    @property
    def arch(self) -> str:
        return self.up.arch

    @property
    def ctas(self) -> int:
        """CTAs of a cluster, each with 128 rows of a unit."""
        return self.up.ctas

    @property
    def unit_rows(self) -> int:
        """Rows of a unit of work: of the tiles of a cluster."""
        return TILE_M * self.ctas

    @property
    def ring_units(self) -> int:
        return self.sizes.ring_rows // self.unit_rows

    @property
    def across(self) -> tuple[int, int]:
        """Tiles of a unit in the first product, in the second one."""
        columns = self.sizes.intermediate, self.sizes.hidden
        pairs = zip(columns, (self.up, self.down), strict=True)
        return tuple(-(-n // each.tile[1]) for n, each in pairs)  # type: ignore[return-value]

    @property
    def k_blocks(self) -> tuple[int, int]:
        depth = self.up.kind.block_k
        return -(-self.sizes.hidden // depth), -(-self.sizes.intermediate // depth)

    @property
    def dispatch_warps(self) -> int:
        return self.send_warps + self.gather_warps

    @property
    def threads(self) -> int:
        """Of a CTA: the epilogue's warps, those of MMA, loads and the finder of tiles, and those
        of tokens."""
        return 32 * (EPILOGUE_WARPS + 3 + self.dispatch_warps)

    @property
    def extra_bytes(self) -> int:
        """Shared memory beside that of the first product."""
        return STAGING_BYTES + 4 * self.sizes.sort_words + 128

    @property
    def shared_bytes(self) -> int:
        return self.up.shared_bytes + self.extra_bytes


def choose_mega(
    sizes: Sizes,
    weights: str,
    *,
    alphas: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    id_bytes: int = 8,
    out_dtype: np.dtype = BFLOAT16,
    arch: str = "sm_100a",
    ctas: int = 2,
) -> MegaConfig:
    """The kernel for ``sizes`` and the format of weights. ``alphas``: as of ``Epilogue``, of both
    products. Not measured: there was no such GPU."""
    formats = sizes.activations, weights
    how = {"mma_n": 256, "ctas": ctas, "cluster": (ctas, 1), "arch": arch, "grouping": "m"}
    quantizing = Quantizing(sizes.activations, swiglu=True, rounded=True)
    up = Config(
        *formats, UINT8, stages=2, epilogue_stages=1, quantizing=quantizing, alpha=alphas[0], **how
    )
    down = Config(*formats, BFLOAT16, stages=2, tma_store=False, alpha=alphas[1], **how)
    least = MegaConfig(sizes, up, down, id_bytes, out_dtype)
    stages = (SHARED - least.shared_bytes) // (up.stage_bytes + 16) + 2
    return replace(
        least, up=replace(up, stages=min(stages, 8)), down=replace(down, stages=min(stages, 8))
    )
