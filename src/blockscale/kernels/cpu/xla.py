"""The compiled loops called with JAX's arrays, on a CPU: the bytes of ``calls``, under ``jax.jit``.

XLA calls the loops itself, by its typed FFI, and spreads them over its own threads. numba is
imported, and a loop compiled or read from disk, when a call is first traced. Nothing here imports
torch. Results do not depend on the number of threads. XLA flushes subnormals to zero, which only
sums of products show.

Formats are those that ``supported`` takes. Data is uint8; scales are uint8, or float32 where a
format's are. ``jax.vmap`` calls for one after the other; leading dimensions are batches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from ...dtypes import FLOAT32
from ...formats import FP32, UE4M3, Format, formats
from ...rounding import FP32_ONE
from ..common.spec import NEAREST_UE4M3, specify
from .spec import Geometry, Strided, geometry, scale_values, supported, values

__all__ = ["data_shape", "dequantize", "global_scale", "multiply", "quantize", "supported"]

#: How the loops see x.
_ITEMS = {"float32": np.int32, "bfloat16": np.uint16, "float16": np.int16}
_CHUNK = 1 << 18  # elements that are worth a thread of their own: some 50 microseconds


def data_shape(shape: Sequence[int], format: Format, axis: int) -> tuple[int, ...]:
    """Shape of the data that :func:`quantize` gives for an ``x`` of ``shape``.

    It is ``format.data_shape``, but for packed data along axis -2, whose bytes hold neighbours
    along M: (..., K, packed M), as torch's lies in memory. ``jnp.swapaxes`` gives the other shape.
    """
    stored = format.data_shape(shape, axis)
    return (*stored[:-2], stored[-1], stored[-2]) if format.turned(axis, False) else stored


@partial(jax.jit, static_argnames=("format", "axis", "scale_rounding", "nonfinite"))
def quantize(
    x: jax.Array,
    format: Format,
    *,
    axis: int = -1,
    scale_rounding: str | None = None,
    nonfinite: str = "propagate",
    global_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Data and compact scales of ``x`` (..., M, K), byte for byte those of ``calls.quantize``.

    ``x`` is float32, bfloat16 or float16; ``global_scale`` is an fp32 scalar, which formats that
    have one need. Data has :func:`data_shape`, scales have ``format.scale_shape``.
    """
    from . import encoding

    _check_dtype(x)
    constants = specify(format, scale_rounding or format.default_scale_rounding, nonfinite)
    if constants.kind == NEAREST_UE4M3 and global_scale is None:
        raise ValueError(f"global_scale: {format.name} needs one")
    grid, items = _geometry(x.shape, format, axis), np.empty(0, _ITEMS[x.dtype.name])
    scratch = (*encoding.make_scratch(items, grid, constants, False), np.empty(128, np.int32))
    work = _Work(f"quantize_{x.dtype.name}", grid.tiles, grid.chunk(_CHUNK))
    data, scale = work.call(
        (x, _scalar(global_scale), scale_values(UE4M3)[:128]),
        (
            jax.ShapeDtypeStruct(data_shape(x.shape, format, axis), np.uint8),
            jax.ShapeDtypeStruct(
                format.scale_shape(x.shape, axis), FLOAT32 if format.scale is FP32 else np.uint8
            ),
        ),
        (_has_fp32_scales(format), *grid, *constants),
        scratch,
    )
    return data, scale


@partial(jax.jit, static_argnames="format")
def global_scale(x: jax.Array, format: Format) -> jax.Array:
    """As ``calls.global_scale``: what :func:`quantize` takes, of a format that has one."""
    _check_dtype(x)
    grid = _geometry(x.shape, formats["mxfp8"], -1)  # any blocks along the rows
    (found,) = _Work(f"global_scale_{x.dtype.name}", grid.tiles, grid.chunk(_CHUNK)).call(
        (x,),
        (jax.ShapeDtypeStruct((grid.tiles,), np.int32),),
        _described(format, grid),
        (np.empty(grid.width, _ITEMS[x.dtype.name]),),
    )
    bits = jnp.max(found, initial=0)
    return jax.lax.bitcast_convert_type(jnp.where(bits == 0, np.int32(FP32_ONE), bits), FLOAT32)


@partial(jax.jit, static_argnames=("format", "shape", "axis", "dtype"))
def dequantize(
    data: jax.Array,
    scale: jax.Array,
    format: Format,
    *,
    shape: tuple[int, ...],
    axis: int = -1,
    global_scale: jax.Array | None = None,
    dtype: np.dtype = FLOAT32,
) -> jax.Array:
    """Values of what :func:`quantize` gave for an ``x`` of ``shape``, as ``calls.dequantize``.

    They are rounded to fp32, then to ``dtype``: float32, bfloat16 or float16.
    """
    from . import decoding

    if format.turned(axis, False):
        turned = (*shape[:-2], shape[-1], shape[-2])
        scale = jnp.swapaxes(scale, -1, -2)
        options = {"global_scale": global_scale, "dtype": dtype}
        return jnp.swapaxes(dequantize(data, scale, format, shape=turned, **options), -1, -2)
    name = "bfloat16" if jnp.dtype(dtype) == jnp.bfloat16 else "float32"
    grid = _geometry(shape, format, axis)
    (out,) = _Work(f"dequantize_{name}", grid.tiles, grid.chunk(_CHUNK)).call(
        _quantized(data, scale, format, global_scale),
        (jax.ShapeDtypeStruct(shape, name),),
        _described(format, grid),
        decoding.make_scratch(grid.width),
    )
    return out.astype(dtype)


@partial(jax.jit, static_argnames=("format",))
def multiply(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    format: Format,
    *,
    global_scale: jax.Array | None = None,
) -> jax.Array:
    """``x @ w.T`` in fp32, by a matrix ``w`` (N, K) that is given as data and compact scales.

    ``x`` is (M, K): a few rows, as each is read again for every row of ``w``. As
    ``calls.multiply``, and added up in its order.
    """
    from . import multiplying

    (m, k), n = x.shape, data.shape[0]
    grid = geometry(Strided((1, n, k), n * k, k), format, -1, in_rows=True)
    padded = jnp.pad(x.astype(FLOAT32), ((0, 0), (0, -k % multiplying.LANES)))
    scratch = multiplying.make_scratch(m)
    (out,) = _Work("multiply", n, max(1, _CHUNK // max(1, k))).call(
        (*_quantized(data, scale, format, global_scale), padded),
        (jax.ShapeDtypeStruct((m, n), FLOAT32),),
        _described(format, grid),
        (*scratch.decoding, scratch.line, scratch.sums),
    )
    return out


@dataclass(frozen=True)
class _Work:
    """A kind of task, how many tiles there are, and how many are worth a thread."""

    kind: str
    tiles: int
    chunk: int

    def call(
        self,
        operands: Sequence[jax.Array | np.ndarray],
        results: Sequence[jax.ShapeDtypeStruct],
        words: Sequence[int],
        scratch: Iterable[np.ndarray],
    ) -> Sequence[jax.Array]:
        """What XLA gives; ``words`` and ``scratch`` (only its sizes) are of ``xla_tasks``."""
        from . import xla_frame as frame

        if not self.tiles:
            return [jnp.zeros(each.shape, each.dtype) for each in results]
        places, end = [], 0
        for array in scratch:
            places += [end, array.nbytes]
            end += -(-array.nbytes // frame.CACHE_LINE) * frame.CACHE_LINE
        sizes = [math.prod(each.shape) * each.dtype.itemsize for each in (*operands, *results)]
        sizes += [0] * (frame.MOST_BUFFERS - len(sizes))
        threads = max(1, min(os.cpu_count() or 1, self.tiles // self.chunk))
        header = _registered(self.kind), self.tiles, self.chunk, threads, end
        plan = np.array([*header, *sizes, *words, *places], np.int64)
        room = jax.ShapeDtypeStruct((frame.room(plan.size, threads, end),), np.uint8)
        name, given = _NAME + self.kind, map(jnp.asarray, operands)
        target = jax.ffi.ffi_call(name, [*results, room], vmap_method="sequential")
        return target(*given, plan=plan)[:-1]


_NAME = "blockscale_"


@cache
def _registered(kind: str) -> int:
    """Let XLA know the loop; its number."""
    from . import xla_tasks

    number = xla_tasks.load(kind)
    capsule = jax.ffi.pycapsule(xla_tasks.handler())
    jax.ffi.register_ffi_target(_NAME + kind, capsule, platform="cpu")
    return number


def _check_dtype(x: jax.Array) -> None:
    if x.dtype.name not in _ITEMS:
        raise TypeError(f"x: got {x.dtype}; expected float32, bfloat16 or float16")


def _geometry(shape: Sequence[int], format: Format, axis: int) -> Geometry:
    rows, columns = shape[-2:] if len(shape) > 1 else (1, *shape)
    strided = Strided((math.prod(shape[:-2]), rows, columns), rows * columns, columns)
    return geometry(strided, format, axis)


def _scalar(global_scale: jax.Array | None) -> jax.Array:
    one = 1.0 if global_scale is None else global_scale
    return jnp.asarray(one, FLOAT32).reshape(())


def _has_fp32_scales(format: Format) -> int:
    return int(format.scale is FP32)


def _quantized(
    data: jax.Array, scale: jax.Array, format: Format, global_scale: jax.Array | None
) -> tuple[jax.Array | np.ndarray, ...]:
    """The operands that all tasks have that decode."""
    tables = values(format.element), scale_values(format.scale)
    return data, scale, _scalar(global_scale), *tables


def _described(format: Format, grid: Geometry) -> tuple[int, ...]:
    constants = specify(format, format.default_scale_rounding, "te")
    return _has_fp32_scales(format), *grid, *constants
