"""``blockscale bench model``: how long products should take, and what limits them. Needs no GPU."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_output import print_lines, print_table
from .emulate_ours import choose_arch
from .outputs import check_output
from .sizes import parse_sizes

if TYPE_CHECKING:
    from ..model import Estimate, Launch

__all__ = ["model"]

_SHAPES = "2048x2048x2048,4096x4096x4096,8192x8192x8192,4096x7168x2048,128x7168x16384"
_TEXTS = "format", "shape", "tile", "wall"
_NUMBERS = (
    "us",
    "TFLOP/s",
    "multiprocessors filled",
    "tensor cores busy",
    "L2 hits",
    "GB of L2",
    "GB of memory",
)
_HONEST = {
    "sm_90a": "An estimate. FP8 was held to times of an H200, bf16 was not: see the documentation.",
    "sm_100a": "An estimate: nothing of it has been measured, there was no such GPU.",
}


def model(
    arch: Annotated[str, typer.Option(help="sm_90a (H200) or sm_100a (B200).")] = "sm_90a",
    format: Annotated[
        str,
        typer.Option(
            help="sm_90a: fp8_block, fp8_1x128, bf16; sm_100a: mxfp8, mxfp8_mxfp4, mxfp4, nvfp4; "
            "or several; default: all."
        ),
    ] = "",
    shapes: Annotated[str, typer.Option(help="M x N x K: 4096x7168x2048,...")] = _SHAPES,
    group: Annotated[
        int | None,
        typer.Option(help="Clusters along M taken before the next along N; 1: no supergroups."),
    ] = None,
    ctas: Annotated[
        int | None, typer.Option(help="sm_100a: blocks whose tensor cores work together, 1 or 2.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
) -> None:
    """Estimate times of products from what their launches count, with a cold L2 cache.

    The wall is what would take longest if it had nothing to wait for. Needs no GPU.
    """
    from ..checks import choose
    from ..model import FORMATS, MACHINES, estimate, launch

    check_output("json", json)
    known = choose_arch(arch, FORMATS, "there are models of")
    names = format.split(",") if format else list(known)
    for name in names:
        choose("format", name, known)
    sizes = parse_sizes("shapes", shapes, "M, N and K", "4096x7168x2048")
    machine = MACHINES[arch]
    found = []
    for name in names:
        for m, n, k in sizes:
            one = launch(arch, name, (m, n, k), group=group, ctas=ctas)
            found.append((name, one, estimate(one, machine)))
    title = f"Estimate, {machine.name} ({arch})"
    print_table(title, (*_TEXTS, *_NUMBERS), [_cells(*each) for each in found], len(_TEXTS))
    print_lines([_HONEST[arch]])
    if json is not None:
        rows = [_row(*each) for each in found]
        content: dict[str, Any] = {"machine": machine.name, "arch": arch, "estimates": rows}
        json.write_text(json_module.dumps(content, indent=1) + "\n", encoding="utf-8")


def _cells(name: str, launch: Launch, found: Estimate) -> tuple[str, ...]:
    tile, cluster = (f"{each[0]}x{each[1]}" for each in (launch.tile, launch.cluster))
    return (
        name,
        "x".join(map(str, launch.shape)),
        f"{tile}, cluster {cluster}, group {launch.group}",
        found.wall,
        f"{found.microseconds:.1f}",
        f"{found.tflops:.0f}",
        f"{found.filled:.0%}",
        f"{found.tensor_share:.0%}",
        f"{found.traffic.hit_rate:.1%}",
        f"{found.traffic.l2 / 1e9:.2f}",
        f"{found.traffic.memory / 1e9:.2f}",
    )


def _row(name: str, launch: Launch, found: Estimate) -> dict[str, Any]:
    return {"format": name} | asdict(launch) | asdict(found)
