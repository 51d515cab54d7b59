"""What the checks find, with line and both sides; the correct twin of each kernel passes."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from asynchronous import ORDERS, aligned, outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace, ExitRace, Uninitialized

SHARED = """.shared .align 128 .b8 s[1024]; .shared .align 8 .b64 bar[2];
    setp.lt.u32 %p1, %t, 32; setp.eq.u32 %p2, %t, 0; shl.b32 %r1, %t, 2;
    mov.u32 %r2, s; mov.u32 %r3, bar; add.u32 %r4, %r2, %r1;
"""
#: One thread sets up the mbarrier, everybody sees it.
BAR = """@%p2 mbarrier.init.shared.b64 [bar], {count};
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;"


@dataclass(frozen=True)
class Twin:
    """A kernel with holes: ``right`` fills them so that all is well, ``wrong`` so that it is not.

    Lines that the report must name end in ``// A`` and ``// B``.
    """

    name: str
    body: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    says: str
    error: tuple[type[Exception], ...] = (DataRace,)
    block: int = 64
    grid: int = 1
    target: str = "sm_90a"
    wanted: str = ""  # value of every word of the output; of thread t, an expression of t

    def source(self, holes: tuple[str, ...]) -> str:
        body = self.body
        for hole in holes:
            body = body.replace("<>", hole, 1)
        assert "<>" not in body
        return text(SHARED + body, target=self.target)


TWINS = [
    Twin("write and read",
         """@%p2 st.shared.u32 [s], 7; // A
         <>
         ld.shared.u32 %r5, [s]; // B
         st.global.u32 [%at], %r5;""",
         ("bar.sync 0;",), ("bar.warp.sync -1;",),
         "data race: ld.shared.u32 of CTA (0, 0, 0), line {B} reads byte 0x400 of the shared memory "
         "of CTA (0, 0, 0); nothing orders it after the write by st.shared.u32 of CTA (0, 0, 0), "
         "line {A}", wanted="7"),
    Twin("read and write",
         """st.shared.u32 [%r4], %t; bar.sync 0;
         xor.b32 %r5, %r1, 128; add.u32 %r5, %r5, %r2;
         ld.shared.u32 %r6, [%r5]; // A
         <>
         st.shared.u32 [%r4], 1; // B
         st.global.u32 [%at], %r6;""",
         ("barrier.sync 0;",), ("",), "line {B} writes byte 0x400 of the shared memory of "
         "CTA (0, 0, 0); nothing orders it after the read by ld.shared.u32 of CTA (0, 0, 0), "
         "line {A}", wanted="t ^ 32"),
    Twin("two writes",
         """@%p1 st.shared.u32 [s], 1; // A
         <>
         @!%p1 st.shared.u32 [s], 2; // B
         bar.sync 0;
         ld.shared.u32 %r5, [s]; st.global.u32 [%at], %r5;""",
         ("bar.sync 0;",), ("",), "line {B} writes byte 0x400 of the shared memory of "
         "CTA (0, 0, 0); nothing orders it after the write by st.shared.u32 of CTA (0, 0, 0), "
         "line {A}", wanted="2"),
    Twin("two warps write at once",
         """and.b32 %r5, %t, <>;
         shl.b32 %r5, %r5, 2; add.u32 %r5, %r5, %r2;
         st.shared.u32 [%r5], %t; // A B
         bar.sync 0;
         ld.shared.u32 %r6, [%r4]; st.global.u32 [%at], %r6;""",
         ("63",), ("31",), "line {B} writes byte 0x400", wanted="t"),
    Twin("a barrier of too few warps",
         """@%p2 st.shared.u32 [s], 7; // A
         setp.lt.u32 %p4, %t, 64;
         <>
         ld.shared.u32 %r5, [s]; // B
         st.global.u32 [%at], %r5;""",
         ("bar.sync 1, 96;",), ("@%p4 bar.sync 1, 64;",),
         "line {B} reads byte 0x400", block=96, wanted="7"),
    Twin("bar.arrive passes on, and learns nothing",
         """@%p1 st.shared.u32 [%r4], %t; // A
         @%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;
         sub.u32 %r5, %r4, 128;
         @!%p1 ld.shared.u32 %r6, [%r5];
         @!%p1 st.shared.u32 [%r4], %r6; // A
         <>
         @%p1 ld.shared.u32 %r6, [%r4+128]; // B
         st.global.u32 [%at], %r6;""",
         ("bar.sync 0;",), ("bar.warp.sync -1;",), "line {B} reads byte 0x480", (DataRace, Uninitialized), wanted="t % 32"),
    Twin("flag in shared memory",
         """@%p2 st.shared.u32 [s+4], 0; bar.sync 0; @!%p1 bra R;
         @%p2 st.shared.u32 [s], 7;
         @%p2 <>.shared.u32 [s+4], 1; // A
         bra E;
         R: ld.acquire.cta.shared.u32 %r5, [s+4]; // B
         setp.eq.u32 %p5, %r5, 1; @!%p5 bra R;
         ld.shared.u32 %r6, [s];
         E: bar.sync 0;
         ld.shared.u32 %r6, [s]; st.global.u32 [%at], %r6;""",
         ("st.release.cta",), ("st",), "byte 0x404 of the shared memory of CTA (0, 0, 0); nothing orders it",
         wanted="7"),
    Twin("atomics",
         """@%p2 st.shared.u32 [s], 0; bar.sync 0;
         <>
         bar.sync 0; ld.shared.u32 %r6, [s]; st.global.u32 [%at], %r6;""",
         ("atom.shared.add.u32 %r5, [s], 1;",),
         ("""ld.shared.u32 %r5, [s]; // A
         add.u32 %r5, %r5, 1;
         st.shared.u32 [s], %r5; // B""",), "line {B} writes byte 0x400", wanted="64"),
    Twin("the last to count reads what all wrote",
         """@%p2 st.shared.u32 [s+4], 0; bar.sync 0;
         and.b32 %r5, %t, 31; setp.ne.u32 %p4, %r5, 0; @%p4 bra E;
         st.shared.u32 [%r4], 7;
         membar.cta; atom.shared.add.u32 %r5, [s+4], 1; membar.cta;
         setp.ne.u32 %p4, %r5, <>; @%p4 bra E;
         ld.shared.u32 %r6, [s]; ld.shared.u32 %r7, [s+128]; // A B
         E: bar.sync 0; ld.shared.u32 %r6, [s]; st.global.u32 [%at], %r6;""",
         ("1",), ("0",), "line {B} ", (DataRace,), wanted="7"),
    Twin("mbarrier passes on what was written",
         BAR.format(count=32) + """@!%p1 bra R;
         st.shared.u32 [%r4], %t; // A
         <>
         bra E;
         R: mbarrier.try_wait.parity<>.shared::cta.b64 %p3, [bar], 0; @!%p3 bra R;
         ld.shared.u32 %r5, [%r4-128]; // B
         st.global.u32 [%at], %r5;
         E:""",
         ("mbarrier.arrive.shared.b64 _, [bar];", ""),
         ("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];", ""),
         "line {B} reads byte 0x400", wanted="t % 32 * (t >= 32)"),
    Twin("mbarrier, relaxed with a fence",
         BAR.format(count=32) + """@!%p1 bra R;
         st.shared.u32 [%r4], %t; // A
         <> mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];
         bra E;
         R: mbarrier.try_wait.parity.shared::cta.b64 %p3, [bar], 0; @!%p3 bra R;
         ld.shared.u32 %r5, [%r4-128]; // B
         st.global.u32 [%at], %r5;
         E:""",
         ("fence.acq_rel.cta;",), ("",), "line {B} reads byte 0x400", wanted="t % 32 * (t >= 32)"),
    Twin("mbarrier, relaxed wait",
         BAR.format(count=32) + """@!%p1 bra R;
         st.shared.u32 [%r4], %t; // A
         mbarrier.arrive.shared.b64 %rd1, [bar];
         bra E;
         R: mbarrier.test_wait.parity<>.shared::cta.b64 %p3, [bar], 0; @!%p3 bra R;
         ld.shared.u32 %r5, [%r4-128]; // B
         st.global.u32 [%at], %r5;
         E:""",
         (".acquire.cta",), (".relaxed.cta",), "line {B} reads byte 0x400",
         wanted="t % 32 * (t >= 32)"),
    Twin("mbarrier before it is initialized for all",
         """@%p2 mbarrier.init.shared.b64 [bar], 64; // A
         @%p2 bra N; N:
         <>
         mbarrier.arrive.shared.b64 %rd1, [bar]; // B
         W: mbarrier.try_wait.shared.b64 %p3, [bar], %rd1; @!%p3 bra W;
         st.global.u32 [%at], 1;""",
         ("bar.sync 0;",), ("",), "nothing orders it after the write by mbarrier.init.shared.b64 of "
         "CTA (0, 0, 0), line {A}", (em.PtxError,), wanted="1"),
    Twin("memory of another CTA",
         """mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1;
         mapa.shared::cluster.u32 %r7, %r4, %r6;
         st.shared::cluster.u32 [%r7], %t; // A
         <>
         ld.shared.u32 %r8, [%r4]; // B
         shl.b32 %r9, %r5, 8; cvt.u64.u32 %rd1, %r9; add.u64 %at, %at, %rd1;
         st.global.u32 [%at], %r8;""",
         ("barrier.cluster.arrive; barrier.cluster.wait;",),
         ("barrier.cluster.arrive.relaxed; barrier.cluster.wait;",),
         "line {B} reads byte 0x400 of the shared memory of CTA (1, 0, 0); nothing orders it after "
         "the write by st.shared::cluster.u32 of CTA (0, 0, 0), line {A}",
         grid=2, wanted="t"),
    Twin("memory of another CTA, relaxed with a fence",
         """mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1;
         mapa.shared::cluster.u32 %r7, %r4, %r6;
         st.shared::cluster.u32 [%r7], %t; // A
         <> barrier.cluster.arrive.relaxed; barrier.cluster.wait.acquire;
         ld.shared.u32 %r8, [%r4]; // B
         shl.b32 %r9, %r5, 8; cvt.u64.u32 %rd1, %r9; add.u64 %at, %at, %rd1;
         st.global.u32 [%at], %r8;""",
         ("fence.acq_rel.cluster;",), ("",),
         "line {B} reads byte 0x400 of the shared memory of CTA (1, 0, 0); nothing orders it after "
         "the write by st.shared::cluster.u32 of CTA (0, 0, 0), line {A}",
         grid=2, wanted="t"),
    Twin("cp.async not waited for",
         """st.shared.u32 [%r4], 5; bar.sync 0;
         cp.async.ca.shared.global [%r4], [%at], 4; // A
         cp.async.commit_group;
         <>
         ld.shared.u32 %r5, [%r4]; // B
         add.u32 %r5, %r5, 1; st.global.u32 [%at], %r5;
         cp.async.wait_all;""",
         ("cp.async.wait_group 0;",), ("cp.async.wait_group 1;",), "byte 0x4", wanted="1"),
    Twin("cp.async of another warp",
         """cp.async.ca.shared.global [%r4], [%at], 4; // A
         cp.async.wait_all;
         <>
         xor.b32 %r5, %r1, 128; add.u32 %r5, %r5, %r2;
         ld.shared.u32 %r6, [%r5]; // B
         st.global.u32 [%at], %r6;""",
         ("bar.sync 0;",), ("",), "nothing orders it after the write by cp.async.ca.shared.global "
         "of CTA (0, 0, 0), line {A}", wanted="0"),
    Twin("bulk copy not waited for",
         BAR.format(count=1) + f"""@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
         @%p2 {BULK} [s], [%out], 256, [bar]; // A
         <>
         ld.shared.u32 %r5, [%r4]; // B
         add.u32 %r5, %r5, 1; st.global.u32 [%at], %r5;
         {WAIT.replace("W", "V")}""",
         (WAIT,), ("",), "byte 0x400", (DataRace, Uninitialized), wanted="1"),
    Twin("bulk copy over what is still read",
         BAR.format(count=1) + f"""st.shared.u32 [%r4], 5;
         fence.proxy.async.shared::cta; bar.sync 0;
         ld.shared.u32 %r5, [%r4]; // A
         <>
         @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
         @%p2 {BULK} [s], [%out], 256, [bar]; // B
         {WAIT}
         ld.shared.u32 %r6, [%r4]; add.u32 %r5, %r5, %r6; st.global.u32 [%at], %r5;""",
         ("bar.sync 0;",), ("",), "line {B} writes byte 0x404 of the shared memory of "
         "CTA (0, 0, 0); nothing orders it after the read by ld.shared.u32 of CTA (0, 0, 0), "
         "line {A}", wanted="5"),
    Twin("no proxy fence before a bulk copy over ordinary writes",
         BAR.format(count=1) + f"""st.shared.u32 [%r4], 5; // A
         <> bar.sync 0;
         @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
         @%p2 {BULK} [s], [%out], 256, [bar]; // B
         {WAIT}
         ld.shared.u32 %r6, [%r4]; st.global.u32 [%at], %r6;""",
         ("fence.proxy.async;",), ("",), "missing fence.proxy.async: " + BULK + " of CTA (0, 0, 0), "
         "line {B} writes byte 0x400 of the shared memory of CTA (0, 0, 0) through the asynchronous "
         "proxy after the ordinary write by st.shared.u32 of CTA (0, 0, 0), line {A}", wanted="0"),
    Twin("no proxy fence before a bulk copy out",
         """st.shared.u32 [%r4], 5; // A
         <>
         @!%p2 bra E;
         cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256; // B
         cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
         E:""",
         ("fence.proxy.async.shared::cta; bar.sync 0;",), ("fence.acq_rel.cta; bar.sync 0;",),
         "missing fence.proxy.async: cp.async.bulk.global.shared::cta.bulk_group of CTA (0, 0, 0), "
         "line {B} reads byte 0x400 of the shared memory of CTA (0, 0, 0) through the asynchronous "
         "proxy after the ordinary write by st.shared.u32 of CTA (0, 0, 0), line {A}", wanted="5"),
    Twin("the proxy fence may come after the barrier, by who issues",
         """st.shared.u32 [%r4], 5; // A
         bar.sync 0;
         <>
         @!%p2 bra E;
         cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256; // B
         cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
         E:""",
         ("fence.proxy.async;",), ("fence.proxy.alias;",), "missing fence.proxy.async", wanted="5"),
    Twin("the proxy fence before the write",
         """<> st.shared.u32 [%r4], 5; // A
         <> bar.sync 0;
         @!%p2 bra E;
         cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256; // B
         cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
         E:""",
         ("", "fence.proxy.async;"), ("fence.proxy.async;", ""), "missing fence.proxy.async",
         wanted="5"),
    Twin("overwriting what a bulk copy still reads",
         """st.shared.u32 [%r4], 5; fence.proxy.async; bar.sync 0;
         @!%p2 bra N;
         cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256; // A
         cp.async.bulk.commit_group;
         <>
         N: bar.sync 0;
         st.shared.u32 [%r4], 6; // B
         @%p2 cp.async.bulk.wait_group 0;""",
         ("cp.async.bulk.wait_group.read 0;",), ("",), "byte 0x400", wanted="5"),
    Twin("overwriting by the thread that issued the copy",
         """@!%p2 bra E;
         st.shared.v4.u32 [%r4], {5, 5, 5, 5}; fence.proxy.async;
         cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 16; // A
         cp.async.bulk.commit_group;
         <>
         st.shared.v4.u32 [%r4], {6, 6, 6, 6}; // B
         cp.async.bulk.wait_group 0;
         E:""",
         ("cp.async.bulk.wait_group.read 0;",), ("",), "byte 0x400", wanted="5 * (t < 4)"),
    Twin("uninitialized",
         """<>
         bar.sync 0;
         ld.shared.u32 %r5, [s+252]; // A
         st.global.u32 [%at], %r5; // B
         """,
         ("st.shared.u32 [%r4], 9;",), ("@%p1 st.shared.u32 [%r4], 9;",),
         "ld.shared.u32 of CTA (0, 0, 0), line {A} reads byte 0x4fc of the shared memory of "
         "CTA (0, 0, 0), which nobody has written", (Uninitialized,), wanted="9"),
    Twin("uninitialized, bulk copy",
         """<> fence.proxy.async; bar.sync 0;
         @!%p2 bra E;
         cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256; // A B
         cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
         E:""",
         ("st.shared.u32 [%r4], 9;",), ("@%p1 st.shared.u32 [%r4], 9;",),
         "cp.async.bulk.global.shared::cta.bulk_group of CTA (0, 0, 0), line {A} reads byte 0x480 "
         "of the shared memory of CTA (0, 0, 0), which nobody has written", (Uninitialized,),
         wanted="9"),
    Twin("bytes apart", # two warps write neighbouring bytes of a word
         """add.u32 %r5, %r2, %t; st.shared.u8 [%r5], %t;
         <> bar.sync 0;
         ld.shared.u8 %r6, [%r5];
         st.global.u32 [%at], %r6;""",
         ("",), ("@%p1 st.shared.u8 [s+32], 9; // A B\n",), "line {A} writes byte 0x420", wanted="t"),
    Twin("uninitialized byte",
         """@%p2 st.shared.u8 [s], 1; @%p2 st.shared.v2.u8 [s+2], {1, 1};
         <> bar.sync 0;
         ld.shared.u8 %r5, [s+1]; // A
         st.global.u32 [%at], %r5; // B
         """,
         ("@%p2 st.shared.b8 [s+1], 3;",), ("",), "line {A} reads byte 0x401", (Uninitialized,),
         wanted="3"),
]  # fmt: skip


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_correct_twin_passes(twin: Twin) -> None:
    out = np.zeros(twin.block * twin.grid, np.uint32)
    got = outcome(
        twin.source(twin.right), [out], target=twin.target, block=twin.block, grid=twin.grid,
        cluster=twin.grid,
    )[0]  # fmt: skip
    t = np.arange(len(out)) % twin.block
    assert (got == eval(twin.wanted, {"t": t})).all(), got


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_the_wrong_twin_is_reported(twin: Twin) -> None:
    source = twin.source(twin.wrong)
    places = {
        mark: next((i for i, line in enumerate(source.splitlines(), 1)
                    if "//" in line and mark in line.split("//")[1]), 0)
        for mark in "AB"
    }  # fmt: skip
    for error in refusal(
        source, [np.zeros(twin.block * twin.grid, np.uint32)], twin.error, target=twin.target,
        block=twin.block, grid=twin.grid, cluster=twin.grid,
    ):  # fmt: skip
        says = twin.says.format(**places)
        said = re.sub(r"thread \d+ of ", "", str(error))
        assert says in said or isinstance(error, twin.error[1:]), (says, said)
        read = any(f"line {line} reads" in said for line in places.values())
        assert error.line in places.values() or (isinstance(error, Uninitialized) and read), said


# --- transactions, exits, alignment -----------------------------------------------------------------

TRANSFER = (
    BAR
    + """@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {expected};
    @%p2 """
    + BULK
    + """ [s], [%out], 256, [bar]; // A
    """
    + WAIT
    + """ // B
    ld.shared.u32 %r5, [%r4]; st.global.u32 [%at], %r5;"""
)


def transfer(expected: int, count: int = 1) -> str:
    return text(SHARED + TRANSFER.format(expected=expected, count=count))


def test_bytes_as_announced() -> None:
    outcome(transfer(256), [np.arange(64, dtype=np.uint32)], block=64)


@pytest.mark.parametrize("expected", [16, 240])
def test_more_bytes_than_announced(expected: int) -> None:
    source = transfer(expected)
    for error in refusal(source, [np.zeros(64, np.uint32)], block=64):
        assert error.line == line_of(source, "// A")
        assert (
            f"wrong transaction bytes: {256 - expected} more bytes came to mbarrier 0x800 of "
            "CTA (0, 0, 0) than its phase 0 expects" in str(error)
        )


@pytest.mark.parametrize("expected", [272, 1 << 19])
def test_fewer_bytes_than_announced(expected: int) -> None:
    source = transfer(expected)
    for error in refusal(source, [np.zeros(64, np.uint32)], em.Deadlock, block=64):
        assert (
            f"CTA (0, 0, 0), warp 0-1, line {line_of(source, '// B')}: "
            "mbarrier.try_wait.parity.shared.b64 waits for the phase of parity 0 of mbarrier 0x800 "
            "of CTA (0, 0, 0), phase 0: 0 of 1 arrivals pending, "
            f"{expected - 256} bytes announced have not come" in str(error)
        )


def test_too_few_arrivals() -> None:
    source = transfer(256, count=3)
    for error in refusal(source, [np.zeros(64, np.uint32)], em.Deadlock, block=64):
        assert "phase 0: 2 of 3 arrivals pending" in str(error)
        assert "bytes" not in str(error)


def test_each_warp_is_in_the_report_of_a_deadlock() -> None:
    body = (
        BAR.format(count=1)
        + """@%p1 bra L;
    bar.sync 1, 64; // B
    L: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; // A
    @!%p3 bra L;"""
    )
    source = text(SHARED + body)
    for error in refusal(source, [np.zeros(64, np.uint32)], em.Deadlock, block=64):
        a, b = line_of(source, "// A"), line_of(source, "// B")
        assert f"CTA (0, 0, 0), warp 0, line {a}: mbarrier.try_wait" in str(error)
        assert f"CTA (0, 0, 0), warp 1, line {b}: bar.sync waits for barrier 1: 32 of 64" in str(
            error
        )


@pytest.mark.parametrize(
    ("issue", "wait"),
    [
        ("cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 16;"
         "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 %rd1, [bar], 16; "
         + BULK + " [s], [%out], 16, [bar];", WAIT),
        ("cp.async.cg.shared.global [s], [%out], 16;", "cp.async.wait_all;"),
    ],
)  # fmt: skip
def test_exit_with_a_copy_in_flight(issue: str, wait: str) -> None:
    body = """@!%p2 bra E;
    st.shared.v4.u32 [s], {0, 0, 0, 0}; fence.proxy.async;
    """
    out = np.zeros(4, np.uint32)
    outcome(text(SHARED + body + issue + wait + "E:"), [out])
    source = text(SHARED + body + issue + "// A\nE:")
    store = "bulk_group" in issue
    if store:  # no sentence of the ISA forbids it: only if asked for
        for completion, seed in ORDERS:
            device = em.Device("sm_90a", completion=completion, seed=seed)
            device.launch(source, "k", 1, 32, [aligned(out)])
    check = ("all", "exit_stores") if store else "all"
    for completion, seed in ORDERS:
        with pytest.raises(
            ExitRace, match="may still be in flight, and needs the memory"
        ) as caught:
            em.Device(completion=completion, seed=seed, check=check).launch(
                source, "k", 1, 32, [aligned(out)]
            )
        assert caught.value.line == line_of(source, "// A")


ALIGNED = [
    ("cp.async.bulk.global.shared::cta.bulk_group [%out{}], [s], 16;", 16, "destination 0x"),
    ("cp.async.bulk.global.shared::cta.bulk_group [%out], [s{}], 16;", 16, "source 0x"),
    (BULK + " [s{}], [%out], 16, [bar];", 16, "destination 0x"),
    (BULK + " [s], [%out{}], 16, [bar];", 16, "source 0x"),
    (BULK + " [s], [%out], 16, [bar{}];", 8, "mbarrier address 0x"),
    ("cp.async.ca.shared.global [s{}], [%out], 4;", 4, "address 0x"),
    ("cp.async.ca.shared.global [s{}], [%out], 8;", 8, "address 0x"),
    ("cp.async.cg.shared.global [s], [%out{}], 16;", 16, "address 0x"),
    (
        "mbarrier.inval.shared.b64 [bar]; mbarrier.init.shared.b64 [bar{}], 1;",
        8,
        "mbarrier address",
    ),
    ("mbarrier.arrive.shared.b64 %rd1, [bar{}];", 8, "mbarrier address 0x"),
    ("mbarrier.test_wait.parity.shared.b64 %p9, [bar{}], 1;", 8, "mbarrier address 0x"),
]


@pytest.mark.parametrize(("line", "align", "says"), ALIGNED)
def test_misaligned(line: str, align: int, says: str) -> None:
    body = """@!%p2 bra E; st.shared.v4.u32 [s], {0, 0, 0, 0}; st.shared.v4.u32 [s+16], {0, 0, 0, 0};
    fence.proxy.async; mbarrier.init.shared.b64 [bar], 2; fence.mbarrier_init.release.cluster;
    mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 16;
    mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 16;"""
    tail = """cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; cp.async.wait_all;
    nanosleep.u32 1; bar.warp.sync 1; E: bar.sync 0;"""
    out = np.zeros(64, np.uint32)
    source = text(f"{SHARED}{body}\n{line} // A\n{tail}")
    device = em.Device(check="race")  # nobody waits for these copies
    device.launch(source.replace("{}", ""), "k", 1, 32, [out])
    if "bar{}" not in line:
        device.launch(source.replace("{}", f"+{align}"), "k", 1, 32, [out])
    for error in refusal(source.replace("{}", f"+{align // 2}"), [out]):
        assert error.line == line_of(source, "// A")
        assert says in str(error)
        assert f"is not a multiple of {align}" in str(error)


@pytest.mark.parametrize("size", [8, 24])
def test_size_of_a_bulk_copy(size: int) -> None:
    body = f"@%p2 cp.async.bulk.global.shared::cta.bulk_group [%out], [s], {size};"
    for error in refusal(text(SHARED + body), [np.zeros(64, np.uint32)]):
        assert f"size {size} is not a multiple of 16" in str(error)


# --- settings ---------------------------------------------------------------------------------------


def test_checks_can_be_chosen() -> None:
    race = next(twin for twin in TWINS if twin.name == "write and read")
    blank = next(twin for twin in TWINS if twin.name == "uninitialized")
    for twin, wanted, allowed in (
        (race, DataRace, ("none", "uninitialized", ("registers",))),
        (blank, Uninitialized, ("none", "race", ("race", "registers"))),
    ):
        source, out = twin.source(twin.wrong), np.zeros(64, np.uint32)
        for check in allowed:
            em.Device(check=check).launch(source, "k", 1, 64, [out])
        for check in ("all", wanted.__name__.lower().removeprefix("data")):
            with pytest.raises(wanted):
                em.Device(check=check).launch(source, "k", 1, 64, [out])


def test_words_are_told_apart_where_nothing_is_narrower() -> None:
    """Two warps write neighbouring halves of what a vector store writes: no race in either size."""
    for store, step in (("st.shared.v2.u16 [%r5], {%h1, %h1}", 4), ("st.shared.u16 [%r5], %h1", 2)):
        body = f"""mad.lo.u32 %r5, %t, {step}, %r2; cvt.u16.u32 %h1, %t; {store}; bar.sync 0;
        ld.shared.u16 %h2, [%r5]; cvt.u32.u16 %r6, %h2; st.global.u32 [%at], %r6;"""
        out = outcome(text(SHARED + body), [np.zeros(64, np.uint32)], block=64)[0]
        assert (out == np.arange(64)).all()
