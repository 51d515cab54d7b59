"""What ``quantize`` and ``convert-checkpoint`` show while they run, and how they stop."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from ..checkpoint import Progress as Event

__all__ = ["progress", "show_manifest"]


@contextmanager
def progress(title: str) -> Iterator[Callable[[Event], None]]:
    """A bar on a terminal; elsewhere only what became of an earlier attempt. Ctrl-C ends the
    command with a sentence."""
    from ..checkpoint.header import show

    console, notes = Console(stderr=True), set[str]()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[tensors]}", markup=False),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(title, total=None, tensors="")

    def tell(event: Event) -> None:
        if event.note and event.note not in notes:
            notes.add(event.note)
            console.print(Text(event.note))
        count = f"{event.tensors}/{event.total_tensors} tensors" if event.total_tensors else ""
        name = show(event.name)[-40:] if event.name else ""
        # no bytes: the model runs, and the bar moves to and fro
        total = event.total_bytes or None
        bar.update(task, completed=event.bytes, total=total, tensors=f"{count} {name}".strip())

    try:
        with bar:
            yield tell
    except KeyboardInterrupt:
        typer.echo(
            "blockscale: stopped; run the same command again, and it goes on after the tensors "
            "that are finished",
            err=True,
        )
        raise typer.Exit(130) from None


def show_manifest(target: Path, manifest: dict[str, Any], json: bool) -> None:
    """Print the manifest of a file or a folder as JSON; or what was done, why the rest was not, and
    how much was lost."""
    if json:
        typer.echo(json_module.dumps(manifest, indent=1))
        return
    for line in _lines(target, manifest):
        Console().print(line, soft_wrap=True)


def _lines(target: Path, manifest: dict[str, Any]) -> Iterator[Text]:
    from ..checkpoint.conventions import CONVENTIONS
    from ..checkpoint.header import show
    from ..checkpoint.summary import Summary
    from ..checkpoint.writer import format_bytes

    done = Summary()
    if "summary" in manifest:
        done = Summary(**manifest["summary"])
    else:
        done.add(manifest)
    what = [f"{count} tensors in {format}" for format, count in done.quantized.items()]
    what += [f"{done.dequantized} tensors dequantized"] if done.dequantized else []
    yield Text(
        f"{target}: {', '.join(what)} ({format_bytes(done.source_bytes)} -> "
        f"{format_bytes(done.quantized_bytes)}), {done.others} copied, {format_bytes(done.bytes)} "
        "in all"
    )
    convention = CONVENTIONS.get(manifest.get("convention") or manifest.get("to", ""))
    if "summary" in manifest and convention is not None:
        readers = ", ".join(convention.readers)
        yield Text(
            f"  for {readers}"
            if readers
            else "  for blockscale alone; servers and transformers read other conventions, as "
            "modelopt and compressed-tensors"
        )
    for why, count in sorted(done.copied.items(), key=lambda item: -item[1]):
        yield Text(f"  copied: {count} matri{'x' if count == 1 else 'ces'}, {why}")
    if done.rounded_again:
        yield Text(f"  rounded a second time: {done.rounded_again} tensors; manifests say how much")
    if done.rounded_reciprocals:
        yield Text(
            f"  {done.rounded_reciprocals} tensors may differ by a unit of fp32: the reciprocal of "
            "their global scale is stored"
        )
    if manifest.get("left_out"):
        names = ", ".join(map(show, manifest["left_out"][:3]))
        yield Text(
            f"  left out: {len(manifest['left_out'])} files with other copies of weights ({names})"
        )
    if repaired := manifest.get("repaired"):
        names = ", ".join(map(show, repaired[:3]))
        yield Text(
            f"  repaired: {len(repaired)} weights ({names}) have the global scale of what servers "
            "fuse with them"
        )
    if "input_scale" in manifest:
        yield Text(
            f"  input_scale {manifest['input_scale']:g}, not calibrated: servers that quantize "
            "activations to nvfp4 cut those above 2688 and lose precision in blocks below 0.09 "
            "(quantize a folder with --calibrate FILE)"
        )
    if unvisited := manifest.get("unvisited_experts"):
        names = ", ".join(map(show, unvisited[:3]))
        yield Text(
            f"  {len(unvisited)} matrices of experts that no token reached have the largest "
            f"input_scale of their block's ({names}{', ...' if len(unvisited) > 3 else ''})"
        )
    for warning in manifest.get("warnings", ()):
        yield Text(f"  warning: {warning}")
    if done.lowest is not None:
        low, worst = done.lowest
        yield Text(f"  SQNR {low:.2f} to {done.highest:.2f} dB, lowest {show(worst)}")
    for name, count in done.nonfinite.items():
        yield Text(
            f"  warning: {show(name)} has NaN or infinite values; {count} elements are NaN now"
        )
