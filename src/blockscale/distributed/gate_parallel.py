"""Routers of ranks that share sequences, in the plans of torch's parallelize_module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from ..nn.class_change import become
from ..nn.gate import Gate, logits
from .dtensor_parameters import check_mesh, distribute_parameter
from .gathered_input import replicate_input

__all__ = ["GateParallel"]


class GateParallel(ParallelStyle):
    """Each rank has the whole router, which sees its tokens alone: the gradient of the weight is
    summed over ranks, as SequenceParallel's of a norm.

    >>> plan = {"gate": bs.distributed.GateParallel()}
    >>> # torch.distributed.tensor.parallel.parallelize_module(moe, mesh["tp"], plan)

    for the ``gate`` of a :class:`blockscale.nn.MoE` in sequence parallelism: ranks of "tp" have
    shards of sequences there. Each sends them to the experts by itself, which are shared over "tp",
    too: :class:`ExpertParallel` over that dimension, or over "ep" and "tp" flattened. Logits have
    the bits of one process. The weight becomes a DTensor, Replicate(). ``fully_shard`` over another
    dimension comes after this.

    ``moe.loss`` is that of a rank's tokens: divide it by the ranks of "tp", over which gradients
    are summed.

    Compilers call it as it is, as they do the experts.

    Raises, when it is applied, TypeError for other modules, ValueError for a mesh of several
    dimensions, RuntimeError without a process group.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    arXiv 2205.05198; Megatron's expert tensor parallelism of 1.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Gate) or isinstance(module, ParallelGate):
            raise TypeError(
                f"module: got {module}; GateParallel takes the gate of a blockscale.nn.MoE, once: "
                'name it in the plan: {"gate": GateParallel()}'
            )
        check_mesh(device_mesh, "tp")
        distribute_parameter(module, "weight", device_mesh, Replicate(), self.src_data_rank)
        become(module, ParallelGate)
        return module


class ParallelGate(Gate):
    """A router of which all ranks have the weight, as :class:`GateParallel` made it."""

    weight: Any  # a DTensor

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        group = self.weight.device_mesh.get_group()
        return logits(x, replicate_input(self.weight.to_local(), group))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, GateParallel"
