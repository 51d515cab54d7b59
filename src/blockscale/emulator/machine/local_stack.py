"""What alloca gives: a part of local memory that each thread takes from, and gives back, in order.

PTX ISA 9.7.17. The stack is regions of local memory, one after the other but with .local variables
between, for those of a function get their room when it is first called. It grows up: only who
compares pointers sees that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..memory.buffers import MemoryFault

if TYPE_CHECKING:
    from .state import CTA, Frame

__all__ = ["LocalStack"]

_MOST = 512 << 10  # bytes of local memory of a thread
_REGION = 256  # bytes of the first region; each one more is at least as large as all before


class LocalStack:
    """Those of the threads of a CTA."""

    def __init__(self, cta: CTA) -> None:
        self._cta = cta
        self._regions: list[tuple[int, int]] = []
        #: Where the next allocation of each thread begins; it names a region by lying in it.
        self.tops = np.zeros(cta.size, np.int64)

    def enter(self, frame: Frame, threads: np.ndarray) -> None:
        """Threads call a function: what it will allocate ends with it."""
        frame.stack_tops[threads] = self.tops[threads]

    def leave(self, frame: Frame, threads: np.ndarray) -> None:
        self.tops[threads] = frame.stack_tops[threads]

    def allocate(self, threads: np.ndarray, nbytes: np.ndarray, align: int) -> np.ndarray:
        """Offsets in local memory of so many bytes for each thread, which hold nothing yet."""
        starts = np.zeros(len(threads), np.int64)
        wanted = np.stack([self.tops[threads], nbytes.astype(np.int64)], 1)
        for top, size in np.unique(wanted, axis=0).tolist():
            some = (wanted == (top, size)).all(1)
            starts[some] = start = self._room(top, size, align)
            self.tops[threads[some]] = start + size
            self._cta.local[threads[some], start : start + size] = 0xFF
        return starts

    def _room(self, top: int, size: int, align: int) -> int:
        for begin, end in self._regions:
            start = -(-max(top, begin) // align) * align
            if top <= end and start + size <= end:
                return start
        nbytes = max(size, _REGION, sum(end - begin for begin, end in self._regions))
        if self._cta.local.shape[1] + nbytes > _MOST:
            raise MemoryFault(
                f"stack overflow: alloca of {size} bytes; a thread has {_MOST} bytes of local "
                f"memory, of which {self._cta.local.shape[1]} are in use"
            )
        begin = self._cta.grow_local(nbytes, max(align, 16))
        self._regions.append((begin, begin + nbytes))
        return begin
