"""Reports and traces, against counts made one thread at a time in plain Python."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ptx_kernels import HEAD, line_of, run, text

from blockscale import emulator as em
from blockscale.emulator.observe.collect import Collector
from blockscale.emulator.observe.report import family
from blockscale.emulator.observe.trace import Slice
from blockscale.emulator.observe.trace import events as trace_events

RNG = np.random.default_rng(0)
OFFSET = "ld.param.u64 %rd1, [at]; mad.wide.u32 %rd1, %t, 4, %rd1; ld.global.u32 %r1, [%rd1];\n"


def by_warp(offsets: list[int]) -> list[list[int]]:
    return [offsets[i : i + 32] for i in range(0, len(offsets), 32)]


def sectors_of(offsets: list[int], size: int) -> tuple[int, int, int]:
    """(requests, bytes, sectors), counted byte by byte."""
    requests = asked = sectors = 0
    for warp in by_warp(offsets):
        octets = {offset + i for offset in warp for i in range(size)}
        requests, asked = requests + 1, asked + len(octets)
        sectors += len({octet // 32 for octet in octets})
    return requests, asked, sectors


def conflicts_of(offsets: list[int], size: int) -> tuple[int, int]:
    """(wavefronts, conflicts): the fullest bank of each group of threads that goes together."""
    wavefronts = conflicts = 0
    together = {8: 16, 16: 8}.get(size, 32)
    for warp in by_warp(offsets):
        for start in range(0, len(warp), together):
            banks: dict[int, set[int]] = defaultdict(set)
            for offset in warp[start : start + together]:
                for word in range(offset // 4, (offset + size + 3) // 4):
                    banks[word % 32].add(word)
            fullest = max(len(words) for words in banks.values())
            wavefronts, conflicts = wavefronts + fullest, conflicts + fullest - 1
    return wavefronts, conflicts


def aligned(n: int, dtype: Any = np.uint8) -> np.ndarray:
    """Like an allocation on a GPU."""
    room = np.zeros(n * np.dtype(dtype).itemsize + 256, np.uint8)
    start = -room.ctypes.data % 256
    return room[start : start + n * np.dtype(dtype).itemsize].view(dtype)


# --- global memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart", "used"), [(32, 1 / 32), (4, 1 / 4), (1, 1.0)])
def test_byte_stores(apart: int, used: float) -> None:
    body = f"mul.lo.u32 %r1, %t, {apart}; cvt.u64.u32 %rd1, %r1; add.u64 %rd1, %out, %rd1;"
    source = body + "\n st.global.u8 [%rd1], 0;"
    report = run(source, aligned(2048), block=64, profile=True)
    row = report.global_memory("write")
    assert (row.requests, row.asked, row.efficiency) == (2, 64, used)
    assert row.fewest == 2  # 32 bytes a warp
    assert report.global_memory("read") is None
    (line,) = report.sectors
    assert line.place.line == line_of(text(source), "st.global.u8")
    assert f"{used:.1%}" in report.table()


VECTORS = {1: "u8", 2: "u16", 4: "u32", 8: "v2.u32", 16: "v4.u32"}


def value(size: int) -> str:
    registers = {8: "{%r2, %r3}", 16: "{%r2, %r3, %r4, %r5}"}
    return registers.get(size, "%h1" if size < 4 else "%r2")


@pytest.mark.parametrize("size", VECTORS)
@pytest.mark.parametrize("block", [32, 50, 96])
@pytest.mark.parametrize("shift", [0, 16])
def test_sectors_of_any_addresses(size: int, block: int, shift: int) -> None:
    """Scattered and repeated ones; where the array begins (16 bytes into a sector) counts not."""
    offsets = RNG.integers(0, 600 // size, block) * size
    body = f"cvt.u64.u32 %rd2, %r1; add.u64 %rd2, %out, %rd2; ld.global.{VECTORS[size]} "
    out, table = aligned(1024)[shift : shift + 640], aligned(block, np.uint32)
    table[:] = offsets
    report = run(
        OFFSET + body + f"{value(size)}, [%rd2];", out, table, block=block, profile=True,
        parameters=".param .u64 at",
    )  # fmt: skip
    row = max(report.sectors, key=lambda row: row.place.line)
    assert (row.requests, row.asked, row.sectors) == sectors_of(offsets.tolist(), size)
    assert report.bytes["global"]["read"] == block * (size + 4)  # of all threads


def test_an_array_that_begins_off_its_alignment_costs_a_sector() -> None:
    load = "ld.global.u8 %h1, [%rd1];"
    body = f"cvt.u64.u32 %rd1, %t; add.u64 %rd1, %out, %rd1; {load}"
    counts = [run(body, aligned(64)[n : n + 32], profile=True).sectors[0].sectors for n in (0, 4)]
    assert counts == [1, 2]


def test_lanes_that_a_predicate_masks_ask_for_nothing() -> None:
    body = "setp.lt.u32 %p1, %t, 40; @%p1 st.global.u32 [%at], %t;"
    report = run(body, aligned(64, np.uint32), block=64, profile=True)
    row = report.global_memory("write")
    assert (row.requests, row.asked, row.sectors) == (2, 160, 5)


@pytest.mark.parametrize("address", ["%out", "%at"])
def test_an_atomic_is_one_request_of_each_warp(address: str) -> None:
    body = f"atom.global.add.u32 %r1, [{address}], 1;"
    report = run(body, aligned(64, np.uint32), block=64, profile=True)
    row = report.global_memory("atomic")
    one = address == "%out"
    assert (row.requests, row.asked, row.sectors) == ((2, 8, 2) if one else (2, 256, 8))
    assert report.bytes == {"global": {"atomic": 256}}


def test_turns_at_one_address_are_one_request() -> None:
    """Two neighbours meet at each word: the second of each pair comes after all the first."""
    body = """
    shr.u32 %r1, %t, 1;
    mad.wide.u32 %rd1, %r1, 4, %out;
    red.global.add.u32 [%rd1], 1;
    """
    row = run(body, aligned(64, np.uint32), block=64, profile=True).global_memory("atomic")
    assert (row.requests, row.asked, row.sectors) == (2, 128, 4)


# --- shared memory --------------------------------------------------------------------------------

SHARED = ".shared .align 1024 .b8 buffer[16384];\n"


def shared_access(offsets: np.ndarray, size: int, kind: str = "ld") -> em.Report:
    operands = (value(size), "[%r1]") if kind == "ld" else ("[%r1]", value(size))
    body = f"mov.u32 %r9, buffer; add.u32 %r1, %r1, %r9; {kind}.shared.{VECTORS[size]} "
    table = offsets.astype(np.uint32)
    device = em.Device("sm_90a", check="none")
    source = text(OFFSET + body + ", ".join(operands) + ";", ".param .u64 at", SHARED)
    return device.launch(
        source, "k", 1, len(offsets), [aligned(4096), table], profile=True
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stride", "size", "wavefronts", "conflicts"),
    [
        (4, 4, 1, 0), (8, 4, 2, 1), (128, 4, 32, 31), (132, 4, 1, 0), (0, 4, 1, 0), (1, 1, 1, 0),
        (8, 8, 2, 0), (16, 16, 4, 0), (128, 16, 32, 28), (0, 16, 4, 0),
    ],
)  # fmt: skip
def test_strides(stride: int, size: int, wavefronts: int, conflicts: int) -> None:
    (row,) = shared_access(np.arange(32) * stride, size).banks
    assert (row.requests, row.wavefronts, row.conflicts) == (1, wavefronts, conflicts)


@pytest.mark.parametrize("size", VECTORS)
@pytest.mark.parametrize(("kind", "name"), [("ld", "read"), ("st", "write")])
@pytest.mark.parametrize("block", [32, 45, 128])
def test_conflicts_of_any_addresses(size: int, kind: str, name: str, block: int) -> None:
    offsets = RNG.integers(0, 2048 // size, block) * size
    report = shared_access(offsets, size, kind)
    (row,) = report.banks
    assert (row.wavefronts, row.conflicts) == conflicts_of(offsets.tolist(), size)
    assert (row.kind, row.requests) == (name, -(-block // 32))
    assert report.bytes["shared"] == {name: block * size}


@pytest.mark.parametrize(("pitch", "conflicts"), [(16, 0), (128, 4 * 7), (144, 0), (64, 4 * 3)])
def test_rows_of_ldmatrix(pitch: int, conflicts: int) -> None:
    body = f"""
    mov.u32 %r9, buffer; mad.lo.u32 %r1, %t, {pitch}, %r9;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r1];
    """
    device = em.Device("sm_90a", check="none")
    report = device.launch(text(body, before=SHARED), "k", 1, 32, [aligned(4)], profile=True)
    (row,) = report.banks
    assert (row.wavefronts, row.conflicts) == (4 + conflicts, conflicts)


# --- asynchronous work ----------------------------------------------------------------------------

COPY = (
    HEAD.format(target="sm_90a")
    + """
.visible .entry k(.param .u64 source, .param .u64 target) {
    .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
    .shared .align 128 .b8 buffer[1024];
    .shared .align 8 .b64 bar;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, buffer;
    mov.u32 %r3, bar;
    ld.param.u64 %rd1, [source];
    ld.param.u64 %rd2, [target];
    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r3], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 1024, [%r3];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0;
    @!%p1 bra WAIT;
    shl.b32 %r4, %r1, 4;
    add.u32 %r4, %r4, %r2;
    ld.shared.b32 %r5, [%r4];
    add.u32 %r5, %r5, 1;
    st.shared.b32 [%r4], %r5;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p0 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
    ret;
}
"""
)


def copy(completion: str = "late", grid: int = 1, workers: int = 1, **more: Any) -> em.Report:
    source, target = aligned(256, np.uint32), aligned(256, np.uint32)
    source[:] = RNG.integers(0, 1 << 30, 256)
    device = em.Device("sm_90a", completion=completion, workers=workers)
    report = device.launch(COPY, "k", grid, 64, [source, target], **more)
    wanted = source.copy()
    wanted[::4] += 1
    assert (target == wanted).all()
    return report


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_bulk_copies(completion: str) -> None:
    report = copy(completion, grid=3, profile=True)
    for kind in ("read", "write"):
        row = report.global_memory(kind)
        assert (row.requests, row.asked, row.sectors) == (3, 3072, 96)
        assert report.bytes["global"][f"{kind} asynchronously"] == 3072
        assert report.bytes["shared"] == {
            "read": 3 * 256, "write": 3 * 256, "read asynchronously": 3072,
            "write asynchronously": 3072,
        }  # fmt: skip


def test_waits_for_copies_say_what_they_wait_for() -> None:
    stalls = {stall.what: stall for stall in copy(profile=True).stalls}
    load, store = stalls["mbarrier"], stalls["group"]
    assert load.role == "warp 0-1"
    assert load.place.line == line_of(COPY, "mbarrier.try_wait")
    assert "1024 bytes announced have not come" in load.reason
    assert store.role == "warp 0"
    assert store.place.line == line_of(COPY, "bulk.wait_group")
    assert "CTA (0, 0, 0)" in store.reason


@pytest.mark.parametrize("turns", [50, 200, 3000])
def test_the_longest_wait_is_for_the_slow_warp(turns: int) -> None:
    body = f"""
    setp.lt.u32 %p1, %t, 32;
    @%p1 bra SLOW;
MEET:
    bar.sync 0;
    bra END;
SLOW:
    mov.u32 %r1, 0;
AGAIN:
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, {turns};
    @%p2 bra AGAIN;
    bra MEET;
END:
    """
    report = run(body, aligned(4), block=128, profile=True)
    longest = report.stalls[0]
    assert (longest.role, longest.what, longest.count) == ("warp 1-3", "barrier", 1)
    # mov, the loop and bra; then the slow warp may run to its end before the others go on.
    assert 3 * turns + 2 <= longest.longest == longest.ticks <= 3 * turns + 5
    assert report.waits()["barrier"][0] == sum(s.count for s in report.stalls)
    assert longest.place.line == line_of(text(body), "bar.sync")
    assert longest.reason.endswith("barrier 0: 3 of 4 warps are there")
    assert report.warp_instructions * 32 == report.total  # waiting is no instruction


def test_who_comes_later_waits_less() -> None:
    """Three groups of warps, which go on together."""
    body = """
    setp.lt.u32 %p1, %t, 32;
    @%p1 bra SLOWEST;
    setp.lt.u32 %p1, %t, 64;
    @%p1 bra SLOW;
MEET:
    bar.sync 0;
    bra END;
SLOW:
    mov.u32 %r1, 900;
    bra AGAIN;
SLOWEST:
    mov.u32 %r1, 0;
AGAIN:
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 1000;
    @%p2 bra AGAIN;
    bra MEET;
END:
    """
    stalls = run(body, aligned(4), block=128, profile=True).stalls
    assert [(stall.role, stall.count) for stall in stalls] == [("warp 2-3", 1), ("warp 1", 1)]
    assert stalls[1].reason.endswith("3 of 4 warps are there")
    assert stalls[0].longest >= stalls[1].longest + 300


def test_products_add_up() -> None:
    collector = Collector(SimpleNamespace(), trace=False)
    for flops in (100, 20):
        collector.multiplied("wgmma.mma_async", 1, flops)
    (row,) = em.Report.merge([collector.report(), collector.report()]).products
    assert (row.opcode, row.count, row.flops) == ("wgmma.mma_async", 4, 240)


# --- the report -----------------------------------------------------------------------------------


def test_a_profile_changes_nothing_else() -> None:
    plain, profiled, traced = copy(), copy(profile=True), copy(trace=True)
    assert plain.instructions == profiled.instructions == traced.instructions
    assert plain == em.Report(plain.instructions)
    assert not plain.profiled
    assert profiled.profiled
    assert traced.profiled
    assert profiled.slices == ()
    assert plain.table().startswith(f"instructions: {plain.total:,} of threads\n")


def test_instructions_of_warps() -> None:
    report = run("add.u32 %r1, %t, 1;", aligned(4), block=128, profile=True)
    assert report.warp_instructions * 32 == report.total
    assert copy(profile=True).total < copy(profile=True).warp_instructions * 32  # diverged


def test_reports_add_up_over_processes() -> None:
    one, two = copy(grid=1, profile=True), copy(grid=2, profile=True)
    both = em.Report.merge(pickle.loads(pickle.dumps([one, two])))
    assert both == em.Report.merge([two, one])
    assert both.total == one.total + two.total
    assert both.warp_instructions == 3 * one.warp_instructions
    assert both.bytes["shared"]["read"] == 3 * 256
    assert both.global_memory("read").sectors == 96
    assert both.waits()["mbarrier"][0] == 3
    assert len(both.stalls) == len(one.stalls)
    assert both.stalls[0].longest == max(s.longest for r in (one, two) for s in r.stalls)
    assert em.Report.merge([]) == em.Report({})


def test_processes_report_what_one_does(tmp_path: Path) -> None:
    alone, forked = (copy(grid=4, workers=workers, trace=True) for workers in (1, 2))
    assert forked.as_dict() == alone.as_dict()
    traces = [events(report, tmp_path / "trace.json") for report in (alone, forked)]
    assert [len(trace) for trace in traces] == [len(traces[0])] * 2
    assert len({event["pid"] for event in traces[1]}) == 4


def test_as_a_dictionary() -> None:
    report = copy(profile=True)
    found = json.loads(json.dumps(report.as_dict()))
    assert found["total"] == report.total
    assert sum(found["families"].values()) == report.total
    assert found["families"]["ld.shared"] == 64
    assert {row["place"]["line"] for row in found["sectors"]} == {
        line_of(COPY, "cp.async.bulk.shared"), line_of(COPY, "cp.async.bulk.global"),
    }  # fmt: skip
    assert found["waits"]["mbarrier"] == {"count": 1, "ticks": report.waits()["mbarrier"][1]}
    assert "bytes" not in copy().as_dict()


def test_families() -> None:
    wanted = {
        "ld.global.nc.L1::no_allocate.v4.u32": "ld.global", "st.shared::cluster.u32": "st.shared",
        "ld.u32": "ld.generic", "atom.acq_rel.gpu.global.add.u32": "atom.global",
        "mad.lo.u32": "mad", "shfl.sync.idx.b32": "shfl.sync",
        "mbarrier.try_wait.parity.shared.b64": "mbarrier.try_wait", "setp.ne.u32": "setp",
    }  # fmt: skip
    assert {opcode: family(opcode) for opcode in wanted} == wanted


def test_the_table_shows_the_worst_first() -> None:
    body = """
    st.global.u32 [%at], %t;
    mul.lo.u32 %r1, %t, 64;
    cvt.u64.u32 %rd1, %r1;
    add.u64 %rd1, %out, %rd1;
    st.global.u16 [%rd1], 0;
    """
    report = run(body, aligned(2048), profile=True)
    lines = report.table().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("global memory, write"))
    assert "st.global.u16" in lines[first + 2]
    assert "st.global.u32" in lines[first + 3]
    assert "... and 1 more" in report.table(most=1)


# --- the trace ------------------------------------------------------------------------------------


def events(report: em.Report, path: Path) -> list[dict[str, Any]]:
    report.trace(path)
    found = json.loads(path.read_text())["traceEvents"]
    for event in found:
        assert event["ph"] in ("X", "M", "s", "f")
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts"))
        assert isinstance(event["name"], str)
        assert event["ph"] != "X" or event["dur"] > 0
    return found


def rows(found: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    named = [e for e in found if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_trace(completion: str, tmp_path: Path) -> None:
    found = events(copy(completion, grid=2, trace=True), tmp_path / "trace.json")
    processes = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert processes == ["CTA (0, 0, 0)", "CTA (1, 0, 0)"]
    names = rows(found)
    for pid in (1, 2):
        of_cta = [name for (owner, _), name in names.items() if owner == pid]
        assert {"warp 0", "warp 1", "TMA loads", "TMA stores"} <= set(of_cta)

    slices = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            row = event["pid"], event["tid"]
            assert row in names
            slices[row].append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():  # one after the other
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))

    ends: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
            spans = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] < end for start, end in spans)
    assert len(ends) >= 4
    for start, end in ends.values():
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert names[start["pid"], start["tid"]].startswith("warp")
        assert names[end["pid"], end["tid"]].startswith("TMA")
        assert start["ts"] <= end["ts"]


def test_parts_of_a_warp_that_wait_have_a_row_of_their_own() -> None:
    """Runs keep the first row, so that arrows find them."""
    cta = (0, 0, 0)
    of_warp = [("wait", 0, 10), ("run", 3, 5), ("run", 12, 15), ("wait", 5, 12), ("wait", 10, 13)]
    slices = [Slice(cta, "warp 2", kind, f"{kind} {a}", a, b) for kind, a, b in of_warp]
    slices.append(Slice(cta, "TMA loads", "work", "copy", 12, 20, {}, ("warp 2", 12)))
    found = trace_events(slices)
    names = rows(found)
    placed = {e["name"]: names[1, e["tid"]] for e in found if e["ph"] == "X"}
    assert placed == {
        "run 3": "warp 2", "run 12": "warp 2", "wait 5": "warp 2", "wait 0": "warp 2 (2)",
        "wait 10": "warp 2 (2)", "copy": "TMA loads",
    }  # fmt: skip
    (start,) = [e for e in found if e["ph"] == "s"]
    assert (names[1, start["tid"]], start["ts"]) == ("warp 2", 12)


def test_a_trace_tells_late_from_eager(tmp_path: Path) -> None:
    lengths = []
    for completion in ("eager", "late"):
        found = events(copy(completion, trace=True), tmp_path / completion)
        (load,) = [e for e in found if "complete_tx" in e["name"]]
        assert rows(found)[load["pid"], load["tid"]] == "TMA loads"
        lengths.append(load["dur"])
    assert lengths[0] == 1 < lengths[1]


def test_no_trace_was_collected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace=True"):
        copy(profile=True).trace(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
