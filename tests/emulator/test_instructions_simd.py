"""Packed integers, dot products, bit fields and carries against Python integers: PTX ISA 9.7.1,
9.7.2, 9.7.9.22."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest
from ptx_forms import Form, bits, check
from ptx_kernels import run
from test_instructions_integer import SHIFTS, signed, typed

from blockscale import emulator as em

Model = Callable[..., int]


def halves(type: str, function: Model) -> Model:
    """A function of 16-bit numbers on both halves."""
    one = typed(type, function)
    return lambda *v: (
        (one(*(x >> 16 for x in v)) & 0xFFFF) << 16 | one(*(x & 0xFFFF for x in v)) & 0xFFFF
    )


def fields(word: int, size: int, type: str) -> list[int]:
    every = [word >> at & (1 << size) - 1 for at in range(0, 32, size)]
    return [signed(x, size) for x in every] if type[0] == "s" else every


def dot(first: int, second: slice, a_type: str, b_type: str) -> Model:
    def run(a: int, b: int, c: int) -> int:
        return c + sum(
            x * y
            for x, y in zip(fields(a, first, a_type), fields(b, 8, b_type)[second], strict=True)
        )

    return run


def bmsk(clamp: bool) -> Model:
    """Bit by bit."""

    def run(a: int, b: int) -> int:
        if not clamp:
            a, b = a % 32, b % 32
        return sum(1 << i for i in range(32) if a <= i < a + b)

    return run


def vabsdiff(size: int, adds: bool) -> Model:
    def run(a: int, b: int, c: int) -> int:
        pairs = zip(fields(a, size, "u32"), fields(b, size, "u32"), strict=True)
        found = [abs(x - y) for x, y in pairs]
        return c + sum(found) if adds else sum(x << size * i for i, x in enumerate(found))

    return run


def szext(type: str, clamp: bool) -> Model:
    def run(a: int, b: int) -> int:
        length = min(b, 32) if clamp else b % 32
        if not length:
            return 0
        low = a & (1 << length) - 1
        return signed(low, length) if type == "s32" else low

    return run


def pack(kind: str, size: int) -> Model:
    low, high = (0, 2**size - 1) if kind == "u" else (-(2 ** (size - 1)), 2 ** (size - 1) - 1)

    def run(a: int, b: int, c: int = 0) -> int:
        a, b = (max(low, min(high, signed(v, 32))) % 2**size for v in (a, b))
        return c << 2 * size | a << size | b

    return run


def forms() -> list[Form]:
    found = []

    def form(
        opcode: str, result: str, operands: str, model: Model, line: str = "", **more: object
    ) -> None:
        found.append(Form(opcode, result, tuple(operands.split()), model, line, **more))  # type: ignore[arg-type]

    for t in ("u16", "s16"):
        for name, function in (("add", operator.add), ("min", min), ("max", max)):
            form(f"{name}.{t}x2", "b32", f"{t}x2 {t}x2", halves(t, function))
    form("min.relu.s16x2", "b32", "s16x2 s16x2", halves("s16", lambda a, b: max(min(a, b), 0)))
    form("max.relu.s16x2", "b32", "s16x2 s16x2", halves("s16", lambda a, b: max(a, b, 0)))
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            form(f"dp4a.{a}.{b}", "b32", "b32 b32 b32", dot(8, slice(4), a, b))
            for half, second in (("lo", slice(2)), ("hi", slice(2, 4))):
                form(f"dp2a.{half}.{a}.{b}", "b32", "b32 b32 b32", dot(16, second, a, b))
    for mode in ("clamp", "wrap"):
        clamp = mode == "clamp"
        form(f"bmsk.{mode}.b32", "b32", "b32 b32", bmsk(clamp), pools=(SHIFTS, SHIFTS))
        for t in ("u32", "s32"):
            values = (0, 1, 0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0xA5A55A5A)
            model = szext(t, clamp)
            form(f"szext.{mode}.{t}", "b32", "b32 b32", model, pools=(values, SHIFTS))
    for count in (2, 4):
        for add in ("", ".add"):
            model = vabsdiff(32 // count, bool(add))
            form(f"vabsdiff{count}.u32.u32.u32{add}", "u32", "u32 u32 u32", model)
    values = (0, 1, 7, 200, 0xFFFFFFFF, 0x80000000, 0xFFFFFFF9)
    for kind in "us":
        form(f"cvt.pack.sat.{kind}16.s32", "b32", "s32 s32", pack(kind, 16))
        for size in (2, 4, 8):
            form(
                f"cvt.pack.sat.{kind}{size}.s32.b32", "b32", "s32 s32 b32", pack(kind, size),
                pools=(values, values, (0, 0x9ABCDEF1)),
            )  # fmt: skip
    for t in ("u32", "s32", "u64", "s64"):
        carries(form, t)
    return found


def carries(form: Callable[..., None], t: str) -> None:
    """Two words and what they carry, and a product of two words by two."""
    size, four = bits(t), f"{t} {t} {t} {t}"
    word = f".reg .b{size}"

    def wide(low: int, high: int) -> int:
        return high << size | low

    for name, function in (("add", operator.add), ("sub", operator.sub)):

        def whole(a: int, b: int, c: int, h: int, f: Model = function) -> int:
            return f(wide(a, c), wide(b, h))

        form(
            f"{name}c.{t}", t, four, lambda *v, f=whole: f(*v) >> size,
            f"{{{word} low; {name}.cc.{t} low, a, b; {name}c.{t} d, c, h;}}",
        )  # fmt: skip
        none = int(name == "sub")  # an H200 carries where nothing is borrowed
        form(
            f"{name}c.cc.{t}", t, four, lambda *v, f=whole, none=none: none + (f(*v) >> 2 * size),
            f"{{{word} x; {name}.cc.{t} x, a, b; {name}c.cc.{t} x, c, h; addc.{t} d, 0, 0;}}",
        )  # fmt: skip
    form(
        f"subc.{t} add.cc", t, four,
        lambda a, b, c, h: c - h - 1 + (a + b >> size),  # as on an H200
        f"{{{word} x; add.cc.{t} x, a, b; subc.{t} d, c, h;}}",
    )  # fmt: skip
    unsigned = f"u{size}"
    product = f"""{{{word} r0, r1, r2, r3; mul.lo.{unsigned} r0, a, b; mul.hi.{unsigned} r1, a, b;
        mad.lo.cc.{unsigned} r1, c, b, r1; madc.hi.{unsigned} r2, c, b, 0;
        mad.lo.cc.{unsigned} r1, a, h, r1; madc.hi.cc.{unsigned} r2, a, h, r2;
        addc.{unsigned} r3, 0, 0; mad.lo.cc.{unsigned} r2, c, h, r2;
        madc.hi.{unsigned} r3, c, h, r3; mov.b{size} d, r"""
    for i in range(4) if t[0] == "u" else ():
        form(
            f"mad.lo.cc.{t} {i}", t, four,
            lambda a, b, c, h, i=i: wide(a, c) * wide(b, h) >> i * size, f"{product}{i};}}",
        )  # fmt: skip
    high = typed(t, lambda a, b: a * b >> size)
    form(
        f"mad.hi.cc.{t}", t, f"{t} {t} {t}",
        lambda a, b, c: (high(a, b) % 2**size + c) >> size,
        f"{{{word} x; mad.hi.cc.{t} x, a, b, c; addc.{t} d, 0, 0;}}",
    )  # fmt: skip


@pytest.mark.parametrize("form", forms(), ids=str)
def test_simd(form: Form) -> None:
    check(form)


def test_carry_of_each_thread() -> None:
    """A thread keeps its carry while others, after a branch, make theirs."""
    out = np.zeros(32, np.uint32)
    run(
        """and.b32 %r1, %t, 1; setp.eq.u32 %p1, %r1, 1; @%p1 bra odd;
        add.cc.u32 %r2, 0xffffffff, 1; bra.uni meet;
        odd: add.cc.u32 %r2, 1, 1;
        meet: add.u32 %r3, %t, 0xfffffff0; addc.u32 %r4, %t, 0; st.global.u32 [%at], %r4;""",
        out,
    )  # fmt: skip
    assert out.tolist() == [i + (i % 2 == 0) for i in range(32)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("min.relu.u16x2 %r1, %r2, %r3;", ".relu is not supported"),
        ("sub.u16x2 %r1, %r2, %r3;", "expected one type"),
        ("dp4a.u32 %r1, %r2, %r3, %r4;", "two types"),
        ("dp2a.u32.u32 %r1, %r2, %r3, %r4;", ".lo or .hi"),
        ("dp4a.lo.u32.u32 %r1, %r2, %r3, %r4;", "unsupported modifier .lo"),
        ("bmsk.b32 %r1, %r2, %r3;", ".clamp or .wrap"),
        ("addc.cc.u16 %h1, %h2, %h3;", "type .u16 is not supported"),
        ("cvt.pack.sat.u8.s32 %r1, %r2, %r3;", "takes .b32"),
        ("cvt.pack.sat.u16.s32.b32 %r1, %r2, %r3, %r4;", "takes no .b32"),
    ],
)
def test_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(32, np.uint32))
