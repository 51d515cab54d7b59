# mypy: ignore-errors
"""fp32 to E2M1, to nearest even and saturating, where no instruction does it: on Hopper.

The codes 0-4, 4-6 and 6-7 of magnitudes are evenly spaced, by 0.5, 1 and 2. So are the floats
around 2^23: by 0.5 below, by 1 above. Hence a sum just below 2^23, rounded, has the first two lines
in its bits, and the code is the least of that, of a third line, and of 7. Signs are put in for all
eight codes of a word at once.
"""

from __future__ import annotations

from cutlass import Uint32
from cutlass.cute.arch import inline_ptx

from .ptx import permute

__all__ = ["e2m1_of_eight", "with_signs"]

_ZERO = 0x4AFFFFFC  # what ``_steps`` gives for 0: four less than the bits of 2^23


def e2m1_of_eight(values: list, signed: list):
    """Eight fp32 values, no NaN, as a word of codes, the first in the lowest bits.

    ``signed``: words that have the values' signs, one for each, or for two of 16 bits.
    """
    word = Uint32(0)
    for i, value in enumerate(values):
        word = word + ((_steps(value) - _ZERO) << (4 * i))
    return with_signs(word, signed)


def with_signs(word, signed: list):
    """Eight codes of magnitudes, with the signs of ``signed``: a word for each, or for two of 16
    bits."""
    even, odd = _top_bytes(signed)
    code = (
        "{ .reg .b32 e, w; shr.b32 e, {$r1}, 4; lop3.b32 w, e, 0x08080808, {$r0}, 0xea;"
        " lop3.b32 {$w0}, {$r2}, 0x80808080, w, 0xea; }"  # of three words: a & b | c
    )
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[word, even, odd])


def _steps(value):
    """``_ZERO`` plus the code of a magnitude."""
    code = (
        "{ .reg .f32 a, n; .reg .s32 i, j; abs.f32 a, {$r0};"
        " add.rn.f32 n, a, 0f4AFFFFFC; mov.b32 i, n;"
        " fma.rn.f32 n, a, 0f3F000000, 0f4B000000; mov.b32 j, n;"
        " min.s32 i, i, j; min.s32 {$w0}, i, 0x4B000003; }"
    )
    return inline_ptx(code, write_only_types=[Uint32], read_only_args=[value])


def _top_bytes(words: list) -> list:
    """Of eight values, the top bytes of the even ones in a word, and those of the odd ones."""
    if len(words) == 8:
        pairs = [[permute(words[j], words[j + 2], 0x73) for j in (i, i + 4)] for i in (0, 1)]
        return [permute(*pair, 0x5410) for pair in pairs]
    mixed = [permute(*words[i : i + 2], 0x7351) for i in (0, 2)]
    return [permute(*mixed, order) for order in (0x5410, 0x7632)]
