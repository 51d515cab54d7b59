"""gemm and grouped_gemm against the fp64 product of what the operands dequantize to."""

from __future__ import annotations

import itertools

import pytest
import torch

import blockscale as bs
from blockscale.formats import formats

#: Largest relative error of one rounding, and half of the smallest subnormal.
ROUNDING = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
}
PAIRS = [
    (a, b) for a, b in itertools.product(formats, formats) if formats[a].multiplies(formats[b])
]


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def assert_product(y, a, b, *, plus=0.0):
    """Within the worst case of fp32 accumulation in any order, and one rounding to y's dtype.

    |fl(sum) - sum| <= n u / (1 - n u) * sum |terms| with u = 2^-24 (Higham, section 3.1).
    """
    a, b = a.double(), b.double()
    exact = a @ b + plus
    terms = a.abs() @ b.abs() + (plus.abs() if isinstance(plus, torch.Tensor) else 0)
    n = (a.shape[-1] + 2) * 2.0**-24
    relative, tiny = ROUNDING[y.dtype]
    bound = n / (1 - n) * terms
    bound = bound + relative * (exact.abs() + bound) + tiny
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_product(backend, a, b, dtype):
    """Every pair of formats with the same blocks and scales; x (M, K) and the weight (N, K)."""
    x, w = matrix(70, 256), matrix(130, 256, seed=1)
    qx, qw = bs.quantize(x, a), bs.quantize(w, b).mT
    y = bs.gemm(qx, qw, out_dtype=dtype)
    assert y.dtype == dtype
    assert y.shape == (70, 130)
    assert y.is_contiguous()
    assert_product(y, qx.dequantize(torch.float64), qw.dequantize(torch.float64))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", formats)
def test_three_products_of_a_linear(backend, name):
    """fprop, dgrad and wgrad: blocks always run along the contraction."""
    x, w, g = matrix(128, 256), matrix(384, 256, seed=1), matrix(128, 384, seed=2)
    x_row, x_column = bs.quantize_both(x, name)
    w_row, w_column = bs.quantize_both(w, name)
    g_row, g_column = bs.quantize_both(g, name)
    for a, b, shape in (
        (x_row, w_row.mT, (128, 384)),
        (g_row, w_column, (128, 256)),
        (g_column.mT, x_column, (384, 256)),
    ):
        y = bs.gemm(a, b, out_dtype=torch.float32)
        assert y.shape == shape
        assert_product(y, a.dequantize(torch.float64), b.dequantize(torch.float64))


@pytest.mark.parametrize(("name", "layout"), [
    ("mxfp8", "tcgen05"), ("mxfp8", "packed"), ("nvfp4", "tcgen05"), ("fp8_1x128", "sm90"),
])  # fmt: skip
def test_layouts_do_not_matter(backend, name, layout):
    x, w = matrix(70, 384), matrix(33, 384, seed=1)
    plain = bs.gemm(bs.quantize(x, name), bs.quantize(w, name).mT)
    for a, b in (("compact", layout), (layout, "compact"), (layout, layout)):
        y = bs.gemm(bs.quantize(x, name, layout=a), bs.quantize(w, name, layout=b).mT)
        assert torch.equal(y, plain)


@pytest.mark.parametrize(("name", "layout"), [
    ("mxfp8", "tcgen05"), ("nvfp4", "packed"), ("fp8_1x128", "sm90"),
])  # fmt: skip
def test_groups_of_rows_do_not_matter(backend, name, layout):
    """Their scales start on tiles of their own, but the rows are those of one matrix."""
    x, b = matrix(70, 384), bs.quantize(matrix(33, 384, seed=1), name).mT
    a = bs.quantize(x, name, layout=layout, offsets=i32([9, 50]))
    assert torch.equal(bs.gemm(a, b)[:50], bs.gemm(bs.quantize(x, name), b)[:50])


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("k", [1, 40, 130])
def test_padded_contraction(backend, name, k):
    a, b = (bs.quantize(matrix(9, k, seed=s), name, pad=True) for s in (0, 1))
    y = bs.gemm(a, b.mT, out_dtype=torch.float32)
    assert_product(y, a.dequantize(torch.float64), b.mT.dequantize(torch.float64))


def test_one_row_and_one_column(backend):
    a, b = bs.quantize(matrix(1, 32)), bs.quantize(matrix(1, 32, seed=1))
    y = bs.gemm(a, b.mT, out_dtype=torch.float32)
    assert_product(y, a.dequantize(torch.float64), b.mT.dequantize(torch.float64))


# --- out, accumulate, bias ------------------------------------------------------------------------


@pytest.fixture
def operands():
    return bs.quantize(matrix(64, 128)), bs.quantize(matrix(32, 128, seed=1)).mT


def test_default_dtype_is_bfloat16(operands):
    assert bs.gemm(*operands).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_out(backend, operands, dtype):
    out = torch.full((64, 32), torch.nan, dtype=dtype)
    assert bs.gemm(*operands, out=out) is out
    assert torch.equal(out, bs.gemm(*operands, out_dtype=dtype))
    strided = torch.zeros(32, 64, dtype=dtype).mT
    bs.gemm(*operands, out=strided)
    assert torch.equal(strided, out)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_accumulate_and_bias(backend, operands, dtype):
    a, b = (q.dequantize(torch.float64) for q in operands)
    bias, c = matrix(32, seed=2), matrix(64, 32, seed=3).to(dtype)
    assert_product(bs.gemm(*operands, dtype, bias=bias), a, b, plus=bias.double())
    out = c.clone()
    assert bs.gemm(*operands, out=out, accumulate=True) is out
    assert_product(out, a, b, plus=c.double())
    out = c.clone()
    bs.gemm(*operands, out=out, accumulate=True, bias=bias)
    assert_product(out, a, b, plus=c.double() + bias.double())


def test_everything_is_added_before_one_rounding(backend):
    """256 + 1.0078125 is 258 in bf16; with the product rounded first, to 1, it would stay 256."""
    x, w = torch.zeros(1, 32), torch.zeros(1, 32)
    x[0, :2], w[0, :2] = torch.tensor([1.0, 2.0**-7]), 1.0
    a, b = bs.quantize(x), bs.quantize(w).mT
    assert bs.gemm(a, b, torch.float32).item() == 1.0078125
    out = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
    assert bs.gemm(a, b, out=out, accumulate=True).item() == 258
    assert bs.gemm(a, b, bias=torch.tensor([256.0])).item() == 258


def test_out_that_shares_memory(operands):
    """Refused, and nothing is written; neighbours in one storage are no trouble."""
    a, b = bs.quantize(matrix(64, 128)), bs.quantize(matrix(32, 128, seed=1)).mT
    bytes_of_b = b.qdata.mT.view(torch.uint8).flatten()
    memory = torch.zeros(64 * 32 + 32)
    out, bias = memory[: 64 * 32].view(64, 32), memory[64 * 32 :]
    bs.gemm(a, b, out=out, bias=bias)
    before = out.clone()
    with pytest.raises(ValueError, match="out: shares memory with bias"):
        bs.gemm(a, b, out=out, bias=out[3])
    with pytest.raises(ValueError, match="out: shares memory with b"):
        bs.gemm(
            bs.quantize(matrix(32, 128)), b, out=bytes_of_b[:4096].view(torch.float32).view(32, 32)
        )
    with pytest.raises(ValueError, match=r"out: has strides .* share memory"):
        bs.gemm(a, b, out=torch.zeros(32).expand(64, 32))
    assert torch.equal(out, before)


@pytest.mark.parametrize("accumulate", [False, True])
def test_out_whose_memory_was_freed(accumulate):
    """As of gradient buffers that are offloaded: it ended the process."""
    out = torch.zeros(64, 32)
    out.untyped_storage().resize_(0)
    a, b = bs.quantize(matrix(64, 128)), bs.quantize(matrix(32, 128, seed=1)).mT
    with pytest.raises(ValueError, match=r"out: the memory of this \(64, 32\) tensor was freed"):
        bs.gemm(a, b, out=out, accumulate=accumulate)


def test_out_is_seen_to_be_written(operands):
    """What autograd has kept of ``out`` is known to be no longer there."""
    out = torch.ones(64, 32)
    y = (torch.ones(64, 32, requires_grad=True) * out).sum()
    bs.gemm(*operands, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_gradient_through_out(operands):
    bias = torch.zeros(32, requires_grad=True)
    y = bs.gemm(*operands, out=torch.zeros(64, 32), bias=bias)
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full((32,), 64.0))


def test_backend(operands):
    want = bs.gemm(*operands)
    for name in ("auto", "kernel", "reference"):
        assert torch.equal(bs.gemm(*operands, backend=name), want)
    with pytest.raises(ValueError, match="backend: got 'fast'; choose one of"):
        bs.gemm(*operands, backend="fast")


# --- a plain bf16 matrix --------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("k", [256, 130])
def test_plain_rows(backend, name, k):
    """Weight-only: ``a`` is not quantized, nor padded."""
    x, b = matrix(70, k), bs.quantize(matrix(33, k, seed=1), name, pad=True).mT
    for rows in (x, x.mT.contiguous().mT):
        y = bs.gemm(rows, b, torch.float32)
        assert_product(y, x, b.dequantize(torch.float64))


def test_plain_rows_of_another_type():
    b = bs.quantize(matrix(32, 128)).mT
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(
            TypeError, match=r"a: got .*ScaledTensor.*bfloat16 matrix.*\.bfloat16\(\)"
        ):
            bs.gemm(matrix(64, 128).to(dtype), b)
    with pytest.raises(TypeError, match=r"b: got torch.bfloat16; expected a ScaledTensor"):
        bs.gemm(bs.quantize(matrix(64, 128)), matrix(128, 32))
    with pytest.raises(ValueError, match="a, b: got"):
        bs.gemm(matrix(64, 96), b)


def test_gradient_of_plain_rows(backend):
    x, b = matrix(64, 128).requires_grad_(), bs.quantize(matrix(32, 128, seed=1)).mT
    y = bs.gemm(x, b, torch.float32)
    g = matrix(64, 32, seed=2)
    y.backward(g.float())
    assert_product(x.grad, g, b.dequantize(torch.float64).mT)


def test_gradient_of_the_bias(operands):
    bias = torch.zeros(32, requires_grad=True)
    y = bs.gemm(*operands, torch.float32, bias=bias)
    g = torch.randn(64, 32)
    y.backward(g)
    torch.testing.assert_close(bias.grad, g.sum(0))


def test_autocast_does_not_round_operands(operands):
    plain = bs.gemm(*operands, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bs.gemm(*operands, torch.float32), plain)


# --- grouped --------------------------------------------------------------------------------------

#: None a multiple of 32 or 128 throughout; empty groups first, inside and last; rows left over.
OFFSETS = [
    [33, 100, 256], [0, 0, 5, 5, 250], [256], [0], [1, 2, 3], [17, 17, 129], [128, 256, 256],
]  # fmt: skip


def slices(offsets):
    return [slice(s, e) for s, e in itertools.pairwise([0, *offsets])]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("product", ["fprop", "dgrad"])
def test_grouped_rows(backend, offsets, name, product):
    n, k = 256, 384
    w = matrix(len(offsets), n, k, seed=1)
    if product == "fprop":
        a, b = bs.quantize(matrix(256, k), name), bs.quantize(w, name).mT
    else:
        a, b = bs.quantize(matrix(256, n), name), bs.quantize(w, name, -2)
    y = bs.grouped_gemm(a, b, i32(offsets), out_dtype=torch.float32)
    assert y.shape == (256, n if product == "fprop" else k)
    for i, rows in enumerate(slices(offsets)):
        assert_product(y[rows], a.dequantize(torch.float64)[rows], b[i].dequantize(torch.float64))
    assert not y[offsets[-1] :].any()


@pytest.mark.sampled(29)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("name", [n for n, f in formats.items() if f.element.bits == 8][:3])
def test_grouped_contraction(backend, offsets, name):
    """wgrad: each group's product of its own rows; an empty group gives zeros."""
    ends = i32(offsets)
    g = bs.quantize(matrix(256, 96), name, -2, offsets=ends)
    x = bs.quantize(matrix(256, 64, seed=1), name, -2, offsets=ends)
    y = bs.grouped_gemm(g.mT, x, ends, out_dtype=torch.float32)
    assert y.shape == (len(offsets), 96, 64)
    left, right = g.dequantize(torch.float64).mT, x.dequantize(torch.float64)
    for i, rows in enumerate(slices(offsets)):
        assert_product(y[i], left[:, rows], right[rows])
        if rows.start == rows.stop:
            assert not y[i].any()


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
def test_groups_are_products_of_their_own(backend, offsets):
    """The same bits as gemm on each expert's rows alone."""
    x, w = matrix(256, 128), matrix(len(offsets), 64, 128, seed=1)
    y = bs.grouped_gemm(bs.quantize(x), bs.quantize(w).mT, i32(offsets), torch.float32)
    for i, rows in enumerate(slices(offsets)):
        if rows.start < rows.stop:
            alone = bs.gemm(bs.quantize(x[rows]), bs.quantize(w[i]).mT, torch.float32)
            assert torch.equal(y[rows], alone)


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_grouped_plain_rows(backend, offsets, name):
    """Weight-only, and the gradient of the rows: that of fp64 through the dequantized weights."""
    x = matrix(256, 128).bfloat16().requires_grad_()
    b = bs.quantize(matrix(len(offsets), 64, 128, seed=1), name).mT
    y = bs.grouped_gemm(x, b, i32(offsets), torch.float32)
    grad = matrix(256, 64, seed=2)
    y.backward(grad)
    wide = x.detach().double().requires_grad_()
    want = torch.zeros(256, 64, dtype=torch.float64)
    for i, rows in enumerate(slices(offsets)):
        want[rows] = wide[rows] @ b[i].dequantize(torch.float64)
        assert_product(y[rows].detach(), wide[rows].detach(), b[i].dequantize(torch.float64))
    want.backward(grad.double())
    assert x.grad.dtype == torch.bfloat16
    assert (x.grad - wide.grad).norm() <= 2**-8 * wide.grad.norm()
    assert not y[offsets[-1] :].any()


@pytest.mark.parametrize("counts", [(16, 3, 0), (0, 0, 0), (1, 16, 16)], ids=str)
@pytest.mark.parametrize("name", [None, "mxfp8", "nvfp4", "fp8_1x128"])
def test_masked(backend, counts, name):
    """The first rows of each group, of a batch or of one matrix; plain ones have a gradient."""
    weights = "fp8_128x128" if name == "fp8_1x128" else name or "mxfp8"
    x = matrix(3, 16, 128)
    b = bs.quantize(matrix(3, 64, 128, seed=1), weights, pad=True).mT
    a = x.bfloat16().detach().requires_grad_() if name is None else bs.quantize(x, name)
    y = bs.grouped_gemm(a, b, counts=i32(counts), out_dtype=torch.float32)
    assert y.shape == (3, 16, 64)
    rows = bs.grouped_gemm(a.flatten(0, 1), b, counts=i32(counts), out_dtype=torch.float32)
    assert torch.equal(rows.unflatten(0, (3, 16)), y)
    wide = x.bfloat16().double().detach().requires_grad_()
    left = wide if name is None else a.dequantize(torch.float64)
    taken = torch.arange(16) < i32(counts)[:, None]
    want = (left * taken[:, :, None]) @ b.dequantize(torch.float64)
    for i, n in enumerate(counts):
        if n:
            assert_product(y[i, :n].detach(), left[i, :n].detach(), b[i].dequantize(torch.float64))
    if name is None:
        grad = matrix(3, 16, 64, seed=2)
        y.backward(grad)
        want.backward(grad.double())
        assert (a.grad - wide.grad).norm() <= 2**-8 * wide.grad.norm()


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_grouped_layout_of_the_rows(backend, offsets, name):
    """Scales swizzled with every group on its own tiles give the same product."""
    x, w, ends = matrix(256, 128), matrix(len(offsets), 64, 128, seed=1), i32(offsets)
    b = bs.quantize(w, name).mT
    swizzled = bs.quantize(x, name, offsets=ends, layout="tcgen05")
    assert torch.equal(
        bs.grouped_gemm(swizzled, b, ends), bs.grouped_gemm(bs.quantize(x, name), b, ends)
    )


def test_nan_past_the_last_group_goes_nowhere(backend):
    x, w, g = matrix(256, 128), matrix(2, 64, 128, seed=1), matrix(256, 64, seed=2)
    x[200:], g[200:] = torch.nan, torch.nan
    ends = i32([77, 200])
    y = bs.grouped_gemm(bs.quantize(x), bs.quantize(w).mT, ends)
    assert y[:200].isfinite().all()
    assert not y[200:].any()
    gradient = bs.grouped_gemm(
        bs.quantize(g, axis=-2, offsets=ends).mT, bs.quantize(x, axis=-2, offsets=ends), ends
    )
    assert gradient.isfinite().all()


def test_nan_in_a_group_stays_there(backend):
    x, ends = matrix(100, 64), i32([33, 100])
    x[99] = torch.nan  # in the last block of the last group
    q = bs.quantize(x, axis=-2, offsets=ends)
    y = bs.grouped_gemm(q.mT, bs.quantize(matrix(100, 32), axis=-2, offsets=ends), ends)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()
    short = i32([33])
    q = bs.quantize(
        matrix(34, 64).index_fill(0, torch.tensor(32), torch.nan), axis=-2, offsets=short
    )
    assert q.dequantize()[:32].isfinite().all()
    assert q.dequantize()[32].isnan().all()
    assert not q.dequantize()[33].any()


# --- groups: out and accumulate -------------------------------------------------------------------


def columns(rows: int, width: int, ends: torch.Tensor, seed: int = 0) -> bs.ScaledTensor:
    return bs.quantize(matrix(rows, width, seed=seed), axis=-2, offsets=ends, k_major=True)


def apart(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Ones, together, with rows apart, and with columns together."""
    whole = torch.ones(*shape[:-1], shape[-1] + 8, dtype=dtype)
    turned = torch.ones(*shape[:-2], shape[-1], shape[-2], dtype=dtype)
    return [torch.ones(*shape, dtype=dtype), whole[..., : shape[-1]], turned.mT]


def test_groups_are_written_where_asked(backend):
    w = bs.quantize(matrix(2, 64, 128, seed=1)).mT
    rows, ends, counts = bs.quantize(matrix(40, 128)), i32([7, 33]), i32([3, 20])
    batch = matrix(40, 128).bfloat16().view(2, 20, 128)
    want = bs.grouped_gemm(rows, w, ends, torch.float32)
    masked = bs.grouped_gemm(batch, w, counts=counts, out_dtype=torch.float32)
    for out, other in zip(apart(40, 64), apart(2, 20, 64), strict=True):
        assert bs.grouped_gemm(rows, w, ends, out=out) is out
        assert torch.equal(out, want)
        assert bs.grouped_gemm(batch, w, counts=counts, out=other) is other
        assert torch.equal(other[0, :3], masked[0, :3])
        assert torch.equal(other[1], masked[1])


def test_groups_along_k_are_added(backend):
    ends = i32([7, 7, 33])
    a, b = columns(40, 64, ends).mT, columns(40, 96, ends, seed=1)
    want = bs.grouped_gemm(a, b, ends, torch.float32)
    for out in apart(3, 64, 96):
        bs.grouped_gemm(a, b, ends, out=out, accumulate=True)
        torch.testing.assert_close(out, want + 1)
    half = torch.full((3, 64, 96), 0.5, dtype=torch.bfloat16)
    bs.grouped_gemm(a, b, ends, out=half, accumulate=True)  # rounded once
    assert torch.equal(half, (want + 0.5).bfloat16())


def test_offsets_that_lie_apart(backend):
    x, w = matrix(40, 128).bfloat16(), bs.quantize(matrix(2, 64, 128)).mT
    apart = i32([7, 0, 33, 0])[::2]
    assert torch.equal(bs.grouped_gemm(x, w, apart), bs.grouped_gemm(x, w, i32([7, 33])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype(backend, dtype):
    """Few rows were added up in memory of torch's default type, read as fp32."""
    x, w = matrix(12, 128).bfloat16(), bs.quantize(matrix(2, 64, 128)).mT
    want = bs.gemm(x, w[0], torch.float32), bs.grouped_gemm(x, w, i32([7, 12]), torch.float32)
    torch.set_default_dtype(dtype)
    try:
        got = bs.gemm(x, w[0], torch.float32), bs.grouped_gemm(x, w, i32([7, 12]), torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, got, want))


def test_memory_that_is_given_to_a_part(backend):
    """What is kept of a quantized tensor is of its memory, not of the tensor that has it."""
    x, q, other = matrix(40, 128).bfloat16(), bs.quantize(matrix(64, 128)), bs.quantize(
        matrix(64, 128, seed=1))  # fmt: skip
    bs.gemm(x, q.mT)
    q.qdata.data, q.qscale.data = other.qdata, other.qscale
    assert torch.equal(bs.gemm(x, q.mT), bs.gemm(x, other.mT))


def test_groups_with_a_gradient_are_written_where_asked(backend):
    x, w = matrix(40, 128).bfloat16().requires_grad_(), bs.quantize(matrix(2, 64, 128)).mT
    out = torch.empty(40, 64, dtype=torch.bfloat16)
    bs.grouped_gemm(x, w, i32([7, 33]), out=out)
    out.float().sum().backward()
    assert x.grad is not None
    assert bool(x.grad[:33].any())
    assert not x.grad[33:].any()
