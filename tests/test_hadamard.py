"""The Hadamard transform before quantization."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.hadamard import transformed

OCTETS = torch.uint8
X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def matrix(h: bs.Hadamard) -> torch.Tensor:
    """Of the definition, in fp64: signs, then H[i, j] = (-1)^(ones that i and j have in common)."""
    n = h.size
    signs = torch.tensor([-1.0 if h.signs >> i & 1 else 1.0 for i in range(n)], dtype=torch.float64)
    common = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return signs[:, None] * torch.tensor(common, dtype=torch.float64) / n**0.5


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("axis", [-1, -2])
def test_definition(size, axis):
    h = bs.Hadamard.random(3, size)
    x = X.T.contiguous() if axis == -2 else X
    want = (X.double().view(64, 128 // size, size) @ matrix(h)).view(64, 128)
    found = transformed(x, h, axis)
    assert found.dtype == torch.float32
    assert torch.allclose((found.mT if axis == -2 else found).double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128])
def test_orthogonal(size):
    """To 1e-6: of unit vectors, and twice is once back (signs are then last)."""
    h = bs.Hadamard.random(5, size)
    unit = transformed(torch.eye(size), h, -1).double()
    assert (unit @ unit.T - torch.eye(size)).abs().max() < 1e-6
    assert (unit - matrix(h)).abs().max() < 1e-6


def test_bits():
    """Of sums in the order of the definition, however x lies in memory, in numpy, too."""
    h = bs.Hadamard(4, signs=0b0100)
    a, b, c, d = (np.float32(v) for v in (0.1, 1e8, -0.3, 7.7))
    c = -c
    p, q, r, s = a + b, a - b, c + d, c - d
    want = [np.float32(0.5) * v for v in (p + r, q + s, p - r, q - s)]
    x = np.array([[0.1, 1e8, -0.3, 7.7]], np.float32)
    assert transformed(x, h, -1).tolist() == [want]
    assert transformed(torch.from_numpy(x), h, -1).tolist() == [want]
    wide = torch.from_numpy(np.repeat(x, 2, 0)).T.contiguous().T
    assert transformed(wide, h, -1).tolist() == [want, want]
    half = X.bfloat16()
    assert torch.equal(transformed(half, h, -1), transformed(half.float(), h, -1))


def test_products_stay():
    """Of operands that are transformed alike."""
    h, x, g = bs.Hadamard.random(7), X[:, :32], X[:, 32:80]
    exact = g.double().T @ x.double()
    a, b = (transformed(each, h, -2).double() for each in (g, x))
    assert torch.allclose(a.T @ b, exact, rtol=0, atol=1e-4)
    a, b = (bs.quantize(each.contiguous(), "nvfp4", -2, hadamard=h) for each in (g, x))
    product = bs.gemm(a.mT, b, out_dtype=torch.float32).double()
    assert (product - exact).norm() < 0.2 * exact.norm()


def test_outliers_are_spread():
    """Beside one elements become zero, and do not where it is spread over their block."""
    x = X.clone()
    x[:, ::16] *= 100
    lost = [
        int((bs.quantize(x, "nvfp4", hadamard=h).dequantize() == 0).sum())
        for h in (None, bs.Hadamard.random(1))
    ]
    assert lost[1] < lost[0] / 4


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128", "mxfp4"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_quantized(name, axis):
    """What is quantized is the transformed matrix, its global scale included."""
    h, x = bs.Hadamard.random(2), torch.randn(128, 256).bfloat16()
    found = bs.quantize(x, name, axis, hadamard=h)
    want = bs.quantize(transformed(x, h, axis).contiguous(), name, axis)
    assert torch.equal(found.dequantize(torch.float32), want.dequantize(torch.float32))
    assert found.dtype == torch.bfloat16
    if found.global_scale is not None:
        assert torch.equal(found.global_scale, want.global_scale)


@pytest.mark.parametrize("size", [2, 16, 64, 128])
def test_both_ways_by_the_op(size):
    """Each along its own contraction; signs of all 128 elements reach the op."""
    h, x = bs.Hadamard.random(2, size), torch.randn(128, 256).bfloat16()
    args = "mxfp8", "rceil", "propagate", "compact", "compact"
    got = torch.ops.blockscale.quantize_both(x, *args, hadamard=h.for_op()[0])
    for axis, data, scale in ((-1, *got[:2]), (-2, *got[2:])):
        want = bs.quantize(transformed(x, h, axis).contiguous(), "mxfp8", axis)
        assert torch.equal(data.view(OCTETS), want.qdata.view(OCTETS))
        assert torch.equal(scale, want.qscale.view(OCTETS))


def test_beside_other_arguments():
    h, x = bs.Hadamard.random(2), torch.randn(128, 256)
    gather = torch.tensor([3, 3, 90], dtype=torch.int32)
    found = bs.quantize(x, "mxfp8", hadamard=h, gather=gather, seed=4)
    want = bs.quantize(x[gather], "mxfp8", hadamard=h, seed=4)
    assert torch.equal(found.dequantize(), want.dequantize())
    x[0, 1] = float("nan")
    assert bs.quantize(x, "mxfp8", hadamard=h).dequantize().isnan().sum() == 32


def test_compiled():
    h = bs.Hadamard.random(2)
    run = torch.compile(
        lambda x: bs.quantize(x, "nvfp4", -2, hadamard=h, global_scale=0.01).qdata.view(
            torch.uint8
        ),
        backend="aot_eager",
        fullgraph=True,
    )
    want = bs.quantize(X, "nvfp4", -2, hadamard=h, global_scale=0.01).qdata.view(torch.uint8)
    assert torch.equal(run(X), want)


def test_signs():
    assert bs.Hadamard.random(1) == bs.Hadamard.random(1)
    assert len({bs.Hadamard.random(seed).signs for seed in range(20)}) == 20
    assert bs.Hadamard() == bs.Hadamard(16, 0)


@pytest.mark.parametrize(("use", "error", "told"), [
    (lambda: bs.Hadamard(12), ValueError, "size: got 12; choose one of 2, 4, 8, 16"),
    (lambda: bs.Hadamard(4, 16), ValueError, "signs: got 16; expected an int of 4 bits"),
    (lambda: bs.quantize(X, hadamard=16), TypeError, "hadamard: got int; expected"),
    (lambda: bs.quantize(X[:24], "nvfp4", -2, pad=True, hadamard=bs.Hadamard()), ValueError,
     "hadamard: dimension -2 of x is 24, not a multiple of 16; choose a smaller size, or pad"),
    (lambda: bs.quantize(X, axis=-2, hadamard=bs.Hadamard(), gather=torch.arange(64).int()),
     ValueError, "hadamard: goes along the rows that gather names"),
    (lambda: bs.quantize(X, axis=-2, hadamard=bs.Hadamard(), offsets=torch.tensor([64]).int()),
     ValueError, "hadamard: goes along the rows that offsets names"),
])  # fmt: skip
def test_bad_input(use, error, told):
    with pytest.raises(error, match=told):
        use()
