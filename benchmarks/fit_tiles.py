"""Fit the constants of ``kernels/sm90/estimate.py`` and ``config.TILINGS`` to measured times.

    PYTHONPATH=src python3 benchmarks/fit_tiles.py FILE.json ...

FILEs are of ``gpu_tiles.py``. Prints the constants, and how good the choice is: the time of the
best tiling that was measured, over that of the one with the least estimate; also of shapes that
were left out of the fit, in four parts.

Least squares of the logarithm of the time, by Levenberg and Marquardt; a time weighs the less, the
longer it is than the shortest of its shape.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from gpu_tiles import FIELDS

from blockscale.kernels.common.gpu import GPUS, Gpu
from blockscale.kernels.sm90.config import BLOCK_K, TILINGS
from blockscale.kernels.sm90.estimate import COSTS, Costs, Tiling

LAUNCH_NS = 5600.0  # what all have in common: it is fitted, too, and not used
PARTS = 4
_MATTERS = 10.0  # a time that is so many percent longer weighs a third
_STEP, _ROUNDS = 1e-4, 40


@dataclass(frozen=True)
class Time:
    shape: tuple[int, int, int]
    gpu: Gpu
    tiling: int  # of TILINGS
    nanoseconds: float
    best: float  # of its shape


def times(files: Sequence[str]) -> list[Time]:
    """Of tilings in TILINGS."""
    known = {tuple(getattr(t.config, name) for name in FIELDS): i for i, t in enumerate(TILINGS)}
    found = []
    for file in files:
        data = json.loads(Path(file).read_text())
        gpu = replace(GPUS["sm_90a"], dram_rate=data["dram_rate"])
        names = [
            tuple(tuple(v) if isinstance(v, list) else v for v in each.values())
            for each in data["tilings"]
        ]
        for row in data["shapes"]:
            took = dict(zip(names, row["microseconds"], strict=True))
            best = min(filter(None, took.values()))
            found += [
                Time(tuple(row["shape"]), gpu, known[name], 1e3 * time, 1e3 * best)
                for name, time in took.items()
                if time and name in known
            ]
    return found


# --- the constants as a vector --------------------------------------------------------------------

KINDS = list(dict.fromkeys((t.config.tile, t.config.warpgroups) for t in TILINGS))


def kind(tiling: Tiling) -> int:
    return KINDS.index((tiling.config.tile, tiling.config.warpgroups))


def start() -> np.ndarray:
    """Logarithms of today's constants."""
    of_kinds = {kind(each): each for each in TILINGS}
    values = [of_kinds[i].k_block_ns for i in range(len(KINDS))]
    values += [of_kinds[i].tile_ns for i in range(len(KINDS))]
    values += [*COSTS.a.values(), *COSTS.b.values(), COSTS.again, COSTS.l2_rate, COSTS.load_rate]
    return np.log([*values, COSTS.start_ns, COSTS.split_ns, LAUNCH_NS])


def constants(vector: np.ndarray) -> tuple[list[Tiling], Costs, float]:
    values = np.exp(vector).tolist()
    n = len(KINDS)
    blocks, tiles, rest = values[:n], values[n : 2 * n], values[2 * n :]
    costs = Costs(
        dict(zip(COSTS.a, rest[:3], strict=True)), dict(zip(COSTS.b, rest[3:6], strict=True)),
        *rest[6:11],
    )  # fmt: skip
    tilings = [
        replace(each, k_block_ns=blocks[kind(each)], tile_ns=tiles[kind(each)], costs=costs)
        for each in TILINGS
    ]
    return tilings, costs, rest[11]


def estimates(vector: np.ndarray, measured: Sequence[Time]) -> np.ndarray:
    tilings, _, launch = constants(vector)
    return np.array(
        [launch + tilings[t.tiling].nanoseconds(t.shape, BLOCK_K, t.gpu) for t in measured]
    )


def fitted(measured: Sequence[Time]) -> np.ndarray:
    took = np.array([t.nanoseconds for t in measured])
    best = np.array([t.best for t in measured])
    weight = np.exp(-_MATTERS / 2 * np.minimum(took / best - 1, 1.5))

    def residual(vector: np.ndarray) -> np.ndarray:
        wrong: np.ndarray = weight * np.log(estimates(vector, measured) / took)
        return wrong

    vector, damping = start(), 1e-2
    here = residual(vector)
    for _ in range(_ROUNDS):
        columns = [(residual(vector + _STEP * unit) - here) / _STEP for unit in np.eye(len(vector))]
        slope = np.stack(columns, 1)
        square = slope.T @ slope
        step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-6), -slope.T @ here)
        there = residual(vector + step)
        if there @ there < here @ here:
            done = 1 - (there @ there) / (here @ here) < 1e-4
            vector, here, damping = vector + step, there, damping / 3
            if done:
                break
        else:
            damping *= 4
    return vector


# --- how good it is -------------------------------------------------------------------------------


def shares(vector: np.ndarray, measured: Sequence[Time]) -> list[float]:
    """The best time over the chosen one's, of each shape."""
    least: dict[Any, tuple[float, float]] = {}
    for time, estimate in zip(measured, estimates(vector, measured), strict=True):
        found, where = (estimate, time.best / time.nanoseconds), (time.shape, time.gpu.dram_rate)
        least[where] = min(least.get(where, (math.inf, 0.0)), found)
    return [share for _, share in least.values()]


def said(what: str, found: Sequence[float]) -> str:
    return f"{what}: {geometric_mean(found):.4f} of the best, least {min(found):.3f}"


def main(*files: str) -> None:
    measured = times(files)
    shapes = sorted({time.shape for time in measured})
    print(said("today's constants", shares(start(), measured)))
    left_out: list[float] = []
    for part in range(PARTS):
        test = set(shapes[part::PARTS])
        vector = fitted([t for t in measured if t.shape not in test])
        left_out += shares(vector, [t for t in measured if t.shape in test])
    print(said("shapes that were left out", left_out))
    vector = fitted(measured)
    print(said("fitted", shares(vector, measured)))
    tilings, costs, launch = constants(vector)
    for each in {kind(t): t for t in tilings}.values():
        config = each.config
        print(f"{config.tile}, {config.warpgroups}: {each.k_block_ns:.0f}, {each.tile_ns:.0f}")
    print(costs, f"launch {launch:.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
