"""What the checks find: raised at once, or kept and counted, unless it is suppressed.

Every check goes through :meth:`Alarms.tell`. What cannot go on (a deadlock, PTX that is malformed
or not supported) is no alarm: it is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..memory.buffers import MemoryFault
from ..ptx.program import PtxError
from .errors import DataRace, EarlyAccess, ExitRace, LaneRace, MissingFence, Site, Uninitialized

if TYPE_CHECKING:
    from .suppressions import Suppression

__all__ = [
    "CLOCKED",
    "KINDS",
    "ON_ERROR",
    "Alarm",
    "Alarms",
    "Kind",
    "Suppressed",
    "merged",
    "wanted",
]

ON_ERROR = ("raise", "collect")


@dataclass(frozen=True, slots=True)
class Kind:
    """A check.

    Attributes:
        error: what it raises.
        default: whether "all" has it.
        always: whether it cannot be turned off.
    """

    name: str
    error: type[PtxError]
    meaning: str
    default: bool = True
    always: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("race", DataRace, "accesses to shared or Tensor Memory that nothing orders"),
        Kind("lanes", LaneRace, "the same of lanes of one warp, which it then tells apart"),
        Kind("fence", MissingFence, "a fence.proxy.async is missing"),
        Kind("proxy_reads", MissingFence, "the same of what threads read before", False),
        Kind("cp_async_proxy", MissingFence, "the same of what cp.async has written", False),
        Kind("mbarrier_proxy", MissingFence, "the same of an mbarrier that copies tell", False),
        Kind("uninitialized", Uninitialized, "shared or Tensor Memory is used that nobody wrote"),
        Kind("registers", PtxError, "registers are used while a wgmma has them"),
        Kind(
            "tcgen05_order", MissingFence, "a tcgen05.fence or tcgen05.wait::ld is missing", False
        ),
        Kind("exit", ExitRace, "a CTA exits that does not know asynchronous work to be complete"),
        Kind("exit_stores", ExitRace, "the same of bulk stores, which read its memory", False),
        Kind("dsmem_exit", ExitRace, "the shared memory of a CTA that may have exited is accessed"),
        Kind("tmem_lanes", PtxError, "tcgen05.ld or .st names lanes of another warp"),
        Kind("global", DataRace, "accesses to global memory that nothing orders", False),
        Kind("pdl", EarlyAccess, "a programmatic launch does not wait for the kernel before"),
        Kind("bounds", MemoryFault, "memory that is not there is accessed", always=True),
    )
}
#: Kinds that need to know what happens before what.
CLOCKED = frozenset(
    {
        "race",
        "lanes",
        "fence",
        "proxy_reads",
        "cp_async_proxy",
        "mbarrier_proxy",
        "tcgen05_order",
        "uninitialized",
        "exit",
        "exit_stores",
        "dsmem_exit",
        "global",
        "pdl",
    }
)


def wanted(check: str | Sequence[str]) -> frozenset[str]:
    """Names of kinds, from what a user gives: "all" are those on by default, "none" adds nothing.

    ValueError for a name that is none.
    """
    named = check.split(",") if isinstance(check, str) else tuple(check)
    if unknown := sorted(set(named) - KINDS.keys() - {"all", "none"}):
        raise ValueError(
            f"check: got {', '.join(map(repr, unknown))}; choose all, none, or some of "
            f"{', '.join(KINDS)}"
        )
    every = "all" in named
    return frozenset(
        kind.name
        for kind in KINDS.values()
        if kind.always or kind.name in named or (every and kind.default)
    )


@dataclass(frozen=True, slots=True)
class Alarm:
    """What one check found at one place of the program, as often as it did.

    Attributes:
        kind: its name.
        line: of the PTX, of the access that was found wrong.
        opcode: of that access.
        source: file:line of its source, where the PTX says so.
        other: line of the PTX of the other access, 0 where there is none.
        message: the first.
        count: how often.
        who: CTAs or threads whose access it was.
    """

    kind: str
    line: int
    opcode: str
    source: str
    other: int
    message: str
    count: int
    who: tuple[str, ...]

    @property
    def place(self) -> str:
        """The line of the source, or that of the PTX."""
        return self.source or f"line {self.line}"


@dataclass(frozen=True, slots=True)
class Suppressed:
    """How many alarms an entry for this kernel has suppressed; none: it may go."""

    entry: str
    reason: str
    count: int


def merged(alarms: Iterable[Alarm]) -> tuple[Alarm, ...]:
    """One for each kind and pair of lines, in the order of lines."""
    found: dict[tuple[str, int, int], Alarm] = {}
    for alarm in alarms:
        key = alarm.kind, alarm.line, alarm.other
        before = found.get(key)
        if before is not None:
            who = tuple(dict.fromkeys(before.who + alarm.who))
            alarm = replace(before, count=before.count + alarm.count, who=who)
        found[key] = alarm
    return tuple(sorted(found.values(), key=lambda alarm: (alarm.line, alarm.kind, alarm.other)))


class Alarms:
    """The alarms of a launch.

    Args:
        checks: names of the kinds that are looked for.
        collecting: whether to keep them and go on.
        suppressions: those for this kernel.
    """

    def __init__(
        self,
        checks: frozenset[str] = frozenset(),
        collecting: bool = False,
        suppressions: Sequence[Suppression] = (),
    ) -> None:
        self.checks, self.collecting = checks, collecting
        self.suppressed = dict.fromkeys(suppressions, 0)
        self._kept: dict[tuple[str, int, int], tuple[str, Site, dict[str, int]]] = {}

    def tell(
        self, kind: str, message: str | PtxError, site: Site, other: Site | None = None
    ) -> None:
        """Raise or keep an alarm, unless its kind is not looked for or it is suppressed.

        Args:
            message: or the error, if there is one.
            site: where the access was made.
            other: where the one was that it clashes with.
        """
        if kind not in self.checks:
            return
        for entry in self.suppressed:
            if entry.covers(kind, site) or (other is not None and entry.covers(kind, other)):
                self.suppressed[entry] += 1
                return
        if not self.collecting:
            if isinstance(message, PtxError):
                raise message
            raise KINDS[kind].error(message, site.line)
        key = kind, site.line, other.line if other else 0
        text = message.message if isinstance(message, PtxError) else message
        who = self._kept.setdefault(key, (text, site, {}))[2]
        who[site.who] = who.get(site.who, 0) + 1

    def left_out(self) -> tuple[Suppressed, ...]:
        return tuple(
            Suppressed(str(entry), entry.reason, count) for entry, count in self.suppressed.items()
        )

    def kept(self) -> tuple[Alarm, ...]:
        return merged(
            Alarm(
                kind, line, site.opcode, site.source.removeprefix(", "), other, message,
                sum(who.values()), tuple(who),
            )
            for (kind, line, other), (message, site, who) in self._kept.items()
        )  # fmt: skip
