"""A state dict as files of a convention have it, for programs that write files themselves."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..fused_names import fused_with
from ..tensor import ScaledTensor
from .conventions import CONVENTIONS, Convention, Scheme
from .conventions.convention import CONFIG
from .header import show
from .ours import INPUT_SCALE, describe, metadata_for
from .storage import Description, check_names

__all__ = ["Written", "check_formats", "written_as"]


class Written(NamedTuple):
    """What a program writes.

    Attributes:
        tensors: stored name -> plain tensor.
        metadata: of the header of each file.
        config: what is put into the model's configuration.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    config: dict[str, Any]


def written_as(
    convention: str,
    tensors: Mapping[str, Tensor],
    *,
    weight_only: bool,
    input_scales: Mapping[str, float],
    config: Mapping[str, Any],
) -> Written:
    """``tensors``, quantized ones among them, by the names and in the dtypes of a convention.

    ``input_scales``: of layers, by the names of their weights. ``config``: of the model. Raises
    ValueError where the convention has not what there is.
    """
    found = CONVENTIONS[convention]
    found.check_model(config, "convention")
    quantized = {n: t for n, t in tensors.items() if isinstance(t, ScaledTensor)}
    _check(found, quantized, weight_only)
    parts: dict[str, Tensor] = {}
    names: list[str] = []
    descriptions: dict[str, Description] = {}
    for name, tensor in tensors.items():
        own = {name: tensor}
        if isinstance(tensor, ScaledTensor):
            is_turned = found.transposed_stacks and tensor.dim() > 2
            descriptions[name], made = describe(
                tensor.mT if is_turned else tensor,
                found.storages,
                weight_only=weight_only and not found.describes_itself,
                input_scale=input_scales.get(name, INPUT_SCALE),
            )
            # scalars may be one tensor, of which programs take one name
            made = {part: t.clone() if t.numel() == 1 else t for part, t in made.items()}
            own = {stored: made[p] for p, stored in descriptions[name].names(name).items()}
        names += own
        parts |= own
    check_names(names, "model")
    layers: dict[str, list[str]] = {}
    for name, q in quantized.items():
        layers.setdefault(q.format.name, []).append(name.removesuffix(".weight"))
    scheme = Scheme({k: tuple(v) for k, v in layers.items()}, _left(tensors), weight_only)
    told = descriptions if found.describes_itself else {}
    return Written(parts, metadata_for(told, {}), dict(found.configure(scheme)[CONFIG]))


def _left(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Layers with matrices that are not quantized, and the output head by its usual name."""
    plain = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if not isinstance(tensor, ScaledTensor) and name.endswith(".weight") and tensor.dim() > 1
    ]
    return tuple(dict.fromkeys(["lm_head", *plain]))


def check_formats(
    convention: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """ValueError where a convention is not for a model of this configuration, or has no tensors of
    a format that is among ``tensors``."""
    found = CONVENTIONS[convention]
    found.check_model(config, "convention")
    _check_formats(found, {n: q for n, q in tensors.items() if isinstance(q, ScaledTensor)})


def _check_formats(convention: Convention, quantized: Mapping[str, ScaledTensor]) -> None:
    for name, q in quantized.items():
        if q.format.name not in convention.storages:
            raise ValueError(
                f"convention: {convention.title} has no {q.format.name}, which {show(name)} is; it "
                f"has {', '.join(convention.storages)}: choose another, or 'blockscale', which has "
                "all"
            )


def _check(
    convention: Convention, quantized: Mapping[str, ScaledTensor], weight_only: bool
) -> None:
    """ValueError where a convention has not what there is."""
    _check_formats(convention, quantized)
    if weight_only and not convention.describes_itself:
        _check_weight_only(convention, quantized)
    for name, q in quantized.items():
        _check_dimensions(convention, name, q)
    _warn_of_reciprocals(convention, quantized)
    if convention.fuses:
        _check_fused(convention, quantized)


def _check_weight_only(convention: Convention, quantized: Mapping[str, ScaledTensor]) -> None:
    formats = dict.fromkeys(q.format.name for q in quantized.values())
    if missing := [each for each in formats if each not in convention.weight_only]:
        raise ValueError(
            f"convention: {convention.title} has no {missing[0]} with activations in high "
            "precision, and the model's recipe leaves them so; choose another convention"
        )


def _check_dimensions(convention: Convention, name: str, q: ScaledTensor) -> None:
    if q.dim() > 2 and not convention.stacks:
        raise ValueError(
            f"convention: {show(name)} is a stack of matrices, and {convention.title} has each "
            "by itself; choose 'blockscale', or leave it in high precision"
        )
    if q.dim() == 2 and convention.transposed_stacks:
        raise ValueError(
            f"convention: {show(name)} is a matrix, and {convention.title} has stacks of "
            "experts alone; choose 'blockscale', or leave it in high precision"
        )


def _warn_of_reciprocals(convention: Convention, quantized: Mapping[str, ScaledTensor]) -> None:
    divided = [q for q in quantized.values() if convention.storages[q.format.name].divides]
    scales = [q.global_scale for q in divided if q.global_scale is not None]
    if any((scale.frexp().mantissa != 0.5).any() for scale in scales):
        warnings.warn(
            f"convention: {convention.title} stores reciprocals of global scales, and some of this "
            "model are no powers of two: values may move by a unit of fp32",
            UserWarning,
            stacklevel=4,  # of written_as's caller
        )


def _check_fused(convention: Convention, quantized: Mapping[str, ScaledTensor]) -> None:
    for name in quantized:
        group = [quantized[each] for each in fused_with(name) if each in quantized]
        found = [q.global_scale for q in group if q.global_scale is not None]
        scales = {tuple(scale.flatten().tolist()) for scale in found}
        if len(scales) > 1:
            raise ValueError(
                f"convention: {show(name)} and what servers fuse with it have {len(scales)} global "
                f"scales, and programs that read {convention.title} take one for all; load the "
                "high-precision folder with quantization_config=, or make the folder by "
                "`blockscale quantize`"
            )
