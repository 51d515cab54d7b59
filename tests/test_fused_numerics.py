"""The reference of SwiGLU, its backward and RMSNorm: every bit, and the error of the values."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from blockscale import reference
from blockscale.reference.fused import fma, square_root
from oracles import fp32, producers
from oracles.patterns import every_half, random_bits, with_neighbours

DTYPES = {torch.float32: fp32.FP32, torch.bfloat16: fp32.BF16, torch.float16: fp32.FP16}
f64 = torch.float64


def rounded(values, dtype):
    """Oracle's fp32 numbers, rounded to ``dtype``."""
    whole = [
        fp32.nearest(Fraction(v), DTYPES[dtype]) if v and math.isfinite(v) else v for v in values
    ]
    return torch.tensor(whole, dtype=f64).to(dtype)  # exact


def assert_same(got, want):
    """Equal bits, except that a NaN is a NaN."""
    kind = {4: torch.int32, 2: torch.int16}[got.dtype.itemsize]
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    bits = [torch.where(t.isnan(), 0, t.contiguous().view(kind)) for t in (got, want)]
    torch.testing.assert_close(*bits, rtol=0, atol=0)


def tensor(values):
    return torch.from_numpy(np.asarray(values, np.float32))


def nasty(n, seed, largest=math.inf):
    """Any bits, and whatever lies next to a special value."""
    special = with_neighbours(np.array([0.0, 1.0, 2.0**-126, 2.0**-149, 3e38, 65504.0, np.inf]))
    values = np.concatenate((special, np.full(1, np.nan, np.float32), random_bits(n, seed)))
    with np.errstate(invalid="ignore"):
        values = np.where(np.abs(values) > largest, largest, values)
    return np.random.default_rng(seed).choice(values, n).astype(np.float32)


def gates(seed):
    """Where the steps of the sigmoid change, with neighbours, and gates of all sizes."""
    rng = np.random.default_rng(seed)
    ties = (np.arange(128) + 0.5) * math.log(2)  # between two powers of two
    edges = np.array(
        [87.3365447, 88.0296860, 17.33, 16.64, 1.2784645, 0.0, np.inf, 1e38, 2.0**-126]
    )
    usual = rng.normal(size=1500) * 2.0 ** rng.integers(-6, 7, 1500)
    every = (
        with_neighbours(np.concatenate((ties, edges))),
        usual,
        random_bits(300, seed),
        [np.nan],
    )
    return np.concatenate(every).astype(np.float32)


# --- fma ------------------------------------------------------------------------------------------


def check_fma(a, b, c):
    got = fma(*map(tensor, (a, b, c)))
    with np.errstate(all="ignore"):
        want = [fp32.fma(*map(float, each)) for each in zip(a, b, c, strict=True)]
    assert_same(got, tensor(want))
    return got


def test_fma_of_any_bits():
    check_fma(*(nasty(4000, seed) for seed in range(3)))


def test_fma_of_sums_that_cancel():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=3000).astype(np.float32) for _ in range(2))
    check_fma(a, b, -a * b)  # what is left is the rounding error of the product
    check_fma(a, b, np.nextafter(-a * b, np.float32(1)))


@pytest.mark.parametrize("power", [0, -60, -120, -149], ids="2^{}".format)
def test_fma_next_to_ties(power):
    """Half a unit in the last place, more or less 2^-46 of it: float64 alone rounds that twice."""
    rng = np.random.default_rng(1)
    c = np.ldexp(rng.integers(2**23, 2**24, 1000).astype(np.float64), power).astype(np.float32)
    half = 2.0**power / 2
    a = np.full_like(c, 1 + 2.0**-23)
    b = (rng.choice([1 - 2.0**-23, 1 - 2.0**-22, 1, -1 + 2.0**-23], 1000) * half).astype(np.float32)
    got = check_fma(a, b, c)
    naive = (a.astype(np.float64) * b + c).astype(np.float32)
    assert power < -100 or (got.numpy() != naive).any()  # else this proved nothing


def test_fma_of_subnormal_results():
    rng = np.random.default_rng(2)
    a, b = (np.ldexp(rng.normal(size=3000), e).astype(np.float32) for e in (-70, -75))
    c = np.ldexp(rng.integers(-(2**20), 2**20, 3000).astype(np.float64), -149).astype(np.float32)
    check_fma(a, b, c)


# --- SwiGLU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_bits(dtype):
    gate = tensor(gates(3)).to(dtype)
    up = tensor(np.random.default_rng(4).normal(size=len(gate)) * 10).to(dtype)
    up[::7] = tensor(nasty(len(up[::7]), 5)).to(dtype)
    got = reference.swiglu(torch.cat((gate, up)).unsqueeze(0))
    want = [producers.swiglu(*each) for each in zip(gate.tolist(), up.tolist(), strict=True)]
    assert got.shape == (1, len(gate))
    assert_same(got[0], rounded(want, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu_backward_bits(dtype):
    gate = tensor(gates(6)).to(dtype)
    rng = np.random.default_rng(7)
    up, grad = (tensor(rng.normal(size=len(gate)) * 10).to(dtype) for _ in range(2))
    for values, seed in ((up[::7], 8), (grad[::5], 9)):
        values.copy_(tensor(nasty(len(values), seed)))
    got = reference.swiglu_backward(grad[None], torch.cat((gate, up))[None])
    each = zip(grad.tolist(), gate.tolist(), up.tolist(), strict=True)
    want_gate, want_up = zip(*(producers.swiglu_backward(*values) for values in each), strict=True)
    assert_same(got[0], torch.cat((rounded(want_gate, dtype), rounded(want_up, dtype))))


def silu_in_double(gate):
    gate = gate.double()
    return gate * torch.sigmoid(gate)


def ulp(value, precision=24):
    """Size of the last place of fp32, or of what has another precision."""
    exponent = torch.frexp(value.double()).exponent.clamp(min=-125)
    return torch.ldexp(torch.ones_like(value, dtype=f64), exponent - precision)


def silu(gate):
    gate = gate.flatten().unsqueeze(0)
    return reference.swiglu(torch.cat((gate, torch.ones_like(gate)), -1))[0]


@pytest.mark.parametrize(("low", "high", "ulps"), [
    (0, 1e-3, 2.5), (1e-3, 4, 3), (4, 100, 2), (-1, 0, 4), (-8, -1, 6), (-16, -8, 7),
    (-30, -16, 9), (-87.3, -30, 24),
])  # fmt: skip
def test_silu_error_in_ulps(low, high, ulps):
    gate = torch.from_numpy(np.random.default_rng(10).uniform(low, high, 200_000)).float()
    want = silu_in_double(gate)
    assert ((silu(gate) - want).abs() / ulp(want)).max() < ulps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_of_every_half(dtype):
    gate = every_half(dtype)
    gate = gate[gate.isfinite()]
    want, got = silu_in_double(gate), silu(gate)
    exp_underflows = gate.double() < -87.33
    bound = gate.double().abs() * 2.0**-126
    assert (got.double().abs() <= bound)[exp_underflows].all()
    error = (got - want).abs() / ulp(want, {torch.bfloat16: 8, torch.float16: 11}[dtype])
    normal = want.abs() >= torch.finfo(dtype).tiny
    assert error[normal & ~exp_underflows].max() < 0.501
    theirs = torch.nn.functional.silu(gate.float()).to(dtype)
    ours, theirs = (t[normal & ~exp_underflows].view(torch.int16).int() for t in (got, theirs))
    assert (ours - theirs).abs().max() <= 1
    assert (ours != theirs).float().mean() < 1e-3


def test_slope_error():
    """It passes zero: the error is absolute."""
    gate = torch.from_numpy(np.random.default_rng(16).uniform(-20, 100, 500_000)).float()
    one = torch.ones(1, len(gate))
    slope = reference.swiglu_backward(one, torch.cat((gate[None], one), -1))[0, : len(gate)]
    s = torch.sigmoid(gate.double())
    want = s + gate.double() * s * torch.sigmoid(-gate.double())
    assert (slope - want).abs().max() < 4 * 2.0**-24


def test_silu_near_torch():
    gate = torch.linspace(-20, 20, 100_001)
    want = torch.nn.functional.silu(gate)
    assert ((silu(gate) - want).abs() / ulp(want)).max() < 12


def test_silu_is_monotone_where_exp_ends():
    """From -87.3 to -88.1 in all steps of fp32: 2^f * 2^n leaves the normal numbers there."""
    gate = torch.arange(0x42AE999A, 0x42B03334, dtype=torch.int32).view(torch.float32)
    e = silu(-gate) / -gate
    assert (e[1:] <= e[:-1] * (1 + 2.0**-21)).all()
    assert 0 < e[-1] < 2.0**-142


def test_finite_input_gives_no_nan():
    gate, up, grad = (tensor(random_bits(200_000, seed)).nan_to_num(7.0) for seed in (11, 12, 13))
    grad = grad.clamp(-3e38, 3e38)  # times 1.1 still finite
    x = torch.cat((gate, up)).unsqueeze(0)
    assert not reference.swiglu(x).isnan().any()
    assert not reference.swiglu_backward(grad.unsqueeze(0), x).isnan().any()


def test_infinite_and_nan_gates_stay_visible():
    gate = torch.tensor([math.inf, -math.inf, math.nan])
    assert not silu(gate).isfinite().any()
    x = torch.cat((gate, torch.ones(3))).unsqueeze(0)
    assert not reference.swiglu_backward(torch.ones(1, 3), x).isfinite().any()


def test_zero_gates():
    for dtype in DTYPES:
        zeros = torch.tensor([0.0, -0.0], dtype=dtype)
        assert torch.equal(torch.signbit(silu(zeros)), torch.tensor([False, True]))


def test_swiglu_backward_near_autograd_in_double():
    rng = np.random.default_rng(14)
    gate, up, grad = (torch.from_numpy(rng.normal(size=(100, 500))).float() for _ in range(3))
    gate = gate * 4
    x = torch.cat((gate, up), -1)
    wide = x.double().requires_grad_()
    (torch.nn.functional.silu(wide[:, :500]) * wide[:, 500:]).backward(grad.double())
    got = reference.swiglu_backward(grad, x).double()
    error = (got - wide.grad).abs()
    # the slope passes zero: its error is absolute, in units of 2^-24
    assert (error[:, :500] / (grad * up).abs()).max() < 6.5 * 2.0**-24
    assert (error[:, 500:] / ulp(wide.grad[:, 500:])).max() < 8


# --- RMSNorm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 17, 33, 64, 100, 257])
def test_rmsnorm_bits(dtype, k):
    rng = np.random.default_rng(k)
    x = tensor(rng.normal(size=(7, k)) * 2.0 ** rng.integers(-3, 4, (7, k))).to(dtype)
    x[1] *= 1e-20
    x[2] = tensor(nasty(k, k, 1e18)).to(dtype)
    x[3] = tensor(nasty(k, k + 1)).to(dtype)
    x[4] = 0.0
    x[5, k // 2] = math.inf
    weight = tensor(rng.normal(size=k))
    for kind in DTYPES:
        y, rstd = reference.rmsnorm(x, weight.to(kind), 1e-6)
        eps = float(np.float32(1e-6))
        args = weight.to(kind).tolist(), eps
        rows = [producers.rmsnorm(row, *args) for row in x.tolist()]
        assert y.shape == x.shape
        for got, (want, _) in zip(y, rows, strict=True):
            assert_same(got, rounded(want, dtype))
        assert_same(rstd, tensor([each for _, each in rows]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 17, 33, 64, 100, 257])
def test_layernorm_bits(dtype, k):
    rng = np.random.default_rng(k)
    x = tensor(rng.normal(size=(7, k)) * 2.0 ** rng.integers(-3, 4, (7, k)) + 3).to(dtype)
    x[1] *= 1e-20
    x[2] = tensor(nasty(k, k, 1e18)).to(dtype)
    x[3] = tensor(nasty(k, k + 1)).to(dtype)
    x[4] = 1.1
    x[5, k // 2] = math.inf
    weight, bias = tensor(rng.normal(size=(2, k)))
    for kind, added in [(torch.float32, None), *((kind, bias.to(kind)) for kind in DTYPES)]:
        y, mean, rstd = reference.layernorm(x, weight.to(kind), added, 1e-5)
        eps = float(np.float32(1e-5))
        args = weight.to(kind).tolist(), None if added is None else added.tolist(), eps
        rows = [producers.layernorm(row, *args) for row in x.tolist()]
        for got, (want, _, _) in zip(y, rows, strict=True):
            assert_same(got, rounded(want, dtype))
        assert_same(mean, tensor([each for _, each, _ in rows]))
        assert_same(rstd, tensor([each for _, _, each in rows]))


@pytest.mark.parametrize("k", [64, 2880, 7168])
def test_layernorm_near_float64_and_torch(k):
    generator = torch.Generator().manual_seed(k)
    x, weight, bias = (torch.randn(n, k, generator=generator) for n in (16, 1, 1))
    given = weight[0], bias[0], 1e-5
    y, mean, rstd = reference.layernorm(x + 2, *given)
    wide = (x + 2).double()
    want = 1 / (wide.var(-1, correction=0) + 1e-5).sqrt()
    assert ((rstd - want).abs() / ulp(want)).max() < 4
    assert ((mean - wide.mean(-1)).abs() / ulp(torch.tensor(2.0).double())).max() < 2
    want = torch.nn.functional.layer_norm(wide, (k,), *(t.double() for t in given[:2]), 1e-5)
    assert (y - want).abs().max() < 2e-6
    theirs = torch.nn.functional.layer_norm(x + 2, (k,), *given)
    assert (y - theirs).abs().max() < 4e-6


@pytest.mark.parametrize("k", [1, 3, 64, 1000])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_norms_near_float64(centered, k, dtype):
    generator = torch.Generator().manual_seed(k)
    x, grad = torch.randn(2, 3, 20, k, generator=generator).to(dtype)
    weight, bias = torch.randn(2, k, generator=generator)
    wide = [each.double().requires_grad_() for each in (x, weight, bias)]
    rows = (k,)
    if centered:
        y = torch.nn.functional.layer_norm(wide[0], rows, *wide[1:], 1e-5)
        _, mean, rstd = reference.layernorm(x, weight, bias, 1e-5)
        found = reference.layernorm_backward(grad, x, weight, mean, rstd)
    else:
        y = torch.nn.functional.rms_norm(wide[0], rows, wide[1], 1e-5)
        _, rstd = reference.rmsnorm(x, weight, 1e-5)
        found = reference.rmsnorm_backward(grad, x, weight, rstd)
    exact = torch.autograd.grad(y, wide[: len(found)], grad.double())
    kinds = dtype, *[torch.float32] * (len(found) - 1)
    for got, want, kind in zip(found, exact, kinds, strict=True):
        assert (got.dtype, got.shape) == (kind, want.shape)
        size = max(want.abs().max(), 1.0)
        error = (got.double() - want).abs() - torch.finfo(kind).eps * want.abs()
        assert error.max() < 2e-5 * size


@pytest.mark.parametrize("first", [0x3F800000, 1], ids=["two octaves", "subnormals"])
def test_square_roots(first):
    """numpy's are IEEE's, torch's are not always: all that differ but for a power of 4."""
    x = torch.arange(first, first + 2**24, dtype=torch.int32).view(torch.float32)
    assert_same(square_root(x), torch.from_numpy(np.sqrt(x.numpy())))


def test_large_rows_bits():
    """Long enough for every vectorized loop of torch, against numpy's."""
    x = realistic_rows(8, 7168)
    squares = np.pad(x * x, ((0, 0), (0, 1024)))
    while squares.shape[1] > 1:
        squares = squares[:, ::2] + squares[:, 1::2]
    rstd = np.float32(1) / np.sqrt(squares[:, 0] / np.float32(7168) + np.float32(1e-5))
    y, got = reference.rmsnorm(tensor(x), torch.ones(7168), 1e-5)
    assert_same(got, tensor(rstd))
    assert_same(y, tensor(x * rstd[:, None]))


def realistic_rows(m, k):
    rng = np.random.default_rng(15)
    return (rng.normal(size=(m, k)) * 2.0 ** rng.integers(-3, 4, (m, 1))).astype(np.float32)


def test_rstd_has_one_nan():
    for value in (math.nan, -math.nan):
        _, rstd = reference.rmsnorm(torch.full((3, 8), value), torch.ones(8), 1e-6)
        assert (rstd.view(torch.int32) == 0x7FC00000).all()


def test_squares_are_summed_as_a_tree():
    """Next to a large square small ones are lost one by one, but not together."""
    x = torch.ones(1, 1024)
    x[0, 0] = 2.0**12.5
    large = float(x[0, 0]) ** 2
    one_by_one = np.cumsum(x[0].numpy() ** 2)[-1]
    assert one_by_one - np.float32(large) < 100
    _, rstd = reference.rmsnorm(x, torch.ones(1024), 2.0**-126)
    mean = (large + 1023) / 1024
    assert abs(rstd.item() * math.sqrt(mean) - 1) < 2.0**-23
    assert abs(rstd.item() * math.sqrt(one_by_one / 1024) - 1) > 2.0**-20


@pytest.mark.parametrize("k", [64, 2880, 7168])
def test_rmsnorm_near_float64_and_torch(k):
    generator = torch.Generator().manual_seed(k)
    x, weight = torch.randn(16, k, generator=generator), torch.randn(k, generator=generator)
    y, rstd = reference.rmsnorm(x, weight, 1e-6)
    want = 1 / (x.double().square().mean(-1) + 1e-6).sqrt()
    assert ((rstd - want).abs() / ulp(want)).max() < 4
    want = x.double() * want.unsqueeze(-1) * weight.double()
    assert ((y - want).abs() / ulp(want)).max() < 5
    theirs = torch.nn.functional.rms_norm(x, (k,), weight, 1e-6)
    assert ((y - theirs).abs() / ulp(want)).max() < 8
