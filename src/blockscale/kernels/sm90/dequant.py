# mypy: ignore-errors
"""Elements of four and eight bits times their block scales, as bf16 in registers.

An element's bits are put where bf16 has its sign, its lowest exponent bits and its highest mantissa
bits: that is its value times a power of two, subnormals included. One multiplication by the scale
and the inverse of that power is exact where bf16 can hold both factors and the result. A scale so
large that bf16 cannot hold its product with the power is left out, and multiplied by afterwards.

An octet, eight neighbours along K, becomes four pairs of neighbours: words of two steps of a wgmma,
whose columns of K may be in any order that both operands share.

Hopper does logic, shifts and additions of integers at half the rate of other instructions, and
what widens is bound by them: multiplications take their place where they can.

``Rows`` are a thread's rows of B as tensor cores take them: two of them, eight apart. Four lanes
share these, and have 32 neighbours along K of each in a stage, or 16 where it is half a K block. A
unit is 16 of them, two octets of each row: what four products of 16 columns of K want in four
registers each.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, cute, range_constexpr

from ...formats import Format
from .ptx import _asm

__all__ = ["WIDENERS", "Rows", "Widener", "e8m0_factor", "place", "ue4m3_factors"]

_MARK = 0xBE  # lop3: (a ^ b) | c
_E8M0 = (  # of a byte b: 2^-127 is subnormal, 255 is NaN
    "mul.lo.u32 {x}, {b}, 0x00800080; max.u32 {x}, {x}, 0x00400040;"
    " setp.eq.u32 e, {b}, 255; selp.b32 z, 0x00400040, 0, e; or.b32 {x}, {x}, z;"
)


def _power(exponent: int) -> str:
    """A power of two as bf16, twice."""
    return f"0x{((exponent + 127) << 7) * 0x10001:08x}"


@dataclass(frozen=True)
class Widener:
    """How elements of one kind are widened.

    Attributes:
        bits: of an element.
        shift: to the left, of an element in the lower byte of 16 bits, to where bf16 has it.
        mask: the bits of a word that hold two widened elements.
        powers: exponents of the powers of two whose product brings a widened element to its value.
            Of three, the second one makes infinities of what stands for them.
        special: added to a byte without its sign, this reaches the sign where the byte is NaN.
    """

    bits: int
    shift: int
    mask: int
    powers: tuple[int, ...]
    special: int = 0

    @property
    def words(self) -> int:
        """Of an octet."""
        return self.bits // 4

    @property
    def folds(self) -> bool:
        """Whether a scale is multiplied by the power of two first."""
        return len(self.powers) == 1

    def octet(self, words: list, factor) -> list:
        """Four pairs times ``factor``."""
        count = len(words)
        lines = ["shl.b32 y, $4, 4;"] if self.bits == 4 else []  # elements in the upper halves
        for i in range(4):
            lines += [self._pair(i), f"mul.lo.u32 x, x, {1 << self.shift};"]
            lines.append(f"and.b32 x, x, 0x{self.mask:08x};")
            for each in [] if self.folds else self.powers:
                lines.append(f"mov.b32 z, {_power(each)}; mul.rn.bf16x2 x, x, z;")
            lines.append(f"mul.rn.bf16x2 o{i}, x, ${4 + count};")
        lines += [f"mov.b32 ${i}, o{i};" for i in range(4)]  # when all that is given has been read
        code = "{ .reg .b32 x, y, z, o<4>; " + " ".join(lines) + " }"
        return _asm(code, [Int32] * 4, [*words, factor], ["r"] * (count + 1))

    def _pair(self, i: int) -> str:
        """The bytes of the ``i``-th pair in x, their signs repeated in the bytes above."""
        low, high = (i, 4 + i) if self.bits == 4 else (2 * i, 2 * i + 1)
        taken = low | (8 + low) << 4 | high << 8 | (8 + high) << 12
        return f"prmt.b32 x, {'y, $4' if self.bits == 4 else '$4, $5'}, 0x{taken:04x};"

    def e8m0_factors(self, scales, count: int) -> list:
        """What octets of blocks are multiplied by, whose scales are the ``count`` lowest bytes of a
        word, and whether that leaves out the scales, which is so for all of a warp if one of its
        lanes has a scale that is too large, or NaN."""
        if not self.folds:
            return [*(e8m0_factor(scales >> (8 * i) & 255) for i in range(count)), Int32(0)]
        (power,) = self.powers
        given = [f"s{i}" for i in range(count)]
        lines = [f"bfe.u32 {each}, ${count + 1}, {8 * i}, 8;" for i, each in enumerate(given)]
        lines += [f"mov.b32 x, {given[0]};", *(f"max.u32 x, x, {each};" for each in given[1:])]
        lines.append(f"setp.gt.u32 p, x, {254 - power};")
        lines.append("vote.sync.any.pred p, p, 0xffffffff;")
        for i, each in enumerate(given):
            lines.append(f"mad.lo.u32 o{i}, {each}, 0x00800080, 0x{power * 0x00800080:08x};")
            lines.append(f"selp.b32 o{i}, {_power(power)}, o{i}, p;")
        lines += [f"mov.b32 ${i}, o{i};" for i in range(count)] + [f"selp.b32 ${count}, 1, 0, p;"]
        code = f"{{ .reg .pred p; .reg .b32 x, o<{count}>, s<{count}>; " + " ".join(lines) + " }"
        return _asm(code, [Int32] * (count + 1), [scales], ["r"])

    def rescaled(self, pairs: list, scales, count: int, left_out) -> list:
        """``pairs`` times scales that were left out; a branch, seldom taken. Each ``count``-th pair
        has the same scale."""
        if not self.folds:
            return pairs
        total = len(pairs)
        lines = [f"setp.eq.u32 p, ${total}, 0; @p bra.uni DONE;"]
        for i in range(count):
            lines.append(f"bfe.u32 b, ${total + 1}, {8 * i}, 8;" + _E8M0.format(x="x", b="b"))
            lines += [f"mul.rn.bf16x2 ${j}, ${j}, x;" for j in range(i, total, count)]
        code = "{ .reg .pred p, e; .reg .b32 b, x, z; " + " ".join(lines) + " DONE: }"
        constraints = ["r", "r", *(str(i) for i in range(total))]
        return _asm(code, [Int32] * total, [left_out, scales, *pairs], constraints)

    def marked(self, seen, words: list, one):
        """``seen``, its highest bits in bytes set where ``words`` have NaN, and elsewhere perhaps.

        ``one``: a register that is 1, and no one knows: it makes a multiplication of an addition.
        """
        if not self.special:
            return seen
        lines = [f"mov.b32 s, ${len(words) + 1};"]
        for i in range(len(words)):
            # a sign that changes: of this byte, or of a byte below that is NaN itself
            lines.append(f"mad.lo.u32 x, ${1 + i}, ${len(words) + 2}, {self.special * 0x01010101};")
            lines.append(f"lop3.b32 s, x, ${1 + i}, s, 0x{_MARK:02x};")
        code = "{ .reg .b32 x, s; " + " ".join(lines) + " mov.b32 $0, s; }"
        return _asm(code, [Int32], [*words, seen, one], ["r"] * (2 + len(words)))[0]

    def poisoned(self, factor, seen):
        """NaN, twice, where ``seen`` says that there was one, else ``factor``: for NaN are then all
        accumulators that elements of this row go into."""
        if not self.special:
            return factor
        code = (
            "{ .reg .pred p; .reg .b32 x; and.b32 x, $2, 0x80808080; setp.ne.b32 p, x, 0;"
            " selp.b32 $0, 0x7fff7fff, $1, p; }"
        )
        return _asm(code, [Int32], [factor, seen], ["r"] * 2)[0]


WIDENERS = {
    "E4M3": Widener(8, 4, 0x87F087F0, (120,), special=0x01),
    "E5M2": Widener(8, 5, 0x8FE08FE0, (112, 112, -112), special=0x03),
    "E2M1": Widener(4, 2, 0x81C081C0, (126,)),
}


def e8m0_factor(byte):
    """A scale as bf16, twice."""
    code = "{ .reg .pred e; .reg .b32 x, z; " + _E8M0.format(x="x", b="$1") + " mov.b32 $0, x; }"
    return _asm(code, [Int32], [byte], ["r"])[0]


def ue4m3_factors(pair) -> list:
    """Two scales in the lower bytes of a word as bf16 times 2^119, each twice: that undoes the
    2^-126 of a widened E2M1 element but for 2^-7, so that no product is too large."""
    code = (
        "{ .reg .b16 b, u, v; .reg .b32 x, y; .reg .f32 f, g;"
        " and.b32 x, $2, 0x7f7f; cvt.u16.u32 b, x;"  # there is no sign
        " cvt.rn.f16x2.e4m3x2 x, b; mov.b32 {u, v}, x; cvt.f32.f16 f, u; cvt.f32.f16 g, v;"
        f" cvt.rn.bf16x2.f32 x, g, f; mov.b32 y, {_power(119)}; mul.rn.bf16x2 x, x, y;"
        " prmt.b32 $0, x, x, 0x1010; prmt.b32 $1, x, x, 0x3232; }"
    )
    return _asm(code, [Int32] * 2, [pair], ["r"])


def place(row, part, row_bytes: int):
    """Where the ``part`` of a row is that one of its four lanes has, in a swizzled tile. Of rows
    of 128 bytes it has 16 bytes more, at the same address but for the bit of 16."""
    if row_bytes == 32:
        return row * 32 + ((part // 2) ^ (row // 4 % 2)) * 16 + part % 2 * 8
    chunk = (2 * part) ^ (row % 8) if row_bytes == 128 else part ^ (row // 2 % 4)
    return row * row_bytes + chunk * 16


class Rows:
    """``steps`` times two rows of a thread, on the device. ``units``: of a stage."""

    def __init__(self, format: Format, steps: int, units: int = 2):
        self.widener = WIDENERS[format.element.name]
        self.fine = format.scale.name == "UE4M3"  # a scale for each unit
        self.kept = 2 * units if self.fine else 3  # registers for the scales of two rows
        self.scale_bytes = units if self.fine else 1  # of a lane's part of a row
        self.steps, self.units = steps, units
        self.one = cute.arch.grid_dim()[1]
        self.seen = cute.make_rmem_tensor((2 * self.steps,), Int32)

    def factors(self, low, high) -> list:
        """Of the scales of two rows: a factor for each row and unit; or one for each row, and a
        word of both scales, and of whether these are left out of the factors."""
        if self.fine:
            pairs = (low, high) if self.units > 1 else (high * 256 + low,)
            return [each for pair in pairs for each in ue4m3_factors(pair)]
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
        factor = factors[self.units * row + unit] if self.fine else factors[row]
        return self.widener.octet(own, factor)

    @cute.jit
    def poison(self, acc):
        """Accumulators of rows of B that had a NaN: those of four threads. ``acc``: of each
        step, four of each eight rows of A."""
        for i in range_constexpr(2 * self.steps if self.widener.special else 0):
            seen = self.seen[i]
            for distance in range_constexpr(1, 3):
                seen = seen | cute.arch.shuffle_sync_bfly(seen, distance)
            if seen & 0x80808080 != 0:
                for group in range_constexpr(cute.size(acc[0]) // 4):
                    for j in range_constexpr(2):
                        acc[i // 2][4 * group + 2 * (i % 2) + j] = Float32(float("nan"))
