"""st.async and red.async: PTX ISA 9.7.9.12 and 9.7.13.8.

Into the shared memory of a CTA of the cluster, telling an mbarrier there; from sm_100 on also into
global memory, telling nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..engine import Work
from ..machine import Fragment, Step, storage
from ..memory import RANK_SHIFT, MemoryFault
from ..ports import read_shared, write_global, write_shared
from ..program import Register
from .access import checked, combiner, turns, vector_length
from .copies import warps
from .mbarrier import addresses, find, visible
from .registry import TYPES, Form, instruction

_TOLD = "mbarrier::complete_tx::bytes"
_MOST = 16  # bytes that a thread stores
_STORED = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
_SMALL = ("b8", "u8", "s8", "b16", "u16", "s16")  # in global memory
#: Operations of red.async and the types that each takes.
_REDUCED = {
    "inc": ("u32",),
    "dec": ("u32",),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
    "add": ("u32", "s32", "u64", "s64"),
}
#: (mask of elements in global memory, old, new) -> what is kept.
Combine = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@instruction("st.async", "red.async")
def store(form: Form) -> Step:
    """[a], b, [mbar] with .mbarrier::complete_tx::bytes; [a], b without."""
    form.needs("sm_90")
    return _into_shared(form) if form.has(_TOLD) else _into_global(form)


def _operation(form: Form, *types: str) -> tuple[str, Combine | None]:
    """The type, one of ``types`` for st.async, and what red.async does."""
    if form.parts[0] == "st":
        return form.type(*types), None
    name = form.one(*_REDUCED)
    if name is None:
        raise form.error(f"expected one of .{', .'.join(_REDUCED)}")
    type = form.type(*_REDUCED[name])
    return type, combiner(type, name)


def _values(form: Form, type: str, count: int) -> Callable[[Fragment], np.ndarray]:
    """Operand 1 as (threads, count); registers are as wide as the type."""
    dtype, items = np.dtype(TYPES[type]), form.items(1)
    if len(items) != count:
        raise form.error(f"stores {count} values from {len(items)} registers")
    for item in items:
        if isinstance(item, Register) and storage(item).itemsize != dtype.itemsize:
            raise form.error(f"register {item.name} of type .{item.type} read as .{type}")
    gets = [form.get(item, type) for item in items]

    def get_all(w: Fragment) -> np.ndarray:
        values = np.empty((w.n, count), dtype)
        for i, get in enumerate(gets):
            values[:, i] = get(w)
        return values

    return get_all


def _combined(combine: Combine | None, new: np.ndarray, old: Callable[[], np.ndarray]) -> np.ndarray:
    """Bytes (n, size) that are kept of ``new`` (n, count); ``old`` fetches those before."""
    if combine is not None:
        before = np.ascontiguousarray(old()).view(new.dtype).reshape(-1)
        after = combine(np.zeros(len(new), bool), before, new.reshape(-1))
        new = np.ascontiguousarray(after, new.dtype).reshape(-1, 1)
    return np.ascontiguousarray(new).view(np.uint8)


def _into_shared(form: Form) -> Step:
    """Each thread's bytes are counted by an mbarrier of the CTA they go to."""
    reduces = form.parts[0] == "red"
    if reduces:
        if not form.has("relaxed") or not form.has("cluster"):
            raise form.error("expected .relaxed.cluster")
        space = form.one("shared::cluster")
    else:
        form.one("weak", "cluster")
        space = form.one("shared::cluster", "shared::cta", "shared")
    type, combine = _operation(form, *_STORED)
    count = 1 if reduces else vector_length(form)
    size = np.dtype(TYPES[type]).itemsize * count
    if size > _MOST:
        raise form.error(f"stores {size} bytes; at most {_MOST}")
    values = _values(form, type, count)
    target, bar = addresses(form, 0, space), addresses(form, 2, space)

    def run(w: Fragment) -> None:
        if len(w.cta.cluster.ctas) == 1:
            raise form.error("is for clusters of more than one CTA")
        for part in warps(w):
            issue(part)

    def issue(w: Fragment) -> None:
        where, new = checked(w, form, np.array(target(w)), size), values(w)
        barriers = [find(w.cta, int(address)) for address in bar(w)]
        for barrier, address in zip(barriers, where, strict=True):
            visible(w, barrier)
            if barrier.cta.rank != int(address) >> RANK_SHIFT:
                raise MemoryFault(f"{barrier} is not in the CTA of the destination {address:#x}")
            if reduces and barrier.cta is w.cta:
                raise MemoryFault(f"the destination {address:#x} is in the CTA that executes it")
        cluster = w.cta.cluster

        def write(work: Work) -> None:
            for turn in turns(where):
                at = where[turn]
                write_shared(
                    work, at, _combined(combine, new[turn], lambda: read_shared(work, at, size))
                )
            known = work.actor.message() if work.actor is not None else None
            for barrier in barriers:
                barrier.complete(size, known)

        actor = cluster.order.begin(w.warp_agents(), generic=True) if cluster.order else None
        needs = {b.cta.rank: b.cta for b in barriers}
        cluster.engine.submit(Work(w, write, needs=tuple(needs.values()), actor=actor))

    return run


def _into_global(form: Form) -> Step:
    """Done at the end of the CTA at the latest: nobody is told."""
    form.needs("sm_100")
    reduces = form.parts[0] == "red"
    order, scope = form.one("release", "relaxed" if reduces else "weak"), form.one("gpu", "sys")
    if (order in ("release", "relaxed")) != (scope is not None) or (reduces and order is None):
        raise form.error("expected .release, and .gpu or .sys")
    if form.has("mmio") and order != "release":
        raise form.error(".mmio goes with .release only")
    form.one("global")
    type, combine = _operation(form, *_STORED, *_SMALL)
    size = np.dtype(TYPES[type]).itemsize
    target, values = form.address(0), _values(form, type, 1)

    def run(w: Fragment) -> None:
        where, new = checked(w, form, np.array(target(w)), size), values(w)
        launch = w.cta.launch
        launch.memory.load(where, size)  # faults where there is no memory

        def write(work: Work) -> None:
            with launch.lock:
                for turn in turns(where):
                    at = where[turn]
                    kept = _combined(combine, new[turn], lambda: launch.memory.load(at, size))
                    write_global(work, launch, at, kept)

        w.cta.cluster.engine.submit(Work(w, write))

    return run
