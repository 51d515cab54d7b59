"""FP8 by MXFP4 on Hopper: the bits of FP8's kernel where K blocks take one pass, else its error."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest
import torch
from gpu_inputs import DEVICE, normal, only_on, same

import blockscale as bs
from blockscale.bench.timing import host_microseconds
from blockscale.gemm_launch import forget_launches
from blockscale.kernels.sm90 import fp8_by_weights

only_on("sm_90a")

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, WEIGHTS = "fp8_1x128", "mxfp4"
# Relative error of sums of FP8 products on Hopper, which are kept below fp32: 1e-4 where scales are
# even, three times as much where one of four is the largest by far, and up to 6e-4 in few products.
WGMMA = 7e-4
gemm = partial(bs.gemm, backend="kernel")
grouped_gemm = partial(bs.grouped_gemm, backend="kernel")


@pytest.fixture(autouse=True)
def however_few_rows(monkeypatch):
    """Those that take other kernels, too."""
    monkeypatch.setattr(fp8_by_weights, "_UPCAST_ROWS", 0)
    forget_launches()
    yield
    forget_launches()


def weights(*shape: int, seed: int = 0, spread: float = 0.0) -> bs.ScaledTensor:
    """The exponents of whose scales have deviation ``spread``; some blocks are zeros."""
    w = normal(*shape, seed=seed).float()
    blocks = w.unflatten(-1, (-1, 32)) if shape[-1] % 32 == 0 else w[..., None]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    power = torch.randn(blocks.shape[:-1], generator=generator, device=DEVICE) * spread
    zero = torch.rand(power.shape, generator=generator, device=DEVICE) < 0.02
    blocks = blocks * power.round().exp2().masked_fill(zero, 0)[..., None]
    return bs.quantize(blocks.reshape(shape), WEIGHTS, pad=True)


def as_fp8(q: bs.ScaledTensor) -> bs.ScaledTensor:
    """The same numbers in ``fp8_128x128``, with the factors of the kernel; K is whole blocks."""
    w = values(q)
    n, k = w.shape[-2:]
    largest = q.qscale.view(torch.uint8).to(FP32).repeat_interleave(32, -1).masked_fill(w == 0, 0)
    tall = torch.nn.functional.pad(largest, (0, 0, 0, -n % 128))
    block = tall.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).amax((-3, -1))
    factor = (block - 127 - 6).exp2()
    whole = factor.repeat_interleave(128, -2)[..., :n, :].repeat_interleave(128, -1)
    data = (w / whole).to(torch.float8_e4m3fn)
    fp8 = bs.ScaledTensor(data, factor, format="fp8_128x128", shape=(*w.shape[:-2], n, k))
    assert torch.equal(values(fp8), w)
    return fp8


def rows(m: int, k: int, seed: int = 0) -> bs.ScaledTensor:
    return bs.quantize(normal(m, k, seed=seed), ROWS, layout="sm90", pad=True)


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def values(q: bs.ScaledTensor) -> torch.Tensor:
    return q.dequantize(torch.float64)


def check(got: torch.Tensor, want: torch.Tensor, what: object = None) -> None:
    assert bool(torch.isfinite(got).all()), what
    rounding = (want.to(got.dtype).double() - want).norm()
    assert (got.double() - want).norm() <= rounding + WGMMA * want.norm(), what


@pytest.mark.parametrize("spread", [0, 3, 12])
def test_100_shapes(spread):
    """All is written, in poisoned memory, and nothing beside it; the same bits again."""
    rng = random.Random(spread)
    for i in range(100):
        m = rng.choice((rng.randint(1, 64), rng.randint(1, 700), 128 * rng.randint(1, 12)))
        n = rng.choice((8 * rng.randint(1, 200), rng.randint(1, 700), 128 * rng.randint(1, 20)))
        k = rng.choice((16 * rng.randint(1, 130), rng.randint(1, 3000), 2048))
        a, b = rows(m, k, i), weights(n, k, seed=i + 1, spread=spread)
        whole = torch.empty(m + 2, n + 16, device=DEVICE, dtype=BF16)
        whole.view(torch.uint8).fill_(0xA5)
        before, out = whole.clone(), whole[1:-1, 8:-8]
        if i % 2:
            gemm(a, b.mT, out=out)
        else:
            out.copy_(gemm(a, b.mT))
        check(out, values(a) @ values(b).mT, (m, n, k))
        assert torch.equal(out, gemm(a, b.mT))
        out.copy_(before[1:-1, 8:-8])
        assert same(whole, before), (m, n, k)


def test_bits_of_fp8():
    """Bias and sums, too. K is short where FP8's kernel would split it."""
    for m, n, k in ((1, 2112, 128), (300, 576, 128), (2048, 4104, 2304), (1024, 16384, 1024)):
        a, b = rows(m, k), weights(n, k, spread=1)
        fp8, bias = as_fp8(b), normal(n, seed=5)
        assert torch.equal(gemm(a, b.mT), gemm(a, fp8.mT)), (m, n, k)
        out = normal(m, n, seed=6, dtype=FP32)
        want = out.clone()
        gemm(a, b.mT, out=out, accumulate=True, bias=bias)
        gemm(a, fp8.mT, out=want, accumulate=True, bias=bias)
        assert torch.equal(out, want), (m, n, k)


@pytest.mark.parametrize("masked", [False, True])
def test_sums_of_fp8_in_groups(masked):
    """But for their order: warpgroups of FP8's kernel may share K."""
    rng = random.Random(0)
    for i in range(30):
        groups, n = rng.choice((1, 5, 40)), 8 * rng.randint(1, 80)
        sizes = [rng.choice((0, 1, 31, 129, rng.randint(0, 300))) for _ in range(groups)]
        k = 128 * rng.randint(1, 9)
        b = weights(groups, n, k, seed=i, spread=1)
        counts = torch.tensor(sizes, device=DEVICE, dtype=torch.int32)
        given = {"counts": counts} if masked else {"offsets": ends(*sizes)}
        a = rows(300 * groups if masked else max(1, sum(sizes)), k, i)
        got, want = (
            grouped_gemm(a, w.mT, **given, out=torch.zeros(len(a), n, device=DEVICE))
            for w in (b, as_fp8(b))
        )
        assert (got - want).norm() <= 3e-7 * want.norm(), (sizes, n, k)


def test_every_weight():
    """The identity's rows by elements of all scales: exact."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    a = bs.quantize(torch.eye(128, device=DEVICE), ROWS, layout="sm90")
    a.qdata.copy_(torch.eye(128, device=DEVICE).to(a.qdata.dtype))
    a.qscale.fill_(1)
    q = weights(4096, 128)
    octets = torch.randint(256, (4096, 64), generator=generator, device=DEVICE)
    q.qdata.view(torch.uint8).copy_(octets.to(torch.uint8))
    for least, most in ((127, 127), (100, 114), (100, 115), (60, 190), (0, 250)):
        power = torch.randint(least, most + 1, q.qscale.shape, generator=generator, device=DEVICE)
        q.qscale.view(torch.uint8).copy_(power.to(torch.uint8))
        assert torch.equal(gemm(a, q.mT, FP32), q.dequantize(FP32).mT)


def test_not_numbers():
    x, q = normal(300, 512), weights(272, 512, spread=3)
    x[3, 7], x[9] = torch.nan, 0.0
    q.qscale.view(torch.uint8)[130, 5] = 255
    a = bs.quantize(x, ROWS, layout="sm90")
    got, want = gemm(a, q.mT, FP32), bs.gemm(a, q.mT, FP32, backend="reference")
    assert torch.equal(got.isnan(), want.isnan())
    finite = ~want.isnan()
    check(got[finite], want[finite].double())


@pytest.mark.parametrize("seed", range(4))
def test_200_groupings(seed):
    """50 in each of four; sizes around those of tiles, and rows of no group."""
    rng = random.Random(seed)
    for i in range(50):
        groups = rng.choice((1, 2, 7, 33, 70))
        most = rng.choice((3, 40, 130, 300))
        sizes = [rng.choice((0, 1, 31, 33, 127, 129, rng.randint(0, most))) for _ in range(groups)]
        rest = rng.choice((0, 0, 1, 200)) or not sum(sizes)
        n, k = 8 * rng.randint(1, 80), 32 * rng.randint(1, 30)
        a, offsets = rows(sum(sizes) + rest, k, i), ends(*sizes)
        b = weights(groups, n, k, seed=i, spread=rng.choice((0, 2, 9)))
        got, want = grouped_gemm(a, b.mT, offsets), torch.zeros(len(a), n, device=DEVICE).double()
        for w, (start, end) in zip(b, pairwise([0, *offsets.tolist()]), strict=True):
            want[start:end] = values(a)[start:end] @ values(w).mT
        check(got, want, (sizes, n, k))
        assert bool((got[sum(sizes) :] == 0).all())
        assert torch.equal(got, bs.grouped_gemm(a, b.mT, offsets))


@pytest.mark.parametrize("capacity", [1, 16, 150])
def test_masked(capacity):
    """Rows past the counts are not written."""
    n, k, groups = 384, 512, 9
    a, b = rows(groups * capacity, k), weights(groups, n, k, spread=2)
    rng = random.Random(0)
    for _ in range(5):
        sizes = [rng.choice((0, 1, capacity, rng.randint(0, capacity))) for _ in range(groups)]
        counts = torch.tensor(sizes, device=DEVICE, dtype=torch.int32)
        out = torch.full((groups * capacity, n), 7, device=DEVICE, dtype=BF16)
        grouped_gemm(a, b.mT, counts=counts, out=out)
        for i, size in enumerate(sizes):
            mine = slice(i * capacity, i * capacity + size)
            if size:
                check(out[mine], values(a)[mine] @ values(b[i]).mT, (sizes, i))
            assert bool((out[mine.stop : (i + 1) * capacity] == 7).all()), (sizes, i)


def test_graph():
    """Replays see other weights, whose K blocks are multiplied more often, and other offsets."""
    a, offsets = rows(512, 384), ends(128, 128, 128, 128)
    q, wide = weights(4, 256, 384), weights(4, 256, 384, seed=1, spread=12)
    grouped_gemm(a, q.mT, offsets), gemm(a, q[0].mT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, one = grouped_gemm(a, q.mT, offsets), gemm(a, q[0].mT)
    q.copy_(wide)
    offsets.copy_(ends(1, 200, 0, 300))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(one, gemm(a, wide[0].mT))
    assert torch.equal(out, grouped_gemm(a, wide.mT, ends(1, 200, 0, 300)))


def test_streams():
    a, b = rows(512, 2048), weights(1024, 2048, spread=4)
    want = gemm(a, b.mT)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append([gemm(a, b.mT) for _ in range(20)])
    torch.cuda.synchronize()
    assert all(torch.equal(want, got) for some in results for got in some)


def test_compile():
    def step(x, w, offsets):
        a = bs.quantize(x, ROWS, layout="sm90")
        q = bs.quantize(w, WEIGHTS)
        return gemm(a, q[0].mT).relu() + bs.grouped_gemm(a, q.mT, offsets)

    torch.compiler.reset()
    given = normal(256, 512), normal(3, 384, 512, seed=2), ends(100, 0, 156)
    with torch.no_grad():
        got = torch.compile(step, fullgraph=True)(*given)
    assert torch.equal(got, step(*given))


def test_weights_of_more_than_2_31_elements():
    groups, n, k = 80, 4096, 7168
    one = weights(1, n, k, spread=2)
    data = one.qdata.view(torch.uint8).expand(groups, n, k // 2).contiguous()
    scale = one.qscale.view(torch.uint8).expand(groups, n, k // 32).contiguous()
    w = bs.ScaledTensor(data.view(one.qdata.dtype), scale, format=WEIGHTS, shape=(groups, n, k))
    x = normal(2, k).repeat(groups, 1)
    got = grouped_gemm(bs.quantize(x, ROWS, layout="sm90"), w.mT, ends(*[2] * groups))
    want = gemm(rows(2, k), one[0].mT)
    assert bool((got.unflatten(0, (groups, 2)) == got[:2]).all())
    assert (got[:2].float() - want.float()).norm() <= 1e-2 * want.float().norm()


@pytest.mark.alone
def test_host_time():
    """Two kernels are launched: what lists K blocks, and the product."""
    a, b = rows(128, 512), weights(512, 512)
    gemm(a, b.mT)
    took = [host_microseconds(lambda: gemm(a, b.mT), 200) for _ in range(10)]
    assert min(took) <= 25
