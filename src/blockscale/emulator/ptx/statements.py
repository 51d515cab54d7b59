"""The body of a function: blocks, labels and instructions. PTX ISA 4.3, 6.

Blocks ``{ }`` are lexical scopes: inline assembly repeats labels and registers in them. What
instructions mean is none of this file's business.
"""

from __future__ import annotations

import re

from .declarations import STATE_SPACES, DeclarationParser
from .operands import Scope
from .program import Function, Instruction, Operand, Register, SourceLines, has_carry
from .tokens import Source, Token

__all__ = ["BodyParser"]

_CARRY = "(carry)"  # no register has such a name
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)(?:\s+(\d+))?"
    r"(?:.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?"
)


class BodyParser(DeclarationParser):
    """Reads the body of ``function``, one token of an outline.

    Args:
        scope: the parameters' own.
    """

    def __init__(
        self, source: Source, body: Token, function: Function, scope: Scope, taken: set[str]
    ) -> None:
        super().__init__(source, source.inside(body), taken)
        self.body, self.scopes = function, [scope]
        self.function = function
        self.loc: SourceLines = ()
        self.locs: dict[tuple[str, ...], SourceLines] = {}  # by file, line and column

    def block(self) -> None:
        self.expect("{")
        self.nest()
        self.scopes.append(Scope())
        while not self.accept("}"):
            if self.kind == "end":
                raise self.fail("a block is not closed")
            self.statement()
        self.depth -= 1
        scope = self.scopes.pop()
        for label, token in scope.uses:
            if label.name in scope.labels:
                label.target = scope.labels[label.name]
            elif len(self.scopes) > 1:
                self.scopes[-1].uses.append((label, token))
            else:
                raise self.fail(f"label {label.name!r} is not defined", token)

    def statement(self) -> None:
        kind, text = self.kind, self.text
        if text == "{":
            self.block()
        elif kind == "loc":
            self.location()
        elif kind == "name" and text[0] == ".":
            self.directive()
        elif kind == "name" and self.texts[self.at + 1] == ":":
            self.label()
        else:
            self.instruction()

    def location(self) -> None:
        """.loc: 11.5.4. Where its function is inlined, a location before it tells the rest."""
        found = _LOC.match(self.take())
        if found:
            here, caller = found.groups()[:3], found.groups()[3:]
            self.loc = ((int(here[0]), int(here[1])),)
            if caller[0] is not None:
                outer = ((int(caller[0]), int(caller[1])),)
                self.loc += self.locs.get(caller, outer)
            self.locs[here] = self.loc

    def directive(self) -> None:
        if self.accept(".reg"):
            self.registers()
        elif self.text in STATE_SPACES:
            for variable in self.variables():
                self.body.variables[variable.name] = variable
        elif self.accept(".param"):
            for parameter in self.parameters():
                self.body.locals[parameter.name] = parameter
            self.expect(";")
        elif self.accept(".pragma"):
            self.skip_past(";")
        else:
            raise self.fail(f"unexpected {self.text!r} in a function")

    def label(self) -> None:
        token = self.token
        self.take()
        self.expect(":")
        if self.accept(".branchtargets"):
            labels = []
            while not self.accept(";"):
                labels.append(self.use_label())
                self.accept(",")
            self.body.tables[token.text] = tuple(labels)
        elif self.accept(".callprototype"):
            self.skip_past(";")
        elif token.text in self.scopes[-1].labels:
            raise self.fail(f"label {token.text!r} is defined twice in a block", token)
        else:
            self.scopes[-1].labels[token.text] = len(self.body.instructions)

    def instruction(self) -> None:
        first = self.token
        predicate, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            token = self.token
            predicate = self.find_predicate()
            if predicate is None:
                raise self.fail(f"{token.text!r} is no predicate register", token)
        if self.kind != "name":
            raise self.fail(f"expected an instruction, found {self.text!r}")
        opcode = self.take()
        while self.text.startswith(".") and self.kind == "name":
            opcode += self.take()  # "mov .b64" is "mov.b64"
        operands: list[Operand] = []
        while not self.accept(";"):
            if self.kind == "end":
                raise self.fail("an instruction is not closed by ';'", first)
            operands.append(self.operand(opcode))
            if self.text != ";":
                self.expect(",")
        line, _ = self.source.where(first.position)
        carry = self.carry() if has_carry(opcode) else None
        self.body.instructions.append(
            Instruction(opcode, tuple(operands), predicate, negated, line, self.loc, carry)
        )

    def carry(self) -> Register:
        """The carry of a thread is a register of its function, though none that has a name."""
        scope = self.scopes[0]
        if _CARRY not in scope.registers:
            scope.registers[_CARRY] = self.new_register(_CARRY, "pred")
        register = scope.registers[_CARRY]
        assert isinstance(register, Register)
        return register
