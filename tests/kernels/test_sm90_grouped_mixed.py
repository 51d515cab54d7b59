"""Products of grouped rows by MXFP8, MXFP4 and NVFP4 for Hopper, run in the emulator, against fp64
products of each group."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from mixed_inputs import assert_close, dequantized, operand, ordered, spaced
from sm90_inputs import assert_no_spills, launched

import blockscale as bs
from blockscale.dtypes import BFLOAT16, FLOAT32
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm90.mixed_config import Config, choose_grouped
from stand_in import emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

EDGES = 5, 0, 130, 64, 1, 0, 15, 17, 31, 33, 127, 129
SMALL = Config("mxfp8", BFLOAT16, rows=64, stages=3, tma_store=True, grouping="m")
FEW = Config("mxfp4", FLOAT32, rows=16, stages=3, grouping="m")


def product(
    config: Config,
    sizes: Sequence[int],
    n: int,
    k: int,
    rest: int = 0,
    *,
    completion: str = "late",
    seed: int = 0,
    multiprocessors: int = 3,
) -> Tensor:
    """What the kernel leaves in poisoned memory; checked."""
    m = sum(sizes) + rest
    a, (data, scale) = operand("bf16", m, k, 1)[0], operand(config.b_format, len(sizes) * n, k, 2)
    b = spaced(data, scale) if config.async_scales else (data, scale)
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    ends = torch.tensor(bounds[1:], dtype=torch.int32)
    left = ordered(a, config.block_k), None, None
    rest_of_all = None, None, ends, 2, multiprocessors
    got = launched(config, (m, n), (*left, *b), None, rest_of_all, completion, seed)
    values = dequantized(config.b_format, data, scale).unflatten(0, (len(sizes), n))
    for w, (start, end) in zip(values, pairwise(bounds), strict=True):
        if start < end:
            assert_close(got[start:end], a[start:end].double(), w)
    assert bool((got[bounds[-1] :] == 0).all())
    assert_no_spills(config)
    return got


def _chosen() -> list[Config]:
    """For few rows of each group to many, in both ways to store."""
    found = [
        choose_grouped((m, n, 7168), 32, format, Epilogue(dtype, tma_store=n % 8 == 0))
        for m in (64, 256, 700, 2048, 4096, 32768)
        for format, dtype, n in (("mxfp8", BFLOAT16, 4096), ("nvfp4", BFLOAT16, 4096),
                                 ("mxfp4", FLOAT32, 4095))
    ]  # fmt: skip
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("config", _chosen(), ids=lambda each: f"{each.b_format}, {each.rows}")
def test_chosen(config):
    """Sizes around those of tiles, a tail in N, rows of no group."""
    sizes = [each for each in EDGES if each <= max(2 * config.rows, 33)]
    product(config, sizes, 136 if config.tma_store else 133, 384, 9, completion="random")


def test_scales_that_are_not_copied():
    product(Config("mxfp8", BFLOAT16, rows=64, async_scales=False, grouping="m"), (5, 70), 72, 352)


@pytest.mark.parametrize("config", [SMALL, FEW], ids=["tiles", "one by one"])
@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_completions(config, completion):
    got = [
        product(config, (66, 3, 130), 136, 384, 1, completion=completion, seed=seed)
        for seed in range(2)
    ]
    assert torch.equal(*got)


@pytest.mark.parametrize(
    ("sizes", "rest"), [((0, 200, 0), 0), ((1,) * 70, 3), ((0,) * 64 + (65,), 0), ((0, 0), 130)]
)
def test_extremes(sizes, rest):
    product(SMALL, sizes, 72, 128, rest)


@pytest.mark.parametrize("seed", range(12))
def test_random_groupings(seed):
    rng = random.Random(seed)
    for _ in range(5):
        sizes = [rng.choice((0, 1, 2, 15, 16, 17, 33, 63, 65)) for _ in range(rng.randint(1, 5))]
        config, rest = rng.choice((SMALL, FEW)), rng.choice((0, 0, 1, 66)) or not sum(sizes)
        product(config, sizes, 72, 128, rest, multiprocessors=rng.randint(1, 5))


def test_nan_stays_in_its_group():
    """And in rows of no group."""
    ends = torch.tensor([30, 100, 140], dtype=torch.int32)
    x, w = matrix(150, 256), matrix(3, 72, 256, seed=1)
    with emulated("sm_90a"):
        b = bs.quantize(w, "mxfp8").mT
        clean = bs.grouped_gemm(x, b, ends, backend="kernel")
        x[30:100], x[140:] = torch.nan, torch.nan
        got = bs.grouped_gemm(x, b, ends, backend="kernel")
        w[1] = torch.nan
        other = bs.grouped_gemm(matrix(150, 256), bs.quantize(w, "mxfp8").mT, ends)
    for result in (got, other):
        assert bool(result[30:100].isnan().all())
        assert torch.equal(result[:30], clean[:30])
        assert torch.equal(result[100:], clean[100:])


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp8"), ("mxfp4", "mxfp8"), ("mxfp8_e5m2", "mxfp4"), ("nvfp4", "nvfp4"),
    (None, "mxfp8"), (None, "mxfp4"), (None, "nvfp4"),
], ids=str)  # fmt: skip
def test_dispatch(left, right):
    """A call, and one like it, which is looked up; K no multiple of a K block."""
    ends = torch.tensor([40, 40, 133], dtype=torch.int32)
    x, w = matrix(150, 288), matrix(3, 136, 288, seed=1)
    a = x if left is None else bs.quantize(x, left)
    b = bs.quantize(w, right).mT
    want = torch.zeros(150, 136, dtype=torch.float64)
    wide = x.double() if left is None else a.dequantize(torch.float64)
    for i, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        want[start:end] = wide[start:end] @ b[i].dequantize(torch.float64)
    with emulated("sm_90a") as launches:
        first = bs.grouped_gemm(a, b, ends, backend="kernel")
        again = bs.grouped_gemm(a, b, ends)
        assert len(launches) == 2 * 2  # A is put in order by itself
    assert torch.equal(first, again)
    assert (first.double() - want).norm() <= 1.7e-3 * want.norm()


@pytest.mark.parametrize(("left", "right"), [
    ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), (None, "mxfp4"),
])  # fmt: skip
def test_dgrad(left, right):
    """Columns of each weight: their scales are put along the contraction."""
    x, w = matrix(90, 256), matrix(2, 256, 136, seed=1)
    a = x if left is None else bs.quantize(x, left)
    ends = torch.tensor([30, 90], dtype=torch.int32)
    with emulated("sm_90a") as launches:
        b = bs.quantize(w, right, axis=-2, k_major=True)
        got, want = (bs.grouped_gemm(a, b, ends, backend=each) for each in ("kernel", "reference"))
        assert len(launches) == 2
        assert (got.double() - want.double()).norm() <= 2e-3 * want.double().norm()
        if right == "mxfp8":
            with pytest.raises(ValueError, match=r"b: its contraction.*k_major=True"):
                bs.grouped_gemm(a, bs.quantize(w, right, axis=-2), ends, backend="kernel")


def test_choice():
    """Tiles of few rows for few; and no part of what dense products may do."""
    for m, groups, rows in ((32, 32, 8), (256, 32, 16), (1024, 32, 64), (32768, 8, 256)):
        assert choose_grouped((m, 4096, 7168), groups, "mxfp8", Epilogue()).rows == rows
    for capacity, rows in ((1, 8), (16, 16), (64, 64), (128, 128), (192, 192)):  # none has more
        shape = 32 * capacity, 4096, 7168
        assert choose_grouped(shape, 32, "mxfp8", Epilogue(), grouping="masked").rows == rows
    for m in (1, 100, 5000, 10**6):
        for groups in (1, 8, 1000):
            config = choose_grouped((m, 136, 256), groups, "nvfp4", Epilogue(FLOAT32))
            assert config.grouped
            assert not config.stream_k
            assert config.sources == 1
