"""Loads, stores and atomics: PTX ISA 9.7.9 (ld, st), 9.7.13 (atom, red)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..machine import Fragment, Step
from ..memory import MemoryFault
from ..program import Address, Symbol
from . import ieee
from .registry import TYPES, Form, instruction

_SPACES = (
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
    "param",
    "param::entry",
    "param::func",
    "const",
)
_HINTS = (
    "weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio",
    "cta", "cluster", "gpu", "sys",
    "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified",
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
    "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last",
    "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip


def hints(form: Form, last: int) -> None:
    """Take everything that says how, not what, and the cache policy behind ``last`` operands."""
    while form.has(*_HINTS):
        pass
    if form.has("L2::cache_hint"):
        form.get(last, "b64")


def vector_length(form: Form) -> int:
    return int((form.one("v2", "v4", "v8") or "v1")[1:])


def _bits(type: str) -> str:
    """Memory moves bits: a half is its 16 bits."""
    return {"f16": "b16", "bf16": "b16"}.get(type, type)


def checked(w: Fragment, form: Form, address: np.ndarray, size: int) -> np.ndarray:
    bad = address % np.uint64(size) != 0
    if bad.any():
        raise MemoryFault(
            f"address {int(address[bad.argmax()]):#x} of {form.ins.opcode} "
            f"is not a multiple of {size}"
        )
    return address


@instruction("ld", "ldu")
def load(form: Form) -> Step:
    """9.7.9; hints of caching and ordering change nothing here."""
    space = form.one(*_SPACES)
    hints(form, 2)
    count, type = vector_length(form), _bits(form.type())
    dtype, items = np.dtype(TYPES[type]), form.items(0)
    size = dtype.itemsize
    if len(items) != count:
        raise form.error(f"loads {count} values into {len(items)} registers")
    puts = [form.set(item, type) for item in items]
    read, address = form.machine.reader(form, space, 1), _address(form, 1, space)

    def run(w: Fragment) -> None:
        where = checked(w, form, address(w), size * count)
        values = read(w, where, size * count).view(dtype)
        for i, put in enumerate(puts):
            put(w, values[:, i])

    return run


def _address(form: Form, index: int, space: str | None) -> Callable[[Fragment], np.ndarray]:
    """Per-thread addresses; of a variable in .param or .local space, its offset."""
    op = form.operand(index)
    if (
        isinstance(op, Address)
        and isinstance(op.base, Symbol)
        and form.machine.is_frame(op.base.name)
    ):
        offset = np.uint64(op.offset)
        return lambda w: np.full(w.n, offset)
    return form.address(index)


@instruction("st")
def store(form: Form) -> Step:
    """9.7.9."""
    space = form.one(*_SPACES)
    hints(form, 2)
    count, type = vector_length(form), _bits(form.type())
    dtype, items = np.dtype(TYPES[type]), form.items(1)
    size = dtype.itemsize
    if len(items) != count:
        raise form.error(f"stores {count} values from {len(items)} registers")
    gets = [form.get(item, type) for item in items]
    write, address = form.machine.writer(form, space, 0), _address(form, 0, space)

    def run(w: Fragment) -> None:
        where = checked(w, form, address(w), size * count)
        values = np.empty((w.n, count), dtype)
        for i, get in enumerate(gets):
            values[:, i] = get(w)
        write(w, where, values.view(np.uint8))

    return run


def _increment(old: Any, limit: Any) -> Any:
    return np.where(old >= limit, 0, old + 1)


def _decrement(old: Any, limit: Any) -> Any:
    return np.where((old == 0) | (old > limit), limit, old - 1)


_ATOMIC: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
    "inc": _increment,
    "dec": _decrement,
}


_INTEGER_TYPES = ("b32", "b64", "u32", "u64", "s32", "s64")
_FLOAT_TYPES = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")


@instruction("atom", "red")
def atomic(form: Form) -> Step:
    """9.7.13. Threads take their turns in order of their number: one of the orders
    that the hardware may use."""
    returns = form.parts[0] == "atom"
    at = 1 if returns else 0
    space = form.one(*_SPACES)
    name = form.one(*_ATOMIC, "cas")
    if name is None:
        raise form.error("the operation is not supported")
    hints(form, at + (3 if name == "cas" else 2))
    form.has("noftz")
    if vector_length(form) > 1:
        raise form.error("vector atomics are not supported")
    floats = _FLOAT_TYPES if name == "add" else _FLOAT_TYPES[2:] if name in ("min", "max") else ()
    halves = ("b16",) if name == "cas" else ()
    type = form.type(*_INTEGER_TYPES, *floats, *halves)
    kept = "b16" if type in ("f16", "bf16") else "b32" if type.endswith("x2") else type
    dtype = np.dtype(TYPES[kept])
    size = dtype.itemsize
    read, write = form.machine.reader(form, space, at), form.machine.writer(form, space, at)
    address = _address(form, at, space)
    b = form.get(at + 1, kept)
    c = form.get(at + 2, kept) if name == "cas" else None
    put = form.set(0, kept) if returns else (lambda w, value: None)
    combine = _combine(type, name, flushes=space == "global")

    def run(w: Fragment) -> None:
        where = checked(w, form, address(w), size)
        operands = [np.array(np.broadcast_to(get(w), w.n)) for get in (b, c) if get is not None]
        before = np.empty(w.n, dtype)
        for turn in turns(where):
            part = w if len(turn) == w.n else w.part(turn, w.pc)
            old = np.ascontiguousarray(read(part, where[turn], size)).view(dtype)[:, 0]
            new = combine(old, *(operand[turn] for operand in operands))
            before[turn] = old
            write(part, where[turn], np.ascontiguousarray(new, dtype)[:, None].view(np.uint8))
        put(w, before)

    return run


def turns(where: np.ndarray) -> list[np.ndarray]:
    """Threads grouped so that no two of a group share an address, in order of their number."""
    _, place = np.unique(where, return_inverse=True)
    order = np.argsort(place, kind="stable")
    ranked = place[order]
    starts = np.nonzero(np.r_[True, ranked[1:] != ranked[:-1]])[0]
    rank = np.empty(len(where), np.int64)
    rank[order] = np.arange(len(where)) - np.repeat(starts, np.diff(np.r_[starts, len(where)]))
    return [np.nonzero(rank == turn)[0] for turn in range(int(rank.max()) + 1)]


def _combine(type: str, name: str, flushes: bool) -> Callable[..., Any]:
    if name == "cas":
        return lambda old, expected, new: np.where(old == expected, new, old)
    function = _ATOMIC[name]
    if type in ("f16", "bf16", "f16x2", "bf16x2"):
        if name != "add":
            function = ieee.lower if name == "min" else ieee.higher
        return lambda old, new: ieee.join(
            function(ieee.split(old, type), ieee.split(new, type)), type
        )
    if type == "f32" and flushes:  # red and atom to global memory flush subnormals, shared do not
        return lambda old, new: ieee.flush(ieee.canonical(ieee.flush(old) + ieee.flush(new)))
    if type == "f32":
        return lambda old, new: ieee.canonical(old + new)
    return function


@instruction("prefetch", "prefetchu")
def prefetch(form: Form) -> Step:
    """9.7.9."""
    form.has("global", "local")
    form.one("L1", "L2", "L2::evict_last", "L2::evict_normal")
    form.address(0)
    return lambda w: None


@instruction("isspacep")
def isspacep(form: Form) -> Step:
    """9.7.9."""
    space = form.one("global", "shared", "shared::cta", "shared::cluster", "local", "const")
    if space is None:
        raise form.error("expected a state space")
    window, put, get = form.machine.window(space), form.set(0, "pred"), form.get(1, "u64")
    return lambda w: put(w, (get(w) >> np.uint64(56)) == np.uint64(window >> 56))
