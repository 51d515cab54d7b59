"""Tiles of gradients of experts' weights on Hopper, of fp8_1x128 to bf16: stages of operands beside
room to put the output together.

    PYTHONPATH=src python3 benchmarks/gpu_wgrad_tiles.py FILE.json

Microseconds with a cold L2 cache, of groups of any size; every kernel has the bits of the chosen
one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import blockscale as bs
from blockscale.bench.moe_shapes import SHAPES
from blockscale.bench.timing import Timer
from blockscale.dtypes import BFLOAT16
from blockscale.gemm_launch import forget_launches
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.sm90 import grouped_plan
from blockscale.kernels.sm90.config import Config

COLUMNS = {256: 128}  # of a wgmma, where they are not those of the tile
THREE, TALL = {"warpgroups": 3, "unroll": 2}, {"unroll": 1}
#: Tile, stages, boxes that a warpgroup stores at once, and other fields.
TILES: tuple[tuple[tuple[int, int], int, int, dict[str, Any]], ...] = (
    ((128, 128), 6, 1, {}),
    ((128, 128), 5, 2, {}),
    ((128, 160), 5, 1, {}),
    ((128, 160), 4, 5, {}),
    ((128, 192), 5, 1, {}),
    ((128, 192), 4, 3, {}),
    ((128, 256), 4, 1, {}),
    ((128, 256), 3, 2, {}),
    ((128, 256), 3, 4, {}),
    ((192, 128), 4, 1, THREE),
    ((192, 128), 4, 2, THREE),
    ((256, 128), 4, 1, TALL),
    ((256, 128), 3, 4, TALL),
    ((256, 128), 3, 4, {**TALL, "cluster": (2, 1)}),
    ((256, 128), 3, 4, {**TALL, "cluster": (1, 2)}),
)


def configurations() -> list[tuple[dict[str, Any], Config]]:
    """Each with the fields in which it differs from the others."""
    same = {"out_dtype": BFLOAT16, "b_block": (1, 128), "grouping": "k", "cluster": (1, 1)}
    found = []
    for tile, stages, boxes, more in TILES:
        fields = {"tile": tile, "stages": stages, "epilogue_stages": boxes, **more}
        mma_n = COLUMNS.get(tile[1], tile[1])
        found.append((fields, Config(mma_n=mma_n, **same | fields)))
    return found


def sizes() -> dict[str, tuple[int, int, int, int]]:
    """Groups, rows of all, and the sides of a gradient."""
    found = {}
    for model, (hidden, inner, experts, top_k, tokens) in SHAPES.items():
        found[f"{model}, up"] = experts, tokens * top_k, 2 * inner, hidden
        found[f"{model}, down"] = experts, tokens * top_k, hidden, inner
    return found | {"32 groups": (32, 32768, 4096, 7168)}


def measured(groups: int, rows: int, m: int, n: int, timer: Timer) -> dict[str, Any]:
    counts = torch.bincount(torch.randint(groups, (rows,)), minlength=groups)
    offsets = counts.cumsum(0).int().cuda()
    how: Any = {"offsets": offsets, "k_major": True, "layout": "sm90", "axis": -2}
    a, b = (
        bs.quantize(torch.randn(rows, side, device="cuda").bfloat16(), "fp8_1x128", **how)
        for side in (m, n)
    )

    def run() -> torch.Tensor:
        return bs.grouped_gemm(a.mT, b, offsets, torch.bfloat16, backend="kernel")

    def timed() -> float:
        return round(timer.microseconds(run, 6), 1)

    forget_launches()
    grouped_plan.plan_k_grouped.cache_clear()
    want, chosen, tiles = run(), timed(), []
    for fields, config in configurations():
        if config.tile[0] * config.cluster[0] > m:
            continue
        with patch.object(grouped_plan, "k_grouped_candidates", lambda *_, c=config: [c]):
            grouped_plan.plan_k_grouped.cache_clear()
            forget_launches()
            assert torch.equal(run(), want), fields
            tiles.append({**fields, "microseconds": timed()})
    size = {"groups": groups, "rows": rows, "m": m, "n": n}
    return {**size, "chosen": chosen, "tiles": tiles}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    torch.manual_seed(0)
    compile_all(config for _, config in configurations())
    timer, found = Timer(), []
    head = json.dumps({"device": torch.cuda.get_device_name()})[:-1]
    for name, size in sizes().items():
        found.append({"what": name, **measured(*size, timer)})
        lines = ",\n".join(map(json.dumps, found))
        file.write_text(f'{head}, "products": [\n{lines}\n]}}\n')
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
