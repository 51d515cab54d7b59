"""``quantize_file`` and ``quantize_folder``: checkpoints in high precision into quantized ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..exclusions import gated_by
from ..formats import Format
from ..tensor import ScaledTensor
from .conventions import Scheme
from .expert_names import renamed
from .files import Files
from .folders import check_place, layer_names, make_folder, read_config
from .fused import GlobalScales, groups_of, stored_amax
from .header import TORCH_DTYPES, show
from .input_scales import InputScales
from .jobs import Job, Progress, check_distinct, job_of, run_jobs
from .orientation import outputs_last
from .ours import INPUT_SCALE, metadata_for
from .reading import described_in_headers
from .request import Request, request_of
from .selection import reason, select, why_nothing
from .storage import Description, part_names
from .tasks import Copy, Quantize, Task
from .writer import locked

__all__ = ["dtypes_to_quantize", "quantize_file", "quantize_folder"]


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format = "mxfp8",
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
    convention: str = "blockscale",
    scaling: str = "amax",
) -> dict[str, Any]:
    """Quantize the matrices of a safetensors file along their last dimension; copy all else.

    >>> manifest = checkpoint.quantize_file("model.safetensors", "model.mxfp8.safetensors", "mxfp8")
    >>> manifest["tensors"]["layer.weight"]["error"]["sqnr_db"]
    31...

    Memory does not grow with the file or its tensors: they are read, quantized, measured and
    written in chunks of rows. ``target`` appears under its name when it is complete. After a kill,
    the same call goes on where it was; finished tensors are not redone. See docs/checkpoints.md.

    Args:
        source: a safetensors file. float32, bfloat16 and float16 tensors (..., N, K), blocks along
            K as in the weight of a linear layer, are quantized where K is a multiple of the block;
            those that a bias shows to be stored (in, out) are not.
        target: to be made; ``target.manifest.json`` beside it holds checksums and errors.
        format: a name of :data:`blockscale.formats`.
        include: globs of what is quantized, instead of all but
            :data:`~blockscale.checkpoint.DEFAULT_EXCLUDE`.
        exclude: globs of what is not.
        progress: called at each step, by one thread at a time.
        convention: whose names the parts of quantized tensors get, of
            :data:`~blockscale.checkpoint.CONVENTIONS`.
        scaling: how blocks of NVFP4 get their scales, see :class:`blockscale.Quantization`:
            "amax", "four_over_six", or "search", which loses least and takes ten times as long.

    Weights that servers fuse get one global scale (:data:`blockscale.fused_names.FUSED`); the
    index of a checkpoint of several files, beside ``source``, says where those are.

    Returns:
        The manifest. If ``target`` is there already and is what this call would make, it is
        returned at once.

    Raises:
        ValueError: damaged source, unknown format, a glob that matches nothing, nothing to
            quantize, ``target`` is in the way, or another process writes it.
        OSError: no such file, no room, or the source changed while it was read.
    """
    request = request_of(format, convention, include, exclude, scaling=scaling)
    target = Path(target)
    with Files(source, "source") as files:
        if files.is_folder:
            raise IsADirectoryError(
                f"source: {files.folder} is a directory; name a .safetensors file in it, or give "
                "it to quantize_folder"
            )
        plan = _plan(files, request)
        check_distinct(files, target)
        with locked(target):
            job = plan.job(files.names[0], target)
            (manifest,) = run_jobs(files, [job], progress or (lambda event: None))
            return manifest


def quantize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str | Format = "mxfp8",
    convention: str = "blockscale",
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
    activations: Mapping[str, float] | str | None = None,
    scaling: str = "amax",
    weights: Mapping[str, ScaledTensor] | None = None,
) -> dict[str, Any]:
    """Quantize a folder as ``save_pretrained`` writes it, so that other programs read it.

    >>> checkpoint.quantize_folder("Llama-3", "Llama-3-NVFP4", "nvfp4", "modelopt")["format"]
    'nvfp4'

    Weights are quantized as by :func:`quantize_file`, each file into one of the same name. The
    index is made anew, ``config.json`` says what was done as ``convention`` says it, and all else
    (tokenizer, templates, ...) is copied. ``target`` appears when all of it is complete. After a
    kill the same call goes on.

    Args:
        source: a folder with ``*.safetensors`` and their index, or with one such file.
        target: folder to be made.
        format: a name of :data:`blockscale.formats` that the convention has.
        convention: a name of :data:`~blockscale.checkpoint.CONVENTIONS`: "modelopt" and
            "compressed-tensors" are what servers read.
        include, exclude: globs of tensors, as in :func:`quantize_file`.
        progress: called at each step, by one thread at a time.
        activations: None: servers quantize them with an ``input_scale`` of 1, where the format has
            one; layer -> largest magnitude of its input, as :func:`blockscale.calibrate` measures
            it: with the scale of that, and experts that no token reached with the largest of their
            block; "bfloat16": they stay in high precision.
        scaling: as in :func:`quantize_file`.
        weights: names -> tensors that are quantized already, as :func:`blockscale.gptq` makes them
            of the folder's model with the same ``format`` and ``scaling``. All others are rounded
            to nearest.

    Returns:
        The manifest of the folder, ``blockscale.manifest.json`` in it.

    Raises:
        ValueError: as :func:`quantize_file`; a convention that lacks the format; a folder that is
            quantized already, or whose index names what is not there; ``weights`` of another model.
        OSError: no such folder, no room, or the source changed while it was read.
    """
    request = request_of(format, convention, include, exclude, activations, scaling, weights)
    with Files(source, "source") as files:
        if not files.is_folder:
            raise NotADirectoryError(
                f"source: {source} is a file; name the folder with it, or give it to quantize_file"
            )
        config = read_config(files, "source")
        names = renamed(request.weights, files.tensors)
        made = {names[name]: q for name, q in request.weights.items()}
        plan = _plan_of_folder(files, config, replace(request, weights=made))
        _check_weights(plan)
        return make_folder(
            files,
            Path(target),
            config,
            plan.job,
            request.convention.configure(plan.scheme),
            plan.about,
            progress or (lambda event: None),
        )


def dtypes_to_quantize(source: Path, target: Path, request: Request) -> dict[str, torch.dtype]:
    """Names and dtypes of the tensors that :func:`quantize_folder` would quantize.

    Raises those of its errors that need no more than headers.
    """
    with Files(source, "source") as files:
        check_place(files, target)
        reasons = _plan_of_folder(files, read_config(files, "source"), request).reasons
        tensors = files.tensors
        return {n: TORCH_DTYPES[tensors[n].dtype] for n, why in reasons.items() if why is None}


@dataclass(frozen=True)
class _Plan:
    """Which tensors are quantized, and with what scales; headers alone tell."""

    files: Files
    request: Request
    reasons: dict[str, str | None]  # None: quantized; else why it is copied
    earlier: dict[str, Description]  # what is quantized already
    scales: GlobalScales | None  # of formats that have them
    input_scales: InputScales
    warnings: list[str]

    @property
    def about(self) -> dict[str, Any]:
        """What the manifest says of the request: options, warnings, scales of activations."""
        about = {**self.request.options, "warnings": self.warnings}
        if self.request.has_input_scale and self.request.amax is None:
            about["input_scale"] = INPUT_SCALE
        elif self.request.has_input_scale:
            about["unvisited_experts"] = self.input_scales.unvisited
        return about

    @property
    def scheme(self) -> Scheme:
        """What the configuration of the target says is quantized."""
        quantized = [n.removesuffix(".weight") for n, why in self.reasons.items() if why is None]
        left = {name for name, why in self.reasons.items() if why is not None}
        layers = {self.request.format.name: tuple(quantized)}
        return Scheme(layers, layer_names(self.files, left), self.request.weight_only)

    def job(self, file: str, target: Path) -> Job:
        """The job that makes ``target`` of one file of the source."""
        reader, request = self.files.file(file), self.request
        header, tasks = reader.header, list[Task]()
        descriptions = {n: d for n, d in self.earlier.items() if n in header.tensors}
        for name, tensor in header.tensors.items():
            why = self.reasons[name]
            if why is not None:
                tasks.append(Copy(name, tensor, why))
                continue
            descriptions[name] = Description(
                request.storage,
                tensor.shape,
                TORCH_DTYPES[tensor.dtype],
                has_input_scale=request.has_input_scale,
            )
            scale = self.input_scales[name.removesuffix(".weight")]
            tasks.append(
                Quantize(
                    *(name, tensor, descriptions[name], self.scales, scale, request.scaling),
                    request.weights.get(name),
                )
            )
        told = descriptions if request.convention.describes_itself else {}
        metadata = metadata_for(told, header.metadata)
        return job_of(reader, target, tasks, metadata, request.options, self.about)


def _plan(files: Files, request: Request) -> _Plan:
    format, include, exclude = request.format, request.include, request.exclude
    earlier = described_in_headers(files, "source")
    if earlier and not request.convention.describes_itself:
        raise ValueError(
            f"source: {show(next(iter(earlier)))} is quantized already, as the header of its file "
            f"says, which {request.convention.title} does not; take the file in high precision, "
            "or convention 'blockscale'"
        )
    parts = part_names(earlier)
    tensors, backwards = files.tensors, outputs_last(files)
    gated = gated_by(tensors, files.shape_of)
    reasons = select(tensors, format, include, exclude, parts, backwards, gated)
    if not request.convention.stacks:
        why = f"a stack of matrices, of which {request.convention.title} has each by itself"
        stacks = {n for n, why in reasons.items() if why is None and len(tensors[n].shape) > 2}
        reasons |= dict.fromkeys(stacks, why)
    if None not in reasons.values():
        why, remedy = why_nothing(tensors, reasons, backwards)
        raise ValueError(
            f"source: nothing in {files.path} would be quantized to {format.name} ({why}){remedy}"
        )
    scales, warnings = None, list[str]()
    if format.has_global_scale:
        groups, warnings = groups_of(
            files, reasons, lambda n, t: reason(n, t, format, include, exclude, gated)
        )
        scales = GlobalScales(
            groups,
            lambda name: stored_amax(files, name),
            format,
            power_of_two=request.storage.divides,
            scaling=request.scaling,
        )
    quantized = [name for name, why in reasons.items() if why is None]
    layers = [name.removesuffix(".weight") for name in quantized]
    input_scales = InputScales(layers, request.amax, format)
    if request.amax is not None and len(input_scales.missing) == len(layers):
        raise ValueError(
            f"activations: of the {len(layers)} layers that are quantized ({show(layers[0])}, ...) "
            f"they have none, but {len(request.amax)} others "
            f"({show(next(iter(request.amax), ''))}, ...); name layers as their file does"
        )
    if input_scales.missing:
        warnings.append(
            f"{len(input_scales.missing)} layers ({', '.join(input_scales.missing[:3])}) were not "
            f"calibrated, and have an input_scale of {INPUT_SCALE:g}"
        )
    rest = [name for name in quantized if name not in request.weights]
    if request.weights and rest:
        warnings.append(
            f"{len(rest)} of {len(quantized)} weights ({', '.join(map(show, rest[:3]))}) are "
            "rounded to nearest, not by GPTQ, which leaves stacks and what its text did not reach"
        )
    warnings += request.convention.caveats({n: (format.name, tensors[n].shape) for n in quantized})
    return _Plan(files, request, reasons, earlier, scales, input_scales, warnings)


def _plan_of_folder(files: Files, config: Mapping[str, Any], request: Request) -> _Plan:
    """The plan of a folder with this ``config.json``. ValueError where it is quantized already."""
    if config.get("quantization_config") is not None:
        raise ValueError(
            f"source: {files.folder} is quantized already, as its config.json says; "
            "`blockscale convert-checkpoint` writes it in another way"
        )
    request.convention.check_model(config, "convention")
    return _plan(files, request)


def _check_weights(plan: _Plan) -> None:
    """ValueError unless a caller's weights are what the plan would make of the same tensors."""
    format = plan.request.format
    for name, q in plan.request.weights.items():
        shown = f"weights: {show(name)}"
        if plan.reasons.get(name, "not in the folder") is not None:
            why = plan.reasons.get(name, "there is no such tensor in the folder")
            raise ValueError(f"{shown} would not be quantized ({why}); leave it out")
        shape = tuple(plan.files.tensors[name].shape)
        if len(shape) > 2:
            raise ValueError(
                f"{shown} is a stack of matrices, which are rounded to nearest from the folder; "
                "leave it out"
            )
        found = q.format, tuple(q.shape), q.axis, q.layout_name
        if found != (format, shape, -1, "compact") or q.offsets is not None:
            raise ValueError(
                f"{shown} is {q.format.name} of {tuple(q.shape)} along axis {q.axis}; expected "
                f"{format.name} of {shape} along axis -1 with compact scales: make it of this "
                "folder's model, by blockscale.gptq"
            )
        if plan.request.storage.scale_rounding and (q.scale.frexp().mantissa != 0.5).any():
            raise ValueError(
                f"{shown} has scales that are no powers of two, which alone "
                f"{plan.request.convention.title} has; leave it out, or choose another convention"
            )
        if q.global_scale is not None and plan.scales is not None:
            own, needed = q.global_scale.item(), plan.scales[name].item()
            if own != needed:
                raise ValueError(
                    f"{shown} has the global scale {own:g}; {needed:g} is that of the folder's "
                    "tensor and of what servers fuse with it: make all of this folder's model, in "
                    f"the dtype of its files, with scaling {plan.request.scaling!r} and "
                    f"power_of_two={plan.request.storage.divides}"
                )
