"""Tensor maps changed on the device: tensormap.replace and tensormap.cp_fenceproxy.

PTX ISA 9.7.9.28 and 9.7.13.16.
"""

from __future__ import annotations

import numpy as np

from ..machine.ports import read_shared, write_global
from ..machine.state import Fragment, Step
from ..memory.buffers import MemoryFault
from ..memory.tensormap_bits import replace
from ..ptx.program import Immediate
from .copies import warps
from .meeting import gathered
from .registry import Form, instruction

_BYTES, _ALIGN = 128, 64
#: Fields with the values that they hold, and their step; of an address, any.
_FIELDS = {
    "global_address": range(1 << 64),
    "rank": range(5),
    "box_dim": range(1, 257),
    "global_dim": range(1 << 32),  # 0 stands for 2**32
    "global_stride": range(0, 1 << 40, 16),
    "element_stride": range(1, 9),
}
_PLACES = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
#: Fields that take a constant, and how many there are: with sm_90a, and later.
_MODES = {
    "elemtype": (13, 16),
    "interleave_layout": (3, 3),
    "swizzle_mode": (4, 4),
    "swizzle_atomicity": (0, 4),
    "fill_mode": (2, 2),
}


@instruction("tensormap.replace")
def replace_field(form: Form) -> Step:
    """tensormap.replace.tile.field{.ss}.b1024.type [addr], {ord,} value."""
    form.needs("sm_90a", "sm_100f")
    if not form.has("tile") or not form.has("b1024"):
        raise form.error("expected .tile and .b1024")
    field = form.one(*_FIELDS, *_MODES)
    if field is None:
        raise form.error(f"expected one of .{', .'.join((*_FIELDS, *_MODES))}")
    space = form.one("global", "shared::cta")
    type = form.type("b64" if field in ("global_address", "global_stride") else "b32")
    place, at = 0, 1
    if field in _PLACES:
        place, at = _constant(form, 1, range(_PLACES[field])), 2
    if field in _MODES:
        _constant(form, at, _codes(form, field))
    allowed = _FIELDS.get(field)
    address, value = form.address(0, space), form.get(at, type)
    read, write = form.machine.reader(form, space, 0), form.machine.writer(form, space, 0)

    def run(w: Fragment) -> None:
        where, values = np.array(address(w)), np.broadcast_to(value(w), w.n)
        for i in range(w.n):
            new = int(values[i])
            if allowed is not None and new not in allowed:
                step = f", multiples of {allowed.step}" if allowed.step > 1 else ""
                raise form.error(f"{field} {new}; allowed are {allowed[0]} to {allowed[-1]}{step}")
            _aligned(form, int(where[i]))
            part = w.alone(i)
            raw = read(part, where[i : i + 1], _BYTES)[0].tobytes()
            out = np.frombuffer(replace(raw, field, place, new), np.uint8)
            write(part, where[i : i + 1], out[None].copy())

    return run


def _constant(form: Form, index: int, allowed: range) -> int:
    """An operand that must be an immediate."""
    op = form.operand(index)
    if not isinstance(op, Immediate) or op.value not in allowed:
        given = op.value if isinstance(op, Immediate) else "a register"
        raise form.error(
            f"operand {index + 1} is {given}; allowed are constants 0 to {allowed[-1]}"
        )
    return op.value


def _codes(form: Form, field: str) -> range:
    old, new = _MODES[field]
    target = form.machine.program.module.target
    if old == new or not any(name.startswith("sm_90") for name in target):
        return range(new)
    if old == 0:
        form.needs("sm_100f")
    return range(old)


def _aligned(form: Form, address: int) -> None:
    if address % _ALIGN:
        raise MemoryFault(
            f"address {address:#x} of {form.ins.opcode} is not a multiple of {_ALIGN}"
        )


@instruction("tensormap.cp_fenceproxy", control=True)
def copy_fenced(form: Form) -> Step:
    """[dst] in global, [src] in shared memory, 128: one copy by each warp."""
    form.needs("sm_90")
    if form.several("global", "shared::cta") != ["global", "shared::cta"]:
        raise form.error("expected .global.shared::cta")
    for name in ("tensormap::generic", "release", "sync", "aligned"):
        if not form.has(name):
            raise form.error(f"expected .{name}")
    if form.one("cta", "cluster", "gpu", "sys") is None:
        raise form.error("expected .cta, .cluster, .gpu or .sys")
    to, start = form.address(0), form.address(1, "shared::cta")
    _constant(form, 2, range(_BYTES, _BYTES + 1))

    def run(w: Fragment) -> None:
        for warp in warps(w):
            copy(warp)

    def copy(w: Fragment) -> None:
        target, source = np.unique(to(w)), np.unique(start(w))
        if len(target) > 1 or len(source) > 1:
            raise form.error("the lanes of a warp name different addresses")
        _aligned(form, int(target[0]))
        _aligned(form, int(source[0]))
        first = w.part(np.arange(w.n) == 0, w.pc)
        write_global(first, w.cta.launch, target, read_shared(first, source, _BYTES))

    return gathered(form, None, run)
