"""gpt-oss: stacked experts of MXFP4, read by transformers, vLLM and SGLang.

Source: openai/gpt-oss ``gpt_oss/torch/weights.py``, and transformers' ``integrations/mxfp4.py``,
which keeps the transposed parameter. Rows of ``gate_up_proj`` alternate, gate first.
"""

from __future__ import annotations

from ...formats import formats
from ..storage import Place, Storage, blocks
from .convention import AS_THEY_ARE, Convention, Json, Scheme, model_config

__all__ = ["GPT_OSS"]


def _configure(scheme: Scheme) -> dict[str, Json]:
    scheme.only_format("gpt-oss")
    for layers in scheme.layers.values():
        if others := [layer for layer in layers if "experts" not in layer.split(".")]:
            raise ValueError(
                f"format: gpt-oss has mxfp4 for stacks of experts alone, {others[0]!r} is none, "
                "and readers would make it anew; leave it out (exclude), or take another convention"
            )
    config = {"quant_method": "mxfp4", "modules_to_not_convert": list(scheme.left_alone)}
    return model_config(config)


GPT_OSS = Convention(
    name="gpt-oss",
    title="gpt-oss",
    readers=("transformers", "vLLM"),
    storages={
        "mxfp4": Storage(
            formats["mxfp4"],
            {
                "data": Place("{name}_blocks", ("U8",), blocks(16)),
                "scale": Place("{name}_scales", ("U8",)),
            },
        )
    },
    methods=("mxfp4",),
    configure=_configure,
    activations=lambda quantization: iter([("mxfp4", AS_THEY_ARE)]),
    is_weight_only=lambda quantization: True,
    weight_only=("mxfp4",),
    stacks=True,
    transposed_stacks=True,
    model_types=("gpt_oss",),
)
