"""cvt between integer, floating-point and narrow formats: PTX ISA 9.7.9."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from .. import ieee
from ..machine.state import Fragment, Step
from .floating import ROUNDINGS
from .registry import TYPES, Form, instruction

#: mantissa bits, exponent bias, largest code, NaN code (None: NaN becomes the largest), bits
NARROW: Mapping[str, tuple[int, int, int, int | None, int]] = {
    "e4m3": (3, 7, 0x7E, 0x7F, 8),
    "e5m2": (2, 15, 0x7B, 0x7F, 8),
    "e3m2": (2, 3, 0x1F, None, 6),
    "e2m3": (3, 1, 0x1F, None, 6),
    "e2m1": (1, 1, 0x07, None, 4),
}

_INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def narrow(value: np.ndarray, name: str, relu: bool = False) -> np.ndarray:
    """fp32 -> codes of a narrow float: to nearest even, saturating."""
    mantissa, bias, largest, nan, bits = NARROW[name]
    value = np.asarray(value, np.float32)
    word = value.view(np.uint32)
    magnitude = word & 0x7FFFFFFF
    drop = 23 - mantissa
    normal = magnitude + ((1 << drop - 1) - 1) + (magnitude >> drop & 1) >> drop
    normal -= np.minimum(normal, 127 - bias << mantissa)
    # Adding 2**n leaves of a subnormal number what the format has, rounded to nearest even.
    shift = np.float32(2.0 ** (24 - bias - mantissa))
    subnormal = (np.abs(value) + shift).view(np.uint32) - shift.view(np.uint32)
    code = np.where(magnitude < 128 - bias << 23, subnormal, normal)
    code = np.minimum(code, largest)
    sign = word >> 31
    code = np.where(sign, 0 if relu else code | 1 << bits - 1, code)
    code = np.where(magnitude > 0x7F800000, largest if nan is None else nan, code)
    return code.astype(np.uint8)


def widen(codes: np.ndarray, name: str) -> np.ndarray:
    """Codes of a narrow float -> fp32, exact."""
    mantissa, bias, largest, nan, bits = NARROW[name]
    code = codes.astype(np.int64)
    magnitude = code & ((1 << (bits - 1)) - 1)
    field = magnitude >> mantissa
    significand = (magnitude & ((1 << mantissa) - 1)) + ((field > 0) << mantissa)
    value = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - bias - mantissa)
    if name == "e5m2":
        value = np.where(magnitude == 0x7C, np.inf, value)
    if nan is not None:
        value = np.where(magnitude > (0x7C if name == "e5m2" else largest), np.nan, value)
    return np.where(code >> (bits - 1) & 1, -value, value).astype(np.float32)


def to_e8m0(value: np.ndarray, up: bool, saturates: bool = True) -> np.ndarray:
    """fp32 -> ue8m0 of the magnitude, toward zero or up; NaN is 0xff, and so is infinity unless it
    saturates."""
    bits = np.asarray(value, np.float32).view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    field, rest = bits >> 23, bits & 0x7FFFFF
    more = np.where(field == 0, rest > 0x400000, rest > 0) & (field < 255)
    code = np.minimum(field + (more & up), 254 if saturates else 255)
    return np.where(np.isnan(value), 255, code).astype(np.uint8)


def _element(part: str) -> str:
    """The narrow type that a modifier names, "" if none."""
    name = part.removesuffix("x2")
    return name if name in (*NARROW, "ue8m0", "tf32") else ""


@dataclass(frozen=True, slots=True)
class _Modifiers:
    rounding: str | None
    ftz: bool
    sat: bool
    relu: bool
    satfinite: bool


@instruction("cvt")
def cvt(form: Form) -> Step:
    """9.7.9."""
    rounding = form.one(*ROUNDINGS, "rna", *_INTEGER_ROUNDING)
    by = _Modifiers(rounding, *(form.has(n) for n in ("ftz", "sat", "relu", "satfinite")))
    types = [part for part in form.left if part in TYPES or _element(part)]
    if len(types) != 2:
        raise form.error(f"expected two types, found {', '.join(types) or 'none'}")
    for part in types:
        form.left.remove(part)
    to, source = types
    narrow_forms = _element(to) or _element(source)
    if narrow_forms and (by.ftz or by.sat):
        raise form.error("unsupported modifier with this type")
    if not {_element(to), _element(source)} <= {"", "tf32", "e4m3", "e5m2"}:
        form.needs("sm_100f")
    if to == "tf32":
        if by.satfinite and rounding != "rna":
            form.needs("sm_100")
        return _tf32(form, rounding or "rn", by.relu, by.satfinite)
    if _element(to):
        return _to_narrow(form, _element(to), source, by)
    if _element(source):
        if rounding != "rn" or by.satfinite:
            raise form.error("expected .rn without .satfinite")
        return _from_narrow(form, _element(source), to, by.relu)
    if to in ("bf16x2", "f16x2") and source == "f32":
        if by.ftz or by.sat:
            raise form.error("unsupported modifier with this type")
        return _pair(form, to[:-2], by)
    return _scalar(form, source, to, by)


_FLOATS = ("f16", "bf16", "f32", "f64")
_INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")


def _roundings(source: str, to: str) -> tuple[str | None, ...]:
    """What may say how to round; None: nothing."""
    if to in _INTEGERS:
        return tuple(_INTEGER_ROUNDING) if source in _FLOATS else (None,)
    if source in _INTEGERS:
        return ROUNDINGS
    if source == to:
        return (None, *_INTEGER_ROUNDING)
    sizes = np.dtype(TYPES[source]).itemsize, np.dtype(TYPES[to]).itemsize
    if sizes[0] == sizes[1]:  # f16 and bf16
        return (None, *ROUNDINGS)
    return ROUNDINGS if sizes[0] > sizes[1] else (None,)


def _may_saturate(source: str, to: str) -> bool:
    """Whether .sat is allowed: for integers, where something can be out of range."""
    if to in _FLOATS:
        return "bf16" not in (to, source)
    if source in _FLOATS:
        return source != "bf16"
    own, info = np.iinfo(TYPES[source]), np.iinfo(TYPES[to])
    return bool(own.min < info.min or own.max > info.max)


def _check_scalar(form: Form, source: str, to: str, by: _Modifiers) -> None:
    """What may go together."""
    for name in (source, to):
        if name not in (*_FLOATS, *_INTEGERS):
            raise form.error(f"type .{name} is not supported")
    allowed = _roundings(source, to)
    if by.rounding not in allowed:
        raise form.error(
            f"unsupported modifier .{by.rounding}"
            if by.rounding
            else f"needs .{', .'.join(filter(None, allowed))}"
        )
    halves = source == "f32" and to in ("f16", "bf16") and not (by.ftz or by.sat)
    if (
        (by.ftz and "f32" not in (source, to))
        or (by.sat and not _may_saturate(source, to))
        or ((by.relu or by.satfinite) and not (halves and by.rounding in ("rn", "rz")))
    ):
        raise form.error("unsupported modifier with this type")
    if source in ("s64", "u64") and to == "f64" and by.rounding not in (None, "rn"):
        raise form.error(f"rounding .{by.rounding} of 64-bit integers is not supported")


def _scalar(form: Form, source: str, to: str, by: _Modifiers) -> Step:
    """From one register to one."""
    _check_scalar(form, source, to, by)
    get = form.get(1, {"bf16": "b16", "f16": "b16"}.get(source, source))
    put = form.set(0, {"bf16": "b16", "f16": "b16"}.get(to, to))
    converted = _conversion(source, to, by)
    return lambda w: put(w, converted(np.asarray(get(w))))


def _conversion(source: str, to: str, by: _Modifiers) -> Callable[[np.ndarray], np.ndarray]:
    if to in _INTEGERS:
        if source in _INTEGERS:
            return lambda value: _between_integers(value, to, by.sat)
        return lambda value: _to_integer(_exact(value, source, by), to, source)
    if source in _INTEGERS and by.rounding == "rn" and to in ("f32", "f64") and not by.sat:
        return lambda value: value.astype(TYPES[to])
    if source == "bf16" and to == "f32" and not (by.rounding in _INTEGER_ROUNDING or by.sat):
        return _bf16_to_f32  # the bits as they are, those of a NaN too
    return lambda value: _to_float(_exact(value, source, by), source, to, by)


def _exact(value: np.ndarray, source: str, by: _Modifiers) -> np.ndarray:
    """The source as fp64, exact or rounded to odd, to an integer where the rounding says so."""
    value = np.atleast_1d(value)
    if source in _INTEGERS:
        return _from_integer(value)
    if source in ("f16", "bf16"):
        value = ieee.split(value, source)[:, 0]
    elif by.ftz and source == "f32":
        value = ieee.flush(value)
    wide = value.astype(np.float64)
    return _INTEGER_ROUNDING.get(by.rounding or "", np.asarray)(wide)


def _to_float(value: np.ndarray, source: str, to: str, by: _Modifiers) -> np.ndarray:
    """fp64 -> one of the larger formats."""
    value = ieee.clamp(value, by.sat, by.relu)
    near = by.rounding if by.rounding in ROUNDINGS else "rn"
    if to == "f64":
        return value
    if to == "f32":
        out = ieee.to_float32(value, near)
        out = out if source == "f64" else ieee.canonical(out)  # a NaN keeps its payload
        return ieee.flush(out) if by.ftz else out
    out = _half(value, to, near, by.satfinite)
    return _with_payload(value, out, to) if source == "f64" else out


def _between_integers(value: np.ndarray, to: str, sat: bool) -> np.ndarray:
    if sat:
        info, own = np.iinfo(TYPES[to]), np.iinfo(value.dtype)
        value = np.clip(value, max(info.min, own.min), min(info.max, own.max))
    return value.astype(TYPES[to])


def _to_integer(whole: np.ndarray, to: str, source: str) -> np.ndarray:
    """Clamped; a NaN is 0 between 32-bit types, else the highest bit alone."""
    info = np.iinfo(TYPES[to])
    low, high = whole < float(info.min), whole >= float(info.max) + (info.bits < 64)
    nan = np.isnan(whole)
    out = np.where(low | high | nan, 0, whole).astype(TYPES[to])
    out[low], out[high] = info.min, info.max
    if source == "f64" or info.bits == 64:
        out[nan] = info.min if info.min else 1 << info.bits - 1
    return out


def _from_integer(a: np.ndarray) -> np.ndarray:
    if a.dtype.itemsize < 8:
        return a.astype(np.float64)
    high = (a >> 32 << 32).astype(np.float64)
    low = (a & a.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return ieee.two_sum_to_odd(high, low)


def _half(value: np.ndarray, to: str, rounding: str, satfinite: bool) -> np.ndarray:
    """fp32 or fp64 -> bits of f16 or bf16."""
    if satfinite:
        limit = 65504.0 if to == "f16" else float(np.uint32(0x7F7F0000).view(np.float32))
        value = np.where(np.isnan(value), value, np.clip(value, -limit, limit))
    return ieee.to_half(value, to, rounding)


def _bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _with_payload(value: np.ndarray, out: np.ndarray, to: str) -> np.ndarray:
    """``out`` with sign and the upper payload of the fp64 NaN it came from."""
    bits = np.ascontiguousarray(value).view(np.uint64)
    quiet, shift = (0x7E00, 42) if to == "f16" else (0x7FC0, 45)
    kept = bits >> np.uint64(48) & np.uint64(0x8000) | bits >> np.uint64(shift) & np.uint64(0x1FF)
    return np.where(np.isnan(value), kept.astype(np.uint16) | np.uint16(quiet), out)


def _two(form: Form, source: str) -> Callable[[Fragment], tuple[np.ndarray, np.ndarray]]:
    """(lower, upper) as fp32: two registers, the upper one first, or one that is packed."""
    if source == "f32":
        upper, lower = form.get(1, "f32"), form.get(2, "f32")
        return lambda w: (
            np.full(w.n, lower(w)),
            np.full(w.n, upper(w)),
        )
    if source not in ("f16x2", "bf16x2"):
        raise form.error(f"source .{source} is not supported")
    get = form.get(1, "b32")

    def both(w: Fragment) -> tuple[np.ndarray, np.ndarray]:
        parts = ieee.split(np.full(w.n, get(w)), source)
        return parts[:, 0], parts[:, 1]

    return both


def _pair(form: Form, half: str, by: _Modifiers) -> Step:
    """cvt.rn.bf16x2.f32 d, a, b: a goes to the upper half."""
    rounding = by.rounding or "rn"
    if rounding not in ("rn", "rz"):
        raise form.error(f"unsupported modifier .{rounding}")
    both, put = _two(form, "f32"), form.set(0, "b32")

    def run(w: Fragment) -> None:
        low, high = (
            _half(ieee.clamp(v, False, by.relu), half, rounding, by.satfinite) for v in both(w)
        )
        put(w, low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16))

    return run


def _to_narrow(form: Form, element: str, source: str, by: _Modifiers) -> Step:
    """e4m3x2.f32 and the like. ``a`` goes to the upper half."""
    rounding, relu, satfinite = by.rounding, by.relu, by.satfinite
    scale = element == "ue8m0"
    if (rounding not in ("rz", "rp") or relu) if scale else (rounding != "rn" or not satfinite):
        raise form.error("expected .rz or .rp" if scale else "expected .rn.satfinite")
    if source == "bf16x2":
        form.needs("sm_100f")
    if scale and source == "f16x2":
        raise form.error("source .f16x2 is not supported")
    bits = 4 if element == "e2m1" else 8
    both, put = _two(form, source), form.set(0, "b8" if bits == 4 else "b16")

    def run(w: Fragment) -> None:
        low, high = (
            (to_e8m0(v, rounding == "rp", satfinite) if scale else narrow(v, element, relu)).astype(
                np.uint16
            )
            for v in both(w)
        )
        put(w, (low | high << np.uint16(bits)).astype(np.uint8 if bits == 4 else np.uint16))

    return run


def _from_narrow(form: Form, element: str, to: str, relu: bool) -> Step:
    """f16x2.e4m3x2 and the like, bf16x2.ue8m0x2: exact."""
    scale = element == "ue8m0"
    if to != ("bf16x2" if scale else "f16x2"):
        raise form.error(f"to .{to} is not supported")
    if relu and scale:
        raise form.error("unsupported modifier .relu")
    bits = 4 if element == "e2m1" else 8
    get, put = form.get(1, "b8" if bits == 4 else "b16"), form.set(0, "b32")

    def run(w: Fragment) -> None:
        both = np.full(w.n, get(w)).astype(np.uint16)
        codes = np.stack([both & np.uint16((1 << bits) - 1), both >> np.uint16(bits)], 1)
        value = _widen_e8m0(codes) if scale else widen(codes, element)
        put(w, ieee.join(ieee.clamp(value, False, relu), to))

    return run


def _widen_e8m0(codes: np.ndarray) -> np.ndarray:
    field = codes.astype(np.uint32)
    bits = np.where(field == 0, np.uint32(0x400000), field << np.uint32(23))
    return np.where(field == 255, np.uint32(0x7FFFFFFF), bits).astype(np.uint32).view(np.float32)


def _tf32(form: Form, rounding: str, relu: bool, satfinite: bool) -> Step:
    if rounding not in ("rn", "rz", "rna") or (relu and rounding == "rna"):
        raise form.error("unsupported modifier for .tf32")
    get, put = form.get(1, "f32"), form.set(0, "b32")

    def run(w: Fragment) -> None:
        value = ieee.clamp(np.full(w.n, get(w), np.float32), False, relu)
        bits = value.view(np.uint32).astype(np.uint64)
        special = bits >> np.uint64(23) & np.uint64(255) == 255
        if rounding == "rna":
            bits = np.where(special, bits, bits + 0x1000)
        elif rounding == "rn":
            bits = bits + 0xFFF + ((bits >> np.uint64(13)) & np.uint64(1))
        out = (bits & np.uint64(0xFFFFE000)).astype(np.uint32)
        if rounding != "rna":
            out = np.where(np.isnan(value), np.uint32(0x7FFFE000), out)
        if satfinite:  # the hardware steps back from all that is not finite, be it a NaN
            over = out >> np.uint32(23) & np.uint32(255) == 255
            over &= ~np.isnan(value) if rounding != "rna" else over
            out = np.where(over, out - np.uint32(0x2000), out)
        put(w, out)

    return run
