"""PTX text -> Module: functions whose names, labels and registers are resolved.

Grammar: PTX ISA chapters 4 (syntax), 5 (state spaces, types, variables) and 11 (directives). Blocks
``{ }`` are lexical scopes: inline assembly repeats labels and registers in them. What instructions
mean is none of this file's business.
"""

from __future__ import annotations

import re
import struct

import numpy as np

from .operands import OperandParser, Scope
from .program import (
    Function,
    Instruction,
    Module,
    Operand,
    Parameter,
    PtxError,
    Variable,
    type_bytes,
)
from .tokens import Token

__all__ = ["parse"]


_STATE_SPACES = (".shared", ".global", ".local", ".const")
_LINKAGE = (".visible", ".extern", ".weak", ".common")


class _Parser(OperandParser):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.module = Module("", (), {}, {}, {}, tuple(text.splitlines()))
        self.taken: set[str] = set()  # names of variables, unique in the module
        self.source: tuple[int, int] | None = None

    def size_of(self, type_name: str, token: Token) -> int:
        try:
            return type_bytes(type_name)
        except PtxError as error:
            raise self.fail(str(error), token) from None

    def unique(self, name: str, token: Token) -> str:
        """A variable's name; blocks and functions repeat names, the module's tables cannot."""
        if self.scopes:
            if name in self.scopes[-1].names:
                raise self.fail(f"variable {name!r} is defined twice in a block", token)
            found, count = name, 1
            while found in self.taken:
                count += 1
                found = f"{name}'{count}"
            self.scopes[-1].names[name] = found
        else:
            found = name
        self.taken.add(found)
        return found

    # --- module level ---

    def parse(self) -> Module:
        while self.token.kind != "end":
            self.top_level()
        if not self.module.version:
            raise PtxError("not PTX: no .version directive", 1, 1)
        return self.module

    def top_level(self) -> None:
        token = self.token
        if token.kind == "file":
            found = re.match(r"\.file\s+(\d+)\s+\"([^\"]*)\"", self.take().text)
            if found is None:
                raise self.fail('expected .file number "path"', token)
            self.module.files[int(found.group(1))] = found.group(2)
            self.accept(";")
        elif token.kind == "loc":
            self.take()
        elif self.accept(".version"):
            self.module.version = self.take().text
        elif self.accept(".target"):
            names = [self.name()]
            while self.accept(","):
                names.append(self.name())
            self.module.target = tuple(names)
        elif self.accept(".address_size"):
            if self.integer() != 64:
                raise self.fail(".address_size must be 64", token)
        elif self.accept(".section"):
            self.skip_section()
        elif not self.module.version:
            raise self.fail("not PTX: no .version directive")
        elif token.text in _LINKAGE or token.text in (".entry", ".func", *_STATE_SPACES):
            self.declaration()
        elif self.accept(".pragma"):
            self.skip_past(";")
        elif self.accept(";"):
            pass
        else:
            raise self.fail(f"unexpected {token.text!r} outside of a function")

    def skip_section(self) -> None:
        self.name()
        depth = 0
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if token.text == "}" and depth == 0:
                return

    def declaration(self) -> None:
        extern = False
        while self.token.text in _LINKAGE:
            extern |= self.take().text == ".extern"
        if self.token.text in (".entry", ".func"):
            self.parse_function(self.take().text == ".entry")
        elif self.token.text in _STATE_SPACES:
            for variable in self.variables(extern):
                self.module.variables[variable.name] = variable
        else:
            raise self.fail(f"unexpected {self.token.text!r} in a declaration")

    def variables(self, extern: bool = False) -> list[Variable]:
        first = self.take()
        space, align, type_name, vector = first.text[1:], 0, "", 1
        while self.token.text.startswith("."):
            text = self.take().text
            if text == ".align":
                align = self.integer()
            elif text in (".v2", ".v4", ".v8"):
                vector = int(text[2:])
            elif text not in (".attribute", ".ptr"):
                type_name = text[1:]
        found = []
        while True:
            token = self.token
            name = self.unique(self.name(), token)
            count, size = vector, self.size_of(type_name, first)
            while self.accept("["):
                count *= 0 if self.token.text == "]" else self.length()
                self.expect("]")
            data = self.initializer(type_name) if self.accept("=") else None
            if data is not None:
                count = max(count, len(data) // size)
                data = data.ljust(count * size, b"\0")
            align = align or size * vector
            found.append(Variable(name, space, type_name, align, count, extern, data))
            if not self.accept(","):
                break
        self.expect(";")
        return found

    def initializer(self, type_name: str) -> bytes:
        size = type_bytes(type_name)
        if self.accept("{"):
            self.nest()
            data = b""
            while not self.accept("}"):
                data += self.initializer(type_name)
                self.accept(",")
            self.depth -= 1
            return data
        value = self.constant()
        if type_name in ("f32", "f64") and value.float_bits != 8 * size:
            number = float(value.value)
            if value.float_bits:
                code = "<f" if value.float_bits == 32 else "<d"
                (number,) = struct.unpack(
                    code, value.value.to_bytes(value.float_bits // 8, "little")
                )
            with np.errstate(over="ignore"):
                return np.array(number, f"<f{size}").tobytes()
        return (value.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    # --- functions ---

    def parse_function(self, is_entry: bool) -> None:
        self.scopes = [Scope()]  # the parameters' own
        results = self.parameter_list() if self.token.text == "(" else ()
        token = self.token
        name = self.name()
        parameters = self.parameter_list() if self.token.text == "(" else ()
        function = Function(name, is_entry, parameters, results)
        while self.token.text not in ("{", ";"):
            directive = self.name()
            if directive == ".pragma":
                self.skip_past(";")
                continue
            values = []
            while self.token.kind == "integer":
                values.append(self.integer())
                self.accept(",")
            function.directives[directive[1:]] = tuple(values)
        if not self.accept(";"):  # else a prototype
            if name in self.module.functions:
                raise self.fail(f"function {name!r} is defined twice", token)
            self.function = function
            self.block()
            self.module.functions[name] = function
        self.function, self.scopes, self.source = None, [], None

    def parameter_list(self) -> tuple[Parameter, ...]:
        self.expect("(")
        found = []
        while not self.accept(")"):
            self.expect(".param")
            found.append(self.parameter())
            self.accept(",")
        return tuple(found)

    def parameter(self) -> Parameter:
        align, type_name, pointee = 0, "", False
        first = self.token
        while self.token.text.startswith(".") and self.token.kind == "name":
            text = self.take().text
            if text == ".align":  # after .ptr it is that of what the pointer points to
                align = (align, self.integer())[not pointee]
            elif text not in (".ptr", *_STATE_SPACES):
                type_name = text[1:]
            pointee |= text == ".ptr"
        token, count = self.token, 1
        name = self.unique(self.name(), token)
        if self.accept("["):
            count = 0 if self.token.text == "]" else self.length()
            self.expect("]")
        size = self.size_of(type_name, first)
        return Parameter(name, type_name, align or size, count)

    def block(self) -> None:
        self.expect("{")
        self.nest()
        self.scopes.append(Scope())
        while not self.accept("}"):
            if self.token.kind == "end":
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
        assert self.function is not None
        token = self.token
        if token.text == "{":
            self.block()
        elif token.kind == "loc":
            numbers = re.match(r"\.loc\s+(\d+)\s+(\d+)", self.take().text)
            if numbers:
                self.source = int(numbers.group(1)), int(numbers.group(2))
        elif self.accept(".reg"):
            self.registers()
        elif token.text in _STATE_SPACES:
            for variable in self.variables():
                self.function.variables[variable.name] = variable
        elif self.accept(".param"):
            parameter = self.parameter()
            self.function.locals[parameter.name] = parameter
            self.expect(";")
        elif self.accept(".pragma"):
            self.skip_past(";")
        elif token.kind == "name" and self.tokens[self.at + 1].text == ":":
            self.label()
        else:
            self.instruction()

    def label(self) -> None:
        assert self.function is not None
        token = self.take()
        self.expect(":")
        if self.accept(".branchtargets"):
            labels = []
            while not self.accept(";"):
                labels.append(self.use_label())
                self.accept(",")
            self.function.tables[token.text] = tuple(labels)
        elif self.accept(".callprototype"):
            self.skip_past(";")
        elif token.text in self.scopes[-1].labels:
            raise self.fail(f"label {token.text!r} is defined twice in a block", token)
        else:
            self.scopes[-1].labels[token.text] = len(self.function.instructions)

    def registers(self) -> None:
        token = self.token
        type_name = self.name()[1:]
        if type_name != "pred":
            self.size_of(type_name, token)
        while True:
            name = self.name()
            if self.accept("<"):
                self.scopes[-1].ranges[name] = (type_name, self.length())
                self.expect(">")
            else:
                self.scopes[-1].registers[name] = self.new_register(name, type_name)
            if not self.accept(","):
                break
        self.expect(";")

    # --- instructions ---

    def instruction(self) -> None:
        assert self.function is not None
        first = self.token
        predicate, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            token = self.token
            predicate = self.find_register(self.name())
            if predicate is None or predicate.type != "pred":
                raise self.fail(f"{token.text!r} is no predicate register", token)
        if self.token.kind != "name":
            raise self.fail(f"expected an instruction, found {self.token.text!r}")
        opcode = self.take().text
        operands: list[Operand] = []
        while not self.accept(";"):
            if self.token.kind == "end":
                raise self.fail("an instruction is not closed by ';'", first)
            operands.append(self.operand(opcode))
            if self.token.text != ";":
                self.expect(",")
        self.function.instructions.append(
            Instruction(
                opcode, tuple(operands), predicate, negated, self.where(first)[0], self.source
            )
        )


def parse(text: str) -> Module:
    """Parse PTX. Raises PtxError with line and column where it is not PTX."""
    return _Parser(text).parse()
