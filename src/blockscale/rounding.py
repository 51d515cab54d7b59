"""Every cast of the library, bit for bit, in integer arithmetic.

Numbers are taken apart into ``significand * 2**exponent`` (int64 tensors) and put together by one
function, :func:`round_significand`, whatever they are rounded to: an element, a scale or fp32
itself. Nothing here depends on libm, on the rounding mode or on flush-to-zero: integers are turned
into floats only to find their highest bit, and those floats are never subnormal.

fp32 values travel as their bits in an int64 tensor ("bits" below, "magnitude" with sign cleared).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .checks import choose
from .formats import E4M3, E8M0, FP32, UE4M3, Element, Format, Scale

__all__ = [
    "FP32_INF",
    "FP32_MAX",
    "FP32_NAN",
    "FP32_ONE",
    "MANTISSA_LIMIT",
    "block_scale",
    "decode",
    "decode_scale",
    "divide",
    "e8m0_from_amax",
    "encode",
    "encode_magnitude",
    "float32_bits",
    "from_float32_bits",
    "global_scale_from_amax",
    "multiply",
    "pack",
    "random_bits",
    "round_significand",
    "scale_bits",
    "unpack",
]

FP32_ONE = 0x3F800000
FP32_MAX = 0x7F7FFFFF
FP32_INF = 0x7F800000
FP32_NAN = 0x7FC00000
_MIN_NORMAL = 0x00800000  # 2^-126
_MIN_GLOBAL = (127 - 117) << 23  # 2^-117: times the smallest UE4M3 scale, 2^-9, still normal


# --- fp32 as integers -----------------------------------------------------------------------------


def float32_bits(x: Tensor) -> Tensor:
    """fp32 bits (int64, 0 to 2^32-1) of a float32, bfloat16 or float16 tensor; exact."""
    if x.dtype == torch.float32:
        return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if x.dtype == torch.bfloat16:
        return (x.view(torch.int16).to(torch.int64) & 0xFFFF) << 16
    if x.dtype == torch.float16:
        half = x.view(torch.int16).to(torch.int64) & 0xFFFF
        exponent, mantissa = (half >> 10) & 0x1F, half & 0x3FF
        normal = ((exponent + 112) << 23) | (mantissa << 13)
        special = FP32_INF | (mantissa << 13)
        subnormal = round_significand(mantissa, torch.full_like(mantissa, -24), 23, 127)
        bits = torch.where(exponent == 0, subnormal, torch.where(exponent == 31, special, normal))
        return bits | ((half & 0x8000) << 16)
    raise TypeError(f"x: got {x.dtype}; expected torch.float32, torch.bfloat16 or torch.float16")


def from_float32_bits(bits: Tensor) -> Tensor:
    """The float32 tensor with these bits."""
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _parts(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Finite fp32 magnitude -> (significand < 2^24, exponent): value = significand * 2^exponent."""
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | ((field > 0).to(torch.int64) << 23)
    return significand, field.clamp(min=1) - 150


def _bit_length(n: Tensor) -> Tensor:
    """Bits of a non-negative integer below 2^53 (0 for 0), read off its float64 exponent."""
    return ((n.to(torch.float64).view(torch.int64) >> 52) - 1022).clamp_(min=0)


def round_significand(
    significand: Tensor,
    exponent: Tensor,
    mantissa_bits: int,
    bias: int,
    noise: Tensor | None = None,
) -> Tensor:
    """Code of ``significand * 2**exponent`` in a float format, with no upper limit to the exponent.

    Round to nearest, ties to even; with ``noise`` (uniform integers below 2^32) stochastically, up
    with the probability of the discarded fraction. ``significand`` is int64, 0 to 2^53-1.
    """
    top = exponent + _bit_length(significand) - 1  # floor(log2(value))
    top = torch.where(significand == 0, 1 - bias, top)
    quantum = top.clamp(min=1 - bias) - mantissa_bits  # exponent of the last bit that is kept
    shift = (quantum - exponent).clamp(-52, 62)
    right, left = shift.clamp(min=0), (-shift).clamp(min=0)
    kept = (significand << left) >> right
    dropped = significand & ((1 << right) - 1)
    if noise is None:
        half = (1 << right) >> 1  # 0 where nothing is dropped: then kept is exact
        up = (dropped > half) | ((dropped == half) & (kept & 1 == 1) & (right > 0))
    else:
        fraction = torch.where(
            right <= 32, dropped << (32 - right).clamp(min=0), dropped >> (right - 32).clamp(min=0)
        )
        up = noise < fraction
    code = kept + up.to(torch.int64)
    return code + ((quantum + mantissa_bits + bias - 1) << mantissa_bits)


def _to_float32(significand: Tensor, exponent: Tensor) -> Tensor:
    return round_significand(significand, exponent, 23, 127).clamp(max=FP32_INF)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The IEEE fp32 product, to nearest even, of two tensors of bits; subnormals are kept."""
    sign = (a ^ b) & 0x80000000
    a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    product = _to_float32(sa * sb, ea + eb)
    product = torch.where((a == FP32_INF) | (b == FP32_INF), FP32_INF, product)
    invalid = (a > FP32_INF) | (b > FP32_INF) | (torch.maximum(a, b) == FP32_INF) & (a * b == 0)
    return torch.where(invalid, FP32_NAN, product | sign)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """The IEEE fp32 quotient, to nearest even, of two tensors of finite bits, a >= 0 and b > 0."""
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    la, lb = 24 - _bit_length(sa), 24 - _bit_length(sb)
    sa, sb = sa << la, sb << lb
    quotient = (sa << 26) // sb
    sticky = (quotient * sb != sa << 26).to(torch.int64)
    return _to_float32((quotient << 1) | sticky, (ea - la) - (eb - lb) - 27)


def _float_bits(value: float, like: Tensor) -> Tensor:
    return float32_bits(torch.tensor(value, dtype=torch.float32)).to(like.device)


# --- elements -------------------------------------------------------------------------------------


def encode_magnitude(magnitude: Tensor, element: Element, noise: Tensor | None = None) -> Tensor:
    """Codes (int64, sign clear) of fp32 magnitudes. Infinity saturates, NaN has no place here."""
    significand, exponent = _parts(magnitude)
    code = round_significand(significand, exponent, element.mantissa_bits, element.bias, noise)
    return code.clamp(max=element.max_code)


def encode(x: Tensor, element: Element, *, seed: int | None = None) -> Tensor:
    """Cast float32, bfloat16 or float16 to one uint8 code an element, saturating at the largest.

    Rounds to nearest, ties to even; with ``seed`` stochastically (:func:`random_bits`). -0 is kept,
    infinities saturate, a NaN becomes the element's NaN or, where it has none, its largest value
    (as PTX ``cvt.satfinite`` does). Raises TypeError for another dtype.
    """
    bits = float32_bits(x)
    magnitude = bits & 0x7FFFFFFF
    noise = None if seed is None else random_bits(seed, x.shape, x.device)
    code = encode_magnitude(magnitude, element, noise)
    code = code | (bits >> 31) * element.sign_code
    nan = element.max_code if element.nan_code is None else element.nan_code
    return torch.where(magnitude > FP32_INF, nan, code).to(torch.uint8)


@lru_cache
def _values(element: Element, device: torch.device) -> Tensor:
    """fp32 value of each code, from the definition of the format."""
    values = []
    for code in range(1 << element.bits):
        field, mantissa = divmod(code & (element.sign_code - 1), 1 << element.mantissa_bits)
        significand = mantissa + (1 << element.mantissa_bits) * (field > 0)
        value = significand * 2.0 ** (max(field, 1) - element.bias - element.mantissa_bits)
        if code & (element.sign_code - 1) > element.max_code:
            is_inf = code & (element.sign_code - 1) == element.inf_code
            value = float("inf") if is_inf else float("nan")
        values.append(-value if code & element.sign_code else value)
    return torch.tensor(values, dtype=torch.float32, device=device)


def decode(codes: Tensor, element: Element) -> Tensor:
    """fp32 values of uint8 codes; exact."""
    return _values(element, codes.device)[codes.to(torch.int64)]


def pack(codes: Tensor, element: Element) -> Tensor:
    """Store uint8 codes: ``(..., n)`` -> ``(..., element.stored(n))`` in ``element.dtype``.

    8-bit codes are their bytes. 4-bit codes share a byte, the even column in the low nibble. Four
    6-bit codes share three bytes, first code in the lowest bits (little-endian bit stream).
    Raises ValueError where the last dimension does not fill whole groups.
    """
    if element.bits == 8:
        return codes.view(element.dtype)
    group = element.codes_per_group
    if codes.shape[-1] % group:
        raise ValueError(
            f"codes: the last dimension is {codes.shape[-1]}; {element.name} is stored in groups "
            f"of {group}: pad it to a multiple of {group}"
        )
    places = torch.arange(group, device=codes.device) * element.bits
    words = (codes.to(torch.int64).unflatten(-1, (-1, group)) << places).sum(-1)
    octets = torch.arange(element.bytes_per_group, device=codes.device) * 8
    return ((words.unsqueeze(-1) >> octets) & 0xFF).to(torch.uint8).flatten(-2)


def unpack(data: Tensor, element: Element) -> Tensor:
    """The inverse of :func:`pack`: uint8 codes, one an element."""
    if element.bits == 8:
        return data.view(torch.uint8)
    octets = torch.arange(element.bytes_per_group, device=data.device) * 8
    words = data.to(torch.int64).unflatten(-1, (-1, element.bytes_per_group))
    words = (words << octets).sum(-1)
    places = torch.arange(element.codes_per_group, device=data.device) * element.bits
    codes = (words.unsqueeze(-1) >> places) & ((1 << element.bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


# --- scales ---------------------------------------------------------------------------------------

#: Of an element, by scale rounding. From amax = m * 2^e the exponent is e - element.max_exponent,
#: plus one where m exceeds a limit: the largest mantissa field (of 23 bits) that is not rounded up.
MANTISSA_LIMIT = {
    "floor": lambda element: 0x7FFFFF,
    "ceil": lambda element: 0,
    "even": lambda element: 0x7FFFFF - (1 << (22 - element.mantissa_bits)),
    "rceil": lambda element: int((element.max_significand - 1) * 2**23),
}


def e8m0_from_amax(amax: Tensor, element: Element, rounding: str = "rceil") -> Tensor:
    """E8M0 byte (int64, 0 to 254) for finite fp32 magnitudes ``amax``, given as bits.

    ``rceil``: smallest power of two >= amax / element.max, so nothing saturates (library default).
    ``floor``: 2^(floor(log2 amax) - element.max_exponent), OCP MX v1.0. ``ceil``: the same with the
    logarithm rounded up. ``even``: floor after amax is rounded to the element's mantissa.
    """
    limit = choose("scale_rounding", rounding, MANTISSA_LIMIT)(element)
    byte = (amax >> 23) - element.max_exponent + ((amax & 0x7FFFFF) > limit).to(torch.int64)
    return byte.clamp(0, 254)


def _e8m0_bits(byte: Tensor) -> Tensor:
    """fp32 bits of 2^(byte - 127); 255 is NaN."""
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, FP32_NAN, bits)


def global_scale_from_amax(amax: Tensor, format: Format) -> Tensor:
    """Bits of ``amax / (largest scale * largest element)``; 1 where amax is 0; at least 2^-117."""
    largest = E4M3.max * format.element.max
    scale = divide(amax, _float_bits(largest, amax)).clamp(min=_MIN_GLOBAL)
    return torch.where(amax == 0, FP32_ONE, scale)


def block_scale(
    amax: Tensor, format: Format, rounding: str, global_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """From finite block maxima (bits): the stored scale (int64 code) and its reciprocal (bits).

    An element is ``encode(multiply(x, reciprocal))``. The reciprocal is the fp32 nearest to
    1 / (block_scale * global_scale), exact for powers of two, and 0 where the scale is 0.
    """
    element, scale = format.element, format.scale
    if scale is E8M0 or rounding != "nearest":
        byte = e8m0_from_amax(amax, element, rounding)
        if scale is FP32:
            byte = byte.clamp(min=1)  # a subnormal scale would depend on flush-to-zero
        return (byte if scale is E8M0 else byte << 23), _e8m0_bits(254 - byte)
    if scale is FP32:
        bits = divide(amax, _float_bits(element.max, amax)).clamp(min=_MIN_NORMAL)
        return bits, divide(_float_bits(1.0, amax), bits)
    if global_scale is None:
        raise ValueError(f"global_scale: {format.name} needs one")
    one = _float_bits(1.0, amax)
    encode_scale = divide(
        divide(one, global_scale).clamp(max=FP32_MAX), _float_bits(element.max, amax)
    )
    code = encode_magnitude(multiply(amax, encode_scale), E4M3)
    dequant = multiply(scale_bits(code, UE4M3), global_scale)
    reciprocal = divide(one, torch.where(dequant == 0, FP32_ONE, dequant)).clamp(max=FP32_MAX)
    return code, torch.where(dequant == 0, 0, reciprocal)


def scale_bits(code: Tensor, scale: Scale) -> Tensor:
    """fp32 bits of stored scales, given as int64 codes."""
    if scale is E8M0:
        return _e8m0_bits(code)
    if scale is UE4M3:
        return float32_bits(decode(code & 0x7F, E4M3))
    return code


def decode_scale(stored: Tensor, scale: Scale) -> Tensor:
    """fp32 bits (int64) of a tensor of stored scales, in ``scale.dtype``."""
    if scale is FP32:
        return float32_bits(stored)
    return scale_bits(stored.view(torch.uint8).to(torch.int64), scale)


# --- stochastic rounding --------------------------------------------------------------------------


def random_bits(seed: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Uniform 32-bit integers (in int64), one an element: Philox4x32-10, counter = index / 4.

    The same seed gives the same bits on every machine, whatever the layout of the tensor.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    n = shape.numel()
    mask = 0xFFFFFFFF
    counter = torch.arange((n + 3) // 4, dtype=torch.int64, device=device)
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter & mask, counter >> 32, zero, zero
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        # int64 products wrap, which leaves their 64 bits as they should be
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (p1 >> 32) & mask ^ c1 ^ k0,
            p1 & mask,
            (p0 >> 32) & mask ^ c3 ^ k1,
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack((c0, c1, c2, c3), -1).flatten()[:n].view(shape)
