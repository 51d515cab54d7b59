"""What a call of experts has: its tensors, how they are multiplied, and the steps that both passes
share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import ops
from ..routing import Routing
from . import group_passes, observing
from .gated import GatedActivation
from .group_checks import ExpertParameters
from .group_launches import Launches
from .group_operands import Operands, Rows, Source, operands
from .recipe import Recipe

__all__ = ["Call", "ExpertsConfig", "Peers"]


class ExpertsConfig(NamedTuple):
    """How experts multiply: what does not change with the tensors."""

    recipe: Recipe | None
    activation: GatedActivation
    dtype: torch.dtype
    transposed: bool
    saved_format: str | None
    grad_enabled: bool = True


class Peers(Protocol):
    """Ranks that share experts. Each has tokens of its own, and rows of all ranks' tokens."""

    def combine(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What this rank's tokens get of the rows of all ranks."""

    def of_pairs(self, of_rows: Tensor) -> Tensor:
        """Of each pair of this rank's tokens what its row has, wherever that is."""

    def agree(self, source: Source) -> Source:
        """The same rows, quantized with the global scale of those of all ranks."""

    def weight_scale(self, name: str) -> Tensor | None:
        """The global scale of all ranks' "up" or "down", where the format has one."""


class Call(NamedTuple):
    """Tensors of a call; ``routing`` is None where rows are in the order of experts already.

    With ``peers`` x and weights are those of all ranks' tokens that have an expert here.
    """

    how: ExpertsConfig
    x: Tensor
    weights: Tensor | None
    held: ExpertParameters
    routing: Routing | None
    offsets: Tensor
    tokens: Tensor | None
    launches: Launches | None = None
    peers: Peers | None = None

    @classmethod
    def of(
        cls, how: ExpertsConfig, tensors: Sequence[Any], launches: Launches | None = None
    ) -> Call:
        """Of what the autograd function takes: x, weights, what experts hold, and the routing."""
        x, weights, *others = tensors
        of_routing = len(Routing._fields)
        held, (pairs, slots, offsets, tokens) = (
            ExpertParameters(*others[:-of_routing]),
            others[-of_routing:],
        )
        offsets = offsets.contiguous()  # as kernels read vectors
        if pairs is None:
            return cls(how, x, weights, held, None, offsets, None, launches)
        routing = Routing(pairs, slots, offsets, tokens)
        return cls(how, x, weights, held, routing, offsets, tokens.contiguous(), launches)

    @property
    def up(self) -> group_passes.Weight:
        """What the first product multiplies by: one stack, or two."""
        up, gate = self.held.up, self.held.gate
        return up if gate is None else (gate, up)

    def operands(
        self, source: Source, role: str, *, rows: bool = False, columns: bool = False
    ) -> Operands:
        made = d_row_weights = None
        if self.peers is not None:
            source = self.peers.agree(source)
        if self.launches is not None and (rows or columns):
            inputs = source.inputs()
            if inputs is None:
                values, d_row_weights = source.values()
                source = Rows(values)
                inputs = source.inputs()
            made = self.launches.quantize(inputs, role, self.offsets, rows=rows, columns=columns)
        if made is None:
            given = self.how.recipe, role, self.offsets, self.how.dtype
            made = operands(source, *given, rows=rows, columns=columns)
        return made if d_row_weights is None else made._replace(d_row_weights=d_row_weights)

    def multiply(self, source: Source, name: str, *, dgrad: bool) -> Tensor:
        """The rows of ``source`` times their group's matrix of "up" or "down", plus its bias. What
        is quantized for it is freed when it returns. ``dgrad``: a backward will multiply by the
        same weight."""
        observing.narrow(name)
        held = self.held
        weight, bias = {"up": (self.up, held.up_bias), "down": (held.down, held.down_bias)}[name]
        rows = self.operands(source, "activations", rows=True).rows
        y = group_passes.fprop(rows, weight, self.offsets, self.product(name, dgrad=dgrad))
        if bias is not None:
            y = (y + group_passes.of_rows(bias, len(y), self.offsets)).to(y.dtype)
        return y

    def product(self, name: str, *, dgrad: bool = False) -> group_passes.Product:
        how, scale = self.how, None if self.peers is None else self.peers.weight_scale(name)
        return group_passes.Product(how.recipe, how.dtype, how.transposed, dgrad, scale)

    def combined(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What tokens get of the rows of ``y``; ``y``, where rows came in the experts' order."""
        if self.peers is not None:
            return self.peers.combine(y, weights, dtype)
        if self.routing is None:
            return y.to(dtype)
        return ops.combine(y, self.routing.slots, weights, dtype)

    def row_weights(self) -> Tensor | None:
        """Of each row, in fp32 at least, if rows are of pairs."""
        if self.weights is None or self.routing is None:
            return None
        wide = torch.promote_types(self.how.dtype, torch.float32)
        return torch.take(self.weights.detach(), self.routing.pairs.long()).to(wide)

    def of_pairs(self, d_row_weights: Tensor) -> Tensor:
        """The gradient of weights, from that of each row's."""
        assert self.weights is not None
        if self.peers is not None:
            return self.peers.of_pairs(d_row_weights)
        assert self.routing is not None
        return torch.take(d_row_weights, self.routing.slots.long()).to(self.weights.dtype)
