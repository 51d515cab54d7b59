"""RMSNorm and quantization of its rows from one read: what to compile for a call, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...formats import Format, get_format
from ..common.gpu import GPUS, SHARED, Gpu
from ..common.runtime import Described, Unsupported, describe, gpu_of
from ..common.spec import Spec, specify
from ..common.template import template
from .config import DTYPES, Request
from .outputs import Output, choose_output
from .plan import as_matrix, unsupported

__all__ = ["SEGMENT", "NormConfig", "choose_norm", "rmsnorm", "unsupported_rmsnorm"]

SEGMENT = 512  # columns of a warp at a time
_RESERVED = 1 << 10  # that the system takes of each block
_RESIDENT = 3  # blocks on a multiprocessor at once: one waits for loads while others compute
_WARPS = 32  # of them all, so that a thread has 64 registers
_FEW_WARPS = 8  # of a block, at least, where it has work for them
_MAX_ROWS = 32
_ROW_MULTIPLE = {"compact": 1, "sm90": 4, "packed": 4, "tcgen05": 128}  # rows of scales


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A kernel: all that its code depends on.

    Attributes:
        columns: of the input.
        tile_rows: rows of a block of threads, a power of two.
        segment_warps: warps side by side along a row, each taking every so many-th segment.
        row_warps: warps that share the rows of a tile.
        bulk: a row is loaded by one bulk copy; else by plain loads, an element at a time.
        wide_weight: 16 weights are loaded by 16-byte loads; else one at a time.
    """

    arch: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    format: str
    scale_rounding: str
    nonfinite: str
    layout: str
    columns: int
    tile_rows: int
    segment_warps: int
    row_warps: int
    bulk: bool
    wide_weight: bool

    @property
    def spec(self) -> Spec:
        return specify(get_format(self.format), self.scale_rounding, self.nonfinite)

    @property
    def threads(self) -> int:
        return 32 * self.segment_warps * self.row_warps

    @property
    def segments(self) -> int:
        return -(-self.columns // SEGMENT)

    @property
    def spread(self) -> bool:
        """Whether rows past the last one, copies of it, have scales, which are zero."""
        return self.layout != "compact"

    @property
    def row_multiple(self) -> int:
        """The layout has scales of a multiple of so many rows."""
        return _ROW_MULTIPLE[self.layout]


def choose_norm(
    shape: tuple[int, int],
    source: tuple[int, int],
    dtype: torch.dtype,
    weight: tuple[int, torch.dtype],
    request: Request,
    gpu: Gpu = GPUS["sm_90a"],
) -> NormConfig:
    """The kernel for a matrix of ``shape``, K of which shared memory holds a row.

    ``source``: address of its first element and distance between its rows, both in bytes.
    ``weight``: address of the first weight, and their dtype.
    """
    (m, k), format = shape, request.fmt
    segments, processors = -(-k // SEGMENT), gpu.multiprocessors
    row, small = segments * _segment_bytes(dtype, format) + 4, _small(format) + _RESERVED
    whole = SHARED + _RESERVED
    fit = min(max((whole // _RESIDENT - small) // row, 1), _MAX_ROWS)
    spread = max(m // processors, 1)  # leave no multiprocessor idle
    rows = 1 << min(fit, spread).bit_length() - 1
    resident = min(_RESIDENT, whole // (rows * row + small), -(-m // (rows * processors)))
    segment_warps = -(-segments // -(-segments // (_WARPS // resident)))
    return NormConfig(
        arch=gpu.arch,
        dtype=dtype,
        weight_dtype=weight[1],
        format=format.name,
        scale_rounding=request.scale_rounding or format.default_scale_rounding,
        nonfinite=request.nonfinite,
        layout=request.layouts[0],
        columns=k,
        tile_rows=rows,
        segment_warps=segment_warps,
        row_warps=min(rows, 1 << max(_FEW_WARPS // segment_warps, 1).bit_length() - 1),
        bulk=all(n % 16 == 0 for n in (*source, k * dtype.itemsize)),
        wide_weight=weight[0] % 16 == 0 and k % 16 == 0,
    )


def _segment_bytes(dtype: torch.dtype, format: Format) -> int:
    """Shared memory of a row's segment: elements, scales, and the sum of squares."""
    scales = SEGMENT // format.block_size * format.scale.nbytes
    return SEGMENT * dtype.itemsize + scales + 4


def _small(format: Format) -> int:
    """Shared memory of a block beside its rows: the barrier, a table, and gaps to align them."""
    return 256 + (512 if format.has_global_scale else 0)


def _most_columns(dtype: torch.dtype, format: Format) -> int:
    return (SHARED - _small(format) - 4) // _segment_bytes(dtype, format) * SEGMENT


@dataclass(frozen=True, slots=True)
class _Plan:
    """``view`` has shape and strides of ``x`` as a matrix, where it is none."""

    run: Callable[..., Any]
    view: tuple[tuple[int, int], tuple[int, int]] | None
    output: Output
    rstd: Tensor


def rmsnorm(
    x: Tensor,
    weight: Tensor,
    request: Request,
    *,
    eps: float,
    global_scale: Tensor | None = None,
    gpu: Gpu | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Data and scales, along rows, of the RMSNorm of ``x`` (..., K), and rstd (...,) in fp32.

    Byte for byte ``reference.quantize`` of ``reference.rmsnorm``, its scales put into the layout of
    ``request``, whose only axis is -1.
    ``weight`` (K,) may have another dtype than ``x``. One-byte scales are returned as uint8.
    ``gpu``: to choose the kernel for where ``x`` is on a CPU, for the emulator.

    Raises Unsupported, a ValueError, where ``unsupported_rmsnorm`` gives a reason; ValueError for a
    ``weight`` that does not fit ``x``, and for a missing ``global_scale``.
    """
    gpu, format = gpu or gpu_of(x.device), request.fmt
    reason = unsupported_rmsnorm(x, format, request.layouts[0], gpu)
    if reason:
        raise Unsupported(reason)
    if format.has_global_scale and global_scale is None:
        raise ValueError(f"global_scale: {format.name} needs one")
    k = x.shape[-1]
    if weight.shape != (k,) or weight.dtype not in DTYPES or not weight.is_contiguous():
        raise ValueError(
            f"weight: got {tuple(weight.shape)} {weight.dtype} with stride {weight.stride()}; "
            f"allowed: ({k},), contiguous, of {', '.join(map(str, DTYPES))}"
        )
    if weight.device != x.device:
        raise ValueError(f"weight: is on {weight.device}; move it to {x.device}, where x is")
    assert gpu is not None  # else it is not supported
    plan = _plan(describe(x), describe(weight), x.device, gpu, request)
    data, scale = torch.empty_like(plan.output.data), torch.empty_like(plan.output.scale)
    rstd = torch.empty_like(plan.rstd)
    matrix = x if plan.view is None else x.as_strided(*plan.view)
    plan.run(matrix, weight, data, scale, rstd, eps, global_scale)
    return (*plan.output.shaped(data, scale), rstd if x.ndim == 2 else rstd.view(x.shape[:-1]))


def unsupported_rmsnorm(x: Tensor, format: Format, layout: str, gpu: Gpu | None = None) -> str:
    """Why the kernel cannot normalize and quantize ``x`` so; empty where it can."""
    reason = unsupported(x, Request(format.name, layouts=(layout,)), gpu)
    return reason or _unsupported(x.shape, x.dtype, format.name)


@lru_cache(maxsize=4096)
def _unsupported(shape: torch.Size, dtype: torch.dtype, format: str) -> str:
    fmt = get_format(format)
    if 0 in shape:
        return f"x has shape {tuple(shape)}: nothing to normalize"
    if fmt.block[0] > 1:
        return f"format {format}: the kernel has no blocks of several rows"
    most = _most_columns(dtype, fmt)
    if shape[-1] > most:
        return f"x has {shape[-1]} columns: shared memory holds rows of at most {most} of {dtype}"
    return ""


@lru_cache(maxsize=4096)
def _plan(
    x: Described, weight: Described, device: torch.device, gpu: Gpu, request: Request
) -> _Plan:
    assert request.axes == (-1,)
    shape, stride, dtype, address = x
    found = as_matrix(shape, stride)
    assert found is not None  # else it is not supported
    rows, columns, apart = found
    source = address, apart * dtype.itemsize
    config = choose_norm((rows, columns), source, dtype, (weight[3], weight[2]), request, gpu)
    same = len(shape) == 2 and stride == (apart, 1)
    return _Plan(
        run=gpu.load(config),
        view=None if same else ((rows, columns), (apart, 1)),
        output=choose_output(shape, request.fmt, -1, request.layouts[0], device, None),
        rstd=template((rows,), torch.float32, device),
    )
