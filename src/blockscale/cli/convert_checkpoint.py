"""``blockscale convert-checkpoint``: a quantized checkpoint as another program reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .conversion import progress, show_manifest

__all__ = ["convert_checkpoint"]


def convert_checkpoint(
    source: Annotated[Path, typer.Argument(help="folder of a quantized model")],
    target: Annotated[Path, typer.Argument(help="folder to make")],
    to: Annotated[
        str, typer.Option(help="modelopt, compressed-tensors, deepseek, ...; or bf16: dequantize")
    ],
    format: Annotated[
        str | None, typer.Option(help="of quantized tensors, instead of theirs: rounds again")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="add what servers need of NVFP4 and the source lacks"),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the manifest")] = False,
) -> None:
    """Write a quantized folder in another convention, with the same codes and scales.

    What has to be rounded a second time is told, and how much that loses is in manifests.
    """
    from ..checkpoint import convert_folder

    with progress("converting") as tell:
        manifest = convert_folder(source, target, to, format, repair, tell)
    show_manifest(target, manifest, json)
