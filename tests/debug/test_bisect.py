"""Which products cost how much of a loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import blockscale as bs
from blockscale.debug import bisect
from blockscale.nn.recipe import PRODUCTS

MXFP8, NVFP4 = bs.Recipe("mxfp8"), bs.Recipe("nvfp4")


class Model(nn.Module):
    """Residual layers, of which one has outliers in its inputs."""

    def __init__(self, layers: int = 5, spoilt: int | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(layers))
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(128)
        self.spoilt = spoilt

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == self.spoilt:  # one input of each block is so large that others become zero
                given = torch.where(torch.arange(128) % 16 == 0, 1e3, x)
                x = x + layer(given) - 1e3 * layer.weight[:, ::16].sum(1)
            else:
                x = x + 0.1 * self.drop(layer(x))
        return self.norm(x)


X, TARGET = (torch.randn(64, 128, generator=torch.Generator().manual_seed(i)) for i in (1, 2))


def loss(y: Tensor) -> Tensor:
    return (y - TARGET).square().mean()


def test_the_culprit_is_found():
    """In fewer trials than there are products, and first."""
    model = bs.convert(Model(16, spoilt=11), NVFP4)
    trials = 0

    def counted(y):
        nonlocal trials
        trials += 1
        return loss(y)

    found = bisect(model, X, counted)
    first = found.costs[0]
    assert first.products == (("layers.11", "fprop"),)
    assert first.format == "nvfp4"
    assert first.total > 3 * found.costs[1].total
    assert trials / 2 < 16 * 3 / 2  # a trial takes the loss twice
    named = [each for cost in found.costs for each in cost.products]
    assert sorted(named) == sorted((f"layers.{i}", p) for i in range(16) for p in PRODUCTS)
    assert found.whole[0].products == tuple((f"layers.{i}", p) for i in range(16) for p in PRODUCTS)


def test_costs_are_those_of_the_model():
    """Of all products the loss of the converted model, less that of the exact one."""
    model = Model(3).eval()
    exact = loss(model(X)).item()
    found = bisect(bs.convert(copy.deepcopy(model), NVFP4), X, loss)
    whole = loss(bs.convert(model, NVFP4)(X)).item()
    assert found.loss == pytest.approx(exact, rel=1e-6)
    assert found.whole[0].forward == pytest.approx(whole - exact, rel=1e-4)
    assert found.lowered == pytest.approx(0.01 * exact, rel=0.2)


def test_products_of_the_backward():
    """Leave the loss, and change where a step leads."""
    model = bs.convert(Model(2), bs.Recipe("nvfp4", high_precision=("fprop",)))
    found = bisect(model, X, loss, share=0)
    assert {cost.products for cost in found.costs} == {
        ((f"layers.{i}", p),) for i in range(2) for p in ("dgrad", "wgrad")
    }
    assert all(cost.forward == 0 for cost in found.costs)
    assert any(cost.step != 0 for cost in found.costs)


def test_recipes():
    model = bs.convert(Model(2), MXFP8)
    found = bisect(model, X, loss, recipes=[MXFP8, NVFP4], share=0)
    assert [cost.format for cost in found.whole] == ["mxfp8", "nvfp4"]
    assert found.whole[1].total > found.whole[0].total
    assert len(found.costs) == 2 * 2 * 3
    text = str(found)
    assert text.startswith(f"loss {found.loss:.6g}, which an exact step lowers by")
    assert "all 6 products" in text
    assert "layers.1 wgrad" in text


def test_all_is_as_before():
    """Recipes, values, gradients, buffers, random numbers; also after an error."""
    model = bs.convert(Model(3), bs.Recipe("mxfp8", overrides={"*.1": NVFP4}))
    loss(model(X)).backward()
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    assert bisect(model, X, loss).whole[0].format == "as converted"
    with pytest.raises(ValueError, match="expected a finite scalar"):
        bisect(model, X, lambda y: y)
    assert [layer.recipe for layer in model.layers] == [MXFP8, NVFP4, MXFP8]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


class Told(nn.Module):
    """As models of transformers: arguments by name, the loss as an attribute."""

    def __init__(self):
        super().__init__()
        self.inner = Model(2)

    def forward(self, x: Tensor, labels: Tensor):
        class Output:
            loss = (self.inner(x) - labels).square().mean()

        return Output


@pytest.mark.parametrize("batch", [{"x": X, "labels": TARGET}, (X, TARGET)], ids=["dict", "tuple"])
def test_batches(batch):
    found = bisect(bs.convert(Told(), NVFP4), batch)
    assert found.whole[0].forward != 0


@pytest.mark.parametrize(("make", "given", "error", "told"), [
    (lambda: Model(2), {}, ValueError, "model: has no converted linear layer"),
    (lambda: bs.convert(Model(2), MXFP8).requires_grad_(False), {}, ValueError, "is trained"),
    (lambda: bs.convert(Model(2), MXFP8), {"recipes": ["nvfp4"]}, TypeError, "recipe: got str"),
    (lambda: bs.convert(Model(2), MXFP8), {"recipes": MXFP8}, TypeError,
     r"recipes: got Recipe\('mxfp8'\); expected a list"),
    (lambda: bs.convert(Model(2), MXFP8), {"share": 2}, ValueError, "share: got 2; expected"),
    (lambda: bs.convert(Model(2), MXFP8), {"loss": lambda y: y.sum() * float("nan")}, ValueError,
     "loss: got .*nan.*; expected a finite scalar"),
    (lambda: bs.convert(Model(2), MXFP8), {"loss": None}, ValueError,
     r"loss: got shape \(64, 128\); expected"),
])  # fmt: skip
def test_bad_input(make, given, error, told):
    with pytest.raises(error, match=told):
        bisect(make(), X, **{"loss": loss, **given})


def test_gradients_that_are_kept_elsewhere():
    model = bs.convert(Model(2), MXFP8)
    model.layers[0].weight.main_grad = torch.zeros(128, 128)
    with pytest.raises(ValueError, match=r"layers\.0\.weight has main_grad, which each trial"):
        bisect(model, X, loss)


@pytest.mark.parametrize("before", [NVFP4, bs.Recipe.nvfp4()])
def test_recipes_that_round_stochastically(before):
    """With the same numbers in each trial; layers count on from where they were."""
    model = bs.convert(Model(3), before)
    loss(model(X)).backward()
    steps = {name: step.clone() for name, step in model.named_buffers() if "rounding" in name}
    assert len(steps) == (3 if before.is_random else 0)
    given = {"recipes": [bs.Recipe.nvfp4("ms_eden")]}
    found, again = bisect(model, X, loss, **given), bisect(model, X, loss, **given)
    assert found == again
    assert {"Recipe.nvfp4('ms_eden')"} == {cost.format for cost in found.costs}
    for name, step in model.named_buffers():
        assert "rounding" not in name or torch.equal(step, steps[name])
    assert all(layer.recipe == before for layer in model.layers)
