"""bs.quantize against the numpy oracle and the reference: every format, mode, dtype and axis."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale import reference, rounding
from blockscale.formats import formats
from oracles import blocks, exact
from oracles.patterns import boundaries, random_bits

MX = [name for name, format in formats.items() if format.scale.name == "E8M0"]
CASES = [(name, mode) for name, format in formats.items() for mode in format.scale.roundings]


def codes_and_scales(q):
    """One uint8 code an element and the scales as numpy, contraction last."""
    data, scale = (q.qdata, q.scale) if q.axis == -1 else (q.qdata.mT, q.scale.mT)
    codes = rounding.unpack(data, q.format.element).numpy()
    scale = scale if scale.dtype == torch.float32 else scale.contiguous().view(torch.uint8)
    return codes, scale.numpy()


def assert_equals_oracle(q, x, rounding_mode, nonfinite="propagate"):
    x = x.float() if q.axis == -1 else x.float().mT
    scalar = 1.0 if q.global_scale is None else q.global_scale.item()
    codes, scale = codes_and_scales(q)
    name = q.format.name
    want_codes, want_scale = blocks.quantize(x.numpy(), name, rounding_mode, nonfinite, scalar)
    np.testing.assert_array_equal(scale, want_scale)
    np.testing.assert_array_equal(codes, want_codes)


def assert_same_bytes(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        octets = [t.contiguous().flatten().view(torch.uint8) for t in (x, y)]
        assert torch.equal(*octets)


def realistic(shape, seed):
    """Normal values whose size changes from row to row and from column to column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for dim in (-1, -2):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        x = x * 2.0 ** torch.randint(-12, 12, size, generator=generator)
    return x


def hostile(rows=256, columns=256, seed=0):
    """Random bits; in every second row fewer, so that blocks without a NaN or infinity exist."""
    x = torch.from_numpy(random_bits(rows * columns, seed)).reshape(rows, columns).clone()
    calm = torch.from_numpy(random_bits(rows * columns, seed + 1)).reshape(rows, columns)
    calm = torch.where(calm.abs() < 1e30, calm, 0.0)  # false for NaN too
    x[::2] = calm[::2]
    x[1::8] = 0.0
    x[1::8, ::3] = -0.0
    x[0:128, 0:128] = 2.0**-140  # a 128 x 128 block of subnormals
    x[128:256, 128:256].clamp_(-1e30, 1e30).nan_to_num_(0.0)
    return x


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.sampled(45)
@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_realistic_values(backend, name, mode, dtype, axis):
    x = realistic((128, 256), 1).to(dtype)
    x = x if axis == -1 else x.mT.contiguous()
    assert_equals_oracle(bs.quantize(x, name, axis, scale_rounding=mode), x, mode)


@pytest.mark.sampled(31)
@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("nonfinite", ["propagate", "te"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_any_bits(backend, name, mode, nonfinite, axis):
    x = hostile()
    q = bs.quantize(x, name, axis, scale_rounding=mode, nonfinite=nonfinite)
    assert_equals_oracle(q, x, mode, nonfinite)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MX)
def test_every_element_boundary_at_every_scale(backend, name):
    """Each midpoint and its two neighbours, in a block that the first element gives its scale."""
    spec = exact.SPECS[formats[name].element.name]
    edges = boundaries(formats[name].element.name).astype(np.float64)
    edges = edges[np.abs(edges) <= spec.max]
    edges = np.pad(edges, (0, -len(edges) % 31)).reshape(-1, 31)
    block = np.column_stack((np.full(len(edges), spec.max), edges))
    for power in range(-127, 128 - spec.max_exponent):
        x = torch.from_numpy(np.ldexp(block, power).astype(np.float32))
        q = bs.quantize(x, name)
        codes, scale = codes_and_scales(q)
        assert (scale == power + 127).all()
        back = x.double().numpy() * 2.0**-power  # subnormal x lost bits
        np.testing.assert_array_equal(codes, exact.cast(back, spec))


@pytest.mark.sampled(28)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("shape", [(1, 128), (128, 128), (5, 384), (3, 7, 256), (2, 3, 130, 128)])
def test_backends_equal_the_reference(backend, name, shape):
    x = torch.from_numpy(random_bits(int(np.prod(shape)), 5)).reshape(shape)
    fmt = formats[name]
    scalar = reference.global_scale(x, fmt) if fmt.has_global_scale else None
    for axis, y in ((-1, x), (-2, x.mT.contiguous())):
        q = bs.quantize(y, name, axis)
        want = reference.quantize(y, fmt, axis=axis, scale_rounding=fmt.default_scale_rounding,
                                  global_scale=scalar)  # fmt: skip
        assert_same_bytes((q.qdata, q.scale), want)
        if fmt.has_global_scale:
            assert q.global_scale.view(torch.int32) == scalar.view(torch.int32)


@pytest.mark.sampled(22)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_leading_dimensions_are_matrices_of_their_own(backend, name, axis):
    x = realistic((2, 3, 128, 256), 12)
    scalar = 0.5 if formats[name].has_global_scale else None
    q = bs.quantize(x, name, axis, global_scale=scalar)
    for i in range(2):
        for j in range(3):
            assert torch.equal(q[i, j], bs.quantize(x[i, j], name, axis, global_scale=scalar))


@pytest.mark.parametrize("name", formats)
def test_one_dimension(backend, name):
    x = realistic((1, 256), 2)
    if formats[name].block[0] == 1:
        q, matrix = bs.quantize(x[0], name), bs.quantize(x, name)
        assert_same_bytes((q.qdata, q.scale), (matrix.qdata[0], matrix.scale[0]))
        assert torch.equal(q.dequantize(), matrix.dequantize()[0])
    else:
        q = bs.quantize(x[0], name)
        assert q.scale.shape == (2,)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_strided_rows_are_read_as_they_are(backend, name, axis):
    x = realistic((256, 512), 3)
    for view in (x[::2, :256], x[:, 128:384], x.expand(2, 256, 512)):
        q, want = bs.quantize(view, name, axis), bs.quantize(view.contiguous(), name, axis)
        assert_same_bytes((q.qdata, q.scale), (want.qdata, want.scale))


# --- the values back ------------------------------------------------------------------------------


@pytest.mark.sampled(19)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
def test_dequantize_is_the_product_rounded_once(backend, name, axis):
    x = realistic((256, 256), 4)
    q = bs.quantize(x, name, axis, scale_rounding=None)
    codes, scale = codes_and_scales(q)
    element, (rows, columns), kind = blocks.FORMATS[name]
    values = exact.value_of(codes, exact.SPECS[element]).astype(np.float32)
    if kind == "E8M0":
        scale = np.ldexp(np.float32(1), scale.astype(int) - 127)
    elif kind == "UE4M3":
        scale = exact.value_of(scale, exact.SPECS["E4M3"]).astype(np.float32)
    want = values * scale.repeat(rows, 0).repeat(columns, 1)
    if q.global_scale is not None:
        want = want * q.global_scale.numpy()
    assert want.dtype == np.float32
    want = torch.from_numpy(want if axis == -1 else want.T)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        back = q.dequantize(dtype)
        assert back.is_contiguous()
        assert torch.equal(back, want.to(dtype))
    assert q.dequantize().dtype == x.dtype


def test_dequantize_of_nan_scales_and_smallest_values(backend):
    x = torch.zeros(4, 32)
    x[0, 3], x[1, 3], x[2, 3] = torch.nan, torch.inf, 2.0**-135
    for name in MX:
        back = bs.quantize(x, name).dequantize()
        assert back[:2].isnan().all()
        assert torch.equal(back[3], torch.zeros(32))
    # 2^-127 * the smallest E4M3 is a subnormal of fp32
    assert bs.quantize(x).dequantize()[2, 3] == 2.0**-135


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", formats)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("k", [1, 17, 33, 130])
def test_pad(backend, name, axis, k):
    """Data is padded with zeros to whole blocks, the shape stays, the values are those unpadded."""
    fmt = formats[name]
    x = realistic((128, k), 6)
    full = torch.nn.functional.pad(x, (0, -k % fmt.block_size))
    x, full = (x, full) if axis == -1 else (x.mT.contiguous(), full.mT.contiguous())
    q, want = bs.quantize(x, name, axis, pad=True), bs.quantize(full, name, axis)
    assert_same_bytes((q.qdata, q.scale), (want.qdata, want.scale))
    assert q.shape == x.shape
    assert torch.equal(q.dequantize(), want.dequantize()[: x.shape[0], : x.shape[1]])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("name", "layout"), [
    ("mxfp8", "tcgen05"), ("nvfp4", "tcgen05"), ("mxfp4", "packed"), ("nvfp4", "packed"),
    ("fp8_1x128", "sm90"), ("fp8_128x128", "sm90"),
])  # fmt: skip
def test_layout_is_what_to_layout_makes(backend, axis, name, layout):
    x = realistic((384, 640), 7)
    q = bs.quantize(x, name, axis, layout=layout)
    assert q.layout_name == layout
    assert torch.equal(q, bs.quantize(x, name, axis).to_layout(layout))


@pytest.mark.sampled(1)
def test_quantize_both_is_quantize_twice(backend):
    for name in formats:
        x = realistic((256, 384), 8).to(torch.bfloat16)
        row, column = bs.quantize_both(x, name, nonfinite="te")
        assert (row.axis, column.axis) == (-1, -2)
        assert torch.equal(row, bs.quantize(x, name, -1, nonfinite="te"))
        assert torch.equal(column, bs.quantize(x, name, -2, nonfinite="te"))


def test_global_scale(backend):
    """Given as a number, as a tensor, or found: amax / (448 * 6) of what is finite; 1 for zeros."""
    x = realistic((16, 64), 9)
    scalar = (x.abs().max() / 2688).to(torch.float32)
    found = bs.quantize(x, "nvfp4")
    assert found.global_scale.shape == ()
    assert found.global_scale == scalar
    assert torch.equal(found, bs.quantize(x, "nvfp4", global_scale=scalar))
    assert torch.equal(found, bs.quantize(x, "nvfp4", global_scale=scalar.item()))
    assert torch.equal(found, bs.quantize(x, "nvfp4", global_scale=scalar.reshape(1, 1)))
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    assert bs.quantize(x, "nvfp4").global_scale == scalar
    assert bs.quantize(torch.zeros(4, 16), "nvfp4").global_scale == 1.0
    assert bs.quantize(torch.full((4, 16), torch.inf), "nvfp4").global_scale == 1.0
    assert bs.quantize(torch.full((4, 16), 1e-45), "nvfp4").global_scale == 2.0**-117


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_ambient_settings_change_no_byte(backend, name):
    """Default dtypes and devices, inference mode, autocast."""
    x = realistic((64, 128), 13)
    want = bs.quantize(x, name)
    for enter in (
        lambda: torch.device("meta"),
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ):
        with enter():
            assert torch.equal(bs.quantize(x, name), want)
            assert torch.equal(bs.quantize(x, name).dequantize(), want.dequantize())
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(bs.quantize(x, name), want)
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_stop_and_the_input_is_untouched(backend):
    x = realistic((32, 64), 10).requires_grad_()
    before = x.detach().clone()
    q = bs.quantize(x)
    assert not q.requires_grad
    assert not q.dequantize().requires_grad
    assert torch.equal(x, before)
    scalar = torch.tensor(0.01, requires_grad=True)
    assert not bs.quantize(x, "nvfp4", global_scale=scalar).global_scale.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_and_device_are_kept(dtype):
    q = bs.quantize(torch.ones(2, 32, dtype=dtype))
    assert q.dtype == dtype
    assert q.device == torch.device("cpu")
    assert q.dequantize().dtype == dtype


@pytest.mark.parametrize("nonfinite", ["propagate", "te"])
@pytest.mark.parametrize("name", [name for name in formats if name != "fp8_128x128"])
def test_groups_along_the_contraction_by_the_reference(name, nonfinite):
    """The same bytes, also of what is not finite, and of rows of no group."""
    x = realistic((300, 40), 3)
    x[7, 3], x[150, 20:], x[299, 0] = torch.nan, torch.inf, torch.nan
    for offsets in ([0, 131, 131, 290], [1, 2], [0, 0], [300]):
        for k_major in (False, True):
            results = [
                bs.quantize(
                    x,
                    name,
                    -2,
                    offsets=torch.tensor(offsets, dtype=torch.int32),
                    k_major=k_major,
                    nonfinite=nonfinite,
                    backend=backend,
                )
                for backend in ("auto", "reference")
            ]
            got, want = ((q.qdata, q.scale) for q in results)
            assert_same_bytes(got, want)


@pytest.mark.parametrize("offsets", [[64, 128], [0, 40, 40, 90], [5, 37, 128], [128], [0, 0, 33]])
@pytest.mark.parametrize("k_major", [False, True])
@pytest.mark.parametrize("name", [name for name in formats if name != "fp8_128x128"])
def test_groups_along_the_contraction_start_their_own_blocks(name, k_major, offsets):
    """Each group has the bytes that it has alone, padded; what is in no group is zero."""
    x, fmt = realistic((128, 48), 11), formats[name]
    ends, scalar = torch.tensor(offsets, dtype=torch.int32), 0.37 if name == "nvfp4" else None
    given = {"global_scale": scalar, "k_major": k_major}
    q = bs.quantize(x, name, -2, offsets=ends, **given)
    assert q.k_grouped
    assert q.groups_apart == (k_major or fmt.element.bits < 8)
    back, start, used = q.dequantize(), 0, 0
    for i, end in enumerate(offsets):
        if end > start:
            alone = bs.quantize(x[start:end], name, -2, pad=True, **given)
            apart = (start // 128 + i) * 128
            if q.groups_apart:
                data = q.qdata[fmt.element.stored(apart) :][: len(alone.qdata)]
                assert_same_bytes((data,), (alone.qdata,))
                used += alone.qdata.view(torch.uint8).count_nonzero()
            else:
                assert_same_bytes((q.qdata[start:end],), (alone.qdata[: end - start],))
            first = apart // fmt.block_size
            assert_same_bytes((q.scale[first : first + len(alone.scale)],), (alone.scale,))
            assert torch.equal(back[start:end], alone.dequantize())
        start = end
    assert not back[start:].any()
    if q.groups_apart:
        assert q.qdata.view(torch.uint8).count_nonzero() == used
