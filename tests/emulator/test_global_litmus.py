"""Races in global memory of random programs, against the memory model written down as relations.

PTX ISA 8.7 to 8.9, over the events of one execution: who read what, morally strong, observation,
release and acquire patterns, synchronization, causality. Nothing of the emulator's clocks is used.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace
from blockscale.emulator.clocks.scopes import CLUSTER, CTA, GPU, SYS
from blockscale.emulator.global_races.member import Member
from blockscale.emulator.global_races.races import Races
from kernels import text

PLACES = 4
ORDERS = ("relaxed", "acquire", "release", "acq_rel")


@dataclass(eq=False)
class Event:
    """What a thread did: its device, cluster and CTA."""

    thread: tuple[int, int, int]
    place: int | None  # None: a fence
    reads: bool = False
    writes: bool = False
    reach: int = 0
    acquires: bool = False
    releases: bool = False
    returns: bool = True
    total: bool = False
    source: Event | None = None  # the write that it read

    @property
    def atomic(self) -> bool:
        return self.reads and self.writes


def morally_strong(a: Event, b: Event) -> bool:
    if a.thread == b.thread:
        return True
    equal = [x == y for x, y in zip(a.thread, b.thread, strict=True)]
    least = CTA if all(equal) else CLUSTER if all(equal[:2]) else GPU if equal[0] else SYS
    return min(a.reach, b.reach) >= least


def observed(write: Event, read: Event) -> bool:
    """8.9.2, for strong ones."""
    at = read
    while at.source is not None:
        if not (at.reach and at.source.reach and morally_strong(at, at.source)):
            return False
        if at.source is write:
            return True
        if not at.source.atomic:
            return False
        at = at.source
    return False


def causality(events: list[Event]) -> np.ndarray:
    """Which precedes which, in base causality order."""
    n = len(events)
    number = {id(event): i for i, event in enumerate(events)}
    before = np.zeros((n, n), bool)
    for i, j in product(range(n), range(n)):
        before[i, j] = i < j and events[i].thread == events[j].thread
    program = before.copy()
    releases, acquires = [], []  # (first, write), (read, last)
    for i, x in enumerate(events):
        if x.writes and x.reach and x.releases:
            releases.append((i, i))
        if x.releases:
            later = (j for j in range(n) if program[i, j] and events[j].writes and events[j].reach)
            releases += [(i, j) for j in later if x.place in (None, events[j].place)]
        if x.reads and x.reach and x.returns:
            if x.acquires:
                acquires.append((i, i))
            later = (j for j in range(n) if program[i, j] and events[j].acquires)
            acquires += [(i, j) for j in later if events[j].place in (None, x.place)]
    for (x, w), (r, y) in product(releases, acquires):
        if observed(events[w], events[r]) and morally_strong(events[x], events[y]):
            before[x, y] = True
    seen = [(number[id(w)], j) for w in events for j, r in enumerate(events) if observed(w, r)]
    fences = [i for i, event in enumerate(events) if event.total]
    while True:
        closed = before.copy()
        for k in range(n):
            closed |= closed[:, k : k + 1] & closed[k : k + 1]
        for i, j in product(fences, fences):  # the other way round would contradict causality
            if i != j and morally_strong(events[i], events[j]):
                closed[i, j] |= any(
                    closed[i, w] and closed[r, j] and events[r].returns for w, r in seen
                )
        if (closed == before).all():
            return closed
        before = closed


def racing(events: list[Event]) -> list[tuple[int, int]]:
    before = causality(events)
    return [
        (i, j)
        for j, y in enumerate(events)
        for i, x in enumerate(events[:j])
        if x.place is not None
        and x.place == y.place
        and (x.writes or y.writes)
        and not before[i, j]
        and not (x.reach and y.reach and morally_strong(x, y))
    ]


# --- programs and their executions ----------------------------------------------------------------


def program(rng: random.Random, first: int, length: int, scopes: Sequence[str]) -> str:
    """A thread's: weak accesses to data, strong ones to flags, fences. Values are all different."""
    lines = ["st.global.u32 [%out+8], 1;"] if not first else []
    for i in range(first, first + length):
        flag = f"[%out+{4 * rng.randrange(2)}]"
        scope = rng.choice(scopes)
        lines += [
            f"nanosleep.u32 {rng.randrange(200)};",
            rng.choice(
                (
                    f"st.global.u32 [%out+12], {i};"
                    if i == length
                    else f"membar.{rng.choice(('gl', 'sys'))};",
                    f"ld.{rng.choice(('relaxed', 'acquire'))}.{scope}.global.u32 %r1, {flag};",
                    f"ld.acquire.{scope}.global.u32 %r1, {flag};",
                    f"st.{rng.choice(('relaxed', 'release'))}.{scope}.global.u32 {flag}, {i};",
                    f"st.release.{scope}.global.u32 {flag}, {i};",
                    f"atom.{rng.choice(ORDERS)}.{scope}.global.exch.b32 %r1, {flag}, {i};",
                    f"red.{rng.choice(ORDERS[::2])}.{scope}.global.add.u32 {flag}, {1 << 20};",
                    f"fence.{rng.choice(('acq_rel', 'sc'))}.{scope};",
                    "membar.gl;",
                )
            ),
        ]
    lines += ["ld.global.u32 %r1, [%out+8];"] if first and rng.random() < 0.7 else []
    return " ".join(lines)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of what is launched from now on."""
    events: list[Event] = []
    last: dict[int, Event] = {}
    read, write, fence = Races.read, Races.write, Member.fence

    def event(by: Any, where: Any, how: Any, **more: Any) -> Event:
        launch, cluster = by.cta.launch, by.cta.cluster
        found = Event(
            (launch.device, cluster.member.number, by.cta.rank), where, **more,
            reach=how.reach if how else 0, acquires=bool(how and how.acquires),
            releases=bool(how and how.releases), returns=not how or how.returns,
        )  # fmt: skip
        events.append(found)
        return found

    def on_read(self: Races, by: Any, where: Any, size: int, how: Any) -> None:
        made = event(by, int(where[0]), how, reads=True)
        made.source = last.get(int(where[0]))
        made.releases &= made.writes
        read(self, by, where, size, how)

    def on_write(self: Races, by: Any, where: Any, size: int, how: Any, same: Any) -> None:
        if how is not None and how.updates:
            made = events[-1]
            made.writes, made.releases = True, how.releases
        else:
            made = event(by, int(where[0]), how, writes=True)
        write(self, by, where, size, how, same)
        last[int(where[0])] = made

    def on_fence(
        self: Member, w: Any, reach: int, releases: bool, acquires: bool, total: bool
    ) -> None:
        made = event(w, None, None, total=total)
        made.reach, made.acquires, made.releases = reach, acquires, releases
        fence(self, w, reach, releases, acquires, total)

    monkeypatch.setattr(Races, "read", on_read)
    monkeypatch.setattr(Races, "write", on_write)
    monkeypatch.setattr(Member, "fence", on_fence)
    return events


def launched(rng: random.Random, seed: int) -> bool:
    """Run a random program; whether there was an alarm."""
    devices, cluster = rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    wide = "sys" if devices > 1 else "gpu"
    scopes = [wide] * rng.choice((5, 20, 100)) + ["cta", "cluster", "gpu", "sys"]
    out, calls = np.zeros(PLACES, np.uint32), []
    for rank in range(devices):
        bodies = [
            program(rng, 100 * i + 1000 * rank, rng.randrange(3, 9), scopes)
            for i in range(2 * cluster)
        ]
        lines = ["mov.u32 %r9, %ctaid.x;"]
        lines += [f"setp.eq.u32 %p1, %r9, {i}; @%p1 bra B{i};" for i in range(len(bodies))]
        lines += [f"B{i}: {body} ret;" for i, body in enumerate(bodies)]
        device = em.Device("sm_90a", completion="random", seed=seed, check="global", resident=4)
        source = text("\n".join(lines))
        calls.append(em.Call(device, source, "k", len(bodies), 1, [out], cluster=cluster))
    try:
        em.launch_together(calls)
    except DataRace:
        return True
    return False


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_alarms_are_races_of_the_model(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events = watched(monkeypatch)
    for seed in range(first, first + 50):
        events.clear()
        alarm = launched(random.Random(seed), seed)
        races = racing(events)
        if alarm:
            assert any(j == len(events) - 1 for _, j in races), seed
            races = [(i, j) for i, j in races if j < len(events) - 1]
        # Of a thread's accesses to a place its last one stands for those of narrower scopes.
        hidden = [
            any(
                k.place == events[i].place
                and k.thread == events[i].thread
                and k.reach > events[i].reach > 0
                for k in events[i + 1 : j]
            )
            for i, j in races
        ]
        assert all(hidden), (seed, races)
