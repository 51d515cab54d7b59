"""PTX text -> tokens, and a cursor over them: what every grammar rule reads with."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property
from typing import NamedTuple

from .program import PtxError

__all__ = ["Cursor", "Source", "Token", "Tokens"]

# White space and what follows it are one match. A name that starts with a dot ends at the next
# one, so that ".shared.align" is two tokens, as in ptxas; an opcode is one.
_TOKEN = re.compile(
    r"""\s*(?:(?://[^\n]*|/\*.*?\*/)\s*)*
    (?:(?P<mark>[{}()\[\],;:@!|<>=+\-*~&^?/])
    |(?P<loc>\.loc\b[^\n{};]*)
    |(?P<file>\.file\b[^\n{};"]*(?:"[^"\n]*")?[^\n{};"]*)
    |(?P<name>[A-Za-z_$%][\w$%]*(?:(?:::|\.)[\w$%]+)*|\.[A-Za-z_$%][\w$%]*(?:::[\w$%]+)*)
    |(?P<hexfloat>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)
    |(?P<decimal>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\.\d+(?:[eE][+-]?\d+)?)
    |(?P<integer>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|0[0-7]+U?|\d+U?)
    |(?P<string>"[^"\n]*")
    |(?P<end>\Z)
    |(?P<bad>.))""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_KINDS = ("", *_TOKEN.groupindex)
_LAST = _KINDS.index("end")
_BRACE = re.compile(r"""[{}]|//[^\n]*|/\*.*?\*/|"[^"\n]*\"""", re.DOTALL)

_DEPTH = 100  # of nested blocks and operands; more is no program


class Token(NamedTuple):
    kind: str
    text: str
    position: int


class Tokens(NamedTuple):
    """Side by side: objects of their own cost three times as much, most of it in the collector."""

    kinds: list[str]
    texts: list[str]
    positions: list[int]

    def extend(self, more: Tokens) -> None:
        self.kinds.extend(more.kinds)
        self.texts.extend(more.texts)
        self.positions.extend(more.positions)

    def end(self, position: int) -> Tokens:
        """With an end token."""
        self.extend(Tokens(["end"], [""], [position]))
        return self


class Source:
    """A text: its tokens, and where in it they are."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._ends: dict[int, int] = {}  # of outermost blocks, by their starts

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(m.end() for m in re.finditer("\n", self.text))]

    def where(self, position: int) -> tuple[int, int]:
        """Line and column, counted from one."""
        line = bisect_right(self._starts, position)
        return line, position - self._starts[line - 1] + 1

    def tokens(self, start: int, end: int) -> Tokens:
        """The tokens of a part."""
        groups: list[int] = []
        texts: list[str] = []
        positions: list[int] = []
        for match in _TOKEN.finditer(self.text, start, end):
            group = match.lastindex or 0
            groups.append(group)
            texts.append(match[group])
            positions.append(match.start(group))
            if group >= _LAST:
                break
        kind, text, position = _KINDS[groups.pop()], texts.pop(), positions.pop()
        if kind == "bad":  # a character that starts no token
            raise PtxError(f"unexpected character {text!r}", *self.where(position))
        return Tokens([_KINDS[group] for group in groups], texts, positions)

    def outline(self) -> Tokens:
        """The tokens of the whole text, each outermost block as one, and an end token."""
        found = Tokens([], [], [])
        at = 0
        for start, end in self._blocks():
            found.extend(self.tokens(at, start))
            found.extend(Tokens(["block"], ["{"], [start]))
            self._ends[start] = at = end
        found.extend(self.tokens(at, len(self.text)))
        return found.end(len(self.text))

    def inside(self, block: Token) -> Tokens:
        """The tokens of a block of the outline, with its braces and an end token."""
        end = self._ends[block.position]
        return self.tokens(block.position, end).end(end)

    def _blocks(self) -> list[tuple[int, int]]:
        """Start and end of the outermost pairs of braces; every brace must have its other."""
        found: list[tuple[int, int]] = []
        depth = start = 0
        for match in _BRACE.finditer(self.text):
            mark = match[0]
            if mark == "{":
                if not depth:
                    start = match.start()
                depth += 1
                if depth > _DEPTH:
                    raise PtxError(
                        f"more than {_DEPTH} levels of braces", *self.where(match.start())
                    )
            elif mark == "}":
                depth -= 1
                if depth < 0:
                    raise PtxError("'}' closes no block", *self.where(match.start()))
                if not depth:
                    found.append((start, match.end()))
        if depth:
            line, _ = self.where(start)
            raise PtxError(
                f"a block is not closed; the outermost one starts in line {line}",
                *self.where(len(self.text)),
            )
        return found


class Cursor:
    """Reads tokens one by one; every complaint names line and column."""

    def __init__(self, source: Source, tokens: Tokens) -> None:
        self.source = source
        self.kinds, self.texts, self.positions = tokens
        self.at = 0
        self.depth = 0

    @property
    def kind(self) -> str:
        return self.kinds[self.at]

    @property
    def text(self) -> str:
        return self.texts[self.at]

    @property
    def token(self) -> Token:
        return Token(self.kinds[self.at], self.texts[self.at], self.positions[self.at])

    def fail(self, message: str, token: Token | None = None) -> PtxError:
        return PtxError(message, *self.source.where((token or self.token).position))

    def take(self) -> str:
        if self.kinds[self.at] == "end":
            raise self.fail("the text ends too early")
        self.at += 1
        return self.texts[self.at - 1]

    def accept(self, text: str) -> bool:
        if self.texts[self.at] == text:  # strings keep their quotes
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            found = self.text or "the end of the text"
            raise self.fail(f"expected {text!r}, found {found!r}")

    def integer(self) -> int:
        negative = self.accept("-")
        token = self.token
        if self.kind != "integer":
            raise self.fail(f"expected an integer, found {self.text!r}")
        digits = self.take().rstrip("U")
        octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        try:
            value = int(digits, 8 if octal else 0)
        except ValueError:
            raise self.fail(f"{digits!r} is not an integer", token) from None
        return -value if negative else value

    def name(self) -> str:
        if self.kind != "name":
            raise self.fail(f"expected a name, found {self.text!r}")
        return self.take()

    def skip_past(self, end: str) -> None:
        while not self.accept(end):
            self.take()

    def nest(self) -> None:
        self.depth += 1
        if self.depth > _DEPTH:
            raise self.fail(f"more than {_DEPTH} levels of braces")
