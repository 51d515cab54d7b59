"""What the commands share that run a kernel of this library in the emulator."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..emulator import Report

__all__ = ["emulated", "tell"]


@contextmanager
def emulated(arch: str, completion: str, seed: int) -> Iterator[list[Report]]:
    """Kernels run in an emulated device with all checks; exit code 1 if one is at fault."""
    from ..emulator import Device, PtxError, cutedsl

    device = Device(arch, completion=completion, seed=seed, check="all")
    try:
        with cutedsl(device, profile=True) as reports:
            yield reports
    except PtxError as error:
        print(f"blockscale: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def tell(json: bool, found: dict[str, Any], reports: Sequence[Report]) -> None:
    """The report of all launches: in JSON beside what was ``found``, or its tables."""
    from ..emulator import Report

    report = Report.merge(reports)
    if json:
        typer.echo(json_module.dumps({**found, "report": report.as_dict()}, indent=1))
    else:
        typer.echo(report.table())
