# mypy: ignore-errors
"""SwiGLU and its backward of fp32 rows: bit for bit ``reference.swiglu``.

Every operation is one of IEEE fp32, in the reference's order; see docs/numerics.md.
"""

from __future__ import annotations

import numpy as np

from ...jit import inlined, spliced
from .intrinsics import as_bits, as_float, fma, shl

ONE = np.float32(1)
LARGEST, MINUS_LOG2_E, MAGIC, P5, P4, P3, P2, P1 = (
    np.uint32(bits).view(np.float32)
    for bits in (
        *(0x42B00F33, 0xBFB8AA3B, 0x4B400000),
        *(0x3AAE5FA3, 0x3C1E7A05, 0x3D635ACB, 0x3E75FCD2, 0x3F317215),  # of 2^f
    )
)


@inlined
def exp_minus_magnitude(gate):
    """exp(-abs(gate)): 2^f times 2^n."""
    a = abs(gate)
    a = a if a < LARGEST else LARGEST  # that of a NaN
    n = fma(a, MINUS_LOG2_E, MAGIC) - MAGIC
    f = fma(a, MINUS_LOG2_E, -n)
    p = fma(fma(fma(fma(fma(P5, f, P4), f, P3), f, P2), f, P1), f, ONE)
    return as_float(np.int32(as_bits(p) + shl(np.int32(n), np.int32(23))))


@inlined
def sigmoid_terms(gate):
    """The sigmoid of abs(gate), silu of the gate, and its slope over that sigmoid."""
    e = exp_minus_magnitude(gate)
    sigmoid, t = ONE / (ONE + e), gate * e
    silu = (t if gate < 0 else gate) * sigmoid
    return sigmoid, silu, fma(t, sigmoid, e if gate < 0 else ONE)


@spliced
def swiglu_rows(x, out, first, last):
    """Rows ``first`` to ``last`` of ``out`` (M, H), made of ``x`` (M, 2H)."""
    width = out.shape[1]
    for row in range(first, last):
        for j in range(width):
            _, silu, _ = sigmoid_terms(x[row, j])
            out[row, j] = silu * x[row, width + j]


@spliced
def swiglu_backward_rows(grad, x, out, first, last):
    """Rows ``first`` to ``last`` of ``out`` (M, 2H), the gradient of ``x``, from ``grad``."""
    width = grad.shape[1]
    for row in range(first, last):
        for j in range(width):
            g = grad[row, j]
            sigmoid, silu, slope = sigmoid_terms(x[row, j])
            out[row, j] = (g * (sigmoid * slope)) * x[row, width + j]
            out[row, width + j] = g * silu
