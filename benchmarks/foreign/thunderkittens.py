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
    """Their ``gl``: a pointer, of four sizes those that are not ``fixed``, the tensor map.

    A fixed size takes one byte, and the next part of a structure starts at a multiple of 128.
    """
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


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Scales of (rows, k), of one byte, as tcgen05.cp wants them.

    Returns: (rows / 128, k / 4, 512), bytes of 32 rows times 4 rows times 4 of k.
    """
    rows, k = scales.shape
    parts = scales.reshape(rows // 128, 4, 32, k // 4, 4)
    return parts.transpose(0, 3, 2, 1, 4).reshape(rows // 128, k // 4, 512)


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
    return allocated(swizzled(powers.astype(dtype).view(np.uint8))), factors


def scale_layout(kind: str, words: np.ndarray) -> bytes:
    """Tiles of 32 x 16 bytes, or of four times 256 halves."""
    if kind == "mxfp8":
        return plain(words.reshape(*words.shape[:2], 32, 16), (None, None, 1, 1), 32)
    return plain(words.view(np.float16), (1, None, None, 1), 4)


def side(
    rng: np.random.Generator, gemm: Gemm, rows: int, tiles: int, whole: float
) -> tuple[bytes, np.ndarray, list[np.ndarray]]:
    """A factor in tiles of ``tiles`` rows: its part of the structure, its values, its arrays.

    The scale of a whole matrix, which only NVFP4 has, is ``whole``.
    """
    array, values = operand(rng, gemm.kind, rows, gemm.k)
    part, arrays = tile(array, tiles, gemm.bytes // array.itemsize), [array]
    if gemm.kind in ("mxfp8", "nvfp4"):
        words, factors = scales(rng, gemm.kind, rows, gemm.k)
        part += scale_layout(gemm.kind, words)
        values = values * factors
        arrays.append(words)
    if gemm.kind == "nvfp4":
        number = allocated(np.array([whole], np.float32))
        part += layout(number, (1, 1, 1, 1), None)
        values = values * whole
        arrays.append(number)
    return part, values, arrays


def run(gemm: Gemm, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    m, n = 512 * gemm.consumers, 2 * gemm.columns
    a, left, arrays = side(rng, gemm, m, 128, 0.5)
    b, right, more = side(rng, gemm, n, gemm.columns // 2, 4.0)
    d = allocated(np.zeros((m, n), BFLOAT16))
    grid = 4 if gemm.kind in ("mxfp8", "nvfp4") else 8  # the others take over tiles
    launch(
        grid, 128 + 128 * gemm.consumers, [a + b + tile(d, 128, gemm.stored)],
        cluster=2, shared=gemm.shared, programmatic=True,
        buffers=[*(("A", x) for x in arrays), *(("B", x) for x in more), ("D", d)],
    )  # fmt: skip
    return bool((d == (left @ right.T).astype(np.float32).astype(BFLOAT16)).all())


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
KERNELS = [
    Foreign(name, "ThunderKittens", VERSION, "sm_100a", gemm.entry, gemm.made, partial(run, gemm))
    for name, gemm in GEMMS.items()
]
