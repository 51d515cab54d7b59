"""Tables of the PTX ISA (9.7.15 wgmma, 9.7.16 tcgen05), typed by hand: no line here is computed.

Sources, named at each table:
[ISA]     the text of the PTX ISA (tables and sentences).
[CUTLASS] where the ISA has a figure only: the (thread, value) layouts of CUTLASS's
          cute/atom/copy_traits_sm100.hpp, mma_traits_sm100_frag.hpp, mma_traits_sm90_gmma.hpp.
[TVM]     the lane tables of the TIRx documentation (tcgen05.cp, tmem_datapath_layout).
"""

from __future__ import annotations

# --------------------------------------------------------------------------------------------------
# tcgen05.ld / .st
# --------------------------------------------------------------------------------------------------

#: [ISA] Tables 49 and 50: registers of each .num, from .x1 on; what is not listed is not allowed.
REGISTERS: dict[str, dict[int, int]] = {
    "32x32b": {1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 32: 32, 64: 64, 128: 128},
    "16x64b": {1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 32: 32, 64: 64, 128: 128},
    "16x32bx2": {1: 1, 2: 2, 4: 4, 8: 8, 16: 16, 32: 32, 64: 64, 128: 128},
    "16x128b": {1: 2, 2: 4, 4: 8, 8: 16, 16: 32, 32: 64, 64: 128},
    "16x256b": {1: 4, 2: 8, 4: 16, 8: 32, 16: 64, 32: 128},
}
NOT_ALLOWED = (("16x128b", 128), ("16x256b", 64), ("16x256b", 128), ("32x32b", 3), ("16x64b", 256))

#: [CUTLASS] (Figures 183 to 187 show the same): which thread holds column 0, 1, ... of each lane at
#: .x1: "thread.register", lanes apart by |.
FRAGMENT_X1: dict[str, str] = {
    "16x64b": """
        0.0 2.0 | 4.0 6.0 | 8.0 10.0 | 12.0 14.0 |
        16.0 18.0 | 20.0 22.0 | 24.0 26.0 | 28.0 30.0 |
        1.0 3.0 | 5.0 7.0 | 9.0 11.0 | 13.0 15.0 |
        17.0 19.0 | 21.0 23.0 | 25.0 27.0 | 29.0 31.0""",
    "16x128b": """
        0.0  1.0  2.0  3.0 |
        4.0  5.0  6.0  7.0 |
        8.0  9.0 10.0 11.0 |
       12.0 13.0 14.0 15.0 |
       16.0 17.0 18.0 19.0 |
       20.0 21.0 22.0 23.0 |
       24.0 25.0 26.0 27.0 |
       28.0 29.0 30.0 31.0 |
        0.1  1.1  2.1  3.1 |
        4.1  5.1  6.1  7.1 |
        8.1  9.1 10.1 11.1 |
       12.1 13.1 14.1 15.1 |
       16.1 17.1 18.1 19.1 |
       20.1 21.1 22.1 23.1 |
       24.1 25.1 26.1 27.1 |
       28.1 29.1 30.1 31.1""",
    "16x256b": """
        0.0  0.1  1.0  1.1  2.0  2.1  3.0  3.1 |
        4.0  4.1  5.0  5.1  6.0  6.1  7.0  7.1 |
        8.0  8.1  9.0  9.1 10.0 10.1 11.0 11.1 |
       12.0 12.1 13.0 13.1 14.0 14.1 15.0 15.1 |
       16.0 16.1 17.0 17.1 18.0 18.1 19.0 19.1 |
       20.0 20.1 21.0 21.1 22.0 22.1 23.0 23.1 |
       24.0 24.1 25.0 25.1 26.0 26.1 27.0 27.1 |
       28.0 28.1 29.0 29.1 30.0 30.1 31.0 31.1 |
        0.2  0.3  1.2  1.3  2.2  2.3  3.2  3.3 |
        4.2  4.3  5.2  5.3  6.2  6.3  7.2  7.3 |
        8.2  8.3  9.2  9.3 10.2 10.3 11.2 11.3 |
       12.2 12.3 13.2 13.3 14.2 14.3 15.2 15.3 |
       16.2 16.3 17.2 17.3 18.2 18.3 19.2 19.3 |
       20.2 20.3 21.2 21.3 22.2 22.3 23.2 23.3 |
       24.2 24.3 25.2 25.3 26.2 26.3 27.2 27.3 |
       28.2 28.3 29.2 29.3 30.2 30.3 31.2 31.3""",
    "32x32b": """
        0.0 | 1.0 | 2.0 | 3.0 | 4.0 | 5.0 | 6.0 | 7.0 |
        8.0 | 9.0 | 10.0 | 11.0 | 12.0 | 13.0 | 14.0 | 15.0 |
        16.0 | 17.0 | 18.0 | 19.0 | 20.0 | 21.0 | 22.0 | 23.0 |
        24.0 | 25.0 | 26.0 | 27.0 | 28.0 | 29.0 | 30.0 | 31.0""",
    # With immHalfSplitoff 1: the second access stands one column to the right of the first.
    "16x32bx2": """
        0.0 16.0 | 1.0 17.0 | 2.0 18.0 | 3.0 19.0 |
        4.0 20.0 | 5.0 21.0 | 6.0 22.0 | 7.0 23.0 |
        8.0 24.0 | 9.0 25.0 | 10.0 26.0 | 11.0 27.0 |
        12.0 28.0 | 13.0 29.0 | 14.0 30.0 | 15.0 31.0""",
}

#: [CUTLASS] what one more repetition adds: (columns to the right, registers up).
REPEAT: dict[str, tuple[int, int]] = {
    "32x32b": (1, 1),
    "16x64b": (2, 1),
    "16x128b": (4, 2),
    "16x256b": (8, 4),
    "16x32bx2": (1, 1),
}

#: (shape, .num, immHalfSplitoff): rows (thread, register, lane, column), counted from taddr.
FRAGMENT_ANCHORS: dict[tuple[str, int, int], list[tuple[int, int, int, int]]] = {
    ("32x32b", 2, 0): [(0, 0, 0, 0), (0, 1, 0, 1), (31, 0, 31, 0), (31, 1, 31, 1), (7, 1, 7, 1)],
    ("32x32b", 128, 0): [(0, 127, 0, 127), (31, 127, 31, 127), (16, 64, 16, 64)],
    ("16x64b", 2, 0): [(0, 1, 0, 2), (1, 0, 8, 0), (1, 1, 8, 2), (2, 0, 0, 1), (2, 1, 0, 3)],
    ("16x64b", 4, 0): [(31, 0, 15, 1), (31, 3, 15, 7), (30, 3, 7, 7), (29, 2, 15, 4), (6, 1, 1, 3)],
    ("16x64b", 128, 0): [(0, 127, 0, 254), (31, 127, 15, 255), (1, 127, 8, 254), (4, 100, 1, 200)],
    ("16x128b", 2, 0): [(0, 1, 8, 0), (0, 2, 0, 4), (0, 3, 8, 4), (3, 2, 0, 7), (31, 3, 15, 7)],
    ("16x128b", 64, 0): [(0, 126, 0, 252), (0, 127, 8, 252), (31, 127, 15, 255), (5, 10, 1, 21)],
    ("16x256b", 2, 0): [(0, 2, 8, 0), (0, 3, 8, 1), (0, 4, 0, 8), (0, 6, 8, 8), (31, 7, 15, 15)],
    ("16x256b", 32, 0): [(0, 124, 0, 248), (31, 127, 15, 255), (31, 125, 7, 255), (5, 9, 1, 19)],
    ("16x32bx2", 1, 16): [(0, 0, 0, 0), (15, 0, 15, 0), (16, 0, 0, 16), (31, 0, 15, 16)],
    ("16x32bx2", 4, 4): [(0, 3, 0, 3), (16, 0, 0, 4), (16, 3, 0, 7), (31, 3, 15, 7), (17, 1, 1, 5)],
    ("16x32bx2", 64, 128): [(15, 63, 15, 63), (16, 0, 0, 128), (31, 63, 15, 191)],
}

#: [ISA] 9.7.16.8.1: the lanes each warp of a warpgroup can reach.
WARP_LANES = {0: (0, 31), 1: (32, 63), 2: (64, 95), 3: (96, 127)}

# --------------------------------------------------------------------------------------------------
# The instruction descriptor
# --------------------------------------------------------------------------------------------------

#: [ISA] Tables 42, 43, 44: field, first bit, bits.
DENSE_FIELDS = [
    ("sparsity selector", 0, 2),
    ("sparse", 2, 1),
    ("saturate", 3, 1),
    ("d type", 4, 2),
    ("reserved", 6, 1),
    ("a type", 7, 3),
    ("b type", 10, 3),
    ("negate a", 13, 1),
    ("negate b", 14, 1),
    ("transpose a", 15, 1),
    ("transpose b", 16, 1),
    ("n / 8", 17, 6),
    ("reserved", 23, 1),
    ("m / 16", 24, 5),
    ("reserved", 29, 1),
    ("max shift", 30, 2),
]
MXF8F6F4_FIELDS = [
    ("reserved", 0, 2),
    ("sparse", 2, 1),
    ("reserved", 3, 1),
    ("sfb id", 4, 2),
    ("reserved", 6, 1),
    ("a type", 7, 3),
    ("b type", 10, 3),
    ("negate a", 13, 1),
    ("negate b", 14, 1),
    ("transpose a", 15, 1),
    ("transpose b", 16, 1),
    ("n / 8", 17, 6),
    ("scale type", 23, 1),
    ("reserved", 24, 3),
    ("m / 128", 27, 2),
    ("sfa id", 29, 2),
    ("reserved", 31, 1),
]
MXF4_FIELDS = [
    ("reserved", 0, 2),
    ("sparse", 2, 1),
    ("reserved", 3, 1),
    ("sfb id", 4, 2),
    ("reserved", 6, 1),
    ("a type", 7, 3),
    ("b type", 10, 2),
    ("reserved", 12, 1),
    ("negate a", 13, 1),
    ("negate b", 14, 1),
    ("transpose a", 15, 1),
    ("transpose b", 16, 1),
    ("n / 8", 17, 6),
    ("scale type", 23, 1),
    ("reserved", 24, 3),
    ("m / 128", 27, 2),
    ("sfa id", 29, 2),
    ("k 96", 31, 1),
]
FIELDS: dict[str, list[tuple[str, int, int]]] = {
    "f16": DENSE_FIELDS,
    "tf32": DENSE_FIELDS,
    "f8f6f4": DENSE_FIELDS,
    "i8": DENSE_FIELDS,
    "mxf8f6f4": MXF8F6F4_FIELDS,
    "mxf4": MXF4_FIELDS,
    "mxf4nvf4": MXF4_FIELDS,
}

F8F6F4_TYPES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
#: [ISA] the same tables: codes of the types of A and B, of D, and of both scales.
AB_CODES: dict[str, dict[str, int]] = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": F8F6F4_TYPES,
    "i8": {"u8": 0, "s8": 1},
    "mxf8f6f4": F8F6F4_TYPES,
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
#: Table 42 names F32 = 1 alone for .kind::f8f6f4; Table 39 allows .f16 too, CUTLASS writes a 0.
D_CODES: dict[str, dict[str, int]] = {
    "f16": {"f16": 0, "f32": 1},
    "tf32": {"f32": 1},
    "f8f6f4": {"f16": 0, "f32": 1},
    "i8": {"s32": 2},
}
SCALE_CODES: dict[str, dict[str, int]] = {
    "mxf8f6f4": {"ue8m0": 1},
    "mxf4": {"ue8m0": 1},
    "mxf4nvf4": {"ue8m0": 1, "ue4m3": 0},
}
#: [ISA] legal scale factor ids: Tables 43, 44 and 9.7.16.10.7.2.
SCALE_IDS: dict[str, tuple[int, ...]] = {"1X": (0, 1, 2, 3), "2X": (0, 2), "4X": (0,)}
#: [ISA] Table 51: (transpose, negate).
TRANSPOSE_NEGATE: dict[str, tuple[bool, bool]] = {
    "tf32": (True, True),
    "f16": (True, True),
    "f8f6f4": (True, True),
    "mxf8f6f4": (True, True),
    "i8": (True, False),
    "mxf4": (False, True),
    "mxf4nvf4": (False, True),
}

STEP_8 = (
    "8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 "
    "136 144 152 160 168 176 184 192 200 208 216 224 232 240 248 256"
)
STEP_16 = "16 32 48 64 80 96 112 128 144 160 176 192 208 224 240 256"
STEP_32 = "32 64 96 128 160 192 224 256"
INTEGERS = "8 16 24 32 48 64 80 96 112 128 144 160 176 192 208 224 240 256"
STATIONARY = "64 128 256"
#: [ISA] Table 39, dense: (kind, cta_group, ws): (every M, every N, K); not listed: invalid.
SHAPES: dict[tuple[str, int, bool], tuple[tuple[int, ...], str, int]] = {
    ("f16", 1, False): ((64, 128), STEP_8, 16),
    ("f16", 2, False): ((128, 256), STEP_16, 16),
    ("f16", 1, True): ((32, 64, 128), STATIONARY, 16),
    ("tf32", 1, False): ((64, 128), STEP_8, 8),
    ("tf32", 2, False): ((128, 256), STEP_16, 8),
    ("tf32", 1, True): ((32, 64, 128), STATIONARY, 8),
    ("f8f6f4", 1, False): ((64, 128), STEP_8, 32),
    ("f8f6f4", 2, False): ((128, 256), STEP_16, 32),
    ("f8f6f4", 1, True): ((32, 64, 128), STATIONARY, 32),
    ("i8", 1, False): ((64, 128), INTEGERS, 32),
    ("i8", 2, False): ((128, 256), STEP_32, 32),
    ("i8", 1, True): ((32, 64, 128), STATIONARY, 32),
    ("mxf8f6f4", 1, False): ((128,), STEP_8, 32),
    ("mxf8f6f4", 2, False): ((128, 256), STEP_16, 32),
    ("mxf4", 1, False): ((128,), STEP_8, 64),
    ("mxf4", 2, False): ((128, 256), STEP_16, 64),
    ("mxf4nvf4", 1, False): ((128,), STEP_8, 64),
    ("mxf4nvf4", 2, False): ((128, 256), STEP_16, 64),
}
#: [ISA] Table 39, sparse: K of each kind; with .ws N is 64 or 128; the mx kinds with cta_group::2
#: take M = 256 alone.
SPARSE_K = {
    "f16": 32,
    "tf32": 16,
    "f8f6f4": 64,
    "i8": 64,
    "mxf8f6f4": 64,
    "mxf4": 128,
    "mxf4nvf4": 128,
}
#: [ISA] Table 52: N where B of 8 bits is transposed, by cta_group.
TRANSPOSED_8_BIT = {1: STEP_16, 2: STEP_32}
#: Whole words, written out by hand from the tables: (kind, cta_group, word, what it says).
WORDS: list[tuple[str, int, int, dict[str, object]]] = [
    ("f16", 1, 0x08200490, {"d": "f32", "a": "bf16", "b": "bf16", "m": 128, "n": 128, "k": 16}),
    ("f16", 1, 0x04040000, {"d": "f16", "a": "f16", "b": "f16", "m": 64, "n": 16, "k": 16}),
    ("tf32", 2, 0x10400910, {"d": "f32", "a": "tf32", "b": "tf32", "m": 256, "n": 256, "k": 8}),
    ("f8f6f4", 1, 0x081E1490, {"d": "f32", "a": "e5m2", "b": "e2m1", "m": 128, "n": 120, "k": 32}),
    ("i8", 1, 0x040804A8, {"d": "s32", "a": "s8", "b": "s8", "m": 64, "n": 32, "saturate": True}),
    ("mxf8f6f4", 1, 0x28A00400, {"a": "e4m3", "b": "e5m2", "m": 128, "n": 128, "sfa": 1, "sfb": 0}),
    ("mxf8f6f4", 2, 0x70C00E30, {"a": "e3m2", "b": "e2m3", "m": 256, "n": 256, "sfa": 3, "sfb": 3}),
    ("mxf4", 1, 0x48A004A0, {"m": 128, "n": 128, "sfa": 2, "sfb": 2, "scale": "ue8m0", "k": 64}),
    ("mxf4nvf4", 2, 0x10400480, {"m": 256, "n": 256, "sfa": 0, "sfb": 0, "scale": "ue4m3"}),
]

# --------------------------------------------------------------------------------------------------
# The shared memory descriptor
# --------------------------------------------------------------------------------------------------

#: [ISA] Table 40 (tcgen05) and 9.7.15.5.1.2.2 (wgmma): field, first bit, bits. Addresses and
#: offsets hold (x & 0x3FFFF) >> 4.
TCGEN05_SHARED = [
    ("start", 0, 14),
    ("leading", 16, 14),
    ("stride", 32, 14),
    ("version", 46, 3),  # must be 0b001
    ("base offset", 49, 3),
    ("absolute", 52, 1),
    ("zero", 53, 8),
    ("swizzle", 61, 3),
]
WGMMA_SHARED = [
    ("start", 0, 14),
    ("leading", 16, 14),
    ("stride", 32, 14),
    ("base offset", 49, 3),
    ("swizzle", 62, 2),
]
#: [ISA] the same: codes of the swizzles; 3, 5 and 7 of tcgen05 are invalid.
TCGEN05_SWIZZLES = {0: "none", 1: "128B_atom_32B", 2: "128B", 4: "64B", 6: "32B"}
WGMMA_SWIZZLES = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
#: [ISA] the worked examples of 9.7.16.3.3 and 9.7.15.5.1.2.1.3 (Figures 166 to 170 and 188 to 192)
#: and the canonical layouts above them, the XOR of bits 4.. with bits 7.. done by hand; [CUTLASS]
#: the 32-byte atom, Swizzle<2,5,2> o ((T,8,m),(4,k)):((1,T,LBO),(8T,SBO)).
#: (major, swizzle, bits of an element, LBO, SBO): (row of A or column of B, k, byte).
OPERANDS: dict[tuple[str, str, int, int, int], list[tuple[int, int, int]]] = {
    ("k", "none", 32, 256, 128): [
        (0, 0, 0), (0, 3, 12), (0, 4, 256), (1, 0, 16), (7, 0, 112), (8, 0, 128), (15, 7, 508),
        (9, 5, 404),
    ],
    ("k", "32B", 32, 16, 256): [
        (0, 0, 0), (0, 4, 16), (1, 0, 32), (3, 7, 124), (4, 0, 144), (4, 4, 128), (7, 0, 240),
        (7, 5, 228), (8, 0, 256), (12, 0, 400), (15, 7, 492),
    ],
    ("k", "64B", 16, 16, 512): [
        (0, 8, 16), (1, 0, 64), (2, 0, 144), (2, 8, 128), (4, 0, 288), (4, 8, 304), (6, 0, 432),
        (7, 15, 494), (8, 0, 512),
    ],
    ("k", "128B", 8, 16, 1024): [
        (0, 16, 16), (1, 0, 144), (1, 16, 128), (2, 0, 288), (4, 0, 576), (7, 0, 1008),
        (7, 31, 1007), (8, 0, 1024), (9, 31, 1167),
    ],
    ("mn", "none", 16, 256, 128): [
        (0, 0, 0), (7, 0, 14), (8, 0, 128), (0, 1, 16), (0, 7, 112), (0, 8, 256), (9, 9, 402),
    ],
    ("mn", "32B", 16, 256, 512): [
        (7, 0, 14), (8, 0, 16), (16, 0, 256), (0, 1, 32), (0, 4, 144), (8, 4, 128), (0, 8, 512),
        (31, 15, 1006),
    ],
    ("mn", "64B", 16, 512, 1024): [
        (8, 0, 16), (31, 0, 62), (32, 0, 512), (0, 1, 64), (0, 2, 144), (0, 4, 288), (0, 8, 1024),
        (31, 3, 238),
    ],
    ("mn", "128B", 16, 2048, 1024): [
        (8, 0, 16), (0, 1, 144), (8, 1, 128), (63, 0, 126), (63, 7, 910), (64, 0, 2048),
        (0, 8, 1024), (72, 9, 3200),
    ],
    ("mn", "128B", 8, 4096, 1024): [
        (16, 0, 16), (127, 1, 239), (128, 0, 4096), (0, 31, 4080), (5, 9, 1173), (0, 8, 1024),
    ],
    ("mn", "128B_atom_32B", 32, 1024, 512): [
        (8, 0, 32), (0, 1, 160), (8, 1, 128), (0, 2, 320), (0, 3, 480), (31, 3, 412), (0, 4, 512),
        (32, 0, 1024), (33, 5, 1700),
    ],
}  # fmt: skip
#: The same with a start 32 bytes into the pattern ([CUTLASS] steps along K so): the pattern stays
#: where it is. (row, k, byte from the pattern's start) of "k", "128B", 8 bits, SBO 1024.
INSIDE_PATTERN = [(0, 0, 32), (0, 31, 63), (1, 0, 176), (2, 0, 256), (7, 0, 976), (8, 16, 1072)]
#: 16 elements of 4 or 6 bits in a slot of 16 bytes, from the lowest bit on, and what tcgen05.cp
#: makes of them. [ISA] 9.7.16.9.1 for the slots; 9.7.14.5 (mma) for the containers: e2m1 "resides
#: in central 4 bits", e3m2 and e2m3 "in the lower 6 bits" (Figures 199 to 203 for tcgen05).
#: bits: (the slot, its codes, bytes in Tensor Memory).
SLOTS: dict[int, tuple[str, tuple[int, ...], str]] = {
    4: (
        "1032547698badcfe aaaaaaaaaaaaaaaa",
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        "0004080c1014181c2024282c3034383c",
    ),
    6: (
        "813010 000000 ffffff 3f0000 aaaaaaaa",
        (1, 2, 3, 4, 0, 0, 0, 0, 63, 63, 63, 63, 63, 0, 0, 0),
        "01020304000000003f3f3f3f3f000000",
    ),
}

# --------------------------------------------------------------------------------------------------
# D in tensor memory
# --------------------------------------------------------------------------------------------------

#: Layouts A, B, D to G of 9.7.16.10.5 [CUTLASS, TVM; the ISA's figures 205 to 218 show the same
#: blocks], dense A: (M, cta_group, ws): blocks (rank, rows, columns of D in eighths of N, lanes),
#: first and last included; every block starts at tensor memory column 0.
Block = tuple[int, tuple[int, int], tuple[int, int], int]
ACCUMULATOR: dict[tuple[int, int, bool], list[Block]] = {
    (256, 2, False): [(0, (0, 127), (0, 7), 0), (1, (128, 255), (0, 7), 0)],  # A
    (128, 2, False): [  # B: 2x2
        (0, (0, 63), (0, 3), 0), (0, (0, 63), (4, 7), 64),
        (1, (64, 127), (0, 3), 0), (1, (64, 127), (4, 7), 64),
    ],
    (128, 1, False): [(0, (0, 127), (0, 7), 0)],  # D
    (128, 1, True): [(0, (0, 127), (0, 7), 0)],  # D
    (64, 1, True): [(0, (0, 63), (0, 3), 0), (0, (0, 63), (4, 7), 64)],  # E: 2x3
    (64, 1, False): [  # F: half of the lanes
        (0, (0, 15), (0, 7), 0), (0, (16, 31), (0, 7), 32),
        (0, (32, 47), (0, 7), 64), (0, (48, 63), (0, 7), 96),
    ],
    (32, 1, True): [  # G: 1x4
        (0, (0, 31), (0, 1), 0), (0, (0, 31), (2, 3), 32),
        (0, (0, 31), (4, 5), 64), (0, (0, 31), (6, 7), 96),
    ],
}  # fmt: skip

#: [TVM] Layout C (M = 128, cta_group::2, sparse A): as F in each CTA.
ACCUMULATOR_SPARSE: list[Block] = [
    (0, (0, 15), (0, 7), 0), (0, (16, 31), (0, 7), 32),
    (0, (32, 47), (0, 7), 64), (0, (48, 63), (0, 7), 96),
    (1, (64, 79), (0, 7), 0), (1, (80, 95), (0, 7), 32),
    (1, (96, 111), (0, 7), 64), (1, (112, 127), (0, 7), 96),
]  # fmt: skip
#: [ISA] 9.7.16.10.4: A in Tensor Memory: bits of a container: (k, column, lowest bit).
A_ELEMENTS: dict[int, list[tuple[int, int, int]]] = {
    32: [(0, 0, 0), (1, 1, 0), (7, 7, 0)],
    16: [(0, 0, 0), (1, 0, 16), (2, 1, 0), (15, 7, 16)],
    8: [(0, 0, 0), (1, 0, 8), (3, 0, 24), (4, 1, 0), (31, 7, 24)],
    4: [(0, 0, 0), (1, 0, 4), (7, 0, 28), (8, 1, 0), (63, 7, 28)],
}
#: [CUTLASS] TmemAllocMode::Duplicated, and pull request 1367 of facebookexperimental/triton: A of
#: layout B stands in lanes 0 to 63 and again in lanes 64 to 127; (M, cta_group): lanes.
A_COPIES = {(256, 2): (0,), (128, 2): (0, 64), (128, 1): (0,), (64, 1): (0,)}

# --------------------------------------------------------------------------------------------------
# Scale factors in tensor memory
# --------------------------------------------------------------------------------------------------

#: [CUTLASS] (Figures 231 to 233, 240 to 242): rows of A (columns of B), the word column.
#: [ISA] "need to be duplicated to all 32 lane partitions": lanes 0, 32, 64 and 96 on hold the same.
SCALE_COLUMNS: list[tuple[tuple[int, int], int]] = [
    ((0, 31), 0),
    ((32, 63), 1),
    ((64, 95), 2),
    ((96, 127), 3),
    ((128, 159), 4),
    ((160, 191), 5),
    ((192, 223), 6),
    ((224, 255), 7),
]
#: [ISA] 9.7.16.10.7.2 and .3: (scale_vec, id): byte of each scale of a row, in order of k.
SCALE_BYTES: dict[tuple[str, int], tuple[int, ...]] = {
    ("1X", 0): (0,),
    ("1X", 1): (1,),
    ("1X", 2): (2,),
    ("1X", 3): (3,),
    ("2X", 0): (0, 1),
    ("2X", 2): (2, 3),
    ("4X", 0): (0, 1, 2, 3),
}
#: [CUTLASS] B's scales where M = 128 with cta_group::2 (the 2x2 datapath): the first half of N
#: stands in lanes 0 to 63, the second in lanes 64 to 127. A B200 showed the same (pull request 3653
#: of facebookexperimental/triton: stored as above, N = 128 was multiplied by scale n % 64).
#: N: (columns of B, word, lanes).
SCALE_COLUMNS_2X2: dict[int, list[tuple[tuple[int, int], int, tuple[int, int]]]] = {
    128: [
        ((0, 31), 0, (0, 32)),
        ((32, 63), 1, (0, 32)),
        ((64, 95), 0, (64, 96)),
        ((96, 127), 1, (64, 96)),
    ],
    256: [
        ((0, 31), 0, (0, 32)),
        ((32, 63), 1, (0, 32)),
        ((64, 95), 2, (0, 32)),
        ((96, 127), 3, (0, 32)),
        ((128, 159), 0, (64, 96)),
        ((160, 191), 1, (64, 96)),
        ((192, 223), 2, (64, 96)),
        ((224, 255), 3, (64, 96)),
    ],
}

# --------------------------------------------------------------------------------------------------
# tcgen05.cp
# --------------------------------------------------------------------------------------------------

#: [CUTLASS, TVM; ISA 9.7.16.9.2 for the warps of each pair]: (shape, multicast): words of a row and
#: blocks (source rows, first lanes).
COPIES: dict[tuple[str, str], tuple[int, list[tuple[tuple[int, int], tuple[int, ...]]]]] = {
    ("128x256b", ""): (8, [((0, 127), (0,))]),
    ("128x128b", ""): (4, [((0, 127), (0,))]),
    ("4x256b", ""): (8, [((0, 0), (0,)), ((1, 1), (32,)), ((2, 2), (64,)), ((3, 3), (96,))]),
    ("64x128b", "warpx2::02_13"): (4, [((0, 31), (0, 64)), ((32, 63), (32, 96))]),
    ("64x128b", "warpx2::01_23"): (4, [((0, 31), (0, 32)), ((32, 63), (64, 96))]),
    ("32x128b", "warpx4"): (4, [((0, 31), (0, 32, 64, 96))]),
}
#: [ISA] 9.7.16.9.2: pairs of shape and multicast that are not allowed.
NO_COPIES = (("64x128b", ""), ("32x128b", ""), ("128x128b", "warpx4"), ("32x128b", "warpx2::02_13"))

# --------------------------------------------------------------------------------------------------
# wgmma
# --------------------------------------------------------------------------------------------------

#: [CUTLASS] CLayout_64xN (Figures 149, 151, 153): (thread, element d_i, row, column).
WGMMA_D = [
    (0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 8, 0), (0, 3, 8, 1), (0, 4, 0, 8), (0, 7, 8, 9),
    (1, 0, 0, 2), (3, 1, 0, 7), (3, 3, 8, 7), (4, 0, 1, 0), (5, 2, 9, 2), (28, 0, 7, 0),
    (31, 0, 7, 6), (31, 3, 15, 7), (31, 7, 15, 15), (32, 0, 16, 0), (63, 3, 31, 7),
    (64, 2, 40, 0), (96, 0, 48, 0), (127, 7, 63, 15), (100, 5, 49, 9),
]  # fmt: skip
#: The last elements of N = 256.
WGMMA_D_256 = [(0, 124, 0, 248), (0, 127, 8, 249), (127, 127, 63, 255), (66, 126, 40, 252)]
#: [CUTLASS] ALayout_64x8, 64x16, 64x32 (Figures 150, 148, 152): bits of an element:
#: (thread, element a_i, row, k).
WGMMA_A: dict[int, list[tuple[int, int, int, int]]] = {
    32: [
        (0, 0, 0, 0), (0, 1, 8, 0), (0, 2, 0, 4), (0, 3, 8, 4), (3, 0, 0, 3), (3, 3, 8, 7),
        (4, 1, 9, 0), (31, 3, 15, 7), (32, 0, 16, 0), (127, 3, 63, 7), (70, 2, 33, 6),
    ],
    16: [
        (0, 0, 0, 0), (0, 1, 0, 1), (0, 2, 8, 0), (0, 3, 8, 1), (0, 4, 0, 8), (0, 5, 0, 9),
        (0, 6, 8, 8), (0, 7, 8, 9), (1, 0, 0, 2), (3, 7, 8, 15), (4, 4, 1, 8), (31, 7, 15, 15),
        (32, 0, 16, 0), (127, 7, 63, 15), (70, 2, 41, 4),
    ],
    8: [
        (0, 0, 0, 0), (0, 3, 0, 3), (0, 4, 8, 0), (0, 7, 8, 3), (0, 8, 0, 16), (0, 12, 8, 16),
        (0, 15, 8, 19), (1, 0, 0, 4), (3, 3, 0, 15), (3, 15, 8, 31), (4, 8, 1, 16),
        (31, 15, 15, 31), (32, 0, 16, 0), (127, 15, 63, 31), (70, 5, 41, 9),
    ],
}  # fmt: skip
