"""Products like one before: a look-up finds their kernel, what is left to do is to launch it.

What ``gemm`` checks, and what its kernel needs, depends on how the operands lie and on a few other
arguments. A call that has these in common with one that a kernel ran needs neither again: most of
the time that a small product takes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels.common.calls import CompiledGemm, Groups, Operand, describe_call
from .kernels.common.gpu import Gpu
from .kernels.common.runtime import gpu_of
from .layouts import SPREADING
from .ops.gemm import check_apart, mark_written, span
from .ops.gemm_kernels import as_rows, lay, products_on
from .ops.gemm_operands import (
    Reading,
    Side,
    Take,
    detached,
    global_scales,
)
from .stored import is_per_matrix
from .tensor import ScaledTensor
from .tensor_checks import checks_values
from .watching import unwatched

__all__ = ["Call", "find_call", "forget_launches", "remember"]

_LIMIT = 4096  # calls that are remembered
_BACKENDS = ("auto", "kernel")
_DTYPES = (torch.dtype, type(None))
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

Launch = Callable[..., Tensor]
_launches: dict[Any, Launch | None] = {}  # None: no kernel by itself takes such calls
_UNKNOWN: Any = object()
_numbers = count()

#: A call that a kernel may run: what launches it, if that is known by now, operands, and a key that
#: it has in common with others like it. (A plain tuple, as it is made in each call.)
Call = tuple[Launch | None, "_Operand", "_Operand", Any]


class _Kind(NamedTuple):
    """How a quantized matrix lies that a kernel can read."""

    number: int  # stands for shape, format, strides and device: quick to look up
    reading: Reading
    take: Take


class _Operand(NamedTuple):
    """A matrix as kernels take it; kept with the quantized tensor whose parts it has views of."""

    number: int
    data: Tensor  # bytes, or bf16
    scale: Any  # None of bf16
    global_scale: Tensor | None
    qdata: Tensor | None  # what these are views of
    qscale: Tensor | None


def find_call(
    a: Any,
    b: Any,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
    backend: str,
    groups: Groups | None = None,
) -> Call | None:
    """None where a call has to go through all checks, and torch's dispatcher maybe."""
    if not unwatched() or backend not in _BACKENDS or type(out_dtype) not in _DTYPES:
        return None
    left = _operand(a, -1)
    if left is None:
        return None
    right = _operand(b, -2)
    if right is None:
        return None
    out_place = bias_place = offsets_place = grouping = None
    if groups is not None:
        offsets_place = _place(groups.offsets)
        if offsets_place is None or checks_values():
            return None
        grouping = groups.grouping
    if out is not None:
        out_place = _place(out)
        if out_place is None or out.data_ptr() % 16:
            return None
    if bias is not None:
        bias_place = _place(bias)
        if bias_place is None:
            return None
    places = out_place, bias_place, offsets_place, grouping
    key = left.number, right.number, out_dtype, not accumulate, places
    launch = _launches.get(key, _UNKNOWN)
    if launch is None:
        return None
    return None if launch is _UNKNOWN else launch, left, right, key


def remember(
    call: Call,
    sides: tuple[Side, Side],
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
    groups: Groups | None = None,
    shape: torch.Size | None = None,
) -> None:
    """Find the kernel for calls to come, after one that has passed all checks; ``shape``: of the
    product, if it is not a matrix."""
    _, left, right, key = call
    compiled = _compile(*sides, out, bias, dtype, accumulate, groups)
    if len(_launches) >= _LIMIT:
        _launches.clear()
    _launches[key] = None if compiled is None else _launch(compiled, left, right, out, bias, shape)


def _compile(
    a: Side,
    b: Side,
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
    groups: Groups | None,
) -> CompiledGemm | None:
    """What takes operands where they are; None where there is no kernel that does."""
    rows = None if out is None else as_rows(out)
    if out is not None and rows is None:
        return None
    try:
        found = lay(a, b, groups, b.data.device)
        if found is None:
            return None
        plan, laid = found
        if _copied(laid[0], a) or _copied(laid[1], b):
            return None
        described = describe_call(
            *laid,
            out=rows,
            bias=bias,
            alpha=global_scales(a.global_scale, b.global_scale),
            out_dtype=dtype,
            accumulate=accumulate,
        )
        compiled = plan(described.grouped(groups))
    except (TypeError, ValueError):  # of what has to be rewritten first
        return None
    return None if compiled.run is None else compiled


def forget_launches() -> None:
    """Find the kernel of each call anew."""
    _launches.clear()


def _copied(laid: Operand, side: Side) -> bool:
    """Whether a kernel was not given an operand where it is."""
    pairs = ((laid.data, side.data), (laid.scale, side.scale))
    return any(x.data_ptr() != y.data_ptr() for x, y in pairs if x is not None and y is not None)


def _place(x: Any) -> tuple[Any, ...] | None:
    """How ``x`` lies; None of what is no plain tensor or has a gradient."""
    if type(x) not in _PLAIN or (x.requires_grad and torch.is_grad_enabled()):
        return None
    return x.shape, x.stride(), x.dtype, x.device


def _operand(q: Any, axis: int) -> _Operand | None:
    """None of what a kernel cannot read as it is."""
    if type(q) is not ScaledTensor:
        return _plain(q) if axis == -1 else None
    data, scale, scalar = q.qdata, q.qscale, q.global_scale
    kept: _Operand | None = q._operand
    if (
        kept is not None
        and kept.qdata is data
        and kept.qscale is scale
        and kept.global_scale is scalar
        and kept.data.data_ptr() == data.data_ptr()  # not given other memory since
        and kept.scale.data_ptr() == scale.data_ptr()
    ):
        return kept
    if q.axis != axis or type(data) is not Tensor:
        return None
    if q.offsets is not None and not q.k_grouped and q.layout_name in SPREADING:
        return None
    kind = _kind(
        gpu_of(data.device),
        axis,
        q.format_name,
        q.layout_name,
        q.shape,
        (data.stride(), scale.stride(), None if scalar is None else scalar.shape),
        data.device,
        q.k_grouped,
    )
    if kind is None or (scalar is not None and not _kernel_takes(scalar, q.shape)):
        return None
    number, reading, take = kind
    if data.data_ptr() % reading.data_apart or scale.data_ptr() % reading.scale_apart:
        return None
    octets = data if data.dtype is torch.uint8 else data.view(torch.uint8)
    made = _Operand._make((number, *take(octets, scale), scalar, data, scale))
    q._operand = made
    return made


def _kernel_takes(global_scale: Tensor, shape: torch.Size) -> bool:
    """Whether kernels take it as it is."""
    if not global_scale.dim():
        return True
    return is_per_matrix(global_scale, shape) and global_scale.stride(-1) == 1


@lru_cache(maxsize=4096)
def _kind(
    gpu: Gpu | None,
    axis: int,
    format: str,
    layout: str,
    shape: torch.Size,
    memory_format: tuple[tuple[int, ...], tuple[int, ...], torch.Size | None],
    device: torch.device,
    k_grouped: bool,
) -> _Kind | None:
    """``memory_format``: strides of data and scales, and the shape of the global scale. The latter
    and ``k_grouped`` are a part of the key alone: other kernels are compiled for them."""
    strides = memory_format[:2]
    products = products_on(device)
    if isinstance(products, str):
        return None
    readings = {2: products.readings, 3: products.grouped and products.grouped.readings}
    reading = (readings.get(len(shape)) or {}).get((format, axis))
    if reading is None or reading.layout != layout:
        return None
    if reading.scale_stride not in (None, strides[1]):
        return None
    take = reading.taken(shape, strides[0])
    return None if take is None else _Kind(next(_numbers), reading, take)


def _plain(x: Any) -> _Operand | None:
    place = _place(x)
    if place is None or x.dtype != torch.bfloat16 or x.data_ptr() % 16:
        return None
    rows = detached(x)
    if x.dim() == 3:  # of equal groups
        if x.stride(0) != x.shape[1] * x.stride(1):
            return None
        rows = rows.flatten(0, 1)
    return _Operand._make((_plain_number(place), rows, None, None, None, None))


@lru_cache(maxsize=4096)
def _plain_number(place: tuple[Any, ...]) -> int:
    return next(_numbers)


def _launch(
    compiled: CompiledGemm,
    a: _Operand,
    b: _Operand,
    out: Tensor | None,
    bias: Tensor | None,
    shape: torch.Size | None,
) -> Launch:
    """What launches a kernel, given operands, output and bias that lie as these do."""
    run, like, rest = compiled.run, compiled.out, compiled.rest
    assert run is not None  # else there is nothing to launch
    out_span = 0 if out is None else span(out)
    spans = [0 if x is None else span(x) for x in (a.data, a.scale, b.data, b.scale, bias)]

    def launch(
        a: _Operand, b: _Operand, out: Tensor | None, bias: Tensor | None, *offsets: Tensor
    ) -> Tensor:
        if out is None:
            result = written = torch.empty_like(like)
            if shape is not None:
                result = written.view(shape)
        else:
            given = a.data, a.scale, b.data, b.scale, bias, *offsets
            check_apart(out, out_span, given, [*spans, *(x.nbytes for x in offsets)])
            mark_written(out)
            result, written = out, detached(out)
            if shape is not None:
                written = written.flatten(0, 1)
        run(
            a.data,
            a.scale,
            b.data,
            b.scale,
            written,
            None if bias is None else detached(bias),
            global_scales(a.global_scale, b.global_scale),
            *offsets,
            *rest,
        )
        return result

    return launch
