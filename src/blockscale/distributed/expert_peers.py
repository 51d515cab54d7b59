"""Ranks that share experts: what each sends of its tokens, and gets back of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..formats import get_format
from ..nn.experts_call import Call, ExpertsConfig
from ..nn.group_checks import ExpertParameters
from ..nn.group_operands import QuantizeInputs, Rows, Scaled, Source
from ..nn.operand import Operand
from ..nn.recipe import Recipe
from ..routing import Routing, route
from ..tensor import ScaledTensor
from .collectives import all_to_all
from .quantizer import Quantizer
from .token_dispatch import Dispatched

__all__ = ["ExpertPeers"]


@dataclass(slots=True)
class QuantizedRows:
    """Rows of ``x``, which came quantized by rows; a source of what products read."""

    x: ScaledTensor
    gather: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device

    def inputs(self) -> QuantizeInputs | None:
        return None

    def values(self) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("no product in high precision reads rows that are sent quantized")

    def quantize(
        self, axes: tuple[int, ...], format: str, **how: Any
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        assert axes == (-1,)
        x, shape = self.x, (len(self.gather), self.x.shape[1])
        data, scale = x.qdata[self.gather], x.qscale[self.gather]
        rows = x._with(data=data, scale=scale, shape=shape, offsets=how["offsets"])
        return (rows.to_layout(how["layout"]),), None


class ExpertPeers:
    """What :class:`blockscale.nn.experts_call.Peers` asks for, of a call whose tokens have been
    dispatched.

    A rank that no token comes to has a row of zeros of no expert: so it quantizes, multiplies and
    agrees on scales as the others do.

    Args:
        tokens: with the weights of each token's experts as the only part.
        held: what this rank has of all experts' parameters.
    """

    def __init__(self, tokens: Dispatched, how: ExpertsConfig, held: ExpertParameters) -> None:
        self.tokens, self.how = tokens, how
        count, experts = sum(tokens.results_sent), tokens.experts
        self.weights = _or_zeros(tokens.parts[0])
        if not count:
            experts = experts.new_full(self.weights.shape, -1)
        pairs, slots, offsets, of_rows = route(experts, len(held.up))
        rows = slice(max(count, 1))  # those after it are of experts on other ranks
        self.order = pairs[:count].argsort()  # as results travel: by token, as it names its experts
        self.routing = Routing(pairs[rows], slots, offsets, of_rows[rows])
        recipe, self.scales = how.recipe, dict[str, Tensor | None]()
        if recipe is not None:
            name = recipe.format_of("weights").name
            for weight in ("up", "down"):
                self.scales[weight] = global_scale(getattr(held, weight), name, self.group)

    @property
    def group(self) -> Any:
        return self.tokens.group

    def call(self, x: Tensor, held: ExpertParameters) -> Call:
        """The call of this rank's experts. ``x`` has the rows that came, or this rank's own where
        only their dtype is read."""
        routing = self.routing
        given = self.how, x, self.weights, held, routing, routing.offsets, routing.tokens
        return Call(*given, peers=self)

    def send(self, x: Tensor) -> Tensor:
        """Rows of all ranks' tokens, given those of this rank's."""
        return _or_zeros(self.tokens.send(x))

    def send_quantized(self, x: Tensor, recipe: Recipe, role: str) -> QuantizedRows:
        """The same, quantized by rows."""
        tokens = self.tokens
        quantizer = Quantizer(recipe.operand(role))
        scale = quantizer.global_scale(x, self.group)
        whole = quantizer.quantize(_or_zeros(x).contiguous(), -1, scale)
        sent, columns = tokens.tokens, x.shape[1]
        data, scales = whole.qdata[sent], whole.qscale[sent]
        rows = whole._with(data=data, scale=scales, shape=(len(sent), columns))
        came = all_to_all(rows, tokens.rows_received, tokens.rows_sent, self.group)
        data, scales = _or_zeros(came.qdata), _or_zeros(came.qscale)
        came = came._with(data=data, scale=scales, shape=(len(data), columns))
        return QuantizedRows(came, self.routing.tokens)

    def rows(self, x: Tensor) -> Rows:
        return Rows(x, self.routing.tokens)

    def combine(self, y: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        results = self.tokens.return_results(y[self.order])
        return ops.combine(results, self.tokens.pairs.slots, weights, dtype)

    def of_pairs(self, of_rows: Tensor) -> Tensor:
        results = self.tokens.return_results(of_rows[self.order])
        return torch.take(results, self.tokens.pairs.slots)

    def agree(self, source: Source) -> Source:
        if isinstance(source, QuantizedRows):
            return source

        def scale_of(format: str) -> Tensor | None:
            if not get_format(format).has_global_scale:
                return None
            return global_scale(source.values()[0], format, self.group)

        return Scaled(source, scale_of)

    def weight_scale(self, name: str) -> Tensor | None:
        return self.scales.get(name)


def global_scale(x: Tensor, format: str, group: dist.ProcessGroup) -> Tensor | None:
    """Ranks find the global scale of what all of them have, if the format has one."""
    return Quantizer(Operand(format, None)).global_scale(x, group)


def _or_zeros(rows: Tensor) -> Tensor:
    """One row of zeros where there are none: products want some."""
    return rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])
