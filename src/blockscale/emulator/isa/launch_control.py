"""clusterlaunchcontrol: taking over the work of clusters that have not started.

PTX ISA 9.7.13.17 and 9.7.13.18.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.engine import Work
from ..machine.ports import write_shared
from ..machine.state import Fragment, Step
from ..memory.buffers import MemoryFault
from .bulk import deliver, landings, one_by_one
from .mbarrier import addresses
from .registry import Form, instruction

_BYTES = 16  # of an answer: x, y, z of the first CTA, and 1 if there was a cluster to cancel
#: x, y and z of no cluster, which are undefined: one thing or the other, so that who relies on it
#: is found out; at random either.
_NONE = {"eager": (0xFFFF_FFFF,), "late": (0,), "random": (0, 0xFFFF_FFFF)}
_FAILED = "clusterlaunchcontrol"  # among the groups of a CTA: it was told that none is left


@instruction("clusterlaunchcontrol.try_cancel.async")
def try_cancel(form: Form) -> Step:
    """[answer], [mbar]: cancel a cluster that waits for its launch, and say which."""
    form.needs("sm_100")
    space = form.one("shared::cta")
    if not form.has("mbarrier::complete_tx::bytes") or not form.has("b128"):
        raise form.error("expected .mbarrier::complete_tx::bytes and .b128")
    every = form.has("multicast::cluster::all")
    if every:
        form.needs("sm_100f")
    to, bar = addresses(form, 0, space), addresses(form, 1, space)

    def run(w: Fragment) -> None:
        cluster, launch = w.cta.cluster, w.cta.launch
        target, barrier = int(to(w)[0]), int(bar(w)[0])
        for address in (target, barrier):
            if cluster.shared(address, 1)[0] is not w.cta:
                raise MemoryFault(f"address {address:#x} is in the shared memory of another CTA")
        if target % _BYTES:
            raise MemoryFault(f"address {target:#x} is not a multiple of {_BYTES}")
        if _FAILED in w.cta.groups:
            raise form.error("this CTA was told already that no cluster is left to cancel")

        def read(work: Work) -> Any:
            random, undefined = cluster.engine.random, _NONE[cluster.engine.completion]
            none = undefined[0] if random is None else int(random.choice(undefined))
            answer = np.array([none, none, none, 0], np.uint32)
            if launch.waiting:
                if random is not None:  # nothing is said of which one it is
                    launch.waiting.rotate(int(random.integers(len(launch.waiting))))
                index = launch.waiting.popleft()
                answer[:] = (*(i * c for i, c in zip(index, launch.cluster, strict=True)), 1)
            values = answer.view(np.uint8)[None]
            return lambda work, address: write_shared(work, np.array([address], np.uint64), values)

        mask = (1 << len(cluster.ctas)) - 1 if every else None
        deliver(w, _BYTES, read, landings(w, target, barrier, mask))

    return one_by_one(run)


def _words(value: Any) -> np.ndarray:
    """(threads, 4) words of 128-bit registers."""
    return np.atleast_1d(np.ascontiguousarray(value)).view(np.uint32).reshape(-1, 4)


def _types(form: Form, *names: str) -> None:
    if not all(form.has(name) for name in names):
        raise form.error(f"expected .{'.'.join(names)}")


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(form: Form) -> Step:
    form.needs("sm_100")
    _types(form, "pred", "b128")
    put, get = form.set(0, "pred"), form.get(1, "b128")

    def run(w: Fragment) -> None:
        canceled = _words(get(w))[:, 3] != 0
        if not canceled.all():
            w.cta.groups[_FAILED] = True
        put(w, canceled)

    return run


@instruction("clusterlaunchcontrol.query_cancel")
def first_cta(form: Form) -> Step:
    """.get_first_ctaid{::x,::y,::z}: of the cluster that was canceled."""
    form.needs("sm_100")
    axis = form.one(*(f"get_first_ctaid::{a}" for a in "xyz"), "get_first_ctaid")
    if axis is None:
        raise form.error("expected .is_canceled or .get_first_ctaid")
    get = form.get(1, "b128")
    if axis != "get_first_ctaid":
        _types(form, "b32", "b128")
        put, at = form.set(0, "b32"), "xyz".index(axis[-1])
        return lambda w: put(w, _words(get(w))[:, at])
    _types(form, "v4", "b32", "b128")
    items = form.items(0)
    if len(items) != 4:
        raise form.error(f"gives 4 values to {len(items)} registers")
    puts = [form.set(item, "b32") for item in items]

    def run(w: Fragment) -> None:
        words = _words(get(w))
        for i, put in enumerate(puts):
            put(w, words[:, i])

    return run
