"""``blockscale bench``: speed on this machine's GPU."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..bench.host import HostCall
    from ..bench.quantize import Absent, Row

__all__ = ["bench"]

bench = typer.Typer()

_PACKAGES = ("nvidia-cutlass-dsl", "triton", "torchao")


@bench.callback(invoke_without_command=True)
def _all(context: typer.Context) -> None:
    """Measure speed on the GPU; without a command, all there is to measure."""
    if context.invoked_subcommand is None:
        quantize()


@bench.command()
def quantize(
    shapes: Annotated[
        str,
        typer.Option(help="Rows x columns: 16384x7168,4096x4096; default: some for each group."),
    ] = "",
    peers: Annotated[str, typer.Option(help="all, or none: others to measure, too.")] = "none",
    json: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw.")] = None,
) -> None:
    """Measure the quantizers beside the device's copy of as many bytes.

    Times are medians with a cold L2 cache; then what a call costs the host. Needs a GPU for which
    there are kernels. What cannot run is listed with the reason.
    """
    import torch

    from ..bench.cases import GROUPS
    from ..bench.host import measure_host
    from ..bench.peers import PEERS
    from ..bench.quantize import Absent, Row, draw, measure
    from ..bench.timing import Timer

    if peers not in ("all", "none"):
        raise ValueError(f"peers: got {peers!r}; choose all or none")
    sizes = [_shape(part) for part in shapes.split(",")] if shapes else None
    if not torch.cuda.is_available():
        raise ValueError("bench: needs an NVIDIA GPU; `blockscale emulate quantize` needs none")
    timer, found = Timer(), list[Row | Absent]()
    for group in GROUPS:
        mine = list(measure(group, sizes, PEERS if peers == "all" else (), timer))
        _show(group.name, mine)
        found += mine
        _write(json, found, ())
    calls = list(measure_host())
    table = Table("what", box=None, pad_edge=False, title="Host, a call", title_justify="left")
    table.add_column("us", justify="right")
    for call in calls:
        table.add_row(call.what, f"{call.microseconds:.2f}")
    _console().print(table)
    _write(json, found, calls)
    if plot is not None:
        draw([row for row in found if isinstance(row, Row)]).savefig(plot, dpi=150)


def _show(title: str, found: Sequence[Row | Absent]) -> None:
    from ..bench.quantize import Row

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in ("shape", "what", "who", "us", "GB/s", "copy, us", "of copy"):
        table.add_column(column, justify="left" if column in ("what", "who") else "right")
    reasons = []
    for row in found:
        first = f"{row.rows}x{row.columns}", row.case, row.who
        if isinstance(row, Row):
            numbers = f"{row.microseconds:.1f}", f"{row.gigabytes_per_second:.0f}"
            table.add_row(*first, *numbers, f"{row.copy_microseconds:.1f}", f"{row.of_copy:.3f}")
        else:
            table.add_row(*first, "-", "-", "-", "-")
            reasons.append(f"{row.case} ({row.who}), {first[0]}, cannot run: {row.why}")
    console = _console()
    console.print(table)
    for reason in reasons:
        console.print(reason, markup=False, highlight=False)
    console.print()


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=1000)


def _write(path: Path | None, found: Sequence[Row | Absent], calls: Sequence[HostCall]) -> None:
    """After each group, so that a run that is stopped leaves what it has."""
    import torch

    from ..bench.quantize import Row

    if path is None:
        return
    content: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in _PACKAGES},
        "rows": [asdict(row) for row in found if isinstance(row, Row)],
        "absent": [asdict(row) for row in found if not isinstance(row, Row)],
        "host": [asdict(call) for call in calls],
    }
    path.write_text(json_module.dumps(content, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"shapes: got {text!r}; expected rows and columns like 16384x7168")
    return int(parts[0]), int(parts[1])
