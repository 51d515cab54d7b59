"""FP8 rows by weights of four bits for Hopper, run in the emulator: what calls launch, and products
whose K blocks are scaled before they are added up, against fp64."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from grouped_inputs import caught
from mixed_inputs import assert_close as assert_exact
from mixed_inputs import dequantized, operand, ordered, spaced
from sm90_inputs import BF16, FP32, assert_close, assert_no_spills, launched
from test_sm90_stream import partials

import blockscale as bs
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm90 import mixed
from blockscale.kernels.sm90.mixed_config import Config, choose_config, choose_grouped
from blockscale.kernels.sm90.mixed_mainloop import Mainloop
from stand_in import emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = Config("nvfp4", BFLOAT16, rows=64, tma_store=True, promotes=True)
EDGES = 5, 0, 130, 64, 1, 0, 15, 17, 31, 33, 127, 129


def rows(m: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """FP8 (M, K), and scales of its K blocks, (K blocks, M), over six binades and not powers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(torch.float8_e4m3fn).to(BF16)
    scale = torch.randn(-(-k // 128), -(-m // 4) * 4, generator=generator).exp2() / 256
    return x, scale


def values(x: Tensor, scale: Tensor) -> Tensor:
    return x.double() * scale.T[: len(x)].double().repeat_interleave(128, 1)[:, : x.shape[1]]


def product(
    config: Config,
    m: int,
    n: int,
    k: int,
    *,
    completion: str = "late",
    seed: int = 0,
    ctas: int = 3,
    start: Tensor | None = None,
) -> Tensor:
    """What the kernel leaves in poisoned memory; checked."""
    x, scale = rows(m, k)
    data, own = operand(config.b_format, n, k, 2)
    b = spaced(data, own) if config.async_scales else (data, own)
    more = partials(config, ctas) if config.stream_k else None
    given = ordered(x, config.block_k), scale, more, *b
    got = launched(config, (m, n), given, start, (None,) * 4 + (ctas,), completion, seed)
    added = 0.0 if start is None else start.double()
    assert_exact(got, values(x, scale), dequantized(config.b_format, data, own), added)
    assert_no_spills(config)
    return got


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "fields", "shape"),
    [
        ("late", {"rows": 8, "split_k": 3, "out_dtype": FLOAT32}, (5, 136, 384)),
        ("random", {"rows": 16, "out_dtype": FLOAT16}, (33, 72, 640)),
        ("eager", {"rows": 32, "b_format": "mxfp4", "out_dtype": FLOAT32}, (70, 264, 256)),
        ("random", {"b_format": "mxfp4", "split_k": 2}, (61, 136, 1152)),
        ("late", {"rows": 128}, (140, 136, 512)),
        ("random", {"rows": 128, "b_format": "mxfp4", "stages": 4}, (300, 264, 640)),
        ("late", {"rows": 128, "stream_k": True}, (256, 264, 640)),
        ("random", {"stream_k": True, "out_dtype": FLOAT32, "tma_store": False}, (70, 264, 384)),
        ("eager", {"rows": 64, "async_scales": False}, (65, 72, 160)),
    ],
    ids=str,
)
def test_shapes(completion, fields, shape):
    """Tiles of all sizes, that are whole or not; K that is split, and shared; tails of K."""
    if fields.get("rows", 64) < 64 or fields.get("out_dtype") is FLOAT32:
        fields = {"tma_store": False, **fields}
    product(replace(SMALL, **fields), *shape, completion=completion)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_completions(completion):
    got = [product(SMALL, 150, 136, 640, completion=completion, seed=seed) for seed in range(2)]
    assert torch.equal(*got)


def test_accumulate():
    config = replace(SMALL, out_dtype=FLOAT32, tma_store=False, accumulate=True)
    product(config, 70, 72, 384, start=torch.randn(70, 72))


def grouped(
    config: Config,
    sizes: tuple[int, ...],
    n: int,
    k: int,
    rest: int = 0,
    completion: str = "late",
    multiprocessors: int = 3,
) -> Tensor:
    m = sum(sizes) + rest
    (x, scale), (data, own) = rows(m, k), operand(config.b_format, len(sizes) * n, k, 2)
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    ends = torch.tensor(bounds[1:], dtype=torch.int32)
    given = ordered(x, config.block_k), scale, None, *spaced(data, own)
    last = None, None, ends, 2, multiprocessors
    got = launched(config, (m, n), given, None, last, completion)
    weights = dequantized(config.b_format, data, own).unflatten(0, (len(sizes), n))
    for w, (start, end) in zip(weights, pairwise(bounds), strict=True):
        if start < end:
            assert_exact(got[start:end], values(x, scale)[start:end], w)
    assert bool((got[bounds[-1] :] == 0).all())
    assert_no_spills(config)
    return got


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_groups(format, completion):
    """Sizes around those of tiles; rows of no group."""
    config = replace(SMALL, b_format=format, grouping="m")
    grouped(config, EDGES, 136, 256, 9, completion)


@pytest.mark.parametrize("each", [16, 32, 128])
def test_chosen_for_groups(each):
    shape = 4 * each, 136, 256
    config = choose_grouped(shape, 8, "nvfp4", Epilogue(BFLOAT16, tma_store=True), promotes=True)
    grouped(config, EDGES[:6], 136, 256, 3, "random")


@pytest.mark.parametrize("seed", range(10))
def test_random_groupings(seed):
    rng = random.Random(seed)
    config = replace(SMALL, grouping="m")
    for _ in range(2):
        sizes = [rng.choice((0, 1, 2, 31, 33, 63, 65)) for _ in range(rng.randint(1, 5))]
        rest = rng.choice((0, 0, 1, 66)) or not sum(sizes)
        grouped(config, tuple(sizes), 72, 256, rest, "random", rng.randint(1, 5))


# --- mutants --------------------------------------------------------------------------------------


def _other_scales(method):
    """Those of the rows after."""
    return lambda self, target, first, *rest: method(self, target, first + 1, *rest)


def _unscaled(method):
    def promote(self, acc, factors):
        method(self, acc, [[_one(x) for x in pair] for pair in factors])

    return promote


def _one(x):
    """1, whatever ``x`` is, so that it is still read."""
    return x * 0.0 + 1.0


def _kept(method):
    """Sums of the K block before are added to."""

    def products(self, acc, stage, half, fragments, keeps=True):
        method(self, acc, stage, half, fragments)

    return products


MUTANTS = {
    "scales of other rows": (mixed.ScaleLoader, "load_a", _other_scales),
    "sums that are not scaled": (Mainloop, "promote", _unscaled),
    "sums that are added twice": (Mainloop, "products", _kept),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    owner, method, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, method, mutant(getattr(owner, method)))
    # a configuration that no other test builds
    assert caught(lambda: product(replace(SMALL, stages=5), 70, 72, 384))


# --- dispatch -------------------------------------------------------------------------------------


@pytest.fixture
def launches():
    with emulated("sm_90a") as launched:
        yield launched


def names(launches: list) -> list[str]:
    return [type(each).__name__ for each in launches]


MIXED = "PermuteConfig"  # and the product, by a configuration whose name others have, too
CASES = pytest.mark.parametrize(
    ("weights", "m", "config"),
    [("mxfp4", 168, "UpcastConfig"), ("mxfp4", 34, MIXED), ("nvfp4", 34, MIXED)],
)


@CASES
@pytest.mark.parametrize(("left", "right"), [
    ("sm90", "compact"), ("compact", "compact"), ("sm90", "tcgen05"),
])  # fmt: skip
def test_layouts(launches, weights, m, config, left, right):
    """Calls alike are looked up where nothing is rewritten; a padded contraction, too."""
    a = bs.quantize(matrix(m, 288), "fp8_1x128", layout=left, pad=True)
    b = bs.quantize(matrix(136, 288, seed=1), weights, layout=right).mT
    want = a.dequantize(torch.float64)[:, :288] @ b.dequantize(torch.float64)
    for _ in range(2):
        assert_close(bs.gemm(a, b, backend="kernel"), want, BF16)
    bias = matrix(136, seed=2)
    out = torch.ones(m, 136)
    bs.gemm(a, b, out=out, accumulate=True, bias=bias)
    assert_close(out, want + 1 + bias.double(), FP32)
    assert names(launches).count(config) == 3
    assert len(launches) == 2 * 3


@CASES
def test_groups_and_batches(launches, weights, m, config):
    a = bs.quantize(matrix(3 * m, 256), "fp8_1x128", layout="sm90")
    b = bs.quantize(matrix(3, 136, 256, seed=1), weights).mT
    ends = torch.tensor([7, 7, 3 * m - 20], dtype=torch.int32)
    for _ in range(2):
        got = bs.grouped_gemm(a, b, ends, FP32, backend="kernel")
        want = bs.grouped_gemm(a, b, ends, FP32, backend="reference").double()
        assert_close(got[: ends[-1]], want[: ends[-1]], FP32)
        assert not got[ends[-1] :].any()
    counts = torch.tensor([5, 0, m], dtype=torch.int32)
    masked = bs.grouped_gemm(a, b, counts=counts, out_dtype=FP32, backend="kernel")
    want = bs.grouped_gemm(a, b, counts=counts, out_dtype=FP32, backend="reference")
    for i, count in enumerate(counts.tolist()):
        mine = slice(m * i, m * i + count)
        if count:
            assert_close(masked[mine], want[mine].double(), FP32)
    assert names(launches).count(config) == 3


@CASES
def test_dgrad(launches, weights, m, config):
    """Columns of weights, of one matrix and of a batch."""
    a = bs.quantize(matrix(m, 256), "fp8_1x128", layout="sm90")
    one = bs.quantize(matrix(256, 136, seed=1), weights, axis=-2)
    want = a.dequantize(torch.float64) @ one.dequantize(torch.float64)
    assert_close(bs.gemm(a, one, backend="kernel"), want, BF16)
    batch = bs.quantize(matrix(1, 256, 136, seed=1), weights, axis=-2)
    ends = torch.tensor([m - 4], dtype=torch.int32)
    got, want = (
        bs.grouped_gemm(a, batch, ends, FP32, backend=each) for each in ("kernel", "reference")
    )
    assert_close(got, want.double(), FP32)
    assert names(launches).count(config) == 2


@CASES
def test_recipe(launches, weights, m, config):
    """A layer's three products by kernels: weights of 4 bits, activations and gradients of 8."""
    layer = torch.nn.Linear(256, 384, dtype=BF16)
    layer = bs.convert(torch.nn.Sequential(layer), bs.Recipe("fp8_1x128", weights=weights))
    x = matrix(256 if m > 160 else 128, 256).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        layer(x).float().square().sum().backward()
    assert names(launches).count(config) == 2  # wgrad is FP8's
    assert bool(x.grad.isfinite().all())


@CASES
def test_weights_that_change(launches, weights, m, config):
    """Nothing of a weight is kept: scales written in place are those of the next product."""
    a = bs.quantize(matrix(m, 256), "fp8_1x128", layout="sm90")
    q = bs.quantize(matrix(136, 256, seed=1), weights)
    bs.gemm(a, q.mT, backend="kernel")
    q.copy_(bs.quantize(1000 * matrix(136, 256, seed=2), weights))
    want = a.dequantize(torch.float64) @ q.dequantize(torch.float64).T
    assert_close(bs.gemm(a, q.mT, backend="kernel"), want, BF16)


def test_not_numbers(launches):
    """A NaN of FP8, of its scales and of those of weights."""
    x, w = matrix(40, 256), matrix(136, 256, seed=1)
    x[3, 7], w[130, 5] = torch.nan, torch.nan
    for weights in ("nvfp4", "mxfp4"):
        a, b = bs.quantize(x, "fp8_1x128", layout="sm90"), bs.quantize(w, weights).mT
        a.qscale[1, 20] = torch.nan
        got, want = (bs.gemm(a, b, FP32, backend=each) for each in ("kernel", "reference"))
        assert torch.equal(got.isnan(), want.isnan())
        assert bool(want[20].isnan().all())
        finite = ~want.isnan()
        assert_close(got[finite], want[finite].double(), FP32)


def test_nan_stays_in_its_group(launches):
    ends = torch.tensor([30, 100, 140], dtype=torch.int32)
    x, b = matrix(150, 256), bs.quantize(matrix(3, 72, 256, seed=1), "nvfp4").mT
    clean = bs.grouped_gemm(bs.quantize(x, "fp8_1x128"), b, ends, backend="kernel")
    x[30:100], x[140:] = torch.nan, torch.nan
    got = bs.grouped_gemm(bs.quantize(x, "fp8_1x128"), b, ends, backend="kernel")
    assert bool(got[30:100].isnan().all())
    assert torch.equal(got[:30], clean[:30])
    assert torch.equal(got[100:], clean[100:])


def test_no_kernel(launches):
    a, b = (bs.quantize(matrix(136, 256), each) for each in ("fp8_1x128", "mxfp4"))
    with pytest.raises(ValueError, match="'mxfp4' and 'fp8_1x128' cannot"):
        bs.gemm(b, a.mT)
    with pytest.raises(ValueError, match="'fp8_128x128' and 'nvfp4' cannot"):
        bs.gemm(
            bs.quantize(matrix(128, 256), "fp8_128x128"), bs.quantize(matrix(136, 256), "nvfp4").mT
        )


# --- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"rows": 192, "stages": 5}, {"warpgroup_split_k": 2}])
def test_no_such_config(wrong):
    with pytest.raises(ValueError, match="promotes"):
        replace(SMALL, **wrong)


def test_choice():
    """Tiles for which a thread has registers, and a CTA shared memory."""
    for m in (1, 9, 40, 100, 300, 5000, 40000):
        for n, k in ((72, 64), (576, 7168), (7168, 16384)):
            config = choose_config((m, n, k), "nvfp4", Epilogue(FLOAT32), promotes=True)
            assert config.rows <= 128
            assert config.shared_bytes <= 227 * 1024
