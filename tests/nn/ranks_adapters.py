"""What each rank does in the tests of adapters on a quantized base: train them, tell the losses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import blockscale as bs

STEPS = 30
RECIPES = {"mxfp8": bs.Recipe(), "nvfp4": bs.Recipe("nvfp4", activations="bfloat16")}
KINDS = ("ddp", "fsdp2")


class Adapted(nn.Module):
    """A quantized layer and a high-precision adapter of rank 8."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(8, base.in_features, generator=generator) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.mT @ self.b.mT


def make_model(recipe: str, seed: int) -> nn.Sequential:
    """The base is always the same, as loaded from a file; ``seed`` makes the adapters."""
    torch.manual_seed(0)
    layers = [bs.quantize_(nn.Linear(64, 64), RECIPES[recipe]) for _ in range(2)]
    return nn.Sequential(Adapted(layers[0], seed), nn.GELU(), Adapted(layers[1], seed + 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(32, 64, generator=generator)
    return x, x[:, :4].repeat(1, 16)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def error(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return (model(x) - y).square().mean()


def alone(recipe: str, ranks: int) -> list[list[float]]:
    """Losses of each rank, by a single process."""
    model = make_model(recipe, 1)
    optimizer = optimizer_of(model)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            loss = error(model, step, rank)
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def wrap(kind: str, model: nn.Sequential) -> nn.Module:
    """As docs/inference.md says."""
    held = {name: p for name, p in model.named_parameters() if isinstance(p, bs.ScaledTensor)}
    if kind == "ddp":
        DDP._set_params_and_buffers_to_ignore_for_model(model, list(held))
        return DDP(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer, ignored_params=set(held.values()))
    return model


def train(kind: str, recipe: str, rank: int) -> list[float]:
    """This rank's losses. DDP gives all ranks the adapters of rank 0."""
    model = wrap(kind, make_model(recipe, 1 + 10 * rank * (kind == "ddp")))
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        loss = error(model, step, rank)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refusals() -> list[str]:
    """What a model is told whose quantized weights are not named."""
    said = []
    for wrapper in (DDP, fully_shard):
        try:
            wrapper(make_model("mxfp8", 1))
        except (TypeError, ValueError) as why:
            said.append(str(why))
    return said


def gathered() -> dict[str, object]:
    """What all ranks found, beside the single process's losses."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {f"{kind} {recipe}": train(kind, recipe, rank) for kind in KINDS for recipe in RECIPES}
    found: list[object] = [None] * ranks
    dist.all_gather_object(found, {"losses": mine, "refused": refusals()})
    return {"ranks": found, "alone": {recipe: alone(recipe, ranks) for recipe in RECIPES}}
