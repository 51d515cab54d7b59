"""``quantize`` and ``quantize_both``: check what was given, dispatch, wrap."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .formats import NONFINITE, Format, choose, get_format
from .layouts import Layout, get_layout
from .tensor import ScaledTensor, check_axis, check_offsets

__all__ = ["quantize", "quantize_both"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEEDS = (int, torch.SymInt, type(None))


def quantize(
    x: Tensor,
    format: str | Format = "mxfp8",
    axis: int = -1,
    *,
    scale_rounding: str | None = None,
    layout: str | Layout = "compact",
    nonfinite: str = "propagate",
    global_scale: Tensor | float | None = None,
    pad: bool = False,
    offsets: Tensor | None = None,
    seed: int | None = None,
) -> ScaledTensor:
    """Quantize ``x`` (..., M, K) in blocks along ``axis``.

    Args:
        x: float32, bfloat16 or float16, last dimension contiguous, not empty.
        format: a name of :data:`blockscale.formats`.
        axis: the contraction of the product to come: -1 or -2.
        scale_rounding: one of ``format.scale.roundings``, default the first of them (``rceil`` for
            E8M0). ``fp8_1x128`` and ``fp8_128x128`` take those of E8M0 too and then have powers of
            two in fp32.
        layout: where the scales are written, see :data:`blockscale.layouts`.
        nonfinite: ``"propagate"``: a NaN or infinity makes its whole block NaN. ``"te"``: as
            Transformer Engine, a NaN stays alone and an infinity saturates.
        global_scale: fp32 multiplier that dequantizes, for formats with one (NVFP4); default
            ``amax(x) / (448 * 6)``, which costs a second read of ``x``.
        pad: allow a contraction that is not a multiple of the block: the data is then padded with
            zeros to whole blocks, ``shape`` stays that of ``x``.
        offsets: int32 (groups,), ascending: the end of each expert's rows (dimension -2). With
            ``axis=-2`` blocks start anew in each group (no padding needed); with ``axis=-1`` the
            scales of each group start on a 128-row tile in every layout but compact.
        seed: round elements stochastically with this seed instead of to nearest even.

    Returns:
        A :class:`ScaledTensor` of the shape and dtype of ``x``. It has no gradient:
        :func:`blockscale.nn.linear` is the differentiable way.

    Raises:
        TypeError: ``x`` is no dense tensor of these dtypes.
        ValueError: anything else that cannot be, with the remedy.

    Source: OCP MX v1.0 section 6.3 with the scale rounded up (seed 000; arXiv 2506.08027).
    """
    fmt, where, axis = get_format(format), get_layout(layout), check_axis(axis)
    rounding = _check_rounding(fmt, scale_rounding)
    choose("nonfinite", nonfinite, dict.fromkeys(NONFINITE))
    if (isinstance(seed, int) and not -(2**63) <= seed < 2**63) or not isinstance(seed, _SEEDS):
        raise ValueError(f"seed: got {seed!r}; expected a 64-bit int, or None for nearest even")
    _check_input(x, fmt, axis, offsets, pad)
    if where.name != "compact" and (x.dim() != 2 or (offsets is not None and axis == -2)):
        raise ValueError(
            f"layout: {where.name!r} stores the scales of one matrix; x has shape "
            f"{tuple(x.shape)}{' and groups along the contraction' * (offsets is not None)}: "
            "flatten leading dimensions first, or keep 'compact'"
        )
    scalar = _check_global_scale(global_scale, x, fmt)
    k_grouped = offsets is not None and axis == -2
    x = x.detach()
    data, scale = ops.quantize(
        x, fmt.name, axis, rounding, nonfinite, where.name, scalar, offsets, k_grouped, seed
    )
    return ScaledTensor(
        data,
        scale,
        format=fmt,
        shape=x.shape,
        axis=axis,
        dtype=x.dtype,
        layout=where,
        global_scale=scalar,
        offsets=offsets,
        k_grouped=k_grouped,
    )


def quantize_both(
    x: Tensor,
    format: str | Format = "mxfp8",
    *,
    global_scale: Tensor | float | None = None,
    **kwargs: object,
) -> tuple[ScaledTensor, ScaledTensor]:
    """``x`` (..., M, K) quantized along rows (axis -1) and along columns (axis -2).

    Two different tensors, both from high precision: one for the product that contracts K, one for
    that which contracts M. Takes the arguments of :func:`quantize` but ``axis``; NVFP4's
    global scale is found once.
    """
    fmt = get_format(format)
    if fmt.has_global_scale and global_scale is None:
        _check_input(x, fmt, -1, None, True)
        global_scale = ops.global_scale(x.detach(), fmt.name)
    row, column = (
        quantize(x, fmt, axis, global_scale=global_scale, **kwargs)  # type: ignore[arg-type]
        for axis in (-1, -2)
    )
    return row, column


def _check_rounding(fmt: Format, scale_rounding: str | None) -> str:
    if scale_rounding is None:
        return fmt.default_scale_rounding
    choose(
        f"scale_rounding (of format {fmt.name!r})",
        scale_rounding,
        dict.fromkeys(fmt.scale.roundings),
    )
    return scale_rounding


def _check_input(x: Tensor, fmt: Format, axis: int, offsets: Tensor | None, pad: bool) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}; expected a torch.Tensor")
    if isinstance(x, ScaledTensor):
        raise TypeError(
            "x: is a ScaledTensor already; quantizing it again rounds twice: quantize the "
            "high-precision tensor (or its .dequantize(), if there is no other)"
        )
    if not torch.compiler.is_compiling():  # traced tensors are dense; their strides, torch's choice
        _check_memory(x)
    if x.dtype not in _DTYPES:
        names = ", ".join(str(d) for d in _DTYPES)
        raise TypeError(f"x: got {x.dtype}; expected one of {names}: cast it first")
    if x.dim() < -axis:
        raise ValueError(f"x: has {x.dim()} dimension(s); axis={axis} needs at least {-axis}")
    if x.numel() == 0:
        raise ValueError(f"x: has shape {tuple(x.shape)}, there is nothing to quantize")
    k = x.shape[axis]
    if offsets is not None:
        _check_offsets(offsets, x, fmt, axis)
        if axis == -2:
            return
    if not pad and k % fmt.block_size:
        raise ValueError(
            f"x: dimension {axis} is {k}, not a multiple of {fmt.name}'s block of "
            f"{fmt.block_size}; pass pad=True to pad it with zeros"
        )


def _check_memory(x: Tensor) -> None:
    if x.layout != torch.strided or x.is_quantized or x.is_nested:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        raise TypeError(
            f"x: got a {kind} tensor; expected a dense one: call .to_dense() or .dequantize()"
        )
    if x.dim() and x.stride(-1) != 1 and x.shape[-1] != 1:
        raise ValueError(
            f"x: strides {x.stride()} are not contiguous in the last dimension; call .contiguous() "
            "(or quantize the transposed tensor along the other axis)"
        )


def _check_offsets(offsets: Tensor, x: Tensor, fmt: Format, axis: int) -> None:
    if x.dim() != 2:
        raise ValueError(f"offsets: x has shape {tuple(x.shape)}; groups cut the rows of a matrix")
    check_offsets(offsets, x.shape[0], x.device)
    if fmt.block[0] > 1:
        raise ValueError(
            f"offsets: blocks of {fmt.name!r} span {fmt.block[0]} rows; groups cannot cut them"
        )
    if axis == -2 and fmt.element.bits < 8:
        raise ValueError(
            f"offsets: {fmt.name!r} packs several elements a byte along the contraction, which "
            "groups cannot cut; quantize each group alone, or use an 8-bit format"
        )


def _check_global_scale(
    global_scale: Tensor | float | None, x: Tensor, fmt: Format
) -> Tensor | None:
    if not fmt.has_global_scale:
        if global_scale is not None:
            raise ValueError(f"global_scale: format {fmt.name!r} has none; leave it out")
        return None
    if global_scale is None:
        return ops.global_scale(x.detach(), fmt.name)
    if not isinstance(global_scale, Tensor):
        if not isinstance(global_scale, (int, float)):
            raise TypeError(f"global_scale: got {global_scale!r}; expected an fp32 scalar")
        global_scale = torch.tensor(global_scale, dtype=torch.float32, device=x.device)
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise ValueError(
            f"global_scale: got {tuple(global_scale.shape)} {global_scale.dtype}; expected an "
            "fp32 scalar, the multiplier that dequantizes (amax / (448 * 6))"
        )
    if global_scale.device != x.device:
        raise ValueError(f"global_scale: is on {global_scale.device}, x on {x.device}; move it")
    if not torch.compiler.is_compiling() and global_scale.device.type == "cpu":
        value = global_scale.item()
        if not 0 < value < float("inf"):
            raise ValueError(f"global_scale: got {value}; expected a positive finite number")
    return global_scale.detach().reshape(())
