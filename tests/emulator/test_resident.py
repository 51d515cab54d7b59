"""Several clusters of a grid at once: who starts, and kernels that are right only for one."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_kernels import text

from blockscale import emulator as em
from blockscale.emulator.launches import grid

SM100 = "sm_100a"
ORDERS = (("eager", 0), ("late", 0), *(("random", seed) for seed in range(8)))
MANY = pytest.mark.parametrize("resident", [1, 2, 3])
CANCEL = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
QUERY = "clusterlaunchcontrol.query_cancel"

#: One warp takes an index after the other; CTAs that start are counted. NEXT: where it finds one.
TAKING = """.shared .align 16 .b8 answer[16]; .shared .align 8 .b64 bar; .reg .b128 %q1;
    setp.ne.u32 %p1, %t, 0; @%p1 bra E; mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    ld.param.u64 %rd1, [started]; red.relaxed.gpu.global.add.u32 [%rd1], 1; mov.u32 %r10, %ctaid.x; mov.u32 %r6, 0;
    L: mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16; CANCEL [answer], [bar];
    mad.wide.u32 %rd3, %r10, 4, %out; red.global.add.u32 [%rd3], 1;
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], %r6; @!%p3 bra W; xor.b32 %r6, %r6, 1;
    ld.shared.b128 %q1, [answer]; QUERY.is_canceled.pred.b128 %p5, %q1; fence.proxy.async.shared::cta;
    NEXT @%p5 bra L;
    E:""".replace("CANCEL", CANCEL).replace("QUERY", QUERY)
FROM_ANSWER = f"{QUERY}.get_first_ctaid::x.b32.b128 %r10, %q1;"


def taking(device: em.Device, grid: int, next: str = FROM_ANSWER) -> tuple[np.ndarray, int]:
    """How often each index was taken, and how many CTAs started."""
    source = text(TAKING.replace("NEXT", next), ".param .u64 started", target=SM100)
    out, started = np.zeros(grid, np.uint32), np.zeros(1, np.uint32)
    device.launch(source, "k", grid, 32, [out, started])
    return out, int(started[0])


@MANY
@pytest.mark.parametrize(("completion", "seed"), ORDERS[:4])
def test_so_many_start_and_the_others_are_canceled(
    completion: str, seed: int, resident: int
) -> None:
    device = em.Device(SM100, completion=completion, seed=seed, resident=resident)
    counts, started = taking(device, 20)
    assert (counts == 1).all()
    assert started == resident


def test_the_seed_draws_how_many_start() -> None:
    """2 by themselves; at random 1 to 3."""
    assert {taking(em.Device(SM100, completion=c), 9)[1] for c in ("eager", "late")} == {2}
    drawn = [em.Device(SM100, completion="random", seed=seed) for seed in range(12)]
    assert {taking(device, 9)[1] for device in drawn} == {1, 2, 3}
    with pytest.raises(ValueError, match="resident: got 0"):
        em.Device(resident=0)


@MANY
def test_indices_that_are_not_those_of_the_answer(resident: int) -> None:
    """The next one instead of that which was canceled: right for one CTA alone."""
    found = [
        taking(em.Device(SM100, completion=c, seed=s, resident=resident), 12, "add.u32 %r10, %r10, 1;")[0]
        for c, s in ORDERS
    ]  # fmt: skip
    right = sum(bool((counts == 1).all()) for counts in found)
    assert right == len(ORDERS) if resident == 1 else right < len(ORDERS) // 2


# --- kernels of which only one CTA may run, or only in this order ---------------------------------

#: A line of 128 bytes comes by a bulk copy, a word of it becomes one more, and it goes back.
ADDS = """.shared .align 128 .b8 line[128]; .shared .align 8 .b64 bar;
    setp.ne.u32 %p1, %t, 0; @%p1 bra E; mbarrier.init.shared.b64 [bar], 1; fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [line], [%out], 128, [bar];
    W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra W;
    ld.shared.u32 %r1, [line]; add.u32 %r1, %r1, 1; st.shared.u32 [line], %r1; fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [line], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:"""
#: The first CTA stores by a bulk copy what the second one reads. SAYS, WAITS: by a flag.
PASSES = """.shared .align 128 .b8 line[128]; .shared .align 8 .b64 bar;
    setp.ne.u32 %p1, %t, 0; @%p1 bra E; mov.u32 %r10, %ctaid.x; setp.eq.u32 %p2, %r10, 1; @%p2 bra S;
    mov.u32 %r1, 7; st.shared.v4.u32 [line], {%r1, %r1, %r1, %r1}; fence.proxy.async;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [line], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; SAYS bra E;
    S: WAITS ld.global.u32 %r2, [%out]; st.global.u32 [%out+32], %r2;
    E:"""
SAYS = "fence.proxy.async; st.release.gpu.global.u32 [%out+64], 1;"
WAITS = (
    "F: ld.acquire.gpu.global.u32 %r3, [%out+64]; setp.ne.u32 %p3, %r3, 1; @%p3 bra F;"
    " fence.proxy.async;"
)


def after(body: str, grid: int, **device: Any) -> np.ndarray:
    room = np.zeros(64 + 32, np.uint32)
    out = room[-room.ctypes.data % 128 // 4 :][:32]
    em.Device("sm_90a", **device).launch(text(body), "k", grid, 32, [out])
    return out


def wrong(body: str, grid: int, at: int, want: int, resident: int, orders: Any = ORDERS) -> int:
    """Of how many orders the result is not what it should be."""
    devices = [{"completion": c, "seed": s, "resident": resident} for c, s in orders]
    return sum(after(body, grid, **device)[at] != want for device in devices)


def test_two_add_to_the_same_line() -> None:
    """A sum is lost as soon as two are there at once, in many orders."""
    assert wrong(ADDS, 6, 0, 6, resident=1) == 0
    assert wrong(ADDS, 6, 0, 6, resident=2) >= len(ORDERS) // 2
    assert wrong(ADDS, 6, 0, 6, resident=3) > len(ORDERS) // 2


def test_one_does_not_wait_for_the_other() -> None:
    body = PASSES.replace("SAYS", "").replace("WAITS", "")
    assert wrong(body, 2, 8, 7, resident=1) == 0
    assert wrong(body, 2, 8, 7, resident=2) > len(ORDERS) // 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("resident", [1, 2])
def test_one_waits_for_the_other(resident: int) -> None:
    """By a flag; also where the one that waits starts first, and spins until there is room."""
    body = PASSES.replace("SAYS", SAYS).replace("WAITS", WAITS)
    swapped = body.replace("setp.eq.u32 %p2, %r10, 1;", "setp.eq.u32 %p2, %r10, 0;")
    for source in (body, swapped):
        assert wrong(source, 2, 8, 7, resident, ORDERS[1:4]) == 0


def test_more_start_while_those_that_run_wait_for_them() -> None:
    """Each waits until all have arrived, of more than are resident."""
    body = """setp.ne.u32 %p1, %t, 0; @%p1 bra E; red.release.gpu.global.add.u32 [%out], 1;
    F: ld.acquire.gpu.global.u32 %r3, [%out]; setp.lt.u32 %p3, %r3, 4; @%p3 bra F;
    E:"""
    for completion, seed in ORDERS[1:3]:
        assert after(body, 4, completion=completion, seed=seed)[0] == 4


#: As cooperative groups do it: %envreg1 and %envreg2 are the address of a word and the barrier.
GRID_BARRIER = """mov.u32 %r10, %ctaid.x; setp.ne.u32 %p1, %t, 0; @%p1 bra E;
    mad.wide.u32 %rd3, %r10, 4, %out; st.global.u32 [%rd3], 1;
    mov.u32 %r2, %envreg2; mov.u32 %r3, %envreg1; mov.b64 %rd1, {%r2, %r3};
    atom.add.release.gpu.u32 %r4, [%rd1+4], 1; mov.u32 %r5, %nctaid.x;
    F: ld.acquire.gpu.u32 %r3, [%rd1+4]; setp.lt.u32 %p3, %r3, %r5; @%p3 bra F;
    mov.u32 %r6, 0; mov.u32 %r7, 0;
    S: mad.wide.u32 %rd3, %r6, 4, %out; ld.global.u32 %r8, [%rd3]; and.b32 %r8, %r8, 1; add.u32 %r7, %r7, %r8;
    add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, %r5; @%p3 bra S;
    shl.b32 %r7, %r7, 1; add.u32 %r7, %r7, 1; mad.wide.u32 %rd3, %r10, 4, %out; st.global.u32 [%rd3], %r7;
    E:"""


@pytest.mark.parametrize(("completion", "seed"), ORDERS[:3])
def test_a_barrier_of_the_grid(completion: str, seed: int) -> None:
    """Each counts what all wrote before it; a launch begins with a workspace of zeros."""
    device, out = em.Device(completion=completion, seed=seed), np.zeros(6, np.uint32)
    for _ in range(2):
        device.launch(text(GRID_BARRIER), "k", 6, 32, [out])
        assert (out == 13).all()
        out[:] = 0


def test_whoever_spins_makes_room_soon() -> None:
    report = em.Device().launch(text(GRID_BARRIER), "k", 6, 32, [np.zeros(6, np.uint32)])
    assert report.instructions["ld.acquire.gpu.u32"] < 6 * 1000


def test_more_than_a_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_SMS", 2)
    out, source = np.zeros(3, np.uint32), text(GRID_BARRIER)
    em.Device().launch(source, "k", 3, 32, [out], shared=100 << 10)  # two CTAs on each
    with pytest.raises(em.Deadlock, match="1 of 3 clusters have not started: a GPU holds 2 of"):
        em.Device().launch(source, "k", 3, 32, [out], shared=200 << 10)
