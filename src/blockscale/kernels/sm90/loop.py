# mypy: ignore-errors
"""What mainloops share: the sums of a warpgroup's rows and columns, batch by batch."""

from __future__ import annotations

from cutlass import Float32, cute

from ..common.ring import Ring
from . import ptx
from .product_config import ProductConfig

__all__ = ["Loop"]


class Loop:
    """A warpgroup's way through the K blocks of a tile.

    ``start`` takes addresses; a call, with K blocks to add to ``sums``, gives the next stage.

    Attributes:
        ring: the stages; ``full``, ``empty``: their barriers.
        lane: of a thread, in its warp.
    """

    def __init__(self, config: ProductConfig):
        self.config, self.ring = config, Ring(config.stages, config.parts)

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Steps down the rows and across the columns."""
        config = self.config
        return [(i, j) for i in range(config.row_steps) for j in range(config.column_steps)]

    def allocate(self) -> list:
        """Sums of a thread, a tensor for each batch."""
        return [self.zeros() for _ in self.batches]

    def zeros(self):
        """Of a batch."""
        values = cute.make_rmem_tensor((self.config.batch // 2,), Float32)
        values.fill(0.0)
        return values

    def release(self, stage) -> None:
        """The warp needs it no more; in no block of the cluster is it filled before all say so."""
        barrier = (self.empty + stage).toint()
        ptx.arrive_at(barrier, self.lane, self.config.blocks)
