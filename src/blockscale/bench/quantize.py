"""Quantizers against the device's own copy at the same bytes, and against what torchao has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from .cases import Case, Group, prepare
from .contest import Call, ready
from .peers import Peer
from .timing import Timer

__all__ = ["Absent", "Row", "draw", "measure"]


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement; ``of_copy`` is the copy's time at the same bytes over this one."""

    group: str
    rows: int
    columns: int
    case: str
    who: str
    microseconds: float
    gigabytes_per_second: float
    copy_microseconds: float
    of_copy: float


@dataclass(frozen=True, slots=True)
class Absent:
    """What could not run, and why."""

    group: str
    rows: int
    columns: int
    case: str
    who: str
    why: str


def measure(
    group: Group,
    shapes: Sequence[tuple[int, int]] | None = None,
    peers: Sequence[Peer] = (),
    timer: Timer | None = None,
) -> Iterator[Row | Absent]:
    """Time every case of a group on random normal numbers, and the peers that do the same."""
    timer = timer or Timer()
    for rows, columns in shapes or group.shapes:
        for case in group.cases:
            nbytes = case.nbytes(rows, columns)
            for who, make in _contestants(case, rows, columns, timer.device, peers):
                where = group.name, rows, columns, case.name, who
                call = ready(make)
                if isinstance(call, str):
                    yield Absent(*where, call)
                    continue
                before = timer.copy(nbytes, kernel=group.copy_kernel)
                took = timer.microseconds(call)
                copy = (before + timer.copy(nbytes, kernel=group.copy_kernel)) / 2
                yield Row(*where, took, nbytes / took / 1e3, copy, copy / took)


def _contestants(
    case: Case, rows: int, columns: int, device: str, peers: Sequence[Peer]
) -> Iterator[tuple[str, Callable[[], Call]]]:
    yield "blockscale", lambda: prepare(case, rows, columns, device)
    for peer in peers:
        if peer.case == case:
            x = torch.randn(rows, columns, device=device, dtype=case.dtype)
            yield peer.name, lambda peer=peer, x=x: peer.prepare(x)  # type: ignore[misc]


def draw(rows: Sequence[Row]) -> Figure:
    """Speed as a part of the copy's: bars for each case, a colour for each shape."""
    shapes = list(dict.fromkeys((row.rows, row.columns) for row in rows))
    bars: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        bars.setdefault((row.group, f"{row.case} ({row.who})"), []).append(row)
    figure = Figure(figsize=(9, 1 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for shape in shapes:
        at, length = [], []
        for i, mine in enumerate(bars.values()):
            for j, row in enumerate(mine):
                if (row.rows, row.columns) == shape:
                    at.append(i + 0.8 * (j + 0.5) / len(mine) - 0.4)
                    length.append(row.of_copy)
        axes.barh(at, length, 0.25, label=f"{shape[0]} x {shape[1]}")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [name for _, name in bars])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("speed, as a part of the device's own copy of as many bytes")
    figure.legend(loc="outside upper center", ncols=3)
    return figure
