"""FP8 by MXFP4 for Hopper, run in the emulator: lists of K blocks against what they should be, and
products against fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from grouped_inputs import caught
from guarded import guarded
from sm90_inputs import BF16, FP32, WGMMA, assert_no_spills, launched

from blockscale import emulator as em
from blockscale.dtypes import BFLOAT16, FLOAT32
from blockscale.kernels.common import compile_cache
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.sm90 import k_blocks, k_blocks_kernel, upcast_roles
from blockscale.kernels.sm90.upcast_config import (
    PASSES,
    TILINGS,
    KBlocksConfig,
    UpcastConfig,
    list_length,
    upcast_candidates,
)
from blockscale.kernels.sm90.upcast_mainloop import UpcastMainloop
from blockscale.layouts import get_layout

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = UpcastConfig(BFLOAT16, tile=(64, 128), stages=3, warpgroups=1, mma_n=128, epilogue_stages=1)
EDGES = 5, 0, 130, 64, 1, 0, 31, 33, 127, 129
SPREADS = 0, 4, 20


def weights(n: int, k: int, spread: float, zeros: float = 0.0, seed: int = 0):
    """MXFP4 (N, K) of any bytes, the exponents of whose scales have deviation ``spread``; some
    blocks are zeros, with scales of any size."""
    generator = torch.Generator().manual_seed(seed + n + k)
    data = torch.randint(256, (n, k // 2), generator=generator, dtype=torch.uint8)
    blocks = -(-k // 32)
    scale = 127 + torch.randn(n, blocks, generator=generator) * spread
    nothing = torch.rand(n, blocks, generator=generator) < zeros
    data = data.masked_fill(nothing.repeat_interleave(16, 1)[:, : k // 2], 0x80)
    scale = scale.where(~nothing, torch.randint(255, nothing.shape, generator=generator))
    return data, scale.round().clamp(0, 254).to(torch.uint8)


def values(data: Tensor, scale: Tensor) -> Tensor:
    """In fp64."""
    k = 2 * data.shape[1]
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    power = torch.exp2(scale.double() - 127).masked_fill(scale == 255, torch.nan)
    return torch.cat((e2m1, -e2m1))[codes] * power.repeat_interleave(32, 1)[:, :k]


def activations(m: int, k: int) -> tuple[Tensor, Tensor]:
    """E4M3 (M, K), and scales of 1 x 128."""
    generator = torch.Generator().manual_seed(m + k)
    a = (100 * torch.randn(m, k, generator=generator)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return a, torch.exp2(torch.randn(m, -(-k // 128), generator=generator) * 2)


def listed(data: Tensor, scale: Tensor, n: int, whole: bool) -> tuple[Tensor, Tensor]:
    """What the kernel leaves in poisoned memory: scales in tiles, and lists of K blocks."""
    k, lists = 2 * data.shape[1], len(data) // n * -(-n // 128)
    blocks = -(-k // 128)
    with guarded((lists, blocks * 128), torch.int32, None) as tiles:  # noqa: SIM117
        with guarded((lists, list_length(k)), torch.int32, None) as entries:
            with em.cutedsl(em.Device("sm_90a", completion="late", check="all,global")):
                compile_cache.build(KBlocksConfig(whole))(data, scale, n, tiles, entries)
            return tiles.clone(), entries.clone()


def expected(data: Tensor, scale: Tensor) -> list[list[tuple[int, int]]]:
    """K block and highest exponent of each pass of 128 rows: of 32 K blocks, first ones, then
    others."""
    first, others = [], []
    full = (data.unflatten(1, (-1, 16)) & 0x77).bool().any(-1)
    for k_block, (full_here, here) in enumerate(
        zip(full.split(4, 1), scale.int().split(4, 1), strict=True)
    ):
        known = here[here < 255]
        if len(known) and known.max() > 191:  # zeros do not count
            known = here[(here < 255) & full_here]
        highest = int(known.max()) if len(known) else 0
        first.append((k_block, highest))
        others.append([])
        while True:
            left = here[(here < highest - 14) & full_here]
            if not len(left):
                break
            highest = int(left.max())
            others[-1].append((k_block, highest))
    return [
        first[i : i + 32] + [each for some in others[i : i + 32] for each in some]
        for i in range(0, len(first), 32)
    ]


def product(
    config: UpcastConfig,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    n: int = 0,
    *,
    ends: Tensor | None = None,
    start: Tensor | None = None,
    completion: str = "late",
    seed: int = 0,
    multiprocessors: int = 2,
) -> Tensor:
    """What both kernels leave in poisoned memory."""
    (data, a_scale), (b_data, b_scale) = a, b
    n, k = n or len(b_data), 2 * b_data.shape[1]
    whole = k % 128 == 0
    tiles, entries = listed(b_data, b_scale, n, whole)
    operands = data.view(torch.uint8), get_layout("sm90").swizzle(a_scale), b_data, tiles, entries
    rest = None, None, ends, None if ends is None else 2, multiprocessors
    shape = len(data), n
    return launched(config, shape, operands, start, rest, completion, seed)


def exact(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    data, scale = a
    wide = scale.double().repeat_interleave(128, 1)[:, : data.shape[1]]
    return (data.double() * wide) @ values(*b).T


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """The error is that of rounding, and of sums of products; some few values are the largest by
    far, whose errors are no mean."""
    assert bool(torch.isfinite(got).all())
    rounding = (want.to(dtype).double() - want).norm() / want.norm()
    error = (got.double() - want).norm() / want.norm()
    assert error <= 1.1 * (rounding**2 + WGMMA**2) ** 0.5


# --- lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "spread", "zeros"),
    [(128, 512, 0, 0), (136, 4352, 3, 0.1), (40, 96, 60, 0.5), (300, 1568, 20, 0.2),
     (8, 32, 0, 1)],
)  # fmt: skip
def test_lists(n, k, spread, zeros):
    data, scale = weights(n, k, spread, zeros)
    scale[3, 0] = 255  # NaN, which no pass is made for
    check_lists(data, scale)


def check_lists(data: Tensor, scale: Tensor) -> None:
    (n, _), k = data.shape, 2 * data.shape[1]
    tiles, entries = listed(data, scale, n, k % 128 == 0)
    want_tiles = get_layout("tcgen05").swizzle(scale).view(torch.int32)
    assert torch.equal(tiles, want_tiles.view(tiles.shape))
    for row, part, exponents in zip(entries, data.split(128), scale.split(128), strict=True):
        parts = expected(part, exponents)
        for i, (found, want) in enumerate(zip(row.split(32 * PASSES), parts, strict=True)):
            words = found[: len(want)]
            ends = [(word & 0x20000000 != 0, word < 0) for word in words.tolist()]
            assert ends == [(False, False)] * (len(want) - 1) + [(True, i == len(parts) - 1)]
            passes = words.long() & 0x1FFFFFFF
            assert list(zip((passes >> 8).tolist(), (passes & 255).tolist(), strict=True)) == want
            check_normal(words.tolist(), want, exponents)


def check_normal(words: list[int], want: list[tuple[int, int]], scale: Tensor) -> None:
    """First passes all of whose scales are within reach say so, but one that ended before others
    were listed."""
    first = len({k_block for k_block, _ in want})
    for i, (word, (k_block, highest)) in enumerate(zip(words, want, strict=True)):
        here = scale[:, 4 * k_block : 4 * k_block + 4].int()
        near = bool(((here >= highest - 11) & (here <= highest)).all())
        ended = i == first - 1 < len(want) - 1
        normal = near and here.shape == (128, 4) and i < first and not ended
        assert bool(word & 0x40000000) == normal, (k_block, highest)


def test_all_nan():
    data, scale = weights(4, 128, 0)
    entries = listed(data, torch.full_like(scale, 255), 4, True)[1]
    assert int(entries[0, 0]) == -(2**31) + 2**29


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0, 5, 14, 15, 40, 254])
def test_every_weight(span):
    """Each element by scales that span so much: one row of A is the identity's, so all is exact."""
    generator = torch.Generator().manual_seed(span)
    data, _ = weights(128, 128, 0)
    top = 254 if span == 254 else 140
    scale = torch.randint(top - span, top + 1, (128, 4), generator=generator).to(torch.uint8)
    scale[0, :2] = torch.tensor([top - span, top])
    a = torch.eye(128).to(torch.float8_e4m3fn), torch.ones(128, 1)
    config = replace(SMALL, out_dtype=FLOAT32)
    got = product(config, a, (data, scale))
    assert torch.equal(got.double(), values(data, scale).T.float().double())


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("each", TILINGS, ids=lambda each: str(each.config.tile[0]))
def test_tilings(each, spread):
    """Tails in M, N and K; zeros by scales of any size; scales that one pass has, and not."""
    a, b = activations(270, 288), weights(136, 288, spread, zeros=0.1)
    got = product(each.config, a, b, completion="random")
    assert_close(got, exact(a, b), BF16)
    assert_no_spills(each.config)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_completions(completion):
    a, b = activations(130, 416), weights(136, 416, 10)
    got = [product(SMALL, a, b, completion=completion, seed=seed) for seed in range(2)]
    assert_close(got[0], exact(a, b), BF16)
    assert torch.equal(*got)


@pytest.mark.parametrize(
    "config",
    [replace(SMALL, tma_store=False), replace(SMALL, out_dtype=FLOAT32),
     replace(SMALL, loaded_rows=8)],
    ids=["one by one", "fp32", "few rows"],
)  # fmt: skip
def test_epilogues(config):
    a = activations(5 if config.loaded_rows else 70, 256)
    b = weights(133 if not config.tma_store else 136, 256, 2)
    got = product(config, a, b)
    assert_close(got, exact(a, b), FP32 if config.out_dtype == FLOAT32 else BF16)


def test_not_numbers():
    """A NaN scale is that of 32 elements, zeros too; NaN of A that of a row."""
    a, (data, scale) = activations(70, 256), weights(136, 256, 20)
    data[5] = 0
    scale[5, 3] = 255
    a[0].view(torch.uint8)[9, 200] = 0x7F
    got = product(SMALL, a, (data, scale))
    want = exact(a, (data, scale))
    assert torch.equal(got.isnan(), want.isnan())
    assert bool(got[:, 5].isnan().all())
    clean = ~want.isnan()
    error = (got[clean].double() - want[clean]).norm() / want[clean].norm()
    assert error < 2**-8


# --- groups ---------------------------------------------------------------------------------------


def check_groups(
    config: UpcastConfig, sizes: Sequence[int], n: int, k: int, rest: int = 0, **how
) -> Tensor:
    """Weights of groups span less or more; the rest is zero."""
    m = sum(sizes) + rest
    a = activations(m, k)
    b = [weights(n, k, SPREADS[i % 3], zeros=0.05, seed=i) for i in range(len(sizes))]
    ends = torch.tensor(sizes).cumsum(0).int()
    all_b = tuple(torch.cat(each) for each in zip(*b, strict=True))
    got = product(config, a, all_b, n, ends=ends, **how)
    for each, (begin, end) in zip(b, pairwise([0, *ends.tolist()]), strict=True):
        if begin < end:
            rows = a[0][begin:end], a[1][begin:end]
            assert_close(got[begin:end], exact(rows, each), BF16)
    assert bool((got[sum(sizes) :] == 0).all())
    return got


GROUPED = replace(SMALL, grouping="m")


@pytest.mark.parametrize(
    "config", upcast_candidates((32768, 4096, 7168), Epilogue(), groups=8, grouping="m"),
    ids=lambda each: str(each.tile[0]),
)  # fmt: skip
def test_group_candidates(config):
    check_groups(config, EDGES, 136, 160, rest=70, completion="random")
    assert_no_spills(config)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_group_completions(completion):
    given = GROUPED, (66, 3, 130), 136, 256, 1
    got = [check_groups(*given, completion=completion, seed=seed) for seed in range(2)]
    assert torch.equal(*got)


@pytest.mark.parametrize(
    ("sizes", "rest"), [((0, 200, 0), 0), ((1,) * 40, 3), ((0,) * 40 + (65,), 0), ((0, 0), 130)]
)
def test_extremes(sizes, rest):
    check_groups(GROUPED, sizes, 72, 128, rest)


@pytest.mark.parametrize("seed", range(10))
def test_random_groupings(seed):
    rng = random.Random(seed)
    for _ in range(3):
        sizes = [rng.choice((0, 1, 2, 31, 33, 63, 64, 65, 100)) for _ in range(rng.randint(1, 5))]
        rest = rng.choice((0, 0, 1, 66)) or not sum(sizes)
        check_groups(GROUPED, sizes, 72, 128, rest, multiprocessors=rng.randint(1, 5))


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_masked(completion):
    """Rows from a group's count on are not written."""
    config, counts, capacity = replace(SMALL, grouping="masked"), (3, 0, 70, 90), 80
    a, b = activations(4 * capacity, 256), weights(4 * 136, 256, 8)
    start = torch.full((4 * capacity, 136), 7.0, dtype=BF16)
    ends = torch.tensor(counts, dtype=torch.int32)
    got = product(config, a, b, 136, ends=ends, start=start, completion=completion)
    for i, count in enumerate(counts):
        own, last = slice(i * 136, i * 136 + 136), i * capacity + min(count, capacity)
        rows = slice(i * capacity, last)
        assert bool((got[last : (i + 1) * capacity] == 7).all())
        if count:
            want = exact(tuple(x[rows] for x in a), tuple(x[own] for x in b))
            assert_close(got[rows], want, BF16)


# --- mutants --------------------------------------------------------------------------------------


def _other_list(lists, tile):
    return INDEX(lists, tile) ^ 1


def _twice(exponent):
    return POWER(exponent + 1)


def _signed(mainloop, factor):
    return [[-each for each in pair] for pair in SCALED(mainloop, factor)]


SCALED = UpcastMainloop.scaled
INDEX, POWER = k_blocks.KBlocks.index, upcast_roles._power_of_two
MUTANTS = {
    "a pass takes one exponent more": (k_blocks_kernel, "_SPAN", 15),
    "a pass takes one exponent less": (k_blocks_kernel, "_SPAN", 13),
    "another list": (k_blocks.KBlocks, "index", _other_list),
    "no last entry": (k_blocks_kernel, "LAST", 0),
    "all are normal": (k_blocks_kernel, "LEAST_NORMAL", -200),
    "a factor of twice as much": (upcast_roles, "_power_of_two", _twice),
    "a factor's sign": (UpcastMainloop, "scaled", _signed),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    a, b = activations(40, 256), weights(136, 256, 20)

    def check() -> None:
        check_lists(*b)
        assert_close(product(SMALL, a, b, multiprocessors=1), exact(a, b), BF16)

    assert not caught(check)
    monkeypatch.setattr(*MUTANTS[mutant])
    assert caught(check)


# --- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"tile": (64, 64), "mma_n": 64}, {"cluster": (2, 1)}, {"grouping": "k"}, {"stages": 9}],
)
def test_no_such_config(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SMALL, **wrong)


def test_choice():
    """Few rows take small tiles, many large ones; where rows are grouped the mean counts."""

    def rows(m, **groups):
        return upcast_candidates((m, 4096, 7168), Epilogue(), **groups)[0].tile[0]

    assert rows(64) == 64
    assert rows(8192) == 256
    assert rows(32768, groups=8, grouping="m") == 256
    assert rows(4096, groups=128, grouping="m") == 64
