"""Parameters that ranks share, as DTensors, and the mesh that they are shared over."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

__all__ = ["check_mesh", "distribute_parameter", "dtensor_like"]


def distribute_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Put a DTensor in the place of a module's parameter. ``source``: the rank whose values all
    get; None: each has its own."""
    parameter: Any = getattr(module, name)
    shared = distribute_tensor(parameter, mesh, (placement,), src_data_rank=source)
    made = nn.Parameter(shared, requires_grad=parameter.requires_grad)
    module.register_parameter(name, made)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of which this rank has ``local``, shared as ``like`` is."""
    how: Any = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **how)


def check_mesh(mesh: DeviceMesh, example: str) -> None:
    """RuntimeError without a process group, ValueError for a mesh of several dimensions;
    ``example``: the name of one."""
    if not dist.is_initialized():
        raise RuntimeError(
            "device_mesh: torch.distributed has no process group; call "
            "torch.distributed.init_process_group before"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh: has dimensions {mesh.mesh_dim_names or mesh.ndim}; give one of them, as "
            f'mesh["{example}"]'
        )
