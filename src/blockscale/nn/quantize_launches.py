"""What quantizes the operands of a layer's products, found once for operands alike.

It gives the parts of quantized matrices, as kernels write and read them. ScaledTensors of them
would take longer than the launches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import Described, describe, gpu_of
from ..kernels.quantizers import calls as quantizers
from ..memory import as_bytes
from ..ops.fused import added_up, partial_sums
from ..ops.operand_layout import OperandLayout, operand_layout
from ..ops.quantize import written_layouts
from ..quantization import PLAIN, Quantization
from ..quantize import wrap
from ..quantize_checks import Arguments, check_call
from ..tensor import ScaledTensor
from .recipe import Recipe
from .seeds import OperandSeed

__all__ = [
    "Asked",
    "Grouped",
    "GroupedLaunch",
    "MatrixLaunch",
    "Parts",
    "QuantizeLaunch",
    "parts_of_axis",
]

_META = torch.device("meta")
_SIGHTS = 64  # ways in which matrices of one shape lie


class Parts(NamedTuple):
    """Of a matrix blocked along one axis: bytes of data and scales, contiguous as the quantizer
    writes them, and the global scale."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None


class Asked(NamedTuple):
    """What is asked for of an operand: its forms along ``axes``, and what is done to ``rows`` and
    ``columns``."""

    device: torch.device
    format: Format
    scale_rounding: str | None
    axes: tuple[int, ...]
    rows: Quantization = PLAIN
    columns: Quantization = PLAIN

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        role: str,
        device: torch.device,
        *,
        rows: bool = False,
        columns: bool = False,
    ) -> Asked:
        """As the recipe says, of operands that play this role."""
        axes = (-1,) * rows + (-2,) * columns
        operand = recipe.operand(role)
        of_axes = operand.rows, operand.columns
        return cls(device, recipe.format_of(role), recipe.scale_rounding, axes, *of_axes)

    def quantization(self, axis: int) -> Quantization:
        """What is done along an axis."""
        return self.rows if axis == -1 else self.columns

    def along(self, axis: int) -> Asked:
        """The form along one axis alone."""
        return self._replace(axes=(axis,))

    @property
    def is_plain(self) -> bool:
        """Whether all that is asked for is rounded to nearest."""
        return all(self.quantization(axis) == PLAIN for axis in self.axes)

    @property
    def alike(self) -> bool:
        """Whether one read gives all that is asked for."""
        first = self.quantization(self.axes[0])
        alone = len(self.axes) == 1
        return alone or (first.hadamard is None and self.rows == self.columns)

    @property
    def layout(self) -> OperandLayout:
        """How products on the device read it."""
        return operand_layout(self.format.name, self.device)


class Grouped(NamedTuple):
    """Rows in groups, and what they are made of.

    Attributes:
        groups: how many.
        shape: of what is quantized: (rows, columns).
        gathers: rows are gathered from the input.
        producer: what makes them: a name of ``kernels.quantizers.config.PRODUCERS``.
    """

    groups: int
    shape: tuple[int, int]
    gathers: bool = False
    producer: str = "load"


class QuantizeLaunch:
    """Quantizes what lies as ``inputs``, which are described, to a tensor of ``shape``: its parts,
    which lie as ``layout`` says.

    Raises Unsupported where no kernel does it, or not by itself.
    """

    is_grouped = False

    def __init__(
        self,
        inputs: tuple[Described, ...],
        shape: tuple[int, ...],
        asked: Asked,
        layout: OperandLayout,
    ) -> None:
        (device, format, rounding, axes, *_), dtype = asked, inputs[0][2]
        (name, k_major), layouts = layout, (layout.layout,) * len(axes)
        given = Arguments(axes, format.name, rounding, layouts, pad=True, k_major=k_major)
        self._call = check_call(shape, dtype, given, self.is_grouped)
        if written_layouts(format, layouts) != layouts:
            raise Unsupported(f"layout: kernels write no {name} of {format.name}")
        self._k_major, self._device = k_major, device
        self._like = torch.empty(shape, dtype=dtype, device=_META)
        self._find = lru_cache(_SIGHTS)(self._plan)
        self._outputs = dict(zip(axes, self._find(*inputs)[0].outputs, strict=True))
        self._described = {
            axis: tuple(describe(part) for part in self.unwritten(axis)[:2]) for axis in axes
        }

    def _plan(
        self, *inputs: Described
    ) -> tuple[quantizers.QuantizePlan, quantizers.QuantizePlan | None]:
        """What quantizes, and what finds the global scale."""
        format, axes, scale_rounding, layouts = self._call
        names, scaled = tuple(each.name for each in layouts), format.has_global_scale
        plain = quantizers.Request(format.name, axes, names, scale_rounding, k_major=self._k_major)
        request, *of_groups = self._request(plain)
        where = self._device, gpu_of(self._device)
        plan = quantizers.plan_quantize(inputs, *where, request, scaled, *of_groups)
        if not scaled:
            return plan, None
        return plan, quantizers.plan_amax(inputs, *where, self._amax_request(request))

    def _amax_request(self, request: quantizers.Request) -> quantizers.Request:
        """What finds the global scale of what is asked for."""
        plain = quantizers.Request(request.format, producer=request.producer)
        return plain._replace(scaling=request.scaling)

    def _request(
        self, request: quantizers.Request
    ) -> tuple[quantizers.Request, int | None, int | None]:
        """What the quantizer is asked for, how many groups there are, and rows that it gathers."""
        return request, None, None

    def unwritten(self, axis: int) -> Parts:
        """The parts of a matrix, on meta."""
        output, scaled = self._outputs[axis], self._call.format.has_global_scale
        data, scale = (torch.empty_like(x, device=_META) for x in (output.data, output.scale))
        scalar = torch.empty((), dtype=torch.float32, device=_META) if scaled else None
        return Parts(data.view(torch.uint8), scale, scalar)

    def is_transformed(self, axis: int) -> bool:
        """Whether a transform of what it is given is quantized."""
        return False

    def is_turned(self, axis: int) -> bool:
        """Whether data lies column by column."""
        return self._outputs[axis].turned

    def form(self, parts: Parts, axis: int, offsets: Tensor | None = None) -> ScaledTensor:
        """The tensor that has these parts; ``offsets``: of its groups, if there are any."""
        output = self._outputs[axis]
        data, scale = output.shaped(parts.data.view(output.data.dtype), parts.scale)
        i = self._call.axes.index(axis)
        return wrap(self._like, self._call, i, data, scale, parts.global_scale, offsets)

    def parts_of(
        self, qdata: Tensor, qscale: Tensor, global_scale: Tensor | None, axis: int
    ) -> Parts:
        """The parts of a tensor that :func:`quantize_forms` made: its attributes."""
        data = as_bytes(qdata.mT if self._outputs[axis].turned else qdata)
        if data.dim() > len(self._described[axis][0][0]):  # a batch, written as one matrix
            data, qscale = data.flatten(0, -2), qscale.flatten(0, -2)
        return self.restored(Parts(data, qscale, global_scale), axis)

    def restored(self, parts: Parts, axis: int) -> Parts:
        """Parts that somebody else kept (hooks of saved tensors do), where kernels read them."""
        data, scale, global_scale = parts
        data_like, scale_like = self._described[axis]
        if describe(data) != data_like or data.device != self._device:
            data = self._copy(data, data_like)
        if describe(scale) != scale_like or scale.device != self._device:
            scale = self._copy(scale, scale_like)
        return Parts(data, scale, global_scale)

    @property
    def shape(self) -> torch.Size:
        """Of what is quantized."""
        return self._like.shape

    def _copy(self, x: Tensor, like: Described) -> Tensor:
        shape, _, dtype, _ = like
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(x.reshape(shape))


class MatrixLaunch(QuantizeLaunch):
    """Quantizes matrices, or batches of such, that lie as ``x``, as :func:`quantize_forms` does."""

    def __init__(self, x: Described, asked: Asked) -> None:
        shape = tuple(x[0])
        # scales of a batch have no other layout
        layout = OperandLayout("compact", k_major=True) if len(shape) > 2 else asked.layout
        super().__init__((x,), shape, asked, layout)

    def __call__(
        self, x: Tensor, global_scale: Tensor | None = None, seed: OperandSeed | None = None
    ) -> tuple[Parts | None, Parts | None]:
        """The parts along rows and along columns of ``x``, which has no gradient; nothing depends
        on a ``seed``."""
        plan, amax = self._find(describe(x))
        if amax is not None and global_scale is None:
            global_scale = amax.global_scale((x,))
        row, row_scale, column, column_scale = plan.quantize((x,), global_scale, None)
        rows = parts_of_axis(row, row_scale, global_scale)
        return rows, parts_of_axis(column, column_scale, global_scale)


class GroupedLaunch(QuantizeLaunch):
    """Quantizes grouped rows, which are made of ``inputs``."""

    is_grouped = True

    def __init__(self, inputs: tuple[Described, ...], grouped: Grouped, asked: Asked) -> None:
        if not asked.is_plain:
            raise Unsupported("quantization: groups are rounded to nearest alone")
        self._grouped = grouped
        # products of groups want columns with the contraction contiguous, whatever others do
        layout = asked.layout._replace(k_major=-2 in asked.axes)
        super().__init__(inputs, grouped.shape, asked, layout)

    def _request(
        self, request: quantizers.Request
    ) -> tuple[quantizers.Request, int | None, int | None]:
        groups, (rows, _), gathers, producer = self._grouped
        request = request._replace(producer=producer, grouped=True, gather=gathers)
        return request, groups, rows if gathers else None

    def __call__(
        self,
        inputs: tuple[Tensor, ...],
        offsets: Tensor,
        gather: Tensor | None,
        weights: Tensor | None,
    ) -> tuple[Parts | None, Parts | None, Tensor | None]:
        """The parts along rows and along columns, and the gradient of ``weights`` of rows where
        there is a gradient among the inputs. None of them has a gradient."""
        plan, amax = self._find(*map(describe, inputs))
        sums = None if weights is None or len(inputs) < 2 else partial_sums(inputs[1])
        global_scale = None if amax is None else amax.global_scale(inputs, weights)
        given = inputs, global_scale, offsets, gather, (weights, sums)
        row, row_scale, column, column_scale = plan.quantize(*given)
        of_weights = None if sums is None else added_up(sums, len(inputs[0]))
        rows = parts_of_axis(row, row_scale, global_scale)
        return rows, parts_of_axis(column, column_scale, global_scale), of_weights


def parts_of_axis(
    data: Tensor | None, scale: Tensor | None, global_scale: Tensor | None
) -> Parts | None:
    """Of what a kernel has written along an axis, if it was asked for."""
    if data is None or scale is None:
        return None
    return Parts(data.view(torch.uint8), scale, global_scale)
