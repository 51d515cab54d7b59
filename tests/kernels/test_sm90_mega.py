"""A mega MoE on Hopper in the emulator: FP8 rows by FP8, NVFP4 and MXFP4 matrices, with the bits of
its steps."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import blockscale as bs
from blockscale import emulator as em
from blockscale.cli.emulate_ranks import Case, Ranks, steps
from blockscale.distributed import MegaMoE, mega_launch
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
def test_nan_infinity_and_extremes(formats):
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


def experts(format: str, seed: int) -> list[bs.ScaledTensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, 256, 256), (3, 256, 128)
    made = [torch.randn(shape, generator=generator) / 8 * (1 + seed) for shape in shapes]
    return [torch.stack([bs.quantize(m, format) for m in w]) for w in made]


@contextmanager
def hopper():
    """Where kernels run, and what names the memory of a module for them."""
    named = {}
    with (
        gpu("sm_90a", multiprocessors=2, quantizes=True),
        em.cutedsl(em.Device("sm_90a"), buffers=named),
    ):
        yield lambda moe: named.update(memory=moe._launch.memory.buffer)


HOW = {"tokens": 9, "topk": 2, "activations": "fp8_1x128"}


@torch.no_grad()
@pytest.mark.parametrize("format", ["fp8_128x128", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("inference", [False, True])
def test_weights_that_change(format, inference):
    given = matrix(9, 256), torch.rand(9, 2), torch.rand(9, 3).argsort(1)[:, :2]
    with hopper() as names, torch.inference_mode(inference):
        one, other = (experts(format, seed) for seed in (0, 1))
        moe = MegaMoE(*one, **HOW)
        names(moe)
        moe(*given)
        want = MegaMoE(*other, **HOW, backend="steps")
        moe.load_state_dict(want.state_dict())
        assert torch.equal(moe(*given), want(*given))
        for mine, new in zip((moe.up, moe.down), experts(format, 2), strict=True):
            mine.copy_(new)
        want = MegaMoE(*experts(format, 2), **HOW, backend="steps")
        assert torch.equal(moe(*given), want(*given))


@torch.no_grad()
def test_a_global_scale_for_all_experts():
    """Whatever its shape, as checkpoints have it."""
    given = matrix(9, 256), torch.rand(9, 2), torch.rand(9, 3).argsort(1)[:, :2]
    shapes = (3, 256, 256), (3, 256, 128)
    made = [bs.quantize(torch.randn(shape) / 8, "nvfp4") for shape in shapes]
    one = [w._with(global_scale=w.global_scale.reshape(1)) for w in made]
    with hopper() as names:
        moe = MegaMoE(*one, **HOW)
        names(moe)
        assert torch.equal(moe(*given), MegaMoE(*made, **HOW, backend="steps")(*given))


@torch.no_grad()
def test_scales_with_other_strides():
    given = matrix(9, 256), torch.rand(9, 2), torch.rand(9, 3).argsort(1)[:, :2]
    made = experts("fp8_128x128", 0)
    turned = [w._with(scale=w.scale.mT.contiguous().mT) for w in made]
    with hopper() as names:
        moe = MegaMoE(*turned, **HOW)
        names(moe)
        assert torch.equal(moe(*given), MegaMoE(*made, **HOW, backend="steps")(*given))


def test_gpus_that_do_not_reach_each_other():
    """Steps, and it says so; an error where the kernel was asked for."""

    def refuse(*args):
        raise RuntimeError("no peer access")

    made = experts("fp8_128x128", 0)
    with hopper(), patch.object(mega_launch, "symmetric_memory", refuse):
        sized = {**HOW, "tokens": 11}
        with pytest.warns(bs.FallbackWarning, match="no peer access"):
            moe = MegaMoE(*made, **sized)
        assert moe._launch is None
        with pytest.raises(RuntimeError, match="no peer access"):
            MegaMoE(*made, **sized, backend="kernel")


@pytest.mark.parametrize("weights", ["fp8_128x128", "nvfp4", "mxfp4"])
def test_registers(weights):
    """Nothing is spilled, and no more registers are asked for than there are."""
    rings, alphas = weights != "fp8_128x128", ((1,), (1,)) if weights == "nvfp4" else ((), ())
    sizes = Sizes(8, 8192, 6, 4096, 2048, 32, "fp8_1x128", bf16_rings=rings)
    chosen = choose_mega(sizes, weights, alphas=alphas)
    loading, sending, multiplying = chosen.registers
    groups = chosen.threads // 128
    asked = loading + sending + multiplying * chosen.consumers
    assert asked <= 65536 // chosen.threads // 8 * 8 * groups
    with em.cutedsl(em.Device("sm_90a")), patch.object(settings(), "keep_cubin", True):
        found = usage(build_kernel(chosen).__cubin__)
    assert found.frame_bytes == 0
    assert chosen.shared_bytes + found.static_bytes <= SHARED
