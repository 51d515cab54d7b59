"""What the checks find, with line and both sides; and that the correct twin of each kernel passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from asynchronous import ORDERS, outcome, refusal

from blockscale import emulator as em
from blockscale.emulator.checks import DataRace, Uninitialized
from kernels import line_of, text

SHARED = """.shared .align 128 .b8 s[1024]; .shared .align 8 .b64 bar;
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
         """@!%p1 bra R;
         @%p2 st.shared.u32 [s], 7;
         @%p2 <>.shared.u32 [s+4], 1; // A
         bra E;
         R: ld.acquire.cta.shared.u32 %r5, [s+4]; // B
         setp.eq.u32 %p5, %r5, 1; @!%p5 bra R;
         ld.shared.u32 %r6, [s];
         E: bar.sync 0;
         ld.shared.u32 %r6, [s]; st.global.u32 [%at], %r6;""",
         ("st.release.cta",), ("st",), "nothing orders it after the write by st.shared.u32",
         (DataRace, Uninitialized), wanted="7"),
    Twin("atomics",
         """@%p2 st.shared.u32 [s], 0; bar.sync 0;
         <>
         bar.sync 0; ld.shared.u32 %r6, [s]; st.global.u32 [%at], %r6;""",
         ("atom.shared.add.u32 %r5, [s], 1;",),
         ("""ld.shared.u32 %r5, [s]; // A
         add.u32 %r5, %r5, 1;
         st.shared.u32 [s], %r5; // B""",), "line {B} writes byte 0x400", wanted="64"),
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
         ("cp.async.wait_group 0;",), ("cp.async.wait_group 1;",), "byte 0x400", wanted="1"),
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
         ("bar.sync 0;",), ("",), "line {B} writes byte 0x480 of the shared memory of "
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
         ld.shared.u32 %r5, [s+252]; // A B
         st.global.u32 [%at], %r5;""",
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
         ld.shared.u8 %r5, [s+1]; // A B
         st.global.u32 [%at], %r5;""",
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
        assert says in str(error) or isinstance(error, twin.error[1:]), (says, str(error))
        assert error.line in places.values(), str(error)
