"""PTX text -> tokens, and a cursor over them: what every grammar rule reads with."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from .program import PtxError

__all__ = ["Cursor", "Token"]

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<loc>\.loc\b[^\n]*)|(?P<file>\.file\b[^\n]*)
    |(?P<string>"[^"\n]*")
    |(?P<hexfloat>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b)
    |(?P<decimal>\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    |(?P<integer>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|0[0-7]+U?|\d+U?)
    |(?P<name>[A-Za-z_$%.][\w$%]*(?:(?:::|\.)[\w$%]+)*)
    |(?P<mark>[{}()\[\],;:@!|<>=+\-*~&^?/])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)

_DEPTH = 100  # of nested blocks and operands; more is no program


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    position: int


def tokens(text: str) -> Iterator[Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            column = position - text.rfind("\n", 0, position)
            raise PtxError(f"unexpected character {text[position]!r}", line, column)
        if match.lastgroup != "skip":
            yield Token(match.lastgroup or "", match.group(), position)
        position = match.end()
    yield Token("end", "", position)


class Cursor:
    """Reads tokens one by one; every complaint names line and column."""

    def __init__(self, text: str) -> None:
        self.tokens = list(tokens(text))
        self.at = 0
        self.depth = 0
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def where(self, token: Token) -> tuple[int, int]:
        line = bisect_right(self.starts, token.position)
        return line, token.position - self.starts[line - 1] + 1

    def fail(self, message: str, token: Token | None = None) -> PtxError:
        return PtxError(message, *self.where(token or self.token))

    def take(self) -> Token:
        token = self.token
        if token.kind == "end":
            raise self.fail("the text ends too early")
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind != "string":
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

    def length(self) -> int:
        token, value = self.token, self.integer()
        if not 0 <= value < 1 << 40:
            raise self.fail(f"a length of {value}", token)
        return value

    def nest(self) -> None:
        self.depth += 1
        if self.depth > _DEPTH:
            raise self.fail(f"more than {_DEPTH} levels of braces")
