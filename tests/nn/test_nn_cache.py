"""The cache of quantized weights: used while the master is unchanged, never longer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import blockscale as bs
from blockscale.nn import Linear, cache, clear_weight_cache, linear
from blockscale.nn.forms import quantize_forms


@pytest.fixture
def counted(monkeypatch):
    """The forms that weights were quantized to, in order."""
    clear_weight_cache()
    calls = []

    def count(*args, rows, columns):
        if rows or columns:
            calls.append("rows" * rows + " columns" * columns)
        return quantize_forms(*args, rows=rows, columns=columns)

    monkeypatch.setattr(cache, "quantize_forms", count)
    return calls


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Linear(64, 32, bias=False)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def fresh(layer):
    """The layer's output by way of a weight that no cache knows."""
    return linear(X.to(layer.weight.dtype), layer.weight.detach().clone(), recipe=layer.recipe)


def test_a_weight_is_read_once_for_both_forms(counted, layer):
    for _ in range(3):
        layer(X.clone().requires_grad_()).sum().backward()
    with torch.no_grad():
        layer(X)
    assert counted == ["rows columns"]


def test_only_what_is_used_is_quantized(counted, layer):
    with torch.no_grad():
        layer(X.clone().requires_grad_())
    layer(X).sum().backward()  # no gradient of x
    assert counted == ["rows"]
    layer(X.clone().requires_grad_())
    assert counted == ["rows", " columns"]


def test_another_stream_makes_its_own(counted, layer, monkeypatch):
    """It would not wait for the one that made them."""
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(cache, "_stream", lambda weight, stream=stream: stream)
        layer(X)
    assert counted == ["rows", "rows"]


def test_a_captured_graph_quantizes_in_each_replay(counted, layer, monkeypatch):
    monkeypatch.setattr(cache, "_is_captured", lambda weight: True)
    for _ in range(2):
        layer(X)
    assert counted == ["rows", "rows"]
    monkeypatch.undo()
    assert layer.weight not in cache._cache  # what is made in a graph is nothing before a replay


def test_two_recipes_do_not_share(counted, layer):
    for recipe in (bs.Recipe(), bs.Recipe(scale_rounding="floor"), bs.Recipe("mxfp4")):
        y = linear(X, layer.weight, recipe=recipe)
        assert torch.equal(y, linear(X, layer.weight.detach().clone(), recipe=recipe))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_step_refreshes(layer, optimizer, options):
    """Fused optimizers do not count versions: they are seen all the same."""
    optimizer = optimizer(layer.parameters(), lr=0.1, **options)
    before = layer(X)
    before.sum().backward()
    optimizer.step()
    assert torch.equal(layer(X), fresh(layer))
    assert not torch.equal(layer(X), before)


def test_load_state_dict_refreshes(layer):
    layer(X)
    for assign in (False, True):
        other = Linear(64, 32, bias=False)
        layer.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(layer(X), other(X))


def test_in_place_changes_refresh(layer):
    layer(X)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer(X), fresh(layer))
    torch.nn.init.ones_(layer.weight)
    assert torch.equal(layer(X), fresh(layer))


def test_to_refreshes(layer):
    layer(X)
    layer.to(torch.bfloat16)
    assert torch.equal(layer(X.bfloat16()), fresh(layer))
    layer.weight.data = torch.randn(32, 64)
    assert torch.equal(layer(X), fresh(layer))


def test_a_new_parameter_refreshes(layer):
    layer(X)
    layer.weight = torch.nn.Parameter(torch.randn(32, 64))
    assert torch.equal(layer(X), fresh(layer))


def test_writing_through_data_needs_a_call(layer):
    before = layer(X)
    layer.weight.data.mul_(2)
    assert torch.equal(layer(X), before)
    clear_weight_cache()
    assert torch.equal(layer(X), fresh(layer))


def test_nothing_outlives_the_module():
    layer = Linear(64, 32)
    layer(X)
    forms = cache.quantized_weight(layer.weight, "mxfp8", None, rows=True, columns=False)
    q = weakref.ref(forms.rows)
    del forms
    weight = weakref.ref(layer.weight)
    size = len(cache._cache)
    del layer
    gc.collect()
    assert weight() is None
    assert q() is None
    assert len(cache._cache) < size


def test_a_deep_copy_has_its_own(layer):
    before = layer(X)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(layer(X), before)
    assert not twin(X).any()


def test_inference_mode_then_training(layer):
    with torch.inference_mode():
        before = layer(X)
    x = X.clone().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, before)
    assert torch.equal(x.grad, torch.ones(8, 32) @ q_columns(layer.weight))


def q_columns(weight):
    return bs.quantize(weight, "mxfp8", -2).dequantize()


def test_a_weight_made_in_inference_mode():
    with torch.inference_mode():
        layer = Linear(64, 32, bias=False)
        first = layer(X)
        layer.weight.mul_(2)
        assert torch.equal(layer(X), 2 * first)
