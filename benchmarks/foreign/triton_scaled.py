"""Triton's tl.dot_scaled: MXFP8, MXFP4, NVFP4, and MXFP8 by MXFP4, for sm_100.

Codes are small numbers and scales powers of two: sums are exact in any order, and the output must
be the rounded sum, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated
from .triton import VERSION

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
M = N = BLOCK_N = 256
BLOCK_M, BLOCKS_K, STAGES = 128, 6, 4  # six blocks of K: the four stages come round


@dataclass(frozen=True)
class Scaled:
    """One format of tutorial 10.

    Attributes:
        a, b: "e4m3" or "e2m1".
        vector: elements of K that one scale belongs to; 16 has scales of E4M3, 32 of UE8M0.
        shared: bytes of dynamic shared memory, in the compiler's metadata.
    """

    a: str
    b: str
    vector: int
    shared: int

    @property
    def block_k(self) -> int:
        return 256 if self.a == "e2m1" else 128

    @property
    def k(self) -> int:
        return BLOCKS_K * self.block_k

    @property
    def made(self) -> str:
        per_byte = [2 if kind == "e2m1" else 1 for kind in (self.a, self.b)]
        return (
            "block_scaled_matmul_kernel of python/tutorials/10-block-scaled-matmul.py, through its "
            f"JIT (JITFunction.warmup with GPUTarget('cuda', 100, 32)): M {M}, N {N}, K {self.k}, "
            f"output_type 1, ELEM_PER_BYTE_A {per_byte[0]} and _B {per_byte[1]}, VEC_SIZE "
            f"{self.vector}, BLOCK_M {BLOCK_M}, BLOCK_N {BLOCK_N}, BLOCK_K {self.block_k}, rep_m "
            f"1, rep_n 2, rep_k {self.block_k // self.vector // 4}, NUM_STAGES {STAGES}"
        )


def described(array: np.ndarray, tensor_map: em.TensorMap) -> list[object]:
    """A tensor descriptor as an argument: its map, shape and strides in elements."""
    strides = [step // array.itemsize for step in array.strides]
    return [tensor_map, *array.shape, *strides]


def operand(
    scaled: Scaled, kind: str, rows: int, block: int, rng: np.random.Generator
) -> tuple[list[object], np.ndarray]:
    """Its arguments, and its values. FP4 by FP8 has 8 bytes of FP4 in 16 of shared memory."""
    if kind == "e4m3":
        values = rng.integers(-2, 3, (rows, scaled.k))
        codes, element = allocated(values.astype(E4M3).view(np.uint8)), "u8"
    else:
        nibbles = rng.integers(0, 16, (rows, scaled.k), dtype=np.uint8)
        codes, values = allocated(nibbles[:, ::2] | nibbles[:, 1::2] << 4), E2M1[nibbles]
        element = "u8" if scaled.a == "e2m1" else "b4x16_align16"
    box = (128, block)
    found = em.TensorMap.of(codes, box, element=element, swizzle="128B", l2_promotion="128B")
    return described(codes, found), values.astype(np.float64)


def scales(
    scaled: Scaled, rows: int, block: int, rng: np.random.Generator
) -> tuple[list[object], np.ndarray]:
    """Tiles of 128 rows by 4 as the tensor cores read them: row r at r % 32, r // 32."""
    factors = 2.0 ** rng.integers(-1, 2, (rows, scaled.k // scaled.vector))
    codes = factors.astype(E4M3 if scaled.vector == 16 else E8M0).view(np.uint8)
    tiles = codes.reshape(rows // 128, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4)
    array = allocated(tiles.reshape(1, rows // 128, -1, 2, 256))
    box = (256, 2, scaled.block_k // scaled.vector // 4, block // 128, 1)
    found = em.TensorMap.of(array, box, l2_promotion="128B")
    return described(array, found), np.repeat(factors, scaled.vector, axis=1)


def run(scaled: Scaled, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    a, left = operand(scaled, scaled.a, M, BLOCK_M, rng)
    a_scales, a_factors = scales(scaled, M, BLOCK_M, rng)
    b, right = operand(scaled, scaled.b, N, BLOCK_N, rng)
    b_scales, b_factors = scales(scaled, N, BLOCK_N, rng)
    c = allocated(np.zeros((M, N), np.float16))
    stored = em.TensorMap.of(c, (64, BLOCK_M), swizzle="128B", l2_promotion="128B")
    args = [*a, *a_scales, *b, *b_scales, *described(c, stored), 0, 0]
    launch(M // BLOCK_M * (N // BLOCK_N), 128, args, shared=scaled.shared)
    wanted = (left * a_factors) @ (right * b_factors).T
    return bool((c == wanted.astype(np.float32).astype(np.float16)).all())


FORMATS = {
    "mxfp8": Scaled("e4m3", "e4m3", 32, 202800),
    "mxfp4": Scaled("e2m1", "e2m1", 32, 208944),
    "nvfp4": Scaled("e2m1", "e2m1", 16, 221232),
    "mixed": Scaled("e4m3", "e2m1", 32, 202800),
}
KERNELS = [
    Foreign(
        f"scaled_{name}_sm100", "triton", VERSION, "sm_100a", "block_scaled_matmul_kernel",
        scaled.made, partial(run, scaled),
    )
    for name, scaled in FORMATS.items()
]  # fmt: skip
