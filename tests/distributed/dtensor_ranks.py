"""What each rank does in the tests of DTensors whose shards are ScaledTensors.

On GPUs: ``torchrun --nproc-per-node 2 tests/distributed/dtensor_ranks.py nccl``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from processes import begin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import blockscale as bs
import blockscale.distributed

FORMATS = "mxfp8", "nvfp4", "fp8_1x128", "fp8_128x128", "mxfp4"
FOUR_BITS = "nvfp4", "mxfp4"
#: Its DTensors gather nothing whose columns are contiguous, as those of four bits are.
OLD = torch.__version__.startswith("2.11.")
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def same(a: bs.ScaledTensor, b: bs.ScaledTensor) -> bool:
    """Whether all bytes, and what they mean, are."""
    pairs = [(a.qdata, b.qdata), (a.qscale, b.qscale)]
    if a.global_scale is not None:
        pairs.append((a.global_scale, b.global_scale))
    return (a.shape, a._meta()) == (b.shape, b._meta()) and all(
        torch.equal(*(x.flatten().view(torch.uint8) for x in pair)) for pair in pairs
    )


def results(device: torch.device) -> dict[str, bool]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, found = init_device_mesh(device.type, (ranks,)), {}
    torch.manual_seed(0)
    w = torch.randn(128 * ranks, 256 * ranks, device=device)
    for format in FORMATS:
        for axis in (-1, -2):
            if axis == -2 and format in FOUR_BITS and OLD:
                continue
            q = bs.quantize(w, format, axis)
            local = {
                "rows": q.chunk(ranks, 0)[rank],
                "columns": q.chunk(ranks, 1)[rank],
                "whole": q,
            }
            name = f"{format} {axis}"
            for before, given in PLACEMENTS.items():
                for after, wanted in PLACEMENTS.items():
                    made = DTensor.from_local(local[before], mesh, (given,), run_check=False)
                    got = made.redistribute(placements=(wanted,)).to_local()
                    found[f"{name}: {before} to {after}"] = same(got, local[after])
                # of the first rank; the others have something else
                mine = q if rank == 0 else bs.quantize(2 * w, format, axis)
                got = distribute_tensor(mine, mesh, (given,)).to_local()
                found[f"{name}: {before} of the first rank"] = same(got, local[before])
            op = torch.ops._dtensor.shard_dim_alltoall  # which gloo's redistribute leaves out
            got = op(local["rows"].contiguous(), 0, 1, mesh.get_group().group_name)
            found[f"{name}: exchanged"] = same(got, local["columns"])
    summed = DTensor.from_local(q, mesh, (Partial(),), run_check=False)
    try:
        summed.redistribute(placements=(Replicate(),))
    except ValueError as error:
        found["sums are refused"] = "none adds up" in str(error)
    return found


def task(rank: int, ranks: int, folder: Path) -> dict[str, bool]:
    return results(torch.device("cpu"))


if __name__ == "__main__":
    found = results(begin(sys.argv[1]))
    if dist.get_rank() == 0:
        print("without columns of four bits" if OLD else "all", end=": ")
        print(f"{sum(found.values())} of {len(found)}", [x for x, ok in found.items() if not ok])
    dist.destroy_process_group()
