"""Products of groups of rows that are quantized for the next one, by Blackwell's kernel in the
emulator: byte for byte what its product without quantization and the reference make. On Hopper by
the kernels that there are."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from guarded import guarded
from kernel_code import built
from sm90_inputs import frame_bytes

import blockscale as bs
from blockscale import emulator as em
from blockscale import reference
from blockscale.dtypes import UINT8
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm100.config import choose_grouped
from blockscale.kernels.sm100.quantizing_config import FORMATS, Quantizing
from blockscale.layouts import Grouped, get_layout
from blockscale.ops.gemm_sm100 import _tiles_of_parts
from stand_in import emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = (5, 0, 130, 1)
REST = 7


def ends(sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def operands(a: str, b: str, n: int, k: int, rest: int = REST, sizes: tuple[int, ...] = SIZES):
    """Rows of groups, and a matrix for each, by plain torch."""
    x, w = matrix(sum(sizes) + rest, k), matrix(len(sizes) * n, k, seed=1).view(-1, n, k) / 4
    how = {"layout": "tcgen05", "offsets": ends(sizes), "backend": "reference"}
    return bs.quantize(x, a, **how), bs.quantize(w, b, backend="reference").mT


def in_two_steps(a, b, format, *, swiglu=False, out_dtype=FP32, layout="tcgen05", offsets, **how):
    """The product's kernel, whose sums are those of this machine; then plain torch."""
    values = bs.grouped_gemm(a, b, offsets, out_dtype, backend="kernel")
    if swiglu:
        values = reference.swiglu(values)
    how |= {"layout": layout, "offsets": offsets, "backend": "reference"}
    return bs.quantize(values, format, **how)


def assert_same(got: bs.ScaledTensor, want: bs.ScaledTensor) -> None:
    assert (got.format, got.scale_layout, got.shape) == (want.format, want.scale_layout, want.shape)
    assert got.offsets is want.offsets
    for x, y in ((got.qdata, want.qdata), (got.qscale, want.qscale)):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize(("pair", "format", "out_dtype", "swiglu"), [
    (("mxfp8", "mxfp8"), "mxfp8", BF16, True), (("mxfp8", "mxfp4"), "mxfp8", FP32, True),
    (("mxfp8_e5m2", "mxfp4"), "mxfp8_e5m2", BF16, False), (("nvfp4", "nvfp4"), "nvfp4", BF16, True),
    (("mxfp4", "mxfp4"), "mxfp4", BF16, True), (("nvfp4", "nvfp4"), "nvfp4", FP32, False),
], ids=str)  # fmt: skip
def test_bytes(pair, format, out_dtype, swiglu):
    """Groups of no rows and of more than a tile, rows of no group, columns of no whole tile."""
    a, b = operands(*pair, 320 if swiglu else 160, 128)
    how = {"swiglu": swiglu, "out_dtype": out_dtype}
    if format == "nvfp4":
        how["global_scale"] = 0.01
    with emulated("sm_100a") as ran:
        got = bs.grouped_gemm_quantize(
            a, b, a.offsets, format, layout="tcgen05", backend="kernel", **how
        )
        assert len(ran) == 1
        assert_same(got, in_two_steps(a, b, format, offsets=a.offsets, **how))


@pytest.mark.parametrize("layout", ["compact", "packed"])
def test_other_layouts(layout):
    a, b = operands("mxfp8", "mxfp8", 128, 64)
    with emulated("sm_100a") as ran:
        how = {"swiglu": True, "layout": layout, "offsets": a.offsets}
        got = bs.grouped_gemm_quantize(a, b, format="mxfp8", backend="kernel", **how)
        assert len(ran) == 1
        assert_same(got, in_two_steps(a, b, "mxfp8", **how))


@pytest.mark.parametrize("layout", ["compact", "packed"])
@pytest.mark.parametrize("given", [(50, 30, 60), (100, 40, 60), (-5, 20, 60), (20, 40, 90)])
def test_offsets_that_only_the_device_has(given, layout):
    """Each is taken for the nearest that can be, by the kernel and for its scales."""
    a, b = operands("mxfp8", "mxfp8", 128, 64, 0, (20, 20, 20))
    a = a._with(layout="compact", scale=a.compact_scale(), offsets=None)
    (left, right), op = (a, b.mT), torch.ops.blockscale.grouped_gemm_quantize
    parts = [(q.qdata.view(torch.uint8), q.qscale, None, "mxfp8", "compact") for q in (left, right)]
    right_parts = parts[1][0].mT, parts[1][1].mT, *parts[1][2:]
    how = "mxfp8", False, False, "rceil", "propagate", layout, None, "kernel"
    found = []
    for offsets in (torch.tensor(given), torch.tensor(given).clamp(0, 60).cummax(0).values):
        with emulated("sm_100a"):
            found.append(op(*parts[0], a.shape, *right_parts, b.shape, offsets.int(), *how))
    for mine, want in zip(*found, strict=True):
        assert torch.equal(mine.view(torch.uint8), want.view(torch.uint8))


def test_experts():
    """Each with a global scale of its own, from tokens to the second product."""
    sizes = (40, 0, 90)
    factors = torch.tensor([1.0, 1e-3, 200.0]).view(3, 1, 1)
    up, down = (
        torch.stack([bs.quantize(m, "nvfp4", backend="reference") for m in w])
        for w in (
            matrix(3 * 256, 128).view(3, 256, 128) * factors,
            matrix(3 * 64, 128, seed=1).view(3, 64, 128),
        )
    )
    offsets = ends(sizes)
    a = bs.quantize(matrix(130, 128, seed=2), "nvfp4", layout="tcgen05", offsets=offsets)
    with emulated("sm_100a") as ran:
        how = {"swiglu": True, "out_dtype": BF16, "layout": "tcgen05", "global_scale": 4.0}
        hidden = bs.grouped_gemm_quantize(a, up.mT, offsets, "nvfp4", backend="kernel", **how)
        y = bs.grouped_gemm(hidden, down.mT, offsets, FP32, backend="kernel")
        assert [config.alpha for config in ran] == [(0, 1), (0, 1)]
        assert_same(hidden, in_two_steps(a, up.mT, "nvfp4", offsets=offsets, **how))
    want = bs.grouped_gemm(hidden, down.mT, offsets, FP32, backend="reference")
    assert (y - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(("completion", "seed"), [("eager", 0), ("late", 0), ("random", 1)])
def test_memory_and_orders(completion, seed, ctas):
    """Nothing but the output's own bytes, which are all written; in any order of things."""
    sizes, rest, n = (3, 140, 0, 40), 9, 192
    a, b = operands("mxfp8", "mxfp8", n, 128, rest, sizes)
    quantizing = Quantizing("mxfp8", True, rounded=True)
    epilogue = Epilogue(UINT8)
    config = choose_grouped(
        (100, n, 128), 4, ("mxfp8", "mxfp8"), epilogue, quantizing=quantizing, ctas=ctas
    )
    padded = Grouped(get_layout("tcgen05")).padded_rows(len(a), 4)
    tiles = get_layout("tcgen05").stored_shape((padded, n // 2 // 32))[0]
    b_tiles = _tiles_of_parts(b.qscale.mT.flatten(0, 1), n // 2).view(torch.int64)
    b_data = b.qdata.mT.view(torch.uint8).flatten(0, 1)
    device = em.Device("sm_100a", completion=completion, seed=seed, check="all,exit_stores,global")
    with (
        guarded((len(a), n // 2), torch.uint8, None) as out,
        guarded((1, tiles), torch.uint8, None) as scale,
        em.cutedsl(device),
    ):
        scale.zero_()
        along = a.qscale.view(torch.int64)
        compile_cache.build(config)(
            a.qdata.view(torch.uint8),
            along.view(padded // 128, -1),
            b_data,
            b_tiles.view(4 * 2, -1),  # a tile for each half of each matrix
            (out, scale[0], None),
            None,
            None,
            a.offsets,
            4,
        )
        data, scales = out.clone(), scale[0].clone()
    with emulated("sm_100a"):
        how = {"swiglu": True, "out_dtype": BF16, "offsets": a.offsets}
        want = in_two_steps(a, b, "mxfp8", **how)
    assert torch.equal(data, want.qdata.view(torch.uint8))
    assert torch.equal(scales, want.qscale)


@pytest.mark.parametrize("format", FORMATS)
def test_no_spills(format):
    for swiglu, rounded in product((False, True), (False, True)):
        quantizing = Quantizing(format, swiglu, rounded=rounded)
        formats = ("nvfp4", "nvfp4") if format == "nvfp4" else ("mxfp8", "mxfp4")
        config = choose_grouped(
            (512, 4096, 4096), 8, formats, Epilogue(UINT8, alpha=(0, 1)), quantizing=quantizing
        )
        with em.cutedsl(em.Device("sm_100a")):
            assert frame_bytes(built(config).__cubin__) == [0]


def test_hopper():
    """The product is written, and read by a quantizer."""
    x, w = matrix(40, 256), matrix(3 * 256, 256, seed=1).view(3, 256, 256)
    a = bs.quantize(x, "fp8_1x128", layout="sm90", backend="reference")
    b = bs.quantize(w, "fp8_128x128", backend="reference").mT
    offsets = ends((5, 0, 33))
    with emulated("sm_90a", quantizes=True) as ran:
        how = {"swiglu": True, "out_dtype": BF16, "layout": "sm90"}
        got = bs.grouped_gemm_quantize(a, b, offsets, "fp8_1x128", backend="kernel", **how)
        assert len(ran) == 2
        assert_same(got, in_two_steps(a, b, "fp8_1x128", offsets=offsets, **how))
