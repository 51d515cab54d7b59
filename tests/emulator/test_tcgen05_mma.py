"""tcgen05.mma in kernels, every kind: PTX ISA 9.7.16.10.

Operands are placed here by the canonical layouts. D must be what ``multiply`` makes of the logical
operands, bit for bit, and close to the sum in float64.
"""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
from asynchronous import refusal
from ptx_kernels import line_of
from tcgen05_kernel import run, source

from blockscale.emulator.tensorcore.arithmetic import Instruction, multiply

RNG = np.random.default_rng(16)
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
DTYPE = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn, "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn, "ue8m0": ml_dtypes.float8_e8m0fnu,
    "ue4m3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


def random_codes(type: str, rows: int, k: int) -> np.ndarray:
    if WIDTH[type] >= 16:
        values = (RNG.standard_normal((rows, k)) * np.exp2(RNG.integers(-6, 6, (rows, k)))).astype(
            DTYPE[type]
        )
        codes = values.view(f"u{WIDTH[type] // 8}")
        return codes & np.uint32(0xFFFFE000) if type == "tf32" else codes
    codes = RNG.integers(0, 1 << WIDTH[type], (rows, k), np.uint8)
    if type in ("e4m3", "e5m2"):  # neither NaN nor infinity
        codes[(codes & 0x7F) >= 0x7C] &= 0x83
    return codes


def values(codes: np.ndarray, type: str) -> np.ndarray:
    return codes.view(DTYPE[type]).astype(np.float64)


def row_bytes(codes: np.ndarray, type: str, packed: bool) -> np.ndarray:
    """(rows, bytes): as rows lie along K. 9.7.16.10.4.4 and .6."""
    if packed:
        return codes[:, ::2] | codes[:, 1::2] << 4
    if WIDTH[type] >= 8:
        return np.ascontiguousarray(codes).view(np.uint8)
    bits = np.unpackbits(codes[..., None], axis=2, bitorder="little")[:, :, : WIDTH[type]]
    slots = np.packbits(bits.reshape(len(codes), -1, 16 * WIDTH[type]), axis=2, bitorder="little")
    out = RNG.integers(0, 256, (len(codes), slots.shape[1], 16), np.uint8)  # padding is anything
    out[:, :, : slots.shape[2]] = slots
    return out.reshape(len(codes), -1)


SWIZZLE = {"none": 0, "32B": 6, "64B": 4, "128B": 2}


def place(rows: np.ndarray, start: int, swizzle: str, data: np.ndarray) -> int:
    """Put K-major rows of 32 bytes at ``start``; the descriptor. 9.7.16.10.6."""
    r, x = np.indices(rows.shape)
    if swizzle == "none":  # core matrices of 8 rows of 16 bytes
        leading, stride = len(rows) * 16, 128
        at = start + r // 8 * stride + r % 8 * 16 + x // 16 * leading + x % 16
    else:
        line = int(swizzle[:-1])
        leading, stride = 16, 8 * line
        at = start + r // 8 * stride + r % 8 * line + x
        at ^= (at >> 7 & line // 16 - 1) << 4
    data[at] = rows
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE[swizzle] << 61


def place_mn(codes: np.ndarray, start: int, data: np.ndarray) -> int:
    """MN-major, swizzle 128B: 128 bytes along MN, 8 of them along K in one pattern."""
    size = codes.itemsize
    mn, k, byte = np.indices((*codes.shape, size))
    x = mn * size + byte
    patterns = codes.shape[1] // 8
    at = start + x // 128 * 1024 * patterns + k // 8 * 1024 + k % 8 * 128 + x % 128
    at ^= (at >> 7 & 7) << 4
    data[at] = codes.view(np.uint8).reshape(*codes.shape, size)
    return start >> 4 | (1024 * patterns) >> 4 << 16 | 1024 >> 4 << 32 | 1 << 46 | 2 << 61


def lanes_of_d(m: int, n: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column of D's elements in one CTA: layouts A, B, D and F of 9.7.16.10.5."""
    row, column = np.indices((m // group, n))
    if (m, group) == (64, 1):
        return row // 16 * 32 + row % 16, column
    if (m, group) == (128, 2):
        return row + 64 * (column // (n // 2)), column % (n // 2)
    return row, column


@dataclass(frozen=True)
class Case:
    kind: str
    a: str
    b: str
    m: int
    n: int
    group: int = 1
    d: str = "f32"
    accumulate: bool = True
    in_tensor: bool = False
    swizzle: str = "128B"
    mn: str = ""  # operands that are MN-major: "a", "b", "ab"
    negate: str = ""
    scale: str = ""
    blocks: int = 0
    vector: str = ""
    ids: tuple[int, int] = (0, 0)
    scale_d: int = 0
    disable: bool = False

    def __str__(self) -> str:
        shown = [self.kind, self.a, self.b, f"{self.m}x{self.n}", f"g{self.group}"]
        for name in ("d", "swizzle", "mn", "negate", "vector", "ids", "scale_d"):
            if getattr(self, name) != Case.__dataclass_fields__[name].default:
                shown.append(f"{name}-{getattr(self, name)}")
        return " ".join([*shown, *(["tmem"] if self.in_tensor else [])])


CASES = [
    Case("f16", "f16", "f16", 128, 64),
    Case("f16", "bf16", "bf16", 64, 8, swizzle="none"),
    Case("f16", "f16", "f16", 128, 16, d="f16"),
    Case("f16", "f16", "f16", 64, 24, d="f16", accumulate=False),
    Case("f16", "bf16", "bf16", 128, 256, accumulate=False),
    Case("f16", "f16", "f16", 256, 64, group=2),
    Case("f16", "bf16", "bf16", 128, 32, group=2, swizzle="32B"),
    Case("f16", "f16", "f16", 128, 64, mn="ab"),
    Case("f16", "bf16", "bf16", 128, 128, mn="b", negate="a"),
    Case("f16", "f16", "f16", 256, 128, group=2, mn="a", negate="b"),
    Case("f16", "f16", "f16", 128, 32, in_tensor=True),
    Case("f16", "bf16", "bf16", 64, 32, in_tensor=True),
    Case("f16", "f16", "f16", 256, 32, group=2, in_tensor=True, negate="ab"),
    Case("f16", "f16", "f16", 128, 64, group=2, in_tensor=True),
    Case("f16", "f16", "f16", 128, 32, scale_d=3),
    Case("tf32", "tf32", "tf32", 64, 16, swizzle="64B", scale_d=15),
    Case("f16", "f16", "f16", 128, 32, disable=True),
    Case("f16", "f16", "f16", 256, 32, group=2, disable=True),
    Case("f16", "f16", "f16", 128, 32, group=2, disable=True),
    Case("f16", "f16", "f16", 64, 32, disable=True),
    Case("tf32", "tf32", "tf32", 128, 40, negate="a"),
    Case("tf32", "tf32", "tf32", 256, 32, group=2, swizzle="none"),
    Case("tf32", "tf32", "tf32", 128, 16, in_tensor=True),
    Case("f8f6f4", "e4m3", "e5m2", 128, 64, negate="b"),
    Case("f8f6f4", "e5m2", "e4m3", 64, 16, d="f16", swizzle="none"),
    Case("f8f6f4", "e2m1", "e3m2", 128, 32, negate="ab"),
    Case("f8f6f4", "e2m3", "e2m1", 256, 32, group=2),
    Case("f8f6f4", "e4m3", "e2m1", 128, 128, mn="a"),
    Case("f8f6f4", "e4m3", "e4m3", 128, 128, mn="ab"),
    Case("f8f6f4", "e4m3", "e4m3", 128, 16, in_tensor=True),
    Case("f8f6f4", "e2m1", "e4m3", 128, 16, in_tensor=True),
    Case("f8f6f4", "e3m2", "e2m3", 128, 32, group=2, in_tensor=True, negate="a"),
    *(Case("mxf8f6f4", "e4m3", "e4m3", 128, 64, scale="ue8m0", blocks=1, ids=ids, vector=vector)
      for ids, vector in (((0, 0), ""), ((1, 3), ".block32"), ((2, 1), ".scale_vec::1X"))),
    Case("mxf8f6f4", "e5m2", "e2m1", 128, 256, scale="ue8m0", blocks=1),
    Case("mxf8f6f4", "e2m3", "e3m2", 256, 96, group=2, scale="ue8m0", blocks=1, ids=(3, 2)),
    Case("mxf8f6f4", "e4m3", "e5m2", 128, 64, group=2, scale="ue8m0", blocks=1, ids=(1, 0)),
    Case("mxf8f6f4", "e4m3", "e4m3", 128, 32, in_tensor=True, scale="ue8m0", blocks=1, negate="a"),
    Case("mxf4", "e2m1", "e2m1", 128, 64, scale="ue8m0", blocks=2),
    Case("mxf4", "e2m1", "e2m1", 128, 8, scale="ue8m0", blocks=2, ids=(2, 0), vector=".scale_vec::2X"),
    Case("mxf4", "e2m1", "e2m1", 256, 64, group=2, scale="ue8m0", blocks=2, vector=".block32"),
    Case("mxf4", "e2m1", "e2m1", 128, 32, in_tensor=True, scale="ue8m0", blocks=2),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 64, scale="ue4m3", blocks=4, vector=".block16"),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 128, scale="ue8m0", blocks=4, vector=".scale_vec::4X", negate="b"),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 24, scale="ue8m0", blocks=2, vector=".block32", ids=(0, 2)),
    Case("mxf4nvf4", "e2m1", "e2m1", 256, 256, group=2, scale="ue4m3", blocks=4, vector=".scale_vec::4X"),
    Case("mxf4nvf4", "e2m1", "e2m1", 128, 128, group=2, scale="ue4m3", blocks=4, vector=".block16"),
]  # fmt: skip


def scale_codes(type: str, rows: int, blocks: int) -> np.ndarray:
    low, high = (120, 135) if type == "ue8m0" else (0, 120)
    return RNG.integers(low, high, (rows, blocks)).astype(np.uint8)


def put_scales(
    tensor: np.ndarray, column: int, codes: np.ndarray, id: int, halves: int = 1
) -> None:
    """9.7.16.10.7: 32 rows a column, a copy in each 32 lanes (of each half)."""
    raw = tensor.view(np.uint8).reshape(128, -1, 4)
    for half, part in enumerate(np.split(codes, halves)):
        for lane in range(64 * half, 64 * half + 128 // halves):
            rows = part[lane % 32 :: 32]
            raw[lane, column : column + len(rows), id : id + codes.shape[1]] = rows


def tensor_words(codes: np.ndarray, type: str, packed: bool) -> np.ndarray:
    """(rows, columns): A in Tensor Memory. 9.7.16.10.4."""
    if packed:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    elif type == "e2m1":
        codes = codes << 2
    return np.ascontiguousarray(codes).view(np.uint32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mma(case: Case) -> None:
    m, n, group, k = case.m, case.n, case.group, K[case.kind]
    packed = k == 64
    a, b = random_codes(case.a, m, k), random_codes(case.b, n, k)
    columns = max(32, 1 << (n + 48 - 1).bit_length())
    at_a, at_sfa, at_sfb = n, n + 16, n + 24  # columns behind those of D
    columns = 512 if columns > 256 else columns
    tensor = RNG.integers(0, 1 << 32, (group, 128, columns), np.uint32)
    data = RNG.integers(0, 256, (group, 65536), np.uint8)

    lanes, places = lanes_of_d(m, n, group)
    c = None
    if case.accumulate:
        c = (RNG.standard_normal((m, n)) * 8).astype(np.float16 if case.d == "f16" else np.float32)
        for rank, part in enumerate(np.split(c, group)):
            bits = part.view(f"u{part.itemsize}")
            tensor[rank][lanes, places] = bits.astype(np.uint32)

    for rank in range(group):
        mine = np.split(a, group)[rank]
        if case.in_tensor:
            words = tensor_words(mine, case.a, packed)
            rows = np.arange(len(mine))
            first = rows // 16 * 32 + rows % 16 if (m, group) == (64, 1) else rows
            for copy in (0, 64) if (m, group) == (128, 2) else (0,):
                tensor[rank][first + copy, at_a : at_a + words.shape[1]] = words
        elif "a" in case.mn:
            a_at = place_mn(mine, 0, data[rank])
        else:
            a_at = place(row_bytes(mine, case.a, packed), 0, case.swizzle, data[rank])
        other = np.split(b, group)[rank]
        if "b" in case.mn:
            b_at = place_mn(other, 32768, data[rank])
        else:
            b_at = place(row_bytes(other, case.b, packed), 32768, case.swizzle, data[rank])

    negate = [-1.0 if name in case.negate else 1.0 for name in "ab"]
    flip = [
        1 << {4: 3, 6: 5}.get(WIDTH[t], WIDTH[t] - 1) if name in case.negate else 0
        for name, t in (("a", case.a), ("b", case.b))
    ]
    more, types = {}, Instruction("tcgen05", case.a, case.b, case.d)
    left, right = values(a, case.a) * negate[0], values(b, case.b) * negate[1]
    idesc = CODES[case.a] << 7 | CODES[case.b] << 10 | (n >> 3) << 17
    idesc |= ("a" in case.negate) << 13 | ("b" in case.negate) << 14
    idesc |= ("a" in case.mn) << 15 | ("b" in case.mn) << 16
    if case.scale:
        if packed:
            idesc = idesc & ~(7 << 7 | 7 << 10) | 1 << 7 | 1 << 10
        sfa, sfb = scale_codes(case.scale, m, case.blocks), scale_codes(case.scale, n, case.blocks)
        for rank in range(group):
            put_scales(tensor[rank], at_sfa, np.split(sfa, group)[rank], case.ids[0])
            put_scales(tensor[rank], at_sfb, sfb, case.ids[1], 2 if (m, group) == (128, 2) else 1)
        more = {"sfa": sfa, "sfb": sfb}
        types = replace(types, scale_type=case.scale, vector=k // case.blocks)
        left = left * np.repeat(values(sfa, case.scale), k // case.blocks, 1)
        right = right * np.repeat(values(sfb, case.scale), k // case.blocks, 1)
        idesc |= (
            (case.scale == "ue8m0") << 23 | (m >> 7) << 27 | case.ids[0] << 29 | case.ids[1] << 4
        )
    else:
        idesc |= (case.d == "f32") << 4 | (m >> 4) << 24

    before = tensor.copy()
    disabled = np.zeros((group, 128), bool)
    mask = ""
    if case.disable:
        disabled = RNG.integers(0, 2, (group, 128)).astype(bool)
        words = np.packbits(disabled.reshape(-1), bitorder="little").view("<u4")
        mask = ", {" + ", ".join(f"%v{i}" for i in range(len(words))) + "}"
        setup = "".join(f"mov.b32 %v{i}, {word:#x};\n" for i, word in enumerate(words))
    else:
        setup = ""
    kind = f"kind::{case.kind}" + (f".block_scale{case.vector}" if case.scale else "")
    first = f"[%r30+{at_a}]" if case.in_tensor else "%rd10"
    scales = f", [%r30+{at_sfa}], [%r30+{at_sfb}]" if case.scale else ""
    tail = f", {case.scale_d}" if case.scale_d else ""
    body = f"""{setup}setp.ne.u32 %p5, {int(case.accumulate)}, 0;
    mov.u32 %r9, s; and.b32 %r9, %r9, 0xffffff; shr.u32 %r9, %r9, 4; cvt.u64.u32 %rd12, %r9;
    mov.u64 %rd10, {0 if case.in_tensor else a_at}; add.u64 %rd10, %rd10, %rd12;
    mov.u64 %rd11, {b_at}; add.u64 %rd11, %rd11, %rd12;
    tcgen05.mma.cta_group::{group}.{kind} [%r30], {first}, %rd11, {idesc}{scales}{mask}, %p5{tail};"""
    after = run(body, tensor, data, group)

    scaled = c
    if case.scale_d:
        scaled = c * c.dtype.type(2.0**-case.scale_d)
    sign = [np.asarray(f, x.dtype) for f, x in zip(flip, (a, b), strict=True)]
    wanted = multiply(types, a ^ sign[0], b ^ sign[1], scaled, **more)
    addend = np.zeros((m, n)) if scaled is None else scaled.astype(np.float64)
    exact, size = left @ right.T + addend, np.abs(left) @ np.abs(right).T + np.abs(addend)
    near = np.abs(wanted - exact) <= size * (2.0**-10 if case.d == "f16" else 2.0**-20)
    assert (near | (np.abs(exact) > (65000 if case.d == "f16" else np.inf))).all()

    expected = before.copy()
    for rank, part in enumerate(np.split(wanted, group)):
        bits = part.view(f"u{part.itemsize}").astype(np.uint32)
        keep = ~disabled[rank][lanes]
        expected[rank][lanes[keep], places[keep]] = bits[keep]
    assert (after == expected).all()


def test_products_add_up_in_order() -> None:
    """Four instructions along K, the first without D: the start address moves in the pattern."""
    a, b = random_codes("f16", 128, 64), random_codes("f16", 32, 64)
    data = np.zeros((1, 65536), np.uint8)
    a_at, b_at = (place(x.view(np.uint8), at, "128B", data[0]) for x, at in ((a, 0), (b, 32768)))
    idesc = 1 << 4 | (32 >> 3) << 17 | (128 >> 4) << 24
    body = (
        """mov.u32 %r9, s; and.b32 %r9, %r9, 0xffffff; shr.u32 %r9, %r9, 4; cvt.u64.u32 %rd12, %r9;
    mov.u32 %r8, 0; mov.u64 %rd10, """
        + f"{a_at}; mov.u64 %rd11, {b_at};"
        + f"""
    add.u64 %rd10, %rd10, %rd12; add.u64 %rd11, %rd11, %rd12;
    L: setp.ne.u32 %p5, %r8, 0;
    tcgen05.mma.cta_group::1.kind::f16.collector::a::lastuse [%r30], %rd10, %rd11, {idesc}, %p5;
    add.u64 %rd10, %rd10, 2; add.u64 %rd11, %rd11, 2; add.u32 %r8, %r8, 1;
    setp.lt.u32 %p5, %r8, 4; @%p5 bra L;"""
    )
    after = run(body, np.zeros((1, 128, 32), np.uint32), data)
    d, types = None, Instruction("tcgen05", "f16", "f16")
    for i in range(0, 64, 16):
        d = multiply(types, a[:, i : i + 16], b[:, i : i + 16], d)
    assert (after[0] == d.view(np.uint32)).all()


def test_copies_of_scales_that_differ() -> None:
    """What is wrong with asynchronous work is reported where it was issued, whenever it is done."""
    data = np.zeros((1, 65536), np.uint8)
    at = place(np.zeros((128, 32), np.uint8), 0, "128B", data[0])
    tensor = np.full((1, 128, 64), 0x7F7F7F7F, np.uint32)
    idesc = (16 >> 3) << 17 | 1 << 23 | 1 << 27
    body = f"""mov.u32 %r9, s; and.b32 %r9, %r9, 0xffffff; shr.u32 %r9, %r9, 4; cvt.u64.u32 %rd12, %r9;
    mov.u64 %rd10, {at}; add.u64 %rd10, %rd10, %rd12; setp.ne.u32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r30], %rd10, %rd10, {idesc}, [%r30+32], [%r30+40], %p5; // A"""
    after = run(body, tensor, data)
    assert (after[0, :, :16] == 0).all()
    tensor[0, 70, 33] = 0x7F7F7F80
    code = source(body, 64, data.shape[1])
    for error in refusal(code, [np.zeros_like(tensor), tensor, data], target="sm_100a", block=128):
        assert "copies of scale_a" in str(error)
        assert error.line == line_of(code, "// A")


ILLEGAL = [
    (f"tcgen05.mma.cta_group::{g}.kind::f16 [%r30], %rd1, %rd2, %r1, {{{', '.join(['%r2'] * n)}}}, %p5;",
     f"takes {4 * g}")
    for g, n in ((1, 8), (2, 4), (1, 3))
] + [
    ("tcgen05.mma.cta_group::1.kind::f16 [%r30], %rd1, %rd2, %r1, %p5, 16;", "from 0 to 15"),
    ("tcgen05.mma.cta_group::1.kind::f16 [%r30], %rd1, %rd2, %r1, %p5, %r2;", "immediate"),
    ("tcgen05.mma.cta_group::1.kind::f8f6f4 [%r30], %rd1, %rd2, %r1, %p5, 1;", "operands"),
    ("tcgen05.mma.kind::f16 [%r30], %rd1, %rd2, %r1, %p5;", "cta_group::1 or .cta_group::2"),
    ("tcgen05.mma.cta_group::1.kind::f16.block_scale [%r30], %rd1, %rd2, %r1, [%r2], [%r3], %p5;",
     "block_scale goes with"),
    ("tcgen05.mma.cta_group::1.kind::mxf4 [%r30], %rd1, %rd2, %r1, [%r2], [%r3], %p5;",
     "block_scale goes with"),
    ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16 [%r30], %rd1, %rd2, %r1, [%r2], [%r3], %p5;",
     "takes one of"),
    ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r30], %rd1, %rd2, %r1, [%r2], [%r3], %p5;",
     "takes one of"),
    ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::2X [%r30], %rd1, %rd2, %r1, [%r2], [%r3], %p5;",
     "takes one of"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), ILLEGAL)
def test_illegal_forms(line: str, says: str) -> None:
    args = [np.zeros(4, np.uint8)] * 3
    for error in refusal(source(line, 32, 16), args, target="sm_100a", block=128):
        assert says in str(error)


DESCRIBED = [
    (1 << 23 | 8 << 17 | 1 << 27 | 2 << 7, "", "atype is 2"),
    (8 << 17 | 1 << 27, "", "scale matrix type is 0"),
    (1 << 23 | 8 << 17 | 1 << 27, "add.u64 %rd10, %rd10, 0x8000;", "reserved bits"),
]


@pytest.mark.parametrize(("idesc", "more", "says"), DESCRIBED)
def test_illegal_descriptors(idesc: int, more: str, says: str) -> None:
    """They are the kernel's faults: the error begins with the instruction."""
    body = f"""mov.u64 %rd10, {place(np.zeros((128, 32), np.uint8), 0, "128B", np.zeros(32768, np.uint8))};
    {more} setp.ne.u32 %p5, 0, 0;
    tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r30], %rd10, %rd10, {idesc}, [%r30+32], [%r30+40], %p5;"""
    tensor, data = np.zeros((1, 128, 64), np.uint32), np.zeros((1, 32768), np.uint8)
    code = source(body, 64, data.shape[1])
    for error in refusal(code, [np.zeros_like(tensor), tensor, data], target="sm_100a", block=128):
        assert str(error).startswith("tcgen05.mma")
        assert says in str(error)
