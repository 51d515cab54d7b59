"""Recipes that do more than round to nearest: which operand gets what, and by which seed."""

from __future__ import annotations

import copy
import json
import pickle
from unittest.mock import patch

import pytest
import torch
from planned import torch_gpu
from torch.utils.checkpoint import checkpoint

import blockscale as bs
from blockscale.nn import plan_cache
from blockscale.nn.nvfp4 import METHODS
from blockscale.nn.seeds import LayerSeed, OperandSeed, number_of
from blockscale.philox import random_bits
from blockscale.seed import Numbers

NVFP4 = bs.Recipe.nvfp4()
RHT = dict(NVFP4.quantization)["activations.wgrad"].hadamard
BF16 = torch.bfloat16


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(k=64, n=48, recipe=NVFP4, name="proj", bias=True):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(k, n, bias)})
    return bs.convert(model, recipe)[name]


def step(module, x, g):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad, module.weight.grad.clone()


def value_of(role):
    """A recipe's layers have one key for each role, and count from numbers of their own on."""
    return ("activations", "weights", "gradients").index(role)


# --- what is done ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [48, 37])
def test_what_nvidia_does_to_each_operand(rows):
    """By ``quantize`` and ``gemm``, of operands that are padded where a transform needs it."""
    module = layer()
    x, g = random(rows, 64), random(rows, 48, seed=1)
    y, dgrad, wgrad = step(module, x, g)

    def nvfp4(t, axis, **how):
        return bs.quantize(t, "nvfp4", axis, pad=True, **how)

    w = module.weight.detach()
    expected = bs.gemm(nvfp4(x, -1), nvfp4(w, -1, square=True).mT, torch.float32, bias=module.bias)
    assert torch.equal(y, expected)
    seed = bs.Seed(value_of("gradients"), step=number_of("proj") + 1)
    g_rows, w_columns = nvfp4(g, -1, seed=seed), nvfp4(w, -2, square=True)
    assert torch.equal(dgrad, bs.gemm(g_rows, w_columns, torch.float32))
    whole = [torch.nn.functional.pad(t, (0, 0, 0, -rows % 16)) for t in (g, x)]
    transformed = [
        nvfp4(t, -2, hadamard=RHT, seed=each) for t, each in zip(whole, (seed, None), strict=True)
    ]
    assert torch.equal(wgrad, bs.gemm(transformed[0].mT, transformed[1], torch.float32))
    assert (wgrad - g.mT @ x).norm() < 0.2 * (g.mT @ x).norm()


def test_each_step_rounds_otherwise_and_a_step_can_be_set():
    module, given = layer(), (random(32, 64), random(32, 48, seed=1))
    first, second = step(module, *given), step(module, *given)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[2], second[2])
    bs.nn.set_rounding_step(module, 1)
    for a, b in zip(step(module, *given), second, strict=True):
        assert torch.equal(a, b)


def test_the_mean_over_steps_is_the_gradient():
    """What rounding to nearest never comes to, as it rounds alike each time."""
    module, x, g = layer(bias=False), random(32, 64), random(32, 48, seed=1)
    exact = g @ bs.quantize(module.weight.detach(), "nvfp4", -2, square=True).dequantize()
    grads = torch.stack([step(module, x, g)[1] for _ in range(256)])
    one, mean = ((grads[0] - exact).norm(), (grads.mean(0) - exact).norm())
    assert mean < 2 * one / 16
    nearest = layer(recipe=bs.Recipe("nvfp4"), bias=False)
    assert torch.equal(step(nearest, x, g)[1], step(nearest, x, g)[1])


def test_layers_have_numbers_of_their_own():
    given = random(32, 64), random(32, 48, seed=1)
    assert not torch.equal(step(layer(name="a"), *given)[1], step(layer(name="b"), *given)[1])
    assert torch.equal(step(layer(name="a"), *given)[1], step(layer(name="a"), *given)[1])


def test_compiled_code_is_the_same_for_all_layers():
    """Which would else be compiled anew for each, up to torch's limit."""
    torch.compiler.reset()
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(12)))
    bs.convert(blocks, NVFP4)
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        blocks(random(32, 64).requires_grad_()).square().mean().backward()
    assert bs.nn.rounding_step(blocks) == 1


def test_converting_again_keeps_the_count():
    module, given = layer(), (random(32, 64), random(32, 48, seed=1))
    model = torch.nn.ModuleDict({"other": module})
    step(module, *given)
    bs.convert(model, bs.Recipe.nvfp4("ms_eden"))
    assert bs.nn.rounding_step(model) == 1
    assert module.rounding_step == number_of("other") + 1


def test_ranks_round_their_rows_as_one_does_all():
    """Given one global scale: that of each rank is that of its own rows."""
    g, now = random(64, 48), torch.tensor(5)
    scale = bs.quantize(g, "nvfp4").global_scale
    whole = OperandSeed(LayerSeed(3, now), "gradients").of(g.shape)
    expected = bs.quantize(g, "nvfp4", seed=whole, global_scale=scale)
    for rank, part in enumerate(g.chunk(4)):
        seed = OperandSeed(LayerSeed(3, now, rank, 4), "gradients").of(part.shape)
        found = bs.quantize(part, "nvfp4", seed=seed, global_scale=scale)
        assert torch.equal(found.data, expected.data[16 * rank :][:16])
    of_weights = [OperandSeed(LayerSeed(3, now, *at), "weights").of((8, 8)) for at in ((), (1, 4))]
    assert of_weights[0] == of_weights[1]


@pytest.mark.parametrize("rows", [128, 100])
def test_what_ms_eden_does_to_each_operand(rows):
    """Signs of a step and a product, alike for both operands; zeros where blocks are not full."""
    module = layer(recipe=bs.Recipe.nvfp4("ms_eden"), k=64, n=48, bias=False)
    x, g = random(rows, 64), random(rows, 48, seed=1)
    y, dgrad, wgrad = step(module, x, g)
    w = module.weight.detach()
    better = {"scaling": "four_over_six"}
    q = bs.quantize(x, "nvfp4", **better), bs.quantize(w, "nvfp4", **better)
    assert torch.equal(y, bs.gemm(q[0], q[1].mT, torch.float32))

    def transformed(t, axis, role, product):
        more = -t.shape[axis] % 128
        t = torch.nn.functional.pad(t, (0, more) if axis == -1 else (0, 0, 0, more))
        purposes = ("activations", "weights", "gradients", "fprop", "dgrad", "wgrad")
        numbers = Numbers(purposes.index(product), number_of("proj") + 1, 0, 0, 0)
        bits = random_bits(numbers, torch.empty(128))
        signs = torch.where(bits % 2 == 1, -1.0, 1.0).repeat(t.shape[axis] // 128)
        t = t * (signs if axis == -1 else signs[:, None])
        how = {"hadamard": bs.Hadamard(128), "scaling": "ms_eden", "pad": True}
        return bs.quantize(
            t, "nvfp4", axis, seed=bs.Seed(value_of(role), number_of("proj") + 1), **how
        )

    operands = transformed(g, -1, "gradients", "dgrad"), transformed(w, -2, "weights", "dgrad")
    assert torch.equal(dgrad, bs.gemm(*operands, torch.float32))
    operands = transformed(g, -2, "gradients", "wgrad"), transformed(x, -2, "activations", "wgrad")
    assert torch.equal(wgrad, bs.gemm(operands[0].mT, operands[1], torch.float32))
    for found, exact in ((dgrad, g @ w), (wgrad, g.mT @ x)):
        assert (found - exact).norm() < 0.2 * exact.norm()


# --- around layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [32, 37])
@pytest.mark.parametrize("method", METHODS)
def test_compiled(method, rows):
    torch.compiler.reset()
    x, g = random(rows, 64).to(BF16), random(rows, 48, seed=1).to(BF16)
    recipe = bs.Recipe.nvfp4(method)
    eager, other = layer(recipe=recipe).to(BF16), layer(recipe=recipe).to(BF16)
    run = torch.compile(other, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x_, x__ = (x.clone().requires_grad_() for _ in range(2))
        eager.zero_grad()
        other.zero_grad()
        y, z = eager(x_), run(x__)
        y.backward(g)
        z.backward(g)
        assert torch.equal(y, z)
        assert torch.equal(x_.grad, x__.grad)
        assert torch.equal(eager.weight.grad, other.weight.grad)
    assert bs.nn.rounding_step(eager) == bs.nn.rounding_step(other) == 3


@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_counts_what_it_repeats(method):
    """Signs of both operands of wgrad are those of the forward that was repeated."""
    module = layer(recipe=bs.Recipe.nvfp4(method))
    x, g = random(32, 64).requires_grad_(), random(32, 48, seed=1)
    checkpoint(module, x, use_reentrant=False).backward(g)
    assert bs.nn.rounding_step(module) == 2
    wgrad = module.weight.grad.clone()
    bs.nn.set_rounding_step(module, 1)
    _, found, of_weight = step(module, x.detach(), g)
    assert torch.equal(found, x.grad)
    assert torch.equal(of_weight, wgrad)


def test_passes_without_gradients_count_nothing():
    module = layer()
    with torch.no_grad():
        module(random(8, 64))
    assert bs.nn.rounding_step(module) == 0


def test_no_state_dict_has_the_step():
    module = layer()
    assert list(module.state_dict()) == ["weight", "bias"]
    torch.nn.Linear(64, 48).load_state_dict(module.state_dict())
    step(module, random(8, 64), random(8, 48))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert bs.nn.rounding_step(twin) == 1
        given = random(32, 64), random(32, 48, seed=1)
        assert torch.equal(step(twin, *given)[1], step(copy.deepcopy(module), *given)[1])


def test_converted_back_and_by_another_recipe():
    model = torch.nn.Sequential(torch.nn.Linear(64, 48))
    bs.convert(model, NVFP4)
    bs.convert(model, bs.Recipe("nvfp4"))
    assert not list(model.buffers())
    bs.convert(model, NVFP4)
    assert len(list(model.buffers())) == 1
    bs.convert(model, None)
    assert type(model[0]) is torch.nn.Linear
    assert not list(model.buffers())


def test_the_step_follows_its_layer():
    module = layer().to("meta")
    assert module.rounding_step.device.type == "meta"
    with patch.object(torch, "empty_like", torch.ones_like):  # what memory may hold
        assert bs.nn.rounding_step(module.to_empty(device="cpu")) == 0
    bs.nn.set_rounding_step(module, 3)
    assert bs.nn.rounding_step(module.half()) == 3


@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_assigned_bring_a_step(method):
    recipe = bs.Recipe.nvfp4(method)
    loaded, given = layer(recipe=recipe).to("meta"), (random(32, 64), random(32, 48, seed=1))
    loaded.load_state_dict(layer(recipe=recipe).state_dict(), assign=True)
    for a, b in zip(step(loaded, *given), step(layer(recipe=recipe), *given), strict=True):
        assert torch.equal(a, b)


def test_layers_that_are_converted_for_inference_train():
    with torch.inference_mode():
        module = torch.nn.Sequential(torch.nn.Linear(64, 48))
    with torch.inference_mode(False):
        module[0].weight = torch.nn.Parameter(random(48, 64))
        module[0].bias = None
    with torch.inference_mode():
        bs.convert(module, NVFP4)
    step(module[0], random(32, 64), random(32, 48))
    assert bs.nn.rounding_step(module[0]) == 1


def test_function_transforms_take_the_step_as_it_is():
    module, x = layer(bias=False), random(32, 64)

    def loss(x):
        return (module(x) * random(32, 48, seed=1)).sum()

    found = torch.func.grad(loss)(x)
    assert bs.nn.rounding_step(module) == 0
    seed = bs.Seed(value_of("gradients"), step=number_of("proj"))
    g = bs.quantize(random(32, 48, seed=1), "nvfp4", seed=seed)
    w = bs.quantize(module.weight.detach(), "nvfp4", -2, square=True)
    assert torch.equal(found, bs.gemm(g, w, torch.float32))


@pytest.mark.parametrize("method", METHODS)
def test_samples_and_models_of_a_batch(method):
    """Each as if it were alone: gradients of samples, and models whose steps differ."""
    recipe = bs.Recipe.nvfp4(method)
    module, x, g = layer(recipe=recipe, bias=False), random(3, 16, 64), random(3, 16, 48, seed=1)

    def loss(weight, x, g):
        return (torch.func.functional_call(module, {"weight": weight}, (x,)) * g).sum()

    weight = module.weight.detach()
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, x, g)
    for sample, *given in zip(each, x, g, strict=True):
        assert torch.equal(sample, torch.func.grad(loss)(weight, *given))
    twins = [copy.deepcopy(module) for _ in range(3)]
    for i, twin in enumerate(twins):
        bs.nn.set_rounding_step(twin, i)

    def of_model(states, x, g):
        def loss(x):
            return (torch.func.functional_call(module, states, (x,)) * g).sum()

        return torch.func.grad(loss)(x)

    states = torch.func.stack_module_state(twins)
    found = torch.func.vmap(of_model, in_dims=(0, None, None))(states, x[0], g[0])
    for i, one in enumerate(found):
        state = {**dict(twins[i].named_parameters()), **dict(twins[i].named_buffers())}
        torch.testing.assert_close(one, of_model(state, x[0], g[0]))  # another order of sums
    assert (found[0] - found[1]).norm() > 0.1 * found[0].norm()


def test_samples_are_rounded_by_numbers_of_their_own():
    """As no format with a global scale would be."""
    recipe = bs.Recipe("mxfp8", quantization={"activations": bs.Quantization(stochastic=True)})
    module, x = layer(recipe=recipe), random(3, 16, 64)
    found = torch.func.vmap(module)(x)
    assert torch.equal(found, torch.stack([torch.func.vmap(module)(each[None])[0] for each in x]))


def test_products_in_high_precision():
    recipe = bs.Recipe("nvfp4", high_precision=("wgrad",), quantization=dict(NVFP4.quantization))
    module, x, g = layer(recipe=recipe, bias=False), random(32, 64), random(32, 48, seed=1)
    assert torch.equal(step(module, x, g)[2], g.mT @ x)


@pytest.mark.parametrize("done", [{"hadamard": RHT}, {"scaling": "four_over_six"}])
@pytest.mark.parametrize("compiles", [False, True])
def test_dgrad_has_a_global_scale_of_its_own(done, compiles):
    """Where fprop's is of other elements, or leaves other room: outliers would saturate."""
    of_fprop = dict.fromkeys(("activations.fprop", "weights.fprop"), bs.Quantization(**done))
    module, g = layer(recipe=bs.Recipe("nvfp4", quantization=of_fprop), bias=False), random(32, 48)
    with torch.no_grad():
        module.weight[3, 5] = 100
    x = random(32, 64).requires_grad_()
    torch.compiler.reset()
    (torch.compile(module, backend="aot_eager") if compiles else module)(x).backward(g)
    operands = bs.quantize(g, "nvfp4"), bs.quantize(module.weight.detach(), "nvfp4", -2)
    assert torch.equal(x.grad, bs.gemm(*operands, torch.float32))


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_reused(method):
    """But for those whose signs are of a step, as their gradient's are."""
    module, x, g = layer(recipe=bs.Recipe.nvfp4(method)), random(32, 64), random(32, 48, seed=1)
    expected = [step(module, x, g) for _ in range(3)]
    bs.nn.set_rounding_step(module, 0)
    with bs.reuse_weights():
        for each in expected:
            for a, b in zip(step(module, x, g), each, strict=True):
                assert torch.equal(a, b)


def test_for_inference_the_forward_has_the_same_bits():
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 48)), random(8, 64)
    expected = bs.convert(copy.deepcopy(model), NVFP4)(x)
    found = bs.quantize_(bs.convert(model, NVFP4), NVFP4)
    assert torch.equal(found(x), expected)
    assert not list(found.buffers())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "without hadamard"])
def test_gpus_go_by_a_plan(monkeypatch, method, bias):
    """With the bits of tensors, and as many launches again in each step."""
    torch.compiler.reset()
    recipe = bs.Recipe.nvfp4(method) if method in METHODS else bs.Recipe.nvfp4(hadamard=None)
    module = layer(k=128, n=256, recipe=recipe, bias=bias)
    given = random(128, 128), random(128, 256, seed=1)
    expected = [step(module, *given) for _ in range(2)]
    bs.nn.set_rounding_step(module, 0)
    with torch_gpu(monkeypatch) as counts:
        for each in expected:
            counts.quantized.clear()
            for a, b in zip(step(module, *given), each, strict=True):
                assert torch.equal(a, b)
            assert len(counts.quantized) == (4 if method == "without hadamard" else 6)
        assert sum(plan is not None for plan in plan_cache._plans.values()) == 1
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        bs.nn.set_rounding_step(module, 0)
        for each in expected:
            for a, b in zip(step(compiled, *given), each, strict=True):
                assert torch.equal(a, b)


def test_a_plan_needs_a_seed(monkeypatch):
    x, w = random(64, 64), random(48, 64)
    x.requires_grad_()
    with torch_gpu(monkeypatch):
        for _ in range(2):
            y = bs.nn.linear(x, w, recipe=NVFP4, seed=bs.nn.LayerSeed(3, torch.tensor(0)))
            y.sum().backward()
            with pytest.raises(ValueError, match="seed: got None, and the recipe rounds"):
                bs.nn.linear(x, w, recipe=NVFP4).sum().backward()


# --- what is refused ------------------------------------------------------------------------------


def test_a_function_needs_a_seed():
    x, w = random(8, 64), random(48, 64)
    with pytest.raises(ValueError, match=r"seed: got None, .*LayerSeed\(value, step\)"):
        bs.nn.linear(x, w, recipe=NVFP4)
    with pytest.raises(TypeError, match=r"seed: got int; expected blockscale\.nn\.LayerSeed"):
        bs.nn.linear(x, w, recipe=NVFP4, seed=3)
    bs.nn.linear(x, w, recipe=NVFP4, seed=bs.nn.LayerSeed(3, torch.tensor(0)))


def test_what_counts_no_steps():
    with pytest.raises(ValueError, match="0 is a MultiheadAttention, which does not round stoch"):
        bs.convert(torch.nn.Sequential(torch.nn.MultiheadAttention(64, 2)), NVFP4)
    with pytest.raises(ValueError, match=r"autocast knows no layers .*call blockscale.convert"):
        bs.autocast(NVFP4)
    with pytest.raises(ValueError, match=r"experts do not know yet; .*overrides=\{'\*.experts'"):
        bs.nn.MoE(64, 32, 4, bs.nn.Router(top_k=2), recipe=NVFP4)
    with pytest.raises(ValueError, match="model: no layer of it rounds stochastically"):
        bs.nn.set_rounding_step(torch.nn.Linear(8, 8), 1)
    for given in (-1, 1.0, True):
        with pytest.raises(ValueError, match=r"step: got .*; expected a number"):
            bs.nn.set_rounding_step(layer(), given)


def test_quantization_that_cannot_be():
    rht = bs.Quantization(hadamard=RHT)
    with pytest.raises(ValueError, match=r"gradients.wgrad have different transforms"):
        bs.Recipe("nvfp4", quantization={"activations.wgrad": rht})
    with pytest.raises(ValueError, match=r"quantization: .*'weight'.*did you mean 'weights'"):
        bs.Recipe("nvfp4", quantization={"weight": rht})
    with pytest.raises(TypeError, match=r"quantization\['weights'\]: got str; expected"):
        bs.Recipe("nvfp4", quantization={"weights": "square"})
    with pytest.raises(TypeError, match="quantization: got int; expected a dict"):
        bs.Recipe("nvfp4", quantization=3)
    with pytest.raises(ValueError, match="blocks of 'fp8_128x128' are squares; leave it out"):
        bs.Recipe("fp8_block", quantization={"weights": bs.Quantization(square=True)})
    with pytest.raises(ValueError, match="square, hadamard: a transform goes along one side"):
        bs.Quantization(square=True, hadamard=RHT)
    with pytest.raises(TypeError, match="stochastic: got 1; expected True or False"):
        bs.Quantization(stochastic=1)
    with pytest.raises(TypeError, match=r"hadamard: got 16; expected blockscale.Hadamard"):
        bs.Quantization(hadamard=16)
    with pytest.raises(ValueError, match=r"method: .*nvidia.*four_over_six.*ms_eden"):
        bs.Recipe.nvfp4("mxfp4")
    with pytest.raises(ValueError, match="scaling: 'ms_eden' corrects blocks that"):
        bs.Recipe.nvfp4("ms_eden", hadamard=bs.Hadamard(8))
    with pytest.raises(ValueError, match="random_signs: are those of a transform that has none"):
        bs.Quantization(random_signs=True)
    with pytest.raises(ValueError, match="scaling, stochastic: 'four_over_six' rounds elements"):
        bs.Quantization(stochastic=True, scaling="four_over_six")
    with pytest.raises(ValueError, match="'mxfp8' has not; leave it out, or choose 'nvfp4'"):
        bs.Recipe(quantization={"weights": bs.Quantization(scaling="four_over_six")})
    random_ = bs.Recipe("nvfp4", quantization={"weights": bs.Quantization(stochastic=True)})
    with pytest.raises(ValueError, match="rounds operands of fprop stochastically, or transforms"):
        bs.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 48)), random_)


def test_as_a_dict():
    others = bs.Recipe.nvfp4(hadamard=None, overrides={"*.0": None}), bs.Recipe()
    for recipe in (*map(bs.Recipe.nvfp4, METHODS), *others):
        assert bs.Recipe.from_dict(recipe.to_dict()) == recipe
        assert recipe.text == bs.Recipe.from_dict(recipe.to_dict()).text
        values = recipe.to_dict()
        values.pop("overrides", None)
        assert json.loads(recipe.text) == values
        assert eval(repr(recipe), vars(bs)) == recipe
    with pytest.raises(ValueError, match=r"values: .*'signs'"):
        bs.Quantization.from_dict({"signs": 3})
    with pytest.raises(TypeError, match="values: got int; expected what to_dict"):
        bs.Quantization.from_dict(3)
    assert repr(NVFP4) == "Recipe.nvfp4()"


@pytest.mark.parametrize("method", METHODS)
def test_fused_layers_run_their_parts(method):
    """Producers round to nearest, by amax."""
    recipe = bs.Recipe.nvfp4(method)
    torch.manual_seed(0)
    mlp = bs.nn.MLP(64, 96, recipe=recipe)
    x, g = random(32, 64), random(32, 64, seed=1)
    given = x.clone().requires_grad_()
    mlp(given).backward(g)
    found = given.grad, mlp.gate_up.weight.grad.clone(), mlp.down.weight.grad.clone()
    bs.nn.set_rounding_step(mlp, 0)
    mlp.zero_grad()
    again = x.clone().requires_grad_()
    gate, up = mlp.gate_up(again).chunk(2, -1)
    mlp.down(torch.nn.functional.silu(gate) * up).backward(g)
    expected = again.grad, mlp.gate_up.weight.grad, mlp.down.weight.grad
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()
    linear = bs.nn.RMSNormLinear(64, 48, recipe=recipe)
    y = linear(x)
    y.backward(random(32, 48))
    bs.nn.set_rounding_step(linear, 0)
    assert torch.equal(y, linear.linear(linear.norm(x)))
    with torch.no_grad():
        served = bs.quantize_(linear, recipe)
        assert torch.equal(served(x), y)


@pytest.mark.parametrize("converted", [False, True])
def test_fused_layers_of_parts_that_are_there(converted):
    """Go on with the number and the count of a converted one."""
    proj, norm = layer(), torch.nn.RMSNorm(64, 1e-6)
    given = random(32, 64), random(32, 48, seed=1)
    if converted:
        step(proj, *given)
    else:
        proj = torch.nn.Linear(64, 48)
    fused = bs.nn.RMSNormLinear.of(norm, proj, NVFP4)
    fused(given[0]).backward(given[1])
    assert bs.nn.rounding_step(fused) == (2 if converted else 1)
    assert not converted or fused.linear.rounding_start == number_of("proj")


def test_layers_without_a_name_draw_a_number():
    torch.manual_seed(0)
    mlp = bs.nn.MLP(64, 96, recipe=NVFP4)
    assert mlp.gate_up.rounding_start != mlp.down.rounding_start
    torch.manual_seed(0)
    assert bs.nn.MLP(64, 96, recipe=NVFP4).down.rounding_start == mlp.down.rounding_start
    before = torch.get_rng_state()
    torch.manual_seed(0)
    bs.nn.Linear(8, 8)
    plain = torch.get_rng_state()
    torch.manual_seed(0)
    torch.nn.Linear(8, 8)
    assert torch.equal(plain, torch.get_rng_state())
    torch.set_rng_state(before)


def test_a_state_goes_on_where_layers_have_counted_differently():
    """As where some blocks are checkpointed, and layers have numbers of their own."""
    made = [bs.nn.Linear(64, 64, recipe=NVFP4) for _ in range(2)]
    model = torch.nn.Sequential(*made)
    x, g = random(32, 64), random(32, 64, seed=1)
    for _ in range(3):
        first = checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=False)
        model[1](first).backward(g)
    state = json.loads(json.dumps(bs.nn.rounding_state(model)))
    assert [count for _, count in state.values()] == [6, 3]
    with pytest.raises(ValueError, match=r"'1' has counted 3 forward passes and '0' 6"):
        bs.nn.rounding_step(model)
    torch.manual_seed(5)
    other = torch.nn.Sequential(*(bs.nn.Linear(64, 64, recipe=NVFP4) for _ in range(2)))
    other.load_state_dict(model.state_dict())
    bs.nn.load_rounding_state(other, state)
    assert bs.nn.rounding_state(other) == state
    found = []
    for each in (model, other):
        each.zero_grad()
        each(x).backward(g)
        found.append([p.grad for p in each.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(
        ValueError, match=r"it lacks \['1'\], and has \['2'\] that the model has not"
    ):
        bs.nn.load_rounding_state(other, {"0": state["0"], "2": state["1"]})
    for wrong in ([5], [1, -1], [1, 2**62], [1, 2.0]):
        with pytest.raises(ValueError, match=r"for '1'; expected \[number, count\]"):
            bs.nn.load_rounding_state(other, {"0": [1, 1], "1": wrong})
    assert bs.nn.rounding_state(other)["0"][0] == state["0"][0]  # nothing was changed


def test_layers_of_one_seed_begin_alike_whatever_rounds_in_them():
    """Their numbers are of the generator's state, and differ where that is one."""

    def made(recipe: bs.Recipe) -> list[bs.nn.Linear]:
        torch.manual_seed(3)
        return [bs.nn.Linear(64, 64, recipe=recipe) for _ in range(3)]

    plain, first, again = made(bs.Recipe()), made(NVFP4), made(NVFP4)
    for layers in zip(plain, first, again, strict=True):
        assert len({layer.weight.sum().item() for layer in layers}) == 1
    assert [a.rounding_start for a in first] == [b.rounding_start for b in again]
    with torch.device("meta"):
        same = [bs.nn.Linear(64, 64, recipe=NVFP4).rounding_start for _ in range(3)]
    assert len({*same, *(layer.rounding_start for layer in first)}) == 6


def test_wrappers_change_no_number():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    wrapped = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64)), backend="eager")
    for each in (model, wrapped):
        bs.convert(each, NVFP4)
    assert (
        bs.nn.rounding_state(model) == bs.nn.rounding_state(wrapped) == {"0": [number_of("0"), 0]}
    )
