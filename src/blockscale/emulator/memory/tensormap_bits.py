"""The 128 bytes of a tensor map in tiled mode.

Found by varying one argument of cuTensorMapEncodeTiled at a time (tests/hardware/tensormap_dump.py
has the calls, driver 580 on an H200). The element types and swizzles that only sm_100 has were read
off the bits that ptxas sets for tensormap.replace of those fields.

    byte  0   address                           byte 32   sizes - 1, one u32 a dimension
    byte  8   flags, below                      byte 52   steps - 1, three bits a dimension
    byte 12   strides / 16, low 32 bits         byte 55   box - 1, one byte a dimension
    byte 28   strides / 16, four bits more      byte 64   notes of the driver

The notes are the bytes of a box and the alignment of its place in shared memory; who builds a map
without the driver leaves them zero, and the copy engine does without.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ELEMENTS",
    "FILLS",
    "INTERLEAVES",
    "PROMOTIONS",
    "SWIZZLES",
    "pack",
    "replace",
    "unpack",
]

# Flag bits without a known effect on copies: CuTe DSL's host code sets 1 always and 21 for tensors
# of 128 KiB and more.
_FOREIGN = 1 << 1 | 1 << 21
_IM2COL = 1  # flag bit 0; bits 4 to 6 are the number of dimensions - 1
_TF32 = 1 << 16  # round to 10 bits of mantissa while loading
_NAMES = "u8 u16 u32 s32 u64 s64 f16 f32 f32_ftz f64 bf16 b4x16_align8 b4x16_align16 b6x16_align16"

# Flag bits of each choice.
ELEMENTS = {name: code << 7 for code, name in enumerate(_NAMES.split())}
ELEMENTS |= {"tf32": ELEMENTS["f32"] | _TF32, "tf32_ftz": ELEMENTS["f32_ftz"] | _TF32}
INTERLEAVES = {"none": 0, "16B": 1 << 11, "32B": 2 << 11}
SWIZZLES = {
    "none": 0,
    "32B": 1 << 13,
    "64B": 2 << 13,
    "128B": 3 << 13,
    "128B_atom_32B": 3 << 13 | 1 << 19,
    "128B_atom_32B_flip_8B": 3 << 13 | 2 << 19,
    "128B_atom_64B": 3 << 13 | 3 << 19,
}
FILLS = {"zeros": 0, "nan": 1 << 15}
PROMOTIONS = {"none": 0, "64B": 1 << 17, "128B": 2 << 17, "256B": 3 << 17}

_CHOICES = {
    "element": (ELEMENTS, 0x10780),
    "interleave": (INTERLEAVES, 0x1800),
    "swizzle": (SWIZZLES, 0x186000),
    "oob_fill": (FILLS, 0x8000),
    "l2_promotion": (PROMOTIONS, 0x60000),
}
_FORMAT = struct.Struct("<QI4II5IHx5B4xI4xI52x")


def pack(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int],
    notes: tuple[int, int],
    **choices: str,
) -> bytes:
    """The 128 bytes; ``choices`` name element, interleave, swizzle, oob_fill and l2_promotion."""
    flags = (len(shape) - 1) << 4
    for field, (codes, _) in _CHOICES.items():
        flags |= codes[choices[field]]
    sixteenths = [s >> 4 for s in strides]
    return _FORMAT.pack(
        address,
        flags,
        *_filled([s & 0xFFFF_FFFF for s in sixteenths], 4),
        sum(s >> 32 << 4 * d for d, s in enumerate(sixteenths)),
        *_filled([n - 1 for n in shape], 5),
        sum((n - 1) << 3 * d for d, n in enumerate(element_strides)),
        *_filled([n - 1 for n in box], 5),
        *notes,
    )


def unpack(raw: bytes) -> dict[str, Any]:
    """The arguments of ``pack`` less the notes.

    Raises ValueError for a map that is not tiled, or has bits that no known field accounts for.
    """
    if len(raw) != 128:
        raise ValueError(f"raw: got {len(raw)} bytes; a tensor map has 128")
    address, flags, *rest = _FORMAT.unpack(raw)
    low, high, sizes, steps, box = rest[:4], rest[4], rest[5:10], rest[10], rest[11:16]
    if flags & _IM2COL:
        raise ValueError("raw: a tensor map of im2col mode; only tiled mode is supported")
    rank = (flags >> 4 & 7) + 1
    known = 0x70 | _FOREIGN
    choices: dict[str, str] = {}
    for field, (codes, mask) in _CHOICES.items():
        known |= mask
        names = [name for name, code in codes.items() if code == flags & mask]
        if not names:
            raise ValueError(f"raw: flags {flags:#010x} hold no known {field}")
        choices[field] = names[0]
    if flags & ~known or rank > 5 or raw[54] or any(raw[60:64]):
        raise ValueError(
            f"raw: not a tensor map of tiled mode: flags {flags:#010x}, "
            f"byte 54 {raw[54]:#x}, bytes 60 to 63 {raw[60:64].hex()}"
        )
    return {
        "address": address,
        "shape": tuple(n + 1 for n in sizes[:rank]),
        "strides": tuple((low[d] | (high >> 4 * d & 15) << 32) << 4 for d in range(rank - 1)),
        "box": tuple(n + 1 for n in box[:rank]),
        "element_strides": tuple((steps >> 3 * d & 7) + 1 for d in range(rank)),
        **choices,
    }


def _filled(values: list[int], count: int) -> list[int]:
    return values + [0] * (count - len(values))


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
#: Bits of the flags that tensormap.replace sets, by its name of the field; read off the code that
#: ptxas makes of it, as is what ``replace`` does with the other fields.
_REPLACED = {
    "rank": 0x70,
    "elemtype": 0x780,
    "interleave_layout": 0x1800,
    "swizzle_mode": 0x40_6000,
    "fill_mode": 0x8000,
    "swizzle_atomicity": 0x38_0000,
}
#: Codes of .elemtype: the ISA's table has the tf32 types before the packed ones. Types but these
#: leave the bit of tf32 as it is.
_REPLACED_TYPES = {11: "tf32", 12: "tf32_ftz", 13: "b4x16_align8", 14: "b4x16_align16"}
_REPLACED_TYPES |= {15: "b6x16_align16"}


def replace(raw: bytes, field: str, place: int, value: int) -> bytes:
    """The 128 bytes with one field changed, as tensormap.replace does (PTX ISA 9.7.9.28).

    Args:
        field: name in the PTX ISA, "global_address".
        place: of the dimension, for fields that have one for each.
        value: bytes for addresses and strides, the number for sizes and steps, the number less
            one for the rank, a code of the ISA's table 33 for types and modes.
    """
    out = bytearray(raw)
    if field == "global_address":
        _U64.pack_into(out, 0, value)
    elif field == "global_stride":
        _U32.pack_into(out, 12 + 4 * place, value >> 4 & 0xFFFF_FFFF)
        high = _U32.unpack_from(out, 28)[0] & ~(15 << 4 * place)
        _U32.pack_into(out, 28, high | (value >> 36 & 15) << 4 * place)
    elif field == "global_dim":
        _U32.pack_into(out, 32 + 4 * place, value - 1 & 0xFFFF_FFFF)
    elif field == "box_dim":
        out[55 + place] = value - 1 & 0xFF
    elif field == "element_stride":
        steps = int.from_bytes(out[52:54], "little") & ~(7 << 3 * place)
        out[52:54] = (steps | (value - 1 & 7) << 3 * place).to_bytes(2, "little")
    else:
        mask = _REPLACED[field]
        bits = value << (mask & -mask).bit_length() - 1 & mask
        if field == "elemtype" and value in _REPLACED_TYPES:
            bits = ELEMENTS[_REPLACED_TYPES[value]]
        flags = _U32.unpack_from(out, 8)[0]
        _U32.pack_into(out, 8, flags & ~mask | bits)
    return bytes(out)
