"""compressed-tensors, of the vLLM project: read by vLLM, SGLang and transformers.

Source: what compressed-tensors 0.20 writes for its presets NVFP4, NVFP4A16, MXFP4, MXFP8 and
FP8_BLOCK. Global scales divide there: we write powers of two, whose reciprocals are exact. MX
formats need ``scale_dtype``, and scales of U8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...formats import formats
from ..storage import ONE, Place, Storage
from .caveats import compressed_experts
from .convention import AS_THEY_ARE, Convention, Json, Pair, Scheme, model_config

__all__ = ["COMPRESSED_TENSORS"]


_PACKED = Place("{name}_packed", ("U8",))
_E8M0 = Place("{name}_scale", ("U8", "F8_E8M0"))
_STORAGES = (
    Storage(
        formats["nvfp4"],
        {
            "data": _PACKED,
            "scale": Place("{name}_scale", ("F8_E4M3",)),
            "global_scale": Place("{name}_global_scale", ("F32",), ONE, divides=True),
            "input_scale": Place("{layer}input_global_scale", ("F32",), ONE, divides=True),
        },
    ),
    Storage(formats["mxfp4"], {"data": _PACKED, "scale": _E8M0}),
    Storage(formats["mxfp8"], {"data": Place("{name}", ("F8_E4M3",)), "scale": _E8M0}),
    Storage(
        formats["fp8_128x128"],
        {
            "data": Place("{name}", ("F8_E4M3",)),
            "scale": Place("{name}_scale", ("F32", "BF16", "F16")),
        },
    ),
)

#: Format -> its name there, and what is said of weights and of activations.
_SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        {"dynamic": "local"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"dynamic": True},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {"dynamic": True},
    ),
    "fp8_128x128": (
        "float-quantized",
        {"strategy": "block", "block_structure": [128, 128]},
        {"dynamic": True, "strategy": "group", "group_size": 128, "block_structure": None},
    ),
}


def _group(format: str, scheme: Scheme, targets: list[str]) -> Json:
    name, weights, activations = _SCHEMES[format]
    common = {
        "type": "float",
        "num_bits": formats[format].element.bits,
        "symmetric": True,
        **weights,
    }
    return {
        "format": name,
        "targets": targets,
        "weights": {**common, "dynamic": False},
        "input_activations": None if scheme.weight_only else {**common, **activations},
        "output_activations": None,
    }


def _configure(scheme: Scheme) -> dict[str, Json]:
    several = len(scheme.layers) > 1
    groups = [
        _group(format, scheme, list(layers) if several else ["Linear"])
        for format, layers in scheme.layers.items()
    ]
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if several else groups[0]["format"],
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(scheme.left_alone),
        "kv_cache_scheme": None,
    }
    return model_config(config)


def _is_weight_only(quantization: Json) -> bool:
    groups = quantization.get("config_groups")
    return (
        isinstance(groups, dict)
        and bool(groups)
        and all(
            isinstance(group, dict) and group.get("input_activations") is None
            for group in groups.values()
        )
    )


#: Bits of an element and size of a block -> format.
_FLOATS: dict[tuple[Any, ...], str] = {
    (4, 16): "nvfp4",
    (4, 32): "mxfp4",
    (8, 32): "mxfp8",
    (8, 128): "fp8_1x128",
}
_BLOCKS: dict[tuple[Any, ...], str] = {(8, (128, 128)): "fp8_128x128"}


def _activations(quantization: Json) -> Iterator[Pair]:
    groups = quantization.get("config_groups")
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        weights = _float("weights", name, group.get("weights") or {})
        given = group.get("input_activations")
        if group.get("output_activations"):
            raise ValueError(
                f"quantization: {name} has output_activations, which are not quantized here"
            )
        activations = AS_THEY_ARE if given is None else _float("input_activations", name, given)
        if given and given.get("dynamic") is False and not formats[activations].has_global_scale:
            raise ValueError(
                f"quantization: input_activations of {name} are not dynamic, and blocks of "
                f"{activations} are scaled as they come here"
            )
        yield weights, activations


def _float(what: str, group: str, given: Json) -> str:
    bits, size, block = (given.get(k) for k in ("num_bits", "group_size", "block_structure"))
    found = _FLOATS.get((bits, size))
    if isinstance(block, list) and size is None:
        found = _BLOCKS.get((bits, tuple(block)))
    if given.get("type") != "float" or found is None or given.get("symmetric") is False:
        said = {key: given.get(key) for key in ("type", "num_bits", "strategy", "group_size")}
        known = ", ".join(f"{bits} bits in blocks of {size}" for bits, size in (*_FLOATS, *_BLOCKS))
        raise ValueError(f"quantization: {what} of {group} are {said}; known are floats of {known}")
    return found


COMPRESSED_TENSORS = Convention(
    name="compressed-tensors",
    title="compressed-tensors",
    readers=("transformers", "vLLM", "SGLang"),
    storages={storage.format.name: storage for storage in _STORAGES},
    methods=("compressed-tensors",),
    configure=_configure,
    activations=_activations,
    is_weight_only=_is_weight_only,
    fuses=True,
    weight_only=("nvfp4", "mxfp4", "mxfp8"),
    caveats=compressed_experts,
)
