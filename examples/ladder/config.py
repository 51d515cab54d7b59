"""The configurations of the short kernels of the ladder."""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.builders import register_builder
from blockscale.kernels.common.refuse import refuse
from blockscale.kernels.sm90.config import Config

__all__ = ["MMA_N", "LadderConfig"]

MMA_N = 128  # columns of a wgmma, and of a scale of B
_STAGED = ((), ("b",), ("a", "b"))
_PROMOTIONS = (128, 256)


@dataclass(frozen=True, slots=True)
class LadderConfig:
    """A short kernel: a CTA has one tile of 64 rows, which all of its warps load, multiply, scale
    and store; bf16 out.

    Attributes:
        columns: the columns of a tile.
        across: warpgroups side by side, each with its part of the columns.
        ahead: K blocks that are on their way while one is scaled and added; with none, a K block
            is asked for when it is needed.
        promotion: bytes that the L2 cache fetches at once for loads of B (of A: 128).
        prefetch: scales of A are read before their wgmmas start, else when the partial accumulator
            is scaled.
        transposed: scales of A are (K / 128, M padded to 4), layout "sm90"; else (M, K / 128).
        staged: operands whose scales TMA brings to shared memory; others are read where they lie.
    """

    columns: int = 128
    across: int = 1
    ahead: int = 0
    promotion: int = 128
    prefetch: bool = False
    transposed: bool = False
    staged: tuple[str, ...] = ()
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        wrong = {
            "columns": self.columns not in (128, 256),
            "across": self.across not in (1, 2) or self.columns % (MMA_N * self.across),
            "ahead": self.ahead not in (0, 1, 2),
            "promotion": self.promotion not in _PROMOTIONS,
            "prefetch": self.prefetch and "a" in self.staged,  # they are in no hurry
            "staged": self.staged not in _STAGED or ("a" in self.staged and not self.transposed),
        }
        refuse(self, wrong)

    @property
    def stages(self) -> int:
        """Tiles of A and B in shared memory."""
        return max(self.ahead, 1)

    @property
    def threads(self) -> int:
        return 128 * self.across

    @property
    def mmas(self) -> int:
        """The wgmmas that a warpgroup needs to go along its columns."""
        return self.columns // (MMA_N * self.across)

    @property
    def b_scales(self) -> int:
        """The scales of B of a tile, in a K block."""
        return self.columns // MMA_N

    @property
    def stored(self) -> Config:
        """What the epilogue of kernels/sm90 has to know: it sees warpgroups one above the other."""
        return Config(
            BFLOAT16,
            tile=(64 * self.across, self.columns // self.across),
            cluster=(1, 1),
            warpgroups=self.across,
            mma_n=MMA_N,
            epilogue_stages=1,
        )


register_builder(LadderConfig, f"{__package__}.kernel", made_of=(Config.__module__,))
