"""The global scale by the GPU kernels, run in the emulator: the reference's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from gpu_bench import assert_same, nasty, poisoned, produced

from blockscale import emulator as em
from blockscale import reference
from blockscale.emulator.observe.report import Report
from blockscale.formats import formats
from blockscale.kernels.common import compile_cache
from blockscale.kernels.quantizers import amax, plan
from blockscale.kernels.quantizers import calls as quantizers
from stand_in import chip

COMPLETIONS = ("late", "eager", "random")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NVFP4 = formats["nvfp4"]


def check(
    x: Tensor,
    arch: str = "sm_90a",
    *,
    completion: str = "late",
    profile: bool = False,
    producer: str = "load",
    others: tuple[Tensor, ...] = (),
) -> list[Report]:
    """Assert that the scale is the reference's, and that there is no race."""
    device = em.Device(arch, completion=completion, check="all,exit_stores")
    with em.cutedsl(device, profile=profile) as reports, poisoned():
        got = quantizers.global_scale(x, NVFP4, producer=producer, others=others, gpu=chip(arch, 0))
    want = reference.global_scale(produced(x, producer, others), NVFP4)
    assert got.shape == ()
    assert_same(got.view(1), want.view(1), "global scale")
    return reports


@pytest.mark.parametrize(("dtype", "arch"), [(BF16, "sm_100a"), (FP16, "sm_90a"), (FP32, "sm_90a")])
def test_dtypes(dtype, arch):
    """Several tiles, which hang over both edges. The largest number is in any of them."""
    for i, completion in enumerate(COMPLETIONS):
        x = nasty(130, 136, dtype, seed=i)
        row, column = ((0, 0), (129, 135), (128, 3))[i]
        x[row, column] = -torch.finfo(dtype).max
        check(x, arch, completion=completion)
    check(nasty(130, 136, dtype), arch)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_values(dtype):
    """Each in the last place of the smallest tensor that shares a kernel."""
    info = torch.finfo(dtype)
    nan, inf, smallest = float("nan"), float("inf"), info.tiny * info.eps
    for value in (0.0, -0.0, nan, inf, -inf, info.max, info.tiny, smallest, -1.5):
        for first in (-smallest, nan):
            x = torch.zeros(2, 8, dtype=dtype)
            x[0, 0], x[-1, -1] = first, value
            check(x)


def test_every_bf16():
    """All patterns, but only those up to a magnitude: infinities and NaNs count as zero."""
    patterns = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    check(patterns.view(BF16).view(128, 512))
    small = patterns[(patterns & 0x7FFF) < 0x3F81].view(BF16)
    special = patterns[(patterns & 0x7FFF) >= 0x7F80].view(BF16)
    x = torch.cat((small, special))[: 127 * 256].view(127, 256)
    check(x.contiguous(), "sm_100a")


@pytest.mark.parametrize(
    "x",
    [
        torch.full((1, 1), -3.0),
        torch.randn(1, 100).to(BF16),
        torch.randn(257, 3).to(FP16),
        torch.randn(5),
        torch.randn(2, 3, 40).to(BF16),
        nasty(20, 200, BF16)[::2, 8:136],  # strides that TMA takes
        nasty(20, 200, BF16)[:, 1:65],  # an address that it does not
    ],
    ids=lambda x: "x".join(map(str, x.shape)),
)
def test_shapes(x):
    check(x)


@pytest.fixture
def few_threads(monkeypatch):
    """The second kernel has 32 threads."""
    build = compile_cache.build.__wrapped__
    monkeypatch.setattr(amax, "_THREADS", 32)
    monkeypatch.setattr(compile_cache, "build", build)
    plan.plan_amax.cache_clear()
    yield
    plan.plan_amax.cache_clear()


@pytest.mark.parametrize("tiles", [33, 70])
def test_more_tiles_than_threads(tiles, few_threads):
    """A thread of the second kernel takes several tiles; the largest number is in the last one."""
    x = torch.randn(1, tiles * 128).to(BF16)
    x[0, -1] = 1000.0
    first, second = check(x)
    assert first.instructions["st.global.b32"] == tiles
    assert second.instructions["ld.global.u32"] == tiles


@pytest.mark.parametrize(("producer", "dtype"), [("swiglu", BF16), ("swiglu_backward", FP32)])
def test_producers(producer, dtype):
    """What is not loaded is zero in what is made of it, too."""
    width = 100 if producer == "swiglu" else 128
    x, grad = nasty(130, 2 * width, dtype), nasty(130, width, dtype, seed=1)
    others = (grad,) if producer == "swiglu_backward" else ()
    check(x, "sm_100a", producer=producer, others=others)
    tiny = [(each * 2.0**-100).nan_to_num(0, 0, 0) for each in (x, *others)]
    check(tiny[0], "sm_100a", producer=producer, others=tuple(tiny[1:]), completion="random")


def test_larger_part():
    """The largest number of a backward is in the gradient of ``up``, or in that of the gate."""
    x, grad = torch.zeros(4, 256), torch.ones(4, 128)
    x[2, 5] = 50.0
    check(x, "sm_100a", producer="swiglu_backward", others=(grad,))
    x[2, 128 + 5] = 77.0
    check(x, "sm_100a", producer="swiglu_backward", others=(grad,))


def test_sectors():
    """The input is read once, and of each tile one word is written and read."""
    x = nasty(128, 1024, BF16)
    first, second = check(x, "sm_100a", profile=True)
    read = first.global_memory("read")
    assert read.asked == 32 * read.sectors == 2 * x.numel()
    assert first.global_memory("write").asked == second.global_memory("read").asked == 8 * 4
    assert second.global_memory("write").asked == 4


def test_refusals():
    x = torch.zeros(4, 256)
    for given, message in (
        ({"gpu": chip("sm_80")}, "sm_90a, sm_100a and sm_103a"),
        ({}, "x is on cpu"),
        ({"producer": "swiglu_backward", "others": (x.half(),)}, "cast one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            quantizers.global_scale(x, NVFP4, **{"gpu": chip("sm_90a")} | given if given else {})
