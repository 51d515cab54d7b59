"""Races in global memory: each pattern without one of its parts, and with all of them."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator as em
from kernels import text

ORDERS = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(4))]


def found(
    body: str, grid: int = 2, block: int = 64, cluster: int = 1, check: str = "all,global"
) -> list[str]:
    """The alarms, in each order: those of the check "global" alone."""
    messages = []
    for completion, seed in ORDERS:
        device = em.Device(
            "sm_90a", completion=completion, seed=seed, check=check, on_error="collect"
        )
        out = np.zeros(1 << 12, np.uint32)
        report = device.launch(text(body), "k", grid, block, [out], cluster=cluster)
        assert all(alarm.kind == "global" for alarm in report.alarms), report.alarms
        messages.append("; ".join(alarm.message for alarm in report.alarms))
    return messages


def holds(body: str, **more: int) -> None:
    assert found(body, **more) == [""] * len(ORDERS)


def races(body: str, message: str, **more: int) -> None:
    messages = found(body, **more)
    assert all(message in each for each in messages), messages


#: CTA 0 stores a word a thread, and thread 0 sets a flag; in CTA 1 thread 0 waits for it.
PASSES = """mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0; setp.ne.u32 %p2, %t, 0; @!%p1 bra HEARS;
    st.global.u32 [%at+128], %t;
    bar.sync 0; // SAYS
    @%p2 ret;
    membar.gl; // FENCE
    st.relaxed.gpu.global.u32 [%out], 1; // FLAG
    ret;
HEARS: @%p2 bra GO;
W:  ld.relaxed.gpu.global.u32 %r1, [%out]; // POLL
    setp.eq.u32 %p3, %r1, 0; @%p3 bra W;
    fence.acq_rel.gpu; // ACQUIRE
GO:
    bar.sync 0; // TOLD
    ld.global.u32 %r2, [%at+128]; // USE
    st.global.u32 [%at+512], %r2;"""


def without(body: str, mark: str) -> str:
    lines = body.splitlines()
    left = [line for line in lines if f"// {mark}" not in line]
    assert len(left) == len(lines) - 1
    return "\n".join(left)


def test_a_flag_orders() -> None:
    holds(PASSES)


@pytest.mark.parametrize("mark", ["SAYS", "FENCE", "ACQUIRE", "TOLD"])
def test_each_part_of_a_flag_is_needed(mark: str) -> None:
    races(without(PASSES, mark), "nothing orders it after")
