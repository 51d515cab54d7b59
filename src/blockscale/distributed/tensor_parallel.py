"""Linear layers whose weights ranks share, column- and row-parallel, in the plans of torch's
parallelize_module. What ranks gather of activations and gradients is quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn.utils.parametrize import is_parametrized

from ..formats import get_format
from ..nn.class_change import extend
from ..nn.linear import Linear, check_dtype
from .compiled import gather_input, multiply, read_input, reduce_output
from .dtensor_parameters import check_mesh, distribute_parameter
from .gathered_input import GatheredInput
from .ranks import check_alike

__all__ = ["ColwiseParallel", "ParallelLinear", "PrepareModuleInput", "RowwiseParallel"]

Style = Any  # ColwiseParallel or RowwiseParallel


class ParallelLinear(Linear):
    """A linear layer of which this rank has a part, as a style of parallelize_module made it."""

    style: Style
    mesh: DeviceMesh
    weight: Any  # a DTensor
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, GatheredInput) and torch.compiler.is_compiling():
            return self._uncompiled(x)
        check_dtype("x", x)
        if hasattr(self.weight, "main_grad"):
            raise ValueError(
                "weight.main_grad: weights over ranks are DTensors, whose gradients are in .grad; "
                "delete main_grad"
            )
        x, weight = self.style.prepare_input(x, self.mesh), self.weight.to_local()
        if x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"x: got {tuple(x.shape)} on this rank, whose weight is {tuple(weight.shape)}; "
                f"expected (..., K), (N, K): give {type(self.style).__name__} the input_layouts "
                "that x has"
            )
        return self.style.product(self, x, weight)

    @torch.compiler.disable(reason="its input was gathered outside of the graph")
    def _uncompiled(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {type(self.style).__name__} of {self.mesh.size()} ranks"


class ColwiseParallel(torch_parallel.ColwiseParallel):
    """Ranks have rows of the weight (N, K), and columns of the output. In the place of torch's:

    >>> plan = {"up": bs.distributed.ColwiseParallel(), "down": bs.distributed.RowwiseParallel()}
    >>> # torch.distributed.tensor.parallel.parallelize_module(block, mesh["tp"], plan)

    for layers of :func:`blockscale.convert`, whose bits the outputs have. An input that is sharded
    along the sequence (``input_layouts=Shard(1)``) is gathered quantized, by rows in the forward,
    by columns in the backward, and its gradient is scattered. Layers that share an input gather it
    once where the module around them has :class:`PrepareModuleInput`.

    Arguments are torch's: ``input_layouts`` is Replicate (default), or Shard of a dimension that is
    not the last, and ``output_layouts`` Shard(-1), or what that is redistributed to.

    Raises TypeError for layers that were not converted; ValueError where ranks would cut blocks,
    for a mesh of several dimensions, and on every rank where they have different recipes;
    RuntimeError without a process group.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (given,) = self.input_layouts
        if not (given.is_replicate() or _is_of_rows(given)):
            raise ValueError(
                f"input_layouts: got {given}; expected Replicate(), or Shard of a dimension before "
                "the last, as Shard(1) of the sequence"
            )
        return _split(self, module, device_mesh, 0)

    def prepare_input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        (given,) = self.input_layouts
        x = _local(x, given, mesh)
        return read_input(x, None if given.is_replicate() else _dim_of(given, x), _group(mesh))

    def product(self, layer: ParallelLinear, x: Tensor, weight: Tensor) -> Tensor:
        bias = None if layer.bias is None else layer.bias.to_local()
        y = multiply(x, weight, bias, layer.recipe, _group(layer.mesh))
        (wanted,) = self.output_layouts
        if _normal(wanted, y) == Shard(y.dim() - 1) and self.use_local_output:
            return y
        out = DTensor.from_local(y, layer.mesh, (Shard(-1),), run_check=False)
        out = out.redistribute(placements=(wanted,))
        return out.to_local() if self.use_local_output else out


class RowwiseParallel(torch_parallel.RowwiseParallel):
    """Ranks have columns of the weight (N, K), and of the input; their products are summed. As
    torch's, for layers of :func:`blockscale.convert`: see :class:`ColwiseParallel`.

    Where the output is sharded along the sequence (``output_layouts=Shard(1)``) its gradient is
    gathered quantized, by rows and by columns.

    Arguments are torch's: ``input_layouts`` is Shard(-1) (default), or what is redistributed to it,
    ``output_layouts`` Replicate (default), or Shard of a dimension that is not the last.

    Raises as :class:`ColwiseParallel`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (wanted,) = self.output_layouts
        if not (wanted.is_replicate() or _is_of_rows(wanted)):
            raise ValueError(
                f"output_layouts: got {wanted}; expected Replicate(), or Shard of a dimension "
                "before the last, as Shard(1) of the sequence"
            )
        return _split(self, module, device_mesh, 1)

    def prepare_input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        (given,) = self.input_layouts
        if _normal(given, x) == Shard(x.dim() - 1):
            return _local(x, given, mesh)
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, (given,), run_check=False)
        return x.redistribute(placements=(Shard(-1),)).to_local()

    def product(self, layer: ParallelLinear, x: Tensor, weight: Tensor) -> Tensor:
        (wanted,) = self.output_layouts
        y = multiply(x, weight, None, layer.recipe, _group(layer.mesh))
        dim = None if wanted.is_replicate() else _dim_of(wanted, y)
        if dim is not None and y.shape[dim] % layer.mesh.size():
            raise ValueError(
                f"output_layouts: got {wanted}, and {y.shape[dim]} rows over {layer.mesh.size()} "
                "ranks; pad the sequence to a multiple of them, or give Replicate()"
            )
        bias = None if layer.bias is None else layer.bias.to_local()
        y = reduce_output(y, bias, dim, _group(layer.mesh))
        if self.use_local_output:
            return y
        return DTensor.from_local(y, layer.mesh, (wanted,), run_check=False)


class PrepareModuleInput(torch_parallel.PrepareModuleInput):
    """As torch's, of a module whose layers share an input: what is to be gathered (Shard to
    Replicate) travels once, as the layers read it, quantized.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> attention = bs.distributed.PrepareModuleInput(
    ...     input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ... )

    Modules inside that are no layers of :class:`ColwiseParallel` get the input as it is, gathered
    in high precision each time; what they make of it is alike on all ranks, and so is its gradient.
    All ranks have shards of one size. Arguments are torch's.
    """

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        gathers = input_layout is not None and _is_of_rows(input_layout)
        if gathers:  # activations, no masks and ids
            layout: Any = input_layout
            gathers = input.is_floating_point() and layout.dim % input.dim() < input.dim() - 1
        if not gathers or not isinstance(desired_layout, Replicate):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        x = _local(input, input_layout, mesh)
        return gather_input(x, _dim_of(input_layout, x), _group(mesh))


def _split(style: Style, module: nn.Module, mesh: DeviceMesh, dim: int) -> nn.Module:
    """Share a layer's weight along ``dim``, and a bias that is of its columns."""
    if isinstance(module, ParallelLinear):
        raise TypeError(f"module: {module} is shared already; apply one style, once")
    if not isinstance(module, Linear):
        name = type(style).__name__
        raise TypeError(
            f"module: got {module}; blockscale.distributed.{name} takes layers of "
            f"blockscale.convert; give others torch's {name}"
        )
    if is_parametrized(module):
        raise TypeError(
            f"module: {module} computes its weight (torch.nn.utils.parametrize), which ranks "
            "cannot share; remove the parametrization, or leave the layer whole"
        )
    if hasattr(module.weight, "quantized_forms"):
        raise TypeError(
            "module: its weight is gathered quantized; call "
            "blockscale.distributed.gather_quantized after parallelize_module"
        )
    _check_blocks(module, mesh, dim)
    check_alike("recipe", module.recipe, mesh.get_group())
    for name, _ in list(module.named_parameters(recurse=False)):
        placement: Placement = Shard(dim) if name == "weight" or dim == 0 else Replicate()
        distribute_parameter(module, name, mesh, placement, style.src_data_rank)
    extend(module, ParallelLinear)
    layer: Any = module
    layer.style, layer.mesh = style, mesh
    return module


def _check_blocks(layer: Linear, mesh: DeviceMesh, dim: int) -> None:
    check_mesh(mesh, "tp")
    recipe = layer.recipe
    for role in ("activations", "gradients"):
        if not recipe.operand(role).is_plain:
            raise NotImplementedError(
                f"recipe: {role} are rounded stochastically, or transformed, which layers over "
                "ranks do not do yet; convert these layers by a recipe that rounds them to "
                "nearest, as Recipe('nvfp4'), or share the model by FSDP"
            )
    weights = recipe.operand("weights")
    if weights.is_random or not weights.has_one_global_scale:
        raise NotImplementedError(
            "recipe: weights are rounded stochastically, transformed, or have another scaling in "
            "dgrad than in fprop, which layers over ranks do not do; convert these layers by a "
            "recipe that rounds them to nearest, alike in both"
        )
    roles = "weights", "gradients" if dim == 0 else "activations"
    block = max(max(get_format(recipe.format_of(role).name).block) for role in roles)
    name, size = ("out_features", "in_features")[dim], layer.weight.shape[dim]
    if size % (mesh.size() * block):
        raise ValueError(
            f"{name}: {size} over {mesh.size()} ranks cuts blocks of {block} of {recipe}; give it "
            f"fewer ranks, or leave the layer to torch: filter_fn of blockscale.convert, and "
            f"torch.distributed.tensor.parallel.{'RowwiseParallel' if dim else 'ColwiseParallel'}"
        )


def _group(mesh: DeviceMesh) -> str:
    name: str = mesh.get_group().group_name
    return name


def _is_of_rows(layout: Placement) -> bool:
    return isinstance(layout, Shard) and layout.dim != -1


def _normal(layout: Any, x: Tensor) -> Any:
    """The layout of ``x``, with a dimension that is counted from the front."""
    return Shard(layout.dim % x.dim()) if isinstance(layout, Shard) else layout


def _dim_of(layout: Any, x: Tensor) -> int:
    dim: int = _normal(layout, x).dim
    if dim == x.dim() - 1:
        raise ValueError(
            f"x: got {tuple(x.shape)}, whose dimension {dim} is the last, and layout {layout}; "
            "shard one of its rows"
        )
    return dim


def _local(x: Tensor, layout: Any, mesh: DeviceMesh) -> Tensor:
    """This rank's part; ValueError for a DTensor that is shared otherwise."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh != mesh:
        raise ValueError(
            f"x: is a DTensor of {x.device_mesh}, the layer is shared by {mesh}; call x.to_local()"
        )
    (found,) = x.placements
    if isinstance(found, Shard) and x.shape[found.dim] % mesh.size():
        raise ValueError(
            f"x: is a DTensor {tuple(x.shape)} with {found} over {mesh.size()} ranks, whose shards "
            "are not even; pad it to a multiple of them"
        )
    if found != _normal(layout, x):
        raise ValueError(
            f"x: is a DTensor with placements {x.placements}; expected ({layout},): give the style "
            "these input_layouts, or call x.redistribute"
        )
    local: Tensor = x.to_local()
    return local
