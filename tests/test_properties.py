"""What holds for every input (hypothesis): idempotence, monotony, error bounds, symmetry, scaling.

Idempotence, exactly. Quantizing what was dequantized gives the same values for every format whose
scales are powers of two, in every scale mode. Bytes are the same too under floor and even. Under
rceil a block whose largest element came out at exactly max / 2 (under ceil, at half the largest
power of two) takes half its scale and twice its elements: other bytes, the same values. fp32 scales
may move by an fp32 rounding. NVFP4 blocks keep their bytes where the scale's code is 4 or more;
below, a scale is off by so much that values may move, to zero even.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import blockscale as bs
from blockscale import rounding
from blockscale.formats import formats
from blockscale.layouts import layouts
from blockscale.philox import random_bits
from oracles import exact

POWER_OF_TWO = [name for name, format in formats.items() if format.scale.name == "E8M0"]
ONE_ROW = [name for name, format in formats.items() if format.block[0] == 1]

#: Above, the nearest value of a block may be 2^128: bytes that fp32 cannot express.
TOP = 2.0**127

floats = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.floats(-500, 500, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-149, 2.0**-126, 448.0, 1.75, 3.4028234663852886e38]),
)


def vectors(n=128):
    return hnp.arrays(np.float32, (n,), elements=floats).map(lambda a: torch.from_numpy(a.copy()))


def octets(q):
    return [part.contiguous().flatten().view(torch.uint8) for part in (q.qdata, q.scale)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(octets(a), octets(b), strict=True))


def codes(q):
    return rounding.unpack(q.qdata, q.format.element)


def block_scales(q):
    """float64 value of block scale times global scale, for every element of a vector."""
    scale = rounding.decode_scale(q.scale, q.format.scale).double()
    scale = scale * (1.0 if q.global_scale is None else q.global_scale.double())
    return scale.repeat_interleave(q.format.block_size)


# --- idempotence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
@given(x=vectors())
def test_requantizing_keeps_the_values(name, mode, x):
    x = x.clamp(-TOP, TOP)
    once = bs.quantize(x, name, scale_rounding=mode)
    again = bs.quantize(once.dequantize(), name, scale_rounding=mode)
    assert torch.equal(again.dequantize(), once.dequantize())


@pytest.mark.parametrize("name", POWER_OF_TWO)
@given(x=vectors())
def test_requantizing_keeps_the_bytes_where_the_maximum_stays(name, x):
    """rceil: scale and data stay unless the largest element is max / 2 and the scale not 0."""
    once = bs.quantize(x.clamp(-TOP, TOP), name)
    again = bs.quantize(once.dequantize(), name)
    element = once.format.element
    half = rounding.encode(torch.tensor(element.max / 2), element).item()
    largest = (codes(once) & (element.sign_code - 1)).view(-1, 32).amax(1)
    assert ((largest >= half) | (once.scale.view(torch.uint8) == 0)).all()
    stays = (largest != half) | (once.scale.view(torch.uint8) == 0)
    first, second = once.scale.view(torch.uint8), again.scale.view(torch.uint8)
    assert torch.equal(first[stays], second[stays])
    assert torch.equal(codes(once).view(-1, 32)[stays], codes(again).view(-1, 32)[stays])
    assert torch.equal(first[~stays] - 1, second[~stays])


@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize("mode", ["floor", "even"])
@given(x=vectors())
def test_requantizing_keeps_the_bytes(name, mode, x):
    once = bs.quantize(x.clamp(-TOP, TOP), name, scale_rounding=mode)
    assert same(bs.quantize(once.dequantize(), name, scale_rounding=mode), once)


def test_requantizing_with_fp32_scales():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    for name in ("fp8_1x128", "fp8_128x128"):
        once = bs.quantize(x, name).dequantize()
        again = bs.quantize(once, name).dequantize()
        torch.testing.assert_close(again, once, rtol=2.0**-22, atol=0)


@given(x=vectors())
def test_requantizing_nvfp4(x):
    once = bs.quantize(x.clamp(-TOP, TOP), "nvfp4")
    again = bs.quantize(once.dequantize(), "nvfp4", global_scale=once.global_scale)
    before, after = octets(once)[1], octets(again)[1]
    stays = (before >= 4) | (before == 0)
    assert torch.equal(before[stays], after[stays])
    stays = before >= 4
    assert torch.equal(codes(once).view(-1, 16)[stays], codes(again).view(-1, 16)[stays])


def test_an_nvfp4_block_that_vanishes():
    """3.06 * 2^-9 has scale 2^-9, the smallest, and element 3; 3 * 2^-9 / 6 is a tie: to 0."""
    x = torch.zeros(1, 16)
    x[0, 0] = 3.06 * 2.0**-9
    once = bs.quantize(x, "nvfp4", global_scale=1.0)
    again = bs.quantize(once.dequantize(), "nvfp4", global_scale=1.0)
    assert once.dequantize()[0, 0] == 3 * 2.0**-9
    assert not again.dequantize().any()


def test_the_bytes_that_move():
    """(1.75 + 2^-10) * 2^8 takes scale 2; its half rounds to 224 = 448 / 2, which scale 1 holds."""
    x = torch.zeros(1, 32)
    x[0, 0] = 448.25
    once = bs.quantize(x)
    again = bs.quantize(once.dequantize())
    assert once.scale.view(torch.uint8).item() == 128
    assert again.scale.view(torch.uint8).item() == 127
    assert (once.qdata.view(torch.uint8)[0, 0], again.qdata.view(torch.uint8)[0, 0]) == (0x76, 0x7E)
    assert torch.equal(once.dequantize(), again.dequantize())


def test_share_of_scales_that_move():
    """Some 4% of the blocks of normal bf16 data, all of them down by one, with the same values."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    once = bs.quantize(x)
    again = bs.quantize(once.dequantize(torch.bfloat16))
    down = once.scale.view(torch.uint8).int() - again.scale.view(torch.uint8).int()
    assert set(down.flatten().tolist()) == {0, 1}
    assert 0.02 < down.float().mean() < 0.06
    assert torch.equal(once.dequantize(), again.dequantize())


# --- order, sign, finiteness ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_ROW)
@pytest.mark.parametrize("mode", [None, "floor"])
@given(x=vectors())
def test_monotone_within_a_block(name, mode, x):
    if mode not in formats[name].scale.roundings:
        mode = None
    back = bs.quantize(x, name, scale_rounding=mode).dequantize()
    size = formats[name].block_size
    order = x.view(-1, size).argsort(dim=1, stable=True)
    ascending = back.view(-1, size).gather(1, order)
    assert (ascending[:, 1:] >= ascending[:, :-1]).all()


@pytest.mark.parametrize("name", formats)
@given(x=vectors())
def test_no_nan_or_infinity_out_of_finite(name, x):
    for mode in formats[name].scale.roundings:
        q = bs.quantize(x, name, scale_rounding=mode)
        assert rounding.decode(codes(q), q.format.element).isfinite().all()
        assert block_scales(q).isfinite().all()
        if mode in ("rceil", "ceil"):  # nothing exceeds what it came from by more than a rounding
            assert q.dequantize().isfinite().all() or x.abs().max() > 2.0**127


@pytest.mark.parametrize("name", formats)
@given(x=vectors())
def test_odd(name, x):
    """q(-x) is -q(x), zeros included: the same scales, the same codes with the sign flipped."""
    plus, minus = bs.quantize(x, name), bs.quantize(-x, name)
    assert torch.equal(octets(plus)[1], octets(minus)[1])
    assert torch.equal(codes(plus) ^ plus.format.element.sign_code, codes(minus))


# --- error ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_ROW)
@example(x=torch.full((128,), 2.0**-149))
@given(x=vectors())
def test_error_within_half_a_step(name, x):
    """|q(x) - x| <= half the distance of the element's values around x / scale, times the scale.

    Exact for power-of-two scales under rceil, where nothing saturates. The other scales are fp32
    numbers: the reciprocal and the product with it each add a relative 2^-24, and NVFP4's block
    scale may be rounded down, so that the largest elements saturate (checked below).
    """
    q = bs.quantize(x, name)
    spec, scale = exact.SPECS[q.format.element.name], block_scales(q).numpy()
    value = rounding.decode(codes(q), q.format.element).double().numpy()
    inside = (scale > 0) & (np.abs(value) < spec.max)
    scaled = x.double().numpy()[inside] / scale[inside]
    slack = 0.0 if q.format.scale.name == "E8M0" else 4 * 2.0**-24 * np.abs(scaled)
    half = exact.step_at(np.maximum(np.abs(scaled), np.abs(value[inside])), spec) / 2
    assert (np.abs(value[inside] - scaled) <= half + slack).all()
    if q.format.scale.name == "E8M0":
        scaled = np.abs(x.double().numpy() / scale)
        assert (scaled <= spec.max).all()
        half = exact.step_at(scaled, spec) / 2
        assert (np.abs(np.abs(value) - scaled) <= half).all()


@pytest.mark.parametrize("name", POWER_OF_TWO)
@given(x=vectors())
def test_error_of_the_values(name, x):
    """In what dequantize returns: scale * step / 2, the subnormals' step included."""
    x = x.clamp(-TOP, TOP)
    q = bs.quantize(x, name)
    spec, scale = exact.SPECS[q.format.element.name], block_scales(q).numpy()
    error = np.abs(q.dequantize(torch.float64).numpy() - x.double().numpy())
    half = scale * exact.step_at(x.double().numpy() / scale, spec) / 2
    tiny = 2.0**-150  # dequantize gives fp32, whose own subnormals are 2^-149 apart
    assert (error <= half + tiny).all()


# --- scaling, padding, axes -----------------------------------------------------------------------


@pytest.mark.parametrize("name", POWER_OF_TWO)
@given(x=hnp.arrays(np.float32, 64, elements=st.floats(-(2.0**20), 2.0**20, width=32)),
       power=st.integers(-30, 30))  # fmt: skip
def test_a_power_of_two_moves_the_scale_only(name, x, power):
    """Where no fp32 subnormal and no end of the scale's range is met."""
    x = np.where(np.abs(x) < 2.0**-60, np.float32(0), x)
    x[::32] = 1.0  # keeps the scale in range
    a = bs.quantize(torch.from_numpy(x), name)
    b = bs.quantize(torch.from_numpy(np.ldexp(x, power)), name)
    assert torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8))
    moved = b.scale.view(torch.uint8).int() - a.scale.view(torch.uint8).int()
    assert (moved == power).all()


@pytest.mark.parametrize("name", formats)
@given(rows=st.integers(1, 140), k=st.integers(1, 150), seed=st.integers(0, 2**31))
@settings(max_examples=25)
def test_padding_never_leaks(name, rows, k, seed):
    """Every value depends on its block alone, and padding of scales and data is zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    scalar = 0.01 if formats[name].has_global_scale else None
    q = bs.quantize(x, name, pad=True, global_scale=scalar)
    down, right = formats[name].block
    big = torch.full((rows + -rows % down + down, k + -k % right + right), torch.inf)
    big[: rows + -rows % down, : k + -k % right] = 0
    big[:rows, :k] = x
    whole = bs.quantize(big, name, global_scale=scalar)
    assert torch.equal(q.dequantize(), whole.dequantize()[:rows, :k])
    padded = rounding.unpack(q.qdata, q.format.element)[:, k:]
    assert not padded.any()
    for layout in layouts.values():
        if q.format.scale.nbytes not in layout.itemsize:
            continue
        stored = q.to_layout(layout).scale.contiguous().flatten().view(torch.uint8)
        inside = torch.zeros(len(stored), dtype=torch.bool)
        shape, size = q.compact_shape, q.format.scale.nbytes
        for row in range(shape[0]):
            for block in range(shape[1]):
                at = layout.offset(row, block, shape, size)
                inside[at : at + size] = True
        assert not stored[~inside].any()


@pytest.mark.parametrize("name", formats)
@given(m=st.integers(1, 5), k=st.integers(1, 3), seed=st.integers(0, 2**31))
@settings(max_examples=10)
def test_columns_are_the_rows_of_the_transpose(name, m, k, seed):
    down, right = formats[name].block
    x = torch.randn(m * right, k * max(down, 32), generator=torch.Generator().manual_seed(seed))
    column, row = bs.quantize(x, name, -2), bs.quantize(x.mT.contiguous(), name, -1)
    assert torch.equal(column.mT.qdata.view(torch.uint8), row.qdata.view(torch.uint8))
    assert same(column.mT, row)
    assert torch.equal(column.dequantize(), row.dequantize().mT)


# --- stochastic rounding --------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"])
@given(x=vectors(64), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_stochastic_rounding_gives_a_neighbour(element, x, seed):
    """The value below or the value above, and values of the format as they are; seeded."""
    spec = exact.SPECS[element]
    fmt = {e.name: e for e in (f.element for f in formats.values())}[element]
    value = rounding.decode(rounding.encode(x, fmt, seed=seed), fmt).double().numpy()
    wide = np.clip(x.double().numpy(), -spec.max, spec.max)
    step = exact.step_at(wide, spec)
    below = np.floor(np.abs(wide) / step) * step
    above = np.minimum(np.ceil(np.abs(wide) / step) * step, spec.max)
    assert ((np.abs(value) == below) | (np.abs(value) == above)).all()
    assert (np.signbit(value) == np.signbit(x.numpy())).all()
    again = rounding.encode(x, fmt, seed=seed)
    assert torch.equal(again, rounding.encode(x, fmt, seed=seed))


@pytest.mark.parametrize("element", sorted({f.element for f in formats.values()}, key=str))
def test_probability_of_rounding_up_is_the_fraction(element):
    """Up exactly for the 32-bit numbers below fraction * 2^32: values of the format never move."""
    step = 2.0**-element.mantissa_bits
    for eighths in range(8):
        x = torch.tensor([1.0 + step * eighths / 8, element.smallest * eighths / 8])
        limit = eighths << 29
        for noise in {0, max(limit - 1, 0), limit, 2**32 - 1}:
            given = torch.full((2,), noise)
            code = rounding.encode_magnitude(rounding.float32_bits(x), element, given)
            floor = torch.tensor([element.bias << element.mantissa_bits, 0])
            assert torch.equal(code, floor + (noise < limit)), (eighths, noise)


@pytest.mark.parametrize("name", formats)
def test_stochastic_rounding_is_unbiased(name):
    """The mean of n roundings is within 5 sigma of the value, sigma = step / (2 sqrt n) at most."""
    n, down = 20_000, formats[name].block[0]
    size = formats[name].block_size
    row = torch.linspace(0.001, 1.0, size)
    x = row.expand(-(-n // down) * down, size).contiguous()
    scalar = 1 / 2688 if formats[name].has_global_scale else None
    q = bs.quantize(x, name, seed=1234, global_scale=scalar)
    scale = q.dequantize()[0].double()
    spec = exact.SPECS[q.format.element.name]
    first = rounding.decode_scale(q.scale, q.format.scale)[0, 0].double()
    first = first * (scalar or 1.0)
    step = torch.from_numpy(exact.step_at((row.double() / first).numpy(), spec)) * first
    error = (q.dequantize(torch.float64).mean(0) - row.double()).abs()
    free = row < row.max()  # a maximum that saturates cannot round up
    assert (error <= 5 * step / (2 * n**0.5) + 1e-6 * row)[free].all()
    assert scale.isfinite().all()


def test_seeds():
    """The same seed, the same bytes, however x lies in memory; another seed, other bytes."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    a, b, c = (bs.quantize(x, seed=seed) for seed in (7, 7, 8))
    assert same(a, b)
    assert not same(a, c)
    assert torch.equal(a.scale.view(torch.uint8), bs.quantize(x).scale.view(torch.uint8))
    assert same(a, bs.quantize(torch.cat((x, x), 1)[:, :128], seed=7))
    exact_values = bs.quantize(x).dequantize()
    assert same(bs.quantize(exact_values, seed=3), bs.quantize(exact_values))


def test_random_bits_are_philox():
    """Known answers of Philox4x32-10 (Random123, kat_vectors): counters 0 and 1 of key 0."""
    bits = random_bits(0, torch.empty(8)).tolist()
    assert bits[:4] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert all(0 <= b < 2**32 for b in bits)
    assert random_bits(0, torch.empty(3)).tolist() == bits[:3]
