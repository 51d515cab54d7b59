"""What ``bench linear`` measures: a layer forward and backward, casts included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..nn import Linear, Recipe
from . import peers_linear
from .contest import BASELINE, OURS, Call, Contest, Where

__all__ = ["PEERS", "RECIPES", "SHAPES", "contests", "train_step"]

Layer = Callable[[Tensor], Tensor]

#: Rows of the input, and the layer's output and input features.
SHAPES = ((16384, 7168, 4096), (8192, 8192, 8192))
RECIPES = {
    "fp8_block": Recipe("fp8_block"),
    "mxfp8": Recipe("mxfp8"),
}
PEERS: dict[str, dict[str, Callable[[nn.Linear], Layer]]] = {
    "fp8_block": {
        "torchao blockwise": peers_linear.blockwise,
        "torchao tensorwise, torch.compile": partial(peers_linear.float8, "tensorwise"),
        "torchao rowwise, torch.compile": partial(peers_linear.float8, "rowwise"),
    },
    "mxfp8": {"torchao emulated, torch.compile": peers_linear.mxfp8_emulated},
}
_GROUP = "Linear layer, forward and backward"


def train_step(
    layer: Layer, weight: Tensor, x: Tensor, grad: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Forward and backward, all three products: the gradients of ``x`` and of ``weight``."""
    x.grad = weight.grad = None
    layer(x).backward(grad)
    return x.grad, weight.grad


def contests(
    recipes: Sequence[str] = tuple(RECIPES),
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    *,
    peers: bool = False,
    device: str = "cuda",
) -> Iterator[Contest]:
    """Each recipe at each shape (M, N, K) in bf16, on random normal numbers."""
    for name in recipes:
        for m, n, k in shapes:
            others = PEERS[name] if peers else {}
            x, w, grad = (
                torch.randn(shape, device=device, dtype=torch.bfloat16)
                for shape in ((m, k), (n, k), (m, n))
            )
            x.requires_grad_()
            makers = {BASELINE: _same, **others}
            contestants = {
                OURS: partial(_ours, RECIPES[name], x, w, grad),
                **{who: partial(_step_of, make, x, w, grad) for who, make in makers.items()},
            }
            yield Contest(Where(_GROUP, name, m, n, k), contestants, products=3)


def _ours(recipe: Recipe, x: Tensor, w: Tensor, grad: Tensor) -> Call:
    n, k = w.shape
    layer = Linear(k, n, bias=False, device=w.device, dtype=w.dtype, recipe=recipe)
    layer.weight = nn.Parameter(w)
    return partial(train_step, layer, layer.weight, x, grad)


def _step_of(make: Callable[[nn.Linear], Layer], x: Tensor, w: Tensor, grad: Tensor) -> Call:
    n, k = w.shape
    layer = nn.Linear(k, n, bias=False, device="meta", dtype=w.dtype)
    layer.weight = nn.Parameter(w)
    return partial(train_step, make(layer), layer.weight, x, grad)


def _same(layer: nn.Linear) -> Layer:
    return layer
