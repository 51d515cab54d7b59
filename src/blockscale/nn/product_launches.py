"""Products of a layer, found once for operands alike: of the parts of quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..gemm import gemm, grouped_gemm, side, sides_of_groups
from ..gemm_checks import check_grouped, check_product
from ..kernels.common.calls import Groups, describe_call
from ..kernels.common.runtime import describe, gpu_of
from ..kernels.common.template import template
from ..ops import gemm_kernels
from ..ops.gemm_operands import Side, global_scales
from ..tensor import ScaledTensor
from .quantize_launches import Parts

__all__ = ["ProductLaunch", "ProductOperand"]

_META = torch.device("meta")


class Quantizes(Protocol):
    """What quantizes an operand, see :class:`QuantizeLaunch`."""

    is_grouped: bool

    def unwritten(self, axis: int) -> Parts: ...

    def form(self, parts: Parts, axis: int, offsets: Tensor | None = None) -> ScaledTensor: ...


class ProductOperand(NamedTuple):
    """An operand of a product: what quantizes it along which axis, and whether its transpose is
    multiplied."""

    launch: Quantizes
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

    def add_to(self, out: Tensor, a: Parts, b: Parts) -> None:
        """The product, added to ``out``, wherever that lies."""
        gemm(self._a.operand(a), self._b.operand(b), out=out, accumulate=True)


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
    sides = (side(left), side(right)) if groups is None else sides_of_groups(left, right, groups)
    a, b = (Side(*each) for each in sides)
    try:
        found = gemm_kernels.lay(a, b, groups, device)
        if found is None:
            return None
        plan, laid = found
        scalars = global_scales(a.global_scale, b.global_scale)
        call = describe_call(*laid, alpha=scalars, out_dtype=out_dtype, gpu=gpu_of(device))
        call = call._replace(bias=describe(bias), device=device).grouped(groups)
        compiled = plan(call)
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
