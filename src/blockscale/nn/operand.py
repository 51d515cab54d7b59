"""How one operand of a layer is quantized, along both of its axes."""

from __future__ import annotations

from typing import NamedTuple

from ..quantization import PLAIN, Quantization

__all__ = ["Operand"]


class Operand(NamedTuple):
    """Activations, weights or gradients, as a recipe says.

    Attributes:
        format: a name of :data:`blockscale.formats`.
        rows, columns: beside it, of the form along -1 and of that along -2.
    """

    format: str
    scale_rounding: str | None
    rows: Quantization = PLAIN
    columns: Quantization = PLAIN

    @property
    def is_plain(self) -> bool:
        """Whether each element is rounded to nearest, by a scale of its block."""
        return self.rows == PLAIN == self.columns

    @property
    def is_random(self) -> bool:
        """Whether it depends on a seed."""
        return self.rows.is_random or self.columns.is_random

    @property
    def is_transformed(self) -> bool:
        return self.rows.hadamard is not None or self.columns.hadamard is not None

    @property
    def has_one_global_scale(self) -> bool:
        """Whether both forms have the global scale of the same elements, found alike."""
        return not self.is_transformed and self.rows.scaling == self.columns.scaling

    def contraction(self, axis: int, size: int) -> int:
        """Elements along ``axis``, with the zeros that fill the last block of a transform."""
        hadamard = (self.rows if axis == -1 else self.columns).hadamard
        return size if hadamard is None else -(-size // hadamard.size) * hadamard.size
