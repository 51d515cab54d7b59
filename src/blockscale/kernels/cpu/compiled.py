# mypy: ignore-errors
"""The compiled functions that Python calls, cached on disk so that a second process starts at once.

numba's cache watches only the file that a function is in, and its index names classes of this
folder: one that was renamed since makes it unreadable. So each version of the sources has files of
its own, told apart by a checksum in the functions' names.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ... import error_sums
from . import arith, comparing, decoding, encoding, jit, multiplying

_sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(error_sums.__file__)]
_version = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:16]


def _cached(function):
    function.__qualname__ = f"{function.__name__}-{_version}"
    try:
        kernel = jit.entry(function)
    except RuntimeError:  # none of the folders that numba tries can be written to
        return jit.entry_without_cache(function)

    def call(*args):
        try:
            return kernel(*args)
        except OSError:  # a full disk: the function is compiled by now, only not saved
            return kernel(*args)
        except Exception:  # a damaged file raises anything when it is unpickled
            kernel._cache.flush()
            return kernel(*args)

    return call


@_cached
def quantize_tiles(
    x, data, scale8, scale32, geometry, spec, encode_scale, table, seed, scratch, first, last
):
    encoding.quantize_tiles(
        x, data, scale8, scale32, geometry, spec, encode_scale, table, seed, scratch, first, last
    )


@_cached
def amax_tiles(x, geometry, limit, amax, first, last):
    return encoding.amax_tiles(x, geometry, limit, amax, first, last)


@_cached
def dequantize_tiles(
    data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
    first, last,
):  # fmt: skip
    decoding.dequantize_tiles(
        data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
        first, last,
    )  # fmt: skip


@_cached
def compare_tiles(
    x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest,
    scratch, sums, first, last,
):  # fmt: skip
    comparing.compare_tiles(
        x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest,
        scratch, sums, first, last,
    )  # fmt: skip


@_cached
def multiply_rows(
    x, data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
    first, last,
):  # fmt: skip
    multiplying.multiply_rows(
        x, data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
        first, last,
    )  # fmt: skip


@_cached
def ue4m3_reciprocals(global_scale, largest, values, reciprocals):
    return arith.ue4m3_reciprocals(global_scale, largest, values, reciprocals)
