"""Recipe: what it accepts, and a sentence for what it does not."""

from __future__ import annotations

import dataclasses
import itertools
import pickle

import pytest
import torch

import blockscale as bs
from blockscale.formats import formats


def test_defaults():
    recipe = bs.Recipe()
    assert {recipe.format_of(r).name for r in ("activations", "weights", "gradients")} == {"mxfp8"}
    assert recipe.high_precision == ()
    assert repr(recipe) == "Recipe('mxfp8')"


def test_roles_override_the_format():
    recipe = bs.Recipe("mxfp8", gradients="mxfp8_e5m2", weights="mxfp4")
    assert recipe.format_of("activations") is formats["mxfp8"]
    assert recipe.format_of("weights") is formats["mxfp4"]
    assert recipe.format_of("gradients") is formats["mxfp8_e5m2"]


def test_it_is_a_value():
    recipe = bs.Recipe("nvfp4", high_precision=["wgrad"])
    assert recipe == bs.Recipe("nvfp4", high_precision=("wgrad",))
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.format = "mxfp8"


@pytest.mark.parametrize(("one", "two"), [*itertools.product(formats, formats)])
def test_formats_of_a_recipe_must_multiply(one, two):
    """Every pair is either a recipe or refused with a sentence, as gemm would refuse it."""
    if formats[one].multiplies(formats[two]):
        bs.Recipe(one, weights=two)
    else:
        with pytest.raises(ValueError, match=rf"weights.*'{one}'.*'{two}'.*one family"):
            bs.Recipe(one, weights=two)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "mxfp7"}, "format: got 'mxfp7'; choose one of 'mxfp8'.*'fp8_block'"),
        ({"format": None}, "format: got None"),
        ({"activations": "fp8"}, "activations: got 'fp8'; choose one of 'mxfp8'"),
        (
            {"activations": "bf16"},
            r"activations: got 'bf16'.*\(did you mean 'bfloat16'",
        ),
        ({"activations": "float16"}, "activations: got 'float16'; .* 'bfloat16'"),
        ({"activations": torch.bfloat16}, "activations: got torch.bfloat16; .* 'bfloat16'"),
        (
            {"weights": "fp8_block"},
            "weights: 'fp8_block' is a recipe of two formats",
        ),
        ({"weights": 8}, "weights: got 8"),
        ({"gradients": ""}, "gradients: got ''"),
        ({"gradients": ["mxfp8"]}, "gradients: got"),
        ({"gradients": "nvfp4"}, "gradients, weights: 'nvfp4' and 'mxfp8'"),
        ({"scale_rounding": "up"}, "scale_rounding.*got 'up'; choose one of 'rceil'"),
        ({"scale_rounding": "nearest"}, "scale_rounding.*'mxfp8'.*got 'nearest'"),
        ({"format": "nvfp4", "scale_rounding": "floor"}, "scale_rounding.*'nvfp4'.*got 'floor'"),
        ({"high_precision": ("grad",)}, "high_precision: got 'grad'; choose one of 'fprop'"),
        ({"high_precision": (None,)}, "high_precision: got None"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        bs.Recipe(**arguments)


@pytest.mark.parametrize("given", ["wgrad", None, 3])
def test_high_precision_is_a_tuple_of_names(given):
    with pytest.raises(TypeError, match=r"high_precision: .*expected a tuple of names"):
        bs.Recipe(high_precision=given)


def test_unknown_arguments():
    with pytest.raises(TypeError, match="colour"):
        bs.Recipe(colour="red")


def test_weight_only():
    recipe = bs.Recipe("nvfp4", activations="bfloat16")
    assert recipe.weight_only
    assert not bs.Recipe("nvfp4").weight_only
    assert recipe.format_of("weights") is formats["nvfp4"]
    with pytest.raises(ValueError, match=r"quantizes weights only.*quantize_\(model, recipe\)"):
        recipe.format_of("activations")
    for role in ("weights", "gradients"):
        with pytest.raises(ValueError, match=f"{role}: got 'bfloat16'; choose one of 'mxfp8'"):
            bs.Recipe("mxfp8", **{role: "bfloat16"})


def test_weight_only_is_not_for_training():
    recipe, layer = bs.Recipe(activations="bfloat16"), torch.nn.Linear(32, 32)
    for use in (
        lambda: bs.convert(layer, recipe),
        lambda: bs.autocast(recipe),
        lambda: bs.nn.linear(torch.ones(4, 32), layer.weight, recipe=recipe),
    ):
        with pytest.raises(ValueError, match=r"recipe: .*quantizes weights only"):
            use()
    assert type(layer) is torch.nn.Linear


def test_the_recipe_of_fp8_blocks_has_a_name():
    named = bs.Recipe("fp8_block")
    assert named == bs.Recipe("fp8_1x128", weights="fp8_128x128")
    assert repr(named) == "Recipe('fp8_block')"
    changed = bs.Recipe("fp8_block", high_precision=("wgrad",))
    assert repr(changed) == "Recipe('fp8_block', high_precision=('wgrad',))"
    assert repr(bs.Recipe("fp8_1x128")) == "Recipe('fp8_1x128')"
    assert bs.Recipe("fp8_block", weights="fp8_1x128") == bs.Recipe(
        "fp8_1x128", weights="fp8_1x128"
    )
    assert pickle.loads(pickle.dumps(named)) == named
    with pytest.raises(ValueError, match="weights: got ''; choose one of"):
        bs.Recipe("fp8_block", weights="")
