"""Weight gradients of groups on Hopper: products of groups along K, beside one dense gradient,
DeepGEMM and torch, and the casts that come before.

    PYTHONPATH=src python3 benchmarks/gpu_wgrad.py FILE.json [--tiles] [--rounds 4]

Microseconds with a cold L2 cache, and TFLOP/s. ``+=`` adds to fp32. DeepGEMM wants sizes that are
multiples of 128; torch's FP8 has a scale a row and a group, which is less exact. ``tiles``: other
tiles than the chosen one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu_grouped import any_size, in_any_order
from gpu_tiles import json_lines
from torch import Tensor

import blockscale as bs
from blockscale.bench.contest import Call, ready
from blockscale.bench.grouped import skewed
from blockscale.bench.peers_grouped import ends_of
from blockscale.bench.timing import Timer
from blockscale.dtypes import BFLOAT16, FLOAT32
from blockscale.kernels.common.compile_all import compile_all
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.grouped_config import k_grouped_candidates, square

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROWS = 32768
WEIGHTS = (4096, 7168), (7168, 2048)  # M, N of a gradient
DENSE = 7168, 4096, 16384  # M, N, K


def columns(x: Tensor, offsets: Tensor | None) -> bs.ScaledTensor:
    given = {"offsets": offsets, "layout": "sm90", "k_major": True, "backend": "kernel"}
    return bs.quantize(x, "fp8_1x128", -2, **given)


def dense() -> dict[str, Call]:
    m, n, k = DENSE
    a, b = (columns(torch.randn(k, width, device="cuda", dtype=BF16), None) for width in (m, n))
    out = torch.zeros(m, n, device="cuda")
    added = {"out": out, "accumulate": True}
    return {
        "dense": partial(bs.gemm, a.mT, b, backend="kernel"),
        "dense +=": partial(bs.gemm, a.mT, b, backend="kernel", **added),
    }


def ours(g: Tensor, x: Tensor, offsets: Tensor) -> Iterator[tuple[str, Call]]:
    a, b = columns(g, offsets), columns(x, offsets)
    out = torch.zeros(len(offsets), g.shape[1], x.shape[1], device="cuda")
    grouped = partial(bs.grouped_gemm, a.mT, b, offsets, backend="kernel")
    yield "bf16", grouped
    yield "+=", partial(grouped, out=out, accumulate=True)
    yield "cast of x", partial(columns, x, offsets)
    yield (
        "cast of x, both axes",
        partial(bs.quantize_both, x, "fp8_1x128", layout="sm90", offsets=offsets, k_major=True),
    )
    yield "copy of as many bytes", copied(3 * x.numel())


def exact(g: Tensor, x: Tensor, offsets: Tensor) -> Iterator[tuple[str, Call]]:
    """Of formats whose operands are written in bf16, to bf16."""
    for name in ("mxfp8", "nvfp4"):
        given = {"offsets": offsets, "k_major": True, "backend": "kernel"}
        a, b = (bs.quantize(each, name, -2, **given) for each in (g, x))
        yield name, partial(bs.grouped_gemm, a.mT, b, offsets, backend="kernel")


def copied(nbytes: int) -> Call:
    half = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(half)
    return lambda: target.copy_(half)


def tiles(g: Tensor, x: Tensor, offsets: Tensor) -> Iterator[tuple[str, Call]]:
    gpu: Any = gpu_of(g.device)
    a, b = columns(g, offsets), columns(x, offsets)
    shape, groups = (g.shape[1], x.shape[1], a.qdata.shape[0]), len(offsets)
    operands = [
        part for q in (a, b) for part in (q.qdata.mT.view(torch.uint8), q.qscale.view(FP32))
    ]
    for name, dtype, added in (("bf16", BFLOAT16, False), ("+=", FLOAT32, True)):
        found = k_grouped_candidates(shape, groups, Epilogue(dtype, accumulate=added), gpu)[:4]
        d = torch.zeros(groups * shape[0], shape[1], device="cuda", dtype=FP32 if added else BF16)
        compile_all(found)
        for config in found:
            chosen = square(config.tile, gpu.multiprocessors)
            heights = (chosen, 1, 4, 16, 64) if config is found[0] else (chosen,)
            for height in heights:
                rest = None, None, offsets, height, gpu.multiprocessors
                call = partial(gpu.load(config), *operands, d, *rest)
                yield f"{name} {config.tile[0]}x{config.tile[1]}, {height}", call


def deep_gemm(g: Tensor, x: Tensor, sizes: Sequence[int]) -> Call:
    """fp32 += of 1x128 by 1x128."""
    _check(sizes)
    library: Any = import_module("deep_gemm")
    data, scales, start = ([], []), ([], []), 0
    for size in sizes:
        for i, each in enumerate((g, x)):
            q = columns(each[start : start + size], None)
            data[i].append(q.qdata.mT.reshape(-1))
            scales[i].append(q.qscale.view(FP32)[:, : each.shape[1]])
        start += size
    sides = [(torch.cat(d), torch.cat(s).mT) for d, s in zip(data, scales, strict=True)]
    d = torch.zeros(len(sizes), g.shape[1], x.shape[1], device="cuda")
    counts = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    return lambda: library.k_grouped_fp8_gemm_nt_contiguous(*sides, d, list(sizes), counts, d)


def row_wise(g: Tensor, x: Tensor, sizes: Sequence[int]) -> Call:
    """torch's FP8, to bf16."""
    _check(sizes)
    ends = ends_of(sizes, x.device)
    (a, a_scale), (b, b_scale) = (_columns_of(each, sizes) for each in (g, x))
    options = {"offs": ends, "out_dtype": BF16, "use_fast_accum": True}
    return lambda: torch._scaled_grouped_mm(a, b.mT, a_scale, b_scale, **options)


def _columns_of(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """FP8 of the transposed matrix, and a scale for each of its rows and groups."""
    parts, scales = [], []
    for part in x.split(list(sizes)):
        scale = part.float().abs().amax(0).clamp(min=1e-12) / 448
        parts.append((part / scale).to(FP8).mT)
        scales.append(scale)
    return torch.cat(parts, 1).contiguous(), torch.cat(scales)


def bf16(g: Tensor, x: Tensor, sizes: Sequence[int]) -> Call:
    _check(sizes)
    ends = ends_of(sizes, x.device)
    return lambda: torch._grouped_mm(g.mT, x, offs=ends)


def _check(sizes: Sequence[int]) -> None:
    """Before the device does: torch wants multiples of 16 bytes."""
    if any(size % 128 for size in sizes):
        raise ValueError("sizes are no multiples of 128")


PEERS = {"DeepGEMM +=": deep_gemm, "torch FP8 row-wise": row_wise, "torch bf16": bf16}


def measured(
    groups: int, kind: str, sizes: Sequence[int], m: int, n: int, timer: Timer, args: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    g, x = (torch.randn(ROWS, width, device="cuda", dtype=BF16) for width in (m, n))
    offsets = ends_of(sizes, x.device)
    calls = {**dense(), **dict(ours(g, x, offsets)), **dict(exact(g, x, offsets))}
    failed = {}
    if args.tiles:
        calls.update(tiles(g, x, offsets))
    for name, prepare in PEERS.items():
        one = ready(partial(prepare, g, x, sizes))
        if isinstance(one, str):
            failed[name] = one
        else:
            calls[name] = one
    took = in_any_order(calls, timer, args.rounds, random.Random(f"{groups} {kind} {m}"))
    flops = dict.fromkeys(took, 2e-6 * m * n * ROWS)
    flops.update(dict.fromkeys(("dense", "dense +="), 2e-6 * DENSE[0] * DENSE[1] * DENSE[2]))
    return {
        "groups": groups,
        "kind": kind,
        "shape": (m, n, ROWS),
        "microseconds": {name: round(each, 1) for name, each in took.items()},
        "teraflops": {
            name: round(flops[name] / each)
            for name, each in took.items()
            if not name.startswith(("cast", "copy"))
        },
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    timer, rows = Timer(), []
    for groups in (8, 32):
        for m, n in WEIGHTS:
            for kind, sizes in (
                ("equal", (ROWS // groups,) * groups),
                ("skewed", skewed(groups, ROWS)),
                ("any size", any_size(groups, ROWS)),
            ):
                rows.append(measured(groups, kind, sizes, m, n, timer, args))
                print(groups, kind, (m, n), rows[-1]["teraflops"], rows[-1]["failed"], flush=True)
                head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
                args.file.write_text(json_lines({**head, "cases": rows}), encoding="utf-8")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
