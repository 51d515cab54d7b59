"""Products of every kind on Hopper, for compute-sanitizer: tails, few tiles, few rows, decoding.

    PYTHONPATH=src python3 benchmarks/gpu_sanitize.py   # compiles the kernels; then with each tool
    compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/gpu_sanitize.py

Names of kinds as arguments leave out the others. Says of each product that it has run, and fails if
it is not close to the fp32 product of what was quantized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import blockscale as bs

SHAPES = (  # M, N, K
    (192, 320, 384),
    (64, 576, 2048),
    (128, 576, 3072),
    (33, 200, 1568),
    (100, 264, 2080),
    (128, 384, 4096),
    (20, 1100, 1536),
)
DECODING = ((1, 264, 2048), (16, 6800, 512), (11, 8192, 1024))
WIDENED = ("mxfp8", "mxfp4", "nvfp4")

Product = Callable[[Tensor, Tensor], Tensor]  # of x (M, K) and w (N, K)


def fp8(x: Tensor, w: Tensor) -> Tensor:
    a, b = (bs.quantize(*each, backend="kernel") for each in ((x, "fp8_1x128"), (w, "fp8_128x128")))
    return bs.gemm(a, b.mT, backend="kernel")


def added(x: Tensor, w: Tensor) -> Tensor:
    a, b = (bs.quantize(each, "fp8_1x128", backend="kernel") for each in (x, w))
    out = torch.zeros(len(x), len(w), device=x.device)
    return bs.gemm(a, b.mT, out=out, accumulate=True, backend="kernel")


def both(name: str) -> Product:
    def product(x: Tensor, w: Tensor) -> Tensor:
        a, b = (bs.quantize(each, name, backend="kernel") for each in (x, w))
        return bs.gemm(a, b.mT, backend="kernel")

    return product


def weights(name: str) -> Product:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return bs.gemm(x, bs.quantize(w, name, backend="kernel").mT, backend="kernel")

    return product


def products() -> Iterator[tuple[str, Product, tuple[int, int, int]]]:
    for shape in SHAPES:
        if shape[2] % 128 == 0:
            yield "fp8", fp8, shape
            yield "added", added, shape
        for name in WIDENED:
            yield f"{name} both", both(name), shape
            yield f"{name} weights", weights(name), shape
    for shape in DECODING:
        for name in WIDENED:
            yield f"{name} decoding", weights(name), shape


def main(kinds: list[str]) -> None:
    torch.manual_seed(1)
    for name, product, (m, n, k) in products():
        if kinds and not set(name.split()) & set(kinds):
            continue
        x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        got, want = product(x, w).float(), x.float() @ w.float().mT
        error = float((got - want).norm() / want.norm())
        print(f"{name}, {m} x {n} x {k}: error {error:.3f}", flush=True)
        if not error < 0.3:  # of quantization: FP4 on both sides has most
            sys.exit("that is too much")


if __name__ == "__main__":
    main(sys.argv[1:])
