"""What the passes of a layer launch: quantizers and products, found once for operands alike.

They take and give the parts of quantized matrices, as kernels write and read them. ScaledTensors
of them would take longer than the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Format
from ..gemm import gemm, side
from ..gemm_checks import check_product
from ..kernels.common.calls import describe_call
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import Described, describe, gpu_of
from ..kernels.common.template import template
from ..kernels.quantizers import calls as quantizers
from ..memory import as_bytes
from ..ops import gemm_kernels
from ..ops.gemm_operands import Side, global_scales
from ..ops.operand_layout import operand_layout
from ..ops.quantize import written_layouts
from ..quantize import wrap
from ..quantize_checks import Arguments, check_call
from ..tensor import ScaledTensor

__all__ = ["Parts", "ProductLaunch", "QuantizeLaunch", "Source"]

_META = torch.device("meta")
_SIGHTS = 64  # ways in which matrices of one shape lie


class Parts(NamedTuple):
    """Of a matrix blocked along one axis: bytes of data and scales, contiguous as the quantizer
    writes them, and the global scale."""

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None


class QuantizeLaunch:
    """Quantizes matrices that have the shape and dtype of ``x``, as :func:`quantize_forms` does.

    ``x`` is described. Raises Unsupported where no kernel does it, or not by itself.
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
    ) -> None:
        shape, _, dtype, _ = x
        axes = (-1,) * rows + (-2,) * columns
        layout, k_major = operand_layout(format.name, device)
        layouts = (layout,) * len(axes)
        asked = Arguments(axes, format.name, scale_rounding, layouts, pad=True, k_major=k_major)
        self._call = check_call(tuple(shape), dtype, asked)
        if written_layouts(format, layouts) != layouts:
            raise Unsupported(f"layout: kernels write no {layout} of {format.name}")
        self._k_major, self._device = k_major, device
        self._like = torch.empty(tuple(shape), dtype=dtype, device=_META)
        self._find = lru_cache(_SIGHTS)(self._plan)
        self._outputs = dict(zip(axes, self._find(x)[0].outputs, strict=True))
        self._described = {
            axis: tuple(describe(part) for part in self.unwritten(axis)[:2]) for axis in axes
        }

    def _plan(self, x: Described) -> tuple[quantizers.QuantizePlan, quantizers.QuantizePlan | None]:
        """What quantizes, and what finds the global scale."""
        format, axes, scale_rounding, layouts = self._call
        scaled = format.has_global_scale
        names = tuple(each.name for each in layouts)
        asked = quantizers.Request(format.name, axes, names, scale_rounding, k_major=self._k_major)
        where = self._device, gpu_of(self._device)
        plan = quantizers.plan_quantize((x,), *where, asked, scaled, None)
        if not scaled:
            return plan, None
        return plan, quantizers.plan_amax((x,), *where, quantizers.Request(format.name))

    def __call__(
        self, x: Tensor, global_scale: Tensor | None = None
    ) -> tuple[Parts | None, Parts | None]:
        """The parts along rows and along columns of ``x``, which has no gradient."""
        plan, amax = self._find(describe(x))
        if amax is not None and global_scale is None:
            global_scale = amax.global_scale((x,))
        row, row_scale, column, column_scale = plan.quantize((x,), global_scale, None)
        rows = columns = None
        if row is not None:
            rows = Parts(row.view(torch.uint8), row_scale, global_scale)
        if column is not None:
            columns = Parts(column.view(torch.uint8), column_scale, global_scale)
        return rows, columns

    def unwritten(self, axis: int) -> Parts:
        """The parts of a matrix, on meta."""
        output, scaled = self._outputs[axis], self._call.format.has_global_scale
        data, scale = (torch.empty_like(x, device=_META) for x in (output.data, output.scale))
        scalar = torch.empty((), dtype=torch.float32, device=_META) if scaled else None
        return Parts(data.view(torch.uint8), scale, scalar)

    def form(self, parts: Parts, axis: int) -> ScaledTensor:
        """The tensor that has these parts."""
        output = self._outputs[axis]
        data, scale = output.shaped(parts.data.view(output.data.dtype), parts.scale)
        i = self._call.axes.index(axis)
        return wrap(self._like, self._call, i, data, scale, parts.global_scale, None)

    def parts_of(
        self, qdata: Tensor, qscale: Tensor, global_scale: Tensor | None, axis: int
    ) -> Parts:
        """The parts of a tensor that :func:`quantize_forms` made: its attributes."""
        data = as_bytes(qdata.mT if self._outputs[axis].turned else qdata)
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

    def _copy(self, x: Tensor, like: Described) -> Tensor:
        shape, _, dtype, _ = like
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(x.reshape(shape))


class Source(NamedTuple):
    """An operand of a product: what quantizes it along which axis, and whether its transpose is
    multiplied."""

    launch: QuantizeLaunch
    axis: int
    turned: bool = False

    def operand(self, parts: Parts) -> ScaledTensor:
        """As :func:`blockscale.gemm` takes it."""
        form = self.launch.form(parts, self.axis)
        return form.mT if self.turned else form


class _View(NamedTuple):
    """What a kernel is given of a part; ``copied``: row by row, where it lies otherwise."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    copied: bool = False


class ProductLaunch:
    """Multiplies parts of ``a`` and ``b``, as :func:`blockscale.gemm` does, to ``shape``.

    ``bias`` is one of those that may be added, or None. Raises ValueError or TypeError as ``gemm``.
    """

    def __init__(
        self,
        a: Source,
        b: Source,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        shape: Sequence[int],
        device: torch.device,
    ) -> None:
        self._a, self._b, self._out_dtype, self._shape = a, b, out_dtype, tuple(shape)
        self._like = template(shape, out_dtype, device)
        parts = [each.launch.unwritten(each.axis) for each in (a, b)]
        left, right = (each.operand(x) for each, x in zip((a, b), parts, strict=True))
        added = None if bias is None else torch.empty_like(bias, device=_META)
        check_product(left, right, out_dtype, None, False, added, "auto")
        matrix = left.shape[0], right.shape[1]
        self._matrix = None if matrix == self._shape else matrix
        self._launch = _find_kernel(left, right, parts, bias, out_dtype, device)

    def __call__(self, a: Parts, b: Parts, bias: Tensor | None = None) -> Tensor:
        """The product; ``bias`` has no gradient."""
        if self._launch is None:
            product = gemm(self._a.operand(a), self._b.operand(b), self._out_dtype, bias=bias)
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
            *rest,
        )
        return product


def _seen(part: Tensor, view: _View) -> Tensor:
    dtype, shape, stride, copied = view
    if dtype is not part.dtype:
        part = part.view(dtype)
    seen = part.as_strided(shape, stride)
    return seen.contiguous() if copied else seen


def _find_kernel(
    left: ScaledTensor,
    right: ScaledTensor,
    parts: Sequence[Parts],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    device: torch.device,
) -> tuple[Callable[..., Any], tuple[Any, ...], Sequence[_View | None]] | None:
    """The kernel, its last arguments, and how it sees the parts; None where one kernel by itself
    cannot multiply them as they are. The operands are on meta, where no copy costs anything."""
    products = gemm_kernels.products_on(device)
    a, b = Side(*side(left)), Side(*side(right))
    if isinstance(products, str) or (a.format, b.format) not in products.pairs:
        return None
    try:
        laid = products.lay(a, b)
        scalars = global_scales(a.global_scale, b.global_scale)
        call = describe_call(*laid, alpha=scalars, out_dtype=out_dtype, gpu=gpu_of(device))
        compiled = products.plan(call._replace(bias=describe(bias), device=device))
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
    whole = scale.ndim == 2 and scale.dtype == x.dtype == torch.uint8 and scale.is_contiguous()
    return whole and x.is_contiguous() and x.shape == scale.mT.shape


def _memory(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset()


def _view(x: Tensor, part: Tensor) -> _View | None:
    """How ``x`` is made of a part in the same memory; None where it is the part."""
    how = _View(x.dtype, x.shape, x.stride())
    return None if how == (part.dtype, part.shape, part.stride(), False) else how
