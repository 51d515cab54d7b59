"""Fit the constants of a product's tilings (``kernels/sm90``) to measured times.

    PYTHONPATH=src python3 benchmarks/fit_tiles.py FILE.json ...

FILEs are of ``gpu_tiles.py``, of one product. Prints the constants, and how good the choice is: the
time of the best tiling that was measured, over that of the one with the least estimate; also of
shapes that were left out of the fit, in four parts.

Least squares of the logarithm of the time, by Levenberg and Marquardt; a time weighs the less, the
longer it is than the shortest of its shape.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
from gpu_tiles import FIELDS

from blockscale.kernels.common.gpu import GPUS, Gpu
from blockscale.kernels.sm90 import bf16_config
from blockscale.kernels.sm90 import config as fp8_config
from blockscale.kernels.sm90.estimate import Costs, Tiling

#: Tilings of a product, and columns of a K block.
PRODUCTS: dict[str, tuple[Sequence[Tiling], int]] = {
    "fp8": (fp8_config.TILINGS[128, 128], fp8_config.BLOCK_K),
    "fp8_1x128": (fp8_config.TILINGS[1, 128], fp8_config.BLOCK_K),
    "bf16": (bf16_config.TILINGS, bf16_config.BLOCK_K),
}
LAUNCH_NS = 5600.0  # what all have in common: it is fitted, too, and not used
PARTS = 4
_MATTERS = 10.0  # a time that is so many percent longer weighs a third
_STEP, _ROUNDS = 1e-4, 40
_LEAST = 1e-3  # of a constant


@dataclass(frozen=True)
class Time:
    shape: tuple[int, int, int]
    gpu: Gpu
    tiling: int
    nanoseconds: float
    best: float  # of its shape


class Run(NamedTuple):
    """What one run of ``gpu_tiles.py`` measured."""

    product: str
    name: str  # of the GPU
    gpu: Gpu
    rows: list[tuple[dict[str, Any], dict[Any, float]]]  # of a shape, and times by FIELDS' values


def read(file: str | Path) -> Run:
    """Read a file of ``gpu_tiles.py``."""
    data = json.loads(Path(file).read_text())
    names = [
        tuple(tuple(v) if isinstance(v, list) else v for v in each.values())
        for each in data["tilings"]
    ]
    rows = [
        (row, {n: t for n, t in zip(names, row["microseconds"], strict=True) if t})
        for row in data["shapes"]
    ]
    gpu = replace(GPUS["sm_90a"], dram_rate=data["dram_rate"])
    return Run(data["product"], data["gpu"], gpu, rows)


def times(files: Sequence[Path]) -> tuple[str, list[Time]]:
    """The product, and the times of its tilings."""
    products, found = set(), []
    for file in files:
        product, _, gpu, rows = read(file)
        products.add(product)
        known = {name(each): i for i, each in enumerate(PRODUCTS[product][0])}
        for row, took in rows:
            best = min(took.values())
            found += [
                Time(tuple(row["shape"]), gpu, known[each], 1e3 * time, 1e3 * best)
                for each, time in took.items()
                if each in known
            ]
    (product,) = products
    return product, found


def name(tiling: Tiling) -> tuple[Any, ...]:
    return tuple(getattr(tiling.config, each) for each in FIELDS)


class Fit:
    """Of the tilings of a product: their constants as a vector of logarithms."""

    def __init__(self, product: str):
        self.tilings, self.block_k = PRODUCTS[product]
        #: All but the CTAs that split K, which is FIELDS' last.
        self.kinds = list(dict.fromkeys(name(each)[:-1] for each in self.tilings))

    def kind(self, tiling: Tiling) -> int:
        return self.kinds.index(name(tiling)[:-1])

    def start(self) -> np.ndarray:
        """Today's constants."""
        of_kinds = {self.kind(each): each for each in self.tilings}
        ordered, costs = [of_kinds[i] for i in range(len(self.kinds))], self.tilings[0].costs
        values = [each.k_block_ns for each in ordered] + [each.tile_ns for each in ordered]
        values += [costs.a, costs.l2_rate, costs.start_ns, costs.split_ns, LAUNCH_NS]
        return np.log(np.maximum(values, _LEAST))

    def constants(self, vector: np.ndarray) -> tuple[list[Tiling], float]:
        values, n = np.exp(vector).tolist(), len(self.kinds)
        blocks, tiles, rest = values[:n], values[n : 2 * n], values[2 * n :]
        found = [
            replace(each, k_block_ns=blocks[i], tile_ns=tiles[i], costs=Costs(*rest[:4]))
            for each in self.tilings
            for i in [self.kind(each)]
        ]
        return found, rest[4]

    def estimates(self, vector: np.ndarray, measured: Sequence[Time]) -> np.ndarray:
        tilings, launch = self.constants(vector)
        return np.array(
            [launch + tilings[t.tiling].nanoseconds(t.shape, self.block_k, t.gpu) for t in measured]
        )

    def fitted(self, measured: Sequence[Time]) -> np.ndarray:
        took = np.array([t.nanoseconds for t in measured])
        best = np.array([t.best for t in measured])
        weight = np.exp(-_MATTERS / 2 * np.minimum(took / best - 1, 1.5))

        def residual(vector: np.ndarray) -> np.ndarray:
            wrong: np.ndarray = weight * np.log(self.estimates(vector, measured) / took)
            return wrong

        vector, damping = self.start(), 1e-2
        here = residual(vector)
        for _ in range(_ROUNDS):
            columns = [
                (residual(vector + _STEP * unit) - here) / _STEP for unit in np.eye(len(vector))
            ]
            slope = np.stack(columns, 1)
            square = slope.T @ slope
            step = np.linalg.solve(
                square + damping * np.diag(np.diag(square) + 1e-6), -slope.T @ here
            )
            there = residual(vector + step)
            if there @ there < here @ here:
                done = 1 - (there @ there) / (here @ here) < 1e-4
                vector, here, damping = vector + step, there, damping / 3
                if done:
                    break
            else:
                damping *= 4
        return vector

    def shares(self, vector: np.ndarray, measured: Sequence[Time]) -> list[float]:
        """The best time over the chosen one's, of each shape."""
        least: dict[Any, tuple[float, float]] = {}
        for time, estimate in zip(measured, self.estimates(vector, measured), strict=True):
            found, where = (
                (estimate, time.best / time.nanoseconds),
                (time.shape, time.gpu.dram_rate),
            )
            least[where] = min(least.get(where, (math.inf, 0.0)), found)
        return [share for _, share in least.values()]


def said(what: str, found: Sequence[float]) -> str:
    return f"{what}: {geometric_mean(found):.4f} of the best, least {min(found):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit the constants of a product's tilings.")
    parser.add_argument("files", nargs="+", type=Path, help="of gpu_tiles.py, of one product")
    product, measured = times(parser.parse_args().files)
    fit = Fit(product)
    shapes = sorted({time.shape for time in measured})
    print(said("today's constants", fit.shares(fit.start(), measured)))
    left_out: list[float] = []
    for part in range(PARTS):
        test = set(shapes[part::PARTS])
        vector = fit.fitted([t for t in measured if t.shape not in test])
        left_out += fit.shares(vector, [t for t in measured if t.shape in test])
    print(said("shapes that were left out", left_out))
    vector = fit.fitted(measured)
    print(said("fitted", fit.shares(vector, measured)))
    tilings, launch = fit.constants(vector)
    for each in tilings:
        print(f"{name(each)}: {each.k_block_ns:.0f}, {each.tile_ns:.0f}")
    print(tilings[0].costs, f"launch {launch:.0f}")


if __name__ == "__main__":
    main()
