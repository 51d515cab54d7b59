"""What ``bs.gemm`` runs on Hopper; ``test_gemm_dispatch`` has what all architectures do alike."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from sm90_inputs import BF16, FP32, assert_close

import blockscale as bs
from blockscale import gemm_launch
from blockscale.kernels.common.runtime import describe
from blockscale.kernels.sm90 import exact_gemm
from stand_in import emulated, matrix

ROWS, BLOCKS = "fp8_1x128", "fp8_128x128"


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """A machine with a Hopper GPU, which is the emulator; counts the products that kernels run."""
    with emulated("sm_90a") as launched:
        yield launched


def product(a, b) -> torch.Tensor:
    return a.dequantize(torch.float64) @ b.dequantize(torch.float64)


@pytest.mark.parametrize(("left", "right"), [
    ((ROWS, "sm90"), (BLOCKS, "compact")),
    ((ROWS, "compact"), (BLOCKS, "sm90")),
    ((ROWS, "sm90"), (ROWS, "sm90")),
    ((ROWS, "compact"), (ROWS, "compact")),
    ((BLOCKS, "compact"), (ROWS, "sm90")),
    ((BLOCKS, "sm90"), (BLOCKS, "compact")),
], ids=str)  # fmt: skip
def test_formats_and_layouts(launches, left, right):
    """A call, and one like it, which is looked up."""
    a = bs.quantize(matrix(34, 256), left[0], layout=left[1])
    b = bs.quantize(matrix(136, 256, seed=1), right[0], layout=right[1]).mT
    first = bs.gemm(a, b, backend="kernel")
    again = bs.gemm(a, b)
    assert len(launches) == 2
    assert torch.equal(first, again)
    assert_close(first, product(a, b), BF16)


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8_e5m2"), ("nvfp4", "nvfp4"), (None, "mxfp8"),
    (None, "nvfp4"),
])  # fmt: skip
def test_widened_formats(launches, left, right):
    """Widened to bf16; ``a`` may be bf16, and the last block of the contraction a part."""
    x, w = matrix(34, 248), matrix(136, 248, seed=1)
    a = x if left is None else bs.quantize(x, left, pad=True)
    b = bs.quantize(w, right, pad=True).mT
    values = x.double() if left is None else a.dequantize(torch.float64)
    want = values @ b.dequantize(torch.float64)
    for _ in range(2):
        assert_close(bs.gemm(a, b, backend="kernel"), want, BF16)
    bias = matrix(136, seed=2)
    out = torch.ones(34, 136)
    bs.gemm(a, b, out=out, accumulate=True, bias=bias)
    assert_close(out, want + 1 + bias.double(), FP32)
    assert len(launches) == 2 * 3  # A is put in order by itself


@pytest.mark.parametrize(
    ("m", "n", "widens"),
    [(100, 8, True), (4096, 2048, True), (4096, 2047, False), (4097, 8192, False)],
)
def test_many_rows_are_written_out(m, n, widens):
    """Both operands, with more than 4096 rows of A, or two for each of B."""
    a, b = (describe(torch.empty(rows, 128, dtype=torch.uint8)) for rows in (m, n))
    assert exact_gemm._widens(a, b) is widens


@pytest.mark.parametrize(
    ("left", "right"), [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), (None, "mxfp8")]
)
def test_widened_in_memory(launches, monkeypatch, left, right):
    """Where that is faster: two dequantizers at most, and a product of bf16 matrices."""
    monkeypatch.setattr(exact_gemm, "_widens", lambda a, b: False)
    x, w = matrix(34, 248), matrix(141, 248, seed=1)
    a = x if left is None else bs.quantize(x, left, pad=True)
    b = bs.quantize(w, right, pad=True).mT
    values = x.double() if left is None else a.dequantize(torch.float64)
    want = values @ b.dequantize(torch.float64)
    for _ in range(2):
        assert_close(bs.gemm(a, b, backend="kernel"), want, BF16)
    bias, out = matrix(141, seed=2), torch.ones(34, 141)
    bs.gemm(a, b, out=out, accumulate=True, bias=bias)
    assert_close(out, want + 1 + bias.double(), FP32)
    assert len(launches) == (6 if left is None else 9)


@pytest.mark.parametrize(("m", "n"), [(40, 144), (35, 141)])
@pytest.mark.parametrize("a_strided", [False, True])
def test_columns_as_they_lie(launches, a_strided, m, n):
    """Operands of 8 bits whose contraction is not contiguous; and rows TMA cannot load. A call, and
    one like it, which is looked up."""
    x, w = matrix(m, 256), matrix(256, n, seed=1)
    a = bs.quantize(x.mT.contiguous(), "mxfp8", -2).mT if a_strided else bs.quantize(x, "mxfp8")
    b = bs.quantize(w, "mxfp8", -2)
    first = bs.gemm(a, b, backend="kernel")
    assert_close(first, product(a, b), BF16)
    assert torch.equal(bs.gemm(a, b, backend="kernel"), first)
    plain = x.mT.contiguous().mT if a_strided else x
    first = bs.gemm(plain, b, backend="kernel")
    assert_close(first, x.double() @ b.dequantize(torch.float64), BF16)
    assert torch.equal(bs.gemm(plain, b, backend="kernel"), first)
    assert len(launches) == 2 * (3 + 2)
    # bf16 columns that TMA cannot load are copied in every call, and so not launched by a look-up
    found = list(gemm_launch._launches.values())
    assert len(found) == 2
    assert found.count(None) == (a_strided and m == 35)


def test_fprop_dgrad_wgrad(launches):
    """The three products of a layer, each with its contraction contiguous."""
    x, w, g = matrix(128, 256), matrix(384, 256, seed=1), matrix(128, 384, seed=2)
    places = {"layout": ("sm90", "compact"), "k_major": True}
    w_row, w_column = bs.quantize_both(w, BLOCKS, k_major=True)
    g_row, g_column = bs.quantize_both(g, ROWS, **places)
    x_row, x_column = bs.quantize_both(x, ROWS, **places)
    for a, b in ((x_row, w_row.mT), (g_row, w_column), (g_column.mT, x_column)):
        assert_close(bs.gemm(a, b, FP32, backend="kernel"), product(a, b), FP32)
    assert len(launches) == 3


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (bs.quantize(matrix(128, 34), ROWS, -2).mT, None, "a: .*quantize columns.*k_major=True"),
        (None, bs.quantize(matrix(128, 40), BLOCKS, -2), "b: .*quantize columns.*k_major=True"),
        (matrix(34, 128), None, "no kernel multiplies bf16 by fp8_128x128"),
    ],
)
def test_no_kernel(launches, a, b, reason):
    """Said, with the remedy, or raised; the reference gives the product."""
    a = bs.quantize(matrix(34, 128), ROWS) if a is None else a
    b = bs.quantize(matrix(40, 128), BLOCKS).mT if b is None else b
    with pytest.raises(ValueError, match=f"backend: no kernel can run gemm as asked.*{reason}"):
        bs.gemm(a, b, backend="kernel")
    with pytest.warns(bs.FallbackWarning, match=f"gemm on cpu runs as plain torch.*{reason}"):
        y = bs.gemm(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(bs.gemm(a, b), y)  # said once
        assert torch.equal(bs.gemm(a, b, backend="reference"), y)
    assert not launches


def test_rows_that_tma_cannot_load(launches):
    """Those that do not start at multiples of 16 bytes are copied to such."""
    a, b = (bs.quantize(matrix(rows, 48, seed=rows), "nvfp4") for rows in (9, 16))
    assert a.qdata.stride(0) == 24
    got = bs.gemm(a, b.mT, FP32, backend="kernel")
    assert len(launches) == 2
    torch.testing.assert_close(got.double(), product(a, b.mT), rtol=2**-20, atol=2**-20)
