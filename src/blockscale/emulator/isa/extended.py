"""Integer arithmetic with a carry: PTX ISA 9.7.2.

The carry of a thread is a register of its function. As on an H200, a subtraction adds
the inverse and its carry says that nothing was borrowed; the PTX ISA has it the other way, which
shows where addc follows sub.cc or subc follows add.cc.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.state import Fragment, Step
from .integer import mul_high
from .registry import TYPES, Form, instruction


def _add(a: Any, b: Any, carry: Any) -> tuple[Any, Any]:
    """Sum and carry, of one unsigned type."""
    partial = a + b
    total = partial + carry
    return total, (partial < a) | (total < partial)


def _type(form: Form) -> str:
    form.has("cc")
    return form.type("u32", "s32", "u64", "s64")


def _step(form: Form, type: str, first: Callable[[Fragment], Any], second: int) -> Step:
    """A sum or difference of a value and the operand numbered ``second``, and its carry."""
    takes = form.get(form.ins.carry, "pred") if form.ins.takes_carry else None
    gives = form.set(form.ins.carry, "pred") if "cc" in form.parts else None
    subtracts = form.parts[0].startswith("sub")
    bits = f"u{type[1:]}"
    dtype = np.dtype(TYPES[bits])
    b, put = form.get(second, bits), form.set(0, bits)

    def run(w: Fragment) -> None:
        carry = dtype.type(subtracts) if takes is None else np.asarray(takes(w)).astype(dtype)
        addend = ~np.asarray(b(w)) if subtracts else np.asarray(b(w))
        result, out = _add(np.asarray(first(w)), addend, carry)
        if gives is not None:
            gives(w, out)
        put(w, result)

    return run


@instruction("add.cc", "addc", "sub.cc", "subc")
def add(form: Form) -> Step:
    """9.7.2.1 to 9.7.2.4."""
    type = _type(form)
    return _step(form, type, form.get(1, f"u{type[1:]}"), 2)


@instruction("mad.lo.cc", "mad.hi.cc", "madc.lo", "madc.hi")
def mad(form: Form) -> Step:
    """9.7.2.5, 9.7.2.6: the carry is that of the addition."""
    type, high = _type(form), form.parts[1] == "hi"
    a, b, unsigned = form.get(1, type), form.get(2, type), np.dtype(TYPES[f"u{type[1:]}"])

    def product(w: Fragment) -> np.ndarray:
        x, y = a(w), b(w)
        return np.asarray(mul_high(x, y, type) if high else x * y).view(unsigned)

    return _step(form, type, product, 3)
