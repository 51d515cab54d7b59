"""The errors that checks raise, and where an access stands."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx.program import PtxError

__all__ = [
    "DataRace",
    "EarlyAccess",
    "ExitRace",
    "LaneRace",
    "MissingFence",
    "Site",
    "Uninitialized",
    "unfenced",
    "unordered",
]


class DataRace(PtxError):
    """Two accesses to one place, one of them a write, that nothing orders."""


class LaneRace(DataRace):
    """Two lanes of a warp access one place, or one relies on what only the other knows."""


class MissingFence(DataRace):
    """Accesses that are ordered, but for a fence between that the ISA asks for, too."""


class ExitRace(DataRace):
    """A CTA exits, and nothing orders that after an access to its memory."""


class EarlyAccess(DataRace):
    """A programmatic launch touches global memory that the kernel before may still use."""


class Uninitialized(PtxError):
    """A use of what shared or Tensor Memory holds where nobody has written."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where in a program an access was made."""

    opcode: str
    line: int
    who: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.opcode} of {self.who}, line {self.line}{self.source}"


def unordered(here: str, verb: str, place: str, other: str, there: str) -> str:
    """The message of a race: who accesses a place here, and who did there before."""
    return f"data race: {here} {verb} {place}; nothing orders it after the {other} by {there}"


def unfenced(here: str, verb: str, place: str, other: str, there: str) -> str:
    """The same of accesses that are ordered, but in two proxies."""
    return (
        f"missing fence.proxy.async: {here} {verb} {place} through the asynchronous proxy after "
        f"the ordinary {other} by {there}"
    )
