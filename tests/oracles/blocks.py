"""Block quantization once more, in numpy: float64 for the MX formats, fp32 for the others."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import exact

#: element, block (rows, columns), scale
FORMATS = {
    "mxfp8": ("E4M3", (1, 32), "E8M0"),
    "mxfp8_e5m2": ("E5M2", (1, 32), "E8M0"),
    "mxfp6_e3m2": ("E3M2", (1, 32), "E8M0"),
    "mxfp6_e2m3": ("E2M3", (1, 32), "E8M0"),
    "mxfp4": ("E2M1", (1, 32), "E8M0"),
    "nvfp4": ("E2M1", (1, 16), "UE4M3"),
    "fp8_1x128": ("E4M3", (1, 128), "FP32"),
    "fp8_128x128": ("E4M3", (128, 128), "FP32"),
}
_F32 = np.float32


def quantize(
    x: NDArray, format: str, rounding: str, nonfinite: str = "propagate", scalar: float = 1.0
) -> tuple[NDArray, NDArray]:
    """uint8 codes, one an element, and scales (bytes, or fp32) of an fp32 matrix, blocks along -1.

    Both dimensions are multiples of the block. ``scalar`` is NVFP4's global scale.
    """
    element, (rows, columns), kind = FORMATS[format]
    spec = exact.SPECS[element]
    m, k = x.shape
    blocks = x.reshape(m // rows, rows, k // columns, columns)
    finite = np.isfinite(blocks)
    amax = np.abs(np.where(finite, blocks, 0)).max((1, 3), keepdims=True)
    if kind == "UE4M3":
        stored, inverse = _ue4m3(amax, _F32(scalar))
    elif rounding == "nearest":
        stored = np.maximum(amax / _F32(448), _F32(2.0**-126))
        inverse = _F32(1) / stored
    else:
        byte = exact.scale_byte(amax, spec, rounding)
        if kind == "FP32":
            byte = np.maximum(byte, 1)
        inverse = np.ldexp(1.0, 127 - byte)  # float64: exact products
        stored = np.ldexp(_F32(1), byte - 127) if kind == "FP32" else byte
    with np.errstate(invalid="ignore", over="ignore"):
        codes = exact.cast(np.where(finite, blocks, 0) * inverse, spec)
    sign = (np.signbit(blocks) * spec.sign).astype(np.uint8)
    codes |= sign  # where the product is 0 * inverse

    bad_scale, full_scale = {
        "E8M0": (0xFF, 0xFE),
        "UE4M3": (0x7F, 0x7E),
        "FP32": (_F32(np.nan), _F32(2.0**127)),
    }[kind]
    if nonfinite == "propagate":
        bad = ~finite.all((1, 3), keepdims=True)
        stored = np.where(bad, bad_scale, stored)
        codes = np.where(bad, 0x7F if spec.bits == 8 else 0, codes)
    else:
        infinite = np.isinf(blocks)
        full = infinite.any((1, 3), keepdims=True)
        stored = np.where(full, full_scale, stored)
        codes = np.where(full, 0, codes)
        largest = exact.cast(np.array(spec.max), spec) | sign
        codes = np.where(infinite, largest, codes)
        codes = np.where(np.isnan(blocks), spec.nan, codes)
    stored = stored[:, 0, :, 0]
    return codes.reshape(m, k).astype(np.uint8), stored.astype(_F32 if kind == "FP32" else np.uint8)


def _ue4m3(amax: NDArray, scalar: np.float32) -> tuple[NDArray, NDArray]:
    largest = np.finfo(_F32).max
    with np.errstate(over="ignore", divide="ignore"):
        encode = min(_F32(1) / scalar, largest) / _F32(6)
        scaled = np.minimum(amax * encode, _F32(448))
        stored = scaled.astype(ml_dtypes.float8_e4m3fn)
        decode = stored.astype(_F32) * scalar
        inverse = np.minimum(_F32(1) / decode, largest)
    return stored.view(np.uint8), np.where(decode == 0, _F32(0), inverse)
