# mypy: ignore-errors
"""Codes in words to fp32 values, and back to where they are stored, for ``dequantize_kernel``."""

from __future__ import annotations

import cutlass
import numpy as np
from cutlass import Float32, Uint32, select_
from cutlass.cute.arch import inline_ptx

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..common.arithmetic import narrow
from ..common.ptx import e4m3_value

__all__ = ["load", "scale_value", "values", "words"]

_TYPES = {1: "u8", 2: "u16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}
_PAIRS = {"E4M3": "e4m3x2", "E5M2": "e5m2x2"}
#: The NaN of the reference, twice in a word of halves. A GPU writes the largest pattern, 0x7FFF...
_NANS = {BFLOAT16: 0x7FC07FC0, FLOAT16: 0x7E007E00, FLOAT32: 0x7FC00000}


def load(address, nbytes: int, *, once: bool = False) -> list:
    """1, 2, 4, 8 or 16 bytes of global memory as words, bytes and halves zero-extended. ``once``:
    nobody else needs what lies there, so L1 need not keep it.

    Not by ``ld.global.nc``: the compiler would move that down past the first stores, to save
    registers, when all loads should be under way at once.
    """
    count = max(nbytes // 4, 1)
    names = ", ".join("{$w" + f"{i}" + "}" for i in range(count))
    target = names if count == 1 else "{ " + names + " }"
    hint = ".L1::no_allocate" * once
    loaded = inline_ptx(
        f"ld.global{hint}.{_TYPES[nbytes]} {target}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[address],
    )
    return list(loaded) if count > 1 else [loaded]


def values(given: list, element: str, count: int) -> list:
    """The ``count`` elements, at most eight, whose codes are in words; exact."""
    if element == "E2M1":
        return _e2m1(given[0])[:count]
    return [value for word in given for value in _four(word, _PAIRS[element])]


def _four(word, kind: str) -> tuple:
    """The four elements in a word."""
    pairs = [
        f"cvt.rn.f16x2.{kind} p, c{i}; mov.b32 {{l, h}}, p;"
        f" cvt.f32.f16 {{$w{2 * i}}}, l; cvt.f32.f16 {{$w{2 * i + 1}}}, h;"
        for i in range(2)
    ]
    code = "{ .reg .b16 c<2>, l, h; .reg .b32 p; mov.b32 {c0, c1}, {$r0}; " + " ".join(pairs) + " }"
    return inline_ptx(code, write_only_types=[Float32] * 4, read_only_args=[word])


def _e2m1(word) -> list:
    """Eight E2M1 values. Each code goes, once for its sign and once for the rest, where bf16 has
    these: that is its value times 2^-126, subnormals included, until it is multiplied by 2^126.
    """
    code = "{ .reg .b32 p; mov.b32 p, 0x7E807E80; mul.rn.bf16x2 {$w0}, {$r0}, p; }"
    found = []
    for i in range(4):
        pair = ((word >> Uint32(4 * i)) & Uint32(0x000F000F)) * Uint32(0x1040) & Uint32(0x81C081C0)
        found.append(inline_ptx(code, write_only_types=[Uint32], read_only_args=[pair]))
    low = [pair << Uint32(16) for pair in found]
    high = [pair & Uint32(0xFFFF0000) for pair in found]
    return [each.bitcast(Float32) for each in low + high]


def scale_value(code, scale: str):
    """The fp32 value of a scale in the low bits of a word."""
    if scale == "FP32":
        return code.bitcast(Float32)
    if scale == "E8M0":
        return _e8m0_value(code & Uint32(0xFF))
    return e4m3_value(code & Uint32(0x7F))


def _e8m0_value(byte):
    """2^(byte - 127); 255 is NaN."""
    bits = cutlass.max(byte << Uint32(23), Uint32(0x00400000))  # 2^-127 is subnormal
    return Uint32(select_(byte == Uint32(255), Uint32(0x7FC00000), bits)).bitcast(Float32)


def words(found: list, dtype: np.dtype) -> list:
    """fp32 values rounded to ``dtype``, to nearest even, every NaN that of the reference."""
    kind = "s32" if dtype == FLOAT32 else "s16x2"
    nan = f"0x{_NANS[dtype]:08x}"
    code = f"{{ .reg .b32 n; mov.b32 n, {nan}; min.{kind} {{$w0}}, {{$r0}}, n; }}"
    return [
        inline_ptx(code, write_only_types=[Uint32], read_only_args=[word])
        for word in narrow(found, dtype)
    ]
