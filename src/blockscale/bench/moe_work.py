"""What a layer of experts moves and multiplies, step by step: what its steps are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .moe_shapes import Shape

__all__ = ["Work", "work"]


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that are moved at least; or a product of groups: all rows of A, rows of each B, K, and
    how many groups there are."""

    nbytes: float = 0
    product: tuple[int, int, int, int] | None = None

    @property
    def flops(self) -> float:
        if self.product is None:
            return 0
        m, n, k, _ = self.product
        return 2 * m * n * k


def work(shape: Shape, size: float, weight: float) -> Mapping[str, Work]:
    """Of each step of forward and backward, by its name, in order; ``size`` and ``weight`` are
    bytes of a quantized element, of rows and of matrices. Then what weights take, and gathers.

    A product along K is counted as one whose groups have a row of A for each row of its result.
    """
    hidden, inner, groups, pairs = shape.hidden, shape.intermediate, shape.experts, shape.pairs
    wide, tokens, held = pairs * hidden, pairs * inner, 3 * groups * hidden * inner
    sums, each = 2 * hidden * (pairs + shape.tokens), pairs // groups

    def gather(axes: int) -> Work:
        return Work(wide * (2 + size * axes))

    def product(rows: int, n: int, k: int) -> Work:
        return Work(product=(rows, n, k, groups))

    return {
        "route": Work(),
        "gather + quantize, rows": gather(1),
        "up": product(pairs, 2 * inner, hidden),
        "SwiGLU + quantize, rows": Work(tokens * (4 + size)),
        "down": product(pairs, hidden, inner),
        "combine": Work(sums),
        "gather + quantize, rows and columns": gather(2),
        "dgrad, down": product(pairs, inner, hidden),
        "weighted SwiGLU + quantize, columns": Work(tokens * (4 + size)),
        "wgrad, down": product(groups * hidden, inner, each),
        "SwiGLU backward + quantize, both": Work(tokens * (6 + 4 * size)),
        "dgrad, up": product(pairs, hidden, 2 * inner),
        "combine, dx": Work(sums),
        "gather + quantize, columns": gather(1),
        "wgrad, up": product(groups * 2 * inner, hidden, each),
        "weights, rows": Work(held * (2 + weight)),
        "weights, columns": Work(held * (2 + weight)),
        "quantize both, gathered in the call": gather(2),
        "quantize both, gathered before": gather(2),
        "quantize both, gathered by torch": gather(2),
    }
