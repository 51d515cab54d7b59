"""Layers of the plugin for vLLM: what they multiply, compiled too, and devices without kernels."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor

import blockscale as bs
from blockscale.vllm.device import check_device
from blockscale.vllm.served import ServedExperts, ServedLinear
from blockscale.vllm.weights import Experts, Weight
from stand_in import gpu

CPU = torch.device("cpu")
RECIPES = [
    *(bs.Recipe(each) for each in ("mxfp8", "mxfp4")),
    *(bs.Recipe(each, activations="bfloat16") for each in ("mxfp8", "mxfp4", "nvfp4")),
    bs.Recipe("mxfp4", activations="mxfp8"),
]
NVFP4 = bs.Recipe("nvfp4")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weight(recipe: bs.Recipe, *shape: int, seed: int = 1) -> bs.ScaledTensor:
    return bs.quantize(randn(*shape, seed=seed), recipe.format_of("weights").name)


# --- linear layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 40), (0,)])
def test_linear_layers_have_the_bits_of_quantized_linear(recipe, shape):
    x, q, bias = randn(*shape, 128), weight(recipe, 96, 128), randn(96, seed=2)
    layer = ServedLinear(Weight(q, torch.tensor(7.0)), recipe)
    assert layer.input_scale is None
    assert torch.equal(layer(x, bias), bs.nn.quantized_linear(x, q, bias, recipe=recipe))


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 40), (0,)])
def test_the_scale_of_the_checkpoint_is_that_of_nvfp4_activations(shape):
    x, q, scale = randn(*shape, 128), weight(NVFP4, 96, 128), torch.tensor(0.02)
    layer = ServedLinear(Weight(q, scale), NVFP4)
    rows = x.reshape(-1, 128)
    expected = torch.empty(0, 96).bfloat16()
    if len(rows):
        expected = bs.gemm(bs.quantize(rows, "nvfp4", global_scale=scale), q.mT)
    assert torch.equal(layer(x), expected.reshape(*shape, 96))


def test_outputs_of_a_token_do_not_depend_on_others():
    """As they would if the global scale were that of the tokens beside it."""
    layer = ServedLinear(Weight(weight(NVFP4, 96, 128), torch.tensor(0.02)), NVFP4)
    x = randn(4, 128)
    others = torch.cat([x[:1], 100 * x[1:]])
    assert torch.equal(layer(x)[0], layer(others)[0])


def test_a_layer_holds_plain_parameters_of_the_weights_memory():
    q = weight(NVFP4, 96, 128)
    layer = ServedLinear(Weight(q, torch.tensor(0.5)), NVFP4)
    parameters = dict(layer.named_parameters())
    assert set(parameters) == {"codes", "scales", "global_scale", "input_scale"}
    assert all(type(x) is torch.nn.Parameter and not x.requires_grad for x in parameters.values())
    assert layer.codes.data_ptr() == q.qdata.data_ptr()
    assert sum(x.nbytes for x in parameters.values()) == q.nbytes + 4
    assert torch.equal(layer.weight.dequantize(), q.dequantize())
    moved = copy.deepcopy(layer)
    assert torch.equal(moved(randn(3, 128)), layer(randn(3, 128)))


@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4], ids=str)
def test_compiled_as_one_op(recipe):
    """For any number of tokens, under vLLM's inference mode."""
    seen = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    layer = ServedLinear(Weight(weight(recipe, 96, 128), torch.tensor(0.02)), recipe)
    graph = torch.compile(layer, fullgraph=True, dynamic=True, backend=look)
    with torch.inference_mode():
        for tokens in (8, 3, 40):
            x = randn(tokens, 128, seed=tokens)
            assert torch.equal(graph(x), layer(x))
    assert seen == [["blockscale.served_linear.default"]]


@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4], ids=str)
def test_the_op_is_what_torch_expects(recipe):
    q, x = weight(recipe, 96, 128), randn(5, 128)
    layer = ServedLinear(Weight(q, torch.tensor(0.02)), recipe)
    stored = layer.codes, layer.scales, layer.global_scale, layer.input_scale
    how = layer.format_name, layer.layout_name, layer.shape, recipe.text
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.blockscale.served_linear.default, (x, *stored, randn(96), *how)
        )


# --- experts --------------------------------------------------------------------------------------

E, H, W = 4, 64, 32


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x, scores = randn(tokens, H), torch.softmax(randn(tokens, E, seed=3).float(), -1)
    weights, ids = scores.topk(2)
    return x, weights, ids.int()  # as vLLM's routers give them


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 0])
def test_experts_have_the_bits_of_quantized_experts(recipe, tokens):
    up, down = weight(recipe, E, 2 * W, H), weight(recipe, E, H, W)
    x, weights, ids = routed(tokens)
    layer = ServedExperts(Experts(up, down, None, torch.tensor(1.0), torch.tensor(1.0)), recipe)
    expected = bs.nn.quantized_experts(*(x, weights, bs.route(ids, E), up, down), recipe=recipe)
    assert torch.equal(layer(x, weights, ids), expected)


def per_expert(shape: tuple[int, ...], seed: int) -> bs.ScaledTensor:
    """A stack whose matrices have global scales of their own."""
    each = [bs.quantize(randn(*shape[1:], seed=seed + e), "nvfp4") for e in range(shape[0])]
    return torch.stack(each)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 0])
def test_scales_of_the_checkpoint_are_those_of_experts_inputs(apart, tokens):
    """Pair by pair, with the bits of single products."""
    gate, up, down = (
        per_expert(shape, seed)
        for seed, shape in ((10, (E, W, H)), (20, (E, W, H)), (30, (E, H, W)))
    )
    whole = per_expert((E, 2 * W, H), 40)
    scales = torch.tensor(0.003), torch.tensor(0.01)
    layer = ServedExperts(
        Experts(up if apart else whole, down, gate if apart else None, *scales), NVFP4
    )
    x, weights, ids = routed(tokens)
    rows = torch.zeros(tokens, 2, H)
    for token in range(tokens):
        for j, e in enumerate(ids[token].tolist()):
            q = bs.quantize(x[token, None], "nvfp4", global_scale=scales[0])
            stacks = [gate[e], up[e]] if apart else [whole[e]]
            h = torch.cat([bs.gemm(q, each.mT) for each in stacks], 1)
            (a,) = bs.swiglu_quantize(h, "nvfp4", axes=(-1,), global_scale=scales[1])
            rows[token, j] = bs.gemm(a, down[e].mT)[0].float()
    first, second = (weights[:, j, None] * rows[:, j] for j in (0, 1))
    assert torch.equal(layer(x, weights, ids), (first + second).bfloat16())


def test_experts_with_biases_and_another_activation():
    recipe = bs.Recipe("mxfp4", activations="bfloat16")
    activation = bs.nn.GatedActivation(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)
    up, down, biases = (
        weight(recipe, E, 2 * W, H),
        weight(recipe, E, H, W),
        (randn(E, 2 * W), randn(E, H)),
    )
    layer = ServedExperts(Experts(up, down), recipe, activation, *biases)
    x, weights, ids = routed(9)
    expected = bs.nn.quantized_experts(
        *(x, weights, bs.route(ids, E), up, down),
        recipe=recipe,
        activation=activation,
        up_bias=biases[0],
        down_bias=biases[1],
    )
    assert torch.equal(layer(x, weights, ids), expected)


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, NVFP4], ids=str)
def test_hopper_has_all_kernels(recipe, groups):
    with gpu("sm_90a"):
        check_device(CPU, recipe, "o_proj", groups=groups)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
@pytest.mark.parametrize("groups", [False, True])
def test_other_gpus_are_refused(arch, groups):
    with (
        gpu(arch),
        pytest.raises(ValueError, match=r"^o_proj: .* does not run blockscale's layers"),
    ):
        check_device(CPU, NVFP4, "o_proj", groups=groups)


def test_formats_without_a_kernel_are_refused():
    """Blackwell has none for bf16 by weights of four bits."""
    with gpu("sm_100a"):
        check_device(CPU, NVFP4, "o_proj")
        with pytest.raises(
            ValueError, match=r"no kernel multiplies bf16 by nvfp4 on Blackwell"
        ) as why:
            check_device(CPU, bs.Recipe("nvfp4", activations="bfloat16"), "o_proj")
    assert "Hopper (compute capability 9.0) does" in str(why.value)
    assert "without quantization='blockscale'" in str(why.value)


def test_cpus_are_served():
    check_device(CPU, NVFP4, "o_proj")


def test_blockscale_does_not_import_vllm():
    assert "vllm" not in sys.modules
