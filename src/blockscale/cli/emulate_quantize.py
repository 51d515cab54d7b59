"""``blockscale emulate quantize``: our own quantizer, compiled and run without a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from .emulate import examine, show
from .emulate_ours import choose_arch, emulated, tell
from .sizes import parse_size

__all__ = ["quantize"]

_AXES = {"rows": (-1,), "columns": (-2,), "both": (-1, -2)}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def quantize(
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a or sm_103a.")] = "sm_100a",
    format: Annotated[str, typer.Option(help="Such as mxfp8, nvfp4, fp8_1x128.")] = "mxfp8",
    shape: Annotated[str, typer.Option(help="Rows and columns of the input.")] = "129x160",
    axis: Annotated[str, typer.Option(help="Blocks along rows, columns or both.")] = "rows",
    layout: Annotated[str, typer.Option(help="Of the scales.")] = "compact",
    dtype: Annotated[str, typer.Option(help="Of the input: bf16, fp16 or fp32.")] = "bf16",
    scale_rounding: Annotated[str | None, typer.Option(help="Default: the format's.")] = None,
    nonfinite: Annotated[str, typer.Option(help="propagate or te.")] = "propagate",
    completion: Annotated[
        str, typer.Option(help="When asynchronous work completes: eager, late or random.")
    ] = "late",
    seed: Annotated[int, typer.Option(help="Of the input and the random order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Quantize random numbers by the GPU's kernel; compare with the reference.

    Prints the outputs and what the launch did. Exit code 1 if a byte differs. Needs
    CuTe DSL (pip install 'blockscale\\[cuda]'), but no GPU.
    """
    import torch

    from .. import reference
    from ..checks import choose
    from ..formats import get_format
    from ..kernels.common.gpu import GPUS
    from ..kernels.quantizers import calls as quantizers
    from ..layouts import as_bytes, get_layout, swizzle_scale

    gpu = choose_arch(arch, GPUS)
    fmt, where, axes = get_format(format), get_layout(layout), choose("axis", axis, _AXES)
    kind = getattr(torch, choose("dtype", dtype, _DTYPES))
    size = parse_size("shape", shape, "rows and columns", "129x160")
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(kind)
    rounding = scale_rounding or fmt.default_scale_rounding
    choose("scale_rounding", rounding, dict.fromkeys(fmt.scale.roundings))
    given: dict[str, Any] = {"scale_rounding": rounding, "nonfinite": nonfinite}
    if fmt.has_global_scale:
        given["global_scale"] = reference.global_scale(x, fmt)
    layouts = (where.name,) * len(axes)
    asked = quantizers.Request(fmt.name, axes, layouts, rounding, nonfinite)
    reason = quantizers.unsupported(x, asked, gpu)
    if reason:
        raise ValueError(reason)
    with emulated(arch, completion, seed) as reports:
        scalar = given.get("global_scale")
        results = quantizers.quantize(x, asked, global_scale=scalar, gpu=gpu)
    outputs = []
    for along, (data, scale) in zip(axes, results, strict=True):
        wanted, compact = reference.quantize(x, fmt, axis=along, **given)
        placed = swizzle_scale(as_bytes(compact), along, where, None)
        name = "rows" if along == -1 else "columns"
        for what, got, want in (("data", data, wanted), ("scale", scale, placed)):
            arrays = [t.contiguous().view(torch.uint8).numpy() for t in (got, want)]
            outputs.append(examine(f"{what} of {name}", *arrays))
    if not json:
        show(outputs)
    tell(json, {"outputs": [asdict(output) for output in outputs]}, reports)
    if not all(output.equal for output in outputs):
        raise typer.Exit(1)
