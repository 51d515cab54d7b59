"""``blockscale inspect``: what a checkpoint holds, and what quantization did to it."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .outputs import check_output

if TYPE_CHECKING:
    from ..checkpoint import FileReport, TensorReport

__all__ = ["inspect"]

_MANIFEST = {
    "intact": "manifest: all checksums match",
    "missing": "manifest: missing",
    "stale": "manifest: stale, it does not describe these bytes",
    "none": "nothing in it is quantized",
}


def inspect(
    path: Annotated[Path, typer.Argument(help="safetensors file or folder, quantized or not")],
    source: Annotated[
        Path | None, typer.Option(help="what it was made from: measure the errors again")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG to draw: errors and exponents of scales, or values")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Formats, shapes, sizes and errors of a checkpoint; checks it against its manifest.

    Exit code 1 if the manifest is stale: bytes are not those that were written.
    """
    from ..checkpoint import inspect_file, inspect_folder

    check_output("plot", plot, ".png")
    err = Console(stderr=True)
    with err.status("reading", spinner="line") if err.is_terminal else _Quiet() as status:
        look = inspect_folder if path.is_dir() else inspect_file
        report = look(
            path, source, lambda name, i, n: status.update(f"reading {i + 1}/{n} tensors")
        )
    if plot is not None:
        _draw(report, plot)
    if json:
        typer.echo(json_module.dumps(report.to_json(), indent=1))
    else:
        _show(report, plot)
    if report.manifest == "stale":
        raise typer.Exit(1)


def _show(report: FileReport, plot: Path | None) -> None:
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to fold to
        console = Console(width=1000)
    console.print(_survey(report) if report.manifest == "none" else _errors(report))
    for line in _footer(report):
        console.print(Text(line), soft_wrap=True)
    if plot is not None:
        console.print(Text(f"drawn: {plot}"), soft_wrap=True)


class _Quiet:
    """A status line for where there is no terminal."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, status: str) -> None:
        """Say nothing."""


def _draw(report: FileReport, plot: Path) -> None:
    from ..checkpoint import plots
    from ..checkpoint.writer import replacing

    figure = plots.values(report) if report.manifest == "none" else plots.errors(report)
    with replacing(plot, "plot") as file:
        figure.savefig(file, format="png")


def _errors(report: FileReport) -> Table:
    table = _table("tensor", "format", "shape", "bytes", "vs bf16")
    for column in ("SQNR dB", "max |error|", "relative", "saturated", "flushed"):
        table.add_column(column, justify="right")
    for t in report.tensors:
        table.add_row(*_common(t), *_error_cells(t), style=None if t.quantized else "dim")
    return table


def _error_cells(t: TensorReport) -> list[str]:
    if t.error is None:
        return ["stale"] if t.stale else ["unknown"] if t.quantized else []
    e, n = t.error, max(t.error.elements, 1)
    sqnr = f"{e.sqnr_db:.2f}" if e.sqnr_db is not None else "nothing lost"
    if e.nonfinite:
        sqnr += f" ({e.nonfinite} NaN)"
    return [
        sqnr,
        f"{e.max_abs:.3g}",
        f"{e.max_rel:.3g}",
        _share(e.saturated, n),
        _share(e.flushed, n),
    ]


def _share(count: int, total: int) -> str:
    return f"{count / total:.3%}" if count else "0"


def _survey(report: FileReport) -> Table:
    table = _table("tensor", "dtype", "shape", "bytes", "vs bf16")
    for column in ("amax", "exponents", "zeros", "not finite"):
        table.add_column(column, justify="right")
    for t in report.tensors:
        cells: list[str] = []
        if t.values is not None:
            exponents = t.values.exponents
            span = f"{min(exponents.counts)} to {max(exponents.counts)}" if exponents.counts else ""
            n = max(t.values.elements, 1)
            cells = [
                f"{t.values.amax:.4g}",
                span,
                _share(exponents.zeros, n),
                f"{exponents.nonfinite}",
            ]
        table.add_row(*_common(t), *cells)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(columns[0], overflow="fold", min_width=20)
    for i, column in enumerate(columns[1:]):
        table.add_column(column, justify="right" if i > 1 else "left", no_wrap=True)
    return table


def _common(t: TensorReport) -> list[Text | str]:
    from ..checkpoint.header import show
    from ..checkpoint.writer import format_bytes

    ratio = f"{t.bf16_bytes / t.nbytes:.2f}x" if t.nbytes else ""
    shape = "x".join(map(str, t.shape)) or "scalar"
    return [Text(show(t.name)[1:-1]), t.format, shape, format_bytes(t.nbytes), ratio]


def _footer(report: FileReport) -> list[str]:
    from ..checkpoint.header import show
    from ..checkpoint.writer import format_bytes

    quantized = [t for t in report.tensors if t.quantized]
    lines = [
        f"{len(report.tensors)} tensors, {format_bytes(report.nbytes)}: "
        f"{report.bf16_bytes / max(report.nbytes, 1):.2f}x compression against bf16"
    ]
    if quantized:
        mine, wide = sum(t.nbytes for t in quantized), sum(t.bf16_bytes for t in quantized)
        lines.append(
            f"{len(quantized)} quantized, {format_bytes(mine)}: {wide / max(mine, 1):.2f}x "
            "compression against bf16"
        )
    for name, e in report.errors_by_format().items():
        sqnr = "nothing lost" if e.sqnr_db is None else f"SQNR {e.sqnr_db:.2f} dB"
        lines.append(f"{name}: {sqnr}, max |error| {e.max_abs:.3g}, {e.saturated} saturated")
    if report.measured == "source":
        lines.append("errors: measured against the source just now")
    elif report.manifest == "missing":
        lines.append("errors: not known; give --source, the file it was made from")
    stale = ", ".join(map(show, report.stale[:5])) + ", ..." * (len(report.stale) > 5)
    return [*lines, _MANIFEST[report.manifest] + (f": {stale}" if stale else "")]
