"""What a kernel does to elements beside plain quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NOTHING", "Applied"]


@dataclass(frozen=True)
class Applied:
    """Values in a block of threads, of what a launch is given; None of what is not asked for.

    Attributes:
        noise: random bits of elements.
        scale_noise: random bits of scales, which are those of blocks' first elements.
        transform: of blocks of elements, before they are quantized.
        squares: whose maxima blocks take for their own.
    """

    noise: Any = None
    transform: Any = None
    squares: Any = None
    scale_noise: Any = None


NOTHING = Applied()
