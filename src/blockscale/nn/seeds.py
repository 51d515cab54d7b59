"""What layers round stochastically by: a number of each layer, and a step that counts on its
device, so that replays of a CUDA graph differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..seed import Numbers, Seed
from ..watching import is_transformed
from .recipe import PRODUCTS_OF, Recipe

__all__ = [
    "LayerSeed",
    "OperandSeed",
    "Stepping",
    "number_of",
    "numbers_of",
    "seed_of_numbers",
    "set_rounding_step",
]

#: What numbers of a layer are for: operands, and signs of products.
PURPOSES = "activations", "weights", "gradients", "fprop", "dgrad", "wgrad"


class LayerSeed(NamedTuple):
    """Of one pass of a layer.

    Attributes:
        value: of the layer.
        step: int64, on the layer's device.
        rank, ranks: which part of the batch's rows the layer has, all of one size.
    """

    value: int
    step: Tensor
    rank: int = 0
    ranks: int = 1

    def number(self, purpose: str) -> int:
        """64 bits for one of ``PURPOSES``."""
        return (self.value * 8 + PURPOSES.index(purpose) + 2**63) % 2**64 - 2**63


class OperandSeed(NamedTuple):
    """Of activations, weights or gradients of a pass."""

    layer: LayerSeed
    role: str

    def of(self, shape: Sequence[int]) -> Seed:
        """Of an operand of ``shape``; rows of activations and gradients are those of one rank."""
        layer, number = self.layer, self.layer.number(self.role)
        if self.role == "weights" or layer.ranks == 1:
            return Seed(number, layer.step)
        rows, *rest = shape
        whole = rows * layer.ranks, *rest
        return Seed(number, layer.step, (rows * layer.rank, *[0] * len(rest)), whole)

    def signs(self, axis: int) -> Numbers:
        """Of the signs of a transform along ``axis``, which both operands of a product share."""
        product = PRODUCTS_OF[self.role][axis == -2]
        return Numbers(self.layer.number(product), self.layer.step, 0, 0, 0)


def numbers_of(seed: LayerSeed | None) -> tuple[list[int] | None, Tensor | None]:
    """As ops take it."""
    return (None, None) if seed is None else ([seed.value, seed.rank, seed.ranks], seed.step)


def seed_of_numbers(numbers: list[int] | None, step: Tensor | None) -> LayerSeed | None:
    """What has these numbers."""
    if numbers is None or step is None:
        return None
    value, rank, ranks = numbers
    return LayerSeed(value, step, rank, ranks)


class Stepping(torch.nn.Module):
    """A base of layers that may round stochastically.

    ``rounding_step``, a buffer that no state_dict has, counts forward passes that a backward may
    follow; layers whose recipe rounds nothing by chance have none.
    """

    recipe: Recipe
    rounding_value: int = 0
    rounding_step: Tensor

    def set_rounding(self, recipe: Recipe | None, value: int) -> None:
        """Count, or do not, as the recipe asks; ``value``: a number of this layer."""
        self.rounding_value = value
        if recipe is None or not recipe.is_random:
            self._buffers.pop("rounding_step", None)
        elif not self.has_steps or self.rounding_step.is_meta:
            self._begin_steps()

    def _begin_steps(self) -> None:
        """At 0, where the parameters are."""
        device = next((p.device for p in self.parameters()), None)
        with torch.inference_mode(False):  # what counts later may do so outside
            step = torch.zeros((), dtype=torch.int64, device=device)
        self.register_buffer("rounding_step", step, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A step on the meta device has no value, and ``to_empty`` gives it none."""
        begins = self.has_steps and self.rounding_step.is_meta
        super()._apply(fn, recurse)
        if begins and not self.rounding_step.is_meta:
            self.rounding_step.zero_()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nor does what is assigned to a layer on the meta device."""
        super()._load_from_state_dict(*args, **kwargs)
        if self.has_steps and self.rounding_step.is_meta:
            self._begin_steps()

    def go_on_from(self, other: torch.nn.Module) -> None:
        """Take the number of a layer whose parameters this one was given, and its count."""
        self.set_rounding(self.recipe, other.rounding_value if isinstance(other, Stepping) else 0)
        if isinstance(other, Stepping) and other.has_steps and self.has_steps:
            self.rounding_step = other.rounding_step

    @property
    def has_steps(self) -> bool:
        return "rounding_step" in self._buffers

    def next_seed(self) -> LayerSeed | None:
        """Of a forward pass and the backward that follows."""
        if not self.has_steps:
            return None
        if torch.is_grad_enabled() and not is_transformed():
            self.rounding_step.add_(1)
        # a copy: the next forward may come before this one's backward
        return LayerSeed(self.rounding_value, self.rounding_step.clone(), *_place())


def _place() -> tuple[int, int]:
    """This rank and how many there are, which are taken to share a batch."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def number_of(name: str) -> int:
    """60 bits for a layer's name, the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 4


def set_rounding_step(model: torch.nn.Module, step: int) -> None:
    """Let layers that round stochastically go on as after ``step`` forward passes.

    >>> model = bs.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), bs.Recipe.nvfp4())
    >>> bs.nn.set_rounding_step(model, 1000)  # of a run that was saved after as many

    Each forward pass with gradients counts one, and so does one that activation checkpointing
    repeats. The count is ``rounding_step`` of each layer, a buffer that no state_dict has. Raises
    ValueError where no layer rounds stochastically, and for a ``step`` that is no count.
    """
    if type(step) is not int or not 0 <= step < 2**62:
        raise ValueError(f"step: got {step!r}; expected a number of forward passes, 0 or more")
    found = [m for m in model.modules() if isinstance(m, Stepping) and m.has_steps]
    if not found:
        raise ValueError(
            "model: no layer of it rounds stochastically; convert it by a recipe that does, as "
            "blockscale.Recipe.nvfp4()"
        )
    for module in found:
        module.rounding_step.fill_(step)
