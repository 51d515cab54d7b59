"""The compiled loops called with torch's tensors: the reference's bytes at memory speed, and its
values added up in one order.

numba is imported by the first call. Results do not depend on the number of threads (that of
``torch.get_num_threads()``), on flush-to-zero (sums of products may) or on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ...error_sums import SLACK, ErrorSums
from ...formats import UE4M3, Format, formats
from ...memory import memory_of
from ...rounding import FP32_ONE, float32_bits, from_float32_bits, global_scale_from_amax
from ...seed import Numbers, numbers_of
from ...threads import run
from ..common.spec import NEAREST_UE4M3, specify
from . import huge_pages
from .spec import (
    MAX_SKINNY_M,
    Geometry,
    Strided,
    geometry,
    least_scale,
    scale_values,
    supported,
    values,
)

__all__ = [
    "ITEMS",
    "MAX_SKINNY_M",
    "amax",
    "dequantize",
    "error_sums",
    "global_scale",
    "multiply",
    "quantize",
    "supported",
    "swiglu",
    "swiglu_backward",
]

#: How the loops see x, and its largest finite item.
ITEMS = {torch.float32: np.int32, torch.bfloat16: np.uint16, torch.float16: np.int16}
_LARGEST = {torch.float32: 0x7F7FFFFF, torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF}
_NO_TABLE, _NO_BYTES = np.empty(0, np.int32), np.empty(0, np.uint8)
_CHUNK = 1 << 18  # elements that are worth a thread of their own: some 50 microseconds

T = TypeVar("T")


def quantize(
    x: Tensor,
    format: Format,
    *,
    axis: int = -1,
    scale_rounding: str = "rceil",
    nonfinite: str = "propagate",
    global_scale: Tensor | None = None,
    seed: int | Numbers | None = None,
) -> tuple[Tensor, Tensor]:
    """Data and compact scales of ``x`` (..., M, K), as ``reference.quantize``, byte for byte.

    ``x`` is float32, bfloat16 or float16 on the CPU and is copied first unless its last dimension
    is contiguous. Data and scales have ``format.data_shape`` and ``format.scale_shape``; packed
    data along axis -2 is contiguous along M.
    """
    from . import compiled, encoding

    shape, x = x.shape, _three_dimensional(x)
    numbers = numbers_of(seed, shape) if isinstance(seed, int) else seed
    grid = _geometry(x, format, axis, in_rows=not _counts_on(numbers, x))
    constants = specify(format, scale_rounding, nonfinite)
    transposed = axis == -2 and format.element.bits < 8
    data = _empty(format.data_shape(shape, axis), torch.uint8, transposed)
    scale = _empty(format.scale_shape(shape, axis), format.scale.dtype)
    encode_scale, table = FP32_ONE, _NO_TABLE
    if constants.kind == NEAREST_UE4M3:
        if global_scale is None:
            raise ValueError(f"global_scale: {format.name} needs one")
        table = np.empty(128, np.int32)
        encode_scale = compiled.ue4m3_reciprocals(
            _scalar_bits(global_scale), constants.max_bits, scale_values(UE4M3)[:128], table
        )
    items = _items(x)
    rounded, place = (None, (0, 0, 0)) if numbers is None else (numbers[:2], numbers[2:])
    fixed = items, *_flat(data, scale), grid, constants, encode_scale, table, rounded, place

    def work(first: int, last: int) -> None:
        scratch = encoding.make_scratch(items, grid, constants, seed is not None)
        compiled.quantize_tiles(*fixed, scratch, first, last)

    _run(work, grid.tiles, grid.chunk(_CHUNK))
    return data.view(format.element.dtype), scale


def quantize_best(
    x: Tensor,
    format: Format,
    largest: Sequence[float],
    *,
    nonfinite: str = "propagate",
    global_scale: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """As :func:`quantize` along rows, with the best of several scales for each block: those by
    which its largest element becomes one of ``largest``.

    None where blocks are so small, or not finite, that fp32 arithmetic may get them wrong.
    """
    from . import compiled, scaling

    shape, x = x.shape, _three_dimensional(x)
    grid, constants = _geometry(x, format, -1), specify(format, "nearest", nonfinite)
    data = _empty(format.data_shape(shape, -1), torch.uint8)
    scale = _empty(format.scale_shape(shape, -1), format.scale.dtype)
    table = np.empty(128, np.int32)
    factors = np.array(
        [
            compiled.ue4m3_reciprocals(
                *(_scalar_bits(global_scale), int(np.float32(value).view(np.int32))),
                *(scale_values(UE4M3)[:128], table),
            )
            for value in largest
        ],
        np.int64,
    )
    items, (flat, scale8, _) = _items(x), _flat(data, scale)
    fixed = items, flat, scale8, grid, constants, factors, table, scale_values(UE4M3)

    def work(first: int, last: int) -> int:
        scratch = scaling.make_scratch(items, grid)
        return int(compiled.quantize_best_tiles(*fixed, scratch, first, last))

    if any(_run(work, grid.tiles, grid.chunk(_CHUNK))):
        return None
    return data.view(format.element.dtype), scale


def global_scale(x: Tensor, format: Format, scaling: str = "amax") -> Tensor:
    """As ``reference.global_scale``."""
    return global_scale_from_amax(amax(x), format, scaling)


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of ``x``, an fp32 scalar; 0 where there is none."""
    from . import compiled

    x = _three_dimensional(x)
    grid = _geometry(x, formats["mxfp8"], -1)  # any blocks along the rows
    items, limit = _items(x), _LARGEST[x.dtype]

    def work(first: int, last: int) -> int:
        scratch = np.zeros(grid.width, items.dtype)
        return int(compiled.amax_tiles(items, grid, limit, scratch, first, last))

    bits = max(_run(work, grid.tiles, grid.chunk(_CHUNK)), default=0)
    return from_float32_bits(torch.tensor(bits))


def swiglu(x: Tensor) -> Tensor:
    """``reference.swiglu``, to the bit but for which NaN a NaN is."""
    from . import compiled

    wide = _fp32_rows(x)
    out = _empty((len(wide), wide.shape[1] // 2), torch.float32)
    arrays = wide.numpy(), out.numpy()
    _run(lambda first, last: compiled.swiglu_rows(*arrays, first, last), *_rows_of(wide))
    return out.view(*x.shape[:-1], x.shape[-1] // 2).to(x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """``reference.swiglu_backward``, likewise."""
    from . import compiled

    wide = _fp32_rows(x)
    out = _empty(wide.shape, torch.float32)
    arrays = _fp32_rows(grad).numpy(), wide.numpy(), out.numpy()
    _run(lambda first, last: compiled.swiglu_backward_rows(*arrays, first, last), *_rows_of(wide))
    return out.view(x.shape).to(x.dtype)


def dequantize(
    data: Tensor,
    scale: Tensor,
    format: Format,
    *,
    shape: Sequence[int],
    axis: int = -1,
    global_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``(element * block_scale) * global_scale`` of compact scales, as ``reference.dequantize``.

    Each product is rounded once to fp32, then the result to ``dtype``, to nearest even. It is
    contiguous, except along M for packed data along axis -2.
    """
    from . import compiled, decoding

    if axis == -2 and format.element.bits < 8:
        shape = (*shape[:-2], shape[-1], shape[-2])
        out = dequantize(
            data.mT, scale.mT, format, shape=shape, global_scale=global_scale, dtype=dtype
        )
        return out.mT
    out = _empty(shape, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    x = _three_dimensional(out)
    grid = _geometry(x, format, axis)
    fixed = (
        *_flat(data.contiguous(), scale.contiguous()),
        _items(x),
        grid,
        *_decoded(format, global_scale),
    )

    def work(first: int, last: int) -> None:
        compiled.dequantize_tiles(*fixed, decoding.make_scratch(grid.width), first, last)

    _run(work, grid.tiles, grid.chunk(_CHUNK))
    return out.to(dtype)


def multiply(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    format: Format,
    *,
    global_scale: Tensor | None = None,
) -> Tensor:
    """``x @ w.mT`` in fp32, by a matrix ``w`` (N, K) that is given as data and compact scales.

    ``x`` is fp32 (M, K): a few rows, as each is read again for every row of ``w``. The values of
    ``w`` are those of :func:`dequantize`; ``multiplying`` says in which order they are added up.
    """
    from . import compiled, multiplying

    (m, k), n = x.shape, data.shape[0]
    # whatever torch's default is
    whole = -(-k // multiplying.LANES) * multiplying.LANES
    padded = torch.zeros(m, whole, dtype=torch.float32)
    padded[:, :k] = x
    out = torch.empty(m, n, dtype=torch.float32)
    grid = geometry(Strided((1, n, k), n * k, k), format, -1, in_rows=True)
    fixed = (
        memory_of(padded, np.float32, padded.numel()),
        *_flat(data.contiguous(), scale.contiguous()),
        memory_of(out, np.float32, out.numel()),
        grid,
        *_decoded(format, global_scale),
    )

    def work(first: int, last: int) -> None:
        compiled.multiply_rows(*fixed, multiplying.make_scratch(m), first, last)

    _run(work, n, max(1, _CHUNK // max(1, k)))
    return out


def error_sums(
    x: Tensor, data: Tensor, scale: Tensor, format: Format, global_scale: Tensor | None
) -> ErrorSums:
    """Compare ``x`` (..., M, K) with data and compact scales along its last dimension, in one pass.

    As ``reference.error_sums``, but for the last digits of sums of squares, and for differences
    below 2^-126 under flush-to-zero.
    """
    from . import comparing, compiled

    count, x = x.numel(), _three_dimensional(x)
    grid, items = _geometry(x, format, -1), _items(x)
    parts = _flat(data.contiguous(), scale.contiguous())
    largest = int(np.float32(format.element.max * SLACK).view(np.int32))
    fixed = items, *parts, grid, *_decoded(format, global_scale), largest
    sums = np.zeros((grid.tiles, 2))

    def work(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        scratch = comparing.make_scratch(grid)
        compiled.compare_tiles(*fixed, scratch, sums.reshape(-1), first, last)
        return scratch.counts, comparing.bins_of(scratch)

    found = _run(work, grid.tiles, grid.chunk(_CHUNK))
    counts = np.sum([counts for counts, _ in found], 0).tolist()
    bins = np.sum([bins for _, bins in found], 0).tolist()
    max_abs, max_rel = np.max([counts for counts, _ in found], 0)[comparing.MAX_ABS :]
    bad = counts[comparing.NONFINITE]
    bins[0] -= bad
    signal, noise = sums.sum(0).tolist()
    return ErrorSums(
        elements=count - bad,
        signal=signal,
        noise=noise,
        max_abs=float(np.int32(max_abs).view(np.float32)),
        max_rel=float(np.int32(max_rel).view(np.float32)),
        zeros=counts[comparing.ZEROS] - bad,
        flushed=counts[comparing.ZEROS] - counts[comparing.WERE_ZEROS],
        saturated=counts[comparing.SATURATED],
        nonfinite=bad,
        bins=tuple(bins),
    )


def _decoded(format: Format, global_scale: Tensor | None) -> tuple[object, ...]:
    """What the loops that decode need of a format and a global scale."""
    factor = FP32_ONE if global_scale is None else _scalar_bits(global_scale)
    constants = specify(format, format.default_scale_rounding, "te")
    tables = values(format.element), scale_values(format.scale)
    return constants, *tables, factor, least_scale(factor)


def _fp32_rows(x: Tensor) -> Tensor:
    """As a matrix, contiguous."""
    return x.detach().reshape(-1, x.shape[-1]).to(torch.float32).contiguous()


def _rows_of(x: Tensor) -> tuple[int, int]:
    """How many there are, and how many are worth a thread: an element takes as long as 16 that are
    quantized."""
    return len(x), max(1, _CHUNK // 16 // max(x.shape[1], 1))


def _run(work: Callable[[int, int], T], items: int, chunk: int) -> list[T]:
    return run(work, items, chunk, torch.get_num_threads())


# --- tensors as flat arrays -----------------------------------------------------------------------


def _three_dimensional(x: Tensor) -> Tensor:
    """``x`` as (leads, M, K), K contiguous; a view if it can be."""
    x = x.detach()
    rows, columns = x.shape[-2:] if x.ndim > 1 else (1, x.numel())
    x = x.reshape(math.prod(x.shape[:-2]), rows, columns)
    return x if x.stride(2) == 1 else x.contiguous()


def _geometry(x: Tensor, format: Format, axis: int, in_rows: bool = False) -> Geometry:
    leads, rows, columns = x.shape
    strided = Strided((leads, rows, columns), x.stride(0), x.stride(1))
    return geometry(strided, format, axis, in_rows)


def _counts_on(numbers: Numbers | None, x: Tensor) -> bool:
    """Whether the index of each element of ``x`` (leads, M, K) is one more than that before: not of
    columns of a whole tensor, which another row of it follows."""
    if numbers is None:
        return True
    leads, rows, columns = x.shape
    in_matrix = rows == 1 or numbers.row == columns
    return in_matrix and (leads == 1 or numbers.matrix == rows * columns)


def _items(x: Tensor) -> np.ndarray:
    """All that lies between the first and the last item of ``x``."""
    if x.dtype not in ITEMS:
        raise TypeError(f"x: got {x.dtype}; expected float32, bfloat16 or float16")
    span = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return memory_of(x, ITEMS[x.dtype], span if x.numel() else 0)


def _flat(data: Tensor, scale: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Data, one-byte scales and fp32 scales; of the scales, one is empty."""
    stored = memory_of(data, np.uint8, data.nbytes)
    if scale.dtype == torch.float32:
        return stored, _NO_BYTES, memory_of(scale, np.int32, scale.numel())
    return stored, memory_of(scale, np.uint8, scale.numel()), _NO_TABLE


def _scalar_bits(value: Tensor) -> int:
    return int(float32_bits(value))


def _empty(shape: Sequence[int], dtype: torch.dtype, transposed: bool = False) -> Tensor:
    """A tensor; ``transposed``: the last but one dimension is the contiguous one."""
    if transposed:
        return _empty((*shape[:-2], shape[-1], shape[-2]), dtype).mT
    out = torch.empty(tuple(shape), dtype=dtype)
    huge_pages.advise(out.data_ptr(), out.nbytes)
    return out
