"""The gradients of experts, from what a forward kept: the tokens, and the first product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import group_passes, observing
from .experts_call import Call
from .group_operands import Activated, ActivatedBackward, Operands, Rows, Source

__all__ = ["STACKS", "dgrads", "gradients"]

#: What experts hold that products make the gradients of.
STACKS = ("up", "down", "gate")
MainGrads = Mapping[str, Tensor | None]


def gradients(
    needs: tuple[bool, ...],
    call: Call,
    h: Tensor,
    grad: Source,
    main_grads: MainGrads | None = None,
) -> tuple[Tensor | None, ...]:
    """Of x, weights and what experts hold, as far as they are needed. ``h`` is the first product,
    ``grad`` has of each row that of its token's result. Those of stacks with ``main_grads`` are
    added there."""
    return _Backward(needs, call, h, grad, main_grads or {}).all()


def dgrads(needs: tuple[bool, ...]) -> tuple[bool, bool]:
    """Whether what the first product reads has a gradient, and what the second one does, given
    which of x, weights and what experts hold need theirs."""
    x, weights, up, _, up_bias, _, gate = needs[:7]
    return x, x or weights or up or up_bias or gate


class _Backward:
    def __init__(
        self,
        needs: tuple[bool, ...],
        call: Call,
        h: Tensor,
        grad: Source,
        main_grads: MainGrads,
    ):
        self.call, self.main_grads = call, main_grads
        self.needs_dx, self.needs_da = dgrads(needs)
        _, self.needs_dweights, up, down, self.needs_dup_bias, *others = needs[:7]
        self.needs_ddown_bias, gate = others
        self.needs_dup, self.needs_ddown = up or gate, down
        self.h, self.grad = h, grad
        self.row_weights = call.row_weights()

    def all(self) -> tuple[Tensor | None, ...]:
        dx = d_row_weights = up = gate = up_bias = None
        da, down = self.second_product()
        if self.needs_da:
            assert da is not None
            observing.narrow("up")
            source: Source = ActivatedBackward(
                self.call.how.activation, da, self.h, self.row_weights
            )
            del da  # the peak of memory is in what follows
            if self.needs_dup_bias:
                dh, d_row_weights = source.values()
                up_bias = self.sum_groups(dh, self.call.held.up_bias)
                source = Rows(dh)
            elif not (self.needs_dx or self.needs_dup):
                d_row_weights = source.values()[1]
            g = self.call.operands(source, "gradients", rows=self.needs_dx, columns=self.needs_dup)
            d_row_weights = g.d_row_weights if d_row_weights is None else d_row_weights
            del source
            dx, up = self.first_product(g)
        if up is not None and self.call.held.gate is not None:
            gate, up = map(self.half, ("gate", "up"), up.chunk(2, 1))
        down_bias, d_row_weights = self.second_bias(d_row_weights)
        weights = None
        if self.needs_dweights and self.row_weights is not None:
            assert d_row_weights is not None
            weights = self.call.of_pairs(d_row_weights)
        return dx, weights, up, down, up_bias, down_bias, gate

    def second_product(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of what it read, not yet times a weight, and that of its matrices."""
        call, da, down = self.call, None, None
        observing.narrow("down")
        g = call.operands(self.grad, "gradients", rows=self.needs_da, columns=self.needs_ddown)
        if g.rows is not None:
            da = group_passes.dgrad(g.rows, call.held.down, call.offsets, call.product("down"))
        if g.columns is not None:
            made = Activated(call.how.activation, self.h, self.row_weights)
            own = call.operands(made, "activations", columns=True).columns
            down = self.wgrad(g.columns, own, call.held.down.dtype, self.main_grads.get("down"))
        return da, down

    def first_product(self, g: Operands) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of tokens, and of its matrices."""
        call, dx, up = self.call, None, None
        if g.rows is not None:
            of_rows = group_passes.dgrad(g.rows, call.up, call.offsets, call.product("up"))
            dx = call.combined(of_rows, None, call.x.dtype)
            del of_rows
        if g.columns is not None:
            own = call.operands(Rows(call.x, call.tokens), "activations", columns=True).columns
            up = self.wgrad(g.columns, own, *self.of_up())
        return dx, up

    def wgrad(
        self,
        g: group_passes.Operand,
        own: group_passes.Operand,
        dtype: torch.dtype,
        main_grad: Tensor | None,
    ) -> Tensor | None:
        """The gradient of a stack; None where it is added to ``main_grad``."""
        offsets, transposed = self.call.offsets, self.call.how.transposed
        if main_grad is None:
            return group_passes.wgrad(g, own, offsets, dtype, transposed)
        group_passes.add_wgrad(main_grad, g, own, offsets, transposed)
        return None

    def of_up(self) -> tuple[torch.dtype, Tensor | None]:
        """The type of the first product's gradient, and what that is added to: nothing yet, where
        it is of two stacks, whose ``main_grad`` lie apart."""
        dtype, main_grad = self.call.held.up.dtype, self.main_grads.get("up")
        if self.call.held.gate is None:
            return dtype, main_grad
        added = main_grad is not None or self.main_grads.get("gate") is not None
        return torch.promote_types(dtype, torch.float32) if added else dtype, None

    def half(self, name: str, gradient: Tensor) -> Tensor | None:
        """That of one of two stacks; None where it is added to its ``main_grad``."""
        main_grad = self.main_grads.get(name)
        if main_grad is None:
            return gradient.to(self.call.held.up.dtype)
        main_grad.add_(gradient)
        return None

    def second_bias(self, d_row_weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of the bias, and that of pairs' weights with its part."""
        bias, made = self.call.held.down_bias, None
        if bias is None:
            return None, d_row_weights
        rows = self.grad.values()[0]
        if d_row_weights is not None and self.needs_dweights:
            own = rows * group_passes.of_rows(bias, len(self.h), self.call.offsets)
            d_row_weights = d_row_weights + own.sum(-1, dtype=d_row_weights.dtype)
        if self.needs_ddown_bias:
            if self.row_weights is not None:
                rows = rows.to(self.row_weights.dtype) * self.row_weights[:, None]
            made = self.sum_groups(rows, bias)
        return made, d_row_weights

    def sum_groups(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        return group_passes.sum_groups(rows, self.call.offsets, bias.dtype)
