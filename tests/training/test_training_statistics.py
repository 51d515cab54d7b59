"""Saturation and SQNR: right on tensors whose answer is known, and no trace left in the model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import blockscale as bs
from blockscale.training import RECIPES, Statistics
from blockscale.training.run import _loss, _model


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (2, 2, 32), generator=generator).unbind()


def test_saturation_is_counted():
    """One element of 32 is 1.9 * 256: with scales rounded down it is cut to 448, rounded up not."""
    x = torch.ones(4, 64)
    x[0, 3] = 1.9 * 256
    for rounding, saturated in (("rceil", 0), ("floor", 1)):
        statistics = Statistics()
        statistics._add("weights", x, bs.Recipe(scale_rounding=rounding, high_precision=("dgrad",)))
        found = statistics.summary()["weights"]
        assert found["elements"] == 256
        assert found["saturated_per_million"] == pytest.approx(saturated * 1e6 / 256)


def test_sqnr_is_the_energy_ratio():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    statistics = Statistics()
    statistics._add("gradients", x, bs.Recipe(high_precision=("wgrad",)))
    error = bs.quantize(x, "mxfp8").dequantize() - x
    expected = 10 * math.log10((x.square().sum() / error.square().sum()).item())
    assert statistics.summary()["gradients"]["sqnr_db"] == pytest.approx(expected, abs=1e-4)


def test_both_axes_count_and_zeros_do_not():
    statistics = Statistics()
    statistics._add("weights", torch.ones(32, 64), bs.Recipe())
    statistics._add("activations", torch.zeros(32, 64), bs.Recipe())
    found = statistics.summary()
    assert found["weights"]["elements"] == 2 * 32 * 64
    assert found["weights"]["sqnr_db"] == 300  # ones are exact
    assert "activations" not in found


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe])
def test_every_recipe_is_measured(small, name):
    model, statistics = _model(RECIPES[name], 0, small), Statistics()
    with statistics.watch(model):
        _loss(model, *batch()).backward()
    found = statistics.summary()
    weights = 32 * 32 * (3 + 1 + 4 + 4)
    assert found["weights"]["elements"] == 2 * weights
    assert found["activations"]["elements"] == 2 * 64 * 32 * (1 + 1 + 1 + 4)
    assert found["gradients"]["elements"] == 2 * 64 * 32 * (3 + 1 + 4 + 1)
    expected = {"mxfp8": 31, "mxfp6_e2m3": 29, "mxfp6_e3m2": 25, "mxfp4": 18, "nvfp4": 20}
    for role, values in found.items():
        recipe = RECIPES[name]
        fmt = recipe.format_of(role)
        wanted = expected.get(fmt.name, 25 if fmt.element.name == "E5M2" else 31)
        assert abs(values["sqnr_db"] - wanted) < 3, role
        if fmt.scale.name == "E8M0" and recipe.scale_rounding is None:
            assert values["saturated_per_million"] == 0


def test_experts_are_measured(small):
    """Each expert's rows, its two matrices, and the gradient of its result."""
    sizes = {"experts": 4, "top_k": 2, "expert_size": 64}
    model, statistics = _model(bs.Recipe("mxfp8"), 0, replace(small, **sizes)), Statistics()
    with statistics.watch(model):
        _loss(model, *batch()).backward()
    found = statistics.summary()
    pairs = 64 * 2
    assert found["weights"]["elements"] == 2 * 32 * (32 * 4 + 4 * 3 * 64)
    assert found["activations"]["elements"] == 2 * 32 * (64 * 2 + pairs)
    assert found["gradients"]["elements"] == 2 * 32 * (64 * (3 + 1) + pairs)
    for values in found.values():
        assert abs(values["sqnr_db"] - 31) < 3


def test_experts_share_a_global_scale():
    """Small ones are lost in NVFP4, as the layer loses them; its arguments may have names."""
    layer = bs.nn.GatedExperts(128, 64, 2, recipe=bs.Recipe("nvfp4"))
    x, statistics = torch.randn(64, 128), Statistics()
    with torch.no_grad():
        layer.gate_up_proj[1] *= 1e-6
        layer.down_proj[1] *= 1e-6
        x[32:] *= 1e-6
        routing = bs.route((torch.arange(64) // 32)[:, None], 2)
        with statistics.watch(layer):
            layer(x, weights=torch.ones(64, 1), routing=routing)
    for values in statistics.summary().values():
        assert abs(values["sqnr_db"] - 3) < 0.5  # half of the experts have none


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_block"])
def test_padded_rows_and_columns_count_once(name):
    """Sums of 5 rows of 40 and of 40 rows of 5, which are padded to blocks."""
    x, recipe, statistics = torch.randn(5, 40), RECIPES[name], Statistics()
    statistics._add("weights", x, recipe)
    ratio, format = 0.0, recipe.format_of("weights")
    for axis in (-1, -2):
        error = bs.quantize(x, format, axis, pad=True).dequantize(torch.float32) - x
        ratio += (error.square().sum() / x.square().sum()).item() / 2
    found = statistics.summary()["weights"]
    assert found["elements"] == 2 * 5 * 40
    assert found["sqnr_db"] == pytest.approx(-10 * math.log10(ratio), abs=1e-3)


def test_a_gradient_that_is_no_number_is_not_hidden():
    statistics = Statistics()
    statistics._add("gradients", torch.tensor([[1.0, math.nan]]).expand(32, 2), bs.Recipe())
    statistics._add("activations", torch.ones(0, 64), bs.Recipe())  # an expert without tokens
    found = statistics.summary()
    assert math.isnan(found["gradients"]["sqnr_db"])
    assert "activations" not in found


def test_high_precision_products_are_not_measured(small):
    recipe, statistics = bs.Recipe(high_precision=("dgrad", "wgrad")), Statistics()
    model = _model(recipe, 0, small)
    with statistics.watch(model):
        _loss(model, *batch()).backward()
    assert statistics.summary().keys() == {"activations", "weights"}
    assert statistics.summary()["weights"]["elements"] == 32 * 32 * 12


def test_watching_changes_nothing(small):
    grads = []
    for watched in (False, True):
        model, statistics = _model(bs.Recipe(), 0, small), Statistics()
        if watched:
            with statistics.watch(model):
                _loss(model, *batch()).backward()
        else:
            _loss(model, *batch()).backward()
        grads.append([p.grad for p in model.parameters()])
        assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    before = statistics.summary()
    _loss(model, *batch()).backward()
    assert statistics.summary() == before


def test_a_model_without_quantized_layers(small):
    model, statistics = _model(None, 0, small), Statistics()
    with statistics.watch(model), torch.no_grad():
        _loss(model, *batch())
    assert statistics.summary() == {}
