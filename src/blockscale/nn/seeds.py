"""What layers round stochastically by: a number of each layer, and a step that counts on its
device, so that replays of a CUDA graph differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..hadamard import Hadamard
from ..quantization import Quantization
from ..seed import Seed
from ..watching import is_faked, is_transformed
from .recipe import PRODUCTS_OF, Recipe

__all__ = [
    "LayerSeed",
    "OperandSeed",
    "Stepping",
    "drawn_number",
    "needed",
    "number_of",
    "numbers_of",
    "seed_of",
    "seed_of_numbers",
    "transform_of",
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

    def drawn(self, hadamard: Hadamard, axis: int) -> Hadamard:
        """With signs of this step along ``axis``, which both operands of a product share."""
        product = PRODUCTS_OF[self.role][axis == -2]
        return Hadamard(hadamard.size, Seed(self.layer.number(product), self.layer.step))


def seed_of(seed: LayerSeed | None, role: str) -> OperandSeed | None:
    """That of an operand of this role."""
    return None if seed is None else OperandSeed(seed, role)


def needed(seed: OperandSeed | None) -> OperandSeed:
    """ValueError where there is none, and an operand depends on it."""
    if seed is None:
        raise ValueError(
            "seed: got None, and the recipe rounds stochastically; pass a blockscale.nn."
            "LayerSeed(value, step), or call a layer, which has one for each step"
        )
    return seed


def transform_of(how: Quantization, axis: int, seed: OperandSeed | None) -> Hadamard | None:
    """What is done along ``axis`` in this step."""
    if how.hadamard is None or not how.random_signs:
        return how.hadamard
    return needed(seed).drawn(how.hadamard, axis)


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
    follow, from a number of the layer on: so no two layers share a step, and compiled code, which
    would hold a number of Python's, is the same for all of them. Layers whose recipe rounds nothing
    by chance have none.
    """

    recipe: Recipe
    rounding_start: int = 0
    rounding_step: Tensor

    def set_rounding(self, recipe: Recipe | None, start: int) -> None:
        """Count, or do not, as the recipe asks; ``start``: where the counts of this layer begin."""
        before, self.rounding_start = self.rounding_start, start
        if recipe is None or not recipe.is_random:
            self._buffers.pop("rounding_step", None)
        elif not self.has_steps or self.rounding_step.is_meta:
            self._begin_steps()
        else:
            with torch.no_grad():
                self.rounding_step.add_(start - before)

    def set_steps(self, count: int) -> None:
        """Go on as after so many forward passes."""
        with torch.no_grad():
            self.rounding_step.fill_(self.rounding_start + count)

    def _begin_steps(self) -> None:
        """Where the parameters are."""
        device, start = next((p.device for p in self.parameters()), None), self.rounding_start
        with torch.inference_mode(False):  # what counts later may do so outside
            step = torch.full((), start, dtype=torch.int64, device=device)
        self.register_buffer("rounding_step", step, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A step on the meta device has no value, and ``to_empty`` gives it none."""
        begins = self.has_steps and self.rounding_step.is_meta
        super()._apply(fn, recurse)
        if begins and not self.rounding_step.is_meta:
            self.set_steps(0)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nor does what is assigned to a layer on the meta device."""
        super()._load_from_state_dict(*args, **kwargs)
        if self.has_steps and self.rounding_step.is_meta:
            self._begin_steps()

    def go_on_from(self, other: torch.nn.Module) -> None:
        """Take the number of a layer whose parameters this one was given, and its count."""
        if isinstance(other, Stepping) and other.has_steps:
            self.set_rounding(self.recipe, other.rounding_start)
            if self.has_steps:
                self.rounding_step = other.rounding_step
        else:
            self.set_rounding(self.recipe, self.rounding_start)

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
        return LayerSeed(0, self.rounding_step.clone(), *_place())


def _place() -> tuple[int, int]:
    """This rank and how many there are, which are taken to share a batch."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


_drawn: tuple[bytes, int] = b"", 0  # the generator's state at the last time, and how often


def drawn_number() -> int:
    """60 bits for a layer that has no name, of the state of torch's generator, which stays as it
    is: models of a seed begin alike, whatever rounds in them."""
    global _drawn
    if is_faked():
        return 0
    state = torch.get_rng_state().numpy().tobytes()
    digest, before = hashlib.sha256(state).digest(), _drawn
    _drawn = digest, before[1] + 1 if before[0] == digest else 0
    return number_of(f"{digest.hex()} {_drawn[1]}")


def number_of(name: str) -> int:
    """60 bits for a layer's name, the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 4
