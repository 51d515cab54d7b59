"""A function ready to run: its steps, and what instructions ask of their surroundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import isa
from ..alarms.errors import Site
from ..clocks.scopes import strength
from ..isa.control import leave
from ..machine.ports import read_own, write_own
from ..machine.registers import guarded
from ..machine.state import CTA, Fragment
from ..ptx.program import Address, Function, Module, PtxError, Symbol
from .careful import careful, reads
from .launch import Launch
from .special_registers import special_register
from .spins import Spin, spin
from .state_spaces import SPACES, Part, Reader, Writer, by_window

__all__ = ["Code", "Program"]


_DEVICE_RUNTIME = ("cudaCDP", "__cudaCDP")  # functions of libcudadevrt


class Program:
    """A module bound to one launch; functions are compiled when they are first needed."""

    def __init__(self, module: Module, launch: Launch) -> None:
        self.module, self.launch = module, launch
        self._codes: dict[str, Code] = {}

    def code(self, name: str) -> Code:
        if name not in self._codes:
            if name not in self.module.functions:
                more = (
                    ": a kernel that launches kernels (dynamic parallelism) is not supported"
                    if name.startswith(_DEVICE_RUNTIME)
                    else ""
                )
                raise PtxError(f"function {name!r} is not in the module{more}")
            self._codes[name] = Code(self, self.module.functions[name])
        return self._codes[name]

    def codes(self) -> list[Code]:
        return list(self._codes.values())


class Code:
    """The steps of a function and how often each instruction ran (in threads)."""

    def __init__(self, program: Program, function: Function) -> None:
        self.program, self.function = program, function
        self.launch = program.launch
        self.counts = [0] * (len(function.instructions) + 1)
        self.held: set[int] = set()  # slots of registers that asynchronous instructions use
        built = [self._built(i) for i in range(len(function.instructions))]
        self._careful = [
            careful(each, ins, self) for each, ins in zip(built, function.instructions, strict=True)
        ]
        self.steps: list[Any] = [
            with_care if reads(ins) else each.step
            for each, with_care, ins in zip(
                built, self._careful, function.instructions, strict=True
            )
        ]
        if self.held:
            held = frozenset(self.held)
            for i, ins in enumerate(function.instructions):
                if ins.parts[0] != "wgmma":  # what lands may be undefined
                    kept = guarded(self._careful[i], ins, built[i].results, held)
                    if kept is not self._careful[i]:
                        self.steps[i] = self._careful[i] = kept
        self.steps.append(leave)  # who runs past the end returns
        self._results = [each.results for each in built]
        self._spins: dict[tuple[int, int], Spin | None] = {}
        self._sites: dict[tuple[int, tuple[int, int, int]], Site] = {}

    def _built(self, pc: int) -> isa.Built:
        """Made anew if it depends on the launch."""
        kept = self.function.built
        if pc in kept:
            return kept[pc]
        try:
            built = isa.build(self.function.instructions[pc], self.resolve, self)
        except PtxError as error:
            raise PtxError(error.message + self._source(pc), error.line, error.column) from None
        if not built.bound:
            kept[pc] = built
        return built

    def be_careful(self) -> None:
        """A register has undefined bits: from the next instruction on, masks are looked after."""
        self.steps[: len(self._careful)] = self._careful

    def reads(self, pc: int) -> bool:
        """Whether masks are kept of what the instruction there loads."""
        return reads(self.function.instructions[pc])

    def spin(self, first: int, last: int) -> Spin | None:
        """The loop between two instructions, if it may spin."""
        key = first, last
        if key not in self._spins:
            self._spins[key] = spin(self.function.instructions, self._results, first, last)
        return self._spins[key]

    # --- symbols ---

    def resolve(self, name: str) -> int:
        """Address of a variable in its state space (a CTA's shared base not yet added)."""
        launch = self.launch
        if name in launch.parameter_offsets and self.function.is_entry:
            return launch.parameters.base + launch.parameter_offsets[name]
        if name in launch.static_shared:
            return launch.static_shared[name]
        if name in launch.module_variables:
            return launch.module_variables[name].base
        if self.is_local(name):
            return 0
        raise PtxError(f"symbol {name!r} is not defined")

    def is_shared(self, name: str) -> bool:
        return name in self.launch.static_shared

    def is_local(self, name: str) -> bool:
        variable = self.function.variables.get(name)
        return variable is not None and variable.space == "local"

    def is_frame(self, name: str) -> bool:
        """Whether a symbol is a .param variable of a call rather than of the kernel."""
        if name in self.function.locals:
            return True
        own = (*self.function.parameters, *self.function.results)
        return not self.function.is_entry and any(p.name == name for p in own)

    def code(self, name: str) -> Code:
        return self.program.code(name)

    def location(self, pc: int) -> str:
        """Line, source line where there is one, and opcode."""
        if pc >= len(self.function.instructions):
            return f"the end of {self.function.name}"
        ins = self.function.instructions[pc]
        return f"line {ins.line}{self._source(pc)}: {ins.opcode}"

    def _source(self, pc: int) -> str:
        source = self.program.module.source(self.function.instructions[pc].source)
        return source and f", {source}"

    def site(self, pc: int, cta: CTA) -> Site:
        """The place of an instruction in a CTA, as alarms name it."""
        key = (pc, cta.index)
        if key not in self._sites:
            ins = self.function.instructions[pc]
            self._sites[key] = Site(ins.opcode, ins.line, f"{cta}", self._source(pc))
        return self._sites[key]

    # --- memory ---

    @staticmethod
    def window(space: str | None) -> int:
        """The generic address of address 0 of a state space."""
        return SPACES[space].window

    def reader(self, form: Any, space: str | None, operand: int) -> Reader:
        """The function by which an instruction loads from its operand, an address."""
        name = _symbol(form, operand)
        if name is not None and self.is_frame(name):
            return lambda w, where, size: read_own(w.frame.variable(name), w, where, size)
        return SPACES[space].reader(self.launch, strength(form.parts))

    def writer(self, form: Any, space: str | None, operand: int) -> Writer:
        """The function by which an instruction stores to its operand, an address."""
        name = _symbol(form, operand)
        if name is not None and self.is_frame(name):
            return lambda w, where, values: write_own(w.frame.variable(name), w, where, values)
        return SPACES[space].writer(self.launch, strength(form.parts))

    def names_frame(self, form: Any, operand: int) -> bool:
        """Whether an address is that of a .param variable of a call."""
        name = _symbol(form, operand)
        return name is not None and self.is_frame(name)

    @staticmethod
    def spaces(
        w: Fragment, space: str | None, where: np.ndarray
    ) -> list[tuple[Any, np.ndarray, Any, int]]:
        """(threads, addresses within the window, which of all, window), for each state space."""
        if space is not None:
            return [(w, where, slice(None), Code.window(space))]
        return [
            (Part(w, chosen), where[chosen] - np.uint64(window), chosen, window)
            for chosen, window in by_window(where)
        ]

    # --- special registers ---

    def special(self, name: str, dtype: np.dtype, form: Any) -> Callable[[Fragment], Any]:
        """The function that reads a special register."""
        read = special_register(self.launch, name, dtype)
        if read is None:
            raise form.error(f"special register {name} is not supported")
        return read


def _symbol(form: Any, operand: int) -> str | None:
    op = form.operand(operand)
    return op.base.name if isinstance(op, Address) and isinstance(op.base, Symbol) else None
