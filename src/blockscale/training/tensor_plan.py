"""How ranks of a mesh's dimension "tp" share the layers of the model, and tokens between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel
from torch.utils._pytree import tree_map_with_path

from .. import distributed
from ..nn import Linear
from .gpt import GPT
from .recipes import RECIPES

__all__ = ["by_kind", "by_rank", "check_blocks", "reordered", "share_layers", "whole"]


def check_blocks(recipes: Iterable[str], width: int, ranks: int) -> None:
    """ValueError where ``ranks`` cut blocks of the layers of a recipe: each has whole ones of
    ``width`` columns, and of as many of queries, keys and values."""
    for name in recipes:
        recipe = RECIPES[name]
        if recipe is None or ranks == 1:
            continue
        formats = [recipe.format_of(role) for role in ("activations", "weights", "gradients")]
        block = max(max(format.block) for format in formats)
        if width % (ranks * block):
            fewer = [n for n in range(2, ranks) if ranks % n == 0 and width % (n * block) == 0]
            raise ValueError(
                f"tp: got {ranks} beside recipe {name}, whose blocks of {block} they cut in layers "
                f"{width} wide; choose one of {', '.join(map(str, [1, *fewer]))}, or other recipes"
            )


def share_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Queries, keys, values and the first product of a perceptron are column-parallel, the second
    one and the attention's output row-parallel: each rank has some heads. Between them each has
    some tokens of all sequences, which it sends to experts by itself. Layers that are converted
    travel quantized, others as they are."""
    tokens = Shard(1)
    norm = torch_parallel.SequenceParallel(use_local_output=True)
    ends = {
        "embedding": torch_parallel.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=tokens
        ),
        "norm": norm,
        "head": torch_parallel.ColwiseParallel(input_layouts=tokens, output_layouts=Replicate()),
    }
    torch_parallel.parallelize_module(model, mesh, ends)
    # torch 2.13: a compiled block drops the gradient of what a collective has not given yet
    model.embedding.register_forward_hook(lambda module, given, out: out.clone())
    block: Any
    for block in model.blocks:
        styles: Any = distributed if isinstance(block.qkv, Linear) else torch_parallel
        with torch.no_grad():
            block.qkv.weight.copy_(by_rank(block.qkv.weight, mesh.size()))
        columns = styles.ColwiseParallel(input_layouts=tokens)
        rows = styles.RowwiseParallel(output_layouts=tokens)
        plan = {"attention_norm": norm, "qkv": columns, "out": rows}
        plan |= {"mlp_norm": norm}
        if block.moe is None:
            plan |= {"up": columns, "down": rows}
        else:
            plan |= {"moe.gate": distributed.GateParallel()}
        torch_parallel.parallelize_module(block, mesh, plan)


def by_rank(qkv: Tensor, ranks: int) -> Tensor:
    """Rows of all queries, then keys, then values, in an order whose shards have those of some
    heads."""
    return qkv.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)


def by_kind(qkv: Tensor, ranks: int) -> Tensor:
    """The inverse of ``by_rank``: as one process has them."""
    return qkv.unflatten(0, (ranks, 3, -1)).transpose(0, 1).flatten(0, 2)


def whole(weight: Any) -> Tensor:
    """All of a DTensor, one dimension of the mesh after another: shards of FSDP2 are within those
    of layers."""
    weight = weight.detach()
    rest = weight.redistribute(placements=(Replicate(), *weight.placements[1:]))
    found: Tensor = rest.full_tensor()
    values = getattr(found, "master", None)  # where one rank has all of a gathered weight
    return found if values is None else values


def reordered(
    state: dict[str, Any], order: Callable[[Tensor, int], Tensor], ranks: int
) -> dict[str, Any]:
    """``state`` of model and optimizer, with queries, keys and values in ``order``."""

    def other(path: Any, value: Any) -> Any:
        if not (isinstance(value, DTensor) and value.dim() > 1 and "qkv.weight" in str(path)):
            return value
        made = order(whole(value), ranks)
        return distribute_tensor(made, value.device_mesh, value.placements, src_data_rank=None)

    found: dict[str, Any] = tree_map_with_path(other, state)
    return found
