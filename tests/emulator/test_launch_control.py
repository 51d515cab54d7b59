"""clusterlaunchcontrol: PTX ISA 9.7.13.17 and 9.7.13.18. Forms as ptxas 13.0 takes them."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from asynchronous import ORDERS, aligned, outcome, refusal
from ptx_kernels import line_of, text

from blockscale import emulator as em

SM100 = "sm_100a"
CANCEL = "clusterlaunchcontrol.try_cancel.async"
QUERY = "clusterlaunchcontrol.query_cancel"
TOLD = "mbarrier::complete_tx::bytes"
HEAD = """.shared .align 16 .b8 answer[64]; .shared .align 8 .b64 bar[2]; .reg .b128 %q<3>;
    mov.u32 %r1, answer; mov.u32 %r2, bar; setp.eq.u32 %p1, %t, 0;
    cvt.u64.u32 %rd5, %r1; cvta.shared.u64 %rd5, %rd5; cvt.u64.u32 %rd6, %r2; cvta.shared.u64 %rd6, %rd6;
    @%p1 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ctaid.y; mov.u32 %r12, %ctaid.z; mov.u32 %r6, 0;
    mov.u32 %r13, %cluster_ctaid.x; mov.u32 %r14, %cluster_ctaid.y; mov.u32 %r15, %cluster_ctaid.z;
    mov.u32 %r16, %nctaid.x; mov.u32 %r17, %nctaid.y; mov.u32 %r5, %cluster_ctarank;
"""
#: Counts the CTA (%r10, %r11, %r12) as processed, once for each thread.
WORK = """mad.lo.u32 %r20, %r12, %r17, %r11; mad.lo.u32 %r20, %r20, %r16, %r10; mad.wide.u32 %rd3, %r20, 4, %out;
    red.relaxed.gpu.global.add.u32 [%rd3], 1;
"""
WAIT = """W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [bar], %r6; @!%p3 bra W; xor.b32 %r6, %r6, 1;
    ld.shared.b128 %q1, [answer];
"""
FIRST = {
    "v4": f"{QUERY}.get_first_ctaid.v4.b32.b128 {{%r10, %r11, %r12, _}}, %q1;",
    "axes": f"""{QUERY}.get_first_ctaid::x.b32.b128 %r10, %q1; {QUERY}.get_first_ctaid::y.b32.b128 %r11, %q1;
        {QUERY}.get_first_ctaid::z.b32.b128 %r12, %q1;""",
}
OWN = "add.u32 %r10, %r10, %r13; add.u32 %r11, %r11, %r14; add.u32 %r12, %r12, %r15;\n"


def kernel(body: str, parameters: str = "", target: str = SM100) -> str:
    return text(HEAD + body, parameters, target=target)


def stealing(every: bool, space: str = ".shared::cta", query: str = "v4") -> str:
    """A persistent loop. ``every``: rank 0 asks for all CTAs of the cluster; else there is one."""
    to, bar = ("[answer]", "[bar]") if space else ("[%rd5]", "[%rd6]")
    multicast = ".multicast::cluster::all" if every else ""
    return kernel(
        f"""setp.eq.and.u32 %p4, %r5, 0, %p1;
    L: @%p1 mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [bar], 16;
    @%p4 {CANCEL}{space}.{TOLD}{multicast}.b128 {to}, {bar};
    {WORK}{WAIT} {QUERY}.is_canceled.pred.b128 %p5, %q1;
    @!%p5 bra E;
    {FIRST[query]} {OWN}
    fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;
    bra L;
    E: barrier.cluster.arrive; barrier.cluster.wait;"""
    )


SHAPES: list[tuple[Sequence[int], Sequence[int]]] = [
    ((1,), (1,)), ((7,), (1,)), ((3, 2, 4), (1,)), ((8,), (2,)), ((6, 4), (3, 2)), ((2, 4, 2), (1, 2, 2)),
    ((4, 1, 3), (2, 1, 3)),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("space", "query"), [(".shared::cta", "v4"), ("", "axes")])
@pytest.mark.parametrize(("grid", "cluster"), SHAPES)
def test_each_cluster_is_processed_once(
    grid: Sequence[int], cluster: Sequence[int], space: str, query: str
) -> None:
    source = stealing(np.prod(cluster) > 1, space, query)
    counts = np.zeros((*grid, 1, 1)[2::-1], np.uint32)
    args = [counts]
    out = outcome(
        source, args, grid=grid, block=32, cluster=cluster, target=SM100, orders=ORDERS[:3]
    )[0]
    assert (out == 32).all()


@pytest.mark.parametrize(("completion", "seed"), ORDERS[:3])
def test_two_processes_share_the_work(completion: str, seed: int) -> None:
    device = em.Device(SM100, completion=completion, seed=seed, workers=2)
    counts = np.zeros((4, 10), np.uint32)
    device.launch(stealing(True), "k", (10, 4), 32, [counts], cluster=(2, 2))
    assert (counts == 32).all()


def order_of_work(grid: int, more: str) -> tuple[np.ndarray, np.ndarray]:
    """Which CTA processed each index, and how many CTAs started."""
    body = f"""@!%p1 bra E;
    ld.param.u64 %rd1, [started]; red.relaxed.gpu.global.add.u32 [%rd1], 1; mov.u32 %r21, %r10;
    L: mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    {CANCEL}.shared::cta.{TOLD}.b128 [answer], [bar];
    mad.wide.u32 %rd3, %r10, 4, %out; st.global.u32 [%rd3], %r21; {more}
    {WAIT} {QUERY}.is_canceled.pred.b128 %p5, %q1; @%p5 {QUERY}.get_first_ctaid::x.b32.b128 %r10, %q1;
    fence.proxy.async.shared::cta;
    @%p5 bra L;
    E:"""
    out, started = np.full(grid, 999, np.uint32), np.zeros(1, np.uint32)
    em.Device(SM100).launch(kernel(body, ".param .u64 started"), "k", grid, 32, [out, started])
    return out, started


def test_what_is_canceled_does_not_start() -> None:
    who, started = order_of_work(20, "")
    assert len(set(who.tolist())) == int(started[0])
    assert started[0] < 20
    assert (who[np.unique(who)] == np.unique(who)).all(), "who started processed its own index"


def test_clusters_that_take_long_share_the_work() -> None:
    """While one spins, others start, and cancel in turn."""
    spin = "mov.u32 %r22, 0; S: add.u32 %r22, %r22, 1; setp.lt.u32 %p7, %r22, 6000; @%p7 bra S;"
    who, started = order_of_work(6, spin)
    assert started[0] > 1
    assert len(set(who.tolist())) == int(started[0])


def test_several_answers_in_flight() -> None:
    """Two slots: the next but one is asked for before the next is known, in any order."""
    body = f"""@%p1 mbarrier.init.shared.b64 [bar+8], 1; fence.proxy.async; bar.sync 0; @!%p1 bra E; mov.u32 %r7, 0; mov.u32 %r8, 0;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16; {CANCEL}.shared::cta.{TOLD}.b128 [answer], [bar];
    mbarrier.arrive.expect_tx.shared.b64 _, [bar+8], 16; {CANCEL}.shared::cta.{TOLD}.b128 [answer+16], [bar+8];
    L: mad.wide.u32 %rd3, %r10, 4, %out; red.global.add.u32 [%rd3], 1;
    mad.lo.u32 %r20, %r7, 8, %r2; mad.lo.u32 %r21, %r7, 16, %r1;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [%r20], %r8; @!%p3 bra W;
    ld.shared.b128 %q1, [%r21]; {QUERY}.is_canceled.pred.b128 %p5, %q1; @!%p5 bra E;
    {QUERY}.get_first_ctaid::x.b32.b128 %r10, %q1; fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r20], 16; {CANCEL}.shared::cta.{TOLD}.b128 [%r21], [%r20];
    xor.b32 %r7, %r7, 1; setp.eq.u32 %p6, %r7, 0; @%p6 xor.b32 %r8, %r8, 1; bra L;
    E: bar.sync 0; @!%p1 bra F; xor.b32 %r7, %r7, 1; setp.eq.u32 %p6, %r7, 0; @%p6 xor.b32 %r8, %r8, 1;
    mad.lo.u32 %r20, %r7, 8, %r2; mad.lo.u32 %r21, %r7, 16, %r1;
    V: mbarrier.try_wait.parity.shared.b64 %p3, [%r20], %r8; @!%p3 bra V;
    ld.shared.b128 %q1, [%r21]; {QUERY}.is_canceled.pred.b128 %p5, %q1; @!%p5 bra F;
    {QUERY}.get_first_ctaid::x.b32.b128 %r10, %q1; mad.wide.u32 %rd3, %r10, 4, %out; red.global.add.u32 [%rd3], 1;
    F:"""
    for grid in (1, 2, 3, 8):
        args = [np.zeros(grid, np.uint32)]
        out = outcome(kernel(body), args, grid=grid, target=SM100, orders=ORDERS[:3])[0]
        assert (out == 1).all()


# --- what is wrong --------------------------------------------------------------------------------


def once(line: str, after: str = "") -> str:
    return f"""@!%p1 bra E; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    {line}
    {WAIT} {after}
    E: barrier.cluster.arrive; barrier.cluster.wait;"""


ONE = f"{CANCEL}.shared::cta.{TOLD}.b128 [answer], [bar]; // ISSUED"
COUNTS = [np.zeros(32, np.uint32)]


def test_asking_again_after_a_refusal() -> None:
    """Undefined once the CTA has seen that a request failed."""
    again = f"""{QUERY}.is_canceled.pred.b128 %p5, %q1; fence.proxy.async;
    {CANCEL}.shared::cta.{TOLD}.b128 [answer], [bar]; // AGAIN"""
    source = kernel(once(ONE, again))
    for error in refusal(source, COUNTS, target=SM100):
        assert error.line == line_of(source, "// AGAIN")
        assert "no cluster is left" in str(error)


def test_reading_the_answer_before_the_wait_is_a_race() -> None:
    body = f"""@!%p1 bra E; st.shared.v4.b32 [answer], {{0, 0, 0, 0}}; fence.proxy.async; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    {ONE}
    ld.shared.b128 %q1, [answer]; // READ
    {WAIT} E:"""
    for error in refusal(kernel(body), COUNTS, em.DataRace, target=SM100):
        assert "ld.shared.b128" in str(error)
        assert "try_cancel" in str(error)


def test_asking_again_without_a_proxy_fence() -> None:
    """The answer is written through the asynchronous proxy, over what was read or stored."""
    source = kernel(once(f"st.shared.v4.b32 [answer], {{0, 0, 0, 0}}; {ONE}"))
    for error in refusal(source, COUNTS, em.DataRace, target=SM100):
        assert "missing fence.proxy.async" in str(error)


def test_an_answer_that_nobody_waits_for() -> None:
    source = kernel(f"@%p1 {ONE}")
    for error in refusal(source, COUNTS, em.ExitRace, target=SM100):
        assert error.line == line_of(source, "// ISSUED")
        assert "which exits without having waited for it" in str(error)


@pytest.mark.parametrize(("line", "says"), [
    (f"{CANCEL}.shared::cta.{TOLD}.b128 [answer+8], [bar];", "not a multiple of 16"),
    (f"{CANCEL}.shared::cta.{TOLD}.b128 [answer], [bar+8];", "no mbarrier"),
    (f"{CANCEL}.{TOLD}.b128 [%out], [%rd6];", "not in shared memory"),
    (f"{CANCEL}.shared::cta.{TOLD}.b128 [answer+1024], [bar];", "out of bounds"),
])  # fmt: skip
def test_where_the_answer_may_not_go(line: str, says: str) -> None:
    source = kernel(once(line))
    for device in (em.Device(SM100, completion=c, check="race") for c, _ in ORDERS[:3]):
        with pytest.raises(em.PtxError, match=says) as caught:
            device.launch(source, "k", 1, 32, [COUNTS[0].copy()])
        assert caught.value.line == line_of(source, line)


def test_the_answer_is_for_the_cta_that_asks() -> None:
    line = f"mapa.shared::cluster.u32 %r8, %r1, 1; mapa.shared::cluster.u32 %r9, %r2, 1; {CANCEL}.shared::cta.{TOLD}.b128 [%r8], [%r9];"
    for error in refusal(kernel(once(line)), COUNTS, target=SM100, grid=2, cluster=2):
        assert "another CTA" in str(error)


def test_a_failed_answer_names_no_cluster() -> None:
    """Its index is undefined: neither the largest number nor 0 may be relied on."""
    names = "%r10, %r11, %r12"
    body = once(
        ONE, f"{QUERY}.get_first_ctaid.v4.b32.b128 {{{names}, _}}, %q1; st.global.u32 [%out], %r10;"
    )
    found = []
    for completion, seed in ORDERS:
        out = np.full(1, 7, np.uint32)
        em.Device(SM100, completion=completion, seed=seed).launch(kernel(body), "k", 1, 32, [out])
        found.append(int(out[0]))
    assert found[:2] == [0xFFFF_FFFF, 0]
    assert set(found[2:]) <= {0xFFFF_FFFF, 0}


# --- forms ----------------------------------------------------------------------------------------

# Refused by ptxas 13.0 for sm_100a.
ILLEGAL = [
    f"{CANCEL}.shared.{TOLD}.b128 [%r1], [bar];",
    f"{CANCEL}.shared::cluster.{TOLD}.b128 [%r1], [bar];",
    f"{CANCEL}.global.{TOLD}.b128 [%rd1], [bar];",
    f"{CANCEL}.shared::cta.{TOLD}.multicast::cluster.b128 [%r1], [bar];",
    f"{CANCEL}.shared::cta.b128 [%r1], [bar];",
    f"{CANCEL}.shared::cta.{TOLD} [%r1], [bar];",
    f"{CANCEL}.shared::cta.{TOLD}.b64 [%r1], [bar];",
    f"{CANCEL}.shared::cta.{TOLD}.b128 [%r1];",
    f"{QUERY}.is_canceled.b128 %p1, %q1;",
    f"{QUERY}.is_canceled.pred %p1, %q1;",
    f"{QUERY}.is_canceled.pred.b64 %p1, %rd1;",
    f"{QUERY}.get_first_ctaid.v4.b32.b128 {{%r1, %r2, %r3}}, %q1;",
    f"{QUERY}.get_first_ctaid.v2.b32.b128 {{%r1, %r2}}, %q1;",
    f"{QUERY}.get_first_ctaid.b32.b128 {{%r1, %r2, %r3, %r4}}, %q1;",
    f"{QUERY}.get_first_ctaid.v4.b128 {{%r1, %r2, %r3, %r4}}, %q1;",
    f"{QUERY}.get_first_ctaid.v4.b32 {{%r1, %r2, %r3, %r4}}, %q1;",
    f"{QUERY}.get_first_ctaid.b32.b128 %r1, %q1;",
    f"{QUERY}.get_first_ctaid::w.b32.b128 %r1, %q1;",
    f"{QUERY}.get_first_ctaid::x.v4.b32.b128 {{%r1, %r2, %r3, %r4}}, %q1;",
    f"{QUERY}.get_first_ctaid::x.u32.b128 %r1, %q1;",
    f"{QUERY}.get_first_ctaid::x.b128 %r1, %q1;",
    f"{QUERY}.b128 %r1, %q1;",
]
LEGAL = [
    f"{CANCEL}.shared::cta.{TOLD}.b128 [%r1], [bar];",
    f"{CANCEL}.shared::cta.{TOLD}.multicast::cluster::all.b128 [%r1], [bar];",
    f"{QUERY}.is_canceled.pred.b128 %p1, %q1;",
    f"{QUERY}.get_first_ctaid::x.b32.b128 %r1, %q1;",
]


def form(line: str, target: str) -> tuple[str, list[Any]]:
    return kernel(f"bra E;\n{line}\nE:", target=target), [aligned(COUNTS[0])]


@pytest.mark.parametrize("line", ILLEGAL)
def test_illegal_forms(line: str) -> None:
    source, args = form(line, SM100)
    with pytest.raises(em.PtxError) as caught:
        em.Device(SM100).launch(source, "k", 1, 32, args)
    assert caught.value.line == line_of(source, line)


@pytest.mark.parametrize("target", ["sm_90", "sm_90a", "sm_100", "sm_100f", "sm_100a"])
@pytest.mark.parametrize("line", LEGAL)
def test_targets(line: str, target: str) -> None:
    """All need sm_100, the multicast a letter behind it."""
    source, args = form(line, target)
    device = em.Device("sm_90a" if "90" in target else SM100)
    if "90" in target or ("multicast" in line and target == "sm_100"):
        with pytest.raises(em.PtxError, match="needs sm_100"):
            device.launch(source, "k", 1, 32, args)
    else:
        device.launch(source, "k", 1, 32, args)
