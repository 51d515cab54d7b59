"""The performance model: what it counts, its walls, and how far it is from measured times."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from blockscale import cli
from blockscale.bench.grouped import skewed
from blockscale.cli.bench import bench
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm90 import config as sm90
from blockscale.kernels.sm90.product_config import ROW
from blockscale.kernels.sm100 import config as sm100
from blockscale.model import FORMATS, MACHINES, Launch, estimate, launch, walk
from blockscale.model.kernels import hopper_fp8, tcgen05
from blockscale.model.machine import B200, H200

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ALL = [(arch, format) for arch, known in FORMATS.items() for format in known]
SHAPES = ((64, 512, 256), (1000, 3000, 520), (4096, 4096, 4096), (128, 7168, 16384))


def plain(shape=(4096, 4096, 4096), **fields) -> Launch:
    given = {
        "unit": "fp8",
        "shape": shape,
        "tile": (128, 256),
        "cluster": (1, 1),
        "group": 8,
        "stages": 4,
        "block_k": 128,
        "shared_bytes": 147456,
        "operand_bytes": (1.0, 1.0),
        "out_bytes": 2,
    }
    return Launch(**given | fields)


launches = st.builds(
    plain,
    shape=st.tuples(*[st.integers(1, 3000)] * 2, st.integers(1, 2000)),
    tile=st.sampled_from([(64, 64), (128, 256), (192, 128)]),
    cluster=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    group=st.integers(1, 9),
    operand_bytes=st.sampled_from([(1.0, 1.0), (0.5625, 1.03125)]),
)


# --- the raster -----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
def test_the_raster_is_the_kernels(monkeypatch, group, cluster):
    schedule = pytest.importorskip("blockscale.kernels.common.schedule")
    monkeypatch.setattr(schedule, "Int32", int)
    monkeypatch.setattr(schedule, "least", min)
    one = plain((2500, 3000, 128), cluster=cluster, group=group)
    kernels = schedule.Raster(one.tile, cluster, group)
    count = one.clusters[0] * one.clusters[1]
    first = [kernels.tile(index, one.clusters, 0) for index in range(count)]
    rows, columns = one.cluster_tile
    assert [(row * rows, column * columns) for row, column in one.raster()] == first


@given(launches)
def test_every_tile_is_taken_once(one):
    (down, across), taken = one.clusters, Counter(one.raster())
    assert taken == Counter((i, j) for i in range(down) for j in range(across))
    rows, columns = one.cluster_tile
    assert (down - 1) * rows < one.shape[0] <= down * rows
    assert (across - 1) * columns < one.shape[1] <= across * columns


# --- bytes ----------------------------------------------------------------------------------------


def missed_by_definition(one, machine, chunks=8):
    """What is used again is there unless more than the cache holds was used in between."""
    (m, n, k), (rows, columns) = one.shape, one.cluster_tile
    chunks = min(chunks, one.k_blocks)
    uses, raster = [], one.raster()
    while wave := list(islice(raster, machine.multiprocessors // one.blocks)):
        for chunk in range(chunks):
            uses += dict.fromkeys(("a", i, chunk) for i, _ in wave)
            uses += dict.fromkeys(("b", j, chunk) for _, j in wave)

    def nbytes(use):
        edge, size, each = (m, rows, 0) if use[0] == "a" else (n, columns, 1)
        return (min(edge, (use[1] + 1) * size) - use[1] * size) * k * one.operand_bytes[each]

    missed = 0.0
    for at, use in enumerate(uses):
        earlier = [i for i in range(at) if uses[i] == use]
        between = {use, *uses[earlier[-1] : at]} if earlier else set()
        if not earlier or sum(map(nbytes, between)) / chunks > machine.l2_bytes:
            missed += nbytes(use) / chunks
    return missed


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 1.1])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_memory_is_read_where_the_cache_forgot(share, group):
    one = plain((2000, 2304, 640), cluster=(2, 1), group=group)
    small = replace(H200, multiprocessors=16, l2_bytes=int(share * one.compulsory_bytes))
    assert walk(one, small).missed == pytest.approx(missed_by_definition(one, small))


@given(launches, st.integers(1, 1 << 22), st.integers(1, 8))
def test_bytes_are_conserved(one, size, more):
    traffic = walk(one, replace(H200, l2_bytes=size))
    assert one.compulsory_bytes <= traffic.missed * (1 + 1e-9)
    assert traffic.missed <= traffic.read * (1 + 1e-9)
    assert 0 <= traffic.hit_rate < 1
    assert traffic.output == one.shape[0] * one.shape[1] * one.out_bytes
    larger = walk(one, replace(H200, l2_bytes=more * size))
    assert larger.missed <= traffic.missed * (1 + 1e-9)
    everything = walk(one, replace(H200, l2_bytes=1 << 40))
    assert everything.missed == pytest.approx(one.compulsory_bytes)


@given(launches)
def test_reads_are_those_of_each_tile(one):
    """Counted tile by tile: a cluster loads its rows and its columns once."""
    (m, n, k), (rows, columns), (a, b) = one.shape, one.cluster_tile, one.operand_bytes
    each = (
        min(rows, m - i * rows) * k * a + min(columns, n - j * columns) * k * b
        for i, j in one.raster()
    )
    assert walk(one, replace(H200, load_sharers=1)).read == pytest.approx(sum(each))


def test_neighbours_of_a_tpc_share_loads():
    """Of CTAs that are alone, each two of the order: here two rows of tiles with one of B."""
    one = plain((256, 1024, 640), cluster=(1, 1), group=2)
    (m, n, k), (a, b) = one.shape, one.operand_bytes
    down, across = one.clusters
    assert down == 2
    assert walk(one, H200).read == pytest.approx(k * (m * a * across + n * b))
    assert walk(one, replace(H200, load_sharers=1)).read == pytest.approx(
        k * (m * a * across + 2 * n * b)
    )
    wide = replace(one, cluster=(2, 1))
    assert walk(wide, H200).read == walk(wide, replace(H200, load_sharers=1)).read


def test_what_is_added_to_is_read_as_well():
    one = plain()
    added = walk(replace(one, accumulate=True), H200)
    assert added.output == 2 * walk(one, H200).output


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("size", [16384, 20000])
def test_supergroups_keep_more_in_the_cache(arch, size):
    """Where B does not fit, each line of tiles reads all of it."""
    shape = size, size, 8192
    format = "fp8_block" if arch == "sm_90a" else "mxfp8"
    square, line = (walk(launch(arch, format, shape, group=g), MACHINES[arch]) for g in (8, 1))
    assert line.missed > 2 * square.missed
    assert line.hit_rate < square.hit_rate


# --- counts of the kernels ------------------------------------------------------------------------


@pytest.mark.parametrize("config", sm90.candidates((4096, 4096, 4096), Epilogue(BFLOAT16)), ids=str)
def test_shared_memory_counts_each_wgmma(config):
    """A warpgroup's wgmmas read 64 rows of A and a batch of B; every stage is written once."""
    passes = 0
    for _ in range(0, config.tile[0], 64):
        for _ in range(0, config.tile[1], config.mma_n):
            passes += 64 * ROW + config.mma_n * ROW
    passes += sum(config.tile) * ROW
    scales = hopper_fp8(config, (4096, 4096, 4096)).shared_bytes - passes
    assert 0 < scales < 0.1 * passes


def test_each_warp_reads_two_scales_a_thread_for_eight_columns():
    config = replace(sm90.choose_config((4096,) * 3, Epilogue(BFLOAT16)), stages=2)
    each = replace(config, b_block=(1, 128))
    before, after = (hopper_fp8(one, (4096,) * 3).shared_bytes for one in (config, each))
    warps, (rows, columns) = 4, config.tile
    read = rows // 64 * warps * (columns // 8) * 32 * 2 * 4
    assert read < after - before < 2 * read


@pytest.mark.parametrize("format", FORMATS["sm_100a"])
def test_a_pair_reads_b_once(format):
    shape = 8192, 8192, 8192
    one, two = (launch("sm_100a", format, shape, ctas=each) for each in (1, 2))
    assert one.tile == two.tile
    k, (a_bytes, b_bytes) = shape[2], one.operand_bytes
    columns = two.tile[1]
    alone, together = (walk(each, B200).read for each in (one, two))
    assert alone == k * 8192 * (a_bytes * 8192 / columns + b_bytes * 8192 / 128)
    assert together == k * 8192 * (a_bytes * 8192 / columns + b_bytes * 8192 / 256)
    assert two.shared_bytes < one.shared_bytes


def test_bytes_of_formats():
    shape = 256, 256, 1024
    expected = {
        "mxfp8": (33 / 32, 33 / 32),
        "mxfp8_mxfp4": (33 / 32, 17 / 32),
        "mxfp4": (17 / 32, 17 / 32),
        "nvfp4": (9 / 16, 9 / 16),
    }
    for format, each in expected.items():
        assert launch("sm_100a", format, shape).operand_bytes == each


def test_sums_that_fit_twice_hide_the_epilogue():
    config = sm100.choose_config((8192, 8192, 8192), ("mxfp8", "mxfp8"), Epilogue(BFLOAT16))
    narrow = sm100.fit(replace(config, mma_n=128))
    assert narrow.acc_stages == 2
    assert tcgen05(narrow, (8192,) * 3).exposed == 0
    assert 0 < tcgen05(config, (8192,) * 3).exposed < 1


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "format"), ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_estimate_is_faster_than_its_walls(arch, format, shape):
    machine, one = MACHINES[arch], launch(arch, format, shape)
    found = estimate(one, machine)
    assert found.microseconds > max(found.walls.values())
    assert found.walls[found.wall] == max(found.walls.values())
    peak = machine.multiprocessors * machine.flops[one.unit] * machine.clock
    assert found.microseconds > 1e6 * one.flops / peak
    assert found.microseconds > 1e6 * one.compulsory_bytes / machine.memory_rate
    assert found.tflops == pytest.approx(one.flops / found.microseconds / 1e6)
    assert 0 < found.tensor_share < 1
    assert 0 < found.filled <= 1
    assert found.clock <= machine.clock / 1e9


@pytest.mark.parametrize(("arch", "format"), ALL)
def test_more_work_takes_longer(arch, format):
    for grow in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        shapes = [tuple(1024 * g**i for g in grow) for i in range(4)]
        one = launch(arch, format, shapes[0])
        times = [
            estimate(replace(one, shape=shape), MACHINES[arch]).microseconds for shape in shapes
        ]
        assert all(b > a for a, b in pairwise(times))


@pytest.mark.parametrize(
    ("wall", "slow"),
    [
        ("tensor cores", {"flops": {"fp8": 80}}),
        ("shared memory", {"shared_rate": 1}),
        ("L2 cache", {"l2_rate": 1e11}),
        ("memory", {"memory_rate": 1e10}),
        ("latency", {"latency": (50.0, 150.0)}),
        ("launch", {"launch": 1e5}),
    ],
)
def test_the_wall_is_what_is_slow(wall, slow):
    found = estimate(plain(), replace(H200, **slow))
    assert found.wall == wall
    assert found.microseconds == pytest.approx(found.walls[wall], rel=0.1)


def test_the_clock_is_what_power_allows():
    """Work times the cube of the clock is no more than at full load."""
    for machine in (H200, replace(H200, loaded_clock=1e9)):
        found = estimate(plain((8192, 8192, 8192)), machine)
        busy = found.tensor_share * found.microseconds / (found.microseconds - machine.launch)
        limit = machine.loaded_clock * busy ** (-1 / 3)
        assert 1e9 * found.clock == pytest.approx(min(machine.clock, limit), rel=1e-3)


def test_one_tile_too_many_is_another_turn():
    full = plain((128 * 132, 256, 4096), group=8)
    more = replace(full, shape=(128 * 133, 256, 4096))
    a, b = (estimate(each, H200) for each in (full, more))
    assert a.filled == 1
    assert b.filled == pytest.approx(133 / 264)
    cycles_a, cycles_b = (each.walls["shared memory"] * each.clock for each in (a, b))
    assert cycles_b == pytest.approx(2 * cycles_a)


# --- against measurements -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors():
    """benchmarks/model_error.py, which tells how far the model is off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        import model_error

        yield model_error


@pytest.mark.slow
def test_times_are_near_those_of_an_h200(errors):
    """Below a tenth on average, in the half of the shapes that no constant was fitted to, too."""
    parts = {}
    for point in errors.chooser_points():
        parts.setdefault(point.part, []).append(abs(point.ratio(H200) - 1))
    assert set(parts) == {"fitted", "held out"}
    for part in parts.values():
        assert statistics.mean(part) < 0.1


def test_hit_rates_are_near_those_of_an_h200(errors):
    for row in errors.hit_rates():
        assert abs(row["model"] - row["ncu"]) < 0.05


def test_what_is_written_of_the_model_is_its_own(errors):
    written = json.loads((errors.RESULTS / "model_h200.json").read_text())
    assert written["constants"] == {name: getattr(H200, name) for name in errors.FITTED}
    first = next(errors.chooser_points())
    told = written["launches"][0]
    assert told["estimated"] == round(first.ratio(H200) * first.microseconds, 2)


def test_a_b200_is_not_beyond_its_data_sheet():
    peak = B200.multiprocessors * 1.86e9
    assert peak * B200.flops["fp8"] == pytest.approx(4.5e15, rel=0.01)
    assert peak * B200.flops["fp4"] == pytest.approx(9e15, rel=0.01)
    assert B200.memory_rate < 8e12
    assert 132 * 1.83e9 * H200.flops["fp8"] == pytest.approx(1979e12, rel=0.01)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_shows_what_the_model_says(tmp_path):
    file = tmp_path / "model.json"
    asked = ["model", "--arch", "sm_100a", "--format", "nvfp4,mxfp8", "--group", "1", "--ctas", "1"]
    asked += ["--shapes", "512x512x512,300x200x100", "--json", str(file)]
    result = CliRunner().invoke(bench, asked)
    assert result.exit_code == 0, result.output
    assert "nothing of it has been measured" in result.output
    rows = json.loads(file.read_text())["estimates"]
    assert [(row["format"], row["shape"]) for row in rows] == [
        (name, shape) for name in ("nvfp4", "mxfp8") for shape in ([512] * 3, [300, 200, 100])
    ]
    for row in rows:
        assert (row["group"], row["cluster"]) == (1, [1, 1])
        one = launch("sm_100a", row["format"], tuple(row["shape"]), group=1, ctas=1)
        assert row["microseconds"] == estimate(one, B200).microseconds
        assert f"{row['microseconds']:.1f}" in result.output
        assert row["wall"] in result.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--arch", "sm_80"], "arch: got 'sm_80'; there are models of sm_90a and sm_100a"),
        (["--arch", "sm_100"], "Choose sm_100a"),
        (["--format", "mxfp8"], "format: got 'mxfp8'; choose one of 'fp8_block'"),
        (["--shapes", "12x13"], "shapes: got '12x13'; expected M, N and K like 4096x7168x2048"),
        (["--group", "0"], "group: got 0; expected 1 or more clusters"),
        (["--ctas", "2"], "ctas: got 2 for sm_90a; choose 1 or 2, for sm_100a"),
        (["--arch", "sm_100a", "--ctas", "3"], "ctas: got 3 for sm_100a"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, options, told):
    monkeypatch.setattr(sys, "argv", ["blockscale", "bench", "model", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert told in error


GROUPS = (0, 300, 4096, 1, 8192 - 4397)


@pytest.mark.parametrize(("arch", "format"), [("sm_90a", "fp8_block"), ("sm_100a", "nvfp4")])
@pytest.mark.parametrize("across_groups", [False, True])
def test_groups(arch, format, across_groups):
    """Each tile of each group is taken once, with a matrix of its own."""
    one = launch(arch, format, (8192, 1000, 2048), groups=GROUPS)
    one = replace(one, across_groups=across_groups)
    rows, columns = one.extents
    assert (sum(rows), sum(columns)) == (8192, 5 * 1000)
    across = len(columns) // 5
    heights = [-(-size // one.cluster_tile[0]) for size in GROUPS]
    owners = [group for group, height in enumerate(heights) for _ in range(height)]
    taken = list(one.raster())
    assert len(taken) == len(set(taken)) == len(rows) * across
    assert all(column // across == owners[row] for row, column in taken)
    found = walk(one, MACHINES[arch])
    assert one.compulsory_bytes * 0.99 <= found.missed <= found.read


def test_one_group_is_a_product():
    shape = 8192, 4096, 2048
    one = launch("sm_100a", "mxfp8", shape)
    grouped = replace(launch("sm_100a", "mxfp8", shape, groups=(8192,)), group=one.group)
    assert estimate(grouped, B200).traffic.read == estimate(one, B200).traffic.read


def test_the_cache_has_the_reads_of_groups():
    """As ncu counted them on an H200 where K is long: where it is not, what is stored, which the
    model leaves out, takes some of the cache."""
    path = BENCHMARKS / "results" / "grouped_l2_h200.json"
    for row in json.loads(path.read_text())["launches"]:
        (groups, m, n, k), height = row["shape"], row["supergroup"]
        sizes = tuple(skewed(groups, m) if row["name"] == "skewed" else (m // groups,) * groups)
        one = launch("sm_90a", "fp8_block", (m, n, k), groups=sizes, group=height)
        ratio = walk(one, H200).missed / row["dram_read_bytes"]
        least = 0.55 if k < 4096 else 0.79 if height == 1 else 0.94
        assert least <= ratio <= 1.04, row


def test_bad_counts_are_named():
    with pytest.raises(ValueError, match=r"groups: got \(3,\); expected M = 4 rows in all"):
        replace(plain((4, 8, 8)), groups=(3,))
    with pytest.raises(ValueError, match=r"format .of groups.: got 'bf16'; choose"):
        launch("sm_90a", "bf16", (8, 8, 8), groups=(8,))
    with pytest.raises(ValueError, match=r"shape: got \(0, 1, 1\); expected positive M, N and K"):
        plain((0, 1, 1))
    with pytest.raises(ValueError, match="unit: got 'fp4'; the tensor cores of H200: bf16, fp8"):
        estimate(plain(unit="fp4"), H200)
