"""Products by the compiled CPU loops: the values of the reference, added up in a known order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu import three_threads

import blockscale as bs
from blockscale import reference
from blockscale.formats import Format, formats
from blockscale.kernels.cpu import calls as cpu
from blockscale.ops import gemm_cpu
from blockscale.rounding import float32_bits

pytest.importorskip("numba")
bf16 = pytest.importorskip("blockscale.kernels.cpu.bf16")

__all__ = ["three_threads"]  # a fixture

FP32, BF16 = torch.float32, torch.bfloat16
SEGMENT, LANES = 2048, 32


def in_order(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w.mT`` of fp32 matrices, in the order that docs/numerics.md promises."""
    out = np.zeros((x.shape[0], w.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for left in range(0, x.shape[1], SEGMENT):
            parts = (t[:, left : left + SEGMENT] for t in (x, w))
            more = -min(SEGMENT, x.shape[1] - left) % LANES
            a, b = (torch.nn.functional.pad(t, (0, more)).numpy() for t in parts)
            acc = np.zeros((*out.shape, LANES), np.float32)
            for i in range(0, a.shape[1], LANES):
                acc += a[:, None, i : i + LANES] * b[None, :, i : i + LANES]
            while acc.shape[-1] > 1:
                half = acc.shape[-1] // 2
                acc = acc[..., :half] + acc[..., half:]
            out += acc[..., 0]
    return torch.from_numpy(out)


def same(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    """The same bits, but for those of NaNs: which operand's they are is up to the processor."""
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    assert torch.equal(got.isnan(), want.isnan()), what
    assert torch.equal(got.nan_to_num().float(), want.nan_to_num().float()), what
    signs = (t.signbit() & ~t.isnan() for t in (got, want))
    assert torch.equal(*signs), what


def quantized(format: Format, shape: tuple[int, int], kind: str, seed: int) -> bs.ScaledTensor:
    """Numbers, or any data and scales that there are."""
    g = torch.Generator().manual_seed(seed)
    q = bs.quantize(torch.randn(shape, generator=g), format.name, pad=True)
    if kind == "numbers":
        return q
    data = torch.randint(0, 256, q.qdata.shape, generator=g, dtype=torch.uint8)
    scale = q.qscale.view(torch.uint8)
    any_scale = torch.randint(0, 256, scale.shape, generator=g, dtype=torch.uint8)
    few = kind == "few" and torch.rand(q.qscale.shape, generator=g) > 0.1
    if kind == "few":  # a NaN or an infinity in some rows only, else nothing but NaN is compared
        wide = few.repeat_interleave(q.qscale.element_size(), -1)
        any_scale = torch.where(wide.view(any_scale.shape), scale, any_scale)
        keep = torch.rand(data.shape, generator=g) > 0.001
        data = torch.where(keep, q.qdata.view(torch.uint8), data)
    q.qdata.view(torch.uint8).copy_(data)
    scale.copy_(any_scale)
    return q


def dequantized(q: bs.ScaledTensor) -> torch.Tensor:
    how = {"shape": q.shape, "global_scale": q.global_scale}
    scale = q.qscale.view(q.format.scale.dtype)
    return reference.dequantize(q.qdata, scale, q.format, **how)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() and not out.is_meta else out

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("kind", ["numbers", "few", "any"])
def test_values_and_order(poisoned: None, name: str, kind: str) -> None:
    cases = ((1, 1, 1), (1, 7, 33), (3, 130, 200), (16, 5, 2048), (2, 3, 2049), (5, 129, 4500))
    for i, (m, n, k) in enumerate(cases):
        w = quantized(formats[name], (n, k), kind, i)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(i)).bfloat16()
        want = in_order(x.float(), dequantized(w))
        same(bs.gemm(x, w.mT, FP32, backend="kernel"), want, (name, kind, m, n, k))
        a = quantized(formats[name], (m, k), "numbers", i + 100)
        want = in_order(dequantized(a), dequantized(w))
        same(bs.gemm(a, w.mT, FP32, backend="kernel"), want, (name, kind, m, n, k))


@pytest.mark.parametrize("name", formats)
def test_what_is_not_finite_in_x(name: str) -> None:
    w = quantized(formats[name], (40, 300), "numbers", 0)
    x = torch.randn(8, 300).bfloat16()
    x[1, 4], x[2, 299], x[3, 7], x[4] = torch.nan, torch.inf, -torch.inf, 0
    x[5, :2] = torch.tensor([torch.inf, -torch.inf])
    x[6] = 2.0**127
    x[7] = 2.0**-133
    same(bs.gemm(x, w.mT, FP32), in_order(x.float(), dequantized(w)), name)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(formats)),
    m=st.integers(1, cpu.MAX_SKINNY_M + 3),
    n=st.integers(1, 300),
    k=st.integers(1, 600),
    kind=st.sampled_from(["numbers", "few", "any"]),
    dtype=st.sampled_from([FP32, BF16, torch.float16]),
    plus=st.sampled_from(["", "bias", "out", "accumulate", "both"]),
    plain=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_random_calls(
    name: str, m: int, n: int, k: int, kind: str, dtype: torch.dtype, plus: str, plain: bool,
    seed: int,
) -> None:  # fmt: skip
    """A few rows have the order's bits; more those of ``backend="reference"``, or sums of their own
    where a processor's bfloat16 is exact (test_cpu_bf16 has those)."""
    g = torch.Generator().manual_seed(seed)
    w = quantized(formats[name], (n, k), kind, seed)
    x = torch.randn(m, k, generator=g).bfloat16()
    a = x if plain else bs.quantize(x, name, pad=True)
    bias = torch.randn(n, generator=g) if plus in ("bias", "both") else None
    c = torch.randn(m, n, generator=g).to(dtype) if plus in ("accumulate", "both") else None
    given = {"bias": bias, "accumulate": c is not None}
    if plus in ("", "bias"):
        got = bs.gemm(a, w.mT, dtype, bias=bias, backend="kernel")
    else:
        out = torch.full((m, n), torch.nan, dtype=dtype) if c is None else c.clone()
        got = bs.gemm(a, w.mT, out=out, backend="kernel", **given)
        assert got is out
    what = name, m, n, k, kind, dtype, plus, plain, seed
    own_sums = bf16.available() and bf16.is_exact(formats[name]) and not plain
    if m > cpu.MAX_SKINNY_M and own_sums:
        left, right = dequantized(a).double(), dequantized(w).double().mT
        want = left @ right
        if kind == "numbers":
            left, right = (t.abs() for t in (left, right))
            for more in (bias, c):
                want = want if more is None else want + more
            rounding = {FP32: 0, BF16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
            bound = (k + 8) * 2.0**-23 * (left @ right + 8) + rounding * want.abs() + 2.0**-24
            assert ((got - want).abs() <= bound).all(), what
        else:  # sums that overflow do so in any order
            assert got[want.isnan()].isnan().all(), what
    elif m <= cpu.MAX_SKINNY_M:
        sums = in_order(x.float() if plain else dequantized(a), dequantized(w))
        same(got, reference.epilogue(sums, dtype, bias, c), what)
    elif c is None:
        same(got, bs.gemm(a, w.mT, dtype, bias=bias, backend="reference"), what)
    else:
        same(got, bs.gemm(a, w.mT, out=c, backend="reference", **given), what)


def test_rows_threads_and_layouts_change_no_bit(three_threads: None) -> None:
    """Neither who multiplies which rows, nor how many rows there are, nor where scales lie."""
    x = torch.randn(16, 4160, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, layout in (("mxfp8", "tcgen05"), ("nvfp4", "tcgen05"), ("fp8_1x128", "sm90")):
        w = torch.randn(300, 4160)
        q = bs.quantize(w, name, pad=True)
        y = bs.gemm(x, q.mT, FP32)
        same(y, in_order(x.float(), dequantized(q)), name)
        for i in range(16):
            same(bs.gemm(x[i : i + 1], q.mT, FP32), y[i : i + 1], (name, i))
        other = bs.quantize(w, name, pad=True, layout=layout)
        same(bs.gemm(x, other.mT, FP32), y, (name, layout))


@pytest.mark.parametrize("name", formats)
def test_data_that_lies_the_other_way(name: str) -> None:
    """8-bit columns are contiguous along N: torch multiplies what a loop dequantizes."""
    w = torch.randn(256, 130)
    for k_major in (False, True) if formats[name].element.bits == 8 else (False,):
        q = bs.quantize(w, name, axis=-2, k_major=k_major)
        x = torch.randn(4, 256).bfloat16()
        got = bs.gemm(x, q, FP32, backend="kernel")
        values = q.dequantize(torch.float64)
        bound = 300 * 2.0**-24 * (x.abs().double() @ values.abs())
        assert ((got - x.double() @ values).abs() <= bound).all()


def test_a_weight_is_not_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows: the values of a weight (N, K) are made as they lie, then seen transposed."""
    seen = []
    multiply = reference.gemm
    monkeypatch.setattr(
        gemm_cpu.reference, "gemm", lambda a, b, **how: seen.append(b) or multiply(a, b, **how)
    )
    for name in formats:
        w = quantized(formats[name], (96, 256), "numbers", 0)
        bs.gemm(torch.ones(40, 256, dtype=BF16), w.mT)
        assert seen[-1].stride() == (1, 256), name
        assert torch.equal(float32_bits(seen[-1].mT), float32_bits(dequantized(w))), name


@pytest.mark.parametrize("name", formats)
def test_empty(poisoned: None, name: str) -> None:
    w, x = quantized(formats[name], (128, 128), "numbers", 0), torch.ones(4, 128, dtype=BF16)
    bias = torch.arange(128.0)
    assert bs.gemm(x, w[:0].mT, backend="kernel").shape == (4, 0)
    assert bs.gemm(x[:0], w.mT, backend="kernel").shape == (0, 128)
    got = bs.gemm(x[:, :0], w[:, :0].mT, FP32, bias=bias, backend="kernel")
    assert torch.equal(got, bias.expand(4, 128))


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    w = quantized(formats["mxfp8"], (40, 64), "numbers", 0)
    x = torch.randn(2, 64).bfloat16()
    monkeypatch.setattr("blockscale.ops.backends.cpu_backend", lambda: "reference")
    assert bs.gemm(x, w.mT).shape == (2, 40)
    with pytest.raises(ValueError, match="no kernel can run gemm as asked for: numba is not inst"):
        bs.gemm(x, w.mT, backend="kernel")


def test_batches_and_gradients() -> None:
    x = torch.randn(3, 5, 64).bfloat16().requires_grad_()
    q = bs.quantize(torch.randn(3, 40, 64), "mxfp8")
    y = bs.gemm(x, q.mT, FP32)
    for i, (one, w) in enumerate(itertools.zip_longest(x.detach().unbind(), q.unbind())):
        same(y[i].detach(), bs.gemm(one, w.mT, FP32), i)
    y.sum().backward()
    want = torch.ones(3, 5, 40) @ q.dequantize(FP32)
    assert torch.allclose(x.grad.float(), want, rtol=2**-7, atol=1e-2)
