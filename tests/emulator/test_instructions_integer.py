"""Integer instructions against Python integers: PTX ISA 9.7.1, 9.7.2, 9.7.6, 9.7.8."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from ptx_forms import Form, bits, check

WIDTHS = ("u16", "u32", "u64", "s16", "s32", "s64")
SHIFTS = (0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0xFFFFFFFF)


def signed(value: int, size: int) -> int:
    value &= (1 << size) - 1
    return value - (value >> size - 1 << size)


def typed(type: str, function: Callable[..., int], sources: int = 2) -> Callable[..., int]:
    """A function of numbers as one of registers' bits."""
    if type[0] != "s":
        return function
    return lambda *v: function(*(signed(x, bits(type)) for x in v[:sources]), *v[sources:])


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def lop3(table: int) -> Callable[[int, int, int], int]:
    def run(a: int, b: int, c: int) -> int:
        out = 0
        for i in range(32):
            row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
            out |= (table >> row & 1) << i
        return out

    return run


def prmt(a: int, b: int, selector: int) -> int:
    every = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = every[nibble & 7]
        out.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def prmt_mode(mode: str) -> Callable[[int, int, int], int]:
    def run(a: int, b: int, c: int) -> int:
        every, s = (b << 32 | a).to_bytes(8, "little"), c & 3
        picks = {
            "f4e": [s, s + 1, s + 2, s + 3],
            "b4e": [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8],
            "rc8": [s] * 4,
            "ecl": [max(i, s) for i in range(4)],
            "ecr": [min(i, s) for i in range(4)],
            "rc16": [2 * (s % 2), 2 * (s % 2) + 1] * 2,
        }[mode]
        return int.from_bytes(bytes(every[i] for i in picks), "little")

    return run


def field_part(type: str, value: int) -> int:
    """The PTX ISA says the low 8 bits; an H200 does that with 32-bit operands only."""
    return value & 255 if bits(type) == 32 else min(value, 255)


def bfe(type: str) -> Callable[[int, int, int], int]:
    top = bits(type) - 1

    def run(a: int, b: int, c: int) -> int:
        at, length = field_part(type, b), field_part(type, c)
        fill = 0 if type[0] == "u" or length == 0 else a >> min(at + length - 1, top) & 1
        return sum(
            (a >> at + i & 1 if i < length and at + i <= top else fill) << i for i in range(top + 1)
        )

    return run


def bfi(type: str) -> Callable[[int, int, int, int], int]:
    top = bits(type) - 1

    def run(a: int, b: int, c: int, d: int) -> int:
        at, length = field_part(type, c), field_part(type, d)
        for i in range(length):
            if at + i <= top:
                b = b & ~(1 << at + i) | (a >> i & 1) << at + i
        return b

    return run


def funnel(left: bool, clamp: bool) -> Callable[[int, int, int], int]:
    def run(low: int, high: int, by: int) -> int:
        by = min(by, 32) if clamp else by & 31
        both = high << 32 | low
        return (both << by >> 32 if left else both >> by) & 0xFFFFFFFF

    return run


def bfind(type: str, shift: bool) -> Callable[[int], int]:
    def run(a: int) -> int:
        a = ~a if type[0] == "s" and a < 0 else a
        place = a.bit_length() - 1
        return place if place < 0 or not shift else bits(type) - 1 - place

    return typed(type, run, 1)


def mul24(type: str, high: bool) -> Callable[[int, int], int]:
    def run(a: int, b: int) -> int:
        if type == "s32":
            a, b = signed(a, 24), signed(b, 24)
        else:
            a, b = a & 0xFFFFFF, b & 0xFFFFFF
        return a * b >> (16 if high else 0)

    return run


def clipped(value: int) -> int:
    return max(-(2**31), min(2**31 - 1, value))


def nth_set(mask: int, base: int, nth: int) -> int:
    nth = signed(nth, 32)
    way = range(base, -1, -1) if nth < 0 else range(base, 32) if nth else (base,)
    found = [i for i in way if mask >> i & 1]
    return found[max(abs(nth), 1) - 1] if len(found) >= max(abs(nth), 1) else 2**32 - 1


def forms() -> list[Form]:
    found = []

    def form(
        opcode: str, result: str, operands: str, model: Callable[..., int], **more: object
    ) -> None:
        found.append(Form(opcode, result, tuple(operands.split()), model, **more))  # type: ignore[arg-type]

    for t in WIDTHS:
        size, two, three = bits(t), f"{t} {t}", f"{t} {t} {t}"
        form(f"add.{t}", t, two, operator.add)
        form(f"sub.{t}", t, two, operator.sub)
        form(f"mul.lo.{t}", t, two, operator.mul)
        form(f"mul.hi.{t}", t, two, typed(t, lambda a, b, size=size: a * b >> size))
        form(f"mad.lo.{t}", t, three, lambda a, b, c: a * b + c)
        form(f"mad.hi.{t}", t, three, typed(t, lambda a, b, c, size=size: (a * b >> size) + c))
        if size < 64:
            double = f"{t[0]}{2 * size}"
            form(f"mul.wide.{t}", double, two, typed(t, operator.mul))
            form(f"mad.wide.{t}", double, f"{two} {double}", typed(t, lambda a, b, c: a * b + c))
        form(f"div.{t}", t, two, typed(t, lambda a, b: truncated(a, b) if b else -1))
        form(f"rem.{t}", t, two, typed(t, lambda a, b: a - truncated(a, b) * b if b else -1))
        form(f"min.{t}", t, two, typed(t, min))
        form(f"max.{t}", t, two, typed(t, max))
        form(f"sad.{t}", t, three, typed(t, lambda a, b, c: c + abs(a - b)))
        shifts = {"pools": ((0, 1, 3, (1 << size) - 1, 1 << size - 1, 0x5A5A), SHIFTS)}
        form(f"shr.{t}", t, f"{t} u32", typed(t, lambda a, b: a >> min(b, 64), 1), **shifts)
        form(f"shl.b{size}", t, f"{t} u32", lambda a, b: a << min(b, 64), **shifts)
        if t[0] == "s":
            form(f"abs.{t}", t, t, typed(t, abs))
            form(f"neg.{t}", t, t, operator.neg)
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            form(f"setp.{name}.{t}", "pred", two, typed(t, getattr(operator, name)))
        if t[0] == "u":
            for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
                form(f"setp.{name}.{t}", "pred", two, getattr(operator, same))
    pools = (
        (0, 1, 0xAAAAAAAA, 2**31, 2**32 - 1, 0x5A5A),
        range(32),
        (0, 1, 2, 40, 2**32 - 1, 2**32 - 7),
    )
    form("fns.b32", "b32", "b32 u32 s32", nth_set, pools=pools)
    for t in ("b16", "b32", "b64"):
        form(f"and.{t}", t, f"{t} {t}", operator.and_)
        form(f"or.{t}", t, f"{t} {t}", operator.or_)
        form(f"xor.{t}", t, f"{t} {t}", operator.xor)
        form(f"not.{t}", t, t, operator.invert)
        form(f"cnot.{t}", t, t, operator.not_)
        form(f"selp.{t}", t, f"{t} {t} pred", lambda a, b, p: a if p else b)
        form(f"slct.{t}.s32", t, f"{t} {t} s32", lambda a, b, c: a if signed(c, 32) >= 0 else b)
        form(f"mov.{t}", t, t, lambda a: a)
    for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        form(f"{name}.pred", "pred", "pred pred", function)
    form("not.pred", "pred", "pred", operator.not_)
    form("add.sat.s32", "s32", "s32 s32", typed("s32", lambda a, b: clipped(a + b)))
    form("sub.sat.s32", "s32", "s32 s32", typed("s32", lambda a, b: clipped(a - b)))
    form("min.relu.s32", "s32", "s32 s32", typed("s32", lambda a, b: max(min(a, b), 0)))
    form("max.relu.s32", "s32", "s32 s32", typed("s32", lambda a, b: max(a, b, 0)))
    for t in ("u32", "s32"):
        for part in ("lo", "hi"):
            form(f"mul24.{part}.{t}", t, f"{t} {t}", mul24(t, part == "hi"))
            form(
                f"mad24.{part}.{t}", t, f"{t} {t} {t}",
                lambda a, b, c, t=t, high=part == "hi": mul24(t, high)(a, b) + c,
            )  # fmt: skip
    for table in (0x00, 0x1E, 0x80, 0x96, 0xE8, 0xCA, 0xFF):
        form(
            f"lop3.b32 {table:#x}",
            "b32",
            "b32 b32 b32",
            lop3(table),
            line=f"lop3.b32 d, a, b, c, {table:#x}",
        )
    form("prmt.b32", "b32", "b32 b32 b32", prmt)
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        form(f"prmt.b32.{mode}", "b32", "b32 b32 b32", prmt_mode(mode))
    for side in ("l", "r"):
        for mode in ("clamp", "wrap"):
            form(
                f"shf.{side}.{mode}.b32", "b32", "b32 b32 u32",
                funnel(side == "l", mode == "clamp"),
                pools=((0, 0x80000001, 0x12345678), (0, 0xFFFFFFFF, 0x9ABCDEF0), SHIFTS),
            )  # fmt: skip
    # Beyond 255 the PTX ISA takes the low 8 bits, which an H200 does in the 32-bit forms only.
    fields = (0, 1, 4, 31, 32, 33, 63, 64, 65, 255, 256, 260, 0xFFFFFFFF)
    for t in ("u32", "s32", "u64", "s64"):
        values = (0, (1 << bits(t)) - 1, 0xA5A5A5A5DEADBEEF & (1 << bits(t)) - 1, 0x12345678)
        form(f"bfe.{t}", t, f"{t} u32 u32", bfe(t), pools=(values, fields, fields))
        form(f"bfind.{t}", "u32", t, bfind(t, False))
        form(f"bfind.shiftamt.{t}", "u32", t, bfind(t, True))
        if t[0] == "u":
            b = f"b{bits(t)}"
            form(f"bfi.{b}", b, f"{b} {b} u32 u32", bfi(b), pools=(values, values, fields, fields))
            form(f"popc.{b}", "u32", b, int.bit_count)
            form(f"clz.{b}", "u32", b, lambda a, t=t: bits(t) - a.bit_length())
            form(f"brev.{b}", b, b, lambda a, t=t: int(f"{a:0{bits(t)}b}"[::-1], 2))
    for name in ("and", "or", "xor"):
        function = getattr(operator, name + ("_" if name != "xor" else ""))
        form(
            f"setp.lt.{name}.s32", "pred", "s32 s32 pred",
            lambda a, b, p, f=function: f(signed(a, 32) < signed(b, 32), bool(p)),
        )  # fmt: skip
        form(
            f"setp.lt.{name}.s32 !c", "pred", "s32 s32 pred",
            lambda a, b, p, f=function: f(signed(a, 32) < signed(b, 32), not p),
            line=f"setp.lt.{name}.s32 d, a, b, !c",
        )  # fmt: skip
        form(
            f"setp.lt.{name}.s32 _|q", "pred", "s32 s32 pred",
            lambda a, b, p, f=function: f(not signed(a, 32) < signed(b, 32), bool(p)),
            line=f"setp.lt.{name}.s32 _|d, a, b, c",
        )  # fmt: skip
    form("set.lt.u32.s32", "u32", "s32 s32", typed("s32", lambda a, b: -(a < b)))
    form("set.ge.f32.u32", "f32", "u32 u32", lambda a, b: 0x3F800000 if a >= b else 0)
    return found


@pytest.mark.sampled(50)
@pytest.mark.parametrize("form", forms(), ids=str)
def test_integer(form: Form) -> None:
    check(form)


@pytest.mark.parametrize("amount", SHIFTS)
@pytest.mark.parametrize("type", ["b32", "u64", "s16"])
def test_shift_by_a_constant(type: str, amount: int) -> None:
    name = "shl" if type[0] == "b" else "shr"
    by = min(amount, 64)
    model = (lambda a: a << by) if name == "shl" else typed(type, lambda a: a >> by)
    check(Form(f"{name}.{type}", type, (type,), model, line=f"{name}.{type} d, a, {amount}"))
