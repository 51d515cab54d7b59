"""What a kernel was launched with, and how its device behaves."""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..alarms.alarm import Alarms
from ..memory.buffers import SYSTEM_SHARED, Buffer, GlobalMemory
from ..memory.heap import Heap
from .clock import Clock

if TYPE_CHECKING:
    from ..global_races.races import Races
    from ..observe.watch import Watch
    from .workers import Peers

__all__ = ["Launch", "Settings"]

_TILE_BARRIERS = 20  # bytes: a word for each size of such a tile


@dataclass(frozen=True, slots=True)
class Settings:
    """How a device behaves where hardware leaves it open."""

    target: str = "sm_90a"
    completion: str = "eager"
    seed: int = 0
    exact: bool = False  # sums of the tensor cores
    resident: int | None = None  # clusters that start at once


@dataclass(slots=True)
class Launch:
    """What a kernel was launched with."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int  # static and dynamic
    dynamic_shared: int
    shared_start: int  # the first address that the kernel may reach
    static_shared: dict[str, int]  # name -> offset in shared memory
    memory: GlobalMemory
    parameters: Buffer
    parameter_offsets: dict[str, int]
    module_variables: dict[str, Buffer]
    heap: Heap | None  # of malloc, if the module calls it
    workspace: Buffer | None  # what the driver gives a cooperative launch, if the module asks
    settings: Settings
    cell: int  # bytes of shared memory that the checks tell apart
    programmatic: bool  # it may start before the kernel before is over, and that is checked
    clock: Clock
    rank: int | None  # among launches that run together
    device: int  # the number of its device among theirs
    waiting: deque[tuple[int, int, int]] = field(default_factory=deque)  # clusters not yet started
    peers: Peers | None = None  # the other processes that run some of its clusters
    watch: Watch | None = None
    alarms: Alarms = field(default_factory=Alarms)
    races: Races | None = None  # in global memory, of all launches that run together
    #: Memory at global addresses that no other launch of its stream writes.
    own: tuple[Buffer, ...] = ()
    #: Around atomic operations on global memory.
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def given_shared(self) -> slice:
        """Bytes that may be read before anybody has written them: barriers of tiles of cooperative
        groups, in which each warp clears its bit; what was there an H100 does not clear."""
        start = self.shared_start
        return slice(start, min(start + _TILE_BARRIERS, SYSTEM_SHARED))

    @property
    def clusters_along(self) -> tuple[int, int, int]:
        """How many clusters the grid is long, along x, y and z: a cluster divides the grid."""
        (x, y, z), (cx, cy, cz) = self.grid, self.cluster
        return x // cx, y // cy, z // cz

    @property
    def clusters(self) -> int:
        return math.prod(self.clusters_along)
