"""Programmatic launches: what they touch in global memory must come after the kernel before.

Such a launch may start while the kernel before it in the stream still runs. That kernel counts as
an agent which reads and writes all of global memory to its end, and ``griddepcontrol.wait`` is how
a warp learns of the end (PTX ISA 9.7.13.13); others learn from that warp, as of everything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..alarms.errors import Site
from ..clocks.knowledge import SEEN
from ..clocks.lane_copies import Copies
from .engine import Work

if TYPE_CHECKING:
    from ..launches.launch import Launch
    from .state import CTA, Fragment

__all__ = ["follows", "unchanged", "waited"]


def waited(w: Fragment) -> None:
    """The warps of a fragment know that the kernel before is over, with all that it did."""
    order = w.cta.cluster.order
    if order is not None and order.predecessor is not None:
        order.wait_for_predecessor(w.agents())


def follows(by: Any, launch: Launch, verb: str, where: np.ndarray) -> None:
    """Raise EarlyAccess for an access that nothing orders after the kernel before.

    Args:
        by: a fragment, each of its threads one address, or a work.
        launch: a programmatic one.
        verb: "reads" or "writes".
        where: (n,) addresses in global memory. What is the launch's own, as parameters, constants
            and its heap, may be among them.
    """
    works = isinstance(by, Work)
    cta: CTA = by.issuer[0] if works else by.cta
    order = cta.cluster.order
    assert order is not None
    assert order.predecessor is not None
    if works:
        assert by.actor is not None
        if isinstance(by.actor, Copies):
            known = by.actor.readers()[0][:, order.predecessor]
        else:
            known = np.broadcast_to(by.actor.known[SEEN, order.predecessor], len(where))
    else:
        tables, which = order.view(by.agents())
        known = np.broadcast_to(
            tables[0 if which is None else which, order.predecessor], len(where)
        )
    early = known == 0
    if early.any():
        threads = by.threads
        if works and isinstance(by.actor, Copies):
            threads = threads[by.actor.reading]
        elif works:
            threads = np.broadcast_to(threads[:1], len(where))
        _refuse(
            by.site(), threads[early], launch, verb, where[early],
            "nothing orders it after the kernel before, which may still run when a programmatic "
            "launch starts: griddepcontrol.wait first",
        )  # fmt: skip


def unchanged(w: Fragment, where: np.ndarray) -> None:
    """Raise EarlyAccess for ld.global.nc in a programmatic launch: its memory is to be read-only
    as long as the kernel is there (PTX ISA 9.7.9.9), and the kernel before may have written it
    since."""
    if w.cta.launch.programmatic:
        _refuse(
            w.site(), w.threads, w.cta.launch, "reads", where,
            "ld.global.nc is for what no kernel writes while this one is there, and the kernel "
            "before may, even if it is waited for: load without .nc",
        )  # fmt: skip


def _refuse(
    site: Site, threads: np.ndarray, launch: Launch, verb: str, where: np.ndarray, why: str
) -> None:
    """Raise EarlyAccess for the first address that the kernel before may have written."""
    for thread, address in zip(threads.tolist(), where.tolist(), strict=True):
        if any(buffer.base <= address < buffer.end for buffer in launch.own):
            continue
        buffer = launch.memory.find(address)
        launch.alarms.tell(
            "pdl",
            f"data race: {replace(site, who=f'thread {thread} of {site.who}')} {verb} byte "
            f"{address - buffer.base:#x} of {buffer.name}; {why}",
            site,
        )
        return
