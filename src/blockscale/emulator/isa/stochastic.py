"""cvt.rs, rounding by given random bits: PTX ISA 9.7.9.21, of sm_100a.

A result steps away from zero if the random bits, added to the first of the bits that do not fit,
carry. Which random bits a result of f16x2 or bf16x2 gets, the manual says in words. Of four narrow
floats it says less, the rest is in a figure: here the first two use the same 16 bits, the last two
the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..machine.state import Fragment, Step
from .convert import NARROW
from .registry import TYPES, Form, instruction

#: mantissa bits, exponent bias, largest code, code of infinity, of NaN (None: the largest), bits
_FORMATS: Mapping[str, tuple[int, int, int, int | None, int | None, int]] = {
    "f16": (10, 15, 0x7BFF, 0x7C00, 0x7FFF, 16),
    "bf16": (7, 127, 0x7F7F, 0x7F80, 0x7FFF, 16),
    **{
        name: (mantissa, bias, largest, None, nan, bits)
        for name, (mantissa, bias, largest, nan, bits) in NARROW.items()
    },
}


def _round(
    value: np.ndarray, random: np.ndarray, digits: int, name: str, relu: bool, satfinite: bool
) -> np.ndarray:
    """fp32 -> codes, ``random`` of ``digits`` bits."""
    mantissa, bias, largest, infinity, nan, bits = _FORMATS[name]
    magnitude = np.abs(value).astype(np.float64)
    finite = np.where(np.isfinite(magnitude), magnitude, 0)
    exponent = np.where(finite == 0, 1 - bias, np.frexp(finite)[1] - 1)
    quantum = np.maximum(exponent, 1 - bias) - mantissa
    steps, rest = np.divmod(np.ldexp(finite, -quantum), 1)
    carries = np.floor(np.ldexp(rest, digits)) + random >= 1 << digits
    code = steps + carries + (quantum + mantissa + bias - 1).astype(np.float64) * (1 << mantissa)
    top = largest if satfinite or infinity is None else infinity
    code = np.where(np.isinf(magnitude), top, np.minimum(code, top)).astype(np.int64)
    negative = np.signbit(value)
    code = np.where(relu & negative, 0, code | negative.astype(np.int64) << bits - 1)
    return np.where(np.isnan(value), largest if nan is None else nan, code)


def _random(name: str, word: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """The random bits of every source, first to last, and how many they are."""
    high, low = word >> 16, word & 0xFFFF
    if name == "f16":
        return [(high & 0x1FFF, 13), (low & 0x1FFF, 13)]
    if name == "bf16":
        return [(high, 16), (low, 16)]
    if name == "e2m1":
        high, low = high & 0xFF00 | low >> 8, (high & 0xFF) << 8 | low & 0xFF
    return [(high, 16)] * 2 + [(low, 16)] * 2


@instruction("cvt.rs")
def cvt(form: Form) -> Step:
    """9.7.9.21: the first source goes to the highest bits."""
    form.needs("sm_100a", "sm_103a")
    relu, satfinite = form.has("relu"), form.has("satfinite")
    to = form.one("f16x2", "bf16x2", *(f"{name}x4" for name in NARROW))
    if to is None or form.type() != "f32":
        raise form.error("expected two or four halves or narrow floats, and .f32")
    name, four = to[:-2], to.endswith("x4")
    if four and not satfinite:
        raise form.error(f".{to} takes .satfinite")
    sources = form.items(1) if four else (form.operand(1), form.operand(2))
    if len(sources) != (4 if four else 2):
        raise form.error(f"has {len(sources)} sources, 4 are expected")
    gets = [form.get(item, "f32") for item in sources]
    rbits = form.get(2 if four else 3, "b32")
    width = 4 if name == "e2m1" else 32 // len(sources)
    kept = f"b{width * len(sources)}"
    put = form.set(0, kept)

    def run(w: Fragment) -> None:
        out = np.zeros(w.n, np.int64)
        random = _random(name, np.broadcast_to(rbits(w), w.n).astype(np.int64))
        for get, (bits, digits) in zip(gets, random, strict=True):
            value = np.array(np.broadcast_to(get(w), w.n))
            out = out << width | _round(value, bits, digits, name, relu, satfinite)
        put(w, out.astype(TYPES[kept]))

    return run
