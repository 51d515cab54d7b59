"""Layers of parts, and both passes of them."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs

__all__ = [
    "BF16",
    "F32",
    "LAYERS",
    "RECIPES",
    "F",
    "K",
    "N",
    "Seen",
    "assert_same",
    "both_passes",
    "made",
    "one_after_the_other",
    "random",
]

BF16, F32 = torch.bfloat16, torch.float32
RECIPES = {
    "mxfp8": bs.Recipe(),
    "e5m2_gradients": bs.Recipe(gradients="mxfp8_e5m2", scale_rounding="floor"),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_block"),
    "mixed": bs.Recipe("mxfp6_e2m3", weights="mxfp4"),
}
K, N, F = 96, 80, 48
LAYERS = {
    "rmsnorm": lambda **how: bs.nn.RMSNormLinear(K, N, **how),
    "layernorm": lambda **how: bs.nn.LayerNormLinear(K, N, **how),
    "mlp": lambda **how: bs.nn.MLP(K, F, True, **how),
    "mlp_without_bias": lambda **how: bs.nn.MLP(K, F, **how),
}


def random(*shape, seed=0, dtype=BF16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(name, recipe=RECIPES["mxfp8"], dtype=BF16):
    layer = LAYERS[name](dtype=dtype, recipe=recipe)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i + 1) / 2 + (parameter.dim() == 1))
    return layer


@contextlib.contextmanager
def one_after_the_other(layer):
    """Somebody looks on as the parts are called."""
    called = []
    hooks = [
        part.register_forward_hook(lambda part, *_: called.append(part))
        for part in layer.children()
    ]
    yield
    assert called == list(layer.children())
    for hook in hooks:
        hook.remove()


def both_passes(layer, x, call=None):
    """The result, and gradients of the input and of all parameters that have some."""
    x = x.detach().clone().requires_grad_()
    y = layer(x) if call is None else call(x)
    trained = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, trained, random(*y.shape, seed=9, dtype=y.dtype))]


def assert_same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a, b), i


class Seen(TorchDispatchMode):
    """Names of the package's ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "blockscale":
            self.names.append(func.name().removeprefix("blockscale::"))
        return func(*args, **(kwargs or {}))
