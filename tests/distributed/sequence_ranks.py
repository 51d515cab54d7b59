"""What each rank does in the tests of mixtures of experts whose ranks have shards of sequences."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from observed import error_of, whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import blockscale as bs
from blockscale.distributed import (
    ColwiseParallel,
    ExpertParallel,
    GateParallel,
    RowwiseParallel,
)

__all__ = ["compared", "wrong"]

HIDDEN = 128


def make_moe(device: torch.device) -> bs.nn.MoE:
    torch.manual_seed(0)
    router, recipe = bs.nn.Router(top_k=3), bs.Recipe("mxfp8")
    return bs.nn.MoE(HIDDEN, 64, 8, router, shared_size=128, recipe=recipe).to(device)


def compared(rank: int, ranks: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """A whole layer whose ranks have shards of a sequence: its output, and all gradients. Beside
    the router and experts there are shared ones, column- and row-parallel."""
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    alone = make_moe(device)
    columns = ColwiseParallel(input_layouts=Shard(0))
    plan = {
        "gate": GateParallel(),
        "experts": ExpertParallel(),
        "shared_experts.gate_proj": columns,
        "shared_experts.up_proj": columns,
        "shared_experts.down_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    shared = parallelize_module(copy.deepcopy(alone), mesh, plan)
    x, grad = torch.randn(2, 32 * ranks, HIDDEN, device=device)
    found = []
    for moe, of, sharers in ((alone, slice(None), 1), (shared, slice(32 * rank, None), ranks)):
        given = x[of][: 32 * ranks // sharers].clone().requires_grad_()
        y = moe(given)
        load = moe.load.clone()
        if sharers > 1:
            dist.all_reduce(load)
        loss = (y * grad[of][: len(given)]).sum() + moe.balancing_loss(load) / sharers
        loss.backward()
        gradients = {name: p.grad for name, p in moe.named_parameters()}
        found.append({"y": y.detach(), "x": given.grad, "load": load} | gradients)
    mine = slice(32 * rank, 32 * (rank + 1))
    pairs = {name: (want, whole(found[1][name])) for name, want in found[0].items()}
    return pairs | {name: (pairs[name][0][mine], pairs[name][1]) for name in ("y", "x")}


def wrong(ranks: int, device: torch.device) -> dict[str, str]:
    """What all ranks are told of a router that is not shared so."""
    told = dict[str, str]()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))
    flat = init_device_mesh(device.type, (1, ranks), mesh_dim_names=("dp", "tp"))
    told["gate"] = error_of(lambda: parallelize_module(make_moe(device), mesh, GateParallel()))
    told["gate's mesh"] = error_of(lambda: GateParallel()._apply(make_moe(device).gate, flat))
    gate = parallelize_module(make_moe(device).gate, mesh, GateParallel())
    told["gate twice"] = error_of(lambda: parallelize_module(gate, mesh, GateParallel()))
    logits = gate(torch.ones(2, HIDDEN, device=device)).square().sum()
    told["gate again"] = error_of(
        lambda: torch.autograd.grad(logits, gate.weight, create_graph=True)
    )
    return told
