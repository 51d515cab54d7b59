# mypy: ignore-errors
"""The E2M1 value nearest to an fp32 magnitude, in fp32: what its code stands for.

Values are 0.5 apart below 2, 1 below 4, and 2 above: half a unit of a magnitude's power of two,
which is 1 at least. A sum of the magnitude and 2^22 times that power is rounded to just so much.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32

from .arithmetic import fma

__all__ = ["e2m1_values"]

_LARGEST, _ONE, _EXPONENT = 0x40C00000, 0x3F800000, 0x7F800000


def e2m1_values(magnitudes: list, blackwell: bool) -> list:
    """To nearest even, and saturating."""
    bits = [cutlass.min(each.bitcast(Uint32), Uint32(_LARGEST)) for each in magnitudes]
    powers = [cutlass.max(each & Uint32(_EXPONENT), Uint32(_ONE)) for each in bits]
    powers = [each.bitcast(Float32) for each in powers]
    up, down = ([Float32(value)] * len(bits) for value in (2.0**22, -(2.0**22)))
    sums = fma(powers, up, [each.bitcast(Float32) for each in bits], blackwell)
    return fma(powers, down, sums, blackwell)  # exact
