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

from .formats import get_format
from .kernels import sm90
from .kernels.gpu.plan import describe
from .kernels.sm90.plan import Plan, plan_gemm
from .kernels.sm90.widened_config import FEW
from .kernels.sm90.widened_plan import plan_widened
from .ops.gemm import check_apart, mark_written, span
from .ops.gemm_kernels import FP8, KERNELS, WIDENED, detached, global_product
from .tensor import ScaledTensor
from .watching import unwatched

__all__ = ["Call", "find_call", "remember"]

_LIMIT = 4096  # calls that are remembered
_BACKENDS = ("auto", "kernel")
_DTYPES = (torch.dtype, type(None))
_PLAIN = frozenset({Tensor, torch.nn.Parameter})

Launch = Callable[..., Tensor]
_launches: dict[Any, Launch] = {}
_numbers = count()

#: A call that a kernel may run: what launches it, if that is known by now, operands, and a key that
#: it has in common with others like it. (A plain tuple, as it is made in each call.)
Call = tuple[Launch | None, "_Operand", "_Operand", Any]


class _Kind(NamedTuple):
    """How a quantized matrix lies that a kernel can read."""

    number: int  # stands for shape, format, strides and device: quick to look up
    turned: bool  # its scales are transposed for the kernel, as all data blocked along columns is
    loaded: bool  # its scales are loaded by TMA


class _Operand(NamedTuple):
    """A matrix as kernels take it; kept with the quantized tensor whose parts it has views of."""

    number: int
    data: Tensor  # (rows, K): bytes, or bf16
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
    out_place = bias_place = None
    if out is not None:
        out_place = _place(out)
        if out_place is None or out.data_ptr() % 16:
            return None
    if bias is not None:
        bias_place = _place(bias)
        if bias_place is None:
            return None
    key = left.number, right.number, out_dtype, not accumulate, out_place, bias_place
    return _launches.get(key), left, right, key


def remember(
    call: Call,
    a: Tensor,
    b: ScaledTensor,
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
) -> None:
    """Find the kernel for calls to come, after one that has passed all checks."""
    _, left, right, key = call
    formats = (a.format_name if isinstance(a, ScaledTensor) else None), b.format_name
    if formats not in KERNELS or sm90.unsupported(b.device):
        return
    if formats[1] in FP8:
        prepare = _prepare_fp8
    elif a.shape[0] <= FEW:
        prepare = _prepare_widened
    else:  # several kernels, which take longer than all checks
        return
    try:
        launch = prepare(left, right, formats, out, bias, dtype, accumulate)
    except (TypeError, ValueError):  # of what has to be rewritten first
        return
    if len(_launches) >= _LIMIT:
        _launches.clear()
    _launches[key] = launch


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
    ):
        return kept
    if q.offsets is not None or type(data) is not Tensor:
        return None
    kind = _kind(
        axis,
        q.axis,
        q.format_name,
        q.layout_name,
        q.shape,
        data.stride(),
        scale.stride(),
        data.device,
    )
    if kind is None or data.data_ptr() % 16 or (kind.loaded and scale.data_ptr() % 16):
        return None
    octets = data if data.dtype is torch.uint8 else data.view(torch.uint8)
    made = _Operand._make(
        (
            kind.number,
            octets if axis == -1 else octets.mT,
            scale.mT if kind.turned else scale,
            scalar,
            data,
            scale,
        )
    )
    q._operand = made
    return made


@lru_cache(maxsize=4096)
def _kind(
    axis: int,
    blocked: int,
    format: str,
    layout: str,
    shape: torch.Size,
    stride: tuple[int, ...],
    scale_stride: tuple[int, ...],
    device: torch.device,
) -> _Kind | None:
    few = axis == -2 and format == "fp8_128x128"
    wanted = "sm90" if format in FP8 and not few else "compact"
    if blocked != axis or layout != wanted or len(shape) != 2 or format not in FP8 + WIDENED:
        return None
    return _Kind(next(_numbers), axis == -2 and layout == "compact", not few)


def _plain(x: Any) -> _Operand | None:
    place = _place(x)
    if place is None or x.dtype != torch.bfloat16 or x.data_ptr() % 16:
        return None
    return _Operand._make((_plain_number(place), detached(x), None, None, None, None))


@lru_cache(maxsize=4096)
def _plain_number(place: tuple[Any, ...]) -> int:
    return next(_numbers)


def _prepare_fp8(
    a: _Operand,
    b: _Operand,
    formats: tuple[str | None, str],
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
) -> Launch:
    plan = plan_gemm(
        describe(a.data),
        describe(a.scale),
        describe(b.data),
        describe(b.scale),
        describe(out),
        describe(bias),
        None,
        dtype,
        get_format(formats[1]).block,
        accumulate,
        a.data.device,
        None,
    )
    return _launch(plan, a, b, out, bias)


def _prepare_widened(
    a: _Operand,
    b: _Operand,
    formats: tuple[str | None, str],
    out: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    accumulate: bool,
) -> Launch:
    plan = plan_widened(
        describe(a.data),
        describe(a.scale),
        formats[0],
        describe(b.data),
        describe(b.scale),
        formats[1],
        describe(out),
        describe(bias),
        describe(global_product(a.global_scale, b.global_scale)),
        dtype,
        accumulate,
        a.data.device,
        None,
    )
    return _launch(plan, a, b, out, bias)


def _launch(
    plan: Plan, a: _Operand, b: _Operand, out: Tensor | None, bias: Tensor | None
) -> Launch:
    """What launches a kernel, given operands, output and bias that lie as these do."""
    if plan.run is None:
        raise ValueError("out: is empty, or a sum of nothing")
    run, like, multiprocessors = plan.run, plan.out, plan.multiprocessors
    out_span = 0 if out is None else span(out)
    spans = [0 if x is None else span(x) for x in (a.data, a.scale, b.data, b.scale, bias)]

    def launch(a: _Operand, b: _Operand, out: Tensor | None, bias: Tensor | None) -> Tensor:
        if out is None:
            result = written = torch.empty_like(like)
        else:
            check_apart(out, out_span, (a.data, a.scale, b.data, b.scale, bias), spans)
            mark_written(out)
            result, written = out, detached(out)
        run(
            a.data,
            a.scale,
            b.data,
            b.scale,
            written,
            None if bias is None else detached(bias),
            global_product(a.global_scale, b.global_scale),
            multiprocessors,
        )
        return result

    return launch
