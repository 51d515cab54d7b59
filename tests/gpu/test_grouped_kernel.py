"""``bs.grouped_gemm`` by the Hopper kernels: the bits of a product for each group."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from gpu_inputs import DEVICE, normal, only_on

import blockscale as bs
from blockscale.bench.timing import host_microseconds

only_on("sm_90a")

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, BLOCKS = "fp8_1x128", "fp8_128x128"
FLOOR, WGMMA = 1.66e-3, 3e-4  # relative errors of rounding to bf16, and of FP8 sums on Hopper


def quantized(m: int, groups: int, n: int, k: int, seed: int = 0):
    a = bs.quantize(normal(m, k, seed=seed), ROWS, layout="sm90", pad=True)
    weights = normal(groups, n, k, seed=seed + 1)
    return a, torch.stack([bs.quantize(w, BLOCKS, pad=True) for w in weights]).mT


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def product(a: bs.ScaledTensor, b: bs.ScaledTensor, offsets: torch.Tensor) -> torch.Tensor:
    x, out = (
        a.dequantize(FP32).double(),
        torch.zeros(a.shape[0], b.shape[2], device=DEVICE, dtype=torch.float64),
    )
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
    (None, "nvfp4"),
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
        a = x if left is None else bs.quantize(x, left)
        got = bs.grouped_gemm(a, b, offsets, backend="kernel")
        wide, want = x if left is None else a.dequantize(FP32), torch.zeros_like(got).double()
        for j, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
            want[start:end] = wide[start:end].double() @ b[j].dequantize(FP32).double()
        check(got, want, (sizes, n, k))
        assert bool((got[sum(sizes) :] == 0).all())


@pytest.mark.parametrize(("left", "right"), [
    (ROWS, BLOCKS), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), (None, "mxfp8"), (None, "mxfp4"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("capacity", [1, 16, 150])
def test_masked(left, right, capacity):
    """A graph whose counts change; rows past them are not written."""
    n, k, groups = 384, 512, 9
    x, w = normal(groups * capacity, k), normal(groups, n, k, seed=1)
    layout = "sm90" if left == ROWS else "compact"
    a = x if left is None else bs.quantize(x, left, layout=layout)
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
            rows = slice(i * capacity, i * capacity + size)
            if size:
                want = wide[rows].double() @ b[i].dequantize(FP32).double()
                rounding = (want.to(BF16).double() - want).norm()  # of few values: no mean
                limit = (rounding**2 + (WGMMA * want.norm()) ** 2) ** 0.5
                assert (out[rows].double() - want).norm() <= 1.02 * limit, (sizes, i)
            assert bool((out[rows.stop : (i + 1) * capacity] == 7).all()), (sizes, i)


@pytest.mark.parametrize("sizes", [(8192,), (4096, 0, 4096), (1000,) * 8, (128,) * 64])
def test_large(sizes):
    a, b = quantized(sum(sizes), len(sizes), 1536, 2048)
    got = bs.grouped_gemm(a, b, ends(*sizes), backend="kernel")
    check(got, product(a, b, ends(*sizes)))


def test_nan_stays_in_its_group():
    a, b = quantized(300, 3, 264, 512)
    offsets = ends(100, 99, 101)
    clean = bs.grouped_gemm(a, b, offsets, backend="kernel")
    a.qdata[100:199].view(torch.uint8).fill_(0x7F)
    got = bs.grouped_gemm(a, b, offsets, backend="kernel")
    assert bool(got[100:199].isnan().all())
    assert torch.equal(got[:100], clean[:100])
    assert torch.equal(got[199:], clean[199:])


def test_graph():
    """Other offsets in the memory that was recorded give other groups."""
    a, b = quantized(512, 4, 256, 384)
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


def test_streams():
    a, b = quantized(700, 4, 256, 384)
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


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compile(backend):
    _, b = quantized(1, 4, 256, 384)

    def step(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return bs.grouped_gemm(bs.quantize(x, ROWS, layout="sm90"), b, offsets) * 2

    x, offsets = normal(512, 384), ends(100, 12, 0, 300)
    got = torch.compile(step, fullgraph=True, backend=backend)(x, offsets)
    assert torch.equal(got, step(x, offsets))


def test_weights_of_more_than_2_31_elements():
    groups, n, k = 80, 4096, 7168
    b = bs.quantize(torch.ones(1, n, k, device=DEVICE, dtype=BF16), BLOCKS)
    data = b.qdata.expand(groups, n, k).contiguous()
    scale = torch.arange(1, groups + 1, device=DEVICE)[:, None, None] * b.scale
    w = bs.ScaledTensor(data, scale, format=BLOCKS, shape=(groups, n, k))
    a = bs.quantize(torch.ones(groups * 2, k, device=DEVICE, dtype=BF16), ROWS, layout="sm90")
    got = bs.grouped_gemm(a, w.mT, ends(*[2] * groups), backend="kernel")
    want = k * torch.arange(1, groups + 1, device=DEVICE).repeat_interleave(2).float()
    assert torch.allclose(got[:, 0].float(), want, rtol=2**-7)
    assert bool((got == got[:, :1]).all())


@pytest.mark.alone
def test_host_time():
    """As a product of two matrices."""
    a, b = quantized(512, 4, 256, 384)
    offsets = ends(300, 1, 99, 112)
    bs.grouped_gemm(a, b, offsets, backend="kernel")
    took = [host_microseconds(lambda: bs.grouped_gemm(a, b, offsets), 200) for _ in range(10)]
    assert min(took) <= 15
