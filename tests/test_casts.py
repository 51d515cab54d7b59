"""Every cast against independent oracles: elements, E8M0 bytes, UE4M3 codes, stored bytes."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from blockscale import rounding
from blockscale.arithmetic import IN_FP32, IN_FP64
from blockscale.formats import E2M1, E2M3, E3M2, E4M3, E5M2, UE4M3, formats
from oracles import exact, nvidia
from oracles.casts import by_definition, by_torch, oracles
from oracles.patterns import (
    boundaries,
    every_half,
    random_bits,
    random_near,
    scale_boundaries,
)

ELEMENTS = {e.name: e for e in (E4M3, E5M2, E3M2, E2M3, E2M1)}
MODES = ("rceil", "floor", "ceil", "even")
MILLION = 1 << 20


def assert_same(ours, theirs, x, what):
    wrong = np.flatnonzero(np.asarray(ours) != theirs)
    if len(wrong):
        i = wrong[0]
        pytest.fail(
            f"{what}: {len(wrong)} of {len(theirs)} differ; first: {x[i]!r} "
            f"({float(x[i]).hex()}) -> {int(ours[i]):#x}, oracle {int(theirs[i]):#x}"
        )


def check_cast(x, name, *, slow=False):
    ours = rounding.encode(torch.from_numpy(x), ELEMENTS[name]).numpy()
    found = oracles(name, slow=slow)
    assert len(found) >= 2
    for oracle, cast in found.items():
        assert_same(ours, cast(x, name), x, f"{name} against {oracle}")


def magnitudes(x):
    """fp32 bits, sign cleared, as the library's scale functions take them."""
    return torch.from_numpy(np.abs(x).view(np.int32).astype(np.int64))


# --- elements -------------------------------------------------------------------------------------


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_pattern(name, dtype):
    x = every_half(dtype)
    ours = rounding.encode(x, ELEMENTS[name]).numpy()
    wide = x.float().numpy()
    for oracle, cast in oracles(name, slow=True).items():
        assert_same(ours, cast(wide, name), wide, f"{name} of {dtype} against {oracle}")


@pytest.mark.parametrize("name", ELEMENTS)
def test_boundaries(name):
    check_cast(boundaries(name), name, slow=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ELEMENTS)
def test_random_fp32(name, seed):
    """16 million patterns of any bits an element and 4 million of those that it can tell apart."""
    spec = exact.SPECS[name]
    for i in range(4):
        check_cast(random_bits(MILLION, 100 * seed + i), name)
    check_cast(random_near(spec, MILLION, seed), name)
    check_cast(random_near(spec, MILLION // 8, 50 + seed), name, slow=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ELEMENTS)
def test_against_fractions(name):
    """The definition with no floats at all: the nearest value, of two the one with an even code."""
    spec = exact.SPECS[name]
    codes = [c for c in range(spec.sign) if exact.value_of(np.uint8(c), spec) <= spec.max]
    values = [Fraction(float(exact.value_of(np.uint8(c), spec))) for c in codes]
    x = boundaries(name)
    ours = rounding.encode(torch.from_numpy(x), ELEMENTS[name]).tolist()
    for value, code in zip(x.tolist(), ours, strict=True):
        size = abs(Fraction(value))
        want = min(codes, key=lambda c: (abs(values[c] - size), c % 2))
        assert code & (spec.sign - 1) == want, f"{name}: {value!r} -> {code:#x}, not {want:#x}"


@pytest.mark.parametrize("name", ELEMENTS)
def test_decode(name):
    spec, element = exact.SPECS[name], ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    ours = rounding.decode(torch.from_numpy(codes), element).numpy()
    if element.dtype is torch.uint8:
        np.testing.assert_array_equal(ours, exact.value_of(codes, spec))
        assert np.isfinite(ours).all()
    else:
        np.testing.assert_array_equal(ours, torch.from_numpy(codes).view(element.dtype).float())
    theirs = {
        "E4M3": ml_dtypes.float8_e4m3fn,
        "E5M2": ml_dtypes.float8_e5m2,
        "E3M2": ml_dtypes.float6_e3m2fn,
        "E2M3": ml_dtypes.float6_e2m3fn,
        "E2M1": ml_dtypes.float4_e2m1fn,
    }[name]
    np.testing.assert_array_equal(ours, codes.view(theirs).astype(np.float32))


@pytest.mark.parametrize("name", ELEMENTS)
def test_pack_is_a_little_endian_bit_stream(name):
    element = ELEMENTS[name]
    codes = torch.randint(0, 1 << element.bits, (3, 16), dtype=torch.uint8)
    stored = rounding.pack(codes, element)
    assert stored.dtype == element.dtype
    assert stored.shape == (3, element.stored(16))
    assert element.elements(stored.shape[-1]) == 16
    octets = stored.view(torch.uint8)
    for row, packed in zip(codes.tolist(), octets.tolist(), strict=True):
        stream = sum(code << i * element.bits for i, code in enumerate(row))
        assert bytes(packed) == stream.to_bytes(len(packed), "little")
    assert torch.equal(rounding.unpack(stored, element), codes)


# --- E8M0 -----------------------------------------------------------------------------------------


def by_nvidia(amax, name, rounding_mode):
    """What the header's conversion to a power of two gives; it has no "even"."""
    spec, wide = exact.SPECS[name], np.abs(amax.astype(np.float64))
    if rounding_mode == "rceil":
        return nvidia.e8m0(wide / spec.max, up=True)  # a power of two exactly where it should be
    return nvidia.e8m0(wide * 2.0**-spec.max_exponent, up=rounding_mode == "ceil")


def by_torchao(amax, name, rounding_mode):
    """``to_mx`` with blocks of one element. Its RCEIL rounds a logarithm: see test_torchao.py."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    dtype = {
        "E4M3": torch.float8_e4m3fn,
        "E5M2": torch.float8_e5m2,
        "E3M2": mx.DTYPE_FP6_E3M2,
        "E2M3": mx.DTYPE_FP6_E2M3,
        "E2M1": torch.float4_e2m1fn_x2,
    }[name]
    pairs = torch.from_numpy(np.abs(amax)).repeat_interleave(2)  # FP4 packs two
    scale, _ = mx.to_mx(pairs, dtype, 2, mx.ScaleCalculationMode[rounding_mode.upper()])
    return scale.view(torch.uint8).numpy()


def check_scale(x, name, mode, *, torchao=False):
    x = x[np.isfinite(x)]
    ours = rounding.e8m0_from_amax(magnitudes(x), ELEMENTS[name], mode).numpy()
    spec = exact.SPECS[name]
    assert_same(ours, exact.scale_byte(x, spec, mode), x, f"{mode}/{name} against the definition")
    if mode != "even" and nvidia.missing() is None:
        assert_same(ours, by_nvidia(x, name, mode), x, f"{mode}/{name} against NVIDIA")
    if mode == "even" or (torchao and mode != "rceil"):
        assert_same(ours, by_torchao(x, name, mode), x, f"{mode}/{name} against torchao")


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_scale_of_every_half_pattern_and_boundary(mode, name):
    check_scale(every_half(torch.bfloat16).float().numpy(), name, mode, torchao=True)
    check_scale(every_half(torch.float16).float().numpy(), name, mode, torchao=True)
    check_scale(scale_boundaries(name), name, mode, torchao=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_scale_of_random_fp32(mode, name):
    """16 million patterns of any bits a mode, 4 million for each element."""
    for i in range(4):
        check_scale(random_bits(MILLION, 1000 + 4 * list(ELEMENTS).index(name) + i), name, mode)


@pytest.mark.parametrize("name", ELEMENTS)
def test_rceil_never_saturates(name):
    """The scaled maximum is at most the element's largest, and would not be at half the scale."""
    x = np.concatenate((scale_boundaries(name), np.abs(random_bits(MILLION, 7))))
    x = x[np.isfinite(x)]
    byte = rounding.e8m0_from_amax(magnitudes(x), ELEMENTS[name], "rceil").numpy()
    limit = np.ldexp(exact.SPECS[name].max, byte - 127)
    assert (x <= limit).all()
    assert ((x > limit / 2) | (byte == 0)).all()


def test_e8m0_decode_and_reciprocal():
    byte = torch.arange(256)
    values = rounding.from_float32_bits(rounding.scale_bits(byte, formats["mxfp8"].scale)).numpy()
    np.testing.assert_array_equal(values[:255], np.ldexp(1.0, np.arange(255) - 127))
    assert np.isnan(values[255])
    stored = byte.to(torch.uint8).view(torch.float8_e8m0fnu)
    np.testing.assert_array_equal(values, stored.float().numpy())
    for power in (-149, -127, -126, 0, 127):  # amax -> the reciprocal of byte s is 2^(127 - s)
        amax = torch.tensor(2.0**power)
        scale, reciprocal = rounding.block_scale(
            rounding.float32_bits(amax), formats["mxfp8"], "rceil"
        )
        product = rounding.from_float32_bits(reciprocal).double() * 2.0 ** (scale - 127)
        assert product.item() == 1.0


# --- UE4M3 and fp32 scales ------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-30, 2.0**-117, 1.0, 6.0, 2688.0, 3e38])
def test_ue4m3_of_every_half_pattern_and_random(largest):
    """Against the sentence of docs/numerics.md in hardware fp32 and torch's and NVIDIA's casts."""
    fmt = formats["nvfp4"]
    f32 = np.float32
    scalar = rounding.global_scale_from_amax(torch.from_numpy(np.array(largest, f32)), fmt)
    want = f32(1) if largest == 0 else max(f32(largest) / f32(2688), f32(2.0**-117))
    assert scalar.item() == want

    x = np.concatenate((every_half(torch.bfloat16).float(), random_bits(MILLION, 3)))
    x = np.abs(np.concatenate((x, boundaries("E4M3") * want * f32(6))))
    x = x[np.isfinite(x)]
    scalar_bits = rounding.float32_bits(scalar)
    code, reciprocal = rounding.block_scale(magnitudes(x), fmt, "nearest", scalar_bits)
    with np.errstate(over="ignore", divide="ignore"):
        encode = min(f32(1) / want, np.finfo(f32).max) / f32(6)
        scaled = x * encode
        assert scaled.dtype == f32
        for cast in (by_torch, by_definition, nvidia.cast):
            if cast is not nvidia.cast or nvidia.missing() is None:
                assert_same(code.numpy(), cast(scaled, "E4M3"), x, f"UE4M3 by {cast.__module__}")
        value = exact.value_of(code.numpy().astype(np.uint8), exact.SPECS["E4M3"]).astype(f32)
        inverse = np.minimum(f32(1) / (value * want), np.finfo(f32).max)
    ours = rounding.from_float32_bits(reciprocal).numpy()
    np.testing.assert_array_equal(ours, np.where(value == 0, f32(0), inverse))
    decoded = rounding.scale_bits(code, UE4M3)
    np.testing.assert_array_equal(rounding.from_float32_bits(decoded).numpy(), value)


def test_fp32_scale_is_the_ieee_quotient():
    x = np.abs(np.concatenate((random_bits(MILLION, 5), scale_boundaries("E4M3"))))
    x = x[np.isfinite(x)]
    scale, reciprocal = rounding.block_scale(magnitudes(x), formats["fp8_1x128"], "nearest")
    want = np.maximum(x / np.float32(448), np.float32(2.0**-126))
    np.testing.assert_array_equal(rounding.from_float32_bits(scale).numpy(), want)
    ours = rounding.from_float32_bits(reciprocal).numpy()
    np.testing.assert_array_equal(ours, np.float32(1) / want)


# --- the arithmetic underneath --------------------------------------------------------------------


def test_multiply_and_divide_are_ieee():
    """Integer fp32 arithmetic against the processor's, subnormals and overflow included."""
    rng = np.random.default_rng(11)
    a, b = random_bits(MILLION, 21), random_bits(MILLION, 22)
    edge = np.array([0.0, 1e-45, 1.1754942e-38, 1.1754944e-38, 1.0, 3.4028235e38, np.inf, np.nan])
    edge = edge.astype(np.float32)
    a = np.concatenate((a, np.repeat(edge, len(edge)), rng.choice(edge, MILLION)))
    b = np.concatenate((b, np.tile(edge, len(edge)), random_bits(MILLION, 23)))
    bits = [torch.from_numpy(v.view(np.uint32).astype(np.int64)) for v in (a, b)]
    with np.errstate(all="ignore"):
        product = a * b
    ours = rounding.from_float32_bits(rounding.multiply(*bits)).numpy()
    np.testing.assert_array_equal(ours, product)
    signs = ~np.isnan(product)
    np.testing.assert_array_equal(np.signbit(ours)[signs], np.signbit(product)[signs])

    good = np.isfinite(a) & np.isfinite(b) & (b != 0)
    a, b = np.abs(a[good]), np.abs(b[good])
    with np.errstate(all="ignore"):
        quotient = a / b
    ours = rounding.from_float32_bits(rounding.divide(magnitudes(a), magnitudes(b))).numpy()
    np.testing.assert_array_equal(ours, quotient)


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_fp32_in_fp64_is_ieee(name):
    rng = np.random.default_rng(31)
    a, b = random_bits(MILLION, 32), random_bits(MILLION, 33)
    near = a.view(np.int32) + rng.integers(-(1 << 26), 1 << 26, len(a))  # what nearly cancels
    near = near.astype(np.uint32).view(np.float32)
    edge = np.array([0, 1e-45, 1.1754942e-38, 1.1754944e-38, 1, 3.4028235e38, np.inf, np.nan])
    edge = np.concatenate((edge, -edge)).astype(np.float32)
    a = np.concatenate((a, a, np.repeat(edge, len(edge)), rng.choice(edge, MILLION)))
    b = np.concatenate((b, near, np.tile(edge, len(edge)), random_bits(MILLION, 34)))
    with np.errstate(all="ignore"):
        wanted = getattr(IN_FP32, name)(a, b)
        found = IN_FP64.floats(getattr(IN_FP64, name)(*map(IN_FP64.of, (a, b))))
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(number, ~np.isnan(found))
    np.testing.assert_array_equal(found.view(np.uint32)[number], wanted.view(np.uint32)[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_of_every_dtype(dtype):
    x = torch.from_numpy(random_bits(MILLION, 9)) if dtype == torch.float32 else every_half(dtype)
    ours = rounding.from_float32_bits(rounding.float32_bits(x))
    nan = x.isnan()
    assert torch.equal(ours[~nan].view(torch.int32), x.float()[~nan].view(torch.int32))
    assert ours[nan].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="expected float32, bfloat16 or float16"):
        rounding.encode(torch.zeros(4).to(dtype), E4M3)


def test_no_rows_and_no_arrays():
    """Shapes of none are packed, too; what is no array is named."""
    for element in (E2M1, E2M3, E4M3):
        packed = rounding.pack(torch.zeros(0, 4, dtype=torch.uint8), element)
        assert packed.shape == (0, element.stored(4))
        assert rounding.unpack(packed, element).shape == (0, 4)
    with pytest.raises(TypeError, match=r"got a list; expected a torch.Tensor, a numpy"):
        rounding.encode([1.0], E2M1)
    with pytest.raises(TypeError, match="x: got float64; expected float32, bfloat16 or float16"):
        rounding.encode(np.ones(3), E2M1)
