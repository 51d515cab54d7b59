"""What ``bs.gemm`` runs on Blackwell, which is the emulator, bit for bit.

``test_gemm_dispatch`` has what all architectures do alike.
"""

from __future__ import annotations

import warnings
from itertools import product as pairs

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm100_inputs import BF16, FP32, Operand, product, rounded

import blockscale as bs
from blockscale import gemm_launch
from blockscale.formats import formats
from blockscale.ops import gemm_sm100
from stand_in import emulated, matrix

FP8 = ("fp8_1x128", "fp8_128x128")


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """A machine with a Blackwell GPU, which is the emulator; the products that kernels run."""
    with emulated("sm_100a") as launched:
        yield launched


def codes(q: bs.ScaledTensor) -> Operand:
    """Elements, one a byte, and scales of a tensor (rows, K)."""
    octets = q.qdata.view(torch.uint8)
    if q.format.element.bits < 8:
        octets = torch.stack([octets & 15, octets >> 4], -1).flatten(1)
    return Operand(q.format_name, octets.contiguous(), q.compact_bytes().contiguous())


def expected(a, b, dtype=BF16, **rest) -> torch.Tensor:
    """What the tensor cores' own arithmetic makes of ``a @ b``."""
    alpha = None if a.global_scale is None else a.global_scale * b.global_scale
    return rounded(product(codes(a), codes(b.mT)), dtype, alpha, **rest)


def test_the_formats_that_multiply():
    """All that the library allows, but those that Blackwell's kernels know nothing of."""
    known = [name for name in formats if name not in FP8 and formats[name].element.bits != 6]
    allowed = {(x, y) for x, y in pairs(known, known) if formats[x].multiplies(formats[y])}
    assert set(gemm_sm100.PRODUCTS.pairs) == allowed


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8_e5m2"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"),
])  # fmt: skip
def test_formats_and_layouts(launches, left, right):
    """Scales in any layout, with the same bits; those that lie as they should are not rewritten."""
    x, w, bias = matrix(34, 256), matrix(40, 256, seed=1), matrix(40, seed=2)
    want = None
    for layouts in (("tcgen05", "tcgen05"), ("compact", "tcgen05"), ("tcgen05", "packed")):
        a, weight = (
            bs.quantize(each, format, layout=layout)
            for each, format, layout in zip((x, w), (left, right), layouts, strict=True)
        )
        want = expected(a, weight.mT, bias=bias) if want is None else want
        for _ in range(2 if layouts == ("tcgen05", "tcgen05") else 1):
            assert torch.equal(bs.gemm(a, weight.mT, bias=bias, backend="kernel"), want)
        assert len(gemm_launch._launches) == 1
    assert len(launches) == 4


def test_added_to_columns_of_another_matrix(launches):
    a = bs.quantize(matrix(34, 256), "nvfp4", layout="tcgen05")
    b = bs.quantize(matrix(40, 256, seed=1), "nvfp4", layout="tcgen05").mT
    bias, start = matrix(40, seed=2), matrix(34, 72, seed=3).float()
    whole, want = start.clone(), start.clone()
    out = want[:, 16:56]
    for i in range(2):
        out.copy_(expected(a, b, FP32, bias=bias, start=out))
        bs.gemm(a, b, out=whole[:, 16:56], accumulate=True, bias=bias)
        assert torch.equal(whole, want)
        assert len(launches) == i + 1


@pytest.mark.parametrize(("m", "n", "k_major"), [(48, 64, True), (33, 41, False)])
def test_8_bit_operands_as_they_lie(launches, m, n, k_major):
    """Rows of ``a`` along M; those whose lines do not start where TMA loads are copied."""
    a = bs.quantize(matrix(96, m), "mxfp8", -2, layout="tcgen05").mT
    b = bs.quantize(matrix(96, n, seed=1), "mxfp8", -2, layout="tcgen05", k_major=k_major)
    want = expected(a, b)
    for _ in range(2):
        assert torch.equal(bs.gemm(a, b, backend="kernel"), want)
    (found,) = gemm_launch._launches.values()
    assert (found is not None) == (m % 16 == 0)
    assert {config.majors for config in launches} == {("mn", "k" if k_major else "mn")}


@pytest.mark.parametrize("k", [96, 128])
def test_4_bits_beside_8(launches, k):
    """K that is no whole number of tiles is padded, rows that TMA cannot spread are copied."""
    a = bs.quantize(matrix(34, k), "mxfp8", layout="tcgen05")
    weight = bs.quantize(matrix(40, k, seed=1), "mxfp4", layout="tcgen05")
    want = expected(a, weight.mT)
    apart = torch.zeros(40, k // 2 + 16, dtype=torch.uint8)
    apart[:, : k // 2] = weight.qdata
    strided = bs.ScaledTensor(
        apart[:, : k // 2], weight.qscale, format="mxfp4", shape=weight.shape, layout="tcgen05"
    )
    for each in (weight, strided):
        for _ in range(2):
            assert torch.equal(bs.gemm(a, each.mT, backend="kernel"), want)
    assert len(launches) == 4


def test_4_bits_that_do_not_lie_along_k(launches):
    """Bytes of two elements cannot be turned: said, with the remedy; the reference multiplies."""
    weight = bs.quantize(matrix(40, 128, seed=1), "nvfp4", layout="tcgen05")
    turned = weight.detach()
    turned.qdata = weight.qdata.mT.contiguous().mT
    a = bs.quantize(matrix(34, 128), "nvfp4", layout="tcgen05")
    with pytest.raises(ValueError, match=r"b: .* 4 bits only so: .*k_major=True.*contiguous\(\)"):
        bs.gemm(a, turned.mT, backend="kernel")
    with pytest.warns(bs.FallbackWarning, match=r"b: its contraction is not contiguous"):
        got = bs.gemm(a, turned.mT)
    assert torch.equal(got, bs.gemm(a, weight.mT, backend="reference"))
    assert not launches


def test_scales_that_tma_cannot_load(launches):
    """They start at no multiple of 16 bytes, or lie apart."""
    a = bs.quantize(matrix(34, 128), layout="tcgen05")
    b = bs.quantize(matrix(40, 128, seed=1), layout="tcgen05").mT
    want = expected(a, b)
    moved, apart = torch.zeros(520, dtype=torch.uint8)[8:], torch.zeros(512, 2, dtype=torch.uint8)
    for place in (moved, apart[:, 0]):
        place.copy_(a.qscale)
        other = bs.ScaledTensor(
            a.qdata, place, format="mxfp8", shape=a.shape, layout="tcgen05", dtype=a.dtype
        )
        for _ in range(2):
            assert torch.equal(bs.gemm(other, b, backend="kernel"), want)
    assert len(launches) == 4


def test_fprop_dgrad_wgrad(launches):
    """The three products of a layer, of operands as its quantizers leave them; one by two CTAs."""
    x, w, g = matrix(160, 128), matrix(112, 128, seed=1), matrix(160, 112, seed=2)
    x_row, x_column = bs.quantize_both(x, layout="tcgen05")
    w_row, w_column = bs.quantize_both(w, layout="tcgen05", pad=True)
    g_row, g_column = bs.quantize_both(g, layout="tcgen05", pad=True)
    for a, b in ((x_row, w_row.mT), (g_row, w_column), (g_column.mT, x_column)):
        for _ in range(2):
            assert torch.equal(bs.gemm(a, b, FP32, backend="kernel"), expected(a, b, FP32))
    majors = ("k", "k"), ("k", "mn"), ("mn", "mn")
    assert [config.majors for config in launches[::2]] == list(majors)
    assert [config.ctas for config in launches[::2]] == [2, 1, 1]
    assert len(gemm_launch._launches) == 3


@pytest.mark.parametrize(("left", "right"), [
    ("fp8_1x128", "fp8_128x128"), (None, "mxfp8"), ("mxfp6_e2m3", "mxfp8"),
])  # fmt: skip
def test_no_kernel(launches, left, right):
    """Said, with what there is, or raised; the reference gives the product."""
    x = matrix(34, 128)
    a = x if left is None else bs.quantize(x, left)
    b = bs.quantize(matrix(40, 128, seed=1), right).mT
    reason = f"no kernel multiplies {left or 'bf16'} by {right} on Blackwell.* nvfp4 by nvfp4"
    with pytest.raises(ValueError, match=f"backend: no kernel can run gemm as asked.*{reason}"):
        bs.gemm(a, b, backend="kernel")
    with pytest.warns(bs.FallbackWarning, match=f"gemm on cpu runs as plain torch.*{reason}"):
        y = bs.gemm(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(bs.gemm(a, b), y)  # said once
        assert torch.equal(bs.gemm(a, b, backend="reference"), y)
    assert not launches
