"""What a call of experts has: its tensors, how they are multiplied, and the steps that both passes
share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..routing import Routing, combine
from . import group_passes
from .gated import GatedActivation
from .group_checks import Held
from .group_launches import quantize_grouped
from .group_operands import Operands, Source, operands
from .recipe import Recipe

__all__ = ["Call", "How"]


class How(NamedTuple):
    """What does not change with the tensors."""

    recipe: Recipe | None
    activation: GatedActivation
    dtype: torch.dtype
    transposed: bool
    saved_format: str | None
    grad_enabled: bool = True


class Call(NamedTuple):
    """Tensors of a call; ``routing`` is None where rows are in the order of experts already."""

    how: How
    x: Tensor
    weights: Tensor | None
    held: Held
    routing: Routing | None
    offsets: Tensor
    tokens: Tensor | None

    @classmethod
    def of(cls, how: How, tensors: Sequence[Any]) -> Call:
        """Of what the autograd function takes: x, weights, what experts hold, and the routing."""
        x, weights, *others = tensors
        held, (pairs, slots, offsets, tokens) = Held(*others[:-4]), others[-4:]
        offsets = offsets.contiguous()  # as kernels read vectors
        if pairs is None:
            return cls(how, x, weights, held, None, offsets, None)
        routing = Routing(pairs, slots, offsets, tokens)
        return cls(how, x, weights, held, routing, offsets, tokens.contiguous())

    @property
    def up(self) -> group_passes.Weight:
        """What the first product multiplies by: one stack, or two."""
        up, gate = self.held.up, self.held.gate
        return up if gate is None else (gate, up)

    def operands(
        self, source: Source, role: str, *, rows: bool = False, columns: bool = False
    ) -> Operands:
        given = self.how.recipe, role, self.offsets
        launched = quantize_grouped(source, *given, rows=rows, columns=columns)
        if launched is not None:
            return launched
        return operands(source, *given, self.how.dtype, rows=rows, columns=columns)

    def multiply(
        self, source: Source, weight: group_passes.Weight, bias: Tensor | None, *, dgrad: bool
    ) -> Tensor:
        """The rows of ``source`` times their group's matrix, plus its bias. What is quantized for
        it is freed when it returns. ``dgrad``: a backward will multiply by the same weight."""
        rows = self.operands(source, "activations", rows=True).rows
        y = group_passes.fprop(rows, weight, self.offsets, self.product._replace(dgrad=dgrad))
        if bias is not None:
            y = (y + group_passes.of_rows(bias, len(y), self.offsets)).to(y.dtype)
        return y

    @property
    def product(self) -> group_passes.Product:
        return group_passes.Product(self.how.recipe, self.how.dtype, self.how.transposed)

    def combined(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What tokens get of the rows of ``y``; ``y``, where rows came in the experts' order."""
        if self.routing is None:
            return y.to(dtype)
        return combine(y, self.routing.slots, weights, dtype)
