"""``blockscale bench``: speed on this machine's GPU."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

__all__ = ["bench"]

bench = typer.Typer()


@bench.callback(invoke_without_command=True)
def _all(context: typer.Context) -> None:
    """Measure speed on the GPU; without a command, all there is to measure."""
    if context.invoked_subcommand is None:
        quantize()


@bench.command()
def quantize(
    shapes: Annotated[
        str, typer.Option(help="Rows x columns: 16384x7168,4096x4096; default: three large ones.")
    ] = "",
    peers: Annotated[str, typer.Option(help="all, or none: others to measure, too.")] = "none",
    json: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw.")] = None,
) -> None:
    """Measure the quantizers beside the device's copy of as many bytes.

    Times are medians with a cold L2 cache. Needs a GPU for which there are kernels.
    """
    import torch

    from ..bench import quantize as measuring

    if not torch.cuda.is_available():
        raise ValueError("bench: needs an NVIDIA GPU; `blockscale emulate quantize` needs none")
    if peers not in ("all", "none"):
        raise ValueError(f"peers: got {peers!r}; choose all or none")
    sizes = [_shape(part) for part in shapes.split(",")] if shapes else measuring.SHAPES
    table = Table(box=None, pad_edge=False)
    for column in ("shape", "what", "who", "us", "GB/s", "copy, us", "of copy"):
        table.add_column(column, justify="left" if column in ("what", "who") else "right")
    rows = []
    for row in measuring.measure(sizes, peers=measuring.PEERS if peers == "all" else ()):
        rows.append(row)
        numbers = f"{row.microseconds:.1f}", f"{row.gigabytes_per_second:.0f}"
        copy = f"{row.copy_microseconds:.1f}", f"{row.of_copy:.3f}"
        table.add_row(f"{row.rows}x{row.columns}", row.case, row.who, *numbers, *copy)
    console = Console()
    (console if console.is_terminal else Console(width=1000)).print(table)
    if json is not None:
        found: dict[str, Any] = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "rows": [asdict(row) for row in rows],
        }
        json.write_text(json_module.dumps(found, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        measuring.draw(rows).savefig(plot, dpi=150)


def _shape(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"shapes: got {text!r}; expected rows and columns like 16384x7168")
    return int(parts[0]), int(parts[1])
