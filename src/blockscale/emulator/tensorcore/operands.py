"""Where an operand of wgmma or tcgen05 lies in shared memory: PTX ISA 9.7.15.5.1.2, 9.7.16.10.6.

A row here is a row of A or a column of B: what is multiplied lies along K. The same layouts
describe the source of tcgen05.cp (K-major).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .descriptors import SharedDescriptor

__all__ = ["frozen", "operand_bytes", "unpack_nibbles", "unpack_slots"]

# Bytes of a line of the pattern; how many address bits, from bit 7 on, select a line of it; the
# lowest address bit that they are added to (modulo 2).
_SWIZZLES = {
    "32B": (32, 1, 4),
    "64B": (64, 2, 4),
    "128B": (128, 3, 4),
    "128B_atom_32B": (128, 2, 5),
}


def frozen(array: Any) -> np.ndarray:
    """An int64 array that nobody can write to: caches hand out the same one to everybody."""
    result = np.ascontiguousarray(array, np.int64)
    result.flags.writeable = False
    return result


@lru_cache(maxsize=512)
def operand_bytes(
    descriptor: SharedDescriptor, rows: int, row_bytes: int, major: str, element_bits: int = 8
) -> np.ndarray:
    """Shared-memory addresses of the first byte of each element, (rows, row_bytes / element size).

    ``row_bytes``: what one instruction reads of a row (32 where A is dense), padding included.
    ``major``: "k", or "mn" where bits "transpose" are set. ``element_bits``: 8, 16 or 32. Operands
    of narrower elements are K-major: take their bytes (8) and give what is read there to
    :func:`unpack_nibbles` or :func:`unpack_slots`.

    The swizzle changes bits of the whole address, so a start inside a pattern is as good as any.
    MN-major needs 128B_atom_32B for 32-bit elements and forbids it for others (Table 54). The table
    has it K-major too, but no source says how that lies: it is refused.

    How ``base_offset`` enters is not written down: it is taken to be subtracted from the address
    bits 7 to 9 that select the line, so that lines are counted from where the pattern starts.
    """
    if element_bits not in (8, 16, 32):
        raise ValueError(f"element_bits is {element_bits}, allowed: 8, 16, 32")
    if major not in ("k", "mn"):
        raise ValueError(f'major is {major!r}, allowed: "k", "mn"')
    if major == "mn" and (element_bits == 32) != (descriptor.swizzle == "128B_atom_32B"):
        raise ValueError(
            f"swizzle is {descriptor.swizzle}, allowed where MN-major with {element_bits}-bit "
            f"elements: 128B_atom_32B {'only' if element_bits == 32 else 'excluded'}"
        )
    if descriptor.leading_absolute:
        raise ValueError("leading_absolute is True, allowed: False (True is for sm_103a)")
    size = element_bits // 8
    row = np.arange(rows)[:, None]
    k = np.arange(row_bytes // size)[None, :]
    if major == "k":
        offsets = _k_major(descriptor, row, k * size, row_bytes)
    else:
        offsets = _mn_major(descriptor, row * size, k)
    return frozen(_swizzled(descriptor, descriptor.start + offsets))


def _k_major(d: SharedDescriptor, row: np.ndarray, x: np.ndarray, row_bytes: int) -> np.ndarray:
    """Offsets before swizzling; ``x`` is the byte within a row."""
    if d.swizzle == "none":
        return row // 8 * d.stride + row % 8 * 16 + x // 16 * d.leading + x % 16
    if d.swizzle == "128B_atom_32B":
        raise ValueError('swizzle is "128B_atom_32B", allowed where K-major: all others')
    line = _SWIZZLES[d.swizzle][0]
    if row_bytes > line:
        raise ValueError(f"row_bytes is {row_bytes}, allowed with swizzle {d.swizzle}: <= {line}")
    return row // 8 * d.stride + row % 8 * line + x


def _mn_major(d: SharedDescriptor, x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Offsets before swizzling; ``x`` is the byte along MN. With 32-byte atoms the stride is from
    4 lines to the next 4, as CUTLASS has it (the pattern is 8 x 4)."""
    if d.swizzle == "none":
        return x // 16 * d.stride + x % 16 + k // 8 * d.leading + k % 8 * 16
    line = _SWIZZLES[d.swizzle][0]
    lines = 4 if d.swizzle == "128B_atom_32B" else 8
    return x // line * d.leading + x % line + k // lines * d.stride + k % lines * line


def _swizzled(d: SharedDescriptor, addresses: np.ndarray) -> np.ndarray:
    if d.swizzle == "none":
        return addresses
    _, bits, low = _SWIZZLES[d.swizzle]
    line = (addresses >> 7) - d.base_offset
    return addresses ^ ((line & (1 << bits) - 1) << low)


def unpack_nibbles(data: np.ndarray) -> np.ndarray:
    """(rows, n) bytes of packed 4-bit elements -> (rows, 2 n) codes; the low half comes first.

    Operands of kinds mxf4 and mxf4nvf4, PTX ISA 9.7.16.10.4.6.
    """
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)


def unpack_slots(data: np.ndarray, element_bits: int) -> np.ndarray:
    """(rows, n) bytes, of each 16 the first 8 or 12 with 16 elements -> (rows, n) codes.

    Operands of 4 or 6 bits of kinds f8f6f4 and mxf8f6f4, PTX ISA 9.7.16.10.4.4, the source formats
    .b4x16_p64 and .b6x16_p32 of tcgen05.cp. The rest of each 16 bytes is padding. Elements follow
    each other from the lowest bit of the first byte on.
    """
    if element_bits not in (4, 6):
        raise ValueError(f"element_bits is {element_bits}, allowed: 4, 6")
    slots = data.reshape(-1, 16)[:, : 2 * element_bits]
    bits = np.unpackbits(slots, axis=1, bitorder="little").reshape(-1, 16, element_bits)
    return np.packbits(bits, axis=2, bitorder="little")[:, :, 0].reshape(data.shape)
