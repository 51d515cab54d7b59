"""``blockscale quantize``: a checkpoint into block-scaled formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .calibrating import model_and_batches
from .conversion import progress, show_manifest

if TYPE_CHECKING:
    from ..checkpoint import Progress
    from ..checkpoint.request import Request
    from ..tensor import ScaledTensor

__all__ = ["quantize"]


def quantize(
    source: Annotated[Path, typer.Argument(help="safetensors file, or folder of a model, to read")],
    target: Annotated[Path, typer.Argument(help="file or folder to make")],
    format: Annotated[str, typer.Option(help="mxfp8, nvfp4, ...; a wrong one lists them all")],
    convention: Annotated[
        str,
        typer.Option(help="whose checkpoints to write: modelopt, compressed-tensors, ..."),
    ] = "blockscale",
    include: Annotated[
        list[str] | None,
        typer.Option(help="glob of tensors to quantize, instead of the default; repeatable"),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="glob of tensors to leave as they are; repeatable")
    ] = None,
    weight_only: Annotated[
        bool, typer.Option("--weight-only", help="of a folder: activations in high precision")
    ] = False,
    scaling: Annotated[
        str, typer.Option(help="of nvfp4: amax, four_over_six, or search, the best and slowest")
    ] = "amax",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="text: run the folder's model on it (transformers) for input scales"),
    ] = None,
    gptq: Annotated[
        bool,
        typer.Option(
            "--gptq", help="round weights so that outputs on the calibration text change least"
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the manifest")] = False,
) -> None:
    """Quantize the matrices of a checkpoint, in constant memory; go on after a kill.

    Blocks run along the last dimension. All else is copied, and so are
    matrices whose last dimension is no multiple of the block, weights that are
    stored (in, out) and, without --include, embeddings, heads, norms and routers.
    Of a folder the index and config.json are made anew, and the rest is copied.
    Checksums and errors go to manifests; `blockscale inspect FILE` shows them.
    """
    from ..checkpoint import quantize_file, quantize_folder
    from ..checkpoint.request import request_of
    from ..formats import get_format

    chosen = tuple(include or ()), tuple(exclude or ())
    if weight_only and calibrate and not gptq:
        raise ValueError("calibrate: is for activations that are quantized; leave out weight-only")
    if calibrate and not gptq and not get_format(format).has_global_scale:
        raise ValueError(
            f"calibrate: {format} has no scale of activations that a text could tell; leave it "
            "out, or add --gptq"
        )
    if gptq and not calibrate:
        raise ValueError("gptq: needs a text to run the model on; add --calibrate FILE")
    with progress("quantizing") as tell:
        if source.is_dir():
            activations: Any = "bfloat16" if weight_only else None
            weights = None
            if calibrate:
                request = request_of(format, convention, *chosen, activations, scaling)
                found, weights = _of_text(source, target, calibrate, request, gptq, tell)
                activations = activations or found
            manifest = quantize_folder(
                *(source, target, format, convention, *chosen, tell),
                *(activations, scaling, weights),
            )
        elif weight_only or calibrate:
            raise ValueError(
                f"{'weight-only' if weight_only else 'calibrate'}: is for folders, whose "
                "config.json says so; leave it out"
            )
        else:
            manifest = quantize_file(
                *(source, target, format, *chosen, tell), convention=convention, scaling=scaling
            )
    show_manifest(target, manifest, json)


def _of_text(
    source: Path,
    target: Path,
    text: Path,
    request: Request,
    gptq: bool,
    tell: Callable[[Progress], None],
) -> tuple[dict[str, float] | None, dict[str, ScaledTensor] | None]:
    """Largest inputs of layers, where they have a scale, and weights by GPTQ."""
    from .. import calibrate
    from .. import gptq as by_gptq
    from ..checkpoint.expert_names import renamed
    from ..checkpoint.header import show
    from ..checkpoint.quantizing import dtypes_to_quantize
    from ..layer_weights import layer_weights

    # what is wrong is said before a model runs
    if gptq and request.storage.scale_rounding:
        raise ValueError(
            f"gptq: {request.convention.title} has scales that are powers of two, which gptq does "
            "not make; leave it out, or choose another convention"
        )
    dtypes = dtypes_to_quantize(source, target, request)
    model, batches = model_and_batches(source, text, dtypes, tell)
    if not gptq:
        return calibrate(model, batches), None
    found = layer_weights(model, request.format, lambda module, name: True)
    names = renamed((f"{name}.weight" for name in found), dtypes)
    if dtypes.keys().isdisjoint(names.values()):
        first = show(min(names)) if names else "it has none"
        raise ValueError(
            f"gptq: none of the {len(dtypes)} tensors to quantize ({show(min(dtypes))}, ...) is a "
            f"weight of the model that transformers makes ({first}, ...), which may have other "
            "names; leave gptq out"
        )
    amax = calibrate(model, batches) if request.has_input_scale else None
    weights = by_gptq(
        model,
        batches,
        request.format,
        scaling=request.scaling,
        filter_fn=lambda module, name: names[f"{name}.weight"] in dtypes,
        power_of_two=request.storage.divides,
    )
    return amax, weights
