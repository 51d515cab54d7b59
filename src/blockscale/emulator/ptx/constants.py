"""Constant expressions: PTX ISA 4.6. Integers have 64 bits, signed unless U or their size says no;
operators are those of C with its precedence."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping

from .program import Immediate
from .tokens import Cursor, Token

__all__ = ["ConstantParser"]

_AFTER = frozenset(",;])}")  # what follows an expression of one number

#: Binary operators, those that bind least first.
_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<=", ">=", "<", ">"), ("<<", ">>"),
    ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
_PAIRS = frozenset(op for level in _LEVELS for op in level if len(op) == 2)
_SUM = 8
_TRUTHS = frozenset(op for level in (0, 1, 5, 6) for op in _LEVELS[level])  # signed, 0 or 1


class _Unsigned(int):
    """A constant of type .u64."""


Value = int | float


def _quotient(a: Value, b: Value) -> Value:
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # towards zero


_OPERATORS: Mapping[str, Callable[..., Value]] = {
    "||": lambda a, b: int(bool(a) or bool(b)), "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": operator.or_, "^": operator.xor, "&": operator.and_,
    "==": operator.eq, "!=": operator.ne,
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
    "<<": lambda a, b: a << (b & 63), ">>": lambda a, b: a >> (b & 63),
    "+": operator.add, "-": operator.sub, "*": operator.mul,
    "/": _quotient, "%": operator.mod,
}  # fmt: skip


def _fit(value: int, unsigned: bool) -> int:
    value &= (1 << 64) - 1
    if unsigned:
        return _Unsigned(value)
    return value - (value >> 63 << 64)


class ConstantParser(Cursor):
    """Reads constant expressions."""

    def constant(self) -> Immediate:
        """An expression, or a float in hexadecimal."""
        token = self.token
        if token.kind == "integer" and self.texts[self.at + 1] in _AFTER:
            return Immediate(self.integer())
        if token.kind == "hexfloat":
            digits = self.take()
            return Immediate(int(digits[2:], 16), 32 if digits[1] in "fF" else 64)
        return self._immediate(self._choice())

    def plus(self) -> int:
        """Reads what is added to a symbol or a register: "+ 4", "- 8", or nothing."""
        if self.text not in ("+", "-"):
            return 0
        token = self.token
        value = self._binary(_SUM, 0)
        if isinstance(value, float):
            raise self.fail("an offset is an integer", token)
        return int(value)

    def length(self) -> int:
        """Reads a length, or a number of registers: ptxas takes no expression there."""
        token, value = self.token, self.integer()
        if not 0 <= value < 1 << 40:
            raise self.fail(f"a length of {value}", token)
        return value

    @staticmethod
    def _immediate(value: Value) -> Immediate:
        if isinstance(value, float):
            return Immediate(int.from_bytes(struct.pack("<d", value), "little"), 64)
        return Immediate(int(value))

    def _choice(self) -> Value:
        value = self._binary(0)
        if not self.accept("?"):
            return value
        self.nest()
        yes = self._choice()
        self.expect(":")
        no = self._choice()
        self.depth -= 1
        return yes if value else no

    def _operator(self, level: int) -> str | None:
        """The operator of a level that comes next."""
        if self.kind == "end":
            return None
        text, at = self.text, self.at
        if self.positions[at + 1] == self.positions[at] + 1 and text + self.texts[at + 1] in _PAIRS:
            text += self.texts[at + 1]
        if text not in _LEVELS[level]:
            return None
        self.at += len(text)
        return text

    def _binary(self, level: int, left: Value | None = None) -> Value:
        """Operators of a level and of those that bind more, after ``left`` where it is given."""
        if level == len(_LEVELS):
            return self._unary()
        if left is None:
            left = self._binary(level + 1)
        while True:
            token, name = self.token, self._operator(level)
            if name is None:
                return left
            left = self._computed(token, name, left, self._binary(level + 1))

    def _computed(self, token: Token, name: str, left: Value, right: Value) -> Value:
        if isinstance(left, float) != isinstance(right, float):
            raise self.fail(f"{name!r} takes two integers or two floats", token)
        unsigned = type(left) is _Unsigned
        if isinstance(left, int) and isinstance(right, int) and name not in ("<<", ">>"):
            # ptxas takes remainders of unsigned integers only.
            unsigned |= type(right) is _Unsigned or name == "%"
            left, right = _fit(left, unsigned), _fit(right, unsigned)
        try:
            value = _OPERATORS[name](left, right)
        except ZeroDivisionError:
            raise self.fail("a constant divided by 0", token) from None
        except (OverflowError, TypeError):
            raise self.fail(f"{name!r} takes integers", token) from None
        if isinstance(value, float):
            return value
        return _fit(int(value), unsigned and name not in _TRUTHS)

    def _unary(self) -> Value:
        token = self.token
        if token.text not in ("-", "+", "~", "!"):
            return self._primary()
        self.nest()
        sign = self.take()
        value = self._unary()
        self.depth -= 1
        if sign == "!":
            return int(not value)
        if sign == "+":
            return value
        if sign == "-":
            return -value if isinstance(value, float) else _fit(-value, type(value) is _Unsigned)
        if isinstance(value, float):
            raise self.fail("'~' takes integers", token)
        return _fit(~value, type(value) is _Unsigned)

    def _primary(self) -> Value:
        token = self.token
        if token.kind == "integer":
            value = self.integer()
            return _Unsigned(value) if token.text[-1] == "U" or value >> 63 else value
        if token.kind == "decimal":
            return float(self.take())
        if self.accept("WARP_SZ"):
            return 32
        if not self.accept("("):
            raise self.fail(f"expected an operand, found {token.text!r}")
        self.nest()
        if self.text in (".s64", ".u64"):
            unsigned = self.take() == ".u64"
            self.expect(")")
            given = self._unary()
            if isinstance(given, float):
                raise self.fail("a cast takes an integer", token)
            value = _fit(given, unsigned)
        else:
            value = self._choice()  # type: ignore[assignment]
            self.expect(")")
        self.depth -= 1
        return value
