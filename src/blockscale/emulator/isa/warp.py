"""What the lanes of a warp do together: PTX ISA 9.7.9 (shfl) and 9.7.13.

Each needs all lanes of its mask: see ``meeting``. A fragment that has them for some of its warps
only goes on with those; the others wait until their missing lanes arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import ieee
from ..clocks.knowledge import Knowledge, executed
from ..machine.state import Fragment, Step
from ..machine.undefined import Origin, Undefined, fill_masks
from ..ptx.program import Pair, Register
from .meeting import elsewhere, gathered, present, rows, spread
from .registry import BITS, TYPES, Form, instruction

_Part = Callable[[Knowledge], Knowledge]


def _everything(known: Knowledge) -> Knowledge:
    return known


@instruction("shfl.sync", control=True)
def shfl(form: Form) -> Step:
    """9.7.9."""
    mode = form.one("up", "down", "bfly", "idx")
    if mode is None:
        raise form.error("expected .up, .down, .bfly or .idx")
    form.type("b32")
    target = form.operand(0)
    first = target.first if isinstance(target, Pair) else target
    put = form.set(first, "b32")
    put_p = form.set(target.second, "pred") if isinstance(target, Pair) else None
    a, b, c = form.get(1, "b32"), form.get(2, "b32"), form.get(3, "b32")
    mask, slot = form.get(4, "b32"), first.slot if isinstance(first, Register) else None

    def run(w: Fragment) -> None:
        table, row, lane = spread(w, a(w), form)
        by = (np.broadcast_to(b(w), w.n) & 31).astype(np.int64)
        packed = np.broadcast_to(c(w), w.n).astype(np.int64)
        clamp, segment = packed & 31, (packed >> 8) & 31
        top = (lane & segment) | (clamp & ~segment)
        bottom = lane & segment
        if mode == "up":
            source = lane - by
            good = source >= top
        elif mode == "down":
            source = lane + by
            good = source <= top
        elif mode == "bfly":
            source = lane ^ by
            good = source <= top
        else:
            source = bottom | (by & ~segment)
            good = source <= top
        source = np.where(good, source, lane)
        put(w, table[row, source])
        if put_p is not None:
            put_p(w, good)
        masks = np.broadcast_to(mask(w), w.n)
        given = present(w)[row, source] & (masks >> source.astype(np.uint32) & np.uint32(1) == 1)
        if slot is not None and not form.of_masks and not given.all():
            _take_nothing(w, slot, ~given)

    return gathered(form, 4, run, a)


def _take_nothing(w: Fragment, slot: int, lanes: np.ndarray) -> None:
    """The result is undefined where the source is inactive or not in the mask."""
    if "uninitialized" in w.cta.launch.alarms.checks:
        message = f"{w.site()} takes it from a lane that is not there, or not in its mask"
        bits = np.full((np.count_nonzero(lanes), 1), 0xFFFF_FFFF, np.uint32)
        found = Undefined(bits, Origin(w.site(), message))
        fill_masks(w.frame, (slot,), w.threads[lanes], found)


@instruction("vote.sync", control=True)
def vote(form: Form) -> Step:
    """9.7.13."""
    mode = form.one("all", "any", "uni", "ballot")
    if mode is None:
        raise form.error("expected .all, .any, .uni or .ballot")
    form.type("b32" if mode == "ballot" else "pred")
    a, mask = form.get(1, "pred"), form.get(2, "b32")
    put = form.set(0, "b32" if mode == "ballot" else "pred")

    def run(w: Fragment) -> None:
        table, row, _ = spread(w, a(w), form)
        member = (np.broadcast_to(mask(w), w.n).astype(np.int64)[:, None] >> np.arange(32)) & 1 == 1
        member &= present(w)[row]
        votes = table[row]
        if mode == "ballot":
            put(w, ((votes & member) << np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32))
        else:
            every, some = (votes | ~member).all(1), (votes & member).any(1)
            put(w, {"all": every, "any": some}.get(mode or "", every | ~some))

    return gathered(form, 2, run, a)


@instruction("match.any.sync", "match.all.sync", control=True)
def match(form: Form) -> Step:
    """9.7.13. It waits for the lanes, so that what they did before is over, which libcu++'s
    pipelines rely on before one lane of them invalidates their mbarriers."""
    every, type = form.parts[1] == "all", form.type(*BITS[1:])
    target = form.operand(0)
    put = form.set(target.first if isinstance(target, Pair) else target, "b32")
    put_p = form.set(target.second, "pred") if isinstance(target, Pair) else None
    a, mask = form.get(1, type), form.get(2, "b32")

    def run(w: Fragment) -> None:
        value = np.array(np.broadcast_to(a(w), w.n))
        table, row, _ = spread(w, value, form)
        member = (np.broadcast_to(mask(w), w.n).astype(np.int64)[:, None] >> np.arange(32)) & 1 == 1
        member &= present(w)[row]
        same = (table[row] == value[:, None]) & member
        bits = (same << np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32)
        if every:
            agree = (same == member).all(1)
            bits = np.where(agree, bits, np.uint32(0))
            if put_p is not None:
                put_p(w, agree)
        put(w, bits)
        if not form.of_masks:
            meet(w, np.broadcast_to(mask(w), w.n), executed)

    return gathered(form, 2, run, a)


@instruction("redux.sync", control=True)
def redux(form: Form) -> Step:
    """9.7.13.12."""
    name = form.one("add", "min", "max", "and", "or", "xor")
    if name is None:
        raise form.error("the operation is not supported")
    function, allowed = _REDUCTIONS[name]
    type, (absolute, nan) = form.type(*allowed), (form.has("abs"), form.has("NaN"))
    put, a, mask = form.set(0, type), form.get(1, type), form.get(2, "b32")
    if type == "f32":
        form.needs("sm_100f")
        function = _extreme(name == "min", absolute, nan)
    elif absolute or nan:
        raise form.error(".abs and .NaN need .f32")

    def run(w: Fragment) -> None:
        table, row, _ = spread(w, a(w), form)
        masks, here = np.broadcast_to(mask(w), w.n), present(w)
        out = np.empty(w.n, TYPES[type])
        for warp, chosen in {*zip(row.tolist(), masks.tolist(), strict=True)}:
            members = here[warp] & (chosen >> np.arange(32) & 1 == 1)
            out[(row == warp) & (masks == chosen)] = function(table[warp, members])
        put(w, out)

    return gathered(form, 2, run, a)


_BITWISE = ("b32",)
_NUMBERS = ("u32", "s32")
#: A reduction of an array to one value, and its types.
_REDUCTIONS: Mapping[str, tuple[Callable[[np.ndarray], Any], tuple[str, ...]]] = {
    "add": (lambda values: np.add.reduce(values, dtype=values.dtype), _NUMBERS),
    "min": (np.min, (*_NUMBERS, "f32")),
    "max": (np.max, (*_NUMBERS, "f32")),
    "and": (np.bitwise_and.reduce, _BITWISE),
    "or": (np.bitwise_or.reduce, _BITWISE),
    "xor": (np.bitwise_xor.reduce, _BITWISE),
}


def _extreme(low: bool, absolute: bool, nan: bool) -> Callable[[np.ndarray], Any]:
    """min or max of fp32: a NaN loses, unless it is to propagate; -0 < +0."""

    def run(values: np.ndarray) -> Any:
        values = np.abs(values) if absolute else values
        if nan and np.isnan(values).any():
            return ieee.canonical(np.nan)
        return ieee.canonical(functools.reduce(ieee.lower if low else ieee.higher, values))

    return run


@instruction("elect.sync", control=True)
def elect(form: Form) -> Step:
    """9.7.13: the lowest lane of the mask that is here is elected."""
    target = form.operand(0)
    if not isinstance(target, Pair):
        raise form.error("expected d|p")
    put, put_p = form.set(target.first, "b32"), form.set(target.second, "pred")
    mask = form.get(1, "b32")

    def run(w: Fragment) -> None:
        row, lane = rows(w)
        masks = np.broadcast_to(mask(w), w.n).astype(np.int64)
        leader = (present(w)[row] & (masks[:, None] >> np.arange(32) & 1 == 1)).argmax(1)
        put(w, leader.astype(np.uint32))
        put_p(w, lane == leader)

    return gathered(form, 1, run)


@instruction("activemask")
def activemask(form: Form) -> Step:
    """9.7.13."""
    form.type("b32")
    put = form.set(0, "b32")

    def run(w: Fragment) -> None:
        row, here = rows(w)[0], present(w)
        bits = (here << np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32)
        put(w, bits[row])

    return run


@instruction("bar.warp.sync", control=True)
def warp_sync(form: Form) -> Step:
    """9.7.13.3: orders the accesses of the lanes of its mask; no other .sync instruction does."""
    mask = form.get(0, "b32")

    def run(w: Fragment) -> None:
        meet(w, np.broadcast_to(mask(w), w.n))

    return gathered(form, 0, run)


def meet(w: Fragment, masks: np.ndarray | None = None, of: _Part = _everything) -> None:
    """The lanes of each mask, or warp, learn what all of them know and have done, those at another
    instruction, too; ``of``: the part of it that they learn."""
    order = w.cta.cluster.order
    if order is None or order.lanes == 1:
        return
    groups, agents = w.threads // 32, w.agents()
    if masks is not None:
        groups = groups << 32 | masks.astype(np.int64)
    for group in np.unique(groups):
        lanes = agents[groups == group]
        order.acquire(lanes, of(order.release(lanes)))
    for meeting in elsewhere(w):
        assert meeting.known is not None  # lanes are told apart
        order.acquire(agents[w.cta.met[w.threads] == meeting], of(meeting.known))
