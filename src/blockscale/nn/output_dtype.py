"""The dtype of a layer's output."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["output_dtype"]


def output_dtype(x: Tensor) -> torch.dtype:
    """That of ``x``, or of torch.autocast where it is on."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # it knows no meta
        return torch.get_autocast_dtype(device)
    return x.dtype
