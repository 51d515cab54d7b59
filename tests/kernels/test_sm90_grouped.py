"""Products of grouped rows for Hopper, run in the emulator, against fp64 products of each group."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from grouped_inputs import assert_counted, assert_groups_close, caught, emulated_groups, grouped
from sm90_inputs import BF16, FP32, assert_no_spills

import blockscale as bs
from blockscale import gemm_launch
from blockscale.dtypes import BFLOAT16, FLOAT32
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.grouped_tiles import RowGroups
from blockscale.kernels.sm90 import grouped_scheduler
from blockscale.kernels.sm90.config import Config
from blockscale.kernels.sm90.epilogue import Epilogue as Stores
from blockscale.kernels.sm90.grouped_config import choose_grouped, grouped_candidates, supergroup
from blockscale.ops import backends
from blockscale.tensor_checks import checks_values
from stand_in import emulated, gpu, matrix

pytestmark = pytest.mark.usefixtures("keep_code")

SMALL = Config(
    BFLOAT16, tile=(64, 64), cluster=(1, 1), stages=3, warpgroups=1, mma_n=64, epilogue_stages=1,
    grouping="m",
)  # fmt: skip
EDGES = 5, 0, 130, 64, 1, 0, 31, 33, 127, 129
CANDIDATES = grouped_candidates((32768, 4096, 7168), 8, Epilogue())


@pytest.mark.parametrize("config", CANDIDATES, ids=lambda each: str(each.tile))
def test_candidates(config):
    """All that may be chosen: sizes around those of tiles, tails in N and K, rows of no group."""
    given = grouped(EDGES, 264, 336, rest=70)
    got = emulated_groups(config, given, completion="random")
    assert_groups_close(got, given)
    assert_no_spills(config)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_completions(completion):
    given = grouped((66, 3, 130), 136, 400, rest=1)
    got = [emulated_groups(SMALL, given, completion=completion, seed=seed) for seed in range(2)]
    assert_groups_close(got[0], given)
    assert torch.equal(*got)


@pytest.mark.parametrize("config", [
    replace(SMALL, tma_store=False), replace(SMALL, out_dtype=FLOAT32),
    replace(SMALL, warpgroups=2, warpgroup_split_k=True),
], ids=["one by one", "fp32", "split"])  # fmt: skip
def test_epilogues(config):
    given = grouped((70, 0, 3, 150), 133 if not config.tma_store else 136, 272, rest=9)
    assert_groups_close(emulated_groups(config, given), given)


@pytest.mark.parametrize(
    ("sizes", "rest"),
    [((0, 200, 0), 0), ((1,) * 70, 3), ((0,) * 64 + (65,), 0), ((0, 0), 130)],
)
def test_extremes(sizes, rest):
    """All rows in one group, none at all, more groups than lanes, empty ones before others."""
    given = grouped(sizes, 72, 144, rest)
    assert_groups_close(emulated_groups(SMALL, given), given)


@pytest.mark.parametrize("seed", range(20))
def test_random_groupings(seed):
    """Each takes another way through the tiles."""
    rng = random.Random(seed)
    for _ in range(10):
        sizes = [rng.choice((0, 1, 2, 31, 33, 63, 64, 65, 100)) for _ in range(rng.randint(1, 6))]
        given = grouped(sizes, 72, 144, rest=rng.choice((0, 0, 1, 66)) or not sum(sizes))
        ways = {"multiprocessors": rng.randint(1, 5), "supergroup": rng.randint(1, 5)}
        got = emulated_groups(SMALL, given, **ways)
        assert_groups_close(got, given)


def test_many_stages_ahead():
    """More tiles of a CTA than the ring has slots, of one K block each."""
    given = grouped((64,) * 13, 200, 128)
    for seed in range(3):
        got = emulated_groups(SMALL, given, completion="random", seed=seed, multiprocessors=1)
        assert_groups_close(got, given)


@pytest.mark.parametrize("where", ["a", "a_scale", "b", "b_scale"])
def test_nan_stays_in_its_group(where):
    """Tiles load rows of the groups around theirs, and weights of the next one."""
    given = grouped((30, 70, 40), 72, 144)
    clean = emulated_groups(SMALL, given)
    part = getattr(given, where).clone()
    group = slice(30, 100) if where.startswith("a") else 1
    if part.dtype == torch.float8_e4m3fn:
        part.view(torch.uint8)[group] = 0x7F
    else:
        part[group] = torch.nan
    got = emulated_groups(SMALL, replace(given, **{where: part}))
    assert bool(got[30:100].isnan().all())
    for rows in (slice(0, 30), slice(100, 140)):
        assert torch.equal(got[rows], clean[rows])


@pytest.mark.parametrize(
    "offsets", [(100, 40, 140), (50, 500, 600), (-7, 20, 10), (2**31 - 1, -(2**31), 0), (0, 0, 141)]
)
def test_offsets_that_no_host_has_seen(offsets):
    """They decrease, or overrun: each is taken for the nearest that does not."""
    given = grouped((30, 70, 40), 72, 144)
    meant = torch.tensor(offsets, dtype=torch.int64).clamp(0, 140).cummax(0).values.tolist()
    assert_groups_close(
        emulated_groups(SMALL, given.with_offsets(*offsets)), given.with_offsets(*meant)
    )


# --- masked ---------------------------------------------------------------------------------------

MASKED = replace(SMALL, grouping="masked")


@pytest.mark.parametrize(
    ("capacity", "counts", "taken"),
    [
        (16, (3, 0, 16, 1), None),
        (130, (130, 64, 0, 65, 129), None),
        (7, (1,) * 70, None),
        (40, (41, -1, 2**31 - 1, -(2**31)), (40, 0, 40, 0)),
        (64, (0, 0), None),
    ],
    ids=["few", "many", "groups", "wrong", "none"],
)
@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_masked(capacity, counts, taken, completion):
    """Rows from a group's count on are not written, and those past its capacity are others'."""
    given = grouped((capacity,) * len(counts), 136, 272)
    start = torch.full((given.a.shape[0], 136), 7.0, dtype=BF16)
    got = emulated_groups(MASKED, given.with_offsets(*counts), completion=completion, start=start)
    assert_counted(got, given, taken or counts, untouched=7.0)


@pytest.mark.parametrize(
    "config", grouped_candidates((2048, 4096, 7168), 32, Epilogue(), grouping="masked")[:4],
    ids=lambda each: str(each.tile),
)  # fmt: skip
def test_masked_candidates(config):
    counts = 5, 0, 150, 64, 1
    given = grouped((150,) * 5, 264, 336)
    start = torch.full((750, 264), 7.0, dtype=BF16)
    got = emulated_groups(config, given.with_offsets(*counts), completion="random", start=start)
    assert_counted(got, given, counts, untouched=7.0)


# --- mutants --------------------------------------------------------------------------------------


def _reach_too_far(tiles, *given):
    row, *rest = FOUND(tiles, *given)
    return row + 1, *rest


def _next_tile(tiles, index, *given):
    return FOUND(tiles, index + 1, *given)


def _one_row_less(tiles, chunk, before):
    begin, end = BOUNDS(tiles, chunk, before)
    return begin, end - 1


def _one_row_more(stores, acc, warpgroup, thread, row, column, end):
    return STORE(stores, acc, warpgroup, thread, row, column, end + 1)


FOUND = grouped_scheduler.GroupedTiles.found
BOUNDS = RowGroups.bounds
STORE = Stores.store
MUTANTS = {
    "tile reaches too far": (grouped_scheduler.GroupedTiles, "found", _reach_too_far),
    "next tile": (grouped_scheduler.GroupedTiles, "found", _next_tile),
    "wrong bound": (RowGroups, "bounds", _one_row_less),
    "tail stored past its group": (Stores, "store", _one_row_more),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, monkeypatch):
    given = grouped((5, 130, 64), 72, 144, rest=3)

    def check() -> None:
        assert_groups_close(emulated_groups(SMALL, given, multiprocessors=1), given)

    assert not caught(check)
    monkeypatch.setattr(*MUTANTS[mutant])
    assert caught(check)


# --- bs.grouped_gemm ------------------------------------------------------------------------------


@pytest.fixture
def launches():
    with emulated("sm_90a") as launched:
        yield launched


@pytest.mark.parametrize("layout", ["sm90", "compact"])
def test_dispatch(launches, layout):
    ends = torch.tensor([40, 40, 133], dtype=torch.int32)
    a = bs.quantize(matrix(150, 256), "fp8_1x128", layout=layout)
    b = bs.quantize(matrix(3, 136, 256, seed=1), "fp8_128x128").mT
    got = bs.grouped_gemm(a, b, ends, backend="kernel")
    want = bs.grouped_gemm(a, b, ends, FP32, backend="reference")
    assert len(launches) == 1
    assert launches[0].grouped
    assert got.dtype == BF16
    assert bool((got[133:] == 0).all())
    assert ((got - want).norm() / want.norm()) < 3e-3


def test_calls_alike(launches):
    """The second is looked up, with other values, weights and offsets in the same places."""
    ends = torch.tensor([40, 100], dtype=torch.int32)
    b = bs.quantize(matrix(2, 128, 256, seed=1), "fp8_128x128").mT
    for seed in range(3):
        a = bs.quantize(matrix(150, 256, seed=seed), "fp8_1x128", layout="sm90")
        ends.copy_(torch.tensor([40 + seed, 100 + 20 * seed]))
        if seed == 2:
            b.qdata.view(torch.uint8)[0].fill_(0x38)
        got = bs.grouped_gemm(a, b, ends, FP32)
        want = bs.grouped_gemm(a, b, ends, FP32, backend="reference")
        assert ((got - want).norm() / want.norm()) < 1e-3
    assert len(gemm_launch._launches) == 1
    assert len(launches) == 3


def test_matrices_apart(launches):
    """Every other one: neither a kernel nor a copy that would not change with them."""
    ends = torch.tensor([40, 150], dtype=torch.int32)
    a = bs.quantize(matrix(150, 256), "fp8_1x128", layout="sm90")
    b = bs.quantize(matrix(4, 128, 256, seed=1), "fp8_128x128")
    apart = bs.ScaledTensor(b.qdata[::2], b.scale[::2], format="fp8_128x128", shape=(2, 128, 256))
    for _ in range(2):
        with pytest.raises(ValueError, match="its matrices must lie together"):
            bs.grouped_gemm(a, apart.mT, ends, backend="kernel")
    assert not launches


@pytest.mark.parametrize(("left", "right"), [
    ("fp8_1x128", "fp8_128x128"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), (None, "mxfp8"),
    (None, "nvfp4"), (None, "mxfp4"),
], ids=str)  # fmt: skip
def test_masked_dispatch(launches, left, right):
    """A call, one like it, and one of the same rows as ends: each by its own kernel."""
    counts = torch.tensor([16, 0, 5], dtype=torch.int32)
    x, b = matrix(48, 256), bs.quantize(matrix(3, 128, 256, seed=1), right).mT
    layout = "sm90" if left == "fp8_1x128" else "compact"
    a = x if left is None else bs.quantize(x, left, layout=layout)
    if layout == "compact":
        a = a.unflatten(0, (3, 16))
    want = bs.grouped_gemm(a, b, counts=counts, out_dtype=FP32, backend="reference").view(48, 128)
    for _ in range(2):
        got = bs.grouped_gemm(a, b, counts=counts)
        assert got.shape == (*a.shape[:-1], 128)
        for i, count in enumerate(counts.tolist()):
            rows = slice(16 * i, 16 * i + count)
            error = (got.view(48, 128)[rows] - want[rows]).norm()
            assert error <= 3e-3 * want[rows].norm()
    assert len(gemm_launch._launches) == 1
    assert launches[-1].grouping == "masked"
    ends = torch.tensor([16, 32, 37], dtype=torch.int32)
    rows = bs.grouped_gemm(a.flatten(0, 1) if a.dim() == 3 else a, b, ends)
    assert launches[-1].grouping == "m"
    assert torch.equal(rows[:16], got.view(48, 128)[:16])
    assert bool((rows[37:] == 0).all())


@pytest.fixture
def checked(monkeypatch):
    """As the first call of a process would have it."""
    monkeypatch.setenv("BLOCKSCALE_CHECK_OFFSETS", "1")
    checks_values.cache_clear()
    yield
    checks_values.cache_clear()


def test_counts_are_checked_where_asked_for(launches, checked):
    b = bs.quantize(matrix(2, 128, 256, seed=1)).mT
    with pytest.raises(ValueError, match=r"counts: got .* expected 0 to 75 rows"):
        bs.grouped_gemm(matrix(150, 256), b, counts=torch.tensor([40, 76], dtype=torch.int32))
    assert not launches


def test_offsets_are_checked_where_asked_for(launches, checked):
    a = bs.quantize(matrix(150, 256), "fp8_1x128", layout="sm90")
    b = bs.quantize(matrix(2, 128, 256, seed=1), "fp8_128x128").mT
    wrong = torch.tensor([40, 151], dtype=torch.int32)
    with pytest.raises(ValueError, match="expected ascending ends, at most 150"):
        bs.grouped_gemm(a, b, wrong)
    assert not launches


def test_dgrad(launches):
    """By the weights, quantized along their other axis."""
    ends = torch.tensor([7, 60], dtype=torch.int32)
    w = matrix(2, 128, 256, seed=1)
    dy = bs.quantize(matrix(60, 128), "fp8_1x128", layout="sm90")
    turned = bs.quantize(w, "fp8_128x128", axis=-2, k_major=True)
    got = bs.grouped_gemm(dy, turned, ends, backend="kernel")
    want = bs.grouped_gemm(dy, turned, ends, FP32, backend="reference")
    assert ((got - want).norm() / want.norm()) < 3e-3


def test_no_kernel(launches):
    ends = torch.tensor([40, 64], dtype=torch.int32)
    a = bs.quantize(matrix(64, 256), "fp8_1x128", layout="sm90")
    b = bs.quantize(matrix(2, 136, 256), "fp8_1x128").mT
    with pytest.raises(ValueError, match="no kernel multiplies groups of fp8_1x128 by fp8_1x128"):
        bs.grouped_gemm(a, b, ends, backend="kernel")


def test_what_the_doctor_says():
    for arch, name in (("sm_90a", "CuTe DSL"), ("sm_100a", "CuTe DSL"), ("sm_80", "reference")):
        with gpu(arch):
            found = backends._grouped_products(torch.device("cpu"))
        assert found[0] == name
        assert found[1]


# --- the choice -----------------------------------------------------------------------------------


def test_choice():
    """A tile for rows that a group has, if all have as many."""
    few = choose_grouped((256, 4096, 7168), 32, Epilogue())
    many = choose_grouped((32768, 4096, 7168), 8, Epilogue())
    assert few.tile[0] == 64
    assert many.tile[0] >= 128
    assert supergroup((128, 256), 7168, 132) == 18  # more than a square of tiles: A is in L2
    assert supergroup((128, 256), 2048, 132) == 64
    assert supergroup((128, 256), 65536, 132) == 16
    assert supergroup((256, 1), 2**30, 1) == 1
    for m in (1, 3, 100, 5000, 10**6):
        for groups in (1, 8, 1000):
            assert choose_grouped((m, 136, 144), groups, Epilogue()).grouped
