"""A launch as a Chrome trace: a process for each CTA, rows for its warps and its engines.

The format is that of chrome://tracing and ui.perfetto.dev ("Trace Event Format"): slices (ph X)
with names for their rows (ph M), and arrows from who issued asynchronous work to the work (ph s
and f). Time is the number of instructions that a cluster has run, written as microseconds.
"""

from __future__ import annotations

import json
import os
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Dim", "Slice", "write"]

Dim = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that lasted.

    Attributes:
        cta: whose.
        row: "warp 3" or an engine, "TMA loads".
        kind: "run", "wait" or "work".
        start, end: ticks.
        details: what is shown of it.
        cause: (row, tick) of the run that issued it.
    """

    cta: Dim
    row: str
    kind: str
    name: str
    start: int
    end: int
    details: dict[str, Any] = field(default_factory=dict)
    cause: tuple[str, int] | None = None


def write(slices: Sequence[Slice], path: str | os.PathLike[str]) -> None:
    """Write a trace; ValueError where there is nothing to draw."""
    if not slices:
        raise ValueError("trace: no slices were collected; launch with trace=True")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events(slices), "displayTimeUnit": "ms"}, file)


def events(slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """The events of the format; slices of one row that overlap get rows of their own."""
    ctas = sorted({s.cta for s in slices}, key=lambda cta: cta[::-1])
    pids = {cta: pid for pid, cta in enumerate(ctas, 1)}
    lanes: dict[tuple[Dim, str], list[list[tuple[int, int]]]] = {}
    placed = []  # runs first: what they overlap with goes to another row
    for s in sorted(slices, key=lambda s: (s.kind != "run", s.start)):
        end = max(s.end, s.start + 1)
        lane = _lane(lanes.setdefault((s.cta, s.row), []), s.start, end)
        placed.append((s, (s.cta, s.row, lane), end))
    rows = sorted({place for _, place, _ in placed}, key=lambda place: (*place[0], _rank(place)))
    tids = {place: tid for tid, place in enumerate(rows, 1)}
    out: list[dict[str, Any]] = []
    for cta in ctas:
        out.append(_name("process_name", pids[cta], 0, f"CTA {cta}"))
    for place in rows:
        cta, row, lane = place
        name = f"{row} ({lane + 1})" if lane else row
        out.append(_name("thread_name", pids[cta], tids[place], name))
        order = {"sort_index": tids[place]}
        out.append(_meta("thread_sort_index", pids[cta], tids[place], order))
    for number, (s, place, end) in enumerate(placed):
        at = {"pid": pids[s.cta], "tid": tids[place]}
        out.append({
            "ph": "X", "name": s.name, "cat": s.kind, **at, "ts": s.start, "dur": end - s.start,
            "args": s.details,
        })  # fmt: skip
        if s.cause is not None and _runs(lanes.get((s.cta, s.cause[0])), s.cause[1]):
            row, tick = s.cause
            issuer = {"pid": pids[s.cta], "tid": tids[s.cta, row, 0]}
            arrow = {"name": "issue", "cat": "issue", "id": number}
            out.append({"ph": "s", **arrow, **issuer, "ts": tick})
            out.append({"ph": "f", "bp": "e", **arrow, **at, "ts": s.start})
    return out


def _lane(lanes: list[list[tuple[int, int]]], start: int, end: int) -> int:
    """The first lane that is free from ``start`` to ``end``, which is taken."""
    for number, taken in enumerate(lanes):
        at = bisect(taken, (start, end))
        before, after = taken[at - 1 : at] if at else [], taken[at : at + 1]
        if all(e <= start for _, e in before) and all(b >= end for b, _ in after):
            taken.insert(at, (start, end))
            return number
    lanes.append([(start, end)])
    return len(lanes) - 1


def _runs(lanes: list[list[tuple[int, int]]] | None, tick: int) -> bool:
    """Whether a slice of the first lane is there at a tick, for an arrow to start at."""
    if lanes is None:
        return False
    at = bisect(lanes[0], tick, key=lambda taken: taken[0])
    return at > 0 and tick < lanes[0][at - 1][1]


def _rank(place: tuple[Dim, str, int]) -> tuple[bool, int, str, int]:
    """Warps before engines, in order of their numbers."""
    _, row, lane = place
    kind, _, number = row.partition(" ")
    if kind == "warp":
        return False, int(number), "", lane
    return True, 0, row, lane


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return _meta(what, pid, tid, {"name": name})


def _meta(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
