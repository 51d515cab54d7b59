"""Fences that nothing but the ISA asks for: without each, an alarm; with it, none."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator as em
from blockscale.emulator.checks import DataRace, MissingFence
from kernels import text

ORDERS = (("eager", 0), ("late", 0), ("random", 0), ("random", 1))


def alarms(body: str, check: str, target: str = "sm_90a", ctas: int = 1) -> list[em.PtxError]:
    """One for each order; those that run through have none."""
    found = []
    for completion, seed in ORDERS:
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
    assert len(found) == len(ORDERS) * wrong
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
    assert len(found) == len(ORDERS) * wrong
    assert all(isinstance(error, MissingFence) for error in found)
