"""What a run asks of the ranks that train one model: the part of this one, and what all agree on.

One process is :class:`Ranks`, which has it all. :class:`ShardedRanks` share batches, the model's
parameters and its layers. A further way to share is a further dimension of their mesh.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..distributed import ExpertParallel, gather_quantized
from ..distributed.functional_collectives import all_reduce
from ..distributed.parallel_experts import ParallelExperts
from ..distributed.ranks import gather_messages
from ..distributed.tensor_parallel import ParallelLinear
from ..nn import GatedExperts, Linear
from .gpt import GPT, mixtures
from .saves import RunSaves, Saves
from .tensor_plan import share_layers, whole

__all__ = ["Ranks", "ShardedRanks", "check_same_facts"]

Item = TypeVar("Item")
Found = TypeVar("Found")


class Ranks:
    """One process: nothing is shared, and there is nobody to agree with."""

    rank = 0
    parts = 1  # of a batch
    mine = 0  # of these, this rank's

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def shard(self, model: GPT) -> None:
        """Leave this rank its shards of the parameters."""

    def whole(self, weight: Tensor) -> Tensor:
        """All of a parameter, of which this rank may have a shard. All ranks call it."""
        return weight

    def seen(self, layer: Linear | GatedExperts, role: str, x: Tensor) -> Tensor | None:
        """All of the activations or gradients of a layer, of which this rank may have a part; None
        where another one looks at them. All ranks call it."""
        return x

    def balancing(self, model: GPT) -> Tensor | float:
        """The balancing losses of all experts in the last forward, as a part of this rank's."""
        return sum((each.loss for each in mixtures(model) if each.loss is not None), start=0.0)

    def loads(self, model: GPT) -> list[Tensor]:
        """Of experts in the last forward, of a part of a batch. All ranks call it."""
        return [each.load for each in mixtures(model) if each.load is not None]

    def clip(self, model: GPT, largest: float) -> Tensor:
        """Scale gradients down where their norm, which is returned, is larger."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), largest)

    def part(self, batch: Tensor) -> Tensor:
        """What this rank learns from."""
        return batch

    def mean(self, losses: Tensor) -> Tensor:
        """Of those of all parts, which are of one size."""
        return losses

    def any(self, wanted: bool) -> bool:
        """Whether one rank wants it."""
        return wanted

    def gathered(self, mine: Found) -> list[Found]:
        """What each rank has, in the order of ranks."""
        return [mine]

    def told(self, mine: Found) -> Found:
        """What the first rank has."""
        return self.gathered(mine)[0]

    def each(self, function: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """``function`` of every item, in their order; ranks take items in turn, as they have parts
        of a batch. All make as many calls, as ranks of a sharded model wait for each other: those
        that are left without an item do another one again."""
        turns = -(-len(items) // self.parts)
        mine = [
            function(items[(turn * self.parts + self.mine) % len(items)]) for turn in range(turns)
        ]
        found = dict(self.gathered((self.mine, mine)))  # ranks that share a part have the same
        return [found[i % self.parts][i // self.parts] for i in range(len(items))]

    def saves(self, folder: Path, recipe: str, seed: int) -> RunSaves:
        """Where a run is saved."""
        return Saves(folder, recipe, seed)


class ShardedRanks(Ranks):
    """Ranks of FSDP2 along two dimensions of the mesh, "fsdp" and "ep": each learns from its part
    of each batch, and has a shard of every parameter, its gradient and the optimizer's state, all
    in fp32; gradients are the mean. Along the third, "tp", ranks share that part, and layers.
    Experts are shared by number along "ep" and "tp", and sharded along "fsdp" alone.

    Converted layers gather their weights quantized, the others and experts in fp32, which autocast
    then rounds as it does in one process: so a step is that of one process but for the order of
    sums.
    """

    def __init__(self, device: torch.device, fsdp: int = 1, ep: int = 1, tp: int = 1) -> None:
        super().__init__(device)
        names = "fsdp", "ep", "tp"
        self.mesh = init_device_mesh(device.type, (fsdp, ep, tp), mesh_dim_names=names)
        self.mesh._flatten("all")  # so that norms of gradients are one sum, the same on all ranks
        self.batches = self.mesh["fsdp", "ep"]._flatten("batches")
        self.experts = self.mesh["ep", "tp"]._flatten("experts")
        self.tensor = self.mesh["tp"]
        self.rank, self.parts = dist.get_rank(), self.batches.size()
        self.mine = self.batches.get_local_rank()

    def shard(self, model: GPT) -> None:
        if self.tensor.size() > 1:
            share_layers(model, self.tensor)
        if any(isinstance(each, Linear) for each in model.modules()):
            gather_quantized(model)
        for block in model.blocks:
            if self.experts.size() > 1:
                for each in mixtures(block):
                    self._share_experts(each.experts)
            fully_shard(block, mesh=self.batches)
        fully_shard(model, mesh=self.batches)

    def _share_experts(self, experts: Any) -> None:
        parallelize_module(experts, self.experts, ExpertParallel())
        mesh = self.mesh["fsdp"]
        fully_shard(experts, mesh=mesh)
        # they have the gradients of all tokens, as others have after FSDP's sum
        experts.set_gradient_divide_factor(self.parts)
        # gloo has no sum of multiples; told so, torch 2.13 divides twice where one rank has no sum
        experts.set_force_sum_reduction_for_comms(mesh.size() > 1)

    def whole(self, weight: Any) -> Tensor:
        return whole(weight)

    def seen(self, layer: Linear | GatedExperts, role: str, x: Tensor) -> Tensor | None:
        mesh, layouts = self.tensor, None
        if isinstance(layer, ParallelLinear):
            style = layer.style
            layouts = style.input_layouts if role == "activations" else style.output_layouts
        elif isinstance(layer, ParallelExperts):
            mesh, layouts = self.experts, (Shard(0),)
        if layouts is not None:
            x = DTensor.from_local(x, mesh, layouts, run_check=False).full_tensor()
        return x if mesh.get_local_rank() == 0 else None

    def balancing(self, model: GPT) -> Tensor | float:
        """Of a batch the loads are those of all parts, so that the mean is the loss of one
        process."""
        found = list(mixtures(model))
        if not found:
            return 0.0
        loads = torch.stack(super().loads(model))
        dist.all_reduce(loads)
        losses = [each.balancing_loss(load) for each, load in zip(found, loads, strict=True)]
        return torch.stack(losses).sum() / self.tensor.size()  # where gradients are summed

    def loads(self, model: GPT) -> list[Tensor]:
        return [all_reduce(each, "sum", self.tensor.get_group()) for each in super().loads(model)]

    def clip(self, model: GPT, largest: float) -> Tensor:
        """As torch's, of parameters that are on several meshes: experts are."""
        groups = defaultdict(list)
        for each in model.parameters():
            if each.grad is not None:
                groups[cast(DTensor, each).device_mesh].append(each)
        norms = []
        for group in groups.values():
            norm = get_total_norm([cast(Tensor, p.grad) for p in group])
            norms.append(cast(DTensor, norm).full_tensor())
        total = torch.stack(norms).norm()
        for group in groups.values():
            clip_grads_with_norm_(group, largest, total)
        return total

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.parts)[self.mine]

    def mean(self, losses: Tensor) -> Tensor:
        return all_reduce(losses, "sum", self.batches.get_group()) / self.parts

    def any(self, wanted: bool) -> bool:
        flag = torch.tensor(wanted, dtype=torch.int32)  # on the host: nothing waits for a GPU
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def gathered(self, mine: Found) -> list[Found]:
        return gather_messages(mine)

    def saves(self, folder: Path, recipe: str, seed: int) -> RunSaves:
        from .sharded_saves import ShardedSaves

        return ShardedSaves(Saves(folder, recipe, seed), self)


def check_same_facts(facts: Mapping[str, object]) -> None:
    """ValueError on every rank where one has others than the rest. All ranks call it."""
    found = gather_messages({name: str(value) for name, value in facts.items()})
    wrong = []
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each.get(name) for each in found]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"rank {i} has {value}" for i, value in enumerate(values) if value != usual]
        if others:
            wrong.append(f"{name} ({', '.join(others)}, most have {usual})")
    if wrong:
        raise ValueError(
            f"ranks: differ in {'; '.join(wrong)}; start all of them with the same arguments, "
            "text and versions"
        )
