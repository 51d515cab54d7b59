"""MainGradients: main_grad of a model's weights, and what optimizers see of it."""

from __future__ import annotations

import copy

import pytest
import torch

import blockscale as bs

RECIPE = bs.Recipe("mxfp8")


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 64)
    return bs.convert(torch.nn.Sequential(*layers), RECIPE)


def inputs(count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 32, 64, generator=generator)


def accumulate(model):
    for x in inputs():
        model(x).square().mean().backward()


def main_grads(model):
    return {name for name, p in model.named_parameters() if hasattr(p, "main_grad")}


def test_steps_are_those_of_grad():
    """fp32 weights add up in fp32 either way."""
    mine, theirs = model(), model()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (mine, theirs)]
    main = bs.nn.MainGradients(mine)
    for _ in range(4):
        accumulate(mine)
        assert mine[0].weight.grad is None
        with main.as_grad():
            assert mine[0].weight.grad is mine[0].weight.main_grad
            torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
            optimizers[0].step()
        optimizers[0].zero_grad()
        accumulate(theirs)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizers[1].step()
        optimizers[1].zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(mine[0].weight, model()[0].weight)


def test_after_a_step_it_is_zero_and_grad_none():
    mine = model()
    main = bs.nn.MainGradients(mine)
    accumulate(mine)
    weight = mine[0].weight
    assert weight.main_grad.any()
    with pytest.raises(RuntimeError, match="of the optimizer"), main.as_grad():
        raise RuntimeError("of the optimizer")
    assert weight.grad is None
    assert not weight.main_grad.any()
    assert weight.grad_added_to_main_grad is False
    accumulate(mine)
    main.zero_()
    assert not weight.main_grad.any()


def test_what_grad_has_is_added_once():
    """As of a weight that another layer reads, too."""
    mine = model()
    weight, x = mine[0].weight, inputs()[0]
    main = bs.nn.MainGradients(mine)
    loss = mine[0](x).square().sum()
    (loss + torch.nn.functional.linear(x, weight).sum()).backward()
    want = weight.main_grad + weight.grad
    assert weight.grad.any()
    with main.as_grad(), main.as_grad():
        assert torch.equal(weight.grad, want)


def test_weights_that_were_frozen_since_stay():
    mine = model()
    main = bs.nn.MainGradients(mine)
    optimizer = torch.optim.AdamW(mine.parameters(), 1e-2, weight_decay=0.5)
    accumulate(mine)
    frozen, before = mine[0].weight.requires_grad_(False), mine[0].weight.clone()
    with main.as_grad():
        assert frozen.grad is None
        optimizer.step()
    assert torch.equal(frozen, before)
    assert not frozen.main_grad.any()


def test_weights_without_main_grad_keep_grad():
    """None is none, as it is for layers."""
    mine, theirs = model(), model()
    main = bs.nn.MainGradients(mine)
    mine[0].weight.main_grad = None
    for each in (mine, theirs):
        accumulate(each)
    with main.as_grad():
        assert torch.equal(mine[0].weight.grad, theirs[0].weight.grad)
        assert torch.equal(mine[2].weight.grad, theirs[2].weight.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_closures(set_to_none):
    """Of optimizers that call the backward themselves: theirs is seen, or it is an error."""
    mine, theirs = model(), model()

    def step(each):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)

        def closure():
            optimizer.zero_grad(set_to_none=set_to_none)
            accumulate(each)

        optimizer.step(closure)

    main = bs.nn.MainGradients(mine)
    if set_to_none:
        with pytest.raises(RuntimeError, match="the optimizer did not see it"), main.as_grad():
            step(mine)
        assert not mine[0].weight.main_grad.any()
        return
    with main.as_grad():
        step(mine)
    step(theirs)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_whose_weights():
    """Those of layers that multiply by them, once each; not biases, frozen or excluded ones."""
    torch.manual_seed(0)
    mine = torch.nn.ModuleDict({
        "a": torch.nn.Linear(64, 64),
        "frozen": torch.nn.Linear(64, 64),
        "lm_head": torch.nn.Linear(64, 64),
        "moe": bs.nn.MoE(64, 32, 4, bs.nn.Router(top_k=2), bias=True),
        "grouped": bs.nn.GroupedLinear(2, 64, 64, bias=True),
        "norm": torch.nn.LayerNorm(64),
        "embedding": torch.nn.Embedding(8, 64),
    })  # fmt: skip
    mine["frozen"].requires_grad_(False)
    bs.convert(mine, RECIPE)
    bs.nn.MainGradients(mine)
    experts = {"moe.experts.gate_up_proj", "moe.experts.down_proj"}
    assert main_grads(mine) == {"a.weight", "grouped.weight", *experts}
    assert mine["a"].weight.main_grad.dtype == torch.float32
    mine["a"].weight.main_grad.add_(1)
    twin = copy.deepcopy(mine)
    assert not main_grads(twin)
    assert "main_grad" not in str(mine.state_dict().keys())


def test_parametrized_weights_keep_their_gradients():
    mine = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    torch.nn.utils.parametrizations.weight_norm(mine[0])
    bs.convert(mine, RECIPE)
    bs.nn.MainGradients(mine)
    assert main_grads(mine) == {"1.weight"}
    mine(torch.randn(32, 64)).sum().backward()
    assert mine[0].parametrizations.weight.original1.grad.any()


def test_bf16_weights_are_for_other_optimizers():
    mine = model().bfloat16()
    main = bs.nn.MainGradients(mine)
    mine(inputs()[0].bfloat16()).sum().backward()
    assert mine[0].weight.main_grad.dtype == torch.float32
    with pytest.raises(TypeError, match=r"as_grad: a weight \(32, 64\) is torch.bfloat16"):
        main.as_grad().__enter__()
    assert mine[0].weight.grad is None
    assert mine[0].weight.main_grad.any()


@pytest.mark.parametrize("recipe", [None, RECIPE])
def test_nothing_to_train_is_an_error(recipe):
    mine = torch.nn.Sequential(torch.nn.Linear(64, 64))
    if recipe is not None:
        bs.convert(mine, recipe).requires_grad_(False)
    with pytest.raises(ValueError, match="that block-scaled layers train"):
        bs.nn.MainGradients(mine)
