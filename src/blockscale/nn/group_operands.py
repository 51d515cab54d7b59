"""What the products of groups read: rows as they are, gathered, or made by an activation.

Each is quantized from one read of what it is made of (NVFP4's global scale takes another), and does
not exist in high precision where every product that reads it is quantized and its activation, if it
has one, is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..fused import swiglu_backward_quantize, swiglu_quantize
from ..ops.operand_layout import operand_layout
from ..quantize import quantize, quantize_both
from . import observing
from .gated import GatedActivation
from .recipe import PRODUCTS_OF, Recipe

__all__ = [
    "Activated",
    "ActivatedBackward",
    "Operands",
    "QuantizeInputs",
    "Rows",
    "Scaled",
    "Source",
    "operands",
]


class Operands(NamedTuple):
    """A matrix as products read its rows and its columns: quantized, or plain; None: not made.

    ``d_row_weights`` (R,): the gradient of weights of rows, where making them gives it, too.
    """

    rows: Any
    columns: Any
    d_row_weights: Tensor | None = None


class QuantizeInputs(NamedTuple):
    """What a kernel makes rows of, which it quantizes.

    Attributes:
        producer: a name of ``kernels.quantizers.config.PRODUCERS``.
        matrices: its inputs.
        shape: of the rows: (R, K).
        gather: int32 (R,), rows of the input, if they are gathered.
        weights: (R,) fp32, of rows, if they have some.
    """

    producer: str
    matrices: tuple[Tensor, ...]
    shape: tuple[int, int]
    gather: Tensor | None = None
    weights: Tensor | None = None


class Source(Protocol):
    """Rows (R, K), and the gradient of their weights, or None."""

    @property
    def device(self) -> torch.device: ...

    def inputs(self) -> QuantizeInputs | None:
        """What a kernel makes them of, if one does."""

    def values(self) -> tuple[Tensor, Tensor | None]: ...

    def quantize(
        self, axes: tuple[int, ...], format: str, **how: Any
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        """Along each of ``axes``; ``how``: arguments of :func:`blockscale.quantize`."""


@dataclass(slots=True)
class Rows:
    """Rows of ``x``: all of them, or those that ``gather`` names."""

    x: Tensor
    gather: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    def inputs(self) -> QuantizeInputs:
        rows = (self.x if self.gather is None else self.gather).shape[0]
        return QuantizeInputs("load", (self.x.contiguous(),), (rows, self.x.shape[1]), self.gather)

    def values(self) -> tuple[Tensor, None]:
        return self.x if self.gather is None else self.x[self.gather], None

    def quantize(
        self, axes: tuple[int, ...], format: str, **how: Any
    ) -> tuple[tuple[Any, ...], None]:
        x, how["gather"] = self.x.contiguous(), self.gather
        if len(axes) == 2:
            return quantize_both(x, format, **how), None
        return (quantize(x, format, axes[0], **how),), None


@dataclass(slots=True)
class Scaled:
    """The same values, quantized with the global scale that ``scale_of`` gives for a format."""

    source: Source
    scale_of: Callable[[str], Tensor | None]

    @property
    def device(self) -> torch.device:
        return self.source.device

    def inputs(self) -> QuantizeInputs | None:
        return self.source.inputs()

    def values(self) -> tuple[Tensor, Tensor | None]:
        return self.source.values()

    def quantize(
        self, axes: tuple[int, ...], format: str, **how: Any
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        scale = self.scale_of(format)
        if scale is not None:
            how["global_scale"] = scale
        return self.source.quantize(axes, format, **how)


@dataclass(slots=True)
class Activated:
    """``activation(h)``, times ``weights`` (R,) of its rows, if there are some."""

    activation: GatedActivation
    h: Tensor
    weights: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.h.device

    def inputs(self) -> QuantizeInputs | None:
        if not self.activation.is_fused:
            return None
        rows, columns = self.h.shape
        producer = "swiglu" if self.weights is None else "weighted_swiglu"
        h = self.h.contiguous()
        return QuantizeInputs(producer, (h,), (rows, columns // 2), None, self.weights)

    def values(self) -> tuple[Tensor, None]:
        if self.weights is None:
            return self.activation(self.h), None
        return self.activation.weighted(self.h, self.weights), None

    def quantize(
        self, axes: tuple[int, ...], format: str, **how: Any
    ) -> tuple[tuple[Any, ...], None]:
        if not self.activation.is_fused:
            return Rows(self.values()[0]).quantize(axes, format, **how)
        return swiglu_quantize(self.h, format, axes=axes, weights=self.weights, **how), None


@dataclass(slots=True)
class ActivatedBackward:
    """The gradient of ``h``, from ``grad``, that of ``Activated``, and that of its weights."""

    activation: GatedActivation
    grad: Tensor
    h: Tensor
    weights: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.h.device

    def inputs(self) -> QuantizeInputs | None:
        if not self.activation.is_fused:
            return None
        rows, columns = self.h.shape
        producer = "swiglu_backward" if self.weights is None else "weighted_swiglu_backward"
        matrices = self.h.contiguous(), self.grad
        return QuantizeInputs(producer, matrices, (rows, columns), None, self.weights)

    def values(self) -> tuple[Tensor, Tensor | None]:
        if self.weights is None:
            return self.activation.backward(self.grad, self.h), None
        return self.activation.weighted_backward(self.grad, self.h, self.weights)

    def quantize(
        self, axes: tuple[int, ...], format: str, **how: Any
    ) -> tuple[tuple[Any, ...], Tensor | None]:
        if not self.activation.is_fused:
            values, d_row_weights = self.values()
            return Rows(values).quantize(axes, format, **how)[0], d_row_weights
        given = self.grad, self.h, format
        if self.weights is None:
            return swiglu_backward_quantize(*given, axes=axes, **how), None
        *made, d_row_weights = swiglu_backward_quantize(
            *given, axes=axes, weights=self.weights, **how
        )
        return tuple(made), d_row_weights


def operands(
    source: Source,
    recipe: Recipe | None,
    role: str,
    offsets: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = False,
    columns: bool = False,
) -> Operands:
    """What is asked for of ``source`` (R, K), the ``role`` of which is "activations" or
    "gradients".

    Blocks along columns begin anew in each group. What a product reads that is not quantized is in
    ``dtype``.
    """
    asked = rows, columns
    quantized = [
        want and recipe is not None and product not in recipe.high_precision
        for want, product in zip(asked, PRODUCTS_OF[role], strict=True)
    ]
    made: list[Any] = [None, None]
    d_row_weights = None
    if list(asked) != quantized:
        values, d_row_weights = source.values()
        for i in range(2):
            if asked[i] and not quantized[i]:
                made[i] = values.to(dtype)
    if recipe is not None and any(quantized):
        axes = tuple(axis for axis, low in zip((-1, -2), quantized, strict=True) if low)
        name = recipe.format_of(role).name
        tensors, d_row_weights = source.quantize(
            axes,
            name,
            scale_rounding=recipe.scale_rounding,
            layout=operand_layout(name, source.device).layout,
            pad=True,
            offsets=offsets,
            k_major=-2 in axes,
        )
        for axis, tensor in zip(axes, tensors, strict=True):
            made[axis == -2] = tensor
        read_by = [PRODUCTS_OF[role][axis == -2] for axis in axes]
        observing.saw(role, source, **dict(zip(read_by, tensors, strict=True)))
    return Operands(made[0], made[1], d_row_weights)
