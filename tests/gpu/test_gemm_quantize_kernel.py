"""``bs.gemm_quantize`` on a Hopper GPU: the bytes of its product in fp32, quantized."""

import pytest
import torch
from gpu_inputs import DEVICE, only_on, same_parts

import blockscale as bs

only_on("sm_90a")


def operands(left: str | None, right: str, m: int, n: int, k: int):
    generator = torch.Generator(DEVICE).manual_seed(m)
    x, w = (
        torch.randn(rows, k, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for rows in (m, n)
    )
    layout = "sm90" if left == "fp8_1x128" else "compact"
    a = x if left is None else bs.quantize(x, left, layout=layout)
    return a, bs.quantize(w, right).mT


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(("right", "format"), [
    ("fp8_128x128", "fp8_1x128"), ("nvfp4", "fp8_1x128"), ("mxfp8", "mxfp8"),
])  # fmt: skip
def test_groups(right, format, swiglu):
    """Of groups of rows: what the steps one by one give."""
    left = "mxfp8" if right == "mxfp8" else "fp8_1x128"
    layout = "sm90" if format == "fp8_1x128" else "compact"
    for m, n, k, ends in ((40, 512, 256, (5, 5, 33)), (1000, 768, 512, (0, 129, 1000))):
        a, _ = operands(left, right, m, n, k)
        w = torch.randn(3, n, k, device=DEVICE, dtype=torch.bfloat16)
        b, offsets = bs.quantize(w, right).mT, torch.tensor(ends, device=DEVICE).int()
        how = {"layout": layout, "backend": "kernel"}
        for dtype in (torch.bfloat16, torch.float32):
            got = bs.grouped_gemm_quantize(
                a, b, offsets, format, swiglu=swiglu, out_dtype=dtype, **how
            )
            y = bs.grouped_gemm(a, b, offsets, dtype)
            want = bs.quantize(y, format, offsets=offsets, **how)
            if swiglu:
                (want,) = bs.swiglu_quantize(y, format, axes=(-1,), offsets=offsets, **how)
            assert same_parts(got, want)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "fp8_1x128"])
@pytest.mark.parametrize(("left", "right"), [
    ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), (None, "mxfp8"),
])  # fmt: skip
def test_bytes(left, right, format, swiglu):
    """Two kernels, or three, give what the reference makes of the product in fp32."""
    for m, n, k in ((1, 512, 256), (130, 768, 1024), (1000, 512, 384)):
        a, b = operands(left, right, m, n, k)
        bias = torch.randn(n, device=DEVICE)
        layout = "tcgen05" if format != "fp8_1x128" else "sm90"
        how = {"layout": layout, "backend": "kernel"}
        got = bs.gemm_quantize(a, b, format, swiglu=swiglu, bias=bias, **how)
        product = bs.gemm(a, b, torch.float32, bias=bias, backend="kernel").cpu()
        if swiglu:
            want = bs.swiglu_quantize(product, format, axes=(-1,), layout=layout)[0]
        else:
            want = bs.quantize(product, format, layout=layout)
        assert same_parts(got, want)
