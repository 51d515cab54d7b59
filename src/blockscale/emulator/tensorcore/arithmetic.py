"""The sums of tensor cores: what one wgmma, tcgen05.mma or mma.sync makes of its operands.

The PTX ISA leaves accumulation open; measurements of the hardware agree on this model. An element
of D is one fused sum of c and all products of the instruction:

1. Products are exact and are not normalized: the exponent of one is the sum of its factors' (and
   of their scales'). With 4-bit operands of K 64, each 16 neighbours are summed exactly first, and
   the exponent of such a sum is that of its scales alone.
2. All terms are aligned to the largest exponent among them and cut toward zero at ``fraction``
   bits below it. That exponent is never less than ``floor``, which zeros have.
3. The exact sum of what is left is rounded once: toward zero to fp32 (fp8 on Hopper: with 13
   fraction bits only), to nearest even to fp16. A magnitude past the largest number is infinite.

Zero is +0 and NaN 0x7fffffff or 0x7fff, whatever the signs and payloads of the operands. NaN comes
from a NaN operand or scale, 0 times infinity, and opposite infinities. Subnormals are kept.

mma.sync of FP8 is no instruction of these tensor cores: ptxas (13.0; sm_90 and sm_100 alike) makes
the operands f16 and emits two sums, the first one from zero: of the first two, then of the last two
of each four neighbours in K. C is added to that by an ordinary addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .elements import decode
from .factors import Factors, factors
from .sums import Model, aligned_sum, exact_sum, toward_zero

__all__ = ["Instruction", "Unit", "multiply", "multiply_integers"]

Unit = Literal["wgmma", "tcgen05", "mma"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """What one instruction multiplies.

    Attributes:
        unit: the tensor cores that do it.
        a_type, b_type, d_type: of elements of A, of B, of C and D.
        scale_type, vector: of the scales of A and B, and how many elements share one; if any.
    """

    unit: Unit
    a_type: str
    b_type: str
    d_type: str = "f32"
    scale_type: str = ""
    vector: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A type of C and D."""

    dtype: np.dtype
    smallest: int  # exponent of the smallest normal number
    nan: int


_RESULTS: Mapping[str, Result] = {
    "f32": Result(np.dtype(np.float32), -126, 0x7FFFFFFF),
    "f16": Result(np.dtype(np.float16), -14, 0x7FFF),
}
_FLOOR_F16 = -21  # of a model, when D is fp16
_FRACTION_F32 = 23

_FULL = Model(25, -133)
_HOPPER_FP8 = Model(13, -133)
_FP4 = Model(35, -139, group=16)

_FP8 = ("e4m3", "e5m2")
_FP8_FP6_FP4 = (*_FP8, "e3m2", "e2m3", "e2m1")


@dataclass(frozen=True, slots=True)
class Kind:
    """Operand types that may be mixed, with what an instruction on them looks like."""

    types: tuple[str, ...]
    k: int
    model: Model
    results: tuple[str, ...] = ("f32",)
    scales: tuple[tuple[str, int], ...] = (("", 0),)  # (type, vector)
    widened: bool = False  # made of two sums of f16


_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "wgmma": (
        Kind(("tf32",), 8, _FULL),
        Kind(("bf16",), 16, _FULL),
        Kind(("f16",), 16, _FULL, ("f32", "f16")),
        Kind(_FP8, 32, _HOPPER_FP8, ("f32", "f16")),
    ),
    "tcgen05": (
        Kind(("tf32",), 8, _FULL),
        Kind(("bf16",), 16, _FULL),
        Kind(("f16",), 16, _FULL, ("f32", "f16")),
        Kind(_FP8_FP6_FP4, 32, _FULL, ("f32", "f16")),
        Kind(_FP8_FP6_FP4, 32, _FULL, scales=(("ue8m0", 32),)),
        Kind(("e2m1",), 64, _FP4, scales=(("ue8m0", 32), ("ue8m0", 16), ("ue4m3", 16))),
    ),
    "mma": (  # of sm_90 and of sm_100, which agree
        *(Kind(("tf32",), k, _FULL) for k in (4, 8)),
        *(Kind(("bf16",), k, _FULL) for k in (8, 16)),
        *(Kind(("f16",), k, _FULL, ("f32", "f16")) for k in (8, 16)),
        *(Kind(_FP8, k, _FULL, ("f32", "f16"), widened=True) for k in (16, 32)),
    ),
}


def multiply(
    instruction: Instruction,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    *,
    sfa: np.ndarray | None = None,
    sfb: np.ndarray | None = None,
    exact: bool = False,
) -> np.ndarray:
    """D (M, N) = A B^T + C of one instruction, in ``d_type``, bit for bit as the unit gives it.

    a (M, K) and b (N, K): codes as unsigned integers, one element each; tf32 as fp32 bits.
    c (M, N): of ``d_type``, None for zeros. K: 8 for tf32, 16 for 16-bit types, 32 for narrower
    ones, 64 for block-scaled e2m1; of mma also half of that. M and N: any. One more dimension in
    front of all of these: so many instructions.
    sfa (M, K / vector), sfb (N, K / vector): codes of ``scale_type``, given together with
    ``vector``: ue8m0 and 32 with K = 32; ue8m0 and 32 or 16, ue4m3 and 16 with K = 64.
    exact: nothing is cut; D is the exact sum of all scaled products and c, rounded once to nearest
    even. Zero is +0, NaN as ever.

    ValueError: the unit has no instruction on these types, or shapes do not fit.
    """
    kind = _kind(instruction, a.shape[-1])
    a_type, b_type, d_type = instruction.a_type, instruction.b_type, instruction.d_type
    scale_type, vector = instruction.scale_type, instruction.vector
    *batch, m, _ = a.shape
    n = b.shape[-2]
    for name, array, shape in (
        ("a", a, (*batch, m, kind.k)),
        ("b", b, (*batch, n, kind.k)),
        ("c", c, (*batch, m, n)),
        ("sfa", sfa, (*batch, m, kind.k // vector) if vector else None),
        ("sfb", sfb, (*batch, n, kind.k // vector) if vector else None),
    ):
        given = None if array is None else array.shape
        if given != shape and not (name == "c" and given is None):
            raise ValueError(f"{name} has shape {given}, not {shape}")
    result = _RESULTS[d_type]
    if c is not None and c.dtype != result.dtype:
        raise ValueError(f"c is {c.dtype}, not {result.dtype}, with d_type {d_type}")

    with np.errstate(over="ignore", invalid="ignore"):
        if kind.widened and not exact:
            d = _widened(a, b, c, a_type, b_type, d_type)
        else:
            left, right = (
                factors(codes, type, scales, scale_type, kind.model.group > 1)
                for codes, type, scales in ((a, a_type, sfa), (b, b_type, sfb))
            )
            d = _sums(kind.model, left, right, c, d_type, exact)
    d += 0  # -0 becomes +0
    bits = d.view(f"u{d.itemsize}")
    bits[np.isnan(d)] = result.nan
    return d


def multiply_integers(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | np.int32, *, saturate: bool
) -> np.ndarray:
    """D (..., M, N) = A B^T + C of one mma.sync or wgmma on integers, in int32.

    a (..., M, K), b (..., N, K): int8 or uint8. c (..., M, N): int32, or 0.
    saturate: D is clamped to int32; otherwise it wraps.
    """
    exact = a.astype(np.float64) @ np.swapaxes(b, -1, -2).astype(np.float64)
    total = exact.astype(np.int64) + c
    if saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.int32)


def _kind(instruction: Instruction, k: int) -> Kind:
    unit, scale_type, vector = instruction.unit, instruction.scale_type, instruction.vector
    a_type, b_type, d_type = instruction.a_type, instruction.b_type, instruction.d_type
    if unit not in _KINDS:
        raise ValueError(f"unit is {unit!r}, not one of {', '.join(_KINDS)}")
    for kind in _KINDS[unit]:
        types, scaled = {a_type, b_type} <= set(kind.types), (scale_type, vector) in kind.scales
        if types and scaled and k == kind.k and d_type in kind.results:
            return kind
    scales = f" with a scale in {scale_type} for each {vector}" if vector or scale_type else ""
    raise ValueError(f"{unit} has no {d_type} += {a_type} x {b_type} of K {k}{scales}")


def _widened(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, a_type: str, b_type: str, d_type: str
) -> np.ndarray:
    sums = None
    left, right = (
        decode(codes, type)[0].astype(np.float16).view(np.uint16)
        for codes, type in ((a, a_type), (b, b_type))
    )
    for pair in (slice(2), slice(2, 4)):
        one, other = (
            half.reshape(*half.shape[:-1], -1, 4)[..., pair].reshape(*half.shape[:-1], -1)
            for half in (left, right)
        )
        sums = multiply(Instruction("mma", "f16", "f16", d_type), one, other, sums)
    assert sums is not None
    return sums if c is None else sums + c


def _sums(
    model: Model, left: Factors, right: Factors, c: np.ndarray | None, d_type: str, exact: bool
) -> np.ndarray:
    """D but for the signs of zeros and the bits of NaNs."""
    result = _RESULTS[d_type]
    if c is None:
        c = np.zeros((*left.values.shape[:-1], right.values.shape[-2]), np.float32)
    addend = np.ascontiguousarray(c, np.float32)
    if exact:
        return exact_sum(left, right, addend).astype(result.dtype)
    if d_type == "f16":
        model = model._replace(floor=_FLOOR_F16)
    sums = aligned_sum(left, right, addend, result.smallest, model)
    if d_type == "f16":
        return sums.astype(result.dtype)
    return toward_zero(sums, min(model.fraction, _FRACTION_F32))
