"""mma.sync: products of a warp from its registers into its registers. PTX ISA 9.7.14.5."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..machine.matrix_operands import undefined_products
from ..machine.state import Fragment, Step
from ..machine.undefined import Undefined, fill_masks
from ..machine.undefined import gathered as masks_of
from ..ptx.program import Register
from ..tensorcore.arithmetic import Instruction, multiply, multiply_integers
from ..tensorcore.fragments import warp_matrix, warp_registers
from .matrix import whole_warps
from .meeting import gathered
from .registry import TYPES, Form, Getter, instruction
from .wgmma import words_of

_M, _N = 16, 8


@dataclass(frozen=True, slots=True)
class _Kind:
    """Types that go together: 9.7.14.5.14."""

    operands: tuple[str, ...]  # A and B are any of these
    results: tuple[str, ...]  # C and D are one of these
    k: tuple[int, int]
    targets: tuple[str, str]  # the first that has it, for each K


_KINDS = (
    _Kind(("tf32",), ("f32",), (4, 8), ("sm_80", "sm_80")),
    _Kind(("bf16",), ("f32",), (8, 16), ("sm_80", "sm_80")),
    _Kind(("f16",), ("f32", "f16"), (8, 16), ("sm_75", "sm_80")),
    _Kind(("e4m3", "e5m2"), ("f32", "f16"), (16, 32), ("sm_89", "sm_89")),
    _Kind(("s8", "u8"), ("s32",), (16, 32), ("sm_80", "sm_80")),
)
#: What holds an element of A, B, C or D.
_DTYPES: Mapping[str, np.dtype] = {
    "s32": np.dtype(np.int32), "f32": np.dtype(np.float32), "f16": np.dtype(np.uint16),
    "tf32": np.dtype(np.uint32), "bf16": np.dtype(np.uint16), "e4m3": np.dtype(np.uint8),
    "e5m2": np.dtype(np.uint8), "s8": np.dtype(np.int8), "u8": np.dtype(np.uint8),
}  # fmt: skip


@instruction("mma.sync", control=True)
def mma(form: Form) -> Step:
    """{d}, {a}, {b}, {c}: D = A B + C. Sparse (.sp) forms, shapes other than m16n8kK, fp64, 4-bit
    and single-bit types, and .kind (sm_120) are not supported."""
    k, d_type, a_type, b_type = _shape(form)
    saturate = form.has("satfinite")
    if saturate and d_type != "s32":
        raise form.error(".satfinite goes with .s32")
    matrices = ((_M, _N, d_type), (_M, k, a_type), (_N, k, b_type), (_M, _N, d_type))
    items = [words_of(form, i, _registers(*matrix)) for i, matrix in enumerate(matrices)]
    put = [form.set(item, "b32") for item in items[0]]
    gets = [[form.get(item, "b32") for item in each] for each in items[1:]]

    slots = [[r.slot for r in each if isinstance(r, Register)] for each in items]

    def unsure(w: Fragment, warps: int, a: np.ndarray, b: np.ndarray) -> Undefined | None:
        """What of D is undefined, (threads, registers)."""
        found = [masks_of(w.frame, each, w.sel) for each in slots[1:]]
        first = next(filter(None, found), None)
        if first is None:
            return None
        of_a, of_b, of_c = (
            None if each is None
            else warp_matrix(each.bits.reshape(warps, 32, -1), rows, _beside(t)).view(_DTYPES[t])
            for each, (rows, _, t) in zip(found, matrices[1:], strict=True)
        )  # fmt: skip
        out = np.zeros((warps, _M, _N), bool)
        for i in range(warps):
            out[i] = undefined_products(
                (a[i], None if of_a is None else Undefined(of_a[i], first.origin)),
                (b[i], None if of_b is None else Undefined(of_b[i], first.origin)),
                (a_type, b_type),
            )
        bits = np.zeros(out.shape, f"u{_DTYPES[d_type].itemsize}")
        bits[out] = ~bits.dtype.type(0)
        if of_c is not None:
            bits[of_c.view(bits.dtype) != 0] = ~bits.dtype.type(0)
        words = warp_registers(bits.view(np.uint32), _beside(d_type))
        return Undefined(words.reshape(w.n, -1), first.origin)

    def run(w: Fragment) -> None:
        warps, launch = whole_warps(w, form), w.cta.launch
        a, b, c = (
            warp_matrix(_read(w, warps, get), rows, _beside(type)).view(_DTYPES[type])
            for get, (rows, _, type) in zip(gets, matrices[1:], strict=True)
        )
        if d_type == "s32":
            d = multiply_integers(a, b, c, saturate=saturate)
        else:
            types = Instruction("mma", a_type, b_type, d_type)
            d = multiply(types, a, b, c.view(TYPES[d_type]), exact=launch.settings.exact)
        words = warp_registers(d.view(np.uint32), _beside(d_type))
        if w.frame.undefined:
            fill_masks(w.frame, slots[0], w.sel, unsure(w, warps, a, b))
        for i, setter in enumerate(put):
            setter(w, words[..., i].reshape(-1))
        if launch.watch is not None:
            launch.watch.multiplied(form.ins.opcode, warps, 2 * warps * _M * _N * k)

    return gathered(form, None, run)


def _shape(form: Form) -> tuple[int, str, str, str]:
    """K and the types of D, A and B."""
    if not form.has("aligned") or form.several("row", "col") != ["row", "col"]:
        raise form.error("expected .aligned and .row.col")
    match = next(filter(None, (re.fullmatch(r"m16n8k(\d+)", part) for part in form.left)), None)
    types = form.several(*_DTYPES)
    if match is None or len(types) != 4 or not form.has(match[0]):
        raise form.error(
            "expected a shape .m16n8kK and the types of D, A, B and C, which are some of "
            f"{', '.join(_DTYPES)}: others are not supported"
        )
    k, (d_type, a_type, b_type, c_type) = int(match[1]), types
    for kind in _KINDS:
        if {a_type, b_type} <= {*kind.operands} and d_type == c_type in kind.results:
            break
    else:
        raise form.error(f"there is no .{'.'.join(types)}")
    if k not in kind.k:
        raise form.error(f"K is {k}; .{a_type}.{b_type} takes {kind.k[0]} and {kind.k[1]}")
    form.needs(kind.targets[kind.k.index(k)])
    return k, d_type, a_type, b_type


def _registers(rows: int, columns: int, type: str) -> int:
    """Of each lane, for a matrix."""
    return rows * columns * _DTYPES[type].itemsize // (4 * 32)


def _beside(type: str) -> int:
    """Registers that follow each other in a row: two of C and D in 32 bits."""
    return 2 if type in ("f32", "s32") else 1


def _read(w: Fragment, warps: int, gets: Sequence[Getter]) -> np.ndarray:
    """(warps, 32, registers) words."""
    words = np.empty((w.n, len(gets)), np.uint32)
    for i, get in enumerate(gets):
        words[:, i] = get(w)
    return words.reshape(warps, 32, -1)
