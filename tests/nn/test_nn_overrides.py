"""Recipes whose overrides name layers."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

import blockscale as bs
from blockscale.nn import Linear, QuantizedLinear, linear
from blockscale.nn.recipe import Recipe

MXFP8, NVFP4, FP8 = bs.Recipe("mxfp8"), bs.Recipe("nvfp4"), bs.Recipe("fp8_block")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 128)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(128, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def recipes(model):
    return {name: m.recipe for name, m in model.named_modules() if hasattr(m, "recipe")}


def test_the_first_pattern_counts():
    recipe = bs.Recipe("nvfp4", overrides={"layers.0.*": None, "*.down": MXFP8})
    assert recipe.of("layers.0.down") is None
    assert recipe.of("layers.1.down") == MXFP8
    assert recipe.of("layers.1.up") == NVFP4
    assert recipe.pattern_of("layers.1.up") is None
    assert recipe.pattern_of("layers.0.down") == "layers.0.*"
    assert recipe == bs.Recipe("nvfp4", overrides=(("layers.0.*", None), ("*.down", MXFP8)))
    other = bs.Recipe("nvfp4", overrides={"*.down": MXFP8, "layers.0.*": None})
    assert {recipe, other} == {recipe, other}
    assert recipe != other
    assert other.of("layers.0.down") == MXFP8


def test_converted_by_name():
    model, report = Model(), bs.nn.ConversionReport()
    recipe = bs.Recipe("nvfp4", overrides={"layers.0.*": None, "*.down": MXFP8, "lm_head": FP8})
    bs.convert(model, recipe, report=report)
    assert recipes(model) == {
        "layers.1.up": NVFP4, "layers.1.down": MXFP8, "layers.2.up": NVFP4, "layers.2.down": MXFP8,
        "lm_head": FP8,
    }  # fmt: skip
    assert type(model.layers[0].up) is nn.Linear
    text = str(report)
    assert "(lm_head): by Recipe('fp8_block'), for 'lm_head'" in text
    assert "(layers.0.up, layers.0.down): left alone by the recipe, for 'layers.0.*'" in text
    x = torch.randn(4, 256)
    layer = model.layers[1].down
    assert torch.equal(layer(x), linear(x, layer.weight, layer.bias, recipe=MXFP8))
    model(torch.arange(8)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_converted_again():
    """What the new recipe leaves alone becomes what it was."""
    model = Model()
    bs.convert(model, NVFP4)
    bs.convert(model, bs.Recipe("mxfp8", overrides={"layers.1.*": None}))
    assert recipes(model) == {
        f"layers.{i}.{name}": MXFP8 for i in (0, 2) for name in ("up", "down")
    }
    assert type(model.layers[1].up) is nn.Linear
    bs.convert(model, bs.Recipe("mxfp8", overrides={"*.up": None}), lambda m, name: "0" in name)
    assert set(recipes(model)) == {"layers.0.down", "layers.2.up", "layers.2.down"}
    bs.convert(model, None)
    assert not recipes(model)


def test_layers_made_with_a_recipe():
    """Become what they were: those that are only of this package have their own recipe again."""
    experts = bs.nn.GatedExperts(64, 64, 2, recipe=NVFP4)
    model = nn.Sequential(Linear(64, 64, recipe=NVFP4), nn.Linear(64, 64), experts)
    bs.convert(model, FP8)
    assert set(recipes(model).values()) == {FP8}
    bs.convert(model, bs.Recipe("mxfp8", overrides={"[02]": None}))
    assert recipes(model) == {"1": MXFP8, "2": NVFP4}


def test_filter_fn_decides():
    model = Model()
    recipe = bs.Recipe("mxfp8", overrides={"*.down": NVFP4})
    bs.convert(model, recipe, lambda module, name: name.startswith("layers.2"))
    assert recipes(model) == {"layers.2.up": MXFP8, "layers.2.down": NVFP4}
    with pytest.raises(ValueError, match=r"override '\*\.down' is of no layer.*by filter_fn"):
        bs.convert(model, recipe, lambda module, name: name.endswith("up"))


@pytest.mark.parametrize(("pattern", "override", "told"), [
    ("*.gate", NVFP4, r"it matches none\. Such layers are 'layers.0.up', 'layers.0.down', "
     r"'layers.1.up', \.\.\."),
    ("*.gate", None, "it matches none"),
    ("Layers.*", NVFP4, "it matches none"),
    ("embed", NVFP4, "those that it matches stay: 1 Embedding, .* looked up, not multiplied"),
])  # fmt: skip
@pytest.mark.parametrize("change", [bs.convert, bs.quantize_])
def test_patterns_of_no_layer(change, pattern, override, told):
    model = Model()
    with pytest.raises(ValueError, match=f"override '{re.escape(pattern)}' is of no layer.*{told}"):
        change(model, bs.Recipe("mxfp8", overrides={pattern: override}))
    assert not recipes(model)


def test_a_pattern_behind_another():
    recipe = bs.Recipe("mxfp8", overrides={"layers.*": NVFP4, "*.down": FP8})
    with pytest.raises(ValueError, match=r"as 'layers\.\*' before it takes layers\.0\.down: put"):
        bs.convert(Model(), recipe)


def test_quantized_by_name():
    model, want = Model(), Model()
    want.load_state_dict(model.state_dict())
    weight_only = bs.Recipe("nvfp4", activations="bfloat16")
    bs.quantize_(model, bs.Recipe("mxfp8", overrides={"*.down": weight_only, "layers.0.*": None}))
    assert recipes(model) == {"layers.0.down": weight_only} | {
        f"layers.{i}.{name}": each
        for i in (1, 2)
        for name, each in (("up", MXFP8), ("down", weight_only))
    }
    assert model.layers[1].down.weight.format_name == "nvfp4"
    bs.quantize_(want, MXFP8, lambda m, name: name in ("layers.1.up", "layers.2.up"))
    bs.quantize_(want, weight_only, lambda m, name: name.endswith("down"))
    tokens = torch.arange(8)
    assert torch.equal(model(tokens), want(tokens))


def test_quantized_weights_that_layers_share():
    """By recipes of their own they share none."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[2].weight = model[0].weight
    bs.quantize_(model, bs.Recipe("mxfp8", overrides={"1": NVFP4}))
    assert model[0].weight is model[2].weight
    assert [layer.weight.format_name for layer in model] == ["mxfp8", "nvfp4", "mxfp8"]


def test_what_is_quantized_stays():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    bs.quantize_(model, MXFP8)
    before = model[0].weight
    with pytest.raises(ValueError, match="leaves 1 in high precision, for '1', whose weight is"):
        bs.quantize_(model, bs.Recipe("mxfp8", overrides={"1": None}))
    assert model[0].weight is before
    assert type(model[1]) is QuantizedLinear


def test_no_product_of_an_override_is_left():
    exact = bs.Recipe("mxfp8", high_precision=("fprop",))
    with pytest.raises(ValueError, match="leaves fprop in high precision"):
        bs.quantize_(Model(), bs.Recipe("mxfp8", overrides={"*.up": exact}))


@pytest.mark.parametrize("use", [
    bs.autocast,
    lambda recipe: bs.nn.Linear(64, 64, recipe=recipe),
    lambda recipe: linear(torch.ones(4, 64), torch.ones(64, 64), recipe=recipe),
    lambda recipe: bs.Recipe("nvfp4", overrides={"*.up": recipe}),
    lambda recipe: bs.nn.GatedExperts(64, 64, 2, recipe=recipe),
])  # fmt: skip
def test_names_are_needed(use):
    recipe = bs.Recipe("mxfp8", overrides={"*.down": None})
    with pytest.raises(ValueError, match="has overrides, which are of names of layers; pass it to"):
        use(recipe)


def test_overrides_of_a_wrong_kind():
    for overrides in (3, "mxfp8", ["*.down"]):
        with pytest.raises(TypeError, match=r"overrides: got \w+; expected a dict of names"):
            bs.Recipe(overrides=overrides)
    for pattern in (3, ""):
        with pytest.raises(TypeError, match="overrides: got the name"):
            bs.Recipe(overrides={pattern: None})
    with pytest.raises(TypeError, match=r"overrides\['\*'\]: got str; expected"):
        bs.Recipe(overrides={"*": "nvfp4"})


@pytest.mark.parametrize("recipe", [
    bs.Recipe(),
    FP8,
    bs.Recipe("fp8_block", high_precision=("wgrad", "dgrad")),
    bs.Recipe("mxfp8", gradients="mxfp8_e5m2", scale_rounding="floor"),
    bs.Recipe("nvfp4", activations="bfloat16"),
    bs.Recipe("nvfp4", overrides={"layers.0.*": None, "*.down": FP8}),
])  # fmt: skip
def test_json(recipe):
    values = recipe.to_dict()
    assert Recipe.from_dict(json.loads(json.dumps(values))) == recipe
    assert values["format"] == ("fp8_block" if recipe.weights == "fp8_128x128" else recipe.format)


def test_not_of_a_recipe():
    with pytest.raises(ValueError, match=r"values: got 'weight'; .*did you mean 'weights'\?"):
        Recipe.from_dict({"format": "mxfp8", "weight": "mxfp8"})
    with pytest.raises(ValueError, match="format: got 'fp8'"):
        Recipe.from_dict({"format": "fp8"})
    with pytest.raises(TypeError, match="values: got str; expected what to_dict"):
        Recipe.from_dict("mxfp8")
    with pytest.raises(TypeError, match=r"overrides\['a'\]: got str"):
        Recipe.from_dict({"overrides": {"a": "mxfp8"}})
