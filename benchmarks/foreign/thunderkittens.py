"""ThunderKittens' products for the B200: MXFP8, NVFP4, BF16 and FP8, pairs of CTAs, persistent.

A kernel takes one structure: for each array a pointer, the sizes that its type leaves open, and
a tensor map. The first instance that their ``main`` runs (for N = 1024) gets a smaller problem,
but each pair of CTAs goes through two tiles, and the ring of inputs comes round.

Operands are small integers and scales powers of two: sums are exact in any order, and the output
must be the rounded sum, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated

VERSION = "0b55588d2769dde0c7a9a606ffc015b0ca7a9551"
FLAGS = "GPU := B200, the flags of kernels/common.mk, nvcc 13.0.88, --ptx"
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def layout(array: np.ndarray, fixed: Sequence[int | None], map: em.TensorMap | None) -> bytes:
    """Their ``gl``: a pointer, of four sizes those that are not ``fixed``, the tensor map."""
    raw = array.ctypes.data.to_bytes(8, "little")
    sizes = (1,) * (4 - array.ndim) + array.shape
    for size, known in zip(sizes, fixed, strict=True):
        raw += b"\0" if known else b"\0" * (-len(raw) % 8) + size.to_bytes(8, "little")
    if map is not None:
        raw = raw.ljust(128, b"\0") + map.encode()
    return raw.ljust(-(-(len(raw) + 1) // 128) * 128, b"\0")


def tile(array: np.ndarray, rows: int, columns: int) -> bytes:
    """A matrix in swizzled tiles: the map has five dimensions, columns in spans of the swizzle."""
    size = array.itemsize
    span = min(128, columns * size)
    element = "u8" if size == 1 else "bf16"
    height, width = array.shape
    inner, whole = span // size, height * width * size
    map = em.TensorMap(
        array.ctypes.data, element,
        (inner, height, width // inner, 1, 1), (width * size, span, whole, whole),
        (inner, rows, columns // inner, 1, 1), swizzle=f"{span}B",
    )  # fmt: skip
    return layout(array, (1, 1, None, None), map)


def plain(array: np.ndarray, fixed: Sequence[int | None], rows: int) -> bytes:
    """Tiles without a swizzle that are as wide as the array: the map has four dimensions."""
    shape = (1,) * (4 - array.ndim) + array.shape
    map = em.TensorMap.of(array.reshape(shape), (shape[-1], rows, 1, 1))
    return layout(array, fixed, map)


def plain_tile(array: np.ndarray, width: int = 128) -> bytes:
    """A matrix in tiles of 128 rows and ``width`` columns without a swizzle."""
    element = "u8" if array.itemsize == 1 else "bf16"
    shape = (1, 1, *array.shape)
    map = em.TensorMap.of(array.reshape(shape), (width, 128, 1, 1), element=element)
    return layout(array, (1, 1, None, None), map)


def swizzled(scales: np.ndarray, columns: int) -> np.ndarray:
    """Scales of (rows, k), ``columns`` of them a tile, as tcgen05.cp wants them.

    Returns: (rows / 128, k / columns, 512 * columns / 4) bytes, rows of 32 times four.
    """
    rows, k = scales.shape
    parts = scales.reshape(rows // 128, 4, 32, k // columns, columns // 4, 4)
    return parts.transpose(0, 3, 4, 2, 1, 5).reshape(rows // 128, k // columns, -1)


@dataclass(frozen=True)
class Gemm:
    """One instance of a kernel.

    Attributes:
        kind: "mxfp8", "nvfp4", "bf16" or "fp8".
        config: arguments of the template ``config``.
        columns: of D that a pair of CTAs computes at a time; 256 rows go with them.
        bytes: of K in a tile of A or B.
        stored: columns of D in a TMA store.
        shared: dynamic shared memory, by their formula.
        k: of the problem.
        consumers: warpgroups that store, each for 256 rows of a pair of CTAs.
    """

    kind: str
    config: str
    columns: int
    bytes: int
    stored: int
    shared: int
    k: int
    consumers: int = 1

    @property
    def made(self) -> str:
        return (
            f"kernels/gemm/{self.kind}_b200/{self.kind}_b200_gemm.cu as it is, the entry of "
            f"config<{self.config}>; {FLAGS}"
        )

    @property
    def entry(self) -> str:
        """The part of the mangled name that holds the arguments of the template."""
        kinds = {"true": "Lb1E", "false": "Lb0E"}
        return "configI" + "".join(kinds.get(x, f"Li{x}E") for x in self.config.split(", "))


def operand(rng: np.random.Generator, kind: str, rows: int, k: int) -> tuple[np.ndarray, ...]:
    """What a kernel reads, and its values."""
    if kind == "nvfp4":
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        return allocated(codes[:, ::2] | codes[:, 1::2] << 4), E2M1[codes]
    values = rng.integers(-4, 5, (rows, k))
    return allocated(values.astype(BFLOAT16 if kind == "bf16" else E4M3)), values.astype(float)


def scales(rng: np.random.Generator, kind: str, rows: int, k: int) -> tuple[np.ndarray, ...]:
    """Powers of two as a kernel reads them, and the factors of the elements."""
    powers = 2.0 ** rng.integers(-1, 2, (rows, k // (32 if kind == "mxfp8" else 16)))
    factors = np.repeat(powers, k // powers.shape[1], axis=1)
    dtype = ml_dtypes.float8_e8m0fnu if kind == "mxfp8" else E4M3
    return allocated(swizzled(powers.astype(dtype).view(np.uint8), 4)), factors


def scale_layout(kind: str, words: np.ndarray) -> bytes:
    """Tiles of 32 x 16 bytes, or of four times 256 halves."""
    if kind == "mxfp8":
        return plain(words.reshape(*words.shape[:2], 32, 16), (None, None, 1, 1), 32)
    return plain(words.view(np.float16), (1, None, None, 1), 4)


def run(gemm: Gemm, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    m, n, k = 512 * gemm.consumers, 2 * gemm.columns, gemm.k
    a, left = operand(rng, gemm.kind, m, k)
    b, right = operand(rng, gemm.kind, n, k)
    d = allocated(np.zeros((m, n), BFLOAT16))
    width = gemm.bytes // a.itemsize
    maps = [[tile(a, 128, width)], [tile(b, gemm.columns // 2, width)]]
    buffers = [a, b, d]
    if gemm.kind in ("mxfp8", "nvfp4"):
        for part, rows in zip(maps, (m, n), strict=True):
            words, factors = scales(rng, gemm.kind, rows, k)
            part.append(scale_layout(gemm.kind, words))
            buffers.append(words)
            if rows == m and part is maps[0]:
                left = left * factors
            else:
                right = right * factors
    total = 1.0
    if gemm.kind == "nvfp4":
        for part, factor in zip(maps, (0.5, 4.0), strict=True):
            number = allocated(np.array([factor], np.float32))
            part.append(layout(number, (1, 1, 1, 1), None))
            buffers.append(number)
            total *= factor
    structure = b"".join([*maps[0], *maps[1], tile(d, 128, gemm.stored)])
    grid = 4 if gemm.kind in ("mxfp8", "nvfp4") else 8  # the others take over tiles
    launch(
        grid, 128 + 128 * gemm.consumers, [structure],
        cluster=2, shared=gemm.shared, buffers=[("", x) for x in buffers], programmatic=True,
    )  # fmt: skip
    wanted = (left @ right.T * total).astype(np.float32).astype(BFLOAT16)
    return bool((d == wanted).all())


def mxfp8_quantize(launch: Launch) -> bool:
    """Blocks of 32 along rows; the scale is the largest magnitude / 448, rounded up."""
    rows, k = 256, 256
    rng = np.random.default_rng(0)
    x = allocated(
        (rng.normal(size=(rows, k)) * 2.0 ** rng.integers(-9, 9, (rows, 1))).astype(BFLOAT16)
    )
    codes = allocated(np.zeros((rows, k), np.uint8))
    words = allocated(np.zeros((rows // 128, k // 128, 32, 16), np.uint8))
    structure = plain_tile(x) + plain_tile(codes) + plain(words, (None, None, 1, 1), 32)
    launch(
        (k // 128, rows // 128), 64, [structure],
        shared=128 * 128 * 2 + 1024, buffers=[("x", x), ("codes", codes), ("words", words)],
    )  # fmt: skip
    blocks = x.astype(np.float32).reshape(rows, k // 32, 32)
    mantissa, power = np.frexp(abs(blocks).max(-1) * np.float32(0.002232142857))
    power -= mantissa == 0.5
    wanted = np.ldexp(blocks, -power[..., None]).clip(-448, 448).astype(E4M3).reshape(rows, k)
    scale = swizzled((power + 127).astype(np.uint8), 4).reshape(words.shape)
    return bool((codes == wanted.view(np.uint8)).all() and (words == scale).all())


def nvfp4_quantize(square: bool, launch: Launch) -> bool:
    """Blocks of 16 along rows, or of 16 x 16 (``square``), and a scale of the whole matrix."""
    rows, k, whole = 256, 256, np.float32(2.0**-4)
    rng = np.random.default_rng(0)
    x = allocated(rng.normal(size=(rows, k)).astype(BFLOAT16))
    codes = allocated(np.zeros((rows, k // 2), np.uint8))
    words = allocated(np.zeros((rows // 128, k // 64, 256), np.float16))
    number = allocated(np.array([whole]))
    structure = plain_tile(x) + plain_tile(codes, 64) + plain(words, (1, None, None, 1), 1)
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
    bytes_wanted = swizzled(scale.view(np.uint8), 4).reshape(rows // 128, k // 64, 512)
    return bool((codes == wanted).all() and (words.view(np.uint8) == bytes_wanted).all())


def shared(columns: int, depth: int, row: int, stored: int, scales: int, consumers: int = 1) -> int:
    """Bytes: inputs and scales of every stage, two outputs a consumer, and room to align."""
    inputs = (128 * consumers + columns // 2) * row * depth
    outputs = 2 * 128 * stored * 2 * consumers
    return inputs + scales * depth + outputs + (2048 if scales else 1024)


GEMMS = {
    "tk_mxfp8_gemm": Gemm(
        "mxfp8", "128, 5, 4, 12, 2, true", 128, 128, 32, shared(128, 5, 128, 32, 1024), 768
    ),
    "tk_mxfp8_gemm_256": Gemm(
        "mxfp8", "256, 5, 8, 8, 2, false", 256, 128, 32, shared(256, 5, 128, 32, 1536), 768
    ),
    "tk_nvfp4_gemm": Gemm(
        "nvfp4", "128, 5, 4, 12, 2, true", 128, 128, 32, shared(128, 5, 128, 32, 4096), 1536
    ),
    "tk_nvfp4_gemm_256": Gemm(
        "nvfp4", "256, 5, 8, 4, 2, false", 256, 128, 32, shared(256, 5, 128, 32, 6144), 1536
    ),
    "tk_bf16_gemm": Gemm(
        "bf16", "256, 64, 128, 4, true, 5, 2", 64, 256, 32, shared(64, 5, 256, 32, 0), 768
    ),
    "tk_bf16_gemm_two": Gemm(
        "bf16", "256, 256, 64, 4, false, 4, 8", 256, 128, 32, shared(256, 4, 128, 32, 0, 2), 320, 2
    ),
    "tk_fp8_gemm": Gemm(
        "fp8", "256, 64, 256, 4, true, 5, 2", 64, 256, 32, shared(64, 5, 256, 32, 0), 1536
    ),
}
QUANTIZERS = {
    "tk_mxfp8_quantize": ("mxfp8", "mxfp8_quantize6config", mxfp8_quantize),
    "tk_nvfp4_quantize": ("nvfp4", "quantize_kernelILb0E", partial(nvfp4_quantize, False)),
    "tk_nvfp4_quantize_2d": ("nvfp4", "quantize_kernelILb1E", partial(nvfp4_quantize, True)),
}
BOUND = (
    "CONFIG := pytorch with -DTORCH_COMPILE, as the Makefile beside it has in comments; headers of "
    "torch 2.13, and for the host's code alone empty headers with the types of cuSPARSE, cuBLAS "
    "and cuSOLVER, which torch's declare functions of"
)
KERNELS = [
    *(
        Foreign(
            name, "ThunderKittens", VERSION, "sm_100a", gemm.entry, gemm.made, partial(run, gemm)
        )
        for name, gemm in GEMMS.items()
    ),
    *(
        Foreign(
            name, "ThunderKittens", VERSION, "sm_100a", entry,
            f"kernels/gemm/{kind}_b200/{kind}_b200_gemm.cu as it is; {FLAGS}, {BOUND}", function,
        )
        for name, (kind, entry, function) in QUANTIZERS.items()
    ),
]  # fmt: skip
