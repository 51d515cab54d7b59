"""The ops ``quantize``, ``quantize_both`` and ``global_scale``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import reference
from ..formats import Format, get_format
from ..kernels import cpu, gpu
from ..layouts import Grouped, as_bytes, get_layout
from . import fakes
from .backends import no_cpu_kernels, on_gpu, use_kernel
from .operation import operation

__all__ = ["global_scale", "quantize", "quantize_both"]

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
    seed: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Data and scales of ``x``, scales in ``layout``; see reference.quantize.

    With ``offsets``, axis -2 has blocks that start anew in each group, axis -1 scales that
    ``layouts.Grouped`` places.
    """
    fmt, axes, layouts = get_format(format), (axis,), (layout,)
    if axis == -1 and layout == "compact":
        offsets = None  # groups of rows move no compact scale
    reason = "" if backend == "reference" else _why_not(x, fmt, axes, layouts, offsets, seed)
    kernel = use_kernel("quantize", x, backend, reason)
    if kernel and on_gpu(x):
        more = scale_rounding, nonfinite, global_scale, offsets
        return _on_gpu(x, fmt, axes, layouts, *more)[0]
    if kernel:
        data, scale = cpu.quantize(
            x,
            fmt,
            axis=axis,
            scale_rounding=scale_rounding,
            nonfinite=nonfinite,
            global_scale=global_scale,
        )
    else:
        data, scale = reference.quantize(
            x,
            fmt,
            axis=axis,
            scale_rounding=scale_rounding,
            nonfinite=nonfinite,
            global_scale=global_scale,
            offsets=offsets if axis == -2 else None,
            seed=seed,
        )
    return data, _placed(as_bytes(scale), axis, layout, offsets)


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
    seed: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``quantize`` along -1, then along -2, from one read of ``x`` where a kernel can do that."""
    fmt, layouts = get_format(format), (row_layout, column_layout)
    one_read = backend != "reference" and on_gpu(x)
    if one_read and not _why_not(x, fmt, (-1, -2), layouts, offsets, seed):
        more = scale_rounding, nonfinite, global_scale, offsets
        row, column = _on_gpu(x, fmt, (-1, -2), layouts, *more)
    else:
        further = global_scale, offsets, seed, backend
        row, column = (
            quantize(x, format, axis, scale_rounding, nonfinite, layout, *further)
            for axis, layout in zip((-1, -2), layouts, strict=True)
        )
    return *row, *column


@operation(fakes.global_scale)
def global_scale(x: Tensor, format: str, backend: str = "auto") -> Tensor:
    """fp32 scalar for a format with two levels of scales; see reference.global_scale."""
    fmt = get_format(format)
    reason = ""
    if backend != "reference":
        reason = _why_not(x, fmt, (-1,), ("compact",), None, None)
    if not use_kernel("global_scale", x, backend, reason):
        return reference.global_scale(x, fmt)
    return (gpu if on_gpu(x) else cpu).global_scale(x, fmt)


# --- the backends ---------------------------------------------------------------------------------


def _why_not(
    x: Tensor,
    fmt: Format,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    offsets: Tensor | None,
    seed: int | None,
) -> str:
    """Why no kernel quantizes ``x`` so; empty where one does."""
    if seed is not None:
        return "seed: no kernel rounds stochastically; leave it out to round to nearest even"
    if on_gpu(x):
        return gpu.unsupported(x, fmt, axes, _written(fmt, layouts), grouped=offsets is not None)
    if offsets is not None and -2 in axes:
        return "offsets with axis=-2: no CPU kernel starts blocks anew in each group"
    return no_cpu_kernels()


def _on_gpu(
    x: Tensor,
    fmt: Format,
    axes: tuple[int, ...],
    layouts: tuple[str, ...],
    scale_rounding: str,
    nonfinite: str,
    global_scale: Tensor | None,
    offsets: Tensor | None,
) -> Sequence[Pair]:
    written = _written(fmt, layouts)
    results = gpu.quantize(
        x,
        fmt,
        axes=axes,
        layouts=written,
        scale_rounding=scale_rounding,
        nonfinite=nonfinite,
        global_scale=global_scale,
        offsets=offsets,
    )
    if written is layouts:
        return results
    return [
        (data, _placed(scale, axis, layout, None))
        for (data, scale), axis, layout in zip(results, axes, layouts, strict=True)
    ]


def _written(fmt: Format, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """The layouts that GPU kernels write: scales of 128x128 blocks, so few, are placed later."""
    return layouts if fmt.block[0] == 1 else ("compact",) * len(layouts)


def _placed(scale: Tensor, axis: int, layout: str, offsets: Tensor | None) -> Tensor:
    """Compact scales, stored in ``layout``."""
    if layout == "compact":
        return scale
    matrix = scale if axis == -1 else scale.mT
    if offsets is not None:
        return Grouped(get_layout(layout)).swizzle(matrix, offsets)
    return get_layout(layout).swizzle(matrix)
