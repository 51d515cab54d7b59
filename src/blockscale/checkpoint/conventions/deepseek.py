"""DeepSeek's checkpoints: V3's blocks of 128x128, and V4's with experts of four bits.

Source: the config.json of deepseek-ai/DeepSeek-V3, transformers' ``FineGrainedFP8Config`` (also of
"mxfp8") and vLLM 0.33's ``models/deepseek_v4``. ``weight_scale_inv`` multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...formats import formats
from ..storage import Place, Storage
from .caveats import EXPERT, rows_of_equal_blocks
from .convention import AS_THEY_ARE, Convention, Json, Pair, Scheme, model_config

__all__ = ["DEEPSEEK", "DEEPSEEK_V4", "FINE_GRAINED"]

_DATA = Place("{name}", ("F8_E4M3",))


def _fp8(scheme: Scheme) -> Json:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(scheme.left_alone),
    }


def _configure_v4(scheme: Scheme) -> dict[str, Json]:
    """Readers take all experts, and nothing else, to be of ``expert_dtype``."""
    four = scheme.layers.get("mxfp4", ())
    if dense := [layer for layer in four if not EXPERT.search(layer)]:
        raise ValueError(
            f"format: DeepSeek V4 has mxfp4 for experts alone, and {dense[0]!r} is none; name "
            "experts by include, or choose fp8_128x128 or another convention"
        )
    eight = any(EXPERT.search(layer) for layer in scheme.layers.get("fp8_128x128", ()))
    if four and eight:
        raise ValueError(
            "format: DeepSeek V4 has one format for all experts, and these have fp8_128x128 and "
            "mxfp4; choose one, or another convention"
        )
    experts = {"expert_dtype": "fp4" if four else "fp8"} if four or eight else {}
    return model_config({**_fp8(scheme), "scale_fmt": "ue8m0"}, **experts)


def _configure_fine_grained(scheme: Scheme) -> dict[str, Json]:
    config = {
        "quant_method": "mxfp8",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(scheme.left_alone),
    }
    return model_config(config)


def _activations(quantization: Json) -> Iterator[Pair]:
    size = quantization.get("weight_block_size")
    if size != [128, 128]:
        raise ValueError(f"quantization: weight_block_size is {size}; blockscale has [128, 128]")
    scheme = quantization.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise ValueError(
            f"quantization: activation_scheme is {scheme!r:.40}, one scale of a tensor; blockscale "
            "has 'dynamic', scales of blocks"
        )
    yield "fp8_128x128", "fp8_1x128"


def _activations_v4(quantization: Json) -> Iterator[Pair]:
    yield from _activations(quantization)
    yield "mxfp4", AS_THEY_ARE  # of experts, which are multiplied by what is exact here


DEEPSEEK = Convention(
    name="deepseek",
    title="DeepSeek's FP8 blocks",
    readers=("transformers", "vLLM", "SGLang"),
    storages={
        "fp8_128x128": Storage(
            formats["fp8_128x128"],
            {"data": _DATA, "scale": Place("{name}_scale_inv", ("F32", "F8_E8M0", "BF16"))},
        )
    },
    methods=("fp8",),
    configure=lambda scheme: model_config(_fp8(scheme)),
    activations=_activations,
    caveats=rows_of_equal_blocks,
)

DEEPSEEK_V4 = Convention(
    name="deepseek-v4",
    title="DeepSeek V4's FP8 blocks and FP4 experts",
    readers=("transformers", "vLLM"),
    storages={
        "fp8_128x128": Storage(
            formats["fp8_128x128"],
            {"data": _DATA, "scale": Place("{layer}scale", ("F8_E8M0", "F32"))},
            scale_rounding="rceil",
        ),
        "mxfp4": Storage(
            formats["mxfp4"],
            {"data": Place("{name}", ("I8",)), "scale": Place("{layer}scale", ("F8_E8M0",))},
        ),
    },
    methods=("fp8",),
    configure=_configure_v4,
    activations=_activations_v4,
    model_types=("deepseek_v4",),
)

FINE_GRAINED = Convention(
    name="fine-grained",
    title="transformers' fine-grained MXFP8",
    readers=("transformers",),
    storages={
        "mxfp8": Storage(
            formats["mxfp8"],
            {"data": _DATA, "scale": Place("{name}_scale_inv", ("U8", "F8_E8M0"))},
        )
    },
    methods=("mxfp8",),
    configure=_configure_fine_grained,
    activations=lambda quantization: iter([("mxfp8", "mxfp8")]),
)
