"""Parameters that ranks share, as DTensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

__all__ = ["as_shared", "check_one_dimension", "share_parameter"]


def share_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Put a DTensor in the place of a module's parameter. ``source``: the rank whose values all
    get; None: each has its own."""
    parameter: Any = getattr(module, name)
    shared = distribute_tensor(parameter, mesh, (placement,), src_data_rank=source)
    made = nn.Parameter(shared, requires_grad=parameter.requires_grad)
    module.register_parameter(name, made)


def as_shared(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of which this rank has ``local``, shared as ``like`` is."""
    how: Any = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **how)


def check_one_dimension(mesh: DeviceMesh, example: str) -> None:
    """ValueError for a mesh of several; ``example``: the name of one."""
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh: has dimensions {mesh.mesh_dim_names or mesh.ndim}; give one of them, as "
            f'mesh["{example}"]'
        )
