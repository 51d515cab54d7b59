"""``blockscale bench``: speed on this machine's GPU, of quantizers on its CPU too."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import bench_output as output
from .outputs import check_output
from .sizes import parse_sizes

if TYPE_CHECKING:
    from ..bench.contest import Absent, Contest, Row
    from ..bench.quantize import Absent as NotQuantized
    from ..bench.quantize import Row as Quantized
    from ..bench.timing import Timer

__all__ = ["bench"]

bench = typer.Typer()

_PRODUCT = ("M, N and K", "4096x7168x2048")

Peers = Annotated[str, typer.Option(help="all, or none: others to measure, too.")]
Json = Annotated[Path | None, typer.Option(help="JSON to write.")]
Plot = Annotated[Path | None, typer.Option(help="PNG to draw.")]


@bench.callback(invoke_without_command=True)
def _all(context: typer.Context) -> None:
    """Measure speed; without a command, all there is to measure: on a CPU the quantizers."""
    if context.invoked_subcommand is None:
        for command in (quantize, gemm, grouped, linear, host) if _device("auto") else (quantize,):
            command()


@bench.command()
def quantize(
    shapes: Annotated[
        str,
        typer.Option(help="Rows x columns: 16384x7168,4096x4096; default: some for each group."),
    ] = "",
    peers: Peers = "none",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: cuda where there is a GPU.")
    ] = "auto",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure the quantizers beside the device's copy of as many bytes.

    On a GPU times are medians with a cold L2 cache; then what a call costs the host. On a CPU
    medians of rounds of all. What cannot run is listed with the reason.
    """
    from ..bench.cases import GROUPS
    from ..bench.host import measure_host, quantize_calls
    from ..bench.peers import PEERS
    from ..bench.quantize import Absent, Row, draw, measure
    from ..bench.timing import Timer

    _check_outputs(json, plot)
    chosen = PEERS if _wanted(peers) else ()
    sizes = None
    if shapes:
        found_sizes = parse_sizes("shapes", shapes, "rows and columns", "16384x7168")
        sizes = [(rows, columns) for rows, columns in found_sizes]
    if not _device(device):
        _quantize_on_cpu(sizes, bool(chosen), json, plot)
        return
    timer, rows, absent = Timer(), list[Row](), list[Absent]()
    for group in GROUPS:
        mine = list(measure(group, sizes, chosen, timer))
        _show_quantized(group.name, mine)
        rows += [row for row in mine if isinstance(row, Row)]
        absent += [row for row in mine if isinstance(row, Absent)]
        output.write(json, rows=rows, absent=absent, host=())
    calls = list(measure_host(quantize_calls(), "bs.quantize, rows"))
    output.show_host(calls)
    output.write(json, rows=rows, absent=absent, host=calls)
    if plot is not None:
        draw(rows).savefig(plot, dpi=150)


def _quantize_on_cpu(
    sizes: list[tuple[int, int]] | None, peers: bool, json: Path | None, plot: Path | None
) -> None:
    from ..bench.cpu import SHAPE, measure
    from ..bench.quantize import Absent, Row, draw

    found = list[Row | Absent]()
    for shape in sizes or [SHAPE]:
        mine = list(measure(shape, peers))
        _show_quantized("CPU", mine)
        found += mine
        rows = [row for row in found if isinstance(row, Row)]
        absent = [row for row in found if isinstance(row, Absent)]
        output.write(json, rows=rows, absent=absent, host=())
    if plot is not None:
        draw(rows).savefig(plot, dpi=150)


def _show_quantized(title: str, found: Iterable[Quantized | NotQuantized]) -> None:
    from ..bench.quantize import Row

    cells, reasons = [], []
    for row in found:
        first = f"{row.rows}x{row.columns}", row.case, row.who
        if isinstance(row, Row):
            numbers = f"{row.microseconds:.1f}", f"{row.gigabytes_per_second:.0f}"
            cells.append((*first, *numbers, f"{row.copy_microseconds:.1f}", f"{row.of_copy:.3f}"))
        else:
            cells.append((*first, "-", "-", "-", "-"))
            reasons.append(f"{row.case} ({row.who}), {first[0]}, cannot run: {row.why}")
    columns = ("shape", "what", "who", "us", "GB/s", "copy, us", "of copy")
    output.print_table(title, columns, cells, 3)
    output.print_lines(reasons)


@bench.command()
def gemm(
    shapes: Annotated[
        str, typer.Option(help="M x N x K: 4096x7168x2048,...; default: some for each group.")
    ] = "",
    format: Annotated[
        str, typer.Option(help="fp8_block, mxfp8 or nvfp4, or several; default: all.")
    ] = "",
    peers: Peers = "none",
    chooser: Annotated[
        bool,
        typer.Option("--chooser", help="Instead: the kernel chosen beside all, at LLMs' shapes."),
    ] = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure products beside torch's in bf16, and others' block-scaled ones.

    Times are medians with a cold L2 cache, of ours and the others in turn; then what a call costs
    the host. Needs a GPU for which there are kernels. What cannot run is listed with the reason.
    """
    from ..bench.gemm import FORMATS, GROUPS, contests
    from ..bench.host import gemm_calls, measure_host
    from ..bench.pictures import draw
    from ..checks import choose

    _check_outputs(json, plot)
    names = format.split(",") if format else list(FORMATS)
    for name in names:
        choose("format", name, FORMATS)
    wanted, sizes = _wanted(peers), _products(shapes)
    timer = _need_gpu()
    if chooser:
        _chooser(timer, json)
        return
    every = contests(GROUPS, formats=names, shapes=sizes, peers=wanted)
    rows, absent = _measure(every, timer, json)
    calls = list(measure_host(gemm_calls(), "bs.gemm, fp8_block"))
    output.show_host(calls)
    output.write(json, rows=rows, absent=absent, host=calls)
    if plot is not None:
        draw(rows).savefig(plot, dpi=150)


@bench.command()
def grouped(
    shapes: Annotated[
        str, typer.Option(help="Groups x M x N x K, all groups' rows: 8x32768x4096x7168,...")
    ] = "",
    format: Annotated[
        str, typer.Option(help="fp8_block, mxfp8 or nvfp4, or several; default: all.")
    ] = "",
    peers: Peers = "none",
    json: Json = None,
) -> None:
    """Measure products of groups of rows (experts) beside torch's in bf16, and others'.

    Groups have as many rows each, then log-normal numbers of them. Beside them is our product of
    all rows by one matrix, which shows what groups cost.
    """
    from ..bench.grouped import FORMATS, SHAPES, contests
    from ..checks import choose

    _check_outputs(json)
    names = format.split(",") if format else list(FORMATS)
    for name in names:
        choose("format", name, FORMATS)
    wanted, sizes = _wanted(peers), _groups(shapes) or SHAPES
    timer = _need_gpu()
    _measure(contests(names, sizes, peers=wanted), timer, json)


@bench.command()
def moe(
    shapes: Annotated[
        str,
        typer.Option(
            help="Hidden x intermediate x experts x top-k x tokens: 2048x768x128x8x16384,...; "
            "default: Qwen3-MoE, Mixtral and DeepSeek-V3."
        ),
    ] = "",
    recipe: Annotated[
        str, typer.Option(help="fp8_block, mxfp8 or nvfp4, or several; default: all.")
    ] = "",
    peers: Peers = "none",
    json: Json = None,
) -> None:
    """Measure a layer of experts, forward, and forward and backward, beside torch's bf16.

    Routing and all casts count; then with the weights as they were quantized before.
    Then each step alone beside its floor, and what a layer costs the host.
    """
    from ..bench.host import measure_host
    from ..bench.moe import AT_ONCE, RECIPES, contests, layer_calls, make_layer
    from ..bench.moe_shapes import SHAPES, Shape
    from ..bench.moe_stages import Stage, measure_stages
    from ..checks import choose

    _check_outputs(json)
    names = recipe.split(",") if recipe else list(RECIPES)
    for name in names:
        choose("recipe", name, RECIPES)
    sizes = dict(SHAPES)
    if shapes:
        found = parse_sizes("shapes", shapes, "hidden, ...", "2048x768x128x8x16384")
        sizes = {"x".join(map(str, each)): Shape(*each) for each in found}
    wanted, timer = _wanted(peers), _need_gpu()
    rows, absent = _measure(contests(names, sizes, peers=wanted), timer, json)
    steps = list[Stage]()
    for model, shape in sizes.items():
        layer = make_layer(shape, timer.device)
        for name in names:
            mine = list(measure_stages(model, layer, shape, name, RECIPES[name], timer))
            steps += mine
            output.show_stages(f"{model}, {name}", mine)
            output.write(json, rows=rows, absent=absent, stages=steps, host=())
    of_layer, name = layer_calls(names[0], timer.device), f"bs.nn.experts, {names[0]}"
    calls = list(measure_host(of_layer, name, AT_ONCE))
    output.show_host(calls)
    output.write(json, rows=rows, absent=absent, stages=steps, host=calls)


@bench.command()
def linear(
    shapes: Annotated[str, typer.Option(help="Rows x outputs x inputs: 16384x7168x4096,...")] = "",
    recipe: Annotated[str, typer.Option(help="fp8_block or mxfp8; default: both.")] = "",
    peers: Peers = "none",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure a linear layer, forward and backward, beside torch's in bf16 and torchao's.

    Three products and all casts count.
    """
    from ..bench.linear import RECIPES, SHAPES, contests
    from ..bench.pictures import draw
    from ..checks import choose

    _check_outputs(json, plot)
    names = recipe.split(",") if recipe else list(RECIPES)
    for name in names:
        choose("recipe", name, RECIPES)
    wanted, sizes = _wanted(peers), _products(shapes) or SHAPES
    timer = _need_gpu()
    rows, _ = _measure(contests(names, sizes, peers=wanted), timer, json)
    if plot is not None:
        draw(rows).savefig(plot, dpi=150)


@bench.command()
def host(json: Json = None) -> None:
    """Measure for how long a linear layer keeps the host, beside torch.nn.Linear.

    Forward, and forward and backward, eager and compiled, of a layer that the device finishes
    first: medians, of all in turn.
    """
    from ..bench.host import HostCall
    from ..bench.host_layers import layer_calls, measure_layers

    _check_outputs(json)
    _need_gpu()
    found = list[HostCall]()
    for compiled in (False, True):
        found += measure_layers(layer_calls(compiled=compiled))
        output.write(json, rows=(), absent=(), host=found)
    output.show_host(found)


def _measure(
    contests: Iterable[Contest], timer: Timer, json: Path | None
) -> tuple[list[Row], list[Absent]]:
    """All of them, a table for each group; JSON after each contest."""
    from ..bench.contest import Absent, Row, contest

    rows, absent = list[Row](), list[Absent]()
    for group, several in groupby(contests, key=lambda one: one.where.group):
        mine: list[Row | Absent] = []
        for one in several:
            found = list(contest(one, timer))
            mine += found
            rows += [each for each in found if isinstance(each, Row)]
            absent += [each for each in found if isinstance(each, Absent)]
            output.write(json, rows=rows, absent=absent, host=())
        output.show_contests(group, mine)
    return rows, absent


def _chooser(timer: Timer, json: Path | None) -> None:
    from ..bench.chooser import Choice, compare, summary
    from ..bench.llm_shapes import LLM_SHAPES

    choices, failed = list[Choice](), list[str]()
    for found in compare(LLM_SHAPES, timer, _multiprocessors()):
        if isinstance(found, str):
            failed.append(found)
        else:
            choices.append(found)
        output.write(json, choices=choices, failed=failed)
    cells = [
        (c.model, c.layer, c.shape, c.chosen, c.best, f"{c.tflops:.0f}", f"{c.of_best:.3f}")
        for c in choices
    ]
    columns = ("model", "layer", "shape", "chosen", "best", "TFLOP/s", "best's time / its")
    output.print_table("Chooser", columns, cells, 5)
    lines = [f"cannot run: {why}" for why in failed]
    if choices:
        mean, least = summary(choices)
        lines.append(
            f"of the best: {mean:.3f} (geometric mean of {len(choices)}), least {least:.3f}"
        )
    output.print_lines(lines)


# --- input ----------------------------------------------------------------------------------------


def _check_outputs(json: Path | None, plot: Path | None = None) -> None:
    check_output("json", json)
    check_output("plot", plot, ".png")


def _wanted(peers: str) -> bool:
    if peers not in ("all", "none"):
        raise ValueError(f"peers: got {peers!r}; choose all or none")
    return peers == "all"


def _products(shapes: str) -> list[tuple[int, int, int]] | None:
    if not shapes:
        return None
    return [(m, n, k) for m, n, k in parse_sizes("shapes", shapes, *_PRODUCT)]


def _groups(shapes: str) -> list[tuple[int, int, int, int]] | None:
    if not shapes:
        return None
    found = parse_sizes("shapes", shapes, "groups, M, N and K", "8x32768x4096x7168")
    return [(groups, m, n, k) for groups, m, n, k in found]


def _device(name: str) -> bool:
    """Whether it is a GPU; ValueError for another name, and for one that is not there."""
    import torch

    from ..checks import choose

    choose("device", name, dict.fromkeys(("auto", "cpu", "cuda")))
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("device: got 'cuda', and torch finds no GPU here; choose 'cpu'")
    return there if name == "auto" else name == "cuda"


def _need_gpu() -> Timer:
    """ValueError without one."""
    import torch

    from ..bench.timing import Timer

    if not torch.cuda.is_available():
        raise ValueError("bench: needs an NVIDIA GPU; `blockscale emulate gemm` needs none")
    return Timer()


def _multiprocessors() -> int:
    import torch

    count: int = torch.cuda.get_device_properties().multi_processor_count
    return count
