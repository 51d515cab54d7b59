"""Where operands of a product lie in memory, as the kernels of a device read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .gemm_kernels import products_on

__all__ = ["OperandLayout", "operand_layout"]


class OperandLayout(NamedTuple):
    """What :func:`blockscale.quantize` is asked for."""

    layout: str = "compact"
    k_major: bool = False


def operand_layout(format: str, device: torch.device) -> OperandLayout:
    """Of operands of ``format`` on ``device``."""
    found = products_on(device)
    if isinstance(found, str):
        return OperandLayout()
    return OperandLayout(found.scale_layout(format), found.k_major)


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: that takes a second.
operand_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]
