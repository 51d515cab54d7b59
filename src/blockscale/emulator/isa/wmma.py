"""wmma: matrices between memory and a warp, and their products. PTX ISA 9.7.14.4.

Which lane holds which element is unspecified; here it is as for mma.sync. Of f16 each operand has
eight registers, of which those behind the elements repeat them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.state import Fragment, Step
from ..memory.buffers import MemoryFault
from ..ptx.program import Operand
from ..tensorcore.fragments import warp_registers
from .floating import ROUNDINGS
from .matrix import whole_warps
from .meeting import gathered
from .mma import WarpMatrix, product
from .registry import Form, instruction
from .wgmma import words_of

_SHAPES = ("m16n16k16", "m8n32k16", "m32n8k16")
#: Types of A and B: shapes, types of C and D, the first target that has them.
_KINDS = {
    "f16": (_SHAPES, ("f32", "f16"), "sm_70"),
    "bf16": (_SHAPES, ("f32",), "sm_80"),
    "tf32": (("m16n16k8",), ("f32",), "sm_80"),
    "s8": (_SHAPES, ("s32",), "sm_72"),
    "u8": (_SHAPES, ("s32",), "sm_72"),
    "f64": (("m8n8k4",), ("f64",), "sm_80"),
}
_F16_REGISTERS = 8
_ALIGNED = 32  # bytes of the largest alignment that an address needs
#: The ISA asks of each row what it asks of the first, the CUDA programming guide 16 bytes.
_STRIDE = 16


def _shape(form: Form) -> tuple[str, int, int, int]:
    """As written, and M, N and K."""
    shape = form.one(*_SHAPES, "m16n16k8", "m8n8k4")
    if not form.has("sync") or not form.has("aligned") or shape is None:
        raise form.error(
            "expected .sync.aligned and a shape, one of "
            f".{', .'.join((*_SHAPES, 'm16n16k8', 'm8n8k4'))}: others are not supported"
        )
    m, n, k = map(int, re.findall(r"\d+", shape))
    return shape, m, n, k


def _words(form: Form, operand: int, matrix: WarpMatrix) -> tuple[Operand, ...]:
    """The registers of a fragment."""
    twice = matrix.type == "f16" and not matrix.sum
    return words_of(form, operand, _F16_REGISTERS if twice else matrix.registers, matrix.word)


def _matrix(form: Form, which: str) -> WarpMatrix:
    """A, B by its columns, or C or D (c)."""
    shape, m, n, k = _shape(form)
    type = form.one(*_KINDS, "f32", "s32")
    fits = [
        kind for kind, (shapes, sums, _) in _KINDS.items()
        if shape in shapes and (type in sums if which == "c" else type == kind)
    ]  # fmt: skip
    if type is None or not fits:
        raise form.error(f"there is no .{type} of .{shape} for this matrix")
    form.needs(_KINDS[fits[0]][2])
    rows, columns = {"a": (m, k), "b": (n, k), "c": (m, n)}[which]
    return WarpMatrix(rows, columns, type, which == "c")


class _InMemory:
    """Where the elements of a matrix lie, and which of them each lane holds.

    Args:
        operand: the address.
        held_by: the operand with the registers.
    """

    def __init__(self, form: Form, which: str, operand: int, held_by: int) -> None:
        layout = form.one("row", "col")
        self.space = form.one("global", "shared", "shared::cta")
        self.matrix = matrix = _matrix(form, which)
        if layout is None:
            raise form.error("expected .row or .col")
        self.form, self.size = form, matrix.dtype.itemsize
        self.packed = matrix.word // self.size
        #: Whether elements beside each other in a register are so in memory.
        self.along = (layout == "col") == (which == "b")
        places = np.arange(matrix.rows * matrix.columns).reshape(matrix.rows, matrix.columns)
        held = warp_registers(places[None, :, :: self.packed], matrix.beside)[0]
        self.rows, self.columns = np.divmod(held, matrix.columns)  # (32, registers)
        self.default = matrix.columns if self.along else matrix.rows
        self.address = form.address(operand, self.space)
        given = len(form.ins.operands) > 2
        self.stride = form.get(2, "u32") if given else lambda w: np.uint32(self.default)
        fragment = len(_words(form, held_by, matrix)) * matrix.word
        self.aligned = min(_ALIGNED, fragment)

    def places(self, w: Fragment) -> Callable[[int, int], np.ndarray]:
        """Addresses of an element of a register, of each thread."""
        warps = whole_warps(w, self.form)
        base = np.broadcast_to(self.address(w), w.n).reshape(warps, 32)
        stride = np.broadcast_to(self.stride(w), w.n).reshape(warps, 32).astype(np.uint64)
        for what, value in (("address", base), ("stride", stride)):
            if (value != value[:, :1]).any():
                raise self.form.error(f"the {what} differs between lanes of a warp")
        if (stride < self.default).any():
            raise self.form.error(
                f"the stride is {int(stride.min())}, and a row or column in memory has "
                f"{self.default} elements: they would overlap"
            )
        step = stride * np.uint64(self.size)
        for what, value, by in (
            ("address", base, self.aligned),
            ("stride in bytes", step, min(self.aligned, _STRIDE)),
        ):
            bad = value[value % np.uint64(by) != 0]
            if len(bad):
                raise MemoryFault(
                    f"{self.form.ins.opcode}: the {what}, {int(bad[0]):#x}, is no multiple of {by}"
                )

        def at(register: int, element: int) -> np.ndarray:
            row, column = self.rows[:, register], self.columns[:, register] + element
            outer, inner = (row, column) if self.along else (column, row)
            steps = outer.astype(np.uint64) * stride + inner.astype(np.uint64)
            where: np.ndarray = base + steps * np.uint64(self.size)
            return where.reshape(-1)

        return at


@instruction("wmma.load", control=True)
def wmma_load(form: Form) -> Step:
    """9.7.14.4.3."""
    which = form.one("a", "b", "c")
    if which is None:
        raise form.error("expected .a, .b or .c")
    memory = _InMemory(form, which, 1, 0)
    matrix, size = memory.matrix, memory.size
    type = f"b{8 * matrix.word}"
    puts = [form.set(item, type) for item in _words(form, 0, matrix)]
    read = form.machine.reader(form, memory.space, 1)

    def run(w: Fragment) -> None:
        at = memory.places(w)
        values = []
        for i in range(matrix.registers):
            if memory.along:
                data = read(w, at(i, 0), matrix.word)
            else:
                parts = [read(w, at(i, j), size) for j in range(memory.packed)]
                data = np.concatenate([part.reshape(w.n, size) for part in parts], axis=1)
            values.append(np.ascontiguousarray(data).view(f"u{matrix.word}").reshape(w.n))
        for i, put in enumerate(puts):
            put(w, values[i % len(values)])

    return gathered(form, None, run)


@instruction("wmma.store", control=True)
def wmma_store(form: Form) -> Step:
    """9.7.14.4.4."""
    if not form.has("d"):
        raise form.error("expected .d")
    memory = _InMemory(form, "c", 0, 1)
    matrix, size = memory.matrix, memory.size
    gets = [form.get(item, f"b{8 * matrix.word}") for item in _words(form, 1, matrix)]
    write = form.machine.writer(form, memory.space, 0)

    def run(w: Fragment) -> None:
        at = memory.places(w)
        for i, get in enumerate(gets):
            data = np.ascontiguousarray(np.broadcast_to(get(w), w.n)).view(np.uint8)
            data = data.reshape(w.n, matrix.word)
            if memory.along:
                write(w, at(i, 0), data)
                continue
            for j in range(memory.packed):
                write(w, at(i, j), np.ascontiguousarray(data[:, j * size : (j + 1) * size]))

    return gathered(form, None, run)


@instruction("wmma.mma", control=True)
def wmma_mma(form: Form) -> Step:
    """9.7.14.4.5. Types of four bits and of one are not supported, nor is a C of another type than
    D."""
    shape, m, n, k = _shape(form)
    if len(form.several("row", "col")) != 2:
        raise form.error("expected the layouts of A and B")
    types = form.several(*_KINDS, "f32", "s32")
    if len(types) == 2:  # of f16
        types[1:1] = ["f16", "f16"]
    kind = _KINDS.get(types[1]) if len(types) == 4 and types[1] == types[2] else None
    if kind is None or shape not in kind[0] or not types[0] == types[3] in kind[1]:
        raise form.error(f"there is no .{'.'.join(types)} of .{shape}, or it is not supported")
    form.needs(kind[2])
    saturate = form.has("satfinite")
    if saturate and types[0] != "s32":
        raise form.error(".satfinite goes with .s32")
    rounding = form.one(*ROUNDINGS) if types[0] == "f64" else None
    sums = WarpMatrix(m, n, types[0], True)
    matrices = (sums, WarpMatrix(m, k, types[1], False), WarpMatrix(n, k, types[2], False), sums)
    items: list[Any] = [_words(form, i, each)[: each.registers] for i, each in enumerate(matrices)]
    return gathered(form, None, product(form, matrices, items, saturate, rounding))
