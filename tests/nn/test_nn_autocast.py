"""bs.autocast and torch.utils.checkpoint, which computes a block again outside of it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import blockscale as bs

# Of one size all around, and with one product in high precision: what the plain recomputation saves
# then fits in number and shape, and gradients were wrong without an error.
RECIPE = bs.Recipe("mxfp8", high_precision=("wgrad",))


def gradients(loss):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.GELU())
    x = torch.randn(64, 64, requires_grad=True)
    loss(model, x).square().mean().backward()
    return x.grad, model[0].weight.grad


def quantized(model, x):
    with bs.autocast(RECIPE):
        return model(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_recomputation_outside_is_refused(use_reentrant, nested):
    def inner(model, x):
        return checkpoint(model, x, use_reentrant=False) if nested else model(x)

    def loss(model, x):
        with bs.autocast(RECIPE):
            return checkpoint(inner, model, x, use_reentrant=use_reentrant)

    with pytest.raises(RuntimeError, match=r"checkpoint computes this product again.*bs\.convert"):
        gradients(loss)


def test_a_recomputation_of_attention_is_refused():
    attention, x = torch.nn.MultiheadAttention(64, 4), torch.randn(8, 1, 64, requires_grad=True)
    with bs.autocast(RECIPE), pytest.raises(RuntimeError, match="computes this product again"):
        checkpoint(attention, x, x, x, use_reentrant=False)


def test_a_recomputation_of_compiled_code_is_refused():
    def loss(model, x):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with bs.autocast(RECIPE):
            return checkpoint(compiled, x, use_reentrant=False)

    with pytest.raises(Exception, match="checkpoint computes this product again"):
        gradients(loss)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_autocast_inside_is_computed_again_as_it_was(use_reentrant):
    def loss(model, x):
        return checkpoint(quantized, model, x, use_reentrant=use_reentrant)

    assert all(map(torch.equal, gradients(loss), gradients(quantized)))


def test_autocast_as_contexts():
    def loss(model, x):
        contexts = lambda: (bs.autocast(RECIPE), bs.autocast(RECIPE))  # noqa: E731
        with bs.autocast(bs.Recipe()):
            return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    assert all(map(torch.equal, gradients(loss), gradients(quantized)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_converted_layers_are_computed_again_as_they_were(use_reentrant):
    def loss(model, x):
        return checkpoint(bs.convert(model, RECIPE), x, use_reentrant=use_reentrant)

    assert all(map(torch.equal, gradients(loss), gradients(quantized)))
