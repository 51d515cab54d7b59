"""What becomes of activations, as a checkpoint's configuration says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint.conventions import Convention
from ..checkpoint.conventions.convention import AS_THEY_ARE, KV_CACHE_KEYS, activations_of
from ..formats import formats
from ..nn.recipe import Recipe

__all__ = ["SERVED", "kv_cache_scheme_of", "served_activations", "served_recipe"]

Json = Mapping[str, Any]

#: Formats of weights.
SERVED = ("mxfp8", "mxfp4", "nvfp4")

_WITHOUT = "serve it without quantization='blockscale', by vLLM's own kernels"


def served_activations(quantization: Json, convention: Convention) -> dict[str, str]:
    """What a configuration says of activations, as :func:`activations_of` tells it.

    >>> served_activations({"quant_algo": "W4A16_NVFP4"}, CONVENTIONS["modelopt"])
    {'nvfp4': 'bfloat16'}

    Raises ValueError for what is not told, and for formats that are not served.
    """
    try:
        found = activations_of(quantization, convention)
    except ValueError as error:
        raise ValueError(f"{error}: {_WITHOUT}") from None
    for weights in found:
        if weights not in SERVED:
            raise ValueError(
                f"quantization: weights are in {weights}, as {convention.title} has them; "
                f"blockscale serves {', '.join(SERVED)}: {_WITHOUT}"
            )
    return found


def served_recipe(weights: str, activations: str) -> Recipe:
    """Of such products. ValueError where no kernel multiplies these."""
    is_served = activations == AS_THEY_ARE or (
        activations in SERVED and formats[activations].multiplies(formats[weights])
    )
    if not is_served:
        raise ValueError(
            f"quantization: activations in {activations} are not multiplied by weights in "
            f"{weights}; {_WITHOUT}"
        )
    return Recipe(weights, activations=None if activations == weights else activations)


def kv_cache_scheme_of(quantization: Json) -> Json | None:
    """What is said of keys and values, whose FP8 cache is vLLM's own; None if nothing.

    Raises ValueError for another scheme than FP8 with a scale for each tensor.
    """
    given = next((told for key in KV_CACHE_KEYS if (told := quantization.get(key))), None)
    if given is None:
        return None
    if isinstance(given, str) and given.upper() == "FP8":
        return {"type": "float", "num_bits": 8, "dynamic": False}
    is_fp8 = isinstance(given, dict) and (
        (given.get("type"), given.get("num_bits")) == ("float", 8)
        and not given.get("dynamic")
        and given.get("strategy", "tensor") == "tensor"
    )
    if not is_fp8:
        raise ValueError(
            f"quantization: keys and values are quantized as {given!r:.120}; beside blockscale's "
            "layers vLLM's cache may be FP8 with a scale for each tensor. Take a copy without "
            f"(blockscale convert-checkpoint IN OUT --to modelopt), or {_WITHOUT}"
        )
    return given
