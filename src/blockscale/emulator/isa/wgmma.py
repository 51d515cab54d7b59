"""wgmma: products of a warpgroup into its registers. PTX ISA 9.7.15.

A warpgroup is four warps, the first a multiple of four. Its products run in the order of their
issue, and read registers and shared memory, and write registers, when they complete.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..machine.engine import Work
from ..machine.matrix_operands import (
    Operand,
    container_bits,
    from_shared,
    negated,
    undefined_products,
)
from ..machine.registers import Multiplying
from ..machine.state import CTA, Fragment, Frame, Split, Step, Wait
from ..machine.undefined import Undefined, fill, gathered
from ..ptx.program import Immediate, PtxError, Register, Vector, type_bytes
from ..tensorcore.arithmetic import Instruction, multiply, multiply_integers
from ..tensorcore.descriptors import SharedDescriptor, wgmma_descriptor
from ..tensorcore.fragments import accumulator_fragment, operand_fragment
from .copies import wait_for
from .registry import Form, instruction

_GROUP = 128  # threads of a warpgroup
_M = 64
_FP8, _INTEGERS = ("e4m3", "e5m2"), ("s8", "u8")
#: Types of A and B that go together, K, and the types of D; 9.7.15.5.2.
_TYPES: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {
    ("tf32", "tf32"): (8, ("f32",)),
    ("bf16", "bf16"): (16, ("f32",)),
    ("f16", "f16"): (16, ("f32", "f16")),
    **{(a, b): (32, ("f32", "f16")) for a in _FP8 for b in _FP8},
    **{(a, b): (32, ("s32",)) for a in _INTEGERS for b in _INTEGERS},
}
_NAMES = ("f32", "f16", "bf16", "tf32", "s32", *_FP8, *_INTEGERS)
_RESULTS: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "s32": np.dtype(np.int32)
}  # fmt: skip
_MATRICES_WITH_TRANSPOSE = ("f16", "bf16")


# --- warpgroups -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Warpgroup:
    """What a warpgroup has in flight: groups of products, the oldest first."""

    fenced: bool = False  # it has executed a wgmma.fence
    open: list[Multiplying] = field(default_factory=list)
    closed: deque[list[Multiplying]] = field(default_factory=deque)

    def flying(self) -> list[Multiplying]:
        return [flight for group in (*self.closed, self.open) for flight in group]


def _warpgroup(w: Fragment) -> Warpgroup:
    everywhere: dict[int, Warpgroup] = w.cta.groups.setdefault("wgmma", {})
    return everywhere.setdefault(int(w.threads[0]) // _GROUP, Warpgroup())


def _for_warpgroups(form: Form, run: Callable[[Fragment], Wait | None]) -> Step:
    """``run`` for each warpgroup in turn, once all of its threads are at the instruction."""
    form.needs("sm_90a")
    if not form.has("sync") or not form.has("aligned"):
        raise form.error("expected .sync.aligned")

    def step(w: Fragment) -> Any:
        groups = w.threads // _GROUP
        whole = _present(w.cta, [w.threads])[groups]
        if not whole.all():
            return Split(whole) if whole.any() else _others(w)
        waits: dict[int, Wait] = {}
        for group in np.unique(groups):
            mine = groups == group
            wait = run(w if mine.all() else w.part(mine, w.pc))
            if wait is not None:
                waits[int(group)] = wait
        if not waits:
            return None
        go = ~np.isin(groups, list(waits))
        if go.any():
            return Split(go)
        first = next(iter(waits.values()))
        return Wait(lambda: any(wait.ready() for wait in waits.values()), first.why)

    return step


def _present(cta: CTA, here: list[np.ndarray]) -> np.ndarray:
    """Which warpgroups of a CTA have all of their threads ``here``."""
    present = np.zeros(-(-cta.size // _GROUP) * _GROUP, bool)
    for threads in here:
        present[threads] = True
    return np.asarray(present.reshape(-1, _GROUP).all(axis=1))


def _others(w: Fragment) -> Wait:
    """A wait until the rest of one of its warpgroups is here."""
    groups = np.unique(w.threads // _GROUP)

    def here() -> list[np.ndarray]:
        return [w.threads, *(f.threads for f in w.cta.fragments if f is not w and f.same_place(w))]

    def why() -> str:
        group = int(groups[0])
        threads = np.arange(group * _GROUP, (group + 1) * _GROUP)
        missing = np.setdiff1d(threads, np.concatenate(here()))
        warps = sorted({int(thread) // 32 for thread in missing})
        text = f"all of warpgroup {group}: warp {', '.join(map(str, warps))} not here"
        gone = [warp for warp in warps if _gone(w.cta, warp)]
        return text + (f"; warp {', '.join(map(str, gone))} never comes" if gone else "")

    return Wait(lambda: bool(_present(w.cta, here())[groups].any()), why)


def _gone(cta: CTA, warp: int) -> bool:
    """Whether a warp has exited, or the CTA never had it."""
    return warp >= cta.warps or bool(cta.exited[32 * warp : 32 * warp + 32].any())


# --- order ----------------------------------------------------------------------------------------


@instruction("wgmma.fence", control=True)
def fence(form: Form) -> Step:
    """9.7.15.7.1: what was written to registers before is seen by products issued after."""

    def run(w: Fragment) -> None:
        _warpgroup(w).fenced = True
        for frame in (w.frame, *(caller for caller, _, _ in w.stack)):
            for written in frame.written.values():
                written[w.sel] = False

    return _for_warpgroups(form, run)


@instruction("wgmma.commit_group", control=True)
def commit_group(form: Form) -> Step:
    """9.7.15.7.2."""

    def run(w: Fragment) -> None:
        mine = _warpgroup(w)
        mine.closed.append(mine.open)
        mine.open = []

    return _for_warpgroups(form, run)


@instruction("wgmma.wait_group", control=True)
def wait_group(form: Form) -> Step:
    """9.7.15.7.3: wait until at most n groups are pending."""
    count = form.operand(0)
    if not isinstance(count, Immediate) or count.value < 0:
        raise form.error("expected a number of groups, a constant")
    keep = count.value

    def run(w: Fragment) -> Wait | None:
        mine = _warpgroup(w)
        groups = list(mine.closed)[: max(len(mine.closed) - keep, 0)]
        old = [flight for group in groups for flight in group]
        wait = wait_for(w, [flight.work for flight in old], False, form.ins.opcode)
        if wait is None:
            for flight in old:
                flight.land()
            while len(mine.closed) > keep:
                mine.closed.popleft()
        return wait

    return _for_warpgroups(form, run)


# --- products -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Multiplication:
    """One wgmma.mma_async of a warpgroup, with everything it was given."""

    a: Operand
    b: Operand
    d_type: str
    a_from: SharedDescriptor | tuple[int, ...]  # slots of registers
    b_from: SharedDescriptor
    d: tuple[int, ...]  # slots of registers
    accumulate: bool
    saturate: bool

    def run(self, work: Work, cta: CTA, frame: Frame, threads: slice) -> None:
        if isinstance(self.a_from, tuple):
            bits = container_bits(self.a.type)
            words = _words(frame, self.a_from, threads)
            codes = np.empty((_M, self.a.k), f"u{bits // 8}")
            codes[operand_fragment(bits)] = words.view(codes.dtype)
            found = gathered(frame, self.a_from, threads)
            if found is not None:
                unsure = np.zeros_like(codes)
                unsure[operand_fragment(bits)] = found.bits.view(codes.dtype)
                found = Undefined(unsure, found.origin)
            a = negated(codes, self.a), found
        else:
            a = from_shared(work, cta, self.a_from, self.a)
        b = from_shared(work, cta, self.b_from, self.b)
        dtype = _RESULTS[self.d_type]
        fragment = accumulator_fragment(self.b.rows)
        c = before = None
        if self.accumulate:
            before = gathered(frame, self.d, threads)
            c = np.empty((_M, self.b.rows), dtype)
            c[fragment] = _words(frame, self.d, threads).view(dtype)
        d = self._sum(a[0], b[0], c, cta)
        words = np.ascontiguousarray(d[fragment]).view(np.uint32)
        unsure_d = next(filter(None, (a[1], b[1], before)), None)
        if unsure_d is not None:
            bad = undefined_products(a, b, (self.a.type, self.b.type))
            ones = np.where(bad, np.array(-1, f"i{dtype.itemsize}"), 0).astype(f"i{dtype.itemsize}")
            bits_d = np.ascontiguousarray(ones[fragment]).view(np.uint32)
            bits_d = bits_d if before is None else bits_d | before.bits
            unsure_d = Undefined(bits_d, unsure_d.origin)
        fill(frame, self.d, threads, words, unsure_d)
        if cta.launch.watch is not None:
            cta.launch.watch.multiplied(work.what, 1, 2 * _M * self.b.rows * self.a.k)

    def _sum(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, cta: CTA) -> np.ndarray:
        if self.d_type != "s32":
            types = Instruction("wgmma", self.a.type, self.b.type, self.d_type)
            return multiply(types, a, b, c, exact=cta.launch.settings.exact)
        signs = {"s8": np.int8, "u8": np.uint8}
        signed_a, signed_b = a.view(signs[self.a.type]), b.view(signs[self.b.type])
        before = np.int32(0) if c is None else c
        return multiply_integers(signed_a, signed_b, before, saturate=self.saturate)


def _words(frame: Frame, slots: tuple[int, ...], threads: slice) -> np.ndarray:
    """(threads, registers) words."""
    return np.stack([frame.registers[slot].view(np.uint32)[threads] for slot in slots], axis=1)


@instruction("wgmma.mma_async", control=True)
def mma_async(form: Form) -> Step:
    """{d}, a-desc or {a}, b-desc, scale-d; then, but for integers, signs of A and B; then for
    16-bit types which of the matrices in shared memory are MN-major. 9.7.15.5.2; sparse and
    single-bit forms are not supported."""
    if "sp" in form.parts or "b1" in form.parts:
        raise form.error("sparse and single-bit products are not supported")
    n, d_type, a_type, b_type = _shape(form)
    saturate = form.has("satfinite")
    if saturate and d_type != "s32":
        raise form.error(".satfinite goes with .s32")
    k = _TYPES[a_type, b_type][0]
    d = form.asynchronous(words_of(form, 0, n * _RESULTS[d_type].itemsize // 8))
    from_registers = isinstance(form.operand(1), Vector)
    registers = form.asynchronous(words_of(form, 1, 4)) if from_registers else ()
    a_of = None if from_registers else form.get(1, "b64")
    b_of, scale_d = form.get(2, "b64"), form.get(3, "pred")
    sign_a = sign_b = 1
    if d_type != "s32":
        sign_a, sign_b = (_constant(form, at, "a sign", (1, -1)) for at in (4, 5))
    major_a = major_b = "k"
    if a_type in _MATRICES_WITH_TRANSPOSE:
        majors = [
            "mn" if _constant(form, at, "a transposition", (0, 1)) else "k"
            for at in range(6, 7 if from_registers else 8)
        ]
        major_b = majors[-1]
        major_a = "k" if from_registers else majors[0]
    a = Operand(_M, k, a_type, major_a, False, sign_a < 0)
    b = Operand(n, k, b_type, major_b, False, sign_b < 0)
    shape = f"m64n{n}k{k}"

    def run(w: Fragment) -> None:
        a_from = registers if a_of is None else _described(form, "A", a_of(w))
        todo = Multiplication(
            a, b, d_type, a_from, _described(form, "B", b_of(w)), d,
            bool(_uniform(form, "scale-d", scale_d(w))), saturate,
        )  # fmt: skip
        cta, cluster, frame, mine = w.cta, w.cta.cluster, w.frame, _warpgroup(w)
        if "registers" in cta.launch.alarms.checks:
            try:
                _check(w, form, mine, registers, d, f"{shape} {d_type}")
            except PtxError as error:
                cta.launch.alarms.tell("registers", error, w.site())
        threads = slice(int(w.threads[0]), int(w.threads[-1]) + 1)
        pipe = ("wgmma", cta.rank, int(w.threads[0]) // _GROUP)
        actor = cluster.follow(w, pipe)
        work = Work(
            w, lambda work: todo.run(work, cta, frame, threads), pipe=pipe, needs=(cta,),
            actor=actor,
        )  # fmt: skip
        mine.open.append(Multiplying(w, registers, d, f"{shape} {d_type}", work))
        cluster.engine.submit(work)

    return _for_warpgroups(form, run)


def _shape(form: Form) -> tuple[int, str, str, str]:
    """N and the types of D, A and B."""
    shape = next((part for part in form.left if part.startswith("m64n")), "")
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    types = form.several(*_NAMES)
    if match is None or len(types) != 3 or not form.has(shape):
        raise form.error("expected a shape .m64nNkK and the types of D, A and B")
    n, k = int(match[1]), int(match[2])
    d_type, a_type, b_type = types
    known = _TYPES.get((a_type, b_type))
    if known is None or d_type not in known[1]:
        raise form.error(f"there is no .{'.'.join(types)}")
    if k != known[0]:
        raise form.error(f"K is {k}; .{a_type}.{b_type} takes {known[0]}")
    if n % 8 or not 8 <= n <= 256:
        raise form.error(f"N is {n}; allowed are multiples of 8 from 8 to 256")
    if d_type == "s32" and n > 32 and n % 16:
        raise form.error(f"N is {n}; allowed with integers above 32 are multiples of 16")
    return n, d_type, a_type, b_type


def words_of(form: Form, operand: int, count: int, size: int = 4) -> tuple[Any, ...]:
    """The registers of an operand: so many, of ``size`` bytes."""
    items = form.items(operand)
    if len(items) != count:
        raise form.error(f"operand {operand} has {len(items)} registers, {count} are expected")
    for item in items:
        if isinstance(item, Register) and (item.type == "pred" or type_bytes(item.type) != size):
            raise form.error(f"register {item.name} has type .{item.type}, not {8 * size} bits")
    return items


def _constant(form: Form, operand: int, what: str, allowed: tuple[int, ...]) -> int:
    op = form.operand(operand)
    if not isinstance(op, Immediate) or op.float_bits or op.value not in allowed:
        given = op.value if isinstance(op, Immediate) else op
        raise form.error(
            f"operand {operand}, {what}, is {given}; allowed are {' and '.join(map(str, allowed))}"
        )
    return op.value


def _uniform(form: Form, what: str, value: Any) -> int:
    values = np.asarray(value)
    if values.ndim and (values != values.flat[0]).any():
        raise form.error(f"{what} differs between threads of a warpgroup")
    return int(values.flat[0])


def _described(form: Form, name: str, value: Any) -> SharedDescriptor:
    bits = _uniform(form, f"the descriptor of {name}", value)
    try:
        return wgmma_descriptor(bits)
    except ValueError as error:
        raise form.error(f"the descriptor of {name}, {bits:#x}: {error}") from None


def _check(
    w: Fragment, form: Form, mine: Warpgroup, a: tuple[int, ...], d: tuple[int, ...], shape: str
) -> None:
    """PtxError unless fences and waits order the product's use of its registers."""
    name = w.frame.function.registers
    if not mine.fenced:
        raise form.error("wgmma.fence is missing: it must come before the first wgmma.mma_async")
    for slot in (*d, *a):
        written = w.frame.written.get(slot)
        if written is not None and written[w.threads].any():
            raise form.error(
                f"wgmma.fence is missing: register {name[slot].name} was written after the last one"
            )
    for flight in mine.flying():
        if flight.frame is not w.frame:
            continue
        clash = set(a) & set(flight.writes)
        if (flight.writes, flight.shape) != (d, shape):
            clash |= set(d) & {*flight.writes, *flight.reads}
        else:
            clash |= set(d) & set(flight.reads)
        if clash:
            raise PtxError(
                f"{form.ins.opcode} uses register {name[min(clash)].name}, which the "
                f"{flight.work.what} in line {flight.work.line} still uses, and is not of its "
                "shape on the same accumulator: wgmma.commit_group and wgmma.wait_group must come "
                "between"
            )
