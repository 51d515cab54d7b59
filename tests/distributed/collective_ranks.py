"""What each rank does in the tests of collectives of quantized tensors."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from observed import error_of

import blockscale as bs
from blockscale.distributed import all_gather, all_gather_gemm, all_to_all, quantizer, shard_ops
from blockscale.distributed.collectives import all_gather_named, pack
from blockscale.distributed.shards import Shards
from blockscale.nn.operand import Operand
from blockscale.ops.operand_layout import OperandLayout

FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128", "fp8_128x128")
SHAPE = 1024, 512  # of the whole


def gathered(rank: int, ranks: int) -> dict[str, Any]:
    """Whether what ranks quantize and gather is what one quantizes; and bytes of an element."""
    found = {}
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[100:300] *= 1e3
    for format, axis, dim in product(FORMATS, (-1, -2), (0, 1)):
        how: dict[str, Any] = {"axis": axis}
        if format == "nvfp4":
            how["global_scale"] = torch.tensor(0.5)
        want, mine = bs.quantize(x, format, **how), x.chunk(ranks, dim)[rank].contiguous()
        q = bs.quantize(mine, format, **how)
        got = all_gather(q, dim)
        pairs = (got.qdata, want.qdata), (got.qscale, want.qscale)
        equal = all(torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in pairs)
        name = f"{format} {axis} {dim}"
        found[name] = equal and got.shape == want.shape, len(pack(q, "")[0]) / mine.numel()
        if format in ("mxfp8", "nvfp4"):  # whole tiles stay as they are
            tiles = all_gather(bs.quantize(mine, format, layout="tcgen05", **how), dim)
            scale = bs.quantize(x, format, layout="tcgen05", **how).qscale
            equal = torch.equal(*(each.view(torch.uint8) for each in (tiles.qscale, scale)))
            found[f"{name} tiles"] = equal and tiles.layout_name == "tcgen05", 0
    return found


def multiplied(rank: int, ranks: int) -> dict[str, bool]:
    """Whether rows that ranks gather and multiply have the bits of all of them at once."""
    found = {}
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    w = torch.randn(96 + 32 * rank, SHAPE[1], generator=torch.Generator().manual_seed(rank))
    bias = torch.randn(len(w), generator=torch.Generator().manual_seed(rank))
    for left, right in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8_1x128", "fp8_128x128")):
        how: dict[str, Any] = {"global_scale": torch.tensor(0.5)} if left == "nvfp4" else {}
        if left == "fp8_1x128":
            how["layout"] = "sm90"
        b: Any = bs.quantize(w, right, pad=True).mT
        shard = bs.quantize(x.chunk(ranks)[rank].contiguous(), left, **how)
        want = bs.gemm(bs.quantize(x, left, **how), b, bias=bias)
        found[left] = torch.equal(all_gather_gemm(shard, b, bias=bias), want)
    return found


def tiled(rank: int, ranks: int) -> dict[str, bool]:
    """Whether shards of activations have the tiles of the whole, where products read tiles."""
    found = {}
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    layout = OperandLayout("tcgen05")
    with ExitStack() as stack:
        for module in (quantizer, shard_ops):
            stack.enter_context(patch.object(module, "operand_layout", lambda *how: layout))
        for format in ("mxfp8", "nvfp4"):
            how = quantizer.Quantizer(Operand(format, None))
            mine = Shards(x.chunk(ranks)[rank], 0, dist.group.WORLD)
            scale = mine.quantize(how, -1).global_scale
            for axis, got in ((-1, mine.rows(how)), (-2, mine.keep(how).whole())):
                want = bs.quantize(x, format, axis, layout="tcgen05", global_scale=scale)
                pairs = (got.qdata, want.qdata), (got.qscale, want.qscale)
                same = [torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in pairs]
                found[f"{format} {axis}"] = all(same) and got.layout_name == "tcgen05"
    return found


def exchanged(rank: int, ranks: int) -> dict[str, bool]:
    """Whether quantized rows that travel are rows that travel and are quantized then."""
    found = {}
    x = torch.randn(ranks * 8, 256, generator=torch.Generator().manual_seed(rank)) * (1 + rank)
    to = [(3 * rank + r) % 4 for r in range(ranks)]  # rows for each rank; none for some
    x = x[: sum(to)]
    come = [(3 * r + rank) % 4 for r in range(ranks)]
    rows = x.new_empty(sum(come), x.shape[1])
    dist.all_to_all_single(rows, x, come, to)
    for format in ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128"):
        scale = {"global_scale": 0.02} if format == "nvfp4" else {}
        got = all_to_all(bs.quantize(x, format, **scale), come, to)
        want = bs.quantize(rows, format, **scale)
        pairs = (got.qdata, want.qdata), (got.qscale, want.qscale)
        equal = all(torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in pairs)
        found[format] = equal and got.shape == want.shape
    return found


def wrong(rank: int, ranks: int) -> dict[str, str]:
    """What a rank is told."""
    told, last = dict[str, str](), rank == ranks - 1
    x = torch.randn(128, 128)
    cases: dict[str, Any] = {
        "format": (bs.quantize(x, "mxfp8_e5m2" if last else "mxfp8"), 0),
        "axis": (bs.quantize(x, "mxfp8", axis=-2 if last else -1), 0),
        "order": (bs.quantize(x, "mxfp8", axis=-2, k_major=last), 0),
        "block": (bs.quantize(x[:, :48], "mxfp8", pad=True), 1),
        "plain": (x, 0),
        "layout": (bs.quantize(x[:64], "mxfp8", layout="tcgen05"), 0),
    }
    for name, given in cases.items():
        told[name] = error_of(partial(all_gather, *given))
    of = "last" if last else "first"
    told["name"] = error_of(lambda: all_gather_named(bs.quantize(x), None, of))
    q = bs.quantize(x)
    for name, given in {
        "rows": (bs.quantize(x[: 64 if last else 128]), q.mT),
        "inner": (q, bs.quantize(x[:, :64]).mT),
        "high precision": (x.bfloat16(), q.mT),
    }.items():
        told[f"product: {name}"] = error_of(partial(all_gather_gemm, *given))
    told["product: kernel"] = error_of(lambda: all_gather_gemm(q, q.mT, backend="kernel"))
    scale = torch.tensor(1.0 + rank)
    got = all_gather(bs.quantize(x, "nvfp4", global_scale=scale))
    told["global scales"] = str(bool(got.dequantize().isnan().all()))
    return told | wrong_exchanges(rank, ranks)


def wrong_exchanges(rank: int, ranks: int) -> dict[str, str]:
    told, two = dict[str, str](), [2] * ranks
    x = bs.quantize(torch.randn(2 * ranks, 128), "mxfp8" if rank < ranks - 1 else "mxfp8_e5m2")
    columns = bs.quantize(x.dequantize(), axis=-2, pad=True)
    told["exchange: formats"] = error_of(lambda: all_to_all(x, two, two))
    told["exchange: sizes"] = error_of(lambda: all_to_all(x, two, [1] * ranks))
    told["exchange: columns"] = error_of(lambda: all_to_all(columns, two, two))
    scaled = bs.quantize(torch.ones(ranks, 128), "nvfp4", global_scale=1.0 + rank)
    got = all_to_all(scaled, [1] * ranks, [1] * ranks).dequantize()
    told["exchange: global scales"] = str(bool(got.isnan().all()))
    return told


def run(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    return {
        "gathered": gathered(rank, ranks),
        "multiplied": multiplied(rank, ranks) | tiled(rank, ranks),
        "exchanged": exchanged(rank, ranks),
        "wrong": wrong(rank, ranks),
    }
