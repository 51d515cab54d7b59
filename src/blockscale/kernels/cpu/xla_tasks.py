# mypy: ignore-errors
"""The compiled loops as tasks of XLA's threads: each reads a call's plan and takes tiles.

A task is given the address of a call's room, see ``xla_frame``. A kind of task is an operation and
the items that its loops see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import types
from numba.np.unsafe.ndarray import to_fixed_tuple

from ... import jit
from ...formats import E4M3
from ...rounding import FP32_ONE, MIN_GLOBAL
from ..common.spec import NEAREST_UE4M3, Spec
from . import arith, decoding, encoding, multiplying
from .compiled import SOURCES
from .intrinsics import as_bits, as_float
from .spec import Geometry, least_scale
from .xla_frame import OWN, answer, buffer, functions, join, leave, plan_of, take, view

# Words of a plan, after those of every kind; last, where scratch arrays begin and their bytes.
_FP32_SCALES, _GEOMETRY = OWN, OWN + 1
_SPEC = _GEOMETRY + len(Geometry._fields)
_SCRATCH = _SPEC + len(Spec._fields)

_LARGEST_SCALE = E4M3.max
_least_scale = jit.inlined(least_scale)


@jit.spliced
def _scratch(base, plan, i, dtype):
    at = _SCRATCH + 2 * i
    return view(base + plan[at], plan[at + 1], dtype)


@jit.inlined
def _described(plan):
    geometry = Geometry(*to_fixed_tuple(plan[_GEOMETRY:], 14))
    return geometry, Spec(*to_fixed_tuple(plan[_SPEC:], 15))


@jit.inlined
def _scalar(address, i):
    return np.int64(buffer(address, i, np.int32)[0]) & 0xFFFFFFFF


@jit.spliced
def _scales(address, i):
    """As one-byte scales and as fp32 ones: one of them is empty."""
    given, wide = buffer(address, i, np.uint8), plan_of(address)[_FP32_SCALES]
    return given[given.size * wide :], buffer(address, i, np.int32)[: given.size * wide]


def _quantize(item):
    """Operands: x, a global scale, values of scales. Results: data, scales."""

    def quantize(address):
        plan, base = plan_of(address), join(address)
        geometry, spec = _described(plan)
        x, values = buffer(address, 0, item), buffer(address, 2, np.int32)
        data, (scale8, scale32) = buffer(address, 3, np.uint8), _scales(address, 4)
        scratch = encoding.Scratch(
            _scratch(base, plan, 0, item),
            _scratch(base, plan, 1, item),
            _scratch(base, plan, 2, np.int32),
            _scratch(base, plan, 3, np.int32),
            _scratch(base, plan, 4, np.int32),
            _scratch(base, plan, 5, np.int32),
            _scratch(base, plan, 6, np.int32),
            _scratch(base, plan, 7, np.uint8),
            _scratch(base, plan, 8, np.uint8),
            _scratch(base, plan, 9, np.uint8),
            _scratch(base, plan, 10, np.uint8),
        )
        table, encode_scale = _scratch(base, plan, 11, np.int32), np.int64(FP32_ONE)
        first, last = take(address)
        if first < last and spec.kind == NEAREST_UE4M3:
            encode_scale = np.int64(
                arith.ue4m3_reciprocals(_scalar(address, 1), spec.max_bits, values, table)
            )
        while first < last:
            encoding.quantize_tiles(
                x, data, scale8, scale32, geometry, spec, encode_scale, table, None, (0, 0, 0),
                scratch, first, last,
            )  # fmt: skip
            first, last = take(address)
        leave(address)

    return quantize


@jit.spliced
def _quantized(address):
    """Data, scales, and values of elements and of scales."""
    data, (scale8, scale32) = buffer(address, 0, np.uint8), _scales(address, 1)
    return data, scale8, scale32, buffer(address, 3, np.int32), buffer(address, 4, np.int32)


@jit.spliced
def _decoding_scratch(base, plan):
    return decoding.Scratch(
        _scratch(base, plan, 0, np.uint8),
        _scratch(base, plan, 1, np.float32),
        _scratch(base, plan, 2, np.int32),
    )


def _dequantize(item):
    """Operands: data, scales, a global scale, values of elements and of scales."""

    def dequantize(address):
        plan, base = plan_of(address), join(address)
        geometry, spec = _described(plan)
        data, scale8, scale32, values, scales = _quantized(address)
        out = buffer(address, 5, item)
        factor, scratch = _scalar(address, 2), _decoding_scratch(base, plan)
        first, last = take(address)
        while first < last:
            decoding.dequantize_tiles(
                data, scale8, scale32, out, geometry, spec, values, scales, factor,
                _least_scale(factor), scratch, first, last,
            )  # fmt: skip
            first, last = take(address)
        leave(address)

    return dequantize


def _multiply(item):
    """Operands: those of ``_dequantize``, x."""

    def multiply(address):
        plan, base = plan_of(address), join(address)
        geometry, spec = _described(plan)
        data, scale8, scale32, values, scales = _quantized(address)
        x = buffer(address, 5, item)
        out = buffer(address, 6, item)
        factor = _scalar(address, 2)
        scratch = multiplying.Scratch(
            _decoding_scratch(base, plan),
            _scratch(base, plan, 3, np.int32),
            _scratch(base, plan, 4, np.float32),
        )
        first, last = take(address)
        while first < last:
            multiplying.multiply_rows(
                x, data, scale8, scale32, out, geometry, spec, values, scales, factor,
                _least_scale(factor), scratch, first, last,
            )  # fmt: skip
            first, last = take(address)
        leave(address)

    return multiply


def _global_scale(limit):
    """Operands: x. Results: bits of global scales of tiles, the largest is that of x; 0 of zeros.

    They are divided here, as XLA multiplies by a reciprocal instead. ``limit``: the largest finite
    item.
    """

    def for_items(item):
        def global_scale(address):
            plan, base = plan_of(address), join(address)
            geometry, spec = _described(plan)
            x, out = buffer(address, 0, item), buffer(address, 1, np.int32)
            largest = np.float32(_LARGEST_SCALE) * as_float(np.int32(spec.max_bits))
            scratch = _scratch(base, plan, 0, item)
            for c in range(scratch.size):
                scratch[c] = 0
            first, last = take(address)
            while first < last:
                for tile in range(first, last):
                    out[tile] = 0
                amax = encoding.amax_tiles(x, geometry, limit, scratch, first, last)
                if amax:
                    found = arith.exact_divide(np.int64(amax), np.int64(as_bits(largest)))
                    out[first] = max(found, MIN_GLOBAL)
                first, last = take(address)
            leave(address)

        return global_scale

    return for_items


#: Kinds of tasks: what compiles each, for which items of memory.
KINDS: dict[str, tuple[Callable, object]] = {
    "quantize_float32": (_quantize, np.int32),
    "quantize_bfloat16": (_quantize, np.uint16),
    "quantize_float16": (_quantize, np.int16),
    "global_scale_float32": (_global_scale(0x7F7FFFFF), np.int32),
    "global_scale_bfloat16": (_global_scale(0x7F7F), np.uint16),
    "global_scale_float16": (_global_scale(0x7BFF), np.int16),
    "dequantize_float32": (_dequantize, np.int32),
    "dequantize_bfloat16": (_dequantize, np.uint16),
    "multiply": (_multiply, np.float32),
}


@cache
def load(kind: str) -> int:
    """Compile a kind of task, or read it from disk, for :func:`handler`; its number."""
    build, item = KINDS[kind]
    function, number = build(item), list(KINDS).index(kind)
    function.__qualname__ = kind
    functions[number] = jit.c_function(SOURCES, types.void(types.intp))(function)
    return number


@cache
def handler() -> int:
    """The address of the function that XLA calls, whatever the kind."""
    return jit.c_function(SOURCES, types.intp(types.intp))(answer)
