# mypy: ignore-errors
"""The compiled functions that Python calls, cached on disk so that a second process starts at once.

numba's cache watches only the file that a function is in. It also counts the values of a function's
free variables, though: naming ``sources`` in each makes them watch this folder, and the constants
that the loops take from elsewhere.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ... import error_sums
from . import arith, comparing, decoding, encoding


def _cached(function):
    try:
        kernel = arith.entry(function)
    except RuntimeError:  # none of the folders that numba tries can be written to
        return arith.entry_without_cache(function)

    def call(*args):
        try:
            return kernel(*args)
        except OSError:  # a full disk: the function is compiled by now, only not saved
            return kernel(*args)

    return call


def _define(sources):
    def quantize_tiles(
        x, data, scale8, scale32, geometry, spec, encode_scale, table, scratch, first, last
    ):
        sources  # noqa: B018
        encoding.quantize_tiles(
            x, data, scale8, scale32, geometry, spec, encode_scale, table, scratch, first, last
        )

    def amax_tiles(x, geometry, limit, amax, first, last):
        sources  # noqa: B018
        return encoding.amax_tiles(x, geometry, limit, amax, first, last)

    def dequantize_tiles(
        data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least, scratch,
        first, last,
    ):  # fmt: skip
        sources  # noqa: B018
        decoding.dequantize_tiles(
            data, scale8, scale32, out, geometry, spec, values, scales, global_scale, least,
            scratch, first, last,
        )  # fmt: skip

    def compare_tiles(
        x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest,
        scratch, sums, first, last,
    ):  # fmt: skip
        sources  # noqa: B018
        comparing.compare_tiles(
            x, data, scale8, scale32, geometry, spec, values, scales, global_scale, least, largest,
            scratch, sums, first, last,
        )  # fmt: skip

    def ue4m3_reciprocals(global_scale, largest, values, reciprocals):
        sources  # noqa: B018
        return arith.ue4m3_reciprocals(global_scale, largest, values, reciprocals)

    entries = quantize_tiles, amax_tiles, dequantize_tiles, compare_tiles, ue4m3_reciprocals
    return [_cached(entry) for entry in entries]


_files = [*sorted(Path(__file__).parent.glob("*.py")), Path(error_sums.__file__)]
_text = b"".join(path.read_bytes() for path in _files)
quantize_tiles, amax_tiles, dequantize_tiles, compare_tiles, ue4m3_reciprocals = _define(
    hashlib.sha256(_text).hexdigest()
)
