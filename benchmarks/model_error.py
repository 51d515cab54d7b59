"""How far the performance model is from measured times, for Hopper's kernels on an H200.

Reads benchmarks/results/chooser_h200.json (all configurations of the FP8 kernel at 40 shapes),
writes model_h200.json. The constants named in ``blockscale.model.machine.FITTED``
were fitted to such times of earlier kernels, which had clusters; ``fitted`` are every other shape,
which a new fit would take, and ``held out`` the rest.
Needs no GPU.

    python benchmarks/model_error.py          the error of the constants as they stand
    python benchmarks/model_error.py --fit    and what a new fit would give: copy it by hand
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockscale.bench.chooser import described
from blockscale.model import Launch, Machine, Traffic, estimate, launch, walk
from blockscale.model.kernels import hopper_fp8
from blockscale.model.machine import FITTED, H200

RESULTS = Path(__file__).resolve().parent / "results"
#: `ncu --section MemoryWorkloadAnalysis` on an H200, caches flushed: L2 Hit Rate, with the tile and
#: the cluster that were chosen then, and clusters down that were taken before the next ones across.
_GROUP = 8
HIT_RATES = (
    ("fp8_block", (4096, 4096, 4096), (128, 256), (2, 1), 0.8196),
    ("fp8_1x128", (4096, 4096, 4096), (128, 256), (2, 1), 0.8172),
    ("fp8_block", (8192, 8192, 8192), (192, 128), (1, 2), 0.7857),
    ("fp8_block", (4096, 7168, 2048), (128, 256), (2, 1), 0.8774),
    ("fp8_block", (16384, 4096, 7168), (192, 128), (1, 2), 0.7875),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured launch."""

    part: str
    config: str
    launch: Launch
    traffic: Traffic
    microseconds: float

    def ratio(self, machine: Machine) -> float:
        """Estimated over measured time."""
        return estimate(self.launch, machine, self.traffic).microseconds / self.microseconds


def chooser_points() -> Iterator[Point]:
    for i, choice in enumerate(_load("chooser_h200.json")["choices"]):
        shape = choice["m"], choice["n"], choice["k"]
        part = "held out" if i % 2 else "fitted"
        for name, took in choice["candidates"].items():
            counts = hopper_fp8(described(name), shape)
            yield Point(part, name, counts, walk(counts, H200), took)


def summary(points: Sequence[Point], machine: Machine) -> dict[str, Any]:
    """Of |estimated / measured - 1|."""
    ratios = [each.ratio(machine) for each in points]
    errors = [abs(ratio - 1) for ratio in ratios]
    worst = points[errors.index(max(errors))]
    return {
        "launches": len(points),
        "mean": statistics.mean(errors),
        "median": statistics.median(errors),
        "bias": statistics.mean(ratios) - 1,
        "worst": max(errors),
        "worst_at": f"{'x'.join(map(str, worst.launch.shape))} {worst.config}",
    }


def fit(points: Sequence[Point], machine: Machine) -> Machine:
    """With constants of least mean |log(estimated / measured)|: a search along each in turn."""

    def loss(candidate: Machine) -> float:
        return statistics.mean(abs(math.log(each.ratio(candidate))) for each in points)

    best, steps = loss(machine), dict.fromkeys(FITTED, 0.08)
    while max(steps.values()) > 0.005:
        for name in FITTED:
            for factor in (1 + steps[name], 1 - steps[name]):
                tried = replace(machine, **{name: getattr(machine, name) * factor})
                if loss(tried) < best:
                    machine, best = tried, loss(tried)
                    break
            else:
                steps[name] /= 2
    return machine


def hit_rates() -> list[dict[str, Any]]:
    return [
        {
            "format": format,
            "shape": shape,
            "ncu": measured,
            "model": walk(
                replace(launch("sm_90a", format, shape, group=_GROUP), tile=tile, cluster=cluster),
                H200,
            ).hit_rate,
        }
        for format, shape, tile, cluster, measured in HIT_RATES
    ]


def _load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def _parts(points: Sequence[Point], key: Callable[[Point], str]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for each in points:
        found.setdefault(key(each), []).append(each)
    return found


def main() -> None:
    points = list(chooser_points())
    constants = {name: getattr(H200, name) for name in FITTED}
    parts = _parts(points, lambda each: each.part)
    by_config = _parts(points, lambda each: each.config)
    result = {
        "machine": H200.name,
        "constants": constants,
        "parts": {name: summary(those, H200) for name, those in parts.items()},
        "configs": {name: summary(those, H200) for name, those in by_config.items()},
        "hit_rates": hit_rates(),
        "launches": [
            {
                "part": each.part,
                "shape": "x".join(map(str, each.launch.shape)),
                "config": each.config,
                "measured": round(each.microseconds, 2),
                "estimated": round(each.ratio(H200) * each.microseconds, 2),
            }
            for each in points
        ],
    }
    if "--fit" in sys.argv[1:]:
        fitted = fit(parts["fitted"], H200)
        print("a new fit:", {name: float(f"{getattr(fitted, name):.4g}") for name in FITTED})
    (RESULTS / "model_h200.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, row in (result["parts"] | result["configs"]).items():
        print(
            f"{name}: {row['launches']} launches, mean {row['mean']:.1%}, median "
            f"{row['median']:.1%}, bias {row['bias']:+.1%}, worst {row['worst']:.1%} "
            f"({row['worst_at']})"
        )
    for row in result["hit_rates"]:
        print(f"{row['format']} {row['shape']}: ncu {row['ncu']:.1%}, model {row['model']:.1%}")


if __name__ == "__main__":
    main()
