"""What is released with the value of a place in global memory, and to whom: PTX ISA 8.8."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..clocks.scopes import CLUSTER, CTA, GPU, SYS
from .messages import Message, together

__all__ = ["Place", "Released", "Version", "add", "included", "released"]

#: The numbers of a CTA, its cluster and its device.
Place = tuple[int, int, int]
#: What was released, by scope and the number of the CTA, cluster or device that did it. A CTA has
#: all that it released itself, and a cluster, too; a device what was released to its scope or SYS.
Released = dict[tuple[int, int], Message]


@dataclass(slots=True, eq=False)
class Version:
    """What was released with the value that a place holds.

    Attributes:
        access: that wrote it.
        released: by release patterns.
        total: by each fence.sc that happens before the write.
    """

    access: int
    released: Released
    total: Released
    _to: dict[tuple[bool, int, Place], Message] = field(default_factory=dict)

    def to(self, reach: int, place: Place, total: bool = False) -> Message:
        """What an acquire of a scope learns in a CTA; ``total``: a fence.sc after it."""
        key = total, reach, place
        if key not in self._to:
            self._to[key] = included(self.total if total else self.released, reach, place)
        return self._to[key]

    def has_more(self, reach: int, place: Place) -> bool:
        """Whether an acquire of the widest scope learns more."""
        less = self.to(reach, place)
        return together((less, self.to(SYS, place))) is not less


def included(released: Released, reach: int, place: Place) -> Message:
    """What of it is released to that place, and by whom the scope of an acquire includes."""
    found = []
    for (scope, origin), message in released.items():
        if scope >= GPU:
            included = min(scope, reach) >= (GPU if origin == place[2] else SYS)
        else:
            included = scope <= reach and origin == place[scope - CTA]
        if included:
            found.append(message)
    return together(found)


def released(message: Message, reach: int, place: Place) -> Released:
    """A message released to a scope, from a CTA."""
    found = {(scope, place[scope - CTA]): message for scope in (CTA, CLUSTER) if scope <= reach}
    if reach >= GPU:
        found[reach, place[2]] = message
    return found


def add(released: Released, more: Released) -> None:
    """Release more."""
    for key, message in more.items():
        before = released.get(key)
        released[key] = message if before is None else together((before, message))
