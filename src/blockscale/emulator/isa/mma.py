"""mma.sync: products of a warp from its registers into its registers. PTX ISA 9.7.14.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ieee import exact_fp64, fma64
from ..machine.matrix_operands import undefined_products
from ..machine.state import Fragment, Step
from ..machine.undefined import Undefined, fill_masks
from ..machine.undefined import gathered as masks_of
from ..ptx.program import Register
from ..tensorcore.arithmetic import Instruction, multiply, multiply_integers
from ..tensorcore.fragments import warp_matrix, warp_registers
from .floating import ROUNDINGS
from .matrix import whole_warps
from .meeting import gathered
from .registry import TYPES, Form, Getter, instruction
from .wgmma import words_of

_N = 8


@dataclass(frozen=True, slots=True)
class _Kind:
    """Types that go together: 9.7.14.5.14."""

    operands: tuple[str, ...]  # A and B are any of these
    results: tuple[str, ...]  # C and D are one of these
    shapes: tuple[tuple[int, int], ...]  # M and K
    targets: tuple[str, ...]  # the first that has it, for each shape


def _of_16(*k: int) -> tuple[tuple[int, int], ...]:
    return tuple((16, each) for each in k)


_KINDS = (
    _Kind(("tf32",), ("f32",), _of_16(4, 8), ("sm_80", "sm_80")),
    _Kind(("bf16",), ("f32",), _of_16(8, 16), ("sm_80", "sm_80")),
    _Kind(("f16",), ("f32", "f16"), _of_16(8, 16), ("sm_75", "sm_80")),
    _Kind(("e4m3", "e5m2"), ("f32", "f16"), _of_16(16, 32), ("sm_89", "sm_89")),
    _Kind(("s8", "u8"), ("s32",), _of_16(16, 32), ("sm_80", "sm_80")),
    _Kind(("f64",), ("f64",), ((8, 4), *_of_16(4, 8, 16)), ("sm_80", "sm_90", "sm_90", "sm_90")),
)
#: What holds an element of A, B, C or D.
_DTYPES: Mapping[str, np.dtype] = {
    "s32": np.dtype(np.int32), "f32": np.dtype(np.float32), "f16": np.dtype(np.uint16),
    "tf32": np.dtype(np.uint32), "bf16": np.dtype(np.uint16), "e4m3": np.dtype(np.uint8),
    "e5m2": np.dtype(np.uint8), "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8),
    "f64": np.dtype(np.float64),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WarpMatrix:
    """A, C or D, or B by its columns, as the lanes of a warp hold it."""

    rows: int
    columns: int
    type: str
    sum: bool  # C or D

    @property
    def dtype(self) -> np.dtype:
        return _DTYPES[self.type]

    @property
    def word(self) -> int:
        """Bytes of a register."""
        return max(self.dtype.itemsize, 4)

    @property
    def registers(self) -> int:
        """Of each lane."""
        return self.rows * self.columns * self.dtype.itemsize // (self.word * 32)

    @property
    def beside(self) -> int:
        """Registers that follow each other in a row: two of C and D in 32 bits and more."""
        return 2 if self.sum and self.dtype.itemsize >= 4 else 1

    def of(self, words: np.ndarray) -> np.ndarray:
        """Of each warp, from its registers (warps, 32, registers)."""
        return warp_matrix(words, self.rows, self.beside).view(self.dtype)

    def words(self, matrix: np.ndarray) -> np.ndarray:
        """What it was made of."""
        return warp_registers(matrix.view(f"u{self.word}"), self.beside)


@instruction("mma.sync", control=True)
def mma(form: Form) -> Step:
    """{d}, {a}, {b}, {c}: D = A B + C. Sparse (.sp) forms, other shapes, 4-bit and single-bit
    types, and .kind (sm_120) are not supported."""
    m, k, d_type, a_type, b_type = _shape(form)
    saturate = form.has("satfinite")
    if saturate and d_type != "s32":
        raise form.error(".satfinite goes with .s32")
    rounding = form.one(*ROUNDINGS) if d_type == "f64" else None
    sums = WarpMatrix(m, _N, d_type, True)
    matrices = (sums, WarpMatrix(m, k, a_type, False), WarpMatrix(_N, k, b_type, False), sums)
    items = [words_of(form, i, each.registers, each.word) for i, each in enumerate(matrices)]
    return gathered(form, None, product(form, matrices, items, saturate, rounding))


def product(
    form: Form,
    matrices: Sequence[WarpMatrix],
    items: Sequence[Sequence[Any]],
    saturate: bool,
    rounding: str | None,
) -> Step:
    """What the whole warps of a fragment do: D, A, B by its columns and C, and their registers."""
    sums, a_type, b_type = matrices[0], matrices[1].type, matrices[2].type
    m, n, k, d_type = sums.rows, sums.columns, matrices[1].columns, sums.type
    type, word = f"b{8 * sums.word}", np.dtype(f"u{sums.word}")
    put = [form.set(item, type) for item in items[0]]
    gets = [[form.get(item, type) for item in each] for each in items[1:]]

    slots = [[r.slot for r in each if isinstance(r, Register)] for each in items]

    def unsure(w: Fragment, warps: int, a: np.ndarray, b: np.ndarray) -> Undefined | None:
        """What of D is undefined, (threads, registers)."""
        found = [masks_of(w.frame, each, w.sel) for each in slots[1:]]
        first = next(filter(None, found), None)
        if first is None:
            return None
        of_a, of_b, of_c = (
            None if each is None
            else matrix.of(each.bits.reshape(warps, 32, -1))
            for each, matrix in zip(found, matrices[1:], strict=True)
        )  # fmt: skip
        out = np.zeros((warps, m, n), bool)
        for i in range(warps):
            out[i] = undefined_products(
                (a[i], None if of_a is None else Undefined(of_a[i], first.origin)),
                (b[i], None if of_b is None else Undefined(of_b[i], first.origin)),
                (a_type, b_type),
            )
        bits = np.zeros(out.shape, f"u{sums.dtype.itemsize}")
        bits[out] = ~bits.dtype.type(0)
        if of_c is not None:
            bits[of_c.view(bits.dtype) != 0] = ~bits.dtype.type(0)
        return Undefined(sums.words(bits).reshape(w.n, -1), first.origin)

    def run(w: Fragment) -> None:
        warps, launch = whole_warps(w, form), w.cta.launch
        a, b, c = (
            matrix.of(_read(w, warps, get, word))
            for get, matrix in zip(gets, matrices[1:], strict=True)
        )
        if d_type == "s32":
            d = multiply_integers(a, b, c, saturate=saturate)
        elif d_type == "f64":
            d = _fused(a, b, c, rounding or "rn")
        else:
            types = Instruction("mma", a_type, b_type, d_type)
            d = multiply(types, a, b, c.view(TYPES[d_type]), exact=launch.settings.exact)
        words = sums.words(d)
        if w.frame.undefined:
            fill_masks(w.frame, slots[0], w.sel, unsure(w, warps, a, b))
        for i, setter in enumerate(put):
            setter(w, words[..., i].reshape(-1))
        if launch.watch is not None:
            launch.watch.multiplied(form.ins.opcode, warps, 2 * warps * m * n * k)

    return run


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str) -> np.ndarray:
    """Fused multiply-adds in order of k, beginning with C. The ISA leaves the order open; MMA-Sim,
    whose models were compared with GPUs, has this one for all of them."""
    step = fma64 if rounding == "rn" else np.vectorize(exact_fp64("fma", rounding), [float])
    for i in range(a.shape[2]):
        c = step(a[:, :, None, i], b[:, None, :, i], c)
    return c


def _shape(form: Form) -> tuple[int, int, str, str, str]:
    """M, K and the types of D, A and B."""
    if not form.has("aligned") or form.several("row", "col") != ["row", "col"]:
        raise form.error("expected .aligned and .row.col")
    match = next(filter(None, (re.fullmatch(r"m(8|16)n8k(\d+)", part) for part in form.left)), None)
    types = form.several(*_DTYPES)
    if match is None or len(types) != 4 or not form.has(match[0]):
        raise form.error(
            "expected a shape .m16n8kK or .m8n8k4 and the types of D, A, B and C, which are some "
            f"of {', '.join(_DTYPES)}: others are not supported"
        )
    shape, (d_type, a_type, b_type, c_type) = (int(match[1]), int(match[2])), types
    for kind in _KINDS:
        if {a_type, b_type} <= {*kind.operands} and d_type == c_type in kind.results:
            break
    else:
        raise form.error(f"there is no .{'.'.join(types)}")
    if shape not in kind.shapes:
        known = ", ".join(f".m{m}n8k{k}" for m, k in kind.shapes)
        raise form.error(f"shape .{match[0]}: .{a_type}.{b_type} takes {known}")
    form.needs(kind.targets[kind.shapes.index(shape)])
    return *shape, d_type, a_type, b_type


def _read(w: Fragment, warps: int, gets: Sequence[Getter], word: np.dtype) -> np.ndarray:
    """(warps, 32, registers) words."""
    words = np.empty((w.n, len(gets)), word)
    for i, get in enumerate(gets):
        words[:, i] = get(w)
    return words.reshape(warps, 32, -1)
