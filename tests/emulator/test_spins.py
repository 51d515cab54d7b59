"""Loops that spin on memory are counted, not run, while nothing changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from ptx_kernels import text

from blockscale import emulator as em
from blockscale.emulator.launches import spins

#: Every lane takes the lock, as nvcc compiles ``while (atomicCAS(lock, 0, 1)) {}``.
LOCK = """
    ld.param.u64 %rd1, [lock]; ld.param.u64 %rd2, [count];
    take: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.s32 %p1, %r1, 0; @%p1 bra take;
    membar.gl;
    ld.volatile.global.u32 %r2, [%rd2]; add.s32 %r3, %r2, 1; st.volatile.global.u32 [%rd2], %r3;
    membar.gl;
    atom.global.exch.b32 %r4, [%rd1], 0;
    mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ntid.x; mad.lo.u32 %r5, %r5, %r6, %t;
    mul.wide.u32 %rd3, %r5, 4; add.u64 %rd3, %out, %rd3; st.global.u32 [%rd3], %r2;
"""
#: The same with the critical section inside of the loop.
INSIDE = """
    ld.param.u64 %rd1, [lock]; ld.param.u64 %rd2, [count];
    mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ntid.x; mad.lo.u32 %r5, %r5, %r6, %t;
    mul.wide.u32 %rd3, %r5, 4; add.u64 %rd3, %out, %rd3;
    take: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.s32 %p1, %r1, 0; @%p1 bra again;
    membar.gl;
    ld.volatile.global.u32 %r2, [%rd2]; add.s32 %r3, %r2, 1; st.volatile.global.u32 [%rd2], %r3;
    st.global.u32 [%rd3], %r2;
    membar.gl;
    atom.global.exch.b32 %r4, [%rd1], 0;
    again: @%p1 bra take;
"""


def locked(body: str, ctas: int, lanes: int = 32, **more: Any) -> em.Report:
    lock, count = np.zeros((2, 1), np.uint32)
    out = np.zeros(lanes * ctas, np.uint32)
    source = text(body, ".param .u64 lock, .param .u64 count")
    report = em.Device(**more).launch(source, "k", ctas, lanes, [out, lock, count])
    assert count == len(out)
    assert sorted(out.tolist()) == list(range(len(out)))
    assert lock == 0
    return report


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("body", [LOCK, INSIDE], ids=["before", "inside"])
def test_a_lock_that_every_lane_takes(
    body: str, completion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not run is counted: the order is the same as if all had been."""
    launch = partial(locked, body, 3, 8, completion=completion, check="none")
    counted = launch().instructions
    monkeypatch.setattr(spins.Turn, "jumps", lambda *_: None)
    assert counted == launch().instructions


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_a_lock_that_every_lane_takes_has_no_race(completion: str) -> None:
    locked(LOCK, 2, completion=completion)


def is_found(body: str, out: np.ndarray) -> bool:
    """Whether instructions of a launch are counted and not run."""
    found: list[Any] = []
    kept = spins.Turn.jumps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spins.Turn, "jumps", lambda *args: found.append(kept(*args)) or found[-1])
        em.Device(completion="late").launch(text(body), "k", 1, 64, [out])
    return any(found)


_SPINNER = """
    .shared .u32 flag; .shared .b64 bar; mov.u32 %r5, bar;
    setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [%r5], 32;
    setp.eq.u32 %p1, %t, 0; @%p1 st.volatile.shared.u32 [flag], 0; bar.sync 0;
    mov.u32 %r2, 0; setp.lt.u32 %p1, %t, 32; @%p1 bra spin; mov.u32 %r9, 0;
    work: add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 1000; @%p1 bra work;
    st.volatile.shared.u32 [flag], 1; mbarrier.arrive.shared.b64 _, [%r5]; bra end;
    spin: {spin} @%p2 bra spin;
    st.global.u32 [%at], %r1; end:
"""


@pytest.mark.parametrize(
    ("spin", "skips"),
    [
        ("ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p2, %r1, 0;", True),
        ("ld.acquire.cta.shared.u32 %r1, [flag]; membar.cta; setp.eq.u32 %p2, %r1, 0;", True),
        ("atom.shared.or.b32 %r1, [flag], 0; setp.eq.u32 %p2, %r1, 0;", True),
        (
            "mov.u32 %r1, 1; mbarrier.test_wait.parity.shared.b64 %p3, [%r5], 0; "
            "not.pred %p2, %p3;",
            True,
        ),
        # A store, if another value has come; one in each iteration; tries that are counted; time;
        # lanes of one warp that vote; a register with two values.
        (
            "ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p2, %r1, 0; @%p2 bra over;"
            "st.global.u32 [%at], 7; over:",
            True,
        ),
        ("ld.volatile.shared.u32 %r1, [flag]; st.global.u32 [%at], 7; "
         "setp.eq.u32 %p2, %r1, 0;", False),
        ("ld.volatile.shared.u32 %r1, [flag]; add.u32 %r2, %r2, 1; "
         "setp.eq.u32 %p2, %r1, 0;", False),
        ("ld.volatile.shared.u32 %r1, [flag]; mov.u64 %rd1, %globaltimer; "
         "setp.eq.u32 %p2, %r1, 0;", False),
        ("ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p3, %r1, 0; "
         "vote.sync.any.pred %p2, %p3, -1;", True),
        ("ld.volatile.shared.u32 %r1, [flag]; shfl.sync.idx.b32 %r1, %r1, 3, 31, -1; "
         "setp.eq.u32 %p2, %r1, 0;", False),
        ("ld.volatile.shared.u32 %r3, [flag]; mov.u32 %r1, 5; mov.u32 %r1, %r3; "
         "setp.eq.u32 %p2, %r1, 0;", False),
        ("atom.shared.or.b32 %r1, [flag], 0; atom.global.add.u32 %r2, [%at], 1; "
         "setp.eq.u32 %p2, %r1, 0;", False),
    ],
)  # fmt: skip
def test_what_need_not_be_run(spin: str, skips: bool) -> None:
    out = np.zeros(64, np.uint32)
    assert is_found(_SPINNER.format(spin=spin), out) is skips
    assert (out[:32] == 1).all()


def test_lanes_that_vote_with_others_are_run() -> None:
    """Half of a warp is told by a vote, and by nothing else, what the other half has read."""
    halves = """setp.lt.u32 %p4, %t, 16; @%p4 bra low;
    high: ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p3, %r1, 0;
    vote.sync.any.pred %p2, %p3, -1; @%p2 bra high; bra out;
    low: ld.volatile.shared.u32 %r6, [unused]; setp.ne.u32 %p3, %r6, 0;
    vote.sync.any.pred %p2, %p3, -1; @%p2 bra low; mov.u32 %r1, 1;
    out: setp.ne.u32 %p2, 0, 0;"""
    out = np.zeros(64, np.uint32)
    body = ".shared .u32 unused; st.volatile.shared.u32 [unused], 0;" + _SPINNER
    assert not is_found(body.format(spin=halves), out)
    assert (out[:32] == 1).all()


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_half_a_warp_that_votes_is_run(completion: str) -> None:
    """The other half votes elsewhere, as often as it wants, and then ends the spin."""
    body = """.shared .u32 flag; st.volatile.shared.u32 [flag], 0; bar.sync 0; mov.u32 %r2, 0;
    setp.lt.u32 %p4, %t, 16; @%p4 bra low;
    high: ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p3, %r1, 0;
    vote.sync.any.pred %p2, %p3, -1; @%p2 bra high; bra out;
    low: setp.ne.u32 %p3, %r2, %r2; vote.sync.any.pred %p5, %p3, -1;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 2000; @%p3 bra low;
    st.volatile.shared.u32 [flag], 1;
    setp.ne.u32 %p3, %r2, %r2; vote.sync.any.pred %p5, %p3, -1; @%p5 bra last; bra out;
    last: vote.sync.any.pred %p5, %p3, -1;
    out: bar.warp.sync -1; st.global.u32 [%at], 1;"""
    out = np.zeros(32, np.uint32)
    em.Device(completion=completion).launch(text(body), "k", 1, 32, [out])
    assert out.all()


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_a_vote_that_is_not_run_is_counted(
    completion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in look-back: a warp waits until none of its lanes has read a zero."""
    vote = """ld.volatile.shared.u32 %r1, [flag]; setp.eq.u32 %p3, %r1, 0;
    vote.sync.any.pred %p2, %p3, -1;"""
    source = text(_SPINNER.format(spin=vote))

    def launch() -> em.Report:
        out = np.zeros(64, np.uint32)
        return em.Device(completion=completion, check="none").launch(source, "k", 1, 64, [out])

    counted = launch().instructions
    monkeypatch.setattr(spins.Turn, "jumps", lambda *_: None)
    assert counted == launch().instructions
