"""One box of a tensor: where its bytes lie in global and in shared memory, and what fills it.

PTX ISA 5.5.1 (sub-byte types), 5.5.3 (out of bounds) and 5.5.7 (swizzles). An H200 says besides
(tests/hardware/tensormap_dump.py):

- mbarriers count the bytes of the box, filled ones included, and not the gaps in shared memory;
- a load of tf32 rounds, no type flushes denormals, the NaN that fills is 0x7ff7 in every 16 bits;
- a store writes all of the 16 bytes that hold the last element in bounds of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .buffers import MemoryFault

__all__ = ["SPANS", "Tile", "swizzled"]

# PTX ISA 5.5.7: each entry xors bits of a shared-memory address, (from, count, to).
_SWIZZLES = {
    "none": (),
    "32B": ((7, 1, 4),),
    "64B": ((7, 2, 4),),
    "128B": ((7, 3, 4),),
    "128B_atom_32B": ((7, 2, 5),),
    "128B_atom_32B_flip_8B": ((7, 2, 5), (7, 1, 3)),
    "128B_atom_64B": ((7, 1, 6),),
}
SPANS = {"none": 0, "32B": 32, "64B": 64} | {s: 128 for s in _SWIZZLES if s[:4] == "128B"}


def swizzled(addresses: np.ndarray, swizzle: str) -> np.ndarray:
    """Where bytes of these shared-memory addresses lie: the pattern is one of the address."""
    out = addresses
    for source, count, target in _SWIZZLES[swizzle]:
        out = out ^ (addresses >> source & (1 << count) - 1) << target
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """One box of a tensor: n pieces, each contiguous in global and in shared memory.

    Attributes:
        addresses: (n,) uint64, of the pieces in global memory; where ``valid`` is 0, of nothing.
        offsets: (n,) int64, of the pieces in the image of the box, before the swizzle.
        valid: (n,) int64, bytes of each piece that are in bounds, from its start.
        unit: bytes of a piece in global memory.
        extent: bytes of shared memory from the first to the last that the image may touch.
        swizzle, fill, element: as in the map.
    """

    addresses: np.ndarray
    offsets: np.ndarray
    valid: np.ndarray
    unit: int
    extent: int
    swizzle: str
    fill: str
    element: str

    @property
    def nbytes(self) -> int:
        """What the mbarrier counts: the whole box, out of bounds included, gaps left out."""
        return len(self.offsets) * self.unit

    def places(self, base: int) -> np.ndarray:
        """(n,) int64: shared-memory addresses of the pieces of an image at address ``base``."""
        if base % 128:
            raise MemoryFault(f"shared address {base:#x} of a tensor copy; a multiple of 128")
        return swizzled(self.offsets + base, self.swizzle)

    def load(self, read: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
        """(n, unit) uint8: what a load writes to ``places``.

        Args:
            read: gives (m, size) bytes at (m,) global addresses.
        """
        if self.valid.min() == self.unit and not self.element.startswith("tf32"):
            return read(self.addresses, self.unit)
        fill = np.array([0xF7, 0x7F] if self.fill == "nan" else [0, 0], np.uint8)
        out = np.tile(fill, (len(self.offsets), self.unit // 2))
        for count in map(int, np.unique(self.valid[self.valid > 0])):
            at = self.valid == count
            out[at, :count] = read(self.addresses[at], count)
        if self.element.startswith("tf32"):
            inside = np.arange(0, self.unit, 4) < self.valid[:, None]
            words = out.view(np.uint32)
            words[inside] = _tf32(words[inside])
        return out

    @property
    def taken(self) -> int:
        """Bytes that a store takes at each of ``places``."""
        return 16 if self.element == "b6x16_align16" else self.unit

    def store(self, values: np.ndarray, write: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Store to global memory what lies at ``places``.

        Args:
            values: (n, taken) uint8.
            write: stores (m, size) bytes at (m,) global addresses.
        """
        inside = self.valid > 0
        if inside.any():
            values = values[inside]
            if self.element == "b6x16_align16":
                values = _packed6(values)
            write(self.addresses[inside], values)


def _tf32(words: np.ndarray) -> np.ndarray:
    """binary32 rounded to 10 bits of mantissa, to nearest even; infinities and NaN only cut."""
    special = words & np.uint32(0x7F80_0000) == 0x7F80_0000
    half = np.uint32(0xFFF) + (words >> np.uint32(13) & np.uint32(1))
    return (words + np.where(special, np.uint32(0), half)) & np.uint32(0xFFFF_E000)


def _packed6(values: np.ndarray) -> np.ndarray:
    """(n, 16) bytes with 6 bits each -> (n, 12), the first element lowest."""
    spread = np.unpackbits(values, axis=1, bitorder="little").reshape(-1, 16, 8)[:, :, :6]
    return np.packbits(spread.reshape(-1, 96), axis=1, bitorder="little")
