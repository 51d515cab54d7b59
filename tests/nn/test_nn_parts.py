"""RMSNormLinear, LayerNormLinear and MLP: the bits of their parts, one after the other, without
what is between in high precision; and models that have such layers."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from parted import (
    BF16,
    F32,
    LAYERS,
    RECIPES,
    F,
    K,
    N,
    Seen,
    assert_same,
    both_passes,
    made,
    one_after_the_other,
    random,
)

import blockscale as bs
from blockscale import reference


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.fixture
def layer(name):
    return made(name)


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_bits_are_those_of_the_parts(name, recipe, dtype):
    layer, x = made(name, RECIPES[recipe], dtype), random(2, 35, K, dtype=dtype)
    got = both_passes(layer, x)
    with one_after_the_other(layer):
        assert_same(got, both_passes(layer, x))


def normalized(layer, x, wide):
    """The norm of rows by its formula, in the type ``wide``."""
    w, x = layer.norm.weight.to(wide), x.to(wide)
    if isinstance(layer, bs.nn.LayerNormLinear):
        return torch.nn.functional.layer_norm(x, (K,), w, layer.norm.bias.to(wide), layer.norm.eps)
    return torch.nn.functional.rms_norm(x, (K,), w, layer.norm.eps)


def exactly_normalized(layer, x):
    norm = layer.norm
    if isinstance(layer, bs.nn.LayerNormLinear):
        return reference.layernorm(x, norm.weight, norm.bias, norm.eps)[0]
    return reference.rmsnorm(x, norm.weight, norm.eps)[0]


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_norms_beside_torch(name, recipe):
    """The product is that of what the reference normalizes; gradients of the norm are float64's,
    from the product's."""
    layer, x = made(name, RECIPES[recipe]), random(70, K)
    y, dx, *others = both_passes(layer, x)
    d_norm, (dw, db) = others[:-2], others[-2:]
    rows = exactly_normalized(layer, x).detach().requires_grad_()
    linear = layer.linear
    want = bs.nn.linear(rows, linear.weight, linear.bias, recipe=linear.recipe)
    grads = torch.autograd.grad(
        want, [rows, linear.weight, linear.bias], random(*want.shape, seed=9)
    )
    assert_same([y, dw, db], [want.detach(), *grads[1:]])
    assert (rows - normalized(layer, x, F32)).abs().max() < 2**-5  # a bf16 number or two
    x64 = x.double().requires_grad_()
    wide = copy.deepcopy(layer.norm).double()
    layer64 = copy.copy(layer)
    layer64._modules = {"norm": wide}
    exact = torch.autograd.grad(
        normalized(layer64, x64, torch.float64), [x64, *wide.parameters()], grads[0].double()
    )
    for got, right in zip([dx, *d_norm], exact, strict=True):
        error = (got.double() - right).abs()
        assert (error <= 2.0**-8 * right.abs() + 2.0**-14 * right.abs().max()).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["mlp", "mlp_without_bias"])
def test_mlp_step_by_step(name, recipe):
    layer, x = made(name, RECIPES[recipe]), random(70, K)
    y, dx, *others = both_passes(layer, x)
    recipe, up, down = RECIPES[recipe], layer.gate_up, layer.down
    x = x.requires_grad_()
    h = bs.nn.linear(x, up.weight, up.bias, recipe=recipe)
    a = reference.swiglu(h.detach()).requires_grad_()
    want = bs.nn.linear(a, down.weight, down.bias, recipe=recipe)
    biases = [up.bias, down.bias] if name == "mlp" else []
    grads = torch.autograd.grad(want, [a, down.weight, *biases[1:]], random(*want.shape, seed=9))
    dh = reference.swiglu_backward(grads[0], h.detach())
    firsts = torch.autograd.grad(h, [x, up.weight, *biases[:1]], dh)
    assert_same([y, dx, *others], [want.detach(), *firsts, *grads[1:]])


def test_gate_is_the_first_half():
    layer = made("mlp_without_bias", bs.Recipe(high_precision=("fprop", "dgrad", "wgrad")), F32)
    gate, up = layer.gate_up.weight.chunk(2)
    x = random(9, K, dtype=F32)
    want = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("rmsnorm", ["norm_quantize", "quantize", "gemm"]),
        ("layernorm", ["norm_quantize", "quantize", "gemm"]),
        ("mlp_without_bias", ["quantize_both", "quantize", "gemm", "swiglu_quantize"]),
    ],
)
def test_nothing_between_is_quantized_from_high_precision(name, ops):
    layer, x = made(name), random(70, K).requires_grad_()
    with Seen() as seen:
        y = layer(x)
    assert seen.names == ops + (["quantize", "gemm"] if "mlp" in name else [])
    with Seen() as seen:
        y.backward(random(*y.shape))
    of_linear = ["quantize", "gemm", "gemm"]
    if name == "mlp_without_bias":
        want = ["quantize_both", "gemm", "quantize", "gemm", "swiglu_quantize", *of_linear]
    else:
        want = ["quantize_both", *of_linear, "norm_backward"]
    assert seen.names == want


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept(name, recipe):
    """x, or its columns, and columns of what is between, with the bytes of two steps: nothing of
    that in high precision."""
    layer, x, kept = made(name, RECIPES[recipe]), random(70, K), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x.requires_grad_())
    held = {id(p) for p in layer.parameters()}
    plain = [t for t in kept if not isinstance(t, bs.ScaledTensor) and id(t) not in held]
    plain = [t for t in plain if t.dim() > 1]
    if name.startswith("mlp"):
        (h,) = plain
        assert h.shape == (70, 2 * F)
        values = [x.detach(), reference.swiglu(h)]
    else:
        assert plain[0] is x
        assert len(plain) == 1
        values = [exactly_normalized(layer, x.detach())]
    quantized = [t for t in kept if isinstance(t, bs.ScaledTensor)]
    how = RECIPES[recipe].format_of("activations").name, -2
    for got, value in zip(quantized, values, strict=True):
        rounding = RECIPES[recipe].scale_rounding
        want = bs.quantize(value.detach(), *how, scale_rounding=rounding, pad=True)
        for a, b in zip(got._parts().values(), want._parts().values(), strict=True):
            assert torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_only", [False, True])
def test_quantized_for_inference(name, layer, weight_only):
    x = random(2, 20, K)
    want = layer(x).detach()
    recipe = bs.Recipe(activations="bfloat16") if weight_only else bs.Recipe()
    bs.quantize_(layer, recipe)
    products = [each for each in layer.children() if not hasattr(each, "normalized_shape")]
    assert all(isinstance(each.weight, bs.ScaledTensor) for each in products)
    y = layer(x)
    assert torch.equal(y, want) is not weight_only
    assert (y - want).float().norm() < 0.1 * want.float().norm()
    with torch.no_grad(), Seen() as seen:
        assert torch.equal(layer(x), y)
    last = "swiglu_quantize" if name.startswith("mlp") else "norm_quantize"
    assert (last in seen.names) is not weight_only
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)
        assert layer(x[:, :0]).shape == (2, 0, y.shape[2])
        with pytest.raises(ValueError, match=r"\(2, 20, 95\)"):
            layer(x[..., 1:])
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), y)


def test_converted_to_another_recipe_and_back(layer):
    x = random(40, K)
    want = layer(x).detach()
    bs.convert(layer, bs.Recipe("nvfp4"))
    assert not torch.equal(layer(x), want)
    bs.convert(layer, None)
    high = layer(x)
    assert 0 < (high - want).float().norm() < 0.1 * want.float().norm()
    bs.convert(layer, bs.Recipe())
    assert_same([layer(x)], [want])


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_state_is_that_of_norm_and_linear(name):
    layer = made(name)
    norm = torch.nn.RMSNorm(K, 1e-6) if name == "rmsnorm" else torch.nn.LayerNorm(K)
    pair = torch.nn.Sequential(OrderedDict(norm=norm, linear=torch.nn.Linear(K, N))).to(BF16)
    pair.load_state_dict(layer.state_dict())
    again = made(name)
    again.load_state_dict(pair.state_dict())
    x = random(40, K)
    assert torch.equal(again(x), layer(x))
    cls = type(layer)
    taken = cls.of(pair.norm, pair.linear, bs.Recipe())
    assert torch.equal(taken(x), layer(x))
    assert taken.linear.weight is pair.linear.weight
    assert taken.norm.weight is pair.norm.weight
    assert cls.of(layer.norm, layer.linear).linear.recipe is layer.linear.recipe
    assert cls.of(pair.eval().norm, pair.linear).training is False


def test_parts_that_do_not_fit():
    rms, linear = torch.nn.RMSNorm(K, 1e-6), torch.nn.Linear(K, N)
    of = bs.nn.RMSNormLinear.of
    with pytest.raises(TypeError, match=r"norm: got LayerNorm; expected a torch.nn.RMSNorm"):
        of(torch.nn.LayerNorm(K), linear)
    with pytest.raises(TypeError, match=r"linear: got Bilinear; expected a torch.nn.Linear"):
        of(rms, torch.nn.Bilinear(K, K, N))
    with pytest.raises(ValueError, match=r"norm: normalizes \(48,\) with a weight; .* \(96,\)"):
        of(torch.nn.RMSNorm(48, 1e-6), linear)
    with pytest.raises(ValueError, match=r"norm: normalizes \(96,\) without a weight"):
        of(torch.nn.RMSNorm(K, 1e-6, elementwise_affine=False), linear)
    with pytest.raises(ValueError, match="its eps is None"):
        of(torch.nn.RMSNorm(K), linear)
    with pytest.raises(TypeError, match="recipe: got str"):
        of(rms, linear, "mxfp8")


def test_halves_of_other_ranks_are_not_mixed():
    """Rows of a fused weight that ranks share are gates on one, and up on another."""
    layer = made("mlp")
    layer.gate_up = bs.nn.Linear(K, F, dtype=BF16)  # as much as one of two ranks has
    layer.down = bs.nn.Linear(F // 2, K, dtype=BF16)
    layer.down.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"gate_up: gave 48 features of 96: .* of their own"):
        layer(random(8, K))
    layer.down = bs.nn.Linear(F, K, dtype=BF16)
    with pytest.raises(ValueError, match=r"down.weight: has shape \(96, 48\)"):
        layer(random(8, K))
