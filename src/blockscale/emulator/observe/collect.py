"""The watch behind a report: collects what a launch does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .report import Banks, Place, Products, Report, Sectors, Stall
from .trace import Dim, Slice
from .traffic import Batch, settled, transfer_sectors
from .watch import Watch

if TYPE_CHECKING:
    from ..alarms.alarm import Alarms
    from ..launches.code import Code
    from ..launches.launch import Launch
    from ..machine.engine import Work
    from ..machine.state import CTA, Fragment, Wait
    from ..memory.buffers import GlobalMemory

__all__ = ["Collector", "collect", "finish"]

#: How an opcode starts -> what its waits are for; the first that fits.
_WAITS = (
    ("mbarrier", "mbarrier"),
    ("barrier.cluster", "cluster barrier"),
    ("bar.warp", "lanes"),
    ("bar", "barrier"),
    ("cp.", "group"),
    ("wgmma", "group"),
    ("tcgen05", "tcgen05"),
    ("", "lanes"),
)
#: How an opcode starts -> the row of a trace; the first that fits.
_ENGINES = (
    ("cp.async.bulk", "TMA"),
    ("cp.reduce.async.bulk", "TMA"),
    ("cp.async", "cp.async"),
    ("wgmma", "tensor core"),
    ("tcgen05.ld", "Tensor Memory"),
    ("tcgen05.st", "Tensor Memory"),
    ("tcgen05", "tensor core"),
    ("", "asynchronous"),
)


def collect(launch: Launch, *, trace: bool = False) -> Collector:
    """A watch for one launch.

    Args:
        launch: its memory says where buffers begin.
        trace: whether to keep what a trace draws, which grows with the length of the launch.
    """
    return Collector(launch.memory, trace)


def finish(watch: Watch | None, codes: Iterable[Code], alarms: Alarms) -> Report:
    """The report of a launch that is over.

    Args:
        watch: of ``collect``; None where nothing but instructions was counted.
        codes: of the launch's program.
        alarms: those of the launch.
    """
    instructions: dict[str, int] = {}
    for code in codes:
        for ins, count in zip(code.function.instructions, code.counts, strict=False):
            instructions[ins.opcode] = instructions.get(ins.opcode, 0) + count
    counted = Report(instructions, alarms=alarms.kept(), suppressed=alarms.left_out())
    return Report.merge([counted, watch.report()] if isinstance(watch, Collector) else [counted])


class _Standing:
    """A fragment that waits."""

    __slots__ = ("place", "reason", "start", "threads")

    def __init__(self, threads: np.ndarray, place: Place, reason: str) -> None:
        self.threads, self.place, self.reason = threads, place, reason
        self.start: int | None = None  # known when its run is over


class Collector(Watch):
    """Collects what a launch does.

    Args:
        memory: of the launch.
        trace: whether to keep slices too.
    """

    def __init__(self, memory: GlobalMemory, trace: bool) -> None:
        self._memory, self._tracing = memory, trace
        self._places: dict[tuple[Code, int], Place] = {}
        self._batches: dict[tuple[object, ...], Batch] = {}
        self._transferred: dict[tuple[str, str], int] = {}  # (space, kind) -> bytes
        self._transfers: dict[tuple[Place, str], Any] = {}  # (place, kind) -> requests, ...
        self._products: dict[str, tuple[int, int]] = {}  # opcode -> count, flops
        self._warp_instructions = 0
        self._standing: dict[CTA, dict[Fragment, _Standing]] = {}
        self._stalls: dict[tuple[str, Place], Stall] = {}
        self._slices: list[Slice] = []
        self._runs: dict[tuple[Dim, int], Slice] = {}  # the last of each warp
        self._flying: dict[Work, int] = {}

    def report(self) -> Report:
        """All but the counts of instructions."""
        moved: dict[str, dict[str, int]] = {}
        sectors = [Sectors(*at, *map(int, row)) for at, row in self._transfers.items()]
        banks: list[Banks] = []
        for batch in self._batches.values():
            batch.look()
            ways = moved.setdefault(batch.space, {})
            ways[batch.kind] = ways.get(batch.kind, 0) + batch.bytes
            if batch.requests:
                counts = [batch.requests, *map(int, batch.sums)]
                if batch.space == "global":
                    sectors.append(Sectors(batch.place, batch.kind, *counts))
                else:
                    banks.append(Banks(batch.place, batch.kind, *counts))
        for (space, kind), count in self._transferred.items():
            moved.setdefault(space, {})[f"{kind} asynchronously"] = count
        return Report(
            {},
            profiled=True,
            warp_instructions=self._warp_instructions,
            bytes=moved,
            sectors=tuple(sectors),
            banks=tuple(banks),
            products=tuple(Products(name, *row) for name, row in self._products.items()),
            stalls=tuple(self._stalls.values()),
            slices=(*self._slices, *self._runs.values()),
        )

    def _place(self, code: Code, pc: int) -> Place:
        if (code, pc) not in self._places:
            function = code.function
            if pc >= len(function.instructions):
                return Place(function.name, 0, "ret")
            ins = function.instructions[pc]
            source = code.program.module.source(ins.source)
            self._places[code, pc] = Place(function.name, ins.line, ins.opcode, source)
        return self._places[code, pc]

    # --- memory ---

    def access(
        self,
        w: Fragment,
        space: str,
        kind: str,
        where: np.ndarray,
        size: int,
        cta: CTA | None,
        threads: np.ndarray,
    ) -> None:
        if cta is not None and cta is not w.cta:
            space = "shared::cluster"
        key = (w.frame.code, w.pc, space, kind, size)
        batch = self._batches.get(key)
        if batch is None:
            place = self._place(w.frame.code, w.pc)
            what = "atomic" if place.opcode.startswith(("atom", "red")) else kind
            batch = self._batches[key] = Batch(place, space, what, size, self._memory)
        turn = None
        if batch.kind == "atomic":  # a read and a write for each turn of its threads
            if kind == "write":
                return
            turn = (w.cta.index, w.cta.cluster.engine.tick, w.used)
        batch.add(where, threads, turn)

    def transfer(
        self, work: Work, space: str, kind: str, where: np.ndarray, size: int, cta: CTA | None
    ) -> None:
        self._transferred[space, kind] = self._transferred.get((space, kind), 0) + len(where) * size
        if space == "global":
            at = self._place(*work.issuer[1:]), kind
            row = np.concatenate([[1], transfer_sectors(settled(where, self._memory), size)])
            self._transfers[at] = self._transfers.get(at, 0) + row

    def multiplied(self, opcode: str, count: int, flops: int) -> None:
        before = self._products.get(opcode, (0, 0))
        self._products[opcode] = before[0] + count, before[1] + flops

    # --- warps ---

    def ran(self, w: Fragment, tick: int, instructions: int) -> None:
        start, warps, waits = tick - instructions, _warps(w.threads), 0
        standing = self._standing.get(w.cta)
        if standing:
            for other, wait in list(standing.items()):
                if other is w and wait.start is None:
                    wait.start, waits = tick, 1
                elif _meet(wait.threads, w.threads):  # as it was, in parts or merged with others
                    self._goes_on(w.cta, standing.pop(other), start)
            if not standing:
                del self._standing[w.cta]
        self._warp_instructions += (instructions - waits) * len(warps)
        if self._tracing:
            self._draw_run(w, warps, start, tick)

    def waits(self, w: Fragment, tick: int, wait: Wait) -> None:
        standing = self._standing.setdefault(w.cta, {})
        if w in standing:
            self._goes_on(w.cta, standing.pop(w), tick)
        place = self._place(w.frame.code, w.pc)
        standing[w] = _Standing(w.threads, place, f"{w.cta}: {wait.why()}")

    def _goes_on(self, cta: CTA, wait: _Standing, tick: int) -> None:
        start = tick if wait.start is None else wait.start
        warps = _warps(wait.threads)
        role = f"warp {_ranges(warps)}"
        stall = Stall(
            role, wait.place, _first(wait.place.opcode, _WAITS), 1, tick - start, tick - start,
            wait.reason,
        )  # fmt: skip
        before = self._stalls.get((role, wait.place))
        if before is not None:
            worse = max(before, stall, key=lambda s: (s.longest, s.reason))
            stall = replace(worse, count=before.count + 1, ticks=before.ticks + stall.ticks)
        self._stalls[role, wait.place] = stall
        if self._tracing and tick > start:
            details = {"at": str(wait.place), "for": wait.reason}
            name = f"waits: {_first(wait.place.opcode, _WAITS)}"
            for warp in warps:
                row = f"warp {warp}"
                self._slices.append(Slice(cta.index, row, "wait", name, start, tick, details))

    def _draw_run(self, w: Fragment, warps: Sequence[int], start: int, tick: int) -> None:
        details = {"until": str(self._place(w.frame.code, w.pc))}
        name = w.frame.code.function.name
        for warp in warps:
            last = self._runs.get((w.cta.index, warp))
            if last is not None and last.end == start and last.name == name:
                start_of = last.start
            else:
                start_of = start
                if last is not None:
                    self._slices.append(last)
            self._runs[w.cta.index, warp] = Slice(
                w.cta.index, f"warp {warp}", "run", name, start_of, tick, details
            )

    # --- engines ---

    def issued(self, work: Work, tick: int) -> None:
        if self._tracing:
            self._flying[work] = tick

    def completed(self, work: Work, tick: int) -> None:
        if self._tracing:
            cta, code, pc = work.issuer
            start = self._flying.pop(work)
            self._slices.append(
                Slice(
                    cta.index,
                    _engine(work.what),
                    "work",
                    work.what,
                    start,
                    tick,
                    {"at": str(self._place(code, pc))},
                    (f"warp {int(work.threads[0]) // 32}", start),
                )
            )


def _first(opcode: str, table: tuple[tuple[str, str], ...]) -> str:
    return next(name for start, name in table if opcode.startswith(start))


def _engine(opcode: str) -> str:
    """The row of a trace that shows asynchronous work."""
    name = _first(opcode, _ENGINES)
    if name != "TMA":
        return name
    spaces = [part for part in opcode.split(".") if part.split("::")[0] in ("global", "shared")]
    return "TMA stores" if spaces[0] == "global" else "TMA loads"  # the destination is first


def _warps(threads: np.ndarray) -> Sequence[int]:
    """The warps of sorted threads."""
    first, last = int(threads[0]), int(threads[-1])
    if last - first + 1 == len(threads):
        return range(first // 32, last // 32 + 1)
    found: list[int] = np.unique(threads // 32).tolist()
    return found


def _ranges(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return str(first)
    if len(numbers) == last - first + 1:
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


def _meet(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether sorted threads have any in common."""
    return bool(a[0] <= b[-1] and b[0] <= a[-1] and np.isin(a, b).any())
