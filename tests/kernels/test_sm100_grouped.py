"""Products of groups for Blackwell, run in the emulator: bit for bit what the arithmetic of its
tensor cores makes of each group."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from grouped_inputs import caught
from kernel_code import built
from sm90_inputs import frame_bytes
from sm100_groups import (
    PAIR,
    check_columns,
    check_random,
    check_rows,
    columns,
    config,
    rows,
    same,
    with_offsets,
)
from sm100_inputs import BF16, FP32

import blockscale as bs
from blockscale.dtypes import FLOAT16, FLOAT32
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.grouped_tiles import RowGroups
from blockscale.kernels.sm100.config import choose_grouped, supergroup
from blockscale.kernels.sm100.epilogue import Epilogue as Stores
from blockscale.kernels.sm100.grouped_scheduler import GroupedTiles, KGroupedTiles
from stand_in import chip, emulated, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

WIDE = {"mma_n": 256, "epilogue_stages": 1}
EDGES = (0, 1, 31, 33, 127, 129, 0)  # rows or columns of groups
FORMATS = [
    ("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp4"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"),
]  # fmt: skip


@pytest.mark.parametrize("fields", [{}, PAIR, PAIR | WIDE], ids=["1 CTA", "2 CTAs", "256 x 256"])
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_rows(formats, fields):
    """Sizes about multiples of a tile, K blocks with a tail, rows after the last group."""
    k = 256 if "mxfp8_e5m2" in formats else 352
    found = config(formats, "m", **fields)
    check_rows(found, rows(formats, EDGES, 136, k, rest=3))
    assert set(frame_bytes(built(found).__cubin__)) == {0}


@pytest.mark.parametrize("fields", [{}, PAIR], ids=["1 CTA", "2 CTAs"])
@pytest.mark.parametrize("capacity", [16, 144])
def test_masked(capacity, fields):
    counts = [min(each, capacity) for each in (0, 1, 16, 130, 5)]
    found = config(("nvfp4", "nvfp4"), "masked", **fields)
    check_rows(found, rows(("nvfp4", "nvfp4"), counts, 136, 288, capacity=capacity))
    assert set(frame_bytes(built(found).__cubin__)) == {0}


@pytest.mark.parametrize("fields", [{}, PAIR, PAIR | WIDE], ids=["1 CTA", "2 CTAs", "256 x 256"])
@pytest.mark.parametrize("formats", FORMATS[:1] + FORMATS[2:], ids="-".join)
def test_columns(formats, fields):
    """Of 4 bits a K block may be of two groups, of which one is left out."""
    found = config(formats, "k", **fields)
    check_columns(found, columns(formats, (0, 32, 300, 128, 0, 416, 64), 72, 136, rest=40))
    assert set(frame_bytes(built(found).__cubin__)) == {0}


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("seed", range(2))
def test_completions(completion, seed):
    how = {"completion": completion, "seed": seed, "resident": 2 + 2 * seed}
    formats = "nvfp4", "nvfp4"
    check_rows(config(formats, "m", **PAIR), rows(formats, (70, 0, 200), 264, 288, rest=1), **how)
    masked = rows(formats, (20, 0, 33), 264, 288, capacity=33)
    check_rows(config(formats, "masked"), masked, **how)
    given = columns(formats, (70, 0, 200), 136, 136)
    check_columns(config(formats, "k"), given, **how)
    check_columns(config(formats, "k", FLOAT32, accumulate=True, **PAIR), given, **how)


@pytest.mark.parametrize("fields", [
    {"dtype": FLOAT32}, {"dtype": FLOAT16}, {"tma_store": False}, {"dtype": FLOAT32} | PAIR,
])  # fmt: skip
def test_epilogues_of_rows(fields):
    formats = "mxfp8", "mxfp8"
    n = 136 if fields.get("tma_store", True) else 131
    check_rows(config(formats, "m", **fields), rows(formats, (5, 129, 64), n, 144, rest=5))


@pytest.mark.parametrize("fields", [
    {"accumulate": True}, {"dtype": FLOAT32, "accumulate": True}, {"dtype": FLOAT16},
    {"tma_store": False}, {"dtype": FLOAT32, "accumulate": True, "tma_store": False},
])  # fmt: skip
def test_epilogues_of_columns(fields):
    """Outputs end within a tile, and the next one's rows follow."""
    formats = "mxfp8", "mxfp8"
    n = 136 if fields.get("tma_store", True) else 131
    check_columns(config(formats, "k", **fields), columns(formats, (5, 129, 0, 64), 150, n))


@pytest.mark.parametrize(("sizes", "rest"), [
    ((300,), 0), ((0, 300, 0), 0), ((0, 0), 130), ((0,), 1), ((1,) * 40, 3), ((0,) * 37 + (9,), 0),
])  # fmt: skip
def test_extremes(sizes, rest):
    """All in one group, none in any, more groups than lanes."""
    formats = "mxfp8", "mxfp8"
    check_rows(config(formats, "m"), rows(formats, sizes, 24, 144, rest), completion="random")
    if sum(sizes):
        given = columns(formats, sizes, 16, 24, rest)
        check_columns(config(formats, "k"), given, completion="random")


def test_tiles_come_in_any_order():
    """Cluster launch control need not give clusters in order: a warp that looks for their groups
    has to go back."""
    formats, sizes = ("mxfp8", "mxfp8"), (3, 130, 1, 0) * 20
    given = rows(formats, sizes, 24, 32)
    for seed in range(3):
        check_rows(config(formats, "m"), given, completion="random", seed=seed, resident=3)


@pytest.mark.parametrize("seed", range(12))
def test_random_groupings(seed):
    """``benchmarks/sm100_groupings.py`` runs 200 of them."""
    assert check_random(random.Random(seed), seed)


def test_200_groupings_were_right():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "sm100_groupings.json"
    found = json.loads(path.read_text())
    assert found["runs"] == found["right"] == 200


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("part", ["codes", "scales"])
def test_nan_stays_in_its_group(operand, part):
    formats, nan = ("mxfp8", "mxfp8"), {"codes": 0x7F, "scales": 0xFF}[part]
    given = rows(formats, (5, 60, 130), 24, 144, rest=9)
    spoiled = getattr(given.a if operand == "a" else given.bs[1], part)
    spoiled[slice(5, 65) if operand == "a" else slice(None)] = nan
    got = given.emulated(config(formats, "m"))
    assert bool(got[5:65].isnan().all())
    assert not bool(got[:5].isnan().any() or got[65:].isnan().any())
    assert same(got, given.product(BF16))
    given = columns(formats, (5, 60, 130), 16, 24)
    getattr(getattr(given, operand)[1], part).fill_(nan)
    got = given.emulated(config(formats, "k")).view(3, 16, 24)
    assert bool(got[1].isnan().all())
    assert not bool(got[::2].isnan().any())


@pytest.mark.parametrize("offsets", [(5, 3, 135), (5, -9, 9999), (5, 5, 2**31 - 1)])
def test_offsets_that_no_host_has_seen(offsets):
    """One that decreases or overruns is taken for the nearest that does not."""
    formats = "mxfp8", "mxfp8"
    given = rows(formats, (5, 0, 130), 24, 144)
    check_rows(config(formats, "m"), with_offsets(given, *offsets))
    given = columns(formats, (5, 0, 130), 16, 24)
    check_columns(config(formats, "k"), with_offsets(given, 5, 5, 135))


def test_counts_beyond_the_capacity():
    formats = "mxfp8", "mxfp8"
    given = rows(formats, (5, 0, 16), 24, 144, capacity=16)
    check_rows(config(formats, "masked"), with_offsets(given, 5, -3, 9999))


# --- mutants --------------------------------------------------------------------------------------


def _end_early(tiles, *given):
    begin, end = BOUNDS(tiles, *given)
    return begin, end - 1


def _begin_early(tiles, *given):
    begin, end = BOUNDS(tiles, *given)
    return begin - 1, end


def _next_tile(tiles, index, *given):
    return FOUND(tiles, index + 1, *given)


def _late_end(tiles, words):
    tile = TILE(tiles, words)
    return replace(tile, end=tile.end + 1)


def _wrong_scales(tiles, *given):
    row, word, scales, end = FOUND(tiles, *given)
    return [row, word, scales + 1, end]


def _wrong_matrix(tiles, words):
    tile = TILE(tiles, words)
    return replace(tile, starts=(tile.starts[0], tile.starts[1] + 8))


def _no_bound(stores, values, d, row, column, end):
    return STORE(stores, values, d, row, column, end + 1)


def _part_of_k(begin, end):
    def found(tiles, *given):
        *where, k_begin, k_end = K_FOUND(tiles, *given)
        return [*where, k_begin + begin, k_end + end]

    return found


def _tile_less(tiles, *given):
    return DOWN(tiles, *given) - 1


def _k_late_end(tiles, words):
    tile = K_TILE(tiles, words)
    return replace(tile, end=tile.end + 1)


BOUNDS, STORE = RowGroups.bounds, Stores.store_rows
FOUND, TILE = GroupedTiles.found, GroupedTiles.tile
K_FOUND, K_TILE, DOWN = KGroupedTiles.found, KGroupedTiles.tile, KGroupedTiles.down_of
ROW_MUTANTS = {
    "wrong bound": (RowGroups, "bounds", _end_early),
    "next tile": (GroupedTiles, "found", _next_tile),
    "scales of the next tile": (GroupedTiles, "found", _wrong_scales),
    "another group's matrix": (GroupedTiles, "tile", _wrong_matrix),
    "a group ends late": (GroupedTiles, "tile", _late_end),
    "tail stored past its group": (Stores, "store_rows", _no_bound),
}
COLUMN_MUTANTS = {
    "wrong bound": (RowGroups, "bounds", _begin_early),
    "a tile of K is left out": (KGroupedTiles, "found", _part_of_k(0, -1)),
    "a tile of K of another group": (KGroupedTiles, "found", _part_of_k(0, 1)),
    "a tile of K too early": (KGroupedTiles, "found", _part_of_k(-1, 0)),
    "a tile is left out": (KGroupedTiles, "down_of", _tile_less),
    "a group ends late": (KGroupedTiles, "tile", _k_late_end),
}


@pytest.mark.parametrize("mutant", ROW_MUTANTS)
def test_mutants_of_rows_are_caught(mutant, monkeypatch):
    formats = "nvfp4", "nvfp4"
    given = rows(formats, (5, 130, 64), 72, 160, rest=3)
    found = config(formats, "m")
    assert not caught(lambda: check_rows(found, given))
    monkeypatch.setattr(*ROW_MUTANTS[mutant])
    assert caught(lambda: check_rows(found, given))


@pytest.mark.parametrize("mutant", COLUMN_MUTANTS)
def test_mutants_of_columns_are_caught(mutant, monkeypatch):
    formats = "nvfp4", "nvfp4"
    given = columns(formats, (128, 64, 256, 34), 72, 40, rest=3)
    found = config(formats, "k")
    assert not caught(lambda: check_columns(found, given))
    monkeypatch.setattr(*COLUMN_MUTANTS[mutant])
    assert caught(lambda: check_columns(found, given))


# --- bs.grouped_gemm ------------------------------------------------------------------------------


@pytest.fixture
def launches():
    with emulated("sm_100a") as launched:
        yield launched


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """As far as sums in another order are, and one rounding to bf16."""
    return bool((got.double() - want.double()).norm() <= 2e-3 * want.double().norm())


ENDS = torch.tensor([5, 5, 140, 200], dtype=torch.int32)


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[3], ("mxfp8", "mxfp4")], ids="-".join)
def test_dispatch(launches, formats):
    """Scales of A in any layout, with the same bits; those of the groups are not rewritten."""
    x, w = matrix(203, 256), matrix(4, 40, 256, seed=1)
    b = bs.quantize(w, formats[1]).mT
    found = []
    for how in ({}, {"layout": "tcgen05"}, {"layout": "tcgen05", "offsets": ENDS}):
        a = bs.quantize(x, formats[0], **how)
        found.append(bs.grouped_gemm(a, b, ENDS, backend="kernel"))
        assert launches[-1].grouping == "m"
        assert close(found[0], bs.grouped_gemm(a, b, ENDS, backend="reference"))
        other = torch.tensor([9, 9, 30, 203], dtype=torch.int32)  # not those it was quantized for
        if "offsets" in how:
            with pytest.raises(ValueError, match=r"offsets: differ from those"):
                bs.grouped_gemm(a, b, other, backend="kernel")
            continue
        want = bs.grouped_gemm(a, b, other, backend="reference")[:200]
        assert close(bs.grouped_gemm(a, b, other, backend="kernel")[:200], want)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["tcgen05", "compact"])
def test_gradients_of_weights(launches, format, layout):
    how = {"axis": -2, "offsets": ENDS, "k_major": True, "layout": layout}
    x, g = (bs.quantize(matrix(203, n, seed=n), format, **how) for n in (72, 48))
    want = bs.grouped_gemm(g.mT, x, ENDS, FP32, backend="reference")
    got = bs.grouped_gemm(g.mT, x, ENDS, FP32, backend="kernel")
    assert launches[-1].grouping == "k"
    assert close(got, want)
    out = got.clone()
    bs.grouped_gemm(g.mT, x, ENDS, out=out, accumulate=True, backend="kernel")
    assert launches[-1].reduces
    assert close(out, 2 * want)


def test_masked_dispatch(launches):
    counts = torch.tensor([3, 0, 16, 7], dtype=torch.int32)
    a, b = bs.quantize(matrix(4, 16, 256), "nvfp4"), bs.quantize(matrix(4, 40, 256), "nvfp4").mT
    got = bs.grouped_gemm(a, b, counts=counts, backend="kernel")
    want = bs.grouped_gemm(a, b, counts=counts, backend="reference")
    assert launches[-1].grouping == "masked"
    for i, count in enumerate(counts.tolist()):
        assert close(got[i, :count], want[i, :count])


def test_no_kernel(launches):
    """Says what to do."""
    a, w = bs.quantize(matrix(203, 256)), bs.quantize(matrix(4, 256, 48), axis=-2)
    with pytest.raises(ValueError, match=r"quantize columns .* with k_major=True"):
        bs.grouped_gemm(a, w, ENDS, backend="kernel")
    with pytest.raises(ValueError, match="no kernel multiplies groups of bf16 by mxfp8"):
        bs.grouped_gemm(
            matrix(203, 256), bs.quantize(matrix(4, 48, 256)).mT, ENDS, backend="kernel"
        )
    x, g = (bs.quantize(matrix(203, n), axis=-2, offsets=ENDS) for n in (72, 48))
    with pytest.raises(ValueError, match=r"quantize columns .* with k_major=True"):
        bs.grouped_gemm(g.mT, x, ENDS, backend="kernel")
    assert not launches


def test_choice():
    """Two CTAs where groups have more rows than one takes, and tiles as large as keep all busy."""

    def chosen(*shape, groups):
        return choose_grouped(shape, groups, FORMATS[0], Epilogue())

    gpu = chip("sm_100a")
    large = chosen(4096, 4096, 7168, groups=8)
    assert (large.ctas, large.mma_n) == (2, 256)
    assert supergroup(large, gpu) in (8, 9)
    assert chosen(128, 4096, 7168, groups=256).ctas == 1
    assert chosen(16, 512, 7168, groups=4).mma_n == 128
    with pytest.raises(ValueError, match="grouping"):
        config(FORMATS[0], "m", accumulate=True)
    with pytest.raises(ValueError, match="grouping"):
        config(FORMATS[0], "k", majors=("mn", "k"))
