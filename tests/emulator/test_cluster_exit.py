"""Shared memory of a CTA is gone when its last thread exits: others must be done with it."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import text

from blockscale import emulator as em

BEFORE = ".shared .align 8 .b8 place[16];"
#: CTA 1 acts on CTA 0's memory; {last} comes before both exit.
BODY = """
    .reg .b32 %rank, %there; .reg .b64 %state;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %r1, place;
    setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %there, %r1, 0;
    setp.eq.u32 %p2, %rank, 1;
    and.pred %p2, %p2, %p1;
    {action}
    {last}
"""
ACTIONS = {
    "store": "@%p2 st.shared::cluster.u32 [%there+8], 1;",
    "load": "@%p2 ld.shared::cluster.u32 %r3, [%there];",
    "arrival": "@%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%there];",
}
BARRIER = "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;"
#: CTA 0 waits for the arrival, with nothing else to tell it.
PHASE = """
    setp.eq.u32 %p3, %rank, 1;
    @%p3 bra DONE;
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r1], 0;
    @!%p4 bra WAIT;
DONE:
"""
LATE = """
    setp.eq.u32 %p3, %rank, 0;
    @%p3 ret;
    mov.u32 %r2, 0;
SPIN:
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p3, %r2, 3000;
    @%p3 bra SPIN;
"""


def launch(action: str, last: str, check: str = "all") -> None:
    ptx = text(BODY.format(action=action, last=last), before=BEFORE)
    device = em.Device("sm_90a", check=check)
    device.launch(ptx, "k", 2, 32, [np.zeros(32, np.uint32)], cluster=2)


@pytest.mark.parametrize("action", ACTIONS)
def test_exit_that_nothing_orders_after_an_access(action: str) -> None:
    with pytest.raises(em.PtxError, match=r"CTA \(0, 0, 0\) exits, and nothing orders that after"):
        launch(ACTIONS[action], "")
    launch(ACTIONS[action], "", check="none")


@pytest.mark.parametrize("action", ACTIONS)
def test_exit_after_a_barrier_of_the_cluster(action: str) -> None:
    launch(ACTIONS[action], BARRIER)


def test_exit_after_waiting_for_the_arrival() -> None:
    launch(ACTIONS["arrival"], PHASE)


@pytest.mark.parametrize("action", ACTIONS)
def test_access_after_the_exit(action: str) -> None:
    with pytest.raises(em.PtxError, match=r"of CTA \(0, 0, 0\), which has exited"):
        launch(LATE + ACTIONS[action], "")
