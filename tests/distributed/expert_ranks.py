"""What each rank does in the tests of experts over ranks.

By hand on GPUs: ``torchrun --nproc-per-node 2 tests/distributed/expert_ranks.py nccl`` says whether
all ranks together have what one has alone.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from observed import error_of
from processes import begin
from torch import Tensor

import blockscale as bs
from blockscale.distributed import MegaMoE
from blockscale.distributed.token_dispatch import dispatch

EXPERTS, HIDDEN, INTERMEDIATE, TOPK, TOKENS = 8, 128, 64, 3, 40
FORMATS = [
    ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("nvfp4", "fp8_1x128"), ("mxfp4", "mxfp8"),
    ("fp8_128x128", "fp8_1x128"),
]  # fmt: skip
#: Tokens of each of four ranks; of fewer ranks the sums.
SHARES = (17, 0, 40, 1)


def weights_of(format: str) -> list[bs.ScaledTensor]:
    """Integers: sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    found = []
    for shape in shapes:
        w = torch.randint(-1, 2, shape, generator=generator).float()
        if format == "nvfp4":  # of each expert its own
            each = [bs.quantize(m, format, global_scale=2.0 ** (i % 3)) for i, m in enumerate(w)]
            found.append(torch.stack(each))
        else:
            found.append(bs.quantize(w, format, pad=True))
    return found


def tokens_of(count: int, *, skewed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights, and experts, some of none."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, (count, HIDDEN), generator=generator).bfloat16()
    experts = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    experts[::7, 1] = -1
    experts[3::11] = EXPERTS
    if skewed:
        experts = torch.tensor([5, -1, -1]).expand(count, -1)
    return x, torch.rand(count, TOPK, generator=generator), experts


def share(rank: int, ranks: int) -> slice:
    per = len(SHARES) // ranks
    ends = [sum(SHARES[: (r + 1) * per]) for r in range(ranks)]
    return slice(ends[rank - 1] if rank else 0, ends[rank])


def module(rank: int, ranks: int, device: torch.device, format: str, **how: Any) -> MegaMoE:
    own = EXPERTS // ranks
    up, down = (w[rank * own : (rank + 1) * own].to(device) for w in weights_of(format))
    return MegaMoE(up, down, **{"tokens": sum(SHARES), "topk": TOPK, **how})


def results(
    rank: int, ranks: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """What a rank's tokens get."""
    mine, found = share(rank, ranks), {}
    for format, activations in FORMATS:
        scales: dict[str, Any] = {}
        if activations == "nvfp4":  # the largest is rank 0's; and of each expert its own
            own = EXPERTS // ranks
            every = 2.0 ** -(torch.arange(EXPERTS) % 3 + 1.0)
            every = every[rank * own : (rank + 1) * own].to(device)
            scales = {"a1_scale": 2.0 ** (-5 - rank), "a2_scale": every}
        moe = module(rank, ranks, device, format, activations=activations, group=group, **scales)
        for skewed in (False, True):
            given = (each[mine].to(device) for each in tokens_of(sum(SHARES), skewed=skewed))
            with torch.no_grad():
                found[f"{format} {activations} {skewed}"] = moe(*given).cpu()
    return found


def wrong(rank: int, ranks: int, device: torch.device) -> dict[str, str]:
    """What a rank is told where one of them, the last one, does something else."""
    last, told = rank == ranks - 1, dict[str, str]()
    cases: dict[str, dict[str, Any]] = {
        "tokens": {"tokens": 100 + last},
        "topk": {"topk": 2 + last},
        "construction": {"topk": 99 if last else TOPK},
    }
    for name, how in cases.items():
        told[name] = error_of(lambda how=how: module(rank, ranks, device, "mxfp8", **how))
    formats = "mxfp4" if last else "mxfp8"
    told["format"] = error_of(lambda: module(rank, ranks, device, formats))
    moe = module(rank, ranks, device, "mxfp8", tokens=4)
    x, weights, experts = (each.to(device) for each in tokens_of(5))
    few = slice(0, 5 if last else 4)
    told["too many"] = error_of(lambda: moe(x[few], weights[few], experts[few]))
    x, weights, experts = x[:2], weights[:2], experts[:2]
    told["experts"] = error_of(lambda: moe(x, weights, experts.float() if last else experts))
    told["strides"] = error_of(lambda: moe(x.mT.contiguous().mT if last else x, weights, experts))
    outside = torch.tensor([[2**32, 1, 2], [-(2**63), 2**31, 0]], device=device)
    told["outside"] = error_of(lambda: moe(x, weights, outside if last else experts))
    every = dist.new_group(list(range(ranks)))
    told["copy"] = error_of(
        lambda: copy.deepcopy(module(rank, ranks, device, "mxfp8", group=every))
    )
    alone = dist.new_group([0])
    told["group"] = error_of(lambda: module(rank, ranks, device, "mxfp8", group=alone, topk=1))
    torch.set_default_dtype(torch.float64)
    empty = slice(0, 0 if last else 2)
    told["empty"] = error_of(lambda: moe(x[empty], weights[empty], experts[empty]))
    torch.set_default_dtype(torch.float32)
    told["after that"] = error_of(lambda: moe(x, weights, experts))
    return told


def run(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """What a rank finds, on a CPU."""
    cpu = torch.device("cpu")
    x, _, experts = (each[share(rank, ranks)] for each in tokens_of(sum(SHARES)))
    rows = dispatch((x,), experts, EXPERTS // ranks).parts[0]
    return {
        "rows": rows,
        "results": results(rank, ranks, cpu),
        "wrong": wrong(rank, ranks, cpu),
    }


if __name__ == "__main__":
    device = begin(sys.argv[1])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    by_rank: list[Any] = [None] * ranks
    dist.all_gather_object(by_rank, results(rank, ranks, device))
    single = dist.new_group([0])
    if rank == 0:
        for name, want in results(0, 1, device, single).items():
            print(name, torch.equal(torch.cat([found[name] for found in by_rank]), want))
    print(rank, wrong(rank, ranks, device))
    dist.destroy_process_group()
