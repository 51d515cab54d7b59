"""``dequantize()`` on a GPU: the kernel's bytes are the reference's, and whatever torch does."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from gpu_inputs import DEVICE, nasty, only_on
from torch import Tensor

import blockscale as bs
from blockscale import reference
from blockscale.kernels.common.gpu import GPUS
from blockscale.kernels.quantizers import calls as quantizers
from blockscale.layouts import layouts

only_on(*GPUS)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = [name for name, fmt in bs.formats.items() if fmt.element.bits != 6]
PLACES = [
    (name, layout)
    for name in FORMATS
    for layout, where in layouts.items()
    if bs.formats[name].scale.nbytes in where.itemsize
]


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        yield


def assert_right(got: Tensor, q: bs.ScaledTensor) -> None:
    """What ``q``, on a CPU, stands for: its bits, but for those of NaN, of which torch has many."""
    values = reference.dequantize(
        q.data,
        q.compact_scale(),
        q.format,
        shape=q.shape,
        axis=q.axis,
        global_scale=q.global_scale,
    )
    want, got = values.to(got.dtype).contiguous(), got.cpu().contiguous()
    assert got.shape == want.shape
    assert torch.equal(got.isnan(), values.isnan())
    bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
    got, want = (x.masked_fill(values.isnan(), 0).view(bits) for x in (got, want))
    assert torch.equal(got, want)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, axis):
    for shape in ((256, 384), (129, 160), (33, 37), (1, 32), (1000, 2880), (2048, 4096)):
        q = bs.quantize(nasty(BF16, *shape), name, axis, pad=True)
        there = q.to(DEVICE)
        for dtype in (BF16, FP16, FP32):
            assert_right(there.dequantize(dtype), q)
    exact = there.dequantize(FP32).double()
    assert torch.equal(there.dequantize(torch.float64).nan_to_num(), exact.nan_to_num())


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("name", "layout"), PLACES)
def test_layouts(name, layout, axis):
    """Scales read where they lie, data in either order."""
    for k_major in (False, True):
        q = bs.quantize(nasty(BF16, 260, 392), name, axis, pad=True, layout=layout, k_major=k_major)
        there = q.to(DEVICE)
        got = quantizers.dequantize(
            there.qdata,
            there.qscale,
            quantizers.Stored(name, tuple(q.shape), axis, layout),
            global_scale=there.global_scale,
        )
        assert_right(got, q)
        assert got.stride(-1 if there.qdata.stride(-1) == 1 else -2) == 1


def test_dimensions_and_views():
    x = nasty(BF16, 192, 256)
    for name, axis in (("mxfp8", -1), ("mxfp8", -2), ("nvfp4", -1), ("nvfp4", -2)):
        for view in (x, x.view(4, 48, 256), x.view(2, 3, 32, 256)):
            q = bs.quantize(view, name, axis, pad=True)
            assert_right(q.to(DEVICE).dequantize(), q)
            assert_right(q.to(DEVICE).mT.dequantize(), q.mT)
    q = bs.quantize(x, "mxfp8")
    assert_right(q.to(DEVICE)[8:40, 32:96].dequantize(), q[8:40, 32:96])


def test_into_another_tensor():
    q = bs.quantize(nasty(BF16), "mxfp8")
    there, out = q.to(DEVICE), torch.full((258, 384), 7.0, dtype=BF16, device=DEVICE)
    part = out[1:-1]  # a row from what else there is
    stored = quantizers.Stored(q.format_name, tuple(q.shape))
    got = quantizers.dequantize(there.qdata, there.qscale, stored, out=part)
    assert got is part
    assert_right(part, q)
    assert (out[0] == 7).all()
    assert (out[-1] == 7).all()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_128x128"])
def test_cuda_graph(name):
    """The graph dequantizes whatever its input holds when it is replayed."""
    q = bs.quantize(nasty(BF16), name)
    there = q.to(DEVICE)
    there.dequantize()  # compiled outside of the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = there.dequantize()
    other = bs.quantize(nasty(BF16, seed=1), name, global_scale=q.global_scale)
    there.qdata.view(torch.uint8).copy_(other.qdata.view(torch.uint8))
    there.qscale.copy_(other.qscale)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(out, other)


def test_no_call_waits_for_the_device():
    quantized = [bs.quantize(nasty(BF16), name, -1).to(DEVICE) for name in FORMATS]
    for q in quantized:
        q.dequantize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for q in quantized:
            q.dequantize()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_compile(name):
    q = bs.quantize(nasty(BF16), name).to(DEVICE)
    run = torch.compile(lambda q: q.dequantize().relu(), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(q).nan_to_num(), q.dequantize().relu().nan_to_num())


def test_fallback(monkeypatch):
    """What no kernel can is said, and computed."""
    monkeypatch.setattr("blockscale.ops.backends._warned", set())
    q = bs.quantize(nasty(BF16), "mxfp6_e2m3")
    there = q.to(DEVICE)
    with pytest.warns(bs.FallbackWarning, match="dequantize .* 6-bit"):
        got = there.dequantize()
    assert_right(got, q)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    """Parts of the result are those of parts of the data."""
    rows, columns = (1 << 18) + 256, 8192
    data = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE)
    scale = torch.randint(0, 256, (rows, columns // 32), dtype=torch.uint8, device=DEVICE)
    fmt = bs.formats["mxfp8"]
    whole = quantizers.dequantize(data, scale, quantizers.Stored(fmt.name, (rows, columns)))
    for first in (0, 1 << 17, (1 << 18) - 64, 1 << 18, rows - 128):
        part = slice(first, first + 128)
        here = bs.ScaledTensor(
            data[part].cpu().view(fmt.element.dtype),
            scale[part].cpu(),
            format="mxfp8",
            shape=(128, columns),
        )
        assert_right(whole[part], here)
