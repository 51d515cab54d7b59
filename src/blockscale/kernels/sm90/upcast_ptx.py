# mypy: ignore-errors
"""E2M1 times a power of two as E4M3: the codes of eight magnitudes, and how elements pick theirs.

A code is a byte: those of 0, 1/2, 1, 3/2 in one word, of 2, 3, 4, 6 in another one.
"""

from __future__ import annotations

from cutlass import Float32, Int32

from .k_blocks import HIGHEST, LEAST_NORMAL
from .ptx import _asm

__all__ = [
    "absolute",
    "bases",
    "byte_of_word",
    "codes",
    "codes_of_normal",
    "is_positive",
    "ld_shared_if",
    "upcast",
]

_NAN = 0x7F7F7F7F
#: Of magnitudes times 2^j: where all of them are normal numbers j adds to the exponents of all, but
#: of zero.
_LOW, _LOW_STEP, _HIGH, _HIGH_STEP = 0x3C383000, 0x08080800, 0x4C484440, 0x08080808
#: Others, some of whose magnitudes are subnormal.
_SUBNORMAL = {
    -6: (0x0C080400, 0x1C181410),
    -7: (0x06040200, 0x14100C08),
    -8: (0x03020100, 0x0C080604),
}


def bases(exponent) -> list:
    """What ``codes_of_normal`` adds."""
    return [_LOW - exponent * _LOW_STEP, _HIGH - exponent * _HIGH_STEP]


def byte_of_word(part):
    """What picks a byte of a word, and zeros."""
    return part | 0x4440


def codes_of_normal(scales, byte, bases: list) -> list:
    """Those of magnitudes times 2^(scale - exponent), all of which but zero are normal numbers.
    ``scales``: four bytes, of which ``byte`` picks one."""
    code = (
        "{ .reg .b32 e; prmt.b32 e, $2, 0, $3;"
        f" mad.lo.s32 $0, e, {_LOW_STEP}, $4; mad.lo.s32 $1, e, {_HIGH_STEP}, $5; }}"
    )
    return _asm(code, [Int32] * 2, [scales, byte, *bases], ["r"] * 4)


def codes(scales, byte, exponent) -> list:
    """Those of any: zeros where they are out of E4M3's range, as another pass has them; NaN of a
    scale that is."""
    code = (
        "{ .reg .pred p, q; .reg .b32 j, l, h, t; prmt.b32 j, $2, 0, $3;"
        " setp.eq.u32 q, j, 255; sub.s32 j, j, $4;"
        f" mad.lo.s32 l, j, {_LOW_STEP}, {_LOW}; mad.lo.s32 h, j, {_HIGH_STEP}, {_HIGH};"
        f" sub.s32 t, j, {LEAST_NORMAL}; setp.gt.u32 p, t, {HIGHEST - LEAST_NORMAL};"
        " selp.b32 l, 0, l, p; selp.b32 h, 0, h, p;"
    )
    for j, (low, high) in _SUBNORMAL.items():
        code += f" setp.eq.s32 p, j, {j}; selp.b32 l, {low}, l, p; selp.b32 h, {high}, h, p;"
    code += f" selp.b32 $0, {_NAN}, l, q; selp.b32 $1, {_NAN}, h, q; }}"
    return _asm(code, [Int32] * 2, [scales, byte, exponent], ["r"] * 3)


def upcast(word, table) -> list:
    """The eight elements of a word, in two."""
    code = (
        "{ .reg .b32 s, t, y, z, u, v; and.b32 s, $2, 0x77777777; prmt.b32 u, $3, $4, s;"
        " shr.u32 s, s, 16; prmt.b32 v, $3, $4, s; shl.b32 t, $2, 4;"
        # the sign of an element is the highest bit of a byte of the word, or of it moved by four
        " prmt.b32 y, t, $2, 0x5140; prmt.b32 z, t, $2, 0x7362;"
        " lop3.b32 $0, y, 0x80808080, u, 0xea; lop3.b32 $1, z, 0x80808080, v, 0xea; }"
    )
    return _asm(code, [Int32] * 2, [word, *table], ["r"] * 3)


def absolute(value):
    return _asm("abs.f32 $0, $1;", [Float32], [value], ["f"])[0]


def is_positive(value):
    """1 unless the sign of fp32 is that of negative numbers."""
    code = "{ .reg .b32 x; mov.b32 x, $1; shr.u32 x, x, 31; xor.b32 $0, x, 1; }"
    return _asm(code, [Int32], [value], ["f"])[0]


def ld_shared_if(wanted, address):
    """fp32, or zero unless ``wanted`` is 1."""
    code = (
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; mov.f32 $0, 0f00000000; @p ld.shared.f32 $0, [$2]; }"
    )
    return _asm(code, [Float32], [Int32(wanted), address], ["r", "r"], memory=True)[0]
