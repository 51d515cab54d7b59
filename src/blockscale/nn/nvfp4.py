"""How others train with NVFP4, by name: what is done to which operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..checks import choose
from ..hadamard import Hadamard
from ..quantization import Quantization

__all__ = ["METHODS", "method"]


def _nvidia(hadamard: Hadamard | None, scaling: str = "amax") -> dict[str, Quantization]:
    return {
        "activations.fprop": Quantization(scaling=scaling),
        "activations.wgrad": Quantization(hadamard=hadamard, scaling=scaling),
        "weights": Quantization(square=True, scaling=scaling),
        "gradients.dgrad": Quantization(stochastic=True),
        "gradients.wgrad": Quantization(stochastic=True, hadamard=hadamard),
    }


def _four_over_six(hadamard: Hadamard | None) -> dict[str, Quantization]:
    return _nvidia(hadamard, "four_over_six")


def _ms_eden(hadamard: Hadamard | None) -> dict[str, Quantization]:
    forward = Quantization(scaling="four_over_six")
    backward = Quantization(hadamard=hadamard, random_signs=True, scaling="ms_eden")
    return {
        "activations.fprop": forward,
        "weights.fprop": forward,
        "weights.dgrad": backward,
        "gradients": backward,
        "activations.wgrad": backward,
    }


Method = Callable[[Hadamard | None], dict[str, Quantization]]

#: By name, and the transform that each has.
METHODS: Mapping[str, tuple[Method, Hadamard]] = MappingProxyType(
    {
        "nvidia": (_nvidia, Hadamard.random(seed=0)),  # signs that were drawn once
        "four_over_six": (_four_over_six, Hadamard.random(seed=0)),
        "ms_eden": (_ms_eden, Hadamard(128)),
    }
)


def method(name: str, hadamard: Hadamard | str | None) -> dict[str, Quantization]:
    """What is done to operands; ``hadamard``: the transform, or "default"."""
    make, default = choose("method", name, METHODS)
    return make(default if isinstance(hadamard, str) else hadamard)
