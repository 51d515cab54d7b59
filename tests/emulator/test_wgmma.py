"""wgmma: operands placed by the test as PTX ISA 9.7.15.5.1 has them, results against numpy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blockscale import emulator as em
from blockscale.emulator.tensorcore.arithmetic import multiply
from kernels import HEAD, line_of

DTYPES: dict[str, Any] = {
    "tf32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LINE = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes
CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
POLICIES = [("eager", 0), ("late", 0), ("random", 1), ("random", 2)]


# --- shared memory ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A matrix of ``rows`` x K in shared memory, in one of the canonical layouts.

    Offsets are those of the ISA's figures, for 16-byte units: K-major, a unit is part of a row;
    MN-major, it is 8 neighbours along MN at one k.
    """

    swizzle: str
    major: str
    leading: int
    stride: int

    def place(self, matrix: np.ndarray, at: int) -> dict[int, bytes]:
        """{address: 16 bytes} of a matrix (rows, k) at address ``at``."""
        lines = matrix if self.major == "k" else matrix.T
        data = np.ascontiguousarray(lines).view(np.uint8)
        units = data.reshape(len(lines), -1, 16)
        found = {}
        for i in range(units.shape[0]):
            for j in range(units.shape[1]):
                found[self._address(at, i, j)] = units[i, j].tobytes()
        return found

    def _address(self, at: int, i: int, j: int) -> int:
        """Of unit j of line i: a line is a row (K-major) or what has one k (MN-major)."""
        wide = LINE[self.swizzle] // 16  # units of a line of the pattern
        group, inner = i // 8, i % 8
        block, unit = j // wide, j % wide
        across, down = self.stride, self.leading
        if self.major == "mn" and self.swizzle == "none":
            across, down = self.leading, self.stride
        address = at + group * across + inner * wide * 16 + unit * 16 + block * down
        swap = {
            "none": 0,
            "32B": address >> 7 & 1,
            "64B": address >> 7 & 3,
            "128B": address >> 7 & 7,
        }
        return address ^ swap[self.swizzle] << 4

    def descriptor(self, at: int) -> int:
        word = at >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32
        return word | CODE[self.swizzle] << 62


def tile(swizzle: str, major: str, rows: int, k_bytes: int, size: int) -> Tile:
    """Units packed as the layout allows, with a gap that nobody may rely on."""
    line = LINE[swizzle]
    if major == "k" and swizzle == "none":
        stride = 8 * 16
        return Tile(swizzle, major, rows // 8 * stride + 128, stride)
    if major == "k":
        return Tile(swizzle, major, 16, 8 * line)
    k_groups = k_bytes // size // 8
    if swizzle == "none":  # stride from 8 columns to the next, leading from 8 k to the next
        return Tile(swizzle, major, 128, 128 * k_groups + 128)
    return Tile(swizzle, major, 8 * line * k_groups, 8 * line)


# --- kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The products of a test."""

    a: str
    b: str
    d: str
    n: int
    from_registers: bool = False
    swizzle: str = "128B"
    major_a: str = "k"
    major_b: str = "k"
    signs: tuple[int, int] = (1, 1)

    @property
    def k(self) -> int:
        return 32 // DTYPES[self.a].itemsize

    @property
    def registers(self) -> int:
        return self.n // (2 if self.d == "f32" else 4)

    @property
    def opcode(self) -> str:
        shape = f"m64n{self.n}k{self.k}.{self.d}.{self.a}.{self.b}"
        return f"wgmma.mma_async.sync.aligned.{shape}"

    def instruction(self, d: str, a: str, b: str, scale_d: str) -> str:
        names = ",".join(f"%{d}{i}" for i in range(self.registers))
        more = [*self.signs]
        if self.a in ("f16", "bf16"):
            majors = (self.major_b,) if self.from_registers else (self.major_a, self.major_b)
            more += [int(major == "mn") for major in majors]
        return f"{self.opcode} {{{names}}}, {a}, {b}, {scale_d}, {','.join(map(str, more))};\n"


START, SPACE = 1024, 64 << 10


def module(body: str, registers: int, shape: Shape | None = None) -> str:
    """A kernel for whole warpgroups: fills shared memory from ``mem`` and keeps d in ``out``.

    %t: the thread; %pt, %pf: true, false; %d: accumulators; %a: A in registers, of ``areg``.
    """
    kind = "f32" if shape is None or shape.d == "f32" else "b32"
    load = "ld.global." + ("f32" if kind == "f32" else "b32")
    prologue = f"""
    .reg .pred %p<8>; .reg .pred %pt, %pf; .reg .b32 %r<16>; .reg .b64 %rd<32>; .reg .{kind} %d<130>;
    .reg .{kind} %e<130>; .reg .b32 %a<8>; .reg .b32 %t; .reg .b64 %out; .reg .b64 %areg;
    mov.u32 %t, %tid.x; setp.eq.u32 %pt, %t, %t; setp.ne.u32 %pf, %t, %t;
    ld.param.u64 %rd0, [mem]; ld.param.u64 %out, [out]; ld.param.u64 %areg, [areg];
    mov.u32 %r1, %ntid.x; mov.u32 %r2, %t; mov.u32 %r3, shared;
fill:
    mul.lo.u32 %r4, %r2, 16; cvt.u64.u32 %rd1, %r4; add.u64 %rd2, %rd0, %rd1; add.u32 %r5, %r3, %r4;
    ld.global.v4.u32 {{%r6, %r7, %r8, %r9}}, [%rd2];
    st.shared.v4.u32 [%r5], {{%r6, %r7, %r8, %r9}};
    add.u32 %r2, %r2, %r1; setp.lt.u32 %p0, %r2, {SPACE // 16}; @%p0 bra fill;
    mad.wide.u32 %out, %t, {4 * registers}, %out;
    mad.wide.u32 %areg, %t, 16, %areg;
    ld.global.v4.u32 {{%a0, %a1, %a2, %a3}}, [%areg];
"""
    prologue += "".join(f"{load} %d{i}, [%out+{4 * i}];\n" for i in range(registers))
    prologue += "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
    stores = "".join(
        f"st.global.{'f32' if kind == 'f32' else 'b32'} [%out+{4 * i}], %d{i};\n"
        for i in range(registers)
    )
    return (
        HEAD.format(target="sm_90a")
        + f".visible .entry k(.param .u64 mem, .param .u64 out, .param .u64 areg) {{\n"
        + f".shared .align 1024 .b8 shared[{SPACE}];\n{prologue}{body}\n{stores}ret;\n}}\n"
    )


FENCE = "wgmma.fence.sync.aligned;\n"
COMMIT = "wgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"


def launch(
    source: str, memory: np.ndarray, out: np.ndarray, a: np.ndarray | None = None, block: int = 128,
    **settings: Any,
) -> em.Report:  # fmt: skip
    a = np.zeros((block, 4), np.uint32) if a is None else a
    return em.Device("sm_90a", **settings).launch(source, "k", 1, block, [memory, out, a])


# --- fragments: the ISA's figures, thread by thread -------------------------------------------------


def accumulator_to_threads(d: np.ndarray) -> np.ndarray:
    """(64, n) -> (128, n / 2) elements: figure of D, 9.7.15.5.1.1.2."""
    n = d.shape[1]
    out = np.empty((128, n // 2), d.dtype)
    for thread in range(128):
        for i in range(n // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + (8 if i % 4 >= 2 else 0)
            out[thread, i] = d[row, i // 4 * 8 + thread % 4 * 2 + i % 2]
    return out


def a_to_threads(a: np.ndarray) -> np.ndarray:
    """(64, K) codes -> (128, 4) words: figures of A, 9.7.15.5.1.1.1: four bytes side by side, those
    of a row and the one 8 below it, then 16 bytes on."""
    data = np.ascontiguousarray(a).view(np.uint8)
    out = np.empty((128, 4), np.uint32)
    for thread in range(128):
        for i in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2)
            column = 16 * (i // 2) + thread % 4 * 4
            out[thread, i] = data[row, column : column + 4].view(np.uint32)[0]
    return out


# --- every kind of product --------------------------------------------------------------------------


@dataclass
class Problem:
    """Random operands, where they lie, and what D must be."""

    shape: Shape
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    memory: np.ndarray
    descriptors: tuple[int, int]

    def expected(self, accumulate: bool = True, exact: bool = False) -> np.ndarray:
        """As the unit sums the assembled matrices; signs are taken into the operands before."""
        s = self.shape
        a, b = (
            codes(m.astype(np.float64) * sign, kind)
            for m, sign, kind in ((self.a, s.signs[0], s.a), (self.b, s.signs[1], s.b))
        )
        return multiply(
            "wgmma", a, b, self.c if accumulate else None, a_type=s.a, b_type=s.b, d_type=s.d,
            exact=exact,
        )  # fmt: skip

    def rounded(self, accumulate: bool = True) -> np.ndarray:
        s = self.shape
        d = self.a.astype(np.float64) @ self.b.astype(np.float64).T * s.signs[0] * s.signs[1]
        return d + self.c if accumulate else d


def codes(values: np.ndarray, kind: str) -> np.ndarray:
    dtype = DTYPES[kind]
    return values.astype(dtype).view(f"u{dtype.itemsize}")


def problem(shape: Shape, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    size = DTYPES[shape.a].itemsize
    a, b = (
        codes(rng.standard_normal((rows, shape.k)), kind).view(DTYPES[kind])
        for rows, kind in ((64, shape.a), (shape.n, shape.b))
    )
    memory = rng.integers(0, 256, SPACE, dtype=np.uint8)
    of_a = tile(shape.swizzle, shape.major_a, 64, 32, size)
    of_b = tile(shape.swizzle, shape.major_b, shape.n, 32, size)
    at = (START, START + (16 << 10))
    for t, matrix, start in ((of_a, a, at[0]), (of_b, b, at[1])):
        for address, data in t.place(matrix, start).items():
            memory[address - START : address - START + 16] = np.frombuffer(data, np.uint8)
    c = rng.standard_normal((64, shape.n)).astype("f4" if shape.d == "f32" else "f2")
    return Problem(shape, a, b, c, memory, (of_a.descriptor(at[0]), of_b.descriptor(at[1])))


def single(
    p: Problem, scale_d: str = "%pt", before: str = FENCE, after: str = COMMIT + WAIT
) -> str:
    a, b = p.descriptors
    source = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n{before}"
    first = "{%a0,%a1,%a2,%a3}" if p.shape.from_registers else "%rd10"
    source += p.shape.instruction("d", first, "%rd11", scale_d) + after
    return module(source, p.shape.registers, p.shape)


def run(p: Problem, source: str, **settings: Any) -> np.ndarray:
    out = accumulator_to_threads(p.c)
    a = a_to_threads(p.a) if p.shape.from_registers else None
    launch(source, p.memory, out, a, **settings)
    return out


PAIRS = [
    ("tf32", "tf32", "f32"), ("bf16", "bf16", "f32"), ("f16", "f16", "f32"), ("f16", "f16", "f16"),
    *[(a, b, d) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f32", "f16")],
]  # fmt: skip


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize(("a", "b", "d"), PAIRS)
def test_types(a: str, b: str, d: str, from_registers: bool) -> None:
    p = problem(Shape(a, b, d, 16, from_registers))
    got = run(p, single(p))
    assert (got == accumulator_to_threads(p.expected())).all()
    close = accumulator_to_threads(p.rounded())
    step = 2e-3 if d == "f16" or a[0] == "e" else 1e-3 if a == "tf32" else 1e-5
    assert np.abs(got - close).max() < step * np.abs(close).max()


@pytest.mark.parametrize("n", [8, 24, 64, 136, 256])
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_columns(n: int, d: str) -> None:
    p = problem(Shape("f16", "f16", d, n))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("majors", ["kk", "mk", "km", "mm"])
@pytest.mark.parametrize("swizzle", list(LINE))
def test_layouts(swizzle: str, majors: str) -> None:
    major_a, major_b = ("mn" if m == "m" else "k" for m in majors)
    p = problem(Shape("bf16", "bf16", "f32", 64, False, swizzle, major_a, major_b))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("swizzle", list(LINE))
@pytest.mark.parametrize("kind", ["e4m3", "tf32"])
def test_layouts_of_other_sizes(kind: str, swizzle: str) -> None:
    p = problem(Shape(kind, kind, "f32", 24, swizzle=swizzle))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("from_registers", [False, True])
def test_b_transposed_with_a_from_registers(from_registers: bool) -> None:
    p = problem(Shape("f16", "f16", "f32", 32, from_registers, major_b="mn"))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("kind", ["e5m2", "bf16", "tf32"])
def test_signs(kind: str, signs: tuple[int, int], from_registers: bool) -> None:
    p = problem(Shape(kind, kind, "f32", 8, from_registers, signs=signs))
    assert (run(p, single(p)) == accumulator_to_threads(p.expected())).all()


def test_without_accumulator() -> None:
    p = problem(Shape("f16", "f16", "f32", 8))
    p.c[:] = np.nan
    got = run(p, single(p, "%pf"))
    assert (got == accumulator_to_threads(p.expected(accumulate=False))).all()


def test_exact() -> None:
    p = problem(Shape("e4m3", "e4m3", "f32", 64))
    exact = accumulator_to_threads(p.rounded()).astype(np.float32)
    assert (run(p, single(p), exact=True) == exact).all()
    assert (run(p, single(p)) != exact).any()


# --- groups and several products --------------------------------------------------------------------


def chain(p: Problem, count: int, between: str = "", wait: str = COMMIT + WAIT) -> str:
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n{FENCE}"
    body += between.join(p.shape.instruction("d", "%rd10", "%rd11", "%pt") for _ in range(count))
    return module(body + wait, p.shape.registers, p.shape)


@pytest.mark.parametrize(("completion", "seed"), POLICIES)
@pytest.mark.parametrize("between", ["", COMMIT, COMMIT + FENCE, COMMIT + WAIT])
def test_several_products(completion: str, seed: int, between: str) -> None:
    p = problem(Shape("e4m3", "e5m2", "f32", 16))
    got = run(p, chain(p, 3, between), completion=completion, seed=seed)
    wanted = p
    for _ in range(3):
        wanted = replace(wanted, c=wanted.expected())
    assert (got == accumulator_to_threads(wanted.c)).all()


@pytest.mark.parametrize(("completion", "seed"), POLICIES)
def test_two_warpgroups(completion: str, seed: int) -> None:
    """Each its own A (rows of 64) and accumulators; diverging lanes meet again before."""
    p = problem(Shape("f16", "f16", "f32", 16, True))
    second = problem(Shape("f16", "f16", "f32", 16, True), seed=1)
    a, b = p.descriptors
    body = f"""mov.b64 %rd11, {b}; and.b32 %r4, %t, 5; setp.eq.u32 %p1, %r4, 1; @%p1 bra odd;
    add.u32 %r5, %r4, 1; bra.uni join; odd: add.u32 %r5, %r4, 2; add.u32 %r5, %r5, 3; join: {FENCE}"""
    body += p.shape.instruction("d", "{%a0,%a1,%a2,%a3}", "%rd11", "%pt") + COMMIT + WAIT
    out = np.concatenate([accumulator_to_threads(x.c) for x in (p, second)])
    regs = np.concatenate([a_to_threads(x.a) for x in (p, second)])
    launch(module(body, 8, p.shape), p.memory, out, regs, 256, completion=completion, seed=seed)
    second.b = p.b
    wanted = [accumulator_to_threads(x.expected()) for x in (p, second)]
    assert (out == np.concatenate(wanted)).all()


def two_groups(p: Problem, more: str = "") -> str:
    """D and %e each get a product, in a group of its own; then all but one group are waited for."""
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n{FENCE}"
    for name in "de":
        body += p.shape.instruction(name, "%rd10", "%rd11", "%pf") + COMMIT
    return module(body + "wgmma.wait_group.sync.aligned 1;\n" + more, 4, p.shape)


STORE_E = "".join(f"st.global.f32 [%areg+{4 * i}], %e{i};\n" for i in range(4))


def test_wait_group_finishes_the_older() -> None:
    p = problem(Shape("bf16", "bf16", "f32", 8))
    wanted, seen = accumulator_to_threads(p.expected(False)), np.zeros((128, 4), np.float32)
    out = np.zeros_like(wanted)
    source = two_groups(p, STORE_E + WAIT)
    launch(source, p.memory, out, seen, completion="late", check="race")
    assert (out == wanted).all()
    assert (seen != wanted).all()  # the younger product has not been made
    out[:] = 0
    launch(two_groups(p, WAIT + STORE_E), p.memory, out, seen, completion="late")
    assert (out == wanted).all()
    assert (seen == wanted).all()
    for completion in ("late", "eager"):
        with pytest.raises(em.PtxError, match=r"st.global.f32 reads register %e0, which the wgmma"):
            launch(source, p.memory, out, seen, completion=completion)


@pytest.mark.parametrize(("completion", "seed"), POLICIES)
def test_moves_go_along(completion: str, seed: int) -> None:
    """Compilers copy accumulators between products, and pack halves."""
    p = problem(Shape("f16", "f16", "f16", 8))
    a, b = p.descriptors
    body = f"""mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; .reg .b16 %low, %high;\n{FENCE}"""
    body += "mov.b32 %e0, %d0; mov.b32 %e1, %d1;\n"
    body += p.shape.instruction("e", "%rd10", "%rd11", "%pt")
    body += "mov.b32 {%low, %high}, %e0; mov.b32 %d0, {%low, %high}; mov.b32 %d1, %e1;\n"
    body += p.shape.instruction("d", "%rd10", "%rd11", "%pt") + COMMIT + WAIT
    got = run(p, module(body, 2, p.shape), completion=completion, seed=seed)
    twice = replace(p, c=p.expected())
    assert (got == accumulator_to_threads(twice.expected())).all()


# --- mistakes ---------------------------------------------------------------------------------------

S8 = Shape("bf16", "bf16", "f32", 8)
RS = Shape("bf16", "bf16", "f32", 8, True)


def fails(p: Problem, body: str, match: str, error: type = em.PtxError, **settings: Any) -> None:
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body
    source = module(body, p.shape.registers, p.shape)
    with pytest.raises(error, match=match) as caught:
        run(p, source, **settings)
    assert str(line_of(source, "wgmma.mma_async")) in str(caught.value)


D = S8.instruction("d", "%rd10", "%rd11", "%pt")
R = RS.instruction("d", "{%a0,%a1,%a2,%a3}", "%rd11", "%pt")


@pytest.mark.parametrize("completion", ["eager", "late"])
@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            FENCE + D + COMMIT + "add.f32 %f0, %d3, %d3;",
            r"add.f32 reads register %d3, .* must come",
        ),
        (
            FENCE + D + COMMIT + "add.f32 %d2, %f0, %f0;",
            r"add.f32 writes register %d2, which the wg",
        ),
        (FENCE + D + WAIT + "add.f32 %f0, %d0, %d0;", r"reads register %d0, .*commit_group"),
        (FENCE + R + COMMIT + "add.u32 %a1, %t, 1;", r"add.u32 writes register %a1"),
        (
            FENCE + R + COMMIT + "@%pf add.u32 %a1, %t, 1; add.u32 %t, %a3, 1;",
            r"reads register %a3",
        ),
        (D + COMMIT + WAIT, "wgmma.fence is missing: it must come before the first"),
        (FENCE + "add.f32 %d1, %f0, %f0;" + D, "wgmma.fence is missing: register %d1 was written"),
        (
            FENCE + "ld.global.b32 %a2, [%areg];" + R,
            "wgmma.fence is missing: register %a2 was writ",
        ),
    ],
)
def test_registers_in_use(body: str, match: str, completion: str) -> None:
    p = problem(RS if "%a" in body else S8)
    body = ".reg .f32 %f<2>; mov.f32 %f0, 0f00000000;\n" + body
    fails(p, body, match, completion=completion)
    a, b = p.descriptors
    source = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body + COMMIT + WAIT
    run(p, module(source, 4, p.shape), completion=completion, check=("race", "uninitialized"))


@pytest.mark.parametrize(
    ("body", "good"),
    [
        (FENCE + D + COMMIT + WAIT + "add.f32 %d1, %f0, %f0;" + D, False),
        (FENCE + D + COMMIT + WAIT + "add.f32 %d1, %f0, %f0;" + FENCE + D, True),
        (FENCE + D + COMMIT + WAIT + D, True),
        (FENCE + D + D + COMMIT + D + COMMIT + "wgmma.wait_group.sync.aligned 1;" + D, True),
        ("@%pf add.f32 %d1, %f0, %f0;" + FENCE + "@%pf add.f32 %d1, %f0, %f0;" + D, True),
    ],
)
def test_where_a_fence_is_needed(body: str, good: bool) -> None:
    p = problem(S8)
    body = ".reg .f32 %f<2>; mov.f32 %f0, 0f00000000;\n" + body + COMMIT + WAIT
    a, b = p.descriptors
    source = module(f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body, 4, p.shape)
    if good:
        run(p, source)
    else:
        with pytest.raises(em.PtxError, match="fence is missing: register %d1"):
            run(p, source)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Shape("f16", "f16", "f16", 16), Shape("f16", "f16", "f32", 8)),  # another shape
        (Shape("f16", "f16", "f16", 16), Shape("f16", "f16", "f16", 8)),
    ],
)
def test_other_shape_on_the_same_accumulator(first: Shape, second: Shape) -> None:
    p = problem(first)
    other = second.instruction("d", "%rd10", "%rd11", "%pt")
    this = first.instruction("d", "%rd10", "%rd11", "%pt")
    fails(p, FENCE + this + other, "uses register %d0, which the wgmma.* and is not of its shape")
    a, b = p.descriptors
    waited = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + FENCE + this + COMMIT + WAIT + FENCE
    run(p, module(waited + other + COMMIT + WAIT, first.registers, first))


def test_accumulator_in_flight_as_operand() -> None:
    first = Shape("f16", "f16", "f16", 16)
    second = Shape("f16", "f16", "f16", 8, True).instruction(
        "e", "{%d0,%d1,%d2,%d3}", "%rd11", "%pt"
    )
    body = FENCE + first.instruction("d", "%rd10", "%rd11", "%pt") + second
    fails(problem(first), body, "uses register %d0, which the wgmma")


STORE = "st.shared.u32 [shared+16], %r1;\n"


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (STORE + "bar.sync 0;" + FENCE + D, "missing fence.proxy.async: wgmma.mma_async"),
        (STORE + "fence.proxy.async.shared::cta;" + FENCE + D, ""),
        ("setp.lt.u32 %p2, %t, 32; @%p2 " + STORE + "fence.proxy.async;" + FENCE + D, ""),
    ],
)
def test_proxy_fence(body: str, match: str) -> None:
    """Every warp fences what it wrote itself; a product knows what its four warps know."""
    p = problem(S8)
    if match:
        fails(p, "setp.eq.u32 %p1, %t, 0; @%p1 " + body, match, em.DataRace)
        return
    a, b = p.descriptors
    source = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; setp.eq.u32 %p1, %t, 0;"
    run(p, module(source + "@%p1 " * body.startswith("st") + body + COMMIT + WAIT, 4, p.shape))


@pytest.mark.parametrize("completion", ["eager", "late"])
@pytest.mark.parametrize("wait", [True, False])
def test_overwriting_an_operand(wait: bool, completion: str) -> None:
    p = problem(S8)
    body = FENCE + D + COMMIT + WAIT * wait + "setp.eq.u32 %p1, %t, 5; @%p1 " + STORE
    if not wait:
        if completion == "eager":
            fails(p, body + WAIT, "data race: st.shared.u32 .* after the read by", em.DataRace)
        else:
            fails(p, body + WAIT, "data race|fence.proxy.async", em.DataRace, completion="late")
        return
    a, b = p.descriptors
    run(p, module(f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b};\n" + body, 4, p.shape))


def test_reading_what_nobody_wrote() -> None:
    p = problem(S8)
    fails(
        p,
        f"mov.b64 %rd10, {p.descriptors[0] + (SPACE >> 4)};" + FENCE + D + COMMIT + WAIT,
        "out of bounds|nobody has written",
    )
    source = single(p).replace("fill:", "mov.u32 %r2, 20000;\nfill:", 1)
    source = source.replace("@%p0 bra fill", "@%pf bra fill").replace(
        "st.shared.v4.u32", "@%pf st.shared.v4.u32"
    )
    with pytest.raises(em.Uninitialized, match="reads byte 0x.* nobody has written"):
        launch(
            source.replace("ld.global.v4.u32 {%r6", "@%pf ld.global.v4.u32 {%r6"),
            p.memory,
            accumulator_to_threads(p.c),
        )


@pytest.mark.parametrize(
    ("body", "block", "match"),
    [
        (
            "setp.gt.u32 %p1, %t, 95; @%p1 bra end;",
            128,
            "all of warpgroup 0: warp 3 not here; warp 3 n",
        ),
        ("setp.eq.u32 %p1, %t, 40; @%p1 bra wait;", 128, "all of warpgroup 0: warp 1 not here"),
        ("", 160, "warpgroup 1: warp 5, 6, 7 not here; warp 5, 6, 7 never comes"),
    ],
)
@pytest.mark.parametrize("what", [FENCE, FENCE + D, COMMIT, WAIT])
def test_threads_that_do_not_come(body: str, block: int, match: str, what: str) -> None:
    p = problem(S8)
    a, b = p.descriptors
    body = f"mov.b64 %rd10, {a}; mov.b64 %rd11, {b}; {body} {what} bra end; wait: bar.sync 1, 256; end:"
    source = (
        module(body, 4, p.shape).replace("bra end; wait", "ret; wait").replace("end:", "end: ret;")
    )
    with pytest.raises(em.Deadlock, match=re.escape(match)):
        launch(source, p.memory, np.zeros((block, 4), np.float32), block=block)


def test_a_descriptor_that_differs() -> None:
    fails(
        problem(S8),
        FENCE + "cvt.u64.u32 %rd12, %t; add.u64 %rd10, %rd10, %rd12;" + D,
        "the descriptor of A differs between threads of a warpgroup",
    )
    fails(
        problem(S8), f"mov.b64 %rd10, {1 << 14};" + FENCE + D, "descriptor of A, 0x4000: .*reserved"
    )
    fails(problem(S8), "setp.eq.u32 %pt, %t, 3;" + FENCE + D, "scale-d differs between threads")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("m64n8k16.f32.bf16.bf16 {%d0,%d1,%d2}, %rd1, %rd2, %pt, 1, 1, 0, 0", "operand 0 has 3 regist"),
        ("m64n12k16.f32.bf16.bf16 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 1, 1, 0, 0", "N is 12"),
        ("m64n8k8.f32.bf16.bf16 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 1, 1, 0, 0", "K is 8; .bf16.bf16"),
        ("m64n8k16.f16.bf16.bf16 {%a0,%a1}, %rd1, %rd2, %pt, 1, 1, 0, 0", "there is no .f16.bf16.bf16"),
        ("m64n8k16.f32.f16.bf16 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 1, 1, 0, 0", "no .f32.f16.bf16"),
        ("m64n8k16.f32.f16.f16 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 2, 1, 0, 0", "operand 4, a sign, is 2"),
        ("m64n8k16.f32.f16.f16 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 1, 1, 0, 2", "operand 7, a transpos"),
        ("m64n8k16.f32.f16.f16 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 1, 1, 0", "7 operands, too few"),
        ("m64n8k8.f32.tf32.tf32 {%d0,%d1,%d2,%d3}, %rd1, %rd2, %pt, 1, 1, 0, 0", "6 are expected"),
        (
            "m64n8k16.f32.f16.f16 {%d0,%d1,%d2,%d3}, {%a0,%a1,%a2,%a3}, %rd2, %pt, 1, 1, 0, 0",
            "8 operands, 7 are expected",
        ),
        ("m64n8k16.f32.f16.f16 {%d0,%d1,%d2,%d3}, {%a0,%a1}, %rd2, %pt, 1, 1, 0", "1 has 2 registers"),
        ("m64n8k16.f32.f16.f16 {%d0,%d1,%d2,%rd3}, %rd1, %rd2, %pt, 1, 1, 0, 0", "rd3 has type .b64"),
        ("m64n8k32.s32.s8.s8 {%a0,%a1,%a2,%a3}, %rd1, %rd2, %pt", "integer and single-bit"),
        ("m64n8k256.s32.b1.b1.and.popc {%a0,%a1,%a2,%a3}, %rd1, %rd2, %pt", "integer and single-bit"),
    ],
)  # fmt: skip
def test_malformed(text: str, match: str) -> None:
    with pytest.raises(em.PtxError, match=re.escape(match) + r".*\(line \d+\)"):
        source = module(f"wgmma.mma_async.sync.aligned.{text};", 4)
        launch(source, np.zeros(SPACE, np.uint8), np.zeros((128, 4), np.float32))


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (
            "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%d0}, %rd1, %rd2, %r1, 0;",
            "sparse",
        ),
        ("wgmma.fence.sync;", r"expected .sync.aligned"),
        ("wgmma.wait_group.sync.aligned %r1;", "expected a number of groups"),
    ],
)
def test_malformed_others(line: str, match: str) -> None:
    with pytest.raises(em.PtxError, match=match):
        launch(module(line, 4), np.zeros(SPACE, np.uint8), np.zeros((128, 4), np.float32))


def test_needs_sm_90a() -> None:
    source = single(problem(S8)).replace(".target sm_90a", ".target sm_90")
    with pytest.raises(em.PtxError, match="needs sm_90a, .target is sm_90"):
        launch(source, np.zeros(SPACE, np.uint8), np.zeros((128, 4), np.float32))
