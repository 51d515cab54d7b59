"""The Hadamard transform before quantization."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.hadamard import transformed
from blockscale.philox import random_bits
from blockscale.seed import Numbers

OCTETS = torch.uint8
META = torch.tensor(0, device="meta")
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


@pytest.mark.parametrize("size", [2, 16, 128])
@pytest.mark.parametrize("step", [0, -1, 2**40 + 3])
def test_seeds_draw_signs(size, step):
    """The lowest bits of a block's random numbers, which ints keep; those of a step are drawn."""
    bits = random_bits(Numbers(-7, step, 0, 0, 0), np.empty(size, np.float32)) % 2
    want = sum(int(bit) << i for i, bit in enumerate(bits))
    assert bs.Hadamard(size, bs.Seed(-7, step)).signs == want
    drawn = bs.Hadamard(size, bs.Seed(-7, torch.tensor(step)))
    for axis in (-1, -2):
        x = X if axis == -1 else X.T.contiguous()
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            fixed = bs.Hadamard(size, want)
            found, wanted = (transformed(x.to(dtype), h, axis) for h in (drawn, fixed))
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [4, 16, 128])
def test_random_is_of_a_seed(size):
    assert bs.Hadamard.random(3, size) == bs.Hadamard(size, bs.Seed(3))
    bits = random_bits(3, np.empty(size, np.float32)) & 1
    assert bs.Hadamard.random(3, size).signs == sum(int(b) << i for i, b in enumerate(bits))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_step_is_read_when_it_is_done(name, axis):
    """Global scale, scales and elements are those of signs of that step, by kernels and by torch;
    other steps have others."""
    step = torch.tensor(0)
    h, found = bs.Hadamard(16, bs.Seed(5, step)), []
    for value in (3, 2**35):
        step.fill_(value)
        fixed = bs.Hadamard(16, bs.Seed(5, value))
        for given in ({"seed": 9}, {"seed": 9, "backend": "reference"}, {}):
            got = bs.quantize(X, name, axis, hadamard=h, **given)
            want = bs.quantize(X, name, axis, hadamard=fixed, **given)
            assert torch.equal(got.qdata.view(OCTETS), want.qdata.view(OCTETS))
            assert torch.equal(got.qscale.view(OCTETS), want.qscale.view(OCTETS))
            assert name != "nvfp4" or torch.equal(got.global_scale, want.global_scale)
        found.append(got.dequantize())
    assert not torch.equal(*found)
    words, _ = h.for_op()
    args = "mxfp8", "rceil", "propagate", "compact", "compact"
    both = torch.ops.blockscale.quantize_both(X, *args, hadamard=words, signs_step=step)
    for i, axis in ((0, -1), (2, -2)):
        want = bs.quantize(X, "mxfp8", axis, hadamard=fixed)
        assert torch.equal(both[i].view(OCTETS), want.qdata.view(OCTETS))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_drawn_signs_compiled(backend):
    """One graph for all steps."""

    def run(x, step):
        h, seed = bs.Hadamard(16, bs.Seed(5, step)), bs.Seed(6, step)
        return bs.quantize(x, "nvfp4", -2, hadamard=h, seed=seed).qdata.view(OCTETS)

    torch.compiler.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for value in (3, 4):
            assert torch.equal(compiled(X, torch.tensor(value)), run(X, torch.tensor(value)))


def test_signs():
    assert bs.Hadamard.random(1) == bs.Hadamard.random(1)
    assert len({bs.Hadamard.random(seed).signs for seed in range(20)}) == 20
    assert bs.Hadamard() == bs.Hadamard(16, 0)


@pytest.mark.parametrize(("use", "error", "told"), [
    (lambda: bs.Hadamard(12), ValueError, "size: got 12; choose one of 2, 4, 8, 16"),
    (lambda: bs.Hadamard(4, 16), ValueError, "signs: got 16; expected an int of 4 bits"),
    (lambda: bs.Hadamard(4, 1.0), ValueError, r"signs: got 1.0; .* or a blockscale.Seed\("),
    (lambda: bs.Hadamard(4, bs.Seed(1, origin=(0, 0), shape=(8, 8))), ValueError,
     r"signs: got a seed of origin=\(0, 0\); all blocks have the same signs"),
    (lambda: bs.quantize(X, hadamard=bs.Hadamard(4, bs.Seed(1, META))), ValueError,
     "hadamard: the step of its signs is on meta, x on cpu; move it"),
    (lambda: bs.Quantization(hadamard=bs.Hadamard(4, bs.Seed(1, META))), ValueError,
     "hadamard: draws signs by a tensor, .* with random_signs=True"),
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
