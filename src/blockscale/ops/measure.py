"""What can be told of a tensor and of its quantized form: no ops, they return Python's numbers."""

from __future__ import annotations

from torch import Tensor

from .. import reference
from ..error_sums import ErrorSums
from ..formats import Format
from ..kernels.cpu import calls as cpu
from .backends import no_cpu_kernels

__all__ = ["amax", "error_sums"]


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude; see reference.amax."""
    return (cpu if _compiled(x) else reference).amax(x)


def error_sums(
    x: Tensor, data: Tensor, scale: Tensor, format: Format, global_scale: Tensor | None
) -> ErrorSums:
    """Compare a tensor with data and compact scales along -1; see reference.error_sums."""
    where = cpu if _compiled(x) else reference
    return where.error_sums(x, data, scale, format, global_scale)


def _compiled(x: Tensor) -> bool:
    return x.device.type == "cpu" and not no_cpu_kernels()
