"""What a parsed PTX program is: values with no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

__all__ = [
    "Address",
    "Function",
    "Group",
    "Immediate",
    "Instruction",
    "Label",
    "Link",
    "Module",
    "Not",
    "Operand",
    "Pair",
    "Parameter",
    "PtxError",
    "Register",
    "SourceLines",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
    "has_carry",
    "type_bytes",
]


class PtxError(ValueError):
    """PTX that cannot be parsed or run; the message ends with line and column where known."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        where = (
            "" if line is None else f" (line {line}" + (f", column {column})" if column else ")")
        )
        super().__init__(message + where)
        self.message, self.line, self.column = message, line, column

    def __reduce__(self) -> tuple[type[PtxError], tuple[str, int | None, int | None]]:
        return type(self), (self.message, self.line, self.column)


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    type: str  # "pred", "b8" ... "b128", "f32", ...
    slot: int  # unique in its function


@dataclass(frozen=True, slots=True)
class Special:
    """%tid.x, %laneid, ..."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """An integer, or the bits of a float constant with its width."""

    value: int
    float_bits: int | None = None  # 32 or 64 where written 0f... or 0d...


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or function, plus a constant."""

    name: str
    offset: int = 0


@dataclass(slots=True)
class Label:
    name: str
    target: int = -1  # index of the instruction after it


@dataclass(frozen=True, slots=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], for tensors [base, {coordinates}, ...]."""

    base: Register | Symbol | Immediate
    offset: int = 0
    more: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Not:
    """!%p"""

    register: Register


@dataclass(frozen=True, slots=True)
class Pair:
    """%r|%p: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Group:
    """(a, b): arguments or results of a call."""

    items: tuple[Operand, ...]


#: ``None`` is the sink ``_``.
Operand = (
    Register | Special | Immediate | Symbol | Label | Vector | Address | Not | Pair | Group | None
)


#: (file number, line) of .loc, and where that was inlined, and so on outwards.
SourceLines = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Instruction:
    opcode: str  # as written, with all modifiers
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    line: int
    source: SourceLines
    carry: Register | None = None  # the condition code, where it is taken or given

    @property
    def takes_carry(self) -> bool:
        return self.parts[0] in _TAKE_CARRY

    @property
    def parts(self) -> tuple[str, ...]:
        return _parts(self.opcode)


_TAKE_CARRY = ("addc", "subc", "madc")


def has_carry(opcode: str) -> bool:
    """Whether an instruction takes or gives the carry of its thread: PTX ISA 9.7.2."""
    parts = _parts(opcode)
    return parts[0] in _TAKE_CARRY or (parts[0] in ("add", "sub", "mad") and "cc" in parts)


@cache
def _parts(opcode: str) -> tuple[str, ...]:
    return tuple(opcode.split("."))


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes of a variable's initial value that hold an address: (symbol + addend) & mask, moved
    down to its lowest bit."""

    at: int
    size: int
    symbol: str
    addend: int
    mask: int
    generic: bool  # written generic(symbol)


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    space: str  # shared, global, local, const
    type: str
    align: int
    count: int  # of elements; 0 for an extern array of unknown size
    extern: bool = False
    data: bytes | None = None
    links: tuple[Link, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.count * type_bytes(self.type)


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    type: str
    align: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * type_bytes(self.type)


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    parameters: tuple[Parameter, ...] = ()
    results: tuple[Parameter, ...] = ()
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # reqntid, ...
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    tables: dict[str, tuple[Label, ...]] = field(default_factory=dict)  # .branchtargets
    locals: dict[str, Parameter] = field(default_factory=dict)  # .param inside the body
    #: By place of the instruction: how it is run, where that is the same in every launch.
    built: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(slots=True)
class Module:
    version: str
    target: tuple[str, ...]
    functions: dict[str, Function]
    variables: dict[str, Variable]
    files: dict[int, str]

    @property
    def addresses(self) -> dict[str, int]:
        """Of its functions."""
        return {name: _FUNCTIONS + 16 * i for i, name in enumerate(self.functions)}

    def source(self, lines: SourceLines) -> str:
        """file:line, and the lines of the kernel's own file where that was inlined: what stands
        between, as in CUTLASS, would hide them."""
        if not lines:
            return ""
        places = [f"{self.files.get(file, f'file {file}')}:{line}" for file, line in lines]
        own = [
            place
            for place, (file, _) in zip(places[1:], lines[1:], strict=True)
            if file == lines[-1][0]
        ]
        return places[0] + (f", inlined at {', '.join(own)}" if own else "")


_FUNCTIONS = 0x0300_0000_0000_0000  # where they start; nothing can be loaded from there


_BYTES = {
    "pred": 1,
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"b128": 16, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f16x2": 4, "bf16x2": 4, "f32x2": 8},
}


def type_bytes(type: str) -> int:
    """Bytes of a fundamental type: "b32"."""
    if type not in _BYTES:
        raise PtxError(f"unknown type .{type}")
    return _BYTES[type]
