"""What to compile for a routing: a pure function of what is routed, and its result."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.gpu import Gpu, Unsupported

__all__ = ["THREADS", "WARPS", "RouteConfig", "choose_route"]

THREADS = 1024  # of a CTA
WARPS = THREADS // 32
_MANY = 256 * THREADS  # pairs above which a thread has several: each CTA reads all chunks' counts
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """A kernel: all that its code depends on.

    Attributes:
        num_experts: a thread counts the rows of each, and one those of none.
        index_bytes: of an expert's number: 4 or 8.
        rounds: pairs of a thread.
    """

    arch: str
    num_experts: int
    index_bytes: int
    rounds: int

    @property
    def bins(self) -> int:
        """Counters of pairs: one for each expert, and one for pairs of none."""
        return self.num_experts + 1

    @property
    def chunk(self) -> int:
        """Pairs of a CTA."""
        return THREADS * self.rounds


def choose_route(pairs: int, num_experts: int, index_bytes: int, gpu: Gpu) -> RouteConfig:
    """The kernel; Unsupported of more experts than it counts."""
    if num_experts >= THREADS:
        raise Unsupported(f"num_experts is {num_experts}: the kernel takes up to {THREADS - 1}")
    return RouteConfig(gpu.arch, num_experts, index_bytes, _ROUNDS if pairs > _MANY else 1)
