"""RMSNormLinear, LayerNormLinear and MLP in training: whatever is around changes no bit."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from parted import (
    BF16,
    F32,
    LAYERS,
    RECIPES,
    K,
    assert_same,
    both_passes,
    made,
    one_after_the_other,
    random,
)

import blockscale as bs
from blockscale.nn import reuse
from blockscale.nn.forms import quantize_forms


@pytest.fixture(params=LAYERS)
def name(request):
    return request.param


@pytest.fixture
def layer(name):
    return made(name)


@pytest.mark.parametrize("products", [("fprop",), ("dgrad", "wgrad")])
def test_products_in_high_precision(name, products):
    layer, x = made(name, bs.Recipe(high_precision=products)), random(33, K)
    called = []
    for part in layer.children():
        forward = part.forward
        part.forward = lambda x, forward=forward: called.append(1) or forward(x)
    both_passes(layer, x)
    assert len(called) == 2


def test_autocast_of_torch(name):
    layer, x = made(name, dtype=F32), random(33, K, dtype=F32)
    with torch.autocast("cpu", BF16):
        got = both_passes(layer, x)
        assert got[0].dtype == BF16
        with one_after_the_other(layer):
            assert_same(got, both_passes(layer, x))


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
def test_empty_batches(layer, shape):
    y, dx, *others = both_passes(layer, torch.empty(shape, dtype=BF16))
    assert y.shape[:-1] == dx.shape[:-1] == shape[:-1]
    assert not any(each.any() for each in others)


def test_frozen_parameters(name, layer):
    x = random(40, K)
    names = ["y", "x", *dict(layer.named_parameters())]
    whole = dict(zip(names, both_passes(layer, x), strict=True))
    for frozen in [*([each] for each in names[2:]), names[2:], names[2:-1], names[3:]]:
        layer.requires_grad_(True)
        for each in frozen:
            layer.get_parameter(each).requires_grad_(False)
        left = [each for each in whole if each not in frozen]
        assert_same(both_passes(layer, x), [whole[each] for each in left])
    layer.requires_grad_(True)
    layer(x).backward(random(*whole["y"].shape, seed=9))  # of an input that has none
    for each, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, whole[each])


def test_main_grad(layer):
    x = random(40, K)
    before = both_passes(layer, x)
    weights = {each: p for each, p in layer.named_parameters() if p.dim() > 1}
    main = bs.nn.MainGradients(layer)
    y = layer(x)
    for _ in range(2):
        layer(x).backward(random(*y.shape, seed=9))
    names = list(dict(layer.named_parameters()))
    for each, weight in weights.items():
        assert weight.grad is None
        want = 2 * before[2 + names.index(each)].float()
        torch.testing.assert_close(weight.main_grad, want, rtol=2**-7, atol=0.02)
    main.zero_()


def test_reused_weights(layer, monkeypatch):
    quantized = []

    def count(weight, *args, **kwargs):
        if kwargs.get("rows") or kwargs.get("columns"):
            quantized.append(weight)
        return quantize_forms(weight, *args, **kwargs)

    x = random(40, K)
    want = both_passes(layer, x)
    monkeypatch.setattr(reuse, "quantize_forms", count)
    weights = [p for p in layer.parameters() if p.dim() > 1]
    with bs.reuse_weights():
        for _ in range(2):
            assert_same(both_passes(layer, x), want)
        made = [weight for weight in weights for each in quantized if each is weight]
        assert len(made) == len(weights)  # both forms from one read
        with torch.no_grad():
            weights[0].mul_(2)
        assert not torch.equal(both_passes(layer, x)[0], want[0])


def test_checkpointed(layer):
    x = random(40, K)
    for reentrant in (False, True):
        got = x.clone().requires_grad_()
        layer.zero_grad()
        y = torch.utils.checkpoint.checkpoint(layer, got, use_reentrant=reentrant)
        y.backward(random(*y.shape, seed=9))
        found = [y.detach(), got.grad, *(p.grad for p in layer.parameters())]
        assert_same(found, both_passes(layer, x))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_compiled(name, recipe):
    layer, x = made(name, RECIPES[recipe]), random(40, K)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(both_passes(layer, x, compiled), both_passes(layer, x))
    bs.convert(layer, bs.Recipe(high_precision=("dgrad",)))  # by parts
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(both_passes(layer, x, compiled), both_passes(layer, x))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms(layer):
    x = random(5, 40, K, dtype=F32)
    layer.float()

    def loss(x):
        return layer(x).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(x)
    for one, alone in zip(each, x, strict=True):
        wanted = alone.clone().requires_grad_()
        loss(wanted).backward()
        torch.testing.assert_close(one, wanted.grad, rtol=1e-6, atol=1e-5)


def test_second_derivatives_are_refused(layer):
    x = random(40, K, dtype=BF16).requires_grad_()
    y = layer(x).float().square().sum()
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("sharded", ["whole", "parts", "gathered"])
def test_fsdp2(layer, sharded):
    dist, x = torch.distributed, random(40, K)
    want = both_passes(layer, x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        if sharded == "gathered":
            bs.distributed.gather_quantized(layer)
        for part in layer.children() if sharded == "parts" else ():
            fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh)
        for _ in range(2):
            layer.zero_grad()
            x = x.detach().requires_grad_()
            y = layer(x)
            x.grad = None
            y.backward(random(*y.shape, seed=9))
            found = [p.grad.full_tensor() for p in layer.parameters()]
            assert_same([y.detach(), x.grad, *found], want)
    finally:
        dist.destroy_process_group()


def test_fields_of_recipes_are_known():
    """A field that is not here is known to ``passes``, maybe, but not to fused layers: let
    ``parts.multiplies_quantized`` refuse it, or what makes operands follow it."""
    known = {"format", "activations", "weights", "gradients", "scale_rounding"}
    known |= {"high_precision", "overrides", "quantization", "text"}
    assert {field.name for field in fields(bs.Recipe)} == known


def test_exported(layer):
    x = random(40, K)
    with torch.no_grad():
        exported = torch.export.export(layer, (x,)).module()
        assert torch.equal(exported(x), layer(x))
