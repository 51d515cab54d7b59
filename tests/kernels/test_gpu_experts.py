"""Experts by kernels of both architectures, in the emulator: nothing falls to plain torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import blockscale as bs
from blockscale.kernels.quantizers.config import Config
from stand_in import emulated

H, I, COUNT = 128, 128, 4  # noqa: E741


def operands(transposed: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (40, H), (COUNT, 2 * I, H), (COUNT, H, I)
    x, up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    weights = torch.rand(40, 2, generator=generator).bfloat16()
    if transposed:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    return [x, weights, up, down]


def run(recipe: bs.Recipe, transposed: bool) -> list[torch.Tensor]:
    leaves = [t.requires_grad_() for t in operands(transposed)]
    x, weights, up, down = leaves
    ids = torch.rand(40, COUNT, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :2]
    ids[ids == 2] = 1  # an expert without tokens
    routing = bs.route(ids, COUNT)
    y = bs.nn.experts(x, weights, routing, up, down, recipe=recipe, transposed=transposed)
    y.backward(torch.randn(40, H, generator=torch.Generator().manual_seed(2)).bfloat16())
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize(
    ("arch", "recipe", "transposed"),
    [
        ("sm_90a", bs.Recipe("fp8_block"), False),
        ("sm_90a", bs.Recipe("fp8_block"), True),
        ("sm_90a", bs.Recipe("mxfp8"), False),
        ("sm_90a", bs.Recipe("nvfp4"), True),
        ("sm_90a", bs.Recipe("fp8_1x128", weights="nvfp4"), False),
        ("sm_100a", bs.Recipe("mxfp8"), False),
        ("sm_100a", bs.Recipe("nvfp4"), True),
    ],
    ids=str,
)
def test_experts(arch, recipe, transposed):
    want = run(recipe, transposed)
    with emulated(arch, quantizes=True) as launches, warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        got = run(recipe, transposed)
    made = [config.producer for config in launches if type(config) is Config]
    for producer in ("swiglu", "weighted_swiglu", "weighted_swiglu_backward"):
        assert made.count(producer) == 1
    gathers = [config.axes for config in launches if getattr(config, "gather", False)]
    assert gathers == [(-1,), (-1, -2), (-2,)]  # x, the gradient, x again
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).norm() <= 1e-2 * b.float().norm()


def allocated(call) -> tuple[list[int], int]:
    """Sizes of all memory of torch's that was allocated during a call, and how much is still."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = found.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return [size for size in sizes if size > 0], sum(sizes)


@pytest.mark.parametrize(("arch", "name"), [("sm_90a", "fp8_block"), ("sm_100a", "mxfp8")])
def test_memory(arch, name):
    """Of all pairs' rows of tokens two exist in bf16, each until it is combined: the second
    product, and the gradient of what was gathered. Between forward and backward, neither."""
    hidden, inner, tokens, top_k, count = 384, 128, 40, 2, 3
    x, up, down = (
        torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
        for shape in ((tokens, hidden), (count, 2 * inner, hidden), (count, hidden, inner))
    )
    weights = torch.rand(tokens, top_k).requires_grad_()
    routing = bs.route(torch.rand(tokens, count).argsort(1)[:, :top_k], count)
    grad, kept = torch.randn(tokens, hidden).bfloat16(), []

    def forward() -> None:
        recipe = bs.Recipe(name)
        kept.append(bs.nn.experts(x, weights, routing, up, down, recipe=recipe))

    pairs = tokens * top_k
    with emulated(arch, quantizes=True), warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        for call in (forward, lambda: kept.pop().backward(grad)):
            sizes, left = allocated(call)
            assert sizes.count(2 * pairs * hidden) == 1
            assert max(sizes) <= max(2 * pairs * hidden, 2 * up.numel())
            if call is forward:
                result, product = 2 * tokens * hidden, 2 * pairs * 2 * inner
                assert result + product <= left <= result + product + 16 * pairs
