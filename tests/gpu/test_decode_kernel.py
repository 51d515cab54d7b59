"""bf16 rows by quantized weights, as in decoding: exact to one rounding, whatever the shape."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from gpu_inputs import DEVICE, normal, only_on

import blockscale as bs

only_on("sm_90a")

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
gemm = partial(bs.gemm, backend="kernel")


def shapes(format: str) -> list[tuple[int, int, int]]:
    """Of LLMs, and random ones whose scales TMA can load."""
    chosen = random.Random(format)
    block = 256 if format == "nvfp4" else 512
    few = [
        (chosen.randint(1, 17), chosen.randint(1, 3000), block * chosen.randint(1, 12))
        for _ in range(40)
    ]
    return [(1, 7168, 16384), (8, 2112, 7168), (16, 57344, 1024), (3, 1, 512), *few]


@pytest.mark.parametrize("format", FORMATS)
def test_values(format):
    """Every element of poisoned memory is written, and nothing beside; the same bits each time."""
    for i, (m, n, k) in enumerate(shapes(format)):
        x, w = normal(m, k, seed=i), bs.quantize(normal(n, k, seed=i + 1), format).mT
        whole = torch.full((m + 2, n + 16), float("nan"), device=DEVICE, dtype=BF16)
        out = whole[1:-1, 8:-8]
        gemm(x, w, out=out)
        exact = x.double() @ w.dequantize(torch.float64)
        sums = k / 16 * 2.0**-22 * (x.double().abs() @ w.dequantize(torch.float64).abs())
        assert bool(((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + sums).all()), (m, n, k)
        assert torch.equal(out, gemm(x, w))
        out.fill_(float("nan"))
        assert bool(whole.isnan().all())
        start = torch.randn(m, n, device=DEVICE)
        bias, total = torch.randn(n, device=DEVICE), start.clone()
        gemm(x, w, out=total, accumulate=True, bias=bias)
        wrong = (total.double() - (exact + start.double() + bias.double())).abs()
        assert bool((wrong <= sums + 2.0**-21 * (1 + total.abs())).all()), (m, n, k)


@pytest.mark.parametrize("format", FORMATS)
def test_not_numbers(format):
    """A NaN of a row of the weights makes its column NaN, and no other."""
    weights = normal(300, 1024, seed=3)
    if format in ("mxfp8", "mxfp8_e5m2"):
        weights[37, 1000] = torch.nan
    w = bs.quantize(weights, format)
    w.qscale.view(torch.uint8)[150, 20] = 0x7F if format == "nvfp4" else 0xFF
    x = normal(5, 1024, seed=4).abs() + 1
    got, want = gemm(x, w.mT), x.float() @ w.dequantize(FP32).mT
    assert torch.equal(got.isnan(), want.isnan())
