"""mbarrier objects: arrivals, transactions and phases. PTX ISA 9.7.13.15."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..clocks.knowledge import Knowledge, joined
from ..ptx.program import PtxError

if TYPE_CHECKING:
    from .state import CTA

__all__ = ["COUNT_BITS", "MOST", "OPAQUE", "MBarrier", "Phase"]

MOST = (1 << 20) - 1  # of counts and of bytes
OPAQUE = 8 * b"\xb8"  # what an object holds in memory
COUNT_BITS = 20  # a state token is the phase above the pending count


class Phase:
    """A phase of a barrier, to which those who wait for its end hold on."""

    __slots__ = ("barrier", "known", "number", "over")

    def __init__(self, barrier: MBarrier, number: int) -> None:
        self.barrier, self.number = barrier, number
        self.over = number < 0  # the phase before the first
        self.known: Knowledge | None = None  # what its arrivals released


class MBarrier:
    """One barrier object in shared memory.

    A phase ends when no arrivals are pending and all bytes that were announced have come.
    """

    def __init__(self, cta: CTA, offset: int, count: int) -> None:
        self.cta, self.offset = cta, offset
        self.count = self.pending = count
        self.bytes = 0
        self.last, self.current = Phase(self, -1), Phase(self, 0)
        #: The first thread of a fragment -> the phase that it has seen end last.
        self.seen: dict[int, int] = {}
        self.uses: dict[int, int] = {}  # agent -> the event of its last use

    @property
    def intact(self) -> bool:
        """Whether its memory was left alone: what it holds is opaque."""
        return self.cta.shared[self.offset : self.offset + 8].tobytes() == OPAQUE

    @property
    def phase(self) -> int:
        """Phases that have ended."""
        return self.current.number

    def __str__(self) -> str:
        return f"mbarrier {self.offset:#x} of {self.cta}"

    def describe(self) -> str:
        text = f"{self}, phase {self.phase}: {self.pending} of {self.count} arrivals pending"
        if self.bytes > 0:
            text += f", {self.bytes} bytes announced have not come"
        if self.bytes < 0:
            text += f", {-self.bytes} bytes came unannounced"
        return text

    def missed(self, thread: int, line: int) -> str:
        """Whether the phase that a thread waits for is not the one after those it has seen."""
        expected = self.seen.get(thread, -1) + 1
        expected += (self.phase - expected) % 2
        if expected == self.phase:
            return ""
        return (
            f"; waited for phase {expected} from line {line}; the barrier is in phase {self.phase}"
        )

    def learn(self, known: Knowledge | None) -> None:
        if known is not None:
            before = self.current.known
            self.current.known = known if before is None else joined(before, known)

    def arrive(self, count: int = 1) -> int:
        """Count arrivals; returns the state before."""
        if count > self.pending:
            raise PtxError(
                f"{count} arrivals at {self}, where {self.pending} of {self.count} are pending "
                f"in phase {self.phase}"
            )
        token = self.phase << COUNT_BITS | self.pending
        self.pending -= count
        self.settle()
        return token

    def expect(self, count: int) -> None:
        self.bytes += count
        if self.bytes > MOST:
            raise PtxError(f"{self} expects {self.bytes} bytes; at most {MOST}")

    def complete(self, count: int, known: Knowledge | None = None) -> None:
        """Bytes have come."""
        self.learn(known)
        self.bytes -= count
        if self.bytes < -MOST:
            raise PtxError(f"{-self.bytes} bytes came to {self} unannounced")
        self.settle()

    def settle(self) -> None:
        if self.pending:
            return
        if self.bytes < 0:
            raise PtxError(
                f"wrong transaction bytes: {-self.bytes} more bytes came to {self} than its "
                f"phase {self.phase} expects"
            )
        if self.bytes == 0:
            self.current.over = True
            self.cta.cluster.engine.stores += 1
            self.last, self.current = self.current, Phase(self, self.phase + 1)
            self.pending = self.count
