"""What threads have allocated: the heap of malloc and free. CUDA C++ Programming Guide, "Dynamic
Global Memory Allocation and Operations".

No byte is given away twice, so that what was freed is known for as long as the launch runs.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ..ptx.program import PtxError
from .buffers import Buffer, GlobalMemory, MemoryFault

__all__ = ["Heap"]

_MOST = 8 << 20  # bytes that are allocated at once: cudaLimitMallocHeapSize, unless it is set
_ROOM = 64 << 20  # and in all
_ALIGNMENT = 16
_GAP = 64  # bytes between blocks


@dataclass(slots=True)
class _Block:
    start: int
    size: int
    owner: str
    freed: str = ""  # by whom

    def __str__(self) -> str:
        return f"the block of {self.size} bytes at {self.start:#x} that {self.owner} allocated"


class Heap:
    """The heap of a launch, in its global memory.

    Attributes:
        buffer: all of it.
    """

    def __init__(self, memory: GlobalMemory, whose: str = "") -> None:
        self._memory = memory
        data = np.zeros(_ROOM, np.uint8)  # pages that nobody touches cost nothing
        self._data, self._base = data, data.ctypes.data
        self.buffer = memory.add(Buffer(f"the heap{whose}", self._base, data, check=self.check))
        self._blocks: list[_Block] = []
        self._starts: list[int] = []
        self._next = self._base + _GAP + -self._base % _ALIGNMENT
        self._used = 0

    def allocate(self, size: int, owner: str) -> int:
        """The address of a new block, 0 if there is no room."""
        if self._used + size > _MOST:
            return 0
        start = self._next
        self._next += size + _GAP + -size % _ALIGNMENT
        if self._next > self._base + _ROOM:
            raise PtxError(
                f"malloc: {_ROOM >> 20} MiB have been allocated in all, and the emulator gives no "
                "byte away twice; allocate less in one launch"
            )
        self._data[start - self._base :][:size] = 0xFF
        self._blocks.append(_Block(start, size, owner))
        self._starts.append(start)
        self._used += size
        self._changed()
        return start

    def free(self, address: int, owner: str) -> int:
        """The bytes of the block that begins there; MemoryFault unless there is one that is not
        free yet. 0 is nothing."""
        if not address:
            return 0
        block = self._before(address)
        if block is None or block.start != address:
            raise MemoryFault(f"free: no block of malloc begins at {address:#x}")
        if block.freed:
            raise MemoryFault(f"free: {block} was freed by {block.freed} already")
        block.freed = owner
        self._used -= block.size
        self._changed()
        return block.size

    def check(self, addresses: np.ndarray, size: int) -> None:
        """MemoryFault unless each of ``size`` bytes there is in a block."""
        for address in np.unique(addresses).tolist():
            block = self._before(address)
            if block is None or address + size > block.start + block.size + _GAP:
                raise MemoryFault(f"global address {address:#x} (+{size}) is in no block of malloc")
            if address + size > block.start + block.size:
                raise MemoryFault(f"global address {address:#x} (+{size}) is out of {block}")
            if block.freed:
                raise MemoryFault(
                    f"global address {address:#x} (+{size}) is in {block}, which {block.freed} has "
                    "freed"
                )

    def _before(self, address: int) -> _Block | None:
        """The last block that begins no later."""
        at = bisect_right(self._starts, address) - 1
        return self._blocks[at] if at >= 0 else None

    def _changed(self) -> None:
        """Others may wait for it."""
        self._memory.stores += 1
        if self._memory.changes is not None:
            self._memory.changes += 1
