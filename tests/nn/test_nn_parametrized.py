"""Layers whose parameters torch.nn.utils.parametrize computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import blockscale as bs
from blockscale.nn import ConversionReport, Linear, QuantizedLinear, linear

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
RECIPE, OTHER = bs.Recipe(), bs.Recipe("mxfp4")


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


class LowRank(nn.Module):
    """A matrix of its own that is added to the weight."""

    def __init__(self):
        super().__init__()
        self.update = nn.Parameter(torch.randn(32, 64))

    def forward(self, weight):
        return weight + self.update


class Own(nn.Linear):
    """A subclass as users write them."""

    def scaled(self, x):
        return 3 * self(x)


class Conv1D(nn.Module):
    """As in transformers: the weight is (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.02 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


PARAMETRIZATIONS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
    "low rank": lambda layer: parametrize.register_parametrization(layer, "weight", LowRank()),
    "twice": lambda layer: parametrize.register_parametrization(
        parametrizations.weight_norm(layer), "weight", Doubled()
    ),
    "weight and bias": lambda layer: parametrize.register_parametrization(
        parametrizations.weight_norm(layer), "bias", Doubled()
    ),
}


def made(cls=nn.Linear):
    """In eval mode, where spectral_norm computes the same weight in every pass."""
    torch.manual_seed(0)
    return nn.Sequential(cls(64, 32), nn.Linear(32, 32)).eval()


def is_as(layer, recipe):
    """Its products are those of the computed weight, and gradients reach what it is made of."""
    x = X.clone().requires_grad_()
    y = layer(x)
    if recipe is None:
        wanted = nn.functional.linear(X, layer.weight, layer.bias)
    else:
        wanted = linear(X, layer.weight, layer.bias, recipe=recipe)
    layer.zero_grad()
    y.square().sum().backward()
    return torch.equal(y, wanted) and all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("cls", [nn.Linear, Own])
@pytest.mark.parametrize("how", PARAMETRIZATIONS)
def test_parametrized_before(how, cls):
    model = made(cls)
    layer = PARAMETRIZATIONS[how](model[0])
    originals, before = dict(layer.named_parameters()), layer(X)
    report = ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert [entry.name for entry in report.converted] == ["0", "1"]
    assert not [e for e in report.left if e.name != "0.parametrizations.weight.0"]
    assert isinstance(layer, Linear)
    assert isinstance(layer, cls)
    assert is_as(layer, RECIPE)
    bs.convert(model, OTHER)
    assert is_as(layer, OTHER)
    bs.convert(model, None)
    assert not isinstance(layer, Linear)
    assert parametrize.type_before_parametrizations(layer) is cls
    assert torch.equal(layer(X), before)
    assert all(originals[name] is p for name, p in layer.named_parameters())


@pytest.mark.parametrize("cls", [nn.Linear, Own])
@pytest.mark.parametrize("how", PARAMETRIZATIONS)
def test_parametrized_after(how, cls):
    """Once, the layer stayed quantized, and in the recipe that it had."""
    model = bs.convert(made(cls), RECIPE)
    layer = PARAMETRIZATIONS[how](model[0])
    assert is_as(layer, RECIPE)
    report = ConversionReport()
    bs.convert(model, OTHER, report=report)
    assert [e.why for e in report.converted] == ["before by Recipe('mxfp8')"] * 2
    assert is_as(layer, OTHER)
    bs.convert(model, None, report=report)
    assert [e.why for e in report.converted] == ["back to what it was"] * 2
    assert parametrize.type_before_parametrizations(layer) is cls
    assert is_as(layer, None)


@pytest.mark.parametrize(
    "steps",
    [
        ("convert", "parametrize", "remove"),
        ("parametrize", "convert", "remove"),
        ("parametrize", "remove", "convert"),
    ],
)
@pytest.mark.parametrize("again", [None, OTHER])
def test_remove_parametrizations_at_every_stage(steps, again):
    model = made()
    for step in steps:
        if step == "convert":
            bs.convert(model, RECIPE)
        elif step == "parametrize":
            parametrizations.weight_norm(model[0])
        else:
            parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is Linear
    assert is_as(model[0], RECIPE)
    bs.convert(model, again)
    assert type(model[0]) is (Linear if again else nn.Linear)
    assert is_as(model[0], again)


def test_remove_one_of_two_after_conversion():
    model = made()
    layer = PARAMETRIZATIONS["weight and bias"](model[0])
    bs.convert(model, RECIPE)
    parametrize.remove_parametrizations(layer, "weight")
    assert is_as(layer, RECIPE)
    parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is Linear
    assert is_as(layer, RECIPE)


def test_a_parametrization_more_after_conversion():
    model = made()
    parametrizations.weight_norm(model[0])
    bs.convert(model, RECIPE)
    parametrize.register_parametrization(model[0], "bias", Doubled())
    assert is_as(model[0], RECIPE)
    assert is_as(bs.convert(model, None)[0], None)


def test_layers_do_not_share_their_class():
    """torch removes the property of a computed weight from the class."""
    model = made()
    for layer in model:
        parametrizations.weight_norm(layer)
    bs.convert(model, RECIPE)
    parametrize.remove_parametrizations(model[0], "weight")
    assert is_as(model[0], RECIPE)
    assert model[1].weight.shape == (32, 32)


def test_a_copy():
    model = made()
    parametrizations.weight_norm(model[0])
    bs.convert(model, RECIPE)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    bs.convert(twin, None)
    assert is_as(twin[0], None)
    assert is_as(model[0], RECIPE)


def test_spectral_norm_is_not_computed_by_a_conversion():
    """Each computation in training moves its estimate of the largest singular value."""
    model = made().train()
    parametrizations.spectral_norm(model[0])
    before = copy.deepcopy(model.state_dict())
    bs.convert(model, RECIPE)
    bs.convert(model, None)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_reuse_weights():
    model = made()
    parametrizations.weight_norm(model[0])
    bs.convert(model, RECIPE)
    wanted = model(X)
    with bs.reuse_weights():
        for _ in range(2):
            assert torch.equal(model(X), wanted)
        with torch.no_grad():
            model[0].parametrizations.weight.original0.mul_(2)
        assert not torch.equal(model(X), wanted)
        with parametrize.cached():
            assert torch.equal(model(X), model(X))
            assert is_as(model[0], RECIPE)


def test_quantize_refuses_a_computed_weight():
    model, report = made(), ConversionReport()
    parametrizations.weight_norm(model[0])
    for _ in range(2):  # as it is, and converted
        bs.quantize_(model, RECIPE, report=report)
        assert not isinstance(model[0], QuantizedLinear)
        assert [(e.name, e.parameters, e.why) for e in report.left] == [
            ("0", 64 * 32 + 2 * 32, "its weight is computed, it is no parameter; remove what "
            "computes it first")
        ]  # fmt: skip
        model[1] = nn.Linear(32, 32)
        bs.convert(model, RECIPE)
    parametrize.remove_parametrizations(model[0], "weight")
    assert isinstance(bs.quantize_(model, RECIPE)[0], QuantizedLinear)


def test_quantize_takes_a_layer_whose_bias_is_computed():
    model = made()
    wanted = bs.quantize_(copy.deepcopy(model), RECIPE)(X)
    parametrize.register_parametrization(model[0], "bias", Doubled())
    bs.quantize_(model, RECIPE)
    assert isinstance(model[0], QuantizedLinear)
    assert torch.equal(model(X), wanted)
    parametrize.remove_parametrizations(model[0], "bias")
    assert type(model[0]) is QuantizedLinear


def test_the_report_counts_what_weights_are_made_of():
    model, report = made(), ConversionReport()
    parametrizations.weight_norm(model[0])
    bs.convert(model, RECIPE, report=report)
    assert [e.parameters for e in report.converted] == [32 * 64 + 2 * 32, 33 * 32]
    assert report.converted_parameters == report.product_parameters == 32 * 65 + 32 * 32
    bs.convert(model, None, report=report)
    assert report.converted_parameters == report.product_parameters == 32 * 65 + 32 * 32


def test_the_share_of_what_was_converted_back():
    """Once it was 100 % of what was converted back."""
    model, report = bs.convert(made(), RECIPE), ConversionReport()
    bs.convert(model, None, lambda module, name: name == "1", report=report)
    assert (report.converted_parameters, report.product_parameters) == (32 * 32, 32 * 32 + 32 * 64)


def test_other_parametrized_layers_are_reported_by_their_name():
    model = nn.Sequential(made(), nn.Conv1d(4, 8, 3), nn.Embedding(9, 64))
    parametrizations.weight_norm(model[1])
    parametrizations.weight_norm(model[2])
    report = ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert [(e.name, e.parameters) for e in report.left] == [
        ("1", 8 * 4 * 3 + 8 + 8),
        ("2", 9 * 64 + 9),
    ]
    assert report.left[1].why == "looked up, not multiplied"
    assert report.product_parameters == 64 * 32 + 32 * 32 + 8 * 4 * 3 + 8


def test_a_head_that_is_tied_stays_alone():
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "embed": nn.Embedding(9, 64)})
    model["unembed"] = nn.Linear(64, 9, bias=False)
    model["unembed"].weight = model["embed"].weight
    parametrize.register_parametrization(model["embed"], "weight", Doubled())
    parametrize.register_parametrization(model["unembed"], "weight", Doubled())
    report = ConversionReport()
    bs.convert(model, RECIPE, report=report)
    assert [(e.name, e.why) for e in report.left] == [
        ("embed", "looked up, not multiplied"),
        ("unembed", "left alone by default: its weight is that of an embedding"),
    ]


@pytest.mark.parametrize("first", ["convert", "parametrize"])
def test_conv1d(first):
    model = nn.Sequential(Conv1D(32, 64))
    for step in (first, "parametrize" if first == "convert" else "convert"):
        if step == "convert":
            bs.convert(model, RECIPE)
        else:
            parametrizations.weight_norm(model[0])
    layer = model[0]
    wanted = linear(X, layer.weight.mT.contiguous(), layer.bias, recipe=RECIPE)
    assert torch.equal(layer(X), wanted)
    bs.convert(model, None)
    assert parametrize.type_before_parametrizations(layer) is Conv1D


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj"])
@pytest.mark.parametrize("first", ["convert", "parametrize"])
def test_attention(first, name):
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(64, 4, batch_first=True)
    model = nn.Sequential(copy.deepcopy(plain))
    x = X[None]
    report = ConversionReport()
    for step in (first, "parametrize" if first == "convert" else "convert"):
        if step == "convert":
            bs.convert(model, RECIPE, report=report)
        elif name == "out_proj":
            parametrize.register_parametrization(model[0].out_proj, "weight", Doubled())
        else:
            parametrize.register_parametrization(model[0], name, Doubled())
    assert not report.left
    assert torch.equal(model[0](x, x, x)[0], bs.convert(copy.deepcopy(plain), RECIPE)(x, x, x)[0])
    bs.convert(model, None)
    assert torch.equal(model[0](x, x, x)[0], plain(x, x, x)[0])


def test_a_class_made_of_a_parametrized_one():
    """As fully_shard makes them: the class of the parametrization is no more the layer's own."""

    class Mixin:
        pass

    model = made()
    parametrizations.weight_norm(model[0])
    layer = model[0]
    cls = layer.__class__ = type("Sharded", (Mixin, type(layer)), {})
    bs.convert(model, RECIPE)
    assert is_as(layer, RECIPE)
    assert isinstance(layer, cls)
    bs.convert(model, None)
    assert type(layer) is cls


@pytest.mark.slow
def test_compiled():
    torch.compiler.reset()
    model = made()
    parametrizations.weight_norm(model[0])
    compiled = torch.compile(model, backend="eager")
    for recipe in (RECIPE, OTHER, None):
        bs.convert(model, recipe)
        assert torch.equal(compiled(X), model(X))
