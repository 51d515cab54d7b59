"""A tensor quantized for the products that read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.operand_layout import operand_layout
from ..quantization import Quantization
from ..quantize import quantize, quantize_both
from ..tensor import ScaledTensor
from .operand import Operand
from .seeds import OperandSeed, needed, transform_of

__all__ = ["Forms", "padded", "quantize_forms"]


class Forms(NamedTuple):
    """A matrix blocked along its rows (axis -1) and along its columns (-2); None: not made."""

    rows: ScaledTensor | None = None
    columns: ScaledTensor | None = None


def quantize_forms(
    x: Tensor,
    operand: Operand,
    *,
    rows: bool = False,
    columns: bool = False,
    global_scale: Tensor | None = None,
    seed: OperandSeed | None = None,
) -> Forms:
    """The forms of ``x`` (M, K), or of a batch (G, M, K), that are asked for, both from one read
    where both are quantized alike.

    They lie in memory as its device multiplies them, a batch as products of groups read it. The
    contraction is padded with zeros to whole blocks, and to those of a transform: a form that is
    transformed has the shape of what was padded. ``global_scale`` is that of a form made before,
    of an operand that has one for both: NVFP4's costs a read of ``x``. ``seed``: for an operand
    that is rounded stochastically.
    """
    if not (rows or columns):
        return Forms()
    layout, k_major = operand_layout(operand.format, x.device)
    if x.dim() > 2:  # scales of a batch have no other layout
        layout, k_major = "compact", True
    how: Any = {"scale_rounding": operand.scale_rounding, "layout": layout, "pad": True}
    how["k_major"] = k_major
    if rows and columns and operand.rows == operand.columns and operand.rows.hadamard is None:
        how |= _arguments(operand.rows, x.shape, global_scale, seed)
        return Forms(*quantize_both(x, operand.format, **how))
    made: dict[str, ScaledTensor] = {}
    for name, axis, asked in (("rows", -1, rows), ("columns", -2, columns)):
        if asked:
            quantization = getattr(operand, name)
            given = padded(x, axis, operand.contraction(axis, x.shape[axis]))
            more = _arguments(quantization, given.shape, global_scale, seed)
            more["hadamard"] = transform_of(quantization, axis, seed)
            made[name] = quantize(given, operand.format, axis, **more, **how)
    return Forms(**made)


def _arguments(
    quantization: Quantization,
    shape: Sequence[int],
    global_scale: Tensor | None,
    seed: OperandSeed | None,
) -> dict[str, Any]:
    """Of ``quantize``."""
    found: dict[str, Any] = {"square": quantization.square, "scaling": quantization.scaling}
    if global_scale is not None:
        found["global_scale"] = global_scale
    if quantization.is_random:
        found["seed"] = needed(seed).of(shape)
    return found


def padded(x: Tensor, axis: int, size: int) -> Tensor:
    """``x`` with zeros up to ``size`` along ``axis``: transforms mix them with what is there."""
    more = size - x.shape[axis]
    return torch.nn.functional.pad(x, (0, more) if axis == -1 else (0, 0, 0, more)) if more else x
