"""Experts that are held quantized: the bits of converted ones, and of exact values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.nn import GatedActivation, experts, quantized_experts

RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "nvfp4": bs.Recipe("nvfp4"),
    "mxfp4": bs.Recipe("mxfp4"),
    "fp8_block": bs.Recipe("fp8_block"),
    "mixed": bs.Recipe("mxfp8", weights="mxfp4"),
    "by_weights": bs.Recipe("fp8_1x128", weights="nvfp4"),
}
H, I = 64, 32  # noqa: E741


def tensor(*shape: int, dtype=torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(tokens: int, count: int, top_k: int = 2, seed: int = 0) -> bs.Routing:
    generator = torch.Generator().manual_seed(seed)
    return bs.route(torch.rand(tokens, count, generator=generator).argsort(1)[:, :top_k], count)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_of_experts(name, dtype, transposed):
    recipe, how = RECIPES[name], {"transposed": transposed}
    up, down = tensor(4, 2 * I, H, dtype=dtype), tensor(4, H, I, dtype=dtype, seed=2)
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
        how["activation"] = GatedActivation(1.702, 7.0, 1.0, True)
    how |= {"up_bias": tensor(4, 2 * I, dtype=dtype), "down_bias": tensor(4, H, dtype=dtype)}
    routing, weights, x = routed(50, 4), tensor(50, 2).softmax(-1), tensor(50, H, dtype=dtype)
    axis = -2 if transposed else -1
    held = [bs.quantize(w, recipe.format_of("weights"), axis, pad=True) for w in (up, down)]
    want = experts(x, weights, routing, up, down, recipe=recipe, **how)
    got = quantized_experts(x, weights, routing, *held, recipe=recipe, **how)
    assert got.dtype == dtype
    assert torch.equal(got, want)
