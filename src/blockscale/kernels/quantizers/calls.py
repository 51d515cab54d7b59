"""Quantization of torch's tensors: from a call to a plan to a launch."""

from __future__ import annotations

from torch import Tensor

from ...formats import Format
from ...hadamard import Hadamard
from ..common.gpu import Gpu
from ..common.runtime import describe, gpu_of
from .config import PRODUCERS, Request
from .dequantize_plan import (
    DequantizeCall,
    DequantizePlan,
    Stored,
    dequantize,
    plan_dequantize,
)
from .further import PLAIN, Further
from .norm import rmsnorm, unsupported_rmsnorm
from .normalized import RowStatistics, row_statistics
from .plan import QuantizePlan, plan_amax, plan_quantize, unsupported

__all__ = [
    "PLAIN",
    "DequantizeCall",
    "DequantizePlan",
    "Further",
    "QuantizePlan",
    "Request",
    "RowStatistics",
    "Stored",
    "dequantize",
    "global_scale",
    "plan_amax",
    "plan_dequantize",
    "plan_quantize",
    "quantize",
    "rmsnorm",
    "row_statistics",
    "unsupported",
    "unsupported_rmsnorm",
]


def quantize(
    x: Tensor,
    request: Request,
    *,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    gather: Tensor | None = None,
    others: tuple[Tensor, ...] = (),
    further: Further = PLAIN,
    gpu: Gpu | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Data and scales of ``x`` (..., M, K) for each of the axes of ``request``, from one read of
    ``x``; byte for byte those of ``reference.quantize`` with its scales put into the layouts.

    Args:
        x: contiguous in its last dimension; its rows may lie apart.
        request: format, axes, layouts and rounding.
        global_scale: () fp32, for formats that have one.
        offsets: int32 (groups,), the end of each expert's rows: scales along rows lie as
            ``layouts.Grouped`` says, in layouts that spread them; blocks along columns start anew
            in each group.
        gather: int32 (R,), the row of ``x`` that each row is; one that ``x`` has not is NaN.
        others: what the producer of ``request`` takes beside ``x``.
        further: what is applied to the elements.
        gpu: to choose the kernel for where ``x`` is on a CPU, for the emulator.

    One-byte scales are returned as uint8. Raises Unsupported, a ValueError, where ``unsupported``
    gives a reason, and ValueError for a missing ``global_scale``.
    """
    groups = None if offsets is None else offsets.shape[0]
    rows = None if gather is None else gather.shape[0]
    if request.grouped is not (groups is not None) or request.gather is not (rows is not None):
        request = request._replace(grouped=groups is not None, gather=rows is not None)
    if further is not PLAIN:
        request = request._replace(
            stochastic=further.numbers is not None,
            fours=further.fours,
            hadamard=0 if further.hadamard is None else further.hadamard.size,
            draws_signs=further.hadamard is not None and further.hadamard.draws,
        )
    inputs, weights = _divided(x, others, request.producer)
    plan = plan_quantize(
        tuple(map(describe, inputs)),
        x.device,
        gpu or gpu_of(x.device),
        request,
        global_scale is not None,
        groups,
        rows,
    )
    written = plan.quantize(inputs, global_scale, offsets, gather, weights, further)
    # shaped while the kernel runs
    return [output.shaped(*written[output.first : output.first + 2]) for output in plan.outputs]


def global_scale(
    x: Tensor,
    format: Format,
    *,
    producer: str = "load",
    others: tuple[Tensor, ...] = (),
    axis: int = -1,
    hadamard: Hadamard | None = None,
    scaling: str = "amax",
    gpu: Gpu | None = None,
) -> Tensor:
    """``reference.global_scale`` of ``x``, of what ``producer`` makes of it, or of what
    ``hadamard`` does along ``axis``: an fp32 scalar, with room where ``scaling`` needs that."""
    asked = Request(format.name, producer=producer, scaling=scaling)
    if hadamard is not None:  # without one there is one plan for both axes
        asked = asked._replace(axes=(axis,), hadamard=hadamard.size, draws_signs=hadamard.draws)
    inputs, weights = _divided(x, others, producer)
    plan = plan_amax(tuple(map(describe, inputs)), x.device, gpu or gpu_of(x.device), asked)
    further = PLAIN if hadamard is None else Further(None, hadamard)
    return plan.global_scale(inputs, weights[0], further)


def _divided(
    x: Tensor, others: tuple[Tensor, ...], producer: str
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, Tensor | None]]:
    """The matrices that a producer takes; the weights of rows, and where their sums go."""
    if not others:
        return (x,), (None, None)
    count = PRODUCERS[producer].inputs - 1
    weights, sums, *_ = *others[count:], None, None
    return (x, *others[:count]), (weights, sums)
