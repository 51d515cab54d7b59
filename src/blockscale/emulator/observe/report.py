"""What a launch did, as plain data: it can be sent between processes, added up, printed, saved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from .. import isa
from ..alarms.alarm import Alarm, Suppressed, merged
from .trace import Slice, write

__all__ = ["Banks", "Place", "Products", "Report", "Sectors", "Stall", "family"]

SECTOR = 32  # bytes that global memory moves at least


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """An instruction of the program."""

    function: str
    line: int  # of the PTX
    opcode: str
    source: str = ""  # file:line of the source, where the PTX says so

    def __str__(self) -> str:
        return f"line {self.line}{', ' + self.source if self.source else ''}: {self.opcode}"


@dataclass(frozen=True, slots=True)
class Sectors:
    """What one instruction asked of global memory, and the sectors of 32 bytes that this took.

    Attributes:
        kind: "read", "write" or "atomic".
        requests: instructions of warps, or asynchronous transfers.
        asked: bytes; one that several threads of a request ask for counts once.
        sectors: sum of those that each request touched.
        fewest: sum of those that its bytes would have filled.
    """

    place: Place
    kind: str
    requests: int
    asked: int
    sectors: int
    fewest: int

    @property
    def efficiency(self) -> float:
        """Part of the bytes moved that were asked for."""
        return self.asked / (SECTOR * self.sectors) if self.sectors else 1.0


@dataclass(frozen=True, slots=True)
class Banks:
    """How often one instruction went to the banks of shared memory.

    Attributes:
        kind: "read", "write" or "atomic".
        requests: instructions of warps.
        wavefronts: times that the banks were used, each for one word.
        conflicts: those beyond one for each 32, 16 or 8 threads, of accesses up to 4, of 8 and of
            16 bytes.
    """

    place: Place
    kind: str
    requests: int
    wavefronts: int
    conflicts: int


@dataclass(frozen=True, slots=True)
class Products:
    """Tensor-core instructions of one opcode; a multiplication and an addition are two flops."""

    opcode: str
    count: int
    flops: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Waits of the same warps of all CTAs at one instruction.

    Attributes:
        role: the warps, "warp 0-3".
        what: "mbarrier", "barrier", "cluster barrier", "group" (of asynchronous work), "tcgen05" or
            "lanes" (of the same warp).
        count: how often.
        ticks: instructions that their cluster ran meanwhile, in sum.
        longest: of one wait.
        reason: what that one waited for, and in which CTA.
    """

    role: str
    place: Place
    what: str
    count: int
    ticks: int
    longest: int
    reason: str


@dataclass(frozen=True)
class Report:
    """What a launch did; all but ``instructions`` is there only if it was asked for.

    Attributes:
        instructions: opcode -> threads that came to it; jumps count where they are taken.
        profiled: whether the rest was collected.
        warp_instructions: instructions that warps ran; diverged parts of a warp count each.
        bytes: space -> direction ("read", "write", "atomic", and for asynchronous work "read
            asynchronously", "write asynchronously") -> bytes, of all threads.
        sectors, banks, products, stalls: see there.
        slices: what a trace draws.
        alarms: what the checks found, where the device collects that; always there.
        suppressed: entries of the device's suppressions for this kernel; always there.
    """

    instructions: dict[str, int]
    profiled: bool = False
    warp_instructions: int = 0
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    sectors: tuple[Sectors, ...] = ()
    banks: tuple[Banks, ...] = ()
    products: tuple[Products, ...] = ()
    stalls: tuple[Stall, ...] = ()
    slices: tuple[Slice, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    suppressed: tuple[Suppressed, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.instructions.values())

    def families(self) -> dict[str, int]:
        """Family ("ld.global", "tcgen05.mma", ...) -> threads, most first."""
        found: dict[str, int] = {}
        for opcode, count in self.instructions.items():
            if count:
                name = family(opcode)
                found[name] = found.get(name, 0) + count
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def global_memory(self, kind: str) -> Sectors | None:
        """The sum of all instructions that "read", "write" or are "atomic"; None without any."""
        every = Place("", 0, "all")
        mine = (replace(row, place=every) for row in self.sectors if row.kind == kind)
        return next(iter(_added(mine, *_SECTORS)), None)

    def waits(self) -> dict[str, tuple[int, int]]:
        """What was waited for -> (how often, ticks)."""
        found: dict[str, tuple[int, int]] = {}
        for stall in self.stalls:
            count, ticks = found.get(stall.what, (0, 0))
            found[stall.what] = count + stall.count, ticks + stall.ticks
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """The report of all of them together: of the parts of one grid, or of several launches."""
        every = list(reports)
        instructions: dict[str, int] = {}
        moved: dict[str, dict[str, int]] = {}
        for report in every:
            _add_counts(instructions, report.instructions)
            for space, counts in report.bytes.items():
                _add_counts(moved.setdefault(space, {}), counts)
        return cls(
            dict(sorted(instructions.items())),
            any(report.profiled for report in every),
            sum(report.warp_instructions for report in every),
            moved,
            _added((row for report in every for row in report.sectors), *_SECTORS),
            _added((row for report in every for row in report.banks), *_BANKS),
            _added((row for report in every for row in report.products), "count", "flops"),
            _added_stalls(row for report in every for row in report.stalls),
            tuple(row for report in every for row in report.slices),
            merged(alarm for report in every for alarm in report.alarms),
            _added((row for report in every for row in report.suppressed), "count"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Numbers and text only, for JSON; without the slices of a trace."""
        found: dict[str, Any] = {
            "total": self.total,
            "instructions": self.instructions,
            "families": self.families(),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "suppressed": [asdict(entry) for entry in self.suppressed],
        }
        if not self.profiled:
            return found
        rows = [{**asdict(row), "efficiency": row.efficiency} for row in self.sectors]
        return found | {
            "warp_instructions": self.warp_instructions,
            "bytes": self.bytes,
            "sectors": rows,
            "banks": [asdict(row) for row in self.banks],
            "products": [asdict(row) for row in self.products],
            "waits": {
                what: {"count": count, "ticks": ticks}
                for what, (count, ticks) in self.waits().items()
            },
            "stalls": [asdict(row) for row in self.stalls],
        }

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the slices for chrome://tracing or ui.perfetto.dev; a tick is a microsecond.

        ValueError where none were collected.
        """
        write(self.slices, path)

    def table(self, most: int = 8) -> str:
        """Plain text, at most so many lines of each kind."""
        return "\n\n".join(part for part in _parts(self, most) if part)

    def __str__(self) -> str:
        return self.table()


# --- families -------------------------------------------------------------------------------------

_IN_MEMORY = {"ld", "ldu", "st", "atom", "red"}
_SPACES = ("global", "shared", "local", "param", "const")


@cache
def family(opcode: str) -> str:
    """The instruction without its modifiers; of a load, a store or an atomic with its space."""
    parts = opcode.split(".")
    if parts[0] in _IN_MEMORY:
        named = [part.split("::")[0] for part in parts]
        return f"{parts[0]}.{next((name for name in named if name in _SPACES), 'generic')}"
    known = set(isa.families())
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in known), parts[0])


# --- sums -----------------------------------------------------------------------------------------


_Row = TypeVar("_Row", Sectors, Banks, Products, Suppressed)
_SECTORS = ("requests", "asked", "sectors", "fewest")
_BANKS = ("requests", "wavefronts", "conflicts")


def _add_counts(into: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + count


def _added(rows: Iterable[_Row], *numbers: str) -> tuple[_Row, ...]:
    """Rows that differ in these numbers only become one with their sums."""
    sums: dict[tuple[Any, ...], _Row] = {}
    for row in rows:
        key = tuple(getattr(row, f.name) for f in fields(row) if f.name not in numbers)
        before = sums.get(key)
        if before is not None:
            row = replace(row, **{n: getattr(before, n) + getattr(row, n) for n in numbers})
        sums[key] = row
    return tuple(sums.values())


def _added_stalls(rows: Iterable[Stall]) -> tuple[Stall, ...]:
    sums: dict[tuple[Any, ...], Stall] = {}
    for row in rows:
        before = sums.get((row.role, row.place, row.what))
        if before is not None:
            worse = max(before, row, key=lambda stall: (stall.longest, stall.reason))
            row = replace(worse, count=before.count + row.count, ticks=before.ticks + row.ticks)
        sums[row.role, row.place, row.what] = row
    return tuple(sorted(sums.values(), key=lambda s: (-s.longest, s.place.line, s.role)))


# --- the table ------------------------------------------------------------------------------------

_Cells = Sequence[str | int]


def _table(title: str, head: Sequence[str], rows: Sequence[_Cells], most: int) -> str:
    """Columns under their heads, those of numbers to the right; "" without rows."""
    if not rows:
        return ""
    shown = rows[:most]
    numbers = [isinstance(cell, int) or cell.endswith("%") for cell in shown[0]]
    lines = [head, *([f"{c:,}" if isinstance(c, int) else c for c in row] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    ]
    left = [f"... and {len(rows) - most} more"] if len(rows) > most else []
    return "\n".join([title, *("  " + line for line in (*text, *left))])


def _alarms(report: Report, most: int) -> Iterator[str]:
    """What the checks found, by line of the source."""
    places: dict[str, list[Alarm]] = {}
    for alarm in report.alarms:
        places.setdefault(alarm.place, []).append(alarm)
    rows: list[_Cells] = []
    for place, found in places.items():
        who = list(dict.fromkeys(name for alarm in found for name in alarm.who))
        more = f" and {len(who) - 1} more" if len(who) > 1 else ""
        kinds = ", ".join(dict.fromkeys(alarm.kind for alarm in found))
        count = sum(alarm.count for alarm in found)
        rows.append((place, kinds, count, who[0] + more, found[0].message))
    every = sum(alarm.count for alarm in report.alarms)
    yield _table(f"alarms: {every:,}", ("at", "kinds", "count", "by", "the first"), rows, most)
    yield _table(
        "suppressed alarms",
        ("entry", "count", "because"),
        [
            (s.entry + ("" if s.count else " (unused)"), s.count, s.reason)
            for s in report.suppressed
        ],
        99,
    )


def _parts(report: Report, most: int) -> Iterator[str]:
    yield from _alarms(report, most)
    counts = list(report.families().items())
    of_warps = f", {report.warp_instructions:,} of warps" if report.profiled else ""
    yield _table(
        f"instructions: {report.total:,} of threads{of_warps}", ("family", "threads"), counts, most
    )
    yield _table(
        "bytes",
        ("space", "direction", "bytes"),
        [(space, way, n) for space, ways in report.bytes.items() for way, n in ways.items()],
        99,
    )
    for kind in ("read", "write", "atomic"):
        yield _global_memory(report, kind, most)
    banks = sorted((b for b in report.banks if b.conflicts), key=lambda b: -b.conflicts)
    every = sum(b.wavefronts for b in report.banks)
    yield _table(
        f"bank conflicts in shared memory: {sum(b.conflicts for b in banks):,} of {every:,} "
        "wavefronts",
        ("instruction", "requests", "wavefronts", "conflicts"),
        [(str(b.place), b.requests, b.wavefronts, b.conflicts) for b in banks],
        most,
    )
    yield _table(
        "tensor cores",
        ("instruction", "count", "flops"),
        [(p.opcode, p.count, p.flops) for p in report.products],
        most,
    )
    yield _table(
        "waits",
        ("for", "count", "ticks"),
        [(what, count, ticks) for what, (count, ticks) in report.waits().items()],
        99,
    )
    yield _table(
        "longest waits",
        ("warps", "longest", "ticks", "count", "instruction", "the longest"),
        [(s.role, s.longest, s.ticks, s.count, str(s.place), s.reason) for s in report.stalls],
        most,
    )


def _global_memory(report: Report, kind: str, most: int) -> str:
    total = report.global_memory(kind)
    if total is None:
        return ""
    rows = [row for row in report.sectors if row.kind == kind]
    rows.sort(key=lambda row: (row.fewest - row.sectors, row.place))
    return _table(
        f"global memory, {kind}: {total.asked:,} bytes asked for in {total.sectors:,} sectors of "
        f"{SECTOR}: {total.efficiency:.1%}, where {total.fewest:,} would do",
        ("instruction", "requests", "bytes", "sectors", "fewest", "used"),
        [
            (str(r.place), r.requests, r.asked, r.sectors, r.fewest, f"{r.efficiency:.1%}")
            for r in rows
        ],
        most,
    )
