"""``blockscale emulate gemm``: our own products, compiled and run without a GPU."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from .emulate_epilogues import EPILOGUES
from .emulate_groups import Groups, parse_groups
from .emulate_ours import choose_arch, emulated, tell
from .emulate_products import PRODUCTS, TRANSPOSES, Kernel, make_operands
from .kept_code import CubinOption, KeptCode, PtxOption, SassOption
from .sizes import parse_size

__all__ = ["Product", "gemm"]


@dataclass(frozen=True, slots=True)
class Product:
    """A product, and how far from the fp64 one of the dequantized operands it is, behind the same
    epilogue.

    ``error`` is relative, of the whole matrix (Frobenius); ``floor`` is that of rounding the exact
    one to ``dtype``; ``allowed`` has the tensor cores' own rounding of sums, too.
    """

    format: str
    transpose: str
    epilogue: str
    shape: tuple[int, int, int]  # M, N, K
    dtype: str
    groups: tuple[int, ...]  # rows of each; empty where they are not grouped
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
        typer.Option(
            help="sm_90a: fp8_block, mxfp8, nvfp4; sm_100a: mxfp8, mxfp8_mxfp4, mxfp4, nvfp4. "
            "Default: the first."
        ),
    ] = "",
    shape: Annotated[str, typer.Option(help="M x N x K.")] = "192x320x384",
    transpose: Annotated[
        str,
        typer.Option(
            help="TN: both operands lie along K; NN: A alone does; TT: B alone; NT: neither."
        ),
    ] = "TN",
    groups: Annotated[
        str,
        typer.Option(help="Rows of each group, as in 0,1,129: each is multiplied by its matrix."),
    ] = "",
    ctas: Annotated[
        int | None,
        typer.Option(help="From sm_100a on: blocks whose tensor cores work together, 1 or 2."),
    ] = None,
    epilogue: Annotated[
        str,
        typer.Option(
            help="From sm_100a on: what becomes of the product, such as nvfp4, or swiglu-mxfp8: "
            "SwiGLU of its halves, quantized."
        ),
    ] = "none",
    completion: Annotated[
        str, typer.Option(help="When asynchronous work completes: eager, late or random.")
    ] = "late",
    seed: Annotated[int, typer.Option(help="Of the operands and the random order.")] = 0,
    cubin: CubinOption = None,
    sass: SassOption = None,
    ptx: PtxOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Multiply random matrices by the GPU's kernel; compare with the fp64 product.

    Prints the error beside the least there can be, and what the launch did. Exit code 1 if the
    error is larger than it may be or the kernel is at fault (a race, a fault of memory), 2 where
    there is no kernel. Needs CuTe DSL (pip install 'blockscale\\[cuda]'), but no GPU.
    """
    import torch

    from ..checks import choose
    from ..kernels.common.compile_cache import last_built
    from ..kernels.common.gpu import GPUS

    products = choose_arch(arch, PRODUCTS)
    format = format or next(iter(products))
    kernel = choose("format", format, products)
    strided = choose("transpose", transpose, TRANSPOSES)
    made = choose("epilogue", epilogue, EPILOGUES)
    m, n, k = parse_size("shape", shape, "M, N and K", "192x320x384")
    _check(kernel, arch, format, transpose, epilogue, ctas)
    kept = KeptCode(cubin, sass, ptx)
    if groups:
        if transpose != "TN" or epilogue != "none":
            raise ValueError("groups: leave transpose and epilogue out")
        made = each = Groups(sizes=parse_groups(groups, m))
        a, b = each.operands(kernel, (m, n, k), seed)
        want = each.product(a.dequantize(torch.float64), b.dequantize(torch.float64))
    else:
        a, b = make_operands(kernel, (m, n, k), strided, seed)
        want = made.exact(a.dequantize(torch.float64) @ b.dequantize(torch.float64))
    rounded = made.rounded(want)
    start = time.perf_counter()
    with emulated(arch, completion, seed, keep_code=kept.wanted) as reports:
        got = made.run(kernel, a, b, GPUS[arch], ctas, rounded)
    seconds = time.perf_counter() - start
    kept.write(last_built())  # what multiplies comes after what widens its operands
    norm = want.norm() or 1.0  # groups may have no rows at all
    errors = [float((made.wide(x) - want).norm() / norm) for x in (got, rounded)]
    product = Product(
        format,
        transpose,
        epilogue,
        (m, n, k),
        made.dtype,
        made.sizes if isinstance(made, Groups) else (),
        error=errors[0],
        floor=errors[1],
        allowed=made.allowed(errors[1], kernel.sums(k)),
        seconds=seconds,
        launches=len(reports),
    )
    if not json:
        _show(product)
    tell(json, asdict(product), reports)
    if not product.right:
        raise typer.Exit(1)


def _check(
    kernel: Kernel, arch: str, format: str, transpose: str, epilogue: str, ctas: int | None
) -> None:
    """ValueError where tensor cores cannot do it so."""
    strided = TRANSPOSES[transpose]
    if any(each and not able for each, able in zip(strided, kernel.strided, strict=True)):
        raise ValueError(
            f"transpose: got {transpose!r}; the tensor cores of {arch} take operands of {format} "
            "that lie along K: quantize with k_major=True, and the same product is 'TN'"
        )
    if epilogue != "none" and not kernel.pairs:
        raise ValueError(
            f"epilogue: got {epilogue!r} for {arch}; products are quantized by kernels from "
            "sm_100a on: leave epilogue out"
        )
    if ctas is None:
        return
    if not kernel.pairs:
        raise ValueError(
            f"ctas: got {ctas} for {arch}; tensor cores work for one CTA each there, "
            "and for pairs of blocks from sm_100a on: leave ctas out"
        )
    if ctas not in (1, 2):
        raise ValueError(f"ctas: got {ctas}; choose 1 or 2")


def _show(product: Product) -> None:
    verdict = "as small as it can be" if product.right else "too large"
    lines = (
        f"{product.format} {product.transpose} {'x'.join(map(str, product.shape))}, "
        f"epilogue {product.epilogue}, {product.dtype} out"
        + (f", groups of {', '.join(map(str, product.groups))} rows" if product.groups else ""),
        f"error    {product.error:.3e}, {verdict}: at most {product.allowed:.3e}",
        f"floor    {product.floor:.3e}, the exact result rounded to {product.dtype}",
        f"launches {product.launches}, without races or reads of what was not written",
        f"time     {product.seconds:.1f} s to compile and to emulate",
    )
    typer.echo("\n".join(lines) + "\n")
