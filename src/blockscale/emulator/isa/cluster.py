"""Shared memory of the other CTAs of a cluster: PTX ISA 9.7.9.23 and 9.7.9.24."""

from __future__ import annotations

import numpy as np

from ..machine.state import Fragment, Step
from ..memory.buffers import RANK_SHIFT, SHARED_WINDOW, MemoryFault
from .registry import TYPES, Form, instruction

_RANKS = 0xFF  # of an address: bits 24 to 31


def _space(form: Form) -> tuple[bool, str]:
    """(whether addresses are generic, their type)."""
    generic = not form.has("shared::cluster")
    return generic, form.type(*(("u64",) if generic else ("u32", "u64")))


def _checked(form: Form, address: np.ndarray, generic: bool) -> np.ndarray:
    if generic and (address >> np.uint64(56) != np.uint64(SHARED_WINDOW >> 56)).any():
        raise MemoryFault(f"{form.ins.opcode}: a generic address that is not in shared memory")
    return address


@instruction("mapa")
def mapa(form: Form) -> Step:
    """9.7.9.23. A rank that the cluster does not have shows where the address is used."""
    form.needs("sm_90")
    generic, type = _space(form)
    dtype = np.dtype(TYPES[type])
    a, b, put = form.get(1, type), form.get(2, "u32"), form.set(0, type)
    keep, shift = dtype.type(~(_RANKS << RANK_SHIFT) & (1 << 8 * dtype.itemsize) - 1), RANK_SHIFT

    def run(w: Fragment) -> None:
        ranks = np.minimum(b(w), _RANKS).astype(dtype) << dtype.type(shift)
        put(w, _checked(form, np.asarray(a(w)), generic) & keep | ranks)

    return run


@instruction("getctarank")
def getctarank(form: Form) -> Step:
    """9.7.9.24."""
    form.needs("sm_90")
    generic, type = _space(form)
    dtype = np.dtype(TYPES[type])
    a, put = form.get(1, type), form.set(0, "u32")
    shift, ranks = dtype.type(RANK_SHIFT), dtype.type(_RANKS)

    def run(w: Fragment) -> None:
        address = _checked(form, np.asarray(a(w)), generic)
        put(w, (address >> shift & ranks).astype(np.uint32))

    return run
