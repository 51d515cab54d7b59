"""The model: what it sees, and in which precision its linear layers work."""

from __future__ import annotations

import math

import torch

import blockscale as bs
from blockscale.training import GPT, RECIPES, Settings
from blockscale.training.gpt import in_block
from blockscale.training.run import _loss, _model


def tokens(n=2, context=32):
    return torch.randint(256, (n, context), generator=torch.Generator().manual_seed(0))


def test_the_default_has_one_to_three_million_parameters():
    model = _model(None, 0, Settings())
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 3e6


def test_it_starts_without_an_opinion(small):
    loss = _loss(_model(None, 0, small), tokens(), tokens())
    assert abs(loss.item() - math.log(256)) < 0.1


def test_no_position_sees_the_future():
    model = GPT(64, 2, 2, 32)
    a = tokens()
    b = a.clone()
    b[:, 20:] = (b[:, 20:] + 1) % 256
    with torch.no_grad():
        x, y = run(model, a), run(model, b)
    assert torch.equal(x[:, :20], y[:, :20])
    assert not torch.equal(x[:, 20:], y[:, 20:])


def run(model, t):
    with torch.autocast("cpu", torch.bfloat16):
        return model(t)


def test_a_shorter_sequence_is_a_prefix():
    model = GPT(64, 2, 2, 32)
    with torch.no_grad():
        whole, part = run(model, tokens()), run(model, tokens()[:, :17])
    torch.testing.assert_close(whole[:, :17], part, rtol=0.05, atol=0.02)


def test_linear_layers_take_and_give_bfloat16(small):
    """Under every recipe: activations that are quantized, and gradients too, are bf16 before."""
    for recipe in RECIPES.values():
        model = _model(recipe, 0, small)
        seen: list[torch.Tensor] = []
        forward = lambda _, args, y, seen=seen: seen.extend((args[0], y))  # noqa: E731
        backward = lambda _, dx, dy, seen=seen: seen.extend((*dx, *dy))  # noqa: E731
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(forward)
                layer.register_full_backward_hook(backward)
        _loss(model, tokens(), tokens()).backward()
        assert len(seen) == 4 * 5
        assert {t.dtype for t in seen} == {torch.bfloat16}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_only_the_products_of_blocks_are_quantized(small):
    model = _model(bs.Recipe(), 0, small)
    names = {name for name, m in model.named_modules() if isinstance(m, bs.nn.Linear)}
    assert names == {f"blocks.0.{name}" for name in ("qkv", "out", "up", "down")}
    assert not in_block(model.head, "head")


def test_recipes_start_from_the_same_parameters(small):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plain, converted = (_model(recipe, 3, small).state_dict() for recipe in (None, bs.Recipe()))
    assert plain.keys() == converted.keys()
    assert all(torch.equal(value, converted[name]) for name, value in plain.items())
    assert torch.equal(before, torch.get_rng_state())
    other = _model(None, 4, small).state_dict()
    assert not torch.equal(plain["head.weight"], other["head.weight"])
