"""alloca, stacksave and stackrestore: PTX ISA 9.7.17."""

from __future__ import annotations

import numpy as np

from ..machine.state import Fragment, Step
from ..ptx.program import Immediate
from .registry import Form, instruction

_WIDEST = 1 << 23  # bytes


@instruction("alloca")
def alloca(form: Form) -> Step:
    """9.7.17.3: the pointer is one to local memory."""
    type = form.type("u32", "u64")
    put, size = form.set(0, type), form.get(1, type)
    align = 8
    if len(form.ins.operands) > 2:
        given = form.operand(2)
        if not isinstance(given, Immediate):
            raise form.error("the alignment is a constant")
        align = int(given.value)
        if not 1 <= align <= _WIDEST or align & align - 1:
            raise form.error(f"alignment {align}; allowed are powers of 2 up to {_WIDEST}")

    def run(w: Fragment) -> None:
        nbytes = np.broadcast_to(size(w), w.n)
        put(w, w.cta.stack.allocate(w.threads, nbytes, max(align, 8)).astype(nbytes.dtype))

    return run


@instruction("stacksave")
def stacksave(form: Form) -> Step:
    """9.7.17.1."""
    type = form.type("u32", "u64")
    put = form.set(0, type)
    dtype = np.uint32 if type == "u32" else np.uint64
    return lambda w: put(w, w.cta.stack.tops[w.threads].astype(dtype))


@instruction("stackrestore")
def stackrestore(form: Form) -> Step:
    """9.7.17.2."""
    saved = form.get(0, form.type("u32", "u64"))

    def run(w: Fragment) -> None:
        w.cta.stack.tops[w.threads] = saved(w)

    return run
