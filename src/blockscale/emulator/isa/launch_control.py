"""clusterlaunchcontrol: taking over the work of clusters that have not started. PTX ISA 9.7.13.17."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine import Work
from ..machine import Fragment, Step
from ..ports import write_shared
from .bulk import Landing, deliver, landings, one_by_one
from .mbarrier import addresses
from .registry import Form, instruction

_BYTES = 16  # of an answer: x, y, z of the first CTA, and 1 if there was a cluster to cancel


@instruction("clusterlaunchcontrol.try_cancel.async")
def try_cancel(form: Form) -> Step:
    """[answer], [mbar]: cancel a cluster that waits for its launch, and say which."""
    form.needs("sm_100")
    space = form.one("shared::cta", "shared")
    if not form.has("mbarrier::complete_tx::bytes"):
        raise form.error("expected .mbarrier::complete_tx::bytes")
    every = form.has("multicast::cluster::all")
    if every:
        form.needs("sm_100a", "sm_100f")
    form.one("b128")
    to, bar = addresses(form, 0, space), addresses(form, 1, space)

    def run(w: Fragment) -> None:
        cluster, launch = w.cta.cluster, w.cta.launch
        target = int(to(w)[0])
        if target % _BYTES:
            raise form.error(f"address {target:#x} is not a multiple of {_BYTES}")
        mask = (1 << len(cluster.ctas)) - 1 if every else None
        lands: list[Landing] = landings(w, target, int(bar(w)[0]), mask)

        def read(work: Work) -> Any:
            answer = np.zeros(4, np.uint32)
            if launch.waiting:
                index = launch.waiting.popleft()
                answer[:] = (*(i * c for i, c in zip(index, launch.cluster, strict=True)), 1)
            values = answer.view(np.uint8)[None]
            return lambda work, address: write_shared(
                work, np.array([address], np.uint64), values
            )

        deliver(w, _BYTES, read, lands)

    return one_by_one(form, run)


def _words(value: Any) -> np.ndarray:
    """(threads, 4) words of 128-bit registers."""
    return np.atleast_1d(np.ascontiguousarray(value)).view(np.uint32).reshape(-1, 4)


@instruction("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(form: Form) -> Step:
    form.needs("sm_100")
    form.has("pred")
    form.has("b128")
    put, get = form.set(0, "pred"), form.get(1, "b128")
    return lambda w: put(w, _words(get(w))[:, 3] != 0)


@instruction("clusterlaunchcontrol.query_cancel")
def first_cta(form: Form) -> Step:
    """.get_first_ctaid{::x,::y,::z}: of the cluster that was canceled."""
    form.needs("sm_100")
    axis = form.one(*(f"get_first_ctaid::{a}" for a in "xyz"), "get_first_ctaid")
    if axis is None:
        raise form.error("expected .is_canceled or .get_first_ctaid")
    form.has("v4")
    form.has("b32")
    form.has("b128")
    get = form.get(1, "b128")
    if axis != "get_first_ctaid":
        put, at = form.set(0, "b32"), "xyz".index(axis[-1])
        return lambda w: put(w, _words(get(w))[:, at])
    puts = [form.set(item, "b32") for item in form.items(0)]

    def run(w: Fragment) -> None:
        words = _words(get(w))
        for i, put in enumerate(puts):
            put(w, words[:, i])

    return run
