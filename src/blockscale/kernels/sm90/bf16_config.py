"""What to compile for a product of bf16 matrices, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dtypes import BFLOAT16
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from .estimate import Costs, Tiling, by_estimate, by_k_groups
from .product_config import ROW, ProductConfig, fit

__all__ = ["BLOCK_K", "Bf16Config", "candidates", "choose_config", "k_grouped_candidates"]

BLOCK_K = ROW // 2  # columns of a stage
MAJORS = ("k", "mn")


@dataclass(frozen=True, slots=True)
class Bf16Config(ProductConfig):
    """A kernel of bf16: all that its code depends on.

    Attributes:
        a_major, b_major: which dimension of A (M, K), of B (N, K) lies together in memory: "k", or
            the other one, "mn".
    """

    a_major: str = "k"
    b_major: str = "k"

    @property
    def block_k(self) -> int:
        return BLOCK_K

    def wrong(self) -> dict[str, Any]:
        return ProductConfig.wrong(self) | {
            "grouping": self.grouping not in ("", "k"),
            "a_major": self.a_major not in MAJORS,
            "b_major": self.b_major not in MAJORS
            or (self.b_major == "mn" and self.mma_n % BLOCK_K),
        }


_COSTS = Costs(a=1.79, l2_rate=21178, start_ns=5071, split_ns=0)


def _tiling(
    tile: tuple[int, int], stages: int, k_block_ns: int, tile_ns: int, **fields: Any
) -> Tiling:
    fields = {"cluster": (1, 1), "mma_n": tile[1], **fields}
    config = Bf16Config(BFLOAT16, tile=tile, stages=stages, epilogue_stages=1, **fields)
    return Tiling(config, k_block_ns, tile_ns, _COSTS)


_SPLIT: dict[str, Any] = {"warpgroup_split_k": True}

#: Of 49 tilings those among which the estimate chooses best, at 96 shapes on an H100, most of them
#: drawn at random. 128 x 160 was measured with six stages, for which fp32 outputs leave no room.
TILINGS = (
    _tiling((64, 80), 11, 120, 835, **_SPLIT),
    _tiling((64, 64), 12, 210, 900, **_SPLIT, split_k=4),
    _tiling((64, 128), 6, 350, 0, **_SPLIT, split_k=4),
    _tiling((64, 64), 12, 125, 0, warpgroups=1),
    _tiling((64, 128), 9, 170, 176, warpgroups=1),
    _tiling((64, 160), 7, 213, 809, warpgroups=1),
    _tiling((64, 192), 6, 235, 594, warpgroups=1),
    _tiling((128, 48), 9, 154, 395, **_SPLIT),
    _tiling((128, 112), 7, 260, 992),
    _tiling((128, 128), 6, 309, 446),
    _tiling((128, 144), 6, 346, 1388),
    _tiling((128, 160), 5, 390, 1366),
    _tiling((128, 192), 5, 479, 1230),
    _tiling((128, 224), 4, 561, 1958),
    _tiling((128, 256), 4, 647, 1389),
    _tiling((128, 256), 4, 650, 1110, cluster=(2, 1)),
    _tiling((192, 160), 4, 601, 1488, warpgroups=3),
    _tiling((192, 192), 4, 737, 1448, warpgroups=3),
    _tiling((256, 128), 4, 633, 1294),
)


def candidates(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    majors: tuple[str, str] = ("k", "k"),
    gpu: Gpu = GPUS["sm_90a"],
) -> list[Bf16Config]:
    """Configurations for a product of ``shape`` (M, N, K), the one that is chosen first.

    ``majors``: of A and of B.
    """
    fields = {"a_major": majors[0], "b_major": majors[1], **epilogue._asdict()}
    return [fit(each, **fields) for each in _ranked(shape, majors, gpu)]


def k_grouped_candidates(
    shape: tuple[int, int, int],
    groups: int,
    epilogue: Epilogue,
    majors: tuple[str, str] = ("k", "k"),
    gpu: Gpu = GPUS["sm_90a"],
) -> list[Bf16Config]:
    """The same for products of each of ``groups`` of columns, as of
    ``grouped_config.k_grouped_candidates``."""
    fields = {"a_major": majors[0], "b_major": majors[1], **epilogue._asdict()}
    ranked = by_k_groups(_able(majors), shape, groups, BLOCK_K, gpu)
    return [fit(each, grouping="k", **fields) for each in ranked]


def _ranked(shape: tuple[int, int, int], majors: tuple[str, str], gpu: Gpu) -> list[ProductConfig]:
    """The one of least estimated time first."""
    return by_estimate(_able(majors), shape, BLOCK_K, gpu)


def _able(majors: tuple[str, str]) -> list[Tiling]:
    """Those that can load B."""
    return [each for each in TILINGS if majors[1] == "k" or each.config.tile[1] % BLOCK_K == 0]


def choose_config(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    majors: tuple[str, str] = ("k", "k"),
    gpu: Gpu = GPUS["sm_90a"],
) -> Bf16Config:
    """The kernel for a product of ``shape`` (M, N, K)."""
    fields = {"a_major": majors[0], "b_major": majors[1], **epilogue._asdict()}
    config: Bf16Config = fit(_ranked(shape, majors, gpu)[0], **fields)
    return config
