"""Alarms that are collected, suppressed and chosen by kind; exits that are decided by clocks."""

# ruff: noqa: E501 (lines of PTX)
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asynchronous import ORDERS, aligned
from ptx_kernels import line_of, text

from blockscale import emulator as em
from blockscale.emulator.alarms.alarm import KINDS, wanted

SHARED = ".shared .align 128 .b8 s[1024]; .shared .align 8 .b64 bar;"
#: Warp 1 reads what warp 0 writes, with nothing between; the word of thread 0 was never written.
RACE = """
    .loc 1 7 0
    setp.lt.u32 %p1, %t, 32; shl.b32 %r1, %t, 2; mov.u32 %r2, s; add.u32 %r3, %r2, %r1;
    @%p1 st.shared.u32 [%r3], %t; // WRITE
    setp.ge.u32 %p2, %t, 32;
    @%p2 ld.shared.u32 %r4, [%r3-128]; // READ
    @%p2 ld.shared.u32 %r5, [%r3+512]; // BLANK
    @%p2 st.global.u32 [%at], %r5; // USE
"""
RACY = text(RACE, before=SHARED)


def launch(
    source: str, *, args: Any = None, grid: int = 1, block: int = 64, cluster: int = 1, **how: Any
) -> em.Report:
    given = [np.zeros(64, np.uint32)] if args is None else args
    device = em.Device(how.pop("target", "sm_90a"), **how)
    return device.launch(source, "k", grid, block, given, cluster=cluster)


def kinds(report: em.Report) -> list[str]:
    return [alarm.kind for alarm in report.alarms]


# --- which ----------------------------------------------------------------------------------------


def test_all_are_the_default_kinds_and_names_add() -> None:
    default = {name for name, kind in KINDS.items() if kind.default}
    assert wanted("all") == default
    assert "exit_stores" not in default
    assert wanted("all,exit_stores") == wanted(("all", "exit_stores")) == default | {"exit_stores"}
    assert wanted("none") == {"bounds"}
    assert wanted("race,fence") == {"race", "fence", "bounds"}


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(
        ValueError, match="check: got 'spelling'; choose all, none, or some of race"
    ):
        em.Device(check="race,spelling")
    with pytest.raises(ValueError, match="on_error: got 'ignore'; choose one of raise, collect"):
        em.Device(on_error="ignore")


# --- collected ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_launch_goes_on_after_alarms(workers: int) -> None:
    report = launch(RACY, grid=4, on_error="collect", workers=workers)
    race, blank = report.alarms
    assert (race.kind, race.line, race.other) == (
        "race",
        line_of(RACY, "// READ"),
        line_of(RACY, "// WRITE"),
    )
    assert (blank.kind, blank.line, blank.other) == (
        "uninitialized",
        line_of(RACY, "// USE"),
        line_of(RACY, "// BLANK"),
    )
    assert race.count == 4
    assert sorted(race.who) == [f"CTA ({x}, 0, 0)" for x in range(4)]
    assert "nothing orders it after the write by st.shared.u32" in race.message
    assert report.as_dict()["alarms"][0]["count"] == 4
    table = report.table()
    assert "alarms: 8" in table
    assert " and 3 more" in table


def test_bounds_are_collected() -> None:
    source = text("""ld.global.u32 %r2, [%at+128]; // PAST
    st.global.u32 [%at], %r2;
    st.global.u32 [%at+128], %t; // PAST TOO
    """)
    out = np.arange(48, dtype=np.uint32)
    with pytest.raises(em.MemoryFault, match="out of bounds"):
        launch(source, args=[out.copy()], block=32, check="none")
    report = launch(source, args=[out], block=32, on_error="collect")
    assert set(kinds(report)) == {"bounds"}
    assert [alarm.line for alarm in report.alarms] == [
        line_of(source, "// PAST"),
        line_of(source, "// PAST TOO"),
    ]
    assert (out[:16] == np.arange(32, 48)).all()  # what is there was read
    assert (out[16:32] == 0xFFFFFFFF).all()  # what is not there is NaN
    assert (out[32:] == np.arange(16)).all()  # what is there was written


# --- suppressed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "line=READ", "line=WRITE", "kernel=k*", "opcode=ld.shared*"])
def test_suppressed_alarms_are_neither_raised_nor_kept(where: str) -> None:
    for mark in ("READ", "WRITE"):
        where = where.replace(mark, str(line_of(RACY, f"// {mark}")))
    lines = [
        f"race {where} # one value",
        "uninitialized # padding",
        "exit kernel=k # none",
        "fence kernel=other # none",
    ]
    report = launch(RACY, suppress=lines)
    assert report.alarms == ()
    assert [(entry.entry.split()[0], entry.count) for entry in report.suppressed] == [
        ("race", 1),
        ("uninitialized", 1),
        ("exit", 0),
    ]
    assert "exit kernel=k (unused)" in report.table()


def test_a_suppression_elsewhere_covers_nothing(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("# Known.\n\nrace line=1  # not there\nrace source=other.cu:7 # nor there\n")
    with pytest.raises(em.DataRace):
        launch(RACY, suppress=file)


@pytest.mark.parametrize("source", ["kernel.cu:7", "wrappers.h:5"])
def test_a_suppression_names_a_line_or_where_it_was_inlined(source: str) -> None:
    inlined = ".loc 1 7 0\n.loc 2 5 9, function_name $L__info_string0, inlined_at 1 7 0\n"
    files = '.file 1 "kernel.cu"\n.file 2 "wrappers.h"\n'
    racy = text(RACE.replace(".loc 1 7 0\n", inlined), before=SHARED + files)
    lines = [f"race source={source} # one value", f"uninitialized source={source} # padding"]
    assert launch(racy, suppress=lines).alarms == ()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("race", "has no reason"),
        ("rice # why", "'rice'; choose one of race"),
        ("race 214 # why", "'214'; expected kernel=GLOB"),
        ("race line=x # why", "expected kernel=GLOB"),
    ],
)
def test_entries_that_say_nothing(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"suppress: line 1.*{says}"):
        em.Device(suppress=[line])


# --- exits ----------------------------------------------------------------------------------------

INIT = """setp.eq.u32 %p2, %t, 0; mov.u32 %r2, s; mov.u32 %r3, bar;
    @%p2 mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; {sync}
    @!%p2 bra DONE;
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{0} [s], [%out], 16, [bar]{1}; // LOAD\n"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p3, [bar], {0}; @!%p3 bra W;\n"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 %rd1, [bar], 16;\n"


@pytest.mark.parametrize(("completion", "seed"), ORDERS)
def test_a_load_must_be_known_whatever_the_order(completion: str, seed: int) -> None:
    """The first of two loads is waited for, the second is not: under eager, too, that is said."""
    how: dict[str, Any] = {"completion": completion, "seed": seed}
    body = INIT.format(sync="bar.sync 0;") + EXPECT + LOAD.format("", "") + WAIT.format(0)
    more = EXPECT + LOAD.format("", "").replace("// LOAD", "// SECOND")
    once, twice = (text(f"{body}{second}DONE:", before=SHARED) for second in ("", more))
    launch(once, args=[aligned(np.zeros(4, np.uint32))], **how)
    with pytest.raises(em.ExitRace, match="exits without having waited") as caught:
        launch(twice, args=[aligned(np.zeros(4, np.uint32))], **how)
    assert caught.value.line == line_of(twice, "// SECOND")
    launch(twice, args=[aligned(np.zeros(4, np.uint32))], check="race,fence", **how)


@pytest.mark.parametrize(("completion", "seed"), ORDERS)
def test_a_load_by_another_cta_must_be_known_to_mine(completion: str, seed: int) -> None:
    """CTA 0 multicasts into both; both wait, or CTA 1 does not."""
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    body = (
        INIT.format(sync=sync)
        + "mov.u32 %r6, %cluster_ctarank; setp.ne.u32 %p4, %r6, 0; mov.u16 %h1, 3;\n"
        + EXPECT
        + "@!%p4 " + LOAD.format(".multicast::cluster", ", %h1")
        + "{skip}" + WAIT.format(0) + "DONE:"
    )  # fmt: skip
    for skip in ("", "@%p4 bra DONE;\n"):
        source, args = (
            text(body.replace("{skip}", skip), before=SHARED),
            [aligned(np.zeros(4, np.uint32))],
        )
        how: dict[str, Any] = {"grid": 2, "cluster": 2, "block": 32, "args": args}
        report = launch(source, on_error="collect", completion=completion, seed=seed, **how)
        found = set(kinds(report))  # the load was issued when CTA 1 exited, or was not yet
        assert found & {"exit", "dsmem_exit"} if skip else not found
