"""Our own convention: every format, described in the files' headers."""

from __future__ import annotations

from collections.abc import Iterator

from ..ours import STORAGES
from .convention import Convention, Json, Pair, Scheme, model_config

__all__ = ["BLOCKSCALE"]


def _configure(scheme: Scheme) -> dict[str, Json]:
    """Name a ``quant_method`` that no program knows, so that none takes the codes for weights."""
    config = {
        "quant_method": "blockscale",
        "formats": sorted(scheme.layers),
        "weight_only": scheme.weight_only,
        "modules_to_not_convert": list(scheme.left_alone),
    }
    return model_config(config)


def _activations(quantization: Json) -> Iterator[Pair]:
    """As weights are, or not at all, as :meth:`Convention.is_weight_only` says."""
    for format in quantization.get("formats") or ():
        yield format, "fp8_1x128" if format == "fp8_128x128" else format


BLOCKSCALE = Convention(
    name="blockscale",
    title="blockscale",
    storages=STORAGES,
    methods=("blockscale",),
    configure=_configure,
    activations=_activations,
    is_weight_only=lambda quantization: quantization.get("weight_only") is True,
    describes_itself=True,
    stacks=True,
)
