"""What each rank does in the tests of tensor parallelism: a block by itself, and over ranks.

On GPUs: ``torchrun --nproc-per-node 2 tests/distributed/tensor_ranks.py nccl``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from observed import counted_gathers, whole
from processes import begin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.distributed import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    gather_quantized,
)

WIDE, INNER, BATCH, LENGTH = 256, 512, 2, 256
RECIPES = "mxfp8", "fp8_block", "nvfp4"
#: What else reads an input that layers share, before they do.
BEFORE: dict[str, Any] = {
    "normed": None,  # a layer norm
    "cast": lambda x: x.double().float(),
    "flipped": lambda x: x.flip(1),
    "doubled": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]] * 2,
    "named": lambda x: x.to(x.dtype).contiguous(),
    "fused": None,  # an autograd.Function
}
#: Whether activations are sharded along the sequence between layers; what else.
CASES = {
    f"{recipe} {case}": (recipe, case)
    for recipe in RECIPES
    for case in ("replicated", "sequence", "cut", "shared")
}
CASES |= {
    f"mxfp8 {case}": ("mxfp8", case)
    for case in ("recomputed", "frozen", "routed", "precise", "scattered", "written", *BEFORE)
}
#: Of a recipe.
MORE = {"precise": {"high_precision": ("fprop", "wgrad")}}


class Fused(torch.autograd.Function):
    """As kernels of others are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Perceptron(nn.Module):
    """Two layers, and perhaps a router in high precision, share an input."""

    loss: Any = 0

    def __init__(self, case: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDE, INNER), nn.Linear(WIDE, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDE)
        self.router = nn.Linear(WIDE, 1) if case == "routed" else None
        self.before = BEFORE.get(case)
        if case == "normed":
            self.before = nn.LayerNorm(WIDE)
        if case == "fused":
            self.before = Fused.apply

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            x = self.before(x)
        y = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        self.loss = 0 if self.router is None else 1000 * self.router(x).square().mean()
        return y


class Block(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDE), Perceptron(case)
        self.recomputes, self.writes = case == "recomputed", case == "written"

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return y
        return self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        y = self.norm(x) * 1
        z = self.mlp(y)
        if self.writes:  # as residuals do
            y += z
            return y
        return x + z


def make_block(recipe: str, case: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    block = bs.convert(Block(case), bs.Recipe(recipe, **MORE.get(case, {})), is_product)
    if case == "frozen":
        block.mlp.requires_grad_(False)
    return block.to(device)


def is_product(layer: nn.Module, name: str) -> bool:
    return "router" not in name


def parallel(block: nn.Module, case: str, mesh: Any) -> nn.Module:
    rows = Replicate() if case == "replicated" else Shard(1)
    plan: dict[str, Any] = {
        "mlp.gate_proj": ColwiseParallel(input_layouts=rows),
        "mlp.up_proj": ColwiseParallel(input_layouts=rows),
        "mlp.down_proj": RowwiseParallel(output_layouts=rows),
    }
    if case != "replicated":
        plan["norm"] = SequenceParallel(use_local_output=True)
    if case == "scattered":  # torch's DTensors between layers, and other layouts
        plan["norm"] = SequenceParallel()
        plan["mlp.up_proj"] = ColwiseParallel(input_layouts=rows, output_layouts=Replicate())
        plan["mlp.gate_proj"] = ColwiseParallel(
            input_layouts=rows, output_layouts=Replicate(), use_local_output=True
        )
        plan["mlp.down_proj"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if case in ("shared", "recomputed", "frozen", "routed", "precise", "written", *BEFORE):
        plan["mlp.gate_proj"] = plan["mlp.up_proj"] = ColwiseParallel()
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
    return parallelize_module(block, mesh, plan)


def step(block: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = block(x)
    ((y * grad).sum() + block.mlp.loss).backward()  # whose gradient is not contiguous
    trained = [p for p in block.parameters() if p.requires_grad]
    return [y.detach(), x.grad, *(whole(p.grad) for p in trained)]


def compared(device: torch.device) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Outputs and gradients of each case: alone, and over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    found = {}
    for name, (recipe, case) in CASES.items():
        length = LENGTH + 2 * ranks if case == "cut" else LENGTH * ranks
        torch.manual_seed(1)
        x, grad = (torch.randn(BATCH, length, WIDE).to(device) for _ in range(2))
        alone = step(make_block(recipe, case, device), x, grad)
        block = parallel(make_block(recipe, case, device), case, mesh)
        mine = [x, grad]
        if case != "replicated":
            mine = [each.chunk(ranks, 1)[rank].contiguous() for each in mine]
        shared = step(block, *mine)
        if case != "replicated":
            shared[:2] = (gathered(each) for each in shared[:2])
        found[name] = [(a.cpu(), b.cpu()) for a, b in zip(alone, shared, strict=True)]
    return found


def train(recipe: str, mesh: Any, device: torch.device, *, gathers: bool) -> list[float]:
    """Losses over a mesh of FSDP2 and tensor parallelism."""
    block = parallel(make_block(recipe, "shared", device), "shared", mesh["tp"])
    if gathers:
        gather_quantized(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(block.mlp, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    optimizer, losses = torch.optim.AdamW(block.parameters(), lr=1e-2), []
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    ranks, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
    for _ in range(4):
        x = torch.randn(BATCH, 128 * ranks, WIDE, generator=generator).to(device, torch.bfloat16)
        loss = (block(x.chunk(ranks, 1)[rank]).float() - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(block.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(device: torch.device) -> dict[str, tuple[list[float], list[float]]]:
    """Losses without and with weights that are gathered quantized."""
    names = {"mesh_dim_names": ("dp", "tp")}
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), **names)
    return {
        recipe: tuple(train(recipe, mesh, device, gathers=gathers) for gathers in (False, True))
        for recipe in RECIPES
    }


def sent(case: str, device: torch.device) -> list[int]:
    """Bytes of each gather of a step, MXFP8, from this rank."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    block = parallel(make_block("mxfp8", case, device).bfloat16(), case, mesh)
    x = torch.randn(BATCH, 128, WIDE, device=device, dtype=torch.bfloat16)
    with counted_gathers() as found:
        step(block, x, x)
    return found


def refused(device: torch.device) -> list[str]:
    """What ranks with different recipes say, of tensor parallelism and of FSDP2."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    said = []
    recipe = RECIPES[min(dist.get_rank(), 1)]
    try:
        parallel(make_block(recipe, "shared", device), "shared", mesh)
    except ValueError as error:
        said.append(str(error))
    block = fully_shard(gather_quantized(make_block(recipe, "shared", device)), mesh=mesh)
    try:
        block(torch.randn(1, 32, WIDE, device=device))
    except ValueError as error:
        said.append(str(error))
    return said


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def task(rank: int, ranks: int, folder: Path) -> Any:
    device = torch.device("cpu")
    counted = {case: sent(case, device) for case in ("sequence", "shared")}
    return compared(device), trained(device), counted, refused(device)


if __name__ == "__main__":
    device = begin(sys.argv[1])
    for name, pairs in compared(device).items():
        errors = [(a.float() - b.float()).norm() / a.float().norm() for a, b in pairs]
        if dist.get_rank() == 0:
            print(name, [f"{float(e):.2e}" for e in errors])
    dist.destroy_process_group()
