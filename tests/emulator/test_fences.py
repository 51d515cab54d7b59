"""Fences that nothing but the ISA asks for: without each, an alarm; with it, none."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import numpy as np
import pytest
from asynchronous import FEW_ORDERS
from ptx_kernels import text

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace, MissingFence


def alarms(body: str, check: str, target: str = "sm_90a", ctas: int = 1) -> list[em.PtxError]:
    """One for each order; those that run through have none."""
    found = []
    for completion, seed in FEW_ORDERS:
        device = em.Device(target, completion=completion, seed=seed, check=check)
        out = np.zeros(1 << 12, np.uint32)
        try:
            device.launch(text(body, target=target), "k", ctas, 128, [out], cluster=ctas)
        except em.PtxError as error:
            found.append(error)
    return found


# --- fence.mbarrier_init --------------------------------------------------------------------------

REMOTE = """.shared .align 8 .b64 bar; .shared .b32 word;
    setp.eq.u32 %p1, %t, 0; mov.u32 %r1, %cluster_ctarank; xor.b32 %r1, %r1, 1;
    @%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 st.shared.u32 [word], 1;
    {fence}
    barrier.cluster.arrive{relaxed}; barrier.cluster.wait;
    mov.u32 %r2, bar; mapa.shared::cluster.u32 %r2, %r2, %r1;
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
    {more}
    A: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [bar], 0; @!%p2 bra A;"""
INITS = "@%p1 fence.mbarrier_init.release.cluster;"


@pytest.mark.parametrize(
    ("fence", "relaxed", "more", "wrong"),
    [
        (INITS, ".relaxed", "", False),
        ("", ".release", "", False),
        ("@%p1 fence.acq_rel.cluster;", ".relaxed", "", False),
        ("", ".relaxed", "", True),
        # It is for mbarriers alone, and for those of the thread that executes it.
        (INITS, ".relaxed", "ld.shared.u32 %r3, [word];", True),
        ("@!%p1 fence.mbarrier_init.release.cluster;", ".relaxed", "", True),
    ],
)
def test_a_relaxed_arrival_passes_on_what_is_fenced(
    fence: str, relaxed: str, more: str, wrong: bool
) -> None:
    body = REMOTE.format(fence=fence, relaxed=relaxed, more=more)
    found = alarms(body, "all,exit_stores", ctas=2)
    assert len(found) == len(FEW_ORDERS) * wrong
    assert all(isinstance(error, DataRace) for error in found)
    if wrong and not more:
        assert all("fence.mbarrier_init must come between" in str(error) for error in found)


COPY = """.shared .align 8 .b64 bar; .shared .align 16 .b8 s[512];
    setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared.b64 [bar], 1;
    {fence}
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 512;
    @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%out], 512, [bar];
    bar.sync 0;
    A: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @!%p2 bra A;"""


@pytest.mark.parametrize(
    ("fence", "wrong"), [(INITS, False), ("fence.proxy.async.shared::cta;", False), ("", True)]
)
def test_copies_tell_mbarriers_that_their_proxy_knows(fence: str, wrong: bool) -> None:
    assert not alarms(COPY.format(fence=fence), "all")
    found = alarms(COPY.format(fence=fence), "all,mbarrier_proxy")
    assert len(found) == len(FEW_ORDERS) * wrong
    assert all(isinstance(error, MissingFence) for error in found)


#: An mbarrier, then 16 bytes that are copied over it.
OVER = (
    COPY
    + """
    bar.sync 0;
    @%p1 mbarrier.inval.shared.b64 [bar];
    {between}
    setp.eq.u32 %p1, %t, 64;
    @%p1 mbarrier.init.shared.b64 [other], 1; @%p1 fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [other], 16;
    @%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [bar], [%out], 16, [other];
    bar.sync 0;
    B: mbarrier.try_wait.parity.shared.b64 %p2, [other], 0; @!%p2 bra B;"""
)


@pytest.mark.parametrize(
    ("between", "check", "wrong"),
    [
        ("bar.sync 0;", "all", False),
        ("fence.proxy.async.shared::cta; bar.sync 0;", "all,mbarrier_proxy", False),
        ("bar.sync 0;", "all,mbarrier_proxy", MissingFence),
        ("", "all", DataRace),
    ],
)
def test_a_copy_over_an_mbarrier_comes_after_its_end(
    between: str, check: str, wrong: type[DataRace]
) -> None:
    """Whether mbarrier.inval writes is not said; that it comes before another use, is."""
    shared = ".shared .align 16 .b64 bar[2]; .shared .align 8 .b64 other;"
    body = OVER.replace(".shared .align 8 .b64 bar;", shared).format(fence=INITS, between=between)
    found = alarms(body, check)
    assert len(found) == len(FEW_ORDERS) * bool(wrong)
    assert all(isinstance(error, wrong or ()) for error in found), found
    assert all("mbarrier.inval" in str(error) for error in found), found


# --- tcgen05.wait and tcgen05.fence ---------------------------------------------------------------

#: Two warps: the first stores to its lanes; the other one's thread copies over them, and commits;
#: the first loads what came. It frees, or the second does.
TENSOR = """.shared .align 8 .b64 bar[2]; .shared .align 1024 .b8 s[4096]; .shared .b32 place;
    .reg .b64 %d; .reg .b32 %a;
    setp.lt.u32 %p2, %t, 32; setp.eq.u32 %p1, %t, 32; setp.ge.u32 %p3, %t, 64;
    @%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 fence.mbarrier_init.release.cluster;
    mad.lo.u32 %r1, %t, 32, 0;
    mov.u32 %r2, s; add.u32 %r1, %r1, %r2;
    st.shared.v4.u32 [%r1], {1, 2, 3, 4}; st.shared.v4.u32 [%r1+16], {1, 2, 3, 4};
    fence.proxy.async.shared::cta;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;
    bar.sync 0;
    ld.shared.u32 %a, [place];
    @%p3 bra E;
    @!%p2 bra B;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%a], {%t};
    tcgen05.wait::st.sync.aligned; // WAIT
    tcgen05.fence::before_thread_sync; // BEFORE
    B: bar.sync 1, 64;
    @!%p1 bra C;
    tcgen05.fence::after_thread_sync; // AFTER
    shr.u32 %r3, %r2, 4; cvt.u64.u32 %d, %r3; or.b64 %d, %d, 0x401000080000;
    tcgen05.cp.cta_group::1.128x128b [%a], %d;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
    C: @!%p2 bra D;
    W: mbarrier.try_wait.parity.shared.b64 %p4, [bar], 0; @!%p4 bra W;
    tcgen05.fence::after_thread_sync; // COMMITTED
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%a];
    tcgen05.wait::ld.sync.aligned; // LOADED
    add.u32 %r5, %r5, 1;
    tcgen05.fence::before_thread_sync; // DONE
    D: bar.sync 1, 64;
    @%p2 bra E;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, 32;
    E:"""
DELETED = {
    "WAIT": "tcgen05.st",
    "BEFORE": "missing tcgen05.fence::before_thread_sync: tcgen05.cp",
    "AFTER": "missing tcgen05.fence::after_thread_sync: tcgen05.cp",
    "COMMITTED": "missing tcgen05.fence::after_thread_sync: tcgen05.ld",
    "LOADED": "tcgen05.wait::ld must come between",
    "DONE": "missing tcgen05.fence::before_thread_sync: tcgen05.dealloc",
}


def without(mark: str) -> str:
    lines = TENSOR.splitlines()
    left = [line for line in lines if f"// {mark}" not in line]
    assert len(left) == len(lines) - (mark != "")
    return "\n".join(left)


def test_a_kernel_with_all_fences_passes() -> None:
    assert not alarms(TENSOR, "all,exit_stores,tcgen05_order,mbarrier_proxy", "sm_100a")


@pytest.mark.parametrize("mark", DELETED)
def test_each_tcgen05_fence_and_wait_is_needed(mark: str) -> None:
    found = alarms(without(mark), "all,tcgen05_order", "sm_100a")
    assert len(found) == len(FEW_ORDERS)
    assert all(DELETED[mark] in str(error) for error in found), found
    assert all(isinstance(error, DataRace) for error in found)


@pytest.mark.parametrize("mark", ["BEFORE", "AFTER", "COMMITTED", "LOADED", "DONE"])
def test_without_the_check_hardware_orders(mark: str) -> None:
    assert not alarms(without(mark), "all", "sm_100a")


# --- Tensor Memory is ordered by execution --------------------------------------------------------

#: Warp 1 stores to Tensor Memory and to ``word``; warp 0 frees after {end}, and reads ``word``.
FREED = """.shared .b32 place; .shared .b32 word; .reg .b32 %a;
    setp.lt.u32 %p1, %t, 32; setp.eq.u32 %p2, %t, 32; setp.ge.u32 %p3, %t, 64;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;
    bar.sync 0;
    ld.shared.u32 %a, [place];
    @%p1 bra FREE;
    @%p3 bra OTHERS;
    add.u32 %r1, %a, 0x200000;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%t}};
    tcgen05.wait::st.sync.aligned;
    @%p2 st.shared.u32 [word], 1;
    tcgen05.fence::before_thread_sync; // BEFORE
OTHERS:
    {others}
    bra END;
FREE:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    tcgen05.fence::after_thread_sync;
    {reads}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, 32;
END:"""
RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
ORDERING = {"exit": "ret;", "relaxed arrive": RELAXED}
READ = "ld.shared.u32 %r2, [word]; st.global.u32 [%out], %r2;"


@pytest.mark.parametrize("others", ORDERING.values(), ids=ORDERING)
def test_tensor_memory_is_ordered_by_execution(others: str) -> None:
    assert not alarms(FREED.format(others=others, reads=""), "all,tcgen05_order", "sm_100a")


@pytest.mark.parametrize("others", ORDERING.values(), ids=ORDERING)
def test_shared_memory_is_not(others: str) -> None:
    found = alarms(FREED.format(others=others, reads=READ), "all", "sm_100a")
    assert len(found) == len(FEW_ORDERS)
    assert all("st.shared.u32 of thread 32" in str(error) for error in found)


def test_execution_is_needed() -> None:
    never = FREED.replace("barrier.cluster", "// barrier.cluster")
    found = alarms(never.format(others="ret;", reads=""), "all", "sm_100a")
    assert len(found) == len(FEW_ORDERS)  # a race, or columns that are gone


@pytest.mark.parametrize("others", ORDERING.values(), ids=ORDERING)
def test_execution_composes_with_fences_alone(others: str) -> None:
    lines = FREED.splitlines()
    bare = "\n".join(line for line in lines if "BEFORE" not in line)
    found = alarms(bare.format(others=others, reads=""), "all,tcgen05_order", "sm_100a")
    assert len(found) == len(FEW_ORDERS)
    assert all("missing tcgen05.fence::before_thread_sync" in str(error) for error in found)


# --- what cp.async has written --------------------------------------------------------------------

COPIED = """.shared .align 128 .b8 s[512]; mov.u32 %r1, s; mad.lo.u32 %r2, %t, 4, %r1;
    {first} cp.async.ca.shared.global [%r2], [%at], 4; cp.async.wait_all; {own} bar.sync 0;
    setp.eq.u32 %p1, %t, 0; @!%p1 bra E; {other}
    cp.async.bulk.global.shared::cta.bulk_group [%out+512], [s], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""


@pytest.mark.parametrize(("first", "own", "other", "right"), [
    ("", "", "", False), ("", "fence.proxy.async;", "", True), ("", "", "fence.proxy.async;", True),
    ("fence.proxy.async;", "", "", False), ("", "fence.proxy.alias;", "", False),
])  # fmt: skip
def test_a_proxy_fence_after_cp_async(first: str, own: str, other: str, right: bool) -> None:
    body = COPIED.format(first=first, own=own, other=other)
    assert not alarms(body, "all")
    found = alarms(body, "all,cp_async_proxy")
    assert len(found) == (0 if right else len(FEW_ORDERS))
    assert all(isinstance(error, MissingFence) for error in found)


def test_an_alarm_that_is_off_hides_no_other() -> None:
    """A copy over an mbarrier that was invalidated, which is mbarrier_proxy's, and over a word."""
    body = """.shared .align 128 .b8 s[128]; .shared .align 8 .b64 bar; setp.ne.u32 %p2, %t, 0; @%p2 bra E;
    mbarrier.init.shared.b64 [s], 1; mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.inval.shared.b64 [s]; st.shared.u32 [s+64], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%out], 128, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W; E:"""
    found = alarms(body, "all")
    assert len(found) == len(FEW_ORDERS)
    assert all(isinstance(error, MissingFence) and "st.shared.u32" in str(error) for error in found)
