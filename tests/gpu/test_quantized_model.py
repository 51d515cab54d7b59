"""quantize_ on a GPU: weights lie as kernels read them, and the numbers are those of convert."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpu_inputs import DEVICE, normal, only_on

import blockscale as bs
from blockscale.ops import backends
from blockscale.ops.operand_layout import operand_layout

only_on("sm_90a")

RECIPES = {
    "mxfp8": bs.Recipe(),
    "nvfp4": bs.Recipe("nvfp4"),
    "fp8_block": bs.Recipe("fp8_1x128", weights="fp8_128x128"),
    "fp8_1x128": bs.Recipe("fp8_1x128"),
}


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 768), torch.nn.GELU(), torch.nn.Linear(768, 1024, bias=False)]
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [1, 200])
def test_the_bits_of_a_converted_model_without_fallback(name, rows):
    x = normal(rows, 1024)
    converted = bs.convert(model().to(DEVICE), RECIPES[name])
    there = bs.quantize_(model().to(DEVICE), RECIPES[name])
    moved = bs.quantize_(model(), RECIPES[name]).to(DEVICE)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", bs.FallbackWarning)
        wanted = converted(x)
        for held in (there, moved):
            layout = operand_layout(held[0].weight.format_name, held[0].weight.device).layout
            assert held[0].weight.layout_name == layout
            assert torch.equal(held(x), wanted)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_weight_only(name, monkeypatch):
    monkeypatch.setattr(backends, "_warned", set())
    layer = bs.quantize_(model()[0].to(DEVICE), bs.Recipe(name, activations="bfloat16"))
    exact = layer.weight.dequantize(torch.float64)
    x = normal(16, 1024)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", bs.FallbackWarning)
        y = layer(x)
    wanted = x.double() @ exact.mT + layer.bias.double()
    assert (y.double() - wanted).norm() < 4e-3 * wanted.norm()
    with pytest.warns(bs.FallbackWarning, match=r"x is torch\.float32; kernels multiply bfloat16"):
        y = layer(x.float())
    assert (y.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_a_file_is_loaded_to_the_device(tmp_path):
    wanted = bs.quantize_(model(), RECIPES["fp8_1x128"])
    bs.checkpoint.save_file(wanted.state_dict(), tmp_path / "q.safetensors")
    state = bs.checkpoint.load_file(tmp_path / "q.safetensors", DEVICE)
    wanted.to(DEVICE)
    x = normal(64, 1024)
    for assign in (False, True):
        other = bs.quantize_(model().to(DEVICE), RECIPES["fp8_1x128"])
        with torch.no_grad():
            other[0].bias.zero_()
        other.load_state_dict(state, assign=assign)
        assert other[0].weight.layout_name == wanted[0].weight.layout_name
        assert torch.equal(other(x), wanted(x))


def test_compiled_whole():
    torch.compiler.reset()
    held = bs.quantize_(model().to(DEVICE), RECIPES["fp8_1x128"])
    compiled = torch.compile(held, fullgraph=True)
    with torch.no_grad():
        y, wanted = compiled(normal(64, 1024)), held(normal(64, 1024))
    assert (y.float() - wanted.float()).norm() < 0.01 * wanted.float().norm()


def test_the_gradient_of_x():
    layer = bs.quantize_(model()[0].to(DEVICE), RECIPES["mxfp8"])
    x, g = normal(64, 1024).requires_grad_(), normal(64, 768, seed=1)
    layer(x).backward(g)
    wanted = g.double() @ layer.weight.dequantize(torch.float64)
    assert (x.grad.double() - wanted).norm() < 4e-3 * wanted.norm()


EXPERTS = {
    **{name: RECIPES[name] for name in ("mxfp8", "nvfp4", "fp8_block")},
    **{name: bs.Recipe(name.partition(" ")[0], activations="bfloat16")
       for name in ("mxfp8 weights", "nvfp4 weights", "mxfp4 weights")},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_experts_in_a_graph(name, tokens):
    """By kernels alone, each expert with a global scale of its own; the host waits for nothing, and
    a replay takes other experts."""
    recipe = EXPERTS[name]
    own = recipe.format_of("weights").name
    up, down = normal(8, 2 * 256, 512, seed=1), normal(8, 512, 256, seed=2)
    held = [torch.stack([bs.quantize(m, own, pad=True) for m in w]) for w in (up, down)]
    x, weights = normal(tokens, 512), torch.full((tokens, 2), 0.5, device=DEVICE)
    first, second = (
        torch.rand(tokens, 8, generator=torch.Generator().manual_seed(seed)).topk(2).indices
        for seed in (0, 1)
    )
    chosen = first.to(DEVICE)

    def step() -> torch.Tensor:
        routing = bs.route(chosen, 8)
        return bs.nn.quantized_experts(x, weights, routing, *held, recipe=recipe)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", bs.FallbackWarning)
        want = step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(again, want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        for each in (first, second):
            chosen.copy_(each)
            graph.replay()
            assert torch.equal(y, step())
    exact = [w.dequantize(torch.float32) for w in held]
    plain = bs.nn.experts(x.float(), weights, bs.route(chosen, 8), *exact, recipe=None)
    error = (y.float() - plain).norm() / plain.norm()
    assert error <= (1e-2 if recipe.weight_only else 0.2)


def test_mixtures_have_the_bits_of_converted_ones():
    for name, recipe in RECIPES.items():
        if name == "fp8_1x128":
            continue
        torch.manual_seed(0)
        moe = bs.nn.MoE(512, 256, 8, bs.nn.Router(top_k=2), device=DEVICE, dtype=torch.bfloat16)
        x = normal(100, 512)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error", bs.FallbackWarning)
            want = bs.convert(moe, recipe)(x)
            assert torch.equal(bs.quantize_(moe, recipe)(x), want), name
