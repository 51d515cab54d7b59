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
from ..nn.experts_call import Call, ExpertsConfig
from ..nn.gated import SWIGLU, exact
from ..nn.group_checks import ExpertParameters
from ..nn.group_operands import Activated, ActivatedBackward, Rows
from ..nn.recipe import Recipe
from ..nn.reuse import reuse_weights
from ..ops.operand_layout import operand_layout
from ..quantize import quantize, quantize_both
from ..routing import combine, route
from ..tensor import ScaledTensor
from . import contest
from .moe import Layer
from .moe_shapes import Shape
from .moe_work import work
from .timing import Timer

__all__ = ["Stage", "measure_stages", "stages"]

_DENSE = 8192  # rows, columns and K of the product whose rate is the floor of all
_SHORT = 10  # repeats


Step = tuple[str, contest.Call]  # what, and a call of it


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

    def __init__(self, layer: Layer, recipe: Recipe):
        self.layer, self.recipe = layer, recipe
        self.x, self.weights, self.up, self.down = (each.detach() for each in layer.leaves)
        self.routing, self.activation = layer.routing, exact(SWIGLU)
        how = ExpertsConfig(
            recipe, self.activation, layer.x.dtype, transposed=False, saved_format=None
        )
        held = ExpertParameters(self.up, self.down, None, None)
        self.call = Call.of(how, (self.x, self.weights, *held, *self.routing))
        self.row_weights = self.call.row_weights()

    def gather(self, x: Tensor, role: str, **axes: bool) -> Step:
        what = "gather + quantize, " + " and ".join(axes)
        return what, lambda: self.call.operands(Rows(x, self.call.tokens), role, **axes)

    def multiply(self, product: Callable[..., Tensor], rows: object, name: str) -> Tensor:
        return product(rows, getattr(self, name), self.call.offsets, self.call.product(name))

    def wgrad(self, what: str, g: Any, x: Any) -> Step:
        return what, partial(group_passes.wgrad, g, x, self.call.offsets, self.x.dtype)

    def forward(self) -> Iterator[Step]:
        yield "route", lambda: route(self.layer.indices, len(self.up))
        yield self.gather(self.x, "activations", rows=True)
        x = self.call.operands(Rows(self.x, self.call.tokens), "activations", rows=True).rows
        up = partial(self.multiply, group_passes.fprop, x, "up")
        yield "up", up
        self.h = up()
        made = Activated(self.activation, self.h)
        quantize_a = partial(self.call.operands, made, "activations", rows=True)
        yield "SwiGLU + quantize, rows", quantize_a
        down = partial(self.multiply, group_passes.fprop, quantize_a().rows, "down")
        yield "down", down
        given = down(), self.routing.slots, self.weights, self.x.dtype
        yield "combine", lambda: combine(*given)

    def backward(self) -> Iterator[Step]:
        """After ``forward``."""
        grad, both = self.layer.grad, {"rows": True, "columns": True}
        yield self.gather(grad, "gradients", **both)
        g = self.call.operands(Rows(grad, self.call.tokens), "gradients", **both)
        of_a = partial(self.multiply, group_passes.dgrad, g.rows, "down")
        yield "dgrad, down", of_a
        weighted = Activated(self.activation, self.h, self.row_weights)
        quantize_a = partial(self.call.operands, weighted, "activations", columns=True)
        yield "weighted SwiGLU + quantize, columns", quantize_a
        yield self.wgrad("wgrad, down", g.columns, quantize_a().columns)
        source = ActivatedBackward(self.activation, of_a(), self.h, self.row_weights)
        quantize_h = partial(self.call.operands, source, "gradients", **both)
        yield "SwiGLU backward + quantize, both", quantize_h
        g = quantize_h()
        of_x = partial(self.multiply, group_passes.dgrad, g.rows, "up")
        yield "dgrad, up", of_x
        dx = of_x()
        yield "combine, dx", lambda: combine(dx, self.routing.slots)
        yield self.gather(self.x, "activations", columns=True)
        x = self.call.operands(Rows(self.x, self.call.tokens), "activations", columns=True).columns
        yield self.wgrad("wgrad, up", g.columns, x)

    def of_weights(self) -> Iterator[Step]:
        name = self.recipe.format_of("weights").name
        for axis, what in ((-1, "rows"), (-2, "columns")):
            how: Any = {"axis": axis, "pad": True, "k_major": axis == -2}
            yield f"weights, {what}", partial(_each, (self.up, self.down), name, **how)

    def gathers(self) -> Iterator[Step]:
        """Rows and columns from one read, of rows that are gathered then, before, and by torch."""
        name = self.recipe.format_of("activations").name
        layout = operand_layout(name, self.x.device).layout
        how: Any = {"offsets": self.call.offsets, "k_major": True, "pad": True, "layout": layout}
        x, gathered = self.x, self.x[self.call.tokens]
        calls: dict[str, contest.Call] = {
            "in the call": lambda: quantize_both(x, name, gather=self.call.tokens, **how),
            "before": lambda: quantize_both(gathered, name, **how),
            "by torch": lambda: quantize_both(x[self.call.tokens], name, **how),
        }
        for when, call in calls.items():
            yield f"quantize both, gathered {when}", call


def _each(weights: Sequence[Tensor], format: str, **how: Any) -> list[ScaledTensor]:
    return [quantize(each, format, **how) for each in weights]


def stages(layer: Layer, recipe: Recipe) -> Iterator[Step]:
    """The steps that ``work`` has, each of what those before it made."""
    run = _Run(layer, recipe)
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
    bits = (recipe.format_of(role).element.bits for role in ("activations", "weights"))
    known = work(shape, *(each / 8 for each in bits))
    for what, call in stages(layer, recipe):
        took, least = timer.microseconds(call, _SHORT), known[what]
        moved = timer.copy(least.nbytes) if least.nbytes else 0.0
        yield Stage(model, name, what, took, max(moved, 1e-6 * least.flops / rate))


def _tera(recipe: Recipe, timer: Timer) -> float:
    """TFLOP/s of a large product of the recipe's formats."""
    x, w = (torch.randn(_DENSE, _DENSE, device=timer.device).bfloat16() for _ in range(2))
    a = quantize(x, recipe.format_of("activations").name)
    b = quantize(w, recipe.format_of("weights").name).mT
    return 2e-6 * _DENSE**3 / timer.microseconds(lambda: gemm(a, b, backend="kernel"), _SHORT)
