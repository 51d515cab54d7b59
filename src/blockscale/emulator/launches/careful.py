"""Instructions in frames that have registers with undefined bits.

An instruction that moves bits is built a second time, for masks: its data comes from the masks of
registers or of memory and goes to masks. Bitwise functions are exact in each bit. All else that
computes gives values that are undefined as a whole where an operand is; what acts uses operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import isa
from ..isa.meeting import ACROSS, GATHER, given_undefined
from ..machine.ports import STORED, mask_local, mask_shared, masks_of_local, masks_of_shared
from ..machine.registers import registers_of
from ..machine.state import Event, Fragment, Step
from ..machine.undefined import Blank, Origin, Undefined, cover, mark, masks, used
from ..memory.buffers import LOCAL_WINDOW, SHARED_WINDOW
from ..ptx.program import Address, Immediate, Instruction, Not, Operand, Pair, Register, Vector

if TYPE_CHECKING:
    from ..isa import Built
    from .code import Code

__all__ = ["careful", "only_gives", "reads"]

#: Which operands are moved; those not named are control, and undefined they make all of it so.
_MOVED = {
    "mov": (1,), "selp": (1, 2), "shfl": (1,), "prmt": (1, 2), "shl": (1,), "shr": (1,),
    "shf": (1, 2), "bfe": (1,), "bfi": (1, 2), "brev": (1,), "movmatrix": (1,), "ld": (),
    "ldu": (), "ldmatrix": (), "st": (1,), "stmatrix": (1,), "wmma.load": (), "wmma.store": (1,),
}  # fmt: skip
_LOADS, _STORES = ("ld", "ldu", "ldmatrix", "wmma.load"), ("st", "stmatrix", "wmma.store")
_BITWISE = {"and": 0xC0, "or": 0xFC, "xor": 0x3C, "not": 0x0F}  # as tables of lop3
#: What does more than give a value, as all that gives none; operands that it only carries, which
#: are Vectors, may be undefined.
_ACTS = (
    "alloca", "atom", "bar", "barrier", "clusterlaunchcontrol", "elect", "mbarrier", "mma",
    "tcgen05", "wgmma", "wmma.mma",
)  # fmt: skip
_CARRY = (
    ("tcgen05", "ld"), ("tcgen05", "st"), ("wgmma", "mma_async"), ("mma", "sync"), ("wmma", "mma"),
)  # fmt: skip
_PLAIN_SPACES = {"global", "const", "param", "param::entry", "param::func"}
_INTEGERS = frozenset(f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64))


def _family(ins: Instruction) -> str:
    return ".".join(ins.parts[: 2 if ins.parts[0] == "wmma" else 1])


def reads(ins: Instruction) -> bool:
    """Whether masks are kept of what the instruction loads."""
    return _family(ins) in _LOADS and _PLAIN_SPACES.isdisjoint(ins.parts)


def only_gives(ins: Instruction, results: Sequence[int]) -> bool:
    """Whether an instruction with such results does no more than give them, whoever is there."""
    return bool(results) and _family(ins) not in (*_ACTS, *GATHER)


def _moved(ins: Instruction) -> tuple[int, ...] | None:
    parts = ins.parts
    if parts[:2] == ("st", "async"):
        return None
    if parts[0] == "cvt" and len(parts) == 3 and _INTEGERS.issuperset(parts[1:]):
        return (1,)
    return _MOVED.get(_family(ins))


def careful(built: Built, ins: Instruction, code: Code) -> Step:
    """The step of an instruction, with what it does to masks."""
    rule: _Rule | None = None
    loads, step = reads(ins), built.step
    gathers = ins.parts[0] in GATHER

    def run(w: Fragment) -> Any:
        nonlocal rule
        if not w.frame.undefined and not (gathers and w.cta.meetings):
            if not loads:
                return step(w)
            try:
                return step(w)
            except Blank:
                pass
        if rule is None:
            rule = _Rule(built, ins, code)
        return rule.run(w)

    return run


class _Rule:
    """Runs one instruction on masks: moves them as its data, and looks at those of what it uses."""

    def __init__(self, built: Built, ins: Instruction, code: Code) -> None:
        self.step, self.ins, self.code = built.step, ins, code
        self.loads, self.stores = reads(ins), _family(ins) in _STORES
        moved = _moved(ins)
        self.acts = _family(ins) in _ACTS or (not built.results and moved is None)
        operands = ins.operands
        carries = ins.parts[:2] in _CARRY
        gives = bool(built.results) and not carries
        self.results = [] if carries else list(built.results)
        sources = operands[1 if gives else 0 :]
        carried = [o for o in sources if _carried(ins, o)]
        self.addresses = [s for o in sources if isinstance(o, Address) for s in _slots(o)]
        others = [o for o in sources if not isinstance(o, Address) and o not in carried]
        data = [operands[i] for i in moved or () if i < len(operands)]
        self.data = [s for o in data for s in _slots(o)]
        self.control = [s for o in others if o not in data for s in _slots(o)]
        if ins.takes_carry and ins.carry is not None:
            self.control.append(ins.carry.slot)
        self.twin: Step | None = None
        if moved is not None:
            self.twin = _twin(ins, moved, gives, code)
        guard = [] if ins.predicate is None else [ins.predicate.slot]
        self.touched = {*self.results, *self.addresses, *self.data, *self.control, *guard}

    def run(self, w: Fragment) -> Any:
        frame, ins = w.frame, self.ins
        given = given_undefined(w) if ins.parts[0] in GATHER else None
        if given is None and not self.loads and frame.undefined.keys().isdisjoint(self.touched):
            return self.step(w)
        behind, every = masks(frame), w.threads
        threads, unsure = every, every[:0]
        if ins.predicate is not None:
            slot = ins.predicate.slot
            threads = every[frame.registers[slot][w.sel] ^ ins.negated]
            unsure = every[frame.registers[behind + slot][w.sel]]
            if len(unsure) and (self.acts or self.stores):
                how = "branches as {} says" if ins.parts[0] == "bra" else "is guarded by {}"
                self._used(w, how, slot)
        for slots, how in ((self.addresses, "uses {} as an address"), (self.control, "uses {}")):
            for slot in slots:
                if (self.acts or slots is self.addresses) and self._has(w, slot, threads).any():
                    self._used(w, how, slot)
        if self.acts or self.stores:
            result = self.step(w)
            if self.stores and self.twin is not None:
                self._move(w, self.data)
            elif not isinstance(result, Event):
                self._commit(w, threads, threads[:0], None)
            return result
        before = w.frame.origin = self._origin(w, (*self.data, *self.control))
        elsewhere = every[:0]
        if given is not None:
            before, elsewhere = before or given[1], every[given[0]]
        return self._give(w, threads, unsure, before, elsewhere)

    def _give(
        self, w: Fragment, threads: np.ndarray, unsure: np.ndarray, from_: Any,
        elsewhere: np.ndarray,
    ) -> Any:  # fmt: skip
        """Values, and masks of them. ``elsewhere``: threads that meet lanes at another place, which
        give undefined bits."""
        frame = w.frame
        found: list[tuple[np.ndarray, np.ndarray]] = []
        whole = threads[self._any(w, self.control if self.twin else self._sources(), threads)]
        if self.loads:
            try:
                result = self.step(w)
            except Blank:
                assert self.twin is not None
                self.twin(w)
                frame.knowing = True
                try:
                    result = self.step(w)
                finally:
                    frame.knowing = False
                for slot in self.results:
                    _cover(frame, slot, unsure)
                mark(frame, self.results, frame.origin)
                return result
            self._commit(w, threads, unsure, frame.undefined.get(self._guard()))
            return result
        if self.twin is not None:
            if isinstance(self.twin(w), Event):
                return self.step(w)
            result = self.step(w)
            for slot in self.results:
                _cover(frame, slot, np.concatenate([whole, unsure]))
            mark(frame, self.results, from_ or frame.undefined.get(self._guard()))
            return result
        table = self._table()
        if table is not None:
            found = [self._bitwise(w, threads, *table)]
        elif self.ins.parts[0] in ACROSS and len(whole) + len(elsewhere):
            groups = self._groups(w, threads)
            whole = np.union1d(whole, elsewhere)
            whole = threads[np.isin(groups, groups[np.isin(threads, whole)])]
        result = self.step(w)
        if isinstance(result, Event):
            return result
        if table is not None:
            whole = whole[:0]
        self._commit(w, threads, np.concatenate([whole, unsure]),
                     from_ or frame.undefined.get(self._guard()))  # fmt: skip
        for at, bits in found:
            mask = frame.registers[masks(frame) + self.results[0]]
            mask[at] |= bits.astype(mask.dtype)
            mark(frame, self.results, from_ or frame.undefined.get(self._guard()))
        return result

    # --- parts ---

    def _sources(self) -> list[int]:
        return [*self.data, *self.control]

    def _groups(self, w: Fragment, threads: np.ndarray) -> np.ndarray:
        """The same for threads of one warp and mask, which is the last operand."""
        mask = self.ins.operands[-1]
        lanes: Any = 0
        if isinstance(mask, Register):
            lanes = w.frame.registers[mask.slot][threads]
        return np.asarray(threads // 32 << 32 | lanes)

    def _guard(self) -> int:
        return -1 if self.ins.predicate is None else self.ins.predicate.slot

    def _has(self, w: Fragment, slot: int, threads: np.ndarray) -> np.ndarray:
        if slot not in w.frame.undefined:
            return np.zeros(len(threads), bool)
        mask = w.frame.registers[masks(w.frame) + slot][threads]
        return np.asarray(mask.view(np.uint8).reshape(len(threads), mask.itemsize).any(axis=1))

    def _any(self, w: Fragment, slots: list[int], threads: np.ndarray) -> np.ndarray:
        out = np.zeros(len(threads), bool)
        for slot in slots:
            out |= self._has(w, slot, threads)
        return out

    def _origin(self, w: Fragment, slots: tuple[int, ...]) -> Origin | None:
        return next((w.frame.undefined[s] for s in slots if s in w.frame.undefined), None)

    def _used(self, w: Fragment, how: str, slot: int) -> None:
        used(w.cta.launch.alarms, w.site(), how, w.frame.undefined[slot])

    def _move(self, w: Fragment, slots: list[int]) -> None:
        """Masks of what was stored."""
        origin = self._origin(w, tuple(slots))
        if origin is not None and self.twin is not None:
            w.frame.origin = origin
            self.twin(w)

    def _commit(self, w: Fragment, threads: np.ndarray, whole: np.ndarray, origin: Any) -> None:
        """The results of these threads are defined, but for those that are undefined as a whole."""
        for slot in self.results:
            cover(w.frame, slot, threads, False)
            _cover(w.frame, slot, whole)
        mark(w.frame, self.results, origin)

    def _table(self) -> tuple[int, list[Operand]] | None:
        parts, operands = self.ins.parts, self.ins.operands
        if parts[0] == "lop3" and isinstance(operands[4], Immediate):
            return operands[4].value, list(operands[1:4])
        if parts[0] in _BITWISE:
            return _BITWISE[parts[0]], list(operands[1:3])
        return None

    def _bitwise(
        self, w: Fragment, threads: np.ndarray, table: int, operands: list[Operand]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bits that are not the same whatever the undefined bits are."""
        frame, behind = w.frame, masks(w.frame)
        dtype = frame.registers[self.results[0]].dtype
        kept = np.dtype(np.uint8) if dtype == np.bool_ else dtype
        ways = []
        for op in (*operands, *[Immediate(0)] * (3 - len(operands))):
            op = op.register if isinstance(op, Not) else op
            if isinstance(op, Register):
                value = frame.registers[op.slot][threads].astype(kept)
                mask = frame.registers[behind + op.slot][threads].astype(kept)
                ways.append((value & ~mask, value | mask))
            else:
                bits = op.value if isinstance(op, Immediate) else 0
                value = np.full(len(threads), bits & (1 << 8 * kept.itemsize) - 1, kept)
                ways.append((value, value))
        if len(operands) < 3 and self.ins.parts[0] in _BITWISE and len(operands) == 1:
            return threads, (ways[0][0] ^ ways[0][1]).astype(dtype)
        lows: Any = ~kept.type(0)
        highs: Any = kept.type(0)
        for which in range(8):
            a, b, c = (ways[i][which >> i & 1] for i in range(3))
            out = np.zeros(len(threads), kept)
            for row in range(8):
                if table >> row & 1:
                    term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                    out |= term
            lows, highs = lows & out, highs | out
        return threads, (lows ^ highs).astype(dtype)


def _cover(frame: Any, slot: int, threads: np.ndarray) -> None:
    if len(threads):
        cover(frame, slot, threads, True)


def _carried(ins: Instruction, op: Operand) -> bool:
    """Whether the instruction itself looks after what is undefined of an operand."""
    return ins.parts[:2] in _CARRY and (isinstance(op, Vector) or ins.parts[0] == "mma")


def _slots(op: Operand) -> list[int]:
    return [register.slot for register in registers_of(op)]


# --- for masks ------------------------------------------------------------------------------------


def _twin(ins: Instruction, moved: tuple[int, ...], gives: bool, code: Code) -> Step:
    behind = len(code.function.registers)

    def masked(op: Operand) -> Operand:
        if isinstance(op, Register):
            return Register(op.name, op.type, op.slot + behind)
        if isinstance(op, Not):
            return masked(op.register)
        if isinstance(op, Vector):
            return Vector(tuple(masked(item) for item in op.items))
        if isinstance(op, Pair):
            return masked(op.first)
        return None if op is None else Immediate(0)

    operands = tuple(
        masked(op) if i in moved or (gives and i == 0) else op for i, op in enumerate(ins.operands)
    )
    return isa.build(replace(ins, operands=operands), code.resolve, _Masks(code))[0]


class _Masks:
    """The machine of instructions built for masks: its memories are those of masks."""

    of_masks = True

    def __init__(self, code: Code) -> None:
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)

    def reader(
        self, form: Any, space: str | None, operand: int
    ) -> Callable[[Fragment, np.ndarray, int], np.ndarray]:
        def read(w: Fragment, where: np.ndarray, size: int) -> np.ndarray:
            out = np.zeros((len(where), size), np.uint8)
            for part, at, chosen, kind in self._code.spaces(w, space, where):
                if kind in (SHARED_WINDOW, LOCAL_WINDOW):
                    masks_of = masks_of_shared if kind == SHARED_WINDOW else masks_of_local
                    if kind == LOCAL_WINDOW and w.cta.local_blanks is None:
                        continue
                    found = masks_of(part, at, size)
                    out[chosen] = found.bits
                    if found.bits.any():
                        w.frame.origin = found.origin
            return out

        return read

    def writer(
        self, form: Any, space: str | None, operand: int
    ) -> Callable[[Fragment, np.ndarray, np.ndarray], None]:
        passed = self._code.names_frame(form, operand)

        def write(w: Fragment, where: np.ndarray, bits: np.ndarray) -> None:
            origin = w.frame.origin
            assert origin is not None
            if passed:
                if bits.any():
                    used(w.cta.launch.alarms, w.site(), "passes {} to a function", origin)
                return
            for part, at, chosen, kind in self._code.spaces(w, space, where):
                found = Undefined(bits[chosen], origin)
                if not found.bits.any():
                    continue
                if kind == SHARED_WINDOW:
                    mask_shared(part, at, found)
                elif kind == LOCAL_WINDOW:
                    mask_local(part, at, found)
                else:
                    used(w.cta.launch.alarms, w.site(), STORED, origin)

        return write
