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


def projected(layer, x):
    return layer(x) if isinstance(layer, torch.nn.Linear) else layer(x, x, x)[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("made", [torch.nn.Linear, torch.nn.MultiheadAttention])
def test_disabled_it_turns_off_those_around_it(made, compiled):
    """As torch.autocast: the innermost decides, and it holds no longer than its block."""

    def nested(layer, x):
        with bs.autocast(RECIPE):
            with bs.autocast(RECIPE, enabled=False):
                inside = projected(layer, x)
                with bs.autocast(RECIPE):
                    innermost = projected(layer, x)
            return inside, innermost, projected(layer, x)

    torch.manual_seed(0)
    layer, x = made(64, 64 if made is torch.nn.Linear else 4).eval(), torch.randn(2, 8, 64)
    run = torch.compile(nested, backend="eager", fullgraph=True) if compiled else nested
    with torch.no_grad():
        plain = projected(layer, x)
        with bs.autocast(RECIPE):
            quantized = projected(layer, x)
        with bs.autocast(RECIPE, enabled=False):
            assert torch.equal(projected(layer, x), plain)
            assert torch.equal(run(layer, x)[1], quantized)
        inside, innermost, after = run(layer, x)
    assert not torch.equal(plain, quantized)
    assert torch.equal(inside, plain)
    assert torch.equal(innermost, quantized)
    assert torch.equal(after, quantized)


def test_disabled_it_takes_errors_and_recomputations():
    layer, x = torch.nn.Linear(64, 64), torch.randn(2, 64)
    with bs.autocast(RECIPE):
        quantized = layer(x)
        with bs.autocast(RECIPE, enabled=False):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                layer(torch.randn(2, 32))
            checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert torch.equal(layer(x), quantized)
    assert torch.equal(layer.weight.grad, x.sum(0).expand(64, 64))


def test_disabled_it_leaves_fused_attention_on():
    with bs.autocast(RECIPE, enabled=False):
        assert torch.backends.mha.get_fastpath_enabled()
        with bs.autocast(RECIPE):
            assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("enabled", [None, 0, "no"])
def test_enabled_is_true_or_false(enabled):
    with pytest.raises(TypeError, match=r"enabled: got .*; expected True or False"):
        bs.autocast(RECIPE, enabled=enabled)
