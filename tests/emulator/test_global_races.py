"""Races in global memory: each pattern without one of its parts, and with all of them."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ptx_kernels import line_of, text

from blockscale import emulator as em
from blockscale.emulator.alarms.errors import DataRace, MissingFence

ORDERS = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(4))]
UNORDERED = "nothing orders it after the"


def found(body: str, grid: int = 2, block: int = 64, cluster: int = 1) -> list[str]:
    """The alarms, in each order: those of the check "global", and no others."""
    messages = []
    for completion, seed in ORDERS:
        device = em.Device(
            "sm_90a", completion=completion, seed=seed, check="all,global", on_error="collect"
        )
        report = device.launch(
            text(body), "k", grid, block, [np.zeros(1 << 12, np.uint32)], cluster=cluster
        )
        assert all(alarm.kind == "global" for alarm in report.alarms), report.alarms
        messages.append("; ".join(alarm.message for alarm in report.alarms))
    return messages


def holds(body: str, **more: int) -> None:
    assert found(body, **more) == [""] * len(ORDERS)


def races(body: str, message: str = UNORDERED, **more: int) -> None:
    messages = found(body, **more)
    assert all(message in each for each in messages), messages


def without(body: str, mark: str) -> str:
    lines = body.splitlines()
    left = [line for line in lines if f"// {mark}" not in line]
    assert len(left) < len(lines)
    return "\n".join(left)


# --- a flag ---------------------------------------------------------------------------------------

#: CTA 0 stores a word a thread, and thread 0 sets a flag; in CTA 1 thread 0 waits for it.
FLAG = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; setp.ne.u32 %p2, %t, 0; @!%p1 bra HEARS;
    st.global.u32 [%at+128], %t;
    bar.sync 0; // SAYS
    @%p2 ret;
    {release}
    ret;
HEARS: @%p2 bra GO;
W:  {acquire}
GO:
    bar.sync 0; // TOLD
    ld.global.u32 %r2, [%at+128]; // USE
    st.global.u32 [%at+512], %r2;"""
UNTIL = " setp.eq.u32 %p3, %r1, 0; @%p3 bra W;"
RELEASES = {
    "st": "st.release.gpu.global.u32 [%out], 1;",
    "red": "red.release.gpu.global.add.u32 [%out], 1;",
    "atom": "atom.acq_rel.gpu.global.exch.b32 %r1, [%out], 1;",
    "fence": "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%out], 1;",
    "membar": "membar.gl; red.global.add.u32 [%out], 1;",
    "volatile": "membar.sys; st.volatile.global.u32 [%out], 1;",
    "generic": "cvta.global.u64 %rd1, %out; st.release.sys.u32 [%rd1], 1;",
    "again": "st.release.gpu.global.u32 [%out], 1; st.relaxed.gpu.global.u32 [%out], 2;",
}
ACQUIRES = {
    "ld": "ld.acquire.gpu.global.u32 %r1, [%out];" + UNTIL,
    "atom": "atom.acquire.gpu.global.add.u32 %r1, [%out], 0;" + UNTIL,
    "fence": "ld.relaxed.gpu.global.u32 %r1, [%out];" + UNTIL + " fence.acq_rel.gpu;",
    "membar": "ld.volatile.global.u32 %r1, [%out];" + UNTIL + " membar.gl;",
    "cas": "atom.relaxed.gpu.global.cas.b32 %r1, [%out], 5, 6;" + UNTIL + " fence.acquire.sync_restrict::shared::cluster.cluster; fence.acq_rel.gpu;",
    "generic": "cvta.global.u64 %rd1, %out; X: ld.acquire.sys.u32 %r1, [%rd1];" + UNTIL.replace("W", "X"),
}  # fmt: skip


def flag(release: str, acquire: str) -> str:
    return FLAG.format(release=release, acquire=acquire)


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_releases(release: str) -> None:
    holds(flag(release, ACQUIRES["ld"]))


@pytest.mark.parametrize("acquire", ACQUIRES.values(), ids=ACQUIRES)
def test_acquires(acquire: str) -> None:
    holds(flag(RELEASES["st"], acquire))


NO_RELEASES = {
    "relaxed": "st.relaxed.gpu.global.u32 [%out], 1;",
    "atomic": "red.global.add.u32 [%out], 1;",
    "fence after": "st.relaxed.gpu.global.u32 [%out], 1; membar.gl;",
    "fence of acquires": "fence.acquire.sync_restrict::shared::cluster.cluster; st.relaxed.gpu.global.u32 [%out], 1;",
    "scope of the CTA": "st.release.cta.global.u32 [%out], 1;",
    "scope of the cluster": "st.release.cluster.global.u32 [%out], 1;",
    "fence of the CTA": "membar.cta; st.relaxed.gpu.global.u32 [%out], 1;",
    "another place": "st.release.gpu.global.u32 [%out+4], 1; st.relaxed.gpu.global.u32 [%out], 1;",
    "proxy fence": "fence.proxy.async; st.relaxed.gpu.global.u32 [%out], 1;",
}  # fmt: skip
NO_ACQUIRES = {
    "relaxed": "ld.relaxed.gpu.global.u32 %r1, [%out];" + UNTIL,
    "atomic": "atom.global.add.u32 %r1, [%out], 0;" + UNTIL,
    "scope of the CTA": "ld.acquire.cta.global.u32 %r1, [%out];" + UNTIL,
    "scope of the cluster": "ld.acquire.cluster.global.u32 %r1, [%out];" + UNTIL,
    "fence of the cluster": "ld.relaxed.gpu.global.u32 %r1, [%out];" + UNTIL + " fence.acq_rel.cluster;",
    "fence before": "fence.acq_rel.gpu; V: ld.relaxed.gpu.global.u32 %r1, [%out];" + UNTIL.replace("W", "V"),
}  # fmt: skip


@pytest.mark.parametrize("release", NO_RELEASES.values(), ids=NO_RELEASES)
def test_what_does_not_release(release: str) -> None:
    races(flag(release, ACQUIRES["ld"]))


@pytest.mark.parametrize("acquire", NO_ACQUIRES.values(), ids=NO_ACQUIRES)
def test_what_does_not_acquire(acquire: str) -> None:
    races(flag(RELEASES["st"], acquire))


def test_a_reduction_returns_nothing_to_be_acquired() -> None:
    """The ISA's own example, 8.11.1."""
    polls = "W: ld.relaxed.cta.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;"
    red = "red.global.add.u32 [%out], 1; fence.acq_rel.gpu;"
    races(flag(RELEASES["st"], "Y: " + polls.replace("W", "V") + red))


@pytest.mark.parametrize("mark", ["SAYS", "TOLD"])
def test_the_threads_of_a_cta_need_its_barrier(mark: str) -> None:
    races(without(flag(RELEASES["st"], ACQUIRES["ld"]), mark))


def test_both_lines_are_named() -> None:
    body = flag(NO_RELEASES["relaxed"], ACQUIRES["ld"])
    with pytest.raises(DataRace) as caught:
        em.Device(check="global").launch(text(body), "k", 2, 32, [np.zeros(1 << 12, np.uint32)])
    source = text(body)
    assert str(caught.value).startswith(
        f"data race: ld.global.u32 of CTA (1, 0, 0), line {line_of(source, 'USE')} reads byte 0x80 of "
        "args[0]; nothing orders it after the write by st.global.u32 of CTA (0, 0, 0), line "
        f"{line_of(source, 'SAYS') - 1}"
    )
    lanes = found(body)[0]
    assert "ld.global.u32 of thread 0 of CTA (1, 0, 0)" in lanes


def test_a_weak_flag_is_a_race_itself() -> None:
    races(flag("membar.gl; st.global.u32 [%out], 1;", ACQUIRES["ld"]), "ld.acquire.gpu.global.u32")


@pytest.mark.parametrize("scope", ["cta", "cluster"])
def test_a_narrow_scope_is_named(scope: str) -> None:
    body = flag(f"st.release.{scope}.global.u32 [%out], 1;", ACQUIRES["ld"])
    races(body, f"the scope .{scope} of one does not include the other")


@pytest.mark.parametrize(("scope", "wrong"), [("cta", True), ("cluster", False), ("gpu", False)])
def test_scopes_within_a_cluster(scope: str, wrong: bool) -> None:
    body = flag(RELEASES["st"], ACQUIRES["ld"]).replace(".gpu", f".{scope}")
    (races if wrong else holds)(body, cluster=2)


def test_within_a_cluster_flags_need_their_order() -> None:
    races(flag(NO_RELEASES["relaxed"], ACQUIRES["ld"]), cluster=2)
    races(flag(RELEASES["st"], NO_ACQUIRES["relaxed"]), cluster=2)


def test_within_a_cta() -> None:
    body = """setp.ge.u32 %p1, %t, 32; @%p1 bra W; st.global.u32 [%at+128], %t; bar.warp.sync -1;
    setp.ne.u32 %p2, %t, 0; @%p2 ret; st.release.cta.global.u32 [%out], 1; ret;
    W: ld.acquire.cta.global.u32 %r1, [%out]; setp.eq.u32 %p2, %r1, 0; @%p2 bra W; ld.global.u32 %r2, [%at];"""
    holds(body, grid=1)
    races(body.replace("st.release.cta", "st.relaxed.cta"), grid=1)
    races(body.replace("bar.warp.sync -1;", ""), grid=1)


# --- fences of all threads ------------------------------------------------------------------------

#: Every thread fences, then one of them tells; every thread fences after it has heard.
ALL_FENCE = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; setp.ne.u32 %p2, %t, 0; @!%p1 bra HEARS;
    st.global.u32 [%at+128], %t;
    membar.gl; bar.sync 0; @%p2 ret;
    red.global.add.u32 [%out], 1; ret;
HEARS: @%p2 bra GO;
W:  ld.relaxed.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;
GO: bar.sync 0; membar.gl;
    ld.global.u32 %r2, [%at+128];"""


def test_sequentially_consistent_fences_order_each_other() -> None:
    holds(ALL_FENCE)
    races(ALL_FENCE.replace("bar.sync 0; membar.gl;", "bar.sync 0;"))
    # A thread's fence that is not sc releases with its own strong writes alone (8.8).
    races(ALL_FENCE.replace("membar.gl", "fence.acq_rel.gpu"))


# --- counters -------------------------------------------------------------------------------------

#: Split-K: each CTA stores its part, and whoever comes last adds all of them.
SPLIT = """.shared .b32 ticket; mov.u32 %r9, %ctaid.x; setp.ne.u32 %p2, %t, 0;
    mad.lo.u32 %r1, %r9, 64, %t; mad.wide.u32 %rd1, %r1, 4, %out; st.global.u32 [%rd1+128], %t;
    bar.sync 0; // STORED
    @%p2 bra GO;
    membar.gl; // RELEASE
    atom.global.inc.u32 %r2, [%out], 2; st.shared.u32 [ticket], %r2;
    fence.acq_rel.gpu; // ACQUIRE
GO: bar.sync 0; ld.shared.u32 %r2, [ticket]; setp.ne.u32 %p3, %r2, 2; @%p3 ret;
    ld.global.u32 %r3, [%at+128]; ld.global.u32 %r4, [%at+384]; ld.global.u32 %r5, [%at+640];
    add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r5; st.global.u32 [%at+1024], %r3;"""


def test_split_k() -> None:
    holds(SPLIT, grid=3)


@pytest.mark.parametrize("mark", ["STORED", "RELEASE", "ACQUIRE"])
def test_split_k_needs(mark: str) -> None:
    races(without(SPLIT, mark), grid=3)


def test_atomics_hand_on_what_was_released() -> None:
    """The last one acquires what all others released, though it reads the last one's value."""
    body = SPLIT.replace("membar.gl; // RELEASE", "").replace("fence.acq_rel.gpu; // ACQUIRE", "")
    holds(body.replace("atom.global", "atom.acq_rel.gpu.global"), grid=3)
    races(body.replace("atom.global", "atom.acquire.gpu.global"), grid=3)
    races(body.replace("atom.global", "atom.release.gpu.global"), grid=3)


def test_a_store_ends_what_was_released() -> None:
    """CTA 2 overwrites the flag of CTA 0, which CTA 1 then reads."""
    body = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; setp.eq.u32 %p2, %r9, 1; @%p1 bra SAYS; @%p2 bra HEARS;
    V: ld.relaxed.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra V; {again} ret;
    SAYS: st.global.u32 [%out+64], 1; st.release.gpu.global.u32 [%out], 1; ret;
    HEARS: ld.acquire.gpu.global.u32 %r1, [%out]; setp.ne.u32 %p3, %r1, 2; @%p3 bra HEARS; ld.global.u32 %r2, [%out+64];"""
    holds(body.format(again="red.global.add.u32 [%out], 1;"), grid=3, block=1)
    assert any(found(body.format(again="st.relaxed.gpu.global.u32 [%out], 2;"), grid=3, block=1))


def test_messages_through_a_third() -> None:
    body = """mov.u32 %r9, %ctaid.x; setp.ne.u32 %p1, %r9, 0; @%p1 bra HEARS; st.global.u32 [%out+64], 1;
    st.release.gpu.global.u32 [%out], 1; ret;
    HEARS: mad.wide.u32 %rd1, %r9, 4, %out;
    W: ld.acquire.gpu.global.u32 %r1, [%rd1-4]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;
    st.release.gpu.global.u32 [%rd1], 1; ld.global.u32 %r2, [%out+64];"""
    holds(body, grid=4, block=1)
    races(
        body.replace("st.release.gpu.global.u32 [%rd1]", "st.relaxed.gpu.global.u32 [%rd1]"),
        grid=4,
        block=1,
    )


#: Two CTAs hand a word to and fro, by the versions of a flag.
TURNS = """mov.u32 %r9, %ctaid.x; mov.u32 %r8, %r9;
    W: ld.acquire.gpu.global.u32 %r1, [%out]; setp.lt.u32 %p3, %r1, %r8; @%p3 bra W;
    ld.global.u32 %r2, [%out+64]; add.u32 %r2, %r2, 1; st.global.u32 [%out+64], %r2;
    add.u32 %r1, %r8, 1; st.release.gpu.global.u32 [%out], %r1;
    add.u32 %r8, %r8, 2; setp.lt.u32 %p4, %r8, 8; @%p4 bra W;"""


def test_a_flag_with_versions() -> None:
    holds(TURNS, block=1)
    races(TURNS.replace("st.release", "st.relaxed"), block=1)


# --- places ---------------------------------------------------------------------------------------


def test_one_word_of_two_clusters() -> None:
    races("mov.u32 %r9, %ctaid.x; st.global.u32 [%out], %r9;", block=1)
    holds("mov.u32 %r9, %ctaid.x; st.global.u32 [%out], 7;", block=1)  # one value
    holds("mov.u32 %r9, %ctaid.x; st.relaxed.gpu.global.u32 [%out], %r9;", block=1)
    holds("red.global.add.u32 [%out], 1;", block=64)
    races("red.global.add.u32 [%out], 1; ld.global.u32 %r1, [%out];", block=1)
    races("red.cta.global.add.u32 [%out], 1;", "the scope .cta of one", block=1)


def test_neighbouring_bytes_are_others() -> None:
    body = "mov.u32 %r9, %ctaid.x; cvt.u64.u32 %rd1, %r9; add.u64 %rd1, %rd1, %out; st.global.u8 [%rd1], %r9;"
    holds(body, grid=8, block=1)
    races(body + "ld.global.u32 %r1, [%out];", grid=8, block=1)


def test_what_was_read_is_overwritten() -> None:
    """Whoever reads first is told of by nobody."""
    body = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; @%p1 bra READS;
    W: ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W; add.u32 %r1, %t, 1; st.global.u32 [%at+512], %r1; ret;
    READS: ld.global.u32 %r1, [%at+512]; ld.global.u32 %r2, [%out+516]; bar.sync 0; setp.ne.u32 %p2, %t, 0; @%p2 ret;
    st.release.gpu.global.u32 [%out], 1;"""
    holds(body)
    late = "bar.sync 0; setp.ne.u32 %p2, %t, 0; @%p2 ret;"
    assert late in body
    races(body.replace("bar.sync 0;", ""), "after the read by")
    races(body.replace("st.release", "st.relaxed"), "after the read by")


def test_a_weak_store_resets_a_flag_that_others_poll() -> None:
    body = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; @%p1 bra RESETS;
    ld.relaxed.gpu.global.u32 %r1, [%out]; red.relaxed.gpu.global.add.u32 [%out+4], 1; ret;
    RESETS: ld.relaxed.gpu.global.u32 %r1, [%out+4]; setp.eq.u32 %p3, %r1, 0; @%p3 bra RESETS;
    {store} [%out], 1;"""
    races(body.format(store="st.global.u32"), "after the read by", block=1)
    holds(body.format(store="st.relaxed.gpu.global.u32"), block=1)


# --- asynchronous copies --------------------------------------------------------------------------

#: CTA 0 stores 64 words by a bulk copy, and sets a flag; CTA 1 waits for it, and reads them.
BULK = """.shared .align 16 .b32 s[64]; mov.u32 %r9, %ctaid.x; setp.ne.u32 %p2, %t, 0; mov.u32 %r1, s;
    mad.lo.u32 %r1, %t, 4, %r1; setp.ne.u32 %p1, %r9, 0; @%p1 bra HEARS;
    st.shared.u32 [%r1], %t; fence.proxy.async.shared::cta; bar.sync 0; @%p2 ret;
    cp.async.bulk.global.shared::cta.bulk_group [%out+256], [s], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} 0;
    st.release.gpu.global.u32 [%out], 1; ret;
HEARS: @%p2 bra GO;
W:  ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;
GO: bar.sync 0; ld.global.u32 %r2, [%at+256];"""


def test_a_bulk_store_is_waited_for() -> None:
    holds(BULK.format(read=""))
    body = BULK.format(read=".read")
    assert any("wait_group without .read" in each for each in found(body))
    races(body.replace("W:  ld", "nanosleep.u32 100000; W: ld"), "wait_group without .read")


def test_bulk_stores_and_stores_overlap() -> None:
    body = (
        BULK.format(read="").replace("@%p1 bra HEARS", "@%p1 bra OTHER")
        + " ret; OTHER: st.global.u32 [%at+SHIFT], %t;"
    )
    races(body.replace("SHIFT", "508"))
    holds(body.replace("SHIFT", "512"))


def test_bulk_reductions_are_atomic() -> None:
    body = """.shared .align 16 .b32 s[64]; mov.u32 %r1, s; mad.lo.u32 %r1, %t, 4, %r1; setp.ne.u32 %p2, %t, 0;
    mov.u32 %r9, %ctaid.x; st.shared.u32 [%r1], %r9; fence.proxy.async.shared::cta; bar.sync 0; @%p2 ret;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out+256], [s], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    holds(body)
    stores = body.replace("cp.reduce.async.bulk", "cp.async.bulk").replace(".add.u32", "")
    races(stores)
    holds(stores.replace("[%r1], %r9", "[%r1], %t"))  # both the same


#: CTA 0 stores words and sets a flag; CTA 1 waits for it, and fetches them by a bulk copy.
FETCH = """.shared .align 16 .b32 s[64]; .shared .align 8 .b64 bar; mov.u32 %r9, %ctaid.x; setp.ne.u32 %p2, %t, 0;
    setp.ne.u32 %p1, %r9, 0; @%p1 bra HEARS;
    st.global.u32 [%at+256], %t;
    fence.proxy.async; // WRITER
    bar.sync 0; @%p2 ret; st.release.gpu.global.u32 [%out], 1; ret;
HEARS: @%p2 ret; mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
W:  ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;
    fence.proxy.async; // READER
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%out+256], 256, [bar];
X:  mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra X;
    ld.shared.u32 %r1, [s+4];"""


@pytest.mark.parametrize("mark", ["WRITER", "READER"])
def test_one_proxy_fence_is_enough(mark: str) -> None:
    holds(FETCH)
    holds(without(FETCH, mark))


@pytest.mark.parametrize(("space", "wrong"), [("global", False), ("shared::cta", True)])
@pytest.mark.parametrize("mark", ["WRITER", "READER"])
def test_a_proxy_fence_is_of_global_memory(mark: str, space: str, wrong: bool) -> None:
    body = without(FETCH, mark).replace("fence.proxy.async", f"fence.proxy.async.{space}")
    (races if wrong else holds)(body, **({"message": "missing fence.proxy.async"} if wrong else {}))


def test_a_proxy_fence_within_a_cta() -> None:
    """All threads store, and one fetches what they did."""
    body = """.shared .align 16 .b32 s[64]; .shared .align 8 .b64 bar; setp.ne.u32 %p2, %t, 0;
    @!%p2 mbarrier.init.shared.b64 [bar], 1; @!%p2 fence.mbarrier_init.release.cluster;
    st.global.u32 [%at+256], %t; {all}
    bar.sync 0; @%p2 ret; {one}
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%out+256], 256, [bar];
    X: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra X;"""
    fence = "fence.proxy.async.global;"
    holds(body.format(all=fence, one=""), grid=1)
    holds(body.format(all="", one=fence), grid=1)
    races(body.format(all="", one=""), "missing fence.proxy.async", grid=1)
    races(body.format(all="@!%p2 " + fence, one=""), "missing fence.proxy.async", grid=1)


def test_a_proxy_fence_tells_a_thread_nothing() -> None:
    """Of what another one acquired, which executes it with this one."""
    body = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; setp.ne.u32 %p2, %t, 0; @!%p1 bra HEARS; @%p2 ret;
    st.global.u32 [%out+128], 7; st.release.gpu.global.u32 [%out], 1; ret;
    HEARS: @%p2 bra GO; W: ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;
    GO: vote.sync.any.pred %p3, %p2, -1; {sync} fence.proxy.async; setp.ne.u32 %p3, %t, 1; @%p3 ret;
    ld.global.u32 %r2, [%out+128]; st.global.u32 [%out+512], %r2;"""
    holds(body.format(sync="bar.warp.sync -1;"), block=32)
    races(body.format(sync=""), block=32)


def test_each_place_of_a_race_is_named() -> None:
    """One of them may be suppressed."""
    body = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; setp.ne.u32 %p2, %t, 0; @%p2 ret; @%p1 bra B;
    st.global.v2.u32 [%out+128], {%t, %t}; // WIDE
    ret;
    B: st.global.u32 [%out+128], 1; // ONE
    st.global.u32 [%out+132], 1; // TWO"""
    source = text(body)
    wide, one, two = (line_of(source, f"// {mark}") for mark in ("WIDE", "ONE", "TWO"))
    for completion, seed in ORDERS:
        device = em.Device(
            completion=completion, seed=seed, check="global", on_error="collect",
            suppress=[f"global line={one}  # known"],
        )  # fmt: skip
        report = device.launch(source, "k", 2, 32, [np.zeros(64, np.uint32)])
        assert [{alarm.line, alarm.other} for alarm in report.alarms] == [{wide, two}]


def test_a_proxy_fence_is_needed() -> None:
    body = without(without(FETCH, "WRITER"), "READER")
    races(body, "missing fence.proxy.async: cp.async.bulk")
    with pytest.raises(MissingFence):
        em.Device(check="global").launch(text(body), "k", 2, 64, [np.zeros(1 << 12, np.uint32)])


def test_a_copy_that_is_waited_for_has_read() -> None:
    """A bulk load of memory that the CTA then stores to."""
    body = """.shared .align 16 .b32 s[64]; .shared .align 8 .b64 bar;
    setp.ne.u32 %p2, %t, 0; @%p2 ret; mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [s], [%out+256], 256, [bar];
    {early} X: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra X; {late}"""
    store = "st.global.u32 [%out+256], 5;"
    holds(body.format(early="", late=store), grid=1)
    races(body.format(early=store, late=""), grid=1)


# --- launches and ranks ---------------------------------------------------------------------------


def test_launches_of_a_stream_are_ordered() -> None:
    device = em.Device(check="all,global")
    out = np.zeros(64, np.uint32)
    for _ in range(2):
        device.launch(
            text("ld.global.u32 %r1, [%at]; add.u32 %r1, %r1, 1; st.global.u32 [%at], %r1;"),
            "k",
            1,
            64,
            [out],
        )
    assert (out == 2).all()


RANKS = """ld.param.u64 %rd1, [next]; mad.wide.u32 %rd2, %t, 4, %rd1;
    st.global.u32 [%rd2+128], %t; bar.sync 0;
    setp.ne.u32 %p1, %t, 0; @%p1 bra GO; st.release.sys.global.u32 [%rd1], 1;
    W: ld.acquire.sys.global.u32 %r2, [%out]; setp.eq.u32 %p2, %r2, 0; @%p2 bra W;
    GO: bar.sync 0; ld.global.u32 %r3, [%at+128];"""
#: All ranks add 1 to the counter of the first, and wait until all have; twice.
BARRIER = """ld.param.u64 %rd1, [next]; mov.u32 %r8, 2; setp.ne.u32 %p1, %t, 0; mov.u32 %r7, 0;
    AGAIN: mad.wide.u32 %rd2, %t, 4, %rd1; add.u32 %r1, %t, %r7; st.global.u32 [%rd2+128], %r1;
    bar.sync 0; @%p1 bra ONE; {says} ONE: bar.sync 0;
    ld.global.u32 %r3, [%at+128]; bar.sync 0; @%p1 bra TWO; {says_again} TWO: bar.sync 0;
    add.u32 %r7, %r7, 1; setp.lt.u32 %p4, %r7, 2; @%p4 bra AGAIN;"""
SAYS = """ld.param.u64 %rd3, [root]; red.release.sys.global.add.u32 [%rd3], 1;
    {0}: ld.acquire.sys.global.u32 %r2, [%rd3]; setp.lt.u32 %p2, %r2, %r8; @%p2 bra {0}; add.u32 %r8, %r8, 2;"""


def ranks(body: str, devices: Sequence[int] = (0, 1)) -> list[str]:
    messages = []
    for completion, seed in ORDERS:
        made = [
            em.Device(
                "sm_90a", completion=completion, seed=seed, check="all,global", on_error="collect"
            )
            for _ in range(2)
        ]
        words = [np.zeros(512, np.uint32) for _ in range(2)]
        source = text(body, ".param .u64 next, .param .u64 root")
        reports = em.launch_together(
            [
                em.Call(made[devices[i]], source, "k", 1, 64, [words[i], words[1 - i], words[0]])
                for i in range(2)
            ]
        )
        alarms = [alarm for report in reports for alarm in report.alarms]
        assert all(alarm.kind == "global" for alarm in alarms)
        messages.append("; ".join(alarm.message for alarm in alarms))
    return messages


def test_ranks_with_flags() -> None:
    assert not any(ranks(RANKS))
    narrow = RANKS.replace(".sys", ".gpu")
    assert not any(ranks(narrow, (0, 0)))  # on one device
    assert all("of rank 1" in each and UNORDERED in each for each in ranks(narrow))
    assert all("the scope .gpu of one does not include" in each for each in ranks(narrow))


@pytest.mark.parametrize("one", ["st.release", "ld.acquire"])
def test_ranks_need_the_system(one: str) -> None:
    assert all(ranks(RANKS.replace(f"{one}.sys", f"{one}.gpu")))


def test_a_barrier_of_ranks() -> None:
    body = BARRIER.format(says=SAYS.format("A"), says_again=SAYS.format("B"))
    assert not any(ranks(body))
    assert all(ranks(body.replace("red.release", "red.relaxed")))
    # Without it one rank may overtake the other, or be overtaken and acquire both.
    assert any(ranks(BARRIER.format(says=SAYS.format("A"), says_again="")))


def test_processes_do_not_share_it() -> None:
    with pytest.raises(
        ValueError, match="global looks at all clusters in one process; got workers=2"
    ):
        em.Device(check="global", workers=2)


# --- vectors: each scalar is an operation of its own (8.2.4) ---------------------------------------

#: Warp 0 writes two words at once, and warp 1 waits for the second one and loads LATER.
PAIR = """mov.u32 %r3, 0; mov.u32 %r4, 1; and.b32 %r5, %t, 31; setp.ne.u32 %p1, %r5, 0; @%p1 ret;
    setp.ge.u32 %p1, %t, 32; @%p1 bra W;
    st.release.gpu.SPACE.v2.u32 [AT], {%r4, %r4}; AGAIN ret;
W:  ld.acquire.gpu.SPACE.u32 %r1, [AT+4]; setp.ne.u32 %p3, %r1, LAST; @%p3 bra W;
    ld.SPACE.u32 %r2, LATER; st.global.u32 [%out+64], %r2;"""


@pytest.mark.parametrize(
    ("again", "later", "race"),
    [
        ("", "[AT]", True),
        ("", "[AT+4]", False),
        ("st.relaxed.gpu.SPACE.u32 [AT+4], 2;", "[AT]", True),
        ("st.relaxed.gpu.SPACE.u32 [AT+4], 2;", "[AT+4]", False),
        ("st.release.gpu.SPACE.u32 [AT+4], 2;", "[AT]", False),
    ],
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_a_scalar_releases_nothing_of_the_others(
    space: str, again: str, later: str, race: bool
) -> None:
    body = (
        PAIR.replace("AGAIN", again).replace("LATER", later).replace("LAST", "2" if again else "1")
    )
    if space == "shared":
        start = ".shared .align 8 .b32 s[2]; setp.eq.u32 %p1, %t, 0; mov.u32 %r3, 0; @%p1 st.shared.v2.u32 [s], {%r3, %r3}; bar.sync 0;"
        body = start + body
    body = body.replace("SPACE", space).replace("AT", "%out" if space == "global" else "s")
    for completion, seed in ORDERS:
        device = em.Device(
            "sm_90a", completion=completion, seed=seed, check="all,global", on_error="collect"
        )
        report = device.launch(text(body), "k", 1, 64, [np.zeros(64, np.uint32)])
        assert bool(report.alarms) == race


def test_a_scalar_is_of_its_own_chain_of_updates() -> None:
    """The last update of the first word is not of the chain that the first update began; that of
    the second word is."""
    turn = "setp.ne.u32 %p1, %r5, {}; @%p1 bra L{}; nanosleep.u32 {}; {} ret; L{}:"
    update = "atom.relaxed.gpu.global.add.v2.f32 {%f1, %f2}, [%out], {%f3, %f3};"
    store = "st.relaxed.gpu.global.f32 [%out], %f3;"
    load = "ld.relaxed.gpu.global.f32 %f1, [%out]; st.global.f32 [%out], %f1;"
    steps = [update, store, store, update, load]
    body = "shr.u32 %r5, %t, 5; and.b32 %r6, %t, 31; setp.ne.u32 %p1, %r6, 0; @%p1 ret; mov.f32 %f3, 0f3F800000;"
    body += "\n".join(turn.format(i, i, 3000 * i, each, i) for i, each in enumerate(steps))
    second = body.splitlines()[1]
    races(body, f"write by {second.split('; ')[3].split()[0]} of thread 32", grid=1, block=160)
