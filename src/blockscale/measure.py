"""What can be measured of a tensor and of its quantized form."""

from __future__ import annotations

from torch import Tensor

from .error_sums import ErrorSums
from .ops import measure
from .stored import is_per_matrix
from .tensor import ScaledTensor

__all__ = ["ErrorSums", "amax", "error_sums"]


def amax(x: Tensor) -> Tensor:
    """The largest finite magnitude of ``x`` (float32, bfloat16, float16), an fp32 scalar.

    0 where there is none.
    """
    return measure.amax(x.detach())


def error_sums(x: Tensor, q: ScaledTensor) -> ErrorSums:
    """Compare ``x`` (..., M, K) with ``q``, which it was quantized to.

    >>> x = torch.randn(64, 256)
    >>> sums = error_sums(x, bs.quantize(x, "mxfp8"))
    >>> 10 * math.log10(sums.signal / sums.noise)  # SQNR in dB
    31...

    Results do not depend on the number of threads. Raises ValueError unless ``q`` has the shape of
    ``x``, compact scales and blocks along -1.
    """
    if x.shape != q.shape or q.axis != -1 or q.layout_name != "compact" or q.offsets is not None:
        raise ValueError(
            f"q: is {tuple(q.shape)} along axis {q.axis} with {q.layout_name!r} scales; expected "
            f"the shape of x, {tuple(x.shape)}, axis -1 and 'compact'"
        )
    if not x.numel():
        raise ValueError(f"x: has shape {tuple(x.shape)}, there is nothing to compare")
    x = x.detach()
    if is_per_matrix(q.global_scale, q.shape):
        return ErrorSums.total([error_sums(x[i], q[i]) for i in range(len(x))])  # type: ignore[arg-type]
    return measure.error_sums(x, q.qdata, q.scale, q.format, q.global_scale)
