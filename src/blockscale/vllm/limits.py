"""What layers of the plugin do not do, each with a sentence that says what to do instead.

Layers and configurations are vLLM's; this module does not import them.
"""

from __future__ import annotations

from typing import Any

from .table import Table

__all__ = ["check_adapters", "check_experts", "check_latent", "check_other"]


def check_experts(layer: Any, activation: str, has_bias: bool, prefix: str) -> None:
    """ValueError where a RoutedExperts wants more than experts of an activation, by vLLM's name."""
    config, wanted = layer.moe_config, layer.activation.value
    numbers = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    refused = {
        "expert parallelism": config.moe_parallel_config.use_ep,
        "LoRA adapters": config.is_lora_enabled,
        "biases": config.has_bias and not has_bias,
        f"the activation {wanted!r}": wanted != activation,
        "a limit of SwiGLU": any(x is not None for x in numbers),
        "weights of the router on their inputs": layer.apply_router_weight_on_input,
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(
                f"{prefix}: blockscale's experts do not have {what}; serve without "
                f"{_OPTIONS.get(what, '')}quantization='blockscale'"
            )


_OPTIONS = {
    "expert parallelism": "--enable-expert-parallel (tensor parallelism shares them), or without ",
    "LoRA adapters": "--enable-lora, or without ",
}


def check_adapters(config: Any, prefix: str) -> None:
    """ValueError where a VllmConfig has adapters."""
    if config is not None and config.lora_config is not None:
        raise ValueError(
            f"{prefix}: LoRA adapters were never run beside blockscale's layers; serve without "
            "--enable-lora, or without quantization='blockscale'"
        )


def check_latent(table: Table, prefix: str) -> None:
    """ValueError where latent attention keeps a copy in bf16 of a quantized ``kv_b_proj``."""
    name = f"{prefix.rpartition('.')[0]}.kv_b_proj"
    if f"{name}.weight" in table.kinds:
        raise ValueError(
            f"{name}: vLLM's latent attention multiplies by a bf16 copy of this weight, which "
            "blockscale does not make; quantize without it (blockscale quantize --exclude "
            "'*kv_b_proj*'), or serve it without quantization='blockscale'"
        )


def check_other(table: Table, layer: Any, prefix: str) -> None:
    """ValueError where a layer of another kind has a quantized weight."""
    if f"{prefix}.weight" in table.kinds:
        raise ValueError(
            f"{prefix}: this layer ({type(layer).__name__}) has a quantized weight, and blockscale "
            "serves linear layers and experts; quantize without it (blockscale quantize "
            "--exclude), or serve it without quantization='blockscale'"
        )
