"""Quantization of torch's tensors: from a call to a plan to a launch."""

from __future__ import annotations

from torch import Tensor

from ...formats import Format
from ..common.gpu import Gpu
from ..common.runtime import Unsupported, describe, gpu_of
from .config import Request
from .dequantize_plan import DequantizeCall, DequantizePlan, dequantize, plan_dequantize
from .norm import rmsnorm, unsupported_rmsnorm
from .plan import QuantizePlan, plan_amax, plan_quantize, unsupported

__all__ = [
    "DequantizeCall",
    "DequantizePlan",
    "QuantizePlan",
    "Request",
    "Unsupported",
    "dequantize",
    "global_scale",
    "plan_amax",
    "plan_dequantize",
    "plan_quantize",
    "quantize",
    "rmsnorm",
    "unsupported",
    "unsupported_rmsnorm",
]


def quantize(
    x: Tensor,
    format: Format,
    *,
    axes: tuple[int, ...] = (-1,),
    layouts: tuple[str, ...] = ("compact",),
    scale_rounding: str | None = None,
    nonfinite: str = "propagate",
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    producer: str = "load",
    others: tuple[Tensor, ...] = (),
    k_major: bool = False,
    gpu: Gpu | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Data and scales of ``x`` (..., M, K) for each of ``axes``, (-1,), (-2,) or (-1, -2), from one
    read of ``x``; byte for byte those of ``reference.quantize`` with its scales put into the
    ``layouts``, one for each axis.

    Args:
        x: contiguous in its last dimension; its rows may lie apart.
        offsets: int32 (groups,), the end of each expert's rows: scales along rows lie as
            ``layouts.Grouped`` says (except compact ones), blocks along columns start anew in each
            group.
        producer: "load": ``x`` is quantized; "swiglu": ``x`` (M, 2H) is gate and up,
            ``reference.swiglu`` of it (M, H) is quantized; "swiglu_backward": ``others`` has the
            gradient (M, H), ``reference.swiglu_backward`` of both (M, 2H) is quantized.
        k_major: data along columns is stored column by column, as 4-bit data always is.
        gpu: to choose the kernel for where ``x`` is on a CPU, for the emulator.

    One-byte scales are returned as uint8. Raises Unsupported, a ValueError, where ``unsupported``
    gives a reason, and ValueError for a missing ``global_scale``.
    """
    groups = None if offsets is None else offsets.shape[0]
    plan = plan_quantize(
        tuple(map(describe, (x, *others))),
        x.device,
        gpu or gpu_of(x.device),
        Request(
            format.name,
            axes,
            layouts,
            scale_rounding,
            nonfinite,
            producer,
            offsets is not None,
            k_major,
        ),
        global_scale is not None,
        groups,
    )
    written = plan.quantize((x, *others), global_scale, offsets)
    # shaped while the kernel runs
    return [output.shaped(*written[output.first : output.first + 2]) for output in plan.outputs]


def global_scale(
    x: Tensor,
    format: Format,
    *,
    producer: str = "load",
    others: tuple[Tensor, ...] = (),
    gpu: Gpu | None = None,
) -> Tensor:
    """``reference.global_scale`` of ``x``, or of what ``producer`` makes of it: an fp32 scalar."""
    asked = Request(format.name, producer=producer)
    inputs = tuple(map(describe, (x, *others)))
    plan = plan_amax(inputs, x.device, gpu or gpu_of(x.device), asked)
    return plan.global_scale((x, *others))
