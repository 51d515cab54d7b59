"""What to compile for a product whose rows ranks bring together meanwhile, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from ..ranks.gather_sizes import CHUNK_ROWS, GatherSizes
from .config import BLOCK_K, TILINGS, Config, why_not
from .estimate import Tiling
from .product_config import fit

__all__ = ["GatherConfig", "choose_gather", "why_not"]


@dataclass(frozen=True, slots=True)
class GatherConfig(Config):
    """A kernel of FP8, A 1 x 128 and B 128 x 128, whose spare warps write this rank's rows to the
    others. Tiles have rows of one rank alone: the last one of a shard reaches up into that before
    it, and both store the same."""

    def wrong(self) -> dict[str, Any]:
        return {
            **Config.wrong(self),
            "tile": Config.wrong(self)["tile"] or self.tile[0] % CHUNK_ROWS,
            "warpgroups": self.warpgroups > 2,  # of three, too few registers are left
            "split_k": self.split_k > 1 or self.warpgroup_split_k,
            "cluster": self.multicast_ctas > 1,
            "grouping": self.grouped,
            "b_block": self.b_block != (128, 128),
            "accumulate": self.accumulate,
        }

    @property
    def registers(self) -> tuple[int, int]:
        return {1: (56, 240), 2: (40, 232)}[self.warpgroups]


def choose_gather(
    sizes: GatherSizes, n: int, epilogue: Epilogue, *, gpu: Gpu = GPUS["sm_90a"]
) -> GatherConfig:
    """The kernel for the matrix of all ranks by one of ``n`` columns."""

    def nanoseconds(tiling: Tiling) -> float:
        tile = tiling.config.tile[0]
        rows = sizes.ranks * -(-sizes.rows // tile) * tile
        return tiling.nanoseconds((rows, n, sizes.columns), BLOCK_K, gpu)

    suiting = (each for each in TILINGS[128, 128] if _suits(each, sizes))
    chosen = min(suiting, key=nanoseconds).config
    given = {each.name: getattr(chosen, each.name) for each in fields(chosen)}
    made: GatherConfig = fit(GatherConfig(**given), **epilogue._asdict())
    return made


def _suits(tiling: Tiling, sizes: GatherSizes) -> bool:
    config = tiling.config
    plain = config.warpgroups <= 2 and not config.warpgroup_split_k and config.multicast_ctas == 1
    return plain and config.tile[0] <= sizes.rows
