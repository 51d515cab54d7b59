"""Declarations of variables, parameters and registers: PTX ISA 5.4, 11.6."""

from __future__ import annotations

import struct

import numpy as np

from .operands import OperandParser, Scope
from .program import Link, Parameter, PtxError, Variable, type_bytes
from .tokens import Source, Token, Tokens

__all__ = ["STATE_SPACES", "DeclarationParser"]

STATE_SPACES = (".shared", ".global", ".local", ".const")
_VECTORS = (".v2", ".v4", ".v8")


class DeclarationParser(OperandParser):
    """Reads what both modules and functions declare.

    Args:
        taken: names of variables and functions, unique in the module; grows.
    """

    def __init__(self, source: Source, tokens: Tokens, taken: set[str]) -> None:
        super().__init__(source, tokens)
        self.taken = taken
        #: Module variables whose initializers, one token each, are not read yet.
        self.unread: dict[str, Token] = {}

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

    def _kind(self) -> tuple[str, int, int]:
        """Type, items of a vector, and alignment (0: not said), in any order."""
        type_name, vector, align = "", 1, 0
        while self.text.startswith(".") and self.kind == "name":
            text = self.take()
            if text == ".align":
                align = self.integer()
            elif text in _VECTORS:
                vector = int(text[2:])
            elif text == ".attribute":
                self.skip_past("(")
                depth = 1
                while depth:
                    depth += {"(": 1, ")": -1}.get(self.take(), 0)
            else:
                type_name = text[1:]
        return type_name, vector, align

    def variables(self, extern: bool = False) -> list[Variable]:
        first = self.token
        self.take()
        type_name, vector, align = self._kind()
        found = []
        while True:
            token = self.token
            name = self.unique(self.name(), token)
            count, size = vector, self.size_of(type_name, first)
            while self.accept("["):
                count *= 0 if self.text == "]" else self.length()
                self.expect("]")
            variable = Variable(
                name, first.text[1:], type_name, align or size * vector, count, extern
            )
            if self.accept("="):
                if self.kind == "block":
                    self.unread[name] = self.token
                    self.take()
                else:
                    variable = self.filled(variable)
            found.append(variable)
            if not self.accept(","):
                break
        self.expect(";")
        return found

    # --- initializers ---

    def filled(self, variable: Variable) -> Variable:
        """The variable with the value that comes next."""
        data = bytearray()
        links: list[Link] = []
        self._value(variable.type, data, links)
        size = type_bytes(variable.type)
        count = max(variable.count, len(data) // size)
        data = data.ljust(count * size, b"\0")
        return Variable(
            variable.name, variable.space, variable.type, variable.align, count, variable.extern,
            bytes(data), tuple(links),
        )  # fmt: skip

    def _value(self, type_name: str, data: bytearray, links: list[Link]) -> None:
        if self.accept("{"):
            self.nest()
            while not self.accept("}"):
                self._value(type_name, data, links)
                if self.text != "}":
                    self.expect(",")
            self.depth -= 1
        elif self._names_symbol():
            links.append(self._link(len(data), type_bytes(type_name)))
            data += bytes(type_bytes(type_name))
        else:
            data += self._number(type_name)

    def _number(self, type_name: str) -> bytes:
        value, size = self.constant(), type_bytes(type_name)
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

    def _names_symbol(self) -> bool:
        token = self.token
        if token.kind == "integer":
            return self.texts[self.at + 1] == "("
        return token.kind == "name" and token.text != "WARP_SZ"

    def _link(self, at: int, size: int) -> Link:
        """name + 4, generic(name) + 4, 0xff00(name): the address, or some of its bytes."""
        mask = self.integer() if self.kind == "integer" else (1 << 8 * size) - 1
        if mask <= 0:
            raise self.fail(f"a mask of {mask}")
        token, offset = self.token, 0
        name = "" if self.text == "(" else self.name()
        generic = name == "generic"
        if name in ("", "generic"):  # generic addresses of global memory are its own
            self.expect("(")
            token = self.token
            name, offset = self.name(), self.plus()
            self.expect(")")
        if name not in self.taken:
            raise self.fail(
                f"there is no variable or function {name!r} to take the address of", token
            )
        return Link(at, size, name, offset + self.plus(), mask, generic)

    # --- functions ---

    def parameters(self) -> list[Parameter]:
        """Reads what one .param, taken already, declares: names with commas between."""
        align, type_name, pointee = 0, "", False
        first = self.token
        while self.text.startswith(".") and self.kind == "name":
            text = self.take()
            if text == ".align":  # after .ptr it is that of what the pointer points to
                align = (align, self.integer())[not pointee]
            elif text not in (".ptr", *STATE_SPACES):
                type_name = text[1:]
            pointee |= text == ".ptr"
        size, found = self.size_of(type_name, first), []
        while True:
            token, count = self.token, 1
            name = self.unique(self.name(), token)
            while self.accept("["):
                count *= 0 if self.text == "]" else self.length()
                self.expect("]")
            found.append(Parameter(name, type_name, align or size, count))
            more = self.text == "," and self.texts[self.at + 1] != ".param"
            if not more:
                return found
            self.take()

    def registers(self) -> None:
        token = self.token
        type_name, vector, _ = self._kind()
        if type_name != "pred":
            self.size_of(type_name, token)
        scope: Scope = self.scopes[-1]
        while True:
            name = self.name()
            if self.accept("<"):
                scope.ranges[name] = (type_name, self.length(), vector)
                self.expect(">")
            else:
                scope.registers[name] = self.new_register(name, type_name, vector)
            if not self.accept(","):
                break
        self.expect(";")
