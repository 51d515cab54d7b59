"""The layer in torch's other ways of running a model: the same bits, or a sentence."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import blockscale as bs
from blockscale.nn import Linear, linear

RECIPES = {name: bs.Recipe(name) for name in ("mxfp8", "nvfp4", "fp8_1x128")}
X = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=RECIPES)
def layer(request):
    torch.manual_seed(0)
    return Linear(64, 32, recipe=RECIPES[request.param])


def loss(layer, parameters, x):
    return functional_call(layer, parameters, (x,)).square().sum()


def gradients(layer, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    layer(x).square().sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


# --- what works -----------------------------------------------------------------------------------


def test_func_grad(layer):
    parameters = dict(layer.named_parameters())
    found, x = grad(lambda p, x: loss(layer, p, x), argnums=(0, 1))(parameters, X[0])
    want = gradients(layer, X[0])
    assert all(torch.equal(g, want[name]) for name, g in {**found, "x": x}.items())


def test_vmap_over_inputs_and_over_weights(layer):
    x = X * torch.tensor([1.0, 1e-7, 100.0]).reshape(3, 1, 1)  # of global scales that differ
    assert torch.equal(vmap(layer)(x), torch.stack([layer(each) for each in x]))
    weights = torch.randn(3, 32, 64)
    found = vmap(lambda x, w: linear(x, w, recipe=layer.recipe))(X, weights)
    for x, w, y in zip(X, weights, found, strict=True):
        assert torch.equal(y, linear(x, w, recipe=layer.recipe))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample(layer):
    parameters = dict(layer.named_parameters())
    samples = X * torch.tensor([1.0, 1e-7, 100.0]).reshape(3, 1, 1)
    found = vmap(grad(lambda p, x: loss(layer, p, x)), (None, 0))(parameters, samples)
    for i, x in enumerate(samples):
        want = gradients(layer, x)
        assert all(torch.equal(g[i], want[name]) for name, g in found.items())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_jacrev(layer):
    x = X[0, :2]
    assert jacrev(layer)(x).shape == (2, 32, 2, 64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_export(layer, strict, trained):
    layer.requires_grad_(trained)
    exported = torch.export.export(layer, (X[0],), strict=strict)
    assert torch.equal(exported.module()(X[1]), layer(X[1]))


@pytest.mark.parametrize("trained", [False, True])
def test_export_of_any_batch(layer, trained):
    """And what is exported with gradients has them."""
    with torch.set_grad_enabled(trained):
        shapes = ({0: torch.export.Dim("batch")},)
        exported = torch.export.export(layer, (X[0],), dynamic_shapes=shapes).module()
        for rows in (1, 2, 33, 500):
            x = torch.randn(rows, 64)
            assert torch.equal(exported(x), layer(x))
    if trained:
        want = gradients(layer, x)
        given = x.clone().requires_grad_()
        exported(given).square().sum().backward()
        assert torch.equal(given.grad, want["x"])
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter.grad, want[name])


def test_export_sees_a_new_weight(layer):
    exported = torch.export.export(layer, (X[0],)).module()
    before = exported(X[0])
    exported.weight.data.mul_(2)
    exported.bias.data.mul_(2)
    assert torch.equal(exported(X[0]), 2 * before)


def test_meta(layer):
    model = layer.to("meta")
    y = model(X.to("meta"))
    y.sum().backward()
    assert (y.shape, y.device.type, y.dtype) == ((3, 40, 32), "meta", torch.float32)
    assert model.weight.grad.shape == (32, 64)


def test_checkpointed_activations(layer):
    want = gradients(layer, X[0])
    for reentrant in (False, True):
        layer.zero_grad()
        x = X[0].clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        y.square().sum().backward()
        assert torch.equal(x.grad, want["x"])
        assert torch.equal(layer.weight.grad, want["weight"])


# --- what says that it does not -------------------------------------------------------------------

TWICE = {
    "backward": lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0].sum().backward(),
    "create_graph": lambda f, x: f(x).backward(create_graph=True),
    "unused": lambda f, x: torch.autograd.grad(
        torch.autograd.grad(f(x), x, create_graph=True)[0].sum(), x, allow_unused=True
    ),
    "hessian": torch.autograd.functional.hessian,
    "grad_grad": lambda f, x: grad(lambda x: grad(f)(x).square().sum())(x),
    "jacrev_jacrev": lambda f, x: jacrev(jacrev(f))(x),
}


@pytest.mark.parametrize("how", TWICE)
@pytest.mark.parametrize("of_what", [torch.sum, lambda y: y.square().sum()])
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Using backward")
def test_second_derivatives(layer, how, of_what):
    """Of a sum the incoming gradient is constant: its derivative by the weight is not zero."""
    x = X[0, :2].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        TWICE[how](lambda x: of_what(layer(x)), x)


def test_second_derivatives_by_the_weight(layer):
    def penalty(w):
        return grad(lambda x: linear(x, w, recipe=layer.recipe).sum())(X[0]).square().sum()

    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        grad(penalty)(layer.weight.detach())


def test_forward_mode(layer):
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(layer, (X[0],), (X[1],))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(layer.weight.detach(), torch.ones_like(layer.weight))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            linear(X[0], dual, recipe=layer.recipe)
        assert layer(X[0]).shape == (40, 32)  # nothing is asked for


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("change", [bs.convert, bs.quantize_])
def test_jit_script(change):
    model = change(torch.nn.Sequential(torch.nn.Linear(64, 32)), RECIPES["mxfp8"])
    with pytest.raises(NotImplementedError, match=r"torch\.export or torch\.compile"):
        torch.jit.script(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_jit_script_of_attention():
    attention = bs.convert(torch.nn.MultiheadAttention(64, 2), RECIPES["mxfp8"])
    with pytest.raises(NotImplementedError, match=r"torch\.export or torch\.compile"):
        torch.jit.script(attention)


def test_jit_trace(layer):
    with pytest.raises(NotImplementedError, match=r"torch\.export or torch\.compile"):
        torch.jit.trace(layer, (X[0],))
