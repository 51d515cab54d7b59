"""Moving data between registers, comparing, selecting and control flow: PTX ISA 9.7.6 to 9.7.13."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine import Diverge, Exit, Fragment, Step, Switch
from ..program import Group, Label, Pair, Symbol, Vector
from . import ieee, integer
from .registry import TYPES, Form, instruction


@instruction("mov")
def mov(form: Form) -> Step:
    """9.7.9: copies, addresses of variables, special registers; vectors packed and unpacked."""
    type = form.type()
    source, target = form.operand(1), form.operand(0)
    if isinstance(source, Vector):
        return _pack(form, type, source)
    if isinstance(target, Vector):
        return _unpack(form, type, target)
    get, put = form.get(1, type), form.set(0, type)
    return lambda w: put(w, get(w))


def _part_type(type: str, parts: int) -> str:
    return f"b{8 * np.dtype(TYPES[type]).itemsize // parts}"


def _pack(form: Form, type: str, source: Vector) -> Step:
    part = _part_type(type, len(source.items))
    gets, put = [form.get(item, part) for item in source.items], form.set(0, type)
    width = np.dtype(TYPES[part])
    out = np.dtype(TYPES[type])

    def run(w: Fragment) -> None:
        parts = np.empty((w.n, len(gets)), width)
        for i, get in enumerate(gets):
            parts[:, i] = get(w)
        put(w, parts.view(out)[:, 0])

    return run


def _unpack(form: Form, type: str, target: Vector) -> Step:
    part = _part_type(type, len(target.items))
    puts, get = [form.set(item, part) for item in target.items], form.get(1, type)
    width = np.dtype(TYPES[part])

    def run(w: Fragment) -> None:
        parts = np.array(np.broadcast_to(get(w), w.n)).view(width).reshape(w.n, -1)
        for i, put in enumerate(puts):
            put(w, parts[:, i])

    return run


@instruction("cvta")
def cvta(form: Form) -> Step:
    """9.7.9: between generic addresses and those of a state space."""
    spaces = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param")
    to, space, type = form.has("to"), form.one(*spaces), form.type("u64")
    window = form.machine.window(space)
    get, put = form.get(1, type), form.set(0, type)
    if window == 0:
        return lambda w: put(w, get(w))
    delta = np.uint64(window)
    if to:
        return lambda w: put(w, get(w) - delta)
    return lambda w: put(w, get(w) + delta)


@instruction("selp")
def selp(form: Form) -> Step:
    """9.7.6."""
    type = form.type()
    a, b, p, put = form.get(1, type), form.get(2, type), form.get(3, "pred"), form.set(0, type)
    return lambda w: put(w, np.where(p(w), a(w), b(w)))


@instruction("slct")
def slct(form: Form) -> Step:
    """9.7.6: a where c >= 0."""
    ftz, (type, by) = form.has("ftz"), form.types()
    if by not in ("s32", "f32"):
        raise form.error(f"selects by .s32 or .f32, not .{by}")
    a, b, c, put = form.get(1, type), form.get(2, type), form.get(3, by), form.set(0, type)
    flushed = ieee.flush if ftz and by == "f32" else (lambda value: value)
    return lambda w: put(w, np.where(flushed(c(w)) >= 0, a(w), b(w)))


_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


@instruction("setp", "set")
def setp(form: Form) -> Step:
    """9.7.6, 9.7.7: setp.cmp[.bool].type p[|q], a, b[, c]; set writes all bits or 1.0."""
    compare = form.one(
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "lo",
        "ls",
        "hi",
        "hs",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    )
    combine = form.one("and", "or", "xor")
    ftz, types = form.has("ftz"), form.types()
    type = types[-1] if types else ""
    is_float = type in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")
    if compare is None or type.endswith("x2"):
        raise form.error("comparison is not supported")
    if ftz and type != "f32":
        raise form.error(f".ftz is not supported with .{type}")
    a, b = _comparable(form, 1, type), _comparable(form, 2, type)
    c = form.get(3, "pred") if combine else None

    def test(w: Fragment) -> Any:
        x, y = a(w), b(w)
        if ftz:
            x, y = ieee.flush(x), ieee.flush(y)
        if not is_float:
            return integer.integer_compare(compare)(x, y)
        unordered = np.isnan(x) | np.isnan(y)
        if compare in ("num", "nan"):
            return unordered if compare == "nan" else ~unordered
        if compare in _UNORDERED:
            return integer.integer_compare(_UNORDERED[compare])(x, y) | unordered
        return integer.integer_compare(compare)(x, y) & ~unordered

    logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

    def results(w: Fragment) -> tuple[Any, Any]:
        p = test(w)
        if c is None or combine is None:
            return p, None
        other = c(w)
        return logic[combine](p, other), logic[combine](np.logical_not(p), other)

    target = form.operand(0)
    if form.parts[0] == "set":
        out = types[0]
        if len(types) != 2 or out not in ("u32", "s32", "f32"):
            raise form.error("expected two types, the first .u32, .s32 or .f32")
        put = form.set(0, out)
        one = np.float32(1) if out == "f32" else np.array(-1).astype(TYPES[out])
        return lambda w: put(w, np.where(results(w)[0], one, TYPES[out].type(0)))
    if len(types) != 1:
        raise form.error("expected one type")
    first = form.set(target.first if isinstance(target, Pair) else target, "pred")
    if not isinstance(target, Pair):
        return lambda w: first(w, results(w)[0])
    second = form.set(target.second, "pred")

    def both(w: Fragment) -> None:
        p, q = results(w)
        first(w, p)
        second(w, np.logical_not(p) if q is None else q)

    return both


def _comparable(form: Form, index: int, type: str) -> Any:
    if type not in ("f16", "bf16"):
        return form.get(index, type)
    get = form.get(index, "b16")
    return lambda w: ieee.split(np.broadcast_to(get(w), w.n), type)[:, 0]


@instruction("bra", control=True)
def bra(form: Form) -> Step:
    """9.7.12."""
    form.has("uni")
    label = form.operand(0)
    if not isinstance(label, Label):
        raise form.error("expected a label")
    predicate, negated, target = form.ins.predicate, form.ins.negated, label.target
    if predicate is None:
        return lambda w: target
    slot = predicate.slot

    def run(w: Fragment) -> Any:
        taken = w.R[slot][w.sel] ^ negated
        if taken.all():
            return target
        if not taken.any():
            return None
        return Diverge(((target, taken), (w.pc + 1, ~taken)))

    return run


@instruction("brx.idx", control=True)
def brx(form: Form) -> Step:
    """9.7.12."""
    form.has("uni")
    table = form.operand(1)
    name = table.name if isinstance(table, Symbol | Label) else ""
    targets = np.array([label.target for label in form.machine.function.tables[name]])
    get = form.get(0, "u32")

    def run(w: Fragment) -> Any:
        index = np.broadcast_to(get(w), w.n)
        if (index >= len(targets)).any():
            raise form.error(f"index {int(index.max())} of {len(targets)} targets")
        where = targets[index]
        ways = np.unique(where)
        if len(ways) == 1:
            return int(ways[0])
        return Diverge(tuple((int(way), where == way) for way in ways))

    return run


@instruction("exit", control=True)
def exit_(form: Form) -> Step:
    """9.7.12."""
    return lambda w: Exit()


@instruction("trap", control=True)
def trap(form: Form) -> Step:
    """9.7.19."""

    def run(w: Fragment) -> None:
        raise form.error("the kernel executed trap")

    return run


def leave(w: Fragment) -> Any:
    """Back to the caller, with the results; from the kernel itself, exit."""
    if not w.stack:
        return Exit()
    *stack, (frame, pc, results) = w.stack
    for here, there in results:
        frame.variable(here)[w.threads] = w.frame.variable(there)[w.threads]
    w.enter(frame, pc, tuple(stack))
    return Switch()


@instruction("ret", control=True)
def ret(form: Form) -> Step:
    """9.7.12."""
    form.has("uni")
    return leave


@instruction("call", control=True)
def call(form: Form) -> Step:
    """call (results), function, (arguments): 9.7.12. Direct calls only."""
    form.has("uni")
    operands = list(form.ins.operands)
    form.all_used()
    results = _names(operands.pop(0)) if isinstance(operands[0], Group) else ()
    target = operands.pop(0)
    arguments = _names(operands.pop(0)) if operands else ()
    if operands or not isinstance(target, Symbol):
        raise form.error("only direct calls, with their arguments in .param space, are supported")
    machine, name = form.machine, target.name

    def run(w: Fragment) -> Any:
        code = machine.code(name)
        wanted = code.function
        if (len(arguments), len(results)) != (len(wanted.parameters), len(wanted.results)):
            raise form.error(f"{name} takes {len(wanted.parameters)} arguments")
        callee = w.cta.frame(code, w.frame.depth + 1)
        for given, parameter in zip(arguments, wanted.parameters, strict=True):
            value = w.frame.variable(given)[w.threads]
            if value.shape[1] != parameter.nbytes:
                raise form.error(f"{given} has {value.shape[1]} bytes, not {parameter.nbytes}")
            callee.variable(parameter.name)[w.threads] = value
        back = tuple(zip(results, (p.name for p in wanted.results), strict=True))
        w.enter(callee, 0, (*w.stack, (w.frame, w.pc + 1, back)))
        return Switch()

    return run


def _names(group: Any) -> tuple[str, ...]:
    return tuple(op.name for op in group.items)


_FENCES = (
    "sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "gl", "proxy", "alias",
    "async", "async::generic", "mbarrier_init", "global", "shared::cta", "shared::cluster",
    "sync_restrict::shared::cta", "sync_restrict::shared::cluster",
)  # fmt: skip


@instruction("fence", "membar")
def fence(form: Form) -> Step:
    """9.7.13: nothing to do, since this machine is sequentially consistent."""
    while form.has(*_FENCES):
        pass
    return lambda w: None


@instruction("nop", "pmevent", "nanosleep")
def nothing(form: Form) -> Step:
    """9.7.19: no effect on values."""
    form.has("mask", "u32")
    form.all_used()
    return lambda w: None
