"""Triton's matrix products, as its own compiler makes them for Hopper and Blackwell.

The tutorials hold the kernels; the compiler picks swizzles, stages of shared memory, barriers and
the split into warps that load, multiply and store. ``Launched`` repeats what its launcher passes.

Operands are small integers: sums are exact in any order, and the output must be the rounded sum,
bit for bit. Sums are large enough to need rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from blockscale import emulator as em

from .kernel import Foreign, Launch, allocated

VERSION = "3.6.0"
F16, E4M3 = np.float16, ml_dtypes.float8_e4m3fn
N = 256
BLOCK, CTAS = 128, 2  # of M and N; of persistent kernels, NUM_SMS


@dataclass(frozen=True)
class Dot:
    """One kernel of tutorial 09 in one specialization.

    Attributes:
        function: of python/tutorials/09-persistent-matmul.py.
        dtype: of A, B and C.
        sm: 90 or 100.
        shared: bytes of dynamic shared memory, in the compiler's metadata.
        specialized: warps have roles (WARP_SPECIALIZE).
    """

    function: str
    dtype: type
    sm: int
    shared: int
    specialized: bool = False

    @property
    def persistent(self) -> bool:
        return "persistent" in self.function

    @property
    def m(self) -> int:
        """Four tiles; of a persistent kernel twelve, so that what two tiles share comes round."""
        return 768 if self.persistent else 256

    @property
    def block_k(self) -> int:
        return 128 // np.dtype(self.dtype).itemsize

    @property
    def k(self) -> int:
        """Four blocks: three stages come round, and one more."""
        return 4 * self.block_k

    @property
    def warps(self) -> int:
        """Those that store, and with roles four more."""
        return 8 if self.specialized else 4

    @property
    def name(self) -> str:
        kind = self.function.removeprefix("matmul_kernel_").replace("matmul_kernel", "dot")
        roles = "_ws" if self.specialized else ""
        dtype = "fp16" if self.dtype is F16 else "e4m3"
        return f"{kind}{roles}_{dtype}_sm{self.sm}"

    @property
    def made(self) -> str:
        return (
            f"{self.function} of python/tutorials/09-persistent-matmul.py, through its JIT "
            f"(JITFunction.warmup with GPUTarget('cuda', {self.sm}, 32)): BLOCK_SIZE_M and _N 128, "
            f"BLOCK_SIZE_K {self.block_k}, GROUP_SIZE_M 8, EPILOGUE_SUBTILE False, NUM_SMS {CTAS}, "
            f"WARP_SPECIALIZE {self.specialized}, FLATTEN "
            f"{not (self.specialized and self.sm == 90)}, num_stages 3, num_warps "
            f"{8 if self.specialized and self.sm == 90 else 4}; pointers and sizes multiples of 16"
        )


def pointers(dot: Dot, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[object]:
    """Strides that are 1 are compiled in."""
    return [a, b, c, dot.m, N, dot.k, dot.k, dot.k, N]


def bare(dot: Dot, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[object]:
    """The kernel makes its tensor maps itself."""
    return [a, b, c, dot.m, N, dot.k]


def descriptors(dot: Dot, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> list[object]:
    """Each tensor's map, shape and strides."""
    args: list[object] = []
    for array in (a, b, c):
        element = "f16" if dot.dtype is F16 else "u8"
        box = (128 // array.itemsize, BLOCK)
        tensor_map = em.TensorMap.of(
            array, box, element=element, swizzle="128B", l2_promotion="128B"
        )
        args += [tensor_map, *array.shape, array.shape[1], 1]
    return [*args, dot.m, N, dot.k]


ARGUMENTS: dict[str, Callable[..., list[object]]] = {
    "matmul_kernel": pointers,
    "matmul_kernel_persistent": pointers,
    "matmul_kernel_tma": descriptors,
    "matmul_kernel_tma_persistent": descriptors,
    "matmul_kernel_descriptor_persistent": bare,
}


def run(dot: Dot, launch: Launch) -> bool:
    rng = np.random.default_rng(0)
    most = 16 if dot.dtype is F16 else 1  # no sum leaves the range of C
    a, b = (
        allocated(rng.integers(-most, most + 1, (rows, dot.k)).astype(dot.dtype))
        for rows in (dot.m, N)
    )
    c = allocated(np.zeros((dot.m, N), dot.dtype))
    grid = CTAS if dot.persistent else dot.m // BLOCK * (N // BLOCK)
    scratch = allocated(np.zeros((grid, 3, 128), np.uint8)) if "descriptor" in dot.function else 0
    args = ARGUMENTS[dot.function](dot, a, b, c)
    launch(grid, 32 * dot.warps, [*args, scratch, 0], shared=dot.shared)
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    return bool((c == wanted.astype(np.float32).astype(dot.dtype)).all())


DOTS = [
    Dot("matmul_kernel", F16, 90, 98304),
    Dot("matmul_kernel_persistent", F16, 90, 106496),
    Dot("matmul_kernel_tma", F16, 90, 98328),
    Dot("matmul_kernel_tma_persistent", F16, 90, 131096),
    Dot("matmul_kernel_descriptor_persistent", F16, 90, 131096),
    Dot("matmul_kernel_descriptor_persistent", F16, 90, 131096, True),
    Dot("matmul_kernel", E4M3, 90, 98304),
    Dot("matmul_kernel_persistent", E4M3, 90, 106496),
    Dot("matmul_kernel_descriptor_persistent", E4M3, 90, 114712, True),
    Dot("matmul_kernel", F16, 100, 98320),
    Dot("matmul_kernel_persistent", F16, 100, 106512),
    Dot("matmul_kernel_tma", F16, 100, 98352),
    Dot("matmul_kernel_tma_persistent", F16, 100, 131120),
    Dot("matmul_kernel_descriptor_persistent", F16, 100, 131120),
    Dot("matmul_kernel_tma", F16, 100, 98524, True),
    Dot("matmul_kernel_tma_persistent", F16, 100, 131172, True),
    Dot("matmul_kernel_descriptor_persistent", F16, 100, 131172, True),
    Dot("matmul_kernel", E4M3, 100, 98320),
    Dot("matmul_kernel_persistent", E4M3, 100, 102416),
    Dot("matmul_kernel_descriptor_persistent", E4M3, 100, 114788, True),
]
KERNELS = [
    Foreign(dot.name, "triton", VERSION, f"sm_{dot.sm}a", dot.function, dot.made, partial(run, dot))
    for dot in DOTS
]
