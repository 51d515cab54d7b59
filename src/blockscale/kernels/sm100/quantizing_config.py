"""What becomes of sums that the next product reads: elements, and a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats import Format, get_format
from ..common.spec import Spec, specify

__all__ = ["BOX_COLUMNS", "FORMATS", "STEP", "Quantizing"]

FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")  # that these kernels multiply

STEP = 32  # columns that a thread quantizes at once
BOX_COLUMNS = 128  # of elements that are stored at once


@dataclass(frozen=True, slots=True)
class Quantizing:
    """Names of ``quantize``.

    Attributes:
        format: one of FORMATS.
        swiglu: the columns are gate and up, and ``silu(gate) * up`` of them is quantized.
        scale_rounding: None for the format's default.
    """

    format: str
    swiglu: bool = False
    scale_rounding: str | None = None
    nonfinite: str = "propagate"

    @property
    def stored(self) -> Format:
        return get_format(self.format)

    @property
    def spec(self) -> Spec:
        rounding = self.scale_rounding or self.stored.default_scale_rounding
        return specify(self.stored, rounding, self.nonfinite)

    @property
    def parts(self) -> int:
        """Columns of the sums that make one of the output."""
        return 2 if self.swiglu else 1

    @property
    def has_table(self) -> bool:
        """Whether scales are relative to a global one, and their reciprocals in shared memory."""
        return self.stored.has_global_scale

    @property
    def step_scales(self) -> int:
        """Of a row, in a step."""
        return STEP // self.stored.block[1]

    @property
    def box_bytes(self) -> int:
        """Of a row of elements that is stored at once."""
        return BOX_COLUMNS * self.stored.element.bits // 8
