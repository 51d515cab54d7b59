"""What becomes of activations, as a checkpoint's configuration says it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..checkpoint.conventions import Convention
from ..formats import formats
from ..nn.recipe import Recipe

__all__ = ["SERVED", "activations_of", "kv_cache_scheme_of", "served_recipe"]

Json = Mapping[str, Any]

#: Formats of weights.
SERVED = ("mxfp8", "mxfp4", "nvfp4")
#: Activations that are not quantized.
AS_THEY_ARE = "bfloat16"

_WITHOUT = "serve it without quantization='blockscale', by vLLM's own kernels"

#: quant_algo -> formats of weights and of activations.
_ALGOS = {
    "MXFP8": ("mxfp8", "mxfp8"),
    "NVFP4": ("nvfp4", "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", AS_THEY_ARE),
}
#: Bits of an element and size of a block -> format, of compressed-tensors.
_FLOATS = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}

_Pair = tuple[str, str]


def activations_of(quantization: Json, convention: Convention) -> dict[str, str]:
    """Format of weights -> what their activations are quantized to, "bfloat16" for not at all.

    >>> activations_of({"quant_algo": "W4A16_NVFP4"}, CONVENTIONS["modelopt"])
    {'nvfp4': 'bfloat16'}

    Raises ValueError for what cannot be done, or is not told.
    """
    told = _TOLD.get(convention.name)
    if told is None:
        raise ValueError(
            f"quantization: blockscale serves {', '.join(SERVED)}, and a checkpoint of "
            f"{convention.title} has {', '.join(convention.storages)}; {_WITHOUT}"
        )
    found: dict[str, str] = {}
    for weights, activations in told(quantization):
        if weights not in SERVED:
            raise ValueError(
                f"quantization: weights are in {weights}; blockscale serves {', '.join(SERVED)}: "
                f"{_WITHOUT}"
            )
        if found.setdefault(weights, activations) != activations:
            raise ValueError(
                f"quantization: activations of some {weights} weights are {found[weights]}, of "
                f"others {activations}; blockscale serves one scheme for a format: {_WITHOUT}"
            )
    if not found:
        raise ValueError(
            "quantization: its config.json says of no layer how it is quantized; fetch the "
            "checkpoint again"
        )
    if convention.is_weight_only(quantization):
        return dict.fromkeys(found, AS_THEY_ARE)
    return found


def served_recipe(weights: str, activations: str) -> Recipe:
    """Of such products. ValueError where no kernel multiplies these."""
    alike = activations == AS_THEY_ARE or (
        activations in SERVED and formats[activations].multiplies(formats[weights])
    )
    if not alike:
        raise ValueError(
            f"quantization: activations in {activations} are not multiplied by weights in "
            f"{weights}; {_WITHOUT}"
        )
    return Recipe(weights, activations=None if activations == weights else activations)


def _modelopt(quantization: Json) -> Iterator[_Pair]:
    algo = str(quantization.get("quant_algo")).upper()
    layers = quantization.get("quantized_layers")
    of_layers = [algo]
    if algo == "MIXED_PRECISION" and isinstance(layers, dict):
        of_layers = [each.get("quant_algo") for each in layers.values()]
    for each in dict.fromkeys(str(name).upper() for name in of_layers):
        if each not in _ALGOS:
            raise ValueError(
                f"quantization: got quant_algo {each!r:.40}; blockscale serves "
                f"{', '.join(_ALGOS)}: {_WITHOUT}"
            )
        yield _ALGOS[each]


def _compressed_tensors(quantization: Json) -> Iterator[_Pair]:
    groups = quantization.get("config_groups")
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights = _float("weights", name, group.get("weights") or {})
        given = group.get("input_activations")
        if group.get("output_activations"):
            raise ValueError(
                f"quantization: {name} has output_activations, which are not quantized here; "
                f"{_WITHOUT}"
            )
        yield weights, AS_THEY_ARE if given is None else _float("input_activations", name, given)


def _float(what: str, group: str, given: Json) -> str:
    kind = (given.get("num_bits"), given.get("group_size"))
    if given.get("type") != "float" or kind not in _FLOATS or given.get("symmetric") is False:
        said = {key: given.get(key) for key in ("type", "num_bits", "strategy", "group_size")}
        known = ", ".join(f"{bits} bits in blocks of {size}" for bits, size in _FLOATS)
        raise ValueError(
            f"quantization: {what} of {group} are {said}; blockscale serves floats of {known}: "
            f"{_WITHOUT}"
        )
    return _FLOATS[kind]


def _own(quantization: Json) -> Iterator[_Pair]:
    for each in quantization.get("formats") or ():
        yield each, each  # or weight-only, which the convention says


_TOLD: Mapping[str, Callable[[Json], Iterator[_Pair]]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "blockscale": _own,
    "fine-grained": lambda quantization: iter([("mxfp8", "mxfp8")]),
    "gpt-oss": lambda quantization: iter([("mxfp4", AS_THEY_ARE)]),
}


def kv_cache_scheme_of(quantization: Json) -> Json | None:
    """What is said of keys and values, whose FP8 cache is vLLM's own; None if nothing.

    Raises ValueError for another scheme than FP8 with a scale for each tensor.
    """
    given = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if not given:
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
