"""What to compile to widen A, and put it in order, for a product that widens B."""

from __future__ import annotations

from dataclasses import dataclass

from .mixed_config import BF16, promotes

__all__ = ["PermuteConfig"]


@dataclass(frozen=True, slots=True)
class PermuteConfig:
    """A kernel: all that its code depends on.

    Attributes:
        a_format: the name of a format for which ``mixed_config.why_not`` is empty, or "bf16".
        block_k: columns that are put in the order of B's lanes together; 0: they stay where they
            are.
        clears: sets counters of the product that follows to zero.
    """

    a_format: str
    block_k: int
    clears: bool = False
    arch: str = "sm_90a"

    @property
    def applies_scales(self) -> bool:
        """Whether elements are multiplied by their block scales, which the product does not do."""
        return self.a_format != BF16 and not promotes(self.a_format)
