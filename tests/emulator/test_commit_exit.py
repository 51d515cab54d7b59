"""A tcgen05.commit that nobody has waited for, while the CTA with its mbarrier exits."""

from __future__ import annotations

import numpy as np
import pytest
from asynchronous import ORDERS
from ptx_kernels import text

from blockscale import emulator as em

BEFORE = """
.shared .align 8 .b64 seen;
.shared .align 8 .b64 free;
"""
#: Two commits of a thread; the CTA waits for the first, and {then} comes before it exits.
BODY = """
    setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared::cta.b64 [seen], 1;
    @%p1 mbarrier.init.shared::cta.b64 [free], 1;
    bar.sync 0;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{first}];
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{second}];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [seen], 0;
    @!%p2 bra WAIT;
    {then}
"""
ALSO = """
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [free], 0;
    @!%p2 bra AGAIN;
"""


def launch(
    order: tuple[str, int], then: str = "", names: tuple[str, str] = ("seen", "free")
) -> None:
    body = BODY.format(first=names[0], second=names[1], then=then)
    device = em.Device("sm_100a", completion=order[0], seed=order[1])
    ptx = text(body, before=BEFORE, target="sm_100a")
    device.launch(ptx, "k", 1, 64, [np.zeros(64, np.uint32)])


@pytest.mark.parametrize("order", ORDERS)
def test_a_later_commit_is_in_flight_in_every_order(order: tuple[str, int]) -> None:
    with pytest.raises(em.ExitRace, match=r"commit.* may still be in flight"):
        launch(order)


@pytest.mark.parametrize("order", ORDERS)
def test_waiting_for_it_is_enough(order: tuple[str, int]) -> None:
    launch(order, ALSO)


@pytest.mark.parametrize("order", ORDERS)
def test_who_waits_for_a_commit_knows_earlier_ones(order: tuple[str, int]) -> None:
    launch(order, names=("free", "seen"))
