"""Experts shared by ranks, in the plans of torch's parallelize_module."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..nn.class_change import become
from ..nn.holds import HoldsQuantized
from ..nn.moe import GatedExperts, MoE
from .dtensor_parameters import check_mesh, distribute_parameter
from .parallel_experts import ParallelExperts

__all__ = ["ExpertParallel"]


class ExpertParallel(ParallelStyle):
    """Each rank has as many of a layer's experts, and passes tokens of its own; for training.

    >>> plan = {"experts": bs.distributed.ExpertParallel()}
    >>> # torch.distributed.tensor.parallel.parallelize_module(moe, mesh["ep"], plan)

    for the ``experts`` of a :class:`blockscale.nn.MoE`, or :class:`blockscale.nn.GatedExperts` that
    are called with the routing of all experts. Their parameters become DTensors, Shard(0): rank
    ``r`` of R has the experts from ``r * num_experts / R`` on. A token travels once to each rank
    that has one of its experts, quantized by rows, and each expert's result comes back in the
    output's dtype, to be added up in the order of an unsharded layer. The rows of an expert are the
    tokens of all ranks, by rank and then by token: outputs and gradients have the bits of an
    unsharded layer that gets the ranks' tokens in one batch, where products have the same. Ranks
    may have other numbers of tokens, or none. All ranks call forward and backward together.

    In the backward the gradient of the output travels in high precision, and so do tokens once
    more: gradients of matrices are quantized along the rows of an expert, in blocks that only its
    rank knows. Where ``down_proj`` is frozen (and without a bias) gradients travel quantized, where
    ``gate_up_proj`` is, tokens do not.

    Gradients of experts are sums over the tokens of all ranks of the mesh, as of one batch.
    ``fully_shard`` of the same module over another dimension comes after this. Compilers call it as
    it is.

    Raises, when it is applied, TypeError for other modules, ValueError where experts cannot be
    shared evenly or the mesh has several dimensions, RuntimeError without a process group. In a
    forward, ValueError or TypeError where a rank's arguments do not fit, and :class:`PeerError` on
    the others then; ValueError on all where theirs differ in more than the number of tokens.

    Source: Lepikhin et al., "GShard", arXiv 2006.16668; torchtitan's style of this name.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        for name, _ in list(module.named_parameters(recurse=False)):
            distribute_parameter(module, name, device_mesh, Shard(0), self.src_data_rank)
        become(module, ParallelExperts)
        return module


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, ParallelExperts):
        raise TypeError("module: its experts are shared already; apply ExpertParallel once")
    if not isinstance(module, GatedExperts):
        remedy = "call it with blockscale.nn.GatedExperts"
        if isinstance(module, MoE):
            remedy = 'name its experts in the plan: {"experts": ExpertParallel()}'
        raise TypeError(
            f"module: got {type(module).__name__}; ExpertParallel takes the experts of a "
            f"blockscale.nn.MoE: {remedy}"
        )
    if isinstance(module, HoldsQuantized):
        raise TypeError(
            "module: its experts are held quantized, for inference; apply ExpertParallel to a "
            "model with high-precision weights, or share quantized experts by MegaMoE"
        )
    check_mesh(mesh, "ep")
    count = module.gate_up_proj.shape[0]
    if count % mesh.size():
        raise ValueError(
            f"num_experts: {count} cannot be shared evenly by {mesh.size()} ranks; give the mesh a "
            "number of ranks that divides it"
        )
