"""st.async and red.async: PTX ISA 9.7.9.12 and 9.7.13.8.

Into the shared memory of a CTA of the cluster, telling an mbarrier there; from sm_100 on also into
global memory, telling nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..clocks.scopes import CLUSTER, SYS, WEAK, Strength, scope_of, width_of
from ..machine.engine import Work
from ..machine.ports import read_shared, write_global, write_shared
from ..machine.state import Fragment, Step, storage
from ..memory.buffers import RANK_SHIFT, MemoryFault
from ..ptx.program import Register
from .access import checked, vector_length
from .bulk import one_by_one, reduced
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
#: (values to store, a function that fetches the bytes before) -> bytes after.
Kept = Callable[[np.ndarray, Callable[[], np.ndarray]], np.ndarray]


@instruction("st.async", "red.async")
def store(form: Form) -> Step:
    """[a], b, [mbar] with .mbarrier::complete_tx::bytes; [a], b without."""
    form.needs("sm_90")
    return _into_shared(form) if form.has(_TOLD) else _into_global(form)


def _operation(form: Form, *types: str) -> tuple[str, Kept]:
    """The type, one of ``types`` for st.async, and what red.async does."""
    if form.parts[0] == "st":
        return form.type(*types), lambda new, old: new.view(np.uint8)
    name = form.one(*_REDUCED)
    if name is None:
        raise form.error(f"expected one of .{', .'.join(_REDUCED)}")
    type = form.type(*_REDUCED[name])
    combine = reduced(name, type)
    return type, lambda new, old: combine(old(), new.view(np.uint8))


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


def _into_shared(form: Form) -> Step:
    """Each thread's bytes, on their own, are counted by an mbarrier of the CTA they go to."""
    reduces = form.parts[0] == "red"
    if reduces:
        if not form.has("relaxed") or not form.has("cluster"):
            raise form.error("expected .relaxed.cluster")
        space = form.one("shared::cluster")
    else:
        form.one("weak", "cluster")
        space = form.one("shared::cluster", "shared::cta", "shared")
    type, kept = _operation(form, *_STORED)
    count = 1 if reduces else vector_length(form)
    size = np.dtype(TYPES[type]).itemsize * count
    if size > _MOST:
        raise form.error(f"stores {size} bytes; at most {_MOST}")
    code = Strength(CLUSTER, width_of(type)).code if reduces else WEAK
    values = _values(form, type, count)
    target, bar = addresses(form, 0, space), addresses(form, 2, space)

    def run(w: Fragment) -> None:
        cluster = w.cta.cluster
        if len(cluster.ctas) == 1:
            raise form.error("is for clusters of more than one CTA")
        where, new = checked(w, form, np.array(target(w)), size), values(w)
        barrier = find(w.cta, int(bar(w)[0]))
        visible(w, barrier)
        if barrier.cta.rank != int(where[0]) >> RANK_SHIFT:
            raise MemoryFault(f"{barrier} is not in the CTA of the destination {int(where[0]):#x}")
        if reduces and barrier.cta is w.cta:
            raise MemoryFault(f"the destination {int(where[0]):#x} is in the CTA that executes it")

        def write(work: Work) -> None:
            write_shared(work, where, kept(new, lambda: read_shared(work, where, size)))
            barrier.complete(size, work.message())

        told = ((barrier.cta.rank, barrier.offset),)
        actor = cluster.begin(w, generic=True, code=code, told=told)
        cluster.engine.submit(Work(w, write, needs=(barrier.cta,), actor=actor))

    return one_by_one(run)


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
    type, kept = _operation(form, *_STORED, *_SMALL)
    size = np.dtype(TYPES[type]).itemsize
    how = None
    if order != "weak" and scope is not None:
        releases, reach = order == "release", scope_of((scope,), SYS)
        how = Strength(reach, size, False, releases, reduces, returns=False)
    target, values = form.address(0), _values(form, type, 1)

    def run(w: Fragment) -> None:
        where, stored = checked(w, form, np.array(target(w)), size), values(w)
        launch = w.cta.launch
        launch.memory.load(where, size)  # faults where there is no memory

        def write(work: Work) -> None:
            with launch.lock:
                new = kept(stored, lambda: launch.memory.load(where, size))
                write_global(work, launch, where, new, None, how)

        cluster = w.cta.cluster
        cluster.engine.submit(Work(w, write, actor=cluster.begin(w, generic=True)))

    return one_by_one(run)
