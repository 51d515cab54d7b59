# mypy: ignore-errors
"""What L2 and DRAM move for products of grouped rows, and how long it takes, by the order of tiles:
supergroups in each group, none, and one raster over all groups.

    PYTHONPATH=src python3 benchmarks/gpu_grouped_raster.py FILE.json

Runs itself under Nsight Compute (ncu), as ``gpu_grouped_l2.py``, once with another search for tiles
in the kernels, whose results are compared with the others' first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import cutlass
import torch
from cutlass import Int32, cute
from gpu_grouped import Operands, cases
from gpu_grouped_l2 import NAMES, launch, profiled, row_of, wide
from gpu_tiles import json_lines

from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.common.schedule import Raster
from blockscale.kernels.sm90.grouped_config import supergroup
from blockscale.kernels.sm90.grouped_scheduler import TileFinder


@cute.jit
def find_across(self):
    """As TileFinder, of bands that go on in the next group."""
    tiles = self.tiles
    start, step = tiles.first()
    down = tiles.count // tiles.across
    for index in range(start, tiles.count, step):
        raster = Raster(tiles.shape, tiles.cluster, tiles.supergroup)
        row, column = raster.tile(index, (down, tiles.across), Int32(0))
        tile = row // tiles.shape[0]
        chunk, begin, end, sums = tiles.begin()
        chunk, begin, end, sums = tiles.seek(chunk, begin, end, sums, tile)
        group, first, last, ends = tiles.owner(chunk, begin, end, sums, tile)
        before = ends[0] - cute.ceil_div(last - first, tiles.shape[0])
        reach = cutlass.max(last - first - tiles.shape[0], Int32(0))
        own = first + cutlass.min((tile - before) * tiles.shape[0], reach)
        tiles.ring.write(tiles.turn(index), (own, column, last, group))


def launches(gpu, across):
    for case in cases():
        if case.name in NAMES:
            config = wide(case, gpu)
            band = supergroup(config.tile, case.k, gpu.multiprocessors)
            for height in (band,) if across else (band, 1):
                yield case, config, height


def check(gpu, across) -> None:
    """The product of skewed groups is what it is without the other search, which leaves a file."""
    case = next(each for each in cases() if each.name == "skewed")
    given = Operands(case)
    _, config, height = next(each for each in launches(gpu, True) if each[0] == case)
    given.grouped(config, height, gpu)()
    name = Path(tempfile.gettempdir()) / "blockscale_raster.pt"
    if across:
        assert torch.equal(torch.load(name), given.d.cpu())
    else:
        torch.save(given.d.cpu(), name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--launch", choices=("within", "across"))
    args = parser.parse_args()
    gpu = gpu_of(torch.device("cuda", 0))
    if args.launch:
        if args.launch == "across":
            TileFinder.__call__ = find_across
        launch(gpu, list(launches(gpu, args.launch == "across")))
        check(gpu, args.launch == "across")
        return
    rows = []
    for order in ("within", "across"):
        # kernels are looked up by their configuration, which is the same
        os.environ["BLOCKSCALE_CACHE_DIR"] = tempfile.mkdtemp()
        given = list(launches(gpu, order == "across"))
        measured = profiled(__file__, str(args.file), "--launch", order)[: len(given)]
        for (case, _, height), found in zip(given, measured, strict=True):
            rows.append({"order": order, **row_of(case, height, found)})
            print(rows[-1])
    head = {"gpu": torch.cuda.get_device_name(), "tile": (128, 256)}
    args.file.write_text(json_lines({**head, "launches": rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
