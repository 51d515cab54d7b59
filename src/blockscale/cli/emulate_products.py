"""The products that ``blockscale emulate gemm`` knows: operands, and how each kernel is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.common.calls import Alpha
    from ..kernels.common.gpu import Gpu
    from ..tensor import ScaledTensor

__all__ = ["PRODUCTS", "TRANSPOSES", "Kernel", "alpha_of", "make_operands"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """``run``: A (M, K), B (K, N), the GPU and how many blocks work together, or None ->
    the product in bf16."""

    activations: str
    weights: str
    layouts: tuple[str, str]  # of A's scales, and of B's
    run: Callable[[ScaledTensor, ScaledTensor, Gpu, int | None], Tensor]
    sums: Callable[[int], float]  # relative error of the tensor cores' sums, of K
    strided: tuple[bool, bool] = (True, True)  # whether the contraction of A, of B may be
    pairs: bool = False  # two blocks' tensor cores can work together


def _fp8_block(a: ScaledTensor, b: ScaledTensor, gpu: Gpu, ctas: int | None) -> Tensor:
    from ..kernels.common.calls import Operand
    from ..kernels.sm90 import calls as sm90

    left = Operand(a.qdata, a.scale, a.format_name)
    return sm90.gemm(left, Operand(b.qdata.mT, b.scale.mT, b.format_name), gpu=gpu)


def _widened(a: ScaledTensor, b: ScaledTensor, gpu: Gpu, ctas: int | None) -> Tensor:
    from ..kernels.common.calls import Operand
    from ..kernels.sm90.exact_gemm import exact_gemm

    return exact_gemm(
        Operand(a.qdata, a.qscale, a.format_name),
        Operand(b.qdata.mT, b.qscale.mT, b.format_name),
        alpha=alpha_of(a, b),
        gpu=gpu,
    )


def _tcgen05(a: ScaledTensor, b: ScaledTensor, gpu: Gpu, ctas: int | None) -> Tensor:
    from ..kernels.common.calls import Operand
    from ..kernels.sm100 import calls as sm100

    return sm100.gemm(
        Operand(a.qdata, a.qscale, a.format_name),
        Operand(b.qdata.mT, b.qscale, b.format_name),
        alpha=alpha_of(a, b),
        gpu=gpu,
        ctas=ctas,
    )


def alpha_of(a: ScaledTensor, b: ScaledTensor) -> Alpha:
    """What the sums are multiplied by: global scales, if there are any."""
    from ..ops.gemm_operands import global_scales

    return global_scales(a.global_scale, b.global_scale)


def _of_fp8(k: int) -> float:
    """Hopper's sums of FP8 products have about 14 bits; each 128 are one, so K does not matter."""
    return 3e-4


def _of_bf16(k: int) -> float:
    """Each 16 products, or more, are added to an fp32 sum, cut off after 22 bits at worst."""
    return k / 16 * 2.0**-22


def _blackwell(a: str, b: str) -> Kernel:
    strided = a == "mxfp8", b == "mxfp8"  # elements of 4 bits lie along K
    return Kernel(a, b, ("tcgen05", "tcgen05"), _tcgen05, _of_bf16, strided, pairs=True)


_HOPPER = {
    "fp8_block": Kernel(
        *("fp8_1x128", "fp8_128x128", ("sm90", "compact"), _fp8_block, _of_fp8, (False, False)),
    ),
    **{
        name: Kernel(name, name, ("compact", "compact"), _widened, _of_bf16)
        for name in ("mxfp8", "nvfp4")
    },
}
_BLACKWELL = {
    "mxfp8": _blackwell("mxfp8", "mxfp8"),
    "mxfp8_mxfp4": _blackwell("mxfp8", "mxfp4"),
    "mxfp4": _blackwell("mxfp4", "mxfp4"),
    "nvfp4": _blackwell("nvfp4", "nvfp4"),
}
#: By architecture and name.
PRODUCTS: dict[str, dict[str, Kernel]] = {
    "sm_90a": _HOPPER,
    "sm_100a": _BLACKWELL,
    "sm_103a": _BLACKWELL,
}
#: Which operand has its contraction strided in memory: A, B.
TRANSPOSES: Mapping[str, tuple[bool, bool]] = {
    "TN": (False, False),
    "NN": (False, True),
    "NT": (True, True),
    "TT": (True, False),
}


def make_operands(
    kernel: Kernel, shape: tuple[int, int, int], strided: tuple[bool, bool], seed: int
) -> tuple[ScaledTensor, ScaledTensor]:
    """A (M, K) and B (K, N), random normal numbers. A contraction that is strided in memory is that
    of a tensor quantized along its columns. Data is padded to whole blocks."""
    import torch

    from ..quantize import quantize

    (m, n, k), generator = shape, torch.Generator().manual_seed(seed)

    def one(rows: int, strided: bool, format: str, layout: str) -> ScaledTensor:
        x = torch.randn(rows, k, generator=generator).to(torch.bfloat16)
        if strided:
            return quantize(x.mT.contiguous(), format, axis=-2, layout=layout, pad=True).mT
        return quantize(x, format, layout=layout, pad=True)

    a = one(m, strided[0], kernel.activations, kernel.layouts[0])
    return a, one(n, strided[1], kernel.weights, kernel.layouts[1]).mT
