"""What a call wants done to elements beside plain quantization."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...hadamard import Hadamard
from ...seed import Numbers

__all__ = ["PLAIN", "Further"]


class Further(NamedTuple):
    """Nothing, unless told.

    Attributes:
        numbers: round stochastically so; its step may be a tensor, () int64 on the device.
        hadamard: transform along the contraction before.
    """

    numbers: Numbers | None = None
    hadamard: Hadamard | None = None

    @property
    def fours(self) -> bool:
        """As of its numbers."""
        return self.numbers is None or self.numbers.fours

    def arguments(self, device: torch.device) -> tuple[Any, ...] | None:
        """Of a kernel: step, value, first, row and matrix; then low and high signs, or the step
        and the value that draw them."""
        found: tuple[Any, ...] = ()
        if self.numbers is not None:
            value, step, *places = self.numbers
            if not isinstance(step, Tensor):
                step = torch.full((), step, dtype=torch.int64, device=device)
            found = step, value, *places
        if self.hadamard is not None:
            (_, *words), drawn = self.hadamard.for_op()
            found += (*words,) if drawn is None else (drawn, *words)
        return found or None


#: Nothing of it.
PLAIN = Further()
