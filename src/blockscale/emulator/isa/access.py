"""Loads, stores and atomics: PTX ISA 9.7.9 (ld, st), 9.7.13 (atom, red)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import ieee
from ..machine.predecessor import unchanged
from ..machine.state import Fragment, Step
from ..memory.buffers import MemoryFault
from ..ptx.program import Address, Operand, Symbol
from .registry import TYPES, Form, Getter, instruction

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
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified",
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
    bad = address & np.uint64(size - 1)  # sizes are powers of two
    if np.count_nonzero(bad):
        raise MemoryFault(
            f"address {int(address[(bad != 0).argmax()]):#x} of {form.ins.opcode} "
            f"is not a multiple of {size}"
        )
    return address


@instruction("ld", "ldu")
def load(form: Form) -> Step:
    """9.7.9; hints of caching and ordering change no value; strong accesses order (see scopes)."""
    space, constant = form.one(*_SPACES), form.has("nc")
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
        if constant:
            unchanged(w, where)
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
    return form.address(index, space)


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


_WORDS = ("b32", "b64", "b128")
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_ORDERED = ("u32", "s32", "u64", "s64")

#: What an operation computes, and the types it takes alone.
_ATOMIC: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "add": (np.add, ("u32", "s32", "u64", "f32", "f64", *_HALVES)),
    "min": (np.minimum, _ORDERED),
    "max": (np.maximum, _ORDERED),
    "and": (np.bitwise_and, ("b32", "b64")),
    "or": (np.bitwise_or, ("b32", "b64")),
    "xor": (np.bitwise_xor, ("b32", "b64")),
    "exch": (lambda old, new: new, ("b32", "b64", "b128")),
    "cas": (lambda old, wanted, new: np.where(old == wanted, new, old), ("b16", *_WORDS)),
    "inc": (_increment, ("u32",)),
    "dec": (_decrement, ("u32",)),
}


def _atomic_type(form: Form, name: str, count: int) -> str:
    """The type of an element; vectors are of floats in global memory."""
    if count == 1:
        type = form.type(*_ATOMIC[name][1])
    else:
        singles = ("f32",) if name == "add" and count < 8 else ()
        packed = _HALVES if count < 8 else _HALVES[:2]
        if name not in ("add", "min", "max"):
            raise form.error("vectors take .add, .min and .max")
        type = form.type(*singles, *packed)
    if form.has("noftz") != (type in _HALVES):
        raise form.error(f".{type} takes {'' if type in _HALVES else 'no '}.noftz")
    return type


@instruction("atom", "red")
def atomic(form: Form) -> Step:
    """9.7.13.5, 9.7.13.6. Threads take their turns in order of their number: one of the orders
    that the hardware may use."""
    returns = form.parts[0] == "atom"
    at = 1 if returns else 0
    space = form.one(*_SPACES)
    name = form.one(*_ATOMIC)
    if name is None or (not returns and name in ("exch", "cas")):
        raise form.error("the operation is not supported")
    if not returns and form.has("acquire", "acq_rel"):
        raise form.error("returns nothing to be acquired")
    hints(form, at + (3 if name == "cas" else 2))
    count = vector_length(form)
    if count > 1 and space not in (None, "global"):
        raise form.error("vectors must be in global memory")
    type = _atomic_type(form, name, count)
    kept = "b16" if type in ("f16", "bf16") else "b32" if type.endswith("x2") else type
    dtype = np.dtype(TYPES[kept])
    size = dtype.itemsize * count
    read, write = form.machine.reader(form, space, at), form.machine.writer(form, space, at)
    address = _address(form, at, space)
    sources = [_each(form, at + 1, count)] + ([_each(form, at + 2, 1)] if name == "cas" else [])
    gets = [[form.get(item, kept) for item in items] for items in sources]
    puts = [form.set(item, kept) for item in (_each(form, 0, count) if returns else ())]
    combine = combiner(type, name)

    def run(w: Fragment) -> None:
        where = checked(w, form, address(w), size)
        operands = [_columns(w, values, dtype) for values in gets]
        before = np.empty((w.n, count), dtype)
        engine, memory, changed = w.cta.cluster.engine, w.cta.launch.memory, False
        stores = engine.stores, memory.stores
        for turn in turns(where):
            part = w if len(turn) == w.n else w.part(turn, w.pc)
            old = np.ascontiguousarray(read(part, where[turn], size)).view(dtype)
            elements = [operand[turn].reshape(-1) for operand in operands]
            flushed = np.repeat(where[turn] >> np.uint64(56) == 0, count) & (space in _GLOBAL)
            new = combine(flushed, old.reshape(-1), *elements)
            before[turn] = old
            values = np.ascontiguousarray(new, dtype).view(np.uint8).reshape(-1, size)
            changed |= values.tobytes() != old.tobytes()
            write(part, where[turn], values)
        if not changed:
            engine.stores, memory.stores = stores
        for i, put in enumerate(puts):
            put(w, before[:, i])

    return run


_GLOBAL = ("global", None)  # of generic addresses, those without a window


def _each(form: Form, index: int, count: int) -> tuple[Operand, ...]:
    """The items of an operand; a sink stands for all of them."""
    items = (None,) * count if form.operand(index) is None else form.items(index)
    if len(items) != count:
        raise form.error(f"operand {index + 1} has {len(items)} items, not {count}")
    return items


def _columns(w: Fragment, gets: Sequence[Getter], dtype: np.dtype) -> np.ndarray:
    """(threads, items)"""
    values = np.empty((w.n, len(gets)), dtype)
    for i, get in enumerate(gets):
        values[:, i] = get(w)
    return values


def turns(where: np.ndarray) -> list[np.ndarray]:
    """Threads grouped so that no two of a group share an address, in order of their number."""
    _, place = np.unique(where, return_inverse=True)
    order = np.argsort(place, kind="stable")
    ranked = place[order]
    starts = np.nonzero(np.r_[True, ranked[1:] != ranked[:-1]])[0]
    rank = np.empty(len(where), np.int64)
    rank[order] = np.arange(len(where)) - np.repeat(starts, np.diff(np.r_[starts, len(where)]))
    return [np.nonzero(rank == turn)[0] for turn in range(int(rank.max()) + 1)]


def combiner(type: str, name: str) -> Callable[..., Any]:
    """(mask of elements in global memory, old, operands) -> new."""
    function = _ATOMIC[name][0]
    if type in _HALVES:
        if name != "add":
            function = ieee.lower if name == "min" else ieee.higher
        return lambda flushed, old, new: ieee.join(
            function(ieee.split(old, type), ieee.split(new, type)), type
        )
    if type == "f32":
        return _add_f32
    return lambda flushed, *values: function(*values)


def _add_f32(flushed: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """On global memory subnormal numbers are flushed, on shared memory they are not."""
    through = ieee.flush(ieee.canonical(ieee.flush(old) + ieee.flush(new)))
    return np.where(flushed, through, ieee.canonical(old + new))


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
