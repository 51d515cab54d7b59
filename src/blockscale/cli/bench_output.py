"""Tables and JSON of ``blockscale bench``."""

from __future__ import annotations

import json as json_module
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..bench.contest import Absent, Row
    from ..bench.host import HostCall
    from ..bench.moe_stages import Stage

__all__ = ["print_lines", "print_table", "show_contests", "show_host", "show_stages", "write"]

_PACKAGES = ("nvidia-cutlass-dsl", "triton", "torchao", "deep_gemm")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: int
) -> None:
    """The first ``texts`` columns are text, the others numbers."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < texts else "right")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """And an empty one."""
    console = _console()
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print()


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=1000)


def show_contests(title: str, found: Sequence[Row | Absent]) -> None:
    """What was measured, how many times as fast as the others ours is, and what could not run."""
    from ..bench.contest import OURS, Absent, Row, speedups

    rows = [row for row in found if isinstance(row, Row)]
    ours = {(row.case, row.shape): row.microseconds for row in rows if row.who == OURS}
    cells = []
    for row in rows:
        mine = ours.get((row.case, row.shape))
        ratio = f"{row.microseconds / mine:.3f}" if mine and row.who != OURS else ""
        times = f"{row.microseconds:.1f}", f"{row.tflops:.0f}"
        cells.append((row.shape, row.case, row.who, *times, ratio))
    columns = ("shape", "what", "who", "us", "TFLOP/s", "its time / ours")
    print_table(title, columns, cells, 3)
    lines = [
        f"{s.case}: {s.mean:.3f} times as fast as {s.who} (geometric mean of {s.shapes}), "
        f"at least {s.least:.3f} ({s.shape})"
        for s in speedups(rows)
    ]
    lines += [
        f"{each.case} ({each.who}), {each.shape}, cannot run: {each.why}"
        for each in found
        if isinstance(each, Absent)
    ]
    print_lines(lines)


def show_stages(title: str, found: Sequence[Stage]) -> None:
    cells = []
    for each in found:
        share = f"{each.floor / each.microseconds:.2f}" if each.floor else ""
        floor = f"{each.floor:.1f}" if each.floor else ""
        cells.append((each.what, f"{each.microseconds:.1f}", floor, share))
    print_table(title, ("step", "us", "floor, us", "floor / time"), cells, 1)
    print_lines(())


def show_host(calls: Sequence[HostCall]) -> None:
    cells = [
        (call.what, "-" if call.microseconds is None else f"{call.microseconds:.2f}")
        for call in calls
    ]
    print_table("Host, a call", ("what", "us"), cells, 1)
    print_lines(f"{call.what} cannot run: {call.why}" for call in calls if call.why)


def write(path: Path | None, **content: Sequence[Any]) -> None:
    """The machine, and lists of results. Called as they come, so that a run that is stopped leaves
    what it has."""
    import torch

    if path is None:
        return
    machine: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": {"model": _cpu_model(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in _PACKAGES},
    }
    lists = {
        name: [asdict(each) if is_dataclass(each) else each for each in values]  # type: ignore[arg-type]
        for name, values in content.items()
    }
    path.write_text(json_module.dumps(machine | lists, indent=1) + "\n", encoding="utf-8")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
