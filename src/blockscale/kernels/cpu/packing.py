# mypy: ignore-errors
"""Codes of 4 and 6 bits in bytes, and out of them: see ``rounding.pack`` for their order."""

from __future__ import annotations

import numpy as np

from ...jit import compiled
from .intrinsics import shl, shr, transpose16


@compiled
def pack(codes, bits, out):
    """``rounding.pack`` of whole groups of codes."""
    if bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(pairs.size):
            out[i] = np.uint8(pairs[i] | np.uint16(pairs[i] >> 4))
    else:
        fours = codes.view(np.int32)
        for i in range(fours.size):
            w = fours[i]
            low = np.int32(np.int32(w & 0x3F) | np.int32(shr(w, np.int32(2)) & 0xFC0))
            high = (shr(w, np.int32(4)) & 0x3F000) | (shr(w, np.int32(6)) & 0xFC0000)
            word = np.int32(low | np.int32(high))
            out[3 * i] = np.uint8(word)
            out[3 * i + 1] = np.uint8(shr(word, np.int32(8)))
            out[3 * i + 2] = np.uint8(shr(word, np.int32(16)))


@compiled
def unpack(data, bits, n, codes):
    """``rounding.unpack`` of ``n`` codes; ``codes`` has room for whole groups."""
    if bits == 4:
        pairs = codes.view(np.uint16)
        for i in range((n + 1) // 2):
            pair = np.int32(data[i])
            pairs[i] = np.uint16(np.int32(pair & 0xF) | shl(np.int32(pair & 0xF0), np.int32(4)))
    else:
        fours = codes.view(np.int32)
        for i in range((n + 3) // 4):
            word = np.int32(
                np.int32(data[3 * i])
                | shl(np.int32(data[3 * i + 1]), np.int32(8))
                | shl(np.int32(data[3 * i + 2]), np.int32(16))
            )
            left = (word & 0x3F) | (shl(word, np.int32(2)) & 0x3F00)
            right = (shl(word, np.int32(4)) & 0x3F0000) | (shl(word, np.int32(6)) & 0x3F000000)
            fours[i] = np.int32(left | np.int32(right))


@compiled
def pack_columns(codes, height, n, stride, bits, transposed, packed, data, to, data_stride):
    """Pack ``n`` columns of ``height`` codes, each to one line of ``data``, in units of 8 bytes."""
    for c in range(0, n, 16):
        for r in range(0, height, 16):
            transpose16(codes, r * stride + c, stride, transposed, c * height + r, height)
    pack(transposed[: n * height], bits, packed)
    words, out, length = packed.view(np.int64), data.view(np.int64), height * bits // 64
    for c in range(n):
        at = (to + c * data_stride) // 8
        line, column = out[at : at + length], words[c * length : (c + 1) * length]
        for i in range(length):  # of slices: for all LLVM knows, plain indices may be negative
            line[i] = column[i]
