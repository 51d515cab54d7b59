"""Whether a device has the kernels of a layer."""

from __future__ import annotations

import torch

from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..nn.recipe import Recipe
from ..ops.gemm_kernels import products_on

__all__ = ["check_device"]


def check_device(device: torch.device, recipe: Recipe, layer: str, *, groups: bool = False) -> None:
    """ValueError where a GPU has no kernel for a layer's products, or those of its experts."""
    if device.type == "cpu" and gpu_of(device) is None:
        return
    weights = recipe.format_of("weights").name
    activations = None if recipe.weight_only else recipe.format_of("activations").name
    found = products_on(device)
    if isinstance(found, str):
        why = found
    else:
        try:
            if (activations, weights) in (found.of_groups("m") if groups else found).pairs:
                return
            which = f"{'groups of ' * groups}{activations or 'bf16'} by {weights}"
            why = f"no kernel multiplies {which} on {found.gpu}"
        except Unsupported as none:
            why = str(none)
    raise ValueError(
        f"{layer}: {_name(device)} does not run blockscale's layers: {why}. Hopper (compute "
        "capability 9.0) does; here serve the model without quantization='blockscale', by vLLM's "
        "own kernels"
    )


def _name(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} (compute capability {major}.{minor})"
