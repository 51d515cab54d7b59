"""What can be quantized, and how: the checks of ``quantize`` and of all that quantizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .checks import check_flag, choose
from .formats import NONFINITE, Format, get_format
from .hadamard import Hadamard, check_transform
from .layouts import Layout, get_layout, layouts
from .quantization import check_groups, check_rounding, check_scaling, check_square
from .remember import remembered
from .seed import Seed
from .stored import is_per_matrix
from .tensor import ScaledTensor
from .tensor_checks import DTYPES, check_gather, check_is_tensor, check_offsets
from .watching import is_dtensor

__all__ = [
    "DTYPES",
    "Arguments",
    "Call",
    "check",
    "check_call",
    "check_hadamard",
    "check_tensor",
    "given_global_scale",
    "resolve_global_scale",
]

_LARGEST = torch.finfo(torch.float32).max
_OUTSIDE = "global_scale: got {}; expected a positive finite number of fp32"
_SEEDS = (int, torch.SymInt, type(None))


class Arguments(NamedTuple):
    """What a caller asks for, by the names of ``quantize``; ``layouts`` has one for each axis."""

    axes: tuple[int, ...]
    format: str | Format
    scale_rounding: str | None
    layouts: tuple[str | Layout, ...]
    nonfinite: str = "propagate"
    pad: bool = False
    k_major: bool = False
    backend: str = "auto"
    square: bool = False
    scaling: str = "amax"


class Call(NamedTuple):
    """Arguments that were checked, with names looked up."""

    format: Format
    axes: tuple[int, ...]
    scale_rounding: str
    layouts: tuple[Layout, ...]


def check(
    x: Tensor,
    request: Arguments,
    offsets: Tensor | None = None,
    seed: int | Seed | None = None,
    gather: Tensor | None = None,
) -> Call:
    """All checks but that of the global scale; those of names and shapes are remembered."""
    if not isinstance(seed, Seed | None) and (
        not isinstance(seed, _SEEDS)
        or isinstance(seed, bool)
        or (isinstance(seed, int) and not -(2**63) <= seed < 2**63)
    ):
        raise ValueError(
            f"seed: got {seed!r}; expected a 64-bit int, a blockscale.Seed, or None for nearest "
            "even"
        )
    if isinstance(seed, Seed) and isinstance(seed.step, Tensor) and seed.step.device != x.device:
        raise ValueError(
            f"seed: its step is on {seed.step.device}, what is rounded on {x.device}; move it"
        )
    check_rounding(request.scaling, request.square, seed is not None)
    check_flag("pad", request.pad)  # here: to a cache True is 1
    check_flag("k_major", request.k_major)
    check_flag("square", request.square)
    check_tensor(x)
    format = request.format
    if isinstance(format, Format):  # its hash is slow
        request = request._replace(format=format.name)
    shape: tuple[int, ...] = x.shape
    if gather is not None:
        check_gather(gather, x)
        shape = gather.shape[0] if shape[0] else 0, shape[1]
    call = check_call(shape, x.dtype, request, offsets is not None)
    if offsets is not None:
        check_offsets(offsets, shape[0], x.device)
    return call


@remembered
def check_call(
    shape: tuple[int, ...], dtype: torch.dtype, request: Arguments, grouped: bool = False
) -> Call:
    """Raise unless a tensor of ``shape`` and ``dtype``, ``grouped`` or not, can be quantized so."""
    call = _check_names(request)
    choose("nonfinite", request.nonfinite, dict.fromkeys(NONFINITE))
    choose("backend", request.backend, dict.fromkeys(ops.BACKENDS))
    if dtype not in DTYPES:
        names = ", ".join(str(d) for d in DTYPES)
        raise TypeError(f"x: got {dtype}; expected one of {names}: cast it first")
    _check_shape(shape, call, request.pad, grouped)
    check_scaling(request.scaling, call.format)
    if request.square:
        check_square(shape, call.format, grouped)
    return call


def _check_names(request: Arguments) -> Call:
    fmt, axes, stored = get_format(request.format), request.axes, request.layouts
    scale_rounding = request.scale_rounding
    if len(stored) != len(axes):
        raise ValueError(f"layout: got {stored!r}; expected one layout, or (rows, columns)")
    where = tuple(get_layout(layout) for layout in stored)
    rounding = fmt.default_scale_rounding
    if scale_rounding is not None:
        known = dict.fromkeys(fmt.scale.roundings)
        choose(f"scale_rounding (of format {fmt.name!r})", scale_rounding, known)
        rounding = scale_rounding
    for layout in where:
        if fmt.scale.nbytes not in layout.itemsize:
            held = "one-byte scales" if layout.itemsize == (1,) else "fp32 scales"
            names = [repr(n) for n, each in layouts.items() if fmt.scale.nbytes in each.itemsize]
            raise ValueError(
                f"layout: layout {layout.name!r} holds {held}, {fmt.name!r} has {fmt.scale.name}; "
                f"choose one of {', '.join(names)}"
            )
    return Call(fmt, axes, rounding, where)


def check_hadamard(
    hadamard: object, x: Tensor, axis: int, gather: Tensor | None, offsets: Tensor | None
) -> None:
    """As :func:`check_transform`, and ValueError for a step on another device."""
    given = {"gather": gather, "offsets": offsets}
    orders = [name for name, order in given.items() if order is not None]
    check_transform(hadamard, x.shape, axis, orders)
    assert isinstance(hadamard, Hadamard)
    step = hadamard.for_op()[1]
    if step is not None and step.device != x.device:
        raise ValueError(
            f"hadamard: the step of its signs is on {step.device}, x on {x.device}; move it"
        )


def check_tensor(x: Tensor) -> None:
    """Raise unless ``x`` is a dense tensor, contiguous in its last dimension."""
    if type(x) is not Tensor:  # isinstance takes longer
        check_is_tensor("x", x)
    if type(x) is ScaledTensor:
        raise TypeError(
            "x: is a ScaledTensor already; quantizing it again rounds twice: quantize the "
            "high-precision tensor (or its .dequantize(), if there is no other)"
        )
    if is_dtensor(x):
        raise TypeError(
            "x: is a DTensor, whose shards may cut blocks; quantize x.to_local() where shards hold "
            "whole blocks, else x.full_tensor()"
        )
    if not torch.compiler.is_compiling():  # traced tensors are dense; their strides, torch's choice
        _check_memory(x)


def _check_shape(shape: tuple[int, ...], call: Call, pad: bool, grouped: bool) -> None:
    fmt = call.format
    for axis in call.axes:
        if len(shape) < -axis:
            raise ValueError(
                f"x: has {len(shape)} dimension(s); axis={axis} needs at least {-axis}"
            )
    if 0 in shape:
        raise ValueError(
            f"x: has shape {tuple(shape)}, there is nothing to quantize; leave empty tensors out"
        )
    for axis in call.axes:
        if grouped:
            check_groups(shape, fmt)
        if not pad and not (grouped and axis == -2) and shape[axis] % fmt.block_size:
            raise ValueError(
                f"x: dimension {axis} is {shape[axis]}, not a multiple of {fmt.name}'s block of "
                f"{fmt.block_size}; pass pad=True to pad it with zeros"
            )
    for layout in call.layouts:
        if layout.name != "compact" and len(shape) != 2:
            raise ValueError(
                f"layout: {layout.name!r} stores the scales of one matrix; x has shape "
                f"{tuple(shape)}: flatten leading dimensions first, or keep 'compact'"
            )


def _check_memory(x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "quantized" if x.is_quantized else "nested" if x.is_nested else str(x.layout)
        raise TypeError(
            f"x: got a {kind} tensor; expected a dense one: call .to_dense() or .dequantize()"
        )
    strides = x.stride()
    if strides and strides[-1] != 1 and x.shape[-1] != 1:
        raise ValueError(
            f"x: strides {strides} are not contiguous in the last dimension; call .contiguous() "
            "(or quantize the transposed tensor along the other axis)"
        )


def resolve_global_scale(
    global_scale: Tensor | float | None,
    x: Tensor,
    fmt: Format,
    backend: str,
    *,
    per_matrix: bool = False,
    axis: int = -1,
    hadamard: Hadamard | None = None,
    scaling: str = "amax",
) -> Tensor | None:
    """The global scale given, checked, else that of ``x``, transformed along ``axis`` by
    ``hadamard``; None for formats that have none. ``per_matrix``: those of a batch may have one
    each."""
    if not fmt.has_global_scale:
        if global_scale is not None:
            raise ValueError(f"global_scale: format {fmt.name!r} has none; leave it out")
        return None
    if global_scale is None:
        transform, step = (None, None) if hadamard is None else hadamard.for_op()
        return ops.global_scale(x.detach(), fmt.name, backend, axis, transform, scaling, step)
    if not isinstance(global_scale, Tensor):
        if not isinstance(global_scale, (int, float)) or isinstance(global_scale, bool):
            raise TypeError(f"global_scale: got {global_scale!r}; expected an fp32 scalar")
        if not 0 < global_scale <= _LARGEST:
            raise ValueError(_OUTSIDE.format(global_scale))
        # no copy from the host: that would wait for the device, and no graph could hold it
        global_scale = torch.full((), global_scale, dtype=torch.float32, device=x.device)
    if is_dtensor(global_scale):
        raise TypeError(
            "global_scale: is a DTensor; pass global_scale.full_tensor(), one scalar for all shards"
        )
    several = per_matrix and is_per_matrix(global_scale, x.shape)
    if global_scale.dtype != torch.float32 or not (several or global_scale.numel() == 1):
        lead = (
            f" (or {tuple(x.shape[:-2])}, one for each matrix)"
            if per_matrix and x.dim() > 2
            else ""
        )
        raise ValueError(
            f"global_scale: got {tuple(global_scale.shape)} {global_scale.dtype}; expected an "
            f"fp32 scalar{lead}, the multiplier that dequantizes (amax / (448 * 6))"
        )
    if global_scale.device != x.device:
        raise ValueError(
            f"global_scale: is on {global_scale.device}, what it scales on {x.device}; move it"
        )
    if not torch.compiler.is_compiling() and global_scale.device.type == "cpu":
        for value in global_scale.flatten().tolist():
            if not 0 < value < float("inf"):
                raise ValueError(_OUTSIDE.format(value))
    if global_scale.requires_grad:
        global_scale = global_scale.detach()
    if several:
        return global_scale.contiguous()  # kernels read them side by side
    return global_scale.reshape(()) if global_scale.dim() else global_scale


def given_global_scale(
    global_scale: Tensor | float | None, x: Tensor, call: Call, backend: str
) -> Tensor | None:
    """The global scale of the caller; None where the op is to find it, or there is none."""
    if global_scale is None:
        return None
    return resolve_global_scale(global_scale, x, call.format, backend)
