"""What to compile for a product of groups: a pure function of what the host knows, which is how
many rows, or columns, and groups there are, not how many a group has."""

from __future__ import annotations

from typing import Any

from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from ..common.groupings import square
from .config import BLOCK_K, TILINGS, Config, fitted, tilings
from .estimate import by_estimate, by_k_groups
from .product_config import ProductConfig, fit

__all__ = ["choose_grouped", "grouped_candidates", "k_grouped_candidates", "supergroup"]


_BAND_BYTES = 16 << 20  # of A, which stay in an H200's L2 cache


def grouped_candidates(
    shape: tuple[int, int, int],
    groups: int,
    epilogue: Epilogue,
    *,
    grouping: str = "m",
    gpu: Gpu = GPUS["sm_90a"],
) -> list[Config]:
    """Configurations for a product of ``shape`` (M, N, K) whose rows are in ``groups``; the one
    first that is chosen, as if all had as many rows."""
    m, n, k = shape
    suiting = [each for each in TILINGS[128, 128] if _takes_groups(each.config)]
    ranked = by_estimate(suiting, (-(-m // groups), n, k), BLOCK_K, gpu, groups)
    fields = {"grouping": grouping, **epilogue._asdict()}
    return [fit(each, **fields) for each in ranked]


def k_grouped_candidates(
    shape: tuple[int, int, int], groups: int, epilogue: Epilogue, gpu: Gpu = GPUS["sm_90a"]
) -> list[Config]:
    """Configurations for products (M, N) of ``shape`` (M, N, K) of each of ``groups`` of columns;
    the one first that is chosen, as if all had as many columns, and were one below the other."""
    fields = {"b_block": (1, 128), "grouping": "k", **epilogue._asdict()}
    ranked = by_k_groups(tilings((1, 128), epilogue), shape, groups, BLOCK_K, gpu)
    return [fitted(each, shape[0], **fields) for each in ranked]


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
    return max(square(tile, multiprocessors), _BAND_BYTES // (tile[0] * k))


def _takes_groups(config: ProductConfig) -> bool:
    """A box of A's scales has four more than rows, and 256 at most."""
    return config.cluster_size == 1 and config.tile[0] < 256
