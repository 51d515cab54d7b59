"""A cluster: CTAs that run together, whose fragment is next, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import numpy as np

from ..alarms.alarm import CLOCKED
from ..alarms.errors import Site
from ..clocks.knowledge import Actor
from ..clocks.order import Order
from ..clocks.scopes import CLUSTER, SYS, WEAK
from ..global_races.member import Member
from ..machine.engine import Engine
from ..machine.shadow import Shadow
from ..machine.state import CTA, Diverge, Event, Exit, Fragment, Split, State, Switch, Wait
from ..memory.buffers import RANK_SHIFT, SYSTEM_SHARED, MemoryFault
from ..ptx.program import PtxError
from .launch import Launch
from .spins import Turn

__all__ = ["Cluster"]

#: Instructions that a fragment may run while others could: turns are fair, or some warps overtake
#: others by far, as the seed says.
_QUANTA = {"eager": (64,), "late": (1024,), "random": (16, 64, 1024)}
_PATIENCE = 1024  # instructions of whoever may be spinning, before a copy in flight completes
_FAILURES = 32  # rounds of failing waits in which nothing else happens: then it is a deadlock


@cache
def _turns(completion: str, seed: int) -> tuple[int, int]:
    """The quantum, and the sign of pc by which the next fragment is the largest.

    Smallest pc first (-1) is fast: fragments meet again. It also runs the body of an if before what
    follows for the others, a store before its reader; under random half of the seeds turn it round.
    """
    quanta, draw = _QUANTA[completion], np.random.default_rng((seed, 1))
    quantum = quanta[int(draw.integers(len(quanta)))]
    return quantum, int(draw.choice((-1, 1))) if completion == "random" else -1


class Cluster:
    """CTAs that run together; the asynchronous work they have in flight lives here."""

    def __init__(self, launch: Launch, code: Any, index: tuple[int, int, int]) -> None:
        self.launch, self.index = launch, index
        cx, cy, cz = launch.cluster
        ix, iy, iz = index
        self.ctas = [
            CTA(self, (ix * cx + x, iy * cy + y, iz * cz + z), rank, code, launch)
            for rank, (z, y, x) in enumerate(np.ndindex(cz, cy, cx))
        ]
        self.barrier: Any = None
        self.at_end: list[Callable[[], None]] = []
        settings = launch.settings
        self.engine = Engine(settings.completion, (settings.seed, *index), launch.watch)
        self.quantum, self.ahead = _turns(settings.completion, settings.seed)
        self.patience = _PATIENCE // self.quantum  # in laps
        self.order: Order | None = None
        self.member: Member | None = None  # of those that share global memory
        if launch.alarms.checks & CLOCKED or launch.races is not None:
            lanes = 32 if "lanes" in launch.alarms.checks else 1
            self.order = Order(
                len(self.ctas),
                self.ctas[0].warps,
                lanes=lanes,
                programmatic=launch.programmatic,
                tensor="tcgen05_order" in launch.alarms.checks,
                scopes=CLUSTER if launch.races is None else SYS,
                runs=lambda: any(cta.tensor is not None for cta in self.ctas),
                copies_fence="cp_async_proxy" not in launch.alarms.checks,
            )
            if launch.races is not None:
                self.member = launch.races.enter(self)
            cells = SYSTEM_SHARED + launch.shared_bytes
            for cta in self.ctas:
                cta.shadow = Shadow(
                    f"byte {{}} of the shared memory of {cta}",
                    -(-cells // launch.cell), self.order, launch.alarms, launch.cell,
                    cta.shared_base,
                )  # fmt: skip
                given = np.arange(cells)[launch.given_shared]
                cta.shadow.given = np.unique(given // launch.cell)
            self.order.who.users += [self._in_flight, *(cta.users.columns for cta in self.ctas)]
        self._forced = 0  # laps when a copy was last made to complete
        self._failures = 0  # rounds of waits that gave up since anything moved
        self._idled = 0  # turns in which nothing could move
        self.looked = -1  # the engine's tick when a thread last read the clock

    def _in_flight(self) -> list[int]:
        """Columns of the work in flight."""
        works = self.engine.flying
        return [c for work in works if work.actor is not None for c in work.actor.needed()]

    def resumed(self) -> None:
        """Somebody's wait is over."""
        self.engine.moved = self.engine.tick
        self._failures = 0

    def begin(
        self, w: Fragment, generic: bool = False, code: int = WEAK, told: Hashable = None,
        tensor: bool = False,
    ) -> Actor | None:  # fmt: skip
        """The place in the order of things of a copy that ``w`` issues; see Order.begin."""
        if self.order is None:
            return None
        return self.order.begin(w.agents(), generic, code, told, tensor)

    def follow(self, w: Fragment, pipe: Hashable, tensor: bool = False) -> Actor | None:
        """The same for work in a pipe."""
        return self.order.follow(w.agents(), pipe, tensor) if self.order else None

    def gone(self, cta: CTA, address: int, site: Site) -> None:
        """A thread reaches shared memory: that of a CTA which has exited is not there."""
        if not cta.alive:
            message = f"shared address {address:#x} is of {cta}, which has exited"
            self.launch.alarms.tell("dsmem_exit", message, site)

    def holds(self, address: int, size: int) -> bool:
        """Whether there are ``size`` bytes of shared memory at a shared::cluster address."""
        try:
            self.shared(address, size)
        except MemoryFault:
            return False
        return True

    def shared(self, address: int, size: int) -> tuple[CTA, int]:
        """The CTA and offset of a shared::cluster address; MemoryFault if it is none."""
        rank, offset = address >> RANK_SHIFT, address & ((1 << RANK_SHIFT) - 1)
        if rank >= len(self.ctas):
            raise MemoryFault(f"shared address {address:#x} names CTA {rank} of {len(self.ctas)}")
        cta = self.ctas[rank]
        if offset < self.launch.shared_start or offset + size > len(cta.shared):
            none = "" if self.launch.dynamic_shared else ", none of them dynamic (shared=)"
            raise MemoryFault(
                f"shared address {address:#x} (+{size}) is out of bounds: {cta} has "
                f"{len(cta.shared) - SYSTEM_SHARED} bytes from {SYSTEM_SHARED:#x}{none}"
            )
        return cta, offset

    @property
    def laps(self) -> int:
        """Laps of the CTA that had most, and turns in which none could move."""
        return max(cta.laps for cta in self.ctas) + self._idled

    @property
    def to_patience(self) -> int:
        """Laps until a copy in flight is made to complete: whoever spins may be waiting for it."""
        return self._forced + self.patience - sum(cta.laps for cta in self.ctas)

    def run(self, rounds: int) -> State:
        """Run until every thread has exited, nothing can move, or all CTAs had some turns."""
        for _ in range(rounds):
            moved = False
            for cta in self.ctas:
                fragment = cta.pick()
                if fragment is not None:
                    moved = True
                    _run(cta, fragment)
            if moved and self.to_patience > 0:
                self.engine.turn()
                continue
            self._forced += self.patience - self.to_patience
            if self.engine.force():
                self._failures = 0
            elif not moved and (self.wake is not None or not self._give_up()):
                if any(cta.alive for cta in self.ctas):
                    return self._stands()
                for check in self.at_end:
                    check()
                return State.DONE
        return State.RUNNING

    def _waits(self) -> list[Wait]:
        return [f.wait for cta in self.ctas for f in cta.fragments if f.wait is not None]

    @property
    def wake(self) -> int | None:
        """When the first of its threads that sleep wakes up, ns."""
        return min((wait.until for wait in self._waits() if wait.until is not None), default=None)

    @property
    def may_fail(self) -> bool:
        """Whether somebody waits who may be told that it was in vain."""
        return any(wait.may_fail for wait in self._waits())

    @property
    def waits(self) -> bool:
        """Whether each of its threads waits for something, and not for time to pass."""
        fragments = [f for cta in self.ctas for f in cta.fragments]
        return all(f.wait is not None and f.wait.until is None for f in fragments)

    def _stands(self) -> State:
        """Nothing can move: not before time has passed, if somebody sleeps, goes by the clock or
        may be told that the wait was in vain, and looks at what others do then."""
        if self.wake is None and self.looked < self.engine.moved and not self.may_fail:
            return State.STUCK
        self._idled += 1
        return State.IDLE

    def time_passed(self) -> None:
        """Much of it: nobody is suspended for so long."""
        self._failures = 0
        self._give_up()

    def _give_up(self) -> bool:
        """Let those waits fail that may; not for ever while nothing else happens."""
        waiting = [f for cta in self.ctas for f in cta.fragments if f.wait and f.wait.may_fail]
        if not waiting or self._failures == _FAILURES:
            return False
        self._failures += 1
        for fragment in waiting:
            fragment.wait, fragment.gives_up = None, True
        return True

    def report(self) -> str:
        lines = [
            f"{fragment.location()} waits for {fragment.wait.why() if fragment.wait else 'a turn'}"
            for cta in self.ctas
            for fragment in sorted(cta.fragments, key=lambda f: int(f.threads[0]))
        ]
        return "\n  ".join(lines)


def _run(cta: CTA, fragment: Fragment) -> None:
    """Run one fragment until it meets or overtakes another, waits, or has had its quantum."""
    meet = len(fragment.frame.code.steps)
    for other in cta.fragments:
        if fragment.pc < other.pc < meet and other.frame is fragment.frame and not other.wait:
            meet = other.pc
    code = fragment.frame.code
    steps, counts, pc, n = code.steps, code.counts, fragment.pc, fragment.n
    before, engine, clock = fragment.used, cta.cluster.engine, cta.launch.clock
    engine.base = engine.tick - before
    used, quantum, turn = before, cta.cluster.quantum, Turn()
    spins = fragment.spins
    if spins is not None and not spins.goes_on(fragment, meet):
        spins = fragment.spins = None
    try:
        while used < quantum:
            if spins is not None:
                pc = spins.count(fragment, pc, quantum - used)
                fragment.used = quantum
                break
            used += 1
            fragment.pc, fragment.used = pc, used
            result = steps[pc](fragment)
            if result is None:
                counts[pc] += n
                pc += 1
            elif type(result) is int:
                counts[pc] += n
                if result <= pc < meet:
                    spins = fragment.spins = turn.jumps(fragment, pc, result)
                pc = result
            elif type(result) is Split:
                cta.fragments.append(fragment.part(~result.go, pc + result.skip))
                fragment.select(fragment.threads[result.go])
                n = fragment.n
                continue
            else:
                if type(result) is not Wait:
                    counts[pc] += n
                _handle(cta, fragment, result)
                return
            if pc >= meet:
                break
        fragment.pc = pc
    except PtxError as error:
        raise _located(error, code, pc, fragment) from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _located(PtxError(f"emulator: {error!r}"), code, pc, fragment) from error
    finally:
        if not engine.quiet:
            clock.now += fragment.used - before
        engine.tick += fragment.used - before
        if engine.watch is not None:
            engine.watch.ran(fragment, engine.tick, fragment.used - before)


def _handle(cta: CTA, fragment: Fragment, event: Event) -> None:
    if isinstance(event, Wait):
        fragment.wait = event
        engine = cta.cluster.engine
        if engine.watch is not None:
            engine.watch.waits(fragment, engine.tick, event)
    elif isinstance(event, Exit):
        cta.exited[fragment.threads] = True
        cta.cluster.engine.moved = cta.cluster.engine.tick
        cta.fragments.remove(fragment)
        if cta.cluster.barrier is not None:
            cta.cluster.barrier.settle()
        if not cta.alive:
            cta.leave()
    elif isinstance(event, Diverge):
        cta.fragments.remove(fragment)
        cta.fragments += [fragment.part(mask, target) for target, mask in event.ways]
    elif not isinstance(event, Switch):
        raise AssertionError(event)


def _located(error: PtxError, code: Any, pc: int, fragment: Fragment) -> PtxError:
    """The error with CTA, warp and line, unless it is about another line."""
    instructions = code.function.instructions
    if pc >= len(instructions) or error.line not in (None, instructions[pc].line):
        return error
    return type(error)(f"{error.message}; {fragment.location()}", instructions[pc].line)
