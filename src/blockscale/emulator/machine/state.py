"""Threads, warps and CTAs, and which of them are next to run.

The unit of execution is a *fragment*: threads of one CTA that stand at the same instruction,
executed together as numpy vectors. A divergent branch splits a fragment; fragments that meet merge.
In a CTA the fragment with the smallest program counter runs first, which brings diverged threads
together again after a loop or an if (under some random orders that with the largest, which does
not); whoever must wait is passed over, and whoever has run a quantum of instructions stands back
until all others have had theirs.

An instruction is compiled once into a *step*, a function of the fragment. It returns None (go on),
an int (jump), or an :class:`Event`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.errors import Site
from ..memory.buffers import RANK_SHIFT, SYSTEM_SHARED
from ..ptx.program import Function, PtxError, Register, type_bytes
from .local_stack import LocalStack
from .shadow import Shadow
from .undefined import Origin
from .users import Users

if TYPE_CHECKING:
    from ..launches.cluster import Cluster
    from ..launches.launch import Launch
    from ..launches.spins import Spinning
    from .engine import Work

__all__ = [
    "CTA",
    "Deadlock",
    "Diverge",
    "Event",
    "Exit",
    "Flight",
    "Fragment",
    "Frame",
    "Split",
    "Stack",
    "State",
    "Step",
    "Switch",
    "Wait",
    "storage",
]


Step = Callable[["Fragment"], Any]

_STORAGE = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


def storage(register: Register) -> np.dtype:
    """dtype in which a register is kept: bool for predicates, else unsigned bits."""
    return _kept(register.type)


@cache
def _kept(type: str) -> np.dtype:
    return np.dtype(bool if type == "pred" else _STORAGE[type_bytes(type)])


class Event:
    """What a step returns when the fragment cannot simply go on."""


@dataclass(frozen=True, slots=True)
class Diverge(Event):
    """Threads go to several places: (target, mask over the fragment's threads)."""

    ways: tuple[tuple[int, np.ndarray], ...]


@dataclass(frozen=True, slots=True)
class Exit(Event):
    pass


@dataclass(frozen=True, slots=True)
class Switch(Event):
    """Frame and pc of the fragment were changed: call and ret."""


@dataclass(frozen=True, slots=True)
class Wait(Event):
    """Do this instruction again when ``ready`` says so; ``why`` is for the deadlock report.

    With ``may_fail`` it may also be done again without that: Fragment.gives_up then holds.
    ``until``: the time at which it is ready, ns.
    """

    ready: Callable[[], bool]
    why: Callable[[], str]
    may_fail: bool = False
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Split(Event):
    """Only some threads execute the instruction now: the rest is left at it, or passes over it."""

    go: np.ndarray
    skip: bool = False


class State(Enum):
    """How a cluster stands."""

    DONE = "every thread has exited"
    STUCK = "nothing can move"
    IDLE = "nothing can move before time passes"
    RUNNING = "there is more to run"


class Deadlock(PtxError):
    """Nothing can move; the message lists every fragment, where it stands and what it waits for."""


class Flight:
    """Registers that asynchronous work still reads or writes."""

    __slots__ = ("threads",)

    def __init__(self, w: Fragment) -> None:
        self.threads = np.zeros(w.cta.size, bool)  # whose registers, over the threads of the CTA
        self.threads[w.threads] = True

    def touched(self, w: Fragment, register: str, writes: bool) -> None:
        """An instruction of ``w`` is about to use one of them."""
        raise NotImplementedError


class Frame:
    """One function's registers and .param variables, for all threads of a CTA at one call depth."""

    __slots__ = (
        "code", "depth", "flights", "function", "knowing", "local_offsets", "origin", "registers",
        "stack_tops", "threads", "undefined", "variables", "written",
    )  # fmt: skip

    def __init__(self, code: Any, threads: int, depth: int) -> None:
        self.code = code
        self.function: Function = code.function
        self.threads, self.depth = threads, depth
        self.registers = _poisoned(threads, self.function.registers)
        self.variables: dict[str, np.ndarray] = {}  # .param of calls, (threads, bytes)
        self.local_offsets: dict[str, int] = {}
        self.stack_tops = np.zeros(threads, np.int64)  # as they were when it was called
        self.undefined: dict[int, Origin] = {}  # slots of registers with undefined bits
        self.origin: Origin | None = None  # of the undefined bits that are being moved
        self.knowing = False  # that what it reads now has undefined bits
        self.flights: dict[int, list[Flight]] = {}  # slot -> who uses the register in flight
        self.written: dict[int, np.ndarray] = {}  # slot of a tensor-core operand -> by threads

    def variable(self, name: str) -> np.ndarray:
        """A .param variable of a call, (threads, bytes), made when first used."""
        if name not in self.variables:
            function = self.function
            for parameter in (*function.parameters, *function.results, *function.locals.values()):
                if parameter.name == name:
                    self.variables[name] = np.full((self.threads, parameter.nbytes), 0xA5, np.uint8)
        return self.variables[name]


#: Callers, innermost last: (frame, return pc, results as (name here, name in the callee)).
Stack = tuple[tuple[Frame, int, tuple[tuple[str, str], ...]], ...]


_POISON = 14 * b"\xa5" + b"\xf5\xff"


def _poisoned(threads: int, registers: Sequence[Register]) -> list[np.ndarray]:
    """0xfff5a5a5 and alike: a NaN as a float of any size, and no address. Predicates are false."""
    kept = [storage(register) for register in registers]
    rows = {}
    for dtype, count in Counter(kept).items():
        poison = bytes(1) if dtype == np.bool_ else _POISON[-dtype.itemsize :]
        rows[dtype] = iter(np.full((count, threads), np.frombuffer(poison, dtype)[0]))
    return [next(rows[dtype]) for dtype in kept]


class Fragment:
    """Threads of a CTA that are at the same instruction of the same frames."""

    __slots__ = (
        "R", "_agents", "_agents_of", "cta", "frame", "gives_up", "n", "pc", "sel", "spins",
        "stack", "threads", "used", "wait",
    )  # fmt: skip

    def __init__(self, cta: CTA, threads: np.ndarray, frame: Frame, pc: int, stack: Stack) -> None:
        self.cta = cta
        self.wait: Wait | None = None
        self.gives_up = False  # on what it waited for: mbarrier.try_wait
        self.used = 0  # instructions of its quantum
        self.spins: Spinning | None = None  # on what nobody has changed since
        self._agents_of = self._agents = threads[:0]
        self.enter(frame, pc, stack)
        self.select(threads)

    def select(self, threads: np.ndarray) -> None:
        self.threads = threads
        self.n = len(threads)
        first, last = int(threads[0]), int(threads[-1])
        self.sel: Any = slice(first, last + 1) if last - first + 1 == self.n else threads

    def enter(self, frame: Frame, pc: int, stack: Stack) -> None:
        self.frame, self.R, self.pc, self.stack = frame, frame.registers, pc, stack

    def part(self, mask: np.ndarray, pc: int) -> Fragment:
        """Some of the threads, at ``pc``."""
        part = Fragment(self.cta, self.threads[mask], self.frame, pc, self.stack)
        part.used = self.used
        return part

    def alone(self, thread: int) -> Fragment:
        """One of the threads, by its place among them, at the same instruction."""
        if self.n == 1:
            return self
        return self.part(np.arange(self.n) == thread, self.pc)

    def same_place(self, other: Fragment) -> bool:
        return self.pc == other.pc and self.frame is other.frame and self.stack == other.stack

    def location(self) -> str:
        warps = sorted({int(t) // 32 for t in self.threads})
        full = {int(t) for w in warps for t in range(32 * w, min(32 * w + 32, self.cta.size))}
        lanes = ""
        if len(full) != self.n:
            lanes = f" lane {_ranges(sorted({int(t) % 32 for t in self.threads}))}"
        where = f"{self.cta}, warp {_ranges(warps)}{lanes}"
        return f"{where}, {self.frame.code.location(self.pc)}"

    def site(self) -> Site:
        """Where it stands, for the checks."""
        return self.frame.code.site(self.pc, self.cta)

    def agents(self) -> np.ndarray:
        """The agent that each thread is in the cluster's order of things."""
        if self._agents_of is not self.threads:
            self._agents_of, self._agents = self.threads, self.cta.agents(self.threads)
        return self._agents


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


class CTA:
    """A thread block: its threads, shared memory and barriers."""

    def __init__(
        self, cluster: Cluster, index: tuple[int, int, int], rank: int, code: Any, launch: Launch
    ) -> None:
        self.cluster, self.index, self.rank, self.launch = cluster, index, rank, launch
        bx, by, bz = launch.block
        self.size = bx * by * bz
        linear = np.arange(self.size, dtype=np.uint32)
        self.tid = (linear % bx, linear // bx % by, linear // (bx * by))
        self.linear = linear
        self.lane = linear % 32
        self.warps = -(-self.size // 32)
        self.shared_base = rank << RANK_SHIFT
        self.shared = np.full(SYSTEM_SHARED + launch.shared_bytes, 0xFF, np.uint8)
        self.frames: dict[tuple[str, int], Frame] = {}
        self.local = np.full((self.size, 0), 0xFF, np.uint8)
        self.stack = LocalStack(self)
        self.local_blanks: tuple[np.ndarray, Origin] | None = None  # masks of what was stored there
        self.exited = np.zeros(self.size, bool)
        #: The phase of an mbarrier that a suspended thread waits for.
        self.awaited = np.full(self.size, None, object)
        #: Where lanes meet others of their warp that are at another instruction.
        self.met = np.full(self.size, None, object)
        self.meetings: dict[Any, Any] = {}
        self.wake = np.zeros(self.size, np.int64)  # when threads that sleep wake up, ns; 0: awake
        self.registers: dict[int, int] = {}  # that each warp has asked for
        self.barriers: dict[int, Any] = {}
        self.mbarriers: dict[int, Any] = {}
        self.groups: dict[str, Any] = {}  # of asynchronous copies, per kind
        self.tensor: Any = None  # Tensor Memory, when it is first used
        self.shadow: Shadow | None = None
        #: Threads of other CTAs that reached the shared memory: when last, and where.
        self.visits: dict[int, tuple[int, Site]] = {}
        self.users = Users(self)
        self.laps = 0  # times that every fragment had used up its quantum
        frame = self.frame(code, 0)
        self.fragments = [Fragment(self, np.arange(self.size), frame, 0, ())]

    def frame(self, code: Any, depth: int) -> Frame:
        key = (code.function.name, depth)
        if key not in self.frames:
            frame = self.frames[key] = Frame(code, self.size, depth)
            for variable in code.function.variables.values():
                if variable.space == "local":
                    offset = self.grow_local(variable.nbytes, variable.align)
                    frame.local_offsets[variable.name] = offset
        return self.frames[key]

    def grow_local(self, nbytes: int, align: int) -> int:
        """Room in the local memory of every thread; its offset."""
        start = -(-self.local.shape[1] // align) * align
        more = np.full((self.size, start + nbytes - self.local.shape[1]), 0xFF, np.uint8)
        self.local = np.concatenate([self.local, more], axis=1)
        return start

    def __str__(self) -> str:
        rank = self.launch.rank
        return f"CTA {self.index}" + ("" if rank is None else f" of rank {rank}")

    @property
    def alive(self) -> bool:
        return bool(self.fragments)

    def agents(self, threads: np.ndarray) -> np.ndarray:
        """The agents that threads are in the cluster's order of things."""
        lanes = 1 if self.cluster.order is None else self.cluster.order.lanes
        return self.rank * self.warps * lanes + (threads if lanes == 32 else threads // 32)

    def visit(self, agents: np.ndarray, site: Site) -> None:
        """Threads of another CTA reach this one's shared memory."""
        if self.cluster.order is not None and "dsmem_exit" in self.launch.alarms.checks:
            event = self.cluster.order.event(site)
            self.visits.update(dict.fromkeys(agents.tolist(), (event, site)))

    def leave(self) -> None:
        """Its last thread has exited, and its shared memory is gone: whatever other CTAs did there
        must be known to have happened before."""
        order = self.cluster.order
        if order is None:
            return
        known = order.seen_by(self.agents(np.arange(self.size)))
        for agent, (event, site) in self.visits.items():
            if event > known[agent]:
                self.launch.alarms.tell(
                    "dsmem_exit",
                    f"{self} exits, and nothing orders that after an access to its "
                    f"shared memory: {site}",
                    site,
                )
        for work in self.users.unknown(known):
            self.outlived(work)

    def outlived(self, work: Work) -> None:
        """Asynchronous work may still be in flight when the CTA, which it needs, is gone."""
        self.launch.alarms.tell(
            work.exit,
            f"{work.location()} may still be in flight, and needs the memory of {self}, "
            "which exits without having waited for it",
            work.site(),
        )

    def pick(self) -> Fragment | None:
        """The next fragment to run, merged with its equals: the deepest call, then the smallest pc,
        or the largest.

        Fragments that have used up a quantum stand back until the others have had theirs.
        """
        can = [f for f in self.fragments if f.wait is None or f.wait.ready()]
        if not can:
            return None
        quantum = self.cluster.quantum
        fresh = [f for f in can if f.used < quantum]
        if not fresh:
            self.laps += 1
            for fragment in can:
                fragment.used = 0
            fresh = can
        ahead = self.cluster.ahead
        best = max(fresh, key=lambda f: (len(f.stack), ahead * f.pc))
        if best.wait is not None and best.wait.until is None:
            self.cluster.resumed()
        twins = [f for f in can if f is not best and f.same_place(best)]
        if twins:
            best.select(np.sort(np.concatenate([best.threads, *(f.threads for f in twins)])))
            best.used = max(f.used for f in (best, *twins))
            best.gives_up = any(f.gives_up for f in (best, *twins))
            self.fragments = [f for f in self.fragments if f not in twins]
        best.wait = None
        return best
