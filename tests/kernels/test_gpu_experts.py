"""Experts by kernels of both architectures, in the emulator: nothing falls to plain torch."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import blockscale as bs
from blockscale.kernels.quantizers.config import Config
from blockscale.nn import group_launches, quantize_launches
from blockscale.quantize import wrap
from stand_in import emulated

H, I, COUNT = 128, 128, 3  # noqa: E741


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "recipe"),
    [("sm_90a", "fp8_block"), ("sm_100a", "mxfp8")],
)
def test_launches(arch, recipe, monkeypatch):
    """What is launched has the bits of quantized tensors, which fp8_block does without."""
    made: list[object] = []
    with emulated(arch, quantizes=True), warnings.catch_warnings():
        warnings.simplefilter("error", bs.FallbackWarning)
        got = run(bs.Recipe(recipe), False)
        counted = lambda *args, **kwargs: made.append(args) or wrap(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(quantize_launches, "wrap", counted)
        with bs.reuse_weights():
            kept = [run(bs.Recipe(recipe), False) for _ in range(2)]
        assert not made or recipe != "fp8_block"
        experts = sys.modules["blockscale.nn.experts"]  # the name is the function's, too
        monkeypatch.setattr(experts, "call_key", lambda *_: None)
        want = run(bs.Recipe(recipe), False)
    for tensors in (got, *kept):
        for a, b in zip(tensors, want, strict=True):
            assert torch.equal(a, b)


GPT_OSS = {"activation": bs.nn.GatedActivation(1.702, 7.0, 1.0, interleaved=True), "bias": True}
#: Arguments, and which of x, weights, up and down have gradients.
VARIANTS = {
    "all": ({}, (0, 1, 2, 3)),
    "transposed, saved": ({"transposed": True, "saved_format": "mxfp8"}, (0, 1, 2, 3)),
    "fp32, in order": ({"wide": True, "in_order": True}, (0, 2, 3)),
    "gpt-oss, int32": ({**GPT_OSS, "short": True}, (0, 1)),
    "gate, adapters": ({"gate": True}, (3,)),
    "weights": ({}, (1,)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_found_once(name, monkeypatch):
    """Launches that were found have the bits of quantized tensors, whatever has a gradient."""
    how, needs = VARIANTS[name]
    how = dict(how)
    leaves = operands(how.get("transposed", False))
    if how.pop("wide", False):  # masters, of which autocast makes bf16
        leaves = [each.float() for each in leaves]
    for i in needs:
        leaves[i].requires_grad_()
    x, weights, up, down = leaves
    if how.pop("bias", False):
        how |= {"up_bias": torch.randn(COUNT, 2 * I), "down_bias": torch.randn(COUNT, H)}
    if how.pop("gate", False):
        how["gate"], up = up[:, :I].contiguous(), up[:, I:].contiguous()
    routing = bs.route(torch.rand(40, COUNT).argsort(1)[:, :2], COUNT)
    if how.pop("short", False):
        routing = routing._replace(pairs=routing.pairs.int(), slots=routing.slots.int())
    if how.pop("in_order", False):
        weights, routing = None, torch.tensor([3, 3, 37], dtype=torch.int32)
    grad, found = torch.randn(40, H).bfloat16(), []
    quantize = group_launches.Launches.quantize

    def counted(*args, **kwargs):
        found.append(quantize(*args, **kwargs))
        return found[-1]

    def step() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            given = x, weights, routing, up, down
            y = bs.nn.experts(*given, recipe=bs.Recipe("fp8_block"), **how)
        return [y, *torch.autograd.grad(y, [leaves[i] for i in needs], grad)]

    monkeypatch.setattr(group_launches.Launches, "quantize", counted)
    with emulated("sm_90a", quantizes=True):
        got = step()
        assert found
        assert None not in found
        monkeypatch.setattr(sys.modules["blockscale.nn.experts"], "call_key", lambda *_: None)
        want = step()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_each_activation_is_its_own():
    """Also where two compare equal: what was found for one is not taken for the other."""

    class Scaled(bs.nn.GatedActivation):
        def __call__(self, h):
            return super().__call__(h) * self.factor

    def scaled(factor: float) -> bs.nn.GatedActivation:
        made = Scaled()
        object.__setattr__(made, "factor", factor)
        return made

    x, weights, up, down = operands()
    given = x, weights, bs.route(torch.zeros(40, 2, dtype=torch.int64), COUNT), up, down
    with emulated("sm_90a", quantizes=True):
        one, other = (
            bs.nn.experts(*given, recipe=bs.Recipe("fp8_block"), activation=scaled(factor))
            for factor in (1.0, 4.0)
        )
    assert torch.equal(other, one * 4)


def test_hooks_that_turn_what_was_saved():
    x, weights, up, down = (each.requires_grad_() for each in operands())
    routing, results = bs.route(torch.rand(40, COUNT).argsort(1)[:, :2], COUNT), []

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.mT.contiguous().mT if t.dim() == 2 else t

    with emulated("sm_90a", quantizes=True):
        for unpack in (lambda t: t, turned):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                recipe = bs.Recipe("fp8_block")
                y = bs.nn.experts(x, weights, routing, up, down, recipe=recipe)
                results.append(torch.autograd.grad(y.sum(), (x, weights, up, down)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_vectors_that_lie_apart():
    """Ends of groups, and what hooks give back for tensors that are saved."""

    def apart(x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() != 1 else torch.stack((x, x), 1)[:, 0]

    x, _, up, down = (each.requires_grad_() for each in operands())
    ends = torch.tensor([5, 5, 40], dtype=torch.int32)
    results = []
    with emulated("sm_90a", quantizes=True):
        for change in (lambda x: x, apart):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, change):
                y = bs.nn.experts(x, None, change(ends), up, down, recipe=bs.Recipe("mxfp8"))
                results.append([y, *torch.autograd.grad(y.sum(), (x, up, down))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def allocated(call) -> tuple[list[int], int]:
    """Sizes of all memory of torch's that was allocated during a call, and how much is still."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    events = found.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return [size for size in sizes if size > 0], sum(sizes)


@pytest.mark.long
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
