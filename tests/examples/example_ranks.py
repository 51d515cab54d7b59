"""What each rank does in the tests of examples of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

import blockscale as bs
from examples.ranks.model import SIZES
from examples.ranks.shard import shard
from examples.ranks.train import make_model, train

__all__ = ["task"]

STEPS, BATCH, LENGTH = 5, 2, 256


def losses(
    size: str, recipes: list[str], shape: tuple[int, int, int], rank: int, ranks: int, folder: Path
) -> dict[str, list[float]]:
    """By recipe, on a mesh of such a shape."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep", "tp"))
    found = {}
    for name in recipes:
        recipe = None if name == "bf16" else bs.Recipe(name)
        model = shard(make_model(SIZES[size], transformers=False), recipe, mesh)
        found[name] = train(model, mesh, STEPS, BATCH, LENGTH)
    return found


def task(size: str, recipes: list[str], fsdp: int = 1, ep: int = 1, tp: int = 1) -> object:
    return partial(losses, size, recipes, (fsdp, ep, tp))
