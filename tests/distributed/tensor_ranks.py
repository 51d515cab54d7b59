"""What each rank does in the tests of tensor parallelism: a block by itself, and over ranks.

On GPUs: ``torchrun --nproc-per-node 2 tests/distributed/tensor_ranks.py nccl``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import begin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import blockscale as bs
from blockscale.distributed import ColwiseParallel, PrepareModuleInput, RowwiseParallel

WIDE, INNER, BATCH, LENGTH = 256, 512, 2, 256
RECIPES = "mxfp8", "fp8_block", "nvfp4"
#: Whether activations are sharded along the sequence between layers; what else.
CASES = {
    f"{recipe} {case}": (recipe, case)
    for recipe in RECIPES
    for case in ("replicated", "sequence", "cut", "shared")
}


class Perceptron(nn.Module):
    """Two layers share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDE, INNER), nn.Linear(WIDE, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDE), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def make_block(recipe: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return bs.convert(Block(), bs.Recipe(recipe)).to(device, torch.bfloat16)


def parallel(block: nn.Module, case: str, mesh: Any) -> nn.Module:
    rows = Replicate() if case == "replicated" else Shard(1)
    plan: dict[str, Any] = {
        "mlp.gate_proj": ColwiseParallel(input_layouts=rows),
        "mlp.up_proj": ColwiseParallel(input_layouts=rows),
        "mlp.down_proj": RowwiseParallel(output_layouts=rows),
    }
    if case != "replicated":
        plan["norm"] = SequenceParallel(use_local_output=True)
    if case == "shared":
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return parallelize_module(block, mesh, plan)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(block: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = block(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(whole(p.grad) for p in block.parameters())]


def compared(device: torch.device) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Outputs and gradients of each case: alone, and over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    found = {}
    for name, (recipe, case) in CASES.items():
        length = LENGTH + 2 * ranks if case == "cut" else LENGTH * ranks
        torch.manual_seed(1)
        x, grad = (torch.randn(BATCH, length, WIDE).to(device, torch.bfloat16) for _ in range(2))
        alone = step(make_block(recipe, device), x, grad)
        block = parallel(make_block(recipe, device), case, mesh)
        mine = [x, grad]
        if case != "replicated":
            mine = [each.chunk(ranks, 1)[rank].contiguous() for each in mine]
        shared = step(block, *mine)
        if case != "replicated":
            shared[:2] = (gathered(each) for each in shared[:2])
        found[name] = [(a.cpu(), b.cpu()) for a, b in zip(alone, shared, strict=True)]
    return found


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def task(rank: int, ranks: int, folder: Path) -> Any:
    return compared(torch.device("cpu"))


if __name__ == "__main__":
    device = begin(sys.argv[1])
    for name, pairs in compared(device).items():
        errors = [(a.float() - b.float()).norm() / a.float().norm() for a, b in pairs]
        if dist.get_rank() == 0:
            print(name, [f"{float(e):.2e}" for e in errors])
    dist.destroy_process_group()
