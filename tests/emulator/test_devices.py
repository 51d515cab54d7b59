"""Several devices that share memory: ranks that run at once and signal each other."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asynchronous import ORDERS
from ptx_kernels import text

from blockscale import emulator as em

every_order = pytest.mark.parametrize(("completion", "seed"), ORDERS)

#: out: words of this rank; next: those of another. Word 0 of each is a flag; 1 + t is what it sends.
PASSES = """ld.param.u64 %rd1, [next]; ld.param.u32 %r9, [number]; mad.wide.u32 %rd2, %t, 4, %rd1;
    add.u32 %r1, %t, %r9; st.global.u32 [%rd2+128], %r1; bar.sync 0;
    setp.ne.u32 %p1, %t, 0; @%p1 bra W; st.release.sys.global.u32 [%rd1], 1;
    W: ld.acquire.sys.global.u32 %r2, [%out]; setp.eq.u32 %p2, %r2, 0; @%p2 bra W;
    ld.global.u32 %r3, [%at+128]; st.global.u32 [%at+256], %r3;"""
MORE = ".param .u64 next, .param .u32 number"


def ring(count: int, body: str = PASSES, **device: Any) -> tuple[list[np.ndarray], list[em.Report]]:
    words = [np.zeros(128, np.uint32) for _ in range(count)]
    calls = [
        em.Call(
            em.Device("sm_90a", **device), text(body, MORE), "k", 1, 32,
            [words[rank], words[(rank + 1) % count], 100 * rank],
        )
        for rank in range(count)
    ]  # fmt: skip
    return words, em.launch_together(calls)


@every_order
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_exchange_data(completion: str, seed: int, count: int) -> None:
    words, reports = ring(count, completion=completion, seed=seed)
    for rank in range(count):
        want = 100 * ((rank - 1) % count) + np.arange(32)
        assert (words[rank][64:96] == want).all()
    assert [report.instructions["ld.acquire.sys.global.u32"] >= 32 for report in reports] == [
        True
    ] * count


def test_ranks_run_different_kernels_on_different_targets() -> None:
    flag, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    says = text("st.release.sys.global.u32 [%out], 5;", target="sm_100a")
    hears = text(
        "ld.param.u64 %rd1, [flag]; W: ld.acquire.sys.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra W;"
        "st.global.u32 [%at], %r1;",
        ".param .u64 flag",
    )
    first, second = em.Device("sm_90a"), em.Device("sm_100a")
    reports = em.launch_together(
        [em.Call(first, hears, "k", 1, 32, [out, flag]), em.Call(second, says, "k", 1, 32, [flag])]
    )
    assert (out == 5).all()
    assert len(reports) == 2


def test_launches_at_once_on_one_device() -> None:
    device = em.Device("sm_90a")
    words = [np.zeros(128, np.uint32) for _ in range(2)]
    em.launch_together(
        [
            em.Call(device, text(PASSES, MORE), "k", 1, 32, [words[i], words[1 - i], i])
            for i in range(2)
        ]
    )
    assert (words[0][64:96] == 1 + np.arange(32)).all()


@every_order
def test_a_deadlock_names_the_rank(completion: str, seed: int) -> None:
    lost = PASSES.replace(
        "@%p1 bra W; st.release", "@%p1 bra W; setp.eq.u32 %p3, %r9, 0; @%p3 bra W; st.release"
    )
    with pytest.raises(em.Deadlock, match="nobody changes what they read") as caught:
        ring(3, lost, completion=completion, seed=seed)
    assert "CTA (0, 0, 0) of rank 1" in str(caught.value)
    assert "of rank 2" not in str(caught.value)  # it had what it waited for


def test_a_rank_that_cannot_move_is_named() -> None:
    body = """ld.param.u32 %r9, [number]; setp.ne.u32 %p1, %r9, 100; @%p1 bra END; .shared .align 8 .b64 bar;
    setp.eq.u32 %p3, %t, 0; @%p3 mbarrier.init.shared.b64 [bar], 1; W: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @!%p2 bra W; END:"""
    with pytest.raises(em.Deadlock, match=r"nothing can move\n  CTA \(0, 0, 0\) of rank 1"):
        ring(2, body, check="none")


def test_errors_name_the_rank_and_its_buffers() -> None:
    body = (
        "ld.param.u32 %r9, [number]; setp.eq.u32 %p1, %r9, 100; @%p1 st.global.u32 [%out+512], 1;"
    )
    with pytest.raises(em.MemoryFault, match="of rank 1, warp 0") as caught:
        ring(2, body)
    assert "args[0] of rank" in str(caught.value)
    _, reports = ring(2, body, on_error="collect")
    assert [len(report.alarms) for report in reports] == [0, 1]
    assert reports[1].alarms[0].who == ("CTA (0, 0, 0) of rank 1",)


def test_what_cannot_run_together_is_refused() -> None:
    with pytest.raises(ValueError, match=r"calls\[0\]: its device has workers=2"):
        ring(2, workers=2)
    with pytest.raises(ValueError, match="calls: got none"):
        em.launch_together([])


@every_order
@pytest.mark.parametrize("signals", [True, False])
def test_a_peer_that_never_signals(completion: str, seed: int, signals: bool) -> None:
    """One clock for all: rank 0 waits for a millisecond."""
    waits = """ld.param.u32 %r9, [number]; setp.eq.u32 %p1, %r9, 100; @%p1 bra PEER; mov.u64 %rd1, %globaltimer;
    S: ld.acquire.sys.global.u32 %r2, [%out]; setp.ne.u32 %p3, %r2, 0; @%p3 bra END;
    mov.u64 %rd2, %globaltimer; sub.u64 %rd2, %rd2, %rd1; setp.lt.u64 %p4, %rd2, 1000000; @%p4 bra S;
    st.global.u32 [%out+4], 2; bra END;
    PEER: ld.param.u64 %rd1, [next]; nanosleep.u32 400000; SIGNAL END:"""
    signal = "st.release.sys.global.u32 [%rd1], 1;" if signals else ""
    words, _ = ring(2, waits.replace("SIGNAL", signal), completion=completion, seed=seed)
    assert words[0][1] == (0 if signals else 2)


def test_races_in_global_memory_are_looked_for_by_all_or_none() -> None:
    out = np.zeros(32, np.uint32)
    calls = [
        em.Call(em.Device("sm_90a", check=check), text("ret;"), "k", 1, 32, [out])
        for check in ("all,global", "all")
    ]
    with pytest.raises(ValueError, match="give global to all of their devices or to none"):
        em.launch_together(calls)
