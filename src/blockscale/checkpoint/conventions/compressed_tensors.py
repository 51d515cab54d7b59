"""compressed-tensors, of the vLLM project: read by vLLM, SGLang and transformers.

Source: what compressed-tensors 0.20 writes for its presets NVFP4, NVFP4A16, MXFP4, MXFP8 and
FP8_BLOCK. Global scales divide there: we write powers of two, whose reciprocals are exact. MX
formats need ``scale_dtype``, and scales of U8.
"""

from __future__ import annotations

from typing import Any

from ...formats import formats
from ..storage import ONE, Place, Storage
from .caveats import compressed_experts
from .convention import Convention, Json, Scheme, model_config

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


def _has_formats(quantization: Json) -> bool:
    """Of each group; "float-quantized" is FP8 with scales of rows and of tensors, too."""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    whole = quantization.get("format")
    known = {name: weights for name, weights, _ in _SCHEMES.values()}
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        name = group.get("format") or whole if isinstance(group, dict) else None
        if not isinstance(weights, dict) or name not in known:
            return False
        if weights.get("strategy") != known[name]["strategy"]:
            return False
    return True


COMPRESSED_TENSORS = Convention(
    name="compressed-tensors",
    title="compressed-tensors",
    readers=("transformers", "vLLM", "SGLang"),
    storages={storage.format.name: storage for storage in _STORAGES},
    methods=("compressed-tensors",),
    configure=_configure,
    is_weight_only=_is_weight_only,
    has_formats=_has_formats,
    fuses=True,
    weight_only=("nvfp4", "mxfp4", "mxfp8"),
    caveats=compressed_experts,
)
