"""Products by kernels: which ones, and their arguments."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import BFLOAT16, FLOAT32, INT32
from ..formats import Format, get_format
from ..kernels.common.epilogue import Epilogue
from ..kernels.sm90 import bf16_config, grouped_config, mixed_config
from ..kernels.sm90 import config as fp8_config
from ..kernels.sm90.mixed_choice import MixedKernels, choose_kernels, widens
from ..kernels.sm90.mixed_config import BF16, BLOCK_K, SUPERGROUP
from ..kernels.sm100 import config as sm100_config
from ..layouts import TILE_ROWS, Grouped, get_layout
from ..layouts.base import as_bytes
from ..layouts.scales import unswizzle_scale
from . import gpu_dequantize
from .array import ScaledArray
from .formulas import Stored
from .launch import InPlace, Target

__all__ = ["grouped", "multiplied", "unsupported"]

_TMA = 16  # bytes that rows start at multiples of
_TILES = get_layout("tcgen05")
_ROWS = get_layout("sm90")


class Operand(NamedTuple):
    """A matrix, or one for each group, whose contraction comes last.

    Attributes:
        data: (..., rows, bytes), or bf16.
        scale: (..., rows, blocks), or as ``layout`` stores it; None of bf16.
        scalar: the global scale, of formats that have one.
        format: None of bf16.
    """

    data: jax.Array
    scale: jax.Array | None
    scalar: jax.Array | None
    format: Format | None
    layout: str

    @classmethod
    def of(cls, x: ScaledArray | jax.Array, axis: int) -> Operand:
        """Of an operand whose contraction is ``axis``."""
        if not isinstance(x, ScaledArray):
            return cls(x, None, None, None, "compact")
        data, scale = x.data, x.scale
        if x.turned[0] != (axis == -2):
            data = data.swapaxes(-1, -2)
        if x.layout == "compact" and x.turned[1] != (axis == -2):
            scale = scale.swapaxes(-1, -2)
        return cls(as_bytes(data), as_bytes(scale), x.global_scale, x.kind, x.layout)

    @property
    def name(self) -> str | None:
        return None if self.format is None else self.format.name

    @property
    def k(self) -> int:
        """With padding."""
        columns = self.data.shape[-1]
        return columns if self.format is None else self.format.element.elements(columns)

    def compact(self) -> jax.Array:
        """Scales (..., rows, blocks)."""
        assert self.format is not None
        assert self.scale is not None
        if self.layout == "compact":
            return self.scale
        shape = -(-self.data.shape[-2] // self.format.block[0]), -(-self.k // self.format.block[1])
        layout, dtype = get_layout(self.layout), self.format.scale.numpy_dtype
        stored = self.scale.view(layout.stored_dtype(dtype))
        return as_bytes(unswizzle_scale(stored, -1, layout, shape, dtype, None))

    def by_rows(self) -> jax.Array:
        """fp32 scales of each row, in layout "sm90"."""
        assert self.format is not None
        assert self.scale is not None
        rows = self.format.block[0]
        if self.layout == "sm90" and rows == 1:
            return self.scale
        return _ROWS.swizzle(jnp.repeat(self.compact(), rows, -2)[: self.data.shape[-2]])

    def values(self, target: Target) -> jax.Array:
        """bf16 of whole blocks, without the global scale."""
        if self.format is None:
            return self.data
        shape = self.data.shape[-2], self.k
        stored = Stored(self.format, -1, "compact", shape, (False, False))
        data, scale = self.data.view(self.format.element.numpy_dtype), self.compact()
        return gpu_dequantize.decoded(data, scale, None, stored, BFLOAT16, target)


def unsupported(
    a: ScaledArray | jax.Array, b: ScaledArray, out: np.dtype, target: Target, groups: int = 0
) -> str:
    """Why kernels cannot multiply these; empty where they can."""
    left, right = (_Described.of(x, axis) for x, axis in ((a, -1), (b, -2)))
    arch, names = target.gpu.arch, (left.name, right.name)
    if arch != "sm_90a":
        if left.name is None:
            return "a: no kernel multiplies bf16 by quantized weights on Blackwell"
        reason = sm100_config.why_not(left.name, right.name or "", out, arch)
        if not reason and groups > sm100_config.MOST_GROUPS:
            return f"offsets: {groups} groups; kernels take {sm100_config.MOST_GROUPS} at most"
        return reason
    if right.name in fp8_config.FORMATS:
        if left.name is None:
            return f"a: no kernel multiplies bf16 by {right.name}"
        if groups and names != ("fp8_1x128", "fp8_128x128"):
            return f"a, b: grouped, no kernel multiplies {left.name} by {right.name}"
        return fp8_config.why_not(right.row_bytes, out, right.name, arch)
    reason = mixed_config.why_not(left.name or BF16, right.name or "", out, arch)
    if not reason and (left.row_bytes % _TMA or right.row_bytes % _TMA):
        return f"a, b: TMA wants rows of a multiple of {_TMA} bytes; pad K with zeros"
    return reason


class _Described(NamedTuple):
    """Of an operand: the name of its format, and bytes along its contraction."""

    name: str | None
    row_bytes: int

    @classmethod
    def of(cls, x: ScaledArray | jax.Array, axis: int) -> _Described:
        if not isinstance(x, ScaledArray):
            return cls(None, x.shape[axis] * x.dtype.itemsize)
        return cls(x.format, x.data.shape[-3 - axis if x.turned[0] else axis])


def multiplied(
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    bias: jax.Array | None,
    out: np.dtype,
    target: Target,
) -> jax.Array:
    """``a @ b + bias``, matrices; accumulated in fp32, rounded once."""
    left, right = Operand.of(a, -1), Operand.of(b, -2)
    m, n = left.data.shape[0], right.data.shape[0]
    bias = None if bias is None else bias.astype(FLOAT32)
    alpha, ranks = _alpha(left, right)
    epilogue = Epilogue(
        out,
        bias=None if bias is None else FLOAT32,
        alpha=ranks,
        tma_store=n * out.itemsize % _TMA == 0,
    )
    ends = jax.ShapeDtypeStruct((m, n), out), bias, alpha
    if target.gpu.arch != "sm_90a":
        return _tcgen05(left, right, epilogue, ends, target)
    if right.name in fp8_config.FORMATS:
        return _fp8(left, right, epilogue, ends, target)
    return _widened(left, right, epilogue, ends, target)


def grouped(
    a: ScaledArray | jax.Array,
    b: ScaledArray,
    offsets: jax.Array,
    out: np.dtype,
    target: Target,
) -> jax.Array:
    """The product of each group of rows by its matrix; zeros after the last group."""
    left, right = Operand.of(a, -1), Operand.of(b, -2)
    m, (groups, n, _) = left.data.shape[0], right.data.shape
    alpha, ranks = _alpha(left, right)
    epilogue = Epilogue(out, alpha=ranks, tma_store=n * out.itemsize % _TMA == 0)
    ends = jax.ShapeDtypeStruct((m, n), out), None, alpha
    below = right._replace(data=right.data.reshape(groups * n, -1))
    gpu = target.gpu
    if gpu.arch != "sm_90a":
        return _tcgen05_grouped(left, right, offsets, epilogue, ends, target)
    if right.name in fp8_config.FORMATS:
        config = grouped_config.choose_grouped((m, n, right.k), groups, epilogue, gpu=gpu)
        band = grouped_config.supergroup(config.tile, right.k, gpu.multiprocessors)
        given = left.data, left.by_rows(), below.data, right.compact(), *ends
        return target.launch(config, *given, offsets, band, gpu.multiprocessors)[0]
    scale = right.compact().reshape(groups * n, -1)
    chosen = choose_kernels(
        (m, n, right.k), (left.name, below.name or ""), epilogue,
        scales_apart=scale.shape[-1], groups=groups, gpu=gpu,
    )  # fmt: skip
    told = offsets, SUPERGROUP, gpu.multiprocessors
    return _by_widened(chosen, left, below._replace(scale=scale), (*ends, *told), target)


# --- Hopper ---------------------------------------------------------------------------------------


def _fp8(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    gpu, block = target.gpu, get_format(b.name or "").block
    shape = a.data.shape[0], b.data.shape[0], b.k
    config = fp8_config.choose_config(shape, epilogue, b_block=block, gpu=gpu)
    scale = b.by_rows() if block[0] == 1 else b.compact()
    given = a.data, a.by_rows(), b.data, scale, *ends
    return target.launch(config, *given, None, None, gpu.multiprocessors)[0]


def _widened(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    gpu, (m, n) = target.gpu, (a.data.shape[0], b.data.shape[0])
    shape = m, n, b.k
    if not (a.format and mixed_config.promotes(a.format.name)) and not widens(m, n):
        values = [_padded(x.values(target), b.k) for x in (a, b)]
        config = bf16_config.choose_config(shape, epilogue, gpu=gpu)
        return target.launch(config, *values, *ends, None, None, gpu.multiprocessors)[0]
    scale = b.compact()
    chosen = choose_kernels(
        shape, (a.name, b.name or ""), epilogue, scales_apart=scale.shape[-1], gpu=gpu
    )
    told = (gpu.multiprocessors,) if chosen.decodes else (None, None, gpu.multiprocessors)
    return _by_widened(chosen, a, b._replace(scale=scale), (*ends, *told), target)


def _by_widened(
    chosen: MixedKernels, a: Operand, b: Operand, rest: tuple[Any, ...], target: Target
) -> jax.Array:
    """By the kernel that puts A in order, if there is one, and the product. ``b`` has compact
    scales."""
    scale = None if a.format is None else a.by_rows() if chosen.promotes else a.compact()
    values, partials = a.data, None
    if chosen.widen is not None:
        columns = -(-b.k // BLOCK_K) * BLOCK_K
        shape = jax.ShapeDtypeStruct((a.data.shape[0], columns), BFLOAT16)
        words = jax.ShapeDtypeStruct((chosen.partials,), INT32) if chosen.partials else None
        applied = scale if chosen.widen.applies_scales else None
        values, *made = target.launch(chosen.widen, a.data, applied, shape, words)
        partials = InPlace(made[0]) if made else None
    later = scale if chosen.promotes else None
    if chosen.decodes:
        return target.launch(chosen.multiply, values, None, b.data, b.scale, *rest)[0]
    return target.launch(chosen.multiply, values, later, partials, b.data, b.scale, *rest)[-1]


# --- Blackwell ------------------------------------------------------------------------------------


def _tcgen05(
    a: Operand, b: Operand, epilogue: Epilogue, ends: tuple[Any, ...], target: Target
) -> jax.Array:
    names, shape = (a.name or "", b.name or ""), (a.data.shape[0], b.data.shape[0], b.k)
    config = sm100_config.choose_config(shape, names, epilogue, gpu=target.gpu)
    given = ((_loadable(x), _down(_tiles(x), -(-x.data.shape[0] // TILE_ROWS))) for x in (a, b))
    return target.launch(config, *chain.from_iterable(given), *ends, None, None)[0]


def _tcgen05_grouped(
    a: Operand,
    b: Operand,
    offsets: jax.Array,
    epilogue: Epilogue,
    ends: tuple[Any, ...],
    target: Target,
) -> jax.Array:
    m, (groups, n, _), names = a.data.shape[0], b.data.shape, (a.name or "", b.name or "")
    each = -(-m // groups), n, b.k
    config = sm100_config.choose_grouped(each, groups, names, epilogue, gpu=target.gpu)
    spread = Grouped(_TILES)
    rows = jnp.pad(b.compact(), ((0, 0), (0, -n % TILE_ROWS), (0, 0)))
    b_tiles = _TILES.swizzle(rows.reshape(-1, rows.shape[-1]))
    inside = jax.lax.cummax(jnp.clip(offsets, 0, m))  # as the kernel takes what they say
    with jax.enable_x64(True):  # it counts rows so
        a_tiles = spread.swizzle(a.compact(), inside)
    down = spread.padded_rows(m, groups) // TILE_ROWS, rows.shape[1] // TILE_ROWS * groups
    left, right = _loadable(a), _loadable(b).reshape(groups * n, -1)
    band = sm100_config.supergroup(config, target.gpu)
    given = left, _down(a_tiles, down[0]), right, _down(b_tiles, down[1])
    return target.launch(config, *given, *ends, offsets, band)[0]


def _loadable(x: Operand) -> jax.Array:
    """Data with K padded by zeros to whole tiles of scales, if it has four bits: TMA wants that of
    what it unpacks, and of rows that start at multiples of some bytes."""
    assert x.format is not None
    if x.format.element.bits == 8:
        return x.data
    tile = x.format.element.stored(4 * x.format.block_size)
    return jnp.pad(x.data, ((0, 0),) * (x.data.ndim - 1) + ((0, -x.data.shape[-1] % tile),))


def _tiles(x: Operand) -> jax.Array:
    assert x.scale is not None
    return x.scale if x.layout == "tcgen05" else _TILES.swizzle(x.compact())


def _down(tiles: jax.Array, count: int) -> jax.Array:
    """So many rows of tiles, as bytes."""
    return as_bytes(tiles).reshape(count, -1)


# --- both -----------------------------------------------------------------------------------------


def _alpha(a: Operand, b: Operand) -> tuple[Any, tuple[int, ...]]:
    """What accumulators are multiplied by, as kernels take it, and the rank of each."""
    found = [x.scalar for x in (a, b) if x.scalar is not None]
    alpha = None if not found else found[0] if len(found) == 1 else tuple(found)
    return alpha, tuple(each.ndim for each in found)


def _padded(x: jax.Array, k: int) -> jax.Array:
    return x if x.shape[-1] == k else jnp.pad(x, ((0, 0), (0, k - x.shape[-1])))
