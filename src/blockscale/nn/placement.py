"""Where operands of a product lie in memory, as the tensor cores of a device read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..remember import remembered

__all__ = ["Placement", "placement"]


class Placement(NamedTuple):
    """What :func:`blockscale.quantize` is asked for."""

    layout: str = "compact"
    k_major: bool = False


_HOPPER = 9  # compute capability, before the dot
_HOPPER_LAYOUTS = {"fp8_1x128": "sm90"}  # of scales; all others are read as they are


@remembered
def placement(format: str, device: torch.device) -> Placement:
    """Of operands of ``format`` on ``device``.

    Hopper multiplies 8-bit operands only where the contraction is contiguous, and its kernels load
    the scales of ``fp8_1x128`` by TMA.
    """
    if device.type != "cuda" or _capability(device.index) != _HOPPER:
        return Placement()
    return Placement(_HOPPER_LAYOUTS.get(format, "compact"), k_major=True)


@torch.compiler.assume_constant_result
def _capability(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]
