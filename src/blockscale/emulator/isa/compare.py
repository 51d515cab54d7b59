"""Comparisons: PTX ISA 9.7.6.1, 9.7.6.2, 9.7.7."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import ieee
from ..machine.state import Fragment, Step
from ..ptx.program import Pair
from . import integer
from .registry import BITS, SIGNED, UNSIGNED, Form, Getter, instruction

_EQUAL = ("eq", "ne")
_ORDERED = (*_EQUAL, "lt", "le", "gt", "ge")
_UNSIGNED = ("lo", "ls", "hi", "hs")
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_FLOAT = (*_ORDERED, *_UNORDERED, "num", "nan")
_HALVES = ("f16", "bf16")
_PACKED = ("f16x2", "bf16x2")
_SINGLES = (*BITS, *UNSIGNED, *SIGNED, "f32", "f64")

_COMPARISONS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(BITS, _EQUAL),
    **dict.fromkeys(SIGNED, _ORDERED),
    **dict.fromkeys(UNSIGNED, (*_ORDERED, *_UNSIGNED)),
    **dict.fromkeys((*_HALVES, *_PACKED, "f32", "f64"), _FLOAT),
}

#: What set writes for true, and the types it compares.
_RESULTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "u32": (0xFFFFFFFF, (*_SINGLES, *_HALVES, *_PACKED)),
    "s32": (0xFFFFFFFF, (*_SINGLES, *_HALVES, *_PACKED)),
    "u16": (0xFFFF, _HALVES),
    "s16": (0xFFFF, _HALVES),
    "f32": (0x3F800000, _SINGLES),
    "f16": (0x3C00, (*_SINGLES, "f16")),
    "bf16": (0x3F80, (*_SINGLES, *_HALVES)),
    "f16x2": (0x3C00, ("f16x2",)),
    "bf16x2": (0x3F80, ("bf16x2",)),
}

_LOGIC: Mapping[str, Callable[..., Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _compare(name: str, x: Any, y: Any, is_float: bool) -> Any:
    if not is_float:
        return integer.integer_compare(name)(x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    if name in _UNORDERED:
        return integer.integer_compare(_UNORDERED[name])(x, y) | unordered
    return integer.integer_compare(name)(x, y) & ~unordered


def _source(form: Form, index: int, type: str) -> Getter:
    """An operand as numbers: (threads,), packed halves as (threads, 2)."""
    if type not in (*_HALVES, *_PACKED):
        return form.get(index, type)
    packed = type in _PACKED
    get = form.get(index, "b32" if packed else "b16")

    def parts(w: Fragment) -> np.ndarray:
        values = ieee.split(np.array(np.broadcast_to(get(w), w.n)), type)
        return values if packed else values[:, 0]

    return parts


def _comparison(form: Form, type: str, ftz: bool) -> tuple[Getter, Callable[..., Any]]:
    """(what the comparison itself gives, what the boolean operation makes of that)."""
    name = form.one(*_COMPARISONS.get(type, ()))
    if name is None:
        raise form.error(f"comparison is not supported with .{type}")
    if ftz and type not in ("f16", "f16x2", "f32"):
        raise form.error(f".ftz is not supported with .{type}")
    logic = form.one(*_LOGIC)
    a, b = _source(form, 1, type), _source(form, 2, type)
    c = form.get(3, "pred") if logic else None
    is_float = type[0] == "f" or type.startswith("bf")
    tiny = ieee.TINY16 if type.startswith("f16") else ieee.TINY32

    def test(w: Fragment) -> Any:
        x, y = a(w), b(w)
        if ftz:
            x, y = ieee.flush(x, tiny), ieee.flush(y, tiny)
        return _compare(name, x, y, is_float)

    def combine(w: Fragment, value: Any) -> Any:
        return value if c is None or logic is None else _LOGIC[logic](value, c(w))

    return test, combine


@instruction("setp")
def setp(form: Form) -> Step:
    """setp.cmp[.bool].type p[|q], a, b[, c]: q is that of not (a cmp b), or of the upper halves."""
    ftz, type = form.has("ftz"), form.type()
    test, combine = _comparison(form, type, ftz)
    target = form.operand(0)
    if isinstance(target, Pair) and type in _HALVES:
        raise form.error(f".{type} takes one predicate")
    first = form.set(target.first if isinstance(target, Pair) else target, "pred")
    if not isinstance(target, Pair) and type not in _PACKED:
        return lambda w: first(w, combine(w, test(w)))
    second = form.set(target.second if isinstance(target, Pair) else None, "pred")

    def run(w: Fragment) -> None:
        value = test(w)
        p, q = (value[..., 0], value[..., 1]) if type in _PACKED else (value, None)
        p, other = combine(w, p), combine(w, np.logical_not(p) if q is None else q)
        first(w, p)
        second(w, other)

    return run


@instruction("set")
def set_(form: Form) -> Step:
    """set.cmp[.bool].to.type d, a, b[, c]: all bits or 1.0 where it is true."""
    ftz, types = form.has("ftz"), form.types()
    to, type = types if len(types) == 2 else ("", "")
    true, sources = _RESULTS.get(to, (0, ()))
    if type not in sources or (ftz and to == "bf16"):
        raise form.error(f"types {', '.join(types) or 'none'} are not supported")
    test, combine = _comparison(form, type, ftz)
    if type in _PACKED:
        put, half = form.set(0, "b32"), np.uint32(true & 0xFFFF)

        def both(w: Fragment) -> None:
            value = test(w)
            low, high = (combine(w, value[..., i]) * half for i in (0, 1))
            put(w, low | high << np.uint32(16))

        return both
    bits = f"b{to.lstrip('bfsu')}"
    put = form.set(0, bits)
    one = np.dtype(f"u{int(bits[1:]) // 8}").type(true)
    return lambda w: put(w, np.where(combine(w, test(w)), one, one.dtype.type(0)))
