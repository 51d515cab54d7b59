"""What ``bench moe`` measures: a layer of experts beside torch's bf16, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..nn import Recipe, experts
from ..nn.reuse import reuse_weights
from ..routing import Routing, route
from .contest import BASELINE, OURS, Call, Contest, Where
from .moe_shapes import SHAPES, Shape

__all__ = [
    "AT_ONCE",
    "ONCE",
    "RECIPES",
    "REUSED",
    "Layer",
    "bf16",
    "contests",
    "layer_calls",
    "make_layer",
]

AT_ONCE = 10  # steps of a layer that a stream takes without making the host wait
ONCE = "weights quantized in one read"
REUSED = "weights quantized before"
RECIPES = {"fp8_block": Recipe("fp8_block"), "mxfp8": Recipe("mxfp8"), "nvfp4": Recipe("nvfp4")}


class Layer(NamedTuple):
    """What a layer multiplies, of random normal numbers, and the gradient of its result."""

    x: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    indices: Tensor
    grad: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self[:4]

    @property
    def routing(self) -> Routing:
        return route(self.indices, len(self.up))


def make_layer(shape: Shape, device: str = "cuda") -> Layer:
    """Experts drawn at random for each token, all alike."""
    generator = torch.Generator(device).manual_seed(0)
    count, hidden, inner = shape.experts, shape.hidden, shape.intermediate

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)
        return drawn.mul_(scale)

    drawn = torch.rand(shape.tokens, count, device=device, generator=generator)
    weights, indices = drawn.topk(shape.top_k)
    leaves = (
        normal(shape.tokens, hidden),
        weights / weights.sum(-1, keepdim=True),
        normal(count, 2 * inner, hidden, scale=hidden**-0.5),
        normal(count, hidden, inner, scale=inner**-0.5),
    )
    for each in leaves:
        each.requires_grad_()
    return Layer(*leaves, indices, normal(shape.tokens, hidden))


def ours(layer: Layer, recipe: Recipe) -> Tensor:
    """Routing counts."""
    return experts(layer.x, layer.weights, layer.routing, layer.up, layer.down, recipe=recipe)


def bf16(layer: Layer) -> Tensor:
    """By torch's product of groups, its indexing and autograd."""
    routing, product = layer.routing, torch.nn.functional.grouped_mm
    h = product(layer.x[routing.tokens], layer.up.mT, offs=routing.offsets)
    gate, up = h.chunk(2, -1)
    y = product(torch.nn.functional.silu(gate) * up, layer.down.mT, offs=routing.offsets)
    return (y[routing.slots] * layer.weights[..., None]).sum(1).to(layer.x.dtype)


def forward(run: Callable[[], Tensor]) -> Call:
    return torch.no_grad()(run)


def train(run: Callable[[], Tensor], layer: Layer) -> Call:
    """Forward and backward."""

    def step() -> None:
        for each in layer.leaves:
            each.grad = None
        run().backward(layer.grad)

    return step


def once(call: Call) -> Call:
    """In a block of its own, in which a weight is read once for both its forms."""

    def step() -> None:
        with reuse_weights():
            call()

    return step


def _where(shape: Shape, group: str, case: str) -> Where:
    """An expert's product, of which there are three: of all pairs, (M, H) by (H, I)."""
    return Where(group, case, shape.pairs, shape.intermediate, shape.hidden)


def _passes(layer: Layer) -> list[tuple[str, Callable[[Callable[[], Tensor]], Call], int]]:
    """By their names; how a run becomes a call of them, and products it has."""
    return [
        ("forward", forward, 3),
        ("forward and backward", partial(train, layer=layer), 9),
    ]


def contests(
    recipes: Sequence[str] = tuple(RECIPES),
    shapes: Mapping[str, Shape] = SHAPES,
    *,
    peers: bool = False,
    device: str = "cuda",
) -> Iterator[Contest]:
    """Each recipe at each shape, forward, and forward and backward; then with the weights as they
    were quantized before, and both forms of them of one read. ``peers``: torch's bf16 compiled,
    too."""
    for model, shape in shapes.items():
        layer = make_layer(shape, device)
        others: dict[str, Callable[[], Tensor]] = {BASELINE: partial(bf16, layer)}
        if peers:
            others[f"{BASELINE}, torch.compile"] = torch.compile(partial(bf16, layer))
        for name in recipes:
            mine, passes = partial(ours, layer, RECIPES[name]), _passes(layer)
            for what, timed, products in passes:
                where = _where(shape, f"{model}, {what}", name)
                every: dict[str, Callable[[], Tensor]] = {OURS: mine, **others}
                calls = {who: partial(timed, run) for who, run in every.items()}
                yield Contest(where, calls, products)
                with reuse_weights():
                    where = _where(shape, f"{model}, {what}", f"{name}, {REUSED}")
                    yield Contest(where, {OURS: partial(timed, mine)}, products)
            what, _, products = passes[-1]
            where = _where(shape, f"{model}, {what}", f"{name}, {ONCE}")
            yield Contest(where, {OURS: partial(once, train(mine, layer))}, products)


def layer_calls(recipe: str = "fp8_block", device: str = "cuda") -> dict[str, Call]:
    """Forward and backward of 128 experts with few rows, which the device finishes soon."""
    layer = make_layer(Shape(256, 128, 128, 8, tokens=64), device)
    return {
        f"bs.nn.experts, {recipe}": train(partial(ours, layer, RECIPES[recipe]), layer),
        BASELINE: train(partial(bf16, layer), layer),
    }
