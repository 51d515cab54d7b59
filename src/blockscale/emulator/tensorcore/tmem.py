"""Where things lie in Tensor Memory: PTX ISA 9.7.16.2.3, 9.7.16.9 and 9.7.16.10.4 to .7.

A place is a lane (0 to 127) and a column (a 32-bit word). Columns are relative to that of the
address operand. Lanes are relative to its lane, except where said otherwise. Most of this is in
figures only; the docstrings say where the text stops and CUTLASS's layouts had to tell.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .operands import frozen, unpack_slots

__all__ = [
    "COPY_SHAPES",
    "LANES",
    "SHIFT_LANES",
    "SHIFT_WORDS",
    "accumulator_places",
    "accumulator_rows",
    "copy_places",
    "decompress",
    "load_places",
    "operand_copies",
    "operand_places",
    "packed_places",
    "scale_copies",
    "scale_places",
]

LANES = 128
_Places = tuple[np.ndarray, np.ndarray]

# What each bit of the thread number, then of the register number within a repetition, adds to lane
# and column; columns of a repetition. (thread bit 4 of 16x32bx2 selects the second access.)
_LOADS: dict[str, tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...], int]] = {
    "32x32b": (((1, 0), (2, 0), (4, 0), (8, 0), (16, 0)), (), 1),
    "16x64b": (((8, 0), (0, 1), (1, 0), (2, 0), (4, 0)), (), 2),
    "16x128b": (((0, 1), (0, 2), (1, 0), (2, 0), (4, 0)), ((8, 0),), 4),
    "16x256b": (((0, 2), (0, 4), (1, 0), (2, 0), (4, 0)), ((0, 1), (8, 0)), 8),
    "16x32bx2": (((1, 0), (2, 0), (4, 0), (8, 0), (0, 0)), (), 1),
}


@lru_cache
def load_places(shape: str, num: int, warp: int, half_split: int = 0) -> _Places:
    """Lanes and columns of tcgen05.ld and .st, each (32 threads, registers).

    ``shape`` and ``num``: the qualifiers, "16x64b" and 4 for .16x64b.x4. ``half_split``:
    immHalfSplitoff of .16x32bx2, in columns. Lanes are absolute for an address whose lane is
    32 * (warp % 4), the first that the warp can reach; for an address 16 further (the shapes of 16
    lanes) add 16. Figures 183 to 187; CUTLASS's layouts of SM100_TMEM_LOAD_*.
    """
    lanes, columns = _load(shape, num, warp)
    return frozen(lanes), frozen(columns + _second(shape, half_split))


@lru_cache
def packed_places(shape: str, num: int, warp: int, half_split: int = 0) -> _Places:
    """The same with .pack::16b or .unpack::16b: lanes (32, registers), columns (.., .., 2).

    The halves of a register, low first, are the low 16 bits of two adjacent columns, so that the
    instruction reaches twice as many columns. ``half_split`` stays in columns.
    """
    lanes, columns = _load(shape, num, warp)
    pairs = (2 * columns + _second(shape, half_split))[..., None] + np.arange(2)
    return frozen(lanes), frozen(pairs)


def _load(shape: str, num: int, warp: int) -> _Places:
    if shape not in _LOADS:
        raise ValueError(f"shape is {shape!r}, allowed: {', '.join(_LOADS)}")
    threads, registers, width = _LOADS[shape]
    most = 128 >> len(registers)
    if num < 1 or num & (num - 1) or num > most:
        raise ValueError(f"num is {num}, allowed for {shape}: powers of 2 up to {most}")
    repeated = tuple((0, width << i) for i in range(num.bit_length() - 1))
    places = _bits(threads)[:, None] + _bits(registers + repeated)
    return places[..., 0] + 32 * (warp % 4), places[..., 1]


def _second(shape: str, half_split: int) -> np.ndarray:
    """What the second access of .16x32bx2 adds to the columns of its threads, (32, 1)."""
    if half_split and shape != "16x32bx2":
        raise ValueError(f"half_split is {half_split}, allowed for {shape}: 0")
    return np.arange(32)[:, None] // 16 * half_split


def _bits(steps: tuple[tuple[int, int], ...]) -> np.ndarray:
    """(2 ** len(steps), 2): for each number the sum of the steps of its bits."""
    numbers = np.arange(1 << len(steps))[:, None] >> np.arange(len(steps)) & 1
    return numbers @ np.array(steps, np.int64).reshape(-1, 2)


# How D and A of an MMA lie: (M, cta_group, .ws) -> (the rows are in the first 16 of each 32 lanes,
# parts that the columns of D are cut into, one below the other).
_DATAPATHS = {
    (256, 2, False): (False, 1),  # layout A
    (128, 2, False): (False, 2),  # B
    (128, 1, False): (False, 1),  # D
    (128, 1, True): (False, 1),
    (64, 1, True): (False, 2),  # E
    (64, 1, False): (True, 1),  # F
    (32, 1, True): (False, 4),  # G
}


def _datapath(m: int, cta_group: int, ws: bool, sparse: bool) -> tuple[bool, int]:
    if (m, cta_group, ws) not in _DATAPATHS:
        known = ", ".join(f"({a}, {b}, {c})" for a, b, c in _DATAPATHS)
        raise ValueError(f"(m, cta_group, ws) is ({m}, {cta_group}, {ws}), allowed: {known}")
    if sparse and (m, cta_group) == (128, 2):
        return True, 1  # layout C
    return _DATAPATHS[m, cta_group, ws]


@lru_cache
def accumulator_rows(m: int, cta_group: int, rank: int) -> np.ndarray:
    """The rows of D (and of A) that CTA ``rank`` of the pair holds, (m / cta_group,)."""
    if not 0 <= rank < cta_group:
        raise ValueError(f"rank is {rank}, allowed with cta_group {cta_group}: < {cta_group}")
    return frozen(np.arange(m // cta_group) + m // cta_group * rank)


@lru_cache
def accumulator_places(
    m: int, n: int, cta_group: int, rank: int, ws: bool = False, sparse: bool = False
) -> _Places:
    """Lanes and columns of D, each (m / cta_group, n): of the rows :func:`accumulator_rows` names.

    Layouts A to G of 9.7.16.10.5. Every element has a word of its own, f16 in its low half
    (9.7.16.10.4.1). Layouts C and F use 16 of each 32 lanes: those from the lane of the address on,
    which is 0 or 16. The ISA's table calls E 2x3, CUTLASS 2x2; the latter is what is here.
    """
    half, parts = _datapath(m, cta_group, ws, sparse)
    if n % parts:
        raise ValueError(f"n is {n}, allowed for m {m}: multiples of {parts}")
    row = np.arange(len(accumulator_rows(m, cta_group, rank)))[:, None]
    part, columns = np.divmod(np.arange(n)[None, :], n // parts)
    lanes = _lanes(row, half) + part * (LANES // parts)
    return frozen(lanes), frozen(np.broadcast_to(columns, lanes.shape))


def _lanes(row: np.ndarray, half: bool) -> np.ndarray:
    return row % 16 + row // 16 * 32 if half else row


@lru_cache
def operand_places(
    m: int, k: int, element_bits: int, cta_group: int = 1, ws: bool = False, sparse: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lanes, columns and lowest bits within the word of A in Tensor Memory, each (rows, k).

    ``k``: elements that are stored (half of K if A is sparse). ``element_bits``: of what holds an
    element: 32 (tf32), 16, 8 or 4 (mxf4, mxf4nvf4). Elements of 4 and 6 bits of f8f6f4 and mxf8f6f4
    have a byte each; :func:`decompress` says which bits of it. Where the columns of D are cut into
    parts, A is there once for each, :func:`operand_copies`. 9.7.16.10.4.
    """
    if element_bits not in (4, 8, 16, 32):
        raise ValueError(f"element_bits is {element_bits}, allowed: 4, 8, 16, 32")
    half, _ = _datapath(m, cta_group, ws, sparse)
    lanes = _lanes(np.arange(m // cta_group)[:, None], half)
    columns, bits = np.divmod(np.arange(k)[None, :] * element_bits, 32)
    shape = (m // cta_group, k)
    every = (np.broadcast_to(a, shape) for a in (lanes, columns, bits))
    return tuple(frozen(a) for a in every)  # type: ignore[return-value]


def operand_copies(m: int, cta_group: int = 1, ws: bool = False, sparse: bool = False) -> range:
    """How many lanes further the copies of A start, the first (0) included.

    Copy i is multiplied into part i of the columns of D. CUTLASS says so of M = 128 of a CTA pair
    and of the metadata of sparse .ws; for A of .ws it is concluded from that.
    """
    _, parts = _datapath(m, cta_group, ws, sparse)
    return range(0, LANES, LANES // parts)


_SCALES = {"1X": (1, (0, 1, 2, 3)), "2X": (2, (0, 2)), "4X": (4, (0,))}


@lru_cache
def scale_places(
    vector: str, rows: int, scale_id: int = 0, halves: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lanes, columns and bytes within the word of scales, each (rows, blocks): of one row.

    ``vector``: .scale_vec, "1X", "2X" or "4X", as many blocks. ``rows``: of scale_A those of A that
    the CTA holds, of scale_B all N, with cta_group::2 too. ``scale_id``: SFA_ID or SFB_ID, the byte
    of the first block. ``halves``: 2 for scale_B where D's columns are in two parts (M = 128 with
    cta_group::2, dense), else 1. Every row is there several times, :func:`scale_copies`.

    9.7.16.10.7 and CUTLASS's tmem_sf_frg: 32 rows in 32 lanes, the next 32 in the next column. With
    two halves the rows of the second start over at lane 64, column 0. CUTLASS has that for
    multiples of 64 rows; for others it is continued from there.
    """
    if vector not in _SCALES:
        raise ValueError(f"vector is {vector!r}, allowed: {', '.join(_SCALES)}")
    blocks, ids = _SCALES[vector]
    if scale_id not in ids:
        raise ValueError(f"scale_id is {scale_id}, allowed for {vector}: {str(ids)[1:-1]}")
    if halves not in (1, 2) or rows % halves:
        raise ValueError(f"halves is {halves}, allowed: 1, or 2 where rows ({rows}) are even")
    half, row = np.divmod(np.arange(rows)[:, None], rows // halves)
    places = (row % 32 + 64 * half, row // 32, scale_id + np.arange(blocks)[None, :])
    every = (np.broadcast_to(a, (rows, blocks)) for a in places)
    return tuple(frozen(a) for a in every)  # type: ignore[return-value]


def scale_copies(halves: int = 1) -> range:
    """How many lanes further the copies of scales start, the first (0) included: one for each 32
    lanes of the rows (or, with two halves, columns) of D that they scale."""
    return range(0, LANES // halves, 32)


#: Rows and bytes a row of the source of tcgen05.cp; it is K-major, its addresses are
#: ``operand_bytes(descriptor, *COPY_SHAPES[shape], "k")``.
COPY_SHAPES = {
    "128x256b": (128, 32),
    "4x256b": (4, 32),
    "128x128b": (128, 16),
    "64x128b": (64, 16),
    "32x128b": (32, 16),
}

# (shape, multicast): source rows that stay together, lanes from one such run to the next, lanes
# that each copy is further.
_COPIES: dict[tuple[str, str | None], tuple[int, int, tuple[int, ...]]] = {
    ("128x256b", None): (128, 0, (0,)),
    ("128x128b", None): (128, 0, (0,)),
    ("4x256b", None): (1, 32, (0,)),
    ("64x128b", "warpx2::02_13"): (64, 0, (0, 64)),
    ("64x128b", "warpx2::01_23"): (32, 64, (0, 32)),
    ("32x128b", "warpx4"): (32, 0, (0, 32, 64, 96)),
}


@lru_cache
def copy_places(shape: str, multicast: str | None = None) -> _Places:
    """Where tcgen05.cp writes: lanes (copies, rows), columns (words of a row).

    ``multicast``: the qualifier without its dot. Word w of source row r goes to ``columns[w]`` of
    the lanes ``lanes[:, r]``. 9.7.16.9.2, and CUTLASS's SM100_UTCCP_* for .4x256b, one row for each
    32 lanes.
    """
    if (shape, multicast) not in _COPIES:
        known = ", ".join(f"{a} {b}" if b else a for a, b in _COPIES)
        raise ValueError(f"shape and multicast are {shape} {multicast or ''}, allowed: {known}")
    run, step, copies = _COPIES[shape, multicast]
    rows, row_bytes = COPY_SHAPES[shape]
    row = np.arange(rows)
    lanes = row % run + row // run * step
    return frozen(np.array(copies)[:, None] + lanes), frozen(np.arange(row_bytes // 4))


_FORMATS = {"b4x16_p64": (4, 2), "b6x16_p32": (6, 0)}


def decompress(data: np.ndarray, source: str) -> np.ndarray:
    """(rows, n) bytes of shared memory -> (rows, n) bytes of Tensor Memory: tcgen05.cp to .b8x16.

    ``source``: "b4x16_p64" or "b6x16_p32", 16 elements in each 16 bytes. Six bits become the low
    ones of their byte. Four become bits 2 to 5, where mma of kind f8f6f4 has e2m1 (9.7.14.5). That
    tcgen05.cp puts them there, and that A of tcgen05.mma has them there, is in figures only (195
    and 199) and not confirmed; ldmatrix leaves them in bits 0 to 3.
    """
    if source not in _FORMATS:
        raise ValueError(f"source is {source!r}, allowed: {', '.join(_FORMATS)}")
    element_bits, padding = _FORMATS[source]
    return unpack_slots(data, element_bits) << np.uint8(padding)


#: tcgen05.shift.down: lane i takes what lane i + 1 held, for these i of 32 lanes; the last keeps
#: its words. That "down" is towards lower lanes is concluded from CUTLASS, which refills the last
#: lane of each 32 with tcgen05.cp.4x256b.
SHIFT_LANES = range(31)
SHIFT_WORDS = 8
