"""Products of many rows as bfloat16: the sums that fp32 allows, and exact ones where there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_cpu import three_threads

import blockscale as bs
from blockscale.formats import formats
from blockscale.ops import gemm_cpu

pytest.importorskip("numba")
bf16 = pytest.importorskip("blockscale.kernels.cpu.bf16")

__all__ = ["three_threads"]  # a fixture

pytestmark = pytest.mark.skipif(not bf16.available(), reason="no AVX512_BF16 here")

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
EXACT = [name for name, each in formats.items() if bf16.is_exact(each)]
SHAPES = ((17, 1, 1), (40, 31, 100), (97, 130, 2100), (100, 70, 33), (193, 200, 64), (96, 32, 4500))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(
    name: str, m: int, n: int, k: int, seed: int = 0
) -> list[tuple[bs.ScaledTensor, bs.ScaledTensor]]:
    """Both sides by rows, and by columns, which lie the other way, or do not (``k_major``)."""
    x, w = normal(m, k, seed=seed), normal(n, k, seed=seed + 1)
    ways = [(bs.quantize(x, name, pad=True), bs.quantize(w, name, pad=True).mT)]
    for k_major in (False, True) if formats[name].element.bits == 8 else (False,):
        how = {"axis": -2, "pad": True, "k_major": k_major}
        a, b = (bs.quantize(t.mT.contiguous(), name, **how) for t in (x, w))
        ways.append((a.mT, b))
    return [(a, b) for (a, _), (_, b) in itertools.product(ways, ways)]


def by_bfloat16(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each product to come: whether it was one of bfloat16."""
    seen: list[bool] = []
    find = gemm_cpu._as_bf16

    def look(*args: object) -> torch.Tensor | None:
        found = find(*args)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(gemm_cpu, "_as_bf16", look)
    return seen


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_fp32(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int, int]
) -> None:
    """k products and sums round, and two products with global scales; bfloat16 once more."""
    seen = by_bfloat16(monkeypatch)
    for a, b in operands(name, *shape):
        left, right = a.dequantize(FP64), b.dequantize(FP64)
        want = left @ right
        bound = (shape[2] + 4) * 2.0**-24 * (left.abs() @ right.abs())
        got = bs.gemm(a, b, FP32, backend="kernel")
        assert got.dtype == FP32
        assert ((got - want).abs() <= bound).all()
        assert torch.equal(bs.gemm(a, b, BF16, backend="kernel"), got.bfloat16())
        bias, out = normal(shape[1]), normal(*shape[:2]).bfloat16()
        added = (got + bias + out.float()).bfloat16()  # before the one rounding
        bs.gemm(a, b, out=out, accumulate=True, bias=bias, backend="kernel")
        assert torch.equal(out, added)
    assert seen
    assert all(seen)


@pytest.mark.parametrize("name", [name for name in EXACT if not formats[name].has_global_scale])
def test_exact_sums_are_exact(name: str) -> None:
    """Small integers, whose sums fp32 holds: no order changes a bit, and no term is left out."""
    g = torch.Generator().manual_seed(0)
    for m, n, k in SHAPES:
        x, w = (torch.randint(-2, 3, (rows, k), generator=g).float() for rows in (m, n))
        x[:, ::16] = w[:, ::16] = 6.0  # the largest of a block: every format has all of these
        a, b = (bs.quantize(t, name, pad=True) for t in (x, w))
        assert torch.equal(a.dequantize(FP32), x)
        assert torch.equal(bs.gemm(a, b.mT, FP32).double(), x.double() @ w.double().mT)


def test_what_is_beside_and_threads_change_no_bit(three_threads: None) -> None:
    """Neither which rows and columns there are beside, nor how a matrix lies."""
    name = "mxfp8"
    x, w = bs.quantize(normal(300, 4160), name), bs.quantize(normal(500, 4160, seed=1), name)
    y = bs.gemm(x, w.mT, FP32)
    for rows, columns in ((slice(3, 40), slice(0, 500)), (slice(100, 300), slice(17, 333))):
        assert torch.equal(bs.gemm(x[rows], w[columns].mT, FP32), y[rows, columns])
    torch.set_num_threads(1)
    assert torch.equal(bs.gemm(x, w.mT, FP32), y)
    first, *others = (bs.gemm(a, b, FP32) for a, b in operands(name, 96, 64, 32))
    alike = [q.dequantize(FP32) for q in operands(name, 96, 64, 32)[0]]
    for (a, b), other in zip(operands(name, 96, 64, 32)[1:], others, strict=True):
        assert torch.equal(a.dequantize(FP32), alike[0])  # one block: the same by either axis
        assert torch.equal(b.dequantize(FP32), alike[1])
        assert torch.equal(other, first)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("side", ["a", "b"])
def test_subnormals_are_not_taken_for_zero(
    monkeypatch: pytest.MonkeyPatch, axis: int, side: str
) -> None:
    """2^-130 times 2^120: the instruction would say 0. A block of zeros, whose scale is as small,
    is no reason for slower products."""
    seen = by_bfloat16(monkeypatch)
    small, large = torch.full((40, 64), 2.0**-130), torch.full((40, 64), 2.0**120)
    small[:, :32] = 0
    left, right = (small, large) if side == "a" else (large, small)

    def multiply() -> torch.Tensor:
        if axis == -1:
            return bs.gemm(bs.quantize(left), bs.quantize(right).mT, FP32)
        a, b = (bs.quantize(t.mT.contiguous(), axis=-2) for t in (left, right))
        return bs.gemm(a.mT, b, FP32)

    assert torch.equal(multiply(), torch.full((40, 40), 32 * 2.0**-10))
    small[:] = 0
    assert not multiply().any()
    assert seen == [False, True]


@pytest.mark.parametrize("name", EXACT)
def test_nan_and_infinity(name: str) -> None:
    x, w = normal(40, 64), normal(33, 64, seed=1)
    x[3, 40], w[5, 7] = torch.nan, torch.inf
    a, b = bs.quantize(x, name), bs.quantize(w, name)
    want = a.dequantize(FP64) @ b.dequantize(FP64).mT
    got = bs.gemm(a, b.mT, FP32)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[3].isnan().all()
    assert got[:, 5].isnan().all()
    assert torch.equal(bs.gemm(a, b.mT).isnan(), want.isnan())


def test_elements_that_are_infinite() -> None:
    """E5M2 has codes of infinity, which casts do not write but data may hold."""
    for axis in (-1, -2):
        a = bs.quantize(torch.ones(64, 64), "mxfp8_e5m2", axis=axis)
        a.qdata.view(torch.uint8)[3, 5] = 0x7C
        b = bs.quantize(torch.ones(64, 64), "mxfp8_e5m2", axis=axis)
        got = bs.gemm(a, b.mT, FP32) if axis == -1 else bs.gemm(b.mT, a, FP32)
        want = torch.full((64, 64), 64.0)
        (want[3] if axis == -1 else want[:, 5])[:] = torch.inf
        assert torch.equal(got, want)


def test_global_scales_do_not_vanish() -> None:
    """Their product would be below what fp32 has, the product of the matrices is not."""
    x, w = normal(40, 64) * 2.0**-90, normal(40, 64, seed=1) * 2.0**-40
    a, b = bs.quantize(x, "nvfp4"), bs.quantize(w * 2.0**20, "nvfp4")
    assert a.global_scale * b.global_scale < 2.0**-126
    left, right = a.dequantize(FP64), b.dequantize(FP64).mT
    bound = 70 * 2.0**-24 * (left.abs() @ right.abs())
    assert ((bs.gemm(a, b.mT, FP32) - left @ right).abs() <= bound).all()


@pytest.mark.parametrize("name", [name for name in formats if name not in EXACT])
def test_fp32_scales_are_multiplied_in_fp32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen = by_bfloat16(monkeypatch)
    a, b = bs.quantize(normal(40, 128), name), bs.quantize(normal(40, 128, seed=1), name)
    want = bs.gemm(a, b.mT, FP32, backend="reference")
    assert torch.equal(bs.gemm(a, b.mT, FP32), want)
    assert seen == [False]


def test_without_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = bs.quantize(normal(40, 96)), bs.quantize(normal(50, 96, seed=1))
    monkeypatch.setattr(bf16, "available", lambda: False)
    assert torch.equal(bs.gemm(a, b.mT, FP32), bs.gemm(a, b.mT, FP32, backend="reference"))
    assert "AVX512_BF16" not in bs.ops.backends.backend("gemm", "cpu")[1]


@pytest.mark.parametrize("name", EXACT)
def test_empty(name: str) -> None:
    a, b = bs.quantize(normal(40, 64), name), bs.quantize(normal(50, 64), name)
    assert bs.gemm(a, b[:0].mT, backend="kernel").shape == (40, 0)
    assert bs.gemm(a[:0], b.mT, backend="kernel").shape == (0, 50)
    assert not bs.gemm(a[:, :0], b[:, :0].mT, FP32, backend="kernel").any()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_groups_have_the_bits_of_their_own_products(name: str) -> None:
    x, w = bs.quantize(normal(200, 96), name), bs.quantize(normal(3, 64, 96, seed=1), name)
    ends = torch.tensor([33, 40, 200], dtype=torch.int32)
    y = bs.grouped_gemm(x, w.mT, ends, FP32)
    for i, (start, end) in enumerate(itertools.pairwise([0, 33, 40, 200])):
        assert torch.equal(y[start:end], bs.gemm(x[start:end], w[i].mT, FP32))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_batches_have_the_bits_of_their_own_products(name: str) -> None:
    """Also where each matrix of a batch has a global scale of its own."""
    x = torch.stack([bs.quantize(normal(40, 96, seed=i) * 3**i, name) for i in range(2)])
    w = bs.quantize(normal(2, 64, 96, seed=5), name)
    counts = torch.tensor([40, 18], dtype=torch.int32)
    y = bs.grouped_gemm(x, w.mT, counts=counts, out_dtype=FP32)
    for i, n in enumerate(counts.tolist()):
        assert torch.equal(y[i, :n], bs.gemm(x[i][:n], w[i].mT, FP32))
