"""Tensor maps changed on the device: tensormap.replace and tensormap.cp_fenceproxy.

PTX ISA 9.7.9.28 and 9.7.13.
"""

from __future__ import annotations

import numpy as np

from ..machine import Fragment, Step
from ..memory import MemoryFault
from ..ports import read_shared, write_global
from ..tensormap_bits import replace
from .registry import Form, instruction
from .warp import gathered

_FIELDS = ("global_address", "rank")
_PLACED = ("box_dim", "global_dim", "global_stride", "element_stride")  # one for each dimension
_MODES = ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
_BYTES = 128


@instruction("tensormap.replace")
def replace_field(form: Form) -> Step:
    """tensormap.replace.tile.field{.ss}.b1024.type [addr], {ord,} value."""
    form.needs("sm_90a", "sm_100a", "sm_100f")
    if not form.has("tile"):
        raise form.error("expected .tile")
    field = form.one(*_FIELDS, *_PLACED, *_MODES)
    if field is None:
        raise form.error(f"expected one of .{', .'.join((*_FIELDS, *_PLACED, *_MODES))}")
    space = form.one("global", "shared::cta")
    if not form.has("b1024"):
        raise form.error("expected .b1024")
    wide = field in ("global_address", "global_stride")
    type = form.type("b64" if wide else "b32")
    placed = field in _PLACED
    place = form.get(1, "b32") if placed else None
    address, value = form.address(0), form.get(1 + placed, type)
    read, write = form.machine.reader(form, space, 0), form.machine.writer(form, space, 0)

    def run(w: Fragment) -> None:
        where = np.array(address(w))
        values = np.broadcast_to(value(w), w.n)
        places = np.zeros(w.n, int) if place is None else np.broadcast_to(place(w), w.n)
        for i in range(w.n):
            _checked(form, int(where[i]))
            one = np.zeros(w.n, bool)
            one[i] = True
            part = w.part(one, w.pc)
            raw = read(part, where[i : i + 1], _BYTES)[0].tobytes()
            new = np.frombuffer(replace(raw, field, int(places[i]), int(values[i])), np.uint8)
            write(part, where[i : i + 1], new[None].copy())

    return run


def _checked(form: Form, address: int) -> None:
    if address % 64:
        raise MemoryFault(f"address {address:#x} of {form.ins.opcode} is not a multiple of 64")


@instruction("tensormap.cp_fenceproxy", control=True)
def copy_fenced(form: Form) -> Step:
    """[dst] in global, [src] in shared memory, 128: one copy by a warp."""
    form.needs("sm_90")
    spaces = form.several("global", "shared::cta")
    if spaces != ["global", "shared::cta"]:
        raise form.error("expected .global.shared::cta")
    for name in ("tensormap::generic", "release", "sync", "aligned"):
        if not form.has(name):
            raise form.error(f"expected .{name}")
    form.one("cta", "cluster", "gpu", "sys")
    to, start, size = form.address(0), form.address(1), form.get(2, "u32")

    def run(w: Fragment) -> None:
        if int(np.max(size(w))) != _BYTES:
            raise form.error(f"size {int(np.max(size(w)))}; it must be {_BYTES}")
        first = np.zeros(w.n, bool)
        first[0] = True
        part = w.part(first, w.pc)
        where = np.array(to(w))[:1]
        _checked(form, int(where[0]))
        values = read_shared(part, np.array(start(w))[:1], _BYTES)
        write_global(part, w.cta.launch, where, values)

    return gathered(form, None, run)
