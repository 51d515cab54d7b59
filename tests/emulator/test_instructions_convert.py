"""cvt against exact fractions, and against ml_dtypes for the narrow formats: PTX ISA 9.7.9."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import ptx_floats as pf
import pytest
from ptx_forms import Form, bits, check
from ptx_kernels import run
from test_instructions_integer import signed

from blockscale import emulator as em

FLOATS = ("f16", "bf16", "f32", "f64")
INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
WHOLE = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
NARROW = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x07}
BITS = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}

#: fp32 bits around powers of two, the smallest scale and the largest.
POWERS = """
    0 1 3fffff 400000 400001 7fffff 800000 3f800000 3f800001 bf800001
    7f000000 7f000001 7f7fffff 7f800000 7fc00000 80000000
"""


def limits(type: str) -> tuple[int, int]:
    size = bits(type)
    return (0, (1 << size) - 1) if type[0] == "u" else (-(1 << size - 1), (1 << size - 1) - 1)


def number(value: int, type: str) -> int:
    return signed(value, bits(type)) if type[0] == "s" else value & (1 << bits(type)) - 1


def converted_nan(a: int, source: str, to: str) -> int:
    """What an H200 makes of a NaN: from fp64 and from bf16 it keeps sign and payload."""
    if (source, to) == ("bf16", "f32"):
        return a << 16
    if source != "f64":
        return pf.nan(to)
    mantissa = pf.FORMATS[to][1]
    payload = (a & (1 << 52) - 1) >> 52 - mantissa | 1 << mantissa - 1
    return pf.infinity(pf.sign(a, source), to) | payload


def float_to_float(
    source: str, to: str, rounding: str = "rn", **marks: bool
) -> Callable[[int], int]:
    ftz, sat, relu, satfinite = (marks.get(k) for k in ("ftz", "sat", "relu", "satfinite"))

    def run(a: int) -> int:
        a = pf.flush(a) if ftz and source == "f32" else a
        value, negative = pf.decode(a, source), pf.sign(a, source)
        if value == pf.NAN:
            return 0 if sat else converted_nan(a, source, to)
        if (sat or relu) and negative:
            return 0
        if value == pf.INFINITY:
            out = pf.infinity(negative, to)
        else:
            out = pf.encode(value, to, rounding, negative)
        out = min(out, pf.encode(pf.Fraction(1), to)) if sat else out
        top = pf.infinity(0, to)
        if satfinite and out & ~pf.zero(1, to) == top:
            out -= 1
        return pf.flush(out) if ftz and to == "f32" else out

    return run


def float_to_integer(
    source: str, to: str, rounding: str, ftz: bool = False
) -> Callable[[int], int]:
    low, high = limits(to)

    def run(a: int) -> int:
        a = pf.flush(a) if ftz else a
        value = pf.decode(a, source)
        if value == pf.NAN:
            return number(1 << bits(to) - 1, to) if source == "f64" or bits(to) == 64 else 0
        if value == pf.INFINITY:
            return low if pf.sign(a, source) else high
        return max(low, min(high, pf.rounded(value, WHOLE[rounding])))

    return run


def whole(type: str, rounding: str) -> Callable[[int], int]:
    """cvt.rni.f32.f32 and the like."""

    def run(a: int) -> int:
        value = pf.decode(a, type)
        if isinstance(value, str):
            return pf.nan(type) if value == pf.NAN else a
        rounded = pf.Fraction(pf.rounded(value, WHOLE[rounding]))
        return pf.encode(rounded, type, "rn", pf.sign(a, type))

    return run


def clamp(source: str, to: str) -> Callable[[int], int]:
    low, high = limits(to)
    return lambda a: max(low, min(high, number(a, source)))


def narrow(value: int, element: str, source: str, relu: bool) -> int:
    """The code of one value: saturating, NaN as the format has it."""
    found = pf.decode(value, source)
    largest, sign_bit = LARGEST[element], 1 << BITS[element] - 1
    if found == pf.NAN:
        return 0x7F if BITS[element] == 8 else largest
    negative = pf.sign(value, source)
    if relu and negative:
        return 0
    magnitude = math.inf if found == pf.INFINITY else abs(float(found))
    limit = float(np.array(largest, np.uint8).view(NARROW[element]))
    code = int(
        np.array(min(magnitude, limit), np.float64)
        .astype(np.float32)
        .astype(NARROW[element])
        .view(np.uint8)
    )
    if magnitude < limit:  # ml_dtypes goes through fp32, which is exact for these sources
        code = min(code, largest)
    return code | sign_bit * negative


def pair(function: Callable[[int], int], size: int) -> Callable[[int, int], int]:
    """Two registers; the first goes to the upper half."""
    return lambda a, b: function(a) << size | function(b)


def halves(function: Callable[[int], int], size: int) -> Callable[[int], int]:
    return lambda a: function(a >> 16) << size | function(a & 0xFFFF)


def e8m0(value: int, up: bool, saturates: bool) -> int:
    """Of the magnitude: the power of two at or below (above) it."""
    magnitude = pf.decode(value & 0x7FFFFFFF, "f32")
    if isinstance(magnitude, str):
        return 254 if magnitude == pf.INFINITY and saturates else 255
    highest = 254 if saturates else 255
    powers = [pf.Fraction(2) ** (code - 127) for code in range(highest)]
    if up:
        return next((code for code, power in enumerate(powers) if power >= magnitude), highest)
    below = [c for c, p in enumerate([*powers[:254], pf.Fraction(2) ** 127]) if p <= magnitude]
    return max(below, default=0)


def of_bf16(function: Callable[[int], int], bits: int) -> int:
    return function(bits << 16)


def tf32(rounding: str, relu: bool = False, satfinite: bool = False) -> Callable[[int], int]:
    def run(a: int) -> int:
        value, negative = pf.decode(a, "f32"), pf.sign(a, "f32")
        if value == pf.NAN and rounding != "rna":
            return 0x7FFFE000
        if relu and negative:
            return 0
        steps, rest = divmod(a & 0x7FFFFFFF, 1 << 13)
        half = 1 << 12
        if rounding == "rna":
            steps += rest >= half and not isinstance(value, str)
        elif rounding == "rn":
            steps += rest > half or (rest == half and steps & 1)
        out = steps << 13
        if satfinite and out >= 0x7F800000:
            out -= 1 << 13
        return out | negative << 31

    return run


def widened(element: str, code: int, to: str, relu: bool = False) -> int:
    value = float(np.array(code & (1 << BITS[element]) - 1, np.uint8).view(NARROW[element]))
    if math.isnan(value):
        return pf.nan(to)
    negative = int(math.copysign(1, value) < 0)
    if relu and negative:
        return 0
    if math.isinf(value):
        return pf.infinity(negative, to)
    return pf.encode(pf.Fraction(value), to, "rn", negative)


def widened_e8m0(code: int) -> int:
    return 0x7FFF if code == 255 else pf.encode(pf.Fraction(2) ** (code - 127), "bf16")


def forms() -> list[Form]:
    found = []

    def form(
        opcode: str, result: str, operands: str, model: Callable[..., int], **more: object
    ) -> None:
        found.append(Form(opcode, result, tuple(operands.split()), model, **more))  # type: ignore[arg-type]

    def registers(type: str) -> str:
        return type if bits(type) > 8 else f"{type[0]}16"

    for source in INTEGERS:
        for to in INTEGERS:
            wide = registers(to)  # a narrow result is extended in its register, by its sign

            def plain(a: int, source: str = source, to: str = to) -> int:
                return number(number(a, source), to)

            form(f"cvt.{to}.{source}", wide, registers(source), plain)
            (low, high), (least, most) = limits(source), limits(to)
            if low < least or high > most:  # ptxas refuses .sat where nothing can be clamped
                form(f"cvt.sat.{to}.{source}", wide, registers(source), clamp(source, to))
        for to in FLOATS:
            for rounding in ("rn", "rz", "rm", "rp"):
                if to == "f64" and bits(source) == 64 and rounding != "rn":
                    continue
                if to == "bf16" and bits(source) == 8:
                    continue
                form(
                    f"cvt.{rounding}.{to}.{source}", to, registers(source),
                    lambda a, s=source, t=(to, rounding): pf.encode(pf.Fraction(number(a, s)), *t),
                )  # fmt: skip
    for source in FLOATS:
        for to in INTEGERS:
            for rounding in WHOLE if source != "bf16" or bits(to) > 8 else ():
                form(
                    f"cvt.{rounding}.{to}.{source}",
                    registers(to),
                    source,
                    float_to_integer(source, to, rounding),
                )
        for to in FLOATS:
            exact = pf.width(to) > pf.width(source)
            for rounding in ("",) if exact else ("rn", "rz", "rm", "rp") if to != source else ():
                dot = f".{rounding}" if rounding else ""
                nan = {"any_nan": "f64"} if to == "f64" else {}
                form(
                    f"cvt{dot}.{to}.{source}",
                    to,
                    source,
                    float_to_float(source, to, rounding or "rn"),
                    **nan,
                )
        if source != "bf16":
            for rounding in WHOLE:
                nan = {"any_nan": "f64"} if source == "f64" else {}
                form(
                    f"cvt.{rounding}.{source}.{source}",
                    source,
                    source,
                    whole(source, rounding),
                    **nan,
                )
    form("cvt.rzi.ftz.s32.f32", "s32", "f32", float_to_integer("f32", "s32", "rzi", True))
    form("cvt.sat.f32.f32", "f32", "f32", float_to_float("f32", "f32", sat=True))
    form("cvt.rn.sat.f16.f32", "f16", "f32", float_to_float("f32", "f16", sat=True))
    form("cvt.ftz.f32.f16", "f32", "f16", float_to_float("f16", "f32", ftz=True))
    form("cvt.rn.ftz.f16.f32", "f16", "f32", float_to_float("f32", "f16", ftz=True))
    form("cvt.rn.ftz.f32.f64", "f32", "f64", float_to_float("f64", "f32", ftz=True))
    for half in ("f16", "bf16"):
        for rounding in ("rn", "rz"):
            for marks in ("", ".relu", ".satfinite", ".relu.satfinite"):
                model = float_to_float(
                    "f32", half, rounding, relu="relu" in marks, satfinite="satfinite" in marks
                )
                form(f"cvt.{rounding}{marks}.{half}x2.f32", f"{half}x2", "f32 f32", pair(model, 16))
                form(f"cvt.{rounding}{marks}.{half}.f32", half, "f32", model)
    for element in NARROW:
        size = 4 if element == "e2m1" else 8
        target = "sm_90a" if element in ("e4m3", "e5m2") else "sm_100a"
        result = "u8" if size == 4 else "b16"
        for relu in (False, True):
            mark = ".relu" if relu else ""
            form(
                f"cvt.rn.satfinite{mark}.{element}x2.f32", result, "f32 f32",
                pair(partial(narrow, element=element, source="f32", relu=relu), size),
                target=target,
            )  # fmt: skip
            for half in ("f16", "bf16"):
                form(
                    f"cvt.rn.satfinite{mark}.{element}x2.{half}x2", result, f"{half}x2",
                    halves(partial(narrow, element=element, source=half, relu=relu), size),
                    target=target if half == "f16" else "sm_100a",
                )  # fmt: skip
            form(
                f"cvt.rn{mark}.f16x2.{element}x2", "b32", "b16",
                lambda a, e=element, r=relu, n=size: (
                    widened(e, a >> n, "f16", r) << 16 | widened(e, a, "f16", r)
                ),
                target=target, pools=(range(256) if size == 4 else range(0, 1 << 16, 341),),
                line=f"cvt.rn{mark}.f16x2.{element}x2 d, a" if size == 8
                else "{.reg .b8 byte; cvt.u8.u16 byte, a; "
                f"cvt.rn{mark}.f16x2.{element}x2 d, byte;}}",
            )  # fmt: skip
    powers = [int(word, 16) for word in POWERS.split()]
    for rounding in ("rz", "rp"):
        for saturates in (True, False):
            mark = ".satfinite" if saturates else ""
            scale = partial(e8m0, up=rounding == "rp", saturates=saturates)
            form(
                f"cvt.{rounding}{mark}.ue8m0x2.f32", "b16", "f32 f32",
                pair(scale, 8),
                target="sm_100a", pools=(powers, [*powers, 0x12345678, 0x6F700000]),
            )  # fmt: skip
            form(
                f"cvt.{rounding}{mark}.ue8m0x2.bf16x2", "b16", "bf16x2",
                halves(partial(of_bf16, scale), 8),
                target="sm_100a",
            )  # fmt: skip
    form(
        "cvt.rn.bf16x2.ue8m0x2", "b32", "b16",
        lambda a: widened_e8m0(a >> 8) << 16 | widened_e8m0(a & 255),
        target="sm_100a", pools=([i << 8 | 255 - i for i in range(256)],),
    )  # fmt: skip
    for rounding, marks in (
        ("rna", ""),
        ("rn", ""),
        ("rz", ""),
        ("rna", ".satfinite"),
        ("rn", ".relu"),
        ("rn", ".satfinite.relu"),
    ):
        model = tf32(rounding, "relu" in marks, "satfinite" in marks)
        target = "sm_100a" if rounding == "rn" and "satfinite" in marks else "sm_90a"
        form(f"cvt.{rounding}{marks}.tf32.f32", "b32", "f32", model, target=target)
    return found


@pytest.mark.sampled(50)
@pytest.mark.parametrize("form", forms(), ids=str)
def test_convert(form: Form) -> None:
    check(form)


def test_the_model_itself() -> None:
    """Plain values, so that the model above cannot be wrong together with the code."""
    assert narrow(struct.unpack("<I", struct.pack("<f", 448.0))[0], "e4m3", "f32", False) == 0x7E
    assert narrow(struct.unpack("<I", struct.pack("<f", -2.5))[0], "e2m1", "f32", False) == 0xC
    assert pf.encode(pf.Fraction(65520), "f16") == 0x7C00
    assert pf.encode(pf.Fraction(65519), "f16") == 0x7BFF
    assert e8m0(0x3F800001, True, True) == 128


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cvt.f32.s32 %f1, %r1;", "needs .rn"),
        ("cvt.bf16.f64 %h1, %rd1;", "needs .rn"),
        ("cvt.rn.f32.f16 %f1, %h1;", "modifier .rn"),
        ("cvt.rni.f32.f64 %f1, %rd1;", "modifier .rni"),
        ("cvt.rn.ftz.f16.f64 %h1, %rd1;", "unsupported modifier"),
        ("cvt.rn.sat.bf16.f32 %h1, %f1;", "unsupported modifier"),
        ("cvt.sat.s64.s32 %rd1, %r1;", "unsupported modifier"),
        ("cvt.rp.relu.f16.f32 %h1, %f1;", "unsupported modifier"),
        ("cvt.rn.satfinite.f16.s32 %h1, %r1;", "unsupported modifier"),
        ("cvt.rm.f16x2.f32 %r1, %f1, %f2;", "modifier .rm"),
        ("cvt.rz.f16x2.e4m3x2 %r1, %h1;", "expected .rn"),
        ("cvt.rn.sat.f16x2.f32 %r1, %f1, %f2;", "unsupported modifier"),
    ],
)
def test_refused(line: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(32, np.uint32))


@pytest.mark.parametrize(
    "line",
    [
        "cvt.rn.satfinite.e2m1x2.f32 %b, %f1, %f2;",
        "cvt.rn.f16x2.e3m2x2 %r1, %h1;",
        "cvt.rz.satfinite.ue8m0x2.f32 %h1, %f1, %f2;",
        "cvt.rn.bf16x2.ue8m0x2 %r1, %h1;",
        "cvt.rn.satfinite.e4m3x2.bf16x2 %h1, %r1;",
        "cvt.rn.satfinite.tf32.f32 %r1, %f1;",
        "cvt.rs.f16x2.f32 %r1, %f1, %f2, %r2;",
    ],
)
def test_later_targets(line: str) -> None:
    with pytest.raises(em.PtxError, match=r"needs sm_100.*target is sm_90a"):
        run(f".reg .b8 %b; {line}", np.zeros(32, np.uint32))
