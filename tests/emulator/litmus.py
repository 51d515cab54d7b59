"""Random programs, what the emulator says of them, and what the memory model does.

A program has no loops, so each of its threads runs each of its lines once, and an alarm names two
accesses by their lines. Some threads share a body: they are lanes of a warp.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from memory_model import Event, Races, closed, overlap, races
from ptx_kernels import text

from blockscale import emulator as em
from blockscale.emulator.machine import ports
from blockscale.emulator.machine.engine import Work

__all__ = ["Program", "Verdict", "verdict"]

CHECK = "race,lanes,fence,global"
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_DATA, _COPIED = 32, 64  # offsets of data, and of what bulk stores copy; flags come first
_GLOBAL = 64 + 16 * 24  # bytes of global memory: the bulk store of each body has its own
_MANY = 0x0101010101010101
PLAIN = "relaxed", "acquire", "release", "acq_rel"


@dataclass
class _Body:
    """Of some threads: lines of PTX, and which of them are whose."""

    first: int
    threads: list[tuple[int, int, int, int]]
    lines: list[str] = field(default_factory=list)


class Program:
    """A random one, by its seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.devices = rng.choice((1, 1, 1, 2))
        self.cluster = rng.choice((1, 1, 2))
        self.clusters = rng.choice((1, 1, 2))
        self._values = rng.sample(range(1, 120), 119)
        wide = "sys" if self.devices > 1 else rng.choice(("cta", "cluster", "gpu"))
        self._scopes = [wide] * rng.choice((2, 8, 50)) + ["cta", "cluster", "gpu", "sys"]
        self._odd = rng.choice((0.0, 0.0, 0.1))  # accesses of other widths
        self._weak = rng.choice((0.0, 0.1, 0.3))  # weak accesses to flags
        self._shared = rng.choice((0.0, 0.5, 1.0))
        #: Whether data is passed on: the first thread stores it, others load it in the end, and
        #: between there are strong accesses to few flags of one width, and fences.
        self._passes = rng.random() < 0.5
        if self._passes:
            self._odd = self._weak = 0.0
            self._shared = rng.choice((0.0, 1.0)) if self.clusters * self.devices == 1 else 0.0
            self._scopes = [self._common()] * 50 + ["cta", "cluster", "gpu", "sys"]
        self._flags = rng.choice((1, 2)) if self._passes else 2
        self._meets = [rng.choice((None, None, None, "cta", "cluster", "warp")) for _ in range(3)]
        self._bodies = list(self._placed())
        for body in self._bodies:
            self._write(body)
        self.source = self._text()

    def _placed(self) -> Iterator[_Body]:
        """Who runs: a few threads of each CTA."""
        kinds = self.rng.choice((((0,), (1,)), ((0,), (32,)), ((0, 1), (32,)), ((0, 1),), ((0,),)))
        first = 0
        for device in range(self.devices):
            for cta in range(self.clusters * self.cluster):
                for lanes in kinds:
                    place = device, cta // self.cluster, cta % self.cluster
                    yield _Body(first, [(*place, lane) for lane in lanes])
                    first += 1

    def _common(self) -> str:
        """The narrowest scope that includes all."""
        if self.devices > 1:
            return "sys"
        return "gpu" if self.clusters > 1 else "cluster" if self.cluster > 1 else "cta"

    def _passed(self) -> tuple[str, str]:
        """Where the data is that is passed on."""
        if self._shared:
            return "shared::cluster", f"[%r21+{_DATA}]"
        return "global", f"[%out+{_DATA}]"

    def _write(self, body: _Body) -> None:
        space, where = self._passed()
        if self._passes and not body.first:
            body.lines += [*self._value(), f"st.{space}.u32 {where}, %r2;"]
        for i, meet in enumerate(self._meets):
            for _ in range(self.rng.randrange(1, 4 if len(self._bodies) > 4 else 6)):
                body.lines.append(f"nanosleep.u32 {self.rng.randrange(120)};")
                body.lines += self._operation(body)
            if i < 2:
                body.lines += _meeting(meet)
        if self._passes and body.first and self.rng.random() < 0.8:
            body.lines.append(f"ld.{space}.u32 %r1, {where};")

    def _value(self) -> list[str]:
        """A value in %r2 and %rd2 no byte of which anybody else writes."""
        return [
            f"add.u32 %r2, %r9, {self._values.pop()}; cvt.u64.u32 %rd2, %r2;"
            f" mul.lo.u64 %rd2, %rd2, {_MANY}; cvt.u32.u64 %r2, %rd2; cvt.u16.u32 %h2, %r2;"
        ]

    def _operation(self, body: _Body) -> list[str]:
        rng = self.rng
        kind = rng.choice(("flag",) * 6 + ("data", "data", "fence", "fence", "copy"))
        if self._passes:
            kind = rng.choice(("flag", "flag", "fence"))
        if not self._values:
            kind = "fence"
        if kind == "fence":
            return [self._fence()]
        if kind == "copy":
            return self._copy(body)
        space, base = ("global", "%out")
        if rng.random() < self._shared:
            space, base = rng.choice((("shared", "%r20"), ("shared::cluster", "%r21")))
        if kind == "data":
            at = rng.choice((_DATA, _DATA, _COPIED))
            if at == _COPIED and space == "global":
                at += 16 * rng.choice(self._bodies).first
            where = f"[{base}+{at}]"
            if rng.random() < 0.5:
                return [f"ld.{space}.u32 %r1, {where};"]
            return [*self._value(), f"st.{space}.u32 {where}, %r2;"]
        return self._flag(space, f"[{base}+{8 * rng.randrange(self._flags)}{{}}]")

    def _flag(self, space: str, place: str) -> list[str]:
        rng = self.rng
        width = rng.choice(("8", "16", "64", "64")) if rng.random() < self._odd else "32"
        part = rng.randrange(8 // _BYTES[width]) if rng.random() < self._odd else 0
        where = place.format(f"+{part * _BYTES[width]}")
        from_ = {"8": "%r2", "16": "%h2", "32": "%r2", "64": "%rd2"}[width]
        into = {"8": "%r1", "16": "%h1", "32": "%r1", "64": "%rd1"}[width]
        how = rng.choice(("ld", "ld", "st", "st", "atom", "red"))
        if how == "ld":
            order = self._order(("relaxed", "acquire", "acquire", "volatile"))
            if width == "32" and rng.random() < self._odd:
                return [f"ld{order}.{space}.v2.u32 {{%r1, %r3}}, {place.format('')};"]
            return [f"ld{order}.{space}.u{width} {into}, {where};"]
        if how == "st" or width in ("8", "16"):
            order = self._order(("relaxed", "release", "release", "volatile"))
            if width == "32" and rng.random() < self._odd:
                vector = f"st{order}.{space}.v2.u32 {place.format('')}, {{%r2, %r2}};"
                return [*self._value(), vector]
            return [*self._value(), f"st{order}.{space}.u{width} {where}, {from_};"]
        order = f".{rng.choice(PLAIN if how == 'atom' else PLAIN[::2])}.{rng.choice(self._scopes)}"
        if rng.random() < 0.1:
            order = ""
        if how == "atom":
            operation = f"atom{order}.{space}.exch.b{width} {into}, {where}, {from_};"
        else:
            operation = f"red{order}.{space}.add.u{width} {where}, {from_};"
        return [*self._value(), operation]

    def _order(self, orders: Sequence[str]) -> str:
        if self.rng.random() < self._weak:
            return ""
        order = self.rng.choice(orders)
        return ".volatile" if order == "volatile" else f".{order}.{self.rng.choice(self._scopes)}"

    def _fence(self) -> str:
        scope = self.rng.choice(self._scopes)
        kinds = ("acq_rel", "acq_rel", "sc", "sc", "sc", "acquire", "release")
        fences = [f"fence.{kind}.{scope};" for kind in kinds]
        fences += ["membar.cta;", "membar.gl;", "membar.sys;", "fence.proxy.async;"]
        fences += ["fence.proxy.async.global;", "fence.proxy.async.shared::cta;"]
        return self.rng.choice(fences)

    def _copy(self, body: _Body) -> list[str]:
        """A bulk store of one thread, and perhaps a wait for it."""
        if len(body.threads) > 1 or any("bulk.global" in line for line in body.lines):
            return [self._fence()]
        fence = self.rng.choice(("", "fence.proxy.async;", "fence.proxy.async.shared::cta;"))
        to = f"[%out+{_COPIED + 16 * body.first}]"
        lines = [
            fence,
            f"cp.async.bulk.global.shared::cta.bulk_group {to}, [%r22], 16;",
            "cp.async.bulk.commit_group;",
            self.rng.choice(
                ("", "cp.async.bulk.wait_group 0;", "", "cp.async.bulk.wait_group.read 0;")
            ),
        ]
        return [line for line in lines if line]

    def _text(self) -> str:
        """All bodies; the other threads only meet. In the end all wait for their copies."""
        lines = [
            ".shared .align 128 .b8 s[128];",
            "ld.param.u32 %r8, [rank]; mov.u32 %r7, %ctaid.x; mad.lo.u32 %r8, %r8, 100, %r7;",
            "mad.lo.u32 %r8, %r8, 100, %t;",
            f"mov.u32 %r20, s; add.u32 %r22, %r20, {_COPIED};",
            "mapa.shared::cluster.u32 %r21, %r20, 0;",
            "mov.u32 %r9, 0;",
        ]
        for body in self._bodies:
            for i, (device, cluster, cta, lane) in enumerate(body.threads):
                number = 10000 * device + 100 * (self.cluster * cluster + cta) + lane
                lines.append(f"setp.eq.u32 %p1, %r8, {number}; @%p1 mov.u32 %r9, {120 * i};")
                lines.append(f"@%p1 bra B{body.first};")
        meet = [line for meet in self._meets[:2] for line in _meeting(meet)]
        end = ["cp.async.bulk.wait_group 0;", *_meeting("cluster"), "ret;"]
        lines += [*meet, *end]
        for body in self._bodies:
            lines += [f"B{body.first}:", *body.lines, *end]
        return text("\n".join(lines), ".param .u32 rank")

    def static(self) -> Iterator[Event]:
        """Fences, barriers and waits of all threads: they are where the text has them."""
        lines = self.source.splitlines()
        for body in self._bodies:
            start = lines.index(f"B{body.first}:") + 2
            for number, line in enumerate(body.lines, start):
                opcode = line.split()[0].rstrip(";")
                for thread in body.threads:
                    meets = _MEETS.get(opcode)
                    barrier = None
                    if meets is not None:
                        same = 3 if meets in ("cta", "warp") else 2
                        warp = thread[3] // 32 if meets == "warp" else 0
                        rounds = [each.split()[0] for each in body.lines[: number - start]]
                        barrier = opcode, thread[:same], warp, rounds.count(line.split()[0])
                    if barrier or opcode.startswith(("fence", "membar", "cp.async.bulk.wait")):
                        yield Event(thread, number, opcode, barrier=barrier)


_MEETS = {"barrier.sync": "cta", "barrier.cluster.wait": "cluster", "bar.warp.sync": "warp"}


def _meeting(meet: str | None) -> list[str]:
    if meet == "cta":
        return ["barrier.sync 0;"]
    if meet == "warp":
        return ["bar.warp.sync 0xffffffff;"]
    return ["barrier.cluster.arrive;", "barrier.cluster.wait;"] if meet == "cluster" else []


# --- what is seen of a run ------------------------------------------------------------------------


class _Recorder:
    """The memory operations of what is launched, in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._last: dict[tuple[object, int], Event] = {}
        self._open: dict[tuple[object, ...], list[Event]] = {}

    def tell(
        self, by: Any, space: str, kind: str, where: np.ndarray, size: int, cta: Any, chosen: Any,
        launch: Any,
    ) -> None:  # fmt: skip
        site = by.site()
        own = by.issuer[0] if isinstance(by, Work) else by.cta
        place = launch.device, int(own.cluster.index[0]), own.rank
        memory: tuple[object, ...] = (space,)
        if space == "shared":
            memory = space, launch.device, int(cta.cluster.index[0]), cta.rank
        if isinstance(by, Work):
            threads = [(*place, by.actor.issuer % 64, site.line)] * len(where)
        else:
            threads = [(*place, thread) for thread in by.threads[chosen].tolist()]
        parts = site.opcode.split(".")
        items = 1 + ("v2" in parts) + 3 * ("v4" in parts)
        items *= 1 + parts[-1].endswith("x2")  # 8.2.5
        for thread, address in zip(threads, where.tolist(), strict=True):
            for item in range(items):
                start = int(address) + item * (size // items)
                self._did(thread, site, kind, (memory, range(start, start + size // items)))

    def _did(self, thread: tuple[int, ...], site: Any, kind: str, where: Any) -> None:
        atomic = site.opcode.startswith(("atom", "red"))
        key = thread, site.line, where
        if atomic and kind == "write":
            event = self._open.pop(key)[0]
            event.writes = True
        else:
            event = Event(thread, site.line, site.opcode, where, at=len(self.events))
            event.reads, event.writes = kind == "read", kind == "write"
            self.events.append(event)
        cells = [(where[0], byte) for byte in where[1]]
        if kind == "read":
            event.sources = [self._last.get(cell) for cell in cells]
            if atomic:
                self._open[key] = [event]
        else:
            self._last.update(dict.fromkeys(cells, event))


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder, tell = _Recorder(), ports._tell

    def both(*args: Any) -> None:
        tell(*args)
        recorder.tell(*args)

    ports._tell = both
    try:
        yield recorder
    finally:
        ports._tell = tell


@dataclass
class Verdict:
    """What the emulator and the model say of a program, by pairs of lines.

    Attributes:
        racy: whether it has a race, by the model.
        found: pairs that the emulator names, which the model does, too.
        false: those that the model does not name, with their kind.
        repeated: the same, but the earlier access has a race with what comes before the later one.
        decided: those among ``found`` that are none if more decides the order of fences: see Races.
        missed: races of the model that the emulator does not name, nor another one of the later
            access, or races there by which the later one would come after the earlier one.
        outdated: the same, but the earlier access comes before a write that does come before the
            later one: causality order is not transitive.
        mistaken: alarms that name a race for a missing proxy fence, or the other way round.
    """

    racy: bool
    found: set[tuple[int, int]]
    false: set[tuple[str, int, int]]
    repeated: set[tuple[str, int, int]]
    decided: set[tuple[int, int]]
    missed: set[tuple[int, int]]
    outdated: set[tuple[int, int]]
    mistaken: set[tuple[str, int, int]]


def _alarms(program: Program) -> set[tuple[str, int, int]]:
    out = np.zeros(_GLOBAL + 128, np.uint8)
    out = out[-out.ctypes.data % 128 :][:_GLOBAL]
    calls = []
    for rank in range(program.devices):
        device = em.Device(
            "sm_90a", completion="random", seed=program.seed, check=CHECK, resident=4,
            on_error="collect",
        )  # fmt: skip
        grid = program.clusters * program.cluster
        calls.append(
            em.Call(device, program.source, "k", grid, 64, [out, rank], cluster=program.cluster)
        )
    reports = em.launch_together(calls)
    return {
        (_kind(alarm), alarm.other, alarm.line) for report in reports for alarm in report.alarms
    }


def _kind(alarm: Any) -> str:
    return "fence" if alarm.message.startswith("missing fence") else "race"


def verdict(program: Program) -> Verdict:
    """Run a program, and compare."""
    with _recording() as recorder:
        alarms = _alarms(program)
    events = [*recorder.events, *program.static()]
    return _compared(events, races(events), alarms)


def _compared(events: list[Event], model: Races, alarms: set[tuple[str, int, int]]) -> Verdict:
    lines: dict[tuple[int, int], set[bool]] = {}
    for (i, j), fence in model.pairs.items():
        lines.setdefault(_lines(events, i, j), set()).add(fence)
    named = {(x, y) for _, x, y in alarms}
    wrong = {each for each in alarms if each[1:] not in lines}
    base = model.base | np.eye(len(events), dtype=bool)
    accused = [pair for pair in model.pairs if _lines(events, *pair) in named]
    repeated = {
        (kind, x, y)
        for kind, x, y in wrong
        for i, j in accused
        if events[i].line == x and any(base[j, k] for k, e in enumerate(events) if e.line == y)
    }
    later = {j for _, j in accused}
    left = [(i, j) for i, j in model.pairs if j not in later]
    missed = [(i, j) for i, j in left if not _stood_for(events, base, accused, i, j)]
    writes = np.array([event.writes for event in events])
    outdated = [
        (i, j)
        for i, j in missed
        if any(
            events[k].where == events[i].where
            for k in np.flatnonzero(model.base[i] & writes & model.causality[:, j]).tolist()
        )
    ]
    return Verdict(
        racy=bool(model.pairs),
        found=named & lines.keys(),
        false=wrong - repeated,
        repeated=repeated,
        decided={_lines(events, *pair) for pair in model.decided} & named,
        missed={_lines(events, *pair) for pair in missed if pair not in outdated},
        outdated={_lines(events, *pair) for pair in outdated},
        mistaken={each for each in alarms - wrong if (each[0] == "fence") not in lines[each[1:]]},
    )


def _stood_for(
    events: list[Event], base: np.ndarray, accused: list[tuple[int, int]], i: int, j: int
) -> bool:
    """Whether one access is after another one but for races that are named: a cell has its last
    accesses only, and what was named is not told again."""
    after = base.copy()
    for a, b in accused:
        after[a, b] |= overlap(events[a], events[i]) and overlap(events[b], events[j])
    return bool(closed(after)[i, j])


def _lines(events: list[Event], i: int, j: int) -> tuple[int, int]:
    return events[i].line, events[j].line
