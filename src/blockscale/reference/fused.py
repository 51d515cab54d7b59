"""What may come before a quantizer in one kernel: SwiGLU and its backward, bit for bit.

Inputs are widened to fp32 and every step is one IEEE fp32 operation, to nearest even, in the order
written here, so that any processor gives the same bytes: there is no exp and nothing approximate.
The result is rounded once to the dtype of ``x``. Which NaN a NaN is stays open.

Torch computes each step by itself, so that nothing is contracted, and its fp32 sums, products and
quotients of two tensors are IEEE's on CPUs and GPUs. A quotient with a number is not (a GPU
multiplies by the reciprocal), nor is a root, and there is no fma: see :func:`square_root` and
:func:`fma`. A CPU thread that called ``torch.set_flush_denormal(True)`` loses the subnormals.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

__all__ = [
    "fma",
    "square_root",
    "sum_of_pairs",
    "swiglu",
    "swiglu_backward",
    "weight_gradient",
    "weighted",
    "weighted_swiglu",
    "weighted_swiglu_backward",
]


def _float(bits: int) -> float:
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


# The bits of these constants are part of the definition.
LOG2_E = _float(0x3FB8AA3B)  # log2(e) to nearest
LARGEST_GATE = _float(0x42B00F33)  # 88.03, the last one below 127 / LOG2_E
TO_INTEGER = _float(0x4B400000)  # 1.5 * 2^23: what is summed with it loses all behind the point
#: 2^f for -0.5 <= f <= 0.5 with a relative error below 9.7e-8, highest power first: the minimax
#: polynomial of degree 5 that is 1 at 0, its coefficients rounded to fp32 one after the other.
POWER_OF_2 = tuple(
    map(_float, (0x3AAE5FA3, 0x3C1E7A05, 0x3D635ACB, 0x3E75FCD2, 0x3F317215, 0x3F800000))
)


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x`` (..., 2H), the gate in its first H columns: (..., H) like ``x``.

    A gate below -88.03 gives itself times 60 * 2^-149, where exp underflows. NaN comes only from
    what is not finite, or from an infinity that the products overflow to.
    """
    gate, up = _halves(x)
    return (_silu(gate, *_sigmoid(gate)) * up).to(x.dtype)


def swiglu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``x`` (..., 2H), like it, from ``grad`` (..., H) of ``swiglu(x)``."""
    gate, up = _halves(x)
    grad = grad.to(torch.float32)
    e, sigmoid = _sigmoid(gate)
    # silu' = s * (1 + g * (1 - s)), where s is the sigmoid or e times it, and 1 - s the other one
    start = torch.where(gate < 0, e, torch.ones_like(e))
    slope = sigmoid * fma(gate * e, sigmoid, start)
    # the slope is at most 1.1: with it first, nothing overflows to meet a zero
    return torch.cat(((grad * slope) * up, grad * _silu(gate, e, sigmoid)), -1).to(x.dtype)


def weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """``swiglu(x)`` (M, H), each row times its fp32 weight of ``weights`` (M,); rounded twice."""
    return weighted(swiglu(x), weights)


def weighted_swiglu_backward(grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` (M, 2H), like it, and of ``weights`` (M,), in fp32, from ``grad`` (M, H)
    of ``weighted_swiglu(x, weights)``.

    ``swiglu_backward`` of ``grad`` times weights, rounded to the dtype of ``x``. A weight's is the
    sum of ``grad`` times ``swiglu(x)``: of 64 columns each by a binary tree of neighbours, then
    these sums one after the other, from zero on.
    """
    return swiglu_backward(weighted(grad, weights), x), weight_gradient(grad, swiglu(x))


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Each row of ``values`` (M, H) times its fp32 weight, rounded to their dtype."""
    return (values.to(torch.float32) * weights[:, None]).to(values.dtype)


def weight_gradient(grad: Tensor, values: Tensor) -> Tensor:
    """That of the weights of ``values``, from ``grad`` of ``weighted``, in fp32."""
    total = grad.to(torch.float32) * values.to(torch.float32)
    total = torch.nn.functional.pad(total, (0, -total.shape[-1] % 64)).unflatten(-1, (-1, 64))
    return sum(sum_of_pairs(total).unbind(-1), total.new_zeros(len(total)))


def sum_of_pairs(x: Tensor) -> Tensor:
    """Over the last dimension, a power of two: neighbours first, then sums of two, and so on."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x.squeeze(-1)


def square_root(x: Tensor) -> Tensor:
    """The fp32 root, rounded once. Torch's own is off by one now and then, where it is MKL's.

    A root of a 24-bit number is at least 2^-51 of itself away from where fp32 rounding changes,
    more than the error of a root in float64.
    """
    return x.to(torch.float64).sqrt().to(torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 ``a * b + c`` rounded once.

    float64 holds the product. The sum is rounded to float64 to odd (where it is not exact, its last
    bit says so), after which rounding to fp32 is as good as rounding once: Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums", IEEE TC 57 (2008).
    """
    product, c = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + c
    there = total - product  # Knuth's sum without error
    error = (product - (total - there)) + (c - there)
    bits = total.view(torch.int64)
    up = (error > 0) == (total > 0)  # away from zero
    odd = torch.where(bits & 1 == 1, bits, torch.where(up, bits + 1, bits - 1))
    inexact = (error > 0) | (error < 0)  # neither where something is infinite or NaN
    return torch.where(inexact, odd, bits).view(torch.float64).to(torch.float32)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.to(torch.float32).chunk(2, -1)
    return gate, up


def _sigmoid(gate: Tensor) -> tuple[Tensor, Tensor]:
    """``exp(-abs(gate))`` and the sigmoid of ``abs(gate)``: no cancellation, no overflow."""
    e = _exp_minus_magnitude(gate)
    one = torch.ones_like(e)
    return e, one / (one + e)


def _silu(gate: Tensor, e: Tensor, sigmoid: Tensor) -> Tensor:
    return torch.where(gate < 0, gate * e, gate) * sigmoid


def _exp_minus_magnitude(gate: Tensor) -> Tensor:
    """``2^f * 2^n``, with n added to the exponent field of 2^f; a NaN counts as a large gate.

    Where the field ends at 0 (gates from 87.34 to 88.03) the values go down to 60 * 2^-149 in
    straight lines instead of to 2^-127.
    """

    def constant(value: float) -> Tensor:
        return torch.full_like(gate, value)

    magnitude = torch.fmin(gate.abs(), constant(LARGEST_GATE))
    shifted = fma(magnitude, constant(-LOG2_E), constant(TO_INTEGER))
    n = shifted - constant(TO_INTEGER)
    f = fma(magnitude, constant(-LOG2_E), -n)
    power = constant(POWER_OF_2[0])
    for coefficient in POWER_OF_2[1:]:
        power = fma(power, f, constant(coefficient))
    bits = power.view(torch.int32) + n.to(torch.int32) * (1 << 23)
    return bits.view(torch.float32)
