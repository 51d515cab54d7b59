"""RMSNorm and LayerNorm with the same bits on every machine, which quantizers have in front."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops, reference
from ..fused import check_norm, layernorm_quantize, rmsnorm_quantize
from ..tensor import ScaledTensor
from ..watching import is_transformed, refuse_tangents
from .double_backward import refuse_double_backward
from .linear import check_dtype, check_whole

__all__ = ["LayerNorm", "Norm", "RMSNorm"]


class Norm(NamedTuple):
    """How rows are normalized: ``centered`` is LayerNorm."""

    eps: float
    centered: bool

    def values(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        """Rows of ``x`` (..., K), normalized; then mean, if centered, and rstd."""
        if not is_transformed():  # which know no ops
            return ops.norm(x, weight, bias, self.eps, self.centered)
        if self.centered:
            return list(reference.layernorm(x, weight, bias, self.eps))
        return list(reference.rmsnorm(x, weight, self.eps))

    def quantize(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, format: str, **how: Any
    ) -> tuple[list[ScaledTensor], tuple[Tensor | None, Tensor]]:
        """The same quantized, along each of ``axes`` of ``how``; mean and rstd."""
        if self.centered:
            *made, mean, rstd = layernorm_quantize(x, weight, bias, format, eps=self.eps, **how)
            return made, (mean, rstd)
        *made, rstd = rmsnorm_quantize(x, weight, format, eps=self.eps, **how)
        return made, (None, rstd)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        statistics: tuple[Tensor | None, Tensor],
        bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of x, weight and bias, from that of the rows, in fp32 until they are rounded
        once."""
        mean, rstd = statistics
        if not is_transformed():
            found = ops.norm_backward(grad, x, weight, mean, rstd, bias_dtype)
            return found[0], found[1], found[2] if bias_dtype is not None else None
        if mean is None:
            return *reference.rmsnorm_backward(grad, x, weight, rstd), None
        *found, of_bias = reference.layernorm_backward(grad, x, weight, mean, rstd)
        return found[0], found[1], None if bias_dtype is None else of_bias.to(bias_dtype)


class _Normalize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Any, ...]:
        y, *mean, rstd = norm.values(x, weight, bias)
        return y, mean[0] if mean else None, rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight, bias, ctx.norm = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(*(each for each in (mean, rstd) if each is not None))
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, *statistics = ctx.saved_tensors
        with torch.no_grad():
            found = ctx.norm.backward(grad, x, weight, tuple(statistics), ctx.bias_dtype)
        return *refuse_double_backward(found, grad, x, weight), None


def _normalize(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    for name, each in (("x", x), ("weight", weight)):
        check_whole(name, each)
    check_dtype("x", x)
    check_norm(x, weight, bias, norm.eps)
    refuse_tangents("norms of blockscale have", x, weight, bias, remedy=", or take torch's")
    if not x.numel():  # which no rows are made of
        bias = None if bias is None else bias.to(x.dtype)
        rows = (x.shape[-1],)
        if norm.centered:
            y = torch.nn.functional.layer_norm(x, rows, weight.to(x.dtype), bias, norm.eps)
        else:
            y = torch.nn.functional.rms_norm(x, rows, weight.to(x.dtype), norm.eps)
        return y.to(x.dtype)
    y = _Normalize.apply(x, weight, bias, norm)[0]
    return y


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm of the last dimension, with the bits of :func:`rmsnorm_quantize`.

    >>> y = bs.nn.RMSNorm(512)(torch.randn(8, 512))

    Each row is squared, summed, multiplied and rounded as "Fused producers" in the numerics says,
    on every machine, in fp32; the result is rounded once, to the dtype of ``x``, also under
    torch.autocast. Parameters and state_dict are those of torch.nn.RMSNorm. Gradients are sums in
    fp32, rounded once. It is the first part of :class:`RMSNormLinear`, whose kernel is faster.

    Raises ValueError or TypeError as :func:`blockscale.rmsnorm_quantize`, and NotImplementedError
    for second derivatives and forward-mode differentiation.

    Source: Zhang and Sennrich, "Root mean square layer normalization", arXiv 1910.07467.
    """

    eps: float

    def __init__(
        self,
        features: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, eps, True, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(x, self.weight, None, Norm(self.eps, False))


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm of the last dimension, with the bits of :func:`layernorm_quantize`.

    >>> y = bs.nn.LayerNorm(512)(torch.randn(8, 512))

    As :class:`RMSNorm`; ``bias``: whether there is one. It is the first part of
    :class:`LayerNormLinear`.

    Source: Ba, Kiros and Hinton, "Layer normalization", arXiv 1607.06450.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, eps, True, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _normalize(x, self.weight, self.bias, Norm(self.eps, True))
