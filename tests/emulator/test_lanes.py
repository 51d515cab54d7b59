"""Lanes of a warp are told apart: what one of them knows or does, bar.warp.sync tells the others."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from asynchronous import outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace, LaneRace, Site
from blockscale.emulator.clocks import order, tables

HEAD = """.shared .align 128 .b8 s[2048]; .shared .align 8 .b64 bar[2];
    setp.eq.u32 %p2, %t, 0; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r4, %r2, %r1;
    xor.b32 %r5, %r1, 4; add.u32 %r5, %r5, %r2;
"""
READY = "@%p2 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%out], 128, [bar];"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 128; cp.async.bulk.commit_group;"
TRY = "mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;"

LANES = np.arange(32)


@dataclass(frozen=True)
class Case:
    """A kernel of one warp with a hole, which bar.warp.sync fills."""

    name: str
    body: str
    wanted: np.ndarray  # what the lanes store


CASES = [
    Case("a lane reads what its neighbour wrote",
         "st.shared.u32 [%r4], %t; // A\n <> ld.shared.u32 %r6, [%r5]; // B\n st.global.u32 [%at], %r6;",
         LANES ^ 1),
    Case("a lane overwrites what its neighbour read",
         "st.shared.u32 [%r4], %t; bar.warp.sync -1; ld.shared.u32 %r6, [%r5]; // A\n <> st.shared.u32 [%r4], 9; // B\n st.global.u32 [%at], %r6;",
         LANES ^ 1),
    Case("one lane stores what all wrote",
         f"st.shared.u32 [%r4], %t; // A\n fence.proxy.async; <> @%p2 bra S; bra E; S: {STORE} // B\n cp.async.bulk.wait_group.read 0; E:",
         LANES),
    Case("others overwrite what one lane's store reads",
         f"st.shared.u32 [%r4], %t; fence.proxy.async; bar.warp.sync -1; @!%p2 bra E; {STORE} // A\n cp.async.bulk.wait_group.read 0; E: vote.sync.any.pred %p5, %p2, -1; <> st.shared.u32 [%r4], 9; // B\n",
         LANES),
    Case("one lane waits for a load that all read",
         "st.shared.u32 [%r4], 8; fence.proxy.async; " + READY + f"@!%p2 bra E; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128; {LOAD} // A\n W: {TRY} E: <> ld.shared.u32 %r6, [%r4]; // B\n add.u32 %r6, %r6, 5; st.global.u32 [%at], %r6;",
         np.full(32, 5)),
]  # fmt: skip


def source(case: Case, sync: str) -> str:
    return text(HEAD + case.body.replace("<>", sync))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_synced_kernel_is_right(case: Case) -> None:
    out = outcome(source(case, "bar.warp.sync -1;"), [np.zeros(32, np.uint32)])[0]
    assert (out == case.wanted).all(), out


@pytest.mark.parametrize("sync", ["", "vote.sync.any.pred %p4, %p2, -1;"], ids=["none", "vote"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_other_is_refused(case: Case, sync: str) -> None:
    """vote.sync brings the lanes together, and orders no memory."""
    wrong = source(case, sync)
    for error in refusal(wrong, [np.zeros(32, np.uint32)], LaneRace):
        assert "data race between lanes of a warp" in str(error)
        assert "bar.warp.sync must come between" in str(error)
        assert f"line {line_of(wrong, '// A')}" in str(error)
        assert f"line {line_of(wrong, '// B')}" in str(error)


def test_threads_are_named() -> None:
    for error in refusal(source(CASES[0], ""), [np.zeros(32, np.uint32)], LaneRace):
        assert "ld.shared.u32 of thread 0 of CTA (0, 0, 0)" in str(error)
        assert "the write by st.shared.u32 of thread 1 of CTA (0, 0, 0)" in str(error)


def test_a_sync_of_other_lanes_does_not_help() -> None:
    """Lanes 0 and 2, and 1 and 3, meet; each reads of the one that it has not met."""
    body = """setp.eq.u32 %p4, %r6, 0; @%p4 bra EVEN; bar.warp.sync 0xa; bra GO; EVEN: bar.warp.sync 0x5; GO:"""
    kernel = text(
        HEAD + "and.b32 %r6, %t, 1; st.shared.u32 [%r4], %t;" + body
        + "ld.shared.u32 %r7, [%r5]; st.global.u32 [%at], %r7;"
    )  # fmt: skip
    refusal(kernel, [np.zeros(4, np.uint32)], LaneRace, block=4)


@pytest.mark.parametrize("check", [("race",), ("race", "uninitialized", "registers")])
def test_lanes_need_not_be_told_apart(check: tuple[str, ...]) -> None:
    out = np.zeros(32, np.uint32)
    em.Device(check=check).launch(source(CASES[0], ""), "k", 1, 32, [out])
    assert (out == np.arange(32) ^ 1).all()


def test_every_reader_counts() -> None:
    """Three warps read a word; two of them meet the one that writes it."""
    body = """@%p2 st.shared.u32 [s], 5; bar.sync 0; ld.shared.u32 %r6, [s]; // A
    setp.lt.u32 %p4, %t, 64; @%p4 bar.sync 1, <>; @!%p4 <>
    @%p2 st.shared.u32 [s], 6; // B
    st.global.u32 [%at], %r6;"""
    right = text(HEAD + body.replace("<>", "96", 1).replace("<>", "bar.sync 1, 96;"))
    wrong = text(HEAD + body.replace("<>", "64", 1).replace("<>", "add.u32 %r7, %r7, 1;"))
    assert (outcome(right, [np.zeros(96, np.uint32)], block=96)[0] == 5).all()
    for error in refusal(wrong, [np.zeros(96, np.uint32)], DataRace, block=96):
        assert "the read by ld.shared.u32 of thread 64 of CTA" in str(error)


@pytest.mark.parametrize("copies", [40, 200])
def test_no_copy_is_forgotten(copies: int) -> None:
    """A copy that nobody waits for, and many after it that somebody waits for."""
    more = "cp.async.bulk.global.shared::cta.bulk_group [%out+16], [s+16], 16;\n" * copies
    body = f"""setp.eq.u32 %p4, %t, 32; st.shared.v4.u32 [%r9], {{%t, %t, %t, %t}}; fence.proxy.async; bar.sync 0;
    @!%p4 bra N; cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 16; // A
    cp.async.bulk.commit_group; <>
    N: bar.sync 0; @!%p2 bra E; {more} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    st.shared.u32 [s], 7; // B
    E: bar.sync 0; @%p4 cp.async.bulk.wait_group 0;"""
    head = HEAD + "shl.b32 %r9, %t, 4; add.u32 %r9, %r9, %r2;"
    right = text(head + body.replace("<>", "cp.async.bulk.wait_group.read 0;"))
    wrong = text(head + body.replace("<>", ""))
    assert (outcome(right, [np.zeros(64, np.uint32)], block=64)[0][:4] == 0).all()
    for error in refusal(wrong, [np.zeros(64, np.uint32)], DataRace, block=64):
        assert f"line {line_of(wrong, '// B')} writes byte" in str(error)
        assert f"line {line_of(wrong, '// A')}" in str(error)


def test_copies_of_one_lane_are_not_ordered() -> None:
    """Two lanes copy the same to one word. One of them waits for its own and tells the other, which
    copies something else there: after its own first copy only if it waits for that, too (8.9.1.1:
    not ordered with those of any other cp.async of the thread)."""
    body = """setp.lt.u32 %p4, %t, 2; setp.eq.u32 %p5, %t, 1; @!%p4 bra M;
    cp.async.ca.shared.global [s], [%out], 4; // A
    M: @%p5 cp.async.wait_all; <> bar.warp.sync -1;
    @%p2 cp.async.ca.shared.global [s], [%out + 4], 4; // B
    cp.async.wait_all; bar.warp.sync -1;
    ld.shared.u32 %r6, [s]; st.global.u32 [%at], %r6;"""
    right = text(HEAD + body.replace("<>", "@%p2 cp.async.wait_all;"))
    wrong = text(HEAD + body.replace("<>", ""))
    assert (outcome(right, [LANES.astype(np.uint32)])[0] == 1).all()
    for error in refusal(wrong, [LANES.astype(np.uint32)], DataRace):
        assert f"line {line_of(wrong, '// B')} writes byte" in str(error)
        assert f"line {line_of(wrong, '// A')}" in str(error)


def test_tables_that_nobody_has_are_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are numbered anew when many were dropped, never while agents are given new ones."""
    random = np.random.default_rng(3)
    steps = [(random.choice(12, 5, replace=False), int(random.integers(12))) for _ in range(200)]

    def known(kept: int) -> list[np.ndarray]:
        monkeypatch.setattr(tables, "_TABLES", kept)
        it = order.Order(ctas=1, warps=12, lanes=1)
        for i, (agents, other) in enumerate(steps):
            it.event(Site("st.shared", i, "CTA 0"))
            it.acquire(agents, it.release(np.array([other])))
            it.fence_proxy(agents[::2])
        return [it.release(np.array([agent])) for agent in range(12)]

    for few, many in zip(known(3), known(4096), strict=True):
        assert (few == many).all()
