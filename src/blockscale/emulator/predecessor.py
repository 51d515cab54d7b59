"""Programmatic launches: what they touch in global memory must come after the kernel before.

Such a launch may start while the kernel before it in the stream still runs. That kernel counts as
an agent which reads and writes all of global memory to its end, and ``griddepcontrol.wait`` is how
a warp learns of the end (PTX ISA 9.7.13.13); others learn from that warp, as of everything else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .checks import EarlyAccess
from .engine import Work
from .order import SEEN

if TYPE_CHECKING:
    from .machine import CTA, Fragment, Launch

__all__ = ["follows", "waited"]


def waited(w: Fragment) -> None:
    """The warps of a fragment know that the kernel before is over, with all that it did."""
    order = w.cta.cluster.order
    if order is not None and order.predecessor is not None:
        order.known[w.warp_agents(), SEEN, order.predecessor] = 1


def follows(by: Any, launch: Launch, verb: str, where: np.ndarray) -> None:
    """Raise EarlyAccess for an access that nothing orders after the kernel before.

    Args:
        by: a fragment, each of its threads one address, or a work.
        launch: a programmatic one.
        verb: "reads" or "writes".
        where: (n,) addresses in global memory. Parameters and constants, which no kernel writes,
            may be among them.
    """
    works = isinstance(by, Work)
    cta: CTA = by.issuer[0] if works else by.cta
    order = cta.cluster.order
    assert order is not None
    assert order.predecessor is not None
    if works:
        assert by.actor is not None
        known = np.broadcast_to(by.actor.known[SEEN, order.predecessor], len(where))
    else:
        known = order.known[by.agents(), SEEN, order.predecessor]
    for i in np.nonzero(known == 0)[0].tolist():
        address = int(where[i])
        if any(buffer.base <= address < buffer.end for buffer in launch.constants):
            continue
        buffer = launch.memory.find(address)
        site = by.site()
        thread = int(by.threads[0 if works else i])
        raise EarlyAccess(
            f"data race: {replace(site, who=f'thread {thread} of {site.who}')} {verb} byte "
            f"{address - buffer.base:#x} of {buffer.name}; nothing orders it after the kernel "
            "before, which may still run when a programmatic launch starts: "
            "griddepcontrol.wait first",
            site.line,
        )
