"""``blockscale emulate``: one kernel, from its PTX and a description of its arguments."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from ..checks import reading
from .description import read_case
from .outputs import check_output

__all__ = ["Output", "emulate", "examine", "run", "show"]


class _Group(TyperGroup):
    """What does not begin with the name of a command is for ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


emulate = typer.Typer(cls=_Group, no_args_is_help=True)


@emulate.callback()
def _about() -> None:
    """Run a kernel for Hopper or Blackwell on the CPU, from its PTX.

    `blockscale emulate FILE.ptx ...` is `blockscale emulate run FILE.ptx ...`.
    """


@dataclass(frozen=True)
class Output:
    """An array after the launch; ``equal`` is None where nothing was expected."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    min: float | int | str | None  # text where it is infinite, None without numbers
    max: float | int | str | None
    nan: int
    equal: bool | None
    difference: str


@emulate.command()
def run(
    file: Annotated[Path, typer.Argument(help="PTX.")],
    args: Annotated[
        Path | None, typer.Option(help="JSON that describes the launch; options override it.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="NPZ with the arrays it names.")] = None,
    entry: Annotated[str | None, typer.Option(help="Kernel, if there are several.")] = None,
    grid: Annotated[str | None, typer.Option(help="CTAs: 4 or 4,2,1.")] = None,
    block: Annotated[str | None, typer.Option(help="Threads of a CTA.")] = None,
    cluster: Annotated[str | None, typer.Option(help="CTAs of a cluster.")] = None,
    shared: Annotated[int | None, typer.Option(help="Dynamic shared memory, bytes.")] = None,
    completion: Annotated[
        str, typer.Option(help="When asynchronous work completes: eager, late or random.")
    ] = "eager",
    seed: Annotated[int, typer.Option(help="Of the random order.")] = 0,
    check: Annotated[
        str, typer.Option(help="all, none, or kinds like race,fence; all,exit_stores adds one.")
    ] = "all",
    collect: Annotated[
        bool, typer.Option("--collect", help="Go on after alarms; the report has them.")
    ] = False,
    suppress: Annotated[
        Path | None,
        typer.Option(
            help="Text: kind key=pattern ...  # reason, a line each; keys may be left out."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Exact sums instead of those of the tensor cores.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="NPZ to write with the outputs.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSON to write for ui.perfetto.dev, warps and engines.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run one kernel; print its outputs and what it did.

    Exit code 1 if the kernel is at fault or an output is not as expected, 2 for
    bad input.
    """
    from ..emulator import Device, PtxError
    from ..emulator.ptx.parse import outline

    check_output("save", save)
    check_output("trace", trace)
    given: dict[str, Any] = {
        "entry": entry,
        "grid": _dimensions(grid, "grid"),
        "block": _dimensions(block, "block"),
        "cluster": _dimensions(cluster, "cluster"),
        "shared": shared,
    }
    description = _read_json(args) | {k: v for k, v in given.items() if v is not None}
    arrays = _read_npz(data)
    text = _read_text(file, "file")
    try:
        case = read_case(outline(text), description, arrays)
        device = Device(
            case.target,
            completion=completion,
            seed=seed,
            check=check,
            on_error="collect" if collect else "raise",
            suppress=() if suppress is None else _read_text(suppress, "suppress").splitlines(),
            exact=exact,
        )
        report = device.launch(
            text,
            case.entry,
            case.grid,
            case.block,
            case.args,
            cluster=case.cluster,
            shared=case.shared,
            buffers=case.buffers,
            profile=True,
            trace=trace is not None,
        )
    except PtxError as error:
        print(f"blockscale: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    outputs = [examine(name, case.arrays[name], case.expected.get(name)) for name in case.outputs]
    if save is not None:
        saved: dict[str, Any] = {name: case.arrays[name] for name in case.outputs}
        with save.open("wb") as target:
            np.savez(target, **saved)
    if trace is not None:
        report.trace(trace)
    if json:
        found = {"outputs": [asdict(output) for output in outputs], "report": report.as_dict()}
        typer.echo(json_module.dumps(found, indent=1))
    else:
        show(outputs)
        typer.echo(report.table())
    if report.alarms or any(output.equal is False for output in outputs):
        raise typer.Exit(1)


def examine(name: str, got: np.ndarray, expected: np.ndarray | None) -> Output:
    """What to say of an output. Bits must be equal, except that any NaN equals any other."""
    is_float = got.dtype.kind == "f"
    nan = np.isnan(got) if is_float else np.zeros(got.shape, bool)
    values = got[~nan] if got.dtype.kind in "iufb" else got[:0]
    low, high = (_number(f(values)) if values.size else None for f in (np.min, np.max))
    equal, difference = None, ""
    if expected is not None:
        difference = _difference(got, expected, nan)
        equal = not difference
    shape, dtype = tuple(got.shape), str(got.dtype)
    return Output(name, shape, dtype, low, high, int(nan.sum()), equal, difference)


def _difference(got: np.ndarray, expected: np.ndarray, nan: np.ndarray) -> str:
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return f"expected is {expected.dtype} of shape {expected.shape}"
    octets = (got.size, got.itemsize)
    different = np.ascontiguousarray(got).reshape(-1).view(np.uint8).reshape(octets)
    other = np.ascontiguousarray(expected).reshape(-1).view(np.uint8).reshape(octets)
    wrong = (different != other).any(axis=1)
    if got.dtype.kind == "f":
        wrong &= ~(nan & np.isnan(expected)).reshape(-1)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), got.shape))
    return (
        f"{int(wrong.sum())} of {got.size} differ, first {list(at)}: {got[at]}, "
        f"expected {expected[at]}"
    )


def _number(value: Any) -> float | int | str:
    """Something that JSON can hold."""
    number: float | int = value.item()
    return number if np.isfinite(number) else str(number)


def show(outputs: list[Output]) -> None:
    if not outputs:
        return
    table = Table(box=None, pad_edge=False)
    for column in ("output", "shape", "dtype", "min", "max", "NaN", "as expected"):
        table.add_column(column, justify="right" if column in ("min", "max", "NaN") else "left")
    for o in outputs:
        verdict = {None: "", True: "yes", False: o.difference}[o.equal]
        low, high = (
            str(v) if v is None or isinstance(v, str) else f"{v:.6g}" for v in (o.min, o.max)
        )
        shape = "x".join(map(str, o.shape)) or "scalar"
        table.add_row(Text(o.name), shape, o.dtype, low, high, str(o.nan), verdict)
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width to fold to
        console = Console(width=1000)
    console.print(table)
    console.print()


# --- input ----------------------------------------------------------------------------------------


def _dimensions(text: str | None, name: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: got {text!r}; expected numbers like 4 or 4,2,1") from None


def _read_text(path: Path, name: str) -> str:
    with reading(name, path):
        return path.read_text(encoding="utf-8")


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json_module.loads(_read_text(path, "args"))
    except json_module.JSONDecodeError as error:
        raise ValueError(f"args: {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"args: {path} holds no object")
    return found


def _read_npz(path: Path | None) -> dict[str, np.ndarray]:
    if path is None:
        return {}
    with reading("data", path):
        try:
            with np.load(path) as file:
                return {name: file[name] for name in file.files}
        except (BadZipFile, ValueError, AttributeError, EOFError):
            raise ValueError(f"data: {path} is not an NPZ file of plain arrays") from None
