"""``blockscale emulate megamoe``: a mixture of experts over ranks, by one kernel each."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from .emulate_ours import choose_arch, emulated, tell

__all__ = ["Outcome", "megamoe"]

_BLACKWELL = {"nvfp4": ("nvfp4", "nvfp4"), "mxfp4": ("mxfp4", "mxfp8"), "mxfp8": ("mxfp8", "mxfp8")}
#: By architecture, and the name of what is multiplied: formats of weights and of activations.
FORMATS = {
    "sm_90a": {
        "fp8_block": ("fp8_128x128", "fp8_1x128"),
        "nvfp4": ("nvfp4", "fp8_1x128"),
        "mxfp4": ("mxfp4", "fp8_1x128"),
    },
    "sm_100a": _BLACKWELL,
    "sm_103a": _BLACKWELL,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ranks had, and whether their tokens got the bits of steps one after another."""

    format: str
    activations: str
    ranks: int
    tokens: int  # of each rank
    hidden: int
    intermediate: int
    experts: int  # of all ranks
    topk: int
    buffer_bytes: int  # of each rank
    equal: bool
    error: float  # relative, against float64 of dequantized weights and tokens as they are
    seconds: float  # to compile and to emulate


def megamoe(
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a or sm_103a.")] = "sm_100a",
    format: Annotated[
        str,
        typer.Option(
            help="sm_90a: fp8_block, nvfp4, mxfp4 (all by FP8); sm_100a: nvfp4, mxfp4 (by mxfp8), "
            "mxfp8. Default: the first."
        ),
    ] = "",
    ranks: Annotated[int, typer.Option(help="That run at once.")] = 2,
    tokens: Annotated[int, typer.Option(help="Of each rank.")] = 48,
    hidden: Annotated[int, typer.Option(help="Columns of a token.")] = 512,
    intermediate: Annotated[int, typer.Option(help="Columns between the products.")] = 256,
    experts: Annotated[int, typer.Option(help="Of all ranks together.")] = 8,
    topk: Annotated[int, typer.Option(help="Experts of a token.")] = 2,
    ctas: Annotated[
        int, typer.Option(help="From sm_100a on: blocks whose tensor cores work together, 1 or 2.")
    ] = 1,
    completion: Annotated[
        str, typer.Option(help="When asynchronous work completes: eager, late or random.")
    ] = "late",
    seed: Annotated[int, typer.Option(help="Of tokens, experts and the random order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Send random tokens through experts of several ranks, each one kernel, all at once.

    Compares with the same steps one after another, which have these bits. Exit code 1 if a bit
    differs or a kernel is at fault (a race across ranks, a fault of memory), 2 where there is no
    kernel. Needs CuTe DSL (pip install 'blockscale\\[cuda]'), but no GPU.
    """
    import torch

    from ..checks import choose
    from ..kernels.mega.buffers import Sizes, why_not_sizes

    known = choose_arch(arch, FORMATS)
    format = format or next(iter(known))
    weights, activations = choose("format", format, known)
    for name, number in (("ranks", ranks), ("topk", topk), ("experts", experts)):
        if number < 1:
            raise ValueError(f"{name}: got {number}; expected 1 or more")
    if tokens < 0:
        raise ValueError(f"tokens: got {tokens}; expected 0 or more")
    if ctas != 1 and arch == "sm_90a":
        raise ValueError(f"ctas: got {ctas} for sm_90a; only from sm_100a on tensor cores pair up")
    if experts % ranks:
        raise ValueError(f"experts: got {experts}; expected a multiple of {ranks} ranks")
    if topk > experts:
        raise ValueError(f"topk: got {topk}; all ranks together have {experts} experts")
    if ctas not in (1, 2):
        raise ValueError(f"ctas: got {ctas}; expected 1 or 2")
    room, per_rank = max(1, tokens), experts // ranks
    sizes = Sizes(ranks, room, topk, hidden, intermediate, per_rank, activations)
    if reason := why_not_sizes(sizes):
        raise ValueError(reason)
    start = time.perf_counter()
    with emulated(arch, completion, seed):  # where CuTe DSL is missing, says so
        from .emulate_ranks import Case, Ranks, exact, steps

        case = Case(
            (tokens,) * ranks,
            topk=topk,
            hidden=hidden,
            intermediate=intermediate,
            experts=per_rank,
            format=weights,
            activations=activations,
            seed=seed,
        )
        run = Ranks(case, arch=arch, ctas=ctas, completion=completion, profile=True)
        got = run.launch()
        want = steps(case, arch)
    wide = torch.cat(exact(case))
    norm = wide.norm() or 1.0
    found = Outcome(
        format,
        activations,
        ranks,
        tokens,
        hidden,
        intermediate,
        experts,
        topk,
        buffer_bytes=run.buffers.nbytes,
        equal=all(torch.equal(*pair) for pair in zip(got, want, strict=True)),
        error=float((torch.cat(got).double() - wide).norm() / norm),
        seconds=time.perf_counter() - start,
    )
    if not json:
        typer.echo(
            f"{ranks} ranks of {tokens} tokens, {experts} experts, top-{topk}, {format} by "
            f"{activations}: bits {'equal' if found.equal else 'DIFFER'}, error {found.error:.3f}"
        )
    tell(json, asdict(found), run.reports)
    if not found.equal:
        raise typer.Exit(1)
