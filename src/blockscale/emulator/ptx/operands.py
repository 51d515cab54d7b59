"""The operands of instructions, resolved in the lexical scopes around them: PTX ISA chapter 6."""

from __future__ import annotations

from dataclasses import dataclass, field

from .constants import ConstantParser
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
from .tokens import Source, Token, Tokens

__all__ = ["OperandParser", "Scope"]

_FIELDS = {name: i for fields in ("xyzw", "rgba") for i, name in enumerate(fields)}


@dataclass(slots=True)
class Scope:
    registers: dict[str, Register | Vector] = field(default_factory=dict)
    #: Stem of names with a number -> type, how many there are, items of each (1: no vector).
    ranges: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    uses: list[tuple[Label, Token]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of variables: as written -> unique


class OperandParser(ConstantParser):
    """Reads operands; who derives from it opens and closes the scopes."""

    def __init__(self, source: Source, tokens: Tokens) -> None:
        super().__init__(source, tokens)
        self.function: Function | None = None
        self.scopes: list[Scope] = []
        self.symbols: set[str] = set()  # that operands name

    def new_register(self, name: str, type_name: str, items: int = 1) -> Register | Vector:
        assert self.function is not None
        if items > 1:
            parts = (self.new_register(f"{name}.{item}", type_name) for item in "xyzw"[:items])
            return Vector(tuple(parts))
        register = Register(name, type_name, len(self.function.registers))
        self.function.registers.append(register)
        return register

    def find_register(self, name: str) -> Register | Vector | None:
        """A register, a vector of them, or one item of a vector."""
        found = self._declared(name)
        if found is None and "." in name:
            stem, _, item = name.rpartition(".")
            vector, at = self._declared(stem), _FIELDS.get(item, 4)
            if isinstance(vector, Vector) and at < len(vector.items):
                found = vector.items[at]  # type: ignore[assignment]
        return found

    def _declared(self, name: str) -> Register | Vector | None:
        stem = name[: max(len(name.rstrip("0123456789")), len(name) - 9)]
        digits = name[len(stem) :]
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
            if digits and stem in scope.ranges:
                type_name, count, items = scope.ranges[stem]
                if int(digits) < count:
                    scope.registers[name] = self.new_register(name, type_name, items)
                    return scope.registers[name]
        return None

    def find_predicate(self) -> Register | None:
        found = self.find_register(self.name())
        return found if isinstance(found, Register) and found.type == "pred" else None

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
        if self.kind == "name":
            return self.named(opcode)
        if self.accept("{"):
            return Vector(self.operands_until("}", opcode))
        if self.accept("["):
            return self.address(opcode)
        if self.text == "(" and opcode.startswith("call"):
            self.take()
            return Group(self.operands_until(")", opcode))
        if self.text == "!" and self.kinds[self.at + 1] == "name":
            token = self.token
            self.take()
            register = self.find_predicate()
            if register is None:
                raise self.fail("expected a predicate after '!'", token)
            return Not(register)
        return self.constant()

    def operands_until(self, end: str, opcode: str) -> tuple[Operand, ...]:
        items: list[Operand] = []
        self.nest()
        while not self.accept(end):
            items.append(self.operand(opcode))
            if self.text != end:
                self.expect(",")
        self.depth -= 1
        return tuple(items)

    def named(self, opcode: str) -> Operand:
        text = self.take()
        if text == "_":
            return None
        register = self.find_register(text)
        if register is not None:
            return register
        if text.startswith("%"):
            return Special(text)
        if text == "WARP_SZ":
            self.at -= 1
            return self.constant()
        if opcode.split(".")[0] in ("bra", "brx"):
            self.at -= 1
            if opcode.startswith("brx") and text in self.function.tables:  # type: ignore[union-attr]
                return Symbol(self.take())
            return self.use_label()
        names = (scope.names[text] for scope in reversed(self.scopes) if text in scope.names)
        name = next(names, text)
        self.symbols.add(name)
        return Symbol(name, self.plus())

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
