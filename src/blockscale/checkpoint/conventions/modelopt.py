"""NVIDIA ModelOpt: read by vLLM, SGLang and TensorRT-LLM.

Source: what ModelOpt 0.47's ``export_hf_checkpoint`` writes, and vLLM 0.33's
``quantization/modelopt.py``. vLLM reads ``config.json``, and of older folders
``hf_quant_config.json``; TensorRT-LLM reads the latter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...formats import formats
from ..ours import STORAGES
from ..storage import Place, Storage
from .convention import AS_THEY_ARE, Convention, Json, Pair, Scheme, model_config

__all__ = ["MODELOPT"]

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
#: Format and whether weights only -> quant_algo.
_ALGOS = {
    ("mxfp8", False): "MXFP8",
    ("nvfp4", False): "NVFP4",
    ("nvfp4", True): "W4A16_NVFP4",
}


def _algo(format: str, weight_only: bool) -> str:
    return _ALGOS.get((format, weight_only)) or _ALGOS[format, False]


def _group(name: str, scheme: Scheme, targets: list[str]) -> Json:
    format = formats[name]
    numbers = {
        "dynamic": False,
        "num_bits": format.element.bits,
        "type": "float",
        "group_size": format.block_size,
    }
    activations = {} if scheme.weight_only else {"input_activations": numbers}
    return {**activations, "weights": numbers, "targets": targets}


def _configure(scheme: Scheme) -> dict[str, Json]:
    several = len(scheme.layers) > 1
    format = next(iter(scheme.layers))
    algo = "MIXED_PRECISION" if several else _algo(format, scheme.weight_only)
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "producer": _PRODUCER,
        "ignore": list(scheme.left_alone),
    }
    older: dict[str, Any] = {"quant_algo": algo, "kv_cache_quant_algo": None}
    if several:
        layers = {
            layer: {
                "quant_algo": _algo(name, scheme.weight_only),
                "group_size": formats[name].block_size,
            }
            for name, layers in scheme.layers.items()
            for layer in layers
        }
        older = {**older, "quantized_layers": layers}
        config["quantized_layers"] = layers
        config["config_groups"] = {
            f"group_{i}": _group(name, scheme, list(layers))
            for i, (name, layers) in enumerate(scheme.layers.items())
        }
    else:
        older = {
            **older,
            "group_size": formats[format].block_size,
            "exclude_modules": list(scheme.left_alone),
        }
        if formats[format].has_global_scale:
            config["config_groups"] = {"group_0": _group(format, scheme, ["Linear"])}
    return {
        **model_config(config),
        "hf_quant_config.json": {"producer": _PRODUCER, "quantization": older},
    }


def _is_weight_only(quantization: Json) -> bool:
    groups = quantization.get("config_groups")
    return quantization.get("quant_algo") == "W4A16_NVFP4" or (
        isinstance(groups, dict)
        and bool(groups)
        and all(isinstance(g, dict) and not g.get("input_activations") for g in groups.values())
    )


def _activations(quantization: Json) -> Iterator[Pair]:
    algo, layers = quantization.get("quant_algo"), quantization.get("quantized_layers")
    of_layers = [algo]
    if str(algo).upper() == "MIXED_PRECISION" and isinstance(layers, dict):
        of_layers = [each.get("quant_algo") for each in layers.values()]
    known = {name: pair for pair, name in _ALGOS.items()}
    for each in dict.fromkeys(str(name).upper() for name in of_layers):
        if each not in known:
            raise ValueError(
                f"quantization: got quant_algo {each!r:.40}; known are {', '.join(known)}"
            )
        format, weight_only = known[each]
        yield format, AS_THEY_ARE if weight_only else format


#: Experts of Llama 4 and gpt-oss, (experts, in, out), packed along the contraction.
_STACKED = Storage(
    formats["nvfp4"],
    {
        "data": Place("{name}", ("U8",)),
        "scale": Place("{name}_weight_scale", ("F8_E4M3",)),
        "global_scale": Place("{name}_weight_scale_2", ("F32",)),
        "input_scale": Place("{name}_input_scale", ("F32",)),
    },
    axis=-2,
)

MODELOPT = Convention(
    name="modelopt",
    title="NVIDIA ModelOpt",
    readers=("vLLM", "SGLang", "TensorRT-LLM"),
    storages={name: STORAGES[name] for name, _ in _ALGOS},
    methods=("modelopt", "modelopt_fp4", "modelopt_mxfp8"),
    configure=_configure,
    activations=_activations,
    also_read=(_STACKED,),
    is_weight_only=_is_weight_only,
    fuses=True,
    weight_only=("nvfp4",),
)
