"""SwiGLU, its backward and norms as docs/numerics.md describes them, a number at a time."""

from __future__ import annotations

import math
import struct

from .fp32 import add, divide, fma, multiply, square_root


def of_bits(bits: int) -> float:
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]


def _sigmoid(gate: float) -> tuple[float, float]:
    """exp(-|g|), and the sigmoid of |g|."""
    largest, log2_e, magic = (of_bits(bits) for bits in (0x42B00F33, 0x3FB8AA3B, 0x4B400000))
    magnitude = abs(gate) if abs(gate) < largest else largest
    n = add(fma(magnitude, -log2_e, magic), -magic)
    f = fma(magnitude, -log2_e, -n)
    power = of_bits(0x3AAE5FA3)
    for bits in (0x3C1E7A05, 0x3D635ACB, 0x3E75FCD2, 0x3F317215, 0x3F800000):
        power = fma(power, f, of_bits(bits))
    (field,) = struct.unpack("<i", struct.pack("<f", power))
    e = of_bits(field + int(n) * 2**23)
    return e, divide(1.0, add(1.0, e))


def silu(gate: float) -> float:
    e, r = _sigmoid(gate)
    return multiply(multiply(gate, e) if gate < 0 else gate, r)


def swiglu(gate: float, up: float) -> float:
    return multiply(silu(gate), up)


def swiglu_backward(grad: float, gate: float, up: float) -> tuple[float, float]:
    """Gradients of the gate and of ``up``."""
    e, r = _sigmoid(gate)
    slope = multiply(r, fma(multiply(gate, e), r, e if gate < 0 else 1.0))
    return multiply(multiply(grad, slope), up), multiply(grad, silu(gate))


def _mean(values: list[float]) -> float:
    """By a tree of sums."""
    sums = values + [0.0] * ((1 << math.ceil(math.log2(len(values)))) - len(values))
    while len(sums) > 1:
        sums = [add(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return divide(sums[0], float(len(values)))


def _rstd(values: list[float], eps: float) -> float:
    return divide(1.0, square_root(add(_mean([multiply(v, v) for v in values]), eps)))


def rmsnorm(x: list[float], weight: list[float], eps: float) -> tuple[list[float], float]:
    """A row, normalized, and its rstd."""
    rstd = _rstd(x, eps)
    return [multiply(multiply(a, rstd), b) for a, b in zip(x, weight, strict=True)], rstd


def layernorm(
    x: list[float], weight: list[float], bias: list[float] | None, eps: float
) -> tuple[list[float], float, float]:
    """A row, normalized, its mean and its rstd."""
    mean = _mean(x)
    centered = [add(value, -mean) for value in x]
    made, rstd = rmsnorm(centered, weight, eps)
    if bias is not None:
        made = [add(a, b) for a, b in zip(made, bias, strict=True)]
    return made, mean, rstd
