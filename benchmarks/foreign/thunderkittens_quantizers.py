"""ThunderKittens' quantizers for the B200: MXFP8, and NVFP4 with blocks of 16 or of 16 x 16.

Codes and scales must be those that numpy computes, byte for byte. The scale of a whole matrix,
which NVFP4's reads, is given, a power of two, rather than computed by the three kernels before.
"""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated
from .thunderkittens import FLAGS, VERSION, layout, plain, swizzled

BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
BOUND = (
    "CONFIG := pytorch with -DTORCH_COMPILE, as the Makefile beside it has in comments; headers of "
    "torch 2.13, and for the host's code alone empty headers with the types of cuSPARSE, cuBLAS "
    "and cuSOLVER that torch's headers name"
)


def tile(array: np.ndarray, width: int = 128) -> bytes:
    """A matrix in tiles of 128 rows and ``width`` columns without a swizzle."""
    element = "u8" if array.itemsize == 1 else "bf16"
    shape = (1, 1, *array.shape)
    map = em.TensorMap.of(array.reshape(shape), (width, 128, 1, 1), element=element)
    return layout(array, (1, 1, None, None), map)


def mxfp8_quantize(launch: Launch) -> bool:
    """Blocks of 32 along rows; the scale is the largest magnitude / 448, rounded up."""
    rows, k = 256, 256
    rng = np.random.default_rng(0)
    x = allocated(
        (rng.normal(size=(rows, k)) * 2.0 ** rng.integers(-9, 9, (rows, 1))).astype(BFLOAT16)
    )
    codes = allocated(np.zeros((rows, k), np.uint8))
    words = allocated(np.zeros((rows // 128, k // 128, 32, 16), np.uint8))
    structure = tile(x) + tile(codes) + plain(words, (None, None, 1, 1), 32)
    launch(
        (k // 128, rows // 128), 64, [structure],
        shared=128 * 128 * 2 + 1024, buffers=[("x", x), ("codes", codes), ("words", words)],
    )  # fmt: skip
    blocks = x.astype(np.float32).reshape(rows, k // 32, 32)
    mantissa, power = np.frexp(abs(blocks).max(-1) * np.float32(0.002232142857))
    power -= mantissa == 0.5
    wanted = np.ldexp(blocks, -power[..., None]).clip(-448, 448).astype(E4M3).reshape(rows, k)
    scale = swizzled((power + 127).astype(np.uint8)).reshape(words.shape)
    return bool((codes == wanted.view(np.uint8)).all() and (words == scale).all())


def nvfp4_quantize(square: bool, launch: Launch) -> bool:
    """Blocks of 16 along rows, or of 16 x 16 (``square``), and a scale of the whole matrix."""
    rows, k, whole = 256, 256, np.float32(2.0**-4)
    rng = np.random.default_rng(0)
    x = allocated(rng.normal(size=(rows, k)).astype(BFLOAT16))
    codes = allocated(np.zeros((rows, k // 2), np.uint8))
    words = allocated(np.zeros((rows // 128, k // 64, 256), np.float16))
    number = allocated(np.array([whole]))
    structure = tile(x) + tile(codes, 64) + plain(words, (1, None, None, 1), 1)
    launch(
        (k // 128, rows // 128), 128, [structure + layout(number, (1, 1, 1, 1), None)],
        shared=128 * 128 * 2 + 1024,
        buffers=[("x", x), ("codes", codes), ("words", words), ("number", number)],
    )  # fmt: skip
    blocks = x.astype(np.float32).reshape(rows, k // 16, 16)
    largest = abs(blocks).max(-1)
    if square:
        largest = np.repeat(largest.reshape(rows // 16, 16, -1).max(1), 16, axis=0)
    scale = (largest / np.float32(6) / whole).astype(E4M3)
    factor = np.float32(1) / (scale.astype(np.float32) * whole)
    values = (blocks * factor[..., None]).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    nibbles = values.reshape(rows, k).view(np.uint8) & 15
    wanted = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    bytes_wanted = swizzled(scale.view(np.uint8)).reshape(rows // 128, k // 64, 512)
    return bool((codes == wanted).all() and (words.view(np.uint8) == bytes_wanted).all())


QUANTIZERS = {
    "tk_mxfp8_quantize": ("mxfp8", "mxfp8_quantize6config", mxfp8_quantize),
    "tk_nvfp4_quantize": ("nvfp4", "quantize_kernelILb0E", partial(nvfp4_quantize, False)),
    "tk_nvfp4_quantize_2d": ("nvfp4", "quantize_kernelILb1E", partial(nvfp4_quantize, True)),
}
KERNELS = [
    Foreign(
        name, "ThunderKittens", VERSION, "sm_100a", entry,
        f"kernels/gemm/{kind}_b200/{kind}_b200_gemm.cu as it is; {FLAGS}, {BOUND}", function,
    )
    for name, (kind, entry, function) in QUANTIZERS.items()
]  # fmt: skip
