"""convert and autocast: which layers they reach, and that all else stays as it was."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import blockscale as bs
from blockscale.nn import Linear, linear

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
        )
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.body(x))


def converted(model):
    return {name for name, module in model.named_modules() if type(module) is Linear}


def test_all_layers_by_default():
    model = Model()
    parameters = dict(model.named_parameters())
    assert bs.convert(model, bs.Recipe("nvfp4")) is model
    assert converted(model) == {"body.0", "body.2", "last"}
    assert model.last.recipe == bs.Recipe("nvfp4")
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_filter_fn_sees_module_and_name():
    seen = []

    def accept(module, name):
        seen.append((type(module), name))
        return name.startswith("body.")

    model = bs.convert(Model(), bs.Recipe(), accept)
    assert converted(model) == {"body.0", "body.2"}
    assert seen == [(torch.nn.Linear, name) for name in ("body.0", "body.2", "last")]


def test_two_recipes_in_one_model():
    model = bs.convert(Model(), bs.Recipe("mxfp4"), lambda m, name: name == "body.0")
    bs.convert(model, bs.Recipe(), lambda m, name: name != "body.0")
    assert (model.body[0].recipe, model.body[2].recipe) == (bs.Recipe("mxfp4"), bs.Recipe())


def test_a_model_that_is_a_layer():
    layer = torch.nn.Linear(64, 32)
    new = bs.convert(layer, bs.Recipe())
    assert type(new) is Linear
    assert new.weight is layer.weight
    assert torch.equal(new(X), linear(X, layer.weight, layer.bias, recipe=bs.Recipe()))


def test_shared_modules_stay_shared():
    model = Model()
    model.again = model.twice = model.body[0]
    bs.convert(model, bs.Recipe())
    assert type(model.again) is Linear
    assert model.again is model.body[0]
    assert model.twice is model.body[0]


def test_shared_weights_stay_shared():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    bs.convert(model, bs.Recipe())
    assert model[1].weight is model[0].weight


def test_again_changes_the_recipe():
    model = bs.convert(Model(), bs.Recipe("mxfp4"))
    parameters = dict(model.named_parameters())
    bs.convert(model, bs.Recipe())
    assert converted(model) == {"body.0", "body.2", "last"}
    assert all(m.recipe == bs.Recipe() for m in model.modules() if type(m) is Linear)
    assert torch.equal(model(X), bs.convert(copy.deepcopy(model), bs.Recipe())(X))
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_back_to_what_it_was():
    model = Model()
    before, types, calls = model(X), [type(m) for m in model.modules()], []
    model.last.register_forward_hook(lambda *_: calls.append("hook"))
    parameters = dict(model.named_parameters())
    bs.convert(model, bs.Recipe())
    assert not torch.equal(model(X), before)
    assert bs.convert(model, None) is model
    assert [type(m) for m in model.modules()] == types
    assert torch.equal(model(X), before)
    assert calls == ["hook"] * 2
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert not hasattr(model.last, "recipe")


def test_back_asks_filter_fn():
    model = bs.convert(Model(), bs.Recipe())
    bs.convert(model, None, lambda module, name: name == "last")
    assert converted(model) == {"body.0", "body.2"}


def test_nothing_to_take_back():
    for model in (Model(), torch.nn.Sequential()):
        with pytest.raises(ValueError, match=r"no layer made by blockscale\.convert"):
            bs.convert(model, None)


def test_whoever_holds_a_layer_holds_the_converted_one():
    """A list is no place that modules know of: a stale layer there would stay in high precision."""
    model = Model()
    aside = [model.last]
    bs.convert(model, bs.Recipe())
    assert aside[0] is model.last
    assert type(aside[0]) is Linear


@pytest.mark.slow
def test_compiled_code_sees_a_conversion():
    torch.compiler.reset()
    model = Model()
    compiled = torch.compile(model, backend="eager")
    for recipe in (None, bs.Recipe(), bs.Recipe("mxfp4"), None):
        if recipe is not None or converted(model):
            bs.convert(model, recipe)
        assert torch.equal(compiled(X), model(X))


def test_hooks_and_mode_stay():
    model, calls = Model().eval(), []
    model.last.register_forward_hook(lambda *_: calls.append("forward"))
    model.last.weight.register_hook(lambda _: calls.append("gradient"))
    bs.convert(model, bs.Recipe())
    model(X).sum().backward()
    assert calls == ["forward", "gradient"]
    assert not model.last.training


def test_an_optimizer_made_before_stays_valid():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bs.convert(model, bs.Recipe())
    before = model.last.weight.detach().clone()
    model(X).sum().backward()
    optimizer.step()
    assert not torch.equal(model.last.weight, before)


@pytest.mark.parametrize(
    ("model", "accept", "why"),
    [
        (torch.nn.ReLU(), None, r"it has no torch\.nn\.Linear"),
        (Model(), lambda module, name: False, "no layer could be: 3 Linear, .* refused by filter"),
        (bs.quantize_(Model(), bs.Recipe()), None, "no layer could be: .* holds a quantized"),
    ],
)
def test_nothing_to_convert(model, accept, why):
    with pytest.raises(ValueError, match=f"model: nothing was converted, as {why}"):
        bs.convert(model, bs.Recipe(), accept)


@pytest.mark.parametrize("recipe", ["mxfp8", None, bs.formats["mxfp8"]])
def test_a_recipe_is_a_recipe(recipe):
    model = Model()
    for change in (bs.convert,) * (recipe is not None) + (bs.quantize_,):
        with pytest.raises(TypeError, match=r"recipe: got .*; expected blockscale\.Recipe"):
            change(model, recipe)
    assert not converted(model)
    with pytest.raises(TypeError, match=r"recipe: got .*; expected blockscale\.Recipe"):
        bs.autocast(recipe)


# --- copies and files -----------------------------------------------------------------------------


def test_state_dict_is_that_of_torch():
    model = Model()
    plain = model.state_dict()
    bs.convert(model, bs.Recipe())
    state = model.state_dict()
    assert list(state) == list(plain)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert Model().load_state_dict(state)  # and back into torch.nn.Linear
    fresh = bs.convert(Model(), bs.Recipe())
    fresh.load_state_dict(plain)
    assert torch.equal(fresh(X), model(X))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how):
    model = bs.convert(Model(), bs.Recipe(gradients="mxfp8_e5m2"))
    y = model(X)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert twin.last.recipe == model.last.recipe
    assert torch.equal(twin(X), y)
    assert twin.last.weight is not model.last.weight


class Subclass(torch.nn.Linear):
    """Converted, it is a class made on the fly."""


def test_models_pickled_before_a_module_was_split_load():
    layer = bs.convert(Subclass(32, 32), bs.Recipe())
    content = pickle.dumps(layer, protocol=0)
    older = content.replace(b"blockscale.nn.class_change\n", b"blockscale.nn.kinds\n")
    assert older != content
    assert type(pickle.loads(older)) is type(layer)
    assert pickle.loads(b"cblockscale.nn.kinds\nConv1D\n.") is bs.nn.kinds.Conv1D


# --- autocast -------------------------------------------------------------------------------------


def test_autocast_multiplies_as_convert_does():
    model = Model()
    with bs.autocast(bs.Recipe()):
        y = model(X)
    y.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain = model(X)
    assert not torch.equal(y, plain)
    bs.convert(model, bs.Recipe())
    other = model(X)
    other.sum().backward()
    assert torch.equal(y, other)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


def test_autocast_reaches_functions_and_leaves_the_rest():
    w, bias = torch.randn(32, 64), torch.randn(32)
    with bs.autocast(bs.Recipe("mxfp4")):
        assert torch.equal(F.linear(X, w), linear(X, w, recipe=bs.Recipe("mxfp4")))
        y = F.linear(X, weight=w, bias=bias)
        assert torch.equal(X @ w.mT, torch.mm(X, w.mT))
    assert torch.equal(y, linear(X, w, bias, recipe=bs.Recipe("mxfp4")))


def test_converted_layers_keep_their_recipe_under_autocast():
    model = bs.convert(Model(), bs.Recipe())
    y = model(X)
    with bs.autocast(bs.Recipe("mxfp4")):
        assert torch.equal(model(X), y)


def test_autocast_nests_and_ends():
    w = torch.randn(32, 64)
    with bs.autocast(bs.Recipe("mxfp4")):
        with bs.autocast(bs.Recipe()):
            inner = F.linear(X, w)
        outer = F.linear(X, w)
    assert torch.equal(inner, linear(X, w, recipe=bs.Recipe()))
    assert torch.equal(outer, linear(X, w, recipe=bs.Recipe("mxfp4")))
    with pytest.raises(ZeroDivisionError), bs.autocast(bs.Recipe()):
        1 / 0  # noqa: B018
    assert torch.equal(F.linear(X, w), X @ w.mT)


@pytest.mark.parametrize("outer", ["torch", "blockscale"])
def test_autocast_composes_with_that_of_torch(outer):
    model = Model()
    modes = [torch.autocast("cpu", torch.bfloat16), bs.autocast(bs.Recipe())]
    first, second = modes if outer == "torch" else modes[::-1]
    with first, second:
        y = model(X)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert model.last.weight.grad.dtype == torch.float32
    bs.convert(model, bs.Recipe())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(X), y)
