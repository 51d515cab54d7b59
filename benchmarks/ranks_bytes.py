"""Bytes that a rank sends in a step of a Llama over two ranks, counted: those of each kind of
collective, by recipe and mesh. Needs no GPU; what travels does not depend on the device.

    torchrun --nproc-per-node 2 benchmarks/ranks_bytes.py OUT.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import blockscale as bs

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.ranks.model import Llama, LlamaConfig
from examples.ranks.shard import shard

RECIPES = "bf16", "mxfp8", "fp8_block", "nvfp4"
BATCH, LENGTH = 2, 256  # of each data-parallel rank
WIDE = LlamaConfig(1024, 2048, 1, 16, 8, 128)
#: By mesh: (dp, ep, tp), and the model.
MESHES = {"fsdp 2": ((2, 1, 1), WIDE), "tp 2": ((1, 1, 2), WIDE)}


class Count(TorchDispatchMode):
    """Bytes that this rank gives to collectives, and the elements of a layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            self.add(func, args, kwargs)
        return func(*args, **kwargs)

    def add(self, func: Any, args: Any, kwargs: Any) -> None:
        """What is sent to the other rank: of two, half of what is reduced or exchanged."""
        name = func._schema.name.partition("::")[2]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not given or "wait" in name or "barrier" in name:
            return
        nbytes = min(x.nbytes for x in given) if "gather" in name else max(x.nbytes for x in given)
        kind = "gather" if "gather" in name else "reduce" if "reduce" in name else "exchange"
        half = 1 if kind == "gather" else 2
        self.sent[kind].append(nbytes // half)


def step(recipe: str, shape: tuple[int, int, int], config: LlamaConfig) -> dict[str, list[int]]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep", "tp"))
    made = None if recipe == "bf16" else bs.Recipe(recipe)
    model = shard(Llama(config), made, mesh)
    tokens = torch.randint(config.vocab_size, (BATCH, LENGTH + 1))
    for _ in range(2):  # FSDP tells ranks more in its first step
        count = Count()
        with torch.autocast("cpu", torch.bfloat16), count:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        model.zero_grad()
    return dict(count.sent)


def main(out: str) -> None:
    dist.init_process_group("gloo")
    report: dict[str, Any] = {"batch": BATCH, "length": LENGTH, "steps": {}}
    for name, (shape, config) in MESHES.items():
        for recipe in RECIPES:
            sent = step(recipe, shape, config)
            if dist.get_rank() == 0:
                report["steps"].setdefault(name, {})[recipe] = sent
                print(
                    name, recipe, {kind: (len(x), sum(x)) for kind, x in sent.items()}, flush=True
                )
                print(sent, flush=True)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
