"""``blockscale emulate gemm``: our own products, compiled and run without a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from .emulate_ours import emulated, tell
from .sizes import parse_size

if TYPE_CHECKING:
    from torch import Tensor

    from ..tensor import ScaledTensor

__all__ = ["Product", "gemm"]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """``run``: A (M, K), B (K, N) and the architecture -> the product in bf16."""

    activations: str
    weights: str
    layouts: tuple[str, str]  # of A's scales, and of B's
    run: Callable[[ScaledTensor, ScaledTensor, str], Tensor]
    sums: Callable[[int], float]  # relative error of the tensor cores' sums, of K


def _fp8_block(a: ScaledTensor, b: ScaledTensor, arch: str) -> Tensor:
    from ..kernels import sm90

    return sm90.gemm(a.qdata, a.scale, b.qdata.mT, b.scale.mT, arch=arch)


def _widened(a: ScaledTensor, b: ScaledTensor, arch: str) -> Tensor:
    from ..kernels.sm90.dequantized_gemm import exact_gemm

    return exact_gemm(
        *(a.qdata, a.qscale, a.format_name),
        *(b.qdata.mT, b.qscale.mT, b.format_name),
        alpha=_alpha(a, b),
        arch=arch,
    )


def _tcgen05(a: ScaledTensor, b: ScaledTensor, arch: str) -> Tensor:
    from ..kernels import sm100

    return sm100.gemm(
        *(a.qdata, a.qscale, a.format_name),
        *(b.qdata.mT, b.qscale, b.format_name),
        alpha=_alpha(a, b),
        arch=arch,
    )


def _alpha(a: ScaledTensor, b: ScaledTensor) -> Tensor | None:
    import torch

    scalars = [q.global_scale for q in (a, b) if q.global_scale is not None]
    return torch.stack(scalars).prod() if scalars else None


def _of_fp8(k: int) -> float:
    """Hopper's sums of FP8 products have about 14 bits; each 128 are one, so K does not matter."""
    return 3e-4


def _of_bf16(k: int) -> float:
    """Each 16 products, or more, are added to an fp32 sum, cut off after 22 bits at worst."""
    return k / 16 * 2.0**-22


_KERNELS = {
    "fp8_block": _Kernel("fp8_1x128", "fp8_128x128", ("sm90", "compact"), _fp8_block, _of_fp8),
    "mxfp8": _Kernel("mxfp8", "mxfp8", ("compact", "compact"), _widened, _of_bf16),
    "nvfp4": _Kernel("nvfp4", "nvfp4", ("compact", "compact"), _widened, _of_bf16),
}
_BLACKWELL = {
    name: _Kernel(name, name, ("tcgen05", "tcgen05"), _tcgen05, _of_bf16)
    for name in ("mxfp8", "mxfp4", "nvfp4")
}
# which operand has its contraction strided in memory: A, B
_TRANSPOSES = {"TN": (False, False), "NN": (False, True), "NT": (True, True)}


@dataclass(frozen=True, slots=True)
class Product:
    """A product, and how far from the fp64 one of the dequantized operands it is.

    ``error`` is relative, of the whole matrix (Frobenius); ``floor`` is that of rounding the exact
    product to ``dtype``; ``allowed`` has the tensor cores' own rounding of sums, too.
    """

    format: str
    transpose: str
    shape: tuple[int, int, int]  # M, N, K
    dtype: str
    error: float
    floor: float
    allowed: float
    seconds: float  # to compile and to emulate
    launches: int

    @property
    def right(self) -> bool:
        return self.error <= self.allowed  # not where it is NaN


def gemm(
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a or sm_103a.")] = "sm_90a",
    format: Annotated[
        str,
        typer.Option(help="fp8_block, mxfp8 or nvfp4; from sm_100a on mxfp8, mxfp4 or nvfp4."),
    ] = "fp8_block",
    shape: Annotated[str, typer.Option(help="M x N x K.")] = "192x320x384",
    transpose: Annotated[
        str,
        typer.Option(help="TN: both operands lie along K; NN: A does; NT: neither."),
    ] = "TN",
    completion: Annotated[
        str, typer.Option(help="When asynchronous work completes: eager, late or random.")
    ] = "late",
    seed: Annotated[int, typer.Option(help="Of the operands and the random order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Multiply random matrices by the GPU's kernel; compare with the fp64 product.

    Prints the error beside the least there can be, and what the launch did. Exit code 1 if the
    error is larger than it may be or the kernel is at fault (a race, a fault of memory), 2 where
    there is no kernel. Needs CuTe DSL (pip install 'blockscale[cuda]'), but no GPU.
    """
    import torch

    from ..formats import choose

    kernel = choose("format", format, _BLACKWELL if arch.startswith("sm_10") else _KERNELS)
    strided = choose("transpose", transpose, _TRANSPOSES)
    m, n, k = parse_size("shape", shape, "M, N and K", "192x320x384")
    if transpose != "TN" and format == "fp8_block":
        raise ValueError(
            f"transpose: got {transpose!r}; Hopper multiplies FP8 operands that lie along K both: "
            "quantize with k_major=True, and the same product is 'TN'"
        )
    a, b = _operands(kernel, (m, n, k), strided, seed)
    start = time.perf_counter()
    with emulated(arch, completion, seed) as reports:
        got = kernel.run(a, b, arch)
    seconds = time.perf_counter() - start
    want = a.dequantize(torch.float64) @ b.dequantize(torch.float64)
    norm = want.norm()
    floor = float((want.to(got.dtype).double() - want).norm() / norm)
    product = Product(
        format,
        transpose,
        (m, n, k),
        str(got.dtype).removeprefix("torch."),
        error=float((got.double() - want).norm() / norm),
        floor=floor,
        allowed=math.hypot(floor, kernel.sums(k)),
        seconds=seconds,
        launches=len(reports),
    )
    if not json:
        _show(product)
    tell(json, asdict(product), reports)
    if not product.right:
        raise typer.Exit(1)


def _operands(
    kernel: _Kernel, shape: tuple[int, int, int], strided: tuple[bool, bool], seed: int
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


def _show(product: Product) -> None:
    verdict = "as small as it can be" if product.right else "too large"
    lines = (
        f"{product.format} {product.transpose} {'x'.join(map(str, product.shape))}, "
        f"{product.dtype} out",
        f"error    {product.error:.3e}, {verdict}: at most {product.allowed:.3e}",
        f"floor    {product.floor:.3e}, the exact product rounded to {product.dtype}",
        f"launches {product.launches}, without races or reads of what was not written",
        f"time     {product.seconds:.1f} s to compile and to emulate",
    )
    typer.echo("\n".join(lines) + "\n")
