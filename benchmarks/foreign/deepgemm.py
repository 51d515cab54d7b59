"""DeepGEMM's GEMMs for sm_100: FP8 x FP8, FP8 x FP4, BF16 and TF32, one and two CTAs, grouped.

Their JIT writes a few lines that name one instance of a template and compiles them. The fields of
``Gemm`` are one of the candidates that its heuristics list for two SMs (``set_num_sms(2)``), with
stages and shared memory by its formulas. For a problem this small its chooser may prefer another
candidate; with these each CTA or pair goes through several tiles, and its ring comes round.

Operands are small integers and scales powers of two: sums are exact in any order, and the output
must be the rounded sum, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated

VERSION = "54e22612409371d6364144b69086735beb54e98b"
FLAGS = (
    "the flags of NVCCCompiler in csrc/jit/compiler.hpp with architecture sm_100f, the headers of "
    "deep_gemm/include and of the submodule CUTLASS, f3fde58372d33e9a5650ba7b80fc48b3b49d40c8, "
    "nvcc 13.0.88 -ptx"
)
# The epilogue's address names lane 0 in every warp; a comment of theirs says that they rely on it.
OFF = {
    "tmem_lanes": "PTX ISA 9.7.16.8.1 says which lanes a warp reaches, and not what the bits of an "
    "address are that name a lane"
}
BFLOAT16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
N, TILE, BARRIERS = 256, 128, 812  # bytes of barriers and of the pointer to Tensor Memory
M = TILE * 8  # eight tiles for a CTA or pair: each block of K comes to each stage


@dataclass(frozen=True)
class Gemm:
    """One instance: blocks of 128 x 128, 128 bytes of K, N 256 and K compiled in.

    Attributes:
        a, b: "e4m3", "e2m1" or "bf16".
        k: of the product.
        stages: of the ring.
        ctas: 1 or 2.
        groups: 1, or the number of matrices B that groups of rows of A each have; grouped
            kernels swap A and B, and share A between two CTAs rather than B.
    """

    a: str
    b: str
    k: int
    stages: int
    ctas: int
    groups: int = 1

    @property
    def made(self) -> str:
        stem = "sm100_bf16_gemm" if self.a == "bf16" else "sm100_fp8_fp4_gemm_1d1d"
        kind = "MGroupedContiguous, swap_ab" if self.groups > 1 else "Normal"
        return (
            f"{stem}_impl of deep_gemm/include/deep_gemm/impls/{stem}.cuh, instantiated as "
            f"generate_impl of csrc/jit_kernels/impls/{stem}.hpp does: both K-major, shape 0 x {N} "
            f"x {self.k}, blocks 128 x 128 x {128 // self.size}, {self.groups} groups, swizzles "
            f"128, {self.stages} stages, 128 + 128 threads, multicast {self.ctas}, on A: "
            f"{self.groups > 1}, 2 SMs, {kind}, A {self.a}, B {self.b}, D bf16, scales of 32; "
            f"{FLAGS}"
        )

    @property
    def size(self) -> int:
        """Bytes of an element in shared memory."""
        return 2 if self.a == "bf16" else 1

    @property
    def loaded(self) -> tuple[int, int]:
        """Rows of A and of B that a CTA loads for a block."""
        half = TILE // self.ctas
        return (half, TILE) if self.groups > 1 else (TILE, half)

    @property
    def shared(self) -> int:
        """Bytes: output twice, operands and scales of every stage, barriers."""
        output = 16 * TILE * 2 * 2 if self.groups > 1 else TILE * 128 * 2
        scales = 0 if self.a == "bf16" else 2 * TILE * 4
        return output + BARRIERS + self.stages * (sum(self.loaded) * 128 + scales)


def operand(rng: np.random.Generator, kind: str, rows: int, k: int) -> tuple[np.ndarray, ...]:
    """What a kernel reads, and its values."""
    if kind == "e2m1":
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        return allocated(codes[:, ::2] | codes[:, 1::2] << 4), E2M1[codes]
    values = rng.integers(-4, 5, (rows, k))
    return allocated(values.astype(BFLOAT16 if kind == "bf16" else E4M3)), values.astype(np.float64)


def scales(rng: np.random.Generator, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """One UE8M0 for 32 of K, four of them a word, words of a column together; the factors."""
    codes = rng.integers(126, 129, (rows, k // 32), dtype=np.uint8)
    words = allocated(codes.view(np.int32).T)
    return words, np.repeat(2.0 ** (codes.astype(np.float64) - 127), 32, axis=1)


def tensor_map(array: np.ndarray, rows: int, kind: str) -> em.TensorMap:
    """128 bytes of shared memory wide, swizzled."""
    element = {"e4m3": "u8", "e2m1": "b4x16_align16", "bf16": "bf16"}[kind]
    box = (64 if kind == "bf16" else 128, rows)
    return em.TensorMap.of(array, box, element=element, swizzle="128B", l2_promotion="256B")


def run(gemm: Gemm, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    a, left = operand(rng, gemm.a, M, gemm.k)
    b, right = operand(rng, gemm.b, N * gemm.groups, gemm.k)
    d = allocated(np.zeros((M, N), BFLOAT16))
    maps = [
        tensor_map(a, gemm.loaded[0], gemm.a),
        tensor_map(b, gemm.loaded[1], gemm.b),
    ]
    if gemm.a != "bf16":
        a_scales, a_factors = scales(rng, M, gemm.k)
        words, b_factors = zip(*(scales(rng, N, gemm.k) for _ in range(gemm.groups)), strict=True)
        b_scales = allocated(np.concatenate(words))
        left, right = left * a_factors, right * np.concatenate(b_factors)
        maps += [em.TensorMap.of(x, (TILE, 1), l2_promotion="256B") for x in (a_scales, b_scales)]
    maps.append(tensor_map(d, 16 if gemm.groups > 1 else TILE, "bf16"))
    rows = np.arange(M, dtype=np.int32)
    layout = rows // (M // gemm.groups) if gemm.groups > 1 else 0
    launch(
        2, 256, [layout, M, N, gemm.k, *maps],
        cluster=gemm.ctas, shared=gemm.shared,
    )  # fmt: skip
    right = right.reshape(gemm.groups, N, gemm.k)
    parts = np.split(left, gemm.groups)
    wanted = np.concatenate([x @ y.T for x, y in zip(parts, right, strict=True)])
    return bool((d == wanted.astype(np.float32).astype(BFLOAT16)).all())


def hc_prenorm(launch: Launch) -> bool:
    """A product of bf16 by fp32 in TF32, and the sums of squares of A's rows; 100 rows of 128."""
    rng = np.random.default_rng(0)
    m, n, k = 100, 24, 896
    a = allocated(rng.integers(-4, 5, (m, k)).astype(BFLOAT16))
    b = allocated(rng.integers(-4, 5, (n, k)).astype(np.float32))
    d, squares = allocated(np.zeros((m, n), np.float32)), np.zeros(m, np.float32)
    maps = [
        em.TensorMap.of(a, (64, 64), swizzle="128B", l2_promotion="256B"),
        em.TensorMap.of(b, (32, 32), element="tf32", swizzle="128B", l2_promotion="256B"),
        em.TensorMap.of(d, (32, 64), swizzle="128B", l2_promotion="256B"),
    ]
    stages, output = 12, 64 * 128
    shared = stages * (64 * 64 * 2 + 32 * 64 * 4) + output + (stages * 4 + 1) * 8 + 4
    launch(2, 256, [m, *maps, squares], shared=shared)
    wide = a.astype(np.float64)
    return bool((d == wide @ b.T).all() and (squares == (wide**2).sum(1)).all())


GEMMS = {
    "fp8_1cta": Gemm("e4m3", "e4m3", 1024, 5, 1),
    "fp8_2cta": Gemm("e4m3", "e4m3", 1024, 7, 2),
    "fp8_fp4_1cta": Gemm("e4m3", "e2m1", 1024, 5, 1),
    "fp8_fp4_2cta": Gemm("e4m3", "e2m1", 1024, 7, 2),
    "fp8_grouped_2cta": Gemm("e4m3", "e4m3", 1152, 8, 2, 2),
    "bf16_1cta": Gemm("bf16", "bf16", 512, 6, 1),
    "bf16_2cta": Gemm("bf16", "bf16", 768, 8, 2),
    "bf16_grouped_2cta": Gemm("bf16", "bf16", 768, 9, 2, 2),
}
KERNELS = [
    *(
        Foreign(name, "DeepGEMM", VERSION, "sm_100a", "gemm", gemm.made, partial(run, gemm), OFF)
        for name, gemm in GEMMS.items()
    ),
    Foreign(
        "tf32_hc_prenorm", "DeepGEMM", VERSION, "sm_100a", "gemm",
        "sm100_tf32_hc_prenorm_gemm_impl of deep_gemm/include/deep_gemm/impls/"
        "sm100_tf32_hc_prenorm_gemm.cuh: N 24, K 896, blocks 64 x 32 x 64, 1 split, swizzle 128, "
        f"12 stages, 128 + 128 threads; {FLAGS}",
        hc_prenorm, OFF,
    ),
]  # fmt: skip
