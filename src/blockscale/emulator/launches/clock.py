"""Virtual time: one clock for all that runs together, in nanoseconds.

An instruction of some threads that run together takes one. A cluster may spin on what others will
write, though, and then how often it does says nothing: once it has run many instructions while no
wait ended, no thread exited and no copy completed (it is *quiet*), time does not pass with what it
does. Where nothing else can move either, time leaps: see ``livelock``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..machine.state import Fragment

__all__ = ["Clock"]


class Clock:
    def __init__(self) -> None:
        self.now = 1  # ns, when the last turn of a fragment ended

    def at(self, w: Fragment) -> int:
        """The time at the instruction that a fragment is at; no later than the end of its turn."""
        engine = w.cta.cluster.engine
        return self.now if engine.quiet else self.now + engine.base + w.used - engine.tick

    def read(self, w: Fragment) -> int:
        """The same, for those who go by it: a spin of theirs may end when time has passed."""
        w.cta.cluster.looked = w.cta.cluster.engine.tick
        return self.at(w)
