"""What L2 and DRAM move for products of grouped rows, by how many tiles down a group are taken
before the next ones across.

    PYTHONPATH=src python3 benchmarks/gpu_grouped_l2.py FILE.json

Runs itself under Nsight Compute (ncu), which holds the clocks: times compare with each other alone.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_grouped import Case, Operands, cases
from gpu_tiles import json_lines

from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.config import Config
from blockscale.kernels.sm90.grouped_config import grouped_candidates

NAMES = "equal", "skewed", "256 of 128"
HEIGHTS = 1, 2, 4, 8, 16, 32, 64
METRICS = {
    "lts__t_sector_hit_rate.pct": "l2_hits_percent",
    "dram__bytes_read.sum": "dram_read_bytes",
    "gpu__time_duration.sum": "nanoseconds",
}


def wide(case: Case, gpu: Any) -> Config:
    """The kernel with tiles of 128 x 256."""
    shape = case.m, case.n, case.k
    found = grouped_candidates(shape, len(case.sizes), Epilogue(), gpu=gpu)
    return next(each for each in found if each.tile == (128, 256))


def launches(gpu: Any) -> Iterator[tuple[Case, Config, int]]:
    for case in cases():
        if case.name in NAMES:
            for height in HEIGHTS:
                yield case, wide(case, gpu), height


def launch(gpu: Any, found: list[tuple[Case, Config, int]]) -> None:
    compile_all(dict.fromkeys(config for _, config, _ in found))
    given, last = None, None
    for case, config, height in found:
        if given is None or case != last:
            given = None  # before there are others
            given, last = Operands(case), case
        given.grouped(config, height, gpu)()
    torch.cuda.synchronize()


def profiled(*command: str) -> list[dict[str, float]]:
    """What ncu measures of each launch of a Python command."""
    ncu = ["ncu", "--csv", "--print-units", "base", "--kernel-name", "regex:Gemmconfig"]
    ncu += ["--metrics", ",".join(METRICS), sys.executable, *command]
    said = subprocess.run(ncu, capture_output=True, text=True, check=True).stdout
    lines = [line for line in said.splitlines() if line.startswith('"')]
    found: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        value = float(row["Metric Value"].replace(",", ""))
        found.setdefault(int(row["ID"]), {})[METRICS[row["Metric Name"]]] = value
    return list(found.values())


def row_of(case: Case, height: int, measured: dict[str, float]) -> dict[str, Any]:
    shape = len(case.sizes), case.m, case.n, case.k
    return {"name": case.name, "shape": shape, "supergroup": height, **measured}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--launch", action="store_true")
    args = parser.parse_args()
    gpu: Any = gpu_of(torch.device("cuda", 0))
    given = list(launches(gpu))
    if args.launch:
        launch(gpu, given)
        return
    rows = [
        row_of(case, height, measured)
        for (case, _, height), measured in zip(
            given, profiled(__file__, str(args.file), "--launch"), strict=True
        )
    ]
    head = {"gpu": torch.cuda.get_device_name(), "tile": (128, 256)}
    args.file.write_text(json_lines({**head, "launches": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
