"""Virtual time: %globaltimer, nanosleep, and time-outs that fire or do not."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from asynchronous import FEW_ORDERS
from ptx_kernels import text

from blockscale import emulator as em

every_order = pytest.mark.parametrize(("completion", "seed"), FEW_ORDERS)

#: CTA 0 waits for a word for LIMIT ns, and says 1 if it came, 2 if not. CTA 1: PEER.
WAITS = """setp.ne.u32 %p1, %t, 0; @%p1 bra END; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p2, %r1, 1; @%p2 bra PEER;
    mov.u64 %rd1, %globaltimer;
    S: ld.acquire.gpu.global.u32 %r2, [%out]; setp.ne.u32 %p3, %r2, 0; @%p3 bra CAME; NAP
    mov.u64 %rd2, %globaltimer; sub.u64 %rd2, %rd2, %rd1; setp.lt.u64 %p4, %rd2, LIMIT; @%p4 bra S;
    st.global.u32 [%out+4], 2; bra END;
    CAME: st.global.u32 [%out+4], 1; bra END;
    PEER: DOES
    END:"""
SIGNALS = "st.release.gpu.global.u32 [%out], 1;"
WORKS = "mov.u32 %r4, 0; L: add.u32 %r4, %r4, 1; setp.lt.u32 %p5, %r4, 20000; @%p5 bra L;"
SLEEPS = "nanosleep.u32 500000;"


def waits(limit: int, does: str = "", nap: str = "") -> str:
    return text(WAITS.replace("LIMIT", str(limit)).replace("DOES", does).replace("NAP", nap))


def launch(source: str, grid: int = 2, **device: Any) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    em.Device("sm_90a", **device).launch(source, "k", grid, 32, [out])
    return out


@every_order
@pytest.mark.parametrize("nap", ["", "nanosleep.u32 100;"])
@pytest.mark.parametrize("limit", [10**6, 10**11])
def test_a_time_out_fires_if_nobody_signals(
    completion: str, seed: int, limit: int, nap: str
) -> None:
    began = time.monotonic()
    out = launch(waits(limit, nap=nap), completion=completion, seed=seed)
    assert out[1] == 2
    assert time.monotonic() - began < 60  # a second or two, where nothing else runs


@every_order
@pytest.mark.parametrize("does", [SIGNALS, WORKS + SIGNALS, SLEEPS + SIGNALS])
def test_it_does_not_if_somebody_does(completion: str, seed: int, does: str) -> None:
    out = launch(waits(10**6, does), completion=completion, seed=seed)
    assert out[1] == 1


@every_order
def test_it_fires_if_somebody_sleeps_for_longer(completion: str, seed: int) -> None:
    out = launch(waits(10**5, SLEEPS + SIGNALS), completion=completion, seed=seed)
    assert (out[0], out[1]) == (1, 2)


@every_order
@pytest.mark.parametrize("nap", ["", "nanosleep.u32 100;", "mov.u64 %rd3, %clock64;"])
def test_a_spin_without_a_time_out_is_found(completion: str, seed: int, nap: str) -> None:
    """Also one that sleeps, or that looks at the clock for nothing."""
    body = f"S: ld.acquire.gpu.global.u32 %r2, [%out]; {nap} setp.eq.u32 %p3, %r2, 0; @%p3 bra S;"
    with pytest.raises(em.Deadlock, match="nobody changes what they read"):
        launch(text(body), 1, completion=completion, seed=seed)


@every_order
def test_a_wait_for_an_mbarrier_has_a_time_out(completion: str, seed: int) -> None:
    """Nothing moves but by its failing; and without the time-out it is a deadlock."""
    body = """.shared .align 8 .b64 bar; setp.ne.u32 %p1, %t, 0; @%p1 bra END; mbarrier.init.shared.b64 [bar], 1;
    mov.u64 %rd1, %globaltimer;
    S: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @%p2 bra END;
    mov.u64 %rd2, %globaltimer; sub.u64 %rd2, %rd2, %rd1; setp.lt.u64 %p4, %rd2, 2000000000; @%p4 bra S;
    st.global.u32 [%out], 2;
    END:"""
    assert launch(text(body), 1, completion=completion, seed=seed)[0] == 2
    endless = body.replace("setp.lt.u64 %p4, %rd2, 2000000000; @%p4 bra S;", "bra S;")
    with pytest.raises(em.Deadlock):
        launch(text(endless), 1, completion=completion, seed=seed)


def test_one_that_spins_does_not_keep_another_from_its_time_out() -> None:
    """Warp 1 spins for ever unless warp 0 gives up: its mbarrier.try_wait ends in vain."""
    body = """.shared .align 8 .b64 bar; setp.ge.u32 %p1, %t, 32; @%p1 bra S; setp.ne.u32 %p1, %t, 0; @%p1 bra END;
    mbarrier.init.shared.b64 [bar], 1; mov.u64 %rd1, %globaltimer;
    W: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @%p2 bra END;
    mov.u64 %rd2, %globaltimer; sub.u64 %rd2, %rd2, %rd1; setp.lt.u64 %p4, %rd2, 1000000; @%p4 bra W;
    st.relaxed.gpu.global.u32 [%out], 2; bra END;
    S: ld.relaxed.gpu.global.u32 %r2, [%out]; setp.eq.u32 %p3, %r2, 0; @%p3 bra S;
    END:"""
    out = np.zeros(64, np.uint32)
    em.Device("sm_90a", check="none").launch(text(body), "k", 1, 64, [out])
    assert out[0] == 2


def test_threads_sleep_for_as_long_as_each_says() -> None:
    body = """mul.lo.u32 %r1, %t, 1000; mov.u32 %r2, %globaltimer_lo; nanosleep.u32 %r1;
    mov.u32 %r3, %globaltimer_lo; sub.u32 %r3, %r3, %r2; st.global.u32 [%at], %r3;"""
    slept = launch(text(body), 1)[:32].astype(np.int64)
    wanted = 1000 * np.arange(32)
    assert (slept >= wanted).all()
    assert (slept <= wanted + 1000).all()
    assert (np.diff(slept) > 0).all()


def test_no_sleep_is_longer_than_a_millisecond() -> None:
    body = """mov.u64 %rd1, %globaltimer; nanosleep.u32 4000000000; mov.u64 %rd2, %globaltimer;
    sub.u64 %rd2, %rd2, %rd1; cvt.u32.u64 %r1, %rd2; st.global.u32 [%at], %r1;"""
    assert 10**6 <= launch(text(body), 1)[0] < 2 * 10**6


@every_order
def test_the_clock_never_goes_back(completion: str, seed: int) -> None:
    """CTAs write down what they read one after the other, in the order of an atomic."""
    body = """setp.ne.u32 %p1, %t, 0; @%p1 bra END; mov.u32 %r3, 0;
    L: atom.acq_rel.gpu.global.exch.b32 %r2, [%out], 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra L;
    ld.global.u32 %r4, [%out+4]; add.u32 %r5, %r4, 1; st.global.u32 [%out+4], %r5;
    mad.wide.u32 %rd1, %r4, 4, %out; mov.u32 %r6, %globaltimer_lo; st.global.u32 [%rd1+8], %r6;
    st.release.gpu.global.u32 [%out], 0; nanosleep.u32 70;
    add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 10; @%p3 bra L;
    END:"""
    out = launch(text(body), 3, completion=completion, seed=seed)
    times = out[2:32].astype(np.int64)
    assert (np.diff(times) > 0).all()
    assert times[-1] > 700


def test_who_looks_at_the_clock_after_some_polls_times_out_as_soon() -> None:
    """30 polls of 5 instructions: a round is no multiple of anything that the emulator has."""
    body = """.shared .u32 flag; setp.ne.u32 %p1, %t, 0; @%p1 bra END; mov.u32 %r1, 0;
    st.volatile.shared.u32 [flag], %r1; mov.u64 %rd1, %globaltimer;
    AGAIN: mov.u32 %r2, 0;
    POLL: ld.volatile.shared.u32 %r1, [flag]; setp.ne.u32 %p2, %r1, 0; @%p2 bra END;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 30; @%p3 bra POLL;
    mov.u64 %rd2, %globaltimer; sub.u64 %rd2, %rd2, %rd1; setp.lt.u64 %p4, %rd2, 100000;
    @%p4 bra AGAIN; st.global.u32 [%out], 1; END:"""
    out = np.zeros(32, np.uint32)
    report = em.Device("sm_90a").launch(text(body), "k", 1, 32, [out])
    assert out[0] == 1
    assert sum(report.instructions.values()) < 10**6
