"""What a ScaledTensor says of the operations that it has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["of_flat", "refusal"]

aten = torch.ops.aten

_WHY = "a ScaledTensor is elements and scales, and this operation takes or makes plain values"
_PRODUCT = "a plain product would not know the scales"
_REMEDY = (
    "call .dequantize() first (and blockscale.quantize the result), or blockscale.gemm to multiply"
)
_LAYER = (
    "Where it is the weight of a layer: leave the layer out by the filter_fn of "
    "blockscale.quantize_ if the model reads its weight itself; merge adapters before it"
)
_COLLECTIVE = (
    "a ScaledTensor is elements and scales, which some collectives move (gathers and shards of a "
    "DTensor, after `import blockscale.distributed`) and none adds up"
)
_LOADED = "a model that has loaded quantized weights runs after blockscale.quantize_(model, recipe)"

#: What torch's wrappers run into, and what they take instead.
_FSDP2 = (
    "FSDP leaves quantized weights whole: fully_shard(model, ignored_params={p for p in "
    "model.parameters() if isinstance(p, blockscale.ScaledTensor)})"
)
_FLAT = (
    "; its values in one row are .dequantize().flatten(). Where DistributedDataParallel does this, "
    "quantized weights are left alone after DistributedDataParallel."
    "_set_params_and_buffers_to_ignore_for_model(model, [name for name, p in "
    "model.named_parameters() if isinstance(p, blockscale.ScaledTensor)])"
)
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.linear.default, aten.matmul.default}


def refusal(func: Any) -> str:
    """The sentence for an operation without a rule."""
    if func in _PRODUCTS:
        return f"{func}: {_PRODUCT}; {_REMEDY}; {_LOADED}. {_LAYER}"
    if func is aten.new_zeros.default:
        return f"{func}: {_WHY}; {_REMEDY}. {_LAYER}. {_FSDP2}"
    if func.namespace in ("_c10d_functional", "c10d", "_dtensor"):
        return f"{func}: {_COLLECTIVE}; {_REMEDY}"
    return f"{func}: {_WHY}; {_REMEDY}. {_LAYER}"


def of_flat(shape: Sequence[int]) -> str:
    """More for a refused view of one dimension, as DDP takes it; "" for others."""
    return _FLAT if len(shape) == 1 else ""
