"""Instructions that ask for speed and leave values alone: PTX ISA 9.7.9.16 to 9.7.9.18, 9.7.13.13,
9.7.19.5."""

from __future__ import annotations

import numpy as np

from ..machine.predecessor import waited
from ..machine.state import Deadlock, Fragment, Step
from ..ptx.program import Immediate
from .access import checked
from .meeting import gathered
from .registry import Form, instruction

_REGISTERS = 1 << 16  # of a multiprocessor
_LINE = 128  # bytes that discard and applypriority are about
_PRIMARY = ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged")
_SECONDARY = ("L2::evict_first", "L2::evict_unchanged")


@instruction("setmaxnreg", control=True)
def setmaxnreg(form: Form) -> Step:
    """9.7.19.5: an increase waits until others have given up as many, forever where they keep more
    than all had to begin with. How many that is ptxas knows, at most an equal share of all."""
    form.needs("sm_90a", "sm_100f")
    if form.one("inc", "dec") is None or not (form.has("sync") and form.has("aligned")):
        raise form.error("expected .inc or .dec, and .sync.aligned")
    form.type("u32")
    count = form.operand(0)
    if not isinstance(count, Immediate) or count.value % 8 or not 24 <= count.value <= 256:
        raise form.error("the number of registers must be a multiple of 8 from 24 to 256")

    def run(w: Fragment) -> None:
        held, warps = w.cta.registers, w.cta.warps
        held.update(dict.fromkeys((w.threads // 32).tolist(), count.value))
        pool = _REGISTERS // (32 * warps) // 8 * 8 * warps
        if len(held) == warps and sum(held.values()) > pool:
            raise Deadlock(
                f"deadlock: setmaxnreg: the {warps} warps of a CTA ask for "
                f"{sum(held.values()) * 32} registers in all, and have {pool * 32}"
            )

    return gathered(form, None, run)


@instruction("griddepcontrol")
def griddepcontrol(form: Form) -> Step:
    """9.7.13.13: a launch starts once everything before it is done; the checks of a programmatic
    one look for what needs the wait all the same."""
    form.needs("sm_90")
    kind = form.one("launch_dependents", "wait")
    if kind is None:
        raise form.error("expected .launch_dependents or .wait")
    return waited if kind == "wait" else lambda w: None


@instruction("createpolicy")
def createpolicy(form: Form) -> Step:
    """9.7.9.18: the policy is opaque, and 0 here."""
    kind = form.one("range", "fractional", "cvt")
    if kind is None:
        raise form.error("expected .range, .fractional or .cvt")
    if kind == "cvt":
        if not form.has("L2"):
            raise form.error("expected .L2")
        form.get(1, "b64")
    else:
        _priorities(form)
    if kind == "range":
        form.has("global")
        form.address(1)
        form.get(2, "b32")
        form.get(3, "b32")
    if kind == "fractional" and len(form.ins.operands) > 1:
        form.get(1, "f32")
    form.type("b64")
    put = form.set(0, "b64")
    return lambda w: put(w, np.uint64(0))


def _priorities(form: Form) -> None:
    """Take a primary priority and perhaps a secondary one, in this order."""
    found = [part for part in form.left if part in _PRIMARY]
    if not 1 <= len(found) <= 2 or not set(found[1:]) <= set(_SECONDARY):
        raise form.error(
            f"expected one of {', '.join(_PRIMARY)}, then perhaps one of {', '.join(_SECONDARY)}"
        )
    for part in found:
        form.left.remove(part)


@instruction("applypriority", "discard")
def line(form: Form) -> Step:
    """9.7.9.16, 9.7.9.17. What was discarded reads as ones: any value would be right."""
    discards = form.parts[0] == "discard"
    space, level = form.one("global"), "L2" if discards else "L2::evict_normal"
    size = form.operand(1)
    if not form.has(level) or not isinstance(size, Immediate) or size.value != _LINE:
        raise form.error(f"expected .{level} and a size of {_LINE}")
    address = form.address(0)
    read, write = form.machine.reader(form, space, 0), form.machine.writer(form, space, 0)

    def run(w: Fragment) -> None:
        where = checked(w, form, address(w), _LINE)
        if discards:
            write(w, where, np.full((w.n, _LINE), 0xFF, np.uint8))
        else:
            read(w, where, _LINE)  # faults where there is no memory

    return run
