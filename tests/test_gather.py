"""Rows gathered and quantized: what ``quantize`` makes of the rows, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import blockscale as bs

ENDS = torch.tensor([3, 3, 40], dtype=torch.int32)


def given(count: int = 50, rows: int = 20, columns: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator).bfloat16()
    return x, torch.randint(rows, (count,), generator=generator, dtype=torch.int32)


def same(a: bs.ScaledTensor, b: bs.ScaledTensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    for got, want in ((a.qdata, b.qdata), (a.qscale, b.qscale)):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128", "mxfp6_e2m3"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_bytes(name, backend):
    x, rows = given()
    scale = {"global_scale": 0.02} if name == "nvfp4" else {}
    how = {"pad": True, "backend": backend, **scale}
    for axis in (-1, -2):
        got = bs.quantize(x, name, axis, gather=rows, **how)
        same(got, bs.quantize(x[rows], name, axis, **how))
    pairs = zip(
        bs.quantize_both(x, name, gather=rows, offsets=ENDS, k_major=True, **how),
        bs.quantize_both(x[rows], name, offsets=ENDS, k_major=True, **how),
        strict=True,
    )
    for got, want in pairs:
        same(got, want)


def test_the_global_scale_is_that_of_all_rows():
    x, rows = given()
    x[7] = 100
    rows = rows[rows != 7]
    assert torch.equal(
        bs.quantize(x, "nvfp4", gather=rows).global_scale, bs.quantize(x, "nvfp4").global_scale
    )


def test_compile_and_products():
    x, rows = given()
    w = bs.quantize(torch.randn(3, 64, 96).bfloat16(), "mxfp8")

    def product(x, rows):
        return bs.grouped_gemm(bs.quantize(x, "mxfp8", gather=rows, offsets=ENDS), w.mT, ENDS)

    got = torch.compile(product, fullgraph=True, backend="aot_eager")(x, rows)
    assert torch.equal(got, product(x, rows))
    assert_close(got, bs.grouped_gemm(bs.quantize(x[rows], "mxfp8"), w.mT, ENDS))


@pytest.mark.parametrize(
    ("gather", "error", "message"),
    [
        (torch.tensor([0, 20], dtype=torch.int32), ValueError, "rows 0 to 20; .* from 0 to 19"),
        (torch.tensor([-1], dtype=torch.int32), ValueError, "rows -1 to -1"),
        (torch.tensor([1]), TypeError, r"gather: got torch\.int64 of 1 dim.*torch\.int32"),
        ([1], TypeError, "gather: got list"),
        (torch.zeros(2, 2, dtype=torch.int32), TypeError, "2 dimension"),
        (torch.arange(8, dtype=torch.int32)[::2], ValueError, r"stride .*contiguous\(\)"),
        (torch.zeros(0, dtype=torch.int32), ValueError, "nothing to quantize"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "is on meta"),
    ],
)
def test_bad_input(gather, error, message):
    with pytest.raises(error, match=message):
        bs.quantize(given()[0], gather=gather)


def test_only_rows_of_a_matrix():
    with pytest.raises(ValueError, match="only rows of a matrix"):
        bs.quantize(torch.randn(2, 4, 32), gather=torch.zeros(2, dtype=torch.int32))
