"""Steps of layers over ranks as compilers record them: ops, which they trace afterwards.

Where no compiler records, what the ops are made of is called at once. Graphs know groups by their
names, and have no :class:`GatheredInput`: in its place is a plain tensor, gathered in high
precision where anything but a layer over ranks reads it, and else nowhere, as nobody needs it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ..nn.compiled import fingerprint
from ..nn.layer_ops import recipe_of
from ..nn.output_dtype import output_dtype
from ..nn.recipe import Recipe
from ..ops.operation import composite
from . import gathered_input, parallel_product
from .functional_collectives import group_of
from .gathered_input import GatheredInput
from .version import Version

__all__ = ["gather_input", "multiply", "read_input", "reduce_output"]


def gather_input(x: Tensor, dim: int, group: str) -> Tensor:
    """Shards ``x`` of all ranks as one, for layers over ranks and whatever else reads it."""
    if torch.compiler.is_compiling():
        return parallel_gather(x, dim, group, _known(x.device, group))
    return gathered_input.gather_input(x, dim, group_of(group))


def read_input(x: Tensor, dim: int | None, group: str) -> Tensor:
    """``x`` as a layer over ranks reads it, which all have, or of which each has a shard along
    ``dim``."""
    if torch.compiler.is_compiling():
        return parallel_input(x, dim, group, _known(x.device, group))
    return _read_input(x, dim, group)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, group: str) -> Tensor:
    """``x @ weight.T + bias`` of what this rank has."""
    given, out_dtype = (x, weight, bias), output_dtype(x)
    if torch.compiler.is_compiling():
        how: Any = recipe.text, out_dtype, group, _known(x.device, group, recipe.text)
        return parallel_multiply(*given, *how)
    return parallel_product.multiply(*given, recipe, out_dtype, group_of(group))


def reduce_output(y: Tensor, bias: Tensor | None, dim: int | None, group: str) -> Tensor:
    """The sum of all ranks' ``y``, and ``bias`` once: a shard along ``dim``, or the whole."""
    if torch.compiler.is_compiling():
        return parallel_reduce(y, bias, dim, group, _known(y.device, group))
    return gathered_input.reduce_output(y, bias, dim, group_of(group))


def _known(device: torch.device, group: str, recipe: str = "") -> str:
    """Return what a traced graph depends on, and what caches of graphs would not see otherwise."""
    return f"{fingerprint(device, recipe)} {dist.get_world_size(group_of(group))}"


# As torch.compiler.assume_constant_result does.
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _read_input(x: Tensor, dim: int | None, group: str) -> Tensor:
    if isinstance(x, GatheredInput):
        return x.partial
    if dim is None:
        return gathered_input.replicate_input(x, group_of(group))
    return gathered_input.gather_input(x, dim, group_of(group)).partial


@composite
def parallel_gather(x: Tensor, dim: int, group: str, fingerprint: str) -> Tensor:
    return _plain(gathered_input.gather_input(x, dim, group_of(group)))


@composite
def parallel_input(x: Tensor, dim: int | None, group: str, fingerprint: str) -> Tensor:
    return _plain(_read_input(_behind(x), dim, group))


@composite
def parallel_multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: str,
    out_dtype: torch.dtype,
    group: str,
    fingerprint: str,
) -> Tensor:
    given = _behind(x), weight, bias
    return parallel_product.multiply(*given, recipe_of(recipe), out_dtype, group_of(group))


@composite
def parallel_reduce(
    y: Tensor, bias: Tensor | None, dim: int | None, group: str, fingerprint: str
) -> Tensor:
    return gathered_input.reduce_output(y, bias, dim, group_of(group))


def _plain(x: Tensor) -> Tensor:
    """What stands for ``x``, which is behind it while one graph is traced and nobody writes to it.
    Else layers get the values alone, and sum gradients of them: more travels, to the same sums in
    another order."""
    if not isinstance(x, GatheredInput):
        return x
    found: Any = x.clone()
    traced = isinstance(found, FunctionalTensor)
    if traced:
        found.behind = x, Version(found)
    return found


def _behind(x: Tensor) -> Tensor:
    found: tuple[Tensor, Version] | None = getattr(x, "behind", None)
    return found[0] if found is not None and found[1].is_of(x) else x
