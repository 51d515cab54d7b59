"""ldmatrix, stmatrix and movmatrix, byte by byte: PTX ISA 9.7.14.5.15 to 9.7.14.5.17."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_kernels import run

from blockscale import emulator as em

RNG = np.random.default_rng(1)
WARPS, SIZE = 2, 4096

#: Where a byte of a register comes from: (lane, register, byte) -> (row of the warp, byte in it).
Place = Callable[[int, int, int], tuple[int, int]]


def rows_of(lane: int, register: int, byte: int) -> tuple[int, int]:
    """Figure 104 (and 106): four lanes hold a row of 16 bytes."""
    return 8 * register + lane // 4, lane % 4 * 4 + byte


def columns_of(lane: int, register: int, byte: int) -> tuple[int, int]:
    """The same of the transposed matrix of 16-bit elements."""
    column, row = lane // 4, lane % 4 * 2 + byte // 2
    return 8 * register + row, 2 * column + byte % 2


def cute(bits_of_lane: list[tuple[int, int]], bits_of_value: list[tuple[int, int]]) -> Place:
    """A layout of CuTe, (size, stride in bits) innermost first, over rows of 128 bits."""

    def place(lane: int, register: int, byte: int) -> tuple[int, int]:
        offset, value = 0, 32 * register + 8 * byte
        for number, modes in ((lane, bits_of_lane), (value, bits_of_value)):
            for size, stride in modes:
                number, digit = divmod(number, size)
                offset += digit * stride
        return offset // 128, offset % 128 // 8

    return place


#: SM100_U8x16_STSM_T of CUTLASS's copy_traits_sm100.hpp.
STORE_BYTES = cute([(4, 256), (8, 8)], [(8, 1), (2, 128), (2, 64), (4, 1024)])


def load_bytes(lane: int, register: int, byte: int) -> tuple[int, int]:
    """SM100_U8x16_LDSM_T, whose rows are in another order than the lanes that name them and which
    exchanges the upper half of the first register with the lower half of the second."""
    matrix, second = divmod(register, 2)
    layout = cute([(4, 256), (8, 8)], [(8, 1), (2, 128), (2, 64), (2, 1024)])
    row, column = layout(lane, byte // 2, byte % 2 + 2 * second)
    source = next(
        s for s in range(16) if s % 2 + s // 2 % 2 * 8 + s // 4 * 2 == row
    )  # SrcLayout: the lane that names a row
    return 16 * matrix + source, column


def kernel(
    body: str, registers: int, target: str, memory: np.ndarray, at: np.ndarray, data: np.ndarray
) -> None:
    """Two warps with ``memory`` in shared memory, a row's offset for each lane in %r2 (address
    %r3, 64 bits %rd3), and ``data`` in %r10, ...; both are written back."""
    names = [f"%r{10 + i}" for i in range(registers)]
    load = "\n".join(f"ld.global.u32 {n}, [%rd6+{4 * i}];" for i, n in enumerate(names))
    store = "\n".join(f"st.global.u32 [%rd6+{4 * i}], {n};" for i, n in enumerate(names))
    copy = "\n".join(
        f"ld.global.v4.b32 {{%r4,%r5,%r6,%r7}}, [%rd5+{16 * i}];"
        f"st.shared.v4.b32 [%r8+{16 * i}], {{%r4,%r5,%r6,%r7}};"
        for i in range(SIZE // 64 // 16)
    )
    back = copy.replace("ld.global", "ld.SHARED").replace("st.shared", "st.global")
    back = back.replace("[%rd5", "[X").replace("[%r8", "[%rd5").replace("[X", "[%r8")
    run(
        f""".shared .align 128 .b8 s[{SIZE}]; ld.param.u64 %rd1, [memory];
        mad.wide.u32 %rd5, %t, {SIZE // 64}, %rd1; mov.u32 %r1, s;
        mad.lo.u32 %r8, %t, {SIZE // 64}, %r1;
        {copy} bar.sync 0;
        ld.param.u64 %rd2, [data]; mad.wide.u32 %rd6, %t, {4 * registers}, %rd2; {load}
        ld.global.u32 %r2, [%at]; add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd3, %r3;
        cvta.shared.u64 %rd3, %rd3;
        {body}
        bar.sync 0; {store} {back.replace("SHARED", "shared")}""",
        at, memory, data, parameters=".param .u64 memory, .param .u64 data",
        block=32 * WARPS, target=target,
    )  # fmt: skip


def some_rows(lanes: int) -> np.ndarray:
    """Offsets of different rows for the lanes that count, nonsense for the others."""
    at = RNG.permutation(SIZE // 16).astype(np.uint32)[: 32 * WARPS] * 16
    at[np.arange(32 * WARPS) % 32 >= lanes] = 0x7FFFFFF1
    return at


def fragments(memory: np.ndarray, at: np.ndarray, registers: int, place: Place) -> np.ndarray:
    """What the lanes hold, from where the bytes are."""
    out = np.zeros((32 * WARPS, 4 * registers), np.uint8)
    for thread in range(32 * WARPS):
        for i in range(4 * registers):
            row, byte = place(thread % 32, i // 4, i % 4)
            out[thread, i] = memory[at[thread // 32 * 32 + row] + byte]
    return out.view(np.uint32)


M8N8 = [
    (f"m8n8.x{n}{t}", n, 8 * n, f)
    for n in (1, 2, 4)
    for t, f in (("", rows_of), (".trans", columns_of))
]


@pytest.mark.parametrize("space", [".shared", ".shared::cta", ""])
@pytest.mark.parametrize(("shape", "registers", "lanes", "place"), M8N8)
def test_ldmatrix(shape: str, registers: int, lanes: int, place: Place, space: str) -> None:
    check_load(f"{shape}{space}.b16", registers, lanes, place, "sm_90a", bool(space))


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_bytes(count: int) -> None:
    check_load(f"m16n16.x{count}.trans.shared.b8", 2 * count, 16 * count, load_bytes, "sm_100a")


def check_load(
    name: str, registers: int, lanes: int, place: Place, target: str, window: bool = True
) -> None:
    memory = RNG.integers(0, 256, SIZE, dtype=np.uint8)
    before, at = memory.copy(), some_rows(lanes)
    data = np.zeros((32 * WARPS, registers), np.uint32)
    names = ", ".join(f"%r{10 + i}" for i in range(registers))
    address = "%r3" if window else "%rd3"
    kernel(
        f"ldmatrix.sync.aligned.{name} {{{names}}}, [{address}];",
        registers,
        target,
        memory,
        at,
        data,
    )
    assert (data == fragments(before, at, registers, place)).all()
    assert (memory == before).all()


def unpacked(row: bytes, bits: int) -> bytes:
    whole = int.from_bytes(row, "little")
    return bytes(whole >> bits * i & (1 << bits) - 1 for i in range(16))


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
@pytest.mark.parametrize(
    ("shape", "registers", "lanes", "place"),
    [(f"m8n16.x{n}", n, 8 * n, rows_of) for n in (1, 2, 4)]
    + [(f"m16n16.x{n}.trans", 2 * n, 16 * n, load_bytes) for n in (1, 2)],
)
def test_ldmatrix_of_packed_elements(
    shape: str, registers: int, lanes: int, place: Place, source: str, bits: int
) -> None:
    """16 elements of 4 or 6 bits, then padding, are 16 bytes with the element in the low bits."""
    memory = RNG.integers(0, 256, SIZE, dtype=np.uint8)
    at, data = some_rows(lanes), np.zeros((32 * WARPS, registers), np.uint32)
    names = ", ".join(f"%r{10 + i}" for i in range(registers))
    rows = [unpacked(memory[i : i + 16].tobytes(), bits) for i in range(0, SIZE, 16)]
    wanted = fragments(np.frombuffer(b"".join(rows), np.uint8), at, registers, place)
    line = f"ldmatrix.sync.aligned.{shape}.shared.b8x16.{source} {{{names}}}, [%r3];"
    kernel(line, registers, "sm_100a", memory, at, data)
    assert (data == wanted).all()


@pytest.mark.parametrize("space", [".shared", ""])
@pytest.mark.parametrize(
    ("shape", "registers", "lanes", "place"),
    M8N8 + [(f"m16n8.x{n}.trans", n, 8 * n, STORE_BYTES) for n in (1, 2, 4)],
)
def test_stmatrix(shape: str, registers: int, lanes: int, place: Place, space: str) -> None:
    """Every byte goes to its place; the rest of memory stays."""
    memory = RNG.integers(0, 256, SIZE, dtype=np.uint8)
    wanted, at = memory.copy(), some_rows(lanes)
    data = RNG.integers(0, 1 << 32, (32 * WARPS, registers), dtype=np.uint32)
    for thread in range(32 * WARPS):
        for i, byte in enumerate(data[thread].tobytes()):
            row, column = place(thread % 32, i // 4, i % 4)
            wanted[at[thread // 32 * 32 + row] + column] = byte
    names = ", ".join(f"%r{10 + i}" for i in range(registers))
    element, address = "b8" if shape.startswith("m16") else "b16", "%r3" if space else "%rd3"
    line = f"stmatrix.sync.aligned.{shape}{space}.{element} [{address}], {{{names}}};"
    kernel(line, registers, "sm_100a", memory, at, data)
    assert (memory == wanted).all()


def test_movmatrix() -> None:
    data = RNG.integers(0, 1 << 32, (64, 1), dtype=np.uint32)
    elements = data.view(np.uint16).reshape(WARPS, 8, 8).copy()  # row, column
    kernel(
        "movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r10;", 1, "sm_90a",
        np.zeros(SIZE, np.uint8), some_rows(0), data,
    )  # fmt: skip
    for warp in range(WARPS):
        for lane in range(32):
            row, column = lane // 4, lane % 4 * 2
            word = data[32 * warp + lane, 0]
            assert word & 0xFFFF == elements[warp, column, row]
            assert word >> 16 == elements[warp, column + 1, row]


def test_lanes_that_come_by_different_ways() -> None:
    """The warp loads once all of its lanes are there; another address for each."""
    out = np.zeros(32, np.uint32)
    run(
        """.shared .align 16 .b8 s[512]; mov.u32 %r1, s; shl.b32 %r2, %t, 4; add.u32 %r3, %r1, %r2;
        st.shared.v4.b32 [%r3], {%t, %t, %t, %t}; setp.lt.u32 %p1, %t, 5; @%p1 bra low;
        add.u32 %r4, %r3, 0; bra.uni meet;
        low: xor.b32 %r2, %r2, 16; add.u32 %r4, %r1, %r2;
        meet: bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r4];
        st.global.u32 [%at], %r5;""",
        out,
    )  # fmt: skip
    assert out[::4].tolist() == [1, 0, 3, 2, 5, 5, 6, 7]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [s+8];", "not a multiple of 16"),
        ("ldmatrix.sync.aligned.m8n8.x1.b16 {%r1}, [%out];", "not in shared memory"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [s];", "1 registers, 2 are expected"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r1}, [s];", "takes .b16"),
        ("ldmatrix.sync.m8n8.x1.shared.b16 {%r1}, [s];", "expected .sync.aligned"),
        ("ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1,%r2}, [s];", "takes .trans"),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r1}, [s];", "takes packed"),
        ("stmatrix.sync.aligned.m16n8.x1.shared.b8 [s], {%r1};", "takes .trans"),
        ("stmatrix.sync.aligned.m8n8.x1.shared::cluster.b16 [s], {%r1};", "unsupported modifier"),
        ("movmatrix.sync.aligned.m8n8.b16 %r1, %r2;", "expected .sync"),
        (
            "setp.eq.u32 %p1, %t, 3; @%p1 exit; movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;",
            "needs all 32 lanes",
        ),
    ],
)
def test_refused(body: str, message: str) -> None:
    with pytest.raises(em.PtxError, match=message):
        run(f".shared .align 16 .b8 s[512]; {body}", np.zeros(32, np.uint32), target="sm_100a")


@pytest.mark.parametrize(
    "line",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1,%r2}, [s];",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r1}, [s];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [s], {%r1};",
    ],
)
def test_bytes_need_blackwell(line: str) -> None:
    with pytest.raises(em.PtxError, match=r"needs sm_100f, \.target is sm_90a"):
        run(f".shared .align 16 .b8 s[512]; {line}", np.zeros(32, np.uint32))
