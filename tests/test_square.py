"""One scale for a square of elements, which rows and columns have alike."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs
from blockscale.formats import formats
from stand_in import gpu

ROWS = [name for name, format in formats.items() if format.block[0] == 1]
X = torch.randn(200, 352, generator=torch.Generator().manual_seed(0))


def scalar(name: str) -> float | None:
    return 2.0**-8 if formats[name].has_global_scale else None


def octets(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", ROWS)
def test_both_axes_have_the_same_elements(name):
    """Also where squares are cut by the end of the matrix, by kernel and by the reference."""
    given = {"square": True, "pad": True, "global_scale": scalar(name)}
    pair = bs.quantize_both(X, name, **given)
    for axis, q in zip((-1, -2), pair, strict=True):
        assert torch.equal(q.dequantize(), pair[0].dequantize())
        for backend in ("auto", "reference"):
            one = bs.quantize(X, name, axis, backend=backend, **given)
            assert torch.equal(octets(one.qdata), octets(q.qdata))
            assert torch.equal(octets(one.qscale), octets(q.qscale))


@pytest.mark.parametrize("name", ROWS)
def test_scales_are_of_the_largest_of_a_square(name):
    """Those of a row that has the largest magnitude of each square in each of its blocks."""
    size = formats[name].block_size
    x = X[:128, :256].abs()
    largest = x.view(128 // size, size, 256 // size, size).amax((1, 3), keepdim=True)
    row = largest.expand(-1, size, -1, size).reshape(128, 256)
    want = bs.quantize(row, name, global_scale=scalar(name))
    found = bs.quantize(x, name, square=True, global_scale=scalar(name))
    assert torch.equal(octets(found.qscale), octets(want.qscale))
    assert found.format_name == name


def test_squares_of_fp8_are_those_of_its_format():
    x = X[:128, :256].contiguous()
    found = bs.quantize(x, "fp8_1x128", square=True).dequantize()
    assert torch.equal(found, bs.quantize(x, "fp8_128x128").dequantize())


def test_products():
    """A weight by its rows and by its columns is one matrix; scales lie as products read them."""
    w, x, g = X[:128, :256].contiguous(), torch.randn(64, 256), torch.randn(64, 128)
    rows, columns = bs.quantize_both(w, "nvfp4", square=True, layout="tcgen05")
    exact = rows.dequantize(torch.float64)
    for a, b, want in ((x, rows.mT, exact.T), (g, columns, exact)):
        a = bs.quantize(a, "nvfp4", layout="tcgen05")
        got = bs.gemm(a, b, out_dtype=torch.float32).double()
        assert torch.allclose(got, a.dequantize(torch.float64) @ want, rtol=1e-5, atol=1e-4)


def test_other_arguments():
    """Stochastic rounding of parts, batches, and what is not finite."""
    x = X[:128, :256].contiguous()
    x[3, 5] = float("nan")
    given = {"square": True, "global_scale": 2.0**-8}
    whole = bs.quantize(x, "nvfp4", seed=7, **given)
    seed = bs.Seed(7, origin=(64, 0), shape=x.shape)
    part = bs.quantize(x[64:], "nvfp4", seed=seed, **given)
    assert torch.equal(part.dequantize(), whole.dequantize()[64:])
    assert whole.dequantize()[:16, :16].isnan().all()
    assert int(whole.dequantize().isnan().sum()) == 16 * 16
    batch = bs.quantize(torch.stack((x, 2 * x)), "nvfp4", seed=None, **given)
    assert torch.equal(octets(batch[0].qdata), octets(bs.quantize(x, "nvfp4", **given).qdata))
    scales = torch.tensor([2.0**-8, 2.0**-7])
    batch = bs.quantize(torch.stack((x, 2 * x)), "nvfp4", square=True, global_scale=scales)
    assert torch.equal(octets(batch[1].qdata), octets(bs.quantize(x, "nvfp4", **given).qdata))


def test_compiled():
    run = torch.compile(
        lambda x: bs.quantize(x, "mxfp8", -2, square=True).qscale.view(torch.uint8),
        backend="aot_eager",
        fullgraph=True,
    )
    x = X[:192, :256].contiguous()
    want = bs.quantize(x, "mxfp8", -2, square=True).qscale.view(torch.uint8)
    assert torch.equal(run(x), want)


def test_no_kernel_on_a_gpu():
    given = {"square": True, "pad": True, "gather": torch.tensor([3, 70, 3], dtype=torch.int32)}
    with gpu("sm_90a", quantizes=True):
        with pytest.raises(ValueError, match="square: no kernel takes it with gather"):
            bs.quantize(X, "mxfp8", backend="kernel", **given)
        with pytest.warns(bs.FallbackWarning, match="square: no kernel"):
            found = bs.quantize(X, "mxfp8", **given)
    assert torch.equal(octets(found.qdata), octets(bs.quantize(X, "mxfp8", **given).qdata))


@pytest.mark.parametrize(("given", "told"), [
    ({"format": "fp8_128x128"}, "square: blocks of 'fp8_128x128' are squares; leave it out"),
    ({"offsets": torch.tensor([64, 128], dtype=torch.int32)}, "square: groups of offsets would"),
    ({"square": 1}, "square: got 1"),
])  # fmt: skip
def test_no_squares(given, told):
    with pytest.raises((TypeError, ValueError), match=told):
        bs.quantize(X[:128, :256].contiguous(), **{"square": True, **given})
    with pytest.raises(ValueError, match="a square needs rows and columns"):
        bs.quantize(X[0], square=True)
