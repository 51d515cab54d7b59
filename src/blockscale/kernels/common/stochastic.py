# mypy: ignore-errors
"""fp32 to a code of fewer bits, stochastically: ``rounding.encode_magnitude`` with noise.

One formula for every format and every size of number. The significand is the upper half of 64
bits, and moved right until the last bit that is kept is the lowest of that half: by as many bits as
the element drops, and by one more for each binary order that the number is below the element's
normal ones. Then the lower half is the fraction that noise is compared with, all 32 bits of it: the
borrow of their difference rounds up. Signs are put in for all codes of a word at once.
"""

from __future__ import annotations

from cutlass import Uint32
from cutlass.cute.arch import inline_ptx

from ...rounding import FP32_INF
from .e2m1 import with_signs
from .ptx import permute
from .spec import Spec

__all__ = ["stochastic_code", "stochastic_codes"]


def stochastic_codes(values: list, noise: list, spec: Spec, nans: bool):
    """A word of codes of fp32 ``values``, the first in the lowest bits. With ``nans``, a NaN, whose
    sign is clear, becomes the element's; else the largest value, as where elements have none."""
    code, word = _text(spec, nans and spec.nan_code != spec.max_code), Uint32(0)
    given = [value.bitcast(Uint32) for value in values]
    for i, each in enumerate(zip(given, noise, strict=True)):
        less = inline_ptx(code, write_only_types=[Uint32], read_only_args=list(each))
        word = word - (less << (spec.bits * i))
    if spec.bits == 4:
        return with_signs(word, given)
    pairs = [permute(*given[i : i + 2], 0x0073) for i in (0, 2)]  # top bytes
    mixed = permute(*pairs, 0x5410)
    text = "lop3.b32 {$w0}, {$r0}, 0x80808080, {$r1}, 0xEA;"  # a & b | c
    return inline_ptx(text, write_only_types=[Uint32], read_only_args=[mixed, word])


def stochastic_code(value, noise, spec: Spec):
    """The code of an fp32 magnitude; the largest one of a NaN."""
    code, given = _text(spec, nans=False), [value.bitcast(Uint32), noise]
    return Uint32(0) - inline_ptx(code, write_only_types=[Uint32], read_only_args=given)


def _text(spec: Spec, nans: bool) -> str:
    """Minus the code of a magnitude."""
    dropped, lowest = 23 - spec.mantissa_bits, 128 - spec.bias  # field of the least normal number
    nan = f"setp.gt.u32 p, m, 0x{FP32_INF:X}; selp.b32 c, {-spec.nan_code}, c, p;" if nans else ""
    return (
        "{ .reg .b32 m, f, e, s, c; .reg .b64 w; .reg .pred p;"
        " and.b32 m, {$r0}, 0x7FFFFFFF; shr.u32 f, m, 23;"
        f" max.u32 e, f, {lowest};"
        " lop3.b32 s, m, 0x007FFFFF, 0x00800000, 0xEA;"  # m & mantissa | 1
        f" sub.u32 f, e, f; add.u32 f, f, {dropped};"
        " cvt.u64.u32 w, s; shl.b64 w, w, 32; shr.u64 w, w, f; mov.b64 {s, c}, w;"
        f" mad.lo.s32 e, e, {-(1 << spec.mantissa_bits)}, {lowest << spec.mantissa_bits};"
        " sub.cc.u32 s, {$r1}, s; subc.u32 c, e, c;"
        f" max.s32 c, c, {-spec.max_code}; {nan}"
        " mov.b32 {$w0}, c; }"
    )
