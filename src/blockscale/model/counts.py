"""What a launch does, in numbers that follow from its kernel's configuration and the shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """A product of A (M, K) and B (N, K) by CTAs that stay, a multiprocessor each.

    Attributes:
        unit: what the tensor cores multiply: a key of ``Machine.flops``.
        shape: M, N and K.
        tile: rows and columns of the output that a CTA takes at once.
        cluster: blocks down and across, which load what they share once.
        group: clusters down that are taken before the next ones across.
        stages: K blocks in flight, of ``block_k`` elements each.
        shared_bytes: that pass through shared memory for a block's K block, both ways.
        operand_bytes: of an element of A, of B, in global memory; scales included.
        out_bytes: of an element of the output.
        split: blocks that have a part of K each, in the place of each block of ``cluster``.
        accumulate: the output is read, too.
        exposed: share of a tile's storing during which its tensor cores have nothing to do.
    """

    unit: str
    shape: tuple[int, int, int]
    tile: tuple[int, int]
    cluster: tuple[int, int]
    group: int
    stages: int
    block_k: int
    shared_bytes: int
    operand_bytes: tuple[float, float]
    out_bytes: int
    split: int = 1
    accumulate: bool = False
    exposed: float = 1.0

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise ValueError(f"shape: got {self.shape}; expected positive M, N and K")
        if self.group < 1:
            raise ValueError(f"group: got {self.group}; expected 1 or more clusters")

    @property
    def flops(self) -> int:
        m, n, k = self.shape
        return 2 * m * n * k

    @property
    def cluster_tile(self) -> tuple[int, int]:
        return self.tile[0] * self.cluster[0], self.tile[1] * self.cluster[1]

    @property
    def clusters(self) -> tuple[int, int]:
        """How many clusters the output takes: down, and across."""
        (m, n, _), (rows, columns) = self.shape, self.cluster_tile
        return -(-m // rows), -(-n // columns)

    @property
    def blocks(self) -> int:
        """How many CTAs a cluster has."""
        return self.cluster[0] * self.cluster[1] * self.split

    @property
    def k_blocks(self) -> int:
        """How many K blocks a CTA multiplies for a tile."""
        return -(-self.shape[2] // (self.block_k * self.split))

    @property
    def compulsory_bytes(self) -> float:
        """The bytes of A and B: what memory gives at least."""
        (m, n, k), (a, b) = self.shape, self.operand_bytes
        return k * (m * a + n * b)

    @property
    def output_bytes(self) -> int:
        m, n, _ = self.shape
        return m * n * self.out_bytes

    def raster(self) -> Iterator[tuple[int, int]]:
        """Clusters in the order in which they are taken, as ``kernels.common.schedule`` has it."""
        down, across = self.clusters
        for index in range(down * across):
            first = index // (self.group * across) * self.group
            height = min(self.group, down - first)
            column, row = divmod(index - first * across, height)
            yield first + row, column
