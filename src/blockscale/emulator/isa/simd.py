"""Small integers packed into 32 bits, and bit fields of 32 bits: PTX ISA 9.7.1, 9.7.9.22."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.state import Fragment, Step
from .integer import simple
from .registry import TYPES, Form, instruction

#: Type modifiers of packed 16-bit integers.
PACKED = ("u16x2", "s16x2")


def _fields(value: Any, dtype: Any) -> np.ndarray:
    """A packed operand as (threads, fields)."""
    words = np.ascontiguousarray(np.atleast_1d(value))
    return words.view(dtype).reshape(len(words), -1)


def halves(form: Form, function: Callable[..., Any], relu: bool = False) -> Step:
    """add, min and max of .u16x2 and .s16x2; .relu of the latter's extremes: 9.7.1.1, 9.7.1.12."""
    form.needs("sm_90")
    type = form.one(*PACKED) or ""
    if relu and type != "s16x2":
        raise form.error(f".relu is not supported with .{type}")
    dtype = np.dtype(TYPES[type[:3]])

    def run(a: Any, b: Any) -> np.ndarray:
        out = np.asarray(function(_fields(a, dtype), _fields(b, dtype)), dtype)
        out = np.maximum(out, dtype.type(0)) if relu else out
        return np.ascontiguousarray(out).view(np.uint32)[:, 0]

    return simple(form, "b32", run)


@instruction("dp4a", "dp2a")
def dot(form: Form) -> Step:
    """9.7.1.23, 9.7.1.24: c plus products of bytes, or of 16-bit numbers and the lower or upper two
    bytes."""
    four = form.parts[0] == "dp4a"
    half = None if four else form.one("lo", "hi")
    kinds = [part for part in form.left if part in ("u32", "s32")]
    if len(kinds) != 2 or (half is None) != four:
        raise form.error("expected two types of .u32 and .s32" + ("" if four else ", .lo or .hi"))
    for kind in kinds:
        form.left.remove(kind)
    of_a, of_b = (
        np.dtype(TYPES[f"{kind[0]}{bits}"])
        for kind, bits in zip(kinds, (8 if four else 16, 8), strict=True)
    )
    chosen = {None: slice(None), "lo": slice(0, 2), "hi": slice(2, 4)}[half]

    def run(a: Any, b: Any, c: Any) -> np.ndarray:
        products = _fields(a, of_a).astype(np.int64) * _fields(b, of_b)[:, chosen]
        return (np.int64(c) + products.sum(1)).astype(np.uint32)

    return simple(form, "b32", run, 3)


def _mask(start: Any, length: Any) -> np.ndarray:
    """uint32 with ``length`` bits set from ``start`` on, those beyond bit 31 lost."""
    one = np.int64(1)
    bits = ((one << np.minimum(length, 32)) - 1) << np.minimum(start, 32)
    return (bits & 0xFFFFFFFF).astype(np.uint32)


def _wraps(form: Form) -> bool:
    mode = form.one("clamp", "wrap")
    if mode is None:
        raise form.error("expected .clamp or .wrap")
    return mode == "wrap"


@instruction("bmsk")
def bmsk(form: Form) -> Step:
    """9.7.1.22."""
    limit = 31 if _wraps(form) else 0xFFFFFFFF
    form.type("b32")
    return simple(form, "b32", lambda a, b: _mask(np.int64(a & limit), np.int64(b & limit)))


@instruction("szext")
def szext(form: Form) -> Step:
    """9.7.1.21: the low bits of a, with zeros or their sign above."""
    limit, type = 31 if _wraps(form) else 0xFFFFFFFF, form.type("u32", "s32")

    def run(a: Any, b: Any) -> np.ndarray:
        length = np.int64(b & limit)
        low = _mask(np.int64(0), length)
        if type == "u32":
            return np.asarray(a & low)
        negative = np.int64(a) >> np.clip(length - 1, 0, 31) & (length > 0)
        return np.where(negative, a | ~low, a & low)

    return simple(form, "b32", run)


@instruction("fns")
def fns(form: Form) -> Step:
    """9.7.1.17: from bit ``base`` on, itself the first one, up or down by the sign of ``nth``."""
    form.type("b32")
    a, b, c, put = form.get(1, "u32"), form.get(2, "u32"), form.get(3, "s32"), form.set(0, "u32")
    bits = np.arange(32)

    def run(w: Fragment) -> None:
        mask, base = (np.broadcast_to(get(w), w.n).astype(np.int64)[:, None] for get in (a, b))
        nth = np.broadcast_to(c(w), w.n).astype(np.int64)[:, None]
        ahead = np.where(nth < 0, bits <= base, bits >= base) & ((nth != 0) | (bits == base))
        found = (mask >> bits & 1 == 1) & ahead
        count = np.where(nth < 0, found[:, ::-1].cumsum(1)[:, ::-1], found.cumsum(1))
        found &= count == np.maximum(np.abs(nth), 1)
        put(w, np.where(found.any(1), found.argmax(1), 0xFFFF_FFFF).astype(np.uint32))

    return run


@instruction("vabsdiff2", "vabsdiff4")
def vabsdiff(form: Form) -> Step:
    """9.7.18.2, without masks and selectors: all that nvcc makes of __vabsdiffu4 and its kind."""
    dtype = {"vabsdiff2": np.uint16, "vabsdiff4": np.uint8}[form.parts[0]]
    if (given := form.types()) != ["u32"] * 3:
        raise form.error(f"expected the types u32, u32 and u32, found {', '.join(given) or 'none'}")
    adds = form.has("add")

    def run(a: Any, b: Any, c: Any) -> np.ndarray:
        first, second = _fields(a, dtype), _fields(b, dtype)
        found = np.maximum(first, second) - np.minimum(first, second)
        if adds:
            return np.asarray(c + found.sum(1, dtype=np.uint32))
        return np.ascontiguousarray(found).view(np.uint32)[:, 0]

    return simple(form, "u32", run, 3)


_SUBWORD = {f"{kind}{bits}": (kind, bits) for kind in "us" for bits in (2, 4, 8, 16)}


@instruction("cvt.pack")
def pack(form: Form) -> Step:
    """9.7.9.22: b and above it a, saturated; above both the low bits of c."""
    to = form.one(*_SUBWORD)
    if to is None or not form.has("sat") or not form.has("s32"):
        raise form.error("expected .sat, a narrow type and .s32")
    kind, bits = _SUBWORD[to]
    third = bits < 16
    if third != form.has("b32"):
        raise form.error(f".{to} takes " + (".b32 and a third operand" if third else "no .b32"))
    low, high = (0, (1 << bits) - 1) if kind == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    field = (1 << bits) - 1

    def run(a: Any, b: Any, c: Any = 0) -> np.ndarray:
        upper, lower = (np.clip(np.int64(v), low, high) & field for v in (a, b))
        return np.asarray(lower | upper << bits | np.int64(c) << 2 * bits).astype(np.uint32)

    return simple(form, "s32", run, 2 + third, "b32")
