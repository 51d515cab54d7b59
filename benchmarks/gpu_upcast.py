"""FP8 by MXFP4 weights on Hopper, one product or groups of rows, beside bf16 and FP8 weights.

    PYTHONPATH=src python3 benchmarks/gpu_upcast.py FILE.json [--rounds 4] [--shapes 8] [--tiles]

Microseconds with a cold L2 cache, and TFLOP/s. Shapes are named, and drawn at random. "wide" are
weights whose scales span so much that each K block is multiplied in two passes. ``--tiles`` times
each tile, too, and the kernel that lists K blocks.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_grouped import ROWS, WEIGHTS, any_size, in_any_order
from gpu_grouped_exact import normal
from gpu_tiles import json_lines

import blockscale as bs
from blockscale.bench.contest import Call
from blockscale.bench.grouped import skewed
from blockscale.bench.timing import Timer
from blockscale.dtypes import BFLOAT16
from blockscale.kernels.common.calls import Operand, multiply
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.mixed_plan import plan_mixed
from blockscale.kernels.sm90.upcast_config import upcast_candidates
from blockscale.kernels.sm90.upcast_plan import plan_upcast, upcast_of

BF16 = torch.bfloat16
NAMED = (
    (4096, 4096, 4096), (8192, 4096, 7168), (4096, 7168, 2048), (2048, 14336, 4096),
    (1024, 8192, 8192), (768, 4096, 7168), (512, 4096, 7168), (384, 7168, 2048), (256, 4096, 7168),
    (128, 7168, 2048), (64, 4096, 7168), (16, 4096, 7168),
)  # fmt: skip
_NEAR = 3e-3  # an error that is that of rounding to bf16


def wide(w: torch.Tensor) -> torch.Tensor:
    """Every other 32 elements of a row 2^20 times as small."""
    return w * torch.tensor([1, 2.0**-20], device="cuda", dtype=BF16).repeat_interleave(32).repeat(
        w.shape[-1] // 64
    )


def drawn(count: int) -> Iterator[tuple[int, int, int]]:
    rng = random.Random(4)
    for _ in range(count):
        m = round(2 ** rng.uniform(7, 13))
        n, k = (round(2 ** rng.uniform(10, 14) / 128) * 128 for _ in range(2))
        yield m, n, k


def dense(x: torch.Tensor, w: torch.Tensor, tiles: bool) -> Iterator[tuple[str, Call]]:
    a = bs.quantize(x, "fp8_1x128", layout="sm90")
    named = (w, "mxfp4"), (w, "fp8_128x128"), (wide(w), "mxfp4"), (w, "nvfp4")
    q, q8, qw, qn = (bs.quantize(*each) for each in named)
    left, right = (Operand(each.qdata, each.qscale, each.format.name) for each in (a, q))
    yield "torch bf16", partial(torch.mm, x, w.mT)
    yield "fp8_128x128", partial(bs.gemm, a, q8.mT, backend="kernel")
    yield "mxfp4", partial(multiply, plan_upcast, left, right)
    yield (
        "mxfp4, wide",
        partial(multiply, plan_upcast, left, right._replace(data=qw.qdata, scale=qw.qscale)),
    )
    yield "mxfp4, widened", partial(multiply, plan_mixed, left, right)
    yield "nvfp4", partial(bs.gemm, a, qn.mT, backend="kernel")
    yield "bf16 x mxfp4", partial(bs.gemm, x, q.mT, backend="kernel")
    for name, each in (("mxfp4", q), ("mxfp4, wide", qw), ("nvfp4", qn)):
        want = a.dequantize(torch.float32) @ each.dequantize(torch.float32).T
        got = bs.gemm(a, each.mT, backend="kernel")
        error = (got.float() - want).norm() / want.norm()
        assert error < _NEAR, (name, x.shape, w.shape, float(error))
    if tiles:
        gpu = gpu_of(x.device)
        shape = x.shape[0], *w.shape
        for config in upcast_candidates(shape, Epilogue(BFLOAT16, False, None, 0, True)):
            run = upcast_of(config, *w.shape, 1, gpu, x.device, True)
            out = torch.empty(x.shape[0], w.shape[0], device="cuda", dtype=BF16)
            given = (
                a.qdata.view(torch.uint8),
                a.qscale,
                q.qdata.view(torch.uint8),
                q.qscale.view(torch.uint8),
            )
            yield (
                f"tile {config.tile[0]}",
                partial(run, *given, out, None, None, None, None, gpu.multiprocessors),
            )
            lists = torch.empty_like(run.tiles), torch.empty_like(run.entries)
            run.list_k_blocks(*given[2:], w.shape[0], *lists)
            yield (
                f"tile {config.tile[0]}, listed",
                partial(
                    run.multiply,
                    *given[:3],
                    *lists,
                    out,
                    None,
                    None,
                    None,
                    None,
                    gpu.multiprocessors,
                ),
            )
        yield "list", partial(run.list_k_blocks, *given[2:], w.shape[0], *lists)


def groups_of(
    x: torch.Tensor, w: torch.Tensor, sizes: tuple[int, ...]
) -> Iterator[tuple[str, Call]]:
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    a = bs.quantize(x, "fp8_1x128", layout="sm90")
    compact = a.to_layout("compact")
    yield "torch bf16", partial(torch._grouped_mm, x, w.mT, ends)
    for format in ("fp8_128x128", "mxfp4", "nvfp4"):
        q = bs.quantize(w, format)
        yield format, partial(bs.grouped_gemm, a, q.mT, ends, backend="kernel")
        got = bs.grouped_gemm(a, q.mT, ends, backend="kernel")
        begin = 0
        for i, end in enumerate(ends.tolist()):
            if i % 7 == 0 and end > begin:
                want = (
                    compact[begin:end].dequantize(torch.float32) @ q[i].dequantize(torch.float32).T
                )
                error = (got[begin:end].float() - want).norm() / want.norm()
                assert error < _NEAR, (format, sizes, float(error))
            begin = end


def measured(timer: Timer, rounds: int, shapes: int, tiles: bool) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    for m, n, k in (*NAMED, *drawn(shapes)):
        calls = dict(dense(normal(m, k), normal(n, k), tiles))
        took = in_any_order(calls, timer, rounds, random.Random(repr((m, n, k))))
        yield {"shape": (m, n, k), "microseconds": {x: round(t, 1) for x, t in took.items()},
               "tflops": {x: round(2e-6 * m * n * k / t) for x, t in took.items()}}  # fmt: skip
        del calls
    for groups in (8, 32):
        for n, k in WEIGHTS:
            w, x = normal(groups, n, k), normal(ROWS, k)
            for name, sizes in (("equal", (ROWS // groups,) * groups),
                                ("skewed", skewed(groups, ROWS)),
                                ("any size", any_size(groups, ROWS))):  # fmt: skip
                calls = dict(groups_of(x, w, sizes))
                took = in_any_order(calls, timer, rounds, random.Random(name))
                flops = 2e-6 * ROWS * n * k
                yield {"shape": (groups, ROWS, n, k), "sizes": name,
                       "microseconds": {x: round(t, 1) for x, t in took.items()},
                       "tflops": {x: round(flops / t) for x, t in took.items()}}  # fmt: skip
                del calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    rows = []
    for row in measured(Timer(), args.rounds, args.shapes, args.tiles):
        rows.append(row)
        print(row["shape"], row.get("sizes", ""), row["tflops"], flush=True)
    device = torch.cuda.get_device_name()
    result = {"device": device, "rounds": args.rounds, "products": rows}
    args.file.write_text(json_lines(result))


if __name__ == "__main__":
    main()
