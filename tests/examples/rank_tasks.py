"""What each rank does in the tests of examples of ranks."""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

import blockscale as bs
from examples.ranks.model import SIZES
from examples.ranks.shard import shard
from examples.ranks.train import make_model, train

__all__ = ["losses"]

STEPS, BATCH, LENGTH = 6, 2, 256


def losses(rank: int, ranks: int, folder: Path) -> dict[str, list[float]]:
    """By recipe, on a mesh of FSDP2 and tensor parallelism whose shape the environment has."""
    fsdp = int(os.environ["FSDP"])
    mesh = init_device_mesh("cpu", (fsdp, ranks // fsdp), mesh_dim_names=("dp", "tp"))
    found = {}
    for name in ("bf16", "mxfp8", "fp8_block"):
        recipe = None if name == "bf16" else bs.Recipe(name)
        model = shard(make_model(SIZES["tiny"], transformers=False), recipe, mesh)
        found[name] = train(model, mesh, STEPS, BATCH, LENGTH)
    return found
