"""Sentences of the PTX ISA 9.1, each with a kernel that keeps it and one that does not."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asynchronous import outcome, refusal
from ptx_kernels import text

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace, LaneRace, MissingFence, Uninitialized
from blockscale.emulator.clocks import columns
from blockscale.emulator.machine.state import Deadlock

HEAD = """.shared .align 128 .b8 s[1024]; .shared .align 8 .b64 bar[2];
    mov.u32 %r1, s; mad.lo.u32 %r2, %t, 4, %r1; xor.b32 %r3, %r2, 4; setp.eq.u32 %p1, %t, 0;
    setp.lt.u32 %p2, %t, 32;
"""


def words(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.uint32)


# --- fences ---------------------------------------------------------------------------------------

RELAXED = """mov.u32 %r10, %cluster_ctarank; setp.eq.u32 %p5, %r10, 0;
    @%p1 mbarrier.init.shared.b64 [bar], 32; @%p1 fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r12, bar; mapa.shared::cluster.u32 %r12, %r12, 1; mapa.shared::cluster.u32 %r13, %r2, 1;
    @!%p5 bra B; st.shared::cluster.u32 [%r13], %t; <release>
    mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r12]; bra E;
    B: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %p3, [bar], 0; @!%p3 bra B; <acquire>
    ld.shared.u32 %r9, [%r2]; st.global.u32 [%at], %r9;
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
RESTRICTED = (
    "fence.release.sync_restrict::shared::cta.cluster;",
    "fence.acquire.sync_restrict::shared::cluster.cluster;",
)


def relaxed(release: str, acquire: str) -> str:
    return text(HEAD + RELAXED.replace("<release>", release).replace("<acquire>", acquire))


@pytest.mark.parametrize(
    "fences",
    [
        RESTRICTED,
        ("fence.release.cluster;", "fence.acquire.cluster;"),
        ("fence.acq_rel.cluster;", "fence.sc.cluster;"),
    ],
)
def test_an_acquire_fence_after_a_relaxed_wait(fences: tuple[str, str]) -> None:
    """9.7.13.4, "Acquire local shared memory via generic proxy": an example of its own."""
    out = outcome(relaxed(*fences), [words(32)], grid=2, cluster=2)[0]
    assert (out == np.arange(32)).all()


@pytest.mark.parametrize(
    "fences",
    [
        ("", RESTRICTED[1]),
        (RESTRICTED[0], ""),
        ("fence.acquire.cluster;", RESTRICTED[1]),
        (RESTRICTED[0], "fence.release.cluster;"),
        ("fence.mbarrier_init.release.cluster;", RESTRICTED[1]),
    ],
)
def test_relaxed_operations_need_both_fences(fences: tuple[str, str]) -> None:
    refusal(relaxed(*fences), [words(32)], DataRace, grid=2, cluster=2)


@pytest.mark.parametrize("space", ["", ".shared::cta", ".shared::cluster", ".global"])
def test_a_proxy_fence_is_for_its_state_space(space: str) -> None:
    """9.7.13.4: "The memory ordering is limited only to operations performed on objects in the
    state space specified."""
    kernel = text(
        HEAD + f"st.shared.u32 [%r2], %t; fence.proxy.async{space}; bar.warp.sync -1; @!%p1 bra E;"
        "cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 128; cp.async.bulk.commit_group;"
        "cp.async.bulk.wait_group 0; E:"
    )
    if space == ".global":
        refusal(kernel, [words(32)], MissingFence)
    else:
        assert (outcome(kernel, [words(32)])[0] == np.arange(32)).all()


STORE = """cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""


@pytest.mark.parametrize("thread", [0, 1, 40])
def test_a_proxy_fence_lies_anywhere_on_the_path(thread: int) -> None:
    """8.9.5: "there is a proxy fence along the base causality path": that of any thread between,
    for what the issuer of the copy wrote itself, too."""
    fence = f"bar.sync 0; setp.eq.u32 %p3, %t, {thread}; @%p3 fence.proxy.async; bar.sync 0;"
    body = HEAD + "st.shared.u32 [%r2], %t; <> @!%p1 bra E;" + STORE
    assert (outcome(text(body.replace("<>", fence)), [words()], block=64)[0] == range(64)).all()
    too_early = text(body.replace("<>", fence.replace("bar.sync 0;", "", 1)))
    refusal(too_early, [words()], MissingFence, block=64)


def test_a_copy_and_its_own_thread_are_no_lanes() -> None:
    """No bar.warp.sync orders what a thread does after a copy that it does not wait for."""
    body = """mad.lo.u32 %r8, %t, 16, %r1; st.shared.v4.u32 [%r8], {%t, %t, %t, %t};
    fence.proxy.async; bar.warp.sync -1; @!%p1 bra E;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [s], 16; st.shared.u32 [s], 3;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
    for error in refusal(text(HEAD + body), [words()], DataRace):
        assert "bar.warp.sync" not in str(error)


# --- copies ---------------------------------------------------------------------------------------

MULTICAST = """mov.u32 %r10, %cluster_ctarank; setp.eq.u32 %p5, %r10, 0; and.pred %p6, %p1, %p5;
    @%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    barrier.cluster.arrive; barrier.cluster.wait; mov.b16 %h1, 3;
    @%p6 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [s], [%out], 128, [bar], %h1;
    @!%p5 bra N; W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    N: barrier.cluster.arrive; barrier.cluster.wait; @%p5 bra E; <before>
    ld.shared.u32 %r9, [%r2]; st.global.u32 [%at+128], %r9; <after>
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
WAIT = "V: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra V;"


def test_a_multicast_tells_each_cta_of_its_own_bytes() -> None:
    """9.7.9.25.4.1: "The mbarrier signal is also multicast to the same CTA-relative offset as mbar
    in the shared memory of the destination CTA": that of another CTA says nothing of this one's."""
    data = np.arange(64, dtype=np.uint32)
    right = text(HEAD + MULTICAST.replace("<before>", WAIT).replace("<after>", ""))
    wrong = text(HEAD + MULTICAST.replace("<before>", "").replace("<after>", WAIT))
    out = outcome(right, [data], grid=2, cluster=2)[0]
    assert (out == np.tile(np.arange(32), 2)).all()
    refusal(wrong, [data], (DataRace, Uninitialized), grid=2, cluster=2)


@pytest.mark.parametrize(
    "wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"]
)
def test_cp_async_is_visible_to_the_thread_that_waited(wait: str) -> None:
    """9.7.9.25.3.3: "Writes performed by cp.async operations are made visible to the executing
    thread only after" its own wait: a neighbour needs a bar.warp.sync, too."""
    kernel = text(
        HEAD + f"cp.async.ca.shared.global [%r2], [%at], 4; {wait}"
        "ld.shared.u32 %r9, [%r3]; st.global.u32 [%at], %r9;"
    )
    refusal(kernel, [words(32)], LaneRace)


ARRIVES = """@%p1 mbarrier.init.shared.b64 [bar], <count>; bar.sync 0;
    cp.async.ca.shared.global [%r2], [%at], 4; <arrive>
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    ld.shared.u32 %r9, [%r3]; st.global.u32 [%at], %r9;"""


def test_an_mbarrier_learns_of_the_copies_of_those_who_arrive() -> None:
    """9.7.13.15.17: it tracks "all prior cp.async operations initiated by the executing thread"."""
    body = ARRIVES.replace("<count>", "32").replace(
        "<arrive>", "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];"
    )
    out = outcome(text(HEAD + body), [np.arange(32, dtype=np.uint32)])[0]
    assert (out == np.arange(32) ^ 1).all()
    one = ARRIVES.replace("<count>", "1").replace(
        "<arrive>", "@%p1 cp.async.mbarrier.arrive.noinc.shared.b64 [bar];"
    )
    refusal(text(HEAD + one), [words(32)], (DataRace, Uninitialized))


def test_cp_async_writes_what_a_neighbour_read() -> None:
    """The copies of a lane are ordered after what that lane did alone."""
    body = """st.shared.u32 [%r2], %t; <first> ld.shared.u32 %r9, [%r3]; <sync>
    cp.async.ca.shared.global [%r2], [%at], 4; cp.async.wait_all;"""
    right = body.replace("<first>", "bar.warp.sync -1;").replace("<sync>", "bar.warp.sync -1;")
    wrong = body.replace("<first>", "bar.warp.sync -1;").replace("<sync>", "")
    outcome(text(HEAD + right), [words(32)])
    refusal(text(HEAD + wrong), [words(32)], LaneRace)


def test_two_cp_async_to_one_place() -> None:
    """9.7.9.25.3: "there is no ordering guarantee between cp.async operations" of a thread, but
    between those that it waited for and later ones."""
    body = """cp.async.ca.shared.global [%r2], [%at], 4; <>
    cp.async.ca.shared.global [%r2], [%at+128], 4; cp.async.wait_all;"""
    data = np.arange(64, dtype=np.uint32)
    outcome(text(HEAD + body.replace("<>", "cp.async.wait_all;")), [data])
    refusal(text(HEAD + body.replace("<>", "")), [data], DataRace)
    refusal(text(HEAD + body.replace("<>", "cp.async.commit_group;")), [data], DataRace)
    kept = "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;"
    outcome(text(HEAD + body.replace("<>", kept)), [data])


def test_more_copies_than_can_be_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused as all else is that the emulator cannot do."""
    body = """and.b32 %r7, %t, 31; mad.lo.u32 %r6, %r7, 16, %r1; mul.wide.u32 %rd1, %r7, 16;
    add.u64 %rd1, %rd1, %out; mov.u32 %r5, 0; @%p2 st.shared.u32 [%r2], %t;
    L: cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r6], 16;
    add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 70; @%p3 bra L;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    monkeypatch.setattr(columns, "MOST_COLUMNS", 4096)
    device = em.Device(completion="late", check="race,exit")
    with pytest.raises(em.PtxError, match="accessors that nobody has waited for"):
        device.launch(text(HEAD + body), "k", 1, 64, [words(256)])


# --- mbarriers ------------------------------------------------------------------------------------


def test_an_mbarrier_is_initialized_once() -> None:
    """9.7.13.15.9: "The behavior of performing an mbarrier.init operation on a memory location
    containing a valid mbarrier object is undefined"."""
    init = "@%p1 mbarrier.init.shared.b64 [bar], 1;"
    right = text(HEAD + init + "@%p1 mbarrier.inval.shared.b64 [bar];" + init)
    outcome(right, [words()])
    for error in refusal(text(HEAD + init + init), [words()]):
        assert "mbarrier.inval must come between" in str(error)


@pytest.mark.parametrize(
    "use",
    [
        "mbarrier.arrive.shared.b64 %rd2, [bar];",
        "mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0;",
    ],
)
def test_an_mbarrier_that_was_overwritten(use: str) -> None:
    """9.7.13.15.1: "Performing any non-mbarrier or mbarrier.init operations on an initialized
    mbarrier object results in undefined behavior."""
    kernel = text(
        HEAD + "@!%p1 ret; mbarrier.init.shared.b64 [bar], 1; mov.b64 %rd1, 5;"
        "st.shared.u64 [bar], %rd1;" + use
    )
    for error in refusal(kernel, [words()]):
        assert "was overwritten" in str(error)


def test_an_mbarrier_is_invalidated_after_its_uses() -> None:
    """9.7.13.15.10: nothing orders the inval after the wait of another warp."""
    kernel = text(
        HEAD
        + """@%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; @%p1 mbarrier.arrive.shared.b64 %rd2, [bar];
    @!%p2 bra W; nanosleep.u32 100000; @%p1 mbarrier.inval.shared.b64 [bar]; bra E;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W; E:"""
    )
    refusal(kernel, [words()], DataRace, block=64)


def test_a_relaxed_arrival_is_not_enough_to_invalidate_what_another_warp_used() -> None:
    """The arrival says that the wait is over, and orders no memory: 8.7.1."""
    kernel = text(
        """.shared .align 8 .b8 bars[16]; mov.u32 %r3, bars; setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 mbarrier.init.shared.b64 [%r3+8], 1; bar.sync 0;
    @%p1 mbarrier.arrive.shared.b64 %rd2, [%r3];
    setp.lt.u32 %p2, %t, 32; @%p2 bra FIRST;
    setp.ne.u32 %p2, %t, 32; @%p2 bra E;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra W;
    mbarrier.arrive.ORDER.cta.shared.b64 %rd2, [%r3+8]; bra E;
    FIRST: @!%p1 bra E;
    V: mbarrier.try_wait.parity.shared.b64 %p3, [%r3+8], 0; @!%p3 bra V;
    mbarrier.inval.shared.b64 [%r3]; E:"""
    )
    outcome(kernel.replace("ORDER", "release"), [words()], block=64)
    refusal(kernel.replace("ORDER", "relaxed"), [words()], DataRace, block=64)


@pytest.mark.parametrize("sync", ["match.any.sync.b32 %r5, 1, -1;", "bar.warp.sync -1;", ""])
def test_an_mbarrier_is_invalidated_after_a_match(sync: str) -> None:
    """9.7.13.10: match.sync waits for all lanes of its mask, and so what they did is over; that is
    how the lanes of a warp leave a cuda::pipeline before one of them invalidates its mbarriers."""
    kernel = text(
        HEAD
        + f"""@%p1 mbarrier.init.shared.b64 [bar], 32; bar.sync 0;
    mbarrier.arrive.shared.b64 %rd2, [bar];
    W: mbarrier.try_wait.shared.b64 %p3, [bar], %rd2; @!%p3 bra W;
    {sync} @%p1 mbarrier.inval.shared.b64 [bar];"""
    )
    if sync:
        outcome(kernel, [words(32)])
    else:
        refusal(kernel, [words(32)], LaneRace)


def test_a_bounded_number_of_tries() -> None:
    """9.7.13.15.16: "Suspended thread resumes execution when the specified phase completes OR
    before the phase completes following a system-dependent time limit"."""
    kernel = text(
        HEAD
        + """@%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0; mov.u32 %r5, 0;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0, 100; @%p3 bra D; add.u32 %r5, %r5, 1;
    setp.lt.u32 %p4, %r5, 100; @%p4 bra W; D: st.global.u32 [%at], %r5;"""
    )
    assert (outcome(kernel, [words(32)])[0] == 100).all()


@pytest.mark.parametrize("instructions", [10, 3000, 100000])
def test_waits_in_vain_see_what_another_cta_writes(instructions: int) -> None:
    """A wait that was in vain is followed by a look at a flag, which ends it."""
    kernel = text(
        HEAD
        + f"""mov.u32 %r6, %ctaid.x; setp.eq.u32 %p5, %r6, 1; @%p5 bra F;
    @%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @%p3 bra D;
    ld.volatile.global.u32 %r5, [%out+256]; setp.eq.u32 %p4, %r5, 0; @%p4 bra W;
    D: st.global.u32 [%at], %r5; ret;
    F: mov.u32 %r7, 0; L: add.u32 %r7, %r7, 1; setp.lt.u32 %p4, %r7, {instructions}; @%p4 bra L;
    mov.u32 %r8, 7; st.volatile.global.u32 [%out+256], %r8;"""
    )
    assert (outcome(kernel, [words(96)], grid=2)[0][:32] == 7).all()


# --- barriers and warps ---------------------------------------------------------------------------


def test_a_barrier_whose_other_lanes_exit_expects_as_many_threads() -> None:
    """9.7.13.1: "Operand b specifies the number of threads participating in the barrier."""
    for error in refusal(text(HEAD + "@%p1 barrier.sync 1, 64;"), [words()], Deadlock):
        assert "32 of 64 threads are there" in str(error)


@pytest.mark.parametrize(
    ("mask", "block", "lane"), [(0xFFFF, 32, 20), (-1, 20, 25), (0xFFFF0000, 32, 3)]
)
def test_a_shuffle_takes_from_lanes_that_are_there(mask: int, block: int, lane: int) -> None:
    """9.7.9.6: "results are undefined if a thread sources a register from an inactive thread or a
    thread that is not in membermask"; that one takes it is no fault, but that it uses it."""
    body = """mov.u32 %r7, <mask>; shr.u32 %r7, %r7, %t; and.b32 %r7, %r7, 1;
    setp.eq.u32 %p1, %r7, 0; @%p1 ret; mov.u32 %r5, %t;
    shfl.sync.idx.b32 %r5, %t, <lane>, 31, <mask>; <> st.global.u32 [%at], %r5;"""
    body = body.replace("<mask>", str(mask & 0xFFFFFFFF)).replace("<lane>", str(lane))
    outcome(text(body.replace("<>", "mov.u32 %r5, 1;")), [words(32)], block=block)
    for error in refusal(text(body.replace("<>", "")), [words(32)], Uninitialized, block=block):
        assert "from a lane that is not there, or not in its mask" in str(error)


@pytest.mark.parametrize(
    "op",
    [
        "vote.sync.ballot.b32 %r9, %p4, %r7;",
        "redux.sync.add.u32 %r9, %r8, %r7;",
        "match.any.sync.b32 %r9, %r8, %r7;",
    ],
)
@pytest.mark.parametrize("who", ["@%p3", "@!%p3"])
def test_lanes_of_another_mask_give_nothing(op: str, who: str) -> None:
    """9.7.13.9: of "all non-exited threads in membermask". Those from 16 on have what is undefined."""
    body = f"""setp.lt.u32 %p3, %t, 16; ld.shared.u32 %r8, [%r2]; @%p3 mov.u32 %r8, 9;
    setp.gt.u32 %p4, %r8, 5; selp.b32 %r7, 0xffff, 0xffff0000, %p3; {op}
    {who} st.global.u32 [%at], %r9;"""
    if who == "@%p3":
        outcome(text(HEAD + body), [words(32)])
    else:
        refusal(text(HEAD + body), [words(32)], Uninitialized)


CARRIES = [
    "add.cc.u32 %r7, %r8, 1; addc.u32 %r9, 0, 0;",
    "sub.cc.u32 %r7, 1, %r8; subc.u32 %r9, 0, 0;",
    "mad.lo.cc.u32 %r7, %r8, 3, 1; madc.hi.u32 %r9, 1, 1, 0;",
    "add.cc.u32 _, %r8, 1; addc.cc.u32 %r7, 0, 0; addc.u32 %r9, 0, 0;",
]


@pytest.mark.parametrize("carry", CARRIES)
def test_the_carry_of_what_is_undefined(carry: str) -> None:
    """9.7.2: the carry is a result, too; where it is given anew, it is defined."""
    body = f"ld.shared.u32 %r8, [%r2]; {carry} st.global.u32 [%at], %r9;"
    refusal(text(HEAD + body), [words(32)], Uninitialized)
    anew = carry.replace("%r9, ", "%r6, ") + " add.cc.u32 %r6, 1, 1; addc.u32 %r9, 0, 5;"
    out = outcome(text(HEAD + body.replace(carry, anew)), [words(32)])[0]
    assert (out == 5).all()


LANES = np.arange(32)
TWO_PLACES = """setp.lt.u32 %p1, %t, 16; mov.u32 %r7, %t; mov.u32 %r8, %t;
    @%p1 bra A; <one> bra E; A: <other> E: st.global.u32 [%at], %r5;"""
COLLECTIVES = {
    "mov.u32 %r5, 3; bar.warp.sync -1;": 0 * LANES + 3,
    "shfl.sync.bfly.b32 %r5, @, 16, 31, -1;": LANES ^ 16,
    "setp.eq.u32 %p2, @, 20; vote.sync.ballot.b32 %r5, %p2, -1;": 0 * LANES + (1 << 20),
    "and.b32 @, @, 1; match.any.sync.b32 %r5, @, -1;": 0x55555555 << (LANES & 1),
    "redux.sync.add.u32 %r5, @, -1;": 0 * LANES + 496,
    "elect.sync %r6|%p2, -1; selp.u32 %r5, 1, 0, %p2;": LANES == 0,
}


@pytest.mark.parametrize("op", COLLECTIVES)
def test_lanes_meet_at_two_places(op: str) -> None:
    """9.7.9.6: a thread waits "until all non-exited threads corresponding to membermask have
    executed shfl.sync with the same qualifiers and same membermask value"; that they must execute
    the same instruction is said of sm_6x and below only. So 9.7.13.2 and others."""
    body = TWO_PLACES.replace("<one>", op.replace("@", "%r7")).replace(
        "<other>", op.replace("@", "%r8")
    )
    assert (outcome(text(body), [words(32)])[0] == COLLECTIVES[op]).all()


@pytest.mark.parametrize("at", ["A", "B"])
@pytest.mark.parametrize("op", [op for op in COLLECTIVES if "@" in op])
def test_what_is_undefined_passes_between_places(op: str, at: str) -> None:
    """Lanes give it to those at another instruction, whose own operands are defined."""
    blank = "ld.shared.u32 @, [%r2];"
    one, other = ("", blank) if at == "A" else (blank, "")
    body = TWO_PLACES.replace("<one>", one.replace("@", "%r7") + op.replace("@", "%r7")).replace(
        "<other>", other.replace("@", "%r8") + op.replace("@", "%r8")
    )
    taker = "setp.lt.u32 %p4, %t, 16; @%p4 st.global.u32 [%at], %r5;"
    taker = taker if at == "B" else taker.replace("@%p4", "@!%p4")
    refusal(
        text(HEAD + body.replace("st.global.u32 [%at], %r5;", taker)), [words(32)], Uninitialized
    )
    right = HEAD + "st.shared.u32 [%r2], %t;" + body
    assert (outcome(text(right), [words(32)])[0] == COLLECTIVES[op]).all()


def test_what_is_undefined_passes_to_another_function() -> None:
    other = """.func (.param .b32 out) f(.param .b32 mine) { .reg .b32 %r<4>; ld.param.b32 %r1, [mine];
    shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1; st.param.b32 [out], %r2; ret; }"""
    body = """setp.lt.u32 %p1, %t, 16; @%p1 bra A; ld.shared.u32 %r8, [%r2];
    shfl.sync.bfly.b32 %r5, %r8, 16, 31, -1; bra E;
    A: { .param .b32 give; .param .b32 take; st.param.b32 [give], %t; call (take), f, (give);
    ld.param.b32 %r5, [take]; } st.global.u32 [%at], %r5; E:"""
    refusal(text(HEAD + body, before=other), [words(32)], Uninitialized)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("shfl.sync.up.b32 %r5, %t, 1, 0, -1;", "shfl.sync.bfly.b32 %r5, %t, 16, 31, -1;"),
        ("bar.warp.sync 0xfffffffe;", "bar.warp.sync -1;"),
    ],
)
def test_other_qualifiers_or_masks_do_not_meet(one: str, other: str) -> None:
    body = TWO_PLACES.replace("<one>", one).replace("<other>", other)
    refusal(text(body), [words(32)], Deadlock)


def test_lanes_meet_again_and_again() -> None:
    """Lanes below 16 go round and meet the others, who are behind, at other places."""
    body = """setp.lt.u32 %p1, %t, 16; mov.u32 %r5, %t; mov.u32 %r6, 0;
    L: @%p1 bra A; shfl.sync.bfly.b32 %r5, %r5, 16, 31, -1; add.u32 %r5, %r5, 1; bra N;
    A: shfl.sync.bfly.b32 %r5, %r5, 16, 31, -1; add.u32 %r5, %r5, 1;
    N: add.u32 %r6, %r6, 1; setp.lt.u32 %p2, %r6, 11; @%p2 bra L; @!%p1 bra Q;
    shfl.sync.bfly.b32 %r5, %r5, 16, 31, -1;
    Q: shfl.sync.bfly.b32 %r5, %r5, 16, 31, -1; @%p1 bra E;
    shfl.sync.bfly.b32 %r5, %r5, 16, 31, -1; E: st.global.u32 [%at], %r5;"""
    assert (outcome(text(body), [words(32)])[0] == (LANES ^ 16) + 11).all()


@pytest.mark.parametrize("sync", ["bar.warp.sync -1;", "shfl.sync.bfly.b32 %r5, %t, 16, 31, -1;"])
def test_memory_where_lanes_meet_at_two_places(sync: str) -> None:
    body = TWO_PLACES.replace("<one>", sync).replace("<other>", sync)
    body = body.replace("E:", "E: xor.b32 %r3, %r2, 64; ld.shared.u32 %r5, [%r3];")
    kernel = text(HEAD + "st.shared.u32 [%r2], %t;" + body)
    if sync.startswith("bar"):
        assert (outcome(kernel, [words(32)])[0] == LANES ^ 16).all()
    else:
        refusal(kernel, [words(32)], LaneRace)


@pytest.mark.parametrize("who", ["@%p1", "@!%p1"])
def test_what_is_undefined_where_lanes_meet_at_two_places(who: str) -> None:
    """Lanes from 16 on give what nobody has written to those below, and take what is defined."""
    shuffle = "shfl.sync.bfly.b32 %r5, %r6, 16, 31, -1;"
    body = TWO_PLACES.replace("<one>", shuffle).replace("<other>", "mov.u32 %r6, 1;" + shuffle)
    body = body.replace("E: ", f"E: {who} ")
    kernel = text(HEAD + "ld.shared.u32 %r6, [%r2];" + body)
    if who == "@%p1":
        refusal(kernel, [words(32)], Uninitialized)
    else:
        assert (outcome(kernel, [words(32)])[0] == (LANES >= 16)).all()


@pytest.mark.parametrize("strong", ["volatile", "relaxed.cta"])
def test_a_strong_read_races_with_a_weak_write(strong: str) -> None:
    """8.7.1: conflicting operations that are not both strong, and that nothing orders, are a data
    race, whichever comes first."""
    body = f"""@%p1 st.shared.u32 [s], 1; bar.sync 0; @!%p2 bra W; ld.{strong}.shared.u32 %r4, [s]; <>
    bra E; W: <> nanosleep.u32 100000; setp.eq.u32 %p3, %t, 32; @%p3 st.shared.u32 [s], 9; E:"""
    outcome(text(HEAD + body.replace("<>", "bar.sync 0;")), [words()], block=64)
    refusal(text(HEAD + body.replace("<>", "")), [words()], DataRace, block=64)


def test_strong_accesses_do_not_race() -> None:
    body = """@%p1 st.shared.u32 [s], 1; bar.sync 0; @!%p2 bra W; ld.volatile.shared.u32 %r4, [s];
    bra E; W: nanosleep.u32 100000; mov.u32 %r4, 9; st.volatile.shared.u32 [s], %r4; E:"""
    outcome(text(HEAD + body), [words()], block=64)


TWO_WRITERS = """shr.u32 %r5, %t, 5; and.b32 %r6, %t, 31; setp.eq.u32 %p3, %r6, 0;
    setp.eq.u32 %p4, %r5, 0; setp.eq.u32 %p5, %r5, 1; @%p4 bra A; @%p5 bra B; <join>
    <third> bra E; A: @%p3 <write> <last> bra E; B: nanosleep.u32 1000; @%p3 <write>
    bar.sync 1, 64; <last> E:"""
WRITES = {
    "st.shared.u32 [s], 5;": "@%p3 st.shared.u32 [s], 6;",
    "atom.shared.add.u32 %r7, [s], 1;": "@%p3 ld.shared.u32 %r7, [s];",
    "red.shared.add.u32 [s], 1;": "@%p3 st.shared.u32 [s], 6;",
    "st.volatile.shared.u32 [s], %r5;": "@%p3 ld.shared.u32 %r7, [s];",
}
UPDATES = [write for write in WRITES if write.startswith(("atom", "red"))]
ZERO_FIRST = "setp.eq.u32 %p3, %t, 0; @%p3 st.shared.u32 [s], 0; bar.sync 0;"


@pytest.mark.parametrize("write", WRITES)
def test_each_of_several_writers_counts(write: str) -> None:
    """8.7.1: what the third warp does is ordered after the write by warp 1, not after that by
    warp 0, whether that is no race with it for its value or for both being strong."""
    body = TWO_WRITERS.replace("<write>", write).replace("<third>", WRITES[write])
    if write in UPDATES:  # an update observes those before it: the other one is the later
        sleep = "nanosleep.u32 1000; "
        body = body.replace(sleep, "").replace("A: ", f"A: {sleep}")
    one = body.replace("<join>", "bar.sync 1, 64;").replace("<last>", "")
    every = body.replace("<join>", "bar.sync 1, 64; bar.sync 2, 96;")
    first = ZERO_FIRST if write in UPDATES else ""
    refusal(text(HEAD + first + one), [words()], DataRace, block=96)
    outcome(text(HEAD + first + every.replace("<last>", "bar.sync 2, 96;")), [words()], block=96)


@pytest.mark.parametrize("write", UPDATES)
def test_an_update_observes_those_before_it(write: str) -> None:
    """8.9.5: what is ordered after an update by warp 1 is ordered after that by warp 0, which came
    before it."""
    body = TWO_WRITERS.replace("<write>", write).replace("<third>", WRITES[write])
    one = body.replace("<join>", "bar.sync 1, 64;").replace("<last>", "")
    outcome(text(HEAD + ZERO_FIRST + one), [words()], block=96)


def test_each_lane_that_wrote_the_same_value_counts() -> None:
    """Lanes 0 and 1 write 5 at once; lane 2 meets lane 1 alone before it writes 6."""
    body = """setp.lt.u32 %p3, %t, 2; setp.eq.u32 %p4, %t, 2; mov.u32 %r4, 5;
    @%p3 st.shared.u32 [s], %r4; setp.ge.u32 %p5, %t, <from>; setp.le.u32 %p6, %t, 2;
    and.pred %p5, %p5, %p6; @%p5 bar.warp.sync <mask>; @%p4 st.shared.u32 [s], 6;"""
    met = body.replace("<from>", "0").replace("<mask>", "7")
    outcome(text(HEAD + met), [words()])
    for first, mask in (("1", "6"), ("3", "0x7ffffff8")):
        wrong = body.replace("<from>", first).replace("<mask>", mask)
        refusal(text(HEAD + wrong), [words()], LaneRace)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type", "given", "wanted"),
    [
        ("f32", np.int32(3), np.float32(3)),
        ("f64", np.int64(-3), np.float64(-3)),
        ("f32", np.float32(3), np.float32(3)),
        ("u32", np.int32(-3), np.uint32(0xFFFF_FFFD)),
        ("b32", np.float32(3), np.float32(3)),
        ("u64", np.bool_(True), None),
        ("u32", np.float32(3), None),
        ("s64", np.float64(3), None),
    ],
)
def test_a_number_of_numpy_is_converted(type: str, given: Any, wanted: Any) -> None:
    """Its bits mean something else in a parameter of another kind."""
    bits = int(type[1:])
    kernel = text(
        f".reg .b{bits} %x; ld.param.b{bits} %x, [a]; st.global.b{bits} [%out], %x;",
        parameters=f".param .{type} a",
    )
    out = np.zeros(8, np.uint8)
    if wanted is None:
        with pytest.raises((TypeError, ValueError), match=r"args\[1\]: got"):
            em.Device().launch(kernel, "k", 1, 1, [out, given])
    else:
        em.Device().launch(kernel, "k", 1, 1, [out, given])
        assert out.tobytes()[: bits // 8] == wanted.tobytes()


@pytest.mark.parametrize(
    ("grid", "block", "name"),
    [((1, 65536), 1, "grid"), ((1, 1, 65536), 1, "grid"), (1, (1, 1, 65), "block")],
)
def test_grids_and_blocks_have_limits(grid: Any, block: Any, name: str) -> None:
    """CUDA C++ Programming Guide, compute capabilities."""
    with pytest.raises(ValueError, match=f"{name}: got"):
        em.Device().launch(text(""), "k", grid, block, [words()])


@pytest.mark.slow
def test_as_many_ctas_as_multiprocessors_meet() -> None:
    """A barrier of the grid, of one CTA on each multiprocessor of a B200."""
    body = """atom.global.add.u32 %r1, [%out], 1; mov.u32 %r9, %nctaid.x;
    L: ld.volatile.global.u32 %r2, [%out]; setp.lt.u32 %p2, %r2, %r9; @%p2 bra L;"""
    out = words()
    em.Device(check="none").launch(text(body), "k", 148, 1, [out])
    assert out[0] == 148
