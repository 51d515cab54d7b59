"""Products of groups of columns (wgrad) for Hopper, in the emulator, against fp64 ones of each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from grouped_inputs import caught
from sm90_inputs import BF16, FP32, WGMMA, assert_no_spills, launched

import blockscale as bs
from blockscale import gemm_launch
from blockscale.dtypes import BFLOAT16, FLOAT16, FLOAT32
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.grouped_tiles import RowGroups
from blockscale.kernels.sm90.config import Config
from blockscale.kernels.sm90.epilogue import Epilogue as Stores
from blockscale.kernels.sm90.grouped_config import k_grouped_candidates
from blockscale.kernels.sm90.k_grouped_tiles import KGroupedTiles
from stand_in import emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = Config(
    BFLOAT16, tile=(64, 64), cluster=(1, 1), stages=3, warpgroups=1, mma_n=64, epilogue_stages=1,
    b_block=(1, 128), grouping="k",
)  # fmt: skip
ADDING = replace(SMALL, out_dtype=FLOAT32, accumulate=True)
EDGES = 5, 0, 130, 64, 1, 0, 31, 33, 127, 129, 300
CANDIDATES = k_grouped_candidates((7168, 4096, 32768), 8, Epilogue())


@dataclass(frozen=True)
class Columns:
    """Columns of ``a`` (T, M) and ``b`` (T, N), as they are quantized, and the ends of groups."""

    a: bs.ScaledTensor
    b: bs.ScaledTensor
    offsets: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.offsets), self.a.shape[1], self.b.shape[1]

    def product(self) -> Tensor:
        """In fp64: (groups, M, N)."""
        a, b = (x.dequantize(torch.float64) for x in (self.a, self.b))
        bounds = pairwise([0, *self.offsets.tolist()])
        return torch.stack([a[start:end].T @ b[start:end] for start, end in bounds])


def columns(sizes: Sequence[int], m: int, n: int, rest: int = 0, spread: float = 1.0) -> Columns:
    """Random; exponents of blocks have deviation ``spread``. Elements of no group are NaN."""
    generator = torch.Generator().manual_seed(sum(sizes) + m + n)
    ends, rows = torch.tensor(sizes).cumsum(0).int(), sum(sizes) + rest

    def quantized(width: int) -> bs.ScaledTensor:
        x = torch.randn(rows, width, generator=generator)
        x = (
            x
            * torch.exp2(torch.randn(rows // 100 + 1, width, generator=generator) * spread)[
                torch.arange(rows) // 100
            ]
        )
        x[sum(sizes) :] = torch.nan
        return bs.quantize(x, "fp8_1x128", -2, layout="sm90", offsets=ends, k_major=True)

    return Columns(quantized(m), quantized(n), ends)


def emulated_columns(
    config: Config,
    given: Columns,
    *,
    completion: str = "late",
    seed: int = 0,
    multiprocessors: int = 3,
    supergroup: int = 4,
    start: Tensor | None = None,
) -> Tensor:
    """What the kernel leaves in poisoned memory, or in that of ``start``."""
    groups, m, n = given.shape
    operands = [
        part
        for q in (given.a, given.b)
        for part in (q.qdata.mT.view(torch.uint8), q.qscale.view(FP32))
    ]
    rest: Any = None, None, given.offsets, supergroup, multiprocessors
    shape = groups * m, n
    flat = None if start is None else start.flatten(0, 1)
    return launched(config, shape, tuple(operands), flat, rest, completion, seed).view(groups, m, n)


def assert_groups_close(got: Tensor, given: Columns, start: Tensor | None = None) -> None:
    """Each group's error is that of rounding, and of sums of FP8; without columns, none."""
    want = given.product()
    if start is not None:
        want = want + start.double()
    for i, (begin, end) in enumerate(pairwise([0, *given.offsets.tolist()])):
        if begin == end:
            assert torch.equal(got[i].double(), want[i]), i
        else:
            rounded = want[i].to(got.dtype).double()
            rounding, error = ((x.double() - want[i]).norm() for x in (rounded, got[i]))
            # near the middle of two values sums of FP8 decide, which the largest ones feel
            assert error <= ((1.1 * rounding) ** 2 + (WGMMA * want[i].norm()) ** 2) ** 0.5


def start_of(given: Columns, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*given.shape, generator=generator).to(dtype)


@pytest.mark.parametrize("i", range(len(CANDIDATES)))
def test_candidates(i):
    """All that may be chosen, every other one added: sizes around those of blocks, tails."""
    config, accumulate = CANDIDATES[i], i % 2 == 0
    if accumulate:
        config = replace(config, out_dtype=FLOAT32, accumulate=True, epilogue_stages=1)
    given = columns((5, 0, 130, 260), 200, 264, rest=70)
    start = start_of(given, FP32) if accumulate else None
    got = emulated_columns(config, given, completion="random", start=start)
    assert_groups_close(got, given, start)
    assert_no_spills(config)


@pytest.mark.parametrize("config", [SMALL, ADDING], ids=["bf16", "added to fp32"])
@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_completions(completion, config):
    given = columns(EDGES, 136, 72, rest=1)
    start = start_of(given, FP32) if config.accumulate else None
    got = [
        emulated_columns(config, given, completion=completion, seed=seed, start=start)
        for seed in range(2)
    ]
    assert_groups_close(got[0], given, start)
    assert torch.equal(*got)


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({"tma_store": False}, 133),
        ({"tma_store": False, "accumulate": True}, 133),
        ({"accumulate": True}, 136),
        ({"out_dtype": FLOAT32}, 136),
        ({"out_dtype": FLOAT16}, 136),
        ({"warpgroups": 2, "warpgroup_split_k": True}, 136),
        ({"cluster": (2, 1)}, 136),
        ({"cluster": (1, 2), "out_dtype": FLOAT32, "accumulate": True}, 136),
        ({"tile": (128, 64), "out_dtype": FLOAT32, "accumulate": True}, 136),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else str(x),
)
def test_epilogues(fields, n):
    config, given = replace(SMALL, **fields), columns((70, 0, 3, 150), 190, n, rest=9)
    dtype = {BFLOAT16: BF16, FLOAT32: FP32, FLOAT16: torch.float16}[config.out_dtype]
    start = start_of(given, dtype) if config.accumulate else None
    assert_groups_close(emulated_columns(config, given, start=start), given, start)


@pytest.mark.parametrize(
    ("sizes", "rest"),
    [((0, 200, 0), 0), ((1,) * 70, 3), ((0,) * 64 + (65,), 0), ((0, 0), 130), ((1,), 0)],
)
def test_extremes(sizes, rest):
    """All in one group, none at all, more groups than lanes, empty ones before others."""
    given = columns(sizes, 72, 40, rest)
    assert_groups_close(emulated_columns(SMALL, given), given)
    start = start_of(given, FP32)
    assert_groups_close(emulated_columns(ADDING, given, start=start), given, start)


@pytest.mark.parametrize("seed", range(10))
def test_random_groupings(seed):
    """Each takes another way through the tiles. (200 others run on a GPU.)"""
    rng = random.Random(seed)
    for i in range(6):
        sizes = [rng.choice((0, 1, 2, 31, 33, 127, 128, 129)) for _ in range(rng.randint(1, 6))]
        given = columns(sizes, 72, 40, rest=rng.choice((0, 0, 1, 66)) or not sum(sizes))
        ways = {"multiprocessors": rng.randint(1, 5), "supergroup": rng.randint(1, 5)}
        config = (SMALL, ADDING)[i % 2]
        start = start_of(given, FP32) if config.accumulate else None
        assert_groups_close(emulated_columns(config, given, start=start, **ways), given, start)


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("part", ["qdata", "qscale"])
def test_nan_stays_in_its_group(where, part):
    given = columns((30, 170, 40), 72, 40)
    clean = emulated_columns(SMALL, given)
    changed = getattr(getattr(given, where), part)
    if part == "qdata":
        changed.view(torch.uint8)[128:384] = 0x7F
    else:
        changed.view(FP32)[1:3] = torch.nan
    got = emulated_columns(SMALL, given)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2], clean[2])


@pytest.mark.parametrize(
    "offsets", [(100, 40, 140), (50, 500, 600), (-7, 20, 10), (2**31 - 1, -(2**31), 0)]
)
def test_offsets_that_no_host_has_seen(offsets):
    """They are not those that were quantized with: nothing outside of the output is written, and
    the emulator finds no access outside of the operands."""
    given = columns((30, 70, 40), 72, 40)
    wrong = replace(given, offsets=torch.tensor(offsets, dtype=torch.int32))
    assert bool(emulated_columns(SMALL, wrong).isfinite().all())


# --- mutants --------------------------------------------------------------------------------------


FOUND, BOUNDS = KGroupedTiles.found, RowGroups.bounds
DOWN, TILE, STORE = KGroupedTiles.down_of, KGroupedTiles.tile, Stores.store


def _one_block_less(tiles, *given):
    row, column, k_begin, k_end = FOUND(tiles, *given)
    return row, column, k_begin, k_end - 1


def _one_block_early(tiles, *given):
    row, column, k_begin, k_end = FOUND(tiles, *given)
    return row, column, k_begin - 1, k_end


def _one_early(tiles, chunk, before):
    begin, end = BOUNDS(tiles, chunk, before)
    return begin - 1, end


def _one_tile_less(tiles, *given):
    return DOWN(tiles, *given) - 1


def _end_is_late(tiles, index):
    tile = TILE(tiles, index)
    return replace(tile, end=tile.end + 8)


MUTANTS = {
    "a block of K is left out": (KGroupedTiles, "found", _one_block_less),
    "a block of K of another group": (KGroupedTiles, "found", _one_block_early),
    "wrong bound": (RowGroups, "bounds", _one_early),
    "a tile is left out": (KGroupedTiles, "down_of", _one_tile_less),
    "tail stored past its group": (KGroupedTiles, "tile", _end_is_late),
}


@pytest.mark.parametrize("config", [SMALL, ADDING], ids=["bf16", "added to fp32"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, config, monkeypatch):
    given = columns((128, 64, 256, 5), 72, 40, rest=3)
    start = start_of(given, FP32) if config.accumulate else None

    def check() -> None:
        got = emulated_columns(config, given, multiprocessors=1, start=start)
        assert_groups_close(got, given, start)

    assert not caught(check)
    monkeypatch.setattr(*MUTANTS[mutant])
    assert caught(check)


# --- bs.grouped_gemm ------------------------------------------------------------------------------


@pytest.fixture
def launches():
    with emulated("sm_90a") as launched:
        yield launched


def quantized(rows: int, width: int, ends: Tensor, layout: str = "sm90", seed: int = 0) -> Any:
    given = {"offsets": ends, "layout": layout, "k_major": True}
    return bs.quantize(matrix(rows, width, seed=seed), "fp8_1x128", -2, **given)


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("layout", ["sm90", "compact"])
@pytest.mark.parametrize("m", [96, 90])
def test_dispatch(launches, layout, m):
    ends = torch.tensor([40, 40, 173], dtype=torch.int32)
    a, b = quantized(200, m, ends, layout), quantized(200, 136, ends, layout, seed=1)
    got = bs.grouped_gemm(a.mT, b, ends, backend="kernel")
    want = bs.grouped_gemm(a.mT, b, ends, FP32, backend="reference")
    assert [each.grouping for each in launches] == ["k"]
    assert got.dtype == BF16
    assert got.shape == (3, m, 136)
    assert not got[1].any()
    assert error(got, want) < 3e-3
    for i, rows in ((0, slice(0, 40)), (2, slice(40, 173))):
        alone = a.dequantize()[rows].float().T @ b.dequantize()[rows].float()
        assert error(want[i], alone) < 3e-3


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_out(launches, dtype, apart):
    """Written, then added to; in memory of its own, or where matrices or rows lie apart."""
    ends = torch.tensor([40, 40, 173], dtype=torch.int32)
    a, b = quantized(200, 64, ends), quantized(200, 136, ends, seed=1)
    want = bs.grouped_gemm(a.mT, b, ends, FP32, backend="reference")
    memory = torch.full((6, 64, 144), 7.0, dtype=dtype)
    out = memory[::2, :, :136] if apart else memory[:3, :, :136].contiguous()
    assert bs.grouped_gemm(a.mT, b, ends, out=out) is out
    assert error(out, want) < 3e-3
    for _ in range(2):  # the second is looked up
        bs.grouped_gemm(a.mT, b, ends, out=out, accumulate=True)
    assert error(out, 3 * want) < 6e-3
    assert len(launches) == 3
    if apart:
        assert bool((memory[1::2] == 7).all())
        assert bool((memory[..., 136:] == 7).all())


def test_calls_alike(launches):
    """The second is looked up, with other values and offsets in the same places; and a product
    without groups of operands that lie as these is not taken for one of them."""
    for seed in range(3):
        ends = torch.tensor([40 + seed, 100 + 20 * seed, 173], dtype=torch.int32)
        a, b = quantized(200, 64, ends, seed=seed), quantized(200, 136, ends, seed=seed + 7)
        got = bs.grouped_gemm(a.mT, b, ends, FP32)
        want = bs.grouped_gemm(a.mT, b, ends, FP32, backend="reference")
        assert error(got, want) < 1e-3
    assert len(gemm_launch._launches) == 1
    assert len(launches) == 3
    one = torch.tensor([100], dtype=torch.int32)
    a, b = quantized(100, 64, one), quantized(100, 136, one)
    plain, other = (
        bs.quantize(matrix(100, n), "fp8_1x128", -2, layout="sm90", k_major=True, pad=True)
        for n in (64, 136)
    )
    assert plain.qdata.stride() == a.qdata.stride()
    for _ in range(2):
        bs.gemm(plain.mT, other, FP32)
        bs.grouped_gemm(a.mT, b, one, FP32)
        with pytest.raises(ValueError, match="use grouped_gemm"):
            bs.gemm(a.mT, b, FP32)
        with pytest.raises(ValueError, match="quantize it with axis=-2 and offsets=offsets"):
            bs.grouped_gemm(plain.mT, other, one, FP32)


def test_no_kernel(launches):
    ends = torch.tensor([40, 64], dtype=torch.int32)
    a = bs.quantize(matrix(64, 96), "mxfp6_e2m3", -2, offsets=ends)
    with pytest.raises(ValueError, match="no kernel multiplies groups along K of mxfp6_e2m3 by"):
        bs.grouped_gemm(a.mT, a, ends, backend="kernel")
    for name in ("fp8_1x128", "mxfp8"):
        a = bs.quantize(matrix(64, 96), name, -2, offsets=ends)
        with pytest.raises(ValueError, match="with k_major=True"):
            bs.grouped_gemm(a.mT, a, ends, backend="kernel")
    assert not launches
