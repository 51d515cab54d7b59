"""Activations of experts that multiply two halves: SwiGLU, and what models made of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference

__all__ = ["SWIGLU", "GatedActivation", "exact"]


@dataclass(frozen=True)
class GatedActivation:
    """``gate * sigmoid(alpha * gate) * (up + shift)`` of the halves of ``h`` (..., 2I).

    >>> bs.nn.GatedActivation()  # SwiGLU
    GatedActivation(alpha=1.0, limit=None, shift=0.0, interleaved=False)
    >>> gpt_oss = bs.nn.GatedActivation(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)

    Args:
        alpha: what the gate is multiplied by in the sigmoid.
        limit: the gate is at most that, and ``up`` between minus that and that; None: any number.
        shift: added to ``up``.
        interleaved: the gate is in every other column from the first on, ``up`` in those between;
            else the gate is in the first I columns, ``up`` in the others.

    All in fp32 (float64 of float64), rounded once to the type of ``h``. Where products are
    quantized SwiGLU is ``swiglu_quantize``'s, to the bit.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    interleaved: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        gate, up = self._limited(h)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)).to(h.dtype)

    def backward(self, grad: Tensor, h: Tensor) -> Tensor:
        """The gradient of ``h``, like it, from that of the result."""
        gate, up = self._limited(h)
        grad, sigmoid = grad.to(gate.dtype), torch.sigmoid(self.alpha * gate)
        of_gate = grad * (up + self.shift) * sigmoid * (1 + self.alpha * gate * (1 - sigmoid))
        of_up = grad * gate * sigmoid
        if self.limit is not None:
            raw_gate, raw_up = self._halves(h)
            of_gate = of_gate.masked_fill(raw_gate > self.limit, 0)
            of_up = of_up.masked_fill(raw_up.abs() > self.limit, 0)
        both = of_gate, of_up
        joined = torch.stack(both, -1).flatten(-2) if self.interleaved else torch.cat(both, -1)
        return joined.to(h.dtype)

    def weighted(self, h: Tensor, weights: Tensor) -> Tensor:
        """The activation, rounded, of each row times its weight of ``weights`` (R,)."""
        return (self(h).to(weights.dtype) * weights[:, None]).to(h.dtype)

    def weighted_backward(self, grad: Tensor, h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``h`` and, (R,), of ``weights``, from that of ``weighted``."""
        wide = grad.to(weights.dtype)
        of_weights = (wide * self(h).to(weights.dtype)).sum(-1)
        return self.backward((wide * weights[:, None]).to(h.dtype), h), of_weights

    @property
    def is_fused(self) -> bool:
        """Whether quantizers make it, to the bit, of what they read."""
        return False

    def _halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        wide = h.to(torch.promote_types(h.dtype, torch.float32))
        if self.interleaved:
            return wide[..., ::2], wide[..., 1::2]
        gate, up = wide.chunk(2, -1)
        return gate, up

    def _limited(self, h: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self._halves(h)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate, up


SWIGLU = GatedActivation()


@dataclass(frozen=True)
class _Exact(GatedActivation):
    """SwiGLU, the same bits on every machine."""

    def __call__(self, h: Tensor) -> Tensor:
        return reference.swiglu(h)

    def backward(self, grad: Tensor, h: Tensor) -> Tensor:
        return reference.swiglu_backward(grad, h)

    def weighted_backward(self, grad: Tensor, h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return reference.weighted_swiglu_backward(grad, h, weights)

    @property
    def is_fused(self) -> bool:
        return True


def exact(activation: GatedActivation) -> GatedActivation:
    """The same activation, or, of SwiGLU, that which fused quantizers have."""
    return _Exact() if activation == SWIGLU else activation
