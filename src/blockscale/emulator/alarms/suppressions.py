"""Alarms that are known, each with the reason why it may stand, from a file or lines of text.

A line is ``kind [key=pattern ...]  # reason``. The keys are ``kernel`` and ``opcode`` (globs),
``line`` (a number, of the PTX) and ``source`` (a glob of file:line, or the end of one, of the line
itself or of one where it was inlined). All that are there must fit, one of the two accesses of a
race. Lines that begin with # are comments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .alarm import KINDS
from .errors import Site

__all__ = ["Suppression", "read_suppressions"]

_KEYS = ("kernel", "line", "source", "opcode")


@dataclass(frozen=True, slots=True)
class Suppression:
    """An entry: an empty pattern fits everything."""

    kind: str
    reason: str
    kernel: str = ""
    line: str = ""
    source: str = ""
    opcode: str = ""

    def covers(self, kind: str, site: Site) -> bool:
        sources = site.source.removeprefix(", ").replace("inlined at ", "").split(", ")
        return (
            kind == self.kind
            and self.line in ("", str(site.line))
            and (not self.source or any(fnmatchcase(s, f"*{self.source}") for s in sources))
            and (not self.opcode or fnmatchcase(site.opcode, self.opcode))
        )

    def is_for(self, kernel: str) -> bool:
        return not self.kernel or fnmatchcase(kernel, self.kernel)

    def __str__(self) -> str:
        given = [f"{key}={value}" for key in _KEYS if (value := getattr(self, key))]
        return " ".join([self.kind, *given])


def read_suppressions(suppress: str | Path | Sequence[str]) -> tuple[Suppression, ...]:
    """The entries of a file, or of lines.

    ValueError for a kind or key that there is not or is there twice, and for an entry without a
    reason.
    """
    if isinstance(suppress, str | Path):
        lines = Path(suppress).read_text(encoding="utf-8").splitlines()
    else:
        lines = list(suppress)
    return tuple(
        _entry(number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )


def _entry(number: int, line: str) -> Suppression:
    said, _, reason = line.partition("#")
    if not reason.strip():
        raise ValueError(
            f"suppress: line {number}, {line.strip()!r}, has no reason: end it with # why"
        )
    kind, *rest = said.split()
    if kind not in KINDS:
        raise ValueError(
            f"suppress: line {number} has the kind {kind!r}; choose one of {', '.join(KINDS)}"
        )
    given: dict[str, str] = {}
    for part in rest:
        key, _, value = part.partition("=")
        if key not in _KEYS or not value or (key == "line" and not value.isdecimal()):
            raise ValueError(
                f"suppress: line {number} has {part!r}; expected kernel=GLOB, line=NUMBER, "
                "source=FILE:LINE or opcode=GLOB"
            )
        if key in given:
            raise ValueError(
                f"suppress: line {number} has {key}= twice, {given[key]!r} and {value!r}; an entry "
                "is for one: write two entries"
            )
        given[key] = value
    return Suppression(kind, reason.strip(), **given)
