"""Matrices between shared memory and the registers of a warp: PTX ISA 9.7.14.5.

A matrix has rows of 16 bytes anywhere in shared memory; the lanes name them, lane 0 the first. In
registers, four lanes hold a row of 16 bytes, or with .trans a column. The layouts of 8-bit elements
are those of CUTLASS's copy atoms for sm_100.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.state import Fragment, Step
from ..memory.buffers import SHARED_WINDOW, MemoryFault
from .access import checked
from .meeting import gathered
from .registry import Form, instruction

#: Bytes of a row (warps, matrices, rows, 16) <-> registers (warps, registers, 32 lanes).
Layout = Callable[[np.ndarray], np.ndarray]

_ROW = 16


def _load_rows(rows: np.ndarray) -> np.ndarray:
    """Lane 4 r + k holds bytes 4 k to 4 k + 3 of row r."""
    return np.ascontiguousarray(rows).view(np.uint32).reshape(*rows.shape[:2], 32)


def _load_columns(rows: np.ndarray) -> np.ndarray:
    """Lane 4 c + k holds rows 2 k and 2 k + 1 of column c, of 16-bit elements."""
    elements = np.ascontiguousarray(rows).view(np.uint16)
    return _load_rows(np.swapaxes(elements, 2, 3))


def _load_columns_of_bytes(rows: np.ndarray) -> np.ndarray:
    """Two registers: lane 4 c + k holds rows 4 k to 4 k + 3 of column c, then of column 8 + c."""
    columns = np.ascontiguousarray(np.swapaxes(rows, 2, 3)).view(np.uint32)
    return columns.reshape(len(rows), -1, 32)


def _store_rows(registers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(registers).view(np.uint8).reshape(*registers.shape[:2], 8, _ROW)


def _store_columns(registers: np.ndarray) -> np.ndarray:
    elements = _store_rows(registers).view(np.uint16)
    return np.ascontiguousarray(np.swapaxes(elements, 2, 3)).view(np.uint8)


def _store_columns_of_bytes(registers: np.ndarray) -> np.ndarray:
    """Of a matrix of 16 rows and 8 columns, each column 16 bytes in memory: lane 4 c + k gives
    columns 2 k and 2 k + 1 of row c, then of row 8 + c."""
    warps, matrices = registers.shape[:2]
    bytes_ = np.ascontiguousarray(registers).view(np.uint8).reshape(warps, matrices, 8, 4, 2, 2)
    return bytes_.transpose(0, 1, 3, 5, 4, 2).reshape(warps, matrices, 8, _ROW)


def _unpack(rows: np.ndarray, bits: int) -> np.ndarray:
    """16 elements of 4 or 6 bits, lowest first, then padding -> the low bits of 16 bytes."""
    each = np.unpackbits(rows, axis=-1, bitorder="little")[..., : 16 * bits]
    fields = each.reshape(*rows.shape, bits)
    return np.packbits(fields, axis=-1, bitorder="little")[..., 0]


_SOURCES = {"b4x16_p64": 4, "b6x16_p32": 6}


def _shape(form: Form, *allowed: str) -> tuple[str, int, bool, str | None]:
    """(shape, matrices, whether .trans, state space)."""
    shape, count = form.one(*allowed), form.one("x1", "x2", "x4")
    if not form.has("sync") or not form.has("aligned") or shape is None or count is None:
        raise form.error("expected .sync.aligned, a shape and .x1, .x2 or .x4")
    return shape, int(count[1:]), form.has("trans"), form.one("shared", "shared::cta")


def whole_warps(w: Fragment, form: Form) -> int:
    """The number of warps, all whole."""
    first, last = w.threads[::32], w.threads[31::32]
    if len(first) != len(last) or (first % 32).any() or (last - first != 31).any():
        raise form.error("needs all 32 lanes of a warp")
    return len(first)


def _rows(
    form: Form, operand: int, space: str | None, lanes: int
) -> Callable[[Fragment], tuple[Fragment, np.ndarray]]:
    """The threads whose addresses count and these, checked."""
    address = form.address(operand, space)

    def run(w: Fragment) -> tuple[Fragment, np.ndarray]:
        where, part = address(w), w
        if lanes < 32:
            chosen = w.threads % 32 < lanes
            where, part = where[chosen], w.part(chosen, w.pc)
        if space is None and (where >> np.uint64(56) != np.uint64(SHARED_WINDOW >> 56)).any():
            raise MemoryFault(f"{form.ins.opcode}: a generic address that is not in shared memory")
        return part, checked(part, form, where, _ROW)

    return run


@instruction("ldmatrix", control=True)
def ldmatrix(form: Form) -> Step:
    """9.7.14.5.15. Elements of 4 and 6 bits come to lie in the low bits of a byte."""
    shape, count, trans, space = _shape(form, "m8n8", "m8n16", "m16n16")
    packed = form.one(*_SOURCES)
    element = "b8x16" if packed else "b16" if shape == "m8n8" else "b8"
    if not form.has(element) or (packed and shape == "m8n8"):
        raise form.error(f".{shape} takes " + ("no packed elements" if packed else f".{element}"))
    if shape != "m8n8":
        form.needs("sm_100f")
    if shape == "m8n16" and (trans or not packed):
        raise form.error(".m8n16 takes packed elements and no .trans")
    if shape == "m16n16" and (not trans or count == 4):
        raise form.error(".m16n16 takes .trans and .x1 or .x2")
    height = 16 if shape == "m16n16" else 8
    layout: Layout = _load_rows
    if trans:
        layout = _load_columns if shape == "m8n8" else _load_columns_of_bytes
    puts = _registers(form, 0, count * height // 8, form.set)
    read = form.machine.reader(form, space, 1)
    rows = _rows(form, 1, space, count * height)

    def run(w: Fragment) -> None:
        warps = whole_warps(w, form)
        part, where = rows(w)
        matrices = read(part, where, _ROW).reshape(warps, count, height, _ROW)
        if packed:
            matrices = _unpack(matrices, _SOURCES[packed])
        registers = layout(matrices)
        for i, put in enumerate(puts):
            put(w, registers[:, i].reshape(-1))

    return gathered(form, None, run)


@instruction("stmatrix", control=True)
def stmatrix(form: Form) -> Step:
    """9.7.14.5.16."""
    shape, count, trans, space = _shape(form, "m8n8", "m16n8")
    element = "b16" if shape == "m8n8" else "b8"
    if not form.has(element):
        raise form.error(f".{shape} takes .{element}")
    layout: Layout = _store_columns if trans else _store_rows
    if shape == "m16n8":
        form.needs("sm_100f")
        if not trans:
            raise form.error(".m16n8 takes .trans")
        layout = _store_columns_of_bytes
    gets = _registers(form, 1, count, form.get)
    write = form.machine.writer(form, space, 0)
    rows = _rows(form, 0, space, 8 * count)

    def run(w: Fragment) -> None:
        warps = whole_warps(w, form)
        part, where = rows(w)
        registers = np.empty((warps, count, 32), np.uint32)
        for i, get in enumerate(gets):
            registers[:, i] = np.broadcast_to(get(w), w.n).reshape(warps, 32)
        write(part, where, layout(registers).reshape(-1, _ROW))

    return gathered(form, None, run)


def _registers(form: Form, operand: int, count: int, access: Callable[..., Any]) -> list[Any]:
    items = form.items(operand)
    if len(items) != count:
        raise form.error(f"has {len(items)} registers, {count} are expected")
    return [access(item, "b32") for item in items]


@instruction("movmatrix", control=True)
def movmatrix(form: Form) -> Step:
    """9.7.14.5.17."""
    if not all(form.has(part) for part in ("sync", "aligned", "m8n8", "trans", "b16")):
        raise form.error("expected .sync.aligned.m8n8.trans.b16")
    get, put = form.get(1, "b32"), form.set(0, "b32")

    def run(w: Fragment) -> None:
        registers = np.broadcast_to(get(w), w.n).reshape(whole_warps(w, form), 1, 32)
        put(w, _load_columns(_store_rows(registers)).reshape(-1))

    return gathered(form, None, run)
