"""PTX text -> Module: functions whose names, labels and registers are resolved.

Grammar: PTX ISA chapters 4 (syntax), 5 (state spaces, types, variables) and 11 (directives). The
module is read in outline first, with blocks unread; of functions and variables only those are read
that the entry reaches: modules of templates hold many kernels, and a launch wants one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from .declarations import STATE_SPACES, DeclarationParser
from .operands import Scope
from .program import Function, Module, Parameter, PtxError, Variable
from .statements import BodyParser
from .tokens import Source, Token

__all__ = ["outline", "parse", "parse_once"]

_LINKAGE = (".visible", ".extern", ".weak", ".common")


@dataclass(slots=True)
class _Unread:
    """A function whose body is one token."""

    function: Function
    scope: Scope  # of its parameters
    body: Token


class _ModuleParser(DeclarationParser):
    def __init__(self, source: Source) -> None:
        super().__init__(source, source.outline(), set())
        self.module = Module("", (), {}, {}, {})
        self.bodies: dict[str, _Unread] = {}
        self.declared: dict[str, Variable] = {}
        self.aliases: dict[str, str] = {}

    # --- outline ---

    def outline(self) -> None:
        while self.kind != "end":
            self.top_level()
        if not self.module.version:
            raise PtxError("not PTX: no .version directive", 1, 1)

    def top_level(self) -> None:
        token = self.token
        if token.kind == "file":
            found = re.match(r"\.file\s+(\d+)\s+\"([^\"]*)\"", self.take())
            if found is None:
                raise self.fail('expected .file number "path"', token)
            self.module.files[int(found.group(1))] = found.group(2)
            self.accept(";")
        elif token.kind == "loc":
            self.take()
        elif self.accept(".version"):
            self.module.version = self.take()
        elif self.accept(".target"):
            names = [self.name()]
            while self.accept(","):
                names.append(self.name())
            self.module.target = tuple(names)
        elif self.accept(".address_size"):
            if self.integer() != 64:
                raise self.fail(".address_size must be 64", token)
        elif not self.module.version:
            raise self.fail("not PTX: no .version directive")
        elif self.accept(".section"):
            self.name()
            self.expect("{")
        elif token.text in _LINKAGE or token.text in (".entry", ".func", *STATE_SPACES):
            self.declaration()
        elif self.accept(".alias"):
            name = self.name()
            self.expect(",")
            self.aliases[name] = self.name()
            self.expect(";")
        elif self.accept(".pragma"):
            self.skip_past(";")
        elif self.accept(";"):
            pass
        else:
            raise self.fail(f"unexpected {token.text!r} outside of a function")

    def declaration(self) -> None:
        extern = False
        while self.text in _LINKAGE:
            extern |= self.take() == ".extern"
        if self.text in (".entry", ".func"):
            self.header(self.take() == ".entry")
        elif self.text in STATE_SPACES:
            for variable in self.variables(extern):
                self.declared[variable.name] = variable
        else:
            raise self.fail(f"unexpected {self.text!r} in a declaration")

    def header(self, is_entry: bool) -> None:
        scope = Scope()
        self.scopes = [scope]
        results = self.parameter_list() if self.text == "(" else ()
        token = self.token
        name = self.name()
        self.taken.add(name)
        parameters = self.parameter_list() if self.text == "(" else ()
        self.scopes = []
        function = Function(name, is_entry, parameters, results)
        while self.text not in ("{", ";"):
            directive = self.name()
            if directive == ".pragma":
                self.skip_past(";")
                continue
            values = []
            while self.kind == "integer":
                values.append(self.integer())
                self.accept(",")
            function.directives[directive[1:]] = tuple(values)
        body = self.token
        self.take()
        if body.kind == "block":  # else a prototype
            if name in self.bodies:
                raise self.fail(f"function {name!r} is defined twice", token)
            self.bodies[name] = _Unread(function, scope, body)

    def parameter_list(self) -> tuple[Parameter, ...]:
        self.expect("(")
        found: list[Parameter] = []
        while not self.accept(")"):
            self.expect(".param")
            found += self.parameters()
            self.accept(",")
        return tuple(found)

    # --- what is reached ---

    def reach(self, names: list[str]) -> None:
        """Read functions and variables, and those that they name."""
        todo, seen = list(names), set(names)
        while todo:
            name = todo.pop(0)
            self.symbols = set()
            if name in self.bodies:
                self.read_body(name)
            elif name in self.declared:
                self.read_variable(name)
            elif name in self.aliases:
                self.symbols = {self.aliases[name]}
            found = sorted(self.symbols - seen)
            seen.update(found)
            todo += found
        for alias, name in self.aliases.items():
            if alias in seen and name in self.module.functions:
                self.module.functions[alias] = self.module.functions[name]

    def read_body(self, name: str) -> None:
        unread = self.bodies[name]
        parser = BodyParser(self.source, unread.body, unread.function, unread.scope, self.taken)
        parser.block()
        self.symbols = parser.symbols
        self.module.functions[name] = unread.function

    def read_variable(self, name: str) -> None:
        variable, block = self.declared[name], self.unread.get(name)
        if block is not None:
            tokens = self.source.inside(block)
            variable = DeclarationParser(self.source, tokens, self.taken).filled(variable)
        self.symbols = {link.symbol for link in variable.links}
        self.module.variables[name] = variable

    def entries(self) -> list[str]:
        return [name for name, unread in self.bodies.items() if unread.function.is_entry]


def parse(text: str, entry: str | None = None) -> Module:
    """Parse PTX.

    Args:
        entry: the kernel to read, with the functions and variables that it reaches; None: all.

    Raises PtxError with line and column where the text is not PTX, as far as it is read (blocks
    must be closed everywhere), and for an entry that is not there.
    """
    parser = _ModuleParser(Source(text))
    parser.outline()
    if entry is None:
        parser.reach([*parser.declared, *parser.bodies, *parser.aliases])
    elif entry in parser.entries():
        parser.reach([entry])
    else:
        raise PtxError(
            f"entry: {entry!r} is not in the module, which has "
            f"{', '.join(parser.entries()) or 'none'}"
        )
    return parser.module


def outline(text: str) -> Module:
    """The target and the functions of a module, with their bodies unread."""
    parser = _ModuleParser(Source(text))
    parser.outline()
    parser.module.functions.update({n: unread.function for n, unread in parser.bodies.items()})
    return parser.module


#: ``parse`` of an entry, kept for the next launch.
parse_once = lru_cache(maxsize=64)(parse)
