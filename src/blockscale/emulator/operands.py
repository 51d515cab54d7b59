"""The operands of instructions, resolved in the lexical scopes around them: PTX ISA chapter 6."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .program import (
    Address,
    Function,
    Group,
    Immediate,
    Label,
    Not,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)
from .tokens import Cursor, Token

__all__ = ["OperandParser", "Scope"]


@dataclass(slots=True)
class Scope:
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    uses: list[tuple[Label, Token]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of variables: as written -> unique


class OperandParser(Cursor):
    """Reads operands; who derives from it opens and closes the scopes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function: Function | None = None
        self.scopes: list[Scope] = []

    def new_register(self, name: str, type_name: str) -> Register:
        assert self.function is not None
        register = Register(name, type_name, len(self.function.registers))
        self.function.registers.append(register)
        return register

    def find_register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
            stem, digits = re.fullmatch(r"(.*?)(\d{0,9})", name, re.DOTALL).groups()  # type: ignore[union-attr]
            if digits and stem in scope.ranges:
                type_name, count = scope.ranges[stem]
                if int(digits) < count:
                    scope.registers[name] = self.new_register(name, type_name)
                    return scope.registers[name]
        return None

    def use_label(self) -> Label:
        token = self.token
        label = Label(self.name())
        self.scopes[-1].uses.append((label, token))
        return label

    def operand(self, opcode: str) -> Operand:
        first = self.simple_operand(opcode)
        if self.accept("|"):
            return Pair(first, self.simple_operand(opcode))
        return first

    def simple_operand(self, opcode: str) -> Operand:
        token = self.token
        if self.accept("{"):
            return Vector(self.operands_until("}", opcode))
        if self.accept("("):
            return Group(self.operands_until(")", opcode))
        if self.accept("["):
            return self.address(opcode)
        if self.accept("!"):
            register = self.find_register(self.name())
            if register is None or register.type != "pred":
                raise self.fail("expected a predicate after '!'", token)
            return Not(register)
        if token.kind == "name":
            return self.named(opcode)
        return self.constant()

    def operands_until(self, end: str, opcode: str) -> tuple[Operand, ...]:
        items: list[Operand] = []
        self.nest()
        while not self.accept(end):
            items.append(self.operand(opcode))
            if self.token.text != end:
                self.expect(",")
        self.depth -= 1
        return tuple(items)

    def named(self, opcode: str) -> Operand:
        token = self.take()
        if token.text == "_":
            return None
        register = self.find_register(token.text)
        if register is not None:
            return register
        if token.text.startswith("%"):
            return Special(token.text)
        if token.text == "WARP_SZ":
            return Immediate(32)
        if opcode.split(".")[0] in ("bra", "brx"):
            self.at -= 1
            if opcode.startswith("brx") and token.text in self.function.tables:  # type: ignore[union-attr]
                return Symbol(self.take().text)
            return self.use_label()
        names = (
            scope.names[token.text] for scope in reversed(self.scopes) if token.text in scope.names
        )
        return Symbol(next(names, token.text), self.plus())

    def plus(self) -> int:
        if self.accept("+"):
            return self.integer()
        return self.integer() if self.token.text == "-" else 0

    def address(self, opcode: str) -> Address:
        token = self.token
        base: Operand = self.named(opcode) if token.kind == "name" else self.constant()
        if isinstance(base, Symbol):
            base, offset = Symbol(base.name), base.offset
        else:
            offset = self.plus()
        more: list[Operand] = []
        self.nest()
        while self.accept(","):
            more.append(self.operand(opcode))
        self.depth -= 1
        self.expect("]")
        if not isinstance(base, Register | Symbol | Immediate):
            raise self.fail("expected a register, a symbol or a number as address", token)
        return Address(base, offset, tuple(more))

    def constant(self) -> Immediate:
        token = self.token
        if token.kind == "integer" or token.text in ("-", "~"):
            inverted, negative = self.accept("~"), self.accept("-")
            if self.token.kind == "integer":
                value = self.integer()
                value = -value if negative else value
                return Immediate(~value if inverted else value)
            if negative and self.token.kind == "decimal":
                return self.double(-float(self.take().text))
        if token.kind == "hexfloat":
            digits = self.take().text
            return Immediate(int(digits[2:], 16), 32 if digits[1] in "fF" else 64)
        if token.kind == "decimal":
            return self.double(float(self.take().text))
        raise self.fail(f"expected an operand, found {token.text!r}")

    @staticmethod
    def double(value: float) -> Immediate:
        return Immediate(int.from_bytes(struct.pack("<d", value), "little"), 64)
