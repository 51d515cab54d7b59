"""What a ScaledTensor says of the operations that it has not."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["refusal"]

aten = torch.ops.aten

_WHY = "a ScaledTensor is elements and scales, and this operation takes or makes plain values"
_PRODUCT = "a plain product would not know the scales"
_REMEDY = (
    "call .dequantize() first (and blockscale.quantize the result), or blockscale.gemm to multiply"
)
_LAYER = (
    "Where it is the weight of a layer: leave the layer out by the filter_fn of "
    "blockscale.quantize_ if the model reads its weight itself; have adapters merge before"
)
_LOADED = "a model that has loaded quantized weights runs after blockscale.quantize_(model, recipe)"

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten.matmul.default}


def refusal(func: Any) -> str:
    """The sentence for an operation without a rule."""
    if func in _PRODUCTS:
        return f"{func}: {_PRODUCT}; {_REMEDY}; {_LOADED}. {_LAYER}"
    return f"{func}: {_WHY}; {_REMEDY}. {_LAYER}"
