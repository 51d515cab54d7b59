"""Operands of wgmma and tcgen05.mma as codes, from where they lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..tensorcore.descriptors import SharedDescriptor
from ..tensorcore.operands import frozen, operand_bytes, unpack_nibbles, unpack_slots
from .engine import Work
from .ports import read_shared
from .state import CTA
from .undefined import Undefined, fetched

__all__ = ["Codes", "Operand", "container_bits", "from_shared", "negated", "undefined_products"]

Codes = tuple[np.ndarray, Undefined | None]  # and what of them is undefined

#: Bits of what holds an element in shared memory, if not a byte.
_CONTAINERS = {"f16": 16, "bf16": 16, "tf32": 32}
#: Bytes of each 16 that hold elements narrower than a byte; copies leave the rest as it was.
_PAYLOADS = {"e2m1": 8, "e2m3": 12, "e3m2": 12}
_SIGNS = {"e2m1": 3, "e3m2": 5, "e2m3": 5, "e4m3": 7, "e5m2": 7, "f16": 15, "bf16": 15, "tf32": 31}


@dataclass(frozen=True, slots=True)
class Operand:
    """How one operand of an instruction is read: its rows in each CTA, K and type."""

    rows: int
    k: int
    type: str
    major: str  # "k" or "mn"
    packed: bool  # two elements a byte: kinds mxf4 and mxf4nvf4
    negated: bool


def container_bits(type: str) -> int:
    """Bits of what holds an element of a type."""
    return _CONTAINERS.get(type, 8)


@lru_cache(maxsize=256)
def _chunks(
    matrix: SharedDescriptor, rows: int, row_bytes: int, major: str, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Starts of the 16-byte pieces that hold an operand, and which bytes of them are its elements:
    (rows, elements * bytes)."""
    first = operand_bytes(matrix, rows, row_bytes, major, bits)
    every = (first[..., None] + np.arange(bits // 8)).reshape(rows, -1)
    starts, place = np.unique(every >> 4, return_inverse=True)
    return frozen(starts << 4), frozen(place.reshape(every.shape) * 16 + (every & 15))


def from_shared(work: Work, cta: CTA, matrix: SharedDescriptor, operand: Operand) -> Codes:
    """(rows, K) codes, negated if asked."""
    codes, found = fetched(work, lambda: _read(work, cta, matrix, operand))
    return negated(codes, operand), found


def _read(work: Work, cta: CTA, matrix: SharedDescriptor, operand: Operand) -> np.ndarray:
    bits = container_bits(operand.type)
    row_bytes = operand.k * bits // (16 if operand.packed else 8)
    starts, place = _chunks(matrix, operand.rows, row_bytes, operand.major, bits)
    size = 16 if operand.packed else _PAYLOADS.get(operand.type, 16)
    data = read_shared(work, starts.astype(np.uint64) + np.uint64(cta.shared_base), size)
    if size < 16:
        data = np.pad(data, ((0, 0), (0, 16 - size)))
    codes = np.ascontiguousarray(data.reshape(-1)[place]).view(f"u{bits // 8}")
    if operand.packed:
        codes = unpack_nibbles(codes)
    elif operand.type in _PAYLOADS:
        codes = unpack_slots(codes, 4 if operand.type == "e2m1" else 6)
    return codes


def negated(codes: np.ndarray, operand: Operand) -> np.ndarray:
    """The codes with their signs changed, if the operand says so."""
    if not operand.negated:
        return codes
    return codes ^ codes.dtype.type(1 << _SIGNS[operand.type])


_FINITE = ("e2m1", "e2m3", "e3m2")  # types that have neither infinities nor NaN


def undefined_products(a: Codes, b: Codes, types: tuple[str, str]) -> np.ndarray:
    """(rows of A, rows of B): sums of products of which a factor is undefined.

    A factor of zero hides the other one only if that is certain to be finite: 0 times NaN is NaN.
    """
    out = np.zeros((len(a[0]), len(b[0])), bool)
    for (_, found), (partner, hidden), type, other, to in (
        (a, b, types[0], types[1], out),
        (b, a, types[1], types[0], out.T),
    ):
        if found is None:
            continue
        bad = found.bits != 0
        if type not in _FINITE:
            to |= bad.any(axis=1)[:, None]
            continue
        alive = partner & partner.dtype.type(
            ~(1 << _SIGNS[other]) & (1 << 8 * partner.itemsize) - 1
        )
        live = alive != 0 if hidden is None else (alive != 0) | (hidden.bits != 0)
        to |= bad.astype(np.float32) @ live.T.astype(np.float32) > 0
    return out
