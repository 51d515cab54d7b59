"""Turns are fair, waits stick to their phase, and what can never end is found out."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import numpy as np
import pytest
from asynchronous import ORDERS
from ptx_kernels import line_of, text

from blockscale import emulator as em

SETUP = """.shared .align 8 .b64 bar; setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared.b64 [bar], 1; bar.sync 0;
    setp.ge.u32 %p2, %t, 32; @%p2 bra WAITS; setp.ne.u32 %p1, %t, 0; @%p1 bra END;
"""
ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"


def work(label: str, count: int) -> str:
    """A loop of three instructions."""
    return f"""mov.u32 %r1, 0; {label}: add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, {count};
    @%p3 bra {label};"""


def run(body: str, completion: str, seed: int) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    em.Device("sm_90a", completion=completion, seed=seed).launch(text(body), "k", 1, 64, [out])
    return out


WAIT = """W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    st.global.u32 [%at], 1; END:"""


@pytest.mark.parametrize(("completion", "seed"), ORDERS)
def test_a_wait_sticks_to_its_phase(completion: str, seed: int) -> None:
    """Two phases end in two instructions that follow each other: who waits learns of the first."""
    body = f"{SETUP}{work('A', 600)} {ARRIVE} {ARRIVE} bra END;\nWAITS: {WAIT}"
    assert run(body, completion, seed)[32:].all()


@pytest.mark.parametrize(("completion", "seed"), ORDERS)
def test_a_wait_for_a_state_sticks_to_its_phase(completion: str, seed: int) -> None:
    """Two phases on, the state is too old to begin with; who waits for it already may go on."""
    setup = SETUP.replace("[bar], 1", "[bar], 2")
    wait = """mbarrier.arrive.shared.b64 %rd1, [bar];
    W: mbarrier.try_wait.shared.b64 %p3, [bar], %rd1; @!%p3 bra W; st.global.u32 [%at], 1; END:"""
    body = f"""{setup}{work("A", 600)} {ARRIVE} mbarrier.arrive.shared.b64 _, [bar], 2; bra END;
    WAITS: setp.ne.u32 %p1, %t, 32; @%p1 bra END; {wait}"""
    assert run(body, completion, seed)[32] == 1


def test_a_warp_behind_has_its_turn() -> None:
    """One goes through two phases, further than the other needs to come to its wait."""
    body = f"{SETUP}{work('A', 100)} {ARRIVE} {work('B', 100)} {ARRIVE} bra END;\nWAITS: {WAIT}"
    assert run(body, "eager", 0)[32:].all()


def test_a_missed_phase_is_named() -> None:
    body = f"{SETUP}{ARRIVE} {ARRIVE} bra END;\nWAITS: {work('A', 600)}\n{WAIT}"
    with pytest.raises(em.Deadlock) as caught:
        run(body, "eager", 0)
    line = line_of(text(body), "mbarrier.try_wait")
    assert f"waited for phase 0 from line {line}; the barrier is in phase 2" in str(caught.value)


def test_a_phase_that_was_not_missed_is_not_named() -> None:
    body = f"{SETUP}{ARRIVE} bra END;\nWAITS: {WAIT.replace('END:', '')} V: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 1; @!%p3 bra V; END:"
    with pytest.raises(em.Deadlock) as caught:
        run(body, "eager", 0)
    assert "parity 1" in str(caught.value)
    assert "waited for" not in str(caught.value)


def test_a_random_order_may_let_the_readers_run_ahead() -> None:
    """Strong accesses are no race; that a barrier is missing shows in what is read."""
    body = """.shared .b32 word; setp.eq.u32 %p1, %t, 0; @%p1 st.volatile.shared.u32 [word], 0; bar.sync 0;
    @!%p1 bra READ; mov.u32 %r1, 7; st.volatile.shared.u32 [word], %r1;
    READ: ld.volatile.shared.u32 %r2, [word]; st.global.u32 [%at], %r2;"""
    assert run(body, "eager", 0)[32] == run(body, "late", 0)[32] == 7
    assert {int(run(body, "random", seed)[32]) for seed in range(4)} == {0, 7}


# --- spins that never end -------------------------------------------------------------------------

SPIN = "S: ld.relaxed.gpu.global.u32 %r5, [%out+WORD]; setp.eq.u32 %p4, %r5, 0; @%p4 bra S;"


def spin(word: int) -> str:
    return SPIN.replace("WORD", str(4 * word))


@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize(("completion", "seed"), [("eager", 0), ("late", 0), ("random", 1)])
def test_a_spin_that_nobody_ends(completion: str, seed: int, resident: int) -> None:
    """Five CTAs, each with another loop; all wait for the word of one that is not there."""
    body = f"""mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 1; @%p1 bra B;
    {spin(40)} bra END;
    B: add.u32 %r2, %r2, 1; and.b32 %r2, %r2, 3; {spin(41).replace("S", "T")} END:"""
    device = em.Device("sm_90a", completion=completion, seed=seed, resident=resident)
    with pytest.raises(
        em.Deadlock, match="threads spin, and nobody changes what they read"
    ) as caught:
        device.launch(text(body), "k", 5, 32, [np.zeros(64, np.uint32)])
    assert str(caught.value).count("CTA (") == 5


def test_a_spin_that_two_processes_share() -> None:
    device = em.Device("sm_90a", workers=2)
    with pytest.raises(em.Deadlock, match="nobody changes"):
        device.launch(text(spin(40)), "k", 5, 32, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("completion", "seed"), ORDERS)
def test_a_spin_that_another_ends(completion: str, seed: int, workers: int) -> None:
    """The other one has 20,000 instructions to do first."""
    body = f"""mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @%p1 bra A;
    {work("B", 6000)} st.relaxed.gpu.global.u32 [%out], 1; bra END;
    A: {spin(0)} END: st.global.u32 [%out+128], 1;"""
    out = np.zeros(64, np.uint32)
    device = em.Device("sm_90a", completion=completion, seed=seed, workers=workers)
    device.launch(text(body), "k", 2, 32, [out])
    assert out[0] == out[32] == 1


@pytest.mark.parametrize(("completion", "seed"), ORDERS)
def test_a_spin_that_a_copy_ends(completion: str, seed: int) -> None:
    body = f""".shared .align 16 .b8 line[16]; setp.ne.u32 %p1, %t, 0; @%p1 bra END;
    mov.u32 %r1, 7; st.shared.v4.u32 [line], {{%r1, %r1, %r1, %r1}}; fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [line], 16; cp.async.bulk.commit_group;
    {spin(0)} cp.async.bulk.wait_group 0; END:"""
    room = np.zeros(64, np.uint32)
    out = room[-room.ctypes.data % 16 // 4 :][:32]
    em.Device("sm_90a", completion=completion, seed=seed).launch(text(body), "k", 1, 32, [out])
    assert out[0] == 7


@pytest.mark.parametrize("clock", ["%clock", "%globaltimer_lo"])
def test_time_ends_a_spin(clock: str) -> None:
    """Registers and memory are as they were at every turn, but for what the clock says."""
    body = f"""mov.u32 %r1, {clock};
    S: ld.relaxed.gpu.global.u32 %r5, [%out]; mov.u32 %r6, {clock}; sub.u32 %r6, %r6, %r1;
    setp.gt.u32 %p4, %r6, 100000; mov.u32 %r6, 0; @%p4 bra END; setp.eq.u32 %p3, %r5, 0; @%p3 bra S;
    END: st.global.u32 [%at], 1;"""
    assert run(body, "eager", 0).all()
