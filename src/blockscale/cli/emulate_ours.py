"""What the commands share that run a kernel of this library in the emulator."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from ..emulator import Report

__all__ = ["choose_arch", "emulated", "tell"]

_T = TypeVar("_T")


def choose_arch(arch: str, known: Mapping[str, _T], what: str = "kernels are compiled for") -> _T:
    """``known[arch]``, or a ValueError that says why not, and what the a of sm_100a is."""
    from ..kernels.common.gpu import no_kernels

    if arch not in known:
        raise ValueError(f"arch: got {arch!r}; {no_kernels(arch, known, what)}")
    return known[arch]


@contextmanager
def emulated(
    arch: str, completion: str, seed: int, *, keep_code: bool = False
) -> Iterator[list[Report]]:
    """Kernels run in an emulated device with all checks; exit code 1 if one is at fault.

    ``keep_code``: compiled functions have their machine code as ``__cubin__``.
    """
    from ..emulator import Device, PtxError, cutedsl
    from ..kernels.common.runtime import missing

    device = Device(arch, completion=completion, seed=seed, check="all")
    try:
        with ExitStack() as stack:
            reports = stack.enter_context(cutedsl(device, profile=True))
            if keep_code:
                stack.enter_context(_kept_code())
            yield reports
    except PtxError as error:
        print(f"blockscale: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ModuleNotFoundError:
        if missing():
            raise ValueError(missing()) from None
        raise


def _kept_code() -> Any:
    from unittest.mock import patch

    from ..emulator.host.hostcode import settings

    return patch.object(settings(), "keep_cubin", True)


def tell(json: bool, found: dict[str, Any], reports: Sequence[Report]) -> None:
    """The report of all launches: in JSON beside what was ``found``, or its tables."""
    from ..emulator import Report

    report = Report.merge(reports)
    if json:
        typer.echo(json_module.dumps({**found, "report": report.as_dict()}, indent=1))
    else:
        typer.echo(report.table())
