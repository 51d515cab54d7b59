"""The sums of tensor cores, bit for bit, against mmasim's model of the hardware.

A tile is 16 x 8 elements of D of one instruction, K as the instruction has it: elements of D do
not depend on each other, so its M and N do not matter. There are ``TILES`` tiles for each of the
kinds below, more than 10,000 in all. Exact sums are checked with fractions, decoding with
ml_dtypes.
"""

from __future__ import annotations

import math
import sys
import types
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import ptx_floats
import pytest
import torch

from blockscale.emulator.tensorcore.arithmetic import Instruction, multiply
from blockscale.emulator.tensorcore.elements import ELEMENTS, NO_EXPONENT, decode

# mmasim compiles its fma, which only fp64 needs, when it is imported.
sys.modules.setdefault("mmasim.arithmetic.fma", types.ModuleType("mmasim.arithmetic.fma"))
from mmasim.nv_ptx import MMA, WGMMA, TCGen05MMA, TCGen05MMABlockScale  # noqa: E402

TILES = 112
M, N = 16, 8
FP8 = ("e4m3", "e5m2")
NARROW = (*FP8, "e3m2", "e2m3", "e2m1")


@dataclass(frozen=True)
class Kind:
    unit: str
    name: str  # of PTX: what mmasim adds to the shape
    k: int
    a: str
    b: str
    d: str = "f32"
    scale: str = ""
    vector: int = 0

    def __str__(self) -> str:
        return f"{self.unit} {self.name}"

    @property
    def instruction(self) -> Instruction:
        return Instruction(self.unit, self.a, self.b, self.d, self.scale, self.vector)


def dense() -> list[Kind]:
    wide = [(8, "tf32", "tf32", "f32"), (16, "bf16", "bf16", "f32")]
    wide += [(16, "f16", "f16", d) for d in ("f32", "f16")]
    kinds = [Kind("wgmma", f"{d}.{a}.{b}", k, a, b, d) for k, a, b, d in wide]
    kinds += [
        Kind("tcgen05", f"kind::{'tf32' if k == 8 else 'f16'}.{d}.{a}.{b}", k, a, b, d)
        for k, a, b, d in wide
    ]
    for d in ("f32", "f16"):
        kinds += [Kind("wgmma", f"{d}.{a}.{b}", 32, a, b, d) for a in FP8 for b in FP8]
        kinds += [
            Kind("tcgen05", f"kind::f8f6f4.{d}.{a}.{b}", 32, a, b, d)
            for a in NARROW
            for b in NARROW
        ]
    return kinds


def of_warps() -> list[Kind]:
    types = [(4, "tf32", "tf32", "f32"), (8, "bf16", "bf16", "f32")]
    types += [(8, "f16", "f16", d) for d in ("f32", "f16")]
    types += [(16, a, b, d) for a in FP8 for b in FP8 for d in ("f32", "f16")]
    return [
        Kind("mma", f"m16n8k{k}.{d}.{a}.{b}.{d}", k, a, b, d)
        for least, a, b, d in types
        for k in (least, 2 * least)
    ]


def scaled() -> list[Kind]:
    kinds = [
        Kind("tcgen05", f"kind::mxf8f6f4.block32.f32.{a}.{b}.ue8m0", 32, a, b, "f32", "ue8m0", 32)
        for a in NARROW
        for b in NARROW
    ]
    for name, scale, vector in (
        ("mxf4", "ue8m0", 32),
        ("mxf4nvf4", "ue8m0", 32),
        ("mxf4nvf4", "ue8m0", 16),
        ("mxf4nvf4", "ue4m3", 16),
    ):
        name = f"kind::{name}.block{vector}.f32.e2m1.e2m1.{scale}"
        kinds.append(Kind("tcgen05", name, 64, "e2m1", "e2m1", "f32", scale, vector))
    return kinds


KINDS = dense() + scaled() + of_warps()
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


# ---- mmasim


def to_torch(codes: np.ndarray, type: str, packed: bool = False) -> torch.Tensor:
    if type == "e2m1" and packed:  # two to a byte, the first one high
        return torch.from_numpy(codes[..., ::2] << 4 | codes[..., 1::2])
    if type == "e2m1":
        return torch.from_numpy(codes << 2)
    kept = {
        "tf32": (np.int32, torch.float32),
        "f32": (np.int32, torch.float32),
        "bf16": (np.int16, torch.bfloat16),
        "f16": (np.int16, torch.float16),
        "e5m2": (np.uint8, torch.float8_e5m2),
        "e4m3": (np.uint8, torch.float8_e4m3fn),
        "ue4m3": (np.uint8, torch.float8_e4m3fn),
        "ue8m0": (np.uint8, torch.float8_e8m0fnu),
    }.get(type, (np.uint8, torch.uint8))
    return torch.from_numpy(np.ascontiguousarray(codes).view(kept[0])).view(kept[1])


def oracle(kind: Kind, tiles: Tiles) -> np.ndarray:
    """D of all tiles, (tiles, m, n)."""
    if kind.unit == "mma":
        given, same = (oracle_of_warps(kind, arch, tiles) for arch in ("Hopper", "Blackwell"))
        np.testing.assert_array_equal(bits(given), bits(same))
        return given
    unit = {"wgmma": WGMMA, "tcgen05": TCGen05MMABlockScale if kind.scale else TCGen05MMA}
    arch = "Hopper" if kind.unit == "wgmma" else "Blackwell"
    m, n = tiles.c.shape[1:]
    op = unit[kind.unit](arch, f"m{128 if kind.scale else 64}n8k{kind.k}.{kind.name}")

    def spread(codes: np.ndarray, type: str, axis: int) -> torch.Tensor:
        return to_torch(codes, type, kind.k == 64).unsqueeze(axis).expand(-1, m, n, -1)

    operands = [spread(tiles.a, kind.a, 2), spread(tiles.b, kind.b, 1)]
    operands.append(torch.from_numpy(tiles.c))
    if kind.scale:
        operands += [spread(tiles.sfa, kind.scale, 2), spread(tiles.sfb, kind.scale, 1)]
    return op.dpa(*operands).numpy()


def oracle_of_warps(kind: Kind, arch: str, tiles: Tiles) -> np.ndarray:
    m, n = tiles.c.shape[1:]
    a, b = (
        to_torch(codes, type).unsqueeze(axis).expand(-1, m, n, -1)
        for codes, type, axis in ((tiles.a, kind.a, 2), (tiles.b, kind.b, 1))
    )
    c = torch.from_numpy(tiles.c)
    if kind.a not in FP8:
        return MMA(arch, kind.name).dpa(a, b, c).numpy()
    # What cuobjdump shows of mma.sync on FP8: F2FP to f16, two HMMA, FADD or HADD2.
    op = MMA(arch, f"m16n8k{kind.k // 2}.{kind.d}.f16.f16.{kind.d}")
    d = torch.zeros_like(c)
    for odd in (0, 1):
        words = torch.arange(kind.k) // 2 % 2 == odd  # halves of 32-bit registers
        d = op.dpa(a[..., words].half(), b[..., words].half(), d)
    with np.errstate(all="ignore"):
        total = d.numpy() + c.numpy() + 0
    bits(total)[np.isnan(total)] = ptx_floats.nan(kind.d)
    return total


# ---- operands


@dataclass
class Tiles:
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    sfa: np.ndarray
    sfb: np.ndarray

    def __getitem__(self, i: int) -> dict[str, Any]:
        scales = {"sfa": self.sfa[i], "sfb": self.sfb[i]} if self.sfa.size else {}
        return {"a": self.a[i], "b": self.b[i], "c": self.c[i], **scales}


CONTAINER = {"tf32": np.uint32, "bf16": np.uint16, "f16": np.uint16}


def container(codes: Any, type: str) -> np.ndarray:
    return np.asarray(codes).astype(CONTAINER.get(type, np.uint8))


def elements(rng: np.random.Generator, type: str, shape: tuple[int, ...], how: str) -> np.ndarray:
    element = ELEMENTS[type]
    codes = rng.integers(1 << element.bits, size=shape)
    if how == "all":
        return container(codes, type)
    low = element.fraction + element.padding
    top = (1 << element.exponent) - 1 - (element.special == "ieee")
    span = {"finite": top, "near": rng.integers(1, 4), "small": 1, "zeros": top}[how]
    start = 0 if how == "small" else rng.integers(top - span + 1)
    field = np.clip(start + rng.integers(span + 1, size=shape), 0, top)
    codes = codes & ~(((1 << element.exponent) - 1) << low) | field << low
    codes = np.where(np.isnan(decode(container(codes, type), type)[0]), codes ^ 1, codes)
    if how == "zeros":
        sign = codes >> (element.bits - 1) << (element.bits - 1)
        codes = np.where(rng.random(shape) < 0.8, sign, codes)
    return container(codes, type)


def special(rng: np.random.Generator, type: str, codes: np.ndarray) -> None:
    """Puts an infinity or a NaN into a matrix, where the type has one."""
    if ELEMENTS[type].special != "none":
        magnitude = container((1 << (ELEMENTS[type].bits - 1)) - 1, type)
        if ELEMENTS[type].special == "ieee" and rng.random() < 0.7:
            low = ELEMENTS[type].fraction + ELEMENTS[type].padding
            magnitude = magnitude >> low << low
        sign = container(rng.integers(2) << (ELEMENTS[type].bits - 1), type)
        codes[rng.integers(len(codes)), rng.integers(codes.shape[1])] = magnitude | sign


def matrices(rng: np.random.Generator, kind: Kind, m: int, n: int, how: str) -> list[np.ndarray]:
    drawn = how if how in ("all", "near", "small", "zeros") else "finite"
    a, b = (elements(rng, type, (rows, kind.k), drawn) for type, rows in ((kind.a, m), (kind.b, n)))
    half = kind.k // 2
    if how == "cancel":  # every product has its opposite
        a[:, half:], b[:, half:] = a[:, :half], b[:, :half]
        b[:, half:] ^= container(1 << (ELEMENTS[kind.b].bits - 1), kind.b)
    if how == "special":
        special(rng, kind.a, a)
        special(rng, kind.b, b)
    return [a, b]


def scale_codes(rng: np.random.Generator, kind: Kind, rows: int, how: str) -> np.ndarray:
    shape = (rows, kind.k // kind.vector if kind.vector else 0)
    if how == "edges":
        edges = (0, 1, 127, 253, 254, 255) if kind.scale == "ue8m0" else (0, 1, 7, 8, 126, 127, 255)
        weights = [0.03 if edge == 255 else 0.97 / (len(edges) - 1) for edge in edges]
        return rng.choice(edges, shape, p=weights).astype(np.uint8)
    if how == "all":
        return rng.integers(256, size=shape).astype(np.uint8)
    if how == "low":  # sums at the smallest numbers
        return rng.integers(70, size=shape).astype(np.uint8)
    centre = 127 if kind.scale == "ue8m0" else 56
    return (centre + rng.integers(-12, 13, size=shape)).astype(np.uint8)


def accumulators(rng: np.random.Generator, d: np.ndarray, how: str) -> np.ndarray:
    """C for products whose sum is ``d``."""
    bits = np.dtype(f"u{d.itemsize}")
    sign = 1 << (8 * d.itemsize - 1)
    if how == "zero":
        return rng.choice([0.0, -0.0], d.shape).astype(d.dtype)
    if how == "bits":
        return rng.integers(1 << 8 * d.itemsize, size=d.shape).astype(bits).view(d.dtype)
    if how == "subnormal":
        low = 23 if d.itemsize == 4 else 10
        codes = rng.integers(1 << low, size=d.shape) | rng.integers(2, size=d.shape) * sign
        return codes.astype(bits).view(d.dtype)
    if how == "opposite":  # but for a few units in the last place
        near = d.view(bits) ^ rng.integers(4, size=d.shape).astype(bits)
        return -near.view(d.dtype)
    with np.errstate(all="ignore"):
        scale = np.ldexp(rng.normal(size=d.shape), rng.integers(-30, 31, d.shape))
        return (d.astype(np.float64) * scale).astype(d.dtype)


MATRICES = ("all", "finite", "near", "small", "zeros", "cancel", "special")
ACCUMULATORS = ("zero", "bits", "subnormal", "opposite", "scaled")
SCALES = ("edges", "all", "low", "near")


def draw(kind: Kind, count: int, seed: int, m: int = M, n: int = N, wild: bool = True) -> Tiles:
    rng = np.random.default_rng([seed, *str(kind).encode()])
    drawn = []
    for i in range(count):
        pair = matrices(rng, kind, m, n, MATRICES[i % len(MATRICES)] if wild else "near")
        how = SCALES[rng.integers(len(SCALES))] if wild else "near"
        drawn.append(pair + [scale_codes(rng, kind, rows, how) for rows in (m, n)])
    a, b, sfa, sfb = map(np.stack, zip(*drawn, strict=True))
    zero = np.zeros((count, m, n), np.float32 if kind.d == "f32" else np.float16)
    sums = oracle(kind, Tiles(a, b, zero, sfa, sfb))
    hows = rng.choice(ACCUMULATORS, count) if wild else ["opposite"] * count
    c = np.stack([accumulators(rng, d, how) for d, how in zip(sums, hows, strict=True)])
    return Tiles(a, b, c, sfa, sfb)


def bits(d: np.ndarray) -> np.ndarray:
    return d.view(f"u{d.itemsize}")


# ---- tests


@pytest.mark.sampled(4)
@by_kind
def test_random_tiles_equal_mmasim(kind: Kind) -> None:
    tiles = draw(kind, TILES, seed=1)
    wanted = bits(oracle(kind, tiles))
    finite = 0
    for i in range(TILES):
        given = multiply(kind.instruction, **tiles[i])
        finite += np.isfinite(given).sum()
        np.testing.assert_array_equal(bits(given), wanted[i], err_msg=f"{kind}, tile {i}")
    assert finite > 0.3 * wanted.size


def test_there_are_ten_thousand_tiles() -> None:
    assert len(KINDS) * TILES >= 10_000


@pytest.mark.parametrize(
    ("name", "m", "n"),
    [
        ("wgmma f32.bf16.bf16", 64, 256),
        ("tcgen05 kind::mxf8f6f4.block32.f32.e4m3.e4m3.ue8m0", 128, 128),
        ("tcgen05 kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3", 128, 256),
    ],
)
def test_whole_instructions_equal_mmasim(name: str, m: int, n: int) -> None:
    (kind,) = [kind for kind in KINDS if str(kind) == name]
    tiles = draw(kind, 1, 2, m, n, wild=False)
    given = multiply(kind.instruction, **tiles[0])
    np.testing.assert_array_equal(bits(given), bits(oracle(kind, tiles))[0])


@pytest.mark.parametrize("unit", ["wgmma", "tcgen05"])
@pytest.mark.parametrize(("addend", "lowest"), [(0.0, -21 - 25), (2.0**-23, -14 - 25)])
def test_tiny_f16_sums_equal_mmasim(unit: str, addend: float, lowest: int) -> None:
    """Halfway between two fp16 subnormals, and a little more: zero sets an exponent of -21 and a
    subnormal c one of -14, so that less than 2^lowest is cut and does not decide the rounding."""
    (kind,) = [k for k in KINDS if k.unit == unit and (k.a, k.d) == ("f16", "f16")]
    low = np.arange(-24, -13)
    a, b = np.zeros((1, 1, 16), np.float16), np.zeros((1, len(low), 16), np.float16)
    a[..., :2] = 2.0**-14, 2.0**-24
    b[..., 0], b[..., 1] = 2.0**-11, np.ldexp(1.0, low)
    none = np.zeros(0)
    c = np.full((1, 1, len(low)), addend, np.float16)
    tiles = Tiles(a.view(np.uint16), b.view(np.uint16), c, none, none)
    given = multiply(kind.instruction, **tiles[0])
    np.testing.assert_array_equal(bits(given), bits(oracle(kind, tiles))[0])
    np.testing.assert_array_equal(given[0] > addend, low - 24 >= lowest)


@pytest.mark.parametrize("unit", ["wgmma", "tcgen05"])
def test_sums_just_below_the_normal_numbers_are_cut(unit: str) -> None:
    """2^-126 - 2^-150 would be rounded to the smallest normal number."""
    (kind,) = [k for k in KINDS if k.unit == unit and k.a == k.b == "bf16"]
    a, b = np.zeros((1, 1, 16), np.float32), np.zeros((1, 1, 16), np.float32)
    a[..., :2], b[..., :2] = (2.0**-63, 2.0**-75), (2.0**-63, -(2.0**-75))
    codes = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    tiles = Tiles(*codes, np.zeros((1, 1, 1), np.float32), np.zeros(0), np.zeros(0))
    given = multiply(kind.instruction, **tiles[0])
    np.testing.assert_array_equal(bits(given), bits(oracle(kind, tiles))[0])
    assert given.item() == 2.0**-126 - 2.0**-149


@pytest.mark.sampled(47)
@by_kind
@pytest.mark.parametrize("exact", [False, True])
def test_many_instructions_at_once(kind: Kind, exact: bool) -> None:
    tiles = draw(kind, 40 if kind.unit == "mma" else 3, 5, wild=False)
    each = [multiply(kind.instruction, **tiles[i], exact=exact) for i in range(len(tiles.a))]
    scales = {"sfa": tiles.sfa, "sfb": tiles.sfb} if kind.scale else {}
    given = multiply(kind.instruction, tiles.a, tiles.b, tiles.c, **scales, exact=exact)
    np.testing.assert_array_equal(bits(given), bits(np.stack(each)))


ONE = 0x38  # of e4m3


@pytest.mark.parametrize(
    ("terms", "c", "d"),
    [
        ({0: 1.0}, 2.0**-24, 1.0),
        ({0: 1.0}, 1.25 * 2.0**-24, 1 + 2.0**-23),
        ({0: 1.0, 2: -1.0}, 2.0**-149, 2.0**-149),
        ({0: 1.0}, -1.0, 0.0),
    ],
)
def test_c_is_added_to_sums_of_fp8(terms: dict[int, float], c: float, d: float) -> None:
    """mma.sync only: wgmma and tcgen05.mma cut C with the products."""
    a = np.zeros((1, 16), ml_dtypes.float8_e4m3fn)
    for k, value in terms.items():
        a[0, k] = value
    ones = np.full((1, 16), ONE, np.uint8)
    types = Instruction("mma", "e4m3", "e4m3")
    given = multiply(types, a.view(np.uint8), ones, np.full((1, 1), c, np.float32))
    assert given.item() == d
    assert not np.signbit(given)


@pytest.mark.parametrize("k", [16, 32])
def test_which_products_of_fp8_are_one_sum(k: int) -> None:
    """In fp16 2048 + 1 is 2048, but 2048 + 2 is not: whether two ones come one by one is seen."""

    def sum_of(terms: dict[int, float]) -> float:
        a = np.zeros((1, k), ml_dtypes.float8_e5m2)
        for at, value in terms.items():
            a[0, at] = value
        one = np.full((1, k), 0x3C, np.uint8)
        types = Instruction("mma", "e5m2", "e5m2", "f16")
        return float(multiply(types, a.view(np.uint8), one, None).item())

    first = [at for at in range(k) if at % 4 < 2]
    for at in range(1, k):
        if at != 2:
            assert sum_of({0: 2048, at: 1, 2: 1}) == (2048 if at in first else 2050)
    assert sum_of({2: 2048, 3: 1, 0: 1}) == 2050  # the sum with 0 and 1 comes first


@pytest.mark.parametrize(
    ("unit", "c", "d"),
    [
        ("wgmma", 2.0**-13, 1 + 2.0**-13),
        ("wgmma", 1.5 * 2.0**-13, 1 + 2.0**-13),
        ("wgmma", -1.5 * 2.0**-13, 1 - 2.0**-13),  # c is cut before it is added
        ("wgmma", -(2.0**-14), 1.0),
        ("wgmma", 1 + 2.0**-13, 2.0),  # the result keeps 13 bits too
        ("tcgen05", -(2.0**-25), 1 - 2.0**-24),
        ("tcgen05", -(2.0**-26), 1.0),
        ("tcgen05", 1 + 2.0**-23, 2.0),
        ("tcgen05", -1.0, 0.0),
    ],
)
def test_where_sums_are_cut(unit: Any, c: float, d: float) -> None:
    """One product of 1 and c, by hand."""
    a = np.zeros((1, 32), np.uint8)
    a[0, 5] = ONE
    given = multiply(Instruction(unit, "e4m3", "e4m3"), a, a, np.full((1, 1), c, np.float32))
    assert given.item() == d
    assert not np.signbit(given)


# ---- exact sums, and the formats

DTYPES = {
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "ue4m3": ml_dtypes.float8_e4m3fn,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
}


def values(codes: np.ndarray, type: str) -> np.ndarray:
    if type == "ue4m3":
        codes = codes & 0x7F
    if type == "tf32":
        codes = codes & ~np.uint32(0x1FFF)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return np.ascontiguousarray(codes).view(DTYPES[type]).astype(np.float64)


def exact_sum(terms: list[float], d_type: str) -> int:
    """Bits of the sum of fractions, rounded once and never -0; infinities and NaN as in fp64."""
    if not all(map(math.isfinite, terms)):
        plain = sum(terms)
        if math.isnan(plain):
            return ptx_floats.nan(d_type)
        return ptx_floats.infinity(plain < 0, d_type)
    given = ptx_floats.encode(sum(map(Fraction, terms), Fraction(0)), d_type)
    return 0 if given == ptx_floats.zero(1, d_type) else given


@pytest.mark.sampled(30)
@by_kind
def test_exact_sums_equal_fractions(kind: Kind) -> None:
    tiles = draw(kind, 2 * len(MATRICES), 3, 3, 2)
    for i in range(len(tiles.a)):
        given = multiply(kind.instruction, **tiles[i], exact=True)
        a, b = values(tiles.a[i], kind.a), values(tiles.b[i], kind.b)
        if kind.scale:
            a = a * np.repeat(values(tiles.sfa[i], kind.scale), kind.vector, axis=1)
            b = b * np.repeat(values(tiles.sfb[i], kind.scale), kind.vector, axis=1)
        with np.errstate(invalid="ignore"):
            terms = np.concatenate([a[:, None] * b, tiles.c[i][..., None].astype(np.float64)], -1)
        for place in np.ndindex(given.shape):
            assert int(bits(given)[place]) == exact_sum(terms[place].tolist(), kind.d), (i, place)


@pytest.mark.parametrize(("tail", "d"), [(2.0**-100, 1 + 2.0**-23), (-(2.0**-100), 1.0)])
def test_exact_sums_are_rounded_once(tail: float, d: float) -> None:
    """1 + 2^-24 is a tie, and what decides it is far below fp64."""
    a, b = np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32)
    a[0, :5] = 1, 2.0**-24, 2.0**-80, -(2.0**-80), tail
    b[0, :5] = 1, 1, 1, 1, 2.0**-100
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(16)
        a, b = a[:, order], b[:, order]
        codes = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
        given = multiply(Instruction("tcgen05", "bf16", "bf16"), *codes, None, exact=True)
        assert given.item() == d


@pytest.mark.parametrize("type", DTYPES)
def test_every_code_is_decoded(type: str) -> None:
    width = ELEMENTS[type].bits
    codes = container(np.arange(1 << min(width, 16)), type)
    if type == "tf32":
        codes = codes << 16 | np.uint32(0x5A5A)
    given, exponents = decode(codes, type)
    wanted = values(codes, type)
    np.testing.assert_array_equal(given, wanted)
    np.testing.assert_array_equal(np.signbit(given)[wanted == 0], np.signbit(wanted)[wanted == 0])
    number = np.isfinite(wanted) & (wanted != 0)
    assert (exponents[~number] == NO_EXPONENT).all()
    smallest = {"tf32": -126, "bf16": -126, "f16": -14, "e5m2": -14, "e4m3": -6, "ue4m3": -6}
    smallest |= {"e3m2": -2, "e2m3": 0, "e2m1": 0, "ue8m0": -127}
    leading = np.floor(np.log2(np.abs(wanted[number])))
    np.testing.assert_array_equal(exponents[number], np.maximum(leading, smallest[type]))


@pytest.mark.parametrize("scale", [False, True])
def test_zeros_times_what_is_no_number(scale: bool) -> None:
    """Also where nothing but C has a size, or bits that are cut: it is NaN in C, too."""
    kind = Instruction("tcgen05", "e5m2", "e5m2", "f32", *(("ue8m0", 32) if scale else ()))
    a, b, c = np.zeros((4, 32), np.uint8), np.full((6, 32), 0x3C, np.uint8), np.zeros((4, 6))
    c[0, 0], scales = np.nan, {}
    if scale:
        scales = {"sfa": np.full((4, 1), 127, np.uint8), "sfb": np.full((6, 1), 127, np.uint8)}
        scales["sfb"][3], b[3] = 255, 0
    else:
        b[3, 5] = 0x7C  # infinity
    d = multiply(kind, a, b, c.astype(np.float32), **scales)
    assert np.isnan(d[:, 3]).all()
    assert np.isnan(d[0, 0])
    assert np.count_nonzero(d) == 5


def test_no_c_is_zero_and_high_bits_are_ignored() -> None:
    (kind,) = [kind for kind in KINDS if kind.name == "kind::f8f6f4.f16.e2m3.e2m1"]
    tile = draw(kind, 1, 4, wild=False)[0]
    plain = multiply(kind.instruction, **tile | {"c": np.zeros((M, N), np.float16)})
    padded = tile | {"a": tile["a"] | 0xC0, "b": tile["b"] | 0xF0, "c": None}
    np.testing.assert_array_equal(bits(multiply(kind.instruction, **padded)), bits(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "hmma"}, "unit is 'hmma', not one of wgmma, tcgen05, mma"),
        ({"unit": "mma"}, "mma has no f32 .* of K 32 with a scale in ue8m0 for each 32"),
        ({"unit": "wgmma"}, "wgmma has no f32 .* of K 32 with a scale in ue8m0 for each 32"),
        ({"a_type": "e2m1x"}, "no f32 .*= e2m1x x e4m3"),
        ({"d_type": "f16"}, "no f16"),
        ({"vector": 16}, "for each 16"),
        ({"scale_type": "ue4m3"}, "a scale in ue4m3"),
        ({"a": np.zeros((4, 16), np.uint8)}, "of K 16"),
        ({"b": np.zeros((2, 16), np.uint8)}, r"b has shape \(2, 16\), not \(2, 32\)"),
        ({"sfa": None}, r"sfa has shape None, not \(4, 1\)"),
        ({"sfb": np.zeros((2, 2), np.uint8)}, r"sfb has shape \(2, 2\), not \(2, 1\)"),
        ({"scale_type": "", "vector": 0}, r"sfa has shape \(4, 1\), not None"),
        ({"c": np.zeros((2, 4), np.float32)}, r"c has shape \(2, 4\), not \(4, 2\)"),
        ({"c": np.zeros((4, 2), np.float16)}, "c is float16, not float32, with d_type f32"),
    ],
)
def test_what_no_unit_does_is_an_error(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "unit": "tcgen05",
        "a": np.zeros((4, 32), np.uint8),
        "b": np.zeros((2, 32), np.uint8),
        "c": None,
        "a_type": "e4m3",
        "b_type": "e4m3",
        "d_type": "f32",
        "sfa": np.zeros((4, 1), np.uint8),
        "sfb": np.zeros((2, 1), np.uint8),
        "scale_type": "ue8m0",
        "vector": 32,
    }
    given = arguments | change
    types = Instruction(**{field.name: given.pop(field.name) for field in fields(Instruction)})
    with pytest.raises(ValueError, match=message):
        multiply(types, **given)
