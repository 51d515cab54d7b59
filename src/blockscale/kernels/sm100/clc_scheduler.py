# mypy: ignore-errors
"""Which tiles a cluster takes: its own, then those of clusters that have not been launched yet.

The grid has a cluster for each tile of the raster. A cluster's scheduler cancels the launch of the
next one that waits (cluster launch control), and its CTAs take that one's tile. It does so a few
tiles ahead of them; a response goes to all CTAs of the cluster at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from ..common.persistent import advance_pipeline
from . import ptx
from .config import CLC_RESPONSE_BYTES, CLC_STAGES, Config

__all__ = ["ClcPipeline", "ClcScheduler"]


@dataclass(frozen=True)
class ClcPipeline:
    """A ring of responses in shared memory.

    Attributes:
        responses: their address.
        full: the address of the mbarriers on which the responses arrive.
        empty: the address of the mbarriers on which those arrive who have read them, in the
            cluster's first CTA.
    """

    config: Config
    responses: Any
    full: Any
    empty: Any

    def first(self):
        """The cluster's own tile, and the stage and phase of the first response."""
        return cute.arch.block_idx()[0] // self.config.cluster_size, Int32(0), Int32(0)

    def more(self, index):
        """Whether there is such a tile."""
        return index >= 0

    def expect(self, stage) -> None:
        """Expect a response's bytes; one thread of each CTA calls it before it waits for them."""
        ptx.mbarrier_arrive_expect_tx(self.full + stage * 8, CLC_RESPONSE_BYTES)

    def read(self, stage, phase):
        """The next tile; negative where there is none. The response stays until all release it."""
        ptx.mbarrier_wait(self.full + stage * 8, phase, self.config.cluster_size)
        return ptx.clc_query(self.responses + stage * CLC_RESPONSE_BYTES, self.config.cluster_size)

    def release(self, stage) -> None:
        """Say that a warp has read a response; one of its threads calls it."""
        ptx.mbarrier_arrive_first_cta(self.empty + stage * 8, self.config.cluster_size)

    def advance(self, stage, phase):
        """The stage and phase of the response after."""
        return advance_pipeline(stage, phase, CLC_STAGES)

    def next(self, stage, phase):
        """The next tile, for a role of one thread, and the stage and phase of the response
        after."""
        index = self.read(stage, phase)
        self.release(stage)
        return index, *self.advance(stage, phase)


class ClcScheduler:
    """Asks for tiles: the work of one thread, in a cluster's first CTA."""

    def __init__(self, clc: ClcPipeline):
        self.clc = clc

    @cute.jit
    def __call__(self):
        clc = self.clc
        index, stage, phase = clc.first()
        while index >= 0:
            ptx.mbarrier_wait(clc.empty + stage * 8, phase ^ 1, clc.config.cluster_size)
            address = clc.responses + stage * CLC_RESPONSE_BYTES
            ptx.clc_try_cancel(address, clc.full + stage * 8, clc.config.cluster_size)
            index = clc.read(stage, phase)
            stage, phase = clc.advance(stage, phase)
