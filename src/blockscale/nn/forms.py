"""A tensor quantized for the products that read it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..ops.operand_layout import operand_layout
from ..quantize import quantize, quantize_both
from ..tensor import ScaledTensor

__all__ = ["Forms", "quantize_forms"]


class Forms(NamedTuple):
    """A matrix blocked along its rows (axis -1) and along its columns (-2); None: not made."""

    rows: ScaledTensor | None = None
    columns: ScaledTensor | None = None


def quantize_forms(
    x: Tensor,
    format: str,
    scale_rounding: str | None,
    *,
    rows: bool = False,
    columns: bool = False,
    global_scale: Tensor | None = None,
) -> Forms:
    """The forms of ``x`` (M, K), or of a batch (G, M, K), that are asked for, both from one read.

    They lie in memory as its device multiplies them, a batch as products of groups read it. The
    contraction is padded with zeros to whole blocks. ``global_scale`` is that of a form made
    before: NVFP4's costs a read of ``x``.
    """
    if not (rows or columns):
        return Forms()
    layout, k_major = operand_layout(format, x.device)
    if x.dim() > 2:  # scales of a batch have no other layout
        layout, k_major = "compact", True
    how: Any = {"scale_rounding": scale_rounding, "layout": layout, "pad": True, "k_major": k_major}
    if global_scale is not None:
        how["global_scale"] = global_scale
    if rows and columns:
        return Forms(*quantize_both(x, format, **how))
    one = quantize(x, format, -1 if rows else -2, **how)
    return Forms(rows=one) if rows else Forms(columns=one)
