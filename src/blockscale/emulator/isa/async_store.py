"""st.async and red.async: stores to the shared memory of a cluster that tell an mbarrier.

PTX ISA 9.7.9.12 and 9.7.13.8.
"""

from __future__ import annotations

import numpy as np

from ..engine import Work
from ..machine import Fragment, Step
from ..memory import RANK_SHIFT, MemoryFault
from ..ports import read_shared, write_shared
from .access import checked, combiner, turns, vector_length
from .mbarrier import addresses, find, visible
from .registry import TYPES, Form, instruction

_STORED = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
#: Operations of red.async and the types that each takes.
_REDUCED = {
    "inc": ("u32",),
    "dec": ("u32",),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
    "add": ("u32", "s32", "u64"),
}


@instruction("st.async", "red.async")
def store(form: Form) -> Step:
    """[a], b, [mbar]: each thread's bytes are counted by an mbarrier of the CTA they go to."""
    reduces = form.parts[0] == "red"
    form.one("weak", "relaxed")
    form.one("cluster")
    if not form.has("shared::cluster") or not form.has("mbarrier::complete_tx::bytes"):
        raise form.error("expected .shared::cluster and .mbarrier::complete_tx::bytes")
    name = form.one(*_REDUCED) if reduces else None
    if reduces and name is None:
        raise form.error(f"expected one of .{', .'.join(_REDUCED)}")
    count = 1 if reduces else vector_length(form)
    type = form.type(*(_REDUCED[name] if name else _STORED))
    dtype, items = np.dtype(TYPES[type]), form.items(1)
    size = dtype.itemsize * count
    if len(items) != count:
        raise form.error(f"stores {count} values from {len(items)} registers")
    gets = [form.get(item, type) for item in items]
    target, bar = form.address(0), addresses(form, 2, "shared::cluster")
    combine = combiner(type, name) if name else None

    def run(w: Fragment) -> None:
        where = checked(w, form, np.array(target(w)), size)
        values = np.empty((w.n, count), dtype)
        for i, get in enumerate(gets):
            values[:, i] = get(w)
        barriers = [find(w.cta, int(address)) for address in bar(w)]
        for barrier, address in zip(barriers, where, strict=True):
            visible(w, barrier)
            if barrier.cta.rank != int(address) >> RANK_SHIFT:
                raise MemoryFault(f"{barrier} is not in the CTA of the destination {address:#x}")
        cluster = w.cta.cluster

        def write(work: Work) -> None:
            for turn in turns(where):
                new = values[turn]
                if combine is not None:
                    old = read_shared(work, where[turn], size).view(dtype).reshape(-1)
                    new = combine(np.zeros(len(turn), bool), old, new.reshape(-1))
                    new = np.ascontiguousarray(new, dtype).reshape(-1, 1)
                write_shared(work, where[turn], new.view(np.uint8))
            known = work.actor.message() if work.actor is not None else None
            for barrier in barriers:
                barrier.complete(size, known)

        actor = cluster.order.begin(w.warp_agents(), generic=True) if cluster.order else None
        needs = {b.cta.rank: b.cta for b in barriers}
        cluster.engine.submit(Work(w, write, needs=tuple(needs.values()), actor=actor))

    return run
