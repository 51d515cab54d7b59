"""What the lanes of a warp do together: PTX ISA 9.7.9 (shfl) and 9.7.13.

Each needs all lanes of its mask at the same instruction. A fragment that has them for some of its
warps only goes on with those; the others wait until their missing lanes arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import ieee
from ..machine import Fragment, Split, Step, Wait
from ..program import Pair
from .registry import BITS, TYPES, Form, instruction

_ALL = np.uint32(0xFFFFFFFF)


def gathered(form: Form, mask_at: int | None, run: Step) -> Step:
    """``run`` once every lane named by the mask operand (None: the whole warp) is here."""
    get = (lambda w: _ALL) if mask_at is None else form.get(mask_at, "b32")

    def step(w: Fragment) -> Any:
        cta, threads = w.cta, w.threads
        masks = np.broadcast_to(get(w), w.n)
        if w.n == cta.size and w.n % 32 == 0 and (masks == _ALL).all():
            return run(w)
        if not (masks >> (threads % 32).astype(np.uint32) & np.uint32(1)).all():
            raise form.error("a lane that executes it is not in its mask")
        missing = _missing(w, masks, [threads])
        if not missing.any():
            return run(w)
        if not missing.all():
            return Split(missing == 0)

        def lacking() -> np.ndarray:
            others = [f.threads for f in cta.fragments if f is not w and f.same_place(w)]
            return _missing(w, masks, [threads, *others])

        def why() -> str:
            lanes = int(np.bitwise_or.reduce(lacking()))
            return f"lanes {lanes:#010x} of its mask {int(masks[0]):#010x}"

        return Wait(lambda: not lacking().all(), why)

    return step


def _missing(w: Fragment, masks: np.ndarray, here: list[np.ndarray]) -> np.ndarray:
    """For each thread of a fragment, the lanes of its mask that are neither ``here`` nor gone."""
    cta = w.cta
    present = np.ones(-(-cta.size // 32) * 32, bool)
    present[: cta.size] = cta.exited
    for threads in here:
        present[threads] = True
    lanes = (present.reshape(-1, 32) << np.arange(32, dtype=np.uint32)).sum(1).astype(np.uint32)
    return masks & ~lanes[w.threads // 32]


def _lanes(w: Fragment) -> tuple[np.ndarray, np.ndarray]:
    """(row of each thread among the warps here, its lane)."""
    _, row = np.unique(w.threads // 32, return_inverse=True)
    return row, w.threads % 32


def spread(w: Fragment, value: Any, fill: Any = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values laid out as (warps, 32), absent lanes filled; rows and lanes of the threads."""
    row, lane = _lanes(w)
    value = np.broadcast_to(value, w.n)
    table = np.full((int(row.max()) + 1, 32), fill, value.dtype)
    table[row, lane] = value
    return table, row, lane


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

    def run(w: Fragment) -> None:
        table, row, lane = spread(w, a(w))
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

    return gathered(form, 4, run)


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
        table, row, _ = spread(w, a(w), False)
        member = (np.broadcast_to(mask(w), w.n).astype(np.int64)[:, None] >> np.arange(32)) & 1 == 1
        here, _, _ = spread(w, np.ones(w.n, bool), False)
        member &= here[row]
        votes = table[row]
        if mode == "ballot":
            put(w, ((votes & member) << np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32))
        else:
            every, some = (votes | ~member).all(1), (votes & member).any(1)
            put(w, {"all": every, "any": some}.get(mode or "", every | ~some))

    return gathered(form, 2, run)


@instruction("match.any.sync", "match.all.sync", control=True)
def match(form: Form) -> Step:
    """9.7.13."""
    every, type = form.parts[1] == "all", form.type(*BITS[1:])
    target = form.operand(0)
    put = form.set(target.first if isinstance(target, Pair) else target, "b32")
    put_p = form.set(target.second, "pred") if isinstance(target, Pair) else None
    a, mask = form.get(1, type), form.get(2, "b32")

    def run(w: Fragment) -> None:
        value = np.array(np.broadcast_to(a(w), w.n))
        table, row, _ = spread(w, value)
        here, _, _ = spread(w, np.ones(w.n, bool), False)
        member = (np.broadcast_to(mask(w), w.n).astype(np.int64)[:, None] >> np.arange(32)) & 1 == 1
        member &= here[row]
        same = (table[row] == value[:, None]) & member
        bits = (same << np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32)
        if every:
            agree = (same == member).all(1)
            bits = np.where(agree, bits, np.uint32(0))
            if put_p is not None:
                put_p(w, agree)
        put(w, bits)

    return gathered(form, 2, run)


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
        value = np.array(np.broadcast_to(a(w), w.n), TYPES[type])
        masks = np.broadcast_to(mask(w), w.n)
        out = np.empty_like(value)
        warps = w.threads // 32
        for warp in np.unique(warps):
            of_warp = warps == warp
            for chosen in np.unique(masks[of_warp]):
                members = of_warp & (masks == chosen)
                out[members] = function(value[members])
        put(w, out)

    return gathered(form, 2, run)


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
        groups = (w.threads // 32 << 32) | np.broadcast_to(mask(w), w.n).astype(np.int64)
        _, first, group = np.unique(groups, return_index=True, return_inverse=True)
        elected = np.zeros(w.n, bool)
        elected[first] = True
        put(w, (w.threads[first] % 32)[group].astype(np.uint32))
        put_p(w, elected)

    return gathered(form, 1, run)


@instruction("activemask")
def activemask(form: Form) -> Step:
    """9.7.13."""
    form.type("b32")
    put = form.set(0, "b32")

    def run(w: Fragment) -> None:
        here, row, _ = spread(w, np.ones(w.n, bool), False)
        bits = (here << np.arange(32, dtype=np.int64)).sum(1).astype(np.uint32)
        put(w, bits[row])

    return run


@instruction("bar.warp.sync", control=True)
def warp_sync(form: Form) -> Step:
    """9.7.13.3: orders the accesses of the lanes of its mask; no other .sync instruction does."""
    mask = form.get(0, "b32")
    return gathered(form, 0, lambda w: meet(w, np.broadcast_to(mask(w), w.n)))


def meet(w: Fragment, masks: np.ndarray | None = None) -> None:
    """The lanes of each mask, or warp, know what all of them know, and have done."""
    order = w.cta.cluster.order
    if order is None or order.lanes == 1:
        return
    groups, agents = w.threads // 32, w.agents()
    if masks is not None:
        groups = groups << 32 | masks.astype(np.int64)
    for group in np.unique(groups):
        lanes = agents[groups == group]
        order.acquire(lanes, order.release(lanes))
