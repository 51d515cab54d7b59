"""What to compile for a product of bf16 matrices, and how it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dtypes import BFLOAT16
from ..common.epilogue import Epilogue
from ..common.gpu import GPUS, Gpu
from .product_config import ROW, Candidate, ProductConfig, by_estimate, fit

__all__ = ["BLOCK_K", "Bf16Config", "candidates", "choose_config"]

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

    def wrong(self) -> dict[str, Any]:
        return ProductConfig.wrong(self) | {
            "a_major": self.a_major not in MAJORS,
            "b_major": self.b_major not in MAJORS
            or (self.b_major == "mn" and self.mma_n % BLOCK_K),
        }


def _candidate(k_block_ns: int, tile_ns: int, **fields: Any) -> Candidate:
    return Candidate(Bf16Config(BFLOAT16, epilogue_stages=1, **fields), k_block_ns, tile_ns)


_SQUARE = {"tile": (128, 128), "mma_n": 128, "stages": 5}
_FEW = {"cluster": (1, 1), "warpgroup_split_k": True, "stages": 7}

# Estimated from FP8's: as many bytes a K block, and tensor cores at half the rate.
CANDIDATES = (
    _candidate(608, 3729),
    _candidate(613, 3836, cluster=(1, 1)),
    _candidate(480, 2571, tile=(128, 192), mma_n=192),
    _candidate(344, 1410, **_SQUARE),
    _candidate(345, 1934, **_SQUARE, cluster=(1, 1)),
    _candidate(275, 1343, **_FEW, tile=(128, 64), mma_n=64),
    _candidate(296, 922, **_FEW, tile=(64, 128), mma_n=128),
    _candidate(204, 543, **_FEW, tile=(64, 64), mma_n=64),
    _candidate(340, 740, **_FEW, tile=(64, 64), mma_n=64, split_k=2),
    _candidate(540, 840, **_FEW, tile=(64, 64), mma_n=64, split_k=4),
    _candidate(840, 1040, **_FEW, tile=(64, 64), mma_n=64, split_k=8),
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
    return [fit(each.config, **fields) for each in by_estimate(CANDIDATES, shape, BLOCK_K, gpu)]


def choose_config(
    shape: tuple[int, int, int],
    epilogue: Epilogue,
    *,
    majors: tuple[str, str] = ("k", "k"),
    gpu: Gpu = GPUS["sm_90a"],
) -> Bf16Config:
    """The kernel for a product of ``shape`` (M, N, K)."""
    return candidates(shape, epilogue, majors=majors, gpu=gpu)[0]
