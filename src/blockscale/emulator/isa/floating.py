"""Floating-point arithmetic: PTX ISA 9.7.3 to 9.7.5.

fp32 and the 16-bit types are computed in fp64, where their products are exact and sums are rounded
to odd (see ieee). fp64 itself goes to numpy, or to exact fractions where numpy has nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..machine import Step
from . import integer
from .ieee import (
    TINY16,
    TINY32,
    canonical,
    clamp,
    exact_fp64,
    flush,
    higher,
    join,
    lower,
    split,
    to_float32,
    two_sum_error,
    two_sum_to_odd,
)
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


_NEAREST: Mapping[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


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
    ftz, sat, relu = form.has("ftz"), form.has("sat"), form.has("relu")
    type = form.type(*_FLOATS)
    if type == "f64":
        if ftz or sat or relu:
            raise form.error("has no modifiers with .f64 but the rounding")
        if rounding != "rn" or name == "fma":
            return integer.simple(
                form, type, np.vectorize(exact_fp64(name, rounding), [float]), sources
            )
        return integer.simple(form, type, _NEAREST[name], sources)
    if (type in _HALVES and rounding != "rn") or (relu and (name != "fma" or type not in _HALVES)):
        raise form.error("unsupported modifier with this type")
    nearest = _nearest_fma if name == "fma" else _NEAREST[name]

    def single(*values: Any) -> np.ndarray:
        if ftz:
            values = tuple(flush(v) for v in values)
        out = (
            nearest(*values)
            if rounding == "rn"
            else to_float32(_exact(name, rounding, values), rounding)
        )
        out = flush(out) if ftz else out
        return canonical(clamp(out, sat, relu))

    def half(*values: Any) -> np.ndarray:
        if ftz:
            values = tuple(flush(v, TINY16) for v in values)
        out = clamp(to_float32(_exact(name, rounding, values), "odd"), sat, relu)
        return flush(out, TINY16) if ftz else out

    if type == "f32":
        return integer.simple(form, type, single, sources)
    return packed(form, type, single if type == "f32x2" else half, sources)


def packed(form: Form, type: str, function: Any, sources: int) -> Step:
    """``function`` of fp32 parts; a 16-bit type rounds what comes out to nearest even."""
    bits = {"f32x2": "b64", "f16x2": "b32", "bf16x2": "b32", "f16": "b16", "bf16": "b16"}[type]

    def run(*values: Any) -> np.ndarray:
        return join(function(*np.broadcast_arrays(*[split(v, type) for v in values])), type)

    return integer.simple(form, bits, run, sources)


def _is_float(form: Form) -> bool:
    return any(part in _FLOATS for part in form.left)


@instruction("add", "sub")
def add(form: Form) -> Step:
    """9.7.1, 9.7.3 to 9.7.5."""
    name = form.parts[0]
    if _is_float(form):
        return arithmetic(form, name, 2)
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
        relu, type = form.has("relu"), form.type(*INTEGERS)
        function = np.minimum if low else np.maximum
        if relu and type == "s32":
            return integer.simple(form, type, lambda a, b: np.maximum(function(a, b), 0))
        if relu:
            raise form.error(".relu needs .s32")
        return integer.simple(form, type, function)
    ftz, nan, xorsign, absolute = (form.has(n) for n in ("ftz", "NaN", "xorsign", "abs"))
    type = form.type(*_FLOATS)
    if count not in (2, 3) or (count == 3 and (type != "f32" or xorsign)):
        raise form.error(f"{count} inputs are not supported")
    if type == "f64" and (ftz or nan or xorsign or absolute):
        raise form.error("has no modifiers with .f64")
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
    if ftz and type != "f32":
        raise form.error(f".ftz is not supported with .{type}")
    if type == "f64":
        return integer.simple(form, type, lambda a: np.where(np.isnan(a), a, function(a)), 1)
    if type == "f32":
        return integer.simple(form, type, lambda a: canonical(function(flush(a) if ftz else a)), 1)
    return packed(form, type, function, 1)


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
    if type == "f64" and (ftz or rounding != "rn" or form.has("approx") or "approx" in form.parts):
        raise form.error("fp64 is supported with .rn")

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


_APPROXIMATE: Mapping[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@instruction(*_APPROXIMATE)
def approximate(form: Form) -> Step:
    """9.7.3. Correctly rounded here; the hardware's differ by a few units."""
    name = form.parts[0]
    if not form.has("approx"):
        raise form.error("expected .approx")
    ftz = form.has("ftz")
    type = form.type("f32", *(_HALVES if name in ("ex2", "tanh") else ()))

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
