"""mma.sync: where each lane's registers belong, what is multiplied, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ptx_kernels import run, text
from wgmma_kernels import DTYPES as FLOATS

from blockscale import emulator as em
from blockscale.emulator.ieee import exact_fp64
from blockscale.emulator.tensorcore.arithmetic import Instruction, multiply

M, N = 16, 8
DTYPES: dict[str, Any] = {
    **FLOATS,
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "f32": np.dtype(np.float32),
    "s32": np.dtype(np.int32),
}

#: (lane / 4, lane % 4, element of the lane) -> (row, column).
Place = Callable[[int, int, int], tuple[int, int]]
#: PTX ISA 9.7.14.5: by bits of an element and K, where A (row, k) and B (k, column) are.
PLACES: dict[tuple[int, int], tuple[Place, Place]] = {
    (32, 4): (lambda g, t, i: (g + 8 * i, t), lambda g, t, i: (t, g)),
    (32, 8): (
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    (16, 8): (
        lambda g, t, i: (g if i < 2 else g + 8, 2 * t + i % 2),
        lambda g, t, i: (2 * t + i, g),
    ),
    (16, 16): (
        lambda g, t, i: (g if i in (0, 1, 4, 5) else g + 8, 2 * t + i % 2 + (8 if i >= 4 else 0)),
        lambda g, t, i: (2 * t + i % 2 + (8 if i >= 2 else 0), g),
    ),
    (8, 16): (
        lambda g, t, i: (g if i < 4 else g + 8, 4 * t + i % 4),
        lambda g, t, i: (4 * t + i, g),
    ),
    (8, 32): (
        lambda g, t, i: (
            g if i < 4 or 8 <= i < 12 else g + 8,
            4 * t + i % 4 + (16 if i >= 8 else 0),
        ),
        lambda g, t, i: (4 * t + i % 4 + (16 if i >= 4 else 0), g),
    ),
}


def place_of_d(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8, 2 * t + i % 2)


def to_lanes(matrix: np.ndarray, place: Place) -> np.ndarray:
    """(32, registers) words of a matrix."""
    held = matrix.size // 32
    out = np.empty((32, held), matrix.dtype)
    for lane in range(32):
        for i in range(held):
            out[lane, i] = matrix[place(lane // 4, lane % 4, i)]
    return out.view(np.uint32)


@dataclass(frozen=True)
class Shape:
    k: int
    d: str
    a: str
    b: str
    more: str = ""

    def __str__(self) -> str:
        return f"m16n8k{self.k}.row.col{self.more}.{self.d}.{self.a}.{self.b}.{self.d}"

    @property
    def places(self) -> tuple[Place, Place, Place]:
        return (*PLACES[8 * DTYPES[self.a].itemsize, self.k], place_of_d)

    def registers(self) -> tuple[int, int, int]:
        sizes = (M * self.k, self.a), (N * self.k, self.b), (M * N, self.d)
        a, b, d = (count * DTYPES[type].itemsize // 128 for count, type in sizes)
        return a, b, d


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def body(shape: Shape, product: str = "") -> str:
    """A from %r10, B from %r14, C in %r16; D, unless ``product`` says otherwise, in %r20."""
    a, b, d = shape.registers()
    text = ""
    for first, count, name in ((10, a, "a"), (14, b, "b"), (16, d, "c")):
        text += f"ld.param.u64 %rd1, [{name}]; mad.wide.u32 %rd1, %t, {4 * count}, %rd1;\n"
        text += "".join(f"ld.global.b32 %r{first + i}, [%rd1+{4 * i}];\n" for i in range(count))
    text += product or instruction(shape)
    text += f"mad.wide.u32 %rd1, %t, {4 * d}, %out;\n"
    return text + "".join(f"st.global.b32 [%rd1+{4 * i}], %r{20 + i};\n" for i in range(d))


def instruction(shape: Shape, d_at: int = 20, c_at: int = 16) -> str:
    a, b, d = shape.registers()
    operands = ", ".join((names(d_at, d), names(10, a), names(14, b), names(c_at, d)))
    return f"mma.sync.aligned.{shape} {operands};\n"


def launch(
    shape: Shape,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    product: str = "",
    device: em.Device | None = None,
) -> tuple[np.ndarray, em.Report]:
    """D in lanes (warps, 32, registers) of matrices a (warps, M, K), b (warps, K, N), c."""
    words = [
        np.stack([to_lanes(matrix, place) for matrix in matrices])
        for matrices, place in zip((a, b, c), shape.places, strict=True)
    ]
    out = np.full_like(words[2], 0xDEADBEEF)
    parameters = ".param .u64 a, .param .u64 b, .param .u64 c"
    source = text(body(shape, product), parameters, target="sm_90")
    device = device or em.Device("sm_90a")
    return out, device.launch(source, "k", 1, 32 * len(a), [out, *words], profile=True)


def random(shape: Shape, warps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = []
    for dims, type in (((M, shape.k), shape.a), ((shape.k, N), shape.b), ((M, N), shape.d)):
        dtype = DTYPES[type]
        if type in ("s8", "u8", "s32"):
            limits = np.iinfo(dtype)
            found.append(rng.integers(limits.min, limits.max, (warps, *dims), dtype, endpoint=True))
        else:
            found.append(rng.normal(size=(warps, *dims)).astype(dtype))
    return found[0], found[1], found[2]


def in_lanes(matrices: np.ndarray) -> np.ndarray:
    return np.stack([to_lanes(matrix, place_of_d) for matrix in matrices])


FLOATS = [
    *(Shape(k, "f32", "tf32", "tf32") for k in (4, 8)),
    *(Shape(k, "f32", "bf16", "bf16") for k in (8, 16)),
    *(Shape(k, d, "f16", "f16") for k in (8, 16) for d in ("f32", "f16")),
    *(
        Shape(k, d, a, b)
        for k in (16, 32)
        for d in ("f32", "f16")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ),
]
INTEGERS = [
    Shape(k, "s32", a, b, more)
    for k in (16, 32)
    for a in ("s8", "u8")
    for b in ("s8", "u8")
    for more in ("", ".satfinite")
]


@pytest.mark.parametrize("shape", FLOATS + INTEGERS[::2], ids=str)
def test_every_element_has_its_place(shape: Shape) -> None:
    """Small whole numbers, so that the product is exact: one wrong place shows."""
    rng = np.random.default_rng(1)
    a, b, c = (
        rng.integers(0 if "u8" in shape.a + shape.b else -2, 3, (2, *dims)).astype(DTYPES[type])
        for dims, type in (((M, shape.k), shape.a), ((shape.k, N), shape.b), ((M, N), shape.d))
    )
    wanted = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    out, _ = launch(shape, a, b, c)
    assert (out == in_lanes(wanted.astype(DTYPES[shape.d]))).all()


def wild(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of like size, numbers of any size with zeros among them, and any bits; C is also
    the opposite of the product but for a few bits."""
    rng = np.random.default_rng(seed)
    a, b, c = random(shape, 12, seed)
    for x in (a, b):
        spread = np.ldexp(x[3:9].astype(np.float64), rng.integers(-9, 9, x[3:9].shape))
        x[3:9] = np.where(rng.random(spread.shape) < 0.2, 0, spread).astype(x.dtype)
        x[9:].view(np.uint8)[:] = rng.integers(256, size=x[9:].view(np.uint8).shape)
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) @ b.astype(np.float64)
        c[::3] = (product[::3] * -rng.choice([1, 1 + 2.0**-9, 1 - 2.0**-11], c[::3].shape)).astype(
            c.dtype
        )
        c[10:].view(np.uint8)[:] = rng.integers(256, size=c[10:].view(np.uint8).shape)
    return a, b, c


@pytest.mark.parametrize("shape", FLOATS, ids=str)
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.undefined)])
def test_sums(shape: Shape, exact: bool) -> None:
    """test_tensorcore_arithmetic.py has the sums themselves; here, that these are taken."""
    a, b, c = wild(shape, 2)
    bits_a, bits_b = (x.view(f"u{x.dtype.itemsize}") for x in (a, b))
    types = Instruction("mma", shape.a, shape.b, shape.d)
    wanted = [
        multiply(types, x, y.T, z, exact=exact) for x, y, z in zip(bits_a, bits_b, c, strict=True)
    ]
    out, _ = launch(shape, a, b, c, device=em.Device("sm_90a", exact=exact))
    assert (out == in_lanes(np.stack(wanted))).all()


@pytest.mark.parametrize("shape", INTEGERS, ids=str)
def test_sums_of_integers(shape: Shape) -> None:
    a, b, c = random(shape, 2)
    c[0] = np.iinfo(np.int32).max - np.arange(M * N, dtype=np.int32).reshape(M, N) * 1000
    c[1] = np.iinfo(np.int32).min + np.arange(M * N, dtype=np.int32).reshape(M, N) * 1000
    wanted = np.empty_like(c)
    passed = 0
    for place in np.ndindex(c.shape):
        warp, row, column = place
        pairs = zip(a[warp, row].tolist(), b[warp, :, column].tolist(), strict=True)
        total = int(c[place]) + sum(x * y for x, y in pairs)
        passed += not -(1 << 31) <= total < 1 << 31
        if shape.more:
            wanted[place] = min(max(total, -(1 << 31)), (1 << 31) - 1)
        else:
            wanted[place] = (total + (1 << 31)) % (1 << 32) - (1 << 31)
    assert passed
    assert (launch(shape, a, b, c)[0] == in_lanes(wanted)).all()


BF16 = Shape(16, "f32", "bf16", "bf16")


def products(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of bf16, an instruction for each warp."""
    each = [
        multiply(Instruction("mma", "bf16", "bf16"), x.view(np.uint16), y.view(np.uint16).T, z)
        for x, y, z in zip(a, b, c, strict=True)
    ]
    return np.stack(each)


def test_the_sum_stays_in_its_registers() -> None:
    """D over C, as loops have it; each of the products sees the one before."""
    a, b, c = random(BF16, 2)
    again = instruction(BF16, c_at=20)
    out, _ = launch(BF16, a, b, c, instruction(BF16) + again + again)
    for _ in range(3):
        c = products(a, b, c)
    assert (out == in_lanes(c)).all()


def test_d_over_a() -> None:
    """Everything is read before anything is written."""
    a, b, c = random(BF16, 1)
    moves = "".join(f"mov.b32 %r{20 + i}, %r{10 + i};" for i in range(4))
    out, _ = launch(BF16, a, b, c, instruction(BF16, d_at=10) + moves)
    assert (out == in_lanes(products(a, b, c))).all()


def test_sums_in_registers_of_floats() -> None:
    a, b, c = random(BF16, 1)
    product = "".join(f"mov.b32 %f{i}, %r{16 + i};" for i in range(4))
    product += instruction(BF16).replace("%r20, %r21, %r22, %r23", "%f0, %f1, %f2, %f3")
    product = product.replace("%r16, %r17, %r18, %r19}", "%f0, %f1, %f2, %f3}")
    product += "".join(f"mov.b32 %r{20 + i}, %f{i};" for i in range(4))
    out, _ = launch(BF16, a, b, c, product)
    assert (out == in_lanes(products(a, b, c))).all()


def test_warps_on_their_own() -> None:
    """Odd warps pass over it by a branch, and by a predicate; lanes that diverged meet before."""
    a, b, c = random(BF16, 4)
    keep = "".join(f"mov.b32 %r{20 + i}, %r{16 + i};" for i in range(4))
    setup = f"{keep} and.b32 %r1, %t, 32; setp.ne.u32 %p1, %r1, 0;"
    lanes = """and.b32 %r1, %t, 5; setp.eq.u32 %p2, %r1, 1; @%p2 bra odd; add.u32 %r2, %r1, 1;
    bra.uni join; odd: add.u32 %r2, %r1, 2; add.u32 %r2, %r2, 3; join: """
    wanted = c.copy()
    wanted[::2] = products(a, b, c)[::2]
    for product in (
        f"{setup} @%p1 bra over; {lanes} {instruction(BF16)} over:",
        f"{setup} {lanes} @!%p1 {instruction(BF16)}",
    ):
        out, report = launch(BF16, a, b, c, product)
        assert (out == in_lanes(wanted)).all()
        assert [(row.count, row.flops) for row in report.products] == [(2, 2 * 2 * 16 * 8 * 16)]


def test_report() -> None:
    _, report = launch(BF16, *random(BF16, 3))
    opcode = f"mma.sync.aligned.{BF16}"
    assert report.instructions[opcode] == report.families()["mma.sync"] == 96
    assert [(p.opcode, p.count, p.flops) for p in report.products] == [(opcode, 3, 3 * 4096)]


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blackwell_gives_the_same(target: str) -> None:
    operands = random(BF16, 1)
    out, _ = launch(BF16, *operands, device=em.Device(target))
    assert (out == launch(BF16, *operands)[0]).all()


# --- fp64 -----------------------------------------------------------------------------------------

#: PTX ISA 9.7.14.5: by M, where A (row, k), B (k, column) and D are.
DOUBLES: dict[int, tuple[Place, Place, Place]] = {
    8: (lambda g, t, i: (g, t), lambda g, t, i: (t, g), lambda g, t, i: (g, 2 * t + i)),
    16: (
        lambda g, t, i: (g + 8 * (i % 2), 4 * (i // 2) + t),
        lambda g, t, i: (t + 4 * i, g),
        place_of_d,
    ),
}


def doubles(
    m: int, k: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str = ""
) -> np.ndarray:
    """D of mma.sync in fp64, as a matrix."""
    counts = m * N // 32, m * k // 32, k * N // 32
    first = 10, 20, 30  # D and C, A, B: %rd registers
    words = [
        to_lanes(matrix, place).view(np.float64)
        for matrix, place in zip((c, a, b), (DOUBLES[m][2], *DOUBLES[m][:2]), strict=True)
    ]
    body = ""
    for name, at, count in zip("cab", first, counts, strict=True):
        body += f"ld.param.u64 %rd1, [{name}]; mad.wide.u32 %rd1, %t, {8 * count}, %rd1;\n"
        body += "".join(f"ld.global.b64 %rd{at + i}, [%rd1+{8 * i}];\n" for i in range(count))
    d, a_of, b_of = (
        "{" + ", ".join(f"%rd{at + i}" for i in range(count)) + "}"
        for at, count in zip(first, counts, strict=True)
    )
    body += f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64{rounding} "
    body += f"{d}, {a_of}, {b_of}, {d};\nmad.wide.u32 %rd1, %t, {8 * counts[0]}, %out;\n"
    body += "".join(f"st.global.b64 [%rd1+{8 * i}], %rd{10 + i};\n" for i in range(counts[0]))
    out = np.zeros((32, counts[0]))
    source = text(body, ".param .u64 c, .param .u64 a, .param .u64 b")
    em.Device("sm_90a").launch(source, "k", 1, 32, [out, *words])
    found = np.zeros_like(c)
    for lane, i in np.ndindex(out.shape):
        found[DOUBLES[m][2](lane // 4, lane % 4, i)] = out[lane, i]
    return found


@pytest.mark.parametrize("rounding", ["", ".rn", ".rz", ".rm", ".rp"])
@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_doubles_are_fused_in_order_of_k(m: int, k: int, rounding: str) -> None:
    rng = np.random.default_rng(m + k)
    a, b, c = (rng.normal(size=size) for size in ((m, k), (k, N), (m, N)))
    a[:, 1] *= 2.0**60  # its product and that of the next column nearly cancel: the order shows
    a[:, 2], b[2] = -a[:, 1] * (1 + 2.0**-52), b[1]
    fused = exact_fp64("fma", rounding[1:] or "rn")
    wanted = c.copy()
    for row, column, i in np.ndindex(m, N, k):
        wanted[row, column] = fused(a[row, i], b[i, column], wanted[row, column])
    assert (doubles(m, k, a, b, c, rounding).view(np.uint64) == wanted.view(np.uint64)).all()
    assert (wanted != a @ b + c).any()


def test_undefined_doubles() -> None:
    """A product with what nobody wrote is undefined in the rows and columns that it reaches."""
    body = """.shared .b64 s; .reg .f64 %d<9>; mov.f64 %d1, 0d3FF0000000000000; mov.f64 %d2, %d1;
    setp.eq.u32 %p1, %t, 9; @!%p1 bra all; ld.shared.f64 %d1, [s]; all: bar.warp.sync -1;
    mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d3, %d4}, {%d1}, {%d2}, {%d2, %d2};
    cvt.rn.f32.f64 %f1, %d3; setp.eq.u32 %p1, %t, <>; @%p1 st.global.f32 [%at], %f1;"""
    out = np.zeros(32, np.float32)
    run(body.replace("<>", "12"), out)  # lane 9 has row 2
    assert out[12] == 5
    with pytest.raises(em.PtxError, match="nobody has written"):
        run(body.replace("<>", "8"), out)


# --- refused --------------------------------------------------------------------------------------

GOOD = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {D}, {A}, {B}, {C};"
REGISTERS = {
    "D": "%f0, %f1, %f2, %f3", "A": "%r1, %r2, %r3, %r4", "B": "%r5, %r6", "C": "%f4, %f5, %f6, %f7"
}  # fmt: skip


def refused(line: str, message: str, target: str = "sm_90a", block: int = 32, **more: str) -> None:
    for name, registers in (REGISTERS | more).items():
        line = line.replace(f"{{{name}}}", f"{{{registers}}}")
    with pytest.raises(em.PtxError, match=message):
        run(line, np.zeros(64, np.uint32), target=target, block=block)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sync.aligned", "sync", "expected .aligned and .row.col"),
        ("row.col", "col.row", "expected .aligned and .row.col"),
        ("row.col", "row.row", "expected .aligned and .row.col"),
        ("row.col.", "", "expected .aligned and .row.col"),
        ("m16n8k16", "m8n8k4", r"shape \.m8n8k4: \.f16\.f16 takes \.m16n8k8, \.m16n8k16"),
        ("m16n8k16", "m8n8k16", r"shape \.m8n8k16: \.f16\.f16 takes \.m16n8k8, \.m16n8k16"),
        (
            "m16n8k16",
            "m16n8",
            "expected a shape .m16n8kK or .m8n8k4 and the types of D, A, B and C",
        ),
        ("f32.f16.f16.f32", "f64.f64.f64.f64", "register %f0 has type .f32, not 64 bits"),
        ("f32.f16.f16.f32", "f32.f16.f16", "expected a shape .m16n8kK or .m8n8k4 and the types"),
        ("f32.f16.f16.f32", "f32.f16.f16.f32.rz", "unsupported modifier .rz"),
        ("m16n8k16.row.col.f32.f16.f16.f32", "m16n8k64.row.col.s32.s4.s4.s32", "the types of D"),
        ("m16n8k16", "m16n8k32", r"shape \.m16n8k32: \.f16\.f16 takes \.m16n8k8, \.m16n8k16"),
        ("f32.f16.f16.f32", "f32.tf32.tf32.f32", r"\.tf32\.tf32 takes \.m16n8k4, \.m16n8k8"),
        ("f32.f16.f16.f32", "f32.f16.f16.f16", "there is no .f32.f16.f16.f16"),
        ("f32.f16.f16.f32", "f16.bf16.bf16.f16", "there is no .f16.bf16.bf16.f16"),
        ("f32.f16.f16.f32", "f32.f16.bf16.f32", "there is no .f32.f16.bf16.f32"),
        ("f32.f16.f16.f32", "f32.s8.s8.f32", "there is no .f32.s8.s8.f32"),
        ("f32.f16.f16.f32", "s32.e4m3.e4m3.s32", "there is no .s32.e4m3.e4m3.s32"),
        ("row.col", "row.col.satfinite", r"\.satfinite goes with \.s32"),
        ("row.col", "row.col.kind::f8f6f4", "unsupported modifier .kind::f8f6f4"),
        ("row.col", "row.col.xor.popc", "unsupported modifier .xor, .popc"),
        ("mma.sync", "mma.sp.sync", "unsupported instruction mma.sp.sync"),
        ("mma.sync", "wmma.xor.popc.sync", "unsupported instruction wmma"),
        (", {C}", "", "has 3 operands, too few"),
        ("{C}", "{C}, 0", "has 5 operands, 4 are expected"),
    ],
)
def test_what_there_is_not(old: str, new: str, message: str) -> None:
    assert old in GOOD
    refused(GOOD.replace(old, new, 1), message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"D": "%f0, %f1"}, "operand 0 has 2 registers, 4 are expected"),
        ({"A": "%r1, %r2"}, "operand 1 has 2 registers, 4 are expected"),
        ({"B": "%r1, %r2, %r3, %r4"}, "operand 2 has 4 registers, 2 are expected"),
        ({"C": "%f1"}, "operand 3 has 1 registers, 4 are expected"),
        ({"D": "%f0, %f1, %f2, %rd3"}, "register %rd3 has type .b64, not 32 bits"),
        ({"A": "%h1, %h2, %h3, %h4"}, "register %h1 has type .b16, not 32 bits"),
        ({"B": "%r1, %p1"}, "register %p1 has type .pred, not 32 bits"),
        ({"D": "%f0, %f1, %f2, 0f00000000"}, "the destination is no register"),
    ],
)
def test_wrong_registers(more: dict[str, str], message: str) -> None:
    refused(GOOD, message, **more)


def test_counts_of_other_types() -> None:
    """f16 sums are in two registers; 8 x 8 and 16 x 8 operands in one and two."""
    half = GOOD.replace("f32.f16.f16.f32", "f16.f16.f16.f16")
    refused(half, "operand 0 has 4 registers, 2 are expected")
    short = GOOD.replace("k16", "k8")
    refused(short, "operand 1 has 4 registers, 2 are expected")
    refused(short, "operand 2 has 2 registers, 1 are expected", A="%r1, %r2")


@pytest.mark.parametrize(
    ("name", "target", "needed"),
    [
        ("m16n8k16.row.col.f32.e4m3.e4m3.f32", "sm_80", "sm_89"),
        ("m16n8k16.row.col.f32.f16.f16.f32", "sm_75", "sm_80"),
        ("m16n8k8.row.col.f32.bf16.bf16.f32", "sm_75", "sm_80"),
        ("m16n8k8.row.col.f32.f16.f16.f32", "sm_70", "sm_75"),
        ("m8n8k4.row.col.f64.f64.f64.f64", "sm_75", "sm_80"),
        ("m16n8k4.row.col.f64.f64.f64.f64", "sm_80", "sm_90"),
    ],
)
def test_too_early_a_target(name: str, target: str, needed: str) -> None:
    source = text(f"mma.sync.aligned.{name} {{%r1}}, {{%r2}}, {{%r3}}, {{%r4}};", target=target)
    with pytest.raises(em.PtxError, match=f"needs {needed}, .target is {target}"):
        em.Device("sm_90a").launch(source, "k", 1, 32, [np.zeros(32, np.uint32)])


def test_needs_whole_warps() -> None:
    refused(GOOD, "needs all 32 lanes of a warp", block=48)
    gone = "setp.eq.u32 %p1, %t, 3; @%p1 exit;"
    refused(gone + GOOD, "needs all 32 lanes of a warp")


def test_lanes_that_do_not_come() -> None:
    refused(
        f"setp.eq.u32 %p1, %t, 3; @%p1 bra over; {GOOD} over: bar.warp.sync 0xffffffff;",
        "nothing can move(?s:.*)mma.sync.*lanes 0x00000008 of its mask 0xffffffff",
    )
