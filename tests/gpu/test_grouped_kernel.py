"""``bs.grouped_gemm`` by the Hopper kernels: the bits of a product for each group."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from gpu_inputs import DEVICE, normal, only_on

import blockscale as bs
from blockscale.bench.timing import host_microseconds
from blockscale.dtypes import from_torch
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.runtime import gpu_of
from blockscale.kernels.sm90.grouped_config import k_grouped_candidates

only_on("sm_90a")

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, BLOCKS = "fp8_1x128", "fp8_128x128"
FLOOR, WGMMA = 1.66e-3, 3e-4  # relative errors of rounding to bf16, and of FP8 sums on Hopper


PAIRS = pytest.mark.parametrize(
    "pair", [(ROWS, BLOCKS), ("mxfp8", "mxfp8"), (None, "nvfp4"), (ROWS, "nvfp4")], ids=str
)


def rows(x: torch.Tensor, name: str | None) -> torch.Tensor:
    """``x`` as a kernel takes it."""
    layout = "sm90" if name == ROWS else "compact"
    return x if name is None else bs.quantize(x, name, layout=layout, pad=True)


def quantized(m: int, groups: int, n: int, k: int, seed: int = 0, pair=(ROWS, BLOCKS)):
    a = rows(normal(m, k, seed=seed), pair[0])
    return a, bs.quantize(normal(groups, n, k, seed=seed + 1), pair[1], pad=True).mT


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def product(a: bs.ScaledTensor, b: bs.ScaledTensor, offsets: torch.Tensor) -> torch.Tensor:
    x = (a.dequantize(FP32) if isinstance(a, bs.ScaledTensor) else a).double()
    out = torch.zeros(a.shape[0], b.shape[2], device=DEVICE, dtype=torch.float64)
    for i, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        out[start:end] = x[start:end] @ b[i].dequantize(FP32).double()
    return out


def check(got: torch.Tensor, want: torch.Tensor, what: object = None) -> None:
    norm = want.norm()
    assert bool(torch.isfinite(got).all()), what
    assert (got.double() - want).norm() <= 1.02 * (FLOOR**2 + WGMMA**2) ** 0.5 * norm, what


@pytest.mark.parametrize("seed", range(4))
def test_200_groupings(seed):
    """50 in each of four; sizes around those of tiles, and rows of no group."""
    rng = random.Random(seed)
    for i in range(50):
        groups = rng.choice((1, 2, 7, 33, 70))
        most = rng.choice((3, 40, 130, 300))
        sizes = [rng.choice((0, 1, 31, 33, 127, 129, rng.randint(0, most))) for _ in range(groups)]
        rest = rng.choice((0, 0, 1, 200)) or not sum(sizes)
        n, k = 8 * rng.randint(1, 80), 16 * rng.randint(1, 60)
        a, b = quantized(sum(sizes) + rest, groups, n, k, seed=i)
        offsets = ends(*sizes)
        got = bs.grouped_gemm(a, b, offsets, backend="kernel")
        check(got, product(a, b, offsets), (sizes, n, k))
        assert bool((got[sum(sizes) :] == 0).all())
        assert torch.equal(got, bs.grouped_gemm(a, b, offsets))


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp4"), ("nvfp4", "nvfp4"), (None, "mxfp8"),
    (None, "nvfp4"), (ROWS, "nvfp4"), (ROWS, "mxfp4"),
], ids=str)  # fmt: skip
def test_exact_groupings(left, right):
    """Weights widened in registers."""
    rng = random.Random(0)
    for i in range(20):
        sizes = [rng.choice((0, 1, 31, 33, 127, 129, 300)) for _ in range(rng.choice((1, 7, 40)))]
        rest = rng.choice((0, 1, 200)) or not sum(sizes)
        n, k = 8 * rng.randint(1, 80), 32 * rng.randint(1, 40)
        x, w = normal(sum(sizes) + rest, k, seed=i), normal(len(sizes), n, k, seed=i + 1)
        b, offsets = bs.quantize(w, right).mT, ends(*sizes)
        a = rows(x, left)
        got = bs.grouped_gemm(a, b, offsets, backend="kernel")
        wide, want = x if left is None else a.dequantize(FP32), torch.zeros_like(got).double()
        for j, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
            want[start:end] = wide[start:end, :k].double() @ b[j].dequantize(FP32).double()
        check(got, want, (sizes, n, k))
        assert bool((got[sum(sizes) :] == 0).all())


@pytest.mark.parametrize(("left", "right"), [
    (ROWS, BLOCKS), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), (None, "mxfp8"), (None, "mxfp4"),
    (ROWS, "nvfp4"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("capacity", [1, 16, 150])
def test_masked(left, right, capacity):
    """A graph whose counts change; rows past them are not written."""
    n, k, groups = 384, 512, 9
    x, w = normal(groups * capacity, k), normal(groups, n, k, seed=1)
    a = rows(x, left)
    b, counts = bs.quantize(w, right).mT, torch.zeros(groups, device=DEVICE, dtype=torch.int32)
    bs.grouped_gemm(a, b, counts=counts, backend="kernel")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bs.grouped_gemm(a, b, counts=counts, backend="kernel")
    wide = x.float() if left is None else a.dequantize(FP32)
    rng = random.Random(0)
    for _ in range(5):
        sizes = [rng.choice((0, 1, capacity, rng.randint(0, capacity))) for _ in range(groups)]
        counts.copy_(torch.tensor([each + (each == capacity) for each in sizes]))
        out.fill_(7)
        graph.replay()
        for i, size in enumerate(sizes):
            mine = slice(i * capacity, i * capacity + size)
            if size:
                want = wide[mine].double() @ b[i].dequantize(FP32).double()
                rounding = (want.to(BF16).double() - want).norm()  # of few values: no mean
                limit = (rounding**2 + (WGMMA * want.norm()) ** 2) ** 0.5
                assert (out[mine].double() - want).norm() <= 1.02 * limit, (sizes, i)
            assert bool((out[mine.stop : (i + 1) * capacity] == 7).all()), (sizes, i)


@pytest.mark.parametrize("sizes", [(8192,), (4096, 0, 4096), (1000,) * 8, (128,) * 64])
def test_large(sizes):
    a, b = quantized(sum(sizes), len(sizes), 1536, 2048)
    got = bs.grouped_gemm(a, b, ends(*sizes), backend="kernel")
    check(got, product(a, b, ends(*sizes)))


@PAIRS
def test_nan_stays_in_its_group(pair):
    x, (_, b) = normal(300, 512), quantized(300, 3, 264, 512, pair=pair)
    offsets = ends(100, 99, 101)
    clean = bs.grouped_gemm(rows(x, pair[0]), b, offsets, backend="kernel")
    x[100:199] = torch.nan
    a = rows(x, pair[0])
    got = bs.grouped_gemm(a, b, offsets, backend="kernel")
    assert bool(got[100:199].isnan().all())
    assert torch.equal(got[:100], clean[:100])
    assert torch.equal(got[199:], clean[199:])


@PAIRS
def test_graph(pair):
    """Other offsets in the memory that was recorded give other groups."""
    a, b = quantized(512, 4, 256, 384, pair=pair)
    offsets = ends(128, 128, 128, 128)
    bs.grouped_gemm(a, b, offsets, backend="kernel")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bs.grouped_gemm(a, b, offsets, backend="kernel")
    for sizes in ((1, 200, 0, 300), (512, 0, 0, 0), (0, 0, 0, 3)):
        offsets.copy_(ends(*sizes))
        out.fill_(7)
        graph.replay()
        check(out, product(a, b, offsets), sizes)


@PAIRS
def test_streams(pair):
    a, b = quantized(700, 4, 256, 384, pair=pair)
    offsets = ends(300, 1, 99, 300)
    want = bs.grouped_gemm(a, b, offsets, backend="kernel")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append([bs.grouped_gemm(a, b, offsets) for _ in range(20)])
    torch.cuda.synchronize()
    assert all(torch.equal(want, got) for some in results for got in some)


@PAIRS
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compile(backend, pair):
    _, b = quantized(1, 4, 256, 384, pair=pair)

    def step(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return bs.grouped_gemm(rows(x, pair[0]), b, offsets) * 2

    x, offsets = normal(512, 384), ends(100, 12, 0, 300)
    got = torch.compile(step, fullgraph=True, backend=backend)(x, offsets)
    assert torch.equal(got, step(x, offsets))


@PAIRS
def test_weights_of_more_than_2_31_elements(pair):
    groups, n, k = 80, 4096, 7168
    powers = (torch.arange(groups, device=DEVICE) % 8).exp2()
    x = torch.ones(groups, 128, k, device=DEVICE, dtype=BF16) * powers[:, None, None].to(BF16)
    q = bs.quantize(x, pair[1])
    data = q.qdata[:, :1].expand(groups, n, -1).contiguous()
    scale = q.qscale[:, :1].expand(groups, n // q.format.block[0], -1).contiguous()
    w = bs.ScaledTensor(
        data, scale, format=pair[1], shape=(groups, n, k), global_scale=q.global_scale
    )
    a = rows(torch.ones(groups * 2, k, device=DEVICE, dtype=BF16), pair[0])
    got = bs.grouped_gemm(a, w.mT, ends(*[2] * groups), backend="kernel")
    want = k * powers.repeat_interleave(2)
    assert torch.allclose(got[:, 0].float(), want, rtol=2**-7)
    assert bool((got == got[:, :1]).all())


@pytest.mark.alone
@PAIRS
def test_host_time(pair):
    """Not much longer than a product of two matrices."""
    a, b = quantized(512, 4, 256, 384, pair=pair)
    offsets, one = ends(300, 1, 99, 112), b[0]
    bs.grouped_gemm(a, b, offsets, backend="kernel"), bs.gemm(a, one, backend="kernel")
    calls = lambda: bs.gemm(a, one), lambda: bs.grouped_gemm(a, b, offsets)
    dense, grouped = (min(host_microseconds(call, 200) for _ in range(10)) for call in calls)
    assert grouped <= dense + 4


# --- groups along K -------------------------------------------------------------------------------


def columns(rows: int, width: int, offsets: torch.Tensor, seed: int = 0) -> bs.ScaledTensor:
    given = {"offsets": offsets, "layout": "sm90", "k_major": True, "backend": "kernel"}
    return bs.quantize(normal(rows, width, seed=seed), ROWS, -2, **given)


def k_product(a: bs.ScaledTensor, b: bs.ScaledTensor, offsets: torch.Tensor) -> torch.Tensor:
    """In fp64: (groups, M, N)."""
    x, y = (each.dequantize(FP32).double() for each in (a, b))
    bounds = pairwise([0, *offsets.tolist()])
    return torch.stack([x[start:end].T @ y[start:end] for start, end in bounds])


def check_k(got: torch.Tensor, want: torch.Tensor, what: object = None) -> None:
    assert bool(torch.isfinite(got).all()), what
    rounding = (want.to(got.dtype).double() - want).norm()
    limit = (rounding**2 + (WGMMA * want.norm()) ** 2) ** 0.5
    assert (got.double() - want).norm() <= 1.02 * limit, what


@pytest.mark.parametrize("seed", range(4))
def test_200_groupings_along_k(seed):
    """50 in each of four; the quantizer's bytes are the reference's; the same bits again."""
    rng = random.Random(seed)
    for i in range(50):
        groups = rng.choice((1, 2, 7, 33, 70))
        most = rng.choice((3, 130, 300))
        sizes = [rng.choice((0, 1, 31, 33, 127, 129, rng.randint(0, most))) for _ in range(groups)]
        rest = rng.choice((0, 0, 1, 200)) or not sum(sizes)
        m, n, offsets = rng.randint(1, 600), 8 * rng.randint(1, 80), ends(*sizes)
        a, b = (
            columns(sum(sizes) + rest, m, offsets, i),
            columns(sum(sizes) + rest, n, offsets, i + 1),
        )
        got = bs.grouped_gemm(a.mT, b, offsets, backend="kernel")
        want = k_product(a, b, offsets)
        check_k(got, want, (sizes, m, n))
        assert torch.equal(got, bs.grouped_gemm(a.mT, b, offsets))
        out = torch.randn(groups, m, n, device=DEVICE)
        want += out
        bs.grouped_gemm(a.mT, b, offsets, out=out, accumulate=True)
        check_k(out, want, (sizes, m, n))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_exact_groupings_along_k(name):
    """Both operands are written in bf16."""
    rng = random.Random(name)
    for i in range(30):
        groups = rng.choice((1, 2, 7, 33))
        sizes = [rng.choice((0, 1, 31, 129, rng.randint(0, 300))) for _ in range(groups)]
        m, n, offsets = 8 * rng.randint(1, 60), 8 * rng.randint(1, 80), ends(*sizes)
        rows = sum(sizes) + rng.choice((1, 200))
        layout = rng.choice(("compact", "tcgen05"))
        how = {"axis": -2, "offsets": offsets, "layout": layout, "k_major": True}
        a, b = (bs.quantize(normal(rows, w, seed=i + w), name, **how) for w in (m, n))
        got = bs.grouped_gemm(a.mT, b, offsets, FP32, backend="kernel")
        want = k_product(a, b, offsets)
        assert (got.double() - want).norm() <= 1e-5 * want.norm(), (sizes, m, n)
        out = got.clone()
        bs.grouped_gemm(a.mT, b, offsets, out=out, accumulate=True, backend="kernel")
        assert (out.double() - 2 * want).norm() <= 2e-5 * want.norm(), (sizes, m, n)


def test_columns_have_the_bytes_of_the_reference():
    for sizes in ((5, 0, 130, 64, 1, 300), (128, 256), (0, 0, 7)):
        offsets, x = ends(*sizes), normal(sum(sizes) + 70, 200)
        for format in (ROWS, "mxfp8", "mxfp4"):
            layouts = ("compact", "sm90") if format == ROWS else ("compact", "tcgen05", "packed")
            for layout in layouts:
                given = {"offsets": offsets, "layout": layout, "k_major": True}
                here = bs.quantize_both(x, format, pad=True, backend="kernel", **given)
                there = bs.quantize_both(x, format, pad=True, backend="reference", **given)
                for q, want in zip(here, there, strict=True):
                    assert torch.equal(q.qdata.view(torch.uint8), want.qdata.view(torch.uint8))
                    if layout == "compact" or q.axis == -2:
                        assert torch.equal(q.qscale, want.qscale)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tiles_that_are_added_one_after_another(dtype):
    """All kernels that may be chosen, of many short groups, as in ``test_gemm_kernel``."""
    groups, k, m, n = 32, 1024, 1024, 2048
    offsets = ends(*[k] * groups)
    a, b = columns(groups * k, m, offsets), columns(groups * k, n, offsets, seed=1)
    x, y = (q.dequantize(FP32).unflatten(0, (groups, k)) for q in (a, b))
    want = (x.mT @ y).flatten(0, 1)
    gpu = gpu_of(a.device)
    operands = [part for q in (a, b) for part in (q.qdata.mT.view(torch.uint8), q.scale)]
    epilogue = Epilogue(from_torch(dtype), accumulate=True)
    for config in k_grouped_candidates((m, n, groups * k), groups, epilogue, gpu):
        for seed in range(2):
            start = normal(groups * m, n, seed=seed).to(dtype)
            out = start.clone()
            rest = None, None, offsets, 8, gpu.multiprocessors
            gpu.load(config)(*operands, out, *rest)
            error = (out.float() - start.float() - want).abs() - 2**-8 * (out.float().abs() + 1)
            assert float(error.max()) < 0.1, config


def test_graph_along_k():
    """Quantizers and product: other offsets in the memory that was recorded give other groups."""
    x, g, offsets = normal(512, 256), normal(512, 384, seed=1), ends(128, 128, 128, 128)
    given = {"offsets": offsets, "layout": "sm90", "k_major": True, "backend": "kernel"}

    def step() -> torch.Tensor:
        a, b = (bs.quantize(each, ROWS, -2, **given) for each in (g, x))
        return bs.grouped_gemm(a.mT, b, offsets, FP32, backend="kernel")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for sizes in ((1, 200, 0, 300), (512, 0, 0, 0), (0, 0, 0, 3), (127, 129, 1, 255)):
        offsets.copy_(ends(*sizes))
        out.fill_(7)
        graph.replay()
        a, b = (bs.quantize(each, ROWS, -2, **given) for each in (g, x))
        check_k(out, k_product(a, b, offsets), sizes)


def test_compiled_along_k():
    offsets = ends(100, 0, 156)

    def step(x: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        given = {"offsets": offsets, "layout": "sm90", "k_major": True}
        a, b = (bs.quantize(each, ROWS, -2, **given) for each in (g, x))
        bs.grouped_gemm(a.mT, b, offsets, out=out, accumulate=True)
        return bs.grouped_gemm(a.mT, b, offsets)

    x, g = normal(256, 128), normal(256, 192, seed=1)
    outs = [torch.ones(3, 192, 128, device=DEVICE) for _ in range(2)]
    got = torch.compile(step, fullgraph=True)(x, g, outs[0])
    assert torch.equal(got, step(x, g, outs[1]))
    assert torch.equal(*outs)


def test_more_than_2_31_elements():
    """Of the output."""
    groups, m, n = 40, 8192, 7168
    offsets = ends(*[128] * groups)
    a, b = columns(128 * groups, m, offsets), columns(128 * groups, n, offsets, seed=1)
    got = bs.grouped_gemm(a.mT, b, offsets, backend="kernel")
    for i in (0, groups - 1):
        rows = slice(128 * i, 128 * i + 128)
        x, y = (each.dequantize(FP32)[rows] for each in (a, b))
        check_k(got[i], (x.T.double() @ y.double()))


@pytest.mark.alone
def test_host_time_along_k():
    """Not much longer than a product of two matrices."""
    offsets = ends(128, 128)
    a, b = columns(256, 256, offsets).mT, columns(256, 256, offsets, seed=1)
    given = {"layout": "sm90", "k_major": True}
    x, y = (bs.quantize(normal(256, 256, seed=s), ROWS, -2, **given) for s in (0, 1))
    out, one = (torch.zeros(*shape, 256, 256, device=DEVICE) for shape in ((2,), ()))
    calls = [
        lambda: bs.gemm(x.mT, y, out=one, accumulate=True),
        lambda: bs.grouped_gemm(a, b, offsets, out=out, accumulate=True),
    ]
    dense, grouped = (min(host_microseconds(call, 200) for _ in range(10)) for call in calls)
    assert grouped <= dense + 4


@pytest.mark.parametrize("left", ["nvfp4", None, ROWS], ids=str)
def test_global_scales_of_experts(left):
    """Kernels multiply by the one of each group: the bits of sums times it."""
    x, sizes, n, k = normal(300, 512), (31, 0, 129, 64), 136, 512
    factors = (1.0, 1e-4, 300.0, 7.0)
    each = [bs.quantize(normal(n, k, seed=i) * f, "nvfp4") for i, f in enumerate(factors)]
    w, offsets = torch.stack(each), ends(*sizes)
    one = torch.ones((), device=DEVICE)
    a = x if left is None else rows(x, left)
    if left == "nvfp4":
        a = a._with(global_scale=one)
    got = [bs.grouped_gemm(a, w.mT, offsets, FP32) for _ in range(2)]
    sums = bs.grouped_gemm(a, w._with(global_scale=one).mT, offsets, FP32)
    start = 0
    for size, scale in zip(sizes, w.global_scale, strict=True):
        part = slice(start, start + size)
        assert torch.equal(got[0][part], sums[part] * scale)
        start += size
    assert not got[0][start:].any()
    assert torch.equal(*got)
