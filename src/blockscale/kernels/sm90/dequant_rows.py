# mypy: ignore-errors
"""Rows of B, widened in registers as tensor cores take them: a thread's two rows, eight apart.

Four lanes share these rows, and have 32 neighbours along K of each in a stage. A unit is 16 of
them, two octets of each row: what four products of 16 columns of K want in four registers each.
"""

from __future__ import annotations

from cutlass import Float32, Int32, cute, range_constexpr

from ...formats import Format
from .dequant import WIDENERS, ue4m3_factors

__all__ = ["Rows", "place"]


def place(row, part, row_bytes: int):
    """Where the ``part`` of a row is that one of its four lanes has, in a swizzled tile. Of 8 bits
    it has 16 bytes more, at the same address but for the bit of 16."""
    chunk = (2 * part) ^ (row % 8) if row_bytes == 128 else part ^ (row // 2 % 4)
    return row * row_bytes + chunk * 16


class Rows:
    """``steps`` times two rows of a thread, on the device."""

    def __init__(self, format: Format, steps: int):
        self.widener = WIDENERS[format.element.name]
        self.fine = format.scale.name == "UE4M3"  # a scale for each unit
        self.kept = 4 if self.fine else 3  # registers for the scales of two rows
        self.scale_bytes = 2 if self.fine else 1  # of a lane's part of a row
        self.steps = steps
        self.one = cute.arch.grid_dim()[1]
        self.seen = cute.make_rmem_tensor((2 * self.steps,), Int32)

    def factors(self, low, high) -> list:
        """Of the scales of two rows: a factor for each row and unit; or one for each row, and a
        word of both scales, and of whether these are left out of the factors."""
        if self.fine:
            return [each for pair in (low, high) for each in ue4m3_factors(pair)]
        scales = high * 256 + low
        *factors, left_out = self.widener.e8m0_factors(scales, 2)
        return [*factors, left_out * 0x10000 + scales]

    def widen(self, words: list, factors: list, step: int, unit: int) -> list:
        """A unit, of whose first row are the first half of ``words``: for each 16 columns of K four
        registers."""
        octets = [self._octet(words, factors, step, unit, i) for i in range(4)]
        pairs = [
            octets[k // 2 * 2 + row][k % 2 * 2 + side]
            for k in range(4)
            for side in (0, 1)
            for row in (0, 1)
        ]
        if self.fine:
            return pairs
        return self.widener.rescaled(pairs, factors[2], 2, factors[2] & 0x10000)

    def _octet(self, words: list, factors: list, step: int, unit: int, i: int) -> list:
        """The ``i``-th octet of a unit, widened; rows take turns."""
        row, count = i % 2, self.widener.words
        own = words[(2 * row + i // 2) * count :][:count]
        self.seen[2 * step + row] = self.widener.marked(self.seen[2 * step + row], own, self.one)
        factor = factors[2 * row + unit] if self.fine else factors[row]
        return self.widener.octet(own, factor)

    @cute.jit
    def poison(self, sums):
        """Sums of rows of B that had a NaN: those of four threads. ``sums``: of each step, four of
        each eight rows of A."""
        for i in range_constexpr(2 * self.steps if self.widener.special else 0):
            seen = self.seen[i]
            for distance in range_constexpr(1, 3):
                seen = seen | cute.arch.shuffle_sync_bfly(seen, distance)
            if seen & 0x80808080 != 0:
                for group in range_constexpr(cute.size(sums[0]) // 4):
                    for j in range_constexpr(2):
                        sums[i // 2][4 * group + 2 * (i % 2) + j] = Float32(float("nan"))
