"""torch.compile takes layers and autocast whole, with static and dynamic shapes."""

from __future__ import annotations

import pytest
import torch

import blockscale as bs


@pytest.fixture(autouse=True)
def _start_anew():
    torch.compiler.reset()


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 32, bias=False)
    )


def both_passes(function, parameters, x):
    x = x.clone().requires_grad_()
    for p in parameters:
        p.grad = None
    y = function(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in parameters)]


def assert_same(a, b):
    for one, two in zip(a, b, strict=True):
        error = (one.float() - two.float()).norm() / two.float().norm()
        assert error < 0.01  # GELU is computed anew, so that some elements round the other way


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers(recipe, dynamic):
    m = bs.convert(model(), bs.Recipe(recipe))
    parameters = list(m.parameters())
    compiled = torch.compile(m, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (40, 33) if dynamic else (40,):
        x = torch.randn(tokens, 64)
        assert_same(both_passes(compiled, parameters, x), both_passes(m, parameters, x))


def test_inductor_and_torch_autocast():
    m = bs.convert(model(), bs.Recipe())
    parameters = list(m.parameters())
    compiled = torch.compile(m, fullgraph=True)
    x = torch.randn(40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(both_passes(compiled, parameters, x), both_passes(m, parameters, x))


def test_autocast():
    m = model()

    def function(x):
        with bs.autocast(bs.Recipe()):
            return m(x)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, parameters = torch.randn(40, 64), list(m.parameters())
    assert_same(both_passes(compiled, parameters, x), both_passes(function, parameters, x))


def test_compiled_code_sees_each_change_of_a_weight():
    m = bs.convert(model(), bs.Recipe())
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    x = torch.randn(40, 64)
    for _ in range(2):
        compiled(x).sum().backward()
        optimizer.step()
        torch.testing.assert_close(compiled(x), m(x), rtol=0.02, atol=0.02)
