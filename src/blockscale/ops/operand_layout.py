"""Where operands of a product lie in memory, as the kernels of a device read them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..kernels.common.gpu import Gpu
from ..kernels.common.runtime import gpu_of
from .gemm_kernels import products_of

__all__ = ["OperandLayout", "operand_layout"]


class OperandLayout(NamedTuple):
    """What :func:`blockscale.quantize` is asked for."""

    layout: str = "compact"
    k_major: bool = False


def operand_layout(format: str, device: torch.device) -> OperandLayout:
    """Of operands of ``format`` on ``device``."""
    if torch.compiler.is_compiling():  # which knows plain values as constants, no tuple of them
        return OperandLayout(_layout(format, device), _k_major(format, device))
    return _read_by(gpu_of(device), format)


@lru_cache
def _read_by(gpu: Gpu | None, format: str) -> OperandLayout:
    found = "" if gpu is None else products_of(gpu)
    if isinstance(found, str):
        return OperandLayout()
    return OperandLayout(found.scale_layout(format), found.k_major)


def _layout(format: str, device: torch.device) -> str:
    return _read_by(gpu_of(device), format).layout


def _k_major(format: str, device: torch.device) -> bool:
    return _read_by(gpu_of(device), format).k_major


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: that takes a second.
_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]
_k_major._dynamo_marked_constant = True  # type: ignore[attr-defined]
