"""What the passes of a layer launch: quantizers and products, found once for operands alike.

They take and give the parts of quantized matrices, as kernels write and read them. ScaledTensors
of them would take longer than the launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..gemm import gemm, grouped_gemm, side, sides_of_groups
from ..gemm_checks import check_grouped, check_product
from ..kernels.common.calls import Groups, describe_call
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import Described, describe, gpu_of
from ..kernels.common.template import template
from ..kernels.quantizers import calls as quantizers
from ..memory import as_bytes
from ..ops import gemm_kernels
from ..ops.fused import added_up, partial_sums
from ..ops.gemm_operands import GroupedProducts, Products, Side, global_scales
from ..ops.operand_layout import operand_layout
from ..ops.quantize import written_layouts
from ..quantize import wrap
from ..quantize_checks import Arguments, check_call
from ..tensor import ScaledTensor

__all__ = ["Grouped", "Parts", "ProductLaunch", "ProductOperand", "QuantizeLaunch"]

_META = torch.device("meta")
_SIGHTS = 64  # ways in which matrices of one shape lie


class Parts(NamedTuple):
    """Of a matrix blocked along one axis: bytes of data and scales, contiguous as the quantizer
    writes them, and the global scale."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None


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
    """Quantizes matrices that have the shape and dtype of ``x``, or batches of such, as
    :func:`quantize_forms` does; with ``grouped`` what is made of ``x`` and ``others``.

    Inputs are described. Raises Unsupported where no kernel does it, or not by itself.
    """

    def __init__(
        self,
        x: Described,
        device: torch.device,
        format: Format,
        scale_rounding: str | None,
        *,
        rows: bool,
        columns: bool,
        grouped: Grouped | None = None,
        others: tuple[Described, ...] = (),
    ) -> None:
        shape, dtype = tuple(x[0] if grouped is None else grouped.shape), x[2]
        axes = (-1,) * rows + (-2,) * columns
        layout, k_major = operand_layout(format.name, device)
        if len(shape) > 2:  # scales of a batch have no other layout
            layout, k_major = "compact", True
        elif grouped is not None:  # as products of groups want columns
            k_major = columns
        layouts = (layout,) * len(axes)
        asked = Arguments(axes, format.name, scale_rounding, layouts, pad=True, k_major=k_major)
        self._call = check_call(shape, dtype, asked, grouped is not None)
        if written_layouts(format, layouts) != layouts:
            raise Unsupported(f"layout: kernels write no {layout} of {format.name}")
        self._k_major, self._device, self._grouped = k_major, device, grouped
        self._like = torch.empty(shape, dtype=dtype, device=_META)
        self._find = lru_cache(_SIGHTS)(self._plan)
        self._outputs = dict(zip(axes, self._find(x, *others)[0].outputs, strict=True))
        self._described = {
            axis: tuple(describe(part) for part in self.unwritten(axis)[:2]) for axis in axes
        }

    def _plan(
        self, *inputs: Described
    ) -> tuple[quantizers.QuantizePlan, quantizers.QuantizePlan | None]:
        """What quantizes, and what finds the global scale."""
        format, axes, scale_rounding, layouts = self._call
        scaled, grouped = format.has_global_scale, self._grouped
        names = tuple(each.name for each in layouts)
        asked = quantizers.Request(format.name, axes, names, scale_rounding, k_major=self._k_major)
        of_groups: tuple[int | None, int | None] = None, None
        if grouped is not None:
            groups, (rows, _), gathers, producer = grouped
            asked = asked._replace(producer=producer, grouped=True, gather=gathers)
            of_groups = groups, rows if gathers else None
        where = self._device, gpu_of(self._device)
        plan = quantizers.plan_quantize(inputs, *where, asked, scaled, *of_groups)
        if not scaled:
            return plan, None
        of_amax = quantizers.Request(format.name, producer=asked.producer)
        return plan, quantizers.plan_amax(inputs, *where, of_amax)

    def __call__(
        self, x: Tensor, global_scale: Tensor | None = None
    ) -> tuple[Parts | None, Parts | None]:
        """The parts along rows and along columns of ``x``, which has no gradient."""
        plan, amax = self._find(describe(x))
        if amax is not None and global_scale is None:
            global_scale = amax.global_scale((x,))
        row, row_scale, column, column_scale = plan.quantize((x,), global_scale, None)
        return _parts(row, row_scale, global_scale), _parts(column, column_scale, global_scale)

    def quantize_groups(
        self,
        inputs: tuple[Tensor, ...],
        offsets: Tensor,
        gather: Tensor | None,
        weights: Tensor | None,
    ) -> tuple[Parts | None, Parts | None, Tensor | None]:
        """The same of grouped rows, made of ``inputs`` and ``weights`` of rows, and the gradient of
        these where there is a gradient among the inputs. None of them has a gradient."""
        plan, amax = self._find(*map(describe, inputs))
        sums = None if weights is None or len(inputs) < 2 else partial_sums(inputs[1])
        global_scale = None if amax is None else amax.global_scale(inputs, weights)
        given = inputs, global_scale, offsets, gather, (weights, sums)
        row, row_scale, column, column_scale = plan.quantize(*given)
        of_weights = None if sums is None else added_up(sums)[: len(inputs[0])]
        rows = _parts(row, row_scale, global_scale)
        return rows, _parts(column, column_scale, global_scale), of_weights

    def unwritten(self, axis: int) -> Parts:
        """The parts of a matrix, on meta."""
        output, scaled = self._outputs[axis], self._call.format.has_global_scale
        data, scale = (torch.empty_like(x, device=_META) for x in (output.data, output.scale))
        scalar = torch.empty((), dtype=torch.float32, device=_META) if scaled else None
        return Parts(data.view(torch.uint8), scale, scalar)

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
    def is_grouped(self) -> bool:
        return self._grouped is not None

    @property
    def shape(self) -> torch.Size:
        """Of what is quantized."""
        return self._like.shape

    def _copy(self, x: Tensor, like: Described) -> Tensor:
        shape, _, dtype, _ = like
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(x.reshape(shape))


class ProductOperand(NamedTuple):
    """An operand of a product: what quantizes it along which axis, and whether its transpose is
    multiplied."""

    launch: QuantizeLaunch
    axis: int
    turned: bool = False

    def operand(self, parts: Parts, offsets: Tensor | None = None) -> ScaledTensor:
        """As :func:`blockscale.gemm` takes it."""
        form = self.launch.form(parts, self.axis, offsets if self.launch.is_grouped else None)
        return form.mT if self.turned else form


class _View(NamedTuple):
    """What a kernel is given of a part; ``copied``: row by row, where it lies otherwise, those of a
    batch one below the other."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    copied: bool = False


class ProductLaunch:
    """Multiplies parts of ``a`` and ``b``, as :func:`blockscale.gemm` does, to ``shape``; with
    ``groups``, as :func:`blockscale.grouped_gemm`.

    ``bias`` is one of those that may be added, or None; offsets of ``groups`` are on meta. Raises
    ValueError or TypeError as these.
    """

    def __init__(
        self,
        a: ProductOperand,
        b: ProductOperand,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        shape: Sequence[int],
        device: torch.device,
        groups: Groups | None = None,
    ) -> None:
        self._a, self._b, self._out_dtype, self._shape = a, b, out_dtype, tuple(shape)
        self._like = template(shape, out_dtype, device)
        parts = [each.launch.unwritten(each.axis) for each in (a, b)]
        offsets = None if groups is None else groups.offsets
        left, right = (each.operand(x, offsets) for each, x in zip((a, b), parts, strict=True))
        if groups is None:
            added = None if bias is None else torch.empty_like(bias, device=_META)
            check_product(left, right, out_dtype, None, False, added, "auto")
        else:
            check_grouped(left, right, groups, out_dtype, None, False, "auto")
        matrix = math.prod(self._shape[:-1]), right.shape[-1]
        self._matrix = None if matrix == self._shape else matrix
        self._launch = _find_kernel(left, right, parts, bias, out_dtype, device, groups)

    def __call__(
        self, a: Parts, b: Parts, bias: Tensor | None = None, offsets: Tensor | None = None
    ) -> Tensor:
        """The product; ``bias`` has no gradient. ``offsets`` of groups, if there are any."""
        if self._launch is None:
            left, right = self._a.operand(a, offsets), self._b.operand(b, offsets)
            if offsets is not None:
                return grouped_gemm(left, right, offsets, self._out_dtype)
            product = gemm(left, right, self._out_dtype, bias=bias)
            # no view: one that an autograd.Function makes refuses in-place operations
            return torch.ops.aten._unsafe_view(product, self._shape)
        run, rest, (a_data, a_scale, b_data, b_scale) = self._launch
        product = torch.empty_like(self._like)
        run(
            a.data if a_data is None else _seen(a.data, a_data),
            a.scale if a_scale is None else _seen(a.scale, a_scale),
            b.data if b_data is None else _seen(b.data, b_data),
            b.scale if b_scale is None else _seen(b.scale, b_scale),
            product if self._matrix is None else product.view(self._matrix),
            bias,
            global_scales(a.global_scale, b.global_scale),
            *(() if offsets is None else (offsets,)),
            *rest,
        )
        return product


def _parts(data: Tensor | None, scale: Tensor | None, global_scale: Tensor | None) -> Parts | None:
    if data is None or scale is None:
        return None
    return Parts(data.view(torch.uint8), scale, global_scale)


def _seen(part: Tensor, view: _View) -> Tensor:
    dtype, shape, stride, copied = view
    if dtype is not part.dtype:
        part = part.view(dtype)
    seen = part.as_strided(shape, stride)
    return seen.contiguous().flatten(0, -2) if copied else seen


def _find_kernel(
    left: ScaledTensor,
    right: ScaledTensor,
    parts: Sequence[Parts],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    device: torch.device,
    groups: Groups | None,
) -> tuple[Callable[..., Any], tuple[Any, ...], Sequence[_View | None]] | None:
    """The kernel, its last arguments, and how it sees the parts; None where one kernel by itself
    cannot multiply them as they are. The operands are on meta, where no copy costs anything."""
    found = gemm_kernels.products_on(device)
    if isinstance(found, str):
        return None
    products: Products | GroupedProducts = found
    try:
        if groups is None:
            a, b = Side(*side(left)), Side(*side(right))
            laid = found.lay(a, b)
        else:
            products = of_groups = found.of_groups(groups.grouping)
            a, b = (Side(*each) for each in sides_of_groups(left, right, groups))
            laid = of_groups.lay(a, b, groups)
        if (a.format, b.format) not in products.pairs:
            return None
        scalars = global_scales(a.global_scale, b.global_scale)
        call = describe_call(*laid, alpha=scalars, out_dtype=out_dtype, gpu=gpu_of(device))
        call = call._replace(bias=describe(bias), device=device).grouped(groups)
        compiled = products.plan(call)
    except (TypeError, ValueError):  # of what has to be rewritten first
        return None
    if compiled.run is None:
        return None
    given = compiled.views(*laid[0][:2], *laid[1][:2])
    scales = [each.scale for each in parts]
    own = [part for each in parts for part in (each.data, each.scale)]
    views = []
    for x, part in zip(given, own, strict=True):
        if x is not None and _memory(x) == _memory(part):
            views.append(_view(x, part))
        elif x is not None and any(part is each for each in scales) and _is_turned(x, part):
            views.append(_View(part.dtype, part.mT.shape, part.mT.stride(), copied=True))
        else:
            return None
    return compiled.run, compiled.rest, views


def _is_turned(x: Tensor, scale: Tensor) -> bool:
    """Whether a copy of one-byte scales can only be their transpose, row by row: no layout that
    kernels write of these has another order of the same shape."""
    whole = scale.dtype == x.dtype == torch.uint8 and scale.is_contiguous()
    *lead, columns = scale.mT.shape
    return whole and x.is_contiguous() and x.shape == (math.prod(lead), columns)


def _memory(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset()


def _view(x: Tensor, part: Tensor) -> _View | None:
    """How ``x`` is made of a part in the same memory; None where it is the part."""
    how = _View(x.dtype, x.shape, x.stride())
    return None if how == (part.dtype, part.shape, part.stride(), False) else how
