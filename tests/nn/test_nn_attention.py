"""Attention and encoders of torch.nn: training and evaluation multiply by the same recipe."""

from __future__ import annotations

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockscale as bs
from blockscale.nn import Linear, MultiheadAttention, linear

X = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2))
RECIPE = bs.Recipe("nvfp4")  # its global scale tells one product from three


def encoder_layer(**options):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, **options)


def attention(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(64, 4, **{"batch_first": True, **options})


def by_autocast(model):
    def run(*args, **kwargs):
        with bs.autocast(RECIPE):
            return model(*args, **kwargs)

    return run


@pytest.fixture(params=["convert", "autocast"])
def apply(request):
    """What makes a function of a model that runs it by the recipe."""
    return by_autocast if request.param == "autocast" else lambda m: bs.convert(m, RECIPE)


def in_eval(model, run, *args, **kwargs):
    model.eval()
    with torch.no_grad():
        return run(*args, **kwargs)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
def test_an_encoder_layer_in_eval(apply, options):
    """Its fast path would take the weights as they are."""
    layer = encoder_layer(**options)
    plain = in_eval(layer, layer, X)
    run = apply(layer)
    trained = layer.train() and run(X)
    evaluated = in_eval(layer, run, X)
    assert torch.equal(evaluated, trained)
    assert (evaluated - plain).norm() > 1e-3 * plain.norm()


@pytest.mark.parametrize("lengths", [None, (6, 4, 3)], ids=str)
def test_an_encoder_in_eval(apply, lengths):
    """It would make nested tensors of padded ones."""
    model = nn.TransformerEncoder(encoder_layer(), 2)
    mask = None
    if lengths is not None:
        mask = torch.arange(6) >= torch.tensor(lengths)[:, None]
    run = apply(model)
    trained = model.train() and run(X, src_key_padding_mask=mask)
    assert torch.equal(in_eval(model, run, X, src_key_padding_mask=mask), trained)


def test_products_of_attention(apply):
    """The four projections, and nothing else, are those of the recipe."""
    layer = attention(bias=False)
    y, weights = apply(layer)(X, X, X)
    q, k, v = (
        each.unflatten(-1, (4, 16)).transpose(1, 2)
        for each in linear(X.transpose(0, 1), layer.in_proj_weight, recipe=RECIPE)
        .transpose(0, 1)
        .chunk(3, -1)
    )
    scores = (q @ k.mT / 4).softmax(-1)
    values = (scores @ v).transpose(1, 2).flatten(2)
    expected = linear(values, layer.out_proj.weight, recipe=RECIPE)
    torch.testing.assert_close(weights, scores.mean(1), rtol=1e-4, atol=1e-5)
    error = (y - expected).norm() / expected.norm()
    assert error < 0.02  # the same but for elements that round the other way


@pytest.mark.parametrize("inputs", [(X, X, X), (X, OTHER, OTHER), (X, OTHER, OTHER.clone())],
                         ids=["self", "cross", "three"])  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"batch_first": False}, {"kdim": 64, "vdim": 64, "add_bias_kv": True},
    {"add_zero_attn": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("need_weights", [False, True])
def test_with_products_in_high_precision_it_is_that_of_torch(inputs, options, need_weights):
    layer, recipe = attention(**options), bs.Recipe(high_precision=("fprop",))
    if not layer.batch_first:
        turned = {id(x): x.transpose(0, 1) for x in inputs}
        inputs = [turned[id(x)] for x in inputs]
    wanted = layer(*inputs, need_weights=need_weights)
    with bs.autocast(recipe):
        by_mode = layer(*inputs, need_weights=need_weights)
    for y, weights in (by_mode, bs.convert(layer, recipe)(*inputs, need_weights=need_weights)):
        torch.testing.assert_close(y, wanted[0])
        torch.testing.assert_close(weights, wanted[1])


def test_each_way_to_project_is_quantized(monkeypatch):
    """Packed for one input, for two and for three, and from weights of their own."""
    shapes = []
    module = sys.modules[bs.autocast.__module__]
    monkeypatch.setattr(
        module,
        "linear",
        lambda x, w, b, **kwargs: shapes.append(tuple(w.shape)) or linear(x, w, b, **kwargs),
    )
    layer = bs.convert(attention(), RECIPE)
    layer(X, X, X)
    layer(X, OTHER, OTHER)
    layer(X, OTHER, OTHER.clone())
    assert shapes == [
        *((192, 64), (64, 64)),
        *((64, 64), (128, 64), (64, 64)),
        *((64, 64), (64, 64), (64, 64), (64, 64)),
    ]
    shapes.clear()
    layer = bs.convert(attention(kdim=32, vdim=96), RECIPE)
    layer(X, OTHER[..., :32], torch.ones(3, 5, 96))
    assert shapes == [(64, 64), (64, 32), (64, 96), (64, 64)]


def test_gradients_and_optimizer():
    layer = bs.convert(attention(), RECIPE)
    layer(X, X, X)[0].square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_there_and_back():
    model = nn.TransformerEncoder(encoder_layer(), 2).eval()
    fast = [(layer.activation_relu_or_gelu) for layer in model.layers], model.use_nested_tensor
    types = [type(m) for m in model.modules()]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        before = model(X)
        bs.convert(model, RECIPE)
        assert type(model.layers[0].self_attn) is MultiheadAttention
        assert type(model.layers[0].linear1) is Linear
        assert not torch.equal(model(X), before)
        bs.convert(model, None, lambda module, name: "self_attn" not in name)
        assert model.layers[0].activation_relu_or_gelu == 0  # attention is still converted
        bs.convert(model, None)
        assert torch.equal(model(X), before)
    assert [type(m) for m in model.modules()] == types
    after = [(layer.activation_relu_or_gelu) for layer in model.layers], model.use_nested_tensor
    assert after == fast
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_only_the_perceptron_of_an_encoder():
    """Attention may take its own fast path then, which sums in another order."""
    layer = encoder_layer()
    plain = layer(X)
    bs.convert(layer, RECIPE, lambda module, name: name.startswith("linear"))
    trained = layer.train()(X)
    evaluated = in_eval(layer, layer, X)
    assert (trained - plain).norm() > 0.02 * plain.norm()
    assert (evaluated - trained).norm() < 0.005 * plain.norm()


def test_quantize_leaves_attention_and_says_so():
    layer, report = encoder_layer(), bs.nn.ConversionReport()
    wanted = bs.convert(copy.deepcopy(layer), RECIPE, lambda m, name: name.startswith("linear"))
    bs.quantize_(layer, RECIPE, report=report)
    assert [(e.name, e.parameters) for e in report.left] == [("self_attn", 4 * 64 * 65)]
    for train in (True, False):
        with torch.set_grad_enabled(train):
            assert torch.equal(layer.train(train)(X), wanted.train(train)(X))


def test_copies():
    layer = bs.convert(encoder_layer(), RECIPE).eval()
    with torch.no_grad():
        y = layer(X)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(X), y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled(apply, train, where):
    """torch.compile takes a fast path that eager code leaves under a mode."""
    torch.compiler.reset()
    layer = encoder_layer()
    run = apply(layer)
    layer.train(train)
    with torch.set_grad_enabled(train):
        if where == "around" and apply is by_autocast:
            compiled = by_autocast(torch.compile(layer, backend="eager"))
        else:
            compiled = torch.compile(run, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), run(X))


def test_autocast_leaves_torch_as_it_was():
    assert torch.backends.mha.get_fastpath_enabled()
    with bs.autocast(RECIPE), bs.autocast(bs.Recipe()):
        F.multi_head_attention_forward(*attention_arguments())
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ZeroDivisionError), bs.autocast(RECIPE):
        1 / 0  # noqa: B018
    assert torch.backends.mha.get_fastpath_enabled()


def test_threads():
    """The switch of the fast paths is one for all of them."""
    layer = bs.convert(encoder_layer(), RECIPE).eval()

    def run(_):
        with torch.no_grad():
            return layer(X)

    wanted = run(0)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(y, wanted) for y in pool.map(run, range(64)))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", [bs.convert, bs.quantize_])
def test_compiled_code_sees_what_changes(change):
    """It was traced on the fast path."""
    torch.compiler.reset()
    layer = encoder_layer().eval()
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        plain = compiled(X)
        assert torch.equal(plain, layer(X))
        with bs.autocast(RECIPE):
            y = compiled(X)
            assert torch.equal(y, layer(X))
        assert not torch.equal(y, plain)
        change(layer, RECIPE)
        y = compiled(X)
    assert (y - plain).norm() > 0.02 * plain.norm()
    trained = layer.train()(X)
    assert (y - trained).norm() < 0.005 * trained.norm()


def attention_arguments():
    w, x = torch.randn(192, 64), X.transpose(0, 1)
    return x, x, x, 64, 4, w, None, None, None, False, 0.0, torch.randn(64, 64), None


def test_torch_autocast_decides_the_output():
    layer = bs.convert(attention(), RECIPE)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X, X, X)[0].dtype == torch.bfloat16


def test_a_subclass_with_its_own_forward_is_left():
    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    report = bs.nn.ConversionReport()
    model = nn.Sequential(Own(64, 4), nn.Linear(64, 64))
    bs.convert(model, RECIPE, report=report)
    assert [(e.name, e.why) for e in report.left] == [("0", "a subclass with a forward of its own")]
    assert type(model[0].out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
