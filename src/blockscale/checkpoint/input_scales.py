"""``input_scale`` of each weight: what servers quantize its activations with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..formats import Format
from ..rounding import global_scale_from_amax
from .expert_names import Key, expert_of
from .ours import INPUT_SCALE

__all__ = ["InputScales"]


class InputScales:
    """Scales of the inputs of layers.

    Args:
        layers: names of those that get one.
        amax: layer -> largest magnitude of its input; None: every scale is
            :data:`~blockscale.checkpoint.ours.INPUT_SCALE`.
        format: of the activations.

    Attributes:
        unvisited: experts that no token reached: they have the largest of their block's.
        missing: other layers of which nothing is known; theirs is the default.
    """

    def __init__(
        self, layers: Iterable[str], amax: Mapping[str, float] | None, format: Format
    ) -> None:
        self.unvisited: list[str] = []
        self.missing: list[str] = []
        self._scales: dict[str, float] = {}
        if amax is None:
            return
        experts, largest = _experts(amax)
        for layer in layers:
            found, expert = amax.get(layer), expert_of(layer)
            if not found and expert is not None:
                found = experts.get(expert)
                if not found:
                    found = largest.get(expert[0])
                    self.unvisited += [layer] if found else []
            if found:
                self._scales[layer] = _scale(found, format)
            else:
                self.missing.append(layer)

    def __getitem__(self, layer: str) -> float:
        return self._scales.get(layer, INPUT_SCALE)


def _experts(amax: Mapping[str, float]) -> tuple[dict[tuple[Key, str], float], dict[Key, float]]:
    """The magnitude of each expert, and the largest of those of a block."""
    each: dict[tuple[Key, str], float] = {}
    largest: dict[Key, float] = {}
    for layer, value in amax.items():
        if (expert := expert_of(layer)) is not None:
            each[expert] = value
            largest[expert[0]] = max(value, largest.get(expert[0], 0.0))
    return each, largest


def _scale(amax: float, format: Format) -> float:
    scale: float = global_scale_from_amax(torch.tensor(amax), format).item()
    return scale
