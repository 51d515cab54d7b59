"""Where the time of a layer of experts goes: each of its steps alone, beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gemm import gemm
from ..nn import group_passes
from ..nn.gated import SWIGLU, exact
from ..nn.group_operands import Activated, ActivatedBackward, Operands, Rows, Source, operands
from ..nn.recipe import Recipe
from ..nn.reuse import reuse_weights
from ..ops.operand_layout import operand_layout
from ..quantize import quantize, quantize_both
from ..routing import combine, route
from ..tensor import ScaledTensor
from .contest import Call
from .moe import Layer, Shape
from .timing import Timer

__all__ = ["Stage", "measure_stages", "stages"]

_DENSE = 8192  # rows, columns and K of the product whose rate is the floor of all
_SHORT = 10  # repeats


@dataclass(frozen=True, slots=True)
class Step:
    """A call, which moves so many bytes at least, or has so many flops."""

    what: str
    call: Call
    nbytes: float = 0
    flops: float = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A step's time, and its floor: its bytes at the rate of a copy, or its flops at that of a
    large product of the same formats."""

    model: str
    recipe: str
    what: str
    microseconds: float
    floor: float


class _Run:
    """A layer's operands, and its steps. Weights are quantized once."""

    def __init__(self, layer: Layer, shape: Shape, recipe: Recipe):
        self.layer, self.shape, self.recipe = layer, shape, recipe
        self.x, self.weights, self.up, self.down = (each.detach() for each in layer.leaves)
        self.routing, self.dtype = layer.routing, layer.x.dtype
        self.tokens, self.offsets = self.routing.tokens, self.routing.offsets
        self.scale = self.weights.flatten()[self.routing.pairs]
        self.activation = exact(SWIGLU)
        self.size = recipe.format_of("activations").element.bits / 8  # bytes of an element
        self.columns = 2 * shape.pairs * shape.hidden * shape.intermediate  # flops of I of them
        self.sums = 2 * shape.hidden * (shape.pairs + shape.tokens)  # bytes of a combine

    def quantized(self, source: Source, role: str, **axes: bool) -> Operands:
        rows, columns = axes.get("rows", False), axes.get("columns", False)
        given = self.recipe, role, self.offsets, self.dtype
        return operands(source, *given, rows=rows, columns=columns)

    def gather(self, x: Tensor, role: str, **axes: bool) -> Step:
        what = "gather + quantize, " + " and ".join(axes)
        moved = self.shape.pairs * self.shape.hidden * (2 + self.size * len(axes))
        return Step(what, lambda: self.quantized(Rows(x, self.tokens), role, **axes), moved)

    def multiply(self, product: Callable[..., Tensor], rows: object, weight: Tensor) -> Tensor:
        return product(rows, weight, self.offsets, group_passes.Product(self.recipe, self.dtype))

    def wgrad(self, what: str, g: Any, x: Any, flops: float) -> Step:
        call = partial(group_passes.wgrad, g, x, self.offsets, self.dtype)
        return Step(what, call, flops=flops)

    def forward(self) -> Iterator[Step]:
        shape, inner = self.shape, self.shape.intermediate
        yield Step("route", lambda: route(self.layer.indices, shape.experts))
        yield self.gather(self.x, "activations", rows=True)
        x = self.quantized(Rows(self.x, self.tokens), "activations", rows=True).rows
        up = partial(self.multiply, group_passes.fprop, x, self.up)
        yield Step("up", up, flops=2 * self.columns)
        self.h = up()
        quantize_a = partial(
            self.quantized, Activated(self.activation, self.h), "activations", rows=True
        )
        yield Step("SwiGLU + quantize, rows", quantize_a, shape.pairs * inner * (4 + self.size))
        down = partial(self.multiply, group_passes.fprop, quantize_a().rows, self.down)
        yield Step("down", down, flops=self.columns)
        given = down(), self.routing.slots, self.weights, self.dtype
        yield Step("combine", lambda: combine(*given), self.sums)

    def backward(self) -> Iterator[Step]:
        """After ``forward``."""
        grad, elements = self.layer.grad, self.shape.pairs * self.shape.intermediate
        both = {"rows": True, "columns": True}
        yield self.gather(grad, "gradients", **both)
        g = self.quantized(Rows(grad, self.tokens), "gradients", **both)
        of_a = partial(self.multiply, group_passes.dgrad, g.rows, self.down)
        yield Step("dgrad, down", of_a, flops=self.columns)
        weighted = Activated(self.activation, self.h, self.scale)
        quantize_a = partial(self.quantized, weighted, "activations", columns=True)
        what, moved = "weighted SwiGLU + quantize, columns", elements * (4 + self.size)
        yield Step(what, quantize_a, moved)
        yield self.wgrad("wgrad, down", g.columns, quantize_a().columns, self.columns)
        source = ActivatedBackward(self.activation, of_a(), self.h, self.scale)
        quantize_h = partial(self.quantized, source, "gradients", **both)
        what, moved = "SwiGLU backward + quantize, both", elements * (6 + 4 * self.size)
        yield Step(what, quantize_h, moved)
        g = quantize_h()
        of_x = partial(self.multiply, group_passes.dgrad, g.rows, self.up)
        yield Step("dgrad, up", of_x, flops=2 * self.columns)
        dx = of_x()
        yield Step("combine, dx", lambda: combine(dx, self.routing.slots), self.sums)
        yield self.gather(self.x, "activations", columns=True)
        x = self.quantized(Rows(self.x, self.tokens), "activations", columns=True).columns
        yield self.wgrad("wgrad, up", g.columns, x, 2 * self.columns)

    def of_weights(self) -> Iterator[Step]:
        kept = self.recipe.format_of("weights")
        moved = (self.up.numel() + self.down.numel()) * (2 + kept.element.bits / 8)
        for axis, name in ((-1, "rows"), (-2, "columns")):
            how: Any = {"axis": axis, "pad": True, "k_major": axis == -2}
            call = partial(_each, (self.up, self.down), kept.name, **how)
            yield Step(f"weights, {name}", call, moved)

    def gathers(self) -> Iterator[Step]:
        """Rows and columns from one read, of rows that are gathered then, before, and by torch."""
        name = self.recipe.format_of("activations").name
        layout = operand_layout(name, self.x.device).layout
        how: Any = {"offsets": self.offsets, "k_major": True, "pad": True, "layout": layout}
        gathered, moved = self.x[self.tokens], self.shape.pairs * self.shape.hidden
        for what, call in (
            (
                "gathered in the call",
                lambda: quantize_both(self.x, name, gather=self.tokens, **how),
            ),
            ("gathered before", lambda: quantize_both(gathered, name, **how)),
            ("gathered by torch", lambda: quantize_both(self.x[self.tokens], name, **how)),
        ):
            yield Step(f"quantize both, {what}", call, moved * (2 + 2 * self.size))


def _each(weights: Sequence[Tensor], format: str, **how: Any) -> list[ScaledTensor]:
    return [quantize(each, format, **how) for each in weights]


def stages(layer: Layer, shape: Shape, recipe: Recipe) -> Iterator[Step]:
    """The steps of forward and backward, in order, each of what those before it made; then what
    weights take, and what gathers are measured against."""
    run = _Run(layer, shape, recipe)
    with reuse_weights():
        yield from run.forward()
        yield from run.backward()
    yield from run.of_weights()
    yield from run.gathers()


def measure_stages(
    model: str, layer: Layer, shape: Shape, name: str, recipe: Recipe, timer: Timer
) -> Iterator[Stage]:
    """Each step's time, with a cold L2, beside its floor."""
    rate = _tera(recipe, timer)
    for step in stages(layer, shape, recipe):
        took = timer.microseconds(step.call, _SHORT)
        moved = timer.copy(step.nbytes) if step.nbytes else 0.0
        yield Stage(model, name, step.what, took, max(moved, 1e-6 * step.flops / rate))


def _tera(recipe: Recipe, timer: Timer) -> float:
    """TFLOP/s of a large product of the recipe's formats."""
    x, w = (torch.randn(_DENSE, _DENSE, device=timer.device).bfloat16() for _ in range(2))
    a = quantize(x, recipe.format_of("activations").name)
    b = quantize(w, recipe.format_of("weights").name).mT
    return 2e-6 * _DENSE**3 / timer.microseconds(lambda: gemm(a, b, backend="kernel"), _SHORT)
