"""Integer arithmetic and logic: PTX ISA 9.7.1, 9.7.6 (compare), 9.7.8 (logic and shift).

Registers are unsigned bits; numpy's wrap-around arithmetic on fixed widths is the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..machine.state import Fragment, Step
from ..ptx.program import Immediate
from .registry import BITS, INTEGERS, TYPES, Form, instruction

Function = Callable[..., Any]


def simple(form: Form, type: str, function: Function, sources: int = 2, out: str = "") -> Step:
    """d = function(a, b, ...), all of one type."""
    gets = [form.get(i + 1, type) for i in range(sources)]
    put = form.set(0, out or type)
    if sources == 1:
        (one,) = gets
        return lambda w: put(w, function(one(w)))
    if sources == 2:
        first, second = gets
        return lambda w: put(w, function(first(w), second(w)))
    return lambda w: put(w, function(*[get(w) for get in gets]))


def wide(type: str) -> np.dtype:
    dtype = np.dtype(TYPES[type])
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


def saturate(value: np.ndarray, type: str) -> np.ndarray:
    info = np.iinfo(TYPES[type])
    return np.clip(value, info.min, info.max).astype(TYPES[type])


def add_or_sub(form: Form, function: Function) -> Step:
    """Integer add and sub; .sat clamps s32."""
    sat, type = form.has("sat"), form.type(*INTEGERS)
    if sat and type != "s32":
        raise form.error(".sat needs .s32")
    if sat:
        return simple(form, type, lambda a, b: saturate(function(np.int64(a), np.int64(b)), type))
    return simple(form, type, function)


def mul_high(a: Any, b: Any, type: str) -> Any:
    dtype = np.dtype(TYPES[type])
    if dtype.itemsize < 8:
        shift = 8 * dtype.itemsize
        return ((np.asarray(a, wide(type)) * np.asarray(b, wide(type))) >> shift).astype(dtype)
    return _mul_high_64(np.asarray(a), np.asarray(b))


def _mul_high_64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    ua, ub = a.astype(np.uint64), b.astype(np.uint64)
    low, ten = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = ua & low, ua >> ten, ub & low, ub >> ten
    middle = a1 * b0 + ((a0 * b0) >> ten)
    cross = a0 * b1 + (middle & low)
    high = a1 * b1 + (middle >> ten) + (cross >> ten)
    if a.dtype.kind == "i":  # unsigned product of the bits, corrected for negative factors
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
        return high.view(np.int64)
    return high


def product(form: Form) -> tuple[str, str, Function]:
    """(type of the factors, type of the product, function) of mul and mad."""
    part = form.one("lo", "hi", "wide")
    type = form.type(*INTEGERS)
    if part == "wide" and type not in ("u64", "s64"):
        bits = 16 * np.dtype(TYPES[type]).itemsize
        out = f"{type[0]}{bits}"
        dtype = np.dtype(TYPES[out])
        return type, out, lambda a, b: np.asarray(a, dtype) * np.asarray(b, dtype)
    if part == "hi":
        return type, type, lambda a, b: mul_high(a, b, type)
    if part == "lo":
        return type, type, lambda a, b: a * b
    raise form.error("integer products take .lo, .hi or .wide")


def mul(form: Form) -> Step:
    type, out, function = product(form)
    return simple(form, type, function, out=out)


def mad(form: Form) -> Step:
    type, out, function = product(form)
    a, b, c, put = form.get(1, type), form.get(2, type), form.get(3, out), form.set(0, out)
    return lambda w: put(w, function(a(w), b(w)) + c(w))


def divide(a: Any, b: Any) -> Any:
    """Truncating; by zero all bits set, as the hardware gives."""
    a, b = np.asarray(a), np.asarray(b)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    x, y = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
    quotient = x // np.where(y == 0, unsigned.type(1), y)
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) ^ (b < 0), np.negative(quotient), quotient)
    return np.where(b == 0, ~unsigned.type(0), quotient).view(a.dtype)


def remainder(a: Any, b: Any) -> Any:
    return np.where(np.asarray(b) == 0, divide(a, b), a - divide(a, b) * b)


@instruction("rem")
def rem(form: Form) -> Step:
    """9.7.1."""
    return simple(form, form.type(*INTEGERS), remainder)


@instruction("sad")
def sad(form: Form) -> Step:
    """9.7.1."""
    type = form.type(*INTEGERS)
    return simple(form, type, lambda a, b, c: c + np.where(a > b, a - b, b - a), 3)


@instruction("mul24", "mad24")
def mul24(form: Form) -> Step:
    """9.7.1."""
    part, type = form.one("lo", "hi"), form.type("u32", "s32")
    if part is None:
        raise form.error("expected .lo or .hi")

    def times(a: Any, b: Any) -> Any:
        if type == "s32":
            a, b = (np.int64(v) << 40 >> 40 for v in (a, b))
        else:
            a, b = (np.int64(v) & 0xFFFFFF for v in (a, b))
        return ((a * b) >> (16 if part == "hi" else 0)).astype(np.int64).astype(TYPES[type])

    if form.parts[0] == "mul24":
        return simple(form, type, times)
    return simple(form, type, lambda a, b, c: times(a, b) + c, 3)


_LOGIC: Mapping[str, Function] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction("and", "or", "xor")
def logic(form: Form) -> Step:
    """9.7.8."""
    return simple(form, form.type("pred", *BITS), _LOGIC[form.parts[0]])


@instruction("not", "cnot")
def invert(form: Form) -> Step:
    """9.7.8."""
    if form.parts[0] == "cnot":
        return simple(form, form.type(*BITS), lambda a: np.equal(a, 0), 1)
    type = form.type("pred", *BITS)
    return simple(form, type, np.invert, 1)


@instruction("shl", "shr")
def shift(form: Form) -> Step:
    """9.7.8. Amounts are u32 and clamped to the width; shr of a signed type fills with
    the sign."""
    left = form.parts[0] == "shl"
    type = form.type(*BITS, *(() if left else INTEGERS))
    dtype = np.dtype(TYPES[type])
    bits, function = 8 * dtype.itemsize, np.left_shift if left else np.right_shift
    a, b, put = form.get(1, type), form.get(2, "u32"), form.set(0, type)
    last, empties = dtype.type(bits - 1), dtype.kind == "u"
    if isinstance(form.operand(2), Immediate):
        amount = int(b(None))  # type: ignore[arg-type]
        if amount < bits:
            by = dtype.type(amount)
            return lambda w: put(w, function(a(w), by))
        return lambda w: put(w, 0 if empties else function(a(w), last))

    def run(w: Fragment) -> None:
        amount = np.asarray(b(w))
        far = amount >= bits
        moved = function(a(w), np.where(far, last, amount.astype(dtype)))
        put(w, np.where(far, dtype.type(0), moved) if empties else moved)

    return run


@instruction("shf")
def funnel(form: Form) -> Step:
    """shf.l/.r.clamp/.wrap.b32 d, low, high, amount: 9.7.8."""
    side, mode = form.one("l", "r"), form.one("clamp", "wrap")
    if side is None or mode is None:
        raise form.error("expected .l or .r, and .clamp or .wrap")
    left, clamp = side == "l", mode == "clamp"
    form.type("b32")
    low, high, by, put = (
        form.get(1, "b32"),
        form.get(2, "b32"),
        form.get(3, "u32"),
        form.set(0, "b32"),
    )

    def run(w: Fragment) -> None:
        both = (np.uint64(high(w)) << np.uint64(32)) | np.uint64(low(w))
        amount = by(w)
        amount = np.uint64(np.minimum(amount, 32) if clamp else amount & 31)
        moved = (both << amount) >> np.uint64(32) if left else both >> amount
        put(w, (moved & np.uint64(0xFFFFFFFF)).astype(np.uint32))

    return run


@instruction("lop3")
def lop3(form: Form) -> Step:
    """9.7.8: any function of three inputs, from its truth table."""
    form.type("b32")
    lut = form.operand(4)
    if not isinstance(lut, Immediate) or not 0 <= lut.value < 256:
        raise form.error("the table must be a number below 256")
    table = lut.value

    def run(a: Any, b: Any, c: Any) -> Any:
        out = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                term = a if row & 4 else ~a
                term = term & (b if row & 2 else ~b)
                out = out | (term & (c if row & 1 else ~c))
        return out

    return simple(form, "b32", run, 3)


#: The four selectors, lowest first, for each value of the control operand's low two bits.
_BYTE_MODES: Mapping[str, tuple[str, str, str, str]] = {
    "f4e": ("0123", "1234", "2345", "3456"),
    "b4e": ("0765", "1076", "2107", "3210"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("0123", "1123", "2223", "3333"),
    "ecr": ("0000", "0111", "0122", "0123"),
    "rc16": ("0101", "2323", "0101", "2323"),
}


@instruction("prmt")
def prmt(form: Form) -> Step:
    """9.7.9: pick four of eight bytes; bit 3 of a selector replicates the sign."""
    form.type("b32")
    mode = form.one(*_BYTE_MODES)
    modes = [int(digits[::-1], 16) for digits in _BYTE_MODES[mode]] if mode else []
    table = np.array(modes, np.uint64)
    b3, ff, one = np.uint64(7), np.uint64(0xFF), np.uint64(1)

    def run(a: Any, b: Any, selector: Any) -> Any:
        both = (np.uint64(b) << np.uint64(32)) | np.uint64(a)
        selectors = table[selector & 3] if mode else np.uint64(selector)
        out: Any = np.uint64(0)
        for i in range(4):
            nibble = selectors >> np.uint64(4 * i)
            byte = both >> ((nibble & b3) << np.uint64(3)) & ff
            sign = (byte >> b3) * ff
            out = out | np.where(nibble >> np.uint64(3) & one, sign, byte) << np.uint64(8 * i)
        return out.astype(np.uint32)

    return simple(form, "b32", run, 3)


def _low_bits(count: Any) -> Any:
    """uint64 with ``count`` (0 to 64) low bits set."""
    count = np.asarray(count)
    some = (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1)
    return np.where(count >= 64, ~np.uint64(0), some)


def field_part(value: Any, bits: int) -> Any:
    """Position or length of a field: the low 8 bits of it, as the PTX ISA says. With 64-bit
    operands an H200 takes all of it."""
    return np.int64(value & 0xFF) if bits == 32 else np.minimum(np.int64(value), 255)


@instruction("bfe")
def bfe(form: Form) -> Step:
    """9.7.1: a field of ``length`` bits, filled with its sign, or with that of the whole number
    where it reaches beyond."""
    type = form.type("u32", "u64", "s32", "s64")
    dtype = np.dtype(TYPES[type])
    bits, unsigned = 8 * dtype.itemsize, np.dtype(f"u{dtype.itemsize}")
    a, at, length = form.get(1, type), form.get(2, "u32"), form.get(3, "u32")
    put = form.set(0, type)

    def run(w: Fragment) -> None:
        value = np.asarray(a(w)).view(unsigned).astype(np.uint64)
        start, count = field_part(at(w), bits), field_part(length(w), bits)
        reach = np.clip(bits - start, 0, count)
        shifted = value >> np.minimum(start, 63).astype(np.uint64)
        out = shifted & _low_bits(reach)
        if dtype.kind == "i":
            sign_at = np.clip(start + count - 1, 0, bits - 1).astype(np.uint64)
            negative = (value >> sign_at & np.uint64(1) == 1) & (count > 0)
            out = np.where(negative, out | ~_low_bits(reach), out)
        put(w, out.astype(unsigned).view(dtype))

    return run


@instruction("bfi")
def bfi(form: Form) -> Step:
    """9.7.1: the low bits of a, put into b."""
    type = form.type("b32", "b64")
    dtype = np.dtype(TYPES[type])
    bits = 8 * dtype.itemsize
    gets = [form.get(1, type), form.get(2, type), form.get(3, "u32"), form.get(4, "u32")]
    put = form.set(0, type)

    def run(w: Fragment) -> None:
        a, b, start, count = (get(w) for get in gets)
        start, count = field_part(start, bits), field_part(count, bits)
        at = np.minimum(start, 63).astype(np.uint64)
        mask = _low_bits(np.clip(bits - start, 0, count)) << at
        put(w, ((np.uint64(b) & ~mask) | ((np.uint64(a) << at) & mask)).astype(dtype))

    return run


@instruction("popc", "clz", "brev", "bfind")
def bits_of(form: Form) -> Step:
    """9.7.1."""
    name = form.parts[0]
    shift_amount = name == "bfind" and form.has("shiftamt")
    type = form.type(*(("u32", "u64", "s32", "s64") if name == "bfind" else BITS[1:]))
    dtype = np.dtype(TYPES[type])
    width = 8 * dtype.itemsize

    def spread(a: Any) -> np.ndarray:
        unsigned = np.atleast_1d(np.asarray(a)).view(f"u{dtype.itemsize}")
        octets = unsigned.astype(f">u{dtype.itemsize}").view(np.uint8).reshape(-1, dtype.itemsize)
        return np.unpackbits(octets, axis=1)  # highest bit first

    if name == "popc":
        return simple(form, type, lambda a: spread(a).sum(1).astype(np.uint32), 1, "u32")
    if name == "brev":

        def reverse(a: Any) -> np.ndarray:
            octets = np.packbits(spread(a)[:, ::-1], axis=1)
            return (
                np.ascontiguousarray(octets)
                .view(f">u{dtype.itemsize}")
                .astype(f"u{dtype.itemsize}")[:, 0]
            )

        return simple(form, type, reverse, 1)

    def leading(a: Any) -> np.ndarray:
        every = spread(a)
        return np.where(every.any(1), every.argmax(1), width).astype(np.uint32)

    if name == "clz":
        return simple(form, type, leading, 1, "u32")

    def find(a: Any) -> np.ndarray:
        if dtype.kind == "i":
            a = np.where(np.asarray(a) < 0, ~np.asarray(a), a)
        zeros = leading(a)
        place = zeros if shift_amount else np.uint32(width - 1) - zeros
        return np.where(zeros == width, np.uint32(0xFFFFFFFF), place)

    return simple(form, type, find, 1, "u32")


_COMPARE: Mapping[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def integer_compare(name: str) -> Function:
    return _COMPARE[name]
