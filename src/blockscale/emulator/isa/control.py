"""Moving data between registers, selecting and control flow: PTX ISA 9.7.6 to 9.7.13."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ieee
from ..machine.state import Diverge, Exit, Fragment, Split, Step, Switch, Wait
from ..ptx.program import Group, Label, Symbol, Vector
from .registry import TYPES, Form, instruction
from .system_calls import system_call


@instruction("mov")
def mov(form: Form) -> Step:
    """9.7.9: copies, addresses of variables, special registers; vectors packed and unpacked, or
    copied item by item (.v2, .v4)."""
    count = int((form.one("v2", "v4") or "v1")[1:])
    type = form.type()
    source, target = form.operand(1), form.operand(0)
    if count > 1:
        return _copy_items(form, type, count)
    if isinstance(source, Vector):
        return _pack(form, type, source)
    if isinstance(target, Vector):
        return _unpack(form, type, target)
    put = form.set(0, type)
    if isinstance(source, Symbol) and source.name in form.machine.program.module.functions:
        if type not in ("u64", "s64", "b64") or source.offset:
            raise form.error(f"the address of the function {source.name} has 64 bits")
        address = np.uint64(form.machine.program.module.addresses[source.name])
        return lambda w: put(w, address)
    get = form.get(1, type)
    return lambda w: put(w, get(w))


def _part_type(type: str, parts: int) -> str:
    return f"b{8 * np.dtype(TYPES[type]).itemsize // parts}"


def _copy_items(form: Form, type: str, count: int) -> Step:
    sources, targets = form.items(1), form.items(0)
    if not len(sources) == len(targets) == count:
        raise form.error(f"copies {count} items, from {len(sources)} to {len(targets)}")
    gets = [form.get(item, type) for item in sources]
    puts = [form.set(item, type) for item in targets]

    def run(w: Fragment) -> None:
        values = [np.array(get(w)) for get in gets]
        for put, value in zip(puts, values, strict=True):
            put(w, value)

    return run


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
        count = np.count_nonzero(taken)
        if count == w.n:
            return target
        if not count:
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


def leave(w: Fragment) -> Any:
    """Back to the caller, with the results; from the kernel itself, exit."""
    if not w.stack:
        return Exit()
    *stack, (frame, pc, results) = w.stack
    for here, there in results:
        frame.variable(here)[w.threads] = w.frame.variable(there)[w.threads]
    w.cta.stack.leave(w.frame, w.threads)
    w.enter(frame, pc, tuple(stack))
    return Switch()


@instruction("ret", control=True)
def ret(form: Form) -> Step:
    """9.7.12."""
    form.has("uni")
    return leave


@instruction("call", control=True)
def call(form: Form) -> Step:
    """call (results), function, (arguments)[, prototype or targets]: 9.7.12.5. Arguments and
    results are variables in .param space; an indirect call goes where a register says, and its
    prototype is that of the function found there."""
    form.has("uni")
    operands = list(form.ins.operands)
    form.all_used()
    results = _names(operands.pop(0)) if isinstance(operands[0], Group) else ()
    target = operands.pop(0)
    arguments = _names(operands.pop(0)) if operands and isinstance(operands[0], Group) else ()
    machine = form.machine
    if isinstance(target, Symbol) and not operands:
        name = target.name
        if name not in machine.program.module.functions:
            step = system_call(form, name, arguments, results)
            if step is not None:
                return step
        return lambda w: _enter(form, w, machine.code(name), arguments, results)
    if len(operands) != 1 or not isinstance(operands[0], Symbol):
        raise form.error("expected a function, or a register and a prototype")
    get = form.get(target, "u64")
    functions = {at: name for name, at in machine.program.module.addresses.items()}

    def run(w: Fragment) -> Any:
        where = np.broadcast_to(get(w), w.n)
        first = int(where[0])
        if first not in functions:
            raise form.error(f"there is no function at {first:#x}")
        here = where == where[0]
        if not here.all():
            return Split(here)
        return _enter(form, w, machine.code(functions[first]), arguments, results)

    return run


def _enter(
    form: Form, w: Fragment, code: Any, arguments: tuple[str, ...], results: tuple[str, ...]
) -> Switch:
    """Go to a function: copies of the arguments are its parameters."""
    wanted = code.function
    if (len(arguments), len(results)) != (len(wanted.parameters), len(wanted.results)):
        raise form.error(
            f"{wanted.name} takes {len(wanted.parameters)} arguments and gives "
            f"{len(wanted.results)} results"
        )
    callee = w.cta.frame(code, w.frame.depth + 1)
    w.cta.stack.enter(callee, w.threads)
    for given, parameter in zip(arguments, wanted.parameters, strict=True):
        value = w.frame.variable(given)[w.threads]
        if value.shape[1] != parameter.nbytes:
            raise form.error(f"{given} has {value.shape[1]} bytes, not {parameter.nbytes}")
        callee.variable(parameter.name)[w.threads] = value
    back = tuple(zip(results, (p.name for p in wanted.results), strict=True))
    w.enter(callee, 0, (*w.stack, (w.frame, w.pc + 1, back)))
    return Switch()


def _names(group: Any) -> tuple[str, ...]:
    return tuple(op.name for op in group.items)


@instruction("pmevent")
def nothing(form: Form) -> Step:
    """9.7.19: no effect on values."""
    form.has("mask")
    form.all_used()
    return lambda w: None


_LONGEST = 1_000_000  # ns that nanosleep takes


@instruction("nanosleep", control=True)
def nanosleep(form: Form) -> Step:
    """9.7.13: suspends each thread for the time that it says. That may be none, by the ISA, as it
    is for threads that sleep again and again while nothing happens: see Clock."""
    duration = form.get(0, form.type("u32"))

    def run(w: Fragment) -> Any:
        cta, clock = w.cta, w.cta.launch.clock
        wake = cta.wake[w.threads]
        awake = wake == 0
        if awake.any():
            length = np.minimum(np.broadcast_to(duration(w), w.n), _LONGEST)
            if cta.cluster.engine.quiet:
                length = np.zeros_like(length)
            wake = np.where(awake, clock.at(w) + length.astype(np.int64), wake)
        over = wake <= clock.at(w)
        if over.all():
            cta.wake[w.threads] = 0
            return None
        cta.wake[w.threads] = wake
        if over.any():
            return Split(over)
        until = int(wake.min())
        return Wait(lambda: clock.now >= until, lambda: "the end of its sleep", until=until)

    return run
