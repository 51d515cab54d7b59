"""The linear layer of transformers' GPT-2, whose weight lies (in, out)."""

from __future__ import annotations

from torch import Tensor

from .linear import linear
from .recipe import Recipe
from .seeds import Stepping
from .unscripted import Unscripted

__all__ = ["Conv1D"]


class Conv1D(Unscripted, Stepping):
    """A linear layer whose weight is (in, out), as transformers' Conv1D; made by :func:`convert`.

    Its weight is transposed in every forward pass.
    """

    recipe: Recipe
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        weight, seed = self.weight.mT.contiguous(), self.next_seed()
        return linear(x, weight, self.bias, recipe=self.recipe, seed=seed)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}".removeprefix(", ")
