"""Floating-point arithmetic: PTX ISA 9.7.3 to 9.7.5.

fp32 and the 16-bit types are computed in fp64, where their products are exact and sums are rounded
to odd (see ieee). fp64 itself goes to numpy, or with directed rounding to exact fractions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ieee import (
    TINY16,
    TINY32,
    canonical,
    clamp,
    exact_fp64,
    flush,
    fma64,
    higher,
    join,
    lower,
    split,
    to_float32,
    two_sum_error,
    two_sum_to_odd,
)
from ..machine.state import Fragment, Step
from . import integer, simd
from .registry import INTEGERS, SIGNED, Form, instruction

ROUNDINGS = ("rn", "rz", "rm", "rp")
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def _exact(name: str, rounding: str, values: tuple[Any, ...]) -> np.ndarray:
    """The result in fp64, exact or to odd."""
    a, b = (np.asarray(v, np.float64) for v in values[:2])
    if name == "mul":
        return a * b
    if name == "fma":
        a, b = a * b, np.asarray(values[2], np.float64)
    b = -b if name == "sub" else b
    total = two_sum_to_odd(*(np.array(v) for v in np.broadcast_arrays(a, b)))
    if rounding == "rm":  # x - x is -0 there, and only 0 + 0 is +0
        negative = (total == 0) & (np.signbit(a) | np.signbit(b))
        total = np.where(negative, -0.0, total)
    return total


_NEAREST: Mapping[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": fma64,
}  # fmt: skip


def _nearest_fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """fma.rn.f32: through fp64, unless its rounding there could decide the second one."""
    wide, c = np.asarray(np.asarray(a, np.float64) * b), np.asarray(c, np.float64)
    total = np.asarray(wide + c)
    risky = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000  # halfway between two fp32 numbers
    risky |= np.abs(total) < TINY32  # or where these lie further apart
    if risky.any() and (two_sum_error(wide, c, total) * risky).any():
        return to_float32(two_sum_to_odd(wide, c), "rn")
    return total.astype(np.float32)


def arithmetic(form: Form, name: str, sources: int) -> Step:
    """add, sub, mul, fma of f32, f64, f16, bf16 and their packed forms."""
    rounding = form.one(*ROUNDINGS, default="rn") or "rn"
    ftz, sat, relu, oob = (form.has(n) for n in ("ftz", "sat", "relu", "oob"))
    types = form.types()
    if len(types) == 2 and types[0] == "f32" and name != "mul" and not (ftz or relu or oob):
        return _mixed(form, name, rounding, sat, types[1])
    if len(types) != 1 or types[0] not in _FLOATS:
        raise form.error(f"types {', '.join(types) or 'none'} are not supported")
    (type,) = types
    if type == "f64":
        if ftz or sat or relu or oob:
            raise form.error("has no modifiers with .f64 but the rounding")
        if rounding != "rn":
            return integer.simple(
                form, type, np.vectorize(exact_fp64(name, rounding), [float]), sources
            )
        return integer.simple(form, type, _NEAREST[name], sources)
    if type in _HALVES and (rounding != "rn" or (sat and relu) or (ftz and oob)):
        raise form.error("unsupported modifier with this type or beside another")
    if (relu or oob) and (name != "fma" or type not in _HALVES):
        raise form.error("unsupported modifier with this type")
    if (sat and type in ("bf16", "bf16x2", "f32x2")) or (ftz and type in ("bf16", "bf16x2")):
        raise form.error("unsupported modifier with this type")
    if type == "f32x2":
        form.needs("sm_100")

    def half(*values: Any) -> np.ndarray:
        if ftz:
            values = tuple(flush(v, TINY16) for v in values)
        out = clamp(to_float32(_exact(name, rounding, values), "odd"), sat, relu)
        return flush(out, TINY16) if ftz else out

    if type in _HALVES:
        return packed(form, type, half, sources, oob)
    single = _single(name, rounding, ftz, sat)
    return (integer.simple if type == "f32" else packed)(form, type, single, sources)


def _single(name: str, rounding: str, ftz: bool, sat: bool) -> Any:
    """add, sub, mul or fma of fp32."""
    nearest = _nearest_fma if name == "fma" else _NEAREST[name]

    def run(*values: Any) -> np.ndarray:
        if ftz:
            values = tuple(flush(v) for v in values)
        out = (
            nearest(*values)
            if rounding == "rn"
            else to_float32(_exact(name, rounding, values), rounding)
        )
        out = flush(out) if ftz else out
        return canonical(clamp(out, sat, False))

    return run


def _mixed(form: Form, name: str, rounding: str, sat: bool, type: str) -> Step:
    """fp32 arithmetic whose operands but the last are .f16 or .bf16: 9.7.5."""
    if type not in ("f16", "bf16"):
        raise form.error(f"type .{type} is not supported")
    form.needs("sm_100")
    count = 2 if name == "fma" else 1
    narrow = [form.get(i + 1, "b16") for i in range(count)]
    last, put = form.get(count + 1, "f32"), form.set(0, "f32")
    single = _single(name, rounding, False, sat)

    def run(w: Fragment) -> None:
        put(w, single(*(split(get(w), type)[:, 0] for get in narrow), last(w)))

    return run


#: OOB-NaN of PTX ISA 5.5.3.3, of either sign: its bits are those that an H200 takes for it.
_OUT_OF_BOUNDS = np.uint16(0x7FF7)


def packed(form: Form, type: str, function: Any, sources: int, oob: bool = False) -> Step:
    """``function`` of fp32 parts; a 16-bit type rounds what comes out to nearest even.

    ``oob``: a part is +0 where one of its first two sources is the NaN of what is out of bounds.
    """
    bits = {"f32x2": "b64", "f16x2": "b32", "bf16x2": "b32", "f16": "b16", "bf16": "b16"}[type]

    def run(*values: Any) -> np.ndarray:
        parts: Any = function(*np.broadcast_arrays(*[split(v, type) for v in values]))
        if oob:
            a, b = (np.atleast_1d(v)[:, None].view(np.uint16) & 0x7FFF for v in values[:2])
            parts = np.where((a == _OUT_OF_BOUNDS) | (b == _OUT_OF_BOUNDS), 0, parts)
        return join(parts, type)

    return integer.simple(form, bits, run, sources)


def _is_float(form: Form) -> bool:
    return any(part in _FLOATS for part in form.left)


@instruction("add", "sub")
def add(form: Form) -> Step:
    """9.7.1, 9.7.3 to 9.7.5."""
    name = form.parts[0]
    if _is_float(form):
        return arithmetic(form, name, 2)
    if name == "add" and not set(form.left).isdisjoint(simd.PACKED):
        return simd.halves(form, np.add)
    return integer.add_or_sub(form, np.add if name == "add" else np.subtract)


@instruction("mul")
def mul(form: Form) -> Step:
    """9.7.1, 9.7.3 to 9.7.5."""
    return arithmetic(form, "mul", 2) if _is_float(form) else integer.mul(form)


@instruction("mad")
def mad(form: Form) -> Step:
    """9.7.1, 9.7.3 to 9.7.5."""
    return arithmetic(form, "fma", 3) if _is_float(form) else integer.mad(form)


@instruction("fma")
def fma(form: Form) -> Step:
    """9.7.3, 9.7.4."""
    return arithmetic(form, "fma", 3)


@instruction("min", "max")
def min_max(form: Form) -> Step:
    """9.7.1, 9.7.3, 9.7.4. Two or three inputs; .NaN propagates,
    else a NaN loses; .xorsign.abs of two."""
    low, count = form.parts[0] == "min", len(form.ins.operands) - 1
    if not _is_float(form):
        relu, function = form.has("relu"), np.minimum if low else np.maximum
        if not set(form.left).isdisjoint(simd.PACKED):
            return simd.halves(form, function, relu)
        type = form.type(*INTEGERS)
        if relu and type == "s32":
            return integer.simple(form, type, lambda a, b: np.maximum(function(a, b), 0))
        if relu:
            raise form.error(".relu needs .s32")
        return integer.simple(form, type, function)
    ftz, nan, xorsign, absolute = (form.has(n) for n in ("ftz", "NaN", "xorsign", "abs"))
    type = form.type("f32", "f64", *_HALVES)
    if count not in (2, 3) or (count == 3 and (type != "f32" or xorsign)):
        raise form.error(f"{count} inputs are not supported")
    if (xorsign and not absolute) or (absolute and count == 2 and not xorsign):
        raise form.error("two inputs take .xorsign.abs, three take .abs")
    if count == 3:
        form.needs("sm_100")
    if type == "f64" and (ftz or nan or xorsign or absolute):
        raise form.error("has no modifiers with .f64")
    if ftz and type.startswith("bf16"):
        raise form.error(f".ftz is not supported with .{type}")
    tiny = TINY16 if type.startswith("f16") else TINY32

    def every(*values: Any) -> np.ndarray:
        values = tuple(flush(v, tiny) for v in values) if ftz else values
        out, *rest = (np.abs(v) for v in values) if absolute else values
        for value in rest:
            out = (lower if low else higher)(out, value)
        if nan:
            out = np.where(
                np.logical_or.reduce([np.isnan(v) for v in np.broadcast_arrays(*values)]),
                np.nan,
                out,
            )
        out = out if type == "f64" else canonical(out)
        if xorsign:
            flip = (np.signbit(values[0]) ^ np.signbit(values[1])) & ~np.isnan(out)
            out = np.where(flip, -out, out)
        return out

    return (
        integer.simple(form, type, every, count)
        if type in ("f32", "f64")
        else packed(form, type, every, count)
    )


@instruction("abs", "neg")
def sign(form: Form) -> Step:
    """9.7.1, 9.7.3, 9.7.4. A NaN comes out canonical, in fp64 as it is."""
    function: Any = np.abs if form.parts[0] == "abs" else np.negative
    if not _is_float(form):
        return integer.simple(form, form.type(*SIGNED), function, 1)
    ftz, type = form.has("ftz"), form.type("f32", "f64", *_HALVES)
    if ftz and type not in ("f32", "f16", "f16x2"):
        raise form.error(f".ftz is not supported with .{type}")
    if type == "f64":
        return integer.simple(form, type, lambda a: np.where(np.isnan(a), a, function(a)), 1)
    tiny = TINY32 if type == "f32" else TINY16

    def single(a: Any) -> np.ndarray:
        return canonical(function(flush(a, tiny) if ftz else a))

    return (integer.simple if type == "f32" else packed)(form, type, single, 1)


@instruction("div", "rcp", "sqrt")
def divide(form: Form) -> Step:
    """9.7.1, 9.7.3. fp64 has enough bits that rounding its quotients and
    roots again is exact; the approximations are correctly rounded here."""
    name = form.parts[0]
    if name == "div" and not _is_float(form):
        return integer.simple(form, form.type(*INTEGERS), integer.divide)
    form.one("approx", *(("full",) if name == "div" else ()))
    rounding = form.one(*ROUNDINGS, default="rn") or "rn"
    ftz, type = form.has("ftz"), form.type("f32", "f64")
    if name == "rcp" and form.parts == ("rcp", "approx", "ftz", "f64"):
        return integer.simple(form, type, _of_upper_words(np.reciprocal), 1)
    if type == "f64" and (ftz or rounding != "rn" or "approx" in form.parts):
        other = ", and rcp.approx.ftz" if name == "rcp" else ""
        raise form.error(f"fp64 is supported with .rn{other}")

    def single(*values: Any) -> np.ndarray:
        if ftz:
            values = tuple(flush(v) for v in values)
        a = np.asarray(values[0], np.float64)
        if name == "div":
            out = a / np.asarray(values[1], np.float64)
        else:
            out = 1.0 / a if name == "rcp" else np.sqrt(a)
        out = canonical(to_float32(np.atleast_1d(out), rounding))
        return flush(out) if ftz else out

    if type == "f32":
        return integer.simple(form, type, single, 2 if name == "div" else 1)
    double: Mapping[str, Any] = {"div": np.divide, "rcp": np.reciprocal, "sqrt": np.sqrt}
    return integer.simple(form, type, double[name], 2 if name == "div" else 1)


def _of_upper_words(function: Any) -> Any:
    """.approx.ftz.f64, 9.7.3.14 and 9.7.3.17: the upper word of the result, nearest, of that of the
    operand; the lower words are ignored and zero. CUDA's divisions and logarithms start there."""
    tiny = np.finfo(np.float64).tiny

    def run(a: Any) -> np.ndarray:
        upper = np.atleast_1d(a).view(np.uint64) & _UPPER
        out = np.atleast_1d(function(flush(upper.view(np.float64), tiny)))
        words = (out.view(np.uint64) + np.uint64(1 << 31)) & _UPPER
        words[np.isnan(out)] = _QUIET_UPPER
        return np.asarray(flush(words.view(np.float64), tiny))

    return run


_UPPER, _QUIET_UPPER = np.uint64(0xFFFFFFFF << 32), np.uint64(0x7FFFFFFF << 32)


def _inverse_root(a: Any) -> Any:
    return 1 / np.sqrt(a)


_APPROXIMATE: Mapping[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": _inverse_root,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction(*_APPROXIMATE)
def approximate(form: Form) -> Step:
    """9.7.3, 9.7.4. Correctly rounded here; the hardware's differ by a few units."""
    name = form.parts[0]
    if not form.has("approx"):
        raise form.error("expected .approx")
    ftz = form.has("ftz")
    also = {"ex2": _HALVES, "tanh": _HALVES, "rsqrt": ("f64",)}
    type = form.type("f32", *also.get(name, ()))
    if type == "f64":
        function = _of_upper_words(_inverse_root) if ftz else _inverse_root
        return integer.simple(form, type, function, 1)
    strict = name == "tanh" or type in _HALVES
    if strict and ftz != (name == "ex2" and type.startswith("bf16")):
        raise form.error(f".{type} takes {'no .ftz' if ftz else '.ftz'}")

    def single(a: Any) -> np.ndarray:
        a = flush(a) if ftz else a
        out = canonical(_APPROXIMATE[name](np.asarray(a, np.float64)).astype(np.float32))
        return flush(out) if ftz else out

    if type == "f32":
        return integer.simple(form, type, single, 1)
    return packed(form, type, single, 1)


@instruction("copysign")
def copysign(form: Form) -> Step:
    """9.7.3: the sign of the first, the rest of the second."""
    return integer.simple(form, form.type("f32", "f64"), lambda a, b: np.copysign(b, a))


_PROPERTIES: Mapping[str, Any] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    # The hardware takes zeros for normal.
    "normal": lambda a: np.isfinite(a) & ((a == 0) | (np.abs(a) >= np.finfo(a.dtype).tiny)),
    "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
}


@instruction("testp")
def testp(form: Form) -> Step:
    """9.7.3."""
    name = form.one(*_PROPERTIES)
    if name is None:
        raise form.error("expected a property to test")
    return integer.simple(form, form.type("f32", "f64"), _PROPERTIES[name], 1, "pred")
