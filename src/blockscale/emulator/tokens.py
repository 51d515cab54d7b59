"""PTX text -> tokens, and a cursor over them: what every grammar rule reads with."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from .program import PtxError

__all__ = ["Cursor", "Source", "Token"]

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
    end: int = 0  # of a block, which is one token where its inside is not read yet


class Source:
    """A text: its tokens, and where in it they are."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(m.end() for m in re.finditer("\n", self.text))]

    def where(self, position: int) -> tuple[int, int]:
        """Line and column, counted from one."""
        line = bisect_right(self._starts, position)
        return line, position - self._starts[line - 1] + 1

    def tokens(self, start: int, end: int) -> list[Token]:
        """The tokens of a part, without an end token."""
        found: list[Token] = []
        add, kinds = found.append, _KINDS
        for match in _TOKEN.finditer(self.text, start, end):
            group = match.lastindex or 0
            add(Token(kinds[group], match[group], match.start(group)))
            if group >= _LAST:
                break
        last = found.pop()  # the end, or a character that starts no token
        if last.kind == "bad":
            raise PtxError(f"unexpected character {last.text!r}", *self.where(last.position))
        return found

    def outline(self) -> list[Token]:
        """The tokens of the whole text, outermost blocks in one token each, and an end token."""
        found: list[Token] = []
        at = 0
        for start, end in self._blocks():
            found += self.tokens(at, start)
            found.append(Token("block", "{", start, end))
            at = end
        found += self.tokens(at, len(self.text))
        found.append(Token("end", "", len(self.text)))
        return found

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

    def __init__(self, source: Source, tokens: Sequence[Token]) -> None:
        self.source, self.tokens = source, tokens
        self.at = 0
        self.depth = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def fail(self, message: str, token: Token | None = None) -> PtxError:
        return PtxError(message, *self.source.where((token or self.token).position))

    def take(self) -> Token:
        token = self.tokens[self.at]
        if token.kind == "end":
            raise self.fail("the text ends too early")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        token = self.tokens[self.at]
        if token.text == text and token.kind != "string":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            found = self.token.text or "the end of the text"
            raise self.fail(f"expected {text!r}, found {found!r}")
        return self.take()

    def integer(self) -> int:
        negative = self.accept("-")
        if self.token.kind != "integer":
            raise self.fail(f"expected an integer, found {self.token.text!r}")
        digits = self.take().text.rstrip("U")
        octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        try:
            value = int(digits, 8 if octal else 0)
        except ValueError:
            raise self.fail(f"{digits!r} is not an integer", self.tokens[self.at - 1]) from None
        return -value if negative else value

    def name(self) -> str:
        if self.token.kind != "name":
            raise self.fail(f"expected a name, found {self.token.text!r}")
        return self.take().text

    def skip_past(self, end: str) -> None:
        while not self.accept(end):
            self.take()

    def nest(self) -> None:
        self.depth += 1
        if self.depth > _DEPTH:
            raise self.fail(f"more than {_DEPTH} levels of braces")
