"""Few rows of bf16 by quantized weights on Hopper: the chosen kernel, and all that differ from it
in how K is split, how many warpgroups take stages in turn, and rows of A in a tile.

    PYTHONPATH=src python3 benchmarks/gpu_few_rows.py FILE.json

Microseconds with a cold L2 cache, without the kernel that puts A in order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import torch

import blockscale as bs
from blockscale.bench.contest import Call, turns
from blockscale.bench.timing import Timer
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import CLUSTERS, GPUS
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.mixed_config import B_ROWS, BF16, BLOCK_K, Config, choose_config
from blockscale.kernels.sm90.permute_config import PermuteConfig

FORMATS = ("mxfp8", "nvfp4")
ROWS = (32, 64, 128)
COLUMNS = {  # by K
    2048: (576, 1024, 1536, 2112, 3072, 4096, 5120, 8192),
    7168: (576, 1024, 1536, 2112, 3072, 4096, 5120, 8192),
    16384: (1024, 2560, 7168, 10240),
}


def name(config: Config) -> str:
    return (
        f"{config.rows} rows, {config.split_k} x {config.warpgroup_split_k}, {config.stages} stages"
    )


def most_stages(config: Config, rows: int, split: int, parts: int) -> Config | None:
    """The kernel made so, with as many stages as there is room for, three at least."""
    for stages in range(12, 2, -1):
        try:
            return replace(config, rows=rows, split_k=split, warpgroup_split_k=parts, stages=stages)
        except ValueError:
            continue
    return None


def candidates(m: int, n: int, k: int, format: str) -> dict[str, Config]:
    """The chosen one first."""
    chosen = choose_config((m, n, k), format, Epilogue())
    found = {name(chosen): chosen}
    for rows in (m, m // 2) if m == ROWS[-1] else (m,):
        tiles = -(-m // rows) * -(-n // B_ROWS)
        for split in CLUSTERS:
            for parts in (1, 2):
                config = most_stages(chosen, rows, split, parts)
                if config and (split == 1 or tiles <= GPUS["sm_90a"].max_active_clusters(split)):
                    found.setdefault(name(config), config)
    return found


def calls(m: int, n: int, k: int, format: str) -> Iterator[tuple[str, Call]]:
    device = torch.device("cuda")
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    q = bs.quantize(w, format, backend="kernel")
    b, scale = (each.view(torch.uint8) for each in (q.qdata, q.qscale))
    a, d = torch.empty_like(x), torch.empty(m, n, device=device, dtype=torch.bfloat16)
    gpu = gpu_of(x.device)
    assert gpu is not None
    gpu.load(PermuteConfig(BF16, BLOCK_K))(x, None, a)
    for label, config in candidates(m, n, k, format).items():
        run = gpu.load(config)
        yield label, partial(run, a, None, b, scale, d, None, None, gpu.multiprocessors)
    yield "torch, bf16", lambda: x @ w.mT


def main(path: str) -> None:
    shapes = [(m, n, k) for k, some in COLUMNS.items() for n in some for m in ROWS]
    cases = [(*shape, format) for format in FORMATS for shape in shapes]
    compile_all(config for case in cases for config in candidates(*case).values())
    timer, rows, ratios = Timer(), [], []
    for m, n, k, format in cases:
        us: dict[str, float] = {}
        for label, took in turns(dict(calls(m, n, k, format)), timer, 15).items():
            if isinstance(took, str):
                sys.exit(f"{m} x {n} x {k}, {format}, {label}: {took}")
            us[label] = took
        chosen, *others, _ = us
        ratios.append(min(us[label] for label in (chosen, *others)) / us[chosen])
        rows.append({"m": m, "n": n, "k": k, "format": format, "chosen": chosen, "us": us})
        print(f"{m} x {n} x {k}, {format}: {chosen} {us[chosen]:.1f} us, of best {ratios[-1]:.3f}")
    mean = geometric_mean(ratios)
    print(f"the mean of {len(ratios)}: {mean:.4f}, the least {min(ratios):.3f}")
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "products": rows}
    Path(path).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
