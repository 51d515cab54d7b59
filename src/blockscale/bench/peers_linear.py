"""torchao's linear layers.

Each function takes a bf16 ``torch.nn.Linear`` without a bias and returns what does the same; it
raises, or its first call does, where torchao is missing or has nothing for this GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["blockwise", "float8", "mxfp8_emulated"]

Layer = Callable[[Tensor], Tensor]

_FP8 = torch.float8_e4m3fn


def blockwise(layer: nn.Linear) -> Layer:
    """FP8, 1x128 and 128x128; its casts are Triton kernels."""
    module: Any = import_module("torchao.prototype.blockwise_fp8_training.linear")
    return module.Float8BlockwiseLinear.from_float(layer)


def float8(recipe: str, layer: nn.Linear) -> Layer:
    """FP8 with a scale for each tensor or row."""
    module: Any = import_module("torchao.float8")
    config = module.Float8LinearConfig.from_recipe_name(recipe)
    converted = module.convert_to_float8_training(layer, config=config)
    return torch.compile(converted, dynamic=False)


def mxfp8_emulated(layer: nn.Linear) -> Layer:
    """MXFP8: quantized, dequantized, multiplied in bf16."""
    linear: Any = import_module("torchao.prototype.moe_training.mxfp8_linear")
    config: Any = import_module("torchao.prototype.mx_formats.config")
    preference: Any = import_module("torchao.quantization.quantize_.common.kernel_preference")
    given = (
        *(_FP8, _FP8, _FP8, 32),
        preference.KernelPreference.EMULATED,
        config.MXFP8Dim0CastKernelChoice.TORCH,
        config.MXFP8Dim1CastKernelChoice.TORCH,
        config.ScaleCalculationMode.RCEIL,
        False,  # the weight's gradient is quantized, too
    )

    def product(x: Tensor) -> Tensor:
        return linear.mx_mm.apply(x, layer.weight, *given)

    return torch.compile(product, dynamic=False)
