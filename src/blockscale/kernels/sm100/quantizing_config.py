"""How an accumulator is quantized for the next product: elements, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats import Format, get_format
from ..common.spec import Spec, specify

__all__ = ["FORMATS", "STORE_COLUMNS", "SUBTILE_N", "Quantizing"]

FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")  # the formats that these kernels multiply

SUBTILE_N = 32  # columns of a subtile, which a thread quantizes at once
STORE_COLUMNS = 128  # columns of elements that one TMA store writes


@dataclass(frozen=True, slots=True)
class Quantizing:
    """What ``quantize`` is asked for, by its names.

    Attributes:
        format: one of FORMATS.
        swiglu: the columns are gate and up, and ``silu(gate) * up`` of them is quantized.
        scale_rounding: None for the format's default.
        rounded: the product, and SwiGLU of it, are rounded to bfloat16 before, as if they had been
            stored.
    """

    format: str
    swiglu: bool = False
    scale_rounding: str | None = None
    nonfinite: str = "propagate"
    rounded: bool = False

    @property
    def stored(self) -> Format:
        return get_format(self.format)

    @property
    def spec(self) -> Spec:
        rounding = self.scale_rounding or self.stored.default_scale_rounding
        return specify(self.stored, rounding, self.nonfinite)

    @property
    def b_halves(self) -> int:
        """The columns of the product that make one of the output: gate and up with SwiGLU."""
        return 2 if self.swiglu else 1

    @property
    def has_table(self) -> bool:
        """Whether block scales are relative to a global one: their reciprocals are then in a table
        in shared memory."""
        return self.stored.has_global_scale

    @property
    def subtile_scales(self) -> int:
        """The block scales of a row of a subtile."""
        return SUBTILE_N // self.stored.block[1]

    @property
    def store_row_bytes(self) -> int:
        """The bytes of a row of elements that one TMA store writes."""
        return STORE_COLUMNS * self.stored.element.bits // 8
