"""``blockscale quantize``: a checkpoint into block-scaled formats."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

__all__ = ["quantize"]


def quantize(
    source: Annotated[Path, typer.Argument(help="safetensors file to read")],
    target: Annotated[Path, typer.Argument(help="safetensors file to make")],
    format: Annotated[str, typer.Option(help="mxfp8, nvfp4, ...; a wrong one lists them all")],
    include: Annotated[
        list[str] | None,
        typer.Option(help="glob of tensors to quantize, instead of the default; repeatable"),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="glob of tensors to leave as they are; repeatable")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="measure errors; without, it is faster")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="print the manifest")] = False,
) -> None:
    """Quantize the matrices of a checkpoint, in constant memory; go on after a kill.

    Blocks run along the last dimension. All else is copied, and so are
    matrices whose last dimension is no multiple of the block, weights that are
    stored (in, out) and, without --include, embeddings, heads, norms and routers.
    Checksums and errors go to TARGET.manifest.json; `blockscale inspect TARGET` shows them.
    """
    from ..checkpoint import quantize_file

    chosen = include or (), exclude or ()
    try:
        with _progress(Console(stderr=True)) as tell:
            manifest = quantize_file(source, target, format, *chosen, tell, statistics=stats)
    except KeyboardInterrupt:
        typer.echo(
            "blockscale: stopped; run the same command again, and it goes on after the tensors "
            "that are finished",
            err=True,
        )
        raise typer.Exit(130) from None
    if json:
        typer.echo(json_module.dumps(manifest, indent=1))
    else:
        for line in _summary(target, manifest):
            Console().print(line, soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[Event], None]]:
    """A bar on a terminal; elsewhere only what became of an earlier attempt."""
    from ..checkpoint.header import show

    notes: set[str] = set()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[tensors]}", markup=False),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks = {
            phase: bar.add_task(title, total=None, visible=False, tensors="")
            for phase, title in (("check", "reading the source"), ("quantize", "quantizing"))
        }

        def tell(event: Event) -> None:
            if event.note and event.note not in notes:
                notes.add(event.note)
                console.print(Text(event.note))
            count = f"{event.tensors}/{event.total_tensors} tensors" if event.total_tensors else ""
            bar.update(
                tasks[event.phase],
                completed=event.bytes,
                total=event.total_bytes,
                tensors=f"{count} {show(event.name)[-40:] if event.name else ''}",
                visible=True,
            )

        yield tell


def _summary(target: Path, manifest: dict[str, Any]) -> Iterator[Text]:
    """What was done, why the rest was not, and how much was lost."""
    from ..checkpoint.header import show
    from ..checkpoint.writer import format_bytes

    tensors = manifest["tensors"]
    quantized = {name: t for name, t in tensors.items() if "format" in t}
    before, after = (sum(t[key] for t in quantized.values()) for key in ("source_bytes", "bytes"))
    yield Text(
        f"{target}: {len(quantized)} tensors in {manifest['format']} ({format_bytes(before)} -> "
        f"{format_bytes(after)}), {len(tensors) - len(quantized)} copied, "
        f"{format_bytes(manifest['file']['size'])} in all"
    )
    reasons = Counter(
        t["copied"] for t in tensors.values() if "copied" in t and len(t["shape"]) > 1
    )
    for why, count in reasons.most_common():
        yield Text(f"  copied: {count} matri{'x' if count == 1 else 'ces'}, {why}")
    if "input_scale" in manifest:
        yield Text(
            f"  input_scale {manifest['input_scale']:g}, not calibrated: servers that quantize "
            "activations to nvfp4 cut those above 2688 and lose precision in blocks below 0.09"
        )
    for warning in manifest["warnings"]:
        yield Text(f"  warning: {warning}")
    errors = {show(name): t["error"] for name, t in quantized.items() if "error" in t}
    sqnr = {name: e["sqnr_db"] for name, e in errors.items() if e["sqnr_db"] is not None}
    if sqnr:
        low, high = min(sqnr.values()), max(sqnr.values())
        worst = min(sqnr, key=lambda name: sqnr[name])
        yield Text(f"  SQNR {low:.2f} to {high:.2f} dB, lowest {worst}")
    for name, error in errors.items():
        if count := error["nonfinite"]:
            yield Text(
                f"  warning: {name} has NaN or infinite values; {count} elements are NaN now"
            )
