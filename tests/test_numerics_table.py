"""The table of docs/numerics.md, row by row, under both policies for NaN and infinity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import inf, nan

import blockscale as bs
from blockscale.formats import formats
from blockscale.layouts import layouts
from oracles.patterns import random_bits

POLICIES = ["propagate", "te"]
# float64 is left out: there torch itself widens, and flushes.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def block(*values, fill=0.0, dtype=torch.float32):
    return torch.tensor([[*values, *[fill] * (32 - len(values))]]).to(dtype)


def quantized(x, format="mxfp8", **kwargs):
    """(scale byte, 32 data bytes)"""
    q = bs.quantize(x, format, **kwargs)
    return q.scale.view(torch.uint8).item(), q.qdata.view(torch.uint8)[0].tolist()


@pytest.mark.parametrize("nonfinite", POLICIES)
class TestFinite:
    """Smallest e with 2^(e-127) >= amax/448; RNE, saturating at 448; -0 kept."""

    @pytest.mark.parametrize(("amax", "scale"), [
        (448.0, 127), (448.00003, 128), (447.99997, 127), (896.0, 128), (1.0, 119), (1.75, 119),
        (1.7500001, 120), (2.0**-126, 0), (1.75 * 2.0**-119, 0), (1.7500001 * 2.0**-119, 1),
        (3.4028235e38, 247),
    ])  # fmt: skip
    def test_scale(self, backend, nonfinite, amax, scale):
        for x in (block(amax), block(-amax), block(0.5 * amax, fill=-amax)):
            assert quantized(x, nonfinite=nonfinite)[0] == scale

    def test_nearest_even(self, backend, nonfinite):
        ties = [256.0, 17.0, 19.0, -17.0, -19.0, 2.0**-10, 3 * 2.0**-10, 272.0, 1.0625]
        scale, data = quantized(block(*ties), nonfinite=nonfinite)
        assert scale == 127
        want = [256.0, 16.0, 20.0, -16.0, -20.0, 0.0, 2.0**-8, 256.0, 1.0]
        back = torch.tensor(data, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        assert back[: len(want)].tolist() == want

    def test_saturation(self, backend, nonfinite):
        """Under floor the scaled maximum reaches 512; it becomes 448 (0x7E), never NaN (0x7F)."""
        for value in (449.0, 464.0, 480.0, 511.9):
            scale, data = quantized(
                block(value, -value), nonfinite=nonfinite, scale_rounding="floor"
            )
            assert (scale, data[:2]) == (127, [0x7E, 0xFE])

    def test_minus_zero(self, backend, nonfinite):
        assert quantized(block(-0.0, 0.0, 1.0), nonfinite=nonfinite)[1][:2] == [0x80, 0x00]
        assert quantized(block(-1e-30, 1.0), nonfinite=nonfinite)[1][:2] == [0x80, 0x78]

    def test_all_zero(self, backend, nonfinite):
        assert quantized(block(), nonfinite=nonfinite) == (0, [0] * 32)
        assert quantized(block(fill=-0.0), nonfinite=nonfinite) == (0, [0x80] * 32)
        assert torch.equal(bs.quantize(block()).dequantize(), block())

    def test_smallest_scale(self, backend, nonfinite):
        """Byte 0 means 2^-127, its reciprocal is 2^127: subnormal inputs keep their values."""
        x = block(
            2.0**-126, 2.0**-127, -(2.0**-128), 2.0**-136, 2.0**-137, 3 * 2.0**-137, 2.0**-149
        )
        scale, data = quantized(x, nonfinite=nonfinite)
        assert scale == 0
        assert data[:7] == [0x40, 0x38, 0xB0, 0x01, 0x00, 0x02, 0x00]


class TestPropagate:
    """Any NaN or infinity: scale 0xFF and all data 0x7F."""

    @pytest.mark.parametrize("bad", [nan, -nan, inf, -inf])
    @pytest.mark.parametrize("at", [0, 13, 31])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_block(self, backend, bad, at, dtype):
        x = torch.linspace(-4, 4, 32)[None]
        x[0, at] = bad
        assert quantized(x.to(dtype)) == (0xFF, [0x7F] * 32)
        assert quantized(x.to(dtype), "mxfp8_e5m2") == (0xFF, [0x7F] * 32)
        assert bs.quantize(x.to(dtype)).dequantize().isnan().all()

    @pytest.mark.parametrize("bad", [nan, inf])
    @pytest.mark.parametrize("name", formats)
    def test_every_format_and_only_that_block(self, backend, name, bad):
        rows, columns = formats[name].block
        x = torch.ones(2 * rows, 2 * columns)
        x[rows, 1] = bad
        back = bs.quantize(x, name).dequantize()
        assert back[rows:, :columns].isnan().all()
        assert back[rows:, columns:].isfinite().all()
        assert back[:rows].isfinite().all()


class TestTe:
    """NaN alone stays a NaN; an infinity takes scale 0xFE and saturates, the rest becomes 0."""

    def test_nan(self, backend):
        scale, data = quantized(block(nan, 448.0, -1.0, -nan), nonfinite="te")
        assert (scale, data[:5]) == (127, [0x7F, 0x7E, 0xB8, 0x7F, 0x00])

    def test_all_nan(self, backend):
        assert quantized(block(fill=nan), nonfinite="te") == (0, [0x7F] * 32)

    def test_infinity(self, backend):
        scale, data = quantized(block(inf, -inf, 448.0, -1.0, -0.0), nonfinite="te")
        assert (scale, data[:5]) == (0xFE, [0x7E, 0xFE, 0, 0, 0])

    def test_infinity_and_nan(self, backend):
        scale, data = quantized(block(nan, inf, 1.0), nonfinite="te")
        assert (scale, data[:3]) == (0xFE, [0x7F, 0x7E, 0])

    def test_elements_without_nan_saturate(self, backend):
        for name, largest in (("mxfp6_e3m2", 28.0), ("mxfp6_e2m3", 7.5), ("mxfp4", 6.0)):
            back = bs.quantize(block(nan, largest), name, nonfinite="te").dequantize()
            assert back[0, :3].tolist() == [largest, largest, 0.0]


@pytest.mark.parametrize("nonfinite", POLICIES)
def test_padding_is_zero(backend, nonfinite):
    """Rows and blocks past the edge have scale 0, never 0xFF, in every layout, and data 0."""
    x = torch.full((130, 40), nan)
    q = bs.quantize(x, pad=True, nonfinite=nonfinite)
    assert q.qdata.shape == (130, 64)
    tail = q.qdata.view(torch.uint8)[:, 40:]
    assert (tail == (0x7F if nonfinite == "propagate" else 0)).all()  # a bad block, as a whole
    for name in ("tcgen05", "packed"):
        stored = q.to_layout(name).scale.view(torch.uint8).flatten()
        inside = {layouts[name].offset(r, b, (130, 2)) for r in range(130) for b in range(2)}
        outside = [i for i in range(len(stored)) if i not in inside]
        assert not stored[outside].any()
    clean = bs.quantize(torch.ones(130, 40), pad=True, nonfinite=nonfinite)
    assert not clean.qdata.view(torch.uint8)[:, 40:].any()


@pytest.mark.parametrize("e", [-100, -3, 0, 1, 90])
def test_scale_modes(backend, e):
    """amax = m * 2^e: the exponent is e - 8, plus one where m exceeds the mode's limit."""
    up = np.float32(2.0**-23)
    for mode, limit, strict in (
        ("floor", 2.0, True), ("ceil", 1.0, True), ("rceil", 1.75, True), ("even", 1.9375, False),
    ):  # fmt: skip
        for m in (1.0, 1.0 + up, 1.75 - up, 1.75, 1.75 + up, 1.9375 - up, 1.9375, 2.0 - up):
            plus = m > limit if strict else m >= limit
            byte, _ = quantized(block(float(np.ldexp(np.float32(m), e))), scale_rounding=mode)
            assert byte - 127 == e - 8 + plus, (mode, m)


def test_threshold_is_the_largest_significand(backend):
    for name, largest in (
        ("mxfp8", 1.75), ("mxfp8_e5m2", 1.75), ("mxfp6_e3m2", 1.75), ("mxfp6_e2m3", 1.875),
        ("mxfp4", 1.5),
    ):  # fmt: skip
        below, above = (bs.quantize(block(m), name) for m in (largest, largest + 2.0**-23))
        step = above.scale.view(torch.uint8).int() - below.scale.view(torch.uint8).int()
        assert step.item() == 1


def test_nvfp4_row(backend):
    """Low nibble is the even column; scale e4m3(amax * (S_enc / 6)); a block of zeros 0x00."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -3.0, 0.5, -0.25])  # -0.25 is a tie: to even, -0
    q = bs.quantize(x, "nvfp4", global_scale=1.0)
    assert q.qdata[0, :2].tolist() == [0xD7, 0x81]
    assert q.scale.view(torch.uint8).tolist() == [[0x38, 0x00]]
    assert q.global_scale.item() == 1.0
    assert bs.quantize(torch.zeros(1, 16), "nvfp4").global_scale.item() == 1.0
    largest = bs.quantize(x, "nvfp4")
    assert largest.global_scale == torch.tensor(6.0) / 2688
    assert largest.scale.view(torch.uint8)[0, 0] == 0x7E


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("axis", [-1, -2])
def test_flush_to_zero_changes_nothing(backend, name, nonfinite, axis):
    x = torch.from_numpy(random_bits(256 * 256, 31)).reshape(256, 256).clone()
    x[:128] *= 0
    x[:128] += torch.from_numpy(np.full((128, 256), 3e-39, np.float32))
    x[:64, :128] = 2.0**-140
    tiny = bs.quantize(x, name, axis, nonfinite=nonfinite)
    values = [tiny.dequantize(d) for d in DTYPES]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        assert torch.tensor([1e-40]) * 1 == 0
        flushed = bs.quantize(x, name, axis, nonfinite=nonfinite)
        again = [flushed.dequantize(d) for d in DTYPES]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(tiny, flushed)
    for a, b in zip(values, again, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
