"""Layers whose weights have a ``main_grad``, micro-batches, and what their gradients add up to."""

from __future__ import annotations

import torch

import blockscale as bs

__all__ = [
    "BF16",
    "F32",
    "RECIPES",
    "batches",
    "columns",
    "expected",
    "made",
    "random",
    "train",
    "with_main_grad",
]

BF16, F32 = torch.bfloat16, torch.float32
RECIPES = {
    "mxfp8": bs.Recipe("mxfp8"),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_block"),
}


def random(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(recipe=RECIPES["mxfp8"], n=48, k=96, dtype=BF16, bias=True):
    layer = bs.nn.Linear(k, n, bias, dtype=dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(random(n, k, seed=1))
    return layer


def with_main_grad(layer, dtype=F32):
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=dtype)
    return layer


def batches(count=3, m=40, n=48, k=96):
    """Inputs, and gradients of outputs, of micro-batches; small beside what was added before."""
    return [(random(m, k, seed=2 * i), random(m, n, seed=2 * i + 1)) for i in range(1, count + 1)]


def train(layer, given):
    """Gradients of the inputs."""
    found = []
    for x, g in given:
        x = x.clone().requires_grad_()
        layer(x).backward(g)
        found.append(x.grad)
    return found


def quantized_columns(x, recipe, role):
    return bs.quantize(x, recipe.format_of(role).name, -2, pad=True)


def columns(x, recipe, role):
    return quantized_columns(x, recipe, role).dequantize(F32)


def expected(given, recipe, dtype=F32):
    """By the definition of the product: fp32 sums, rounded once a micro-batch."""
    total = torch.zeros(given[0][1].shape[1], given[0][0].shape[1], dtype=dtype)
    for x, g in given:
        left = quantized_columns(g, recipe, "gradients")
        right = quantized_columns(x, recipe, "activations")
        total = (bs.gemm(left.mT, right, F32) + total.float()).to(dtype)
    return total
