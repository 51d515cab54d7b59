"""Where operands of a product lie in memory, as the tensor cores of a device read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..remember import remembered

__all__ = ["OperandLayout", "operand_layout"]


class OperandLayout(NamedTuple):
    """What :func:`blockscale.quantize` is asked for."""

    layout: str = "compact"
    k_major: bool = False


@dataclass(frozen=True, slots=True)
class _Wants:
    """``layouts``: of the scales of formats; those of others are read compact."""

    layouts: Mapping[str, str]
    k_major: bool


_TILED = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")

#: Of compute capabilities, before the dot.
_WANTS = {
    9: _Wants({"fp8_1x128": "sm90"}, k_major=True),
    10: _Wants(dict.fromkeys(_TILED, "tcgen05"), k_major=False),
}
_ANYWHERE = _Wants({}, k_major=False)


@remembered
def operand_layout(format: str, device: torch.device) -> OperandLayout:
    """Of operands of ``format`` on ``device``.

    Hopper multiplies 8-bit operands only where the contraction is contiguous, and its kernels load
    the scales of ``fp8_1x128`` by TMA. Blackwell's take 8-bit operands in either order, and scales
    in the tiles that its tensor cores read.
    """
    wants = _WANTS.get(_capability(device.index), _ANYWHERE) if device.type == "cuda" else _ANYWHERE
    return OperandLayout(wants.layouts.get(format, "compact"), wants.k_major)


def _capability(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: that takes a second.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
