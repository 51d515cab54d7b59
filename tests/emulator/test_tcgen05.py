"""tcgen05 but for mma: allocation, loads and stores, copies, shifts, commits. PTX ISA 9.7.16."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asynchronous import ORDERS, outcome, refusal
from ptx_kernels import line_of, text
from tcgen05_kernel import run, source

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace, Uninitialized

RNG = np.random.default_rng(9716)
HEAD = """.shared .align 8 .b64 bar[2]; .shared .b32 place[4]; .reg .b32 %v<128>;
    setp.eq.u32 %p1, %t, 0; setp.lt.u32 %p2, %t, 32;
    shl.b32 %r31, %t, 16; and.b32 %r31, %r31, 0x600000;
"""


def alloc(columns: int, group: int = 1, sync: str = "bar.sync 0;") -> str:
    """By warp 0; %r30 is the first column, %r31 that of the first lane of the warp."""
    return f"""@%p2 tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [place], {columns};
    {sync} ld.shared.u32 %r30, [place]; add.u32 %r31, %r31, %r30;
    """


def free(columns: int, group: int = 1, sync: str = "bar.sync 0;") -> str:
    return f"""{sync}
    @%p2 tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r30, {columns};
    """


def kernel(body: str) -> str:
    return text(HEAD + body, target="sm_100a")


def launch(body: str, *arrays: Any, block: int = 128, **more: Any) -> np.ndarray:
    return outcome(kernel(body), arrays, target="sm_100a", block=block, **more)[0]


def refused(
    body: str, *arrays: Any, block: int = 128, error: Any = em.PtxError, **more: Any
) -> list[em.PtxError]:
    return refusal(kernel(body), arrays, error, target="sm_100a", block=block, **more)


# --- loads and stores -----------------------------------------------------------------------------


def places(shape: str, thread: Any, register: Any, half: int = 0) -> tuple[Any, Any]:
    """Lane and column of a register of a thread: figures 183 to 187 as formulas."""
    t, r = thread, register
    return {
        "32x32b": lambda: (t, r),
        "16x64b": lambda: (t // 4 + t % 2 * 8, t // 2 % 2 + 2 * r),
        "16x128b": lambda: (t // 4 + r % 2 * 8, t % 4 + r // 2 * 4),
        "16x256b": lambda: (t // 4 + r // 2 % 2 * 8, t % 4 * 2 + r % 2 + r // 4 * 8),
        "16x32bx2": lambda: (t % 16, r + t // 16 * half),
    }[shape]()  # fmt: skip


REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
SHAPES = [
    *((shape, num) for shape in REGISTERS for num in (1, 2, 4)),
    ("32x32b", 128), ("16x64b", 128), ("16x128b", 64), ("16x256b", 32), ("16x32bx2", 64),
]  # fmt: skip


def operand(
    shape: str, num: int, address: str, store: bool, packed: bool = False, half: int = 0
) -> str:
    count = REGISTERS[shape] * num
    words = "{" + ", ".join(f"%v{i}" for i in range(count)) + "}"
    split = f", {half}" if shape == "16x32bx2" else ""
    if store:
        return f"tcgen05.st.sync.aligned.{shape}.x{num}{'.unpack::16b' if packed else ''}.b32 [{address}]{split}, {words};\n"
    return f"tcgen05.ld.sync.aligned.{shape}.x{num}{'.pack::16b' if packed else ''}.b32 {words}, [{address}]{split};\n"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "num"), SHAPES)
def test_loads_and_stores(shape: str, num: int, packed: bool) -> None:
    """Store with the shape, load word by word; store word by word, load with the shape."""
    if packed and num == 128:
        num = 64
    count = REGISTERS[shape] * num
    half = 2 * num if shape == "16x32bx2" and packed else num if shape == "16x32bx2" else 0
    if shape == "16x32bx2" and num == 2:
        half = 7
    offsets = (0,) if shape == "32x32b" else (0, 16)
    t, r = np.arange(32)[:, None], np.arange(count)[None, :]
    lanes, columns = np.broadcast_arrays(*places(shape, t, r, 0 if packed else half))
    if packed:
        columns = 2 * columns + (t // 16 * half if shape == "16x32bx2" else 0)
    width = int(columns.max()) + (2 if packed else 1)
    total = max(32, 1 << (width - 1).bit_length())
    data = RNG.integers(0, 1 << 32, (4, 32, max(total, -(-count // 4) * 4)), np.uint32)

    body = (
        alloc(total)
        + moved("ld", data.shape[2], 32)
        + "".join(
            f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r31+{c}], {vector(32)};\n"
            for c in range(0, total, 32)
        )
    )
    body += "tcgen05.wait::st.sync.aligned;\n" + moved("ld", data.shape[2], count)
    body += "".join(operand(shape, num, f"%r31+{o << 16}", True, packed, half) for o in offsets)
    body += "tcgen05.wait::st.sync.aligned;\n" + "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {vector(32)}, [%r31+{c}];"
        f"tcgen05.wait::ld.sync.aligned; {moved('st', total, 32, c)}"
        for c in range(0, total, 32)
    )
    out = both(body + free(total), np.zeros((4, 32, total), np.uint32), data)
    wanted = np.tile(data[:, :, :32], total // 32)
    for offset in offsets:
        value = data[:, :, :count]
        if packed:
            wanted[:, lanes + offset, columns] = value & 0xFFFF
            wanted[:, lanes + offset, columns + 1] = value >> 16
        else:
            wanted[:, lanes + offset, columns] = value
    assert (out == wanted).all()

    offset, stored = offsets[-1], -(-count // 4) * 4
    body = alloc(total) + "".join(
        moved("ld", data.shape[2], 32, c)
        + f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r31+{c}], {vector(32)};\n"
        for c in range(0, total, 32)
    )
    body += "tcgen05.wait::st.sync.aligned;\n"
    body += operand(shape, num, f"%r31+{offset << 16}", False, packed, half)
    body += "tcgen05.wait::ld.sync.aligned;\n" + moved("st", stored, count)
    out = both(body + free(total), np.zeros((4, 32, stored), np.uint32), data)[:, :, :count]
    if packed:
        low, high = (data[:, lanes + offset, columns + i] & 0xFFFF for i in (0, 1))
        wanted = low | high << np.uint32(16)
    else:
        wanted = data[:, lanes + offset, columns]
    assert (out == wanted).all()


def vector(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%v{first + i}" for i in range(count)) + "}"


def moved(verb: str, row: int, count: int, start: int = 0) -> str:
    """Registers %v from or to a row of global memory for each thread."""
    base = "%rd2" if verb == "ld" else "%out"
    lines = [f"mad.wide.u32 %rd1, %t, {4 * row}, {base};"]
    for i in range(0, count, 4):
        at = f"[%rd1+{4 * (start + i)}]"
        four = vector(4, i)
        lines.append(
            f"ld.global.v4.u32 {four}, {at};" if verb == "ld" else f"st.global.v4.u32 {at}, {four};"
        )
    return "\n".join(lines) + "\n"


def both(body: str, out: np.ndarray, data: np.ndarray) -> np.ndarray:
    code = text(HEAD + "ld.param.u64 %rd2, [in];" + body, ".param .u64 in", target="sm_100a")
    return outcome(code, [out, data], target="sm_100a", block=128, orders=ORDERS[:3])[0]


def test_a_register_in_flight_has_its_value_when_it_is_used() -> None:
    body = f"""{alloc(32)} tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {{%t}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r31];
    add.u32 %r6, %r5, 1; tcgen05.wait::ld.sync.aligned; st.global.u32 [%at], %r6; {free(32)}"""
    assert (launch(body, np.zeros(128, np.uint32)) == np.arange(1, 129)).all()


# --- allocation -----------------------------------------------------------------------------------


def test_allocations_do_not_overlap_and_wait_for_room() -> None:
    """Each warp asks for half of the columns twice: two at a time can have them."""
    body = """shr.u32 %r5, %t, 5; shl.b32 %r6, %r5, 2; mov.u32 %r7, place; add.u32 %r7, %r7, %r6;
    mov.u32 %r8, 0; mov.u32 %r31, 0; shl.b32 %r10, %t, 16; and.b32 %r10, %r10, 0x600000;
    L: tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 256;
    ld.shared.u32 %r30, [%r7]; add.u32 %r31, %r30, %r10;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31+255], {%t}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r31+255]; tcgen05.wait::ld.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 256;
    add.u32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 2; @%p3 bra L;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    st.global.u32 [%at], %r9;"""
    body = body.replace(
        "tcgen05.relinquish_alloc_permit", "bar.sync 0; tcgen05.relinquish_alloc_permit"
    )
    assert (launch(body, np.zeros(128, np.uint32)) == np.arange(128)).all()


def test_every_warp_allocates_for_itself() -> None:
    body = """shr.u32 %r5, %t, 5; shl.b32 %r6, %r5, 2; mov.u32 %r7, place; add.u32 %r7, %r7, %r6;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 64; ld.shared.u32 %r30, [%r7];
    st.global.u32 [%at], %r30; bar.sync 0;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64;"""
    out = launch(body, np.zeros((4, 32), np.uint32))
    assert sorted(set(out.ravel().tolist())) == [0, 64, 128, 192]
    assert (out == out[:, :1]).all()


def test_warps_that_wait_for_room_together() -> None:
    """Of three that ask for half each, two get it; nobody ever frees."""
    body = """setp.ge.u32 %p3, %t, 96; @%p3 bra E; shr.u32 %r5, %t, 5; shl.b32 %r6, %r5, 2;
    mov.u32 %r7, place; add.u32 %r7, %r7, %r6;
    setp.lt.u32 %p4, %r5, 2; selp.u32 %r8, 512, 256, %p4;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], %r8; E: bar.sync 0;"""
    for error in refused(body.replace("512", "256"), np.zeros(128, np.uint32), error=em.Deadlock):
        assert "waits for 256 columns of Tensor Memory: 512 of 512 are allocated" in str(error)
    for error in refused(body, np.zeros(128, np.uint32), error=em.Deadlock):
        assert "columns of Tensor Memory: " in str(error)


ALLOCATIONS = [
    (alloc(32), "", "leak: CTA (0, 0, 0) exits with 32 columns of Tensor Memory allocated, from column 0"),
    (alloc(48), "48 columns", "allowed are powers of two from 32 to 512"),
    (alloc(16), "16 columns", "allowed are powers of two"),
    (alloc(1024), "1024 columns", "allowed are powers of two"),
    (alloc(32) + free(64) + free(32), "tcgen05.dealloc", "64 columns from 0 were not allocated so: 32 are from there"),
    (alloc(32) + free(32) + "\n" + free(32), "tcgen05.dealloc", "or were freed before"),
    ("@%p2 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" + alloc(32),
     "tcgen05.alloc", "given up the right to allocate in line"),
    (alloc(32, 2), "tcgen05.alloc", "has no peer"),
    (alloc(512) + "\n@%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place+4], 32;", "",
     "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 waits for 32 columns of Tensor Memory: "
     "512 of 512 are allocated"),
    (alloc(32) + "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32; bar.sync 0;", "", "waits for lanes 0xfffffffe"),
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%t}; tcgen05.wait::st.sync.aligned;", "", "column 0 of Tensor Memory is not allocated"),
    (alloc(32) + "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r31+31], {%t, %t}; tcgen05.wait::st.sync.aligned;" + free(32), "",
     "column 32 of Tensor Memory is not allocated"),
    (alloc(512) + "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r31+511], {%t, %t}; tcgen05.wait::st.sync.aligned;" + free(512), "", "out of bounds"),
    (alloc(32) + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%t}; tcgen05.wait::st.sync.aligned;" + free(32), "", "is not of warp 1 of its group"),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("body", "where", "says"), ALLOCATIONS)
def test_allocation_errors(body: str, where: str, says: str) -> None:
    for error in refused(body, np.zeros(128, np.uint32)):
        assert says in str(error), str(error)
        assert not where.startswith("tcgen05") or where in kernel(body).splitlines()[error.line - 1]


# --- checks ---------------------------------------------------------------------------------------

ORDERED = [  # body with a hole, what fills it, words of the report without it
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%t}; // A\n<> tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r31]; // B\n",
     "tcgen05.wait::st.sync.aligned;"),
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%t}; tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r31]; // A\n"
     "<> tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {7}; // B\n", "tcgen05.wait::ld.sync.aligned;"),
    ("<> tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r31]; // B A\n",
     "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%t}; tcgen05.wait::st.sync.aligned;"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "fill"), ORDERED)
def test_order_in_tensor_memory(body: str, fill: str) -> None:
    body = alloc(32) + body.replace("{7}", "{%r30}") + """tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;
    st.global.u32 [%at], %r5;""" + free(32)  # fmt: skip
    assert (launch(body.replace("<>", fill), np.zeros(128, np.uint32)) == np.arange(128)).all()
    wrong = kernel(body.replace("<>", ""))
    lines = {
        line_of(wrong, "// A") if "// A" in wrong else line_of(wrong, "// B"),
        line_of(wrong, "// B"),
    }
    for error in refused(
        body.replace("<>", ""), np.zeros(128, np.uint32), error=(DataRace, Uninitialized)
    ):
        read = any(f"line {line} reads" in str(error) for line in lines)
        assert error.line in lines or (isinstance(error, Uninitialized) and read)
        assert "of the Tensor Memory of CTA (0, 0, 0)" in str(error)
        assert ", column 0 of the Tensor Memory" in str(error)
        assert isinstance(error, Uninitialized) or all(
            f"line {line}" in str(error) for line in lines
        )


def test_deallocation_comes_after_all_loads() -> None:
    body = f"""{alloc(32)} tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {{%t}};
    tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r5}}, [%r31];
    tcgen05.wait::ld.sync.aligned; st.global.u32 [%at], %r5;
    {free(32, sync="<>")}"""
    assert (
        launch(body.replace("<>", "bar.sync 0;"), np.zeros(128, np.uint32)) == np.arange(128)
    ).all()
    for error in refused(body.replace("<>", ""), np.zeros(128, np.uint32), error=DataRace):
        assert "tcgen05.dealloc" in str(error)


# --- copies and shifts ----------------------------------------------------------------------------

COPIES = {
    "128x256b": (128, 32, lambda row: [row]),
    "4x256b": (4, 32, lambda row: [32 * row]),
    "128x128b": (128, 16, lambda row: [row]),
    "64x128b.warpx2::02_13": (64, 16, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (
        64,
        16,
        lambda row: [row % 32 + row // 32 * 64 + more for more in (0, 32)],
    ),
    "32x128b.warpx4": (32, 16, lambda row: [row + 32 * i for i in range(4)]),
}


def unpacked(data: np.ndarray, bits: int, shift: int) -> np.ndarray:
    """(rows, n): 16 elements of each 16 bytes to bytes, one by one."""
    out = np.zeros_like(data)
    for row, chunk in np.ndindex(len(data), data.shape[1] // 16):
        whole = int.from_bytes(data[row, 16 * chunk : 16 * chunk + 16].tobytes(), "little")
        for i in range(16):
            out[row, 16 * chunk + i] = (whole >> bits * i & (1 << bits) - 1) << shift
    return out


@pytest.mark.sampled(12)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize(
    ("form", "bits", "shift"), [("", 8, 0), (".b8x16.b6x16_p32", 6, 0), (".b8x16.b4x16_p64", 4, 2)]
)
def test_copy(shape: str, form: str, bits: int, shift: int, group: int) -> None:
    rows, size, lanes = COPIES[shape]
    tensor = RNG.integers(0, 1 << 32, (group, 128, 32), np.uint32)
    data = RNG.integers(0, 256, (group, 8192), np.uint8)
    row, x = np.indices((rows, size))
    leading = 128 * max(rows // 8, 1)
    at = 1024 + row // 8 * 128 + row % 8 * 16 + x // 16 * leading + x % 16
    descriptor = leading >> 4 << 16 | 128 >> 4 << 32 | 1 << 46
    body = f"""mov.u32 %r9, s; and.b32 %r9, %r9, 0xffffff; shr.u32 %r9, %r9, 4; add.u32 %r9, %r9, 64;
    cvt.u64.u32 %rd12, %r9; add.u64 %rd12, %rd12, {descriptor};
    tcgen05.cp.cta_group::{group}.{shape}{form} [%r30+4], %rd12;"""
    after = run(body, tensor, data, group)
    wanted = tensor.copy()
    for rank in range(group):
        content = data[rank][at] if not form else unpacked(data[rank][at], bits, shift)
        for i in range(rows):
            for lane in lanes(i):
                wanted[rank, lane, 4 : 4 + size // 4] = content[i].view(np.uint32)
    assert (after == wanted).all()


@pytest.mark.parametrize("group", [1, 2])
def test_shift(group: int) -> None:
    tensor = RNG.integers(0, 1 << 32, (group, 128, 32), np.uint32)
    after = run(
        f"tcgen05.shift.cta_group::{group}.down [%r30+8];",
        tensor,
        np.zeros((group, 16), np.uint8),
        group,
    )
    wanted = tensor.copy()
    for first in range(0, 128, 32):
        wanted[:, first : first + 31, 8:16] = tensor[:, first + 1 : first + 32, 8:16]
    assert (after == wanted).all()


def test_copy_without_a_proxy_fence() -> None:
    body = f"""{alloc(32)} .shared .align 128 .b8 s[512]; @%p1 mbarrier.init.shared.b64 [bar], 1;
    shl.b32 %r5, %t, 2; mov.u32 %r6, s; add.u32 %r5, %r5, %r6; st.shared.u32 [%r5], %t; // A
    fence.mbarrier_init.release.cluster; <> bar.sync 0;
    and.b32 %r6, %r6, 0xffffff; shr.u32 %r6, %r6, 4; cvt.u64.u32 %rd1, %r6;
    add.u64 %rd1, %rd1, {8 << 32 | 8 << 16 | 1 << 46};
    @!%p1 bra N;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r30], %rd1; // B
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd2];
    N: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra N;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r7}}, [%r31]; tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%at], %r7; {free(32)}"""
    body = "mov.u32 %r8, bar; cvt.u64.u32 %rd2, %r8; cvta.shared.u64 %rd2, %rd2;" + body
    out = launch(body.replace("<>", "fence.proxy.async.shared::cta;"), np.zeros(128, np.uint32))
    assert (out == np.arange(128) % 32 * 4).all()
    wrong = body.replace("<>", "")
    for error in refused(wrong, np.zeros(128, np.uint32), error=DataRace):
        a, b = line_of(kernel(wrong), "// A"), line_of(kernel(wrong), "// B")
        assert (
            f"missing fence.proxy.async: tcgen05.cp.cta_group::1.32x128b.warpx4 of CTA (0, 0, 0), line {b}"
            in str(error)
        )
        assert (
            f"after the ordinary write by st.shared.u32 of thread 0 of CTA (0, 0, 0), line {a}"
            in str(error)
        )


def test_loads_wait_for_the_commit() -> None:
    tensor = RNG.integers(0, 1 << 32, (1, 128, 32), np.uint32)
    body = "tcgen05.shift.cta_group::1.down [%r30]; // A"
    code = source(body + "\n", 32, 16).replace(
        "C: mbarrier.try_wait.parity.shared.b64 %p4, [bar+8], 0; @!%p4 bra C;", "C:"
    )
    args = [np.zeros_like(tensor), tensor, np.zeros(16, np.uint8)]
    for error in refusal(code, args, (DataRace, em.PtxError), target="sm_100a", block=128):
        assert any(why in str(error) for why in ("data race", "in flight", "is not allocated"))
        assert "line " + str(line_of(code, "// A")) in str(error)


# --- commit ---------------------------------------------------------------------------------------


def test_commit_of_nothing_arrives_once() -> None:
    body = """@%p1 mbarrier.init.shared.b64 [bar], 2; bar.sync 0;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
    mov.u32 %r5, bar; cvt.u64.u32 %rd1, %r5; cvta.shared.u64 %rd1, %rd1;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd1];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    st.global.u32 [%at], 1;"""
    assert (launch(body, np.zeros(128, np.uint32)) == 1).all()


@pytest.mark.parametrize("mask", [1, 6, 15])
def test_multicast_commit(mask: int) -> None:
    """The barriers of the CTAs of the mask, and no others."""
    body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p4, %r5, 2; and.pred %p4, %p4, %p1;
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait; mov.u16 %h1, {mask};
    @%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], %h1;
    shr.u32 %r6, {mask}, %r5; and.b32 %r6, %r6, 1; setp.eq.u32 %p5, %r6, 0; @%p5 bra N;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    N: barrier.cluster.arrive; barrier.cluster.wait;
    mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0; selp.u32 %r7, 1, 0, %p3;
    mad.wide.u32 %at, %r5, 128, %at; st.global.u32 [%at], %r7;"""
    out = launch(body, np.zeros((4, 32), np.uint32), block=32, grid=4, cluster=4)
    assert (out == (mask >> np.arange(4) & 1)[:, None]).all()


def test_multicast_to_nobody() -> None:
    body = """@%p1 mbarrier.init.shared.b64 [bar], 1; mov.u16 %h1, 2;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], %h1;"""
    for error in refused(body, np.zeros(128, np.uint32)):
        assert "multicast to CTAs 0x2 of a cluster of 1" in str(error)


# --- forms ----------------------------------------------------------------------------------------

# Refused by ptxas 13.0.
ILLEGAL = [
    "tcgen05.alloc.cta_group::1.sync.aligned.shared.b32 [place], 64;",
    "tcgen05.alloc.cta_group::1.shared::cta.b32 [place], 64;",
    "tcgen05.alloc.sync.aligned.shared::cta.b32 [place], 64;",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cta.b64 [bar];",
    "tcgen05.commit.cta_group::1.shared::cluster.b64 [bar];",
    "tcgen05.cp.cta_group::1.64x128b [%r30], %rd1;",
    "tcgen05.cp.cta_group::1.32x128b [%r30], %rd1;",
    "tcgen05.cp.cta_group::1.128x256b.warpx4 [%r30], %rd1;",
    "tcgen05.cp.cta_group::1.128x256b.b8x16 [%r30], %rd1;",
    "tcgen05.cp.cta_group::1.128x256b.b6x16_p32 [%r30], %rd1;",
    "tcgen05.shift.cta_group::1 [%r30];",
    "tcgen05.wait::ld;",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5}, [%r30];",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 %r5, [%r30];",
    "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r5}, [%r30];",
    "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r5}, [%r30];",
    "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r5}, [%r30], %r6;",
    "tcgen05.ld.sync.aligned.32x32b.x1.unpack::16b.b32 {%r5}, [%r30];",
    "tcgen05.st.sync.aligned.32x32b.x1.pack::16b.b32 [%r30], {%r5};",
    "tcgen05.ld.aligned.32x32b.x1.b32 {%r5}, [%r30];",
]


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_forms(line: str) -> None:
    code = kernel(f"bra E;\n{line}\nE:")
    with pytest.raises(em.PtxError, match=r"tcgen05\.") as caught:
        em.Device("sm_100a").launch(code, "k", 1, 32, [np.zeros(32, np.uint32)])
    assert caught.value.line == line_of(code, line)


def test_needs_a_blackwell() -> None:
    line = "tcgen05.wait::ld.sync.aligned;"
    with pytest.raises(em.PtxError, match="sm_100f"):
        em.Device().launch(text(line), "k", 1, 32, [np.zeros(32, np.uint32)])


FAMILY = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.{0} [%r1], %rd1, %rd2, %r2, "
SCALES = "[%r3], [%r4], %p1;"


@pytest.mark.parametrize(
    ("target", "device"),
    [("sm_100f", "sm_100a"), ("sm_100f", "sm_103a"), ("sm_103f", "sm_103a")],
)
def test_family(target: str, device: str) -> None:
    """Code for a family runs on its later members; ptxas 13.0 refuses for a family what is refused here."""
    body = HEAD + alloc(32) + free(32) + "bra E;\n" + FAMILY.format("block32") + SCALES + "\nE:"
    em.Device(device).launch(text(body, target=target), "k", 1, 128, [np.zeros(128, np.uint32)])
    for line in ("tcgen05.shift.cta_group::1.down [%r1];", FAMILY.format("scale_vec::1X") + SCALES):
        code = text(f"bra E;\n{line}\nE:", target=target)
        with pytest.raises(em.PtxError, match="needs sm_100a or sm_103a") as caught:
            em.Device(device).launch(code, "k", 1, 32, [np.zeros(32, np.uint32)])
        assert caught.value.line == line_of(code, line)
