"""Products of wgmma for tests: operands placed as PTX ISA 9.7.15.5.1 has them, kernels, D."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from ptx_kernels import HEAD

from blockscale import emulator as em
from blockscale.emulator.tensorcore.arithmetic import Instruction, multiply

DTYPES: dict[str, Any] = {
    "tf32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
}
LINE = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes
CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}

# --- shared memory --------------------------------------------------------------------------------


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


# --- kernels --------------------------------------------------------------------------------------


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
        return self.n // (4 if self.d == "f16" else 2)

    @property
    def opcode(self) -> str:
        shape = f"m64n{self.n}k{self.k}.{self.d}.{self.a}.{self.b}"
        return f"wgmma.mma_async.sync.aligned.{shape}"

    def instruction(self, d: str, a: str, b: str, scale_d: str) -> str:
        names = ",".join(f"%{d}{i}" for i in range(self.registers))
        more: list[int] = [] if self.d == "s32" else [*self.signs]
        if self.a in ("f16", "bf16"):
            majors = (self.major_b,) if self.from_registers else (self.major_a, self.major_b)
            more += [int(major == "mn") for major in majors]
        operands = [f"{{{names}}}", a, b, scale_d, *map(str, more)]
        return f"{self.opcode} {', '.join(operands)};\n"


START, SPACE = 1024, 64 << 10


def module(body: str, registers: int, shape: Shape | None = None) -> str:
    """A kernel for whole warpgroups: fills shared memory from ``mem`` and keeps d in ``out``.

    %t: the thread; %pt, %pf: true, false; %d: accumulators; %a: A in registers, of ``areg``.
    """
    kind = "f32" if shape is None or shape.d == "f32" else "b32"
    load = "ld.global." + ("f32" if kind == "f32" else "b32")
    prologue = f"""
    .reg .pred %p<8>; .reg .pred %pt, %pf; .reg .b32 %r<16>;
    .reg .b64 %rd<32>;
    .reg .{kind} %d<130>; .reg .{kind} %e<130>; .reg .b32 %a<8>;
    .reg .b32 %t; .reg .b64 %out; .reg .b64 %areg;
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
        + ".visible .entry k(.param .u64 mem, .param .u64 out, .param .u64 areg) {\n"
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


# --- fragments: the ISA's figures, thread by thread -----------------------------------------------


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


# --- every kind of product ------------------------------------------------------------------------


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
        types = Instruction("wgmma", s.a, s.b, s.d)
        return multiply(types, a, b, self.c if accumulate else None, exact=exact)

    def rounded(self, accumulate: bool = True) -> np.ndarray:
        s = self.shape
        d = self.a.astype(np.float64) @ self.b.astype(np.float64).T * s.signs[0] * s.signs[1]
        return d + self.c if accumulate else d


def codes(values: np.ndarray, kind: str) -> np.ndarray:
    dtype = DTYPES[kind]
    return values.astype(dtype).view(f"u{dtype.itemsize}")


def _random(rng: np.random.Generator, size: tuple[int, int], kind: str) -> np.ndarray:
    if DTYPES[kind].kind in "iu":
        limits = np.iinfo(DTYPES[kind])
        return rng.integers(limits.min, limits.max + 1, size)
    return rng.standard_normal(size)


def problem(shape: Shape, seed: int = 0) -> Problem:
    rng = np.random.default_rng(seed)
    size = DTYPES[shape.a].itemsize
    a, b = (
        codes(_random(rng, (rows, shape.k), kind), kind).view(DTYPES[kind])
        for rows, kind in ((64, shape.a), (shape.n, shape.b))
    )
    memory = rng.integers(0, 256, SPACE, dtype=np.uint8)
    of_a = tile(shape.swizzle, shape.major_a, 64, 32, size)
    of_b = tile(shape.swizzle, shape.major_b, shape.n, 32, size)
    at = (START, START + (16 << 10))
    for t, matrix, start in ((of_a, a, at[0]), (of_b, b, at[1])):
        for address, data in t.place(matrix, start).items():
            memory[address - START : address - START + 16] = np.frombuffer(data, np.uint8)
    c = rng.standard_normal((64, shape.n)).astype({"f32": "f4", "f16": "f2", "s32": "i4"}[shape.d])
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
