"""The choice of tiles for FP8 products of many rows: of what was measured, and by a profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import CLUSTERS, GPUS, Gpu
from blockscale.kernels.sm90.config import BLOCK_K, TILINGS, candidates, choose_config
from blockscale.kernels.sm90.estimate import Costs, Tiling
from stand_in import chip

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "tiles"
H200, H100 = GPUS["sm_90a"], replace(GPUS["sm_90a"], dram_rate=3352)
SHAPES = [(72, 5120, 4096), (200, 1408, 20480), (1000, 28672, 2048), (4096, 7168, 16384)]


def rows(files: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Each shape of the files, and the time of what is chosen there now, of those measured then."""
    for file in sorted(MEASURED.glob(files)):
        data = json.loads(file.read_text())
        gpu = replace(H200, dram_rate=data["dram_rate"])
        for row in data["shapes"]:
            took = dict(zip(map(str, data["tilings"]), row["microseconds"], strict=True))
            names = data["tilings"][0]
            for config in candidates(tuple(row["shape"]), Epilogue(), gpu=gpu):
                tiling = {name: getattr(config, name) for name in names}
                if time := took.get(str(json.loads(json.dumps(tiling)))):
                    yield row, time
                    break


@pytest.mark.parametrize(("files", "shapes"), [("h200_*", 368), ("h100_*", 110)])
def test_what_is_chosen_is_nearly_the_best(files: str, shapes: int) -> None:
    """Of 120 tilings that were measured at shapes drawn at random."""
    shares = [min(filter(None, row["microseconds"])) / chosen for row, chosen in rows(files)]
    assert len(shares) == shapes
    assert geometric_mean(shares) > 0.988
    assert min(shares) > 0.89


def test_beside_deep_gemm() -> None:
    """65 to 1024 rows, then 1024 to 16384; docs/lab/chooser.md says how much of that was fitted."""
    ratios: tuple[list[float], list[float]] = [], []
    for row, chosen in rows("h200_20*"):
        ratios[row["shape"][0] > 1024].append(row["peers"]["DeepGEMM"] / chosen)
    few, many = map(geometric_mean, ratios)
    assert few > 1.06
    assert many > 1.025


def chips() -> Iterator[Gpu]:
    """Profiles of other chips: fewer multiprocessors, slower memory."""
    for multiprocessors in (132, 114, 78):
        for rate in (4814, 3352, 2039, 4000):
            yield replace(chip("sm_90a", multiprocessors), dram_rate=rate)


@pytest.mark.parametrize(
    "gpu", [*chips()], ids=lambda gpu: f"{gpu.multiprocessors}, {gpu.dram_rate}"
)
@pytest.mark.parametrize("shape", SHAPES)
def test_of_any_chip(shape: tuple[int, int, int], gpu: Gpu) -> None:
    """What is chosen has the least estimate of those that run; slower memory takes longer."""
    chosen = choose_config(shape, Epilogue(), gpu=gpu)
    assert chosen == candidates(shape, Epilogue(), gpu=gpu)[0]
    legal = {
        tiling(each.config): each.nanoseconds(shape, BLOCK_K, gpu)
        for each in TILINGS
        if each.is_legal(*shape[:2], gpu)
    }
    assert legal[tiling(chosen)] == min(legal.values())
    slower = replace(gpu, dram_rate=gpu.dram_rate / 2)
    for each in TILINGS:
        here = each.nanoseconds(shape, BLOCK_K, gpu)
        assert each.nanoseconds(shape, BLOCK_K, slower) > here


def tiling(config: Any) -> tuple[Any, ...]:
    return config.tile, config.cluster, config.warpgroups, config.warpgroup_split_k, config.split_k


def test_a_chip_of_its_own() -> None:
    """With a fourth of the multiprocessors, more tiles follow each other, and larger ones win."""
    small = replace(H200, multiprocessors=32)
    assert (
        choose_config((128, 8192, 4096), Epilogue(), gpu=small).tile
        > choose_config((128, 8192, 4096), Epilogue()).tile
    )


_NONE = dict.fromkeys(((1, 1), (2, 1), (1, 2)), 0.0)
FREE = Costs(_NONE, _NONE, again=0, l2_rate=1, load_rate=1, start_ns=0, split_ns=0)
SQUARE = replace(TILINGS[0].config, tile=(128, 128), mma_n=128, stages=5, warpgroup_split_k=False)


def test_work_alone() -> None:
    """Waves of tiles, and nothing else, if memory costs nothing."""
    tiling = Tiling(SQUARE, 300, 50, FREE)
    gpu = replace(H200, dram_rate=float("inf"))
    assert tiling.nanoseconds((128, 132 * 128, 1024), BLOCK_K, gpu) == 8 * 300 + 50
    assert tiling.nanoseconds((128, 133 * 128, 1024), BLOCK_K, gpu) == 2 * (8 * 300 + 50)
    assert tiling.nanoseconds((129, 66 * 128, 1024), BLOCK_K, gpu) == 8 * 300 + 50
    assert tiling.nanoseconds((129, 67 * 128, 1024), BLOCK_K, gpu) == 2 * (8 * 300 + 50)


def test_memory_alone() -> None:
    """Bytes over the rate of DRAM, where tiles cost nothing."""
    m, n, k = 128, 8192, 4096
    time = Tiling(SQUARE, 1e-9, 0, FREE).nanoseconds((m, n, k), BLOCK_K, H100)
    assert time == pytest.approx((m * k + n * k + 2 * m * n) / 3352)


def test_every_cluster_is_known() -> None:
    assert {each.config.cluster_size for each in TILINGS} <= set(CLUSTERS)
