"""How an instruction finds its meaning: opcode -> builder -> step.

A builder is registered for a family ("add", "ld", "cp.async.bulk"); the longest family that starts
an opcode gets it. It receives a :class:`Form`, takes every modifier and operand it knows, and must
leave none: what is unknown is an error with its line, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..machine.state import Fragment, Step, storage
from ..memory.buffers import SHARED_WINDOW, MemoryFault
from ..ptx.program import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    PtxError,
    Register,
    Special,
    Symbol,
    Vector,
)
from ..ptx.targets import has
from .steps import predicated, synchronized

__all__ = [
    "BITS",
    "INTEGERS",
    "SHARED_SPACES",
    "SIGNED",
    "TYPES",
    "UNSIGNED",
    "Built",
    "Form",
    "Getter",
    "Setter",
    "build",
    "families",
    "first",
    "instruction",
]

Getter = Callable[[Fragment], Any]
Setter = Callable[[Fragment, Any], None]
Builder = Callable[["Form"], Step]

#: numpy dtype in which an operand of a PTX type is computed.
TYPES: Mapping[str, Any] = {
    "pred": np.bool_,
    **{
        f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
        for kind, code in (("u", "u"), ("b", "u"), ("s", "i"))
        for bits in (8, 16, 32, 64)
    },
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
    "b128": np.dtype("V16"),
}
SIGNED = ("s16", "s32", "s64")
UNSIGNED = ("u16", "u32", "u64")
INTEGERS = (*UNSIGNED, *SIGNED)
BITS = ("b16", "b32", "b64")

#: State spaces whose addresses have 32 bits.
SHARED_SPACES = ("shared", "shared::cta", "shared::cluster")
_LOW = np.uint64(0xFFFFFFFF)

_builders: dict[tuple[str, ...], tuple[Builder, bool]] = {}


def instruction(*names: str, control: bool = False) -> Callable[[Builder], Builder]:
    """Register a builder for opcode families.

    ``control`` marks steps that may return something: threads whose predicate is false are then
    split off first, so that the step sees a whole fragment.
    """

    def register(builder: Builder) -> Builder:
        for name in names:
            _builders[tuple(name.split("."))] = (builder, control)
        return builder

    return register


def families() -> list[str]:
    """Every registered family, for the documentation."""
    return sorted(".".join(key) for key in _builders)


class Form:
    """One instruction while it is built: its modifiers and operands, and where it stands."""

    def __init__(self, ins: Instruction, resolve: Callable[[str], int], machine: Any) -> None:
        self.ins = ins
        self.parts = ins.parts
        self.bound = False  # whether the step depends on the launch
        self._machine, self._resolve = machine, resolve
        self.of_masks = getattr(machine, "of_masks", False)  # built for masks: see careful
        self.left: list[str] = []
        self.used = 0  # operands looked at: the rest would be ignored, which is an error
        self.results: list[int] = []  # slots of the registers that it writes

    # --- what the launch decides ---

    @property
    def machine(self) -> Any:
        self.bound = True
        return self._machine

    def resolve(self, name: str) -> int:
        """The address of a symbol in its own state space."""
        self.bound = True
        return self._resolve(name)

    def release(self) -> None:
        """Let go of the launch: the step is kept for others."""
        del self._machine, self._resolve

    # --- modifiers ---

    def start(self, family: tuple[str, ...]) -> None:
        self.left = list(self.parts[len(family) :])

    def has(self, *names: str) -> bool:
        """Take a modifier if it is there (any of ``names``)."""
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return True
        return False

    def one(self, *names: str, default: str | None = None) -> str | None:
        """Take the one of ``names`` that is there."""
        for name in names:
            if self.has(name):
                return name
        return default

    def several(self, *names: str) -> list[str]:
        """Take all of ``names`` that are there, in the order in which they are written."""
        found = [part for part in self.left if part in names]
        for part in found:
            self.left.remove(part)
        return found

    def types(self) -> list[str]:
        """Take all type modifiers, in order."""
        found = [part for part in self.left if part in TYPES or part == "tf32"]
        for part in found:
            self.left.remove(part)
        return found

    def type(self, *allowed: str) -> str:
        """Take the only type, one of ``allowed`` where any are given."""
        found = self.types()
        if len(found) != 1:
            raise self.error(f"expected one type, found {', '.join(found) or 'none'}")
        if allowed and found[0] not in allowed:
            raise self.error(f"type .{found[0]} is not supported")
        return found[0]

    def done(self) -> None:
        if self.left:
            raise self.error("unsupported modifier " + ", ".join("." + part for part in self.left))
        if self.used < len(self.ins.operands):
            raise self.error(f"has {len(self.ins.operands)} operands, {self.used} are expected")

    def error(self, message: str) -> PtxError:
        return PtxError(f"{self.ins.opcode}: {message}", self.ins.line)

    def needs(self, *targets: str) -> None:
        """PtxError unless the module's .target has what one of ``targets`` brought.

        "sm_100": that or anything later; "sm_100f": its family, if the module names it with a
        letter; "sm_100a": that one alone.
        """
        given = self._machine.program.module.target
        if not any(has(own, wanted) for own in given for wanted in targets):
            raise self.error(f"needs {' or '.join(targets)}, .target is {', '.join(given)}")

    # --- operands ---

    def all_used(self) -> None:
        self.used = len(self.ins.operands)

    def operand(self, index: int) -> Operand:
        self.used = max(self.used, index + 1)
        try:
            return self.ins.operands[index]
        except IndexError:
            raise self.error(f"has {len(self.ins.operands)} operands, too few") from None

    def is_predicate(self, index: int) -> bool:
        op = self.ins.operands[index]
        op = op.register if isinstance(op, Not) else op
        return isinstance(op, Register) and op.type == "pred"

    def get(self, operand: int | Operand, type: str) -> Getter:
        """A function that reads an operand as ``type``: an array over threads, or a scalar."""
        op = self.operand(operand) if isinstance(operand, int) else operand
        dtype = np.dtype(TYPES[type])
        if isinstance(op, Register):
            slot, kept = op.slot, storage(op)
            if kept == dtype:
                return lambda w: w.R[slot][w.sel]
            if kept.itemsize == dtype.itemsize and kept != np.bool_ and dtype != np.bool_:
                return lambda w: w.R[slot].view(dtype)[w.sel]
            if (
                kept.itemsize > dtype.itemsize and dtype != np.bool_
            ):  # a wide register read narrow: its low bits
                narrow = np.dtype(f"u{dtype.itemsize}")
                return lambda w: w.R[slot][w.sel].astype(narrow).view(dtype)
            raise self.error(f"register {op.name} of type .{op.type} read as .{type}")
        if isinstance(op, Immediate) and dtype.kind != "V":
            constant = _immediate(op, dtype)
            return lambda w: constant
        if isinstance(op, Not):
            inner = self.get(op.register, "pred")
            return lambda w: np.logical_not(inner(w))
        if isinstance(op, Symbol) and self.machine.is_local(op.name):
            name, offset = op.name, op.offset
            return lambda w: dtype.type(w.frame.local_offsets[name] + offset)
        if isinstance(op, Symbol):
            if dtype.kind not in "ui":
                raise self.error(f"the address {op.name} read as .{type}")
            address = dtype.type(self.resolve(op.name) + op.offset)
            if self.machine.is_shared(op.name):  # a CTA's own addresses carry its rank
                return lambda w: dtype.type(int(address) + w.cta.shared_base)
            return lambda w: address
        if isinstance(op, Special):
            return self.machine.special(op.name, dtype, self)
        raise self.error(f"operand {op!r} cannot be read as .{type}")

    def set(self, operand: int | Operand, type: str) -> Setter:
        """A function that writes an operand of ``type``; the sink ``_`` takes anything."""
        op = self.operand(operand) if isinstance(operand, int) else operand
        if op is None:
            return lambda w, value: None
        if not isinstance(op, Register):
            raise self.error("the destination is no register")
        self.results.append(op.slot)
        dtype, kept, slot = np.dtype(TYPES[type]), storage(op), op.slot
        if kept == dtype:

            def put(w: Fragment, value: Any) -> None:
                w.R[slot][w.sel] = value

            return put
        if kept.itemsize == dtype.itemsize and kept != np.bool_:

            def put_view(w: Fragment, value: Any) -> None:
                w.R[slot].view(dtype)[w.sel] = value

            return put_view
        if kept.itemsize > dtype.itemsize and dtype != np.bool_:
            signed = dtype.kind == "i"

            def put_wide(w: Fragment, value: Any) -> None:
                value = np.asarray(value, dtype)
                wide = (
                    value.astype(f"i{kept.itemsize}")
                    if signed
                    else value.view(f"u{dtype.itemsize}")
                )
                w.R[slot][w.sel] = wide.astype(kept)

            return put_wide
        raise self.error(f"register {op.name} of type .{op.type} written as .{type}")

    def items(self, operand: int) -> tuple[Operand, ...]:
        """The items of a vector operand, or the operand alone."""
        op = self.operand(operand)
        return op.items if isinstance(op, Vector) else (op,)

    def asynchronous(self, items: Sequence[Operand]) -> tuple[int, ...]:
        """Slots of registers that the instruction holds after it was issued."""
        slots = []
        for op in items:
            if not isinstance(op, Register):
                raise self.error("expected registers")
            slots.append(op.slot)
        self.machine.held.update(slots)
        return tuple(slots)

    def address(self, operand: int | Operand, space: str | None = None) -> Getter:
        """Base + offset of [..], per thread, as uint64.

        Args:
            space: shared, shared::cta or shared::cluster: the address has 32 bits. The hardware
                uses the low ones of a wide register, also where cvta made it generic.
        """
        op = self.operand(operand) if isinstance(operand, int) else operand
        if not isinstance(op, Address):
            raise self.error(f"expected an address, found {op!r}")
        base, offset = op.base, np.uint64(op.offset & (1 << 64) - 1)
        if op.more:
            raise self.error("expected one address, found a list")
        wide = "u64" if not isinstance(base, Register) or storage(base).itemsize == 8 else "u32"
        get = self.get(base, wide)
        if wide == "u64" and isinstance(base, Register):
            if space in SHARED_SPACES:
                return lambda w: self._narrow(get(w) + offset)
            return lambda w: get(w) + offset
        if space in SHARED_SPACES:
            return lambda w: (_threads(get(w), w).astype(np.uint64) + offset) & _LOW
        return lambda w: _threads(get(w), w).astype(np.uint64) + offset

    def _narrow(self, address: np.ndarray) -> np.ndarray:
        """The low 32 bits of shared and of generic addresses. Others, which the hardware cuts as
        well, are those of something else."""
        high = address >> np.uint64(32)
        wrong = (high != 0) & (high != np.uint64(SHARED_WINDOW >> 32)) & (high != _LOW)
        if wrong.any():
            raise MemoryFault(
                f"{self.ins.opcode}: {int(address[wrong.argmax()]):#x} is no address in shared "
                "memory, neither its own nor a generic one",
                self.ins.line,
            )
        return address & _LOW


def first(value: Any) -> int:
    """The value of a fragment of one thread, or of the first of several."""
    return int(np.asarray(value).flat[0])


def _threads(value: Any, w: Fragment) -> np.ndarray:
    """A scalar spread over the threads of the fragment."""
    return value if np.ndim(value) else np.full(w.n, value)


def _immediate(op: Immediate, dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return np.bool_(op.value != 0)
    if op.float_bits is not None:
        bits = np.array(op.value, f"u{op.float_bits // 8}")
        if dtype.kind == "f":
            return bits.view(f"f{op.float_bits // 8}").astype(dtype)[()]
        if op.float_bits // 8 == dtype.itemsize:
            return bits.view(dtype)[()]
        return bits.view(np.float64).astype(np.float32).view(dtype)[()]
    mask = (1 << 8 * dtype.itemsize) - 1
    return np.array(op.value & mask, f"u{dtype.itemsize}").view(dtype)[()]


class Built(NamedTuple):
    """The step of an instruction, predicate included."""

    step: Step
    bound: bool  # it is for this launch alone
    results: tuple[int, ...]  # slots of the registers that it writes


def build(ins: Instruction, resolve: Callable[[str], int], machine: Any) -> Built:
    """PtxError for what is not supported."""
    parts = ins.parts
    for length in range(len(parts), 0, -1):
        if parts[:length] in _builders:
            builder, control = _builders[parts[:length]]
            form = Form(ins, resolve, machine)
            form.start(parts[:length])
            step = synchronized(_built(builder, form), parts)
            if not form.bound:
                form.release()
            if parts[0] != "bra":
                step = predicated(step, ins, control)
            return Built(step, form.bound, tuple(form.results))
    raise PtxError(f"unsupported instruction {ins.opcode}", ins.line)


def _built(builder: Builder, form: Form) -> Step:
    try:
        step = builder(form)
        form.done()
    except PtxError as error:
        raise error if error.line is not None else form.error(str(error)) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise form.error(f"malformed ({error})") from error
    return step
