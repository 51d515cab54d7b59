"""The ops ``quantize``, ``quantize_both`` and ``global_scale``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..apart import apart_position
from ..blocks import spread_squares
from ..formats import Format, get_format, padded_groups
from ..hadamard import Hadamard, transformed
from ..kernels.common.gpu import Unsupported
from ..kernels.common.runtime import gpu_of
from ..kernels.cpu import calls as cpu
from ..kernels.quantizers import calls as quantizers
from ..layouts import get_layout, swizzle_scale
from ..memory import as_bytes, joined
from ..rounding import LARGEST
from ..seed import Numbers
from ..stored import is_per_matrix
from . import fakes
from .backends import fall_back, require_cpu_kernels
from .operation import operation

__all__ = ["global_scale", "quantize", "quantize_both", "written_layouts"]

Pair = tuple[Tensor, Tensor]  # data and scales


@operation(fakes.quantize)
def quantize(
    x: Tensor,
    format: str,
    axis: int,
    scale_rounding: str,
    nonfinite: str,
    layout: str,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    seed: list[int] | None = None,
    backend: str = "auto",
    k_major: bool = False,
    gather: Tensor | None = None,
    square: bool = False,
    step: Tensor | None = None,
    hadamard: list[int] | None = None,
    scaling: str = "amax",
    signs_step: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Data and scales of ``x``, scales in ``layout``; see reference.quantize.

    With ``gather``, of rows of ``x``. With ``offsets``, axis -2 has blocks that start anew in each
    group, axis -1 scales that ``layouts.Grouped`` places, in layouts that spread them. ``seed``:
    :class:`blockscale.seed.Numbers`, rounds stochastically; ``step``: () int64 on x's device, takes
    the place of theirs. ``square``: scales are of squares of elements, and stored for each of their
    rows, or columns. ``hadamard``, ``signs_step``: of :meth:`Hadamard.for_op`; transforms ``x``
    along ``axis`` before.
    """
    if axis == -1 and not get_layout(layout).spreads:
        offsets = None  # groups of rows move no scale
    further = _further(seed, step, Hadamard.of_op(hadamard, signs_step))
    if backend != "reference":
        grouped = offsets is not None
        asked = quantizers.Request(
            *(format, (axis,), (layout,), scale_rounding, nonfinite, "load", grouped, k_major),
            square=square,
            scaling=scaling,
        )
        try:
            return _by_kernel(x, asked, global_scale, offsets, further, gather)[0]
        except Unsupported as why:
            fall_back("quantize", x, backend, str(why))
    if further.hadamard is not None:  # a kernel may quantize what torch transforms
        x = transformed(x, further.hadamard, axis).contiguous()
        if scaling != "ms_eden":  # which corrects blocks of a transform that it knows
            given = x, format, axis, scale_rounding, nonfinite, layout, global_scale, offsets, seed
            return quantize(*given, backend, k_major, gather, square, step, scaling=scaling)
    x, fmt = x if gather is None else x[gather], get_format(format)
    data, scale = reference.quantize(
        x,
        fmt.squared if square else fmt,
        axis=axis,
        scale_rounding=scale_rounding,
        nonfinite=nonfinite,
        global_scale=global_scale,
        offsets=offsets if axis == -2 else None,
        seed=further.numbers,
        k_major=k_major,
        scaling=scaling,
        rotated=0 if further.hadamard is None else further.hadamard.size,
    )
    scale = _repeated(scale, fmt, axis, x.shape) if square else scale
    of_rows = offsets if axis == -1 else None
    return data, swizzle_scale(as_bytes(scale), axis, get_layout(layout), of_rows)


@operation(fakes.quantize_both)
def quantize_both(
    x: Tensor,
    format: str,
    scale_rounding: str,
    nonfinite: str,
    row_layout: str,
    column_layout: str,
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    seed: list[int] | None = None,
    backend: str = "auto",
    k_major: bool = False,
    gather: Tensor | None = None,
    square: bool = False,
    step: Tensor | None = None,
    hadamard: list[int] | None = None,
    scaling: str = "amax",
    signs_step: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``quantize`` along -1, then along -2, from one read of ``x`` where a kernel can do that;
    transformed along each axis, if at all."""
    layouts = row_layout, column_layout
    if backend != "reference" and gpu_of(x.device) is not None:
        grouped = offsets is not None
        asked = quantizers.Request(
            *(format, (-1, -2), layouts, scale_rounding, nonfinite, "load", grouped, k_major),
            square=square,
            scaling=scaling,
        )
        try:
            further = _further(seed, step, Hadamard.of_op(hadamard, signs_step))
            row, column = _by_kernel(x, asked, global_scale, offsets, further, gather)
        except Unsupported:
            pass  # what one axis needs, the other may not
        else:
            return *row, *column
    x = x if gather is None else x[gather]
    rest = global_scale, offsets, seed, backend, k_major, None, square, step, hadamard, scaling
    row, column = (
        quantize(x, format, axis, scale_rounding, nonfinite, layout, *rest, signs_step)
        for axis, layout in zip((-1, -2), layouts, strict=True)
    )
    return *row, *column


@operation(fakes.global_scale)
def global_scale(
    x: Tensor,
    format: str,
    backend: str = "auto",
    axis: int = -1,
    hadamard: list[int] | None = None,
    scaling: str = "amax",
    signs_step: Tensor | None = None,
) -> Tensor:
    """fp32 scalar for a format with two levels of scales; see reference.global_scale. ``hadamard``,
    ``signs_step``: of ``x`` transformed along ``axis``, as ``quantize`` does it. Other ``scaling``
    than by amax leaves room above the largest scale."""
    fmt, transform = get_format(format), Hadamard.of_op(hadamard, signs_step)
    if backend != "reference":
        try:
            if gpu_of(x.device) is not None:
                return quantizers.global_scale(
                    x, fmt, axis=axis, hadamard=transform, scaling=scaling
                )
            require_cpu_kernels()
            given = x if transform is None else transformed(x, transform, axis)
            return cpu.global_scale(given, fmt, scaling)
        except Unsupported as why:
            fall_back("global_scale", x, backend, str(why))
    if transform is not None:  # a kernel may look at what torch transforms
        given = transformed(x, transform, axis).contiguous()
        return global_scale(given, format, backend, scaling=scaling)
    return reference.global_scale(x, fmt, scaling)


# --- kernels --------------------------------------------------------------------------------------


def _by_kernel(
    x: Tensor,
    asked: quantizers.Request,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    further: quantizers.Further,
    gather: Tensor | None,
) -> Sequence[Pair]:
    """What a kernel makes of ``x``, on a CPU along one axis; Unsupported where there is none."""
    if is_per_matrix(global_scale, x.shape):
        return _one_by_one(x, asked, global_scale, further)
    gpu, fmt, axes, layouts = gpu_of(x.device), asked.fmt, asked.axes, asked.layouts
    if gpu is None:
        require_cpu_kernels()
        if asked.scaling != "amax":
            return [_best_of_scales(x, asked, global_scale, offsets, further, gather)]
        numbers = further.numbers
        if numbers is not None:
            numbers = numbers._replace(step=int(numbers.step))
        if further.hadamard is not None:
            x = transformed(x, further.hadamard, axes[0]).contiguous()
        x = x if gather is None else x[gather]
        along = offsets if axes == (-2,) else None
        if along is not None and (numbers is not None or fmt.block[0] > 1):
            raise Unsupported(
                "offsets with axis=-2: no CPU kernel rounds stochastically, or has tiles"
            )
        assert asked.scale_rounding is not None  # the op has its name
        data, scale = cpu.quantize(
            x if along is None else _moved_apart(x, along),
            fmt.squared if asked.square else fmt,
            axis=axes[0],
            scale_rounding=asked.scale_rounding,
            nonfinite=asked.nonfinite,
            global_scale=global_scale,
            seed=numbers,
        )
        scale = _repeated(scale, fmt, axes[0], x.shape) if asked.square else scale
        turned = fmt.turned(axes[0], asked.k_major)
        if turned and data.stride(-2) != 1:
            data = data.mT.contiguous().mT
        if along is not None:
            data, scale = _of_groups(data, scale, fmt, along, x.shape[0], apart=turned)
        of_rows = offsets if along is None else None
        return [(data, swizzle_scale(as_bytes(scale), axes[0], get_layout(layouts[0]), of_rows))]
    written = written_layouts(fmt, layouts)
    if written is not layouts:
        asked = asked._replace(layouts=written)
    results = quantizers.quantize(
        *(x, asked),
        global_scale=global_scale,
        offsets=offsets,
        gather=gather,
        further=further,
        gpu=gpu,
    )
    if written is layouts:
        return results
    return [
        (data, swizzle_scale(scale, axis, get_layout(layout), None))
        for (data, scale), axis, layout in zip(results, axes, layouts, strict=True)
    ]


def _best_of_scales(
    x: Tensor,
    asked: quantizers.Request,
    global_scale: Tensor | None,
    offsets: Tensor | None,
    further: quantizers.Further,
    gather: Tensor | None,
) -> Pair:
    """What a CPU's kernel makes of rows whose blocks take the best of several scales."""
    if (
        asked.scaling == "ms_eden"
        or asked.axes != (-1,)
        or asked.square
        or (offsets, further.numbers, further.hadamard) != (None, None, None)
    ):
        raise Unsupported(
            f"scaling={asked.scaling!r}: CPU kernels know it of rows, neither of squares nor of "
            "columns, without a transform"
        )
    assert global_scale is not None  # the op has it
    x = x if gather is None else x[gather]
    made = cpu.quantize_best(
        *(x, asked.fmt, LARGEST[asked.scaling]),
        nonfinite=asked.nonfinite,
        global_scale=global_scale,
    )
    if made is None:
        raise Unsupported(f"scaling={asked.scaling!r}: blocks are not finite, or below 2^-100")
    data, scale = made
    return data, swizzle_scale(as_bytes(scale), -1, get_layout(asked.layouts[0]), None)


def _one_by_one(
    x: Tensor, asked: quantizers.Request, global_scale: Tensor, further: quantizers.Further
) -> list[Pair]:
    """Matrices of a batch, each with its own global scale."""
    if further.numbers is not None:
        raise Unsupported("seed: kernels take one global scale where they round stochastically")
    matrices, lead = x.flatten(0, -3), x.shape[:-2]
    each = [
        _by_kernel(matrix, asked, scalar, None, further, None)
        for matrix, scalar in zip(matrices, global_scale.flatten(), strict=True)
    ]
    made = []
    for of_axis in zip(*each, strict=True):
        data, scale = (joined(torch.stack, parts, -3) for parts in zip(*of_axis, strict=True))
        made.append((data.unflatten(0, lead), scale.unflatten(0, lead)))
    return made


def _further(
    seed: list[int] | None, step: Tensor | None, hadamard: Hadamard | None
) -> quantizers.Further:
    """What is applied to elements; the numbers, as an op is given them."""
    if seed is None and hadamard is None:
        return quantizers.PLAIN
    numbers = None if seed is None else Numbers(*seed)
    if numbers is not None and step is not None:
        numbers = numbers._replace(step=step)
    return quantizers.Further(numbers, hadamard)


def _moved_apart(x: Tensor, offsets: Tensor) -> Tensor:
    """Rows of groups, each of which begins with a tile: then blocks start anew by themselves."""
    position = apart_position(offsets, len(x))[: int(offsets[-1])]
    apart = x.new_zeros(padded_groups(len(x), len(offsets)), x.shape[1])
    apart[position] = x[: len(position)]
    return apart


def _of_groups(
    data: Tensor, scale: Tensor, fmt: Format, offsets: Tensor, rows: int, apart: bool
) -> Pair:
    """What was made of ``_moved_apart``: zeros as scales of blocks without rows, and data where it
    was, unless it stays ``apart``."""
    position = apart_position(offsets, rows)[: int(offsets[-1])]
    used = torch.zeros(len(scale), dtype=torch.bool)
    used[position // fmt.block_size] = True
    scale = torch.where(used[:, None], as_bytes(scale), 0)
    if apart:
        return data, scale
    octets = as_bytes(data)
    back = octets.new_zeros(rows, octets.shape[1])
    back[: len(position)] = octets[position]
    return back.view(data.dtype), scale


def _repeated(scale: Tensor, fmt: Format, axis: int, shape: torch.Size) -> Tensor:
    """Scales of squares, as rows or columns of a matrix have them."""
    return spread_squares(as_bytes(scale), fmt, axis, shape).contiguous().view(scale.dtype)


def written_layouts(fmt: Format, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """The layouts that GPU kernels write: scales of 128x128 blocks, so few, are placed later."""
    return layouts if fmt.block[0] == 1 else ("compact",) * len(layouts)
