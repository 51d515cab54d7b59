"""What a launch does, in numbers that follow from its kernel's configuration and the shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
        groups: rows of each group, which has a B of its own, M in all; none is one of M rows.
        across_groups: bands of ``group`` clusters go on in the next group; else each group is cut
            into bands that are alike.
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
    groups: tuple[int, ...] = ()
    across_groups: bool = False

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise ValueError(f"shape: got {self.shape}; expected positive M, N and K")
        if self.group < 1:
            raise ValueError(f"group: got {self.group}; expected 1 or more clusters")
        if self.groups and (min(self.groups) < 0 or sum(self.groups) != self.shape[0]):
            raise ValueError(f"groups: got {self.groups}; expected M = {self.shape[0]} rows in all")

    @property
    def flops(self) -> int:
        m, n, k = self.shape
        return 2 * m * n * k

    @property
    def cluster_tile(self) -> tuple[int, int]:
        return self.tile[0] * self.cluster[0], self.tile[1] * self.cluster[1]

    @property
    def heights(self) -> list[int]:
        """How many clusters each group takes down."""
        return [-(-rows // self.cluster_tile[0]) for rows in self.groups or self.shape[:1]]

    @property
    def clusters(self) -> tuple[int, int]:
        """How many clusters the output takes: down, and across."""
        return sum(self.heights), -(-self.shape[1] // self.cluster_tile[1])

    @property
    def extents(self) -> tuple[list[int], list[int]]:
        """The rows of A of each cluster down, and the rows of B of each one across, one group's
        after the other's."""
        (m, n, _), (rows, columns) = self.shape, self.cluster_tile
        parts = self.groups or (m,)
        return _cut(parts, rows), _cut((n,) * len(parts), columns)

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
        return k * (m * a + max(1, sum(rows > 0 for rows in self.groups)) * n * b)

    @property
    def output_bytes(self) -> int:
        m, n, _ = self.shape
        return m * n * self.out_bytes

    def raster(self) -> Iterator[tuple[int, int]]:
        """Clusters in the order in which they are taken, as ``kernels.common.schedule`` and
        ``grouped_tiles`` have it: which of the rows of A, and of those of B."""
        heights, across = self.heights, self.clusters[1]
        if self.across_groups:
            owners = [group for group, height in enumerate(heights) for _ in range(height)]
            for row, column in _bands(len(owners), across, self.group):
                yield row, owners[row] * across + column
            return
        first = 0
        for group, down in enumerate(heights):
            height = self.group
            if self.groups:  # bands that are alike
                height = -(-down // max(1, (down + height // 2) // height)) or 1
            for row, column in _bands(down, across, height):
                yield first + row, group * across + column
            first += down


def _cut(lengths: Iterable[int], size: int) -> list[int]:
    """Pieces of a size, and what is left of each length."""
    return [min(size, length - first) for length in lengths for first in range(0, length, size)]


def _bands(down: int, across: int, group: int) -> Iterator[tuple[int, int]]:
    """Rows and columns, ``group`` rows down before the next column."""
    for first in range(0, down, group):
        height = min(group, down - first)
        for index in range(height * across):
            column, row = divmod(index, height)
            yield first + row, column
