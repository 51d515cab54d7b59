"""Every cast of the library, bit for bit, in integer arithmetic.

Numbers are taken apart into ``significand * 2**exponent`` (int64 arrays) and put together by one
function, :func:`round_significand`, whatever they are rounded to: an element, a scale or fp32
itself. Nothing here depends on libm, on the rounding mode or on flush-to-zero: integers are turned
into floats only to find their highest bit, and those floats are never subnormal.

fp32 values travel as their bits in an int64 array ("bits" below, "magnitude" with sign cleared).
Arrays are torch's, numpy's, or JAX's where it has 64 bits; the words are the array API standard's.
"""

from __future__ import annotations

import struct

from .arrays import Array, bits_as, device_of, namespace
from .checks import choose
from .dtypes import UINT8
from .formats import E4M3, E8M0, FP32, UE4M3, Element, Format, Scale
from .philox import random_bits

__all__ = [
    "FP32_INF",
    "FP32_MAX",
    "FP32_NAN",
    "FP32_ONE",
    "MANTISSA_LIMIT",
    "MIN_GLOBAL",
    "ROOM",
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
    "round_significand",
    "scale_bits",
    "unpack",
]

FP32_ONE = 0x3F800000
FP32_MAX = 0x7F7FFFFF
FP32_INF = 0x7F800000
FP32_NAN = 0x7FC00000
_MIN_NORMAL = 0x00800000  # 2^-126
MIN_GLOBAL = (127 - 117) << 23  # 2^-117: times the smallest UE4M3 scale, 2^-9, still normal


# --- fp32 as integers -----------------------------------------------------------------------------


def float32_bits(x: Array) -> Array:
    """fp32 bits (int64, 0 to 2^32-1) of a float32, bfloat16 or float16 array; exact."""
    xp = namespace(x)
    name = str(x.dtype).removeprefix("torch.")
    if name == "float32":
        return _int64(x.view(xp.int32)) & 0xFFFFFFFF
    if name == "bfloat16":
        return (_int64(x.view(xp.int16)) & 0xFFFF) << 16
    if name == "float16":
        half = _int64(x.view(xp.int16)) & 0xFFFF
        exponent, mantissa = (half >> 10) & 0x1F, half & 0x3FF
        normal = ((exponent + 112) << 23) | (mantissa << 13)
        special = FP32_INF | (mantissa << 13)
        subnormal = round_significand(mantissa, xp.full_like(mantissa, -24), 23, 127)
        bits = xp.where(exponent == 0, subnormal, xp.where(exponent == 31, special, normal))
        return bits | ((half & 0x8000) << 16)
    raise TypeError(f"x: got {x.dtype}; expected float32, bfloat16 or float16")


def from_float32_bits(bits: Array) -> Array:
    """The float32 array with these bits."""
    xp = namespace(bits)
    signed = xp.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return xp.astype(signed, xp.int32).view(xp.float32)


def _int64(x: Array) -> Array:
    xp = namespace(x)
    return xp.astype(x, xp.int64)


def _parts(magnitude: Array) -> tuple[Array, Array]:
    """Finite fp32 magnitude -> (significand < 2^24, exponent): value = significand * 2^exponent."""
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | (_int64(field > 0) << 23)
    return significand, namespace(field).clip(field, min=1) - 150


def _bit_length(n: Array) -> Array:
    """Bits of a non-negative integer below 2^53 (0 for 0), read off its float64 exponent."""
    xp = namespace(n)
    return xp.clip((xp.astype(n, xp.float64).view(xp.int64) >> 52) - 1022, min=0)


def round_significand(
    significand: Array,
    exponent: Array,
    mantissa_bits: int,
    bias: int,
    noise: Array | None = None,
) -> Array:
    """Code of ``significand * 2**exponent`` in a float format, with no upper limit to the exponent.

    Round to nearest, ties to even; with ``noise`` (uniform integers below 2^32) stochastically, up
    with the probability of the discarded fraction. ``significand`` is int64, 0 to 2^53-1.
    """
    xp = namespace(significand)
    top = exponent + _bit_length(significand) - 1  # floor(log2(value))
    top = xp.where(significand == 0, 1 - bias, top)
    quantum = xp.clip(top, min=1 - bias) - mantissa_bits  # exponent of the last bit that is kept
    shift = xp.clip(quantum - exponent, min=-52, max=62)
    right, left = xp.clip(shift, min=0), xp.clip(-shift, min=0)
    kept = (significand << left) >> right
    one = xp.ones_like(right)
    dropped = significand & ((one << right) - 1)
    if noise is None:
        half = (one << right) >> 1  # 0 where nothing is dropped: then kept is exact
        up = (dropped > half) | ((dropped == half) & (kept & 1 == 1) & (right > 0))
    else:
        fraction = xp.where(
            right <= 32,
            dropped << xp.clip(32 - right, min=0),
            dropped >> xp.clip(right - 32, min=0),
        )
        up = noise < fraction
    code = kept + _int64(up)
    return code + ((quantum + mantissa_bits + bias - 1) << mantissa_bits)


def _to_float32(significand: Array, exponent: Array) -> Array:
    code = round_significand(significand, exponent, 23, 127)
    return namespace(code).clip(code, max=FP32_INF)


def multiply(a: Array, b: Array) -> Array:
    """The IEEE fp32 product, to nearest even, of two tensors of bits; subnormals are kept."""
    xp = namespace(a)
    sign = (a ^ b) & 0x80000000
    a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    product = _to_float32(sa * sb, ea + eb)
    product = xp.where((a == FP32_INF) | (b == FP32_INF), FP32_INF, product)
    invalid = (a > FP32_INF) | (b > FP32_INF) | (xp.maximum(a, b) == FP32_INF) & (a * b == 0)
    return xp.where(invalid, FP32_NAN, product | sign)


def divide(a: Array, b: Array) -> Array:
    """The IEEE fp32 quotient, to nearest even, of two tensors of finite bits, a >= 0 and b > 0."""
    (sa, ea), (sb, eb) = _parts(a), _parts(b)
    la, lb = 24 - _bit_length(sa), 24 - _bit_length(sb)
    sa, sb = sa << la, sb << lb
    quotient = (sa << 26) // sb
    sticky = _int64(quotient * sb != sa << 26)
    return _to_float32((quotient << 1) | sticky, (ea - la) - (eb - lb) - 27)


def _float_bits(value: float, like: Array) -> Array:
    xp = namespace(like)
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return xp.full((), bits, dtype=xp.int64, device=device_of(like))


# --- elements -------------------------------------------------------------------------------------


def encode_magnitude(magnitude: Array, element: Element, noise: Array | None = None) -> Array:
    """Codes (int64, sign clear) of fp32 magnitudes. Infinity saturates, NaN has no place here."""
    significand, exponent = _parts(magnitude)
    code = round_significand(significand, exponent, element.mantissa_bits, element.bias, noise)
    return namespace(code).clip(code, max=element.max_code)


def encode(x: Array, element: Element, *, seed: int | None = None) -> Array:
    """Cast float32, bfloat16 or float16 to one uint8 code an element, saturating at the largest.

    Rounds to nearest, ties to even; with ``seed`` stochastically, by
    :func:`blockscale.philox.random_bits`. -0 is kept, infinities saturate, a NaN becomes the
    element's NaN or, where it has none, its largest value (as PTX ``cvt.satfinite`` does). Raises
    TypeError for another dtype.
    """
    xp, bits = namespace(x), float32_bits(x)
    magnitude = bits & 0x7FFFFFFF
    noise = None if seed is None else random_bits(seed, x)
    code = encode_magnitude(magnitude, element, noise)
    code = code | (bits >> 31) * element.sign_code
    nan = element.max_code if element.nan_code is None else element.nan_code
    return xp.astype(xp.where(magnitude > FP32_INF, nan, code), xp.uint8)


def _element_bits(codes: Array, element: Element) -> Array:
    """fp32 bits of codes (int64), from the definition of the format."""
    xp, limit = namespace(codes), 1 << element.mantissa_bits
    magnitude = codes & (element.sign_code - 1)
    field, mantissa = magnitude >> element.mantissa_bits, magnitude & (limit - 1)
    normal = (magnitude << (23 - element.mantissa_bits)) + ((127 - element.bias) << 23)
    step = xp.full_like(mantissa, element.min_exponent - element.mantissa_bits)
    bits = xp.where(field == 0, _to_float32(mantissa, step), normal)
    if element.inf_code is not None:
        bits = xp.where(magnitude == element.inf_code, FP32_INF, bits)
    nan = (magnitude > element.max_code) & (magnitude != (element.inf_code or 0))
    return xp.where(nan, FP32_NAN, bits) | _int64(codes >= element.sign_code) << 31


def decode(codes: Array, element: Element) -> Array:
    """fp32 values of uint8 codes; exact."""
    return from_float32_bits(_element_bits(_int64(codes), element))


def pack(codes: Array, element: Element) -> Array:
    """Store uint8 codes: ``(..., n)`` -> ``(..., element.stored(n))`` in ``element.dtype``.

    8-bit codes are their bytes. 4-bit codes share a byte, the even column in the low nibble. Four
    6-bit codes share three bytes, first code in the lowest bits (little-endian bit stream).
    Raises ValueError where the last dimension does not fill whole groups.
    """
    if element.bits == 8:
        return bits_as(codes, element.numpy_dtype)
    group = element.codes_per_group
    if codes.shape[-1] % group:
        raise ValueError(
            f"codes: the last dimension is {codes.shape[-1]}; {element.name} is stored in groups "
            f"of {group}: pad it to a multiple of {group}"
        )
    xp, outer = namespace(codes), tuple(codes.shape[:-1])
    groups = _int64(codes).reshape((*outer, codes.shape[-1] // group, group))
    words = sum(groups[..., i] << (i * element.bits) for i in range(group))
    octets = [(words >> (8 * i)) & 0xFF for i in range(element.bytes_per_group)]
    stored = element.stored(codes.shape[-1])
    return xp.astype(xp.stack(octets, axis=-1), xp.uint8).reshape((*outer, stored))


def unpack(data: Array, element: Element) -> Array:
    """The inverse of :func:`pack`: uint8 codes, one an element."""
    if element.bits == 8:
        return bits_as(data, UINT8)
    xp, outer, nbytes = namespace(data), tuple(data.shape[:-1]), element.bytes_per_group
    octets = _int64(data).reshape((*outer, data.shape[-1] // nbytes, nbytes))
    words = sum(octets[..., i] << (8 * i) for i in range(nbytes))
    places = range(0, element.codes_per_group * element.bits, element.bits)
    codes = [(words >> place) & ((1 << element.bits) - 1) for place in places]
    n = data.shape[-1] // nbytes * element.codes_per_group
    return xp.astype(xp.stack(codes, axis=-1), xp.uint8).reshape((*outer, n))


# --- scales ---------------------------------------------------------------------------------------

#: Of an element, by scale rounding. From amax = m * 2^e the exponent is e - element.max_exponent,
#: plus one where m exceeds a limit: the largest mantissa field (of 23 bits) that is not rounded up.
MANTISSA_LIMIT = {
    "floor": lambda element: 0x7FFFFF,
    "ceil": lambda element: 0,
    "even": lambda element: 0x7FFFFF - (1 << (22 - element.mantissa_bits)),
    "rceil": lambda element: int((element.max_significand - 1) * 2**23),
}


#: What the largest element of a block of NVFP4 becomes, of each scale that is tried, by scaling.
#: Slightly above 6 clips a little, and loses less in the mean (arXiv 2601.22813).
LARGEST = {
    "four_over_six": (6.0, 4.0),
    "search": (6.0, 6.4, 5.6, 5.2, 4.8, 4.4, 4.0, 3.7),
    "ms_eden": (6 / (17 / 16 * 0.93),),
}

#: What their global scale is multiplied by: the largest scale is 256 at first, not 448, as a block
#: of which 4 is the largest element has one that is half as large again, and so may a correction
#: make it.
ROOM = 448 / 256


def e8m0_from_amax(amax: Array, element: Element, rounding: str = "rceil") -> Array:
    """E8M0 byte (int64, 0 to 254) for finite fp32 magnitudes ``amax``, given as bits.

    ``rceil``: smallest power of two >= amax / element.max, so nothing saturates (library default).
    ``floor``: 2^(floor(log2 amax) - element.max_exponent), OCP MX v1.0. ``ceil``: the same with the
    logarithm rounded up. ``even``: floor after amax is rounded to the element's mantissa.
    """
    limit = choose("scale_rounding", rounding, MANTISSA_LIMIT)(element)
    byte = (amax >> 23) - element.max_exponent + _int64((amax & 0x7FFFFF) > limit)
    return namespace(byte).clip(byte, min=0, max=254)


def _e8m0_bits(byte: Array) -> Array:
    """fp32 bits of 2^(byte - 127); 255 is NaN."""
    xp = namespace(byte)
    bits = xp.where(byte == 0, 0x00400000, byte << 23)
    return xp.where(byte == 255, FP32_NAN, bits)


def global_scale_from_amax(
    amax: Array, format: Format, scaling: str = "amax", *, power_of_two: bool = False
) -> Array:
    """``amax / (largest scale * largest element)`` in fp32; 1 where amax is 0; at least 2^-117.

    Other ``scaling`` than by amax: :data:`ROOM` times that. ``power_of_two``: rounded up to one.
    """
    xp, bits = namespace(amax), float32_bits(amax)
    largest = _float_bits(E4M3.max * format.element.max, bits)
    scale = xp.clip(divide(bits, largest), min=MIN_GLOBAL)
    scale = xp.where(bits == 0, FP32_ONE, scale)
    scale = scale if scaling == "amax" else multiply(scale, _float_bits(ROOM, bits))
    return from_float32_bits((scale + 0x7FFFFF) & FP32_INF if power_of_two else scale)


def block_scale(
    amax: Array,
    format: Format,
    rounding: str,
    global_scale: Array | None = None,
    *,
    largest: float | None = None,
) -> tuple[Array, Array]:
    """From finite block maxima (bits): the stored scale (int64 code) and its reciprocal (bits).
    ``largest``: what a maximum becomes, of UE4M3 scales; None for the largest element.

    An element is ``encode(multiply(x, reciprocal))``. The reciprocal is the fp32 nearest to
    1 / (block_scale * global_scale), exact for powers of two, and 0 where the scale is 0.
    """
    xp, element, scale = namespace(amax), format.element, format.scale
    if scale is E8M0 or rounding != "nearest":
        byte = e8m0_from_amax(amax, element, rounding)
        if scale is FP32:
            byte = xp.clip(byte, min=1)  # a subnormal scale would depend on flush-to-zero
        return (byte if scale is E8M0 else byte << 23), _e8m0_bits(254 - byte)
    if scale is FP32:
        bits = xp.clip(divide(amax, _float_bits(element.max, amax)), min=_MIN_NORMAL)
        return bits, divide(_float_bits(1.0, amax), bits)
    if global_scale is None:
        raise ValueError(f"global_scale: {format.name} needs one")
    one = _float_bits(1.0, amax)
    inverse = xp.clip(divide(one, global_scale), max=FP32_MAX)
    encode_scale = divide(inverse, _float_bits(largest or element.max, amax))
    code = encode_magnitude(multiply(amax, encode_scale), E4M3)
    dequant = multiply(scale_bits(code, UE4M3), global_scale)
    reciprocal = divide(one, xp.where(dequant == 0, FP32_ONE, dequant))
    return code, xp.where(dequant == 0, 0, xp.clip(reciprocal, max=FP32_MAX))


def scale_bits(code: Array, scale: Scale) -> Array:
    """fp32 bits of stored scales, given as int64 codes."""
    if scale is E8M0:
        return _e8m0_bits(code)
    if scale is UE4M3:
        return _element_bits(code & 0x7F, E4M3)
    return code


def decode_scale(stored: Array, scale: Scale) -> Array:
    """fp32 values of stored scales, in ``scale.dtype``; exact."""
    if scale is FP32:
        return stored
    return from_float32_bits(scale_bits(_int64(bits_as(stored, UINT8)), scale))
