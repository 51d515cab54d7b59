"""The choice of tiles for Hopper's products: of what was measured, and by a profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from blockscale.dtypes import FLOAT32
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import CLUSTERS, GPUS, Gpu
from blockscale.kernels.sm90 import bf16_config
from blockscale.kernels.sm90 import config as fp8_config
from blockscale.kernels.sm90.config import BLOCK_K, TILINGS, candidates, choose_config
from blockscale.kernels.sm90.estimate import Costs, Tiling
from stand_in import chip

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "tiles"
H200, H100 = GPUS["sm_90a"], replace(GPUS["sm_90a"], dram_rate=3352)
SHAPES = [(72, 5120, 4096), (200, 1408, 20480), (1000, 28672, 2048), (4096, 7168, 16384)]


@dataclass(frozen=True)
class Product:
    """Its tilings; what ranks them; and how good the choice is, at least, of what was measured at
    so many shapes: in the geometric mean, and where it is worst."""

    tilings: Sequence[Tiling]
    ranked: Callable[..., list[Any]]
    shapes: int
    mean: float
    least: float


def _of_columns(shape: tuple[int, int, int], gpu: Gpu) -> list[Any]:
    added = Epilogue(FLOAT32, accumulate=True)
    return fp8_config.candidates(shape, added, b_block=(1, 128), gpu=gpu)


PRODUCTS = {
    "fp8": Product(
        TILINGS[128, 128], lambda *at, gpu: candidates(*at, Epilogue(), gpu=gpu), 166, 0.992, 0.93
    ),
    "fp8_1x128": Product(TILINGS[1, 128], _of_columns, 38, 0.99, 0.94),
    "bf16": Product(
        bf16_config.TILINGS,
        lambda *at, gpu: bf16_config.candidates(*at, Epilogue(), gpu=gpu),
        96, 0.987, 0.69,
    ),
}  # fmt: skip


def rows(product: str, files: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Each shape of the files, and the time of what is chosen there now, of those measured then."""
    for file in sorted(MEASURED.glob(f"{product}_{files}")):
        data = json.loads(file.read_text())
        assert data["product"] == product
        gpu = replace(H200, dram_rate=data["dram_rate"])
        for row in data["shapes"]:
            took = dict(zip(map(str, data["tilings"]), row["microseconds"], strict=True))
            names = data["tilings"][0]
            for config in PRODUCTS[product].ranked(tuple(row["shape"]), gpu=gpu):
                tiling = {name: getattr(config, name) for name in names}
                if time := took.get(str(json.loads(json.dumps(tiling)))):
                    yield row, time
                    break


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_chosen_is_nearly_the_best(name: str) -> None:
    """Of some 50 tilings that were measured at shapes drawn at random."""
    product = PRODUCTS[name]
    found = rows(name, "h100_*")
    shares = [min(filter(None, row["microseconds"])) / chosen for row, chosen in found]
    assert len(shares) == product.shapes
    assert geometric_mean(shares) > product.mean
    assert min(shares) > product.least


@pytest.mark.parametrize(
    ("product", "files", "peer", "ratio"),
    [
        ("fp8", "h100_301*", "DeepGEMM", 1.12),  # 65 to 1024 rows
        ("fp8", "h100_302*", "DeepGEMM", 1.02),  # 1024 to 16384, and squares
        ("fp8", "h100_303*", "DeepGEMM", 1.11),  # up to 64
        ("fp8", "h100_310*", "DeepGEMM", 1.02),  # up to 1024 rows, weights of 1 to 8 M elements
        ("fp8", "h200_311*", "DeepGEMM", 1.07),  # 65 to 1024 rows; these had no part in the fit
        ("fp8", "h200_312*", "DeepGEMM", 1.04),  # 1024 to 16384, and squares
        ("fp8", "h200_313*", "DeepGEMM", 1.25),  # up to 64
        ("fp8_1x128", "h100_*", "DeepGEMM", 1.09),
        ("bf16", "h100_*", "bf16", 1.02),
    ],
)
def test_beside_others(product: str, files: str, peer: str, ratio: float) -> None:
    """docs/lab/chooser.md says how much of that was fitted."""
    found = [row["peers"][peer] / chosen for row, chosen in rows(product, files)]
    assert geometric_mean(found) > ratio


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
        for each in TILINGS[128, 128]
        if each.is_legal(*shape[:2], gpu)
    }
    assert legal[tiling(chosen)] == min(legal.values())
    slower = replace(gpu, dram_rate=gpu.dram_rate / 2)
    for each in TILINGS[128, 128]:
        here = each.nanoseconds(shape, BLOCK_K, gpu)
        assert each.nanoseconds(shape, BLOCK_K, slower) > here


@pytest.mark.parametrize("shape", SHAPES)
def test_of_one_multiprocessor(shape: tuple[int, int, int]) -> None:
    """No cluster of two fits."""
    gpu = chip("sm_90a", 1)
    for choose in (fp8_config.choose_config, bf16_config.choose_config):
        assert choose(shape, Epilogue(), gpu=gpu).cluster_size == 1


def tiling(config: Any) -> tuple[Any, ...]:
    return config.tile, config.cluster, config.warpgroups, config.warpgroup_split_k, config.split_k


def test_a_chip_of_its_own() -> None:
    """With a fourth of the multiprocessors, more tiles follow each other, and larger ones win."""
    small = replace(H200, multiprocessors=32)
    assert (
        choose_config((128, 8192, 4096), Epilogue(), gpu=small).tile
        > choose_config((128, 8192, 4096), Epilogue()).tile
    )


FREE = Costs(a=1, l2_rate=float("inf"), start_ns=0, split_ns=0)
SQUARE = replace(
    TILINGS[128, 128][0].config, tile=(128, 128), mma_n=128, stages=5, warpgroup_split_k=False
)


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


def test_l2_alone() -> None:
    """Bytes of rows over the rate of L2, in the last wave of fewer CTAs, too."""
    costs = replace(FREE, a=0.5, l2_rate=64)
    tiling = Tiling(SQUARE, 1e-9, 0, costs)
    fast = replace(H200, dram_rate=float("inf"))
    time = tiling.nanoseconds((128, 134 * 128, 256), BLOCK_K, fast)
    assert time == pytest.approx(2 * 128 * (0.5 * 128 + 128) * (132 + 2) / 64)


def test_every_cluster_is_known() -> None:
    for product in PRODUCTS.values():
        assert {each.config.cluster_size for each in product.tilings} <= set(CLUSTERS)


def test_ctas_take_turns() -> None:
    """Where tiles are many, CTAs have some four each, and no more than four follow each other on a
    multiprocessor."""
    for cluster in ((1, 1), (1, 2)):
        config = replace(SQUARE, cluster=cluster)
        tiles = {66: 1, 132: 1, 132 * 7: 1, 132 * 8: 2, 132 * 15: 3, 132 * 100: 4}
        for count, turns in tiles.items():
            assert config.shared_ctas(128, 128 * count, H200) == turns * 132
        assert config.shared_ctas(256, 128 * 100, replace(H200, multiprocessors=1)) == 4
