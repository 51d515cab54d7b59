"""A mega MoE on Hopper in the emulator: FP8 rows by FP8, NVFP4 and MXFP4 matrices, with the bits of
its steps."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import blockscale as bs
from blockscale import emulator as em
from blockscale.cli.emulate_ranks import Case, Ranks, steps
from blockscale.distributed import MegaMoE
from blockscale.emulator.host.hostcode import settings
from blockscale.kernels.common.builders import build_kernel
from blockscale.kernels.common.gpu import SHARED
from blockscale.kernels.common.machine_code import usage
from blockscale.kernels.mega.buffers import Sizes
from blockscale.kernels.sm90.mega_config import choose_mega
from stand_in import gpu, matrix

FP8 = {"format": "fp8_128x128", "activations": "fp8_1x128"}


NVFP4, MXFP4 = ({"format": name, "activations": "fp8_1x128"} for name in ("nvfp4", "mxfp4"))


@pytest.mark.parametrize(("case", "how"), [
    (Case((20,), hidden=128, experts=2, **FP8), {"completion": "late"}),
    (Case((20, 13), topk=3, hidden=128, experts=2, **FP8), {"completion": "eager"}),
    (Case((19, 6), hidden=512, intermediate=384, experts=3, **FP8), {"completion": "random"}),
    (Case((37, 3, 0, 5), hidden=128, experts=2, **FP8), {"completion": "random", "clusters": 1}),
    (Case((300,), hidden=384, experts=2, ring=4, **FP8), {"completion": "random", "clusters": 3}),
    (Case((20,), hidden=128, experts=2, **NVFP4), {"completion": "late"}),
    (Case((19, 6), hidden=384, intermediate=256, experts=3, **NVFP4), {"completion": "random"}),
    (Case((37, 3, 0, 5), hidden=128, experts=2, **MXFP4), {"completion": "eager", "clusters": 1}),
    (Case((300,), hidden=128, experts=2, ring=4, **NVFP4), {"completion": "random", "clusters": 3}),
])  # fmt: skip
def test_ranks(case, how):
    ranks = Ranks(case, "sm_90a", **how)
    for got, want in zip(ranks.launch(), steps(case, "sm_90a"), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("formats", [FP8, NVFP4, MXFP4], ids=["fp8", "nvfp4", "mxfp4"])
def test_nasty(formats):
    """NaN and infinities stay in their tokens, and all sizes come with the bits of steps; launch
    after launch."""
    case = Case((24,), topk=3, hidden=256, experts=3, **formats)
    x = case.x[0]
    x[3, 7], x[4, 200], x[5] = float("nan"), float("inf"), 0
    x[6:9] *= torch.tensor([[1e-30], [1e30], [3e38]])
    x[9, ::3] = 1e-38
    ranks = Ranks(case, "sm_90a")
    want = steps(case, "sm_90a")[0]
    for _ in range(3):
        got = ranks.launch()[0]
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert want[3].isnan().all()
    assert want[10:].isfinite().all()


def test_a_rank_that_does_not_come():
    ranks = Ranks(Case((5, 3), hidden=128, experts=2, **FP8), "sm_90a", limit=1e-4)
    got = ranks.launch(absent=[1])
    assert ranks.ranks[0].missing_rank == 1
    assert got[0].isnan().all()
    got = ranks.launch(absent=[0])  # too late
    assert ranks.ranks[1].missing_rank == 0
    assert got[1].isnan().all()


def test_a_module():
    """It takes the kernel, with the bits of steps, which it runs where it is asked for them."""
    x, part, ids = matrix(9, 128), torch.rand(9, 2), torch.rand(9, 3).argsort(1)[:, :2]
    shapes = ((3, 256, 128), (3, 128, 128))
    up, down = (bs.quantize(torch.randn(shape) / 8, "fp8_128x128") for shape in shapes)
    device, named = em.Device("sm_90a"), {}
    with (
        gpu("sm_90a", multiprocessors=2, quantizes=True),
        em.cutedsl(device, buffers=named) as ran,
    ):
        want = MegaMoE(up, down, tokens=9, topk=2, backend="steps")(x, part, ids)
        moe = MegaMoE(up, down, tokens=9, topk=2)
        named["memory"] = moe._launch.memory.buffer
        ran.clear()
        assert torch.equal(moe(x, part, ids), want)
        assert len(ran) == 2  # the quantizer's, and that


@pytest.mark.parametrize("weights", ["fp8_128x128", "nvfp4", "mxfp4"])
def test_registers(weights):
    """Nothing is spilled, and no more registers are asked for than there are."""
    widened, alphas = weights != "fp8_128x128", ((1,), (1,)) if weights == "nvfp4" else ((), ())
    sizes = Sizes(8, 8192, 6, 4096, 2048, 32, "fp8_1x128", widened=widened)
    chosen = choose_mega(sizes, weights, alphas=alphas)
    loading, sending, multiplying = chosen.registers
    groups = chosen.threads // 128
    asked = loading + sending + multiplying * chosen.consumers
    assert asked <= 65536 // chosen.threads // 8 * 8 * groups
    with em.cutedsl(em.Device("sm_90a")), patch.object(settings(), "keep_cubin", True):
        found = usage(build_kernel(chosen).__cubin__)
    assert found.frame_bytes == 0
    assert chosen.shared_bytes + found.static_bytes <= SHARED
