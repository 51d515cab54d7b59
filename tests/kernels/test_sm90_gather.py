"""A product on Hopper whose rows ranks bring together meanwhile, in the emulator: the bits of one
rank that has all rows."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from gather_ranks_emulated import Ranks

import blockscale as bs
from blockscale import emulator as em
from blockscale.distributed import PeerError, gather_gemm
from blockscale.kernels.common.epilogue import Epilogue
from blockscale.kernels.common.gpu import Unsupported
from blockscale.kernels.ranks import gathering, signals
from blockscale.kernels.ranks.gather_sizes import EPOCH, READY, GatherSizes, why_not_gather
from blockscale.kernels.sm90 import gather_config
from blockscale.kernels.sm90.gather_config import GatherConfig, choose_gather
from stand_in import gpu, matrix


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def assert_bits(found, want):
    for got in found:
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(("ranks", "sizes", "how"), [
    (2, [(64, 64, 256), (128, 40, 128), (64, 64, 128)], {"multiprocessors": 3}),
    (3, [(64, 40, 128), (64, 72, 256)], {"completion": "random", "multiprocessors": 1}),
    (4, [(64, 64, 128), (128, 64, 128)], {"completion": "eager", "multiprocessors": 1}),
])  # fmt: skip
def test_bits_of_one_rank(ranks, sizes, how):
    """Launch after launch, of other sizes in the same memory."""
    run = Ranks(ranks, GatherSizes(ranks, 128, 256), **{"completion": "late", **how})
    for i, (rows, n, k) in enumerate(sizes):
        x, w = matrix(ranks * rows, k, seed=i), matrix(n, k, seed=i + 10)
        assert_bits(*run(x, w))


@pytest.mark.parametrize("rows", [128, 192])
def test_wide_tiles(rows):
    """Of 128 x 256, which two warpgroups share, also where the last of a shard reaches up into that
    before it; with a bias, in fp32."""
    wide = [each for each in gather_config.TILINGS[128, 128] if each.config.tile == (128, 256)]
    run = Ranks(2, GatherSizes(2, rows, 384), completion="late")
    with patch.dict(gather_config.TILINGS, {(128, 128): wide}):
        bias = matrix(264).float()
        found = run(
            matrix(2 * rows, 384), matrix(264, 384, seed=1), bias=bias, out_dtype=torch.float32
        )
    assert_bits(*found)


def test_nan_infinity_and_extremes():
    x = matrix(128, 256)
    x[3, 7], x[4, 200], x[100] = float("nan"), float("inf"), 0
    x[64:67] *= torch.tensor([[1e-30], [1e30], [3e38]])
    run = Ranks(2, GatherSizes(2, 64, 256))
    found, want = run(x, matrix(64, 256, seed=1))
    assert_bits(found, want)
    assert want[3].isnan().all()
    assert want[5:64].isfinite().all()


def test_counters_begin_anew():
    """After 2**32 launches."""
    run = Ranks(2, GatherSizes(2, 64, 256))
    for place in run.places:
        place.signals[EPOCH] = place.signals[READY : READY + 2] = -1
    for i in range(2):
        assert_bits(*run(matrix(128, 256, seed=i), matrix(64, 256)))
    assert [int(place.signals[EPOCH]) for place in run.places] == [1, 1]


def test_a_rank_that_does_not_come():
    """What did not come is NaN, this rank's own rows are right, and the memory tells who."""
    run = Ranks(3, GatherSizes(3, 64, 128), limit=1e-4)
    found, want = run(matrix(192, 128), matrix(64, 128), absent=[1])
    for rank, got in zip((0, 2), found, strict=True):
        own = slice(64 * rank, 64 * rank + 64)
        assert torch.equal(got[own], want[own])
        assert got[64:128].isnan().all()
        assert int(run.places[rank].missing) == 1 + 1


def test_the_function():
    """It takes the kernel where there is one, as often as all ranks call it, and says at the next
    call who did not come."""
    ranks = Ranks(2, GatherSizes(2, 64, 256), limit=1e-4)
    x, w = matrix(128, 256), matrix(64, 256, seed=1)
    shards = [bs.quantize(each.contiguous(), "fp8_1x128") for each in x.chunk(2)]
    b = bs.quantize(w, "fp8_128x128").mT
    want = ranks(x, w)[1]
    groups = [object(), object()]

    def launch(rank):
        place = rank, 2
        made = ranks.memory[rank], ranks.places[rank].peers
        with (
            patch.object(gather_gemm, "rank_and_ranks", lambda group: place),
            patch.object(gather_gemm, "symmetric_memory", lambda *how: made),
            patch.object(gather_gemm, "make_on_all", lambda make, group: (make(), "")),
            patch.object(gather_gemm, "check_alike"),
            patch.object(gather_gemm, "_LIMIT", 1e-4),
            em.cutedsl(
                em.Device("sm_90a"),
                buffers={f"memory {i}": each for i, each in enumerate(ranks.memory)},
            ),
        ):
            return bs.distributed.all_gather_gemm(shards[rank], b, groups[rank], backend="kernel")

    with gpu("sm_90a", kernel=ranks.load, multiprocessors=1):
        for _ in range(2):
            with em.capture() as launches:
                found = [launch(rank) for rank in range(2)]
            em.launch_together(launches)
            assert_bits(found, want)
        launch(0)
        with pytest.raises(PeerError, match="rank 1 did not come"):
            launch(0)
        assert not any(groups[0] in key for key in gather_gemm._found)


def nothing(*args, **how) -> None:
    """In place of a wait or a fence."""


def relaxed(address, value, scope: str) -> None:
    """In place of a release."""
    signals._asm(f"red.relaxed.{scope}.global.add.u32 [$0], $1;", None, address, value)


@pytest.mark.parametrize(("name", "instead"), [
    ("wait_for_peer", nothing),
    ("fence_async", nothing),
    ("add_release", relaxed),
])  # fmt: skip
def test_what_is_left_out_is_found(name, instead):
    from blockscale.kernels.common.builders import build_kernel

    run = Ranks(2, GatherSizes(2, 64, 128), build=build_kernel, completion="late")
    with patch.object(gathering, name, instead), pytest.raises(em.PtxError):
        run(matrix(128, 128), matrix(64, 128))


@pytest.mark.parametrize(("sizes", "told"), [
    (GatherSizes(1, 64, 128), "1 ranks: kernels bring the shards of 2 to 128 together"),
    (GatherSizes(2, 96, 128), "96 rows of a shard: kernels that gather take multiples of 64"),
    (GatherSizes(2, 64, 192), "K = 192: kernels that gather take multiples of 128"),
    (GatherSizes(2, 1 << 18, 128), "524288 rows of all ranks: kernels that gather take 262144"),
])  # fmt: skip
def test_no_kernel(sizes, told):
    assert why_not_gather(sizes).startswith(told)


def test_unsupported():
    run = Ranks(2, GatherSizes(2, 64, 128))
    with pytest.raises(Unsupported, match="96 rows of a shard"):
        run(matrix(192, 128), matrix(64, 128))


@pytest.mark.parametrize("rows", [64, 128, 192, 256, 2048, 2112])
@pytest.mark.parametrize("n", [64, 2048, 7168])
def test_tiles_have_rows_of_one_rank(rows, n):
    config = choose_gather(GatherSizes(2, rows, 7168), n, Epilogue())
    assert isinstance(config, GatherConfig)
    assert config.tile[0] <= rows
    if n == 2048:
        assert rows < 2048 or config.tile[0] == 128
