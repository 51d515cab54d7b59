"""What to compile for a product of grouped rows: a pure function of what the host knows, which is
how many rows and groups there are, not how many rows a group has."""

from __future__ import annotations

import math
from typing import Any

from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from .config import BLOCK_K, TILINGS, Config
from .estimate import by_estimate
from .product_config import ProductConfig, fit

__all__ = ["choose_grouped", "grouped_candidates", "supergroup"]


_BAND_BYTES = 16 << 20  # of A, which stay in an H200's L2 cache


def grouped_candidates(
    shape: tuple[int, int, int],
    groups: int,
    epilogue: Epilogue,
    *,
    masked: bool = False,
    gpu: Gpu = GPUS["sm_90a"],
) -> list[Config]:
    """Configurations for a product of ``shape`` (M, N, K) whose rows are in ``groups``, ``masked``
    or not; the one first that is chosen, as if all had as many rows."""
    m, n, k = shape
    tilings = [each for each in TILINGS[128, 128] if _takes_groups(each.config)]
    ranked = by_estimate(tilings, (-(-m // groups), n, k), BLOCK_K, gpu, groups)
    fields = {"grouped": True, "masked": masked, **epilogue._asdict()}
    return [fit(each, **fields) for each in ranked]


def choose_grouped(
    shape: tuple[int, int, int], groups: int, epilogue: Epilogue, **options: Any
) -> Config:
    """The kernel for a product of ``shape`` (M, N, K) whose rows are in ``groups``; ``options`` of
    ``grouped_candidates``."""
    return grouped_candidates(shape, groups, epilogue, **options)[0]


def supergroup(tile: tuple[int, int], k: int, multiprocessors: int) -> int:
    """Tiles down a group that are taken before the next ones across, if it has so many: those whose
    rows of A stay in the L2 cache meanwhile. At least as many as are a square of the output, for
    which the tiles that run at once load the fewest rows of A and B."""
    rows, columns = tile
    square = max(1, round(math.sqrt(multiprocessors * columns / rows)))
    return max(square, _BAND_BYTES // (rows * k))


def _takes_groups(config: ProductConfig) -> bool:
    """A box of A's scales has four more than rows, and 256 at most."""
    return config.cluster_size == 1 and config.tile[0] < 256
