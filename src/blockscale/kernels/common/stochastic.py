# mypy: ignore-errors
"""fp32 to a code of fewer bits, stochastically: ``rounding.encode_magnitude`` with noise.

One formula for every format and every size of number. The significand is the upper half of 64
bits, and moved right until the last bit that is kept is the lowest of that half: by as many bits as
the element drops, and by one more for each binary order that the number is below the element's
normal ones. Then the lower half is the fraction that noise is compared with, all 32 bits of it.
"""

from __future__ import annotations

from cutlass import Uint32
from cutlass.cute.arch import inline_ptx

from ...rounding import FP32_INF
from .spec import Spec

__all__ = ["stochastic_codes"]


def stochastic_codes(values: list, noise: list, spec: Spec):
    """A word of codes of fp32 ``values``, the first in the lowest bits. A NaN becomes the element's
    NaN, without its sign; the largest value, with it, of elements that have none."""
    code, word = _text(spec), Uint32(0)
    for i, (value, random) in enumerate(zip(values, noise, strict=True)):
        given = [value.bitcast(Uint32), random]
        found = inline_ptx(code, write_only_types=[Uint32], read_only_args=given)
        word = word + (found << (spec.bits * i))
    return word


def _text(spec: Spec) -> str:
    dropped, lowest = 23 - spec.mantissa_bits, 128 - spec.bias  # field of the least normal number
    sign = 1 << (spec.bits - 1)
    nan = (
        f"setp.gt.u32 p, m, 0x{FP32_INF:X}; selp.b32 c, {spec.nan_code}, c, p;"
        if spec.nan_code != spec.max_code
        else ""
    )
    return (
        "{ .reg .b32 m, f, e, s, c; .reg .b64 w; .reg .pred p;"
        " and.b32 m, {$r0}, 0x7FFFFFFF; shr.u32 f, m, 23;"
        f" max.u32 e, f, {lowest};"
        " lop3.b32 s, m, 0x007FFFFF, 0x00800000, 0xEA;"  # m & mantissa | 1
        f" sub.u32 f, e, f; add.u32 f, f, {dropped};"
        " cvt.u64.u32 w, s; shl.b64 w, w, 32; shr.u64 w, w, f; mov.b64 {s, c}, w;"
        " setp.lt.u32 p, {$r1}, s;"
        f" sub.u32 e, e, {lowest}; shl.b32 e, e, {spec.mantissa_bits}; add.u32 c, c, e;"
        f" @p add.u32 c, c, 1; min.u32 c, c, {spec.max_code};"
        f" shr.u32 s, {{$r0}}, {32 - spec.bits}; lop3.b32 c, s, {sign}, c, 0xEA; {nan}"
        " mov.b32 {$w0}, c; }"
    )
