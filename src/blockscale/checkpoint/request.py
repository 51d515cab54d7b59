"""What a caller asks for who wants a checkpoint quantized, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from xxhash import xxh3_128

from ..checks import choose
from ..formats import Format, formats, get_format
from ..quantization import check_scaling_of_weights
from ..tensor import ScaledTensor
from .conventions import CONVENTIONS, Convention
from .header import show
from .storage import Storage
from .writer import tensor_bytes

__all__ = ["Request", "request_of"]


@dataclass(frozen=True)
class Request:
    """The arguments of a caller who wants a checkpoint quantized."""

    format: Format
    convention: Convention
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    activations: Mapping[str, float] | str | None = None
    scaling: str = "amax"
    weights: Mapping[str, ScaledTensor] = field(default_factory=dict)  # quantized already

    @property
    def weight_only(self) -> bool:
        """Whether activations stay in high precision."""
        return isinstance(self.activations, str)

    @property
    def amax(self) -> Mapping[str, float] | None:
        """Largest magnitudes of the inputs of layers, where the caller gave them."""
        return None if isinstance(self.activations, str) else self.activations

    @property
    def storage(self) -> Storage:
        """How the convention stores tensors of this format."""
        return self.convention.storages[self.format.name]

    @property
    def has_input_scale(self) -> bool:
        """Whether a global scale of activations is stored."""
        return self.format.has_global_scale and not self.weight_only

    @cached_property
    def options(self) -> dict[str, Any]:
        """The arguments that decide which bytes a file has."""
        return {
            "format": self.format.name,
            "convention": self.convention.name,
            "scaling": self.scaling,
            "include": list(self.include),
            "exclude": list(self.exclude),
            "activations": self.activations if self.weight_only else _digest_of_amax(self.amax),
            "weights": _digest_of_weights(self.weights) if self.weights else None,
        }


def request_of(
    format: str | Format,
    convention: str,
    include: str | Sequence[str],
    exclude: str | Sequence[str],
    activations: Mapping[str, float] | str | None = None,
    scaling: str = "amax",
    weights: Mapping[str, ScaledTensor] | None = None,
) -> Request:
    """The arguments of :func:`blockscale.checkpoint.quantize_folder`, checked.

    Raises ValueError for one that is wrong.
    """
    fmt, conv = get_format(format), choose("convention", convention, CONVENTIONS)
    if formats.get(fmt.name) != fmt:
        raise ValueError(
            f"format: {fmt.name!r} is not one of blockscale.formats, no file can name it"
        )
    if fmt.name not in conv.storages:
        others = ", ".join(repr(c.name) for c in CONVENTIONS.values() if fmt.name in c.storages)
        raise ValueError(
            f"format: {conv.title} has no {fmt.name}; it has {', '.join(conv.storages)}, and "
            f"{fmt.name} is in convention {others}"
        )
    if isinstance(activations, str):
        choose("activations", activations, {"bfloat16": None})
        if fmt.name not in conv.weight_only:
            raise ValueError(
                f"activations: {conv.title} has no {fmt.name} of weights alone"
                + (f", only {', '.join(conv.weight_only)}" if conv.weight_only else "")
                + "; leave it out"
            )
    elif activations is not None and not fmt.has_global_scale:
        raise ValueError(
            f"activations: {fmt.name} has no scale that could be calibrated; leave them out"
        )
    elif activations is not None:
        activations = _checked(activations)
    include = (include,) if isinstance(include, str) else tuple(include)
    exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    check_scaling_of_weights(scaling, fmt)
    return Request(fmt, conv, include, exclude, activations, scaling, _on_cpu(weights or {}))


def _on_cpu(weights: Mapping[str, ScaledTensor]) -> dict[str, ScaledTensor]:
    """TypeError for what is not quantized."""
    if not isinstance(weights, Mapping) or not all(
        isinstance(q, ScaledTensor) for q in weights.values()
    ):
        raise TypeError(
            f"weights: got {type(weights).__name__}, not all of it ScaledTensors; "
            "expected a dictionary, name -> ScaledTensor, as blockscale.gptq returns it"
        )
    return {name: cast(ScaledTensor, q.cpu()) for name, q in weights.items()}


def _checked(amax: Mapping[str, float]) -> dict[str, float]:
    """Largest magnitudes as floats. Raises ValueError for one that is no magnitude."""
    if not isinstance(amax, Mapping):
        raise TypeError(
            f"activations: got {type(amax).__name__}; expected None, 'bfloat16', or a dictionary, "
            "layer -> largest magnitude of its input, as blockscale.calibrate returns it"
        )
    largest = torch.finfo(torch.float32).max
    for layer, value in amax.items():
        single = isinstance(value, int | float) or (
            isinstance(value, torch.Tensor) and value.numel() == 1
        )
        if not single or not 0 <= value <= largest:
            raise ValueError(
                f"activations: {show(str(layer))} has {value!r:.40}; expected the largest "
                "magnitude of its input, a finite number from 0 up: calibrate again, on other data"
            )
    return {layer: float(value) for layer, value in amax.items()}


def _digest_of_amax(amax: Mapping[str, float] | None) -> str | None:
    """A digest that tells this calibration from others; None where there is none."""
    if amax is None:
        return None
    return xxh3_128(json.dumps(dict(amax), sort_keys=True).encode()).hexdigest()


def _digest_of_weights(weights: Mapping[str, ScaledTensor]) -> str:
    """A digest that tells these quantized weights from others."""
    found = xxh3_128()
    for name, q in sorted(weights.items()):
        found.update(name.encode())
        for part in (q.qdata, q.scale):
            found.update(tensor_bytes(part.contiguous()))
    return found.hexdigest()
